"""The conformance kit on real containers of Apptainer, started by whoever runs the tests and by an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import hermes_singularity
import pytest
from hermes_testing.conformance import GROUPS

from tests.support.accounts import interpreter_for_others

FOLDER = os.environ.get("HERMES_TEST_APPTAINER", "")
PROFILE = {"image": f"docker-archive:{FOLDER}/python.tar"}
ORDINARY_UID = 54_323
NOT_REPEATED = ("commands", "files", "speed")
"""Groups in which an ordinary user's containers are like root's, or that make no promise."""

AS_ORDINARY_USER = """
import site, sys
site.addsitedir(sys.argv.pop(1))
from hermes_core.cli.main import main
main()
"""


@pytest.mark.usefixtures("apptainer")
@pytest.mark.conformance(
    "singularity", config=PROFILE, groups=[each for each in GROUPS if each != "speed"], plugins=(hermes_singularity,)
)
def test_singularity(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_as_an_ordinary_user(apptainer: Path) -> None:
    """Whoever runs the tests, the driver is an ordinary user who has only the program."""
    python, packages = interpreter_for_others(), Path(pytest.__file__).parents[1]
    if python is None or not all(directory.stat().st_mode & 0o001 for directory in packages.parents):
        pytest.skip("no interpreter here, or not this checkout, can be used by an ordinary user")
    home = Path(os.path.realpath("/var/tmp"), f"hermes-ordinary-{os.getpid()}")
    home.mkdir()
    try:
        user = {} if os.geteuid() != 0 else {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
        if user:
            os.chown(home, ORDINARY_UID, ORDINARY_UID)
        profile = home / "profile.yaml"
        profile.write_text(json.dumps({**PROFILE, "state_dir": str(home / "state"), "image_dir": str(home / "images")}))
        groups = [word for each in GROUPS if each not in NOT_REPEATED for word in ("--group", each)]
        arguments = ["conformance", "singularity", *groups, "--config", str(profile)]
        ran = subprocess.run(
            [str(python), "-c", AS_ORDINARY_USER, str(packages), *arguments],
            env={"HOME": str(home), "TMPDIR": str(home), "PATH": f"{FOLDER}:/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd=home,
            capture_output=True,
            text=True,
            **user,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert list((home / "state").iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)
