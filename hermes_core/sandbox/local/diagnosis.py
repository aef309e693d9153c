"""The diagnosis of local sandboxes for `hermes-rl doctor`: the levels that a real sandbox gets here, and remedies."""

from __future__ import annotations

import asyncio
import uuid

from hermes_core.errors import HermesError
from hermes_core.sandbox.contract import Backend, Diagnosis, Isolation, Network, SandboxSpec
from hermes_core.sandbox.local import view
from hermes_core.sandbox.local.host import Probe, remedies

_LIMIT_S = 20.0


async def diagnose(backend: Backend, probe: Probe) -> Diagnosis:
    """Try a sandbox of the strongest level that the host seems to allow.

    For `private-root`, try `namespace`: sandboxes of the two levels differ only in their slots, which the probe has
    tested.
    """
    capabilities = backend.capabilities
    trusted = "until then, only trusted work: `--isolation shared --allow-unisolated`"
    advice = () if probe.isolates else (*remedies(probe), trusted)
    strongest = max(capabilities.isolation)
    try:
        version = await _try(backend, min(strongest, Isolation.NAMESPACE))
    except HermesError as error:
        return Diagnosis(False, f"a sandbox of level {strongest.label} does not work: {error}", (), advice)
    levels = ", ".join(level.label for level in sorted(capabilities.isolation))
    details = [f"levels: {levels}", f"interpreter in sandboxes: {view.interpreter()} ({version})"]
    if probe.isolates:
        details.append(_mechanism(probe))
        details.append(
            "commands may use this host's network (at level user) and all of its memory: `--confine` limits both"
        )
    if probe.own_roots and probe.isolates:
        details.append(f"private-root is not available: {probe.own_roots}")
    if Network.NONE not in capabilities.network:
        details.append("the networks 'none' and 'allow' are not available")
    if probe.reason:
        details.append(f"the reason: {probe.reason}")
    return Diagnosis(True, f"sandboxes up to level {strongest.label}", tuple(details), advice)


def _mechanism(probe: Probe) -> str:
    if not probe.namespaces:
        return "isolation by user namespaces: every slot in one of its own"
    return "isolation by namespaces and a user id for each slot" if probe.root else "isolation by namespaces"


async def _try(backend: Backend, level: Isolation) -> str:
    """Make a sandbox, run the interpreter in it, end it, and return the interpreter's version."""
    spec = SandboxSpec(
        creation_id=f"doctor-{uuid.uuid4().hex}",
        owner="doctor",
        config=backend.config_class(orphan_ttl_s=_LIMIT_S),
        isolation=level,
    )
    try:
        async with asyncio.timeout(_LIMIT_S):
            sandbox = await backend.create(spec)
    except TimeoutError:
        raise HermesError("it was not created in time") from None
    try:
        async with asyncio.timeout(_LIMIT_S):
            channel = await sandbox.open(["python3", "-I", "-S", "-c", "import sys; print(sys.version.split()[0])"])
            try:
                version = (await channel.read(100)).decode().strip()
                status = await channel.wait()
                stderr = channel.stderr_tail
            finally:
                await channel.aclose()
    except TimeoutError:
        raise HermesError("the interpreter does not answer in it") from None
    finally:
        await sandbox.terminate()
    if status != 0 or not version:
        raise HermesError(
            f"the interpreter {view.interpreter()} does not run in it: {stderr or f'exit status {status}'}",
            hint="name what it needs in `visible_paths`",
        )
    return version
