"""The SSH backend for hermes-rl: sandboxes on hosts that you reach by SSH."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `ssh`."""
    registry.add(
        "ssh",
        "hermes_ssh.backend:SshBackend",
        summary="sandboxes on hosts that you reach by SSH; the account need not be root",
        requires=("a Linux host with sshd and Python 3.7 or newer", "its host key in known_hosts"),
    )
