"""The conformance kit on the backends that run for real here, a test id for each check."""

from __future__ import annotations

import os
from collections.abc import Callable

import hermes_docker
import hermes_slurm
import hermes_ssh
import pytest
from hermes_testing.conformance import GROUPS

from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend

OF_THE_GUEST = ("commands", "processes", "files")
"""The groups in which one host is like another."""

ELSEWHERE = [group for group in GROUPS if group not in (*OF_THE_GUEST, "speed")]
"""The groups that other backends than `local` are tried with; `speed` makes no promise, and needs a quiet machine."""

REPEATED = ("slots", "leaks", "speed")
"""The groups whose promises other tests of `make test` show on local sandboxes: tests/isolation, tests/sandbox."""


@pytest.mark.conformance("local", groups=[group for group in GROUPS if group not in REPEATED])
def test_local(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.full
@pytest.mark.conformance("local", groups=REPEATED)
def test_repeated_on_local(conformance_check: Callable[[], None]) -> None:
    conformance_check()


ON_DOCKER = {"config": {"image": "hermes-test-python:bookworm"}, "plugins": (hermes_docker,)}


@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance("docker", groups=ELSEWHERE, **ON_DOCKER)
def test_docker(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.stress
@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance("docker", groups=[*OF_THE_GUEST, "speed"], **ON_DOCKER)
def test_a_guest_on_docker(conformance_check: Callable[[], None]) -> None:
    """At `user`. What `full` has is slots that are root, which differ more."""
    conformance_check()


@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance(
    "docker",
    config={"image": "hermes-test-python:bookworm", "network": "none", "read_only": True},
    groups=["forwards"],
    plugins=(hermes_docker,),
)
def test_docker_without_a_network(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance(
    "docker",
    config={"image": "hermes-test-python:bookworm", "slot_user": "root"},
    isolation="dedicated",
    groups=OF_THE_GUEST,
    plugins=(hermes_docker,),
)
def test_docker_with_slots_that_are_root(conformance_check: Callable[[], None]) -> None:
    conformance_check()


ON_SSH = {
    "config": {"host": "hermes-test", "config_file": os.environ.get("HERMES_TEST_SSH_CONFIG", "")},
    "isolation": "namespace",
    "plugins": (hermes_ssh,),
}


@pytest.mark.usefixtures("ssh_config")
@pytest.mark.conformance("ssh", groups=ELSEWHERE, **ON_SSH)
def test_ssh(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.stress
@pytest.mark.usefixtures("ssh_config")
@pytest.mark.conformance("ssh", groups=[*OF_THE_GUEST, "speed"], **ON_SSH)
def test_a_guest_on_ssh(conformance_check: Callable[[], None]) -> None:
    conformance_check()


ON_SLURM = {"isolation": "namespace", "plugins": (hermes_slurm,)}


@pytest.mark.usefixtures("slurm")
@pytest.mark.conformance("slurm", groups=ELSEWHERE, **ON_SLURM)
def test_slurm(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.stress
@pytest.mark.usefixtures("slurm")
@pytest.mark.conformance("slurm", groups=[*OF_THE_GUEST, "speed"], **ON_SLURM)
def test_a_guest_on_slurm(conformance_check: Callable[[], None]) -> None:
    conformance_check()


SHARED_NETWORK = (
    "a_port_leads_to_the_driver[private-root]",
    "a_neighbour_s_port_to_the_driver_is_closed[private-root]",
)


@pytest.mark.skipif(
    Isolation.PRIVATE_ROOT not in LocalBackend().capabilities.isolation, reason="this host grants no roots of their own"
)
@pytest.mark.conformance("local", config={"share_network": True}, isolation="private-root", names=SHARED_NETWORK)
def test_local_slots_that_share_a_network(conformance_check: Callable[[], None]) -> None:
    conformance_check()
