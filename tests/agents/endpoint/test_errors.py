"""Every provider has words of its own for a conversation that no longer fits. None of them is a failure."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_core.agents.endpoint.errors import (
    BadCompletion,
    ContextLengthExceeded,
    RequestTooLarge,
    as_model_error,
    is_transient,
)
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.replies import read_reply


class Refusal(Exception):
    """An answer of an endpoint with an error status, as clients raise it."""

    def __init__(self, status: int, said: str, code: str | None = None) -> None:
        super().__init__(said)
        self.status_code, self.body, self.code = status, {"message": said}, code


SAID = {
    "OpenAI": [
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
    ],
    "Anthropic": [
        "prompt is too long: 210000 tokens > 200000 maximum",
        "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length",
    ],
    "Gemini": ["The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."],
    "Vertex": ["Unable to submit request because the input token count is 40000 but model only supports up to 32768."],
    "Mistral": [
        "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length"
    ],
    "Cohere": ["too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000."],
    "Groq": ["Please reduce the length of the messages or completion."],
    "Cerebras": ["Please reduce the length of the messages or completion. Current length is 9000 while limit is 8192"],
    "Fireworks": ["The prompt is too long: 70000, model maximum context length: 65536"],
    "xAI": ["This model's maximum prompt length is 131072 but the request contains 537812 tokens."],
    "OpenRouter": ["This endpoint's maximum context length is 32768 tokens. However, you requested about 40000 tokens"],
    "SambaNova": [
        "Requested generation length 1 is not possible! The provided prompt is 5000 tokens long, so generating 1 "
        "tokens requires a sequence length of 5001, but the maximum supported sequence length is just 4096!"
    ],
    "Bedrock": [
        "Input is too long for requested model.",
        "Input Tokens Exceeded: Number of input tokens exceeds maximum length. Please update the input to try again.",
    ],
    "DashScope": ["Range of input length should be [1, 30720]"],
    "Moonshot": ["Invalid request: Your request exceeded model token limit: 8192 (requested: 9000)"],
    "Zhipu": ["Prompt exceeds max length", "Prompt 超长"],
    "Baidu": ["prompt tokens too long", "输入内容过长"],
    "Ark": ["Total tokens of image and text exceed max message tokens"],
    "SiliconFlow": ["length of prompt_tokens (40000) must be less than max_seq_len (32768)."],
    "GitHub Models": ["Request body too large for gpt-4o model. Max size: 8000 tokens."],
    "Copilot": ["prompt token count of 70000 exceeds the limit of 64000"],
    "watsonx": ["the number of input tokens 5000 cannot exceed the total tokens limit 4096 for this model"],
    "Yandex": ["number of input tokens must be no more than 8000, got 9000"],
    "Cloudflare": [
        "The estimated number of input and maximum output tokens (9000) exceeded this model context window limit "
        "(8192)."
    ],
    "HyperCLOVA": ["Text too long"],
    "vLLM": [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens in the messages",
        "The decoder prompt (length 5000) is longer than the maximum model length of 4096.",
        "Please reduce the length of the input prompt: max_model_len is 4096",
    ],
    "SGLang": [
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    ],
    "TGI": [
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 5000 `inputs` tokens",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
    ],
    "llama.cpp": [
        "the request exceeds the available context size. try increasing the context size or enable context shift",
        "context size has been exceeded",
        "input is too large to process. increase the physical batch size",
    ],
    "Ollama": ["the input length exceeds the context length"],
    "LM Studio": [
        "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context "
        "length of only 4096 tokens, which is not enough."
    ],
    "NIM": [
        "The sum of prompt length (5000.0), query length (0) should not exceed max_num_tokens (4096)",
        "Prompt length (5000) exceeds maximum input length (4096)",
    ],
}
"""What providers say, in the words of their documentation, their sources or bug reports."""


@pytest.mark.parametrize("status", [400, 413, 422, 500])
@pytest.mark.parametrize("said", [said for words in SAID.values() for said in words])
def test_the_words_of_every_provider_tell_that_a_conversation_no_longer_fits(said: str, status: int) -> None:
    error = Refusal(status, said)
    assert isinstance(as_model_error(error), ContextLengthExceeded)
    assert not is_transient(error, proven=False), "to send it again does not help"


@pytest.mark.parametrize("code", ["context_length_exceeded", "tokens_limit_reached", "exceed_context_size_error"])
def test_a_code_tells_that_a_conversation_no_longer_fits(code: str) -> None:
    assert isinstance(as_model_error(Refusal(400, "no", code)), ContextLengthExceeded)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": None, "base_resp": {"status_code": 2013, "status_msg": "context window exceeds limit"}},
        {"error": {"message": "This endpoint's maximum context length is 32768 tokens.", "code": 400}},
    ],
)
def test_an_answer_with_status_200_tells_that_a_conversation_no_longer_fits(answer: Any) -> None:
    with pytest.raises(ContextLengthExceeded, match="no longer fits"):
        read_reply(answer, 1)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (400, "tool_choice: unknown value", None),
        (400, "Invalid 'tools[0].function.name': string too long.", None),
        (400, "max_tokens is too large: 100000. This model supports at most 16384 completion tokens", None),
        (429, "Rate limit reached: too many tokens per minute", None),
        (401, "the key is longer than the maximum", None),
        (500, "Internal server error", None),
        (
            413,
            "Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 7000",
            RequestTooLarge,
        ),
    ],
)
def test_other_refusals_are_not_taken_for_a_conversation_that_no_longer_fits(status: int, said: str, kind: Any) -> None:
    failure = as_model_error(Refusal(status, said))
    assert not isinstance(failure, ContextLengthExceeded)
    assert kind is None or isinstance(failure, kind)


def test_an_answer_without_choices_is_no_completion() -> None:
    with pytest.raises(BadCompletion):
        read_reply({"error": {"message": "overloaded"}}, 1)


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Grows:
    """An endpoint that refuses conversations of more than four messages with words that nobody knows."""

    def __init__(self, *, summarises: bool) -> None:
        self.summarises = summarises
        self.asked: list[int] = []

    async def chat_completion(self, *, messages: Any, **_: Any) -> Any:
        self.asked.append(len(messages))
        summary = "Write a summary" in str(messages[-1]["content"])
        if len(messages) > 4 and not (summary and self.summarises):
            raise Refusal(400, "Bad things happened")
        if summary:
            message: dict[str, Any] = {"content": "I looked."}
        else:
            message = {"content": "done"} if self.asked.count(1) > 1 else {"content": "", "tool_calls": [CALL]}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"prompt_tokens": 50}}


@pytest.mark.parametrize(
    ("compact_at", "summarises", "reason", "asked"),
    [
        (1000, True, "finished", [1, 3, 5, 6, 1]),
        (None, True, "refused", [1, 3, 5]),
        (1000, False, "refused", [1, 3, 5, 6]),
    ],
    ids=["on", "off", "no help"],
)
async def test_a_refusal_of_what_has_grown_is_tried_once_with_a_summary(
    compact_at: int | None, summarises: bool, reason: str, asked: list[int]
) -> None:
    async def handler(name: str, arguments: Any, task_id: str) -> str:
        return '{"output": "x"}'

    server = Grows(summarises=summarises)
    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    loop = HermesAgentLoop(server, [schema], {"look"}, tool_handler=handler, compact_at=compact_at)
    result = await loop.run([{"role": "user", "content": "go"}])
    assert (result.stop_reason, server.asked) == (reason, asked)
