"""Finds the known hosts, and asks them about themselves for `hermes-rl doctor`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from hermes_core import Diagnosis, HermesError, Settings
from hermes_ssh.config import SshConfig
from hermes_ssh.hosts import Host, HostPool

log = logging.getLogger(__name__)


def find_hosts(pool: HostPool, settings: Settings | None) -> list[Host]:
    """Return the hosts that were used, and those of the runtime's profiles."""
    for name, values in (settings.profiles if settings is not None else {}).items():
        if "host" in values or "hosts" in values:
            try:
                pool.of(SshConfig.model_validate({**values, "name": name}))
            except ValidationError as error:
                log.debug("profile %s is none of the ssh backend: %s", name, error)
    return pool.hosts()


async def ask_all(hosts: Sequence[Host], request: Mapping[str, Any]) -> list[tuple[Host, dict[str, Any]]]:
    """Return the answers of the hosts. A host that does not answer is left out, with a warning in the log.

    Raises:
        HermesError: the first host's error, if no host answers.
    """
    answers: list[tuple[Host, dict[str, Any]]] = []
    failures: list[HermesError] = []
    for host in hosts:
        try:
            answers.append((host, await host.ask(request)))
        except HermesError as error:
            log.warning("host %s does not say what is on it: %s", host.name, error)
            failures.append(error)
    if failures and not answers:
        raise failures[0]
    return answers


async def diagnose(hosts: Sequence[Host]) -> Diagnosis:
    """Ask every host for its levels."""
    if not hosts:
        return Diagnosis(
            True, "no host is configured", (), ("name one: `host: user@name` in a profile, or --backend.host",)
        )
    answers = await asyncio.gather(*(_ask(host) for host in hosts))
    usable = any(good for good, _ in answers)
    lines = tuple(line for _, line in answers)
    return Diagnosis(usable, f"{sum(good for good, _ in answers)} of {len(hosts)} hosts can be used", lines)


async def _ask(host: Host) -> tuple[bool, str]:
    try:
        probe = await host.ask({"op": "probe"})
    except HermesError as error:
        return False, f"{host.name}: {error}"
    levels = "shared, user, namespace" if probe["namespaces"] or probe["user_namespaces"] else "shared"
    levels += "" if probe["own_roots"] else ", private-root"
    account = "root" if probe["root"] else "an ordinary account"
    reason = f" ({probe['reason']})" if probe["reason"] else ""
    return True, f"{host.name}: {account}, Python {probe['python']}, levels: {levels}{reason}"
