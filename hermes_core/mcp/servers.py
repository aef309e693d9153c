"""The settings of MCP servers in a run or a task, and the file that holds them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hermes_core.errors import ConfigError, UsageError, nearest_hint
from hermes_core.settings import read_dotenv, read_mapping, url_secrets
from hermes_core.validation import SECRET_NAME, validate_data

Transport = Literal["stdio", "streamable-http", "sse"]

SERVERS = "mcpServers"
"""The key under which a file has its servers."""

_NAME = re.compile(r"[A-Za-z0-9-]+(_[A-Za-z0-9-]+)*")
_MAX_NAME = 32
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\}")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_APPROVALS = frozenset({"autoApprove", "alwaysAllow", "description"})
"""Keys of interactive clients that are ignored, because nobody is asked before a call."""
_SPELLINGS = {"http": "streamable-http", "streamable_http": "streamable-http", "streamableHttp": "streamable-http"}


class McpServer(BaseModel):
    """One MCP server: a program that is started, or a URL. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    command: str | None = Field(default=None, min_length=1)
    """The program, which speaks MCP on its standard input and output."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables of the program. The agent can read those of a program in its slot."""
    cwd: str | None = None
    """The directory that it starts in. None is the slot's, or the driver's own."""
    url: str | None = None
    """Where the server listens, instead of `command`. It is reached from the driver."""
    transport: Annotated[
        Transport | None,
        BeforeValidator(lambda value: _SPELLINGS.get(value, value) if isinstance(value, str) else value),
    ] = None
    """`streamable-http` (also `http`) or `sse` for a URL; None is `streamable-http`. `type` is another name for it."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """HTTP headers of every request."""
    where: Literal["sandbox", "driver"] | None = None
    """Where the program runs: in the slot of each rollout, or on the driver's host with the driver's rights. None is
    the slot."""
    tools: tuple[str, ...] | None = None
    """The tools that are offered, by the server's own names. None is all."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Time limit of a call in seconds. None is the limit of other tools."""
    startup_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that the server may take to start and to list its tools."""
    disabled: bool = False
    """Whether the server is left out."""

    @model_validator(mode="before")
    @classmethod
    def _usual_keys(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kept = {key: value for key, value in given.items() if key not in _APPROVALS}
        if "type" in kept and "transport" not in kept:
            kept["transport"] = kept.pop("type")
        return kept

    @field_validator("headers")
    @classmethod
    def _valid_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or any(character in value for character in "\r\n\0"):
                raise ValueError(f"{name!r} is no valid header")
        return headers

    @model_validator(mode="after")
    def _program_or_url(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("needs `command` or `url`, and not both")
        if self.url is None:
            if self.transport not in (None, "stdio"):
                raise ValueError(f"transport {self.transport} needs `url`")
            if self.headers:
                raise ValueError("a program has no headers")
            return self
        if self.transport == "stdio":
            raise ValueError("transport stdio needs `command`")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("`url` must begin with http:// or https://")
        if self.args or self.env or self.cwd:
            raise ValueError("a URL has no args, env or cwd")
        if self.where == "sandbox":
            raise ValueError("a URL is reached from the driver, not from the sandbox")
        return self

    @property
    def on_driver(self) -> bool:
        """Return whether the driver runs the server, or connects to it by URL."""
        return self.url is not None or self.where == "driver"

    def without_secrets(self) -> dict[str, Any]:
        """Return the settings that can change a run's records, without values that may be secret."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return {**values, **{key: sorted(values[key]) for key in ("env", "headers") if key in values}}


