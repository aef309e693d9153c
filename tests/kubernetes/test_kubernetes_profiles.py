"""Profiles of the backend: what is wrong in one is told with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from hermes_kubernetes.config import KubernetesConfig

from hermes_core import UsageError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"namespace": "My Namespace"}, "must be lower-case letters"),
        ({"image": None}, "leave it out for python:3.11"),
        ({"cpu": 1, "cpu_request": 2}, "cpu_request is 2.0, more than cpu, 1.0"),
        ({"memory": 512, "memory_request": 1024}, "memory_request is 1024, more than memory, 512"),
        ({"network": "setup", "user": 1000}, "leave `user` out"),
        ({"labels": {"hermes-rl/owner": "me"}}, "are the backend's own"),
        ({"pod": {"spec": {"hostNetwork": True}}}, "holds spec 'hostNetwork'"),
        ({"pod": {"metadata": {"name": "x"}}}, "holds metadata 'name'"),
        ({"pod": {"spec": {"containers": [{"name": "sandbox", "command": ["x"]}]}}}, "holds container 'command'"),
        (
            {"pod": {"spec": {"containers": [{"name": "sandbox", "securityContext": {"privileged": True}}]}}},
            "holds securityContext 'privileged'",
        ),
        ({"pod": {"spec": {"containers": [{"name": "logger"}]}}}, "initContainers with restartPolicy: Always"),
        ({"pod": {"spec": []}}, "must be part of a pod"),
        ({"warm_pool": "a", "cpu": 1}, "its template decides on cpu"),
        ({"warm_pool": "a", "cap_add": ["SYS_ADMIN"]}, "its template decides on cap_add"),
        ({"imagee": "x"}, "image"),
    ],
)
def test_what_is_wrong_is_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        KubernetesConfig.from_dict("mine", settings)
    assert words in str(caught.value)
    assert "'mine'" in str(caught.value)


def test_what_is_written_in_another_form_is_understood() -> None:
    config = KubernetesConfig.from_dict("mine", {"cap_add": ["cap_sys_admin"], "warm_pool": None, "gpus": 2})
    assert (config.cap_add, config.gpu_count) == (("SYS_ADMIN",), 2)
    assert KubernetesConfig.from_dict("mine", {"warm_pool": "a", "max_lifetime": 600, "slots_per_sandbox": 4}).warm_pool
