"""Tests a token-exact server before the first rollout: a few tokens show whether its answers can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from hermes_core.agents.endpoint.errors import public_url
from hermes_core.agents.exact.generate import TokenServer
from hermes_core.agents.exact.wires import Sampled
from hermes_core.errors import ConfigError

TRIAL = "Hello, Wörld: {'n': 12345} != [0.5]\n\tdef f(x): return x  # 日本語 🦀"
"""A text that few tokenizers split in the same way."""

TRIAL_TOKENS = 8


async def try_out(server: TokenServer, tokenizer: Any, temperature: float) -> None:
    """Ask a server for a few tokens, and check that they can be trained on. If the server does not answer, requests are
    repeated for `check_patience_s`.

    Raises:
        ModelError: the server can't be reached, refuses the key or the model, or gives no tokens with logprobs.
        ConfigError: the server has another tokenizer, or its logprobs do not belong to the distribution from which it
            samples.
    """
    prompt, patience_s = list(tokenizer.encode(TRIAL, add_special_tokens=False)), server.settings.check_patience_s
    theirs = await server.tokenize(TRIAL, patience_s=patience_s)
    if theirs is not None and theirs != prompt:
        _refuse_tokenizer(
            server, tokenizer, f"of one text it makes the tokens {_few(theirs)}, and this one {_few(prompt)}"
        )
    sampled = await server.sample(prompt, max_tokens=TRIAL_TOKENS, temperature=1.0, patience_s=patience_s)
    check_tokenizer(server, tokenizer, sampled)
    if server.raw_logprobs and temperature not in (0, 1):
        await _check_scaling(server, prompt, temperature)


def check_tokenizer(server: TokenServer, tokenizer: Any, sampled: Sampled) -> None:
    """Refuse a tokenizer that does not have the server's tokens, or that decodes them to another text.

    Raises:
        ConfigError: the tokenizer differs.
    """
    known = max([len(tokenizer), *(index + 1 for index in tokenizer.added_tokens_decoder)])
    if max(sampled.tokens) >= known:
        _refuse_tokenizer(server, tokenizer, f"it gave the token {max(sampled.tokens)}, and this one has {known}")
    ours = tokenizer.decode(sampled.tokens, skip_special_tokens=True)
    if sampled.text is not None and not _same_text(sampled.text, ours):
        _refuse_tokenizer(
            server, tokenizer, f"of the tokens {_few(sampled.tokens)} it makes {sampled.text!r}, and this one {ours!r}"
        )


def _refuse_tokenizer(server: TokenServer, tokenizer: Any, problem: str) -> NoReturn:
    raise ConfigError(
        f"the tokenizer {tokenizer.name_or_path!r} is not that of the server at {public_url(server.url)}: {problem}",
        hint="set tokenizer_name to the tokenizer of the model that the server has loaded",
    )


def _same_text(theirs: str, ours: str) -> bool:
    """Return whether both texts are the same, except for parts that a server may leave out: spaces, half characters,
    and the end."""
    left = ["".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split()) for text in (theirs, ours)]
    return left[1].startswith(left[0])


def _few(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:8]))
    return f"[{shown}, …]" if len(tokens) > 8 else f"[{shown}]"


async def _check_scaling(server: TokenServer, prompt: list[int], temperature: float) -> None:
    """Refuse logprobs from before the temperature is applied. A token that is sampled with `top_k=1` must have
    probability 1, and only such logprobs say otherwise.

    Raises:
        ConfigError: the logprobs are from before the temperature.
    """
    (logprob,) = (await server.sample(prompt, max_tokens=1, temperature=temperature, top_k=1)).logprobs
    if logprob < -1e-4:
        raise ConfigError(
            f"the server at {public_url(server.url)} gives logprobs from before the temperature, and the temperature "
            f"is {temperature:g}: they are not of what it draws from",
            hint="start vLLM with --logprobs-mode processed_logprobs, or set the temperature to 1",
        )