def secrets_of(servers: Mapping[str, McpServer]) -> dict[str, str]:
    """Return the secrets in the settings of servers, by a name that describes each."""
    found: dict[str, str] = {}
    for server, each in servers.items():
        for header, value in each.headers.items():
            found[f"the header {header} of MCP server {server}"] = value
            if " " in value.strip():  # `Bearer KEY`
                found[f"the key in the header {header} of MCP server {server}"] = value.split()[-1]
        for name, value in each.env.items():
            if SECRET_NAME.search(name.upper()):
                found[f"{name} of MCP server {server}"] = value
            found |= url_secrets(f"{name} of MCP server {server}", value)
        found |= url_secrets(f"MCP server {server}", each.url or "")
        for option, value in _options(each.args):
            if SECRET_NAME.search(option.lstrip("-").replace("-", "_").upper()):
                found[f"{option} of MCP server {server}"] = value
            found |= url_secrets(f"{option or 'the arguments'} of MCP server {server}", value)
    return found


def _options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a command, each with the option that it may belong to: `--key VALUE`, `--key=VALUE`."""
    before = ""
    for argument in args:
        option, equals, value = argument.partition("=") if argument.startswith("-") else (before, "=", argument)
        if equals:
            yield option, value
        before = "" if equals else option


def check_server_name(name: str) -> None:
    """Check that a server's name can be a part of its tools' names.

    Raises:
        UsageError: the name can't be a part of a tool's name.
    """
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise UsageError(
            f"{name!r} can't be the name of an MCP server",
            hint=f"use at most {_MAX_NAME} letters, digits, '-', and single '_' between them",
        )


def read_servers(given: Any) -> Any:
    """Return servers by name, without disabled ones. `given` may be the name of a JSON or YAML file with the key
    `mcpServers`, the content of such a file, or only its servers. Any other value is returned unchanged.

    `${VAR}` and `${VAR:-default}` in texts are replaced by variables of the driver.

    Raises:
        ConfigError: the file can't be read, a variable is not set, or a server's settings are wrong.
        UnknownNameError: a server has an unknown key.
    """
    where = "mcp"
    if isinstance(given, str | Path):
        where = str(given)
        given = read_mapping(Path(given).expanduser(), "mcp")
        if SERVERS not in given:
            raise ConfigError(f"{where} has no key {SERVERS!r}", hint=_other_key(given))
    if not isinstance(given, Mapping):
        return given
    servers = given.get(SERVERS, given)
    if not isinstance(servers, Mapping):
        raise ConfigError(f"{SERVERS} of {where} is not a mapping", hint="write the name of each server before it")
    if isinstance(more := set(given) - {SERVERS} if SERVERS in given else None, set) and more:
        raise ConfigError(f"{where} has the unknown key {min(map(str, more))!r}", hint=f"it has one key, {SERVERS}")
    found: dict[str, McpServer] = {}
    for name, settings in servers.items():
        what = f"MCP server {name!r} of {where}"
        check_server_name(str(name))
        server = settings
        if not isinstance(settings, McpServer):
            if not isinstance(settings, Mapping):
                raise ConfigError(f"{what} is not a mapping", hint="give it `command` or `url`")
            server = validate_data(McpServer, _fill(settings, what), what)
        if not server.disabled:
            found[name] = server
    return found


def _other_key(given: Mapping[str, Any]) -> str:
    return f'write {{"{SERVERS}": {{NAME: …}}}}' + (f"; {nearest_hint(SERVERS, given)}" if given else "")


def _fill(value: Any, what: str) -> Any:
    """Return settings in which the driver's environment variables replace each `${VAR}`."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _variable(found, what), value)
    if isinstance(value, Mapping):
        return {key: _fill(each, what) for key, each in value.items()}
    return [_fill(each, what) for each in value] if isinstance(value, list | tuple) else value


def _variable(found: re.Match[str], what: str) -> str:
    name, default = found["name"], found["default"]
    value = os.environ.get(name) or read_dotenv(os.environ).get(name)
    if value:
        return value
    if default is None:
        raise ConfigError(f"{what} needs the variable {name}", hint=f"set it, or write ${{{name}:-DEFAULT}}")
    return str(default.removeprefix(":-"))
