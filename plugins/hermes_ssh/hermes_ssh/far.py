"""What runs on the host: starts, enters, lists and ends sandboxes there. Sent over the connection, never written down.

A sandbox on the host is what the `local` backend makes: a supervisor, a first process in namespaces of its own, a
directory with a record. So this is core's supervisor, told by requests that come from elsewhere. Python >= 3.7.
"""
# pathlib is slow to import
# ruff: noqa: PTH100, PTH103, PTH106, PTH110, PTH111, PTH112, PTH118, PTH119, PTH123, PTH208

from __future__ import annotations

import json
import marshal
import os
import select
import signal
import stat
import sys
import time

from hermes_core.errors import ConfigError, HermesError, PolicyError
from hermes_core.sandbox.guest.probe import what_works
from hermes_core.sandbox.local import directories, processes, supervisor, view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARK = b"\0hermes-far\0"
"""Says where our output begins; the same as in `connect`."""

_START_S, _END_S, _KILL_S = 30.0, 30.0, 5.0
_ATTEMPTS = 5
_POLL_S = 0.01
_DATA = "/data"


def main(request: dict[str, Any]) -> None:
    """Do what the request asks and print the answer as JSON; to enter a sandbox is to become a program in it."""
    os.write(1, MARK)
    if request["op"] == "enter":
        sys.exit(_enter(request))
    try:
        answer = _OPERATIONS[request["op"]](request)
    except HermesError as error:
        kind = "policy" if isinstance(error, PolicyError) else "config" if isinstance(error, ConfigError) else "infra"
        answer = {"error": error.message, "hint": error.hint, "kind": kind}
    except OSError as error:
        answer = {"error": f"{error.strerror or error}: {error.filename or ''}", "hint": None, "kind": "infra"}
    os.write(1, json.dumps(answer).encode("ascii"))


# --- making one ----------------------------------------------------------------------------------------------------


def _create(request: dict[str, Any]) -> dict[str, Any]:
    probe = what_works()
    _check(request, probe)
    packages = _packages(request)
    _check_awaited()
    sandbox_id = request["record"]["sandbox_id"]
    for _ in range(_ATTEMPTS):
        root = _open_root(request["directory"])
        _sweep(root)
        path = os.path.join(root, sandbox_id)
        report = _start_supervisor(_supervisor_request(request, probe, root, packages))
        if "record" in report:
            return dict(_described(report["record"], root), packages=packages)
        if "error" in report and os.path.isdir(root):  # or its last sandbox has just taken it away
            raise HermesError("it could not be started: " + report["error"])
        record = _existing(path)
        if record is not None:
            return dict(_described(record, root), packages=packages)
    raise HermesError(f"the directory {path} is in the way", hint="remove it")


def _check_awaited() -> None:
    """End here if the connection was closed while we looked around: nobody is to find a sandbox later."""
    if select.select([0], [], [], 0)[0] and not os.read(0, 1):
        sys.exit(1)


def _packages(request: dict[str, Any]) -> list[str] | None:
    """Where this host's Pythons keep packages. Looking takes seconds on a cold disk: we are told what we have found."""
    if not request["isolated"] or request["packages"] is not None:
        return request["packages"]
    return list(view.package_folders(view.interpreter_prefixes()))


def _check(request: dict[str, Any], probe: dict[str, Any]) -> None:
    """Refuse what this host can't give this account, with the kernel's reason."""
    level = request["record"]["isolation"]
    able = probe["namespaces"] or probe["user_namespaces"]
    if request["isolated"] and not able:
        raise PolicyError(
            f"it can't give this account isolation {level!r}: {probe['reason']}",
            hint="allow user namespaces there (kernel.unprivileged_userns_clone, user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns), or use root's account",
        )
    if request["no_network"] and not (request["isolated"] and probe["network"]):
        raise PolicyError(
            f"it can't give this account network 'none': {probe['reason'] or 'that needs namespaces'}",
            hint="ask for isolation 'user' or 'namespace', or for network 'open'",
        )


def _supervisor_request(
    request: dict[str, Any], probe: dict[str, Any], root: str, packages: list[str] | None
) -> dict[str, Any]:
    isolated, sandbox_id = request["isolated"], request["record"]["sandbox_id"]
    by_user = isolated and not probe["namespaces"]
    shown = view.View((), (), ())
    if isolated:
        shown = view.view(request["visible_paths"], [root], view.homes(), packages)
    return {
        "state_root": root,
        "sandbox_id": sandbox_id,
        "isolated": isolated,
        "user_namespace": by_user,
        "reserve_uids": isolated and probe["root"] and not by_user,
        "no_network": request["no_network"],
        "tmpfs_bytes": None,
        "binds": shown.binds,
        "symlinks": shown.symlinks,
        "masks": shown.masks,
        "command": request["command"],
        "environment": view.base_environment({processes.MARKER: sandbox_id}),
        "record": dict(request["record"], created=time.time(), user_namespace=by_user),
    }


