"""Finds out for `hermes-rl doctor` whether a cluster can be used here."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_core import Diagnosis, HermesError
from hermes_kubernetes.namespaces import Namespace

RIGHTS = (("create", "pods"), ("get", "pods"), ("list", "pods"), ("delete", "pods"), ("get", "pods/exec"))
"""The rights that the backend needs. The exec of a websocket is a GET."""


async def diagnose(namespaces: Sequence[Namespace]) -> Diagnosis:
    """Ask each cluster for its version and for our rights in the namespace. Never raises."""
    lines, advice = [], []
    usable = False
    for namespace in namespaces:
        try:
            name, server = await namespace.name(), await namespace.cluster.server()
            version = (await namespace.cluster.ask("GET", "/version", patience_s=0)).get("gitVersion", "unknown")
            missing = [f"{verb} {kind}" for verb, kind in RIGHTS if not await may(namespace, verb, kind)]
        except HermesError as error:
            lines.append(error.message)
            advice.append(error.hint or "")
            continue
        lines.append(f"{server}: Kubernetes {version}, namespace {name}")
        if missing:
            lines[-1] += f": no right to {', '.join(missing)}"
            advice.append(f"have a Role in namespace {name} bound to you, with the missing verbs")
        usable = usable or not missing
    return Diagnosis(usable, lines[0], tuple(lines[1:]), tuple(dict.fromkeys(filter(None, advice))))


async def may(namespace: Namespace, verb: str, kind: str) -> bool:
    """Return whether we may do this to objects of a kind in the namespace."""
    resource, _, subresource = kind.partition("/")
    asked = {"namespace": await namespace.name(), "verb": verb, "resource": resource, "subresource": subresource}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    review = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
    body = {**review, "spec": {"resourceAttributes": asked}}
    answer = await namespace.cluster.ask("POST", path, body=body, patience_s=0)
    return bool((answer.get("status") or {}).get("allowed"))
