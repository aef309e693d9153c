"""Profiles of the backend `nomad`: what is refused, with what to do, and the names that other programs use."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest

from hermes_core import Isolation, PolicyError, SandboxSpec
from hermes_core.errors import UsageError
from hermes_core.terminal.settings import TerminalSettings

pytestmark = pytest.mark.usefixtures("cloud_extra")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("NOMAD_", "TERMINAL_")):
            monkeypatch.delenv(name)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"address": "nomad.example:port:4646//"}, "must be http://HOST:PORT or https://HOST:PORT"),
    ({"address": "ftp://nomad.example"}, "must be http://HOST:PORT"),
    ({"address": "http://user:s3cret@nomad.example"}, "must be http://HOST:PORT"),
    ({"namespace": "a b"}, "must be at most 128 letters"),
    ({"job_prefix": "a/b"}, "must be at most 64 letters"),
    ({"image": ""}, "name an image that the nodes can pull"),
    ({"cpu": 0.5}, "set cpu_mhz for a share of one"),
    ({"cpu": 2, "cpu_mhz": 500}, "Nomad reserves cores or MHz, not both"),
    ({"driver": "raw_exec"}, "'raw_exec' gives a sandbox no container of its own: use docker or podman"),
    ({"driver": "singularity"}, "use docker or podman"),
    ({"driver": "dockr"}, "docker"),
    ({"constraints": ["${node.class} sandboxes"]}, "must be ATTRIBUTE OPERATOR VALUE"),
    ({"priority": 0}, "priority"),
    ({"addres": "x"}, "did you mean 'address'"),
]


@pytest.mark.parametrize(("settings", "said"), WRONG)
def test_a_wrong_setting_is_refused_with_what_to_do(settings: dict[str, Any], said: str) -> None:
    from hermes_nomad.config import NomadConfig

    with pytest.raises(UsageError, match=re.escape(said)) as failed:
        NomadConfig.from_dict("p", settings)
    assert "s3cret" not in str(failed.value)


def test_addresses_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes_nomad.config import NomadConfig

    assert NomadConfig().address == "http://127.0.0.1:4646"
    monkeypatch.setenv("NOMAD_ADDR", "https://nomad.example:4646/")
    monkeypatch.setenv("NOMAD_NAMESPACE", "rollouts")
    monkeypatch.setenv("NOMAD_REGION", "eu")
    config = NomadConfig()
    assert (config.address, config.namespace, config.region) == ("https://nomad.example:4646", "rollouts", "eu")
    assert NomadConfig(address="nomad:4646").address == "http://nomad:4646"


def test_constraints_and_lists() -> None:
    from hermes_nomad.config import NomadConfig, split_constraint

    assert split_constraint("${attr.kernel.version} version >= 5.10, < 7") == {
        "LTarget": "${attr.kernel.version}",
        "Operand": "version",
        "RTarget": ">= 5.10, < 7",
    }
    assert split_constraint("${meta.gpu} is_set") == {"LTarget": "${meta.gpu}", "Operand": "is_set", "RTarget": ""}
    config = NomadConfig.from_dict("p", {"datacenters": "dc1, dc2", "cap_add": "cap_sys_admin"})
    assert (config.datacenters, config.cap_add) == (("dc1", "dc2"), ("SYS_ADMIN",))


def test_texts_that_nomad_would_change() -> None:
    """The driver's settings are templates of HCL. Variables are replaced in another way, which has no escape."""
    from hermes_nomad.config import NomadConfig
    from hermes_nomad.jobs import describe_job

    config = NomadConfig()
    job = describe_job(SandboxSpec("c", "o", config, Isolation.SHARED), config)
    script = json.dumps(job["TaskGroups"][0]["Tasks"][0]["Config"]["args"])
    assert "$${up%.*}" in script and not re.search(r"(?<!\$)\$\{", script)
    spec = SandboxSpec("c", "o", config, Isolation.SHARED, environment={"V": "a ${NOMAD_ALLOC_ID}"})
    with pytest.raises(PolicyError, match="the variable V holds"):
        describe_job(spec, config)


def test_what_a_job_is_for_each_driver_and_level() -> None:
    from hermes_nomad.config import NomadConfig
    from hermes_nomad.jobs import describe_job

    def settings(isolation: Isolation, **given: Any) -> dict[str, Any]:
        config = NomadConfig(**given)
        job = describe_job(SandboxSpec("c", "o", config, isolation), config)
        found: dict[str, Any] = job["TaskGroups"][0]["Tasks"][0]["Config"]
        return found

    docker = settings(Isolation.USER, network="none", shm_size=64)
    assert (docker["network_mode"], docker["shm_size"], docker["work_dir"]) == ("none", 64 << 20, "/data")
    assert docker["sysctl"][0]["kernel.shmmni"] == "0"
    assert docker["cap_drop"] == ["ALL"] and "SYS_ADMIN" not in docker["cap_add"]
    podman = settings(Isolation.USER, driver="podman", shm_size=64)
    assert (podman["shm_size"], podman["working_dir"], podman["sysctl"]["kernel.msgmni"]) == ("64m", "/data", "0")
    namespace = settings(Isolation.NAMESPACE, cap_add=["SYS_ADMIN"])
    assert "sysctl" not in namespace and {"SYS_ADMIN", "NET_ADMIN", "SYS_CHROOT"} <= {*namespace["cap_add"]}


def test_the_terminal_tools_variables(caplog: pytest.LogCaptureFixture) -> None:
    from hermes_nomad.config import NomadConfig

    environ = {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "nomad", "TERMINAL_NOMAD_ADDRESS": "http://n:4646"}
    environ |= {"TERMINAL_NOMAD_JOB_ID": "mine", "TERMINAL_NOMAD_IMAGE": "python:3.12", "TERMINAL_NOMAD_MAX": "3"}
    found = TerminalSettings.load({"nomad": lambda: NomadConfig}, {**environ, "TERMINAL_NOMAD_SLOTS": "4"})
    config = NomadConfig.from_dict("default", found.profiles["default"])
    assert (config.address, config.job_prefix, config.image) == ("http://n:4646", "mine", "python:3.12")
    assert config.max_sandboxes == 3
    assert [message for message in caplog.messages if "TERMINAL_NOMAD_SLOTS is not read" in message]
