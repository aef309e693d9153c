"""What holds for every text: calls come back from their rendering, nothing raises, and time is linear."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_core.agents.parsers.base import ParsedCall, Parser
from hermes_core.runtime import Runtime

NAMES = sorted(Runtime(load_entry_points=False).parsers.names())
PARSERS: dict[str, Any] = {name: Runtime(load_entry_points=False).parser(name) for name in NAMES}
TAGGED = (
    *("glm45", "glm47", "hunyuan", "qwen3_coder", "mimo", "seed_oss", "minimax_m2", "minimax_m3", "step3"),
    *("deepseek_v3_2", "deepseek_v4", "kimi_k3", "dots", "minicpm5", "gigachat35"),
)
"""Formats that write values bare: a value that holds the tag that closes it can't be told from two."""

_MARKERS = """
    <tool_call> </tool_call> <longcat_tool_call> </longcat_tool_call> <think> </think> [THINK] [/THINK] <|python_tag|>
    [TOOL_CALLS] [ARGS] [CALL_ID] <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>
    <|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> functions.f:0
    <|tool_call> <tool_call|> call:f{ <|channel|>analysis<|message|> to=functions.f <|message|> <|end|> <channel|>
    <arg_key> </arg_key> <arg_value> </arg_value> <function= <function=f> </function> <parameter=s> </parameter> >
    ``` ```json { } [ ] " \\ , : ; f s 1 -1.5 true null "name" "arguments" "parameters" <|im_end|> </s> é 日本
    {"name":"f","arguments":{"s":"x"}} {"name": function<｜tool▁sep｜>f
    <tool_calls> </tool_calls> <tool_sep> <seed:tool_call> </seed:tool_call> <minimax:tool_call> </minimax:tool_call>
    </invoke>
    <｜DSML｜function_calls> </｜DSML｜parameter> </｜DSML｜invoke> <|open|>tools<|sep|> <|close|>argument<|sep|>
    <|close|>call<|sep|> <|close|>think<|sep|> <｜tool_calls_begin｜> <｜tool_call_begin｜>function<｜tool_sep｜>
    </steptml:parameter> </steptml:invoke> <｜tool_call_end｜> <|START_ACTION|> <|END_ACTION|> <|tools_prefix|>
    functools[
    <|tool_call|> <|/tool_call|> <|tool_call_start|> <|tool_call_end|> <function_calls> </function_calls>
    <|python_start|>
    <start_function_call> <end_function_call> [f(s=' f(s=" f() ') ") ''' ) ( = ** <mm:think> </mm:think>
    <TOOLCALL> </TOOLCALL> <param name="s"> </param> <![CDATA[ ]]> <function name="f"> <dots_function_call>
    function call<|role_sep|> <|function_call|> <|message_sep|> <function_call> <|action_start|> <|plugin|>
    <|action_end|> <|message_model|> <|content_invoke_tool_json|> <|end_message|> <|tool_call:begin|>
    <|tool_call:name|> <|tool_call:args|> <|tool_call:end|> <|think|> <|python_end|>
"""
MARKERS = (
    *_MARKERS.split(),
    *('<invoke name="f">', '<parameter name="s">', '<｜DSML｜invoke name="f">'),
    *('<｜DSML｜parameter name="s" string="true">', '<steptml:invoke name="f">', '<steptml:parameter name="s">'),
    *('<|open|>call tool="f" index="1"<|sep|>', '<|open|>argument key="s" type="string"<|sep|>'),
)
SPACES = ("\n", " ", "\t", "\x00", "\ud800", "\u2028")

fragments = st.lists(st.one_of(st.sampled_from(MARKERS + SPACES), st.text(max_size=4)), max_size=40).map("".join)
anything = st.one_of(fragments, st.text(st.characters(codec=None), max_size=200))

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
texts = st.one_of(words, st.lists(st.sampled_from(MARKERS), max_size=6).map(" ".join))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "t": {"type": "string"},
                    "n": {"type": "integer"},
                    "x": {"type": "number"},
                    "b": {"type": "boolean"},
                    "o": {"type": "object"},
                    "l": {"type": "array"},
                    "z": {"type": "null"},
                },
            },
        },
    }
    for name in ("f", "long_name-2", "名")
]
arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": texts,
        "t": texts,
        "n": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "o": st.dictionaries(texts, values, max_size=3),
        "l": st.lists(values, max_size=3),
        "z": st.none(),
    },
)
calls = st.builds(ParsedCall, st.sampled_from([str(tool["function"]["name"]) for tool in TOOLS]), arguments)
free_calls = st.builds(
    ParsedCall, st.from_regex(r"[a-zA-Z_][\w.-]{0,20}", fullmatch=True), st.dictionaries(words, values)
)


def pairs(found: Any) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in found]


def free_of_tags(call: ParsedCall) -> ParsedCall:
    """The call without the tags that end values, keys and calls in the formats that write values bare."""
    text = re.sub(
        r"</?(?:｜DSML｜|steptml:|seed:|minimax:)?(?:arg_|parameter|function|tool_|invoke)\w*[=>]?|<｜tool_\w*｜>"
        r"|<\|(?:open|close|sep)\|>",
        "",
        json.dumps(call.arguments, ensure_ascii=False),
    )
    return replace(call, arguments=json.loads(text))


