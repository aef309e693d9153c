"""Confines a slot's parent to its user and namespaces, and proves that no process of an earlier lease is left there."""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import resource
import signal
import sys
import time

from ..linux import descriptors, landlock, mounts, namespaces, removal, syscalls
from ..linux.probe import kernel_version
from .layers import import_nothing_more
from .parent import Parent, close_all_but, encode_message
from .value import Value

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from ..linux.users import Lists
    from .layers import Layers
    from .workspace import Workspace

_SHM_BYTES = 64 << 20
_TERMINALS = 64
_UMASK = 0o022
"""The usual umask, which programs and checks expect. Private files are protected by the directories above them."""
_OPEN_FILES = 4096
"""Maximum number of descriptors of a process: the kernel's default, and far fewer than the guest has."""
_SIGNALS = 4096
"""Maximum number of pending signals and timers of a slot."""
_SHARE = 8
"""Each slot may use at most one eighth of a resource that the kernel limits per user."""
_PIDS_OF_NAMESPACE, _RESERVED_PIDS = (6, 14), 300
"""The first kernel with a `pid_max` for each pid namespace, and the kernel's own RESERVED_PIDS."""
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36
_libc = ctypes.CDLL(None)
_PROOF_TRIES, _PROOF_PAUSE_S = 4, 0.001


class Plan(Value):
    """How a slot's parent is confined."""

    workspace: Workspace
    mechanism: str
    """`shared` (no isolation), `user`, `namespace`, or `root` (root in a root directory of its own)."""
    uid: int | None
    """The user that the parent becomes. None: the parent stays the guest's user."""
    counted_as: int | None
    """For `root`: the user, outside of the slot's user namespace, whose limits hold for the slot's processes."""
    layers: Layers | None
    """For `root`: the layers of the slot's root directory."""
    lists: Lists | None
    """For `namespace`: the contents of /etc/passwd and /etc/group that the slot sees. None: those of the system."""
    user_namespace: bool
    """Whether the parent gets a user namespace, in which `uid` stands for the guest's user."""
    net_namespace: bool
    """For `namespace` and `root`: whether the parent gets a network namespace, which has only a loopback."""
    max_processes: int
    """Maximum number of processes of the slot's user. 0 is no limit."""
    process_memory: int
    """Maximum number of bytes that each process may allocate. 0 is no limit."""
    max_files: int
    """The soft limit on the descriptors of each command."""
    visible: Sequence[str]
    """For `namespace`: the paths that the slot can read besides the system."""
    scratch: str
    """For `namespace` and `root`: the directory that the slot's root directory is mounted on."""
    wipe: bool
    """Whether the workspace is emptied first, and the user's files in `swept` are removed."""
    swept: Sequence[str]
    """The directories outside the workspace where the user may have files."""

    @property
    def has_namespaces(self) -> bool:
        """Return whether the parent gets namespaces. Then, the process that we fork makes them and forks the parent."""
        return self.mechanism in ("namespace", "root")


def become_subreaper() -> None:
    """Make orphans of our descendants our children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def parent_main(sock: socket.socket, plan: Plan) -> NoReturn:
    """Run a slot's parent in the forked child: confine it by `plan`, report that, then serve. Never returns."""
    try:
        _detach(sock)
        if plan.mechanism == "user" and not _prove_alone(plan.uid or 0):
            _tell(sock, {"dirty": True})
            os._exit(0)
        if plan.wipe:
            plan.workspace.discard()
        plan.workspace.make()
        if plan.wipe and plan.uid is not None and plan.swept:
            removal.sweep(plan.swept, (plan.uid,))
        if plan.layers is not None and plan.counted_as is not None:
            _enter_root(sock, plan, plan.layers, plan.counted_as)
        else:
            _enter_own_user(sock, plan)
        os.umask(_UMASK)
        os.chdir(plan.workspace.path)
        parent = Parent(sock, owns_all=plan.mechanism != "shared")
        parent.ready()
        parent.serve()
    except BaseException as error:
        try:
            text = "%s: %s" % (type(error).__name__, error)
            _tell(sock, {"refused": text, "errno": getattr(error, "errno", None)})
        finally:
            os._exit(1)


