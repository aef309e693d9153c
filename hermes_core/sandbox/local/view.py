"""Decides what a local sandbox sees of this host: the system's directories and our interpreter, not our own files."""
# pathlib is slow to import, and hosts of `ssh` wait for it
# ruff: noqa: PTH109, PTH110, PTH112, PTH114, PTH119, PTH120

from __future__ import annotations

import functools
import os
import pwd
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hermes_core.errors import ConfigError, PolicyError
from hermes_core.sandbox.linux import mounts
from hermes_core.sandbox.linux.mounts import is_below

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OWN_PATHS = ("/data", "/tmp", "/var/tmp", "/dev", "/proc")  # of the sandbox
_NEEDED = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include", "local")
_ENTER = stat.S_IROTH | stat.S_IXOTH
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_CONDA, _CONDA_CACHE = "conda-meta", "pkgs"
_BYTECODE = "__pycache__"  # a quarter of all directories, and without packages
_INSTALLER = "pip"  # without it, each new virtual environment would have to unpack a copy


class View(NamedTuple):
    """The allow-list for a sandbox's root directory: arguments of `mounts.build_root`."""

    binds: tuple[tuple[str, str, bool], ...]
    symlinks: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]


def interpreter() -> str:
    """Return the path of the interpreter that runs us, without virtual environment and links."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_prefixes() -> tuple[str, ...]:
    """Return the directories that this interpreter needs.

    Raises:
        PolicyError: one of them contains the driver's home.
    """
    paths = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(interpreter()))}
    prefixes = tuple(sorted(map(os.path.normpath, paths)))
    for home in homes():
        if is_below(home, prefixes) and not is_below(home, mounts.SYSTEM_DIRECTORIES):
            raise PolicyError(
                f"the interpreter {interpreter()} is installed in {', '.join(prefixes)}, around the home {home}: "
                "a sandbox that can run it could read the home",
                hint="run hermes-rl with an interpreter that has a directory of its own",
            )
    return prefixes


def view(
    visible: Iterable[str],
    hidden: Iterable[str],
    own: Iterable[str] | None = None,
    packages: Iterable[str] | None = None,
) -> View:
    """Return what the sandbox sees: the system, this interpreter, and the `visible` paths, without the `hidden` ones.

    Packages that any Python on this host has installed are hidden too, because a task's own package among them would
    be its solution. Exceptions are pip, and everything below a `visible` path.

    Args:
        visible: paths to show besides the system and the interpreter.
        hidden: directories to hide.
        own: directories of ours to hide if they are inside a system directory; all others are invisible anyway. None:
            our home, working directory, checkout and virtual environment.
        packages: the result of `package_folders`. None: search for it.

    Raises:
        ConfigError: a visible path is relative, missing, or the sandbox's own; or a hidden path can't be hidden.
        PolicyError: the interpreter can't be shown without the home.
    """
    extra = list(map(_validate_visible, visible))
    shown = [*interpreter_prefixes(), *extra]
    hidden_paths = [os.path.realpath(path) for path in hidden]
    candidates = sorted({*(_driver_directories() if own is None else own), *hidden_paths})
    masks = [path for path in candidates if _can_mask(path, shown)]
    for path in hidden_paths:
        if path not in masks and os.path.exists(path) and is_below(path, [*mounts.SYSTEM_DIRECTORIES, *shown]):
            raise ConfigError(
                f"hidden_paths: {path} can't be hidden: it is not a directory, or programs need it",
                hint="name a directory that nothing in the sandbox needs",
            )
    folders = package_folders(interpreter_prefixes()) if packages is None else packages
    # Some may be gone since the search, and we can't mount on what does not exist.
    folders = [path for path in folders if os.path.isdir(path) and not is_below(path, [*masks, *extra])]
    installers = [f"{path}/{_INSTALLER}" for path in folders]
    masks = sorted({*masks, *folders})
    binds, symlinks = mounts.system_binds([*shown, *installers], masks)
    return View(tuple(binds), tuple(symlinks), tuple(masks))


@functools.lru_cache(maxsize=None)
def package_folders(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders of installed packages in the system's directories and below `prefixes`.

    These are folders of any Python: of the distribution, built by hand, of virtual environments, of conda and its
    cache. The search runs once per process, because it takes a third of a second.
    """
    return search_packages(prefixes, lambda directory: None)


