"""Pods as users meet them: what they get, how they end, and what a driver that was killed leaves."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core import SandboxSpec, SandboxStatus, Settings
from tests.kubernetes.conftest import ClusterProcess, output

Spec = Callable[..., SandboxSpec]


async def test_long_words_reach_the_pod(backend: Any, spec: Spec) -> None:
    wanted = spec()
    wanted.environment["MONEY"] = "$(HOME) $$ $(( 1 + 1 ))"  # type: ignore[index]
    sandbox = await backend.create(wanted)
    assert await output(sandbox, 'printf %s "$MONEY"') == b"$(HOME) $$ $(( 1 + 1 ))"


async def test_odd_owners_are_found(backend: Any, spec: Spec) -> None:
    wanted = spec()
    odd = SandboxSpec("an id/with ünusual text" * 5, "an owner: " + "x" * 100, wanted.config, wanted.isolation)
    sandbox = await backend.create(odd)
    try:
        (info,) = await backend.list(odd.owner)
        assert (info.owner, info.creation_id) == (odd.owner, odd.creation_id)
    finally:
        await sandbox.terminate()


async def test_many_pods_are_listed_page_by_page(
    cluster: ClusterProcess, backend: Any, spec: Spec, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_kubernetes.cluster.PAGE", 2)
    made = await asyncio.gather(*(backend.create(spec()) for _ in range(5)))
    assert {info.sandbox_id for info in await backend.list(owner)} == {each.id for each in made}
    cluster.ask("log")
    await asyncio.gather(*(each.terminate() for each in made))
    assert await backend.list(owner) == []


async def test_waiting_callers_share_a_list_four_times_a_second(
    cluster: ClusterProcess, backend: Any, spec: Spec
) -> None:
    cluster.ask("log")
    specs = [spec(cpu=100, start_timeout_s=3) for _ in range(6)]
    failures = await asyncio.gather(*map(backend.create, specs), return_exceptions=True)
    assert all("Unschedulable" in str(each) for each in failures)
    lists = [line for line in cluster.ask("log") if line.startswith("GET") and "labelSelector" in line]
    assert 0 < len(lists) <= 18, "in three seconds of waiting, and while the pods are deleted"


async def test_what_is_known_of_an_image(backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec(image="python:3.12"))
    assert (sandbox.image.name, sandbox.image.digest, sandbox.image.workdir) == (
        "python:3.12",
        f"sha256:{'0' * 64}",
        "/data",
    )


async def test_a_pod_ends_at_its_deadline(backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec(max_lifetime=60))
    assert 0 < sandbox.lifetime_s <= 60


async def test_the_network_is_none_and_can_not_be_had_again(backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec("user", network="none"))
    assert await output(sandbox, "cat /sys/class/net/eth0/operstate") == b"down\n"
    assert await output(sandbox, "ip link set eth0 up 2>/dev/null; echo $?") != b"0\n"
    assert await output(sandbox, "cat /proc/sys/kernel/shmmni") == b"0\n"


async def test_a_pod_of_ones_own_is_merged(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    more = {
        "metadata": {"labels": {"team": "rl"}},
        "spec": {
            "priorityClassName": "low",
            "containers": [{"name": "sandbox", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}],
            "volumes": [{"name": "cache", "emptyDir": {}}],
        },
    }
    sandbox = await backend.create(spec(pod=more, labels={"app": "x"}, cpu=0.5, memory=256))
    (pod,) = [each for each in cluster.ask("pods") if sandbox.id.endswith(each["metadata"]["name"])]
    assert {"team": "rl", "app": "x"}.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["priorityClassName"] == "low"
    (container,) = pod["spec"]["containers"]
    assert container["command"][0] == "/bin/sh"
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/data", "/cache"]
    assert container["resources"] == {
        "limits": {"cpu": "0.5", "memory": "256Mi"},
        "requests": {"cpu": "0.5", "memory": "256Mi"},
    }
    assert pod["spec"]["automountServiceAccountToken"] is False


async def test_a_killed_driver_leaves_pods_that_end(cluster: ClusterProcess, backend: Any, tmp_path: Path) -> None:
    rows = [{"id": "t", "prompt": "p", "check": "true", "solution": "touch begun; sleep 1000"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        *(sys.executable, "-m", "hermes_core", "rollout", "tasks", "--agent", "oracle", "--backend", "kubernetes")
    ]
    command += ["--env.dataset_name=tasks.jsonl", "--backend.orphan_ttl_s=5", "--out", "out"]
    environment = os.environ | {
        "HERMES_OWNER": "killed",
        "HERMES_PLUGINS": "kubernetes",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment)
    async with asyncio.timeout(60):
        while not await backend.list("killed"):
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)
        process.kill()
        await process.wait()
        while (left := await backend.list("killed")) and left[0].status is SandboxStatus.RUNNING:
            await asyncio.sleep(0.2)
    reaped = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes_core", "reap", "kubernetes", "--any-owner"),
        cwd=tmp_path,
        env=environment,
    )
    assert await reaped.wait() == 0
    assert await backend.list("killed") == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_understands_the_emulator(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec())
    name = sandbox.id.split("/")[1]

    def kubectl(*words: str, given: bytes = b"") -> bytes:
        done = subprocess.run(["kubectl", *words], input=given, capture_output=True, timeout=60)
        return done.stdout + (b"" if done.returncode == 0 else b"status %d " % done.returncode + done.stderr)

    assert name.encode() in await asyncio.to_thread(kubectl, "get", "pods")
    data = os.urandom(1 << 20)
    words = "exec", "-i", name, "--", "head", "-c", str(len(data))
    assert await asyncio.to_thread(kubectl, *words, given=data) == data
    told = await asyncio.to_thread(kubectl, "exec", name, "--", "sh", "-c", "exit 7")
    assert told.startswith(b"status 7 ")
    await asyncio.to_thread(kubectl, "delete", "pod", name)
    assert await sandbox.status() is SandboxStatus.GONE


async def test_the_doctor(cluster: ClusterProcess, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await backend.check()
    assert found.usable
    assert "v1.34.0, namespace rollouts" in found.summary
    cluster.ask("set", denied=["create pods", "get pods/exec"])
    found = await backend.check()
    assert not found.usable
    assert "no right to create pods, get pods/exec" in found.summary
    assert found.advice


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no kubeconfig"),
        ("nonsense: [", "can't be used"),
        ("{}", "can't be used"),
        (json.dumps({"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}]}), "can't be used"),
    ],
)
async def test_the_doctor_without_a_cluster(
    cloud_extra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, words: str
) -> None:
    from hermes_kubernetes.backend import KubernetesBackend

    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    if content is not None:
        (tmp_path / "config").write_text(content)
    backend = KubernetesBackend(Settings())
    found = await backend.check()
    await backend.aclose()
    assert not found.usable
    assert words in found.summary
    assert found.advice


async def test_the_doctor_with_a_cluster_that_is_down(
    cluster: ClusterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_kubernetes.backend import KubernetesBackend

    text = Path(cluster.kubeconfig).read_text().replace(cluster.url, "https://127.0.0.1:9")
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    backend = KubernetesBackend(Settings())
    found = await backend.check()
    await backend.aclose()
    assert not found.usable
    assert "https://127.0.0.1:9 can't be reached" in found.summary
