"""The sandboxes of one host: what it can give them, and creating, finding, entering and ending them there.

One program with two ways in. `local` calls these functions, and its launcher does what needs a process of its own;
`ssh` sends them to a host and calls `main` there. So they take plain data, and need Python >= 3.7 and its standard
library alone.
"""
# pathlib is slow to import, and so are hashlib and dataclasses: each request over a connection waits for them.
# ruff: noqa: PTH100, PTH103, PTH106, PTH110, PTH111, PTH112, PTH118, PTH123, PTH208

from __future__ import annotations

import json
import marshal
import os
import select
import signal
import stat
import sys
import time
from importlib._bootstrap_external import MAGIC_NUMBER
from typing import NamedTuple

from hermes_core.errors import ConfigError, HermesError, InfraError, PolicyError
from hermes_core.sandbox.linux import mounts
from hermes_core.sandbox.linux.probe import CHROOT, probe_host
from hermes_core.sandbox.local import directories, processes, supervisor, view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from hermes_core.sandbox.contract import SandboxSpec

MARK = b"\0hermes-host\0"
"""The first output of `main`. Everything before it was printed by the account's login files."""

NOT_THERE = supervisor.NOT_THERE
"""The exit status of `main` where there is no sandbox to enter."""

_DATA = "/data"
_OWN_ROOTS = "private-root"
_LEVELS = ("shared", "user", "namespace", _OWN_ROOTS)
_IMAGE = "/image"
"""Where a sandbox shows the directory that the roots of its slots start from."""
_ATTEMPTS = 5
_END_S, _KILL_S = 30.0, 5.0
_LIMITS = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""What can stand in the way of a user namespace: the value that does, and one that does not."""


class Probe(NamedTuple):
    """What a host allows an account: the result of `probe_host`."""

    root: bool
    namespaces: bool
    """Whether namespaces work directly."""
    user_namespaces: bool
    """Whether namespaces work through a user namespace."""
    network: bool
    reason: str
    own_roots: str = "it was not tried"
    """Why slots can't have roots of their own; empty if they can."""

    @property
    def isolates(self) -> bool:
        """Return whether sandboxes can have namespaces of their own, in one of the two ways."""
        return self.namespaces or self.user_namespaces


class SandboxRecord(NamedTuple):
    """The contents of a sandbox's `record.json`, which its supervisor writes once it runs."""

    sandbox_id: str
    owner: str
    creation_id: str
    isolation: str
    created: float
    user_namespace: bool
    supervisor: tuple[int, int]
    """Process id and start time."""
    init: tuple[int, int]
    """Process id and start time of the first process; the id is the one seen from outside."""
    environment: dict[str, str]
    uid_base: int | None = None
    has_image: bool = False
    """Whether the roots of its slots start from a directory of their own, at `slot_root`."""

    @property
    def slot_root(self) -> str | None:
        """Return the directory that the roots of its slots start from, as a path inside; None is the system."""
        return _IMAGE if self.has_image else None

    @property
    def isolated(self) -> bool:
        """Return whether the sandbox has namespaces of its own."""
        return self.isolation != "shared"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SandboxRecord:
        """Return the record from a supervisor's report or file. Raise KeyError, TypeError or ValueError if it is not
        valid."""
        identities = {}
        for key in ("supervisor", "init"):
            pid, started = values[key]
            identities[key] = (int(pid), int(started))
        return cls(**{"environment": {}, **values, **identities})


# --- the directory of all of them ----------------------------------------------------------------------------------


def place_of(wanted: str | None, usual: str) -> str:
    """Return the directory of an account's sandboxes: the requested one, or the usual one with the account's uid."""
    return f"{usual}-{os.geteuid()}" if wanted is None else os.path.abspath(os.path.expanduser(wanted))


def open_place(place: str, setting: str) -> str:
    """Make that directory if necessary. Slots' users may pass through it but not list it.

    Args:
        setting: the setting that names another directory, for the hint.

    Raises:
        PolicyError: it can't be made, is a link, or others could put things there.
    """
    hint = f"name another one by `{setting}`"
    try:
        os.makedirs(place, mode=0o711, exist_ok=True)
        info = os.lstat(place)
    except OSError as error:
        raise PolicyError(f"the directory {place} can't be made: {error.strerror}", hint=hint) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PolicyError(f"the directory {place} is a link, or belongs to another user", hint=hint)
    if info.st_mode & 0o022:
        raise PolicyError(f"others can write to the directory {place}", hint=f"`chmod 711 {place}`, or {hint}")
    return place


