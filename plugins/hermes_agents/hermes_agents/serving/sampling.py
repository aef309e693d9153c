"""Asks the rollout's model: with the run's sampling settings, or with the program's own request."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hermes_agents.serving.dialects import BadRequest, Dialect, ModelRequest
from hermes_agents.serving.http import Exchange
from hermes_agents.serving.requests import Passing, Request
from hermes_agents.serving.upstream import Passage, Upstream
from hermes_core import AgentSettings, AgentTask, ChatServer, KeepsState, ModelReply, derive_seed
from hermes_core.agents.replies import read_reply

_CHARACTERS = 200
"""Maximum number of characters of a setting in the record."""

_SETTINGS = 32
_LIKELY_MAX_TOKENS = 16_384
"""If the run sets no maximum number of tokens of an answer, an agent's own maximum above this number is ignored. Agents
request the maximum of the model for which they were made, and an endpoint refuses more than its model's context."""


class Sampling:
    """Asks the model of one rollout.

    Args:
        server: answers the requests. An `Upstream` gets them unchanged.
        settings: the model and how to sample. A program's sampling settings only count if requests are passed on.
        task: the task, from whose `seed_key` the seed is derived.
    """

    def __init__(self, server: ChatServer | Upstream, settings: AgentSettings, task: AgentTask) -> None:
        self._server = server
        self._settings = settings
        self._seed_key = task.seed_key or task.trajectory_id

    async def ask(self, request: Request, number: int) -> tuple[ModelReply, bytes | None]:
        """Return the reply to a request, and the bytes of the provider's own answer if the program gets that answer.

        Args:
            number: the number of the call, from 1.
        """
        if isinstance(self._server, Upstream):
            assert request.passage is not None
            reply, written = await self._server.answer(request.passage, number)
            return replace(reply, sampling=_own_sampling(request.asked)), written
        return await self._ask_with_our_settings(self._server, request.asked, number), None

    def passing(self, exchange: Exchange, dialect: Dialect) -> Passing | None:
        """Return the function that makes a `Passage` from a request; None if the request is not passed on to a
        provider."""
        server = self._server
        if not isinstance(server, Upstream):
            return None

        def passing(asked: ModelRequest, body: bytes, value: Mapping[str, Any]) -> Passage:
            if dialect.name != server.api.name:
                raise BadRequest(f"only requests in the dialect {server.api.name} are passed on here")
            return server.passage(asked, body, value, query=exchange.query, headers=exchange.headers)

        return passing

    def overridden(self, asked: ModelRequest) -> dict[str, str]:
        """Return the sampling settings of a request that are not used."""
        if isinstance(self._server, Upstream):
            return {}
        overridden = {key[:_CHARACTERS]: _brief(value) for key, value in list(asked.settings.items())[:_SETTINGS]}
        if asked.max_tokens is not None and self._max_tokens(asked) != asked.max_tokens:
            overridden["max_tokens"] = _brief(asked.max_tokens)
        return overridden

    def cost(self, reply: ModelReply) -> float | None:
        """Return the cost of a reply in dollars; None if it is not known."""
        price = self._settings.price
        if price is None:
            return reply.cost
        return price.cost(reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens or 0)

    def managed_state(self) -> Mapping[str, Any] | None:
        """Return the server's record of the conversation, such as the tokens; None if the server keeps no record."""
        return self._server.get_state() if isinstance(self._server, KeepsState) else None

    async def _ask_with_our_settings(self, server: ChatServer, asked: ModelRequest, number: int) -> ModelReply:
        settings = self._settings
        extra = dict(settings.extra_body or {})
        if settings.seed is not None:
            extra.setdefault("seed", derive_seed(settings.seed, self._seed_key))
        options = {
            "tools": asked.tools or None,
            "temperature": settings.temperature,
            "max_tokens": self._max_tokens(asked),
            "extra_body": extra or None,
            "tool_choice": "none" if asked.no_calls and asked.tools else None,
        }
        given = {key: value for key, value in options.items() if value is not None}
        completion = await server.chat_completion(messages=asked.messages, n=1, **given)
        reply = read_reply(completion, number)
        sent = {"temperature": settings.temperature, "max_tokens": options["max_tokens"], **extra}
        kept = {key: value for key, value in sent.items() if value is not None}
        return reply if reply.sampling is not None else replace(reply, sampling=kept)

    def _max_tokens(self, asked: ModelRequest) -> int | None:
        """Return the maximum number of tokens of the answer. The program may only lower the run's maximum."""
        ours, theirs = self._settings.max_tokens, asked.max_tokens
        if ours is None and theirs is not None and theirs > _LIKELY_MAX_TOKENS:
            return None
        return min((each for each in (ours, theirs) if each is not None), default=None)


def _own_sampling(asked: ModelRequest) -> dict[str, Any]:
    """Return the sampling settings of a request that was passed on. Long values are cut."""
    settings = {"max_tokens": asked.max_tokens, **dict(list(asked.settings.items())[:_SETTINGS])}
    said = {key[:_CHARACTERS]: (value, repr(value)) for key, value in settings.items() if value is not None}
    return {key: value if len(text) <= _CHARACTERS else text[:_CHARACTERS] for key, (value, text) in said.items()}


def _brief(value: Any) -> str:
    """Return a setting's value as a short text."""
    return reprlib.repr(value)[:_CHARACTERS]
