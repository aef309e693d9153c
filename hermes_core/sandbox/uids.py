"""Reserves blocks of user ids. Each block is for one of all sandboxes on this host, of any driver. Light imports only.

The kernel counts processes per uid and host, so two sandboxes with the same uid would share a limit. A block is
reserved by a lock on one byte of a file. The kernel releases it when the last process that inherited the descriptor
has ended.
"""
# pathlib is slow to import
# ruff: noqa: PTH123

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib

BLOCK = 512
"""The number of ids of a block."""

FIRST_UID, BLOCKS = 2_000_000_000, 1 << 16
"""The first id and the number of blocks on an ordinary host: above the ids of accounts and containers, below 2**31."""

FIRST_OWN_UID = 1_900_000_000
"""The first id of the blocks of `uid_base_in_own_kernel`, below those of `reserve`."""

_LOWEST_UID = 20_000
_LOCK_FILES = ("/run/hermes-rl-uids", "/tmp/hermes-rl-uids")  # fixed: all drivers must use the same, whatever TMPDIR is
_TRY_NEXT = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS)


class UidBlock:
    """A block of user ids, reserved until this object is closed and all processes with its `descriptors` have ended.

    ```python
    with reserve() as block:
        sandbox.uid_base = block.uid_base
        await asyncio.create_subprocess_exec(*main_process, pass_fds=block.descriptors)
    ```
    """

    def __init__(self, uid_base: int | None = None, descriptors: tuple[int, ...] = ()) -> None:
        self.uid_base = uid_base
        """The first id of the block; None if it is empty."""
        self.descriptors = descriptors
        """The descriptors that hold the lock. Pass them to the sandbox's first process as `pass_fds`."""

    def close(self) -> None:
        """Close our descriptors. The block stays reserved until all processes that inherited them have ended.
        Idempotent."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> UidBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(lock_files: tuple[str, ...] = _LOCK_FILES) -> UidBlock:
    """Reserve a block. The returned block is empty if this process's id map has no room for a block.

    Call this in the event loop, because it takes microseconds and never waits. A thread would go on if its caller is
    cancelled, and nobody would close the block.

    Raises:
        ProvisionError: all blocks are taken, or the lock file can't be used.
    """
    first, count = choose_range(_id_map("uid_map"), _id_map("gid_map"))
    if count == 0:
        return UidBlock()
    descriptor = _open_lock_file(lock_files)
    try:
        start = int.from_bytes(os.urandom(4), "big")  # random, so that a block that was just released is not reused
        for offset in range(count):
            block = (start + offset) % count
            if _lock(descriptor, block):
                return UidBlock(first + block * BLOCK, (descriptor,))
        raise _refusal(f"all {count} blocks of user ids are taken", "end some sandboxes")
    except BaseException:
        os.close(descriptor)
        raise


def choose_range(uids: list[tuple[int, int]], gids: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the first id and the number of blocks that fit into both maps; `(0, 0)` if none fits.

    Args:
        uids, gids: the rows of the id maps, as (first id inside, number of ids).
    """
    ranges = []
    for uid, uid_length in uids:
        for gid, gid_length in gids:
            low, high = max(uid, gid, _LOWEST_UID), min(uid + uid_length, gid + gid_length)
            ranges.append((low, high))
    if any(low <= FIRST_UID and high >= FIRST_UID + BLOCK * BLOCKS for low, high in ranges):
        return FIRST_UID, BLOCKS
    length, low = max(((high - low, low) for low, high in ranges), default=(0, 0))
    return (low, min(length // BLOCK, BLOCKS)) if length >= BLOCK else (0, 0)


def _id_map(name: str) -> list[tuple[int, int]]:
    with open(f"/proc/self/{name}", encoding="ascii") as lines:
        rows = [line.split() for line in lines]
    return [(int(inside), int(length)) for inside, _, length in rows]


def _open_lock_file(paths: tuple[str, ...]) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    failure: OSError | None = None
    for path in paths:
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            failure = error
            if error.errno in _TRY_NEXT:
                continue
            break
        if os.fstat(descriptor).st_uid != os.geteuid():
            os.close(descriptor)
            raise _refusal(f"{path} belongs to someone else", "remove it")
        return descriptor
    raise _refusal(
        f"no user ids can be reserved: {failure}", f"let the driver write to {' or '.join(paths)}"
    ) from failure


def uid_base_in_own_kernel(creation_id: str, ids: int = 1 << 32) -> int | None:
    """Return the first id of the block of a sandbox that has a kernel of its own, such as a micro-VM, or a range of a
    kernel's ids of its own.

    Such a sandbox may take any block. Its creation id chooses one, so that emulators of a provider, whose sandboxes
    share a host, can't confuse the slots' processes of two sandboxes.

    Args:
        ids: the number of user ids that the sandbox has, from 0 on: 65,536 in many containers with an id map.

    Returns:
        None if there is no room for a block.
    """
    first = FIRST_OWN_UID if ids >= FIRST_OWN_UID + BLOCKS * BLOCK else _LOWEST_UID
    blocks = min(BLOCKS, (ids - first) // BLOCK)
    return first + zlib.crc32(creation_id.encode()) % blocks * BLOCK if blocks > 0 else None


def _refusal(message: str, hint: str) -> Exception:
    from hermes_core.errors import ProvisionError  # slow to import for a supervisor

    return ProvisionError(message, hint=hint)


def _lock(descriptor: int, byte: int) -> bool:
    # A lock of the open file description, which children inherit: it is held until the last of them has ended.
    request = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise _refusal(f"no user ids can be reserved: {error}", "see what limits locks on this host") from error
    return True
