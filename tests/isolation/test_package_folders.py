"""Packages that the host's Pythons have installed: no slot can read them, whichever Python's they are."""

from __future__ import annotations

import os
import shutil
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.accounts import AGAIN

NAME = f"planted_{uuid.uuid4().hex}"
"""A module that is nowhere else."""

TOOLS, LOCAL = Path(f"/opt/{NAME}_tools"), Path(f"/usr/local/{NAME}_local")


def _places() -> dict[str, Path]:
    version, base = sysconfig.get_python_version(), {"base": sysconfig.get_config_var("base")}
    shared = {
        "the driver's interpreter": Path(sysconfig.get_path("purelib", vars=base)),
        "the distribution": Path("/usr/lib/python3/dist-packages"),
        "built by hand": Path(f"/usr/local/lib/python{version}/dist-packages"),
    }
    return {
        **{name: place for name, place in shared.items() if place.is_dir()},
        "an older version": LOCAL / "lib/python3.6/site-packages",
        "pypy": LOCAL / "lib/pypy3.9/site-packages",
        "pyenv": TOOLS / "pyenv/versions/3.8.1/lib/python3.8/site-packages",
        "a virtual environment": TOOLS / "venv/lib/python3.12/site-packages",
        "pipx": TOOLS / "pipx/venvs/tool/lib/python3.11/site-packages",
        "conda": TOOLS / "conda/lib/python3.10/site-packages",
        "an environment of conda's": TOOLS / "conda/envs/one/lib/python3.10/site-packages",
        "conda's cache": TOOLS / "conda/pkgs/thing-1.0-0/info",
        "a link": TOOLS / "elsewhere",
        "an egg": TOOLS / "venv/lib/python3.12/site-packages/thing-1.0-py3.12.egg",
        "the host's /tmp": Path("/tmp") / NAME,
        "a cache in /var": Path("/var/cache") / NAME,
    }


@pytest.fixture(scope="module", autouse=True)
def planted() -> Iterator[None]:
    """The module in every place, before a driver starts."""
    if os.geteuid() != 0:
        pytest.skip("only root can put packages where the system's are")
    own = [LOCAL, TOOLS, Path("/tmp") / NAME, Path("/var/cache") / NAME]
    (TOOLS / "link/lib/python3.11").mkdir(parents=True)
    (TOOLS / "link/lib/python3.11/site-packages").symlink_to(TOOLS / "elsewhere")
    (TOOLS / "conda/conda-meta").mkdir(parents=True)
    try:
        for place in _places().values():
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{NAME}.py").write_text("solution = True\n")
        yield
    finally:
        for place in _places().values():
            (place / f"{NAME}.py").unlink(missing_ok=True)
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)


FIND = f"find / -name '{NAME}.*' -not -path '/proc/*' 2>/dev/null; true"


@pytest.fixture(
    params=[
        "root-user",
        pytest.param("root-namespace", marks=pytest.mark.full),
        pytest.param("ordinary-user", marks=AGAIN),
    ]
)
def started(request, _drivers_by_account):
    account, level = request.param.split("-")

    def start(*slots, **config):
        return _drivers_by_account(account).started(level, *slots, **config)

    return start


def test_no_slot_finds_them(started) -> None:
    assert sum(1 for place in _places().values() if (place / f"{NAME}.py").exists()) == len(_places())
    with started("a") as driver:
        assert driver.run("a", FIND).out.split() == []
        ran = driver.run("a", f"for p in python3 /usr/bin/python3; do $p -c 'import {NAME}' && echo found; done")
        assert "found" not in ran.out and ran.err.count("No module named") == 2, ran


@pytest.mark.full  # that no slot finds them is above
def test_what_is_named_is_there_again_and_nothing_else(started) -> None:
    named = [str(_places()["pipx"]), str(_places()["the distribution"] / f"{NAME}.py")]
    with started("a", visible_paths=named) as driver:
        found = sorted(driver.run("a", FIND).out.split())
        assert found == sorted([f"{named[0]}/{NAME}.py", named[1]])


@pytest.mark.full  # environments are made in tests/swe_smith
def test_virtual_environments_can_still_be_made_and_filled(started) -> None:
    with started("a") as driver:
        ran = driver.run("a", "git --version && python3 -m venv --without-pip v", timeout_s=60)
        assert ran.status == 0, ran
        ran = driver.run(
            "a", "python3 -I -m pip --python v/bin/python list && v/bin/python -c 'import json'", timeout_s=60
        )
        assert ran.status == 0, ran
        ran = driver.run("a", "python3 -I -c 'import ensurepip; print(ensurepip.version())'")
        assert ran.status == 0, ran
