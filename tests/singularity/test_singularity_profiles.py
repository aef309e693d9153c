"""Profiles, command lines and messages of the backend `singularity`: what needs no Apptainer."""

from __future__ import annotations

from pathlib import Path

import hermes_singularity
import pytest
from hermes_singularity.backend import SingularityBackend
from hermes_singularity.config import SingularityConfig
from hermes_singularity.diagnosis import not_started
from hermes_singularity.images import classify_failure
from hermes_singularity.runtime import exec_command, variables, variables_for_downloads

from hermes_core.errors import ConfigError, ImageError, PolicyError, ProvisionError, UnknownNameError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.settings import Settings
from hermes_core.terminal.settings import TerminalSettings


async def test_it_is_found_by_both_names() -> None:
    async with Runtime(Settings(), plugins=[hermes_singularity], load_entry_points=False) as runtime:
        for name in ("singularity", "apptainer"):
            assert isinstance(runtime.backend(name), SingularityBackend)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cpu": 2}, "cpu"),
        ({"memory": 512}, "memory"),
        ({"image": ""}, "name an image"),
        ({"image": "--help"}, "name an image"),
        ({"volumes": ["data:/data2"]}, "must be /SOURCE:/TARGET"),
        ({"volumes": ["/a:/b:rx"]}, "must be /SOURCE:/TARGET"),
        ({"volumes": ["/a,/etc:/b"]}, "without commas"),
        ({"volumes": ["/a:/data/"]}, "of its own"),
        ({"tmpfs_size": 0}, "tmpfs_size"),
        ({"program": "x"}, "program"),
    ],
)
async def test_a_wrong_setting_is_refused(values: dict[str, object], said: str) -> None:
    async with Runtime(Settings(), plugins=[hermes_singularity], load_entry_points=False) as runtime:
        with pytest.raises((ConfigError, PolicyError, UnknownNameError), match=said):
            async with runtime.tool_backend("singularity", isolation=Isolation.SHARED, config=values, profiles={}):
                pass


def test_only_what_is_named_is_mounted() -> None:
    config = SingularityConfig(volumes=("/sets/a:/sets:ro",), gpus=True, arguments=("--rocm",))
    argv = exec_command("/bin/apptainer", config, Path("/images/x"), Path("/place"), ("main", "a b"))
    binds = [argv[at + 1] for at, word in enumerate(argv) if word == "--bind"]
    assert binds == ["/place/data:/data", "/place/tmp:/tmp", "/place/vartmp:/var/tmp", "/sets/a:/sets:ro"]
    assert {"--contain", "--cleanenv", "--no-home", "--nv", "--rocm"} < set(argv)
    assert argv[-3:] == ("sh", "main", "a b") and argv[argv.index("/bin/sh") - 1] == "/images/x"
    assert "--nv" not in exec_command("a", SingularityConfig(), Path("/i"), Path("/p"), ("m",))


def test_a_directory_that_is_mounted_is_shown_to_slots() -> None:
    assert SingularityConfig(volumes=("/a:/sets:ro",), visible_paths=("/x",)).visible_paths == ("/x", "/sets")


def test_apptainer_gets_what_it_needs_for_downloads_and_a_container_nothing() -> None:
    environ = {
        "APPTAINER_DOCKER_PASSWORD": "p",
        "APPTAINERENV_SECRET": "s",
        "APPTAINER_BINDPATH": "/etc",
        "APPTAINER_CACHEDIR": "/home/me",
        "SINGULARITY_DOCKER_USERNAME": "u",
        "https_proxy": "h",
        "OPENAI_API_KEY": "k",
    }
    passed = variables_for_downloads(Path("/scratch"), environ)
    assert passed["APPTAINER_DOCKER_PASSWORD"] == "p" and passed["SINGULARITY_DOCKER_USERNAME"] == "u"
    assert passed["https_proxy"] == "h" and passed["APPTAINER_CACHEDIR"] == "/scratch"
    assert not {"APPTAINERENV_SECRET", "APPTAINER_BINDPATH", "OPENAI_API_KEY"} & passed.keys()
    assert not {"APPTAINER_DOCKER_PASSWORD", "https_proxy"} & variables(Path("/scratch")).keys()


@pytest.mark.parametrize(
    ("said", "kind", "retryable", "advice"),
    [
        ("FATAL: while writing: no space left on device", ProvisionError, True, "image_dir"),
        ("initializing source docker://x: unauthorized", ImageError, False, "APPTAINER_DOCKER_USERNAME"),
        ("reading manifest latest: manifest unknown", ImageError, False, "name and tag"),
        ("dial tcp: lookup registry: no such host", ProvisionError, True, "network"),
        ("FATAL: while performing build: %post exited with 1", ImageError, False, "apptainer build"),
    ],
)
def test_a_failed_image_says_whose_fault_it_is(
    said: str, kind: type[ProvisionError], retryable: bool, advice: str
) -> None:
    error = classify_failure("x.def", said)
    assert type(error) is kind and error.retryable is retryable
    assert said in error.message and advice in str(error.hint)


def test_a_container_that_did_not_start_says_what_to_do() -> None:
    error = not_started("FATAL: mount source /sets doesn't exist")
    assert "volume" in str(error.hint) and not error.retryable
    assert not_started("signal: killed").retryable


def test_the_terminal_tools_variable_names_the_image() -> None:
    classes = {"singularity": lambda: SingularityConfig}
    environ = {"HERMES_ENV_FILE": "", "TERMINAL_ENV": "singularity", "TERMINAL_SINGULARITY_IMAGE": "/images/a.sif"}
    settings = TerminalSettings.load(classes, environ)
    assert settings.profiles["default"]["image"] == "/images/a.sif"
