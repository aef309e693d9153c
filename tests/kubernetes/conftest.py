"""What the tests of Kubernetes share: an emulator of the API server in its own process, and a kubeconfig for it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core import Isolation, SandboxSpec, ToolBackend
from hermes_core.tools.registry import ToolRegistry
from tests.support.selection import makes_tests_full

HOW = "`make setup EXTRAS=cloud`, then `.venv-cloud/bin/python -m pytest -m full tests/kubernetes`"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
@makes_tests_full
def cloud_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where the SDK is not installed, or the emulator can't make pods."""
    there = importlib.util.find_spec("kubernetes_asyncio") is not None
    require("cloud", None if there else f"kubernetes-asyncio is not installed here; {HOW}")
    if os.geteuid() != 0:
        pytest.skip("pods of the emulator are made by root")
    missing = [each for each in ("ip", "openssl", "setpriv", "unshare") if shutil.which(each) is None]
    require("cloud", f"the emulator needs {', '.join(missing)}" if missing else None)


class ClusterProcess:
    """The emulator as a process."""

    def __init__(self, folder: Path, *, host_network: bool = False) -> None:
        self.folder = folder
        argv = [sys.executable, "-m", "tests.kubernetes.emulator", str(folder)]
        environment = os.environ | ({"HERMES_EMULATOR_HOST_NETWORK": "1"} if host_network else {})
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=-1, stdout=-1, text=True, start_new_session=True, env=environment
        )
        assert self._process.stdout is not None
        self.kubeconfig = self._process.stdout.readline().strip()
        assert self.kubeconfig, "the emulator did not start"
        self._encryption = ssl.create_default_context(cafile=folder / "ca.pem")
        self.url = json.loads(Path(self.kubeconfig).read_text())["clusters"][0]["cluster"]["server"]

    def ask(self, what: str, **given: Any) -> Any:
        """Control the emulator: `fault`, `clear`, `set`, `evict`, `cut`, `log`, `pods`."""
        request = urllib.request.Request(f"{self.url}/-/{what}", json.dumps(given).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30, context=self._encryption) as answer:
            return json.load(answer)

    def fault(self, request: str, **how: Any) -> None:
        """Plan a fault of requests that this expression matches: `GET /api/v1/.*/exec`."""
        self.ask("fault", request=request, **how)

    def close(self) -> None:
        """End the emulator, with its pods."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def session_cluster(cloud_extra: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """The emulator that all tests share."""
    made = ClusterProcess(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture
def cluster(session_cluster: ClusterProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterProcess]:
    """The emulator, named by KUBECONFIG. Its faults end with the test."""
    monkeypatch.setenv("KUBECONFIG", session_cluster.kubeconfig)
    session_cluster.ask("log")
    yield session_cluster
    session_cluster.ask("clear")


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend(cluster: ClusterProcess, owner: str) -> AsyncIterator[Any]:
    """A backend; what is left of the test's owner is ended."""
    from hermes_kubernetes.backend import KubernetesBackend

    made = KubernetesBackend()
    yield made
    cluster.ask("clear")
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def spec(owner: str, cloud_extra: None) -> Callable[..., SandboxSpec]:
    """`spec(isolation, **config)`: with a creation id of its own, or the one that is given."""
    from hermes_kubernetes.config import KubernetesConfig

    def make(isolation: str = "shared", creation_id: str | None = None, **config: Any) -> SandboxSpec:
        settings = KubernetesConfig.from_dict("test", {"orphan_ttl_s": 20, **config})
        return SandboxSpec(creation_id or uuid.uuid4().hex, owner, settings, Isolation.parse(isolation))

    return make


async def output(sandbox: Any, script: str) -> bytes:
    """Return what a script prints in a sandbox."""
    channel = await sandbox.open(["sh", "-c", script])
    try:
        found = b""
        while data := await channel.read(1 << 16):
            found += data
        return found
    finally:
        await channel.aclose()


def tool_backend(backend: Any, owner: str, **config: Any) -> ToolBackend:
    """Return slots of level `user` on two pods."""
    from hermes_kubernetes.config import KubernetesConfig

    settings = {"slots_per_sandbox": 4, "max_sandboxes": 2, "reserve_slots": 0, "acquire_timeout_s": 40, **config}
    return ToolBackend(
        backend,
        profiles={"default": KubernetesConfig(**settings)},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=owner,
    )
