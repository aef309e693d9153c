"""The error tree. Every error says what failed, where (sandbox, slot, trajectory), and what to do next.

This module is also loaded on hosts with Python 3.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E", bound="HermesError")

LISTED, LISTED_BESIDE = 30, 8
"""Maximum number of names that a hint lists if there is no nearest name, and if there is one."""


class _Word(str, Enum):
    """A string enum that prints as its value, like `StrEnum` since Python 3.11."""

    __str__ = str.__str__


class ErrorKind(_Word):
    """Why a tool call did not succeed, as carried by `ExecutionResult.error_kind`.

    `command` means that the command itself failed, which is data; `timeout`, that the call's time limit passed;
    `policy`, that the rules of the slot refused the call; and `infra`, that we failed: provisioning, transport, a lost
    sandbox. Only after `infra` is a call retried on a fresh slot.
    """

    COMMAND = "command"
    TIMEOUT = "timeout"
    INFRA = "infra"
    POLICY = "policy"


class FailureKind(_Word):
    """Why a rollout failed, as carried by the trajectory record's `failure.kind`."""

    INFRA = "infra"
    IMAGE = "image"
    SETUP = "setup"
    MODEL = "model"
    VERIFIER = "verifier"
    CANCELLED = "cancelled"


class HermesError(Exception):
    """Base of every error that hermes-rl raises on purpose.

    Args:
        message: what went wrong, in one sentence.
        hint: what to do next, in one sentence.
        sandbox_id: the sandbox in which the error occurred, if known.
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
        """Return the same error as another object, which can be changed without affecting other holders of the error.

        Unlike `copy.copy`, this does not call a subclass's `__init__`, because only the subclass knows its arguments.
        """
        builtin = next(kind for kind in type(self).__mro__ if kind.__module__ == "builtins")
        twin = builtin.__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class UsageError(HermesError):
    """The caller asked for something impossible: a wrong name, value or combination. Exit code 2."""


class ConfigError(UsageError):
    """A configuration file, environment variable or option is wrong."""


class UnknownNameError(UsageError):
    """There is no backend, environment, tool, profile, level or key of this name."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, where: str = "", hint: str | None = None) -> None:
        self.name = name
        self.known = sorted(known)
        place = f" {where}" if where else ""
        super().__init__(f"unknown {what} {name!r}{place}", hint=hint or nearest_hint(name, self.known))


class PluginError(HermesError):
    """A plugin could not be loaded, clashes with another plugin, or was made for another plugin API."""


class DatasetError(HermesError):
    """A dataset or one of its rows can't be used. The message names the row and the field."""


class PolicyError(HermesError):
    """The rules of the sandbox refuse an operation, because of an isolation level, a network policy, a path or a
    capability."""


class NoPythonError(PolicyError):
    """The sandbox has no Python for the guest; the direct mode is for such sandboxes."""


class InfraError(HermesError):
    """Provisioning or transport failed, or a sandbox was lost. Never the model's fault, never turned into a reward."""

    retryable: bool = True
    """Whether another attempt may help."""


