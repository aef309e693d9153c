"""The Docker backend for hermes-rl: containers with many slots, reached over one attached exec stream each."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `docker`."""
    registry.add(
        "docker",
        "hermes_docker.backend:DockerBackend",
        summary="Containers of a Docker daemon, with many slots in each",
        requires=("a Docker daemon, or Podman's socket",),
    )
