"""Checks before the first rollout: the servers, the tokenizer, its chat template, the parser, the wire format."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from pydantic import SecretStr

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.agents.chat import Chat
from hermes_core.agents.endpoints import SharedAgent
from hermes_core.agents.exact import ExactAgent
from hermes_core.agents.failures import public_url
from hermes_core.agents.generate import GenerateServer
from hermes_core.agents.matching import matching_parser
from hermes_core.agents.model import OpenAIServer
from hermes_core.agents.wires import Sampled
from hermes_core.atropos.config import HermesAgentEnvConfig
from hermes_core.errors import ConfigError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings, read_dotenv

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
) -> tuple[Agent, list[Any]]:
    """Return the agent for these servers, and what is to be closed after it.

    Raises:
        UnknownNameError: there is no such parser, or the chat template has no such variable.
        ConfigError: the tokenizer's chat template can't be used, the parser does not read it, or a server can't be.
    """
    settings = config.agent_settings()
    if servers[0].server_type not in EXACT:
        asked = [_settings(settings, server) for server in servers]
        opened = [OpenAIServer(each) for each in asked]
        room = [server.num_max_requests_at_once for server in servers]
        return SharedAgent(list(zip(asked, opened, room, strict=True))), list(opened)
    named = runtime.parser(config.tool_call_parser)
    template = _template(config.chat_template)
    chat = Chat(tokenizer, template=template, template_kwargs=config.chat_template_kwargs)
    chat.check(tools=tools, system=bool(config.system_prompt))
    parsers = {name: runtime.parser(name) for name in runtime.parsers.names()}
    parser = (
        matching_parser(config.tool_call_parser, {config.tool_call_parser: named, **parsers}, chat) if tools else named
    )
    exact = [
        GenerateServer(_settings(settings, server), server.server_type, at_once=server.num_max_requests_at_once)
        for server in servers
    ]
    return ExactAgent(settings, exact, chat, parser, max_length, end_thinking=config.calls_end_thinking), list(exact)


TRIAL = "Hello, Wörld: {'n': 12345} != [0.5]\n\tdef f(x): return x  # 日本語 🦀"
"""A text that few tokenizers split in the same way."""

TRIAL_TOKENS = 8


async def try_out(servers: Sequence[Any], tokenizer: Any, temperature: float) -> None:
    """Ask each token-exact server for a few tokens, to find now one whose tokens can't be trained on; check the others.

    Raises:
        ModelError: a server can't be reached, refuses the key or the model, or gives no tokens with logprobs.
        ConfigError: it has another tokenizer, or its logprobs are not of what it draws from.
    """
    prompt = list(tokenizer.encode(TRIAL, add_special_tokens=False))
    for server in servers:
        if isinstance(server, GenerateServer):
            theirs = await server.tokenize(TRIAL)
            if theirs is not None and theirs != prompt:
                _refuse_tokenizer(
                    server, tokenizer, f"of one text it makes the tokens {_few(theirs)}, and this one {_few(prompt)}"
                )
            sampled = await server.sample(prompt, max_tokens=TRIAL_TOKENS, temperature=1.0)
            _check_tokenizer(server, tokenizer, sampled)
            if server.wire.raw_logprobs and temperature not in (0, 1):
                await _check_scaling(server, prompt, temperature)
        else:
            await server.check()


def _check_tokenizer(server: GenerateServer, tokenizer: Any, sampled: Sampled) -> None:
    """Refuse a tokenizer that does not have the server's tokens, or makes another text of them.

    Raises:
        ConfigError: it is so.
    """
    known = max([len(tokenizer), *(index + 1 for index in tokenizer.added_tokens_decoder)])
    if max(sampled.tokens) >= known:
        _refuse_tokenizer(server, tokenizer, f"it gave the token {max(sampled.tokens)}, and this one has {known}")
    ours = tokenizer.decode(sampled.tokens, skip_special_tokens=True)
    if sampled.text is not None and not _same_text(sampled.text, ours):
        _refuse_tokenizer(
            server, tokenizer, f"of the tokens {_few(sampled.tokens)} it makes {sampled.text!r}, and this one {ours!r}"
        )


def _refuse_tokenizer(server: GenerateServer, tokenizer: Any, problem: str) -> NoReturn:
    raise ConfigError(
        f"the tokenizer {tokenizer.name_or_path!r} is not that of the server at {public_url(server.url)}: {problem}",
        hint="set tokenizer_name to the tokenizer of the model that the server has loaded",
    )


def _same_text(theirs: str, ours: str) -> bool:
    """Return whether the one is the other, but for what a server may leave out: spaces, half characters, the end."""
    left = ["".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split()) for text in (theirs, ours)]
    return left[1].startswith(left[0])


def _few(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:8]))
    return f"[{shown}, …]" if len(tokens) > 8 else f"[{shown}]"


async def _check_scaling(server: GenerateServer, prompt: list[int], temperature: float) -> None:
    """Refuse logprobs from before the temperature: drawn from one token only, that has probability 1 or they are.

    Raises:
        ConfigError: they are.
    """
    (logprob,) = (await server.sample(prompt, max_tokens=1, temperature=temperature, top_k=1)).logprobs
    if logprob < -1e-4:
        raise ConfigError(
            f"the server at {public_url(server.url)} gives logprobs from before the temperature, and agent_temperature "
            f"is {temperature:g}: they are not of what it draws from",
            hint="start vLLM with --logprobs-mode processed_logprobs, or set agent_temperature to 1",
        )


def _settings(settings: AgentSettings, server: APIServerConfig) -> AgentSettings:
    where = {
        "model": server.model_name,
        "base_url": server.base_url or None,
        "api_key": SecretStr(server.api_key) if server.api_key else None,
        "request_timeout_s": float(server.timeout),
    }
    return settings.model_copy(update=where)


def _template(given: str | None) -> str | None:
    """Return the chat template that is set: a file's, or the text itself.

    Raises:
        ConfigError: there is no such file.
    """
    if not given or "{" in given:
        return given or None
    try:
        return Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the chat template {given!r} can't be read: {error}",
            hint="name a Jinja file, or write the template itself",
        ) from error
