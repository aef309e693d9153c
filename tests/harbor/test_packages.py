"""Packages for the tests' own tools: pip and apt take them from the cache, and the agent knows nothing of it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile

import pytest
from hermes_harbor.packages import packages_of

from hermes_core.errors import DatasetError
from tests.harbor.harbor_tasks import PYTHON, Shell, roll_out, write_task
from tests.harbor.task_folders import scored


def wheel(folder):
    """Write a wheel of the package `hermes-tiny`."""
    info = "hermes_tiny-1.0.dist-info"
    files = {
        "hermes_tiny.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: hermes-tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "hermes_tiny-1.0-py3-none-any.whl", "w") as made:
        for name, text in files.items():
            made.writestr(name, text)


def debian_package(folder):
    """Write a Debian package `hermes-tiny` with the program `/usr/bin/hermes-tiny`, and the list of it."""
    root = folder.parent / "deb"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    about = "Package: hermes-tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: n <e@example.com>\nDescription: tiny\n"
    (root / "DEBIAN/control").write_text(about)
    (root / "usr/bin/hermes-tiny").write_text("#!/bin/sh\nexit 0\n")
    (root / "usr/bin/hermes-tiny").chmod(0o755)
    package = folder / "hermes-tiny_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(root), str(package)], check=True, capture_output=True)
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    listed = f"{about}Filename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n"
    (folder / "Packages").write_text(listed)


async def test_the_tests_get_their_tools_from_a_folder(runtime, tmp_path):
    folder = tmp_path / "cache"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/hermes-tool").write_text("#!/bin/sh\nexit 0\n")
    (folder / "bin/hermes-tool").chmod(0o755)
    wheel(folder)
    needs = ["pip install --break-system-packages -q hermes-tiny", "python3 -c 'import hermes_tiny'", "hermes-tool"]
    if shutil.which("dpkg-deb"):
        debian_package(folder)
        needs += ["apt-get update -qq", "apt-get install -qq hermes-tiny", "hermes-tiny"]
    write_task(tmp_path / "tasks/task", image=PYTHON, test=scored(" && ".join(needs)))
    env = {"package_cache": str(folder)}
    agent = Shell("env; ls /opt; command -v hermes-tool")
    record = (await roll_out(runtime, tmp_path / "tasks", agent, env=env))["task"]
    assert (record["reward"], record["failure"]) == (1.0, None), record["details"]
    assert "hermes-packages" not in agent.answers[0]["output"] and "PIP_" not in agent.answers[0]["output"]
    record = (await roll_out(runtime, tmp_path / "tasks", "nop"))["task"]
    assert (record["reward"], "hermes-tiny" in record["details"]["output"]) == (0.0, True)


def test_what_the_setting_means(tmp_path):
    index = packages_of("http://index.example.com:3141/simple/")
    assert index.folder is None
    assert (
        index.variables["PIP_INDEX_URL"]
        == index.variables["UV_DEFAULT_INDEX"]
        == "http://index.example.com:3141/simple/"
    )
    assert index.variables["PIP_TRUSTED_HOST"] == "index.example.com"
    assert "PIP_TRUSTED_HOST" not in packages_of("https://index.example.com/simple/").variables
    folder = packages_of(str(tmp_path))
    assert (folder.folder, folder.programs, "APT_CONFIG" in folder.variables) == (tmp_path, None, False)
    assert folder.variables["PIP_NO_INDEX"] == folder.variables["UV_OFFLINE"] == "1"
    for wrong in (str(tmp_path / "none"), "ftp://a/b", "https://"):
        with pytest.raises(DatasetError, match="neither a folder nor"):
            packages_of(wrong)
