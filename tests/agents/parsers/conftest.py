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
    "llama4_json": _LLAMA,
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
def parser_of() -> Callable[[str], Parser]:
    """The built-in parser of a name, without any plugin."""
    return lambda name: Runtime(load_entry_points=False).parser(name)
