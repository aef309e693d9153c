"""What a local sandbox sees of this host: the system's directories, our interpreter, nothing of the driver's own."""

from __future__ import annotations

import os
import pwd
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hermes_core.errors import ConfigError, PolicyError
from hermes_core.sandbox.guest import mounts
from hermes_core.sandbox.guest.mounts import is_below

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_OWN_PATHS = ("/data", "/tmp", "/var/tmp", "/dev", "/proc")  # of the sandbox
_NEEDED = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "include", "local")


@dataclass(frozen=True)
class View:
    """The allow-list of a sandbox's root, as `mounts.build_root` takes it."""

    binds: tuple[tuple[str, str, bool], ...]
    symlinks: tuple[tuple[str, str], ...]
    masks: tuple[str, ...]


def interpreter() -> str:
    """The interpreter that runs the driver, behind its virtual environment and any links."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def interpreter_prefixes() -> tuple[str, ...]:
    """The directories that this interpreter needs.

    Raises:
        PolicyError: one of them holds the driver's home.
    """
    found = {sys.base_prefix, sys.base_exec_prefix, str(Path(interpreter()).parent.parent)}
    prefixes = tuple(sorted(map(os.path.normpath, found)))
    for home in homes():
        if is_below(home, prefixes) and not is_below(home, mounts.SYSTEM_DIRECTORIES):
            raise PolicyError(
                f"the interpreter {interpreter()} is installed in {', '.join(prefixes)}, around the home {home}: "
                "a sandbox that can run it could read the home",
                hint="run hermes-rl with an interpreter that has a directory of its own",
            )
    return prefixes


def view(visible: Iterable[str], hidden: Iterable[str], own: Iterable[str] | None = None) -> View:
    """What the sandbox sees: the system, this interpreter, and the `visible` paths; without the `hidden` ones.

    Our `own` directories are hidden too where they lie in a system directory; anywhere else they are not there in the
    first place. If not named, they are our home, working directory, checkout and virtual environment.

    Raises:
        ConfigError: a visible path is relative, missing, or the sandbox's own; or one of the hidden can't be hidden.
        PolicyError: the interpreter can't be shown without the home.
    """
    shown = [*interpreter_prefixes(), *map(_checked, visible)]
    unseen = [os.path.realpath(path) for path in hidden]
    masks = [
        path for path in sorted({*(_driver_directories() if own is None else own), *unseen}) if _can_mask(path, shown)
    ]
    for path in unseen:
        if path not in masks and Path(path).exists() and is_below(path, [*mounts.SYSTEM_DIRECTORIES, *shown]):
            raise ConfigError(
                f"hidden_paths: {path} can't be hidden: it is no directory, or programs need it",
                hint="name a directory that nothing in the sandbox needs",
            )
    binds, symlinks = mounts.system_binds(shown, masks)
    return View(tuple(binds), tuple(symlinks), tuple(masks))


def base_environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """The whole environment of something opened in a sandbox: a minimum, and what is given."""
    return {"PATH": f"{Path(interpreter()).parent}:{PATH}", "LANG": "C.UTF-8", **(given or {})}


def _checked(path: str) -> str:
    absolute = os.path.normpath(path)
    if not path.startswith("/") or not Path(path).exists():
        raise ConfigError(f"visible_paths: {path!r} is not the absolute path of something on this host")
    if absolute == "/" or absolute in _OWN_PATHS or is_below(absolute, ("/dev", "/proc")):
        raise ConfigError(
            f"visible_paths: {absolute} can't be made visible: a sandbox has its own",
            hint="name what is to be seen below it",
        )
    return absolute


def homes() -> set[str]:
    """The home of this account, as the environment says it and as the system does."""
    homes = {os.environ.get("HOME", "")}
    try:
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        pass
    return {os.path.realpath(home) for home in homes if home.startswith("/")} - {"/"}


def _driver_directories() -> set[str]:
    """The places of ours that nobody in a sandbox is to read."""
    found = homes()
    try:
        found.add(str(Path.cwd()))
    except OSError:  # it has been removed
        pass
    if sys.prefix != sys.base_prefix:
        found.add(os.path.realpath(sys.prefix))
    checkout = Path(__file__).resolve().parents[3]
    if checkout.name not in ("site-packages", "dist-packages"):
        found.add(str(checkout))
    return found


def _can_mask(path: str, shown: list[str]) -> bool:
    """Whether a path needs to be masked, and can be without taking away what programs and our interpreter need."""
    system = {os.path.realpath(top) for top in mounts.SYSTEM_DIRECTORIES}
    if not Path(path).is_dir() or not is_below(path, system) or path in system or path in shown:
        return False
    if any(is_below(f"{top}/{name}", [path]) for top in ("/usr", "/usr/local") for name in _NEEDED):
        return False
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(interpreter()).parent)]
    own = [os.path.realpath(part) for part in own]
    hides_some = any(is_below(part, [path]) and not any(is_below(p, [path]) for p in shown) for part in own)
    return not (is_below(path, own) or hides_some)
