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
_TRY_NEXT = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS)


class UidBlock:
    """A block of user ids, held until this object is closed and every process that inherited `descriptors` has ended.

    ```python
    with reserve() as block:
        sandbox.uid_base = block.uid_base
        await asyncio.create_subprocess_exec(*main_process, pass_fds=block.descriptors)
    ```
    """

    def __init__(self, uid_base: int | None = None, descriptors: tuple[int, ...] = ()) -> None:
        self.uid_base = uid_base
        """Its first id; None if it has none."""
        self.descriptors = descriptors
        """What holds it: give it to the sandbox's first process as `pass_fds`. Others don't inherit it."""

    def close(self) -> None:
        """Leave the block to the processes that inherited it. Idempotent."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> UidBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reserve(lock_files: tuple[str, ...] = _LOCK_FILES) -> UidBlock:
    """Reserve a block. It has no ids if our own id map has no room for one.

    It takes microseconds and waits for nothing: call it in the event loop. A thread would go on if its caller is
    cancelled, and nobody would close the block.

    Raises:
        ProvisionError: every block is taken, or the lock file can't be used.
    """
    first, count = choose_range(_id_map("uid_map"), _id_map("gid_map"))
    if count == 0:
        return UidBlock()
    descriptor = _open_lock_file(lock_files)
    try:
        start = int.from_bytes(os.urandom(4), "big")  # so that a block that was just in use is not taken next
        for offset in range(count):
            block = (start + offset) % count
            if _lock(descriptor, block):
                return UidBlock(first + block * BLOCK, (descriptor,))
        raise _refusal(f"all {count} blocks of user ids are taken", "end some sandboxes")
    except BaseException:
        os.close(descriptor)
        raise


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


def _refusal(message: str, hint: str) -> Exception:
    from hermes_core.errors import ProvisionError  # a supervisor has no time to import it

    return ProvisionError(message, hint=hint)


def _lock(descriptor: int, byte: int) -> bool:
    # A lock of the open file description: children inherit it with the descriptor, and it stays when one of them ends.
    request = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise _refusal(f"no user ids can be reserved: {error}", "see what limits locks on this host") from error
    return True