def search_packages(prefixes: tuple[str, ...], reading: Callable[[str], object]) -> tuple[str, ...]:
    """Search as `package_folders` does. `reading` is called with every directory before it is read."""
    tops = [top for top in (*mounts.SYSTEM_DIRECTORIES, *prefixes) if not os.path.islink(top) or not _is_shown(top)]
    names = {*_PACKAGE_FOLDERS, _CONDA, _CONDA_CACHE}
    folders: set[str] = set()
    waiting = list(tops)
    while waiting:
        directory = waiting.pop()
        reading(directory)
        try:
            # Links are followed only for these names, because checking all links would be most of the work.
            entries = [e for e in os.scandir(directory) if e.is_dir(follow_symlinks=e.name in names)]
        except OSError:  # if we can't read it, slots can't either
            continue
        conda = any(entry.name == _CONDA for entry in entries)
        for entry in entries:
            if entry.name in _PACKAGE_FOLDERS or (conda and entry.name == _CONDA_CACHE):
                path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                folders.update([path] if is_below(path, tops) else [])
            elif not entry.is_symlink() and entry.name != _BYTECODE:
                waiting.append(entry.path)
    return tuple(sorted(folders))


@functools.lru_cache(maxsize=None)
def unreadable() -> tuple[str, ...]:
    """Return the files and directories in the system's directories that not every user may read.

    The search runs once per process, because it takes up to a second.
    """
    paths = []
    waiting = [*mounts.SYSTEM_DIRECTORIES, *mounts.PACKAGE_DIRECTORIES]
    waiting = [top for top in waiting if os.path.isdir(top) and not os.path.islink(top)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # it has been removed
            continue
        for entry in entries:
            if entry.is_symlink():
                continue
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except OSError:
                continue
            if stat.S_ISDIR(mode) and mode & _ENTER == _ENTER:
                waiting.append(entry.path)
            elif not (stat.S_ISREG(mode) and mode & stat.S_IROTH):
                paths.append(entry.path)
    return tuple(paths)


def _is_shown(link: str) -> bool:
    """Return whether the target of a top-level link is in another system directory, which is shown."""
    return is_below(os.path.realpath(link), [top for top in mounts.SYSTEM_DIRECTORIES if not os.path.islink(top)])


def base_environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Return the whole environment of a program in a sandbox: PATH, LANG, and these variables."""
    return {"PATH": f"{os.path.dirname(interpreter())}:{PATH}", "LANG": "C.UTF-8", **(variables or {})}


def _validate_visible(path: str) -> str:
    absolute = os.path.normpath(path)
    if not path.startswith("/") or not os.path.exists(path):
        raise ConfigError(f"visible_paths: {path!r} is not the absolute path of something on this host")
    if absolute == "/" or absolute in _OWN_PATHS or is_below(absolute, ("/dev", "/proc")):
        raise ConfigError(
            f"visible_paths: {absolute} can't be made visible: a sandbox has its own",
            hint="name what is to be seen below it",
        )
    return absolute


def homes() -> set[str]:
    """Return the homes of this account, from the environment and from the system."""
    homes = {os.environ.get("HOME", "")}
    try:
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pass
    return {os.path.realpath(home) for home in homes if home.startswith("/")} - {"/"}


def _driver_directories() -> set[str]:
    """Return our home, working directory, virtual environment and checkout, which no sandbox may read."""
    directories = homes()
    try:
        directories.add(os.getcwd())
    except OSError:  # it has been removed
        pass
    if sys.prefix != sys.base_prefix:
        directories.add(os.path.realpath(sys.prefix))
    checkout = os.path.realpath(f"{os.path.dirname(__file__)}/../../..")
    if os.path.basename(checkout) not in _PACKAGE_FOLDERS:
        directories.add(checkout)
    return directories


def _can_mask(path: str, shown: list[str]) -> bool:
    """Return whether a path must be masked, and whether that hides nothing that programs or our interpreter need."""
    system = {os.path.realpath(top) for top in mounts.SYSTEM_DIRECTORIES}
    if not os.path.isdir(path) or not is_below(path, system) or path in system or path in shown:
        return False
    if any(is_below(f"{top}/{name}", [path]) for top in ("/usr", "/usr/local") for name in _NEEDED):
        return False
    needed = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(interpreter())]
    needed = [os.path.realpath(part) for part in needed]
    hides_some = any(is_below(part, [path]) and not any(is_below(p, [path]) for p in shown) for part in needed)
    return not (is_below(path, needed) or hides_some)