def sweep(place: str) -> int:
    """Remove what killed supervisors have left. Return the number of removed directories."""
    removed = 0
    for path in directories.leftovers(place):
        record = _read(path)
        if record is not None and not record.isolated:  # with namespaces, its processes died with their init
            processes.kill_marked(record.sandbox_id)
        removed += directories.discard_dead(path)
    return removed


# --- finding them --------------------------------------------------------------------------------------------------


def sandbox_id_of(creation_id: str) -> str:
    """Return the id of the one sandbox that can have this creation id on a host."""
    import hashlib

    return directories.PREFIX + hashlib.sha256(creation_id.encode()).hexdigest()[:20]


def find(place: str, sandbox_id: str) -> SandboxRecord | None:
    """Return the record of a sandbox, running or not; None if it has none (yet), or an unreadable one."""
    if not sandbox_id.startswith(directories.PREFIX) or "/" in sandbox_id:
        return None
    return _read(os.path.join(place, sandbox_id))


def records(place: str) -> list[SandboxRecord]:
    """Return the record of every sandbox, running or not."""
    names = sorted(os.listdir(place)) if os.path.isdir(place) else []
    found = [find(place, name) for name in names]
    return [record for record in found if record is not None]


def runs(place: str, sandbox_id: str) -> bool:
    """Return whether a sandbox runs. It does as long as its supervisor lives."""
    return directories.held(os.path.join(place, sandbox_id))


def status(place: str, sandbox_id: str) -> str:
    """Return `running`, `ended`, or `gone` if nothing of it is left."""
    if runs(place, sandbox_id):
        return "running"
    return "ended" if os.path.lexists(os.path.join(place, sandbox_id)) else "gone"


def workspace_base(place: str, record: SandboxRecord) -> str:
    """Return the directory of the slots' workspaces, as a path inside the sandbox."""
    return _DATA if record.isolated else os.path.join(place, record.sandbox_id, directories.DATA)


