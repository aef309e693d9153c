"""What models really write, format by format: well-formed texts with the calls that they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.agents.parsers.base import Parser
from hermes_core.runtime import Runtime

Case = tuple[str, str, list[tuple[str, dict[str, Any]]]]
"""A text, its content, and its calls."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "terminal",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "timeout": {"type": "integer"},
                    "background": {"type": "boolean"},
                    "ratio": {"type": "number"},
                    "env": {"type": "object"},
                    "paths": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "list_tools", "parameters": {"type": "object", "properties": {}}}},
]

LS = ("terminal", {"command": "ls -la"})
LIST = ("list_tools", {})
TYPED = (
    "terminal",
    {"command": "7", "timeout": 30, "background": True, "ratio": 0.5, "env": {"A": {"B": [1]}}, "paths": ["a", "ü"]},
)
TYPED_JSON = (
    '{"command": "7", "timeout": 30, "background": true, "ratio": 0.5, "env": {"A": {"B": [1]}}, "paths": ["a", "ü"]}'
)


def _json(tag: str) -> list[Case]:
    def call(body: str) -> str:
        return f"<{tag}>\n{body}\n</{tag}>"

    ls = call('{"name": "terminal", "arguments": {"command": "ls -la"}}')
    return [
        (ls, "", [LS]),
        (f"I'll look.\n{ls}", "I'll look.", [LS]),
        (f"{ls}\n" + call('{"name": "list_tools", "arguments": {}}'), "", [LS, LIST]),
        (call(f'{{"name": "terminal", "arguments": {TYPED_JSON}}}'), "", [TYPED]),
        (call('{\n  "arguments": {\n    "command": "ls -la"\n  },\n  "name": "terminal"\n}'), "", [LS]),
    ]


def _deepseek(call: Any) -> list[Case]:
    def section(*bodies: str) -> str:
        calls = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
        return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"

    ls = call("terminal", '{"command": "ls -la"}')
    return [
        (section(ls), "", [LS]),
        (f"I'll look.{section(ls, call('list_tools', '{}'))}", "I'll look.", [LS, LIST]),
        (section(call("terminal", TYPED_JSON)), "", [TYPED]),
        (section(call("terminal", '{\n  "command": "ls -la"\n}')), "", [LS]),
    ]


def _glm(new_line: str) -> list[Case]:
    def call(name: str, **values: str) -> str:
        pairs = (f"<arg_key>{k}</arg_key>{new_line}<arg_value>{v}</arg_value>{new_line}" for k, v in values.items())
        return f"<tool_call>{name}{new_line}{''.join(pairs)}</tool_call>"

    typed = {
        "command": "7",
        "timeout": "30",
        "background": "true",
        "ratio": "0.5",
        "env": '{"A": {"B": [1]}}',
        "paths": '["a", "ü"]',
    }
    return [
        (call("terminal", command="ls -la"), "", [LS]),
        (f"I'll look.\n{call('terminal', command='ls -la')}\n{call('list_tools')}", "I'll look.", [LS, LIST]),
        (call("terminal", **typed), "", [TYPED]),
        (
            call("write_file", path="a.txt", content="one\n  two"),
            "",
            [("write_file", {"path": "a.txt", "content": "one\n  two"})],
        ),
    ]


