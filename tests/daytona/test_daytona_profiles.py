"""What profiles may say, and what of them Daytona is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.errors import ConfigError, PolicyError
from hermes_core.sandbox.contract import Isolation, SandboxSpec


def read(**values: Any) -> Any:
    from hermes_daytona.config import DaytonaConfig

    return DaytonaConfig.from_dict("mine", values)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"image": "a", "snapshot_id": "b"}, "exactly one of image and snapshot_id"),
        ({"image": ""}, "exactly one of image and snapshot_id"),
        ({"snapshot_id": "b", "cpu": 2}, "leave it out"),
        ({"gpu_type": "H100"}, "gpus: 1"),
        ({"network": "none", "network_allow_list": "10.0.0.0/8"}, "leave one of them out"),
        ({"network_allow_list": "example.com"}, "network_allow_list"),
        ({"auto_stop_interval": 0}, "auto_stop_interval"),
        ({"auto_stop_interval": 1, "orphan_ttl_s": 90}, "make it longer"),
        ({"workspace_base": "data"}, "from the root on"),
        ({"max_lifetime": 10}, "max_lifetime"),
    ],
)
def test_a_wrong_value_is_told(emulator: Any, values: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as raised:
        read(**values)
    assert "mine" in str(raised.value)


@pytest.mark.parametrize("values", [{"cpu": 0.5}, {"memory": 1500}, {"gpus": 1, "gpu_type": "A1"}])
async def test_a_size_that_daytona_does_not_have_is_refused(
    backend: Any, make_spec: Callable[..., SandboxSpec], emulator: Any, values: dict[str, Any]
) -> None:
    with pytest.raises(PolicyError, match=r"gives whole|it has H100"):
        await backend.create(make_spec(**values))
    assert emulator.count("create_sandbox") == 0


def test_what_daytona_is_asked_for(make_spec: Callable[..., SandboxSpec]) -> None:
    from hermes_daytona.requests import sandbox_request

    spec = make_spec(
        "abc",
        image="example:1",
        cpu=2,
        memory=4096,
        disk=8,
        gpus=1,
        gpu_type="H100,H200",
        target="eu",
        user="root",
        network_allow_list="10.0.0.0/8,192.168.0.0/16",
        volumes={"/cache": "mine"},
        secrets={"API_KEY": "vault"},
        max_lifetime=90,
    )
    asked = sandbox_request(spec, spec.config).to_dict()
    assert (
        asked
        | {
            "name": "hermes-rl-abc",
            "buildInfo": {"dockerfileContent": "FROM example:1\n"},
            "cpu": 2,
            "memory": 4,
            "disk": 8,
            "gpu": 1,
            "gpuType": ["H100", "H200"],
            "target": "eu",
            "user": "root",
            "networkBlockAll": False,
            "networkAllowList": "10.0.0.0/8,192.168.0.0/16",
            "volumes": [{"volumeId": "mine", "mountPath": "/cache"}],
            "secrets": [{"API_KEY": "vault"}],
            "ttlMinutes": 2,
            "autoStopInterval": 5,
            "autoDeleteInterval": 0,
        }
        == asked
    )
    assert spec.config.visible_paths == ("/cache",)
    assert spec.config.has_secrets and spec.config.gpu_count == 1


def test_no_network_is_the_block_of_all(make_spec: Callable[..., SandboxSpec]) -> None:
    from hermes_daytona.requests import sandbox_request

    spec = make_spec(network="none")
    assert sandbox_request(spec, spec.config).network_block_all


def test_namespaces_are_asked_for(backend: Any) -> None:
    assert Isolation.NAMESPACE not in backend.levels(read())
    assert Isolation.NAMESPACE in backend.levels(read(namespaces=True))


def test_the_region_is_that_of_the_variable(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().target is None
    monkeypatch.setenv("DAYTONA_TARGET", "eu")
    assert read().target == "eu"
