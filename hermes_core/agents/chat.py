"""A tokenizer's chat template as token-exact conversations need it: the first prompt, and what follows each answer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_core.agents.base import Message
from hermes_core.agents.model import sendable
from hermes_core.errors import ConfigError, UsageError

END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>"),
    *("<|end_of_sentence|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|return|>"),
    # GLM has no token for it: an answer ends where the next message begins, and behind a call that is a tool's.
    *("<|user|>", "<|observation|>"),
)
"""Special tokens that end an answer, in the models that are in use. A tokenizer's own end token is always one."""

_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Look",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: the token ids, and whether the template has begun its thinking for it."""

    tokens: list[int]
    thinking: bool = False


class Chat:
    """Renders conversations for one tokenizer. It changes nothing in it and keeps nothing: one serves all rollouts.

    Args:
        tokenizer: a Hugging Face tokenizer.

    Raises:
        ConfigError: it has no chat template, or no end token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.turnstile = asyncio.Lock()
        """Held by whoever works on a long text, so that the event loop gets its turn in between."""
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self._name = str(name)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self._name} has no chat template", hint="use the tokenizer of an instruction-tuned model"
            )
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        known = {added[text] for text in END_OF_TURN if text in added}
        own = {tokenizer.eos_token_id} - {None}
        self.end_tokens: frozenset[int] = frozenset(own | known)
        """The token ids that end an answer."""
        if not self.end_tokens:
            raise ConfigError(f"{self._name} has no end token", hint="set eos_token in its tokenizer_config.json")

    def check(self, *, tools: bool) -> None:
        """Try the template out, with tools if rollouts will have some.

        Raises:
            ConfigError: it ignores them, can't be rendered, or ends answers with no end token.
        """
        user: Message = {"role": "user", "content": "Look."}
        call = {"id": "call00000", "type": "function", "function": {"name": "probe_of_tools", "arguments": "{}"}}
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "probe_of_tools", "content": "{}"}
        offered = [dict(_PROBE_TOOL)] if tools else []
        answer: Message = {"role": "assistant", "content": "", **({"tool_calls": [call]} if tools else {})}
        try:
            if tools and "probe_of_tools" not in self._render([user], offered):
                raise ConfigError(
                    f"the chat template of {self._name} ignores `tools`: the model would never know of them",
                    hint="use a model whose template has tools, or give the tokenizer one that does",
                )
            self.continuation([user, answer, result if tools else user], 1, offered)
        except UsageError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._name}: {error.message}", hint=error.hint) from error

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """The whole conversation, ready for the model's answer.

        Raises:
            UsageError: the template refuses it.
        """
        text = self._render(messages, tools)
        return Prompt(self._encode(text), _begins_thinking(text))

    def continuation(self, messages: Sequence[Message], answered: int, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """What follows the model's answer `messages[answered]`, from the token that ends it on.

        The answer itself is not rendered: a template would write it differently from how the model did. In its place
        stands a mark that nothing in the conversation can hold, and what comes after that is taken.

        Raises:
            UsageError: the template refuses the conversation, or ends the answer with no end token.
        """
        mark = f"mark{secrets.token_hex(12)}"
        text = self._with_mark(messages, answered, tools, mark)
        _, found, tail = text.rpartition(mark)
        tokens = self._encode(tail) if found else []
        ends = (place for place, token in enumerate(tokens) if token in self.end_tokens)
        begin = next(ends, None)
        if begin is None:
            raise UsageError(
                "the chat template ends an assistant's message with none of the tokenizer's end tokens",
                hint="set eos_token in tokenizer_config.json to the token that ends an answer",
            )
        return Prompt(tokens[begin:], _begins_thinking(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _with_mark(
        self, messages: Sequence[Message], answered: int, tools: Sequence[Mapping[str, Any]], mark: str
    ) -> str:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps({"at": mark})}}
            for call in messages[answered].get("tool_calls") or ()
        ]
        first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
        refusal: UsageError | None = None
        # What was said in between is not rendered: it changes nothing after the mark, and long conversations would take
        # longer with each turn. A template that insists gets all of it; and templates of models that make one call at a
        # time (Llama 3.1) get one.
        for past in (messages[:first], messages[:answered]):
            for some in (calls, calls[:1]):
                answer: Message = {"role": "assistant", "content": mark, **({"tool_calls": some} if some else {})}
                try:
                    return self._render([*past, answer, *messages[answered + 1 :]], tools)
                except UsageError as error:
                    refusal = error
        assert refusal is not None
        raise refusal

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                _for_template(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of the model's makers: it raises what it likes
            raise UsageError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}",
                hint="look at what the template asks of roles and calls",
            ) from error
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _for_template(messages: Sequence[Message]) -> list[Message]:
    """The messages as templates take them: the arguments of calls as mappings, no field that is None."""
    return [_plain_calls(message) if message.get("tool_calls") else message for message in sendable(messages)]


def _plain_calls(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _begins_thinking(prompt: str) -> bool:
    """Some templates write the `<think>` that an answer begins with themselves."""
    return prompt.rstrip().endswith("<think>")
