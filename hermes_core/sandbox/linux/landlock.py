"""Landlock: forbids a slot to write to /proc, where file modes do not protect a process from its own user."""

from __future__ import annotations

import ctypes
import os
import struct

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # one number on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _MOVE = 1 << 1, 1 << 13
_ENOUGH = 2
"""The first version in which a restricted process may still move files between directories."""
_libc = ctypes.CDLL(None, use_errno=True)


def forbid_writes_to_proc() -> bool:
    """Permanently forbid this process and its descendants to write to files of /proc.

    The guest raises the `oom_score_adj` of slots. If the guest lacks CAP_SYS_RESOURCE, a slot could undo this through
    /proc, and so be the last to be killed when memory is short. `no_new_privs` must be set on this process.

    Returns:
        Whether this kernel has Landlock, in a version with which files can still be moved.

    Raises:
        OSError: the kernel has Landlock, but refused.
    """
    if _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION)) < _ENOUGH:
        return False
    handled = ctypes.c_uint64(_WRITE_FILE | _MOVE)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint(0))
    try:
        # A rule can only allow something. So we allow each entry of / except /proc.
        with os.scandir("/") as entries:
            for entry in entries:
                if entry.name != "proc" and not entry.is_symlink():
                    _allow(ruleset, entry.path, _WRITE_FILE | (_MOVE if entry.is_dir() else 0))
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint(0))
    finally:
        os.close(fd)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, "landlock: %s" % os.strerror(code))
    return result
