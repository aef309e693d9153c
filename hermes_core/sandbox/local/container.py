"""Starts a container runtime, such as Apptainer, in namespaces of ours and under our supervisor. Light imports only.

The runtime runs as root of a user namespace that we make, in a pid namespace that we make too. So it needs neither
setuid nor /etc/subuid, and everything that it starts ends with its first process. An ordinary user's namespace has that
user alone. The system's root is never in it: its containers belong to `CONTAINER_UID` and a block of ids of their own.
"""
# pathlib is slow to import
# ruff: noqa: PTH101, PTH102, PTH104, PTH112, PTH118, PTH123

from __future__ import annotations

import fcntl
import marshal
import os
import select

from hermes_core.sandbox import uids
from hermes_core.sandbox.linux import mounts, namespaces
from hermes_core.sandbox.linux.processes import list_processes
from hermes_core.sandbox.local import directories, processes, supervisor
from hermes_core.sandbox.local.removal import remove_tree

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

CONTAINER_UID = uids.FIRST_UID - 1
"""The id that root of the containers has outside, if the system's root runs the driver. It also owns their images."""

READY = b"\0ready\n"
"""What a container's main process writes first."""
MAIN = "printf '\\0ready\\n'; exec \"$@\" >/dev/null 2>&1"

LOG, OVERLAY = "runtime.log", "overlay"
"""In a sandbox's directory: the runtime's messages; in its place: what the container changes of its image."""

_LOG_BYTES, _ENVIRONMENT_BYTES = 4000, 1 << 20
_OF_THE_RUNTIME = ("APPTAINER_", "SINGULARITY_", "PROMPT_COMMAND=", "PS1=", "PWD=", "OLDPWD=", "SHLVL=", "_=")
"""How the variables begin that Apptainer and SingularityCE set for their own shells."""
_PR_SET_CHILD_SUBREAPER = 36


def owner_outside() -> int:
    """Return the user id that containers' root has outside: our own, or `CONTAINER_UID` for the system's root."""
    return CONTAINER_UID if _is_root_of_the_system() else os.geteuid()


def _is_root_of_the_system() -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as rows:
        everyone = any(int(row.split()[2]) > uids.FIRST_UID for row in rows)
    return everyone and os.geteuid() == 0


def main(mode: str, descriptor: int) -> int:
    """Run the mode `container` or `build` with the request from a descriptor. Return the exit status."""
    with open(descriptor, "rb") as stream:
        request = marshal.load(stream)  # from our own parent
    if mode == "build":
        return build(request)
    supervisor.create(request, start)
    return 0


# --- a container ----------------------------------------------------------------------------------------------------


def start(request: dict[str, Any], directory: str, block: uids.UidBlock) -> tuple[int, dict[str, Any]]:
    """Start a container. Return the pid of the first process outside of it, with which it ends, and its record."""
    if not _is_root_of_the_system():
        block.close()
        block.uid_base = None
    if request["no_network"]:
        import socket  # noqa: F401 - inside, our own files may not be readable
    _furnish(directory)
    log = os.open(os.path.join(directory, LOG), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    first = _fork_inside(block.uid_base, lambda: _become_runtime(request, directory, writer, log), log)
    supervisor.handle_signals(first)
    os.close(writer)
    try:
        _await_ready(reader, log)
        inner = _find_container(first)
        record = dict(
            request["record"],
            supervisor=[os.getpid(), processes.start_time(os.getpid())],
            init=[inner, processes.start_time(inner)],
            uid_base=block.uid_base,
            environment=dict(_variables_of(inner), **request["variables"]),
        )
        import json

        supervisor.write_record(os.path.join(directory, directories.RECORD), json.dumps(record), {})
    except BaseException:
        os.kill(first, 9)
        os.waitpid(first, 0)
        raise
    finally:
        os.close(reader)
    return first, record


def _furnish(directory: str) -> None:
    """Make the directory of changes, and give all that the container writes to its owner."""
    overlay = os.path.join(directory, OVERLAY)
    for path in (overlay, os.path.join(overlay, "upper"), os.path.join(overlay, "work")):
        os.mkdir(path, 0o755)
    if (owner := owner_outside()) != os.geteuid():
        os.chmod(directory, 0o711)
        written = (directories.DATA, directories.TMP, directories.VAR_TMP, directories.DISK, directories.ROOT)
        for name in (OVERLAY, f"{OVERLAY}/upper", f"{OVERLAY}/work", *written):
            os.chown(os.path.join(directory, name), owner, owner)


def _become_runtime(request: dict[str, Any], directory: str, writer: int, log: int) -> NoReturn:
    """Become the runtime, in the namespaces that the container shares with it."""
    if request["no_network"]:
        namespaces.unshare(net=True)
        namespaces.loopback_up()
    if request["no_sysv_ipc"]:
        namespaces.no_sysv_ipc()
    if request["tmpfs_bytes"] is not None:
        disk, size = os.path.join(directory, directories.DISK), request["tmpfs_bytes"]
        options = f"mode=755,size={size},nr_inodes={size // mounts.BYTES_PER_FILE}"
        mounts.mount("tmpfs", disk, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, options)
        directories.furnish(disk)
        _furnish(disk)
    os.chdir("/")
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, writer), (2, log)):
        os.dup2(source, descriptor)
    supervisor.execute(request["command"], request["runtime_environment"])


