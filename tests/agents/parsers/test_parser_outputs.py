"""What models write, well-formed and broken, and what each parser makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.agents.parsers.base import ParsedText, Parser

FAMILY = {
    "json": ("hermes", "qwen", "longcat"),
    "llama": ("llama3_json", "llama4_json"),
    "glm": ("glm45", "glm47"),
    "deepseek": ("deepseek_v3", "deepseek_v3_1"),
    "objects": (
        *("hermes", "longcat", "mistral", "deepseek_v3", "deepseek_v3_1", "kimi_k2", "ernie45", "granite"),
        *("hunyuan_a13b", "phi4_mini_json", "cohere", "apertus", "nemotron_nano_v2", "gigachat3", "granite_20b_fc"),
        *("interns1", "inkling", "solar_open"),
    ),
    "bare": (
        *("glm45", "glm47", "qwen3_coder", "hunyuan", "mimo", "seed_oss", "minimax_m2", "minimax_m3", "step3"),
        *("dots", "minicpm5"),
    ),
}

Parse = Callable[[str, str], ParsedText]


@pytest.fixture(scope="module")
def parse(parser_of: Callable[[str], Parser], tools: list[dict[str, Any]]) -> Parse:
    """`parse(format, text)`."""
    return lambda name, text: parser_of(name).parse(text, tools)


def calls(parsed: ParsedText) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parsed.calls]


LS = ("terminal", {"command": "ls"})
LIST = ("list_tools", {})


def one(name: str, command: str = "ls") -> str:
    """`terminal` with this command, which JSON writes as it is."""
    bodies = {
        "hermes": '<tool_call>\n{"name": "terminal", "arguments": {"command": "%s"}}\n</tool_call>',
        "longcat": '<longcat_tool_call>\n{"name": "terminal", "arguments": {"command": "%s"}}\n</longcat_tool_call>',
        "llama3_json": '{"name": "terminal", "parameters": {"command": "%s"}}',
        "mistral": '[TOOL_CALLS]terminal[ARGS]{"command": "%s"}',
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n"
        '{"command": "%s"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>terminal<｜tool▁sep｜>"
        '{"command": "%s"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>"
        '{"command": "%s"}<|tool_call_end|><|tool_calls_section_end|>',
        "glm45": "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "glm47": "<tool_call>terminal<arg_key>command</arg_key><arg_value>%s</arg_value></tool_call>",
        "qwen3_coder": "<tool_call>\n<function=terminal>\n<parameter=command>\n%s"
        "\n</parameter>\n</function>\n</tool_call>",
        "hunyuan_a13b": '<tool_calls>[{"name": "terminal", "arguments": {"command": "%s"}}]</tool_calls>',
        "granite": '<|tool_call|>[{"name": "terminal", "arguments": {"command": "%s"}}]',
        "phi4_mini_json": 'functools[{"name": "terminal", "arguments": {"command": "%s"}}]',
        "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "terminal", '
        '"parameters": {"command": "%s"}}\n]<|END_ACTION|>',
        "apertus": '<|tools_prefix|>[{"terminal": {"command": "%s"}}]<|tools_suffix|>',
        "nemotron_nano_v2": '<TOOLCALL>[{"name": "terminal", "arguments": {"command": "%s"}}]</TOOLCALL>',
        "gigachat3": 'function call<|role_sep|>\n{"name": "terminal", "arguments": {"command": "%s"}}<|message_sep|>',
        "granite_20b_fc": '<function_call> {"name": "terminal", "arguments": {"command": "%s"}}',
        "interns1": '<|action_start|> <|plugin|>\n{"name": "terminal", "parameters": {"command": "%s"}}<|action_end|>',
        "inkling": "<|message_model|>terminal<|content_invoke_tool_json|>"
        '{"name": "terminal", "args": {"command": "%s"}}<|end_message|>',
        "solar_open": "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>terminal<|tool_call:args|>"
        '{"command": "%s"}<|tool_call:end|><|calls|>',
        "minicpm5": '<function name="terminal"><param name="command">%s</param></function>',
        "xlam": '[{"name": "terminal", "arguments": {"command": "%s"}}]',
        "hunyuan": "<tool_calls>\n<tool_call>terminal<tool_sep>\n<arg_key>command</arg_key>\n"
        "<arg_value>%s</arg_value>\n</tool_call>\n</tool_calls>",
        "mimo": "<tool_call>\n<function=terminal>\n<parameter=command>%s</parameter>\n</function>\n</tool_call>",
        "seed_oss": "<seed:tool_call>\n<function=terminal>\n<parameter=command>%s</parameter>\n</function>\n"
        "</seed:tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="terminal">\n<parameter name="command">%s</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="terminal">]<]minimax[>[<command>%s'
        "]<]minimax[>[</command>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="terminal">\n<｜DSML｜parameter name="command"'
        ' string="true">%s</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="terminal" index="1"<|sep|><|open|>argument key="command" '
        'type="string"<|sep|>%s<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="terminal">'
        '<steptml:parameter name="command">%s</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        "pythonic": '[terminal(command="%s")]',
        "lfm2": '<|tool_call_start|>[terminal(command="%s")]<|tool_call_end|>',
        "olmo3": '<function_calls>terminal(command="%s")</function_calls>',
        "functiongemma": "<start_function_call>call:terminal{command:<escape>%s<escape>}<end_function_call>",
        "gemma4": '<|tool_call>call:terminal{command:<|"|>%s<|"|>}<tool_call|>',
        "gpt_oss": "<|start|>assistant to=functions.terminal<|channel|>commentary json<|message|>"
        '{"command": "%s"}<|call|>',
    }
    bodies |= dict.fromkeys(("qwen", "ernie45", "auto"), bodies["hermes"])
    bodies |= {"llama4_json": bodies["llama3_json"], "llama4_pythonic": bodies["pythonic"]}
    bodies["deepseek_v4"] = bodies["deepseek_v3_2"].replace("function_calls", "tool_calls")
    bodies["gigachat35"] = bodies["deepseek_v4"].replace("DSML", "GCML")
    bodies["dots"] = bodies["minimax_m2"].replace("minimax:tool_call", "dots_function_call")
    return bodies[name] % command


# --- well-formed ------------------------------------------------------------------------------------------------------


def test_the_calls_of_a_well_formed_text_are_all_there(parse: Parse, well_formed: Any) -> None:
    name, text, content, expected = well_formed
    parsed = parse(name, text)
    assert (calls(parsed), parsed.content, parsed.problems, parsed.reasoning) == (expected, content, (), None)
    assert not any(call.repaired or not call.ended for call in parsed.calls)
    assert all(text[call.start :].startswith(call.raw) for call in parsed.calls)


def test_auto_tells_every_format_by_its_marks(parse: Parse, well_formed: Any) -> None:
    _, text, content, expected = well_formed
    parsed = parse("auto", text)
    assert (calls(parsed), parsed.content, parsed.problems) == (expected, content, ())


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|eot_id|>\n", "</s>", "<|observation|>", "<｜end▁of▁sentence｜>"])
def test_end_tokens_are_no_content(parse: Parse, format_name: str, end: str) -> None:
    parsed = parse(format_name, f"Now.\n{one(format_name)}{end}")
    assert (calls(parsed), parsed.content, parsed.problems) == ([LS], "Now.", ())
    assert parse(format_name, f"It is done. {end}").content.strip() == "It is done."


def test_a_plain_answer_is_left_as_it_is(parse: Parse, format_name: str) -> None:
    text = '  Done: {"a": [1]}, 1 < 2 > 0, `[ARGS]`, {{x}}.\n\n'
    assert parse(format_name, text) == ParsedText(text)


def test_text_between_and_after_calls_is_content(parse: Parse, format_name: str) -> None:
    call = one(format_name)
    parsed = parse(format_name, f"First.\n{call}\nthen\n{call}\nand done.")
    assert (calls(parsed), parsed.content, parsed.problems) == ([LS, LS], "First.\nthen\nand done.", ())


def test_tags_of_every_format_may_stand_in_an_argument(parse: Parse, format_name: str) -> None:
    tags = (
        "</tool_call> <tool_call> </function> </longcat_tool_call> [TOOL_CALLS] <|tool_call_end|> <｜tool▁call▁end｜> "
        "<think> </think> ``` } ] ; </arg_value>, </parameter>, {{"
    )
    parsed = parse(format_name, f"{one(format_name, tags)}\n{one(format_name)}")
    assert (calls(parsed), parsed.problems) == ([("terminal", {"command": tags}), LS], ())


@pytest.mark.parametrize("name", FAMILY["bare"])
@pytest.mark.parametrize(
    "value",
    [
        "</function><function=f>",
        "<parameter=timeout> is a tag, and </parameter> too",
        "<arg_key>timeout</arg_key><arg_value>3</arg_value> is one argument",
        "a</tool_call>\n<tool_call>b",
        "if a < b and c > d: </function>",
        "\n\nlines\n\n",
    ],
)
def test_a_bare_value_may_hold_tags(parse: Parse, name: str, value: str) -> None:
    parsed = parse(name, f"{one(name, value)}\n{one(name)}")
    assert (calls(parsed), parsed.problems) == ([("terminal", {"command": value}), LS], ())


def test_unicode_stays_what_it_is(parse: Parse, format_name: str) -> None:
    word = "naïve 日本語 🜁 \u200b\u2028 \x85 ｜▁"
    assert calls(parse(format_name, one(format_name, word))) == [("terminal", {"command": word})]


@pytest.mark.parametrize("name", [*FAMILY["objects"], "llama3_json"])
def test_json_may_have_many_lines_and_be_nested(parse: Parse, name: str) -> None:
    text = one(name).replace(
        '{"command": "ls"}', '{\n\t"command":\n "ls",\r\n"env": {"a": {"b": [{}, [{"c": "}"}]]}}\n}'
    )
    parsed = parse(name, text)
    assert calls(parsed) == [("terminal", {"command": "ls", "env": {"a": {"b": [{}, [{"c": "}"}]]}}})]
    assert not parsed.calls[0].repaired


def test_what_comes_after_a_hundred_broken_calls_is_one_problem(parse: Parse) -> None:
    """Each costs time, and nobody reads thousands of them."""
    parsed = parse("pythonic", "[terminal(command='" * 1000 + "[terminal(command='ls')]")
    assert (parsed.calls, len(parsed.problems)) == ((), 101)
    assert parsed.problems[-1].raw.endswith("command='ls')]")
    assert "rest of the answer" in parsed.problems[-1].message


# --- reasoning --------------------------------------------------------------------------------------------------------


def test_no_call_in_reasoning_is_made(parse: Parse, format_name: str) -> None:
    call, draft = one(format_name), one(format_name, "rm -rf /")
    for text in (f"<think>\nMaybe {draft}?\n</think>\nSo:\n{call}", f"Maybe {draft}?\n</think>\nSo:\n{call}"):
        parsed = parse(format_name, text)
        assert (calls(parsed), parsed.content, parsed.problems) == ([LS], "So:", ())
        assert parsed.reasoning is not None
        assert "rm -rf /" in parsed.reasoning


def test_no_call_in_reasoning_without_an_end_is_made_and_none_vanishes(parse: Parse, format_name: str) -> None:
    draft, call = one(format_name, "ls -a"), one(format_name)
    parsed = parse(format_name, f"<think>Maybe {draft} and {call}")
    assert (calls(parsed), parsed.content) == ([], "")
    assert [(problem.name, problem.raw in parsed.reasoning) for problem in parsed.problems] == [("terminal", False)] * 2
    told = parsed.tool_calls(1)
    assert [(call.name, call.arguments) for call in told] == [("terminal", None)] * 2
    assert all("a call inside of <think> was not made: write </think> before it" in str(call.error) for call in told)
    made = parsed.tool_calls(1, end_thinking=True)
    assert [(call.name, call.arguments, call.error) for call in made] == [
        ("terminal", {"command": "ls -a"}, None),
        ("terminal", {"command": "ls"}, None),
    ]


def test_thinking_without_an_end_that_calls_nothing_is_no_problem(parse: Parse, format_name: str) -> None:
    parsed = parse(format_name, "Well. <think>Maybe I should look, {or} [not]")
    assert (parsed.calls, parsed.problems) == ((), ())
    assert (parsed.content, parsed.reasoning) == ("Well.", "Maybe I should look, {or} [not]")


@pytest.mark.parametrize("name", ["gpt_oss", "auto"])
def test_the_channels_of_harmony(parse: Parse, name: str) -> None:
    draft, call = one("gpt_oss", "rm -rf /"), one("gpt_oss")
    analysis = "<|channel|>analysis<|message|>"
    parsed = parse(name, f"{analysis}Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Now.<|end|>{call}")
    assert (calls(parsed), parsed.reasoning, parsed.content, parsed.problems) == ([LS], "Hm.", "Now.", ())
    parsed = parse(name, f"{analysis}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>")
    assert (calls(parsed), parsed.reasoning, parsed.content) == ([], "Hm.", "Done.")
    parsed = parse(name, f"{analysis}Maybe {draft}")
    assert (calls(parsed), len(parsed.problems)) == ([], 1)
    parsed = parse(name, " to=functions.terminal<|channel|>commentary json")
    assert [(problem.name, problem.message) for problem in parsed.problems] == [("", "the call has no message")]


@pytest.mark.parametrize("name", ["gemma4", "auto"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("call:terminal{command:ls -la}", 'a text has to stand between <|"|>'),
        ('call:terminal{command:<|"|>ls}', "a text has no end"),
        ("call:terminal{command:}", "an argument has no value"),
        ('call:terminal{<|"|>command<|"|> 3}', "':' is missing"),
        ("call:terminal{timeout:3 background:true}", "',' is missing"),
        ("call:terminal{timeout:1e999}", "is not a number"),
        ("call:terminal" + "{a:" * 60, "nested too deep"),
        ("terminal", "not of the form call:NAME"),
    ],
)
def test_broken_calls_of_gemma_are_told(parse: Parse, name: str, body: str, said: str) -> None:
    parsed = parse(name, f"Now.<|tool_call>{body}<tool_call|>")
    assert (parsed.calls, parsed.content) == ((), "Now.")
    assert said in parsed.problems[0].message
    thought = parse(name, f"<|channel>thought\nHm.\n<channel|>{one('gemma4')}")
    assert (calls(thought), thought.reasoning) == ([LS], "Hm.")


def test_no_broken_call_in_reasoning_is_a_problem(parse: Parse, format_name: str) -> None:
    draft = one(format_name)[:-25]
    for opening in ("", "<think>"):
        parsed = parse(format_name, f"{opening}{draft} or so</think>{one(format_name)}")
        assert (calls(parsed), parsed.problems) == ([LS], ())


def test_reasoning_between_calls(parse: Parse, format_name: str) -> None:
    call = one(format_name)
    parsed = parse(format_name, f"<think>a</think>{call}<think>b{call}</think>{call}")
    assert (calls(parsed), parsed.reasoning, parsed.problems) == ([LS, LS], "a\nb" + call, ())


def test_empty_reasoning_is_none(parse: Parse, format_name: str) -> None:
    parsed = parse(format_name, f"<think>\n\n</think>\n\n{one(format_name)}")
    assert (parsed.reasoning, calls(parsed), parsed.content) == (None, [LS], "")


def test_nested_reasoning_is_never_made_and_the_call_is_told(parse: Parse, format_name: str) -> None:
    parsed = parse(format_name, f"<think>a<think>b</think>{one(format_name)}</think>done")
    assert (calls(parsed), parsed.content) == ([], "done")
    assert ["reasoning" in problem.message for problem in parsed.problems] == [True]


@pytest.mark.parametrize(("opening", "closing"), [("[THINK]", "[/THINK]"), ("<longcat_think>", "</longcat_think>")])
def test_other_marks_of_reasoning(parse: Parse, opening: str, closing: str) -> None:
    for name in ("mistral", "longcat"):
        parsed = parse(name, f"{opening}hm {one(name)}{closing}{one(name)}")
        assert calls(parsed) == [LS]


# --- broken -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY["objects"])
@pytest.mark.parametrize(
    "body",
    ['{"command": "ls"', '{"command": ls}', '{"command": "ls}', "{'command': 'ls'}", '["ls"]', "ls", '{"command"'],
)
def test_a_broken_call_costs_only_itself(parse: Parse, name: str, body: str) -> None:
    good = one(name)
    broken = good.replace('{"command": "ls"}', body)
    parsed = parse(name, f"{good}\n{broken}\n{good}")
    assert calls(parsed) == [LS, LS]
    (problem,) = parsed.problems
    assert problem.name in ("terminal", "")
    assert "JSON" in problem.message
    assert [call.error is None for call in parsed.tool_calls(1)] == [True, False, True]


@pytest.mark.parametrize("name", ["llama3_json", "llama4_json"])
@pytest.mark.parametrize("body", ['{"command": "ls"', '{"command": ls}', '{"command": "ls}', "ls"])
def test_a_broken_bare_object_costs_only_itself(parse: Parse, name: str, body: str) -> None:
    good = one(name)
    broken = good.replace('{"command": "ls"}', body)
    parsed = parse(name, f"{good}; {broken}; {good}")
    assert calls(parsed) == [LS, LS]
    assert [problem.name for problem in parsed.problems] == ["terminal"]


@pytest.mark.parametrize("name", ["hermes", "longcat", "deepseek_v3", "deepseek_v3_1", "kimi_k2", "glm45", "glm47"])
def test_closing_marks_may_be_missing(parse: Parse, name: str) -> None:
    text = one(name).replace("\n```<", "<")
    for closing in (
        "</tool_call>",
        "</longcat_tool_call>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ):
        text = text.replace(closing, "")
    parsed = parse(name, f"{text}\n{text}")
    assert (calls(parsed), parsed.problems) == ([LS, LS], ())


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>",
        "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>",
        "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</function>\n</tool_call>",
        "<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</tool_call>",
        "<function=terminal>\n<parameter=command>\nls\n</function>",
        '<function="terminal"><parameter="command">ls</parameter></function>',
    ],
)
def test_tags_may_be_missing_in_qwen3_coder(parse: Parse, text: str) -> None:
    assert calls(parse("qwen3_coder", text)) == [LS]
    parsed = parse("qwen3_coder", f"{text}\n{one('qwen3_coder')}")
    assert (calls(parsed), parsed.problems) == ([LS, LS], ())


def test_a_value_without_its_closing_tag_ends_at_the_next_argument(parse: Parse) -> None:
    expected = [("write_file", {"path": "a", "content": "b <parameter=x>"}), LS]
    qwen = (
        "<function=write_file>\n<parameter=path>\na\n<parameter=content>\nb <parameter=x>\n</parameter>\n</function>\n"
    )
    parsed = parse("qwen3_coder", qwen + one("qwen3_coder"))
    assert (calls(parsed), [call.repaired for call in parsed.calls]) == (expected, [True, False])
    glm = (
        "<tool_call>write_file\n<arg_key>path</arg_key><arg_value>a\n"
        "<arg_key>content</arg_key><arg_value>b</arg_value></tool_call>"
    )
    assert calls(parse("glm45", glm)) == [("write_file", {"path": "a\n", "content": "b"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=terminal>\n<parameter=command>\nrm -rf /tm"),
        ("qwen3_coder", "<tool_call>\n<function=termi"),
        ("qwen3_coder", "<tool_call>\n"),
        ("glm45", "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>rm -rf /tm"),
        ("glm45", "<tool_call>termi"),
        ("kimi_k2", "<|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>"),
        ("kimi_k2", "<|tool_call_begin|>functions.termi"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>terminal<｜tool▁sep｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]terminal[ARGS]"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "terminal", "arguments": {"command": "rm -rf /tm'),
        ("llama3_json", '{"name": "terminal", "parameters": {"command": "rm -rf /tm'),
        ("hunyuan", "<tool_calls>\n<tool_call>terminal<tool_sep>\n<arg_key>command</arg_key>\n<arg_value>rm -rf /tm"),
        ("seed_oss", "<seed:tool_call>\n<function=terminal>\n<parameter=command>rm -rf /tm"),
        ("seed_oss", "<seed:tool_call>\n"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="terminal">\n<parameter name="command">rm -rf /tm'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="term'),
        (
            "minimax_m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="terminal">]<]minimax[>[<command>rm -rf /tm',
        ),
        ("minimax_m3", ']<]minimax[>[<invoke name="terminal">]<]minimax[>[<command>ls]<]minimax[>[</command>'),
        (
            "deepseek_v3_2",
            '<｜DSML｜invoke name="terminal">\n<｜DSML｜parameter name="command" string="true">rm -rf /tm',
        ),
        (
            "kimi_k3",
            '<|open|>call tool="terminal" index="1"<|sep|><|open|>argument key="command" type="string"<|sep|>rm',
        ),
        ("step3", '<steptml:invoke name="terminal"><steptml:parameter name="command">rm -rf /tm'),
        ("pythonic", '[terminal(command="rm -rf /tm'),
        ("lfm2", '<|tool_call_start|>[terminal(command="rm -rf /tm'),
        ("lfm2", "<|tool_call_start|>["),
        ("olmo3", "<function_calls>terminal(comm"),
        ("functiongemma", "<start_function_call>call:terminal{command:<escape>rm -rf /tm"),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "terminal", "parameters": {"command": "rm'),
        ("apertus", '<|tools_prefix|>[{"terminal": {"command": "rm'),
        ("phi4_mini_json", 'functools[{"name": "terminal", "arguments": {"command": "rm'),
    ],
)
def test_what_is_cut_off_in_the_middle_is_not_made(parse: Parse, name: str, text: str) -> None:
    parsed = parse(name, f"{one(name)}; {text}")
    assert calls(parsed) == [LS]
    assert [problem.raw for problem in parsed.problems] == [text]


def test_a_call_without_an_end_is_not_made_if_the_answer_was_cut(parse: Parse) -> None:
    text = "<function=terminal>\n<parameter=command>\nls\n</parameter>\n"
    parsed = parse("qwen3_coder", text)
    (whole,), (cut,) = parsed.tool_calls(1), parsed.tool_calls(1, cut=True)
    assert (whole.error, whole.arguments) == (None, {"command": "ls"})
    assert cut.arguments is None
    assert "cut off" in str(cut.error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{}</tool_call>", 'no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "terminal", "command": "ls"}</tool_call>', 'no "arguments"'),
        ('<tool_call>{"name": "terminal", "arguments": [1]}</tool_call>', "must be a JSON object, not a list"),
        ('<tool_call>{"name": "terminal", "arguments": {"timeout": NaN}}</tool_call>', "NaN is not JSON"),
        ("<tool_call>terminal(command='ls')</tool_call>", "not a JSON object"),
    ],
)
def test_what_is_wrong_is_said(parse: Parse, text: str, message: str) -> None:
    parsed = parse("hermes", text)
    assert [message in problem.message for problem in parsed.problems] == [True]
    assert (parsed.calls, parsed.content, parsed.problems[0].raw) == ((), "", text)


@pytest.mark.parametrize(
    ("body", "expected", "repaired"),
    [
        ('{"name": "terminal", "arguments": "{\\"command\\": \\"ls\\"}"}', [LS], True),
        ('{"name": "terminal", "arguments": {"command": "a\nb"}}', [("terminal", {"command": "a\nb"})], True),
        ('{"name": "terminal", "parameters": {"command": "ls"}}', [LS], False),
        ('{"type": "function", "function": {"name": "terminal", "arguments": {"command": "ls"}}}', [LS], False),
        ('{"name": "list_tools"}', [LIST], False),
        ('{"name": "list_tools", "arguments": null}', [LIST], False),
        ('{"name": "list_tools"}\n{"name": "terminal", "arguments": {"command": "ls"}}', [LIST, LS], False),
        ('[{"name": "list_tools"}, {"name": "terminal", "arguments": {"command": "ls"}}]', [LIST, LS], False),
    ],
)
def test_other_ways_to_write_an_object(parse: Parse, body: str, expected: Any, repaired: bool) -> None:
    parsed = parse("hermes", f"<tool_call>{body}</tool_call>")
    assert (calls(parsed), parsed.problems, parsed.content) == (expected, (), "")
    assert any(call.repaired for call in parsed.calls) is repaired


def test_a_broken_element_of_a_list_costs_only_itself(parse: Parse) -> None:
    good = '{"name": "terminal", "arguments": {"command": "ls"}}'
    parsed = parse("mistral", f'[TOOL_CALLS] [{good}, {{"name": "terminal", "arguments": {{bad}}}}, {good}')
    assert calls(parsed) == [LS, LS]
    assert [problem.name for problem in parsed.problems] == ["terminal"]


def test_what_a_broken_call_was_to_write_is_not_made(parse: Parse) -> None:
    inner = '<tool_call>{\\"name\\": \\"terminal\\", \\"arguments\\": {\\"command\\": \\"rm\\"}}</tool_call>'
    parsed = parse(
        "hermes", f'<tool_call>{{"name": "write_file", "arguments": {{"content": "{inner}", bad}}}}</tool_call>'
    )
    assert parsed.calls == ()
    assert parsed.problems


# --- what only some formats have --------------------------------------------------------------------------------------


def test_ids_are_kept_where_the_format_has_them(parse: Parse) -> None:
    assert [c.id for c in parse("kimi_k2", one("kimi_k2")).calls] == ["functions.terminal:0"]
    for text in (
        '[TOOL_CALLS]terminal[CALL_ID]abcDEF123[ARGS]{"command": "ls"}',
        '[TOOL_CALLS][{"name": "terminal", "arguments": {"command": "ls"}, "id": "abcDEF123"}]',
    ):
        parsed = parse("mistral", text)
        assert (calls(parsed), [c.id for c in parsed.tool_calls(3)]) == ([LS], ["abcDEF123"])


def test_ids_that_are_made_up_are_nine_letters_and_digits_each_once(parse: Parse, format_name: str) -> None:
    text = (one(format_name) + "\n") * 50
    ids = [call.id for turn in (1, 400) for call in parse(format_name, text).tool_calls(turn)]
    given = 2 if format_name == "kimi_k2" else 0
    assert sum(len(i) == 9 and i.isalnum() for i in ids) == 100 - given
    assert len(set(ids)) == 100 - given // 2


@pytest.mark.parametrize("name", FAMILY["llama"])
def test_an_example_in_prose_is_no_call(parse: Parse, name: str) -> None:
    for text in (
        'Like this: {"name": "bob", "parameters": {"age": 3}}.',
        '{"name": "Bob", "age": 3}',
        '{"id": 4, "items": [{"name": "terminal", "parameters": {}}]}',
        'The schema is {"type": "object", "properties": {}}',
    ):
        assert parse(name, text) == ParsedText(text)


@pytest.mark.parametrize("name", FAMILY["llama"])
def test_llama_calls_around_text_and_tags(parse: Parse, name: str) -> None:
    object_ = one(name)
    assert calls(parse(name, f"I look.\n\n{object_}\n")) == [LS]
    assert calls(parse(name, f"[{object_}, {object_}]")) == [LS, LS]
    assert calls(parse(name, f"<|python_start|>{object_}<|python_end|>")) == [LS]
    assert calls(parse(name, '{"name": "nonsense", "parameters": {}}')) == [("nonsense", {})]
    assert calls(parse(name, '{"type": "function", "name": "list_tools", "parameters": {}}')) == [LIST]
    (problem,) = parse(name, '<|python_tag|>brave_search.call(query="x")').problems
    assert "not a JSON object" in problem.message


@pytest.mark.parametrize("name", FAMILY["llama"])
@pytest.mark.parametrize("named", ["[1]", "{}", "3", "null", '""'])
def test_an_object_whose_name_is_none_is_no_call(parse: Parse, name: str, named: str) -> None:
    assert parse(name, f'{{"name": {named}, "parameters": {{}}}}').calls == ()


@pytest.mark.few(24)
@pytest.mark.parametrize("depth", [500, 900, 990, 100_000])
def test_nesting_that_is_too_deep_is_a_problem_at_worst(parse: Parse, format_name: str, depth: int) -> None:
    deep = one(format_name).replace('"ls"', "[" * depth + "]" * depth)
    parsed = parse(format_name, f"{deep}\n{one(format_name)}")
    made = parsed.tool_calls(1)
    assert made[-1].arguments == {"command": "ls"}
    assert all((call.arguments is None) == (call.error is not None) for call in made)


def test_deepseek_reads_both_versions(parse: Parse) -> None:
    for name in FAMILY["deepseek"]:
        for other in FAMILY["deepseek"]:
            assert calls(parse(name, one(other))) == [LS]


def test_zero_arguments(parse: Parse) -> None:
    for name, text in (
        ("glm45", "<tool_call>list_tools\n</tool_call>"),
        ("glm47", "<tool_call>list_tools</tool_call>"),
        ("qwen3_coder", "<tool_call><function=list_tools></function></tool_call>"),
        ("mistral", "[TOOL_CALLS]list_tools[ARGS]{}"),
        ("kimi_k2", "<|tool_call_begin|>functions.list_tools:0<|tool_call_argument_begin|><|tool_call_end|>"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>list_tools<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>list_tools<｜tool▁call▁end｜>"),
        ("llama3_json", '<|python_tag|>{"name": "list_tools"}'),
    ):
        parsed = parse(name, text)
        assert (calls(parsed), parsed.problems) == ([LIST], ())


@pytest.mark.parametrize("name", FAMILY["bare"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        (None, "123", "123"),
        ({}, "true", "true"),
        ({"type": "integer"}, "123", 123),
        ({"type": "integer"}, " -4 ", -4),
        ({"type": "integer"}, "x", "x"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[a", "[a"),
        ({"type": "array", "items": {"type": "string"}}, '["1", 2]', ["1", 2]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, "[" * 5000, "[" * 5000),
        ({"enum": [1, 2, "3"]}, "2", 2),
        ({"enum": [1, 2, "3"]}, "3", "3"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/N"}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"items": {"type": "integer"}}, "[1]", [1]),
    ],
)
def test_values_are_typed_by_the_schema(
    parser_of: Callable[[str], Parser], name: str, schema: Any, text: str, value: Any
) -> None:
    properties = {} if schema is None else {"v": schema}
    definitions = {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "t", "parameters": parameters}}]
    written = {
        "glm45": f"<tool_call>t\n<arg_key>v</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "glm47": f"<tool_call>t<arg_key>v</arg_key><arg_value>{text}</arg_value></tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=t>\n<parameter=v>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "hunyuan": f"<tool_call>t<tool_sep>\n<arg_key>v</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "mimo": f"<tool_call>\n<function=t>\n<parameter=v>{text}</parameter>\n</function>\n</tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=t>\n<parameter=v>{text}</parameter>\n</function>\n</seed:tool_call>",
        "minimax_m2": f'<invoke name="t">\n<parameter name="v">{text}</parameter>\n</invoke>',
        "dots": f'<invoke name="t">\n<parameter name="v">{text}</parameter>\n</invoke>',
        "minicpm5": f'<function name="t"><param name="v"><![CDATA[{text}]]></param></function>',
        "minimax_m3": ']<]minimax[>[<invoke name="t">]<]minimax[>[<v>'
        + text
        + "]<]minimax[>[</v>]<]minimax[>[</invoke>",
        "step3": f'<steptml:invoke name="t"><steptml:parameter name="v">{text}</steptml:parameter></steptml:invoke>',
    }
    (call,) = parser_of(name).parse(written[name], tools).calls
    assert call.arguments == {"v": value}
    assert type(call.arguments["v"]) is type(value)


def test_a_tool_list_that_is_wrong_is_no_reason_to_fail(parser_of: Callable[[str], Parser], format_name: str) -> None:
    for tools in (
        (),
        [{}],
        [{"function": None}],
        [{"function": {"name": "terminal", "parameters": None}}],
        [{"type": 1}],
    ):
        assert calls(parser_of(format_name).parse(one(format_name), tools)) == [LS]


@pytest.mark.parametrize(
    ("name", "broken"), [("hermes", '<tool_call>{"name": "terminal", '), ("mistral", "[TOOL_CALLS]terminal{")]
)
def test_of_thousands_of_broken_calls_each_is_told_and_a_whole_one_is_made(
    parse: Parse, name: str, broken: str
) -> None:
    parsed = parse(name, broken * 2000 + one(name))
    assert len(parsed.problems) == 2000 and calls(parsed) == [LS]
    assert all("not valid JSON" in problem.message for problem in parsed.problems)
    assert "line 1" in parsed.problems[0].message and parsed.problems[-1].message.endswith("not valid JSON")


# --- the formats of today ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek_v3_2", "deepseek_v4", "auto"])
def test_deepseek_says_which_values_are_text(parse: Parse, name: str) -> None:
    def written(value: str, text: str) -> str:
        return (
            '<｜DSML｜invoke name="terminal">\n<｜DSML｜parameter name="v" '
            f'string="{text}">{value}</｜DSML｜parameter>\n</｜DSML｜invoke>'
        )

    for value, text, read in (
        ("7", "true", "7"),
        ("7", "false", 7),
        ("null", "false", None),
        ('{"a": [1]}', "false", {"a": [1]}),
        ("1e999", "false", "1e999"),
        ("not JSON", "false", "not JSON"),
        (' a\n"b" </｜DSML｜', "true", ' a\n"b" </｜DSML｜'),
    ):
        assert calls(parse(name, written(value, text))) == [("terminal", {"v": read})]
    for section in ("function_calls", "tool_calls"):
        other = f"Now.\n<｜DSML｜{section}>\n{written('ls', 'true')}\n</｜DSML｜{section}>"
        assert (calls(parse(name, other)), parse(name, other).content) == ([("terminal", {"v": "ls"})], "Now.")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "deepseek_v3_2",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="terminal">\n{"command": "ls"}</｜DSML｜invoke>\n',
        ),
        ("deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="terminal">{"command": "ls"}</｜DSML｜invoke>'),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="terminal" index="1"<|sep|><|open|>json type="object"<|sep|>'
            '{"command": "ls"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ),
        ("minimax_m2", '<minimax:tool_call><invoke name="terminal">{"command": "ls"}</invoke></minimax:tool_call>'),
        ("qwen3_coder", '<tool_call><function=terminal>{"command": "ls"}</function></tool_call>'),
    ],
)
def test_all_arguments_may_be_one_object(parse: Parse, name: str, text: str) -> None:
    for each in (name, "auto"):
        parsed = parse(each, f"{text}\n{one(name)}")
        assert (calls(parsed), parsed.problems, parsed.content) == ([LS, LS], (), "")
        broken = parse(each, text.replace('"ls"}', "ls}") + one(name))
        assert (calls(broken), [problem.name for problem in broken.problems]) == ([LS], ["terminal"])


def test_kimi_k3_has_channels_types_and_encoded_names(parse: Parse) -> None:
    text = (
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Now.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="a&quot;b&amp;c" index="1"<|sep|>'
        '<|open|>argument key="k&quot;" type="string"<|sep|>7<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>7<|close|>argument<|sep|>'
        '<|open|>argument key="z" type="null"<|sep|>null<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    for name in ("kimi_k3", "auto"):
        parsed = parse(name, text)
        assert (calls(parsed), parsed.problems) == ([('a"b&c', {'k"': "7", "n": 7, "z": None})], ())
        assert (parsed.reasoning, parsed.content) == ("Hm.", "Now.")
        said = "Done.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
        assert parse(name, said).content == "Done."


@pytest.mark.parametrize("name", ["minimax_m3", "auto"])
def test_minimax_m3_writes_objects_and_lists_as_tags(parser_of: Callable[[str], Parser], name: str) -> None:
    sign = "]<]minimax[>["
    item = {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}
    properties = {
        "user": {"type": "integer"},
        "where": {"$ref": "#/$defs/Place"},
        "items": {"type": "array", "items": item},
        "extra": {"type": "object", "additionalProperties": {"type": "string"}},
        "free": {"type": "object"},
    }
    place = {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}
    schema = {"type": "object", "properties": properties, "$defs": {"Place": place}}
    tools = [{"type": "function", "function": {"name": "order", "parameters": schema}}]

    def tag(key: str, *inside: str) -> str:
        return f"{sign}<{key}>{''.join(inside)}{sign}</{key}>"

    body = "".join(
        (
            tag("user", "42"),
            tag("where", tag("city", "a <b> ]<]"), tag("zip", "18956")),
            tag("items", tag("item", tag("sku", "7"), tag("count", "2")), "\n", tag("item", tag("sku", "b"))),
            tag("extra", tag("a", "1")),
            tag("free", tag("t", "x"), tag("t", "y")),
        )
    )
    call = f'{sign}<tool_call>\n{sign}<invoke name="order">{body}{sign}</invoke>\n{sign}</tool_call>'
    parsed = parser_of(name).parse(f"<mm:think>Hm.</mm:think>Now.{call}", tools)
    assert calls(parsed) == [
        (
            "order",
            {
                "user": 42,
                "where": {"city": "a <b> ]<]", "zip": 18956},
                "items": [{"sku": "7", "count": 2}, {"sku": "b"}],
                "extra": {"a": "1"},
                "free": {"t": ["x", "y"]},
            },
        )
    ]
    assert (parsed.reasoning, parsed.content, parsed.problems) == ("Hm.", "Now.", ())
    for wrong, said in (
        (tag("user", "4") + "x", "something else than arguments"),
        (f"{sign}<user>4{sign}</users>", "the value of 'user' has no end"),
        (f"{sign}<where>x{tag('city', 'a')}{sign}</where>", "the value of 'where' has no end"),
        (f"{sign}<where>{tag('city', 'a')}x{sign}</where>", "has text beside tags"),
        (f"{sign}<a>" * 60 + f"{sign}</a>" * 60, "nested too deep"),
    ):
        broken = parser_of(name).parse(call.replace(body, wrong), tools)
        assert (broken.calls, [said in problem.message for problem in broken.problems]) == ((), [True])


def test_the_tools_of_other_thinking_and_other_marks(parse: Parse) -> None:
    for name, text in (
        ("seed_oss", "<seed:think>Hm.<seed:cot_budget_reflect>1</seed:cot_budget_reflect></seed:think>\n"),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>"),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>"),
        ("hunyuan", "Hm.</think:opensource>"),
        ("ernie45", "Hm.</think>\n\n"),
    ):
        for each in (name, "auto"):
            parsed = parse(each, text + one(name))
            assert (calls(parsed), parsed.problems, parsed.content) == ([LS], (), "")
            assert str(parsed.reasoning).startswith("Hm.")
    for name, text in (
        ("ernie45", "<response>\nDone.\n</response>\n"),
        ("cohere", "<|START_RESPONSE|>Done.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("hunyuan_a13b", "<answer>\nDone.\n</answer>"),
    ):
        assert parse(name, text).content == "Done."


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic", "lfm2", "olmo3"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("terminal(command='''a\n'b' \"c\"''')", {"command": "a\n'b' \"c\""}),
        ('terminal(command="""a\n"b" \'c\'""")', {"command": "a\n\"b\" 'c'"}),
        ("terminal(command='it's here')", {"command": "it's here"}),
        (r"terminal(command='it\'s \\ \n \x41 é 日 \q')", {"command": "it's \\ \n A é 日 \\q"}),
        ("terminal( command = 'a' , timeout = 3, )", {"command": "a", "timeout": 3}),
        (
            "terminal(env={'a': [1, (2, 3)], \"b\": {}}, background=true, x=null)",
            {"env": {"a": [1, [2, 3]], "b": {}}, "background": True, "x": None},
        ),
        ("terminal(**{'odd key': -1.5e3})", {"odd key": -1500.0}),
    ],
)
def test_what_python_can_write(parse: Parse, name: str, body: str, expected: dict[str, Any]) -> None:
    parsed = parse(name, one(name).replace('terminal(command="ls")', body))
    assert (calls(parsed), parsed.problems, parsed.content) == ([("terminal", expected)], (), "")


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic", "lfm2", "olmo3"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("terminal('ls')", "an argument has no name"),
        ("terminal(command)", "'=' is missing"),
        ("terminal(command=ls)", "a text has to stand between"),
        ("terminal(command='a' + 'b')", "',' is missing"),
        ("terminal(timeout=1e999)", "is not a number"),
        ("terminal(command=b'a')", "a text has to stand between"),
        ("terminal(**'a')", "an argument has no name"),
        ("terminal(command=)", "an argument has no value"),
        ("terminal(env=" + "{'a': " * 60 + ")", "nested too deep"),
    ],
)
def test_a_broken_call_of_python_costs_only_itself(parse: Parse, name: str, body: str, said: str) -> None:
    good = 'terminal(command="ls")'
    parsed = parse(name, one(name).replace(good, f"{good},\n{body},\n{good}"))
    assert calls(parsed) == [LS, LS]
    assert [(problem.name, said in problem.message) for problem in parsed.problems] == [("terminal", True)]


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
def test_a_list_in_prose_is_no_call(parse: Parse, name: str) -> None:
    for text in ("See [f(x)](https://example.org).", "[f(x)]", "As [f(x=1)] does.", "a[i(0)] = [g(1, 2)]"):
        assert parse(name, text) == ParsedText(text)
    assert calls(parse(name, "[unknown(x=1)]")) == [("unknown", {"x": 1})]


