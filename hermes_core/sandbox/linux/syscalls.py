"""The seccomp filter of slots: forbids calls that neither namespaces nor user ids isolate, or that only harm others."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_CALLS = (
    "add_key",  # request_key and keyctl follow it, everywhere
    "bpf",
    "clone",
    "fanotify_init",
    "fcntl",
    "fcntl64",
    "io_setup",
    "perf_event_open",
    "setns",
    "socket",
    "socketcall",
    "socketpair",
    "syslog",
    "unshare",
    "userfaultfd",
)
_IO_URING_SETUP, _CLONE3 = 425, 435  # one number on every architecture; io_uring_enter and io_uring_register follow
_NONE = -1
_X86_32 = (0x40000003, 286, 357, 120, 338, 55, 221, 245, 336, 346, 359, 102, 360, 103, 310, 374)
_ARM_32 = (0x40000028, 309, 386, 120, 367, 55, 221, 243, 364, 375, 281, _NONE, 288, 103, 337, 388)
_GENERIC = (217, 280, 220, 262, 25, _NONE, 0, 241, 268, 198, _NONE, 199, 116, 97, 282)
_MACHINES = {
    # machine: (number of seccomp(2), one row for each architecture that its kernel runs). A row is the architecture's
    # AUDIT_ARCH value, then the numbers of `_CALLS`.
    "x86_64": (
        317,
        ((0xC000003E, 248, 321, 56, 300, 72, _NONE, 206, 298, 308, 41, _NONE, 53, 103, 272, 323), _X86_32),
    ),
    "i686": (354, (_X86_32,)),
    "aarch64": (277, ((0xC00000B7, *_GENERIC), _ARM_32)),
    "armv7l": (383, (_ARM_32,)),
    "riscv64": (277, ((0xC00000F3, *_GENERIC),)),
    "loongarch64": (277, ((0xC0000102, *_GENERIC),)),
    "ppc64le": (358, ((0xC0000015, 269, 361, 120, 323, 55, _NONE, 227, 319, 350, 326, _NONE, 333, 103, 282, 364),)),
    "s390x": (348, ((0x80000016, 278, 351, 120, 332, 55, _NONE, 243, 331, 339, 359, _NONE, 360, 103, 303, 355),)),
}
_X32_BIT = 0x40000000
_NAMESPACES = 0x7E020000
"""The clone flags of all namespaces except time: clone(2) uses that bit for the exit signal."""
_TIME_NAMESPACE = 0x80
_SET_LEASE = 1024
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER, _SET_MODE_FILTER, _SPECULATION_AS_BEFORE = 22, 2, 1, 4


def restrict() -> None:
    """Permanently forbid this process and its descendants the system calls that slots don't need and could abuse.

    - Kernel keyrings: a key belongs to a user or a login, whatever namespaces its reader is in.
    - Sockets other than unix, inet, inet6 and routing netlink. Vsock reaches the hypervisor from any network namespace.
      A packet socket takes milliseconds to close, so thousands of them would delay the death of a slot.
    - io_uring, which makes sockets past this filter.
    - New namespaces: in its own user namespace a slot would have every capability, and so reach more of the kernel.
    - File leases: each process that opens a leased file waits up to 45 s.
    - Little-used calls whose resources are limited per user or per host: asynchronous I/O, fanotify, perf, bpf,
      userfaultfd. And the kernel's log.

    Containers forbid most of these in the same way. On a machine that is not in `_MACHINES` nothing is forbidden. The
    process must have `no_new_privs` set, or CAP_SYS_ADMIN in its user namespace.

    Raises:
        OSError: the kernel refuses the filter.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return
    number, architectures = _MACHINES[machine]
    steps = [step for audit, *calls in architectures for step in _block(machine, audit, dict(zip(_CALLS, calls)))]
    steps.append(_refuse(errno.ENOSYS))
    code = ctypes.create_string_buffer(b"".join(steps), 8 * len(steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    # Without this flag, kernels before 5.16 turn on slow mitigations of speculative execution for filtered processes.
    if libc.syscall(ctypes.c_long(number), _SET_MODE_FILTER, _SPECULATION_AS_BEFORE, program) == 0:
        return
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), program, ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refuses a filter of system calls")


def _block(machine: str, audit: int, calls: dict[str, int]) -> list[bytes]:
    """Return the instructions for one architecture. On another, they jump to their end."""
    flags = 1 if machine == "s390x" else 0  # s390x swaps the first two arguments of clone(2)
    missing = [_refuse(errno.ENOSYS)]  # as on a kernel without the call: programs have a fallback for that
    rules = [
        (calls["add_key"], 3, missing),
        (_IO_URING_SETUP, 3, missing),
        (_CLONE3, 1, missing),  # its flags are in memory, which a filter can't read. C libraries fall back to clone
        (calls["socketcall"], 1, missing),  # its arguments are in memory too. Newer C libraries don't call it
        (calls["io_setup"], 1, missing),
        *((calls[name], 1, [_refuse(errno.EPERM)]) for name in _PRIVILEGED),
        (calls["clone"], 1, [_load(flags), _step(_ANY_BIT, _NAMESPACES, 0, 1), _refuse(errno.EPERM)]),
        (
            calls["unshare"],
            1,
            [_load(0), _step(_ANY_BIT, _NAMESPACES | _TIME_NAMESPACE, 0, 1), _refuse(errno.EPERM)],
        ),
        *((calls[name], 1, _NO_LEASE) for name in ("fcntl", "fcntl64")),
        *((calls[name], 1, _FAMILIES) for name in ("socket", "socketpair")),
    ]
    steps = [_step(_LOAD, _NUMBER)]
    if machine == "x86_64":  # the x32 ABI, a third set of numbers, which no program uses
        steps += [_step(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    for first, count, body in rules:
        if first != _NONE:
            steps += _rule(first, count, body)
    steps.append(_step(_RETURN, _ALLOW))
    return [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, audit, 0, len(steps)), *steps]


def _rule(first: int, count: int, body: list[bytes]) -> list[bytes]:
    """Apply `body` to `count` system calls from `first` on. If `body` refuses nothing, the call is allowed."""
    body = [*body, _step(_RETURN, _ALLOW)]
    if count == 1:
        return [_step(_EQUAL, first, 0, len(body)), *body]
    return [_step(_AT_LEAST, first + count, len(body) + 1, 0), _step(_AT_LEAST, first, 0, len(body)), *body]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _load(argument: int) -> bytes:
    """Load the lower 32 bits of an argument."""
    return _step(_LOAD, 16 + 8 * argument + (0 if sys.byteorder == "little" else 4))


def _refuse(error: int) -> bytes:
    return _step(_RETURN, _ERROR | error)


_PRIVILEGED = ("bpf", "fanotify_init", "perf_event_open", "setns", "syslog", "userfaultfd")
_NO_LEASE = [_load(1), _step(_EQUAL, _SET_LEASE, 0, 1), _refuse(errno.EINVAL)]
_FAMILIES = [
    _load(0),
    _step(_EQUAL, _UNIX, 7, 0),
    _step(_EQUAL, _INET, 6, 0),
    _step(_EQUAL, _INET6, 5, 0),
    _step(_EQUAL, _NETLINK, 1, 0),
    _refuse(errno.EAFNOSUPPORT),
    _load(2),
    _step(_EQUAL, 0, 1, 0),  # NETLINK_ROUTE, with which programs list the network's addresses
    _refuse(errno.EPROTONOSUPPORT),
]
