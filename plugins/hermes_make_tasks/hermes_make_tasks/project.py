"""Brings a repository into the sandbox and out again as a bundle of one commit, and finds its tests' requirements."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hermes_swe_smith.attribution import OperationRefused
from hermes_swe_smith.dependencies import Installer
from hermes_swe_smith.network import git_was_cut_off
from hermes_swe_smith.workspace import (
    PreparedRepository,
    operate,
    prepare_programs,
    read_pieces,
    send_file,
)

from hermes_core import DatasetError, InfraError, NewSandbox, SetupFailed, SlotCommands, SlotHandle
from hermes_make_tasks import requirements
from hermes_make_tasks.origin import RepositoryOrigin

MAX_BUNDLE = 1 << 30
MAX_SOURCES = 256 << 20

Site = SlotHandle | NewSandbox

_FREEZE = """
import importlib.metadata, json, sys
pins = {}
for distribution in importlib.metadata.distributions():
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if sys.argv[1] not in url.get("url", ""):
        pins[distribution.metadata["Name"]] = [distribution.version, url.get("url", "")]
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "pins": pins}))
"""

_VERSION = 'import sys; print(\'{"python": "%d.%d", "pins": {}}\' % sys.version_info[:2])'

# Packages of the new environment itself, which are pinned only if the requirements name them.
_TOOLS = frozenset({"pip", "setuptools", "wheel"})

_INSTALL = 'cd "$1" && VIRTUAL_ENV="$2" PATH="$2/bin:$PATH" && export VIRTUAL_ENV PATH && eval "$3"'


@dataclass(frozen=True)
class Imported:
    """A repository that was imported."""

    upstream: str
    """The commit of the origin whose tree was imported."""
    commit: str
    """The only commit of the bundle."""
    files: Mapping[str, str]
    """The texts of the repository's packaging files, by path."""
    bundle: bytes


@dataclass(frozen=True)
class File:
    """A Python file of the repository."""

    data: bytes
    program: bool


async def import_project(
    site: Site, origin: RepositoryOrigin, ref: str, name: str, *, env: Mapping[str, str], timeout_s: float
) -> Imported:
    """Read a commit of the repository in the sandbox, and return it as a bundle of one commit.

    Raises:
        DatasetError: there is no such commit, or it can't be read.
        InfraError: the repository's server can't be reached.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        source = origin.url or f"{directory}/source"
        if origin.bundle is not None:
            data = await asyncio.to_thread(origin.bundle.read_bytes)
            await send_file(commands, source, data)
        elif origin.git_dir is not None:
            await commands.tar_in(source, _in_thread(origin.archive()))
        arguments = {
            "repo": f"{directory}/repo.git",
            "source": source,
            "ref": ref,
            "message": name,
            "bundle": f"{directory}/bundle",
            "read": requirements.FILES,
        }
        try:
            answer = await operate(commands, programs, "import_project", arguments, env=env, timeout_s=timeout_s)
        except OperationRefused as refused:
            if origin.url is not None and git_was_cut_off(refused.message):
                raise InfraError(f"{origin.given} can't be reached: {refused.message}") from refused
            raise DatasetError(
                f"{ref} of {origin.given} can't be read: {refused.message}", hint="check the repository, and --ref"
            ) from refused
        await commands.write_file(f"{directory}/answer.json", json.dumps(answer).encode())

    programs = await prepare_programs(site)
    key = hashlib.sha256(f"{origin}\0{ref}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    directory = await site.prepare(f"make-tasks-import-{key}", build, private=True)
    answer = json.loads(await read_all(site, f"{directory}/answer.json", 64 << 20))
    bundle = await read_all(site, f"{directory}/bundle", MAX_BUNDLE)
    return Imported(answer["upstream"], answer["commit"], answer["files"], bundle)


async def read_sources(site: Site, repository: PreparedRepository) -> dict[str, File]:
    """Return the Python files of a prepared repository by path.

    Raises:
        DatasetError: the files are too large.
    """
    programs = await prepare_programs(site)
    arguments = {"repo": repository.git_dir, "to": repository.directory}
    answer = await operate(site.preparation, programs, "pack_sources", arguments)
    try:
        tar = await read_all(site, answer["tar"], MAX_SOURCES)
    finally:
        await site.preparation.remove(answer["tar"])
    return await asyncio.to_thread(_unpack, tar)


def _unpack(tar: bytes) -> dict[str, File]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                found[member.name.removeprefix("./")] = File(content.read(), bool(member.mode & 0o100))
    return found


@dataclass(frozen=True)
class Needs:
    """The requirements of a project's tests."""

    python: str
    """The Python version, such as `3.11`."""
    pins: tuple[str, ...]


