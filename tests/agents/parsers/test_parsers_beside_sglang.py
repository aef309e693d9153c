"""The same well-formed texts through SGLang's own parsers: the same calls, except where SGLang is known to differ."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hermes_core.agents.parsers.base import Parser

PARSERS = {
    "deepseek_v3": ("deepseekv3_detector", "DeepSeekV3Detector"),
    "deepseek_v3_1": ("deepseekv31_detector", "DeepSeekV31Detector"),
    "deepseek_v3_2": ("deepseekv32_detector", "DeepSeekV32Detector"),
    "hermes": ("hermes_detector", "HermesDetector"),
    "kimi_k2": ("kimik2_detector", "KimiK2Detector"),
    "kimi_k3": ("kimik3_detector", "KimiK3Detector"),
    "lfm2": ("lfm2_detector", "Lfm2Detector"),
    "llama3_json": ("llama32_detector", "Llama32Detector"),
    "mimo": ("mimo_detector", "MiMoDetector"),
    "minimax_m2": ("minimax_m2", "MinimaxM2Detector"),
    "minimax_m3": ("minimax_m3", "MinimaxM3Detector"),
    "pythonic": ("pythonic_detector", "PythonicDetector"),
    "qwen": ("qwen25_detector", "Qwen25Detector"),
    "qwen3_coder": ("qwen3_coder_detector", "Qwen3CoderDetector"),
    "step3": ("step3_detector", "Step3Detector"),
    "glm45": ("glm4_moe_detector", "Glm4MoeDetector"),
    "glm47": ("glm47_moe_detector", "Glm47MoeDetector"),
    "gemma4": ("gemma4_detector", "Gemma4Detector"),
    "hunyuan": ("hunyuan_detector", "HunyuanDetector"),
    "cohere": ("cohere_command4_detector", "CohereCommand4Detector"),
}

DIFFERS: dict[tuple[str, int], str] = {
    ("deepseek_v3_2", 3): "SGLang strips texts, and so loses line breaks at the end of a file",
    ("minimax_m2", 3): "SGLang strips texts, and so loses line breaks at the end of a file",
    ("step3", 3): "SGLang strips texts, and so loses line breaks at the end of a file",
    ("step3", 1): "SGLang loses a call without arguments",
    ("qwen3_coder", 4): "SGLang loses a call without <tool_call> around it",
    ("minimax_m3", 2): "SGLang leaves an object that is written as JSON a text",
    **{("hunyuan", number): "SGLang reads `:opensource` only if the tokenizer has it" for number in (4, 5, 6, 7)},
}
"""Where SGLang 0.5.23 loses or changes a call, by format and number of the text."""

STAND_INS = (
    *("sglang.srt.entrypoints", "sglang.srt.entrypoints.openai", "sglang.srt.entrypoints.openai.protocol"),
    *("sglang.srt.environ", "sglang.srt.parser", "sglang.srt.parser.response_template", "orjson", "msgspec"),
    *("xgrammar", "xgrammar.structural_tag", "partial_json_parser", "partial_json_parser.core"),
    *("partial_json_parser.core.exceptions", "partial_json_parser.core.options"),
)
"""What SGLang's parsers import and don't need to parse whole texts."""


class Anything:
    """Stands for whatever is imported: it can be called, and has every attribute."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def get(self, *_: Any) -> bool:
        return False

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self.__dict__)


class StandIn(ModuleType):
    """A module in which every name is `Anything`."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "orjson":
            return getattr(json, {"JSONDecodeError": "JSONDecodeError"}.get(name, name))
        if name in ("envs", "Allow"):
            return Anything()
        return type(name, (Exception if name.startswith("Malformed") else Anything,), {})


@pytest.fixture(scope="module")
def sglang(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """The class of SGLang's parser for a format, from the source that HERMES_SGLANG_SOURCE names."""
    require = request.getfixturevalue("require")
    folder = Path(os.environ.get("HERMES_SGLANG_SOURCE", "/nowhere")) / "sglang"
    there = (folder / "srt" / "function_call").is_dir()
    require("sglang", None if there else "set HERMES_SGLANG_SOURCE to the folder of an unpacked wheel of sglang 0.5.23")
    before = dict(sys.modules)
    for name in STAND_INS:
        sys.modules[name] = StandIn(name)
    for name in ("sglang", "sglang.srt", "sglang.srt.function_call"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder.parent.joinpath(*name.split(".")))]
    yield lambda name: getattr(
        importlib.import_module(f"sglang.srt.function_call.{PARSERS[name][0]}"), PARSERS[name][1]
    )
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def test_sglang_finds_the_same_calls(
    sglang: Callable[[str], Any],
    parser_of: Callable[[str], Parser],
    tools: list[dict[str, Any]],
    well_formed: Any,
    request: pytest.FixtureRequest,
) -> None:
    name, text, _, _ = well_formed
    if name not in PARSERS:
        pytest.skip(f"not compared with SGLang: {name}")
    number = int(request.node.callspec.id.rpartition("-")[2])
    offered = [SimpleNamespace(type="function", function=SimpleNamespace(**tool["function"])) for tool in tools]
    theirs = sglang(name)().detect_and_parse(text, offered)
    found = [(call.name, json.loads(call.parameters)) for call in theirs.calls]
    ours = [(call.name, call.arguments) for call in parser_of(name).parse(text, tools).calls]
    if (name, number) in DIFFERS:
        assert found != ours, f"SGLang agrees now: no longer true is that {DIFFERS[name, number]}"
        return
    assert found == ours