def _read(path: str) -> SandboxRecord | None:
    try:
        return SandboxRecord.of(directories.read_record(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None


# --- making one, entering it, ending it ----------------------------------------------------------------------------


def description(spec: SandboxSpec, *, tmpfs_mib: int | None = None, root: str | None = None) -> dict[str, Any]:
    """Return what a host must know to create a sandbox, as plain data. Called by the driver.

    Args:
        tmpfs_mib: the size of its disk in memory; None is a directory.
        root: the directory of the host that the roots of slots start from.
    """
    from hermes_core.sandbox.guest.workspace import slot_users  # hosts are not sent it

    one_etc = spec.isolation.label == "user"  # at `namespace` the guest gives each slot its own
    return {
        "record": {
            "sandbox_id": sandbox_id_of(spec.creation_id),
            "owner": spec.owner,
            "creation_id": spec.creation_id,
            "isolation": spec.isolation.label,
            "has_image": root is not None,
            "environment": {**spec.config.env_vars, **spec.environment},
        },
        "root": root,
        "no_network": spec.config.network.value == "none",
        "tmpfs_bytes": None if tmpfs_mib is None else tmpfs_mib << 20,
        "visible_paths": list(spec.config.visible_paths),
        "users": slot_users(_DATA, 0, spec.config.slots_per_sandbox) if one_etc else [],
        "command": list(spec.command(".hermes")),  # it is started in the directory of the workspaces
    }


def check(wanted: Mapping[str, Any], probe: Probe) -> None:
    """Refuse what this host can't give this account.

    Raises:
        PolicyError: gives the kernel's reason.
    """
    level = wanted["record"]["isolation"]
    isolated = level != "shared"
    if level not in _LEVELS:
        raise PolicyError(f"an account can't have isolation {level!r}", hint=f"it can have {', '.join(_LEVELS)}")
    if isolated and not probe.isolates:
        raise PolicyError(
            f"this account can't have isolation {level!r}: {probe.reason}", hint="; ".join(remedies(probe))
        )
    if level == _OWN_ROOTS and probe.own_roots:
        raise PolicyError(
            f"this account can't have isolation {level!r}: {probe.own_roots}",
            hint="run as root, on Linux 5.19 or later, with /usr on a file system such as ext4, xfs or btrfs",
        )
    if wanted["root"] is not None and level != _OWN_ROOTS:
        raise PolicyError(
            f"`root` is what slots of level 'private-root' start from, not of {level!r}", hint="leave it out"
        )
    if wanted["no_network"] and not (isolated and probe.network):
        reason = probe.reason or "that is for sandboxes with namespaces"
        raise PolicyError(
            f"network 'none' needs namespaces: {reason}",
            hint="use isolation 'user' or 'namespace', or network 'open'",
        )
    if wanted["tmpfs_bytes"] is not None and not isolated:
        raise PolicyError("tmpfs_size needs namespaces", hint="use isolation 'user' or 'namespace'")


def remedies(probe: Probe) -> list[str]:
    """Return what can be done on this host so that this account gets sandboxes with namespaces."""
    if probe.reason == CHROOT:
        return ["enter the directory as a container does: with pivot_root, such as by `systemd-nspawn -D`"]
    found = []
    for name, (closed, opened) in _LIMITS.items():
        path = "/proc/sys/" + name.replace(".", "/")
        if os.path.exists(path):
            with open(path, encoding="ascii") as stream:
                found += [f"`sysctl {name}={opened}`"] if stream.read().strip() == closed else []
    rights = "run where root may make namespaces (in a container: `--cap-add SYS_ADMIN`)"
    if os.geteuid() != 0:
        rights = "allow user namespaces (in a container, its seccomp profile may forbid them), or run as root"
    return found or [rights]


def creation(
    place: str,
    wanted: Mapping[str, Any],
    probe: Probe,
    *,
    hidden: Iterable[str] = (),
    own: Iterable[str] | None = None,
    packages: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the supervisor's request for a sandbox of this `description`.

    Args:
        hidden, own, packages: as `view.view` takes them.

    Raises:
        ConfigError, PolicyError: as `view.view` does.
    """
    sandbox_id, isolated = wanted["record"]["sandbox_id"], wanted["record"]["isolation"] != "shared"
    by_user = isolated and not probe.namespaces
    over_system = wanted["record"]["isolation"] == _OWN_ROOTS and wanted["root"] is None
    record = dict(wanted["record"], created=time.time(), user_namespace=by_user)
    shown = view.View((), (), ())
    if isolated:
        unseen = [*hidden, place]  # other slots' files are an ordinary user's own
        visible = [*wanted["visible_paths"], *(_package_directories() if over_system else ())]
        shown = view.view(visible, unseen, own, packages)
    return {
        "state_root": place,
        "sandbox_id": sandbox_id,
        "isolated": isolated,
        "user_namespace": by_user,
        "reserve_uids": isolated and probe.root and not by_user,
        "no_network": wanted["no_network"],
        "tmpfs_bytes": wanted["tmpfs_bytes"],
        "binds": (*shown.binds, *_image_of(wanted)),
        "symlinks": shown.symlinks,
        "masks": shown.masks,
        "unreadable": list(view.unreadable()) if over_system else None,
        "users": wanted["users"],
        "command": wanted["command"],
        "environment": view.base_environment({processes.MARKER: sandbox_id}),
        "record": record,
        "record_json": json.dumps(record),  # a supervisor has no time to import it
    }


def _package_directories() -> list[str]:
    return [path for path in mounts.PACKAGE_DIRECTORIES if os.path.isdir(path)]


def _image_of(wanted: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Return the mount of the directory that slots' roots start from, if there is one.

    Raises:
        ConfigError: it can't be one.
    """
    root = wanted["root"]
    if root is None:
        return []
    path = os.path.realpath(root)
    if not root.startswith("/") or path == "/" or not os.path.isdir(os.path.join(path, "usr")):
        raise ConfigError(
            f"root: {root!r} is not the absolute path of a directory with a system in it (it has no usr)",
            hint="make one with debootstrap, or unpack `docker export` of a container",
        )
    return [(path, _IMAGE, False)]


def entry(place: str, record: SandboxRecord, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the request for a program that is started in a sandbox. `python3` there is the interpreter that runs us.

    Its environment has PATH, LANG, HERMES_SANDBOX_ID, the sandbox's own variables and `env`, but nothing of ours.
    """
    given = {processes.MARKER: record.sandbox_id, **record.environment, **env}
    return {
        "isolated": record.isolated,
        "init": record.init,
        "command": [view.interpreter() if argv[0] == "python3" else argv[0], *argv[1:]],
        "environment": view.base_environment(given),
        "directory": workspace_base(place, record),
    }


def end(place: str, record: SandboxRecord) -> None:
    """End a sandbox and remove everything of it. Idempotent; blocks for some ms, or half a minute if it does not end.

    What has so many files that their removal takes longer is ended by then, and its supervisor goes on to remove them.

    Raises:
        InfraError: a part of it can't be ended from here.
    """
    path = os.path.join(place, record.sandbox_id)
    ended = processes.stop(record.supervisor, signal.SIGTERM, _END_S)
    if not ended and os.path.lexists(path):  # else it is removing the files, which have another name by then
        processes.stop(record.supervisor, signal.SIGKILL, _KILL_S)
    if os.path.lexists(path):  # its supervisor was killed itself
        if not record.isolated:
            processes.kill_marked(record.sandbox_id)
        directories.discard_dead(path)
    if directories.held(path):
        raise InfraError(
            "the sandbox's supervisor can't be ended from here",
            hint=f"it is process {record.supervisor[0]}, perhaps of another pid namespace",
            sandbox_id=record.sandbox_id,
        )


# --- the way in by a connection ------------------------------------------------------------------------------------


def main(request: dict[str, Any]) -> None:
    """Carry out a request that came over a connection, and answer with JSON: also with the magic number of our
    bytecode, as `magic`. For `enter`, become a program in a sandbox."""
    os.write(1, MARK)
    place = place_of(request["directory"], request["usual"])
    if request["op"] == "enter":
        sys.exit(_enter(place, request))
    try:
        answer = _OPERATIONS[request["op"]](place, request)
    except HermesError as error:
        kind = "policy" if isinstance(error, PolicyError) else "config" if isinstance(error, ConfigError) else "infra"
        answer = {"error": error.message, "hint": error.hint, "kind": kind}
    except OSError as error:
        answer = {"error": f"{error.strerror or error}: {error.filename or ''}", "hint": None, "kind": "infra"}
    os.write(1, json.dumps(dict(answer, magic=MAGIC_NUMBER.hex())).encode("ascii"))


def _create(place: str, request: dict[str, Any]) -> dict[str, Any]:
    wanted, packages = request["sandbox"], request["packages"]
    probe = Probe(**probe_host())
    check(wanted, probe)
    if packages is None:  # looking takes seconds on a cold disk: the driver tells us what we have found
        packages = list(view.package_folders(view.interpreter_prefixes()))
    if select.select([0], [], [], 0)[0] and not os.read(0, 1):
        sys.exit(1)  # the connection was closed while we looked: don't create a sandbox that nobody knows of
    for _ in range(_ATTEMPTS):
        open_place(place, "directory")
        sweep(place)
        report = _start_supervisor(creation(place, wanted, probe, own=view.homes(), packages=packages))
        if "record" in report:
            return dict(_told(place, SandboxRecord.of(report["record"])), packages=packages)
        if os.path.isdir(place):
            break
    raise HermesError(
        "it could not be started: " + report["error"]
    )  # or its last sandbox takes it away, again and again


def _start_supervisor(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a supervisor, which outlives us and the connection; return its report."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()  # the end of the connection is not its own
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor, source in ((0, null), (1, writer), (2, null)):
                os.dup2(source, descriptor)
            os.closerange(3, 256)
            os.chdir("/")
            supervisor.create(request)
            _remove_if_empty(request["state_root"])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        report = stream.read()
    return marshal.loads(report) if report else {"error": "its supervisor ended without a report"}  # from our own child


def _enter(place: str, request: dict[str, Any]) -> int:
    record = find(place, request["sandbox_id"])
    if record is None or not runs(place, record.sandbox_id):
        os.write(2, b"the sandbox is not there\n")
        return NOT_THERE
    os.write(1, b"\n")  # it is there, and what follows is its own
    return supervisor.enter(entry(place, record, request["command"], request["env"]))


def _told(place: str, record: SandboxRecord) -> dict[str, Any]:
    return dict(record._asdict(), workspace_base=workspace_base(place, record), running=runs(place, record.sandbox_id))


def _find(place: str, request: dict[str, Any]) -> dict[str, Any]:
    record = find(place, request["sandbox_id"])
    return {"sandbox": None if record is None else _told(place, record)}


def _list(place: str, _request: dict[str, Any]) -> dict[str, Any]:
    return {"sandboxes": [_told(place, record) for record in records(place)]}


def _probe(_place: str, _request: dict[str, Any]) -> dict[str, Any]:
    return dict(probe_host(), python=".".join(map(str, sys.version_info[:3])), interpreter=view.interpreter())


def _status(place: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"status": status(place, request["sandbox_id"])}


def _terminate(place: str, request: dict[str, Any]) -> dict[str, Any]:
    record = find(place, request["sandbox_id"])
    if record is not None:
        end(place, record)
    _remove_if_empty(place)
    return {}


def _remove_if_empty(place: str) -> None:
    """Remove the directory with the last sandbox, so that nothing of ours stays on the host."""
    try:
        os.rmdir(place)
    except OSError:  # it is not the last one
        pass


_OPERATIONS = {
    "create": _create,
    "find": _find,
    "list": _list,
    "probe": _probe,
    "status": _status,
    "terminate": _terminate,
}
