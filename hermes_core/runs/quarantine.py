"""Quarantine files: they list items of a dataset that `hermes-rl validate` found unsound, and that runs leave out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hermes_core.environment import Environment, Item
from hermes_core.errors import ConfigError
from hermes_core.records.jsonable import plain

log = logging.getLogger(__name__)

FORMAT: Literal["hermes-rl/quarantine"] = "hermes-rl/quarantine"
VERSION = 1
"""The version of files written now. Files of newer versions are refused."""

_NAMED = 10
"""Maximum number of items that a message names."""


class _Part(BaseModel):
    """A part of the file. Unknown keys are ignored, because a later release may add keys."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class QuarantineReason(_Part):
    """The reason why an item is in quarantine, and the place of the evidence."""

    reason: str
    """`gold-fails`, `gold-flakes`, `nop-scores`, `nop-fails`, `cheat-solves`, `doubted` or `differs`."""
    text: str = ""
    backend: str | None = None
    """The backend's name in the validation; None if the reason concerns several backends."""
    agent: str | None = None
    rewards: list[float | None] = Field(default_factory=list)
    """The rewards of the agent's rollouts; None for a rollout without a reward."""
    run: str | None = None
    """The run's folder, relative to the validation's folder."""
    records: list[str] = Field(default_factory=list)
    """The trajectory ids of these rollouts in the run."""


class QuarantinedItem(_Part):
    """One item that runs leave out."""

    item_id: str = Field(min_length=1)
    fingerprint: str | None = None
    """The fingerprint of the item's row; None means that the row is not checked."""
    reasons: list[QuarantineReason] = Field(default_factory=list)


class QuarantinedDataset(_Part):
    """The dataset that was validated."""

    fingerprint: str
    items: int


class QuarantineFile(_Part):
    """A quarantine file. See docs/guides/validating.md."""

    format: Literal["hermes-rl/quarantine"]
    version: int
    environment: str
    """The environment's name."""
    dataset: QuarantinedDataset | None = None
    """The dataset that was validated; None means that the dataset is not checked."""
    validated: dict[str, Any] = Field(default_factory=dict)
    """Time and settings of the validation, for readers."""
    items: list[QuarantinedItem]


@dataclass(frozen=True)
class Fingerprints:
    """Hashes that identify the content of a dataset: the same on any host, and for any order of the rows."""

    dataset: str
    items: Mapping[str, str]
    """The fingerprint of each row, by the item's id."""

    @classmethod
    def of(cls, environment: Environment) -> Fingerprints:
        """Return the fingerprints of an environment's dataset, which must be loaded. Blocking."""
        rows = environment.items()
        items = {environment.item_id(item): _fingerprint(item) for item in (rows[n] for n in range(len(rows)))}
        whole = hashlib.sha256()
        for item_id in sorted(items):
            whole.update(json.dumps([item_id, items[item_id]]).encode())
        return cls(f"sha256:{whole.hexdigest()}", items)


def _fingerprint(item: Item) -> str:
    text = json.dumps(plain(item), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Quarantine:
    """A quarantine file that a run uses."""

    path: Path
    file: QuarantineFile

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a quarantine file. Blocking.

        Raises:
            ConfigError: the file can't be read, is no quarantine file, or was written by a newer version.
        """
        wrong = f"{path} is no quarantine file"
        try:
            content = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"can't read the quarantine {path}: {error.strerror}", hint="check its name") from error
        except ValueError as error:
            raise ConfigError(f"{wrong}: {error}", hint="name the quarantine.json of a validation") from error
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(f"{path} has version {version} of the format", hint="update hermes-rl to read it")
        try:
            return cls(Path(path), QuarantineFile.model_validate(content))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            hint = "name the quarantine.json of a validation"
            raise ConfigError(f"{wrong}: {place or 'it'}: {first['msg']}", hint=hint) from error

    @property
    def item_ids(self) -> frozenset[str]:
        """Return the ids of the items that are left out."""
        return frozenset(item.item_id for item in self.file.items)

    def to_configuration(self) -> dict[str, Any]:
        """Return the values that identify the quarantine in a run's configuration: the items, without the reasons."""
        ids = sorted(self.item_ids)
        return {"items": len(ids), "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]}

    def check(self, name: str, environment: Environment) -> None:
        """Check that the file was made of this environment's dataset, and log how many items are left out. Blocking.

        The dataset may have changed since it was validated. Warnings name quarantined items that the dataset no longer
        has, and those whose rows have changed.

        Args:
            name: the environment's name.

        Raises:
            ConfigError: the file was made of another environment or dataset, or leaves out every item.
        """
        if self.file.environment != name:
            raise ConfigError(
                f"the quarantine {self.path} is of environment {self.file.environment!r}, not of {name!r}",
                hint="validate this one",
            )
        here = Fingerprints.of(environment)
        known = self.item_ids & here.items.keys()
        if self.item_ids and not known:
            raise ConfigError(
                f"the quarantine {self.path} is of another dataset: it names {_some(self.item_ids)}, and none of these "
                "is here",
                hint="validate this dataset",
            )
        if len(known) == len(here.items):
            raise ConfigError(f"the quarantine {self.path} leaves out every item", hint="fix the dataset")
        if self.file.dataset is None or self.file.dataset.fingerprint != here.dataset:
            self._tell_differences(here)
        log.warning("the quarantine %s leaves out %d of %d items", self.path, len(known), len(here.items))

    def _tell_differences(self, here: Fingerprints) -> None:
        if self.file.dataset is not None:
            log.warning(
                "the quarantine %s was made of another state of this dataset: validate it again, as items that were "
                "sound may have changed",
                self.path,
            )
        if unknown := self.item_ids - here.items.keys():
            log.warning("the quarantine %s names items that the dataset does not have: %s", self.path, _some(unknown))
        changed = {
            item.item_id
            for item in self.file.items
            if item.fingerprint is not None and here.items.get(item.item_id, item.fingerprint) != item.fingerprint
        }
        if changed:
            log.warning(
                "these items were changed after they were validated, and are left out all the same: %s", _some(changed)
            )


def _some(item_ids: frozenset[str] | set[str]) -> str:
    named = sorted(item_ids)
    return ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")
