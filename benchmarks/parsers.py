"""Seconds that each parser of tool calls takes for 1 MB of the worst text that we know for it."""

from __future__ import annotations

import json
import time

from benchmarks.measure import MB, Row, Rows, Target, p50
from hermes_core.agents.parsers.base import ParsedCall
from hermes_core.runtime import Runtime

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}},
    }
]

PIECES = (
    *(
        "a",
        " ",
        "\n",
        '"',
        "{",
        "[",
        "{}",
        "[],",
        '{"a":',
        '{"name":',
        '{"name": "f", ',
        '{"name":"f","parameters":{}};',
    ),
    *("<think>", "</think>", "<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>[{"name":"f"},{"name" '),
    *('<tool_call>{"name":"f"}</tool_call>', '<tool_call>{"name":"f"}</tool_call></think>', "<tool_call>f "),
    *("<tool_call>f<arg_key>s</arg_key><arg_value>", "<arg_key>s</arg_key><arg_value>", "<longcat_tool_call>{"),
    *("<function=f>", "<function=f>\n<parameter=s>", "\n<parameter=s>\nx</parameter>z", "</function>", "</parameter>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS]f{", '[TOOL_CALLS][{"name":"f",', "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"),
    *("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{", "<|python_tag|>{", "<|im_end|> "),
    *("<tool_calls>[{", "<tool_call>f<tool_sep>", "<seed:tool_call>", '<invoke name="f">', '\n<parameter name="s">x'),
    *('<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="s" string="true">', "<｜DSML｜tool_calls>"),
    *(
        '<|open|>call tool="f" index="1"<|sep|>',
        '<|open|>argument key="s" type="string"<|sep|>',
        "<|open|>tools<|sep|>",
    ),
    *("<｜tool_calls_begin｜>", '<steptml:invoke name="f">', '<steptml:parameter name="s">', "<|START_ACTION|>[{"),
    *("<|tools_prefix|>[{", 'functools[{"name":"f",', "[f(", "[f(s='", "[f(s=[", "[f()]", "f(), ", "f(s='x')\n"),
    *("it's ", "\\'", "<|tool_call_start|>[f(s='", "<function_calls>f(s=1)", "<start_function_call>call:f{s:<escape>"),
    *(']<]minimax[>[<invoke name="f">', "]<]minimax[>[<s>", "]<]minimax[>[<s>x]<]minimax[>[</s>"),
)
"""What a text repeats; each also behind the beginning of a real call."""


async def rows(quick: bool) -> Rows:
    """Processor seconds for the slowest text, beside those of reading 1 MB of JSON."""
    runtime = Runtime(load_entry_points=False)
    numbers = json.dumps(list(range(MB // 8)))
    for name in runtime.parsers.names():
        parser = runtime.parser(name)
        call = parser.render([ParsedCall("f", {"s": "x"})])  # type: ignore[attr-defined]
        slowest, text = 0.0, ""
        for piece in PIECES[:: 16 if quick else 1]:
            for beginning in ("", call[:-15]):
                # A tenth of the text is enough to find out which takes long, though not to say how long.
                sample = beginning + piece * (MB // (10 if quick else 1) // len(piece))
                if (took := _seconds(parser.parse, sample, TOOLS)) > slowest:
                    slowest, text = took, beginning + piece * (MB // len(piece))
        ours, reference = [], []
        for _ in range(1 if quick else 3):
            ours.append(_seconds(parser.parse, text, TOOLS))
            reference.append(_seconds(json.loads, numbers))
        note = f"{text[:60]!r}…; the reference is `json.loads` of 1 MB of numbers"
        yield Row(
            "parsers", f"1 MB, {name}, the slowest of the texts", p50(ours), p50(reference), "s", Target(1.0), (note,)
        )


def _seconds(work: object, *arguments: object) -> float:
    began = time.thread_time()
    work(*arguments)  # type: ignore[operator]
    return time.thread_time() - began
