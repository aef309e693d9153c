"""Opens a token-exact agent: loads the tokenizer, and checks its chat template and the parser before any request."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hermes_core.agents.base import Agent, AgentResult, AgentSettings, AgentTask
from hermes_core.agents.exact.agent import ExactAgent
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.generate import GenerateServer, TokenServer
from hermes_core.agents.exact.parser_choice import AUTO, matching_parser
from hermes_core.agents.model import ExactSettings, ModelAgent, ModelSettings
from hermes_core.agents.parsers.base import Parser
from hermes_core.errors import ConfigError, UsageError, describe
from hermes_core.workers import Workers

_NEEDED = ("transformers", "jinja2", "aiohttp")
"""Packages that token-exact rollouts need, and that the core does not require."""


@dataclass(frozen=True)
class AgentContext:
    """The facts about a run that an agent needs when it is opened."""

    parsers: Callable[[str], Mapping[str, Parser]]
    """Returns all parsers by name, and raises if there is none with the given name. The given one comes first."""
    tools: bool = False
    """Whether rollouts have tools."""
    system: bool = False
    """Whether rollouts have a system message."""
    server: Callable[[Chat], TokenServer] | None = None
    """Makes the server that samples; None uses the server at the settings' `base_url`."""


@runtime_checkable
class CanOpen(Protocol):
    """An agent that may have something to load before its first rollout, such as a tokenizer."""

    async def open(self, context: AgentContext) -> Agent:
        """Return the agent that rollouts use: this agent, or another, which the caller closes."""
        ...


async def enter_agent(agent: Agent, context: AgentContext) -> Agent:
    """Return the agent that rollouts use: the result of `agent.open`, or `agent` itself if it has no `open`."""
    return await agent.open(context) if isinstance(agent, CanOpen) else agent


class ExactModel:
    """The agent `model` with a `tool_call_parser`, whose tokenizer is not loaded yet."""

    name = "model"

    def __init__(self, settings: ExactSettings) -> None:
        self.settings = settings

    async def open(self, context: AgentContext) -> ExactAgent:
        """Load the tokenizer; see `CanOpen`. Raise as `open_exact_agent`."""
        return await open_exact_agent(
            self.settings,
            context.parsers(self.settings.tool_call_parser or AUTO),
            tools=context.tools,
            system=context.system,
            server=context.server,
        )

    async def run(self, task: AgentTask) -> AgentResult:
        """Refuse to work, because only the agent that `open` returns can work.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "this agent's tokenizer is not loaded yet",
            hint="pass it to run_rollouts(…), or use what its open() returns",
        )

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""


class ModelFactory:
    """Makes the agent `model` from its settings."""

    config_class = ModelSettings

    def __call__(self, settings: AgentSettings) -> Agent:
        """Return an agent that asks an OpenAI endpoint; or, with a `tool_call_parser`, a token-exact one."""
        if isinstance(settings, ExactSettings) and settings.tool_call_parser is not None:
            return ExactModel(settings)
        return ModelAgent(settings)


make_model = ModelFactory()


async def open_exact_agent(
    settings: ExactSettings,
    parsers: Mapping[str, Parser],
    *,
    tools: bool,
    system: bool = False,
    server: Callable[[Chat], TokenServer] | None = None,
) -> ExactAgent:
    """Return the agent for these settings. The server is asked only when the agent's `check_endpoint` is called.

    Args:
        settings: the model, its server and tokenizer, and how to sample. Without a `tool_call_parser`, `auto` is used.
        parsers: all parsers by name, including the `tool_call_parser`.
        tools: whether rollouts have tools.
        system: whether rollouts have a system message.
        server: makes the server that samples; None uses the server at the settings' `base_url`.

    Raises:
        ConfigError: a package is not installed, the tokenizer can't be loaded, its chat template can't be used, or the
            parser does not read the calls that the template writes.
        UnknownNameError: the chat template has no such variable.
    """
    check_installed()
    sampler = server or GenerateServer(settings, settings.server_type)
    threads = Workers(1)  # the event loop's own executor would wait for a download even after Ctrl-C
    try:
        chat, parser = await asyncio.get_running_loop().run_in_executor(
            threads, lambda: _chat_and_parser(settings, parsers, tools=tools, system=system)
        )
    finally:
        threads.shutdown(wait=False)
    servers = [sampler(chat) if callable(sampler) else sampler]
    return ExactAgent(
        settings, servers, chat, parser, settings.max_token_length, end_thinking=settings.calls_end_thinking
    )


def check_installed() -> None:
    """Check that the packages for token-exact rollouts are installed.

    Raises:
        ConfigError: a package is not installed.
    """
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"token-exact rollouts need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed",
            hint="pip install 'hermes-rl[exact]', or in a checkout make setup EXTRAS=exact",
        )


def load_chat(
    tokenizer: Any,
    *,
    template: str | None,
    template_kwargs: Mapping[str, Any] | None,
    tools: bool,
    system: bool,
    compacts: bool,
) -> Chat:
    """Return the tokenizer's chat, after a check of its template.

    Args:
        template: a Jinja file, or the text of a template, to use instead of the tokenizer's.
        template_kwargs: more variables for the template.
        tools, system, compacts: see `Chat.check`.

    Raises:
        UnknownNameError: the template does not have a variable of `template_kwargs`.
        ConfigError: the template can't be used, or its file does not exist.
    """
    chat = Chat(
        tokenizer,
        template=_template(template),
        template_kwargs=template_kwargs,
        end_tokens=_end_tokens(tokenizer.name_or_path),
    )
    chat.check(tools=tools, system=system, compacts=compacts)
    return chat


def _chat_and_parser(
    settings: ExactSettings, parsers: Mapping[str, Parser], *, tools: bool, system: bool
) -> tuple[Chat, Parser]:
    chat = load_chat(
        _load_tokenizer(settings.tokenizer_name or settings.model),
        template=settings.chat_template,
        template_kwargs=settings.chat_template_kwargs,
        tools=tools,
        system=system,
        compacts=isinstance(settings, ModelSettings) and settings.compact_at is not None,
    )
    return chat, matching_parser(settings.tool_call_parser or AUTO, parsers, chat, tools=tools)


def _load_tokenizer(name: str | None) -> Any:
    """Return the tokenizer in this folder, or with this name on the hub.

    Raises:
        ConfigError: there is no such tokenizer, or it can't be loaded.
    """
    if not name:
        raise ConfigError(
            "no tokenizer is named", hint="give --agent.tokenizer_name=FOLDER, or the model's name as --model"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a tokenizer's files can be wrong in any way
        raise ConfigError(
            f"the tokenizer {name!r} can't be loaded: {describe(error)}",
            hint="give --agent.tokenizer_name: a folder with the model's tokenizer, or its name on the hub",
        ) from error


def _end_tokens(name: str) -> Iterator[int]:
    """Yield the token ids that end an answer according to the files beside a tokenizer. Servers end answers at each of
    these tokens."""
    from transformers.utils import cached_file

    for file in ("generation_config.json", "config.json"):
        try:
            path = cached_file(name, file)
            token_ids = json.loads(Path(path).read_bytes())["eos_token_id"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield from (each for each in (token_ids if isinstance(token_ids, list) else [token_ids]) if type(each) is int)


def _template(given: str | None) -> str | None:
    """Return the text of the chat template. `given` is the path of its file, or the text itself; None for no template.

    Raises:
        ConfigError: the file does not exist.
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
