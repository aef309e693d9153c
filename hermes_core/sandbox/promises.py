"""Checks that a backend's declarations and answers keep the contract. Violations are faults of its author."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import Enum
from functools import partial

from hermes_core.aio import exits_are_errors
from hermes_core.errors import HermesError, PluginError, describe, explain_errors, plugin_fault, wrong_answer
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxStatus,
)

log = logging.getLogger(__name__)

_METHODS = {
    "attach": ("CanAttach", ("attach",)),
    "snapshot": ("CanSnapshot", ("snapshot", "restore")),
    "builds": ("CanBuild", ("prepare_image",)),
}
"""Maps each capability that requires methods to the protocol of these methods and their names."""


_KINDS = {"sandbox_id": str, "owner": str, "creation_id": str, "created": int | float, "status": SandboxStatus}
"""The types of the fields of a `SandboxInfo`."""


def check_declarations(backend: Backend, what: str) -> None:
    """Refuse a backend whose declarations have wrong types.

    Args:
        what: a description of the backend for errors: `backend 'acme' of plugin 'acme' (hermes-rl-acme 1.0)`.

    Raises:
        PluginError: a declaration is wrong. The hint says what to write.
    """
    _check_config_class(backend, what)
    _check_capabilities(backend, _capabilities(backend, what), what)


def _check_config_class(backend: Backend, what: str) -> None:
    kind: object = backend.config_class
    if not (isinstance(kind, type) and issubclass(kind, SandboxConfig)):
        raise PluginError(f"{what} has {kind!r} as config_class", hint="make it a subclass of SandboxConfig")
    unsupported: object = kind.unsupported
    if not isinstance(unsupported, Collection) or isinstance(unsupported, str):
        raise PluginError(
            f"{what}: {kind.__name__}.unsupported is {unsupported!r}",
            hint='write the names of settings: unsupported = ("image", "cpu")',
        )
    unknown = [key for key in unsupported if key not in kind.model_fields]
    if unknown:
        raise PluginError(
            f"{what}: {kind.__name__}.unsupported names {unknown[0]!r}, which is none of its settings",
            hint="name fields of the class or of SandboxConfig",
        )


def _capabilities(backend: Backend, what: str) -> Capabilities:
    hint = "write capabilities = Capabilities(isolation=frozenset({Isolation.SHARED})), with the levels that it gives"
    unread = f"{what}: its capabilities can't be read"
    with explain_errors(lambda error: PluginError(f"{unread}: {describe(error)}", hint=hint)):
        can: object = backend.capabilities
    if not isinstance(can, Capabilities):
        raise PluginError(f"{what} has a {type(can).__name__} as capabilities: {can!r}", hint=hint)
    return can


def _check_capabilities(backend: Backend, can: Capabilities, what: str) -> None:
    _check_set(can.isolation, Isolation, f"{what}: isolation of its capabilities")
    _check_set(can.network, Network, f"{what}: network of its capabilities")
    for key in (each.name for each in fields(can) if each.name not in ("isolation", "network")):
        value: object = getattr(can, key)
        if not isinstance(value, bool):
            raise PluginError(
                f"{what}: {key} of its capabilities is {value!r}", hint=f"write {key}=True or leave it out"
            )
    for key, (protocol, methods) in _METHODS.items():
        absent = [each for each in methods if not callable(getattr(backend, each, None))]
        if getattr(can, key) and absent:
            raise PluginError(
                f"{what} declares {key}=True and has no method {' or '.join(absent)}",
                hint=f"write what {protocol} in hermes_core.sandbox.contract describes, or leave out {key}=True",
            )


def _check_set(declared: object, kind: type[Enum], where: str) -> None:
    if isinstance(declared, AbstractSet) and all(isinstance(each, kind) for each in declared):
        return
    example = f"{kind.__name__}.{next(iter(kind)).name}"
    raise PluginError(f"{where} is {declared!r}", hint=f"write a set of {kind.__name__}: frozenset({{{example}}})")


def levels_of(backend: Backend, config: SandboxConfig) -> frozenset[Isolation]:
    """Return the declared levels that the backend's `levels` allows for a profile.

    Raises:
        HermesError: `levels` raised an error, or did not return a set of levels.
    """
    with explain_errors(partial(plugin_fault, backend, "levels")):
        levels: object = backend.levels(config.for_backend())
    if not (isinstance(levels, AbstractSet) and all(isinstance(each, Isolation) for each in levels)):
        raise wrong_answer(backend, "levels", levels, "a set of Isolation")
    return backend.capabilities.isolation & levels


async def create_sandbox(backend: Backend, method: str, make: Callable[[], Awaitable[object]]) -> Sandbox:
    """Make a sandbox by calling `make`.

    Args:
        method: the name of the backend's method that `make` calls: `create` or `restore`.

    Raises:
        HermesError: the method raised an error, or did not return a sandbox.
    """
    with explain_errors(partial(plugin_fault, backend, method)):
        sandbox = await make()
    if not (isinstance(sandbox, Sandbox) and isinstance(getattr(sandbox, "id", None), str)):
        raise wrong_answer(backend, method, sandbox, "a Sandbox with an `id`")
    return sandbox


async def list_sandboxes(backend: Backend, owner: str | None = None) -> list[SandboxInfo]:
    """Return the result of the backend's `list`.

    Raises:
        HermesError: `list` raised an error, or did not return a list of SandboxInfo.
    """
    with explain_errors(partial(plugin_fault, backend, "list")):
        infos: object = await backend.list(owner)
    if not isinstance(infos, Sequence) or isinstance(infos, str):
        raise wrong_answer(backend, "list", infos, "a list of SandboxInfo")
    for info in infos:
        if not isinstance(info, SandboxInfo):
            raise wrong_answer(backend, "list", infos, f"a list of SandboxInfo: it has {info!r:.80}")
        for key, kind in _KINDS.items():
            if not isinstance(getattr(info, key), kind):
                field = f"{key} of a SandboxInfo is {getattr(info, key)!r:.80}"
                raise wrong_answer(backend, "list", infos, f"right: {field}, not a {getattr(kind, '__name__', kind)}")
    return list(infos)


async def diagnosis_of(backend: Backend) -> Diagnosis:
    """Return the result of the backend's `check`.

    Raises:
        HermesError: `check` raised this error.
        PluginError: `check` raised another error, or did not return a Diagnosis.
    """
    method = f"{type(backend).__name__}.check()"
    try:
        with exits_are_errors():
            diagnosis: object = await backend.check()
    except HermesError:
        raise
    except Exception as error:
        log.debug("%s failed", method, exc_info=error)
        raise PluginError(
            f"{method} raised {describe(error)}",
            hint="a bug in the plugin: `hermes-rl -vv doctor` shows where; what users can fix should be a "
            "Diagnosis(False, …)",
        ) from error
    if not isinstance(diagnosis, Diagnosis):
        raise PluginError(
            f"{method} returned {type(diagnosis).__name__}, not a Diagnosis",
            hint="a bug in the plugin: `check` is to return Diagnosis(usable, summary)",
        )
    if not _is_printable(diagnosis):
        raise PluginError(
            f"{method} returned {diagnosis!r}, with an empty field or one of another type",
            hint="a bug in the plugin: usable is a bool, summary says something, details and advice have texts",
        )
    return diagnosis


def _is_printable(diagnosis: Diagnosis) -> bool:
    lists: tuple[object, ...] = (diagnosis.details, diagnosis.advice)
    return (
        isinstance(diagnosis.usable, bool)
        and isinstance(diagnosis.summary, str)
        and bool(diagnosis.summary.strip())
        and all(isinstance(each, tuple | list) and all(isinstance(text, str) for text in each) for each in lists)
    )
