"""The model servers of an Atropos environment: checks their settings, and opens the agent that asks them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import SecretStr

from hermes_atropos.config import HermesAgentEnvConfig
from hermes_core import Agent, AgentSettings, ConfigError, ExactAgent, Runtime, Settings
from hermes_core.agents.balanced import BalancedAgent
from hermes_core.agents.exact.factory import load_chat
from hermes_core.agents.exact.generate import GenerateServer
from hermes_core.agents.exact.parser_choice import matching_parser
from hermes_core.agents.model import ModelAgent, OpenAIServer
from hermes_core.runs.session import parsers_with
from hermes_core.settings import read_dotenv

EXACT = ("vllm", "sglang")
"""Server types that return tokens and logprobs."""

NO_TOKENIZER = "none"
"""The tokenizer's name of a server that has none."""


def default_config(kind: type[HermesAgentEnvConfig], **given: Any) -> HermesAgentEnvConfig:
    """Return the default settings, with the values of `ATROPOS_TOKENIZER_NAME` and `ATROPOS_SANDBOX_IMAGE`.

    Args:
        given: settings that override these.
    """
    variables = _variables()
    if name := variables.get("ATROPOS_TOKENIZER_NAME"):
        given.setdefault("tokenizer_name", name)
    if image := variables.get("ATROPOS_SANDBOX_IMAGE"):
        given.setdefault("sandbox", {name: {"image": image} for name in ("docker", "modal")})
    return kind(**given)


def default_server() -> APIServerConfig:
    """Return the server of the variables `ATROPOS_SERVER_…`, in the environment or in `.env`.

    Values that these variables leave out come from the settings of the other commands, such as `OPENAI_BASE_URL`.

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


def validate_servers(servers: Any, config: HermesAgentEnvConfig) -> list[APIServerConfig]:
    """Return the servers as a list, each with the tokenizer of the settings and without Atropos' health check.

    Raises:
        ConfigError: there is no server, their types differ or cannot be used, or a setting does not fit their type.
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
    return [_fill_tokenizer(server, config.tokenizer_name) for server in servers]


def _fill_tokenizer(server: APIServerConfig, tokenizer: str) -> APIServerConfig:
    # The health check requests completions from the model, which cost money.
    changes: dict[str, Any] = {"health_check": False}
    if server.tokenizer_name == NO_TOKENIZER:
        changes["tokenizer_name"] = tokenizer
    return server.model_copy(update=changes)


def fill_key(servers: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """Return copies of the servers, each with a key. Atropos makes clients of them, which need a key and are never
    used."""
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
    """Return the agent `model`, which asks these servers and closes them, and the settings for each server.

    Args:
        max_length: maximum number of tokens of a conversation.
        tools: whether the model is offered tools.

    Raises:
        UnknownNameError: the parser, or a variable of the chat template, does not exist.
        ConfigError: the chat template or a server can't be used, or the parser does not read what the template writes.
    """
    settings = config.agent_settings()
    settings_of_servers = [_settings(settings, server) for server in servers]
    limits = [server.num_max_requests_at_once for server in servers]
    if servers[0].server_type not in EXACT:
        pairs = zip(settings_of_servers, limits, strict=True)
        return BalancedAgent([OpenAIServer(own, at_once=limit) for own, limit in pairs]), settings_of_servers
    parsers = parsers_with(runtime, config.tool_call_parser)
    is_program = config.agent != ModelAgent.name  # a program has tools and a system prompt of its own
    tools = tools or is_program
    chat = load_chat(
        tokenizer,
        template=config.chat_template,
        template_kwargs=config.chat_template_kwargs,
        tools=tools,
        system=bool(config.system_prompt) or is_program,
        compacts=config.compact_at is not None,
    )
    parser = matching_parser(config.tool_call_parser, parsers, chat, tools=tools)
    exact = [
        GenerateServer(own, server.server_type, at_once=limit)
        for own, server, limit in zip(settings_of_servers, servers, limits, strict=True)
    ]
    agent = ExactAgent(settings, exact, chat, parser, max_length, end_thinking=config.calls_end_thinking)
    return agent, settings_of_servers


def open_agent(
    runtime: Runtime, config: HermesAgentEnvConfig, model: BalancedAgent | ExactAgent, settings: AgentSettings
) -> Agent:
    """Return the agent that the configuration names, which gets its answers from `model`.

    Args:
        settings: the settings of the model's server.

    Raises:
        UnknownNameError: the agent, or one of its settings, does not exist.
        UsageError, ConfigError: the agent can't be used here, or not with these settings.
    """
    if config.agent == ModelAgent.name:
        if config.agent_options:
            raise ConfigError("agent_options are those of a program", hint="name one: --env.agent")
        return model
    # Leave out None, which is each setting's default, because a program refuses some settings even if they are None.
    options = {**settings.model_dump(exclude_unset=True, exclude_none=True), **config.agent_options}
    return runtime.agent(config.agent, options, model=model)


def _settings(settings: AgentSettings, server: APIServerConfig) -> AgentSettings:
    changes = {
        "model": server.model_name,
        "base_url": server.base_url or None,
        "api_key": SecretStr(server.api_key) if server.api_key else None,
        "request_timeout_s": float(server.timeout),
    }
    return settings.model_copy(update=changes)
