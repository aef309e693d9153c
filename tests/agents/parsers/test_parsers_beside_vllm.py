"""The same well-formed texts through vLLM's own parsers: the same calls, but where vLLM is known to do otherwise."""

from __future__ import annotations

import importlib
import importlib.util
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
    "hermes": ("hermes", "Hermes2ProToolParser"),
    "qwen": ("hermes", "Hermes2ProToolParser"),
    "longcat": ("longcat", "LongcatFlashToolParser"),
    "llama3_json": ("llama", "Llama3JsonToolParser"),
    "llama4_json": ("llama", "Llama3JsonToolParser"),
    "mistral": ("mistral", "MistralToolParser"),
    "deepseek_v3": ("deepseekv3", "DeepSeekV3ToolParser"),
    "deepseek_v3_1": ("deepseekv31", "DeepSeekV31ToolParser"),
    "kimi_k2": ("kimi_k2", "KimiK2ToolParser"),
    "glm45": ("glm4_moe", "Glm4MoeModelToolParser"),
    "glm47": ("glm47_moe", "Glm47MoeModelToolParser"),
    "qwen3_coder": ("qwen3coder", "Qwen3CoderToolParser"),
}

DIFFERS = {
    ("deepseek_v3", 3): "vLLM's pattern does not cross lines, and loses a call whose JSON has several",
    ("deepseek_v3_1", 3): "vLLM's pattern does not cross lines, and loses a call whose JSON has several",
}
"""Where vLLM 0.19.1 loses a call that is there, by format and number of the text."""

STAND_INS = (
    *("envs", "logger", "sampling_params", "tokenizers", "utils", "utils.mistral", "utils.import_utils"),
    *("utils.collection_utils", "entrypoints", "entrypoints.chat_utils", "entrypoints.openai"),
    *("entrypoints.openai.engine", "entrypoints.openai.engine.protocol", "entrypoints.openai.chat_completion"),
    *("entrypoints.openai.chat_completion.protocol", "entrypoints.openai.responses"),
    "entrypoints.openai.responses.protocol",
)
"""What vLLM's parsers import and don't need to parse: loggers, engines, the types of requests."""


class Record(SimpleNamespace):
    """Stands for whatever class a parser fills in: it keeps what it is given by name."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        super().__init__(**fields)


class StandIn(ModuleType):
    """A module in which every name is a `Record`."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return lambda _: Record(
                **dict.fromkeys(("debug", "info", "warning", "exception", "error"), lambda *_: None)
            )
        if name == "is_mistral_tokenizer":
            return lambda tokenizer: tokenizer.version > 0
        return 5.0 if name.isupper() else Record


class Tokenizer:
    """Knows every token, which is all that the parsers ask when they are made."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def get_vocab(self) -> Any:
        return SimpleNamespace(get=lambda token: 1)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1]


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """The class of vLLM's parser for a format, from the source that HERMES_VLLM_SOURCE names."""
    require = request.getfixturevalue("require")
    folder = Path(os.environ.get("HERMES_VLLM_SOURCE", "/nowhere"))
    there = (folder / "vllm" / "tool_parsers").is_dir() and all(map(importlib.util.find_spec, ("regex", "ijson")))
    require(
        "vllm",
        None
        if there
        else "pip install regex ijson, and set HERMES_VLLM_SOURCE to the folder of an unpacked vllm 0.19.1 sdist",
    )
    before = dict(sys.modules)
    names = [
        "transformers",
        "partial_json_parser",
        "partial_json_parser.core",
        "partial_json_parser.core.options",
    ]
    for name in (*names, *(f"vllm.{name}" for name in STAND_INS)):
        sys.modules[name] = StandIn(name)
    for name, place in (("vllm", folder / "vllm"), ("vllm.tool_parsers", folder / "vllm" / "tool_parsers")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(place)]
    yield lambda name: getattr(
        importlib.import_module(f"vllm.tool_parsers.{PARSERS[name][0]}_tool_parser"), PARSERS[name][1]
    )
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def test_vllm_finds_the_same_calls(
    vllm: Callable[[str], Any],
    parser_of: Callable[[str], Parser],
    tools: list[dict[str, Any]],
    well_formed: Any,
    request: pytest.FixtureRequest,
) -> None:
    name, text, _, _ = well_formed
    if name not in PARSERS:
        pytest.skip(f"not compared with vLLM 0.19.1: {name}")
    number = int(request.node.callspec.id.rpartition("-")[2])
    version = 11 if name == "mistral" and not text.partition("[TOOL_CALLS]")[2].lstrip().startswith("[") else 0
    schemas = json.loads(json.dumps(tools), object_hook=lambda fields: fields)
    offered = [SimpleNamespace(type="function", function=SimpleNamespace(**tool["function"])) for tool in schemas]
    parser = vllm(name)(Tokenizer(version), offered)
    theirs = parser.extract_tool_calls(text, SimpleNamespace(tools=offered, tool_choice="auto"))
    found = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
    ours = parser_of(name).parse(text, tools)
    same = found == [(call.name, call.arguments) for call in ours.calls]
    if (name, number) in DIFFERS:
        assert not same, f"vLLM agrees now: no longer true is that {DIFFERS[name, number]}"
        return
    assert same, (found, ours.calls)
    assert (theirs.content or "").strip() == ours.content
