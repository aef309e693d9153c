"""The same well-formed texts through vLLM's own parsers: the same calls, except where vLLM is known to differ."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.parsers.base import Parser

VERSION = "0.33.0"

NAMES = {
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "hunyuan": "hy_v3",
    "qwen": "hermes",
}
"""vLLM's names of formats, where they are others."""

ELSEWHERE = {
    "cohere": "vLLM leaves it to a package of Cohere's",
    "gpt_oss": "vLLM's needs the vocabulary of gpt-oss, which is downloaded",
}
"""Formats that vLLM's tool parsers do not read."""

_PROSE = "vLLM finds no call behind text"
_NO_TEXT = "vLLM loses the text before the calls"
_FUNCTOOLS = "vLLM finds no list without `functools`"
DIFFERS: dict[tuple[str, int], str] = {
    ("gemma4", 2): "vLLM makes a text of a number that the schema gives no type",
    ("phi4_mini_json", 1): _NO_TEXT,
    ("phi4_mini_json", 2): "vLLM's pattern ends at the first `]`, and loses all calls if one has a list in it",
    **{("phi4_mini_json", number): _FUNCTOOLS for number in (3, 4, 5)},
    ("xlam", 1): "vLLM finds no list behind text, unless it is fenced or tagged",
    ("seed_oss", 3): "vLLM strips a line break at each end of a value, as if Qwen's template had added it",
    ("step3", 2): "vLLM leaves objects and lists texts",
    ("step3", 3): "vLLM strips values, and so loses line breaks at the end of a file",
    ("pythonic", 1): _PROSE,
    ("llama4_pythonic", 1): _PROSE,
    ("llama4_pythonic", 5): _PROSE,
    ("olmo3", 1): _NO_TEXT,
    ("functiongemma", 2): "vLLM loses all arguments but texts, and makes a number of a text of digits",
}
"""Where vLLM loses or changes a call or the text beside it, by format and number of the text."""


@pytest.fixture(scope="module")
def vllm(
    request: pytest.FixtureRequest, tools: list[dict[str, Any]], texts: dict[str, list[str]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """What vLLM makes of each text, by format and number."""
    python = os.environ.get("HERMES_VLLM", "")
    request.getfixturevalue("require")(
        "vllm", None if python else f"HERMES_VLLM names no Python with vllm {VERSION}, see docs/reference/parsers.md"
    )
    numbered = [(name, number, text) for name, of in texts.items() for number, text in enumerate(of)]
    asked = {"tools": tools, "texts": [(NAMES.get(name, name), text) for name, _, text in numbered]}
    done = subprocess.run(
        [python, Path(__file__).with_name("vllm_calls.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([(name, number) for name, number, _ in numbered], json.loads(done.stdout), strict=True))


@pytest.mark.full
def test_vllm_finds_the_same_calls(
    vllm: dict[tuple[str, int], dict[str, Any]],
    parser_of: Callable[[str], Parser],
    tools: list[dict[str, Any]],
    well_formed: Any,
    request: pytest.FixtureRequest,
) -> None:
    name, text, _, _ = well_formed
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    number = int(request.node.callspec.id.rpartition("-")[2])
    theirs = vllm[name, number]
    ours = parser_of(name).parse(text, tools)
    same = (
        theirs.get("calls") == [[call.name, call.arguments] for call in ours.calls]
        and (theirs["content"] or "").strip() == ours.content
    )
    if (name, number) in DIFFERS:
        assert not same, f"vLLM agrees now: no longer true is that {DIFFERS[name, number]}"
    else:
        assert same, (theirs, ours)
