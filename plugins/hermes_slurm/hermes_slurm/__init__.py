"""The Slurm backend for hermes-rl: sandboxes in jobs of a cluster, each in an allocation of one node."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_backends(registry: Registrar) -> None:
    """Add the backend `slurm`."""
    registry.add(
        "slurm",
        "hermes_slurm.backend:SlurmBackend",
        summary="sandboxes in Slurm jobs of one node each; the account need not be root",
        requires=("Slurm's programs (sbatch, srun, squeue, scancel, scontrol)", "Python 3.7 or newer on the nodes"),
    )
