"""The checkpoint of a driver: its sandboxes and leases, so that another driver can take them over after its death.

The checkpoint does not list processes: the guests know them, and tell the driver that takes over.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_core.errors import ConfigError, UsageError
from hermes_core.sandbox.contract import Isolation, SandboxConfig
from hermes_core.sandbox.pool.leases import PooledSandbox, Watch

log = logging.getLogger(__name__)

CHECKPOINT, LOCK = "processes.json", "processes.lock"
VERSION: Literal[1] = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SavedLease(_Model):
    """The lease of a slot."""

    trajectory_id: str
    watches: dict[str, Watch] = Field(default_factory=dict)
    """The watches of background processes, by process id."""


class SavedSandbox(_Model):
    """A sandbox, and the identity of its guest, which proves that it is still the same sandbox."""

    backend: str
    sandbox_id: str
    creation_id: str
    profile: str
    config: dict[str, Any]
    """The profile's settings."""
    isolation: str
    instance: str
    boot_id: str
    began: int
    """With `instance` and `boot_id`, the identity of its guest: see `GuestLife`."""
    leases: dict[int, SavedLease] = Field(default_factory=dict)
    """The leases by the index of the slot."""


class _CheckpointFile(_Model):
    version: Literal[1]
    owner: str
    sandboxes: list[SavedSandbox]
    unsettled: dict[str, str] = Field(default_factory=dict)
    """The backends of sandboxes that are being made or ended, by creation id."""


class Checkpoint:
    """The file `processes.json` in a directory, which is locked while this object is open. A context manager.

    Each change replaces the file by a rename, so that after `kill -9` it holds either the old or the new content. The
    kernel releases the lock when its holder dies.

    Args:
        folder: the directory. It is made if necessary, for this user only.
        owner: the owner of the sandboxes, unless there is a file, which names the owner.

    Raises:
        UsageError: a living driver uses the directory, or we can't use it.
        ConfigError: this version can't read the file.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.path = folder / CHECKPOINT
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"can't use {folder} for the checkpoint: {error.strerror}", hint="choose another name"
            ) from error
        try:
            self._take_lock(folder)
            saved = _read(self.path)
        except BaseException:
            os.close(self._lock)
            raise
        self.owner = owner if saved is None else saved.owner
        self.sandboxes: dict[str, SavedSandbox] = {}
        """The sandboxes by creation id."""
        self.orphans: dict[str, str] = {}
        """The backends of sandboxes that an earlier driver was making or ending when it died, by creation id."""
        self._unsettled: dict[str, str] = {}
        if saved is not None:
            self.sandboxes = {each.creation_id: each for each in saved.sandboxes}
            self.orphans = saved.unsettled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory. The file stays, unless it is empty. Idempotent."""
        if self._lock < 0:
            return
        if not (self.sandboxes or self.orphans or self._unsettled):
            self.path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def save(self) -> None:
        """Write the file. If that fails, only log the error."""
        if self._lock < 0:
            return
        sandboxes, unsettled = list(self.sandboxes.values()), self.orphans | self._unsettled
        content = _CheckpointFile(version=VERSION, owner=self.owner, sandboxes=sandboxes, unsettled=unsettled)
        new = self.path.with_suffix(".new")
        try:
            new.write_text(content.model_dump_json(indent=1), encoding="utf-8")
            new.chmod(0o600)
            new.replace(self.path)
        except OSError as error:
            log.error("%s was not written, and after a crash now sandboxes could not be found: %s", self.path, error)

    def record(self, backend: str, isolation: Isolation, pooled: PooledSandbox, config: SandboxConfig) -> None:
        """Write a sandbox and its leases to the file, if it can be taken over."""
        life = pooled.client.life
        if life is None:
            return
        self._unsettled.pop(pooled.creation_id, None)
        self.sandboxes[pooled.creation_id] = SavedSandbox(
            backend=backend,
            sandbox_id=pooled.sandbox.id,
            creation_id=pooled.creation_id,
            profile=config.name,
            config=config.model_dump(mode="json", exclude_unset=True),
            isolation=isolation.label,
            instance=life.instance,
            boot_id=life.boot_id,
            began=life.began,
            leases={
                lease.seat.index: SavedLease(trajectory_id=lease.slot.trajectory_id or "", watches=lease.watches)
                for lease in pooled.leases
                if lease.release is None
            },
        )
        self.save()

    def note(self, backend: str, creation_id: str) -> None:
        """Write that a sandbox is about to be made or ended. If we die then, the next driver ends it."""
        self.sandboxes.pop(creation_id, None)
        self._unsettled[creation_id] = backend
        self.save()

    def settle(self, creation_id: str) -> None:
        """Write that there is no sandbox with this creation id any more."""
        if self._unsettled.pop(creation_id, None) is not None:
            self.save()

    def give_up(self, saved: SavedSandbox) -> None:
        """Write that a sandbox can't be taken over, so that it will be ended as an orphan."""
        self.sandboxes.pop(saved.creation_id, None)
        self.orphans[saved.creation_id] = saved.backend
        self.save()

    def _take_lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"another driver that lives uses {folder}"
            raise UsageError(message, hint="wait for it to end, or choose another directory") from error


def read_checkpoint(path: Path) -> list[SavedSandbox]:
    """Return the sandboxes of a checkpoint without locking it, only to show them.

    Raises:
        ConfigError: this version can't read the file.
    """
    saved = _read(path)
    return [] if saved is None else saved.sandboxes


def _read(path: Path) -> _CheckpointFile | None:
    try:
        return _CheckpointFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} things in it are wrong"
        raise ConfigError(
            f"{path} can't be used as a checkpoint: {reason}",
            hint="if another version wrote it, let that one end what it holds; else remove the file, and"
            " `hermes-rl ps` lists the sandboxes that it may have been about",
        ) from error
