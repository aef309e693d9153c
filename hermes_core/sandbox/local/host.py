"""The sandboxes of one host: probes the host, and creates, finds, enters and ends sandboxes.

`local` calls these functions, and its launcher does what needs another process. `ssh` sends this module to a host and
calls `main` there. So it takes plain data, and needs only Python >= 3.7 and its standard library.
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
"""The first output of `main`. Login files of the account may print something before it."""

NOT_THERE = supervisor.NOT_THERE
"""The exit status of `main` if there is no sandbox to enter."""

_DATA = "/data"
_OWN_ROOTS = "private-root"
_LEVELS = ("shared", "user", "namespace", _OWN_ROOTS)
_IMAGE = "/image"
"""The path in a sandbox of the directory that its slots' root directories start from."""
_ATTEMPTS = 5
_END_S, _KILL_S = 30.0, 5.0
_LIMITS = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""Maps kernel settings that can forbid user namespaces to (the value that forbids them, a value that allows them)."""


class Probe(NamedTuple):
    """The namespaces and root directories that a host allows an account: the result of `probe_host`."""

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
        """Return whether sandboxes can have namespaces, directly or through a user namespace."""
        return self.namespaces or self.user_namespaces


class SandboxRecord(NamedTuple):
    """The contents of a sandbox's `record.json`, which its supervisor writes when the sandbox runs."""

    sandbox_id: str
    owner: str
    creation_id: str
    isolation: str
    created: float
    user_namespace: bool
    supervisor: tuple[int, int]
    """Process id and start time."""
    init: tuple[int, int]
    """Process id, as seen from outside, and start time of the first process."""
    environment: dict[str, str]
    uid_base: int | None = None
    has_image: bool = False
    """Whether its slots' root directories start from `slot_root`, and not from the host's system."""

    @property
    def slot_root(self) -> str | None:
        """Return the directory that slots' root directories start from, as a path inside the sandbox. None: they start
        from the host's system."""
        return _IMAGE if self.has_image else None

    @property
    def is_isolated(self) -> bool:
        """Return whether the sandbox has namespaces."""
        return self.isolation != "shared"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SandboxRecord:
        """Return the record from a supervisor's report or file. Raises KeyError, TypeError or ValueError if it is
        invalid."""
        identities = {}
        for key in ("supervisor", "init"):
            pid, started = values[key]
            identities[key] = (int(pid), int(started))
        return cls(**{"environment": {}, **values, **identities})


# --- the directory of all sandboxes of an account ------------------------------------------------------------------


def place_of(directory: str | None, usual: str) -> str:
    """Return the directory of an account's sandboxes: `directory`, or else `usual` with the account's uid appended."""
    return f"{usual}-{os.geteuid()}" if directory is None else os.path.abspath(os.path.expanduser(directory))


def open_place(place: str, setting: str) -> str:
    """Make the directory of an account's sandboxes if necessary. Slots' users may pass through it but not list it.

    Args:
        setting: the name of the setting for another directory, for the hint.

    Raises:
        PolicyError: it can't be made, it is a link, or other users can write to it.
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
    """Remove the sandboxes of killed supervisors. Return the number of removed directories."""
    removed = 0
    for path in directories.leftovers(place):
        record = _read(path)
        if record is not None and not record.is_isolated:  # with namespaces, its processes died with their init
            processes.kill_marked(record.sandbox_id)
        removed += directories.discard_dead(path)
    return removed


# --- finding sandboxes ---------------------------------------------------------------------------------------------


def sandbox_id_of(creation_id: str, prefix: str = directories.PREFIX) -> str:
    """Return the sandbox id for a creation id, the same one on each call."""
    import hashlib

    return prefix + hashlib.sha256(creation_id.encode()).hexdigest()[:20]


def find(place: str, sandbox_id: str) -> SandboxRecord | None:
    """Return the record of a sandbox, running or not; None if there is none, or it can't be read."""
    if not sandbox_id.startswith(directories.PREFIXES) or "/" in sandbox_id:
        return None
    return _read(os.path.join(place, sandbox_id))


def records(place: str) -> list[SandboxRecord]:
    """Return the record of every sandbox, running or not."""
    names = sorted(os.listdir(place)) if os.path.isdir(place) else []
    return [record for record in (find(place, name) for name in names) if record is not None]


def runs(place: str, sandbox_id: str) -> bool:
    """Return whether a sandbox runs, which is as long as its supervisor lives."""
    return directories.is_held(os.path.join(place, sandbox_id))


def status(place: str, sandbox_id: str) -> str:
    """Return `running`, `ended`, or `gone` if its directory was removed too."""
    if runs(place, sandbox_id):
        return "running"
    return "ended" if os.path.lexists(os.path.join(place, sandbox_id)) else "gone"


def workspace_base(place: str, record: SandboxRecord) -> str:
    """Return the directory of the slots' workspaces, as a path inside the sandbox."""
    return _DATA if record.is_isolated else os.path.join(place, record.sandbox_id, directories.DATA)