def _enter_own_user(sock: socket.socket, plan: Plan) -> None:
    if plan.mechanism == "namespace":
        _enter_namespaces(sock, plan)
    else:
        become_subreaper()
    # Only now, inside the user namespace, which inherits its creator's limits, and counts all processes of that user.
    _limit(plan)
    if plan.uid is not None:
        namespaces.become(plan.uid, plan.uid)
        # The slot's processes must not inspect us: with our socket they could forge results.
        _prctl(_SET_DUMPABLE, 0)
        if plan.mechanism == "user":  # with namespaces, /proc is read-only
            landlock.forbid_writes_to_proc()
        syscalls.restrict()


def _tell(sock: socket.socket, message: dict[str, Any]) -> None:
    descriptors.send(sock, encode_message(message))


def _detach(sock: socket.socket) -> None:
    """Drop the guest's descriptors and signal handlers, but stay in its session.

    The kernel schedules each session as one group (`man 7 sched`, autogroup). On a busy machine, a process that is
    woken by another group waits milliseconds for a processor, and one woken by its own group runs at once. Each
    command goes from the guest to the slot's parent and back.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_all_but({0, 1, 2, sock.fileno()})
    try:
        # If memory is short, the kernel shall kill the slots' commands before the guest.
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)
    except OSError:
        pass


def _limit(plan: Plan) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The kernel counts descriptors in flight over unix sockets per user, and compares with the sender's limit. If slots
    # share the guest's user, their limit must be lower, so that the guest can still send when slots no longer can.
    files = _lower_limit(resource.RLIMIT_NOFILE, min(_OPEN_FILES, max(1, _hard_limit(resource.RLIMIT_NOFILE) // 2)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(plan.max_files, files), files))
    _lower_limit(resource.RLIMIT_SIGPENDING, _SIGNALS)
    if plan.user_namespace:
        _lower_limit(resource.RLIMIT_MSGQUEUE, _hard_limit(resource.RLIMIT_MSGQUEUE) // _SHARE)
    if plan.max_processes:
        _lower_limit(resource.RLIMIT_NPROC, plan.max_processes)
    if plan.process_memory:
        # Not RLIMIT_AS, because Go, Java and node reserve far more address space than they use.
        _lower_limit(resource.RLIMIT_DATA, plan.process_memory)


def _hard_limit(limit: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _lower_limit(limit: int, most: int) -> int:
    """Lower the soft and hard limit to `most`, and return the new value."""
    value = min(most, _hard_limit(limit))
    resource.setrlimit(limit, (value, value))
    return value


def _prove_alone(uid: int) -> bool:
    """Return whether no process on the host has this user id, by the kernel's own count. We stay root.

    With a limit of two processes, our second thread can start only if the user has no other process. A scan of /proc
    can miss a process that forks all the time; this can't. Zombies count too, so we try several times.
    """
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (2, limits[1]))
    os.setresuid(uid, uid, 0)
    try:
        for _ in range(_PROOF_TRIES):
            if _can_start_a_thread():
                return True
            time.sleep(_PROOF_PAUSE_S)
        return False
    finally:
        os.setresuid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, limits)


def _can_start_a_thread() -> bool:
    lock = _thread.allocate_lock()
    lock.acquire()
    try:
        _thread.start_new_thread(lock.release, ())
    except RuntimeError:
        return False
    lock.acquire()  # until the thread has released it
    return True


def _enter_namespaces(sock: socket.socket, plan: Plan) -> None:
    namespaces.unshare(
        user=plan.user_namespace,
        mount=True,
        pid=True,
        ipc=True,
        net=plan.net_namespace,
        uts=True,
        inside_uid=plan.uid or 0,
        inside_gid=plan.uid or 0,
    )
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        _tell(sock, {"init": pid})
        os.write(writer, b"x")
        os._exit(0)
    os.close(writer)
    # The guest must know our pid before our first message, because it opens the pipes of commands by it.
    if not os.read(reader, 1):
        os._exit(0)
    os.close(reader)
    if plan.net_namespace:
        namespaces.loopback_up()
    binds, symlinks = mounts.system_binds(plan.visible)
    if plan.lists is not None:
        try:
            binds += plan.workspace.show_users(plan.lists)
        except OSError:  # on a full disk, the slot does without names
            pass
    mounts.build_root(
        plan.scratch,
        binds=binds + plan.workspace.binds(),
        tmpfs=[("/dev/shm", _SHM_BYTES, 0o1777)],
        symlinks=symlinks,
        terminals=_TERMINALS,
    )
    if plan.user_namespace:
        _limit_user_namespace()
    mounts.close_proc()


def _enter_root(sock: socket.socket, plan: Plan, layers: Layers, counted_as: int) -> None:
    """Become root in a root directory of its own. The user namespace is entered last, so it owns none of the mounts."""
    namespaces.unshare(pid=True)
    ready, in_namespace = os.pipe2(os.O_CLOEXEC)
    mapped, has_mapped = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(in_namespace)
        _tell(sock, {"init": pid})
        if os.read(ready, 1):
            namespaces.write_id_maps(pid, layers.ids.lines)
            os.write(has_mapped, b"x")
        os._exit(0)
    os.close(has_mapped)
    namespaces.unshare(mount=True)
    mounts.build_root(
        plan.scratch,
        base=lambda root: layers.mount(root, plan.workspace.changes),
        binds=layers.binds + plan.workspace.binds(own_root=True),
        tmpfs=[("/dev/shm", _SHM_BYTES, 0o1777)],
        terminals=_TERMINALS,
    )
    _limit(plan)
    if layers.ids.root == 0:
        _limit_processes(plan.max_processes)
    mounts.mask_proc()
    mounts.close_proc()

    def be_mapped() -> None:
        os.write(in_namespace, b"x")
        if not os.read(mapped, 1):
            raise OSError(errno.EPERM, "the ids of the user namespace can't be written")

    namespaces.own_user_namespace(counted_as, be_mapped, net=plan.net_namespace)
    if plan.net_namespace:
        namespaces.loopback_up()
    syscalls.restrict()
    namespaces.become_root()
    import_nothing_more()
    _prctl(_SET_DUMPABLE, 0)
    for descriptor in (ready, in_namespace, mapped):
        os.close(descriptor)


def _limit_processes(most: int) -> None:
    """Limit the processes of our pid namespace, because the kernel sets no limit on the system's root.

    Before Linux 6.14, `pid_max` is a setting of the whole machine. Then, only a limit of the sandbox itself holds.
    """
    if most and kernel_version() >= _PIDS_OF_NAMESPACE:
        _write_setting("kernel/pid_max", most + _RESERVED_PIDS)


def _limit_user_namespace() -> None:
    """Limit our user namespace to its share of the resources that the kernel counts per user. Forbid new namespaces.

    With a cgroup namespace, a slot could mount its own cgroup. If the user owns that, as in a desktop session, a write
    to `cgroup.kill` would kill the driver too.
    """
    for name in os.listdir("/proc/sys/user"):
        if name.endswith("_namespaces"):
            _write_setting("user/" + name, 0)
    for name, whole in (("max_inotify_instances", "max_user_instances"), ("max_inotify_watches", "max_user_watches")):
        try:
            with open("/proc/sys/fs/inotify/" + whole) as file:
                share = int(file.read()) // _SHARE
        except FileNotFoundError:  # a kernel without inotify
            continue
        _write_setting("user/" + name, share)


def _write_setting(name: str, value: int) -> None:
    with open("/proc/sys/" + name, "w") as file:
        file.write(str(value))


def run_detached(body: Callable[[], object], keep: int, niceness: int = 0) -> int:
    """Fork a child that runs `body` and exits; it has only the descriptor `keep` and our log. Return its pid.

    Raises:
        OSError: the fork failed.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_but({0, 1, 2, keep})
        os.nice(niceness)
        body()
    except BaseException as error:
        sys.stderr.write("hermes guest: %s: %s\n" % (type(error).__name__, error))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