class ProvisionError(InfraError):
    """A sandbox could not be created or prepared.

    Args:
        retryable: whether another attempt may help. It can't help if an image does not exist or a key is wrong. None is
            the class's default.
        where: see `HermesError`.
    """

    def __init__(self, message: str, *, retryable: bool | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        if retryable is not None:
            self.retryable = retryable


class ImageError(ProvisionError):
    """An image can't be built or fetched, and another attempt does not help: its Dockerfile fails or takes too long, or
    no registry gives us the image."""

    retryable = False


class ChannelLost(InfraError):
    """The byte stream to the sandbox broke. The sandbox itself may still be alive."""


class SandboxLost(InfraError):
    """The sandbox died, or could not be reached again before its deadline."""


class SlotLost(InfraError):
    """The slot is gone with its sandbox, or was quarantined."""


class SlotUnclean(SlotLost):
    """The slot was quarantined: a process of its commands may still live, or the commands changed the slot so that we
    can't enter it.

    If processes die slowly, this is the fault of the program that started them. So in an agent's own slot, this error
    is the agent's result, and not an infrastructure failure.
    """


class Disturbed(InfraError):
    """Our own work in a slot was killed or ran out of room, before any of the agent's code ran there. The host, or
    other slots, are short of memory, processes or disk."""


DISTURBANCES = frozenset({"killed", "no_space", "spawn"})
"""Codes of a `CommandError` that mean `Disturbed` as long as none of the agent's code has run."""


class AcquireTimeout(InfraError):
    """No slot became free before the deadline. The message has the pool's counts."""


class StaleSlotError(UsageError):
    """A slot handle was used after its lease had been released."""


class CommandError(HermesError):
    """A command or file operation inside the slot failed, and the sandbox did not (missing file, bad directory).

    `code` is a stable word for the reason: `not_found`, `is_a_directory`, `not_a_directory`, `permission`,
    `not_a_file`, `exists`, `no_space`, `too_large`, `invalid`, `no_pty`, `unknown_process`, `spawn`,
    `killed`, `failed`. For a command, `not_found`, `permission` and `not_a_directory` are about the program; if its
    working directory can't be used, the codes are `cwd_not_found`, `cwd_permission` and `cwd_not_a_directory`.
    """

    def __init__(
        self, message: str, *, code: str = "failed", hint: str | None = None, slot_id: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, slot_id=slot_id)
        self.code = code


class ToolArgumentError(HermesError):
    """A tool was called with arguments that its schema refuses. This is an answer to the model, not a crash."""


class SetupFailed(HermesError):
    """An environment's workspace setup failed because of the task or the environment."""


class VerifierError(HermesError):
    """The verification itself failed (not the agent's work): no reward is given."""


class RolloutEnded(HermesError):
    """A call was made for a rollout that has ended: its time is up, it failed, or its model was done."""


class OutputError(HermesError):
    """The output of a run can't be written."""


class ModelError(HermesError):
    """The model's endpoint failed: unreachable, refused, rate-limited for too long, or answering nonsense."""

    result: Any = None
    """The `AgentResult` up to the failure, set by the agent that met it."""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Return one line that names the known word nearest to `name`. The line lists the known words if they are few or if
    none of them is near."""
    import difflib  # imported here, because most programs that import this module never need it

    names = sorted(known)
    listed = ", ".join(names[:LISTED]) + (f", … ({len(names)} in all)" if len(names) > LISTED else "")
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?" + (f" known: {listed}" if len(names) <= LISTED_BESIDE else "")
    return f"known: {listed}" if names else "there are none"


def describe(error: BaseException) -> str:
    """Return an exception in one line: `ImportError: No module named 'docker'`. For a group, its first exception is
    returned in this form."""
    grouped = getattr(error, "exceptions", ())  # only a group has them
    if grouped:
        return describe(grouped[0])
    if isinstance(error, HermesError):
        return str(error)
    return f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(": ")


BUG_HINT = "a bug in the plugin: `hermes-rl --traceback …` shows where"
"""The hint of an error that a plugin should not have raised."""


@contextmanager
def explain_errors(
    explain: Callable[[Exception], HermesError], but: type[Exception] | tuple[type[Exception], ...] = HermesError
) -> Iterator[None]:
    """Run a block that calls a plugin's code. If the code raises an unexpected `error`, raise `explain(error)` instead.

    Args:
        but: the types of the expected exceptions, which are raised unchanged.
    """
    try:
        yield
    except but:
        raise
    except Exception as error:
        raise explain(error) from error


def plugin_fault(made_by_plugin: object, method: str, error: Exception, **where: Any) -> ProvisionError:
    """Return the error for an exception that a backend or its sandbox should not have raised.

    Args:
        made_by_plugin: the backend or sandbox.
        method: its method that raised `error`.
        where: see `HermesError`.
    """
    return ProvisionError(
        f"{type(made_by_plugin).__name__}.{method}() raised {describe(error)}",
        hint=f"{BUG_HINT}; what users can fix should be a ProvisionError, PolicyError or ChannelLost",
        retryable=False,
        **where,
    )


def wrong_answer(made_by_plugin: object, method: str, answer: object, wanted: str, **where: Any) -> ProvisionError:
    """Return the error for a value that a backend, its sandbox or channel should not have returned.

    Args:
        made_by_plugin: the backend, sandbox or channel.
        method: its method that returned `answer`.
        wanted: a description of the right value: "a Sandbox".
        where: see `HermesError`.
    """
    return ProvisionError(
        f"{type(made_by_plugin).__name__}.{method}() returned {answer!r:.80}, which is not {wanted}",
        hint="a bug in the plugin",
        retryable=False,
        **where,
    )
