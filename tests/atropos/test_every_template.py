"""Every chat template with every parser: it works token for token, or is refused at the start."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.parser_choice import matching_parser
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.parsers.base import ParsedCall
from hermes_core.errors import ConfigError, UnknownNameError, UsageError
from hermes_core.records.tokens import MASKED, tokens_of
from hermes_core.runs.session import parsers_with
from hermes_core.runtime import Runtime

OURS = Path(__file__).parent / "templates"
THEIRS = os.environ.get("HERMES_CHAT_TEMPLATES")
"""A folder of `*.jinja` of real models, to try as well."""

WORKS = {
    "chatml": ("<|im_end|>", "hermes", {"hermes", "qwen", "ernie45", "granite"}),
    "qwen3": ("<|im_end|>", "hermes", {"hermes", "qwen", "ernie45", "granite"}),
    "qwen3_coder": ("<|im_end|>", "qwen3_coder", {"qwen3_coder"}),
    "qwen35": ("<|im_end|>", "qwen3_coder", {"qwen3_coder"}),
    "llama3": ("<|eot_id|>", "llama3_json", {"llama3_json", "llama4_json"}),
    "llama33": ("<|eot_id|>", "llama3_json", {"llama3_json", "llama4_json"}),
    "mistral_v3": ("</s>", "mistral", {"mistral"}),
    "mistral_v7": ("</s>", "mistral", {"mistral"}),
    "mistral_v11": ("</s>", "mistral", {"mistral"}),
    "deepseek_v3": ("<｜end▁of▁sentence｜>", "deepseek_v3", {"deepseek_v3", "deepseek_v3_1"}),
    "deepseek_r1": ("<｜end▁of▁sentence｜>", "deepseek_v3", {"deepseek_v3", "deepseek_v3_1"}),
    "deepseek_v31": ("<｜end▁of▁sentence｜>", "deepseek_v3_1", {"deepseek_v3", "deepseek_v3_1"}),
    "gemma3_pythonic": ("<end_of_turn>", "pythonic", {"pythonic", "llama4_pythonic"}),
    "gemma4": ("<turn|>", "gemma4", {"gemma4"}),
    "gpt_oss": ("<|return|>", "gpt_oss", {"gpt_oss"}),
    "glm45": ("<|endoftext|>", "glm45", {"glm45", "glm47"}),
    "glm47": ("<|endoftext|>", "glm47", {"glm45", "glm47"}),
    "kimi_k2": ("<|im_end|>", "kimi_k2", {"kimi_k2"}),
}
"""Templates by name: the tokenizer's end token, the parser that `auto` takes, and all that read it."""

REFUSED = {
    "gemma3": ("<end_of_turn>", "ignores `tools`"),
    "kimi_k2_first": ("<|im_end|>", "does not write a model's calls"),
}
"""Templates that can't be used, and why."""

_SPECIAL = re.compile(
    r'<\|"\|>|<\|?\w+\|>|<\|\w+>|<｜[^｜\s]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|</s>'
)


@pytest.fixture(scope="session")
def chat_of(tokenizers: Callable[[str], Any]) -> Callable[..., Chat]:
    """`chat_of(name, **options)`: the chat of a template, with a tokenizer that has its special tokens."""

    def text_of(name: str) -> str:
        place = OURS / f"{name}.jinja"
        return place.read_text("utf-8") if place.exists() else str(tokenizers(name).chat_template)

    def of(name: str, end: str, *, text: str | None = None, **options: Any) -> Chat:
        template = text or text_of(name)
        tokenizer = copy.deepcopy(tokenizers("chatml"))
        tokenizer.add_tokens(sorted({*_SPECIAL.findall(template), end, "<bos>"}), special_tokens=True)
        tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template = end, "<bos>", template
        return Chat(tokenizer, **options)

    return of


