"""How a slot's parent gets into its user and namespaces, and proves that nothing of an earlier lease is left there."""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import _thread

from . import files, namespaces
from .parent import Parent, close_all_but, send_message

_SLOT_UID = 1000
"""The slot's user inside a user namespace of its own."""
_SHM_BYTES = 64 << 20
_SUBREAPER = 36


def become_subreaper():
    """Orphans of our descendants become our children. False where the kernel has no such thing."""
    import ctypes

    return ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0) == 0


def parent_main(sock, plan):
    """The forked child's whole life: confine itself as `plan` says, say so, then serve. Never returns."""
    try:
        _detach(sock)
        if plan["mechanism"] == "namespace":
            _enter_namespaces(sock, plan)
        else:
            become_subreaper()
        _limit(plan)
        if plan["uid"] is not None:
            namespaces.become(plan["uid"], plan["gid"])
        os.umask(plan["umask"])
        if plan["mechanism"] == "user":
            if not _alone():
                send_message(sock, {"dirty": True})
                os._exit(0)
            for path in plan["sweep"]:
                _sweep(path, plan["uid"])
        os.chdir(plan["workspace"])
        send_message(sock, {"ready": True})
        Parent(sock, pid_one=plan["mechanism"] == "namespace").serve()
    except BaseException as error:
        try:
            send_message(sock, {"refused": "%s: %s" % (type(error).__name__, error)})
        finally:
            os._exit(1)


def _detach(sock):
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_all_but({0, 1, 2, sock.fileno()})
    os.setsid()
    try:
        # Memory pressure shall take the slots' commands before the guest.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _enter_namespaces(sock, plan):
    namespaces.unshare(
        user=plan["user_namespace"],
        mount=True,
        pid=True,
        ipc=True,
        net=plan["net_namespace"],
        uts=True,
        inside_uid=_SLOT_UID,
        inside_gid=_SLOT_UID,
    )
    pid = os.fork()
    if pid:
        send_message(sock, {"init": pid})
        os._exit(0)
    if plan["net_namespace"]:
        namespaces.loopback_up()
    binds, symlinks = namespaces.system_binds(plan["visible"])
    namespaces.build_root(
        plan["scratch"],
        binds=binds + [tuple(bind) for bind in plan["binds"]],
        tmpfs=[("/dev/shm", _SHM_BYTES, 0o1777)],
        symlinks=symlinks,
    )


def _limit(plan):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if plan["max_processes"]:
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        wanted = plan["max_processes"]
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))


def _alone():
    """Whether we are this user's only process on the host, by the kernel's own count.

    With a limit of two, a second task can start only if nobody else counts against the user: a scan of /proc can miss
    a process that forks all the time, this can't. Zombies count too.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (2, hard))
    done = _thread.allocate_lock()
    done.acquire()
    try:
        _thread.start_new_thread(done.release, ())
        done.acquire()
        return True
    except RuntimeError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def _sweep(path, uid):
    """Remove what this user owns below a world-writable directory, with this user's own rights only."""
    pending = [path]
    while pending:
        folder = pending.pop()
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            full = os.path.join(folder, name)
            try:
                info = os.lstat(full)
                if info.st_uid == uid:
                    if stat.S_ISDIR(info.st_mode):
                        files.remove_tree(full)
                    else:
                        os.unlink(full)
                elif stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_IWOTH:
                    pending.append(full)
            except FileNotFoundError:
                continue


def world_writable(skip):
    """The directories below / that any user can write to, read-only and virtual file systems and `skip` left out."""
    found = []
    pending = ["/"]
    devices = {}
    while pending:
        folder = pending.pop()
        try:
            info = os.lstat(folder)
            if not stat.S_ISDIR(info.st_mode) or folder in skip:
                continue
            if info.st_dev not in devices:
                devices[info.st_dev] = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
            if info.st_mode & stat.S_IWOTH:
                found.append(folder)
                continue
            # A read-only directory may have a writable mount below it: its immediate children are always looked at.
            children = [os.path.join(folder, name) for name in os.listdir(folder)]
        except OSError:
            continue
        if devices[info.st_dev] and folder.count("/") > 2:
            continue
        pending.extend(children)
    return found


def run_detached(body, keep):
    """Fork a child that runs `body` at low priority, with the descriptor `keep` and our log, and leaves; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_but({0, 1, 2, keep})
        os.nice(10)
        body()
    except BaseException as error:
        sys.stderr.write("hermes guest: %s: %s\n" % (type(error).__name__, error))
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