def _tagged(argument: str, call: str, section: str = "%s", joint: str = "\n", *, types: bool = False) -> list[Case]:
    """Cases of a format that tags arguments. With `types`, an argument says the kind of its value."""

    def written(name: str, *values: tuple[str, str, str]) -> str:
        made = (argument % ((key, kind, value) if types else (key, value)) for key, kind, value in values)
        return call % (name, "".join(made))

    kinds = {"true": "true", "false": "false"} if types and "string=" in argument else {}
    text = kinds.get("true", "string")

    def kind(name: str) -> str:
        return kinds.get("false", name)

    ls = written("terminal", ("command", text, "ls -la"))
    typed = written(
        "terminal",
        ("command", text, "7"),
        ("timeout", kind("number"), "30"),
        ("background", kind("boolean"), "true"),
        ("ratio", kind("number"), "0.5"),
        ("env", kind("object"), '{"A": {"B": [1]}}'),
        ("paths", kind("array"), '["a", "ü"]'),
    )
    lines = written("write_file", ("path", text, "a.txt"), ("content", text, "one\n\n  two\n"))
    return [
        (section % ls, "", [LS]),
        (f"I'll look.\n{section % joint.join((ls, written('list_tools')))}", "I'll look.", [LS, LIST]),
        (section % typed, "", [TYPED]),
        (section % lines, "", [("write_file", {"path": "a.txt", "content": "one\n\n  two\n"})]),
    ]


def _listed(before: str, after: str, form: str = '{"name": "%s", "arguments": %s}') -> list[Case]:
    """Cases of a format that writes a list of objects."""
    ls, tools = form % ("terminal", '{"command": "ls -la"}'), form % ("list_tools", "{}")
    return [
        (f"{before}[{ls}]{after}", "", [LS]),
        (f"I'll look.\n{before}[\n    {ls},\n    {tools}\n]{after}", "I'll look.", [LS, LIST]),
        (f"{before}[{form % ('terminal', TYPED_JSON)}]{after}", "", [TYPED]),
    ]


def _objects(before: str, after: str, key: str = "arguments") -> list[Case]:
    """Cases of a format that writes one object after the other."""

    def call(name: str, arguments: str) -> str:
        return f'{before.replace("%s", name)}{{"name": "{name}", "{key}": {arguments}}}{after}'

    ls = call("terminal", '{"command": "ls -la"}')
    return [
        (ls, "", [LS]),
        (f"I'll look.\n{ls}\n{call('list_tools', '{}')}", "I'll look.", [LS, LIST]),
        (call("terminal", TYPED_JSON), "", [TYPED]),
    ]


