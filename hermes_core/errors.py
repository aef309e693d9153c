"""The error tree: every error says what went wrong, where (sandbox, slot, trajectory) and what to do next.

Hosts with Python 3.7 load this too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound="HermesError")

LISTED, LISTED_BESIDE = 30, 8
"""Names that a hint lists at most: by themselves, and beside the nearest one."""


class _Word(str, Enum):
    """One of some words, written as itself: what `StrEnum` is since Python 3.11."""

    __str__ = str.__str__


class ErrorKind(_Word):
    """Why a tool call did not succeed, as carried by `ExecutionResult.error_kind`.

    `command` is data (the command itself failed), `timeout` its time limit, `policy` a refusal by the rules of the
    slot, and `infra` ours: provisioning, transport, a lost sandbox. Only `infra` is retried on a fresh slot.
    """

    COMMAND = "command"
    TIMEOUT = "timeout"
    INFRA = "infra"
    POLICY = "policy"


class FailureKind(_Word):
    """Why a rollout has no reward, as carried by the trajectory record's `failure.kind`."""

    INFRA = "infra"
    SETUP = "setup"
    MODEL = "model"
    VERIFIER = "verifier"
    CANCELLED = "cancelled"


class HermesError(Exception):
    """Base of every error that hermes-rl raises on purpose.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next, in one sentence.
        sandbox_id: the sandbox where it happened, if known.
        slot_id: the slot, if known.
        trajectory_id: the rollout, if known.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        sandbox_id: str | None = None,
        slot_id: str | None = None,
        trajectory_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sandbox_id = sandbox_id
        self.slot_id = slot_id
        self.trajectory_id = trajectory_id

    def __str__(self) -> str:
        places = (("sandbox", self.sandbox_id), ("slot", self.slot_id), ("trajectory", self.trajectory_id))
        where = ", ".join(f"{word} {value}" for word, value in places if value)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def twin(self: E) -> E:
        """The same error as another object, to be changed by one of several who were given it.

        A subclass's `__init__` is not called, whose arguments nobody but the subclass knows: `copy.copy` would.
        """
        builtin = next(kind for kind in type(self).__mro__ if kind.__module__ == "builtins")
        twin = builtin.__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class UsageError(HermesError):
    """The caller asked for something that cannot be: a wrong name, value or combination. Exit code 2."""


class ConfigError(UsageError):
    """A configuration file, environment variable or option is wrong."""


class UnknownNameError(UsageError):
    """A backend, environment, tool, profile, level or key of that name does not exist."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, where: str = "", hint: str | None = None) -> None:
        self.name = name
        self.known = sorted(known)
        place = f" {where}" if where else ""
        super().__init__(f"unknown {what} {name!r}{place}", hint=hint or nearest_hint(name, self.known))


class PluginError(HermesError):
    """A plugin could not be loaded, clashes with another, or was made for another plugin API."""


class DatasetError(HermesError):
    """A dataset, or one row of it, cannot be used; names the row and the field."""


class PolicyError(HermesError):
    """The rules of the sandbox refuse this: an isolation level, a network policy, a path, a capability."""


class NoPythonError(PolicyError):
    """The sandbox has no Python for the guest; the direct mode is for such sandboxes."""


class InfraError(HermesError):
    """Provisioning, transport or a lost sandbox. Never the model's doing, never turned into a reward."""


class ProvisionError(InfraError):
    """A sandbox could not be created or prepared.

    Args:
        retryable: whether trying again may help; not with an image that does not exist, or a wrong key. None is what
            the class says.
        where: as for `HermesError`.
    """

    retryable: bool = True

    def __init__(self, message: str, *, retryable: bool | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        if retryable is not None:
            self.retryable = retryable


class ChannelLost(InfraError):
    """The byte stream to the sandbox broke; the sandbox itself may well be alive."""


class SandboxLost(InfraError):
    """The sandbox died, or could not be reached again before its deadline."""


class SlotLost(InfraError):
    """The slot is gone with its sandbox, or was quarantined."""


class SlotUnclean(SlotLost):
    """The slot was quarantined, as it could not be proved that everything that its commands had started is dead.

    What dies slowly is the doing of whoever started it: of an agent's own slot this is its result, and no
    infrastructure failure.
    """


class Disturbed(InfraError):
    """Work of ours in a slot was killed, or found no room, where nothing of an agent's ran yet: neighbours or the host
    are short of memory, processes or disk."""


DISTURBANCES = frozenset({"killed", "no_space", "spawn"})
"""Codes of a `CommandError` that is `Disturbed`, where nothing of an agent's ran yet."""


class AcquireTimeout(InfraError):
    """No slot became free before the deadline; carries the pool's counts in its message."""


class StaleSlotError(UsageError):
    """A slot handle was used after its lease had been released."""


class CommandError(HermesError):
    """A command or file operation inside the slot failed for a reason of its own (missing file, bad directory).

    `code` is a stable word for the reason: `not_found`, `is_a_directory`, `not_a_directory`, `permission`,
    `not_a_file`, `exists`, `no_space`, `too_large`, `invalid`, `no_pty`, `unknown_process`, `spawn`, `killed`,
    `failed`. Of a command, `not_found`, `permission` and `not_a_directory` mean the program; where its working
    directory can't be used they are `cwd_not_found`, `cwd_permission` and `cwd_not_a_directory`.
    """

    def __init__(
        self, message: str, *, code: str = "failed", hint: str | None = None, slot_id: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, slot_id=slot_id)
        self.code = code


class ToolArgumentError(HermesError):
    """A tool was called with arguments that its schema refuses: an answer to the model, not a crash."""


class SetupFailed(HermesError):
    """An environment's workspace set-up failed for a reason that lies in the task or the environment."""


class VerifierError(HermesError):
    """The verification itself failed (not the agent's work): no reward is given."""


class OutputError(HermesError):
    """What a run writes can't be written."""


class ModelError(HermesError):
    """The model's endpoint failed: unreachable, refused, rate-limited beyond patience, or answering garbage."""

    result: Any = None
    """The `AgentResult` up to the failure, set by the agent that met it."""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """One line that names the nearest known word to `name`, and lists what there is if it is little or nothing near."""
    names = sorted(known)
    listed = ", ".join(names[:LISTED]) + (f", … ({len(names)} in all)" if len(names) > LISTED else "")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?" + (f" known: {listed}" if len(names) <= LISTED_BESIDE else "")
    return f"known: {listed}" if names else "there are none"


def describe(error: BaseException) -> str:
    """An exception in one line: `ImportError: No module named 'docker'`; the first one of a group."""
    grouped = getattr(error, "exceptions", ())  # only a group has them
    if grouped:
        return describe(grouped[0])
    if isinstance(error, HermesError):
        return str(error)
    return f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(": ")