def _read(path: str) -> SandboxRecord | None:
    try:
        return SandboxRecord.of(directories.read_record(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None


# --- creating, entering and ending sandboxes -----------------------------------------------------------------------


def description(spec: SandboxSpec, *, tmpfs_mib: int | None = None, root: str | None = None) -> dict[str, Any]:
    """Return the description of a sandbox, as plain data for a host. Only the driver calls this.

    Args:
        tmpfs_mib: the size of the sandbox's disk in memory. None: its files are in a directory of the host.
        root: the directory of the host that slots' root directories start from.
    """
    from hermes_core.sandbox.guest.workspace import slot_users  # it is not sent to hosts

    one_etc = spec.isolation.label == "user"  # at `namespace`, the guest gives each slot its own /etc/passwd
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
        "command": list(spec.command(".hermes")),  # relative to the base of the workspaces, where it is started
    }


def check(sandbox: Mapping[str, Any], probe: Probe) -> None:
    """Refuse the `description` of a sandbox that this host can't give this account.

    Raises:
        PolicyError: with the kernel's reason.
    """
    level = sandbox["record"]["isolation"]
    is_isolated = level != "shared"
    if level not in _LEVELS:
        raise PolicyError(f"an account can't have isolation {level!r}", hint=f"it can have {', '.join(_LEVELS)}")
    if is_isolated and not probe.isolates:
        raise PolicyError(
            f"this account can't have isolation {level!r}: {probe.reason}", hint="; ".join(remedies(probe))
        )
    if level == _OWN_ROOTS and probe.own_roots:
        raise PolicyError(
            f"this account can't have isolation {level!r}: {probe.own_roots}",
            hint="run as root, on Linux 5.19 or later, with /usr on a file system such as ext4, xfs or btrfs",
        )
    if sandbox["root"] is not None and level != _OWN_ROOTS:
        raise PolicyError(
            f"`root` is what slots of level 'private-root' start from, not of {level!r}", hint="leave it out"
        )
    if sandbox["no_network"] and not (is_isolated and probe.network):
        reason = probe.reason or "that is for sandboxes with namespaces"
        raise PolicyError(
            f"network 'none' needs namespaces: {reason}",
            hint="use isolation 'user' or 'namespace', or network 'open'",
        )
    if sandbox["tmpfs_bytes"] is not None and not is_isolated:
        raise PolicyError("tmpfs_size needs namespaces", hint="use isolation 'user' or 'namespace'")


def remedies(probe: Probe) -> list[str]:
    """Return what users can do on this host to get sandboxes with namespaces."""
    if probe.reason == CHROOT:
        return ["enter the directory as a container does: with pivot_root, such as by `systemd-nspawn -D`"]
    commands = []
    for name, (forbidding, allowing) in _LIMITS.items():
        path = "/proc/sys/" + name.replace(".", "/")
        if os.path.exists(path):
            with open(path, encoding="ascii") as stream:
                commands += [f"`sysctl {name}={allowing}`"] if stream.read().strip() == forbidding else []
    rights = "run where root may make namespaces (in a container: `--cap-add SYS_ADMIN`)"
    if os.geteuid() != 0:
        rights = "allow user namespaces (in a container, its seccomp profile may forbid them), or run as root"
    return commands or [rights]


def creation(
    place: str,
    sandbox: Mapping[str, Any],
    probe: Probe,
    *,
    hidden: Iterable[str] = (),
    own: Iterable[str] | None = None,
    packages: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the supervisor's request for a sandbox.

    Args:
        sandbox: its `description`.
        hidden, own, packages: see `view.view`.

    Raises:
        ConfigError, PolicyError: see `view.view`.
    """
    sandbox_id, is_isolated = sandbox["record"]["sandbox_id"], sandbox["record"]["isolation"] != "shared"
    by_user = is_isolated and not probe.namespaces
    over_system = sandbox["record"]["isolation"] == _OWN_ROOTS and sandbox["root"] is None
    record = dict(sandbox["record"], created=time.time(), user_namespace=by_user)
    seen = view.View((), (), ())
    if is_isolated:
        # Hide other sandboxes too: for an ordinary user, their files belong to our user.
        visible = [*sandbox["visible_paths"], *(_package_directories() if over_system else ())]
        seen = view.view(visible, [*hidden, place], own, packages)
    return {
        "state_root": place,
        "sandbox_id": sandbox_id,
        "isolated": is_isolated,
        "user_namespace": by_user,
        "reserve_uids": is_isolated and probe.root and not by_user,
        "no_network": sandbox["no_network"],
        "tmpfs_bytes": sandbox["tmpfs_bytes"],
        "binds": (*seen.binds, *_image_of(sandbox)),
        "symlinks": seen.symlinks,
        "masks": seen.masks,
        "unreadable": list(view.unreadable()) if over_system else None,
        "users": sandbox["users"],
        "command": sandbox["command"],
        "environment": view.base_environment({processes.MARKER: sandbox_id}),
        "record": record,
        "record_json": json.dumps(record),  # so that the supervisor need not import json
    }


def _package_directories() -> list[str]:
    return [path for path in mounts.PACKAGE_DIRECTORIES if os.path.isdir(path)]


def _image_of(sandbox: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Return the bind of the directory that slots' root directories start from, if there is one.

    Raises:
        ConfigError: no system is in that directory.
    """
    root = sandbox["root"]
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
    """Return the request to start a program in a sandbox. `python3` means the interpreter that runs us.

    The program's environment has PATH, LANG, HERMES_SANDBOX_ID, the sandbox's variables and `env`, but none of ours.
    """
    variables = {processes.MARKER: record.sandbox_id, **record.environment, **env}
    return {
        "isolated": record.is_isolated,
        "init": record.init,
        "command": [view.interpreter() if argv[0] == "python3" else argv[0], *argv[1:]],
        "environment": view.base_environment(variables),
        "directory": workspace_base(place, record),
    }


def end(place: str, record: SandboxRecord) -> None:
    """End a sandbox and remove its files. Idempotent. Blocks for some ms, or for half a minute if it does not end.

    If removing its files takes longer, the sandbox has ended when this returns, and its supervisor removes the rest.

    Raises:
        InfraError: the supervisor can't be ended from here.
    """
    path = os.path.join(place, record.sandbox_id)
    has_ended = processes.stop(record.supervisor, signal.SIGTERM, _END_S)
    if not has_ended and os.path.lexists(path):  # without this path, the supervisor is removing the renamed directory
        processes.stop(record.supervisor, signal.SIGKILL, _KILL_S)
    if os.path.lexists(path):  # the supervisor was killed before it removed the directory
        if not record.is_isolated:
            processes.kill_marked(record.sandbox_id)
        directories.discard_dead(path)
    if directories.is_held(path):
        raise InfraError(
            "the sandbox's supervisor can't be ended from here",
            hint=f"it is process {record.supervisor[0]}, perhaps of another pid namespace",
            sandbox_id=record.sandbox_id,
        )


# --- requests over a connection ------------------------------------------------------------------------------------


def main(request: dict[str, Any]) -> None:
    """Carry out a request that came over a connection. For `enter`, become a program in a sandbox.

    Otherwise, answer with JSON. Its field `magic` is the magic number of our bytecode.
    """
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
    sandbox, packages = request["sandbox"], request["packages"]
    probe = Probe(**probe_host())
    check(sandbox, probe)
    if packages is None:  # the search takes seconds on a cold disk, so the driver sends us our earlier result
        packages = list(view.package_folders(view.interpreter_prefixes()))
    if select.select([0], [], [], 0)[0] and not os.read(0, 1):
        sys.exit(1)  # the connection was closed meanwhile: don't create a sandbox that nobody knows of
    for _ in range(_ATTEMPTS):  # the end of the last sandbox may remove the directory just now
        open_place(place, "directory")
        sweep(place)
        report = _start_supervisor(creation(place, sandbox, probe, own=view.homes(), packages=packages))
        if "record" in report:
            return dict(_describe(place, SandboxRecord.of(report["record"])), packages=packages)
        if os.path.isdir(place):
            break
    raise HermesError("it could not be started: " + report["error"])


def _start_supervisor(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a supervisor, which outlives us and the connection. Return its report."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.setsid()  # so that the supervisor survives the connection
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor, source in ((0, null), (1, writer), (2, null)):
                os.dup2(source, descriptor)
            os.closerange(3, 256)
            os.chdir("/")
            supervisor.create(request)
            remove_if_empty(request["state_root"])
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
    os.write(1, b"\n")  # the sandbox is there, and all following output is the program's
    return supervisor.enter(entry(place, record, request["command"], request["env"]))


def _describe(place: str, record: SandboxRecord) -> dict[str, Any]:
    return dict(record._asdict(), workspace_base=workspace_base(place, record), running=runs(place, record.sandbox_id))


def _find(place: str, request: dict[str, Any]) -> dict[str, Any]:
    record = find(place, request["sandbox_id"])
    return {"sandbox": None if record is None else _describe(place, record)}


def _list(place: str, _request: dict[str, Any]) -> dict[str, Any]:
    return {"sandboxes": [_describe(place, record) for record in records(place)]}


def _probe(_place: str, _request: dict[str, Any]) -> dict[str, Any]:
    return dict(probe_host(), python=".".join(map(str, sys.version_info[:3])), interpreter=view.interpreter())


def _status(place: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"status": status(place, request["sandbox_id"])}


def _terminate(place: str, request: dict[str, Any]) -> dict[str, Any]:
    record = find(place, request["sandbox_id"])
    if record is not None:
        end(place, record)
    remove_if_empty(place)
    return {}


def remove_if_empty(place: str) -> None:
    """Remove the directory of the sandboxes if it is empty, so that nothing of ours stays on the host."""
    try:
        os.rmdir(place)
    except OSError:  # there are other sandboxes
        pass


_OPERATIONS = {
    "create": _create,
    "find": _find,
    "list": _list,
    "probe": _probe,
    "status": _status,
    "terminate": _terminate,
}
