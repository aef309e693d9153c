"""Fetches programs from the npm and Python indexes, once, into a folder of the driver."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hermes_core import ConfigError, Diagnosis

Fill = Callable[[Path], Awaitable[None]]
"""Fills an empty folder of the driver."""

LOOK_AGAIN_S = 0.2
"""Seconds between two attempts to take a lock that another process holds."""

_GET_NPM, _GET_PIP = "install Node.js, whose package has npm", "install pip for this Python"
_GET_PYTHON = "run hermes-rl with a newer Python, which the slots must have, too"
_CPU = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,60}")


@dataclass(frozen=True)
class NpmPackages:
    """Packages of the npm index, without their install scripts."""

    specs: tuple[str, ...]
    """The packages that npm installs. `{version}` stands for the agent's version, and `{cpu}` and `{machine}` for npm's
    and the kernel's names of the machine's type."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """The files and folders to keep: the path in the installation of each, by its new name. Empty keeps everything."""
    needs: tuple[str, ...] = ()
    """The programs and libraries that the slot must have to run the packages, as in `AgentProgram.needs`."""

    def check(self, name: str, version: str) -> Diagnosis:
        """Return whether the packages are fetched, or could be."""
        available = shutil.which("npm") is not None
        return _diagnosis(name, version, self._place(name, version), "npm", available, _GET_NPM)

    def _place(self, name: str, version: str) -> str:
        return f"{name}-{_validate_version(version)}-{_cpu()}-{_digest([self.specs, sorted(self.keep.items())])}"

    async def fetch(self, name: str, version: str) -> Path:
        """Return the folder with the packages, which are fetched if they are not there.

        Raises:
            ConfigError: they can't be had.
        """
        places = {"version": _validate_version(version), "cpu": _cpu(), "machine": platform.machine()}
        line = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
        line += [
            "--os=linux",
            f"--cpu={places['cpu']}",
            "--libc=glibc",
            *(each.format(**places) for each in self.specs),
        ]
        keep = {path: source.format(**places) for path, source in self.keep.items()}

        async def fill(folder: Path) -> None:
            await _run([*line, "--prefix", str(folder)], "npm", _GET_NPM)
            if keep:
                await asyncio.to_thread(_keep_only, folder, keep)

        return await _once(self._place(name, version), fill)


@dataclass(frozen=True)
class PythonPackages:
    """Packages of the Python index with their dependencies, for the driver's version of Python."""

    specs: tuple[str, ...]
    """The packages that pip installs. `{version}` stands for the agent's version."""
    oldest: tuple[int, int] = (3, 11)
    """The oldest version of Python with which the packages run."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the programs and libraries that the slot must have to run the packages."""
        return ("glibc", f"python3.{sys.version_info.minor}")

    def check(self, name: str, version: str) -> Diagnosis:
        """Return whether the packages are fetched, or could be."""
        if sys.version_info[:2] < self.oldest:
            return Diagnosis(False, self._too_old(name), advice=(_GET_PYTHON,))
        available = importlib.util.find_spec("pip") is not None
        return _diagnosis(name, version, self._place(name, version), "pip", available, _GET_PIP)

    def _place(self, name: str, version: str) -> str:
        return f"{name}-{_validate_version(version)}-{_cpu()}-py3.{sys.version_info.minor}-{_digest(self.specs)}"

    def _too_old(self, name: str) -> str:
        needed, here = (".".join(map(str, each)) for each in (self.oldest, sys.version_info[:2]))
        return f"{name} needs Python {needed} or newer, and the driver has {here}"

    async def fetch(self, name: str, version: str) -> Path:
        """Return the folder with the packages, which are fetched if they are not there.

        Raises:
            ConfigError: they can't be had.
        """
        if sys.version_info[:2] < self.oldest:
            raise ConfigError(self._too_old(name), hint=_GET_PYTHON)
        specs = [each.format(version=version) for each in self.specs]
        place = self._place(name, version)
        # Compile the packages here. In the slots, the folder can't be written, so each slot would compile them anew.
        line = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--compile"]

        async def fill(folder: Path) -> None:
            await _run([*line, "--only-binary=:all:", "--target", str(folder), *specs], "pip", _GET_PIP)

        return await _once(place, fill)