class Plays:
    """A server whose model says what it is told to: texts, each ended by a token, behind what it was thinking."""

    def __init__(self, chat: Chat, *answers: tuple[str, int]) -> None:
        self.chat = chat
        self.given = [[*chat.tokenizer.encode(text, add_special_tokens=False), end] for text, end in answers]
        self.asked: list[list[int]] = []

    async def sample(self, prompt: Any, *, max_tokens: int, temperature: float | None, **_: Any) -> Sampled:
        turn = len(self.asked)
        self.asked.append(list(prompt))
        if self.chat.decode(prompt).endswith(("<think>", "<think>\n")):
            thought = self.chat.tokenizer.encode("hm\n</think>\n\n", add_special_tokens=False)
            self.given[turn] = [*thought, *self.given[turn]]
        tokens = self.given[turn]
        return Sampled(tokens, [-0.5] * len(tokens), "stop")


def all_parsers(runtime: Runtime) -> dict[str, Any]:
    return parsers_with(runtime, "auto")


async def converse(chat: Chat, parser: Any, runtime: Runtime, written: Any = None) -> None:
    """Two turns with calls, the first with two of them where the format has that; then words.

    Args:
        written: writes calls as the model does; the parser itself if None.
    """
    write = (written or parser).render
    calls = [
        ParsedCall("terminal", {"command": word}, id=f"functions.terminal:{word[-1]}")
        for word in ("ls 0", "ls 1", "ls 2")
    ]
    end = after_call(chat)
    server = Plays(chat, (write(calls[:2]), end), (write(calls[2:]), end), ("done", chat.tokenizer.eos_token_id))
    session = ExactSession(server, chat, parser, max_length=50_000)  # type: ignore[arg-type]
    ran: list[str] = []

    async def handler(name: str, arguments: Any, task_id: str) -> str:
        ran.append(arguments["command"])
        return json.dumps({"output": f"result of {arguments['command']}", "exit_code": 0})

    loop = HermesAgentLoop(session, runtime.tools.schemas(["terminal"]), {"terminal"}, tool_handler=handler)
    result = await loop.run([{"role": "user", "content": "the question"}])
    assert (ran, result.tool_errors, result.finished_naturally) == (["ls 0", "ls 1", "ls 2"], [], True)
    tokens = tokens_of(session.get_state())
    assert tokens.refused is None
    (node,) = session.nodes
    assert list(node.tokens) == server.asked[2] + server.given[2]
    trained = [token for token, mask in zip(node.tokens, node.masked_tokens, strict=True) if mask != MASKED]
    assert trained == [token for given in server.given for token in given]
    seen = [chat.decode(asked) for asked in server.asked]
    assert "the question" in seen[0]
    for turn, word in ((1, "ls 0"), (1, "ls 1"), (2, "ls 2")):
        assert f"result of {word}" in seen[turn], "what a tool said is what the next answer is given to"


def after_call(chat: Chat) -> int:
    """The token that ends an answer with a call, by the template."""
    call = {"id": "call00000", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "terminal", "content": "{}"},
    ]
    return chat.continuation(messages, 1, []).tokens[0]


@pytest.mark.parametrize("name", sorted(WORKS))
async def test_a_template_that_is_taken_loses_nothing(
    name: str, chat_of: Callable[..., Chat], runtime: Runtime
) -> None:
    end, expected, _ = WORKS[name]
    chat = chat_of(name, end)
    chat.check(tools=True)
    chat.check(tools=False)
    parser = matching_parser("auto", all_parsers(runtime), chat)
    assert parser.name == expected  # type: ignore[attr-defined]
    await converse(chat, parser, runtime)


@pytest.mark.parametrize("name", sorted(WORKS))
async def test_a_parser_works_with_a_template_or_is_refused(
    name: str, chat_of: Callable[..., Chat], runtime: Runtime
) -> None:
    end, best, able = WORKS[name]
    chat, parsers = chat_of(name, end), all_parsers(runtime)
    first = next(each for each in parsers if each in able)
    for other in parsers:
        if other == "auto":
            continue
        if other in able:
            assert matching_parser(other, parsers, chat) is parsers[other]
            await converse(chat, parsers[other], runtime, written=parsers[best])
        else:
            with pytest.raises(ConfigError, match=rf"{other!r} does not read the calls .*set tool_call_parser={first}"):
                matching_parser(other, parsers, chat)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_template_that_can_not_be_used_is_refused_with_the_reason(
    name: str, chat_of: Callable[..., Chat], runtime: Runtime
) -> None:
    end, reason = REFUSED[name]
    for parser in runtime.parsers.names():
        chat = chat_of(name, end)
        with pytest.raises(ConfigError, match=reason):
            chat.check(tools=True)
            matching_parser(parser, all_parsers(runtime), chat)