async def find_needs(
    site: Site,
    imported: Imported,
    repository: PreparedRepository,
    *,
    python: str,
    wanted: Sequence[str] | None,
    install: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
) -> Needs:
    """Install the packages that the tests need, once, and return the installed versions.

    Args:
        python: the version, or an empty text for whatever `python3` is.
        wanted: the requirements; None reads them in the packaging files.
        install: commands to run in a checkout instead, which install the packages with the new environment's `pip`.

    Raises:
        SetupFailed: something can't be installed, or can't be pinned.
        InfraError: the package index can't be reached.
    """
    lines = requirements.find_requirements(imported.files) if wanted is None else [*wanted]
    pinned = not install and lines is not None and requirements.are_pins(lines)

    async def build(commands: SlotCommands, directory: str) -> None:
        installer = Installer(commands, directory, env, timeout_s)
        interpreter, has_pip = await installer.find_python(python)
        if pinned:
            version = await installer.run([interpreter, "-I", "-c", _VERSION], "asking Python for its version")
            await commands.write_file(f"{directory}/frozen.json", version.stdout)
            return
        await installer.make_venv(interpreter, has_pip and not install)
        checkout = f"{directory}/checkout"
        await operate(commands, programs, "check_out", {"repo": repository.git_dir, "to": checkout})
        for command in install:
            argv = ["sh", "-c", _INSTALL, "sh", checkout, f"{directory}/venv", command]
            await installer.run(argv, f"--install {command!r}")
        if not install:
            project = [checkout] if lines is None else []
            await installer.install(requirements.with_pytest([*(lines or []), *project]))
        await commands.remove(checkout, recursive=True)
        frozen = await installer.run([f"{directory}/venv/bin/python", "-I", "-c", _FREEZE, checkout], "looking around")
        await commands.write_file(f"{directory}/frozen.json", frozen.stdout)

    programs = await prepare_programs(site)
    parts = (repository.directory, python, *(["declared"] if lines is None else lines), "", *install)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    directory = await site.prepare(f"make-tasks-needs-{key}", build)
    answer = json.loads(await read_all(site, f"{directory}/frozen.json", 1 << 20))
    asked = {re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0].lower() for line in lines or ()}
    needs = _needs(answer, asked)
    if pinned:
        return Needs(needs.python, tuple(lines or ()))
    if not any(pin.startswith("pytest==") for pin in needs.pins):
        raise SetupFailed("pytest is not in the environment of the tests", hint="let --install install it, too")
    return needs


def _needs(answer: object, asked: set[str]) -> Needs:
    """Check the description that the environment gives of itself, and return it as `Needs`. A project that was
    installed there could have changed it."""
    if not isinstance(answer, dict) or not re.fullmatch(r"3\.\d{1,2}", str(answer.get("python"))):
        raise SetupFailed("the environment of the tests does not say what is in it")
    pins = []
    for name, (version, url) in sorted(answer["pins"].items()):
        if name.lower() in _TOOLS - asked:
            continue
        if url or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or not re.fullmatch(r"[\w.!+-]+", version):
            raise SetupFailed(
                f"{name} {version} can't be pinned: it is not from a package index",
                hint="name a released version with --requirements",
            )
        pins.append(f"{name}=={version}")
    return Needs(answer["python"], tuple(pins))


async def read_all(site: Site, path: str, most: int) -> bytes:
    """Return the whole content of a file of the preparation user.

    Raises:
        DatasetError: the file has more than `most` bytes.
    """
    pieces, size = [], 0
    async for piece in read_pieces(site.preparation, path):
        size += len(piece)
        if size > most:
            raise DatasetError(f"the repository's {path.rsplit('/', 1)[-1]} has more than {most} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a blocking iterator, several joined at a time. The iterator runs in a thread."""
    while taken := await asyncio.to_thread(_some, pieces):
        yield taken


def _some(pieces: Iterator[bytes]) -> bytes:
    taken = bytearray()
    for piece in pieces:
        taken += piece
        if len(taken) >= 1 << 20:
            break
    return bytes(taken)
