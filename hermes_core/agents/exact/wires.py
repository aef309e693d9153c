"""The formats in which servers take token ids, and return the sampled token ids with their logprobs.

| wire | server | |
|---|---|---|
| `vllm` | stock vLLM | `POST /inference/v1/generate` with `token_ids` |
| `vllm` | stock vLLM | `POST /v1/completions` with `return_token_ids` |
| `vllm` | the API server of Atropos' example trainer | `POST /generate` with `{"prompt": {"prompt_token_ids": […]}}` |
| `sglang` | stock SGLang | `POST /generate` with `input_ids` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_core.agents.base import Part
from hermes_core.agents.replies import count, get, weight_version

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings that are sent with each request, because the server would otherwise take them from the model's
`generation_config.json` or its own settings. The logprobs would then not belong to the distribution from which the
server samples."""

_NO_LOGPROB = -9999.0
"""The number that vLLM returns in place of a logprob that it does not have."""

_TOKEN_ID = "token_id:"
"""The beginning of a token's name that is not the token's text."""


_OF_SGLANG = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
"""SGLang's names of settings. SGLang uses the seed only if it was started with `--enable-deterministic-inference`."""


@dataclass(frozen=True)
class Sampled:
    """One completion as the server sampled it; both lists have the same length."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop`, `length` or, if the server broke the completion off, `abort`."""
    text: str | None = None
    """The tokens decoded by the server, without special tokens; None if the server sends no text."""
    prompt_tokens: int | None = None
    """The server's count of the prompt's tokens; None if the server sends no count."""
    completion_tokens: int | None = None
    """The server's count of the sampled tokens; None if the server sends no count."""
    cached_tokens: int | None = None
    """How many tokens of the prompt came from the server's cache; None if the server sends no count."""
    weight_version: str | None = None
    """The version of the policy's weights, as the server names it; None if the server names no version."""
    parts: list[Part] = field(default_factory=list)
    """See `TurnRecord.parts`."""

    def then(self, more: Sampled) -> Sampled:
        """Return one completion made of this one and `more`, which continues it and comes from another request."""
        before = self.parts or [[len(self.tokens), self.weight_version]]
        return replace(
            more,
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs,
            text=None if self.text is None or more.text is None else self.text + more.text,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=None,
            cached_tokens=self.cached_tokens,
            parts=[*before, [len(more.tokens), more.weight_version]],
        )


