"""Tokenizers of every kind: what a model sampled is read as it was written, and any of its end tokens ends it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.factory import load_chat
from hermes_core.agents.exact.parser_choice import matching_parser
from hermes_core.agents.exact.wires import Sampled
from hermes_core.records.tokens import tokens_of
from hermes_core.runs.session import parsers_with
from hermes_core.runtime import Runtime

CHATML = files("hermes_testing.tiny_model").joinpath("templates", "chatml.jinja").read_text("utf-8")
SPECIAL = ("<|im_start|>", "<|im_end|>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(autouse=True)
def extra(exact_extra: None) -> None:
    """All of these need tokenizers."""


def sentencepiece(scheme: str, **options: Any) -> Any:
    """A tokenizer like those of Llama 2 and Mistral v3: bytes for what it does not know, a space before each text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    known = [*BYTES, "<unk>", "▁", *(chr(code) for code in range(33, 127))]
    vocabulary = {text: number for number, text in enumerate(known)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if scheme == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return in_transformers(made, **options)


def byte_level(*, add_prefix_space: bool, **options: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({text: n for n, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return in_transformers(made, **options)


def in_transformers(made: Any, **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", **options)
    tokenizer.chat_template = CHATML
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "a space by a normalizer (Llama 2)": lambda: sentencepiece("normalizer"),
    "a space before the first text (Mistral v3)": lambda: sentencepiece("first"),
    "a space before each text": lambda: sentencepiece("always"),
    "no space": lambda: sentencepiece("never"),
    "bytes": lambda: byte_level(add_prefix_space=False),
    "bytes with a space before": lambda: byte_level(add_prefix_space=True),
    "spaces cleaned up": lambda: byte_level(add_prefix_space=False, clean_up_tokenization_spaces=True),
}


class Says:
    """A server whose model writes these tokens."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)

    async def sample(self, prompt: Any, **_: Any) -> Sampled:
        tokens = self.answers.pop(0)
        return Sampled(tokens, [-0.5] * len(tokens), "stop")


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_sampled_is_read_as_it_was_written(kind: str, runtime: Runtime) -> None:
    tokenizer = KINDS[kind]()
    chat = Chat(tokenizer)
    chat.check(tools=True)
    parser = matching_parser("auto", parsers_with(runtime, "auto"), chat)
    assert parser.name == "hermes"  # type: ignore[attr-defined]

    def tokens(text: str) -> list[int]:
        """The tokens of this text, and of no space before it."""
        begin = tokenizer.encode("<|im_end|>", add_special_tokens=False)
        found = tokenizer.encode(f"<|im_end|>{text}<|im_end|>", add_special_tokens=False)[len(begin) :]
        return found if chat.decode(found[:-1]) == text else found[1:]

    call = '<tool_call>\n{"name": "f", "arguments": {"x": " do not é\\n日 ."}}\n</tool_call>'
    texts = [f" he says é日 , do not .\n\n{call}", "\n 日\n", "a"]
    session = ExactSession(Says(*map(tokens, texts)), chat, parser, max_length=9999)  # type: ignore[arg-type]
    messages: list[dict[str, Any]] = [{"role": "user", "content": " he \n"}]
    for text in texts:
        reply = await session.chat_completion(messages=messages, tools=[])
        if text.endswith(call):
            assert reply.content == "he says é日 , do not ."
            assert [each.arguments for each in reply.calls] == [{"x": " do not é\n日 ."}]
            messages += [reply.as_message(), {"role": "tool", "tool_call_id": reply.calls[0].id, "content": " {}"}]
        else:
            assert reply.content == text
            messages += [reply.as_message(), {"role": "user", "content": "\n\n é"}]
    (node,) = session.nodes
    assert tokens_of(session.get_state()).refused is None
    assert chat.decode(node.tokens).count("<|im_end|>") == 6


async def test_half_a_character_beside_a_line_break_costs_no_tokens(runtime: Runtime) -> None:
    """A run of bytes that is no text decodes to one sign for each byte, the line break before it too."""
    tokenizer = sentencepiece("first")
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    said = [0x0A, 0xE6, 0x97]
    session = ExactSession(Says([*said, end], [0x97, end]), chat, runtime.parser("hermes"), max_length=9999)  # type: ignore[arg-type]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    reply = await session.chat_completion(messages=messages, tools=[])
    await session.chat_completion(messages=[*messages, reply.as_message(), *messages], tools=[])
    assert tokens_of(session.get_state()).refused is None


@pytest.mark.parametrize(
    ("file", "given", "ends"),
    [
        ("generation_config.json", {"eos_token_id": [0, 5]}, {0, 5}),
        ("generation_config.json", {"eos_token_id": 5}, {5}),
        ("config.json", {"eos_token_id": [5]}, {5}),
        ("generation_config.json", {"eos_token_id": None}, set()),
        ("generation_config.json", {"eos_token_id": ["x", -1, 10**9, True, 5]}, {5}),
        ("generation_config.json", [], set()),
        ("other.json", {"eos_token_id": 5}, set()),
    ],
)
def test_any_of_a_model_s_end_tokens_ends_an_answer(
    file: str, given: Any, ends: set[int], tmp_path: Path, tokenizers: Callable[[str], Any]
) -> None:
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / file).write_text(json.dumps(given))
    chat = load_chat(tokenizer, template=None, template_kwargs=None, tools=True, system=False, compacts=False)
    assert chat.end_tokens - Chat(tokenizers("chatml")).end_tokens == ends - Chat(tokenizers("chatml")).end_tokens
    assert ends <= chat.end_tokens


def test_what_follows_an_answer_begins_with_an_end_token_that_only_the_configuration_names(
    tokenizers: Callable[[str], Any],
) -> None:
    """As in Apertus, whose answers with calls end with the mark behind these."""
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    tokenizer.add_tokens(["<|suffix|>"], special_tokens=True)
    (suffix,) = tokenizer.encode("<|suffix|>", add_special_tokens=False)
    tokenizer.chat_template = CHATML.replace(
        "        {%- endfor -%}\n        {{- '<|im_end|>\\n' -}}",
        "        {%- endfor -%}\n        {{- '<|suffix|>' if message.tool_calls else '<|im_end|>\\n' -}}",
    )
    chat = Chat(tokenizer, end_tokens=[suffix])
    chat.check(tools=True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "{}"},
    ]
    assert chat.continuation(messages, 1, []).tokens[0] == suffix


@pytest.mark.parametrize("begun", ["<think>\n", "<think>", "[THINK]"])
def test_a_tag_that_is_no_token_is_read_whole(begun: str, tokenizers: Callable[[str], Any], runtime: Runtime) -> None:
    """As in QwQ: `<` begins the prompt's `<think>` and the call's `<tool_call>`."""
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    tokenizer.chat_template = CHATML.replace(
        "'<|im_start|>assistant\\n' if add_generation_prompt",
        f"('<|im_start|>assistant\\n' + {begun!r}) if add_generation_prompt",
    )
    chat = Chat(tokenizer)
    assert [each.text[:11] for each in chat.write_calls()] == ["<tool_call>"] * 4
    assert matching_parser("auto", parsers_with(runtime, "auto"), chat).name == "hermes"  # type: ignore[attr-defined]
