"""What is concluded from a daemon's own account of itself. The accounts are those of real daemons, shortened."""

from __future__ import annotations

from typing import Any

import pytest
from hermes_docker.config import DockerConfig
from hermes_docker.diagnosis import check_spec, maps_users

from hermes_core.errors import PolicyError
from hermes_core.sandbox.contract import Isolation, SandboxSpec

_ABLE = {"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}
ROOT = {**_ABLE, "SecurityOptions": ["name=seccomp,profile=default"], "CgroupVersion": "1"}
MAPPED = {**ROOT, "SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}
ROOTLESS = {**ROOT, "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"], "CgroupVersion": "2"}
PODMAN = {**ROOT, "Rootless": True}
"""Podman 4.3, run by an ordinary user on a host with cgroup v1: it ignores the limits that it claims."""
PODMAN_2 = {**PODMAN, "CgroupVersion": "2"}


def check(info: dict[str, Any], **settings: Any) -> None:
    config = DockerConfig(image="any", **settings)
    spec = SandboxSpec(creation_id="a", owner="me", config=config, isolation=Isolation.USER, labels={})
    check_spec(spec, config, info)


def test_a_daemon_that_maps_user_ids_is_recognised() -> None:
    assert [maps_users(info) for info in (ROOT, MAPPED, ROOTLESS, PODMAN, PODMAN_2)] == [False, True, True, True, True]


@pytest.mark.parametrize(
    "limit", [{"memory": 512}, {"cpu": 0.5}, {"pids_limit": 100}], ids=lambda limit: next(iter(limit))
)
def test_a_limit_that_would_be_ignored_is_refused(limit: dict[str, Any]) -> None:
    for info in (ROOT, ROOTLESS, PODMAN_2):
        check(info, **limit)
    for info in (PODMAN, {**ROOTLESS, "MemoryLimit": False, "CpuCfsQuota": False, "PidsLimit": False}):
        check(info)
        with pytest.raises(PolicyError, match=f"can't enforce {next(iter(limit))}"):
            check(info, **limit)
