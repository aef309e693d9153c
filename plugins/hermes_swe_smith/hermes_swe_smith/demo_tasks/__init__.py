"""The demo's dataset in the usual form of SWE-smith: a small package with its tests, and four bugs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hermes_core import ConfigError

REPO = "swesmith/hermes__ledgerline.1ed6e711"
BUNDLE = "ledgerline.bundle"
REQUIREMENTS = ("iniconfig==2.3.1", "packaging==26.3", "pluggy==1.7.0", "pytest==8.3.5")
"""The tests' packages. This is the last pytest without Pygments, which takes longer to install than all the others."""

_PACKAGE = Path(__file__).parent
_WHEN = "2024-01-01T00:00:00Z"


def write(folder: Path) -> Path:
    """Write the dataset into a folder: `tasks.jsonl`, `repos.json` and the bundle. Return the path of `tasks.jsonl`.
    Blocking.

    The repository's commit has the same id on every host.

    Raises:
        ConfigError: git is not installed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch, "ledgerline")
        shutil.copytree(_PACKAGE / "project", checkout, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for path in checkout.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        _git(checkout, "init", "-q", "--template=")
        _git(checkout, "symbolic-ref", "HEAD", "refs/heads/main")
        _git(checkout, "add", "-A")
        _git(checkout, "commit", "-q", "-m", "ledgerline 1.0")
        commit = _git(checkout, "rev-parse", "HEAD")
        _git(checkout, "bundle", "create", "-q", str(folder.absolute() / BUNDLE), "main")
    entry = {
        "repo": REPO,
        "bundle": BUNDLE,
        "base_commit": commit,
        "python": ">=3.9",
        "requirements": REQUIREMENTS,
        "pythonpath": ".",
        "test_cmd": "python -m pytest",
    }
    (folder / "repos.json").write_text(json.dumps([entry], indent=1), encoding="utf-8")
    shutil.copyfile(_PACKAGE / "tasks.jsonl", folder / "tasks.jsonl")
    return folder / "tasks.jsonl"


def _git(checkout: Path, *words: str) -> str:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(checkout),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _IDENTITY.items()},
    }
    try:
        done = subprocess.run(
            ["git", *words], cwd=checkout, env=environment, capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise ConfigError("the demo's repository is made with git, which is not here", hint="install git") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"the demo's repository can't be made: {error.stderr.strip()}", hint="try git here"
        ) from error
    return done.stdout.strip()


_IDENTITY = {"NAME": "ledgerline", "EMAIL": "ledgerline@example.invalid", "DATE": _WHEN}
