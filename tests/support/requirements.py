"""What a test needs that not every machine has: namespaces, a server, an extra, a data set.

A test asks for it by a fixture, and is skipped with the reason where it is missing. `HERMES_REQUIRE=docker,ssh` names
what has to be there: the same tests fail then, so that a run can't pass by skipping them. A fixture of your own ends in
`require("docker", reason)`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.support.selection import makes_tests_full

ROOT = Path(__file__).resolve().parents[2]


def required() -> set[str]:
    """Return what HERMES_REQUIRE names."""
    return set(re.split(r"[,\s]+", os.environ.get("HERMES_REQUIRE", "")))


@pytest.fixture(scope="session")
def require() -> Callable[[str, str | None], None]:
    """`require("docker", reason)`: skip with the reason, or fail if HERMES_REQUIRE names it; None means it is there."""
    named = required()

    def check(name: str, missing: str | None) -> None:
        if missing is None:
            return
        if name in named:
            pytest.fail(f"HERMES_REQUIRE names {name}, but {missing}", pytrace=False)
        pytest.skip(f"{name}: {missing}")

    return check


@pytest.fixture(scope="session")
def swe_tasks(require: Callable[[str, str | None], None]) -> Path:
    """The folder of real SWE-smith tasks: HERMES_SWE_TASKS, or `shared/swe_tasks` beside the checkout."""
    folder = Path(os.environ.get("HERMES_SWE_TASKS") or ROOT.parent / "shared" / "swe_tasks")
    there = (folder / "tasks.jsonl").is_file()
    require("swe_tasks", None if there else f"{folder} has no tasks.jsonl; set HERMES_SWE_TASKS")
    return folder


@pytest.fixture(scope="session")
@makes_tests_full
def docker_images(require: Callable[[str, str | None], None]) -> tuple[str, str]:
    """The images that `.ci/docker` builds, with Python and with busybox alone, on a daemon that answers."""
    images = ("hermes-test-python:bookworm", "hermes-test-busybox:latest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the SDK loses the socket that it could not connect
        missing = _missing_of_docker(images)
        gc.collect()
    require("docker", missing)
    return images


def _missing_of_docker(images: Iterable[str]) -> str | None:
    import docker.errors

    with contextlib.closing(docker.APIClient(**docker.utils.kwargs_from_env(), version="1.41", timeout=20)) as api:
        try:
            for image in images:
                api.inspect_image(image)
        except docker.errors.NotFound:
            return f"the daemon has no image {image}; `.ci/docker` builds it"
        except (docker.errors.DockerException, OSError) as error:  # requests' errors are OSErrors
            return f"no daemon answers ({error}); `.ci/docker` starts one on Debian"
    return None


@pytest.fixture(scope="session")
@makes_tests_full
def ssh_config(require: Callable[[str, str | None], None]) -> str:
    """A configuration file of OpenSSH's that names the server `hermes-test`."""
    named = os.environ.get("HERMES_TEST_SSH_CONFIG", "")
    require("ssh", None if named else 'HERMES_TEST_SSH_CONFIG is not set; `eval "$(.ci/ssh)"` as root sets it')
    return named


@pytest.fixture
@makes_tests_full
def slurm(require: Callable[[str, str | None], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `.ci/slurm`. Slurm's programs run as the account that is not root."""
    folder = os.environ.get("HERMES_TEST_SLURM", "")
    require("slurm", None if folder else 'HERMES_TEST_SLURM is not set; `eval "$(.ci/slurm)"` as root sets it')
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    return Path(folder)


@pytest.fixture(scope="session")
@makes_tests_full
def exact_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where the extra is not installed; imports it where it is, whatever it warns of."""
    missing = [name for name in ("transformers", "jinja2", "aiohttp") if importlib.util.find_spec(name) is None]
    require("exact", f"{', '.join(missing)} not installed; `make setup EXTRAS=exact`" if missing else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer  # noqa: F401


@pytest.fixture(scope="session")
def torch_extra(exact_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where there is no torch for the tiny model."""
    there = importlib.util.find_spec("torch") is not None
    require("torch", None if there else 'torch is not installed; `make setup EXTRAS="exact torch"`')
    import torch

    torch.set_num_threads(1)  # the machine has others to serve


@pytest.fixture(scope="session")
@makes_tests_full
def apptainer(require: Callable[[str, str | None], None]) -> Path:
    """The folder with `apptainer` and the archives of two images that `.ci/apptainer` makes. The program is in PATH."""
    named = os.environ.get("HERMES_TEST_APPTAINER", "")
    reason = 'HERMES_TEST_APPTAINER is not set; `eval "$(.ci/apptainer)"` as root sets it'
    require("apptainer", None if named else reason)
    return Path(named)
