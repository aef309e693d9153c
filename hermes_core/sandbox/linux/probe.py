"""What this host is and allows: which namespaces a process may make here, found by making them in a child.

Runs in the guest too: Python >= 3.7, and in no process that has threads.
"""

from __future__ import annotations

import os

from . import mounts, namespaces

CHROOT = "this is a chroot, which can have no sandboxes with namespaces: who enters one would be outside of the chroot"
"""The reason in a root that is not the one of its mount namespace."""

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def what_works() -> dict[str, Any]:
    """Return what this process may do, found by trying it in a child.

    `root`: it is uid 0. `namespaces`: it can make mount, pid and ipc namespaces as it is. `user_namespaces`: the same
    by a new user namespace. `network`: a network namespace with them. `reason`: why not, in the kernel's words.
    """
    direct = _try_namespaces(user=False, net=False)
    by_user = _try_namespaces(user=True, net=False)
    works = not direct or not by_user
    network = _try_namespaces(user=bool(direct), net=True) if works else "no namespaces"
    reasons = [] if works else ["as it is: " + direct, "by a user namespace: " + by_user]
    if works and network:
        reasons.append("network namespace: " + network)
    return {
        "root": os.geteuid() == 0,
        "namespaces": not direct,
        "user_namespaces": not by_user,
        "network": not network,
        "reason": "; ".join(reasons),
    }


def what_a_host_allows() -> dict[str, Any]:
    """Return the same of a host, and `own_roots`: why slots can't have roots of their own; empty if they can."""
    found = what_works()
    if in_child(_find_chroot) == CHROOT:
        found.update(namespaces=False, user_namespaces=False, network=False, reason=CHROOT)
    possible = found["root"] and found["namespaces"] and found["network"]
    return {**found, "own_roots": _try_own_roots() if possible else "only root can give slots roots of their own"}


def kernel_version() -> tuple[int, int]:
    """Return the kernel's version, such as (6, 14); (0, 0) if it can't be read."""
    try:
        major, minor = os.uname().release.split(".")[:2]
        return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)
    except ValueError:
        return 0, 0


def boot_id() -> str:
    """Return the kernel's name for the time since its last start; empty where it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def system_identity() -> str:
    """Return which system this process sees: the same to every process that has this very /etc, and to no other."""
    etc = os.stat("/etc")
    return "%s/%d/%d" % (boot_id(), etc.st_dev, etc.st_ino)


def _try_namespaces(user: bool, net: bool) -> str:
    """Make namespaces and mount in them, as a sandbox would; "" or what went wrong. A bare unshare proves too little:
    where AppArmor restricts user namespaces, it succeeds and gives no right to mount."""

    def first() -> None:
        namespaces.unshare(user=user, mount=True, pid=True, ipc=True, net=net)
        failure = in_child(second)
        if failure:
            raise OSError(0, failure)

    def second() -> None:
        mounts.make_private()
        if net:
            namespaces.loopback_up()
        mounts.mount("proc", "/proc", "proc", mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)
        mounts.mount("tmpfs", "/proc", "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)

    return in_child(first)


def _find_chroot() -> None:
    """Fail with `CHROOT` where whoever joins a mount namespace has another root than its processes, as in a chroot."""
    namespaces.unshare(user=os.geteuid() != 0, mount=True)
    root = os.stat("/")
    namespaces.join([("mnt", os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))])
    if not os.path.samestat(root, os.stat("/")):
        raise OSError(0, CHROOT)


def _try_own_roots() -> str:
    """Lay an overlay over a directory of the system that is mounted with other ids; "" or what went wrong."""

    def attempt() -> None:
        namespaces.unshare(mount=True)
        mounts.make_private()
        others = namespaces.user_namespace("0 %d 65536" % (1 << 31))
        mounts.mount("tmpfs", "/tmp", "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV)
        for name in ("lower", "upper", "work", "root"):
            os.mkdir("/tmp/" + name)
        mounts.mount_with_ids("/usr", "/tmp/lower", others)
        options = "lowerdir=/tmp/lower,upperdir=/tmp/upper,workdir=/tmp/work," + mounts.OVERLAY_OPTIONS
        mounts.mount("overlay", "/tmp/root", "overlay", mounts.MS_NODEV, options)

    return in_child(attempt)


def in_child(action: Callable[[], None]) -> str:
    """Run `action` in a forked child; "" or the text of its `OSError`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except OSError as error:
            os.write(writer, (error.strerror or str(error)).encode("utf-8", "replace")[:4000])
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as stream:
        text = stream.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    return "" if status == 0 else text or "the attempt ended with wait status %d" % status