class Wire(ABC):
    """One wire format."""

    path: str
    """The path after the server's root."""
    server: str
    """The server that speaks this format, for messages."""
    raw_logprobs = False
    """Whether logprobs are computed before the temperature is applied, unless the server was started otherwise."""
    advice: str
    """What to do if the answer has no tokens with logprobs."""

    @abstractmethod
    def write(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request. `sampling` has `max_tokens` and other keys, with their meanings in vLLM."""

    def name_model(self, model: Mapping[str, str]) -> Mapping[str, str]:
        """Return the keys of a request that name the model; empty for a server that has only one model."""
        return model

    @abstractmethod
    def read(self, answer: Any) -> Sampled:
        """Return the completion in an answer. If the answer is not valid, any kind of exception may be raised."""


class AtroposVllm(Wire):
    """The API server of Atropos' example trainer."""

    path, server = "/generate", "the API server of Atropos' example trainer"
    advice = "start it from atroposlib 0.4.0's example_trainer"

    def name_model(self, model: Mapping[str, str]) -> Mapping[str, str]:
        """Return nothing: the server has one model, and takes no other keys."""
        return {}

    def write(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request."""
        return {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": 1, **sampling}

    def read(self, answer: Any) -> Sampled:
        """Return the completion in an answer."""
        # Each position is a list of one mapping from one token id, as text, to its logprob.
        places = [next(iter(place[0].items())) for place in answer["logprobs"][0]]
        texts, prompt = answer.get("text"), answer.get("prompt_token_ids")
        return Sampled(
            [int(token) for token, _ in places],
            [logprob for _, logprob in places],
            _reason(answer["finish_reasons"][0]),
            texts[0] if isinstance(texts, list) and texts else None,
            len(prompt) if isinstance(prompt, list) else None,
            weight_version=weight_version(answer),
        )


class VllmTokens(Wire):
    """Stock vLLM: token ids in requests and answers, without any text."""

    path, server = "/inference/v1/generate", "vLLM"
    raw_logprobs = True
    advice = "use vLLM 0.33 or later"

    def write(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request."""
        return {"token_ids": prompt, "sampling_params": {"n": 1, "logprobs": 0, **_NEUTRAL, **sampling}}

    def read(self, answer: Any) -> Sampled:
        """Return the completion in an answer."""
        (choice,) = answer["choices"]
        places = choice["logprobs"]["content"]
        for token, place in zip(choice["token_ids"], places, strict=True):
            named = place.get("token", "")  # `token_id:7`, or, with some options of the server, a text
            if named.startswith(_TOKEN_ID) and named != f"{_TOKEN_ID}{token}":
                raise ValueError(f"the logprob of {named} stands beside the token {token}")
        logprobs = [place["logprob"] for place in places]
        reason, version = _reason(choice["finish_reason"]), weight_version(answer, answer.get("metadata"))
        return Sampled(choice["token_ids"], logprobs, reason, None, *_usage(answer), version)


class VllmCompletions(Wire):
    """Stock vLLM: the older endpoint of the OpenAI API, with token ids beside the text."""

    path, server = "/v1/completions", "vLLM"
    raw_logprobs = True
    advice = "use vLLM 0.10.2 or later, which knows return_token_ids"

    def write(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request."""
        return {"prompt": prompt, "n": 1, "logprobs": 0, "return_token_ids": True, **_NEUTRAL, **sampling}

    def read(self, answer: Any) -> Sampled:
        """Return the completion in an answer."""
        (choice,) = answer["choices"]
        logprobs, reason = choice["logprobs"]["token_logprobs"], _reason(choice["finish_reason"])
        version = weight_version(answer, answer.get("metadata"))
        return Sampled(choice["token_ids"], logprobs, reason, choice.get("text"), *_usage(answer), version)


class Sglang(Wire):
    """Stock SGLang."""

    path, server = "/generate", "SGLang"
    advice = "use SGLang's own server, with its native /generate"

    def name_model(self, model: Mapping[str, str]) -> Mapping[str, str]:
        """Return nothing: the server has one model."""
        return {}

    def write(self, prompt: list[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a request."""
        renamed = {_OF_SGLANG.get(key, key): value for key, value in sampling.items()}
        wanted = {"return_logprob": True, "return_text_in_logprobs": False}
        return {"input_ids": prompt, "sampling_params": {**_NEUTRAL, **renamed}, **wanted}

    def read(self, answer: Any) -> Sampled:
        """Return the completion in an answer."""
        one = answer[0] if isinstance(answer, list) else answer
        about = one["meta_info"]
        places = about["output_token_logprobs"]
        return Sampled(
            [place[1] for place in places],
            [place[0] for place in places],
            _reason(about["finish_reason"]["type"]),
            one.get("text"),
            count(about.get("prompt_tokens")),
            count(about.get("completion_tokens")),
            count(about.get("cached_tokens")),
            weight_version(about),
        )


WIRES: Mapping[str, tuple[Wire, ...]] = {
    "vllm": (VllmTokens(), VllmCompletions(), AtroposVllm()),
    "sglang": (Sglang(),),
}
"""The wires that servers of each type may speak. The first wire that a server knows is used."""


def check_sampled(sampled: Sampled, prompt_tokens: int, max_tokens: int) -> Sampled:
    """Return the completion unchanged, after a check that each token has a valid logprob, and that the counts agree.

    Args:
        prompt_tokens: the number of tokens that were sent.
        max_tokens: the maximum number of tokens that was requested.

    Raises:
        ValueError, TypeError: a token has no valid logprob, or a count differs.
    """
    if not sampled.tokens:
        raise ValueError("no token")
    if len(sampled.tokens) > max_tokens:
        raise ValueError(f"{len(sampled.tokens)} tokens, and was asked for {max_tokens} at most")
    for token, logprob in zip(sampled.tokens, sampled.logprobs, strict=True):
        if type(token) is not int or token < 0:
            raise ValueError(f"{token!r} is not a token id")
        if type(logprob) not in (int, float) or not _NO_LOGPROB < logprob <= 0:
            raise ValueError(f"{logprob!r} is not a logprob")
    if sampled.completion_tokens not in (None, len(sampled.tokens)):
        raise ValueError(f"{len(sampled.tokens)} tokens, and a count of {sampled.completion_tokens}")
    if sampled.prompt_tokens not in (None, prompt_tokens):
        raise ValueError(
            f"a count of {sampled.prompt_tokens} for a prompt of {prompt_tokens} tokens; servers must not cut prompts"
        )
    return sampled


def _usage(answer: Any) -> tuple[int | None, int | None, int | None]:
    """Return the answer's numbers of tokens: of the prompt, sampled, and from the cache; None for a missing number."""
    usage = answer.get("usage")
    cached = get(get(usage, "prompt_tokens_details"), "cached_tokens")
    return count(get(usage, "prompt_tokens")), count(get(usage, "completion_tokens")), count(cached)


def _reason(said: Any) -> str:
    """Return the stop reason.

    Raises:
        ValueError: an answer with this stop reason can't be trained on.
    """
    if said not in ("stop", "length", "abort"):
        raise ValueError(f"the completion ended with {said!r}")
    return str(said)
