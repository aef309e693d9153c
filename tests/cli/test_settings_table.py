"""The listings of one name: every setting with its option, type, default and meaning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from enum import StrEnum
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel, ConfigDict, Field

from hermes_core.cli import listing
from hermes_core.cli.main import main
from hermes_core.cli.settings_table import settings_table
from hermes_core.environment import EnvironmentConfig
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.registry import Registrar
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Capabilities, Isolation, Network, SandboxConfig
from hermes_core.sandbox.local.backend import LocalBackend


class Kind(StrEnum):
    A = "a"
    B = "b"


class Price(BaseModel):
    hour: float = Field(default=0.5, ge=0)
    """By the hour."""


class Config(EnvironmentConfig):
    path: str
    """Where it is,
    on this host."""
    kind: Kind = Kind.A
    limit: float | None = Field(default=2, gt=0, le=9, description="Described by the field.")
    """Not this one."""
    names: tuple[str, ...] = ()
    price: Price | None = None


def table(model: type[BaseModel], **options: Any) -> dict[str, tuple[str, str, str]]:
    rows = settings_table(model, "env", **options)
    return {row["option"]: (row["type"], row["default"], row["summary"]) for row in rows}


def test_each_setting_has_a_type_a_default_and_a_meaning() -> None:
    rows = table(Config)
    assert list(rows)[:6] == [f"--env.{key}" for key in ("path", "kind", "limit", "names", "price", "price.hour")]
    assert rows["--env.path"] == ("string, required", "", "Where it is, on this host.")
    assert rows["--env.kind"] == ('one of "a", "b"', "a", "")
    assert rows["--env.limit"] == ("number, more than 0, at most 9 or none", "2", "Described by the field.")
    assert rows["--env.names"] == ("array of string", "[]", "")
    assert rows["--env.price.hour"] == ("number, at least 0", "0.5", "By the hour.")
    assert rows["--env.max_items"][:2] == ("integer, at least 0", "0")


def test_every_setting_of_the_base_classes_says_what_it_is_for() -> None:
    with_runtime = Runtime(load_entry_points=False)
    for what, name in (("environment", "tasks"), ("agent", "model"), ("backend", "local")):
        rows = listing.list_entries(with_runtime, what, name)["settings"]
        assert rows and [row["option"] for row in rows if not row["summary"]] == []


def test_a_type_that_json_can_t_describe_is_named_as_python_does() -> None:
    class Odd(BaseModel):
        model_config = ConfigDict(arbitrary_types_allowed=True)

        thread: threading.Thread | None = None

    assert table(Odd)["--env.thread"][:2] == ("threading.Thread | None", "none")


def test_a_key_can_be_left_out() -> None:
    assert "--env.seed" not in table(Config, hidden={"seed"})


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("command", "kind", "option"),
    [
        (["envs", "tasks"], "environment", "--env.dataset_name"),
        (["agents", "model"], "agent", "--agent.max_turns"),
        (["backends", "local"], "backend", "--backend.slots_per_sandbox"),
    ],
)
def test_a_name_lists_its_settings(command: list[str], kind: str, option: str) -> None:
    told = json.loads(run(*command, "--json").output)
    assert told[kind][0]["name"] == command[1]
    assert option in {row["option"] for row in told["settings"]}
    assert option in run(*command).output


class OneImage(SandboxConfig):
    unsupported = ("image", "cpu")


class Fixed(LocalBackend):
    name = "fixed"
    config_class = OneImage
    capabilities = Capabilities(frozenset({Isolation.USER, Isolation.SHARED}), frozenset({Network.NONE, Network.OPEN}))


class Fixing:
    @hookimpl
    def hermes_register_backends(self, registry: Registrar) -> None:
        registry.add("fixed", Fixed)


def test_a_backend_lists_what_it_declares_and_no_setting_that_it_refuses() -> None:
    told = listing.list_entries(Runtime(plugins=[Fixing()], load_entry_points=False), "backend", "fixed")
    settings = {row["key"]: row for row in told["settings"]}
    assert settings["network"]["type"] == 'one of "none", "open", "allow"'
    assert "memory" in settings and not {"name", "image", "cpu"} & settings.keys()
    can = {row["name"]: row["value"] for row in told["capabilities"]}
    assert (can["isolation"], can["network"]) == (["shared", "user"], ["none", "open", "allow"])
    assert (can["attach"], can["gpu"], can["memory_limit"]) == ("no", "no", "yes")
    shown = listing.as_text(told, terminal_width=None)
    assert re.search(r"^not supported +image, cpu ", shown, re.M)
    assert shown.index("not supported") < shown.index("--backend.")


def test_a_backend_without_the_setting_memory_does_not_limit_it() -> None:
    rows = json.loads(run("backends", "local", "--json").output)["capabilities"]
    assert {row["name"]: row["value"] for row in rows}["memory_limit"] == "no"


def test_the_baselines_have_no_settings() -> None:
    assert json.loads(run("agents", "nop", "--json").output)["settings"] == []


def test_a_tool_lists_its_parameters_and_a_toolset_its_tools() -> None:
    told = json.loads(run("tools", "terminal", "--json").output)
    assert told["parameters"][0] == {
        "name": "command",
        "type": "string, required",
        "default": "",
        "summary": "The shell command line.",
    }
    assert [row["name"] for row in json.loads(run("tools", "safe", "--json").output)["tools"]] == [
        "read_file",
        "search_files",
    ]


@pytest.mark.parametrize(
    ("command", "near"),
    [
        (["envs", "taks"], "'tasks'"),
        (["agents", "modl"], "'model'"),
        (["backends", "locl"], "'local'"),
        (["tools", "terminl"], "'terminal'"),
        (["parsers", "hrmes"], "'hermes'"),
    ],
)
def test_a_misspelt_name_suggests_a_near_one(command: list[str], near: str) -> None:
    done = run(*command)
    assert done.exit_code == 2 and f"did you mean {near}" in done.output


def test_lists_without_a_name() -> None:
    for command, name in (("agents", "oracle"), ("parsers", "hermes")):
        assert name in {row["name"] for row in json.loads(run(command, "--json").output)}
    assert run("sinks").exit_code == 0


def test_one_parser_or_sink_says_how_it_is_used() -> None:
    assert "--parser hermes" in run("parsers", "hermes").output
    refused = run("sinks", "nope")
    assert refused.exit_code == 2 and "unknown sink 'nope'" in refused.output

    class Plugin:
        @hookimpl
        def hermes_register_sinks(self, registry: Registrar) -> None:
            registry.add("rewards", "os:getcwd", summary="Rewards as CSV")

    (row,) = listing.list_entries(Runtime(plugins=[Plugin()], load_entry_points=False), "sink", "rewards")["sink"]
    assert (row["summary"], row["use"]) == ("Rewards as CSV", "hermes-rl rollout ENV --sink rewards=TARGET")


def test_the_json_of_a_tool_has_the_schema_that_the_model_gets() -> None:
    (tool,) = json.loads(run("tools", "terminal", "--json").output)["tool"]
    assert tool["schema"]["function"]["parameters"]["properties"]["command"]["type"] == "string"
    assert '"parameters"' not in run("tools", "terminal").output


def test_a_terminal_of_80_columns_shows_all_of_it() -> None:
    told = listing.list_entries(Runtime(load_entry_points=False), "agent", "model")
    lines = listing.as_text(told, terminal_width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("type: integer, at least 1; default: 30") for line in lines)


def test_the_settings_are_those_that_the_command_line_takes() -> None:
    command = [sys.executable, "-m", "hermes_core", "rollout", "tasks", "--agent", "nop", "--env.needs=[]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "dataset_name is missing" in done.stderr, done.stderr