def _solar(*calls: tuple[str, str]) -> str:
    written = (
        f"<|tool_call:begin|>{number}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls|>{''.join(written)}<|calls|>"


def _python(before: str, after: str, joint: str = ", ") -> list[Case]:
    """Cases of a format that writes calls as Python does."""
    typed = "terminal(command='7', timeout=30, background=True, ratio=0.5, env={'A': {'B': [1]}}, paths=['a', \"ü\"])"
    text = "it's \"one\"\n\ttwo \\ 'three', é"
    return [
        (f'{before}terminal(command="ls -la"){after}', "", [LS]),
        (
            f"I'll look.\n{before}terminal(command='ls -la'){joint}list_tools(){after}",
            "I'll look.",
            [LS, LIST],
        ),
        (f"{before}{typed}{after}", "", [TYPED]),
        (
            f"{before}write_file(path='a.txt', content={text!r}){after}",
            "",
            [("write_file", {"path": "a.txt", "content": text})],
        ),
    ]


_M3 = "]<]minimax[>["
_M3_LS = f'{_M3}<invoke name="terminal">{_M3}<command>ls -la{_M3}</command>{_M3}</invoke>\n'
_M3_TYPED = (
    f'{_M3}<invoke name="terminal">{_M3}<command>7{_M3}</command>{_M3}<timeout>30{_M3}</timeout>'
    f"{_M3}<background>true{_M3}</background>{_M3}<ratio>0.5{_M3}</ratio>"
    f'{_M3}<env>{{"A": {{"B": [1]}}}}{_M3}</env>'
    f"{_M3}<paths>{_M3}<item>a{_M3}</item>{_M3}<item>ü{_M3}</item>{_M3}</paths>{_M3}</invoke>\n"
)

_QWEN_LS = "<tool_call>\n<function=terminal>\n<parameter=command>\nls -la\n</parameter>\n</function>\n</tool_call>"
_LLAMA_LS = '{"name": "terminal", "parameters": {"command": "ls -la"}}'
_KIMI_LS = '<|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>{"command": "ls -la"}<|tool_call_end|>'

_GEMMA_LS = '<|tool_call>call:terminal{command:<|"|>ls -la<|"|>}<tool_call|>'
_HARMONY_LS = ' to=functions.terminal<|channel|>commentary json<|message|>{"command": "ls -la"}<|call|>'

_LLAMA: list[Case] = [
    (_LLAMA_LS, "", [LS]),
    (f"<|python_tag|>{_LLAMA_LS}", "", [LS]),
    (f'{_LLAMA_LS}; {{"name": "list_tools", "parameters": {{}}}}', "", [LS, LIST]),
    (f'{{"name": "terminal", "arguments": {TYPED_JSON}}}', "", [TYPED]),
]

WELL_FORMED: dict[str, list[Case]] = {
    "hermes": _json("tool_call"),
    "qwen": _json("tool_call"),
    "longcat": _json("longcat_tool_call"),
    "llama3_json": _LLAMA,
    "llama4_json": [
        *_LLAMA,
        (f"<|python_start|><|python_end|>{_LLAMA_LS}", "", [LS]),
        (f"<|python_start|>{_LLAMA_LS}<|python_end|>", "", [LS]),
        (
            f'<|python_start|>I\'ll look.<|python_end|>{_LLAMA_LS}{{"name": "list_tools", "parameters": {{}}}}<|eom|>',
            "I'll look.",
            [LS, LIST],
        ),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "terminal", "arguments": {"command": "ls -la"}}]', "", [LS]),
        (
            'I look.[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls -la"}}, '
            '{"name": "list_tools", "arguments": {}}]',
            "I look.",
            [LS, LIST],
        ),
        (f'[TOOL_CALLS] [{{"name": "terminal", "arguments": {TYPED_JSON}}}]', "", [TYPED]),
        ('[TOOL_CALLS]terminal{"command": "ls -la"}', "", [LS]),
        ('I look.[TOOL_CALLS]terminal{"command": "ls -la"}[TOOL_CALLS]list_tools{}', "I look.", [LS, LIST]),
        (f"[TOOL_CALLS]terminal{TYPED_JSON}", "", [TYPED]),
    ],
    "deepseek_v3": _deepseek(lambda name, body: f"function<｜tool▁sep｜>{name}\n```json\n{body}\n```"),
    "deepseek_v3_1": _deepseek(lambda name, body: f"{name}<｜tool▁sep｜>{body}"),
    "kimi_k2": [
        (f"<|tool_calls_section_begin|>{_KIMI_LS}<|tool_calls_section_end|>", "", [LS]),
        (
            f"I'll look.<|tool_calls_section_begin|>{_KIMI_LS}<|tool_call_begin|>functions.list_tools:1"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            "I'll look.",
            [LS, LIST],
        ),
        (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>{TYPED_JSON}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "",
            [TYPED],
        ),
    ],
    "gemma4": [
        (_GEMMA_LS, "", [LS]),
        (f"I'll look.{_GEMMA_LS}<|tool_call>call:list_tools{{}}<tool_call|>", "I'll look.", [LS, LIST]),
        (
            '<|tool_call>call:terminal{background:true,command:<|"|>7<|"|>,env:{A:{B:[1]}},'
            'paths:[<|"|>a<|"|>,<|"|>ü<|"|>],ratio:0.5,timeout:30}<tool_call|>',
            "",
            [TYPED],
        ),
    ],
    "gpt_oss": [
        (_HARMONY_LS, "", [LS]),
        (
            "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.terminal <|constrain|>json<|message|>{"command": "ls -la"}<|call|>'
            "<|start|>assistant to=functions.list_tools<|channel|>commentary json<|message|>{}",
            "I'll look.",
            [LS, LIST],
        ),
        (f"<|start|>assistant to=functions.terminal<|channel|>commentary<|message|>{TYPED_JSON}", "", [TYPED]),
    ],
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "qwen3_coder": [
        (_QWEN_LS, "", [LS]),
        (
            f"I'll look.\n{_QWEN_LS}\n<tool_call>\n<function=list_tools>\n</function>\n</tool_call>",
            "I'll look.",
            [LS, LIST],
        ),
        (
            "<tool_call>\n<function=terminal>\n<parameter=command>\n7\n</parameter>\n"
            "<parameter=timeout>\n30\n</parameter>\n"
            "<parameter=background>\nTrue\n</parameter>\n<parameter=ratio>\n0.5\n</parameter>\n<parameter=env>\n"
            '{"A": {"B": [1]}}\n</parameter>\n<parameter=paths>\n["a", "ü"]\n</parameter>\n</function>\n</tool_call>',
            "",
            [TYPED],
        ),
        (
            "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n<parameter=content>\n"
            "one\n\n  two\n\n</parameter>\n</function>\n</tool_call>",
            "",
            [("write_file", {"path": "a.txt", "content": "one\n\n  two\n"})],
        ),
        (
            "<function=terminal>\n<parameter=command>\nls -la\n</parameter>\n</function>",
            "",
            [LS],
        ),
    ],
    "ernie45": _json("tool_call"),
    "granite": [*_listed("<|tool_call|>", ""), *_listed("<tool_call> ", "")],
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": [*_listed("functools", ""), *_listed("<|tool_call|>", "<|/tool_call|>")],
    "cohere": _listed(
        "<|START_ACTION|>", "<|END_ACTION|>", '{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}'
    ),
    "apertus": _listed("<|tools_prefix|>", "<|tools_suffix|>", '{"%s": %s}'),
    "xlam": _listed("", ""),
    "nemotron_nano_v2": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "gigachat3": [
        *_objects("function call<|role_sep|>\n", "<|message_sep|>"),
        *_objects("<|function_call|>", ""),
    ],
    "granite_20b_fc": _objects("<function_call> ", ""),
    "interns1": _objects("<|action_start|> <|plugin|>\n", "<|action_end|>", "parameters"),
    "inkling": _objects("<|message_model|>%s<|content_invoke_tool_json|>", "<|end_message|>", "args"),
    "solar_open": [
        (_solar(("terminal", '{"command": "ls -la"}')), "", [LS]),
        ("I'll look." + _solar(("terminal", '{"command": "ls -la"}'), ("list_tools", "{}")), "I'll look.", [LS, LIST]),
        (_solar(("terminal", TYPED_JSON)), "", [TYPED]),
    ],
    "dots": _tagged(
        '<parameter name="%s">%s</parameter>\n',
        '<invoke name="%s">\n%s</invoke>',
        "<dots_function_call>\n%s\n</dots_function_call>",
    ),
    "minicpm5": [
        *_tagged('<param name="%s">%s</param>', '<function name="%s">%s</function>'),
        *_tagged('<param name="%s"><![CDATA[%s]]></param>', '<function name="%s">%s</function>'),
    ],
    "gigachat35": _tagged(
        '<｜GCML｜parameter name="%s" string="%s">%s</｜GCML｜parameter>\n',
        '<｜GCML｜invoke name="%s">\n%s</｜GCML｜invoke>',
        "<｜GCML｜tool_calls>\n%s\n</｜GCML｜tool_calls>",
        types=True,
    ),
    "hunyuan": [
        *_tagged(
            "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
            "<tool_call>%s<tool_sep>\n%s</tool_call>",
            "<tool_calls>\n%s\n</tool_calls>",
        ),
        *_tagged(
            "<arg_key:opensource>%s</arg_key:opensource>\n<arg_value:opensource>%s</arg_value:opensource>\n",
            "<tool_call:opensource>%s<tool_sep:opensource>\n%s</tool_call:opensource>",
            "<tool_calls:opensource>\n%s\n</tool_calls:opensource>",
        ),
    ],
    "mimo": _tagged("<parameter=%s>%s</parameter>\n", "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>")[:3],
    "seed_oss": _tagged(
        "<parameter=%s>%s</parameter>\n", "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>"
    ),
    "minimax_m2": _tagged(
        '<parameter name="%s">%s</parameter>\n',
        '<invoke name="%s">\n%s</invoke>',
        "<minimax:tool_call>\n%s\n</minimax:tool_call>",
    ),
    "minimax_m3": [
        (f"{_M3}<tool_call>\n{_M3_LS}{_M3}</tool_call>", "", [LS]),
        (
            f'I\'ll look.\n{_M3}<tool_call>\n{_M3_LS}{_M3}<invoke name="list_tools">{_M3}</invoke>\n{_M3}</tool_call>',
            "I'll look.",
            [LS, LIST],
        ),
        (f"{_M3}<tool_call>\n{_M3_TYPED}{_M3}</tool_call>", "", [TYPED]),
    ],
    "deepseek_v3_2": _tagged(
        '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n',
        '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>',
        "<｜DSML｜function_calls>\n%s\n</｜DSML｜function_calls>",
        types=True,
    ),
    "deepseek_v4": _tagged(
        '<｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter>\n',
        '<｜DSML｜invoke name="%s">\n%s</｜DSML｜invoke>',
        "<｜DSML｜tool_calls>\n%s\n</｜DSML｜tool_calls>",
        types=True,
    ),
    "kimi_k3": _tagged(
        '<|open|>argument key="%s" type="%s"<|sep|>%s<|close|>argument<|sep|>',
        '<|open|>call tool="%s" index="1"<|sep|>%s<|close|>call<|sep|>',
        "<|open|>tools<|sep|>%s<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        "",
        types=True,
    ),
    "step3": _tagged(
        '<steptml:parameter name="%s">%s</steptml:parameter>',
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="%s">%s</steptml:invoke><｜tool_call_end｜>',
        "<｜tool_calls_begin｜>%s<｜tool_calls_end｜>",
        "",
    ),
    "pythonic": _python("[", "]"),
    "llama4_pythonic": [*_python("[", "]"), *_python("<|python_start|>[", "]<|python_end|>")],
    "lfm2": _python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": _python("<function_calls>", "</function_calls>", "\n"),
    "functiongemma": [
        ("<start_function_call>call:terminal{command:<escape>ls -la<escape>}<end_function_call>", "", [LS]),
        (
            "I'll look.<start_function_call>call:terminal{command:<escape>ls -la<escape>}<end_function_call>"
            "<start_function_call>call:list_tools{}<end_function_call><start_function_response>",
            "I'll look.",
            [LS, LIST],
        ),
        (
            "<start_function_call>call:terminal{background:true,command:<escape>7<escape>,env:{A:{B:[1]}},"
            "paths:[<escape>a<escape>,<escape>ü<escape>],ratio:0.5,timeout:30}<end_function_call>",
            "",
            [TYPED],
        ),
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `well_formed` run for each text of each format: `(format, text, content, calls)`."""
    if "well_formed" in metafunc.fixturenames:
        cases = [(name, *case) for name, table in WELL_FORMED.items() for case in table]
        numbered = [f"{name}-{i}" for name, table in WELL_FORMED.items() for i, _ in enumerate(table)]
        metafunc.parametrize("well_formed", cases, ids=numbered)
    if "format_name" in metafunc.fixturenames:
        metafunc.parametrize("format_name", [*WELL_FORMED, "auto"])


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    """The tools that the texts call."""
    return TOOLS


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    """The well-formed texts of each format."""
    return {name: [text for text, _, _ in cases] for name, cases in WELL_FORMED.items()}


@pytest.fixture(scope="session")
def parser_of() -> Callable[[str], Parser]:
    """The built-in parser of a name, without any plugin."""
    return Runtime(load_entry_points=False).parser