def python(start: str) -> tuple[str, ...]:
    """Return the beginning of a command line that runs the statement `start` with the packages of `PythonPackages`.

    PYTHONPATH is not used, because the commands that an agent runs would get it, too.
    """
    return ("python3", "-I", "-c", f"import site, sys; site.addsitedir(sys.argv.pop(1)); {start}", "{install}")


def cache() -> Path:
    """Return the folder in which fetched programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hermes-rl" / "agents"


def _validate_version(version: str) -> str:
    if not _VERSION.fullmatch(version):
        raise ConfigError(f"{version!r} can't be a version", hint="write it like 1.2.3")
    return version


def _cpu() -> str:
    """Return npm's name for the type of this machine.

    Raises:
        ConfigError: there are no programs for this type.
    """
    if (cpu := _CPU.get(platform.machine())) is None:
        raise ConfigError(f"there are no coding agents for {platform.machine()}", hint="use x86_64 or aarch64")
    return cpu


def _digest(declared: object) -> str:
    """Return a hash of an agent's declaration, so that releases of this plugin with other declarations use other
    folders."""
    return hashlib.sha256(json.dumps(declared).encode()).hexdigest()[:8]


async def _once(name: str, fill: Fill) -> Path:
    """Return the folder of this name. If it does not exist, one process fills it, and it gets its name when it is
    complete.

    Raises:
        ConfigError: the cache can't be written.
    """
    folder, part = cache() / name, cache() / f".{name}.part"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with _hold_lock(cache() / f".{name}.lock"):
            if folder.is_dir():
                return folder
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)  # left by a process that was killed
            part.mkdir()
            try:
                await fill(part)
                part.rename(folder)
            finally:
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error}", hint="set XDG_CACHE_HOME to another folder") from error
    return folder


def _diagnosis(  # noqa: PLR0917 (private, and called twice)
    name: str, version: str, place: str, installer: str, available: bool, hint: str
) -> Diagnosis:
    """Return whether a program is fetched, or could be."""
    if (cache() / place).is_dir():
        return Diagnosis(True, f"version {version} is in {cache() / place}")
    if not available:
        return Diagnosis(False, f"{installer} is needed once, to fetch it, and is not there", advice=(hint,))
    above = next(each for each in (cache(), *cache().parents) if each.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        return Diagnosis(False, f"{above} can't be written", advice=("set XDG_CACHE_HOME to another folder",))
    advice = f"`hermes-rl agents install {name}` does it now, with {installer}; else the first run does"
    return Diagnosis(True, f"version {version} is not fetched yet", advice=(advice,))


@asynccontextmanager
async def _hold_lock(path: Path) -> AsyncIterator[None]:
    """Hold a lock during the block that excludes other processes of this machine."""
    with path.open("w") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        yield


async def _run(line: Sequence[str], program: str, hint: str) -> None:
    """Run an installer.

    Raises:
        ConfigError: the installer is missing, or fails.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *line,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise ConfigError(f"{program} is needed once, to fetch the agent, and is not there", hint=hint) from error
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
    if process.returncode:
        text = said.decode("utf-8", "replace").strip()
        raise ConfigError(
            f"{program} failed with {process.returncode}: {text[-1500:]}",
            hint="see that the index is reachable and has this version; npm and pip use their own configuration",
        )


def _keep_only(folder: Path, keep: Mapping[str, str]) -> None:
    """Move these files to the top of the folder, and remove all others."""
    kept = folder / ".kept"
    kept.mkdir()
    for path, source in keep.items():
        (folder / source).rename(kept / path)
    for entry in [entry for entry in folder.iterdir() if entry != kept]:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in kept.iterdir():
        entry.rename(folder / entry.name)
    kept.rmdir()
