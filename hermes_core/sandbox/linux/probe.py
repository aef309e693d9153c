"""Finds out which namespaces a process may make here, by making them in a child. Also identifies the system.

The guest runs it too, on Python >= 3.7. It forks, so never call it in a process that has threads.
"""

from __future__ import annotations

import os

from . import mounts, namespaces

CHROOT = "this is a chroot, which can have no sandboxes with namespaces: who enters one would be outside of the chroot"
"""The reason given if our root directory is not that of our mount namespace."""

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def probe_process() -> dict[str, Any]:
    """Find out which namespaces this process may make, by making them in a child.

    Returns:
        `root`: whether its uid is 0. `namespaces`: whether it can make mount, pid and ipc namespaces directly.
        `user_namespaces`: whether it can make these inside a new user namespace. `network`: whether it can make a
        network namespace in the same way. `reason`: the kernel's messages for what failed.
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


def probe_host() -> dict[str, Any]:
    """Find out which namespaces and root directories of slots a host allows.

    Returns:
        The fields of `probe_process`. `own_roots`: why slots can't have root directories of their own; empty if they
        can.
    """
    probe = probe_process()
    if in_child(_fail_in_chroot) == CHROOT:
        probe.update(namespaces=False, user_namespaces=False, network=False, reason=CHROOT)
    possible = probe["root"] and probe["namespaces"] and probe["network"]
    return {**probe, "own_roots": _try_own_roots() if possible else "only root can give slots roots of their own"}


def kernel_version() -> tuple[int, int]:
    """Return the kernel's version, such as (6, 14); (0, 0) if it can't be read."""
    try:
        major, minor = os.uname().release.split(".")[:2]
        return int(major), int("".join(digit for digit in minor if digit.isdigit()) or 0)
    except ValueError:
        return 0, 0


def boot_id() -> str:
    """Return the kernel's random id of this boot; empty if it has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def system_identity() -> str:
    """Return an identifier that is the same for all processes that see this same /etc, and different for all others."""
    etc = os.stat("/etc")
    return "%s/%d/%d" % (boot_id(), etc.st_dev, etc.st_ino)


def _try_namespaces(user: bool, net: bool) -> str:
    """Make namespaces in a child, and mount in them as a sandbox would. Return the error; empty if all worked.

    `unshare` alone proves too little: where AppArmor restricts user namespaces, it succeeds without a right to mount.
    """

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


def _fail_in_chroot() -> None:
    """Raise OSError with `CHROOT` if this is a chroot: joining a mount namespace then leads to another root."""
    namespaces.unshare(user=os.geteuid() != 0, mount=True)
    root = os.stat("/")
    namespaces.join([("mnt", os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))])
    if not os.path.samestat(root, os.stat("/")):
        raise OSError(0, CHROOT)


def _try_own_roots() -> str:
    """Mount an overlay over a system directory that is mounted with other ids. Return the error; empty if it worked."""

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
    """Run `action` in a forked child. Return the message of its OSError; empty if it raised none."""
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
