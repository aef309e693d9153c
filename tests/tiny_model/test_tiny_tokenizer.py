"""The folders that are made on the spot: lossless tokens, and templates that say what the public ones say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.tiny_model.folder import FORMATS, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_core.errors import UnknownNameError

TOOL = {"type": "function", "function": {"name": "terminal", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": {"command": "ls"}}}

RENDERED = {
    "chatml": "<tool_call>\n{call}\n</tool_call><|im_end|>\n"
    "<|im_start|>tool\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<think>\nlook\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": "{call}<|eot_id|>"
    '<|start_header_id|>ipython<|end_header_id|>\n\n{{"output": "a.txt"}}<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(each_tiny: Any, text: str) -> None:
    tokens = each_tiny.tokenizer.encode(text, add_special_tokens=False)
    assert each_tiny.tokenizer.decode(tokens) == text


def test_a_call_and_its_result_are_rendered_as_the_model_knows_them(each_tiny: Any) -> None:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    turn = [
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]
    before = rendered(each_tiny.tokenizer, asked, tools=[TOOL])
    after = rendered(each_tiny.tokenizer, [*asked, *turn], tools=[TOOL])
    key = "parameters" if each_tiny.form == "llama3" else "arguments"
    call = json.dumps({"name": "terminal", key: {"command": "ls"}})
    assert after == before + RENDERED[each_tiny.form].format(call=call)
    assert "be brief" in before
    assert '"name": "terminal"' in before
    assert '"name": "terminal"' not in rendered(each_tiny.tokenizer, asked)


@pytest.mark.parametrize("each_tiny", ["qwen3"], indirect=True)
def test_qwen3_forgets_what_was_thought_before_the_last_question(each_tiny: Any) -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
    ]
    assert "secret" in rendered(each_tiny.tokenizer, talk[:2])
    assert rendered(each_tiny.tokenizer, talk).count("secret") == 0
    assert "first<|im_end|>" in rendered(each_tiny.tokenizer, talk)
    assert rendered(each_tiny.tokenizer, talk, enable_thinking=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("each_tiny", ["llama3"], indirect=True)
def test_llama_takes_one_call_an_answer(each_tiny: Any) -> None:
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    with pytest.raises(Exception, match="single tool-calls"):
        rendered(each_tiny.tokenizer, talk)


def test_the_folder_is_read_without_a_hub(each_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = AutoTokenizer.from_pretrained(each_tiny.folder)
    assert again.chat_template == each_tiny.tokenizer.chat_template
    assert again.eos_token == FORMATS[each_tiny.form].end_of_turn
    assert again.encode("ls -la\n<|im_end|>") == each_tiny.tokenizer.encode("ls -la\n<|im_end|>")


def test_a_wrong_format_names_the_nearest(tmp_path: Path, torch_extra: None) -> None:
    with pytest.raises(UnknownNameError, match="chatml"):
        make_tokenizer(tmp_path, "chatlm")
