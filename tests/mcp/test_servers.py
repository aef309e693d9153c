"""How servers are named: the usual file, its variables and secrets, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.cli.main import main
from hermes_core.environment import Environment
from hermes_core.errors import ConfigError, UsageError
from hermes_core.mcp.servers import McpServer, read_servers, secrets_of
from hermes_core.runs.options import RunOptions
from hermes_core.settings import Redactor


def written(path: Path, content: Any, name: str = "mcp.json") -> Path:
    file = path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_usual_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_KEY", "k-0123456789")
    content = {
        "web": {
            "command": "npx",
            "args": ["-y", "web@${VERSION:-latest}"],
            "env": {"KEY": "${SEARCH_KEY}", "PORT": 80},
        },
        "docs": {
            "type": "http",
            "url": "https://docs.example/mcp",
            "headers": {"Authorization": "Bearer ${SEARCH_KEY}"},
        },
        "old": {"transport": "sse", "url": "http://localhost:1/sse", "tools": ["a"], "timeout_s": 5},
        "off": {"command": "x", "disabled": True, "autoApprove": ["y"]},
        "browser": {"command": "browser", "where": "driver", "cwd": "~"},
    }
    servers = RunOptions.model_validate({"mcp": str(written(tmp_path, {"mcpServers": content}))}).mcp
    assert servers is not None and [*servers] == ["web", "docs", "old", "browser"]
    assert servers["web"].args == ("-y", "web@latest") and servers["web"].env == {"KEY": "k-0123456789", "PORT": "80"}
    assert servers["docs"].transport == "streamable-http" and servers["old"].tools == ("a",)
    assert [each.on_driver for each in servers.values()] == [False, True, True, True]
    assert read_servers({"mcpServers": content}) == read_servers(content) == servers


def test_a_file_in_yaml_and_a_file_with_tabs(tmp_path: Path) -> None:
    yaml = written(tmp_path, "mcpServers:\n  web: {command: web}\n", "mcp.yaml")
    tabs = written(tmp_path, '{\n\t"mcpServers": {\n\t\t"web": {"command": "web"}}}')
    assert read_servers(yaml) == read_servers(tabs) == {"web": McpServer(command="web")}


WRONG: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not valid JSON"),
    "another key": ({"mcpServer": {}}, "did you mean 'mcpServer'"),
    "a list": ([], "does not hold a mapping"),
    "servers as a list": ({"mcpServers": []}, "is not a mapping"),
    "no mapping": ({"mcpServers": {"a": "npx"}}, "give it `command` or `url`"),
    "neither": ({"mcpServers": {"a": {}}}, "needs `command` or `url`"),
    "both": ({"mcpServers": {"a": {"command": "x", "url": "http://x"}}}, "and not both"),
    "unknown key": ({"mcpServers": {"a": {"comand": "x"}}}, "did you mean 'command'"),
    "URL in the sandbox": ({"mcpServers": {"a": {"url": "http://x", "where": "sandbox"}}}, "reached from the driver"),
    "another scheme": ({"mcpServers": {"a": {"url": "file:///etc"}}}, "must begin with http"),
    "headers of a program": ({"mcpServers": {"a": {"command": "x", "headers": {"A": "b"}}}}, "has no headers"),
    "two lines": ({"mcpServers": {"a": {"url": "http://x", "headers": {"A": "b\r\nC: d"}}}}, "no valid header"),
    "a name with spaces": ({"mcpServers": {"a b": {"command": "x"}}}, "can't be the name"),
    "a name that could clash": ({"mcpServers": {"a__b": {"command": "x"}}}, "can't be the name"),
    "no variable": ({"mcpServers": {"a": {"command": "${NOT_SET_ANYWHERE}"}}}, "needs the variable NOT_SET_ANYWHERE"),
    "more beside": ({"mcpServers": {}, "inputs": []}, "unknown key 'inputs'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, case: str) -> None:
    content, said = WRONG[case]
    with pytest.raises(UsageError) as caught:
        read_servers(written(tmp_path, content))
    assert said in str(caught.value)


@pytest.mark.parametrize("command", ["rollout", "validate"])
def test_the_command_line_takes_a_file(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = written(tmp_path, {"mcpServers": {"a": {}}})
    done = CliRunner().invoke(main, [command, "tasks", "--env.dataset_name=x", "--mcp", str(file)])
    assert done.exit_code == 2 and "needs `command` or `url`" in done.output


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_servers("/nowhere/mcp.json")


def test_secrets_are_not_shown_and_are_redacted() -> None:
    servers = {
        "a": McpServer(
            command="x",
            args=(
                "--db=postgres://me:hunter2hunter2@db/x",
                "--api-key",
                "s3cr3t-value-4",
                "-v",
                "http://u:hunter2hunter2@x",
            ),
            env={"API_KEY": "s3cr3t-value-1"},
        ),
        "b": McpServer(url="https://x/mcp?token=s3cr3t-value-2", headers={"Authorization": "Bearer s3cr3t-value-3"}),
    }
    redact = Redactor(secrets_of(servers))
    shown = json.dumps({name: server.without_secrets() for name, server in servers.items()})
    assert "s3cr3t-value-1" not in shown + repr(servers) and "s3cr3t-value-3" not in shown + repr(servers)
    assert "s3cr3t" not in redact(
        shown + "key s3cr3t-value-1, s3cr3t-value-3, s3cr3t-value-4"
    ) and "hunter2" not in redact(shown)
    assert servers["a"].without_secrets()["env"] == ["API_KEY"]


def test_an_environment_has_none_by_default() -> None:
    assert Environment.mcp_servers(None, {}) == {}  # type: ignore[arg-type]
