"""A sandbox's directory on the host: how it is made, locked and removed. Light imports only.

The supervisor holds a lock on the directory, from before the directory gets its name until after it is removed. So if
the lock can be taken, the sandbox is dead. This needs no process ids, and works from another pid namespace too.
"""
# pathlib is slow to import
# ruff: noqa: PTH101, PTH102, PTH104, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import fcntl
import os
import time

from hermes_core.sandbox.local.removal import remove_tree

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

RECORD, DATA, TMP, VAR_TMP, ROOT, DISK = "record.json", "data", "tmp", "vartmp", "root", "disk"
"""The contents of a sandbox's directory: the record, three writable directories, and two empty ones to mount on."""

PREFIX, CONTAINER_PREFIX = "local-", "container-"
"""The prefixes of sandbox ids: of those that core makes, and of those that a container runtime makes."""
PREFIXES = (PREFIX, CONTAINER_PREFIX)

_NEW, _TRASH = ".new-", ".trash-"
_UNFINISHED_S = 60.0


def claim(state_root: str, sandbox_id: str) -> tuple[str, int]:
    """Make the directory of a sandbox and lock it. Return its path and the descriptor that holds the lock.

    Raises:
        FileExistsError: the sandbox has a directory.
    """
    path = os.path.join(state_root, sandbox_id)
    unnamed = os.path.join(state_root, f"{_NEW}{os.getpid()}-{os.urandom(8).hex()}")
    os.mkdir(unnamed, 0o700)
    holder = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(holder, fcntl.LOCK_EX)
    furnish(unnamed)
    for name in (ROOT, DISK):
        os.mkdir(os.path.join(unnamed, name), 0o700)
    try:
        os.rename(unnamed, path)
    except OSError:  # a directory that is not empty is in the way
        remove_tree(unnamed)
        os.close(holder)
        raise FileExistsError(path) from None
    return path, holder


def furnish(place: str) -> None:
    """Make the writable directories."""
    for name, mode in ((DATA, 0o755), (TMP, 0o1777), (VAR_TMP, 0o1777)):
        path = os.path.join(place, name)
        os.mkdir(path)
        os.chmod(path, mode)  # mkdir applies the umask, and sets no sticky bit


def read_record(path: str) -> dict[str, Any]:
    """Return the record in a sandbox's directory. Raises OSError or ValueError if it can't be read."""
    import json

    with open(os.path.join(path, RECORD), "rb") as stream:
        record: dict[str, Any] = json.loads(stream.read().decode("utf-8"))
        return record


def is_held(path: str) -> bool:
    """Return whether this directory exists and its supervisor lives."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def discard(path: str) -> bool:
    """Remove a directory that the caller has locked. Return whether all of it is gone.

    The directory is renamed first, so that half of it never looks like a sandbox, and the name is free at once.
    """
    trash = os.path.join(os.path.dirname(path), _TRASH + os.urandom(8).hex())
    try:
        os.rename(path, trash)
    except OSError:
        return not os.path.lexists(path)
    return remove_tree(trash)


def discard_dead(path: str) -> bool:
    """Remove a directory unless its supervisor lives. Return whether it existed, was dead, and is gone now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):  # it may have been replaced meanwhile
            return discard(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def discard_unnamed(state_root: str, claimant: int) -> None:
    """Remove the directories that a dead process has made in `claim` but not renamed."""
    for name in os.listdir(state_root):
        if name.startswith(f"{_NEW}{claimant}-"):
            remove_tree(os.path.join(state_root, name))


def leftovers(state_root: str) -> list[str]:
    """Return the directories of sandboxes without a supervisor, and those that were not completely made or removed."""
    paths = []
    for name in os.listdir(state_root):
        path = os.path.join(state_root, name)
        if name.startswith((*PREFIXES, _TRASH)) or (name.startswith(_NEW) and _age(path) > _UNFINISHED_S):
            paths.append(path)
    return [path for path in paths if not is_held(path)]


def _age(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0