@pytest.mark.parametrize("name", NAMES)
def test_calls_come_back_from_their_rendering(name: str) -> None:
    parser = PARSERS[name]

    @given(
        st.lists(calls, min_size=1, max_size=4), st.sampled_from(["", "Well.\n", "<think>hm</think>\n", "hm</think>"])
    )
    def check(made: list[ParsedCall], before: str) -> None:
        if name in TAGGED:
            made = [free_of_tags(call) for call in made]
        if name == "minimax_m3":  # it has no types inside of an object or list that the schema does not describe
            made = [replace(c, arguments={k: c.arguments[k] for k in c.arguments.keys() - {"o", "l"}}) for c in made]
        parsed = parser.parse(before + parser.render(made), TOOLS)
        assert (pairs(parsed.calls), parsed.problems) == (pairs(made), ())
        assert parsed.content == ("Well." if before == "Well.\n" else "")
        assert not any(call.repaired or not call.ended for call in parsed.calls)

    check()


@pytest.mark.parametrize("text", ["<![CDATA[", "]]>", "a]]>", "<![CDATA[]]>", " <![CDATA[x]]> ", "<![CDATA[x]]>]]>"])
def test_a_value_that_looks_quoted_comes_back(text: str) -> None:
    parser, made = PARSERS["minicpm5"], [ParsedCall("f", {"s": text, "t": "more"})]
    assert pairs(parser.parse(parser.render(made), TOOLS).calls) == pairs(made)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TAGGED])
def test_calls_of_unknown_tools_come_back_too(name: str) -> None:
    parser = PARSERS[name]

    @given(st.lists(free_calls, min_size=1, max_size=4))
    def check(made: list[ParsedCall]) -> None:
        if name == "kimi_k2":
            made = [replace(call, name=call.name.removeprefix("functions.") or "f") for call in made]
        parsed = parser.parse(parser.render(made), ())
        assert (pairs(parsed.calls), parsed.problems) == (pairs(made), ())

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_call_survives_any_text_before_and_after(name: str) -> None:
    """Prose without marks, that is: whatever it is, the call is read and the rest is content."""
    parser, call = PARSERS[name], ParsedCall("f", {"s": "x"})

    @given(
        st.text(st.characters(exclude_characters='<[{"`｜|', exclude_categories=("Cs",))),
        words.map(lambda w: w.replace("<", "")),
    )
    def check(before: str, after: str) -> None:
        parsed = parser.parse(
            f"{before}\n{parser.render([call])}\n{after.translate(dict.fromkeys(map(ord, '[{`')))}", TOOLS
        )
        assert (pairs(parsed.calls), parsed.problems) == ([("f", {"s": "x"})], ())

    check()


@pytest.mark.parametrize("name", NAMES)
def test_no_text_raises_and_every_part_is_accounted_for(name: str) -> None:
    parser = PARSERS[name]

    @settings(max_examples=3 * settings.default.max_examples)
    @given(anything, st.sampled_from([TOOLS, ()]))
    def check(text: str, tools: Any) -> None:
        parsed = parser.parse(text, tools)
        assert parsed == parser.parse(text, tools)
        for item in (*parsed.calls, *parsed.problems):
            assert item.raw
            assert text[item.start : item.start + len(item.raw)] == item.raw
        json.dumps([call.arguments for call in parsed.calls], allow_nan=False)
        made = parsed.tool_calls(1, cut=True)
        assert len(made) == len(parsed.calls) + len(parsed.problems) == len({call.id for call in made})
        for call in made:
            (call.name + call.text + (call.error or "")).encode()
            assert (call.arguments is None) == (call.error is not None)

    check()


KEYS = st.sampled_from(["name", "arguments", "parameters", "function", "id", "type", "x"])


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TAGGED])
def test_no_object_raises_whatever_its_fields_are(name: str) -> None:
    parser = PARSERS[name]

    @given(st.dictionaries(KEYS, values), values)
    def check(fields: dict[str, Any], made: Any) -> None:
        for body in (json.dumps(fields), json.dumps([fields, fields]), json.dumps(made)):
            marked = parser.render([ParsedCall("f", {"s": "x"})])
            for text in (body, f"[TOOL_CALLS]{body}", f"<|python_tag|>{body}", marked.replace('{"s": "x"}', body)):
                parser.parse(text, TOOLS).tool_calls(1)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_between_think_marks_is_made(name: str) -> None:
    parser = PARSERS[name]

    @given(fragments)
    def check(text: str) -> None:
        inside = text.replace("</think>", "")
        assert parser.parse(f"<think>{inside}", TOOLS).calls == ()
        assert pairs(parser.parse(f"<think>{inside}</think>ok", TOOLS).calls) == []

    check()


