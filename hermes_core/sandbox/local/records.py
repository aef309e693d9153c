"""What the driver knows of the local sandboxes of this host: the state directory and the record that each has there."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_core.errors import PolicyError
from hermes_core.sandbox.contract import Isolation, SandboxInfo, SandboxStatus
from hermes_core.sandbox.local import directories, processes


@dataclass(frozen=True)
class Record:
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
    """The same of the first process; its pid as seen from outside."""
    uid_base: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def isolated(self) -> bool:
        """Whether the sandbox has namespaces of its own."""
        return self.isolation != Isolation.SHARED.label

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Record:
        """From what a supervisor reports or has written. Raises KeyError, TypeError or ValueError if wrong."""
        processes = {}
        for key in ("supervisor", "init"):
            pid, started = values[key]
            processes[key] = (int(pid), int(started))
        return cls(**{**values, **processes})


def sandbox_id_of(creation_id: str) -> str:
    """Return the id of the one sandbox that can have this creation id on a host."""
    return directories.PREFIX + hashlib.sha256(creation_id.encode()).hexdigest()[:20]


def open_state_root(wanted: str | None) -> Path:
    """The directory that holds every sandbox of this user, made if need be.

    Slots' users may pass through it but not list it.

    Raises:
        PolicyError: it can't be made, is a link, or someone else could put things there.
    """
    path = Path(wanted).absolute() if wanted else Path(tempfile.gettempdir()).absolute() / f"hermes-rl-{os.geteuid()}"
    hint = "name another one by `state_dir`"
    try:
        path.mkdir(mode=0o711, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise PolicyError(f"the state directory {path} can't be made: {error.strerror}", hint=hint) from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise PolicyError(f"the state directory {path} is a link, or belongs to another user", hint=hint)
    if info.st_mode & 0o022:
        raise PolicyError(f"others can write to the state directory {path}", hint=f"`chmod 711 {path}`, or {hint}")
    return path


def read(path: Path) -> Record | None:
    """The record of the sandbox whose directory this is; None if it has none (yet), or an unreadable one."""
    try:
        return Record.of(json.loads((path / directories.RECORD).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def all_records(root: Path) -> Iterator[Record]:
    """Every record of a state directory."""
    for path in sorted(root.glob(directories.PREFIX + "*")):
        record = read(path)
        if record is not None:
            yield record


def info_of(root: Path, record: Record) -> SandboxInfo:
    """The record as a line of `Backend.list`."""
    living = directories.held(str(root / record.sandbox_id))
    status = SandboxStatus.RUNNING if living else SandboxStatus.ENDED
    return SandboxInfo(record.sandbox_id, record.owner, record.creation_id, record.created, status)


def sweep(root: Path) -> int:
    """Remove what dead supervisors left; the number of directories removed. Blocking."""
    removed = 0
    for leftover in directories.leftovers(str(root)):
        record = read(Path(leftover))
        if record is not None and not record.isolated:  # with namespaces, its processes died with their init
            processes.kill_marked(record.sandbox_id)
        removed += directories.discard_dead(leftover)
    return removed