def _start_supervisor(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a supervisor, which outlives us and the connection; its report."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()  # the end of the connection is not its own
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor, source in ((0, null), (1, writer), (2, null)):
                os.dup2(source, descriptor)
            os.closerange(3, 256)
            os.chdir("/")
            supervisor.keep(request)
            _remove_root(request["state_root"])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        report = stream.read()
    return marshal.loads(report) if report else {"error": "its supervisor ended without a report"}  # from our own child


def _existing(path: str) -> dict[str, Any] | None:
    """The record of the sandbox that is there already; None if it is dead, and now out of the way."""
    deadline = time.monotonic() + _START_S
    while directories.held(path):
        record = _record(path)
        if record is not None:
            return record
        if time.monotonic() > deadline:
            raise HermesError("another driver does not get this sandbox started")
        time.sleep(_POLL_S)
    directories.discard_dead(path)
    return None


def _described(record: dict[str, Any], root: str) -> dict[str, Any]:
    keys = ("sandbox_id", "isolation", "uid_base")
    data = os.path.join(root, record["sandbox_id"], directories.DATA)
    base = data if record["isolation"] == "shared" else _DATA
    return dict({key: record[key] for key in keys}, workspace_base=base)


# --- the others ----------------------------------------------------------------------------------------------------


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    return dict(what_works(), python=".".join(map(str, sys.version_info[:3])), interpreter=view.interpreter())


def _list(request: dict[str, Any]) -> dict[str, Any]:
    root = _root(request["directory"])
    found = []
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        record = _record(os.path.join(root, name)) if name.startswith(directories.PREFIX) else None
        if record is not None:
            values = {key: record[key] for key in ("sandbox_id", "owner", "creation_id", "created")}
            found.append(dict(values, running=directories.held(os.path.join(root, name))))
    return {"sandboxes": found}


def _status(request: dict[str, Any]) -> dict[str, Any]:
    path = os.path.join(_root(request["directory"]), _name(request))
    return {"status": "running" if directories.held(path) else "ended" if os.path.exists(path) else "gone"}


def _find(request: dict[str, Any]) -> dict[str, Any]:
    root = _root(request["directory"])
    record = _record(os.path.join(root, _name(request)))
    if record is None or not directories.held(os.path.join(root, record["sandbox_id"])):
        return {"gone": True}
    return dict(_described(record, root), creation_id=record["creation_id"])


def _terminate(request: dict[str, Any]) -> dict[str, Any]:
    root = _root(request["directory"])
    path = os.path.join(root, _name(request))
    record = _record(path)
    if record is not None:
        pid, started = record["supervisor"]
        for number, limit in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _KILL_S)):
            if processes.alive(pid, started):
                os.kill(pid, number)
                _wait_for_end(pid, started, limit)
        if record["isolation"] == "shared":
            processes.kill_marked(record["sandbox_id"])
    directories.discard_dead(path)
    if directories.held(path):
        raise HermesError("the sandbox's supervisor can't be ended")
    _remove_root(root)
    return {}


def _wait_for_end(pid: int, started: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while processes.alive(pid, started) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _enter(request: dict[str, Any]) -> int:
    path = os.path.join(_root(request["directory"]), _name(request))
    record = _record(path) if directories.held(path) else None
    if record is None:
        os.write(2, b"the sandbox is not there\n")
        return supervisor.NOT_THERE
    os.write(1, b"\n")  # it is there, and what follows is its own
    isolated = record["isolation"] != "shared"
    words = request["command"]
    given = {processes.MARKER: record["sandbox_id"]}
    given.update(record["environment"])
    given.update(request["env"])
    return supervisor.enter(
        {
            "isolated": isolated,
            "init": record["init"],
            "command": [view.interpreter() if words[0] == "python3" else words[0], *words[1:]],
            "environment": view.base_environment(given),
            "directory": _DATA if isolated else os.path.join(path, directories.DATA),
        }
    )


# --- the directory of all of them ----------------------------------------------------------------------------------


def _root(wanted: str | None) -> str:
    if wanted is None:
        return f"/var/tmp/hermes-rl-ssh-{os.geteuid()}"
    return os.path.abspath(os.path.expanduser(wanted))


def _open_root(wanted: str | None) -> str:
    """The directory that holds every sandbox of this account, made if need be."""
    path = _root(wanted)
    hint = "name another one by `directory`"
    try:
        os.makedirs(path, mode=0o711, exist_ok=True)
        info = os.lstat(path)
    except OSError as error:
        raise PolicyError(f"the directory {path} can't be made: {error.strerror}", hint=hint) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PolicyError(f"the directory {path} is a link, or others can write to it", hint=hint)
    return path


def _remove_root(root: str) -> None:
    """Nothing of us stays on the host: the last sandbox takes the directory with it."""
    try:
        os.rmdir(root)
    except OSError:  # it is not the last one
        pass


def _sweep(root: str) -> None:
    """Remove what supervisors have left that were killed themselves."""
    for path in directories.leftovers(root):
        record = _record(path)
        if record is not None and record["isolation"] == "shared":
            processes.kill_marked(record["sandbox_id"])
        directories.discard_dead(path)


def _record(path: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(path, directories.RECORD), "rb") as stream:
            record = json.loads(stream.read().decode("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _name(request: dict[str, Any]) -> str:
    name = os.path.basename(str(request["sandbox_id"]))
    if not name.startswith(directories.PREFIX):
        raise HermesError(f"{name!r} is no sandbox")
    return name


_OPERATIONS = {
    "create": _create,
    "find": _find,
    "list": _list,
    "probe": _probe,
    "status": _status,
    "terminate": _terminate,
}
