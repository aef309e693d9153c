"""The conformance kit on the backends that run for real here, a test id for each check."""

from __future__ import annotations

import os
from collections.abc import Callable

import hermes_docker
import hermes_ssh
import pytest

from hermes_core.testing.conformance import GROUPS

pytest_plugins = ["hermes_core.testing.conformance.plugin"]


REPEATED = ("leaks", "speed")
"""The groups that only do again, and often, what others do."""


@pytest.mark.conformance("local", groups=[group for group in GROUPS if group not in REPEATED])
def test_local(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.full
@pytest.mark.conformance("local", groups=REPEATED)
def test_local_again_and_again(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance("docker", config={"image": "hermes-test-python:bookworm"}, plugins=(hermes_docker,))
def test_docker(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.usefixtures("docker_images")
@pytest.mark.conformance(
    "docker",
    config={"image": "hermes-test-python:bookworm", "slot_user": "root"},
    isolation="dedicated",
    groups=("commands", "processes", "files"),
    plugins=(hermes_docker,),
)
def test_docker_with_slots_that_are_root(conformance_check: Callable[[], None]) -> None:
    conformance_check()


@pytest.mark.usefixtures("ssh_config")
@pytest.mark.conformance(
    "ssh",
    config={"host": "hermes-test", "config_file": os.environ.get("HERMES_TEST_SSH_CONFIG", "")},
    isolation="namespace",
    plugins=(hermes_ssh,),
)
def test_ssh(conformance_check: Callable[[], None]) -> None:
    conformance_check()
