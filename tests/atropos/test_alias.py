"""`hermes_core.atropos`, the first path of these names, hands on to the plugin and says how to install it."""

from __future__ import annotations

import subprocess
import sys

import hermes_atropos
import pytest

import hermes_core.atropos as alias
from hermes_core.errors import ConfigError


@pytest.mark.usefixtures("atropos_extra")
def test_the_names_are_those_of_the_plugin() -> None:
    for name in hermes_atropos.__all__:
        assert getattr(alias, name) is getattr(hermes_atropos, name)


def test_a_name_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HermesEnv'"):
        alias.HermesEnv  # noqa: B018


def test_there_is_no_second_copy_of_a_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        __import__("hermes_core.atropos.env")


def test_a_plugin_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hermes_atropos", None)
    with pytest.raises(ConfigError, match="HermesAgentBaseEnv is in a distribution that is not installed") as raised:
        alias.HermesAgentBaseEnv  # noqa: B018
    assert raised.value.hint == "pip install hermes-rl-atropos"


@pytest.mark.parametrize("plugins", ["", "docker"])
def test_a_command_that_no_plugin_in_use_has_is_explained(plugins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_PLUGINS", plugins)
    done = subprocess.run([sys.executable, "-m", "hermes_core", "atropos"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "add 'atropos' to HERMES_PLUGINS" in done.stderr