WITHOUT_SUMMARY = {"mistral_v3", "mistral_v7", "deepseek_v3", "deepseek_r1"}
"""Templates that have no place for a message of the user after a tool's result."""


@pytest.mark.parametrize("name", sorted(WORKS))
def test_a_template_takes_a_request_for_a_summary_or_is_refused(name: str, chat_of: Callable[..., Chat]) -> None:
    chat = chat_of(name, WORKS[name][0])
    if name in WITHOUT_SUMMARY:
        with pytest.raises(ConfigError, match=r"no place for a request for a summary .*leave compact_at out"):
            chat.check(tools=True, compacts=True)
    else:
        chat.check(tools=True, compacts=True)


CHATML = files("hermes_testing.tiny_model").joinpath("templates/chatml.jinja").read_text("utf-8")


@pytest.mark.parametrize(
    ("changed", "by", "reason"),
    [
        # As gpt-oss and Gemma 4 once were: the next end token that is known stands behind the result.
        (
            "tojson) + '}\\n</tool_call>' -}}\n        {%- endfor -%}\n        {{- '<|im_end|>\\n'",
            "tojson) + '}\\n</tool_call>' -}}\n        {%- endfor -%}\n        {{- '<|done|>\\n'",
            "leaves a tool's result out",
        ),
        ("'\\n<tool_response>\\n' + message.content + '\\n</tool_response>'", "''", "leaves a tool's result out"),
        (
            "+ message.content + '\\n</tool_response>'",
            "+ message.content[:5] + '\\n</tool_response>'",
            "leaves a tool's result out",
        ),
        ("'<|im_start|>user\\n' + message.content", "'<|im_start|>user\\n'", "leaves a message of the user out"),
    ],
)
def test_a_template_that_loses_what_the_model_is_told_is_refused(
    chat_of: Callable[..., Chat], changed: str, by: str, reason: str
) -> None:
    assert changed in CHATML
    with pytest.raises(ConfigError, match=reason):
        chat_of("lossy", "<|im_end|>", text=CHATML.replace(changed, by)).check(tools=True)


def test_a_template_without_a_system_s_message_is_refused_when_there_is_one(chat_of: Callable[..., Chat]) -> None:
    chat = chat_of("lossy", "<|im_end|>", text=CHATML.replace("system\\n' + first", "system\\n'"))
    chat.check(tools=True)
    chat.prompt([{"role": "user", "content": "a"}], [])
    with pytest.raises(ConfigError, match="leaves a message of the system out of the prompt"):
        chat.check(tools=True, system=True)
    with pytest.raises(UsageError, match="leaves a message of the system out of the prompt"):
        chat.prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}], [])


def test_what_follows_an_answer_is_looked_at_in_each_shape(chat_of: Callable[..., Chat]) -> None:
    """A template may be right for one result, and lose the third."""
    lossy = CHATML.replace(
        "'\\n<tool_response>\\n' + message.content",
        "'\\n<tool_response>\\n' + (message.content if loop.index0 < 4 else '')",
    )
    chat = chat_of("lossy", "<|im_end|>", text=lossy)
    chat.check(tools=True)
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "terminal", "arguments": "{}"}} for n in range(3)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "one"} for call in calls]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    chat.continuation(messages[:4], 1, [])
    with pytest.raises(UsageError, match="leaves a tool's result out"):
        chat.continuation(messages, 1, [])


