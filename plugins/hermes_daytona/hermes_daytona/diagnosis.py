"""Finds out for `hermes-rl doctor` whether Daytona can be used here."""

from __future__ import annotations

import asyncio
from typing import Any

from hermes_core import ConfigError, Diagnosis
from hermes_daytona.service import DaytonaService, ServiceFailed, advice

DIAL_LIMIT_S = 10.0
"""Time limit in seconds for a connection to the SSH gateway."""


async def diagnose(service: DaytonaService) -> Diagnosis:
    """Ask the API about itself and for one sandbox, and connect to the SSH gateway. Never raises."""
    try:
        deployment = await service.describe_deployment()
        async for _ in service.list({}):
            break
    except ConfigError as error:
        return Diagnosis(False, error.message, advice=(error.hint or "",))
    except ServiceFailed as error:
        what = "does not take the key" if error.status in (401, 403) else "does not answer"
        return Diagnosis(False, f"Daytona at {service.url} {what}: {error}", advice=(advice(error),))
    details = ["levels: shared, user, dedicated; namespace with `namespaces: true`"]
    if deployment.ssh_gateway_host and (reason := await _refusal(deployment)):
        place = f"{deployment.ssh_gateway_host}:{deployment.ssh_gateway_port or 22}"
        hint = f"allow outgoing connections to {place}, which carry everything"
        return Diagnosis(False, f"Daytona's SSH gateway at {place} can't be reached: {reason}", advice=(hint,))
    return Diagnosis(True, f"Daytona at {service.url}, version {deployment.version}", tuple(details))


async def _refusal(deployment: Any) -> str | None:
    """Return why the SSH gateway can't be connected to; None if it can."""
    try:
        async with asyncio.timeout(DIAL_LIMIT_S):
            _, writer = await asyncio.open_connection(
                deployment.ssh_gateway_host, int(deployment.ssh_gateway_port or 22)
            )
    except (OSError, TimeoutError) as error:
        return str(error) or type(error).__name__
    writer.close()
    return None
