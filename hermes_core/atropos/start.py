"""What is checked before the first rollout: the servers, the tokenizer, its chat template, the parser, the wire."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import SecretStr

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.agents.chat import Chat
from hermes_core.agents.exact import ExactAgent
from hermes_core.agents.generate import GenerateServer
from hermes_core.agents.model import OpenAIServer
from hermes_core.atropos.endpoints import SharedAgent
from hermes_core.errors import ConfigError
from hermes_core.settings import Settings, read_dotenv

if TYPE_CHECKING:
    from hermes_core.atropos.config import HermesAgentEnvConfig
    from hermes_core.runtime import Runtime

EXACT = ("vllm", "sglang")
"""Server types that give tokens and logprobs."""

NO_TOKENIZER = "none"


def default_config(kind: type[HermesAgentEnvConfig], **given: Any) -> HermesAgentEnvConfig:
    """The settings that nobody gave, with `ATROPOS_TOKENIZER_NAME` and `ATROPOS_SANDBOX_IMAGE` in them."""
    variables = _variables()
    if name := variables.get("ATROPOS_TOKENIZER_NAME"):
        given.setdefault("tokenizer_name", name)
    if image := variables.get("ATROPOS_SANDBOX_IMAGE"):
        given.setdefault("sandbox", {name: {"image": image} for name in ("docker", "modal")})
    return kind(**given)


def default_server() -> APIServerConfig:
    """The server that `ATROPOS_SERVER_…` names, in the environment or in `.env`; else that of the other commands.

    Raises:
        ConfigError: `ATROPOS_SERVER_TIMEOUT_S` is no number.
    """
    variables, settings = _variables(), Settings.load()
    timeout = variables.get("ATROPOS_SERVER_TIMEOUT_S", "600")
    if not timeout.isdigit():
        raise ConfigError(f"ATROPOS_SERVER_TIMEOUT_S is {timeout!r}", hint="give a whole number of seconds")
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    return APIServerConfig(
        base_url=variables.get("ATROPOS_SERVER_BASE_URL") or settings.base_url or "",
        model_name=variables.get("ATROPOS_SERVER_MODEL") or settings.model or "default",
        api_key=variables.get("ATROPOS_SERVER_API_KEY") or key,
        server_type=variables.get("ATROPOS_SERVER_TYPE") or "openai",
        timeout=int(timeout),
        health_check=False,
    )


def _variables() -> Mapping[str, str]:
    return {**read_dotenv(os.environ), **os.environ}


def checked_servers(servers: Any, config: HermesAgentEnvConfig) -> list[APIServerConfig]:
    """The servers as Atropos takes them: a list, with the tokenizer that is meant, and no requests of its own.

    Raises:
        ConfigError: they can't be used as they are.
    """
    if isinstance(servers, APIServerConfig):
        servers = [servers]
    if not isinstance(servers, Sequence) or not servers or not all(isinstance(s, APIServerConfig) for s in servers):
        raise ConfigError(
            "no model server is named",
            hint="set --openai.base_url, or ATROPOS_SERVER_BASE_URL; config_init gives a list",
        )
    kinds = {server.server_type for server in servers}
    if len(kinds) > 1:
        raise ConfigError(f"the servers are of several types: {', '.join(sorted(kinds))}", hint="use one type")
    if "trl" in kinds:
        raise ConfigError("a server of type trl gives no logprobs", hint=f"use openai, {' or '.join(EXACT)}")
    if not config.tokenizer_name:
        raise ConfigError(
            "no tokenizer is named", hint="set --env.tokenizer_name, or ATROPOS_TOKENIZER_NAME, to a folder or hub name"
        )
    if kinds & set(EXACT) and config.extra_body:
        raise ConfigError(
            f"extra_body is for servers of type openai, not {kinds.pop()}",
            hint="leave it out: what changes the sampling would make the logprobs wrong",
        )
    return [_with_tokenizer(server, config.tokenizer_name) for server in servers]


def _with_tokenizer(server: APIServerConfig, tokenizer: str) -> APIServerConfig:
    # Its health check asks the model for completions, which somebody pays for.
    changes: dict[str, Any] = {"health_check": False}
    if server.tokenizer_name == NO_TOKENIZER:
        changes["tokenizer_name"] = tokenizer
    return server.model_copy(update=changes)


def with_key(servers: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """The same for Atropos' own clients, which are made, and never used, and insist on a key."""
    return [server.model_copy(update={"api_key": server.api_key or "none"}) for server in servers]


def open_servers(
    runtime: Runtime,
    servers: Sequence[APIServerConfig],
    config: HermesAgentEnvConfig,
    tokenizer: Any,
    *,
    max_length: int,
    tools: bool,
) -> tuple[Agent, list[Any]]:
    """The agent for these servers, and what is to be closed after it.

    Raises:
        UnknownNameError: there is no such parser.
        ConfigError: the tokenizer's chat template can't be used, or a server can't be.
    """
    settings = config.agent_settings()
    if servers[0].server_type not in EXACT:
        asked = [_settings(settings, server) for server in servers]
        opened = [OpenAIServer(each) for each in asked]
        room = [server.num_max_requests_at_once for server in servers]
        return SharedAgent(list(zip(asked, opened, room, strict=True))), list(opened)
    parser = _parser(runtime, config.tool_call_parser)
    chat = Chat(tokenizer)
    chat.check(tools=tools)
    exact = [
        GenerateServer(_settings(settings, server), server.server_type, at_once=server.num_max_requests_at_once)
        for server in servers
    ]
    return ExactAgent(settings, exact, chat, parser, max_length), list(exact)


async def try_out(servers: Sequence[Any], tokenizer: Any) -> None:
    """Ask each token-exact server for one token, so that one that gives no logprobs is found now.

    Raises:
        ModelError: a server can't be reached, or gives no tokens with logprobs.
    """
    prompt = list(tokenizer.encode("Hello", add_special_tokens=False))
    for server in servers:
        if isinstance(server, GenerateServer):
            await server.sample(prompt, max_tokens=1, temperature=1.0)


def _settings(settings: AgentSettings, server: APIServerConfig) -> AgentSettings:
    where = {
        "model": server.model_name,
        "base_url": server.base_url or None,
        "api_key": SecretStr(server.api_key) if server.api_key else None,
        "request_timeout_s": float(server.timeout),
    }
    return settings.model_copy(update=where)


def _parser(runtime: Runtime, name: str) -> Any:
    """The parser of that name.

    Raises:
        UnknownNameError: there is none; names the nearest.
    """
    entry = runtime.parsers.entry(name)
    return entry.load()()
