"""Fetches one commit of a dataset's git repository into a cache, without hooks, prompts, or links out of the cache.

A repository belongs to a stranger, so nothing in it is run, and its own configuration is not read.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from hermes_core import DatasetError
from hermes_harbor.variables import resolve_text

FORM = "write https://HOST/REPOSITORY#REF:FOLDER; REF and FOLDER may be left out"
SHOWN = 4000
"""Number of last bytes of git's messages in an error."""

_URL = re.compile(r"(?P<scheme>[a-z][a-z+]*)://", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"[\w.@{}^/+-]+")
_SAFE = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "submodule.recurse=false",
    "protocol.allow=never",
    "protocol.https.allow=always",
    "gc.auto=0",
    "advice.detachedHead=false",
)


@dataclass(frozen=True)
class DatasetRepository:
    """A dataset's place in a repository."""

    url: str
    """The URL without credentials."""
    ref: str | None
    """A branch, a tag or a whole commit id; None is the default branch."""
    folder: str
    """The dataset's folder in the repository, a relative path."""
    login: str | None
    """`user:password`, or None."""

    @property
    def is_local(self) -> bool:
        """Return whether the repository is on this host."""
        return self.url.startswith("file:")


@dataclass(frozen=True)
class Checkout:
    """The files of a commit in the cache."""

    path: Path
    """The dataset's folder."""
    top: Path
    """The folder of the whole commit."""
    commit: str


def repository_of(name: str) -> DatasetRepository | None:
    """Return the repository for a dataset's name that is a URL; None for a path.

    Raises:
        DatasetError: the URL can't be used.
    """
    scheme = _URL.match(name)
    if scheme is None:
        if re.match(r"[\w.-]+@[\w.-]+:", name):
            raise DatasetError("dataset_name is an SSH address", hint="clone it yourself, or use https://…")
        return None
    whole, mark, rest = name.partition("#")
    if not mark:
        begin = whole.find("/", scheme.end())
        place = whole.rfind("@", begin) if begin >= 0 else -1
        whole, rest = (whole[:place], whole[place + 1 :]) if place > begin >= 0 else (whole, "")
    ref, _, folder = rest.partition(":")
    parts = urlsplit(whole)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in ("https", "file") or not parts.path.strip("/") or parts.query:
        raise DatasetError(f"{shown} can't be fetched: it must be https://… or file://…", hint=FORM)
    if ref and (ref.startswith("-") or not _REF.fullmatch(ref)):
        raise DatasetError(f"{shown}: {ref!r} can't be a branch, a tag or a commit", hint=FORM)
    if PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
        raise DatasetError(f"{shown}: the folder {folder!r} must be a relative path without '..'", hint=FORM)
    return DatasetRepository(shown, ref or None, folder, _login(parts.netloc.rpartition("@")[0], shown))


def _login(credentials: str, shown: str) -> str | None:
    """Return the user and the password in a URL. The password must be a variable, because URLs are recorded.

    Args:
        shown: the URL without credentials, for messages.

    Raises:
        DatasetError: the password is no variable, or the variable is not set.
    """
    if not credentials:
        return None
    user, _, password = credentials.partition(":")
    if not re.fullmatch(r"\$\{\w+\}", password or user):
        raise DatasetError(
            f"the URL of {shown} has credentials in it, and would be recorded",
            hint="name a variable, as in https://user:${TOKEN}@…, or use git's credential helper",
        )
    values = [resolve_text(unquote(each), f"the URL of {shown}") for each in (user, password)]
    return ":".join(values)