LONG = (
    *("<tool_calls>[{", "<tool_call>f<tool_sep>", "<seed:tool_call>", '<invoke name="f">', '\n<parameter name="s">x'),
    *('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="s" string="true">', '<｜DSML｜invoke name="f">{"s":'),
    *(
        '<|open|>call tool="f" index="1"<|sep|>',
        '<|open|>argument key="s" type="string"<|sep|>',
        "<|open|>tools<|sep|>",
    ),
    *("<｜tool_calls_begin｜>", '<steptml:invoke name="f">', '<steptml:parameter name="s">', "<|START_ACTION|>[{"),
    *(
        "<|tools_prefix|>[{",
        '{"f": {',
        "functools[{",
        "<|tool_call|>[",
        "[f(",
        "[f(s='",
        "f(s='",
        "f(s=[",
        "f(), ",
        "f(**{",
    ),
    *(
        "'",
        "\\'",
        "it's ",
        "'''",
        "<|tool_call_start|>[f(s='",
        "<function_calls>f(s='\n",
        "<start_function_call>call:f{s:<escape>",
    ),
    *(
        "]<]minimax[>[",
        ']<]minimax[>[<invoke name="f">',
        "]<]minimax[>[<s>",
        "]<]minimax[>[</s>",
        "]<]minimax[>[<s>x]<]minimax[>[</s>",
    ),
    *(
        "{",
        "[",
        '"',
        "\\",
        " ",
        "\n",
        "{}",
        "[],",
        '{"a":',
        '{"name":',
        '{"name": "f", ',
        '{"name":"f","parameters":{}};',
    ),
    *(
        "<think>",
        "</think>",
        "<think></think>",
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        '<tool_call>[{"name":"f"},{',
    ),
    *('<tool_call>{"name":"f"}</tool_call></think>', '<tool_call>{"name":"f","arguments":{"s":"\\"<tool_call>'),
    *(
        "<tool_call>f ",
        "<tool_call>f<arg_key>s</arg_key><arg_value>",
        "<arg_key>s</arg_key><arg_value>",
        "</arg_value> ",
    ),
    *("<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value>y", "<function=f>", "<function=f>\n<parameter=s>"),
    *(
        "\n<parameter=s>",
        "\n<parameter=s>\nx</parameter>z",
        "</parameter>",
        "</function>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f{",
    ),
    *(
        '[TOOL_CALLS]f[ARGS]{"s":"',
        '[TOOL_CALLS][{"name":"f",',
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<longcat_tool_call>{",
    ),
    *('<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"', "<|python_tag|>{", "<|im_end|>", "<|im_end|> "),
)


ONE_OF_EACH_MODULE = (
    *("auto", "gemma4", "gpt_oss", "hermes", "kimi_k2", "llama3_json", "mistral", "minimax_m3", "pythonic"),
    "qwen3_coder",
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH_MODULE else pytest.param(name, marks=pytest.mark.stress) for name in NAMES]
)
def test_time_is_linear_in_the_length(name: str) -> None:
    """Sixteen times the text takes nowhere near 256 times as long, whatever is repeated."""
    parser = PARSERS[name]

    def seconds(text: str) -> float:
        began = time.thread_time()
        parser.parse(text, TOOLS)
        return time.thread_time() - began

    for beginning in ("", parser.render([ParsedCall("f", {"s": "x"})])[:-15]):
        for piece in LONG:
            short, long = (beginning + piece * (size // len(piece)) for size in (1_000, 16_000))
            ratios = (seconds(long) / max(2e-4, seconds(short)) for _ in range(5))
            assert any(ratio < 64 for ratio in ratios), (piece, beginning)


def test_every_format_is_registered(parser_of: Callable[[str], Parser]) -> None:
    formats = (
        "hermes qwen longcat llama3_json llama4_json mistral deepseek_v3 deepseek_v3_1 kimi_k2 glm45 glm47 qwen3_coder"
        " gemma4 gpt_oss"
        " ernie45 granite hunyuan_a13b phi4_mini_json cohere apertus xlam hunyuan mimo seed_oss minimax_m2 minimax_m3"
        " deepseek_v3_2 deepseek_v4 kimi_k3 step3 pythonic llama4_pythonic lfm2 olmo3 functiongemma"
        " nemotron_nano_v2 gigachat3 gigachat35 granite_20b_fc interns1 inkling solar_open dots minicpm5"
    )
    assert set(NAMES) == {*formats.split(), "auto"}
    for alias, name in (
        *(
            ("deepseek_v31", "deepseek_v3_1"),
            ("deepseek_v32", "deepseek_v3_2"),
            ("openai", "gpt_oss"),
            ("hy_v3", "hunyuan"),
            ("jamba", "hunyuan_a13b"),
            ("nemotron_json", "nemotron_nano_v2"),
            ("internlm", "interns1"),
            ("trinity", "qwen"),
            ("ling3", "glm47"),
        ),
        *((alias, "qwen3_coder") for alias in ("qwen3_xml", "nemotron_v3", "step3p5", "step5")),
        *((alias, "glm45") for alias in ("poolside_v1", "spark25")),
        *((alias, "cohere") for alias in ("cohere_command3", "cohere_command4")),
    ):
        assert parser_of(alias).name == name
    assert all(parser_of(name).name == name for name in NAMES)