def _await_ready(reader: int, log: int) -> None:
    """Wait for the container's main process. Raises OSError with the runtime's message if it ends before that."""
    text = b""
    while READY not in text:
        data = os.read(reader, 4096)
        if not data:
            size = os.fstat(log).st_size
            said = os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode("utf-8", "replace").strip()
            raise OSError(0, said or "the container ended before its main process began")
        text = (text + data)[-4096:]


def _find_container(first: int) -> int:
    """Return the pid, as seen from here, of the container's first process: 1 in a pid namespace below that of `first`.

    Raises:
        OSError: there is none.
    """
    depth = len(_pids_of(first))
    table = list_processes()
    members, generation = {first}, {first}
    while generation:
        generation = {pid for pid, process in table.items() if process.parent in generation and pid not in members}
        members |= generation
    for pid in sorted(members):
        numbers = _pids_of(pid)
        if len(numbers) > depth and numbers[-1] == "1":
            return pid
    raise OSError(0, "the container's first process is not found in /proc")


def _pids_of(pid: int) -> list[str]:
    """Return the ids of a process in its pid namespaces, from the one of /proc inwards; none if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            return next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    except OSError:
        return []


def _variables_of(pid: int) -> dict[str, str]:
    """Return the variables that a container's programs have: those of its image, and those that the runtime adds."""
    with open(f"/proc/{pid}/environ", "rb") as stream:
        words = stream.read(_ENVIRONMENT_BYTES).decode("utf-8", "surrogateescape").split("\0")
    pairs = (word.partition("=") for word in words if "=" in word and not word.startswith(_OF_THE_RUNTIME))
    return {name: value for name, _, value in pairs}


# --- namespaces -----------------------------------------------------------------------------------------------------


def _fork_inside(first_uid: int | None, become: Callable[[], NoReturn], log: int = 2) -> int:
    """Fork a child of ours that calls `become` as root of a new user namespace, and is process 1 of a new pid
    namespace. Return its pid. When we die, the kernel kills it, and with it all others there.

    Args:
        first_uid: the first id of a block that the user namespace has besides its root; None for no block.
        log: the descriptor that the child writes its errors to.
    """
    namespaces.check(namespaces.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")
    told, tell = os.pipe()
    go, let_go = os.pipe()
    maker = os.fork()  # we stay outside, and are root there
    if maker == 0:
        try:
            os.close(let_go)
            _enter_user_namespace(first_uid)
            namespaces.unshare(pid=True)
            child = os.fork()
            if child == 0:
                os.close(told)
                _be_first(go, tell, become, log)
            os.write(tell, b"%d" % child)
        except BaseException as error:
            os.write(tell, str(error).encode("utf-8", "replace")[:_LOG_BYTES])
        finally:
            os._exit(0)
    os.close(go)
    os.close(tell)
    os.waitpid(maker, 0)  # now its child is ours
    said = os.read(told, _LOG_BYTES)
    os.close(told)
    if not said.isdigit():
        os.close(let_go)
        raise OSError(0, said.decode("utf-8", "replace") or "its namespaces could not be made")
    os.write(let_go, b"x")  # it stays open, as a sign that we live
    return int(said)


def _enter_user_namespace(first_uid: int | None) -> None:
    if not _is_root_of_the_system():
        namespaces.unshare(user=True)
        return
    block = "" if first_uid is None else f"\n{first_uid} {first_uid} {uids.BLOCK}"
    namespaces.join([("user", namespaces.user_namespace(f"0 {CONTAINER_UID} 1{block}"))])
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _be_first(go: int, tell: int, become: Callable[[], NoReturn], log: int) -> NoReturn:
    status = 1
    try:
        os.close(tell)
        ready = os.read(go, 1)
        namespaces.death_signal(9)
        if ready != b"x" or select.select([go], [], [], 0)[0]:  # its end: our parent died before the death signal
            os._exit(1)
        os.setsid()
        namespaces.unshare(mount=True, ipc=True)
        mounts.make_private()
        mounts.mount("proc", "/proc", "proc", mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)
        child = os.fork()  # we don't become the runtime, which would give up the death signal
        if child == 0:
            become()
        supervisor.silence()  # our copies of the streams would hide their ends
        status = _wait_for(child)
    except BaseException as error:
        os.write(log, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(status)


def _wait_for(child: int) -> int:
    """Reap children, and orphans, until this child has ended. Return its exit status, 128 + n for signal n."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


# --- building images -------------------------------------------------------------------------------------------------


def build(request: dict[str, Any]) -> int:
    """Make an image by a command of the runtime, as root of the containers' user namespace. Return the exit status.

    The request has the `command`, which makes the directory `new`, its `environment`, the `directory` to start in, and
    `scratch`, a directory for `new` and its other files. If all goes well, `new` is renamed to `target`. Others who
    make the same image wait for the file `lock`. On TERM, and when the driver dies, nothing is left.
    """
    namespaces.death_signal(15)
    descriptor = os.open(request["lock"], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.path.isdir(request["target"]):  # another driver has made it meanwhile
        return 0
    remove_tree(request["scratch"])  # of a builder that was killed
    try:
        os.mkdir(request["scratch"], 0o700)
        os.chown(request["scratch"], owner_outside(), -1)
        first = _fork_inside(None, lambda: _become_builder(request))
        supervisor.handle_signals(first)
        status = _wait_for(first)
        if status == 0:
            os.rename(request["new"], request["target"])
        return status
    finally:
        remove_tree(request["scratch"])


def _become_builder(request: dict[str, Any]) -> NoReturn:
    os.chdir(request["directory"])
    supervisor.execute(request["command"], request["environment"])
