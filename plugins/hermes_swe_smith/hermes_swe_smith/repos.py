"""The sources of tasks' repositories, and the commands of their tests: `repos.json` with bundles, a URL, or an
image."""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hermes_core import ConfigError, DatasetError, nearest_hint, validate_row
from hermes_swe_smith.rows import SweTask

_URL = re.compile(r"^(https?|ssh|git|file)://|^[\w.-]+@[\w.-]+:")
IN_IMAGE = "image:"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SHELL = ("|", "||", "&", "&&", ";", ">", "<", ">>", "2>&1")


@dataclass(frozen=True)
class TestCommand:
    """The parts of a `test_cmd`. The command itself is not run, because core's reporter runs pytest."""

    __test__ = False

    args: tuple[str, ...] = ()
    """Arguments for pytest."""
    env: Mapping[str, str] | None = None
    checkout_on_path: bool = True
    """Whether the checkout is on the import path: `python -m pytest` adds it, `pytest` does not."""

    @classmethod
    def parse(cls, command: str) -> TestCommand:
        """Parse `[NAME=value …] python -m pytest …` or `[NAME=value …] pytest …`.

        Raises:
            ValueError: the command is not of this form.
        """
        words = shlex.split(command)
        env = {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        if words[1:3] == ["-m", "pytest"] and re.fullmatch(r"python[\d.]*", words[0]):
            args, on_path = words[3:], True
        elif words and words[0] in ("pytest", "py.test"):
            args, on_path = words[1:], False
        else:
            raise ValueError(f"{command!r} does not run pytest")
        if any(word in _SHELL or word.startswith(("$(", "`")) for word in args):
            raise ValueError(f"{command!r} is more than one command of pytest")
        return cls(tuple(args), env, on_path)


class RepoEntry(BaseModel):
    """One repository of `repos.json`. Other keys are ignored, as notes for people."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    repo: str
    """The name, as in the field `repo` of rows."""
    bundle: str
    """A git bundle in the folder of `repos.json`, relative to it."""
    base_commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    """The commit of the clean tree."""
    python: str = Field(default="", pattern=r"^((>=)?\d+\.\d+)?$")
    """A Python version: `3.11`, or `>=3.9` for that or any later one. Empty: whatever `python3` is."""
    requirements: tuple[str, ...] = ()
    """Pinned packages for the tests, pytest among them."""
    requirements_file: str | None = None
    """A file of pinned packages in the folder of `repos.json`, relative to it; used when `requirements` is empty."""
    pythonpath: str = "."
    """Directories of the checkout from which the project is imported, separated by `:`."""
    test_cmd: str = "python -m pytest"


@dataclass(frozen=True)
class RepositorySource:
    """A repository at one commit, and the settings with which its tests are run."""

    key: str
    """A key for caches, which changes with the content: letters, digits, `.`, `_`, `-`."""
    commit: str | None
    """The commit; None is the head of the repository's main branch."""
    bundle: Callable[[], bytes] | None = None
    """Reads the bundle; None if `url` is to be cloned."""
    url: str | None = None
    checkout: str | None = None
    """The directory of the image with the repository, and with an environment for its tests in or beside it."""
    python: str = ""
    requirements: tuple[str, ...] | None = None
    """The tests' pinned packages. None means unknown; the project's own dependencies are installed then."""
    pythonpath: tuple[str, ...] | None = None
    """The directories from which the project is imported, relative to the checkout. None means unknown."""
    command: TestCommand = TestCommand()


class Catalog:
    """The repositories of a dataset: in a folder with `repos.json`, below a URL as `owner/name`, or in a directory of
    each task's image."""

    def __init__(
        self, entries: Mapping[str, RepoEntry], folder: Path | None, url: str | None, checkout: str | None = None
    ) -> None:
        self._entries = entries
        self._folder = folder
        self._url = url
        self._checkout = checkout

    @classmethod
    def open(cls, base: str) -> Catalog:
        """Open the catalog at `repo_base_url`. Blocking.

        Raises:
            ConfigError: `base` is neither a URL, nor a folder with `repos.json`, nor the directory of an image.
            DatasetError: `repos.json` can't be used; the message names the entry and the field.
        """
        if base.startswith(IN_IMAGE):
            checkout = posixpath.normpath(base.removeprefix(IN_IMAGE))
            if not checkout.startswith("/") or checkout == "/":
                raise ConfigError(f"repo_base_url: {base!r} names no directory", hint="write it as image:/testbed")
            return cls({}, None, None, checkout)
        if _URL.match(base):
            return cls({}, None, base.rstrip("/"))
        folder = Path(base).expanduser()
        listing = folder / "repos.json"
        if not listing.is_file():
            missing = f"{folder} has no repos.json" if folder.is_dir() else f"there is no folder {folder}"
            raise ConfigError(
                f"repo_base_url: {missing}", hint="give a folder with repos.json, https://…, or image:/testbed"
            )
        return cls(_read_listing(listing), folder, None)

    def source(self, task: SweTask) -> RepositorySource:
        """Return the source of a task's repository.

        Raises:
            DatasetError: the repository is not in the catalog, its bundle is missing, or its entry can't be used; the
                message names the instance.
        """
        if self._checkout is not None:
            digest = _digest(self._checkout, task.base_commit or "")
            return RepositorySource(
                f"{task.repo.replace('/', '__')}-{digest}", task.base_commit, checkout=self._checkout
            )
        if task.variant == "r2e":
            raise DatasetError(
                f"instance {task.instance_id!r}: R2E-Gym's rows name no base commit; the image has it checked out",
                hint="set repo_base_url to image:/testbed, and use_image_name",
            )
        if self._folder is None:
            return self._remote(task)
        entry = self._entries.get(task.repo)
        if entry is None:
            raise DatasetError(
                f"instance {task.instance_id!r}: repository {task.repo!r} is not in {self._folder / 'repos.json'}",
                hint=nearest_hint(task.repo, self._entries),
            )
        bundle = self._folder / entry.bundle
        if not bundle.is_file():
            raise DatasetError(
                f"instance {task.instance_id!r}: the bundle of {task.repo!r} is missing: {bundle}",
                hint="fetch it, or correct `bundle` in repos.json",
            )
        try:
            return _from_entry(entry, self._folder, task.base_commit or entry.base_commit)
        except (ValueError, OSError) as error:
            raise DatasetError(
                f"instance {task.instance_id!r}: the entry of {task.repo!r} in repos.json: {error}",
                hint="correct the entry",
            ) from error

    def _remote(self, task: SweTask) -> RepositorySource:
        commit = task.base_commit
        name = f"{task.repo.replace('/', '__')}-{_digest(f'{self._url}/{task.repo}', commit or '')}"
        return RepositorySource(key=name, commit=commit, url=f"{self._url}/{task.repo}")


def _read_listing(path: Path) -> dict[str, RepoEntry]:
    try:
        listing = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DatasetError(f"{path} can't be read: {error}", hint="a JSON list of repositories") from error
    if not isinstance(listing, list):
        raise DatasetError(f"{path}: the whole must be a list", hint="it is a JSON list of repositories")
    entries = [validate_row(RepoEntry, entry, f"{path}, entry {number}") for number, entry in enumerate(listing, 1)]
    return {entry.repo: entry for entry in entries}


def _from_entry(entry: RepoEntry, folder: Path, commit: str) -> RepositorySource:
    bundle = _inside(folder, entry.bundle)
    requirements = entry.requirements
    if not requirements and entry.requirements_file:
        lines = _inside(folder, entry.requirements_file).read_text(encoding="utf-8").splitlines()
        requirements = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    pythonpath = tuple(part.strip("/") or "." for part in entry.pythonpath.split(":"))
    if any(".." in part.split("/") for part in pythonpath):
        raise ValueError(f"pythonpath {entry.pythonpath!r} leaves the checkout")
    stat = bundle.stat()
    return RepositorySource(
        key=f"{entry.repo.replace('/', '__')}-{_digest(str(stat.st_size), str(stat.st_mtime_ns), commit)}",
        commit=commit,
        bundle=functools.partial(bundle.read_bytes),
        python=entry.python,
        requirements=requirements,
        pythonpath=pythonpath,
        command=TestCommand.parse(entry.test_cmd),
    )


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file that `repos.json` names, which may come from a stranger.

    Raises:
        ValueError: the name leads out of the folder.
    """
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} leads out of the folder of repos.json")
    return folder / name


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TestEnvironment:
    """A prepared virtual environment."""

    __test__ = False

    directory: str
    """The directory with `notes.json`, and with `venv` unless the environment is the image's own."""
    pythonpath: tuple[str, ...]
    """The directories from which the project is imported, relative to the checkout."""
    interpreter: str = ""
    """The interpreter of the image's own environment; empty for ours."""

    @property
    def venv(self) -> str:
        """Return the path of the virtual environment."""
        return posixpath.dirname(posixpath.dirname(self.python))

    @property
    def python(self) -> str:
        """Return the path of the interpreter."""
        return self.interpreter or f"{self.directory}/venv/bin/python"

    @property
    def notes(self) -> str:
        """Return the path of the file that names the environment's modules."""
        return f"{self.directory}/notes.json"
