"""The conformance kit on real containers of Apptainer, started by whoever runs the tests and by an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hermes_singularity
import pytest
from hermes_testing.conformance import GROUPS

from tests.support.accounts import interpreter_for_others
from tests.support.requirements import ROOT

FOLDER = os.environ.get("HERMES_TEST_APPTAINER", "")
PROFILE = {"image": f"docker-archive:{FOLDER}/python.tar"}
ORDINARY_UID = 54_323
NOT_REPEATED = ("commands", "processes", "files", "leaks", "speed")
"""Groups in which an ordinary user's containers are like root's, or that make no promise."""

RUN_MODULE = """
import runpy, site, sys
site.addsitedir(sys.argv.pop(1))
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.usefixtures("apptainer")
@pytest.mark.conformance(
    "singularity", config=PROFILE, groups=[each for each in GROUPS if each != "speed"], plugins=(hermes_singularity,)
)
def test_singularity(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.fixture
def ordinary_home() -> Iterator[Path]:
    """A directory of a user who is not root, in which no sandbox is to be left."""
    home = Path(tempfile.mkdtemp(prefix="hermes-ordinary-", dir="/var/tmp"))
    if os.geteuid() == 0:
        os.chown(home, ORDINARY_UID, ORDINARY_UID)
    yield home
    left = [*home.glob("hermes-rl-containers-*/*")]
    subprocess.run(["rm", "-rf", str(home)], check=True)
    assert left == []


@pytest.fixture
def run_as_ordinary_user(apptainer: Path, ordinary_home: Path) -> Callable[..., None]:
    """Runs a Python module as this user, who has only the program."""
    python, packages = interpreter_for_others(), Path(pytest.__file__).parents[1]
    if python is None or not all(directory.stat().st_mode & 0o001 for directory in packages.parents):
        pytest.skip("no interpreter here, or not this checkout, can be used by an ordinary user")
    user = {} if os.geteuid() != 0 else {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
    variables = {
        "HOME": ordinary_home,
        "TMPDIR": ordinary_home,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ROOT,
    }
    variables |= {"PATH": f"{FOLDER}:/usr/bin:/bin", "HERMES_TEST_APPTAINER": FOLDER}

    def run(*words: str) -> None:
        ran = subprocess.run(
            [str(python), "-c", RUN_MODULE, str(packages), *words],
            env={name: str(value) for name, value in variables.items()},
            cwd=ordinary_home,
            capture_output=True,
            text=True,
            **user,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_as_an_ordinary_user(run_as_ordinary_user: Callable[..., None], ordinary_home: Path) -> None:
    profile = ordinary_home / "profile.yaml"
    profile.write_text(json.dumps(PROFILE))
    groups = [word for each in GROUPS if each not in NOT_REPEATED for word in ("--group", each)]
    run_as_ordinary_user("hermes_core", "conformance", "singularity", *groups, "--config", str(profile))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_life_and_images_of_an_ordinary_user(run_as_ordinary_user: Callable[..., None]) -> None:
    """The other tests of this folder, once more."""
    files = [str(Path(__file__).with_name(f"test_singularity_{name}.py")) for name in ("life", "images")]
    run_as_ordinary_user("pytest", "-q", "-m", "full", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files)
