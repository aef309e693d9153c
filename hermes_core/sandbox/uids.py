"""Blocks of user ids that only one sandbox on this host uses, whichever driver owns it. Light imports only.

Process limits are counted per uid and host, so the same uid in two sandboxes would make them share a limit. A block is
held by a lock on one byte of a file, which the kernel releases when the last process that has the file open is gone.
"""
# pathlib is slow to import
# ruff: noqa: PTH123

from __future__ import annotations

import errno
import fcntl
import os
import struct

BLOCK = 512
"""How many ids a block has."""

FIRST_UID, BLOCKS = 2_000_000_000, 1 << 16
"""Where the blocks begin on an ordinary host: above the ids of accounts and containers, below 2**31."""

_LOWEST_UID = 20_000
_LOCK_FILES = ("/run/hermes-rl-uids", "/tmp/hermes-rl-uids")  # fixed: all drivers must use the same, whatever TMPDIR is


class UidError(OSError):
    """No block of ids is available."""


def reserve(lock_files: tuple[str, ...] = _LOCK_FILES) -> tuple[int, int] | None:
    """Reserve a block. Return `(its first id, the descriptor that holds it)`; None if our id map has no room for one.

    The descriptor is close-on-exec. Make it inheritable for a child that also holds the block.

    Raises:
        UidError: every block is taken, or the lock file can't be trusted.
    """
    first, count = choose_range(_id_map("uid_map"), _id_map("gid_map"))
    if count == 0:
        return None
    descriptor = _open_lock_file(lock_files)
    start = int.from_bytes(os.urandom(4), "big")  # so that a block that was just in use is not taken next
    for offset in range(count):
        block = (start + offset) % count
        if _lock(descriptor, block):
            return first + block * BLOCK, descriptor
    os.close(descriptor)
    raise UidError(errno.EAGAIN, f"all {count} blocks of user ids are taken")


def choose_range(uids: list[tuple[int, int]], gids: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the first id and the number of blocks within both maps, each `(first inside, length)`.

    They are `(0, 0)` if none fits.
    """
    ranges = []
    for uid, uid_length in uids:
        for gid, gid_length in gids:
            low, high = max(uid, gid, _LOWEST_UID), min(uid + uid_length, gid + gid_length)
            ranges.append((low, high))
    wanted = (FIRST_UID, FIRST_UID + BLOCK * BLOCKS)
    if any(low <= wanted[0] and wanted[1] <= high for low, high in ranges):
        return FIRST_UID, BLOCKS
    length, low = max(((high - low, low) for low, high in ranges), default=(0, 0))
    return (low, min(length // BLOCK, BLOCKS)) if length >= BLOCK else (0, 0)


def _id_map(name: str) -> list[tuple[int, int]]:
    with open(f"/proc/self/{name}", encoding="ascii") as lines:
        rows = [line.split() for line in lines]
    return [(int(inside), int(length)) for inside, _, length in rows]


def _open_lock_file(paths: tuple[str, ...]) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for path in paths:
        try:
            descriptor = os.open(path, flags, 0o600)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.EROFS:
                continue
            raise
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise UidError(errno.EPERM, f"{path} belongs to someone else; remove it")
        return descriptor
    raise UidError(errno.ENOENT, f"none of {', '.join(paths)} can be written")


def _lock(descriptor: int, byte: int) -> bool:
    # A lock of the open file description: children inherit it with the descriptor, and it stays when one of them ends.
    request = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
