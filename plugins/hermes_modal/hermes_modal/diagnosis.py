"""Finds out for `hermes-rl doctor` whether Modal can be used here, and with which profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import modal
from modal import exception
from modal.config import config as modal_config
from modal.config import user_config_path

from hermes_core import ConfigError, Diagnosis, HermesError, UsageError
from hermes_core.terminal.settings import explain
from hermes_modal import requests
from hermes_modal.account import FAILURES, Account
from hermes_modal.config import FILE_VARIABLE, NAMES_VARIABLE, ModalSandboxConfig, load_profiles

HELLO_LIMIT_S = 10.0
"""Time limit in seconds for Modal's first answer."""

Read = Callable[[], Mapping[str, ModalSandboxConfig]]


async def diagnose(account: Account, profiles: Mapping[str, Mapping[str, Any]]) -> Diagnosis:
    """Connect, and look up everything that the profiles name. Never raises.

    Args:
        profiles: the profiles of the runtime's settings, by name.
    """
    url = str(modal_config.get("server_url"))
    try:
        client = await account.client()
        await account.call(client.hello.aio(), HELLO_LIMIT_S)
    except ConfigError as error:
        return Diagnosis(False, error.message, advice=(error.hint or "",))
    except exception.AuthError as error:
        advice = ("`modal token new` makes another; MODAL_TOKEN_ID and MODAL_TOKEN_SECRET come before ~/.modal.toml",)
        return Diagnosis(False, f"Modal does not take the token of {_token_source()}: {error}", advice=advice)
    except FAILURES as error:
        reason = str(error) or type(error).__name__
        advice = ("check the network, and https://status.modal.com; MODAL_SERVER_URL names another server",)
        return Diagnosis(False, f"Modal does not answer at {url}: {reason}", advice=advice)
    kinds = "V2, and V1 for GPUs" if modal_config.get("sandbox_v2") is not False else "V1"
    details = [f"the token is from {_token_source()}", f"sandboxes of kind {kinds}", "levels: shared, user, dedicated"]
    wrong: list[str] = []
    hints: list[str] = []
    for place, read in _sources(profiles, details):
        try:
            for name, config in read().items():
                await requests.check_names(config, account)
                details.append(f"profile {name!r} is from {place}")
        except HermesError as error:
            wrong.append(f"{error.message} (from {place})")
            hints.append(error.hint or "")
        except FAILURES as error:
            wrong.append(f"what the profiles of {place} name could not be looked up: {error}")
    if wrong:
        return Diagnosis(False, "; ".join(wrong), tuple(details), tuple(dict.fromkeys(filter(None, hints))))
    return Diagnosis(True, f"Modal at {url}, SDK {modal.__version__}", tuple(details))


def _token_source() -> str:
    return "MODAL_TOKEN_ID" if os.environ.get("MODAL_TOKEN_ID") else str(Path(user_config_path))


def _sources(profiles: Mapping[str, Mapping[str, Any]], details: list[str]) -> Iterator[tuple[str, Read]]:
    """Yield each source of profiles, with a function that reads it."""
    if profiles:
        yield "the settings (HERMES_PROFILES_FILE)", lambda: _valid_profiles(profiles, details)
    if any(os.environ.get(name) for name in (FILE_VARIABLE, NAMES_VARIABLE)):
        yield "the ATROPOS_MODAL_… variables", load_profiles
    yield "the terminal tool's settings", _terminal_profiles


def _terminal_profiles() -> dict[str, ModalSandboxConfig]:
    """Return the terminal tool's profiles, if Modal is its backend."""
    try:
        settings, _ = explain({"modal": lambda: ModalSandboxConfig})
    except HermesError:  # `doctor` reports wrong settings of the terminal tool for every backend
        return {}
    if settings.backend != "modal":
        return {}
    return {name: ModalSandboxConfig.from_dict(name, values) for name, values in settings.profiles.items()}


def _valid_profiles(profiles: Mapping[str, Mapping[str, Any]], details: list[str]) -> dict[str, ModalSandboxConfig]:
    """Return the profiles that are valid for Modal. For the others, which may be for another backend, add a line to
    `details`."""
    found = {}
    for name, values in profiles.items():
        try:
            found[name] = ModalSandboxConfig.from_dict(name, values)
        except UsageError as error:
            details.append(f"profile {name!r} of the settings is none of Modal's: {error.message}")
    return found
