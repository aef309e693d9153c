"""Finds out for `hermes-rl doctor` whether a cluster can be used here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hermes_core import Diagnosis, HermesError
from hermes_kubernetes.cluster import ClusterError
from hermes_kubernetes.namespaces import CLAIMS, PODS, Kind, Namespace

_OBJECT = ("create", "get", "list", "delete")
RIGHTS: Mapping[Kind, Sequence[tuple[str, str]]] = {
    PODS: (*((verb, "pods") for verb in _OBJECT), ("get", "pods/exec"), ("create", "pods/exec")),
    CLAIMS: tuple((verb, "sandboxclaims") for verb in _OBJECT),
}
"""The rights that the backend needs. A websocket is opened by GET; newer servers ask for `create` as well."""


async def diagnose(namespaces: Sequence[Namespace]) -> Diagnosis:
    """Ask each cluster for its version and for our rights in the namespace. Never raises."""
    found = [await _examine(each) for each in namespaces]
    lines = tuple(line for _, line, _ in found)
    advice = dict.fromkeys(hint for _, _, hint in found if hint)
    return Diagnosis(any(usable for usable, _, _ in found), lines[0], lines[1:], tuple(advice))


async def _examine(namespace: Namespace) -> tuple[bool, str, str]:
    """Return whether a namespace can be used, what was found out about it, and what to do."""
    try:
        version = (await namespace.cluster.ask("GET", "/version", patience_s=0)).get("gitVersion", "unknown")
        line = f"{await namespace.cluster.server()}: Kubernetes {version}, namespace {await namespace.name()}"
        if CLAIMS in namespace.kinds and not await _has_claims(namespace):
            return (
                False,
                f"{line}: agent-sandbox is not installed there",
                "install agent-sandbox, or leave warm_pool out",
            )
        rights = [(kind, *right) for kind in namespace.kinds for right in RIGHTS[kind]]
        missing = [f"{verb} {what}" for kind, verb, what in rights if not await _may(namespace, kind, verb, what)]
    except HermesError as error:
        return False, error.message, error.hint or ""
    if missing:
        hint = "the guide of the kubernetes backend has a Role with all rights that it needs"
        return False, f"{line}: no right to {', '.join(missing)}", hint
    return True, line, ""


async def _has_claims(namespace: Namespace) -> bool:
    try:
        await namespace.cluster.ask("GET", f"/{CLAIMS.group}", patience_s=0)
    except ClusterError as error:
        if error.status == 404:
            return False
        raise
    return True


async def _may(namespace: Namespace, kind: Kind, verb: str, what: str) -> bool:
    """Return whether we may do this to objects of a kind in the namespace."""
    resource, _, subresource = what.partition("/")
    group = "" if kind is PODS else kind.group.split("/")[1]
    asked = {"namespace": await namespace.name(), "verb": verb, "resource": resource, "subresource": subresource}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
    body = {**review, "spec": {"resourceAttributes": {**asked, "group": group}}}
    answer = await namespace.cluster.ask("POST", path, body=body, patience_s=0)
    return bool((answer.get("status") or {}).get("allowed"))