async def fetch(repository: DatasetRepository, cache: Path, *, submodules: bool, timeout_s: float) -> Checkout:
    """Return a commit of the repository from the cache, or fetch it.

    Raises:
        DatasetError: the repository can't be fetched, or has no such ref or folder; with git's message.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _fetch(repository, cache, submodules=submodules)
    except TimeoutError as error:
        raise DatasetError(
            f"{repository.url} was not fetched within {timeout_s:g} s", hint="raise --env.git_timeout_s, or clone it"
        ) from error


async def _fetch(repository: DatasetRepository, cache: Path, *, submodules: bool) -> Checkout:
    git = _Git(repository)
    ref = repository.ref or "HEAD"
    commit = ref if _COMMIT.fullmatch(ref) else await _commit(git, ref)
    kind = "-submodules" if submodules else ""
    home = cache / f"{sha256(repository.url.encode()).hexdigest()[:20]}{kind}"
    if not (home / commit).is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=home) as scratch:
            top = Path(scratch) / "top"
            await git.run("init", "--quiet", "--template=", str(top), cwd=home)
            await git.run("fetch", "--quiet", "--depth=1", "--no-tags", "--", repository.url, commit, cwd=top)
            await git.run("checkout", "--quiet", "--detach", commit, cwd=top)
            if submodules:
                await git.run("submodule", "update", "--quiet", "--init", "--depth=1", cwd=top)
            await asyncio.to_thread(shutil.rmtree, top / ".git")
            with contextlib.suppress(OSError):  # another process was faster
                top.rename(home / commit)
    top = home / commit
    path = top / repository.folder
    if not path.is_dir() or not path.resolve().is_relative_to(top.resolve()):
        raise DatasetError(f"{repository.url} has no folder {repository.folder!r} at {ref}", hint=FORM)
    return Checkout(path, top, commit)


async def _commit(git: _Git, ref: str) -> str:
    """Return the commit that a ref names now."""
    listing = await git.run("ls-remote", "--quiet", "--", git.url, ref, f"{ref}^{{}}")
    commits = dict(line.split("\t")[::-1] for line in listing.splitlines() if line.count("\t") == 1)
    for name in (ref, f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}"):
        if _COMMIT.fullmatch(commits.get(name, "")):
            return commits[name]
    raise DatasetError(
        f"{git.url} has no branch or tag {ref!r}", hint="name one that exists, or a commit by its whole id"
    )


class _Git:
    """Runs git for one repository."""

    def __init__(self, repository: DatasetRepository) -> None:
        self.url = repository.url
        self._settings = [*_SAFE, *(["protocol.file.allow=always"] if repository.is_local else [])]
        self._environment = {**_plain_environment(), "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1"}
        if repository.login is not None:  # in variables, because every user of the host can read command lines
            login = base64.b64encode(repository.login.encode()).decode()
            self._environment |= {
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": f"http.{repository.url}.extraHeader",
                "GIT_CONFIG_VALUE_0": f"Authorization: Basic {login}",
            }

    async def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run git, and return its output. If the caller is cancelled, git and its processes are killed.

        Raises:
            DatasetError: git failed, or is not installed.
        """
        settings = [word for each in self._settings for word in ("-c", each)]
        try:
            process = await asyncio.create_subprocess_exec(
                *("git", *settings, *arguments),
                cwd=cwd,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise DatasetError(f"git can't be run: {error}", hint="install git, or clone the dataset") from error
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.TaskGroup() as group:
                output = group.create_task(_tail(process.stdout, 1 << 20))
                messages = group.create_task(_tail(process.stderr, SHOWN))
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            raise DatasetError(
                f"git {arguments[0]} of {self.url} failed with status {status}: {messages.result().strip()}",
                hint="try it by hand; for a private repository, use https://user:${TOKEN}@… or a credential helper",
            )
        return output.result()


def _plain_environment() -> Mapping[str, str]:
    """Return the driver's variables without those that would point git to another repository."""
    kept = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_SSL_", "GIT_PROXY_SSL_")
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key.startswith(kept)}


async def _tail(stream: asyncio.StreamReader, limit: int) -> str:
    """Read a stream to its end, and return its last `limit` bytes."""
    data = b""
    while piece := await stream.read(1 << 16):
        data = (data + piece)[-limit:]
    return data.decode("utf-8", "replace")