@pytest.mark.parametrize(
    ("name", "last", "kept"),
    [
        ("glm45", "<|user|>", True),
        ("glm45", "<|observation|>", False),
        ("glm45", "<|endoftext|>", True),
        ("gemma4", "<turn|>", True),
        ("qwen3", "<|endoftext|>", False),
        ("gpt_oss", "<|return|>", False),
    ],
)
async def test_an_answer_that_is_ended_by_another_token_does_not_cost_the_next_message_its_head(
    name: str, last: str, kept: bool, chat_of: Callable[..., Chat], runtime: Runtime
) -> None:
    """`<|user|>` behind a call of GLM's ends it; `<|observation|>` still has to say that a result follows."""
    chat = chat_of(name, WORKS[name][0])
    parser = matching_parser("auto", all_parsers(runtime), chat)
    (token,) = chat.tokenizer.encode(last, add_special_tokens=False)
    end = after_call(chat)
    server = Plays(
        chat, (parser.render([ParsedCall("terminal", {"command": "ls"})]), token), ("done", chat.tokenizer.eos_token_id)
    )  # type: ignore[attr-defined]
    session = ExactSession(server, chat, parser, max_length=50_000)  # type: ignore[arg-type]

    async def handler(name: str, arguments: Any, task_id: str) -> str:
        return "{}"

    loop = HermesAgentLoop(session, runtime.tools.schemas(["terminal"]), {"terminal"}, tool_handler=handler)
    await loop.run([{"role": "user", "content": "go"}])
    follows = server.asked[1][len(server.asked[0]) + len(server.given[0]) :]
    assert (follows[0] == end) is kept
    assert tokens_of(session.get_state()).refused is None


def test_variables_reach_the_template(chat_of: Callable[..., Chat]) -> None:
    def asked(**options: Any) -> str:
        chat = chat_of("qwen35", "<|im_end|>", **options)
        prompt = chat.prompt([{"role": "user", "content": "a"}], [])
        return prompt.begun + "|" + chat.decode(prompt.tokens).rpartition("assistant\n")[2]

    assert asked() == "<think>|<think>\n"
    assert asked(template_kwargs={"enable_thinking": False}) == "|<think>\n\n</think>\n\n"
    assert asked(template=CHATML) == "|"
    with pytest.raises(UnknownNameError, match=r"'enable_thinkin' .*did you mean 'enable_thinking'"):
        asked(template_kwargs={"enable_thinkin": False})
    with pytest.raises(ConfigError, match="can't have messages"):
        asked(template_kwargs={"messages": []})


async def test_thinking_of_gemma_that_the_template_begins_is_no_content(
    chat_of: Callable[..., Chat], runtime: Runtime
) -> None:
    chat = chat_of("gemma4", "<turn|>", template_kwargs={"enable_thinking": True})
    chat.check(tools=True)
    end = after_call(chat)
    call = runtime.parser("gemma4").render([ParsedCall("terminal", {"command": "ls"})])  # type: ignore[attr-defined]
    server = Plays(
        chat, (f"<|channel>thought\nhm\n<channel|>{call}", end), ("so\n<channel|>done", chat.tokenizer.eos_token_id)
    )
    session = ExactSession(server, chat, runtime.parser("gemma4"), max_length=50_000)  # type: ignore[arg-type]

    async def handler(name: str, arguments: Any, task_id: str) -> str:
        return "{}"

    loop = HermesAgentLoop(session, runtime.tools.schemas(["terminal"]), {"terminal"}, tool_handler=handler)
    result = await loop.run([{"role": "user", "content": "go"}])
    assert result.reasoning_per_turn == ["hm", "so"]
    assert result.messages[-1]["content"] == "done"


@pytest.mark.skipif(not THEIRS, reason="set HERMES_CHAT_TEMPLATES to a folder of *.jinja of real models")
async def test_the_templates_of_real_models(chat_of: Callable[..., Chat], runtime: Runtime, capsys: Any) -> None:
    assert THEIRS is not None
    for place in sorted(Path(THEIRS).glob("*.jinja")):
        text = place.read_text("utf-8")
        ends = (
            "<|return|>",
            "<turn|>",
            "<end_of_turn>",
            "<|eot_id|>",
            "<|im_end|>",
            "<｜end▁of▁sentence｜>",
            "<|end|>",
        )
        try:
            chat = chat_of(place.stem, next((end for end in ends if end in text), "</s>"), text=text)
            chat.check(tools=True)
            parser = matching_parser("auto", all_parsers(runtime), chat)
        except ConfigError as error:
            said = f"refused: {error.message[:150]}"
        else:
            await converse(chat, parser, runtime)
            said = parser.name  # type: ignore[attr-defined]
        with capsys.disabled():
            print(f"{place.stem}: {said}")
