"""What a local sandbox sees of this host: the system's directories and our interpreter, but nothing of the driver's
own."""
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
_BYTECODE = "__pycache__"  # a quarter of all directories, and no packages in them
_INSTALLER = "pip"  # without it every new virtual environment would have to unpack one of its own


class View(NamedTuple):
    """The allow-list for a sandbox's root, as `mounts.build_root` takes it."""

    binds: tuple[tuple[str, str, bool], ...]
    symlinks: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]


def interpreter() -> str:
    """Return the interpreter that runs the driver, without its virtual environment and links."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_prefixes() -> tuple[str, ...]:
    """Return the directories that this interpreter needs.

    Raises:
        PolicyError: one of them contains the driver's home.
    """
    found = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(interpreter()))}
    prefixes = tuple(sorted(map(os.path.normpath, found)))
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

    Our `own` directories are hidden too if they are inside a system directory; others are not visible anyway. If not
    named, they are our home, working directory, checkout and virtual environment.

    The packages that any Python on this host has installed are hidden as well, because a task's package among them
    would be its solution. Exceptions are pip and everything below a `visible` path. The packages are searched for,
    unless earlier results are given as `packages`.

    Raises:
        ConfigError: a visible path is relative, missing, or the sandbox's own; or a hidden path can't be hidden.
        PolicyError: the interpreter can't be shown without the home.
    """
    named = list(map(_checked, visible))
    shown = [*interpreter_prefixes(), *named]
    unseen = [os.path.realpath(path) for path in hidden]
    masks = [
        path for path in sorted({*(_driver_directories() if own is None else own), *unseen}) if _can_mask(path, shown)
    ]
    for path in unseen:
        if path not in masks and os.path.exists(path) and is_below(path, [*mounts.SYSTEM_DIRECTORIES, *shown]):
            raise ConfigError(
                f"hidden_paths: {path} can't be hidden: it is not a directory, or programs need it",
                hint="name a directory that nothing in the sandbox needs",
            )
    found = package_folders(interpreter_prefixes()) if packages is None else packages
    # They may be gone since the search, and nothing can be mounted where there is nothing.
    apart = [path for path in found if os.path.isdir(path) and not is_below(path, [*masks, *named])]
    installers = [f"{path}/{_INSTALLER}" for path in apart]
    masks = sorted({*masks, *apart})
    binds, symlinks = mounts.system_binds([*shown, *installers], masks)
    return View(tuple(binds), tuple(symlinks), tuple(masks))


@functools.lru_cache(maxsize=None)
def package_folders(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return where Pythons keep installed packages, in the system's directories and below `prefixes`.

    This includes any Python: of the distribution, built by hand, a virtual environment, conda's with its cache. The
    search runs once per process, because it takes a third of a second.
    """
    return search_packages(prefixes, lambda directory: None)


def search_packages(prefixes: tuple[str, ...], reading: Callable[[str], object]) -> tuple[str, ...]:
    """Search as `package_folders` does. `reading` is called with every directory before it is read."""
    tops = [top for top in (*mounts.SYSTEM_DIRECTORIES, *prefixes) if not os.path.islink(top) or not _is_shown(top)]
    wanted = {*_PACKAGE_FOLDERS, _CONDA, _CONDA_CACHE}
    found: set[str] = set()
    waiting = list(tops)
    while waiting:
        directory = waiting.pop()
        reading(directory)
        try:
            # Links are not followed, but for these names: that would be most of the work.
            entries = [e for e in os.scandir(directory) if e.is_dir(follow_symlinks=e.name in wanted)]
        except OSError:  # what we can't read, a slot can't either
            continue
        conda = any(entry.name == _CONDA for entry in entries)
        for entry in entries:
            if entry.name in _PACKAGE_FOLDERS or (conda and entry.name == _CONDA_CACHE):
                path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                found.update([path] if is_below(path, tops) else [])
            elif not entry.is_symlink() and entry.name != _BYTECODE:
                waiting.append(entry.path)
    return tuple(sorted(found))


@functools.lru_cache(maxsize=None)
def unreadable() -> tuple[str, ...]:
    """Return what not every user may read in the system's directories: files, and directories without what is in them.

    The search runs once per process, because it takes up to a second.
    """
    found = []
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
                found.append(entry.path)
    return tuple(found)


def _is_shown(link: str) -> bool:
    """Return whether the target of a top-level link is shown by itself."""
    return is_below(os.path.realpath(link), [top for top in mounts.SYSTEM_DIRECTORIES if not os.path.islink(top)])


def base_environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the whole environment of something opened in a sandbox: a minimum, and the given variables."""
    return {"PATH": f"{os.path.dirname(interpreter())}:{PATH}", "LANG": "C.UTF-8", **(given or {})}


def _checked(path: str) -> str:
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
    """Return our directories that nobody in a sandbox may read."""
    found = homes()
    try:
        found.add(os.getcwd())
    except OSError:  # it has been removed
        pass
    if sys.prefix != sys.base_prefix:
        found.add(os.path.realpath(sys.prefix))
    checkout = os.path.realpath(f"{os.path.dirname(__file__)}/../../..")
    if os.path.basename(checkout) not in _PACKAGE_FOLDERS:
        found.add(checkout)
    return found


def _can_mask(path: str, shown: list[str]) -> bool:
    """Return whether a path needs to be masked, and can be without hiding what programs and our interpreter need."""
    system = {os.path.realpath(top) for top in mounts.SYSTEM_DIRECTORIES}
    if not os.path.isdir(path) or not is_below(path, system) or path in system or path in shown:
        return False
    if any(is_below(f"{top}/{name}", [path]) for top in ("/usr", "/usr/local") for name in _NEEDED):
        return False
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(interpreter())]
    own = [os.path.realpath(part) for part in own]
    hides_some = any(is_below(part, [path]) and not any(is_below(p, [path]) for p in shown) for part in own)
    return not (is_below(path, own) or hides_some)
