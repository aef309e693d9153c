"""A filter on the slots' system calls, for what no namespace keeps apart: kernel keyrings, sockets to a hypervisor."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_X86_32 = (0x40000003, 286, 359, 102)
_ARM_32 = (0x40000028, 309, 281, 0)
_CALLS = {
    # By machine: the number of seccomp(2), and what the kernel runs there: the architecture as auditing names it, the
    # first of add_key, request_key and keyctl (three in a row everywhere), socket, and socketcall or 0.
    "x86_64": (317, ((0xC000003E, 248, 41, 0), _X86_32)),
    "i686": (354, (_X86_32,)),
    "aarch64": (277, ((0xC00000B7, 217, 198, 0), _ARM_32)),
    "armv7l": (383, (_ARM_32,)),
    "riscv64": (277, ((0xC00000F3, 217, 198, 0),)),
    "loongarch64": (277, ((0xC0000102, 217, 198, 0),)),
    "ppc64le": (358, ((0xC0000015, 269, 326, 0),)),
    "s390x": (348, ((0x80000016, 278, 359, 0),)),
}
_VSOCK = 40
_X32_BIT = 0x40000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16 if sys.byteorder == "little" else 20
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER, _SET_MODE_FILTER, _SPECULATION_AS_BEFORE = 22, 2, 1, 4


def restrict() -> None:
    """Take kernel keyrings and sockets of the `vsock` family from this process and all that it starts, for good.

    A key belongs to a user or a login, whatever namespaces its reader is in: a slot could take the driver's. A vsock
    leads past every network namespace to the hypervisor. Containers forbid both the same way. On a machine that is not
    in the table nothing is done.

    The process must have given up gaining privileges (`no_new_privs`).

    Raises:
        OSError: the kernel does not take the filter.
    """
    if os.uname().machine not in _CALLS:
        return
    number, architectures = _CALLS[os.uname().machine]
    steps = [step for calls in architectures for step in _block(*calls)]
    steps.append(_step(_RETURN, _ERROR | errno.ENOSYS))
    code = ctypes.create_string_buffer(b"".join(steps), 8 * len(steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    # Without that flag, kernels before 5.16 slow a filtered process down against speculation.
    if libc.syscall(ctypes.c_long(number), _SET_MODE_FILTER, _SPECULATION_AS_BEFORE, program) == 0:
        return
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), program, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


def _block(architecture: int, keys: int, socket: int, socketcall: int) -> list[bytes]:
    """The steps for one architecture; for another, on to what follows."""
    steps = [
        _step(_LOAD, _NUMBER),
        _step(_AND, ~_X32_BIT & 0xFFFFFFFF),
        _step(_AT_LEAST, keys + 3, 2, 0),
        _step(_AT_LEAST, keys, 0, 1),
        _step(_RETURN, _ERROR | errno.ENOSYS),
    ]
    if socketcall:  # its arguments are in memory, where a filter can't look; newer C libraries do without it
        steps += [_step(_EQUAL, socketcall, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    steps += [
        _step(_EQUAL, socket, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_EQUAL, _VSOCK, 0, 1),
        _step(_RETURN, _ERROR | errno.EAFNOSUPPORT),
        _step(_RETURN, _ALLOW),
    ]
    return [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 0, len(steps)), *steps]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