def test_these_models_write_json_as_well(parse: Parse) -> None:
    for name, text in (
        ("lfm2", '<|tool_call_start|>[{"name": "terminal", "arguments": {"command": "ls"}}]<|tool_call_end|>'),
        ("llama4_pythonic", '<|python_start|>{"name": "terminal", "parameters": {"command": "ls"}}<|python_end|>'),
        ("xlam", '```json\n[{"name": "terminal", "arguments": {"command": "ls"}}]\n```'),
    ):
        parsed = parse(name, f"Now.\n{text}")
        assert (calls(parsed), parsed.problems, parsed.content) == ([LS], (), "Now.")


@pytest.mark.parametrize(
    ("identifier", "name"),
    [
        ("functions.terminal:0", "terminal"),
        ("terminal:3", "terminal"),
        ("functions_terminal_1", "terminal"),
        ("functionsterminal5", "terminal"),
        ("call_terminal_0", "terminal"),
        ("call_write_file:2", "write_file"),
        ("call_nothing:2", "call_nothing"),
    ],
)
def test_kimi_k2_copies_the_ids_that_it_is_shown(parse: Parse, identifier: str, name: str) -> None:
    text = f"<|tool_call_begin|>{identifier}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert [(call.name, call.id) for call in parse("kimi_k2", text).calls] == [(name, identifier)]
