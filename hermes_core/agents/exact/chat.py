"""A tokenizer's chat template for token-exact conversations: renders the first prompt, and the text after an answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_core.agents.base import Message
from hermes_core.agents.model import sendable
from hermes_core.agents.parsers.scan import THINKING
from hermes_core.errors import ConfigError, UnknownNameError, UsageError

OPENS_NEXT = ("<|user|>", "<|observation|>", "<|tool_response>")
"""Tokens that end an answer because they begin the next message. GLM has no other end tokens. Gemma 4 ends a call with
the token that begins a tool's message."""

END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("</s>", "<|end_of_sentence|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|return|>", "<|call|>"),
    *OPENS_NEXT,
)
"""Special tokens that end an answer in current models, in addition to the tokenizer's own end token."""

_PART_OF_A_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Look",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Where"},
                "depth": {"type": "integer", "description": "How deep"},
                "hidden": {"type": "boolean", "description": "Hidden files, too"},
            },
            "required": ["path"],
        },
    },
}
"""A tool for testing templates."""

_NAME = PROBE_TOOL["function"]["name"]

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "conversation", "chat_template"})
"""Variables that `Chat` gives to every template, so that settings can't set them."""

_REMEMBERED = 4096
"""Maximum number of entries of `Chat._whole`."""


@dataclass(frozen=True)
class Prompt:
    """The prompt for a model."""

    tokens: list[int]
    begun: str = ""
    """The beginning of the answer that the template writes into the prompt: the mark that begins thinking, or
    nothing."""


@dataclass(frozen=True)
class WrittenCall:
    """A call in the form in which the template writes it into the conversation."""

    text: str
    """The answer with the call, without the text that surrounds an answer."""
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class _Way:
    """A way to put a mark into a conversation in place of an answer, to find the text that follows the mark."""

    content: bool
    """Whether the mark is also the answer's content. Gemma 4 writes content after the tools' results."""
    calls: int | None
    """Maximum number of calls of one answer. Llama 3.1 makes one at a time."""
    text_arguments: bool
    """Whether the arguments are JSON text. Most templates take mappings; DeepSeek's take text."""


_WAYS = tuple(itertools.starmap(_Way, itertools.product((True, False), (None, 1), (False, True))))  # in this order


