"""The Kubernetes backend for hermes-rl: pods with many slots in each, reached by pod exec."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `kubernetes`."""
    registry.add(
        "kubernetes",
        "hermes_kubernetes.backend:KubernetesBackend",
        aliases=("k8s",),
        summary="Pods of a Kubernetes cluster, with many slots in each",
        requires=("a kubeconfig, or a service account in the cluster", "the right to create pods and to exec in them"),
    )
