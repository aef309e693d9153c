"""Starts a sandbox under a supervisor, which removes its files at its end, and enters running sandboxes. Light imports.

A supervisor runs outside of the sandbox. It is the parent of the sandbox's first process, waits for its end, and
removes the directory. With namespaces, the first process is the init of the pid namespace, so its death kills all
processes in the sandbox. If the supervisor is killed, the kernel kills the first process, and the next sweep removes
the directory.

Requests and reports are marshalled, because both ends are the same interpreter, and importing `json` would take longer
than everything else here.
"""
# pathlib is slow to import
# ruff: noqa: PTH102, PTH104, PTH118, PTH123

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` adds enums, which take a third of our time to start
import marshal
import os
import time

from hermes_core.sandbox import uids
from hermes_core.sandbox.linux import mounts, namespaces, users
from hermes_core.sandbox.linux.probe import probe_host
from hermes_core.sandbox.local import directories, processes

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Start = Callable[[dict[str, Any], str, uids.UidBlock], tuple[int, dict[str, Any]]]

KINDS = ("user", "mnt", "pid", "ipc", "net")
"""The namespaces that a sandbox may have."""

NOT_THERE, CANNOT_RUN, NOT_FOUND = 125, 126, 127
"""Exit statuses of `enter`: no such sandbox, a program that can't be run, no program with that name."""

_ATTEMPTS, _PAUSE_S, _START_S = 5, 0.01, 30.0
_SHM_BYTES = 1 << 30
_SIGHUP, _SIGINT, _SIGKILL, _SIGTERM = 1, 2, 9, 15
_IGNORED_BY_PYTHON = (13, 25)  # SIGPIPE and SIGXFSZ; programs expect their default actions


def main(mode: str, descriptor: int) -> int:
    """Run a mode of the launcher with the request from a descriptor. Return the exit status."""
    if mode == "probe":
        os.write(1, marshal.dumps(probe_host()))
        return 0
    with open(descriptor, "rb") as stream:
        request = marshal.load(stream)  # from our own parent
    if mode == "enter":
        return enter(request)
    create(request)
    return 0


# --- supervising ---------------------------------------------------------------------------------------------------


def create(request: dict[str, Any], start: Start | None = None) -> None:
    """Start a sandbox, report on standard output, and return when it has ended and its directory is removed.

    The report is `{"record": …}`, or `{"error": …}`. If a sandbox with this id runs, only report its record.

    Args:
        start: starts the first process, writes the record, and returns both. It gets the request, the sandbox's
            directory and the block of user ids. If it fails, it leaves no process. None: our own way.
    """
    os.umask(0o022)
    path = os.path.join(request["state_root"], request["sandbox_id"])
    try:
        existing = _claim(request["state_root"], request["sandbox_id"])
    except OSError as error:
        return _report({"error": f"its directory can't be made: {_error_text(error)}"})
    if existing is not None:
        return _report({"record": existing})
    try:
        block = uids.reserve() if request["reserve_uids"] else uids.UidBlock()
        init, record = (start or _start)(request, path, block)
    except Exception as error:  # an OSError or a ProvisionError, which would have to be imported to be named
        directories.discard(path)
        return _report({"error": _error_text(error)})
    _report({"record": record})
    _stay(init)
    if not request["isolated"]:
        processes.kill_marked(request["sandbox_id"])
    directories.discard(path)
    return None


def _claim(state_root: str, sandbox_id: str) -> dict[str, Any] | None:
    """Make and lock a sandbox's directory. Return the record of the sandbox if it runs already, otherwise None."""
    path = os.path.join(state_root, sandbox_id)
    for _ in range(_ATTEMPTS):
        try:
            directories.claim(state_root, sandbox_id)
            return None
        except FileExistsError:
            existing = _existing(path)
            if existing is not None:
                return existing
    raise OSError(0, f"{path} is in the way, remove it")


def _existing(path: str) -> dict[str, Any] | None:
    """Return the record of the running sandbox in this directory. If it is dead, remove it and return None."""
    deadline = time.monotonic() + _START_S
    while directories.is_held(path):
        try:
            return directories.read_record(path)
        except (OSError, ValueError):  # another supervisor is starting it
            if time.monotonic() > deadline:
                raise OSError(0, "another driver does not get this sandbox started") from None
        time.sleep(_PAUSE_S)
    if not directories.discard_dead(path):
        time.sleep(_PAUSE_S)  # another process is removing it
    return None


def _start(request: dict[str, Any], directory: str, block: uids.UidBlock) -> tuple[int, dict[str, Any]]:
    """Start the first process and write the record. Return its pid and the record."""
    if request["isolated"]:
        namespaces.unshare(user=request["user_namespace"], pid=True)
    go_reader, go_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(go_writer)
        _be_init(request, directory, block, go_reader, ready_writer)
    os.close(go_reader)
    os.close(ready_writer)
    os.write(go_writer, b"g")
    os.close(go_writer)
    handle_signals(init)
    with open(ready_reader, "rb") as stream:
        error = stream.read()
    if error:
        os.waitpid(init, 0)
        raise OSError(0, error.decode("utf-8", "replace"))
    facts: dict[str, Any] = {
        "supervisor": [os.getpid(), processes.start_time(os.getpid())],
        "init": [init, processes.start_time(init)],
    }
    if block.uid_base is not None:
        facts["uid_base"] = block.uid_base
    write_record(os.path.join(directory, directories.RECORD), request["record_json"], facts)
    return init, {**request["record"], **facts}


def handle_signals(init: int) -> None:
    """From now on, end the sandbox on TERM, and ignore HUP and INT."""
    _signal.signal(_SIGTERM, lambda *_: os.kill(init, _SIGKILL))
    for number in (_SIGHUP, _SIGINT):
        _signal.signal(number, _signal.SIG_IGN)


def _stay(init: int) -> None:
    """Wait for the end of the first process."""
    os.chdir("/")
    silence()
    # Don't reap the process before TERM is ignored: our handler could kill another process that has got its pid.
    os.waitid(os.P_PID, init, os.WEXITED | os.WNOWAIT)
    _signal.signal(_SIGTERM, _signal.SIG_IGN)
    os.waitpid(init, 0)


def write_record(path: str, text: str, facts: dict[str, Any]) -> None:
    """Write a record: the JSON object `text`, with fields added whose values are numbers and lists of numbers."""
    more = "".join(f', "{name}": {value}' for name, value in facts.items())
    descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text[:-1] + more + "}")
    os.rename(path + ".new", path)


def _error_text(error: BaseException) -> str:
    """Return the message of an error, with its file, but without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


def _report(report: dict[str, Any]) -> None:
    try:
        os.write(1, marshal.dumps(report))
    except BrokenPipeError:  # nobody waits for the report any more. The watchdog will end the sandbox
        pass
    silence()


def silence() -> None:
    """Close the standard streams."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)


# --- the first process ---------------------------------------------------------------------------------------------


def _be_init(request: dict[str, Any], directory: str, block: uids.UidBlock, go: int, ready: int) -> NoReturn:
    """Become the sandbox's first process. Errors are written to `ready`, which the exec closes."""
    try:
        namespaces.death_signal(_SIGKILL)
        if os.read(go, 1) != b"g":  # the supervisor died before the death signal was set
            os._exit(1)
        os.setsid()
        if request["isolated"]:
            _build(request, directory, block.uid_base)
            os.chdir("/data")
        else:
            os.chdir(os.path.join(directory, directories.DATA))
        silence()
        for descriptor in block.descriptors:
            os.set_inheritable(descriptor, True)  # the block is reserved until the supervisor and this process end
        execute(request["command"], request["environment"])
    except BaseException as error:
        text = _error_text(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        os.write(ready, text.encode("utf-8", "replace")[:4000])
    finally:
        os._exit(1)


def _build(request: dict[str, Any], directory: str, first_uid: int | None) -> None:
    """Make namespaces, and a root directory with the system, the requested paths, and three writable directories."""
    namespaces.unshare(mount=True, ipc=True, net=request["no_network"])
    place = directory
    if request["tmpfs_bytes"] is not None:
        place = os.path.join(directory, directories.DISK)
        mounts.make_private()
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        size = request["tmpfs_bytes"]
        files = size // mounts.BYTES_PER_FILE  # empty files take memory too, which `size` does not count
        mounts.mount("tmpfs", place, "tmpfs", flags, f"mode=755,size={size},nr_inodes={files}")
        directories.furnish(place)
    if request["unreadable"] is not None:
        _keep_unreadable(os.path.join(place, directories.DATA), request["unreadable"])
    writable = ((directories.DATA, "/data"), (directories.TMP, "/tmp"), (directories.VAR_TMP, "/var/tmp"))
    mounts.build_root(
        os.path.join(directory, directories.ROOT),
        binds=[
            *request["binds"],
            *_bind_users(request["users"], directory, first_uid),
            *((os.path.join(place, name), path, True) for name, path in writable),
        ],
        tmpfs=[("/dev/shm", _SHM_BYTES, 0o1777)],
        masks=request["masks"],
        symlinks=request["symlinks"],
        proc_options=None if request["user_namespace"] else "hidepid=2",
    )
    if request["no_network"]:
        namespaces.loopback_up()
    namespaces.no_sysv_ipc()  # or slots, which share this ipc namespace, could use it to communicate


def _keep_unreadable(data: str, paths: list[str]) -> None:
    """Write the paths that only some users may read to a file for the guest."""
    state = os.path.join(data, ".hermes")
    os.mkdir(state, 0o700)
    with open(os.path.join(state, "unreadable"), "wb") as file:
        file.write(b"".join(os.fsencode(path) + b"\0" for path in paths))


def _bind_users(
    slot_users: list[tuple[int, str, str]], directory: str, first_uid: int | None
) -> list[tuple[str, str, bool]]:
    """Return the binds of copies of /etc/passwd and /etc/group in which the slots' users have names.

    Args:
        slot_users: ids relative to `first_uid`, names, homes.
    """
    if first_uid is None or not slot_users:
        return []
    try:
        lists = users.add(users.read(), [(first_uid + offset, name, home) for offset, name, home in slot_users])
        return users.write_copies(lists, directory)
    except OSError:  # the host's files can't be read. Slots work without names
        return []


def execute(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become a program, which is found by the PATH of its environment."""
    import ctypes

    for number in _IGNORED_BY_PYTHON:
        ctypes.CDLL(None).signal(number, None)
    os.execvpe(command[0], command, environment)


# --- entering ------------------------------------------------------------------------------------------------------


def enter(request: dict[str, Any]) -> int:
    """Run a program in a sandbox with our standard streams. Return its exit status, 128 + n for signal n."""
    import warnings  # noqa: F401 - `os.execvpe` imports it, and a container has no Python of ours to import it from

    pid, started = request["init"]
    try:
        descriptors = namespaces.open_namespaces(pid, KINDS) if request["isolated"] else []
        if not processes.alive(pid, started):  # checked after opening, so these are the sandbox's namespaces
            raise ProcessLookupError(0, "its first process has ended")
        in_user_namespace = any(kind == "user" for kind, _ in descriptors)
        namespaces.join(descriptors)
        if in_user_namespace:
            _become_its_root()
    except OSError as error:
        os.write(2, f"the sandbox is not there: {error.strerror or error}\n".encode())
        return NOT_THERE
    reader, writer = os.pipe()
    go_reader, go_writer = os.pipe()
    child = os.fork()  # only a child is in the pid namespace
    if child == 0:
        os.close(go_writer)
        _leave_to_init(request, go_reader, writer)
    os.close(writer)
    os.close(go_reader)
    os.waitpid(child, 0)
    try:
        os.write(go_writer, b"x")
    except BrokenPipeError:  # the sandbox has ended
        pass
    silence()  # our copies of the streams would hide their ends from the program's readers and writers
    return (os.read(reader, 1) or bytes([128 + _SIGKILL]))[0]  # no report: the program was killed with the sandbox


def _become_its_root() -> None:
    """Become root of the user namespace that was joined, which may have an id of its own outside.

    The namespace's other processes can't inspect us: by /proc/PID/exe, its root could write to our interpreter.
    """
    namespaces.forbid_inspection()
    try:
        os.setgroups([])
    except PermissionError:  # an ordinary user's, where groups can't be given up
        pass
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _leave_to_init(request: dict[str, Any], go: int, report: int) -> NoReturn:
    """Fork a process that runs the program, and exit, so that the sandbox's init adopts it.

    If the new process stayed our child and we were killed, the host's init would adopt it. Some inits reap nothing, and
    the kernel can't end a pid namespace with unreaped processes. The same holds for this process if its caller is
    killed. So the program starts only when the caller has reaped this process, and has written to `go`. From then on,
    the caller can be killed at any time.
    """
    try:
        if os.fork() == 0:
            _wait_for_program(request, go, report)
    finally:
        os._exit(0)


def _wait_for_program(request: dict[str, Any], go: int, report: int) -> NoReturn:
    """Run the program, and write its exit status to `report`: 128 + n for signal n."""
    try:
        if not os.read(go, 1):  # the caller was killed
            os._exit(0)
        child = os.fork()
        if child == 0:
            _be_program(request)
        silence()
        _, status = os.waitpid(child, 0)
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        os.write(report, bytes([code]))
    finally:
        os._exit(0)


def _be_program(request: dict[str, Any]) -> NoReturn:
    status = CANNOT_RUN
    try:
        os.setsid()
        os.chdir(request["directory"])
        execute(request["command"], request["environment"])
    except FileNotFoundError:
        status = NOT_FOUND
        os.write(2, f"{request['command'][0]}: not found in the sandbox\n".encode("utf-8", "replace"))
    except BaseException as error:
        os.write(2, f"{request['command'][0]}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(status)