class Chat:
    """Renders conversations for one tokenizer, which it does not change. One instance serves all rollouts.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: a chat template to use instead of the tokenizer's own.
        template_kwargs: more variables for the template, such as `enable_thinking`.
        end_tokens: more token ids that end an answer, from the model's `generation_config.json`.

    Raises:
        ConfigError: there is no chat template or no end token, or `template_kwargs` has a variable that can't be set.
        UnknownNameError: the template does not have a variable of `template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        end_tokens: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.turnstile = asyncio.Lock()
        """Held while a session renders or parses a text, so that the event loop gets its turn between two sessions."""
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.name = str(name)
        if not template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{self.name} has no chat template",
                hint="use the tokenizer of an instruction-tuned model, or set chat_template",
            )
        self._template = template
        self._variables = dict(template_kwargs or {})
        self._check_variables()
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        self.vocabulary: int = max([len(tokenizer), *(index + 1 for index in added.values())])
        """One more than the highest token id."""
        own = {tokenizer.eos_token_id} - {None} | {each for each in end_tokens if 0 <= each < self.vocabulary}
        self.end_tokens: frozenset[int] = frozenset(own | {added[text] for text in END_OF_TURN if text in added})
        """The token ids that end an answer."""
        self._opening = frozenset(added[text] for text in OPENS_NEXT if text in added)
        self.closing_tokens = self.end_tokens - self._opening
        """The end tokens that do not begin another message."""
        if not self.end_tokens:
            raise ConfigError(f"{self.name} has no end token", hint="set eos_token in its tokenizer_config.json")
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._whole: set[tuple[Any, ...]] = set()
        """Shapes of conversations (`_shape`) that were found to be rendered completely, each with its `_Way`."""

    def check(self, *, tools: bool, system: bool = False, compacts: bool = False) -> None:
        """Test the template, with tools, and with a system message if rollouts will have one.

        Args:
            compacts: whether a request for a summary may follow the tools' results.

        Raises:
            ConfigError: the template ignores the tools or the system message, can't be rendered, does not end answers
                with an end token, or leaves something out.
        """
        user: Message = {"role": "user", "content": "Look."}
        offered = [dict(PROBE_TOOL)] if tools else []
        try:
            if tools and _NAME not in self._render([user], offered):
                raise self._ignores_tools()
            self.prompt([*([{"role": "system", "content": "Be brief."}] if system else []), user], offered)
            if not tools:
                self.continuation([user, {"role": "assistant", "content": ""}, user], 1, offered)
                return
            for count in (1, 2):
                calls = [_call("{}", f"call0000{number}") for number in range(count)]
                answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
                conversation = [user, answer, *(_result(call["id"], "{}") for call in calls)]
                self.continuation(conversation, 1, offered)
                if compacts:
                    self._check_request(conversation, offered)
        except UsageError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.name}: {error.message}", hint=error.hint) from error

    def _check_request(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Check that the template renders a user's message after a tool's result like the user's first message.

        Raises:
            ConfigError: the template has no place for such a message.
        """
        mark = _mark()
        request: Message = {"role": "user", "content": mark}
        before_first = self._render([request], tools).rpartition(mark)[2]
        try:
            following = self.decode(self.continuation([*messages, request], 1, tools).tokens)
        except UsageError as error:
            reason = error.message
        else:
            if following.rpartition(mark)[2] == before_first:
                return
            reason = f"it would end in {following.rpartition(mark)[2]!r}, and not in {before_first!r}"
        raise ConfigError(
            f"the chat template of {self.name} has no place for a request for a summary after a result: {reason}",
            hint="leave compact_at out, or set chat_template to a template that has it",
        )

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Return the whole conversation, ready for the model's answer.

        Raises:
            UsageError: the template refuses the conversation, or leaves a message or the tools out.
        """
        shape = (bool(tools), *_shape(messages))
        if shape not in self._whole:
            marked, marks = _mark_messages(messages)
            text = self._render_any(marked, tools)
            _refuse_if_lost(marks, text, messages, "the prompt")
            if any(tool["function"]["name"] not in text for tool in tools):
                raise self._ignores_tools()
            self._remember(shape)
        text = self._render_any(messages, tools)
        return Prompt(self._encode(text), _opening_mark(text))

    def continuation(self, messages: Sequence[Message], answered: int, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """Return the prompt's part after the model's answer `messages[answered]`, from the answer's end token on.

        The answer itself is not rendered, because a template would write it differently from how the model did.
        Instead, a mark that nothing in the conversation can contain is rendered in its place, and the text after the
        mark is taken. The first time that a conversation has this shape, the messages after the answer are marked as
        well, to check that all of them are rendered. The messages before the answer are rendered, too, because
        templates read them: Cohere's templates number all calls of a conversation.

        Raises:
            UsageError: the template refuses the conversation, does not end the answer with an end token, or leaves out
                a message that follows.
        """
        shape = ("after", *_shape(messages[answered:]))
        refusal: UsageError | None = None
        for way in _WAYS:
            try:
                if (shape, way) not in self._whole:
                    since, marks = _mark_messages(messages[answered + 1 :])
                    tried = [*messages[: answered + 1], *since]
                    text = self.decode(self._after(way, tried, answered, tools).tokens)
                    _refuse_if_lost(marks, text, messages[answered + 1 :], "what follows an answer")
                    self._remember((shape, way))
                return self._after(way, messages, answered, tools)
            except UsageError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def follows(self, last: int, prompt: Prompt) -> Prompt:
        """Return the continuation without the token that ends an answer, if the answer's `last` token is an end token.

        An end token that also begins the next message is left out only if `last` is the same token.
        """
        first = prompt.tokens[0]
        done = last == first or (last in self.end_tokens and first not in self._opening)
        return Prompt(prompt.tokens[1:], prompt.begun) if done else prompt

    def write_calls(self) -> Iterator[WrittenCall]:
        """Yield a call as the template writes it into a conversation, for each kind of id and of arguments that the
        template accepts."""
        for identifier, as_text in itertools.product(("call00000", f"functions.{_NAME}:0"), (False, True)):
            user, inside, result = (_mark() for _ in range(3))
            arguments = {"path": f"{inside} é ü/*.py", "depth": 3, "hidden": True}
            answer: Message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [_call(json.dumps(arguments, ensure_ascii=False), identifier)],
            }
            asked: Message = {"role": "user", "content": user}
            try:
                before = self._render([asked], [PROBE_TOOL]).rpartition(user)[2]
                whole = self._render([asked, answer, _result(identifier, result)], [PROBE_TOOL], as_text=as_text)
            except UsageError:
                continue
            head, found, tail = whole.rpartition(user)[2].partition(result)[0].rpartition(inside)
            if found:
                text = _strip_frame(head, before) + inside + self._up_to_end(tail)
                yield WrittenCall(text, _NAME, arguments)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens in the middle of a text, including special ones. (At the beginning of a text,
        SentencePiece drops a space.)"""
        before, text = (
            self.tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for each in (self._before, [*self._before, *tokens])
        )
        return str(text[len(before) :])

    def _after(
        self, way: _Way, messages: Sequence[Message], answered: int, tools: Sequence[Mapping[str, Any]]
    ) -> Prompt:
        """Return the prompt's part after the answer `messages[answered]`, in whose place `way` puts a mark.

        Raises:
            UsageError: the template refuses the conversation, or puts no end token after the answer.
        """
        mark = _mark()
        messages_before = [
            {**message, "tool_calls": message["tool_calls"][: way.calls]} if message.get("tool_calls") else message
            for message in messages
        ]
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps({"at": mark})}}
            for call in messages_before[answered].get("tool_calls") or ()
        ]
        messages_before[answered] = {"role": "assistant", "content": mark if way.content or not calls else ""}
        if calls:
            messages_before[answered]["tool_calls"] = calls
        text = self._render(messages_before, tools, as_text=way.text_arguments)
        _, found, tail = text.rpartition(mark)
        tokens = self._encode(tail) if found else []
        begin = next((place for place, token in enumerate(tokens) if token in self.end_tokens), None)
        if begin is None:
            raise UsageError(
                "the chat template ends an assistant's message with none of the tokenizer's end tokens",
                hint="set eos_token in tokenizer_config.json to the token that ends an answer",
            )
        return Prompt(tokens[begin:], _opening_mark(text))

    def _ignores_tools(self) -> ConfigError:
        return ConfigError(
            f"the chat template of {self.name} ignores `tools`: the model would never know of them",
            hint="use a model whose template has tools, or set chat_template to one that does",
        )

    def _up_to_end(self, tail: str) -> str:
        ends = self.tokenizer.convert_ids_to_tokens(sorted(self.end_tokens))
        return re.split("|".join(map(re.escape, ends)), tail, maxsplit=1)[0]

    def _remember(self, shape: tuple[Any, ...]) -> None:
        if len(self._whole) >= _REMEMBERED:
            self._whole.clear()
        self._whole.add(shape)

    def _check_variables(self) -> None:
        """Refuse variables that the template would silently ignore."""
        if not self._variables:
            return
        if taken := sorted(_OURS & self._variables.keys()):
            raise ConfigError(f"chat_template_kwargs can't have {', '.join(taken)}", hint="leave it out")
        import jinja2
        import jinja2.meta

        own = self._template or self.tokenizer.chat_template
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        known: set[str] = set()
        for text in own.values() if isinstance(own, Mapping) else (own,):
            try:
                # Only transformers knows the tag `{% generation %}`, which has no variables.
                plain = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
                known |= jinja2.meta.find_undeclared_variables(environment.parse(plain))
            except jinja2.TemplateError:
                return  # the template has an unknown tag, so its variables can't be found
        for name in self._variables:
            if name not in known:
                raise UnknownNameError("variable", name, known - _OURS, where=f"of the chat template of {self.name}")

    def _render_any(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Render the conversation with the arguments of its calls as mappings or as text, whichever the template
        accepts."""
        try:
            return self._render(messages, tools)
        except UsageError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self._render(messages, tools, as_text=True)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, as_text: bool = False) -> str:
        variables = self._variables if self._template is None else {**self._variables, "chat_template": self._template}
        try:
            text: str = self.tokenizer.apply_chat_template(
                _for_template(messages, as_text),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program by the model's makers, and can raise anything
            raise UsageError(
                f"the chat template refuses the conversation: {type(error).__name__}: {error}",
                hint="look at what the template asks of roles and calls",
            ) from error
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _mark() -> str:
    return f"mark{secrets.token_hex(12)}"


def _strip_frame(head: str, before: str) -> str:
    """Return `head` without the beginning that it shares with `before`, which no answer wrote. No tag is cut in two."""
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(head, before, strict=False)))
    return head[len(_PART_OF_A_TAG.sub("", head[:common])) :]


def _call(arguments: str, identifier: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _result(identifier: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": identifier, "name": _NAME, "content": content}


def _shape(messages: Sequence[Message]) -> tuple[Any, ...]:
    """Return everything in a conversation that can change how a template renders it, except the texts that marks
    replace: the role and the number of calls of each message."""
    return tuple((message["role"], len(message.get("tool_calls") or ())) for message in messages)


def _mark_messages(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return the messages with a mark in place of each text that the model did not write, and these marks."""
    marks: list[str] = []
    marked: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            marked.append(message)
            continue
        marks.append(_mark())
        marked.append({**message, "content": json.dumps({"output": marks[-1]})})
    return marked, marks


def _refuse_if_lost(marks: Sequence[str], text: str, messages: Sequence[Message], place: str) -> None:
    """Check that the rendered text has all marks, because a missing mark shows that the template left a message out.

    Raises:
        UsageError: a mark is missing. The error names the role of its message.
    """
    roles = [message["role"] for message in messages if message["role"] != "assistant"]
    for mark, role in zip(marks, roles, strict=True):
        if mark not in text:
            what = "a tool's result" if role == "tool" else f"a message of the {role}"
            raise UsageError(
                f"the chat template leaves {what} out of {place}, or ends the answer with a token that is not known"
                " here: the model would never see it",
                hint="set chat_template to one that renders every message, or eos_token to what ends an answer",
            )


def _for_template(messages: Sequence[Message], as_text: bool) -> list[Message]:
    """Return the messages in the form for templates: arguments of calls as mappings or as text, no field that is None,
    and a plain text in place of a list with one text, because templates without images accept no lists."""
    ready = [_with_plain_text(message) for message in sendable(messages)]
    return ready if as_text else [_plain_calls(message) if message.get("tool_calls") else message for message in ready]


def _with_plain_text(message: Message) -> Message:
    match message.get("content"):
        case [{"type": "text", "text": str(text)}]:
            return {**message, "content": text}
    return message


def _plain_calls(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _opening_mark(prompt: str) -> str:
    """Return the mark that begins thinking, if the prompt ends with it; else an empty text."""
    end = prompt.rstrip()
    return next((mark for mark in THINKING if end.endswith(mark.rstrip())), "")
