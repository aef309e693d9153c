"""The model servers of an Atropos environment: the checks of their settings, and the agent that uses them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import SecretStr

from hermes_atropos.config import HermesAgentEnvConfig
from hermes_core import Agent, AgentSettings, ConfigError, ExactAgent, Runtime, Settings
from hermes_core.agents.balanced import BalancedAgent
from hermes_core.agents.exact.factory import checked_chat
from hermes_core.agents.exact.generate import GenerateServer
from hermes_core.agents.exact.parser_choice import matching_parser
from hermes_core.agents.model import ModelAgent, OpenAIServer
from hermes_core.runs.session import agent_on, parsers_with
from hermes_core.settings import read_dotenv

EXACT = ("vllm", "sglang")
"""Server types that return tokens and logprobs."""

NO_TOKENIZER = "none"


def default_config(kind: type[HermesAgentEnvConfig], **given: Any) -> HermesAgentEnvConfig:
    """Return the settings that nobody gave, with `ATROPOS_TOKENIZER_NAME` and `ATROPOS_SANDBOX_IMAGE` in them."""
    variables = _variables()
    if name := variables.get("ATROPOS_TOKENIZER_NAME"):
        given.setdefault("tokenizer_name", name)
    if image := variables.get("ATROPOS_SANDBOX_IMAGE"):
        given.setdefault("sandbox", {name: {"image": image} for name in ("docker", "modal")})
    return kind(**given)


def default_server() -> APIServerConfig:
    """Return the server that `ATROPOS_SERVER_…` names, in the environment or in `.env`; else the other commands' one.

    Raises:
        ConfigError: `ATROPOS_SERVER_TIMEOUT_S` is not a number.
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
    """Return the servers as Atropos takes them: a list, with the tokenizer that is meant, and no requests of its own.

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
    kind = kinds.pop()
    if kind in EXACT and config.extra_body:
        raise ConfigError(
            f"extra_body is for servers of type openai, not {kind}",
            hint="leave it out: what changes the sampling would make the logprobs wrong; for the chat template there "
            "is chat_template_kwargs",
        )
    unused = [key for key in ("chat_template", "chat_template_kwargs") if kind not in EXACT and getattr(config, key)]
    if unused:
        raise ConfigError(
            f"{unused[0]} is for servers of type {' and '.join(EXACT)}: one of type {kind} renders the chat itself",
            hint="""set --env.extra_body='{"chat_template_kwargs": {…}}' where the server takes that""",
        )
    return [_with_tokenizer(server, config.tokenizer_name) for server in servers]


def _with_tokenizer(server: APIServerConfig, tokenizer: str) -> APIServerConfig:
    # The health check requests completions from the model, which cost money.
    changes: dict[str, Any] = {"health_check": False}
    if server.tokenizer_name == NO_TOKENIZER:
        changes["tokenizer_name"] = tokenizer
    return server.model_copy(update=changes)


def with_key(servers: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """Return the same for Atropos' own clients, which are made, and never used, and insist on a key."""
    return [server.model_copy(update={"api_key": server.api_key or "none"}) for server in servers]


def open_servers(
    runtime: Runtime,
    servers: Sequence[APIServerConfig],
    config: HermesAgentEnvConfig,
    tokenizer: Any,
    *,
    max_length: int,
    tools: bool,
) -> tuple[BalancedAgent | ExactAgent, list[AgentSettings]]:
    """Return the agent `model` on these servers, which closes them, and the settings of each server.

    Raises:
        UnknownNameError: there is no such parser, or the chat template has no such variable.
        ConfigError: the tokenizer's chat template can't be used, the parser does not read it, or a server can't be.
    """
    settings = config.agent_settings()
    each = [_settings(settings, server) for server in servers]
    room = [server.num_max_requests_at_once for server in servers]
    if servers[0].server_type not in EXACT:
        return BalancedAgent([OpenAIServer(one, at_once=most) for one, most in zip(each, room, strict=True)]), each
    parsers = parsers_with(runtime, config.tool_call_parser)
    alone = config.agent != ModelAgent.name  # a program has tools and a system prompt of its own
    tools = tools or alone
    chat = checked_chat(
        tokenizer,
        template=config.chat_template,
        template_kwargs=config.chat_template_kwargs,
        tools=tools,
        system=bool(config.system_prompt) or alone,
        compacts=config.compact_at is not None,
    )
    parser = matching_parser(config.tool_call_parser, parsers, chat, tools=tools)
    exact = [
        GenerateServer(one, server.server_type, at_once=most)
        for one, server, most in zip(each, servers, room, strict=True)
    ]
    return ExactAgent(settings, exact, chat, parser, max_length, end_thinking=config.calls_end_thinking), each


def open_agent(
    runtime: Runtime, config: HermesAgentEnvConfig, model: BalancedAgent | ExactAgent, settings: AgentSettings
) -> Agent:
    """Return the agent that the configuration names, on this model.

    Args:
        settings: those of the model.

    Raises:
        UnknownNameError: there is no such agent, or it has no such setting.
        UsageError, ConfigError: it can't be used here, or not with these settings.
    """
    if config.agent_options and config.agent == ModelAgent.name:
        raise ConfigError("agent_options are those of a program", hint="name one: --env.agent")
    # None is the default of each, and a program refuses some of them however they are set.
    given = {**settings.model_dump(exclude_unset=True, exclude_none=True), **config.agent_options}
    return agent_on(runtime, config.agent, given, model)


def _settings(settings: AgentSettings, server: APIServerConfig) -> AgentSettings:
    where = {
        "model": server.model_name,
        "base_url": server.base_url or None,
        "api_key": SecretStr(server.api_key) if server.api_key else None,
        "request_timeout_s": float(server.timeout),
    }
    return settings.model_copy(update=where)
