"""Finds out for `hermes-rl doctor` whether a Nomad cluster can be used, and says what to do about errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_core import Diagnosis, UsageError
from hermes_nomad.api import NomadApi, NomadError, find_part
from hermes_nomad.config import NomadConfig

_RIGHTS = (
    "submit-job, read-job, list-jobs, alloc-lifecycle and alloc-exec in the namespace, and `node { policy = read }`"
)


def advise(error: NomadError) -> str:
    """Return what to do about an error of Nomad's."""
    if error.status is None:
        return "check the network; NOMAD_ADDR or the setting `address` names the cluster, NOMAD_CACERT its certificate"
    if error.status in (401, 403) or "ACL token" in error.message or "Permission denied" in error.message:
        return f"NOMAD_TOKEN needs a policy with {_RIGHTS}"
    if error.status == 429:
        return "raise `limits { http_max_conns_per_client }` of the agent at this address: each channel is a connection"
    if error.status >= 500 and error.passing:
        return "the cluster has no leader or is overloaded: `nomad server members`, `nomad operator raft list-peers`"
    return "change what the profile asks for"


async def diagnose(api: NomadApi, profiles: Mapping[str, Mapping[str, Any]]) -> Diagnosis:
    """Ask the cluster for its leader and its nodes. Never raises.

    Args:
        profiles: the profiles of the runtime's settings, by name.
    """
    wanted = _drivers(profiles)
    try:
        leader = (await api.call("GET", "/v1/status/leader", patience_s=0)).data
        nodes = await api.get_pages("/v1/nodes", {}, patience_s=0)
    except NomadError as error:
        known = f"Nomad at {api.address}: {error.message}"
        return Diagnosis(False, known, (f"{'a' if api.has_token else 'no'} token is set",), (advise(error),))
    ready = [
        each for each in nodes if each.get("Status") == "ready" and each.get("SchedulingEligibility") == "eligible"
    ]
    counts = {driver: sum(_has_driver(node, driver) for node in ready) for driver in sorted(wanted)}
    details = (
        f"leader {leader}; {len(ready)} of {len(nodes)} nodes are ready and eligible",
        *(f"{count} of them have the driver {driver}" for driver, count in counts.items()),
        "levels: shared, user, dedicated; with cap_add: [SYS_ADMIN] also namespace",
    )
    if missing := [driver for driver, count in counts.items() if not count]:
        advice = "`nomad node status -verbose NODE` says why a driver is not healthy; `nomad node eligibility -enable`"
        return Diagnosis(False, f"no node has a healthy driver {' or '.join(missing)}", details, (advice,))
    return Diagnosis(True, f"Nomad at {api.address}", details)


def _drivers(profiles: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the drivers of the profiles that are valid for Nomad; the default one if there are none."""
    found: set[str] = set()
    for name, values in profiles.items():
        try:
            found.add(NomadConfig.from_dict(name, values).driver)
        except UsageError:  # a profile of another backend
            continue
    return found or {NomadConfig().driver}


def _has_driver(node: Mapping[str, Any], driver: str) -> bool:
    return all(find_part(node, "Drivers", driver, state, kind=bool) for state in ("Detected", "Healthy"))
