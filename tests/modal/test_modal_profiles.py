"""Profiles from mappings, YAML, variables and settings; what is wrong is named by profile and key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hermes_modal.plugin
import pytest
from hermes_modal import ModalSandboxConfig, ModalToolBackend, load_profiles
from hermes_modal.apps import KEPT, Apps
from hermes_modal.config import read_profiles

from hermes_core.errors import ConfigError, UnknownNameError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("ATROPOS_"):
            monkeypatch.delenv(name)


def test_a_profile_has_the_defaults_of_the_page() -> None:
    config = ModalSandboxConfig()
    assert (config.name, config.app_name, config.image, config.gpu) == ("default", None, "python:3.11", None)
    assert (config.cpu, config.memory, config.slots_per_sandbox) == (1.0, 2048, 10)
    assert (config.min_sandboxes, config.max_sandboxes) == (1, 5)
    assert (config.idle_timeout, config.max_lifetime) == (120, 3600)
    assert (config.acquire_timeout_s, config.execution_timeout_s) == (60.0, 30.0)
    assert (config.secrets, config.env_vars, config.workspace_base) == ((), {}, "/data")
    assert config.get_app_name() == "atropos-sandbox"
    assert config.with_app_name("my-training").app_name == "my-training-default"


def test_the_pages_file(tmp_path: Path, page_profiles: str) -> None:
    file = tmp_path / "modal_profiles.yaml"
    file.write_text(page_profiles)
    profiles = load_profiles(file)
    assert set(profiles) == {"default", "gpu"}
    assert (profiles["default"].min_sandboxes, profiles["default"].max_sandboxes) == (1, 5)
    gpu = profiles["gpu"]
    assert (gpu.gpu, gpu.memory, gpu.min_sandboxes, gpu.max_sandboxes) == ("T4", 16384, 0, 2)
    assert ModalSandboxConfig.from_yaml(file) == profiles["default"]
    assert ModalSandboxConfig.from_yaml(file, "gpu") == gpu
    with pytest.raises(UnknownNameError, match="gpux"):
        ModalSandboxConfig.from_yaml(file, "gpux")
    assert load_profiles(environ={"ATROPOS_MODAL_PROFILES_FILE": str(file)}) == profiles


def test_a_default_profile_and_when_to_shrink(tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text("default_profile: a\nprofiles:\n  a: {idle_timeout: 600, scale_down_idle: 180}\n  b: {}\n")
    profiles, default = read_profiles(ModalSandboxConfig, file)
    assert default == "a"
    assert (profiles["a"].idle_timeout, profiles["a"].modal_idle_timeout) == (180, 600)
    assert set(load_profiles(file)) == {"a", "b", "default"}


def test_profiles_are_read_from_variables() -> None:
    environ = {
        "ATROPOS_MODAL_PROFILES": "cpu, pytorch-gpu",
        "ATROPOS_MODAL_IMAGE": "python:3.12",
        "ATROPOS_MODAL_CPU": "2.5",
        "ATROPOS_MODAL_MAX_SANDBOXES": "7",
        "ATROPOS_MODAL_EXECUTION_TIMEOUT": "11",
        "ATROPOS_MODAL_PROFILE_PYTORCH_GPU_IMAGE": "pytorch/pytorch:2.1.0",
        "ATROPOS_MODAL_PROFILE_PYTORCH_GPU_GPU": "T4",
        "ATROPOS_MODAL_PROFILE_PYTORCH_GPU_SECRETS": "one, two",
        "ATROPOS_MODAL_PROFILE_PYTORCH_GPU_ENV_VARS": "A=1;B=x=y",
    }
    profiles = load_profiles(environ=environ)
    assert set(profiles) == {"cpu", "pytorch-gpu", "default"}
    assert (profiles["cpu"].image, profiles["cpu"].cpu, profiles["cpu"].gpu) == ("python:3.12", 2.5, None)
    gpu = profiles["pytorch-gpu"]
    assert (gpu.image, gpu.gpu, gpu.cpu, gpu.max_sandboxes) == ("pytorch/pytorch:2.1.0", "T4", 2.5, 7)
    assert (gpu.secrets, gpu.env_vars) == (("one", "two"), {"A": "1", "B": "x=y"})
    assert gpu.execution_timeout_s == 11
    assert ModalSandboxConfig.from_env("cpu", environ) == profiles["cpu"]


def test_the_settings_of_an_environment() -> None:
    settings = SimpleNamespace(
        modal_image="python:3.12",
        modal_app_name="mine",
        modal_gpu=None,
        modal_slots_per_sandbox=4,
        modal_acquire_timeout=9.0,
        modal_secrets="one,two",
        modal_env_vars="A=1;B=2",
        modal_max_lifetime=100,
        group_size=8,
    )
    config = ModalSandboxConfig.from_agent_env_config(settings)
    assert (config.image, config.app_name, config.gpu, config.slots_per_sandbox) == ("python:3.12", "mine", None, 4)
    assert (config.acquire_timeout_s, config.secrets, config.env_vars) == (9.0, ("one", "two"), {"A": "1", "B": "2"})
    assert config.max_lifetime == 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"imgae": "x"}, "did you mean 'image'"),
        ({"memory": "much"}, "memory must be a whole number"),
        ({"cpu": 0}, "cpu must be more than 0"),
        ({"max_lifetime": 100_000}, "max_lifetime must be at most 86400"),
        ({"image": "a", "snapshot_id": "im-1"}, "exactly one of image"),
        ({"dockerfile": "/no/such/Dockerfile"}, "does not exist"),
        ({"workspace_base": "data"}, "a directory from the root on"),
        ({"network": "none", "outbound_cidr_allowlist": "10.0.0.0/8"}, "network is none"),
        ({"network": "setup", "outbound_domain_allowlist": "a.org"}, "network is setup"),
        ({"min_pool": 1, "min_sandboxes": 1}, "min_pool and min_sandboxes are the same"),
        ({"use_dotenv": True}, "modal secret create"),
        ({"use_dotenv": "true"}, "modal secret create"),
        ({"workdir": "/workspace"}, "workspace_base"),
        ({"gpu": "two A100"}, "such as T4, or A100:2 for two"),
        ({"max_cost": 1}, "no price"),
        ({"app_name": "with spaces"}, "at most 64 letters"),
        ("x", "write `key: value` lines"),
    ],
)
def test_what_is_wrong_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError if given != {"imgae": "x"} else UnknownNameError) as caught:
        ModalSandboxConfig.from_dict("training", given)
    assert said in str(caught.value) and "'training'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("profile: {}", "unknown key 'profile'"),
        ("profiles: []", "has no profiles"),
        ("default_profile: gpux\nprofiles: {gpu: {}}", "unknown profile 'gpux'"),
        ("profiles: {gpu: {memory: -1}}", "profile 'gpu'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        load_profiles(tmp_path / "p.yaml")


def test_env_vars_without_a_value() -> None:
    with pytest.raises(ConfigError, match="ATROPOS_MODAL_ENV_VARS: part 2 has no `=`"):
        ModalSandboxConfig.from_env("default", {"ATROPOS_MODAL_ENV_VARS": "A=1;secret"})


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("ATROPOS_MODAL_IMGAE", "did you mean 'IMAGE'"),
        ("ATROPOS_MODAL_PROFILE_GPU_MEMROY", "ends in no key of a profile"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(variable: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_profiles(environ={variable: "1"})


def test_networks_and_a_slots_secrets_by_variables() -> None:
    config = ModalSandboxConfig.from_env(
        "default",
        {
            "ATROPOS_MODAL_NETWORK": "none",
            "ATROPOS_MODAL_SECRETS": "keys",
            "ATROPOS_MODAL_PROFILE_DEFAULT_SLOT_SECRETS": "API_KEY, OTHER",
        },
    )
    assert (config.network.value, config.slot_secrets) == ("none", ("API_KEY", "OTHER"))
    assert config.has_secrets and not ModalSandboxConfig().has_secrets


def test_the_default_profile_of_the_file_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text("default_profile: gpu\nprofiles: {gpu: {gpu: T4}}")
    monkeypatch.setenv("ATROPOS_MODAL_PROFILES_FILE", str(tmp_path / "p.yaml"))
    assert ModalToolBackend()._default == ModalToolBackend.with_profiles("app")._default == "gpu"


def test_apps_are_remembered_from_process_to_process(tmp_path: Path) -> None:
    file = tmp_path / "state" / "modal-apps"
    first, second = Apps({"usual"}, file), Apps({"usual"}, file)
    first.add("planned")
    for name in ("mine", "mine", "usual"):
        first.note(name)
    assert first.names() == ["mine", "planned", "usual"] and second.names() == ["mine", "usual"]
    file.write_bytes(b"../etc/passwd\n\xff\n" + b"".join(b"app-%d\n" % n for n in range(1000)))
    assert len(second.names()) == KEPT + 1 and "app-999" in second.names()


def test_what_variables_of_the_terminal_tool_look_like() -> None:
    config = ModalSandboxConfig.from_dict("t", {"env_vars": "A=1;B=x=y", "use_dotenv": "false", "secrets": "a, b"})
    assert (config.env_vars, config.secrets) == ({"A": "1", "B": "x=y"}, ("a", "b"))


def test_the_price_counts_gpus() -> None:
    prices = {"cpu": 0.1, "memory": 0.02, "gpu": 0.5}
    assert ModalSandboxConfig(prices=prices).price_per_hour == pytest.approx(0.1 + 2 * 0.02)
    assert ModalSandboxConfig(gpu="A100:2", prices=prices).price_per_hour == pytest.approx(0.1 + 2 * 0.02 + 1.0)
    assert ModalSandboxConfig(gpu="T4", prices=prices).gpu_count == 1


def test_the_example_file() -> None:
    import hermes_modal.plugin

    example = Path(hermes_modal.__file__).parents[1] / "modal_profiles.example.yaml"
    profiles = load_profiles(example)
    assert set(profiles) == {"default", "pytorch-gpu", "node"}
    assert profiles["node"].slot_secrets == ("API_KEY",)


def test_a_runtime_reads_the_same_file() -> None:
    example = Path(hermes_modal.__file__).parents[1] / "modal_profiles.example.yaml"
    runtime = Runtime(
        Settings.load({"HERMES_PROFILES_FILE": str(example), "HERMES_ENV_FILE": ""}),
        plugins=[hermes_modal.plugin],
        load_entry_points=False,
    )
    profiles = runtime.profiles("modal")
    assert set(profiles) == {"default", "pytorch-gpu", "node"}
    assert (profiles["default"].min_sandboxes, profiles["default"].max_sandboxes) == (1, 5)
    assert profiles["node"].idle_timeout == 180
