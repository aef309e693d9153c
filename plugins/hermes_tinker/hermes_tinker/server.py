"""Tinker's sampler as a token-exact server of the agent loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import Any

from hermes_core import AgentSettings, BadCompletion, Chat, Endpoint, Served
from hermes_core.agents.exact.wires import Sampled, check_sampled


class Policy:
    """The weights of a training run, and a client that samples from the weights saved last.

    Args:
        training: Tinker's `TrainingClient`.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._client: Any = None
        self._version = -1

    @property
    def current(self) -> tuple[Any, int]:
        """Return the `SamplingClient` of the weights saved last, and their version, which counts the saves from 0."""
        return self._client, self._version

    @property
    def name(self) -> str:
        """Return the name of the training run."""
        return f"tinker://{self._training.model_id}"

    def save(self) -> None:
        """Save the current weights, and sample from them from now on. Blocks."""
        from tinker.lib.retry_handler import RetryConfig

        once = RetryConfig(enable_retry_logic=False)  # `Endpoint` repeats requests, with the patience of the settings
        self._client = self._training.save_weights_and_get_sampling_client(retry_config=once)
        self._version += 1

    async def info(self) -> Any:
        """Return Tinker's information about the training run."""
        return await self._training.get_info_async()


class TokensOnly:
    """Base of token servers that only sample, through a client that belongs to the caller."""

    raw_logprobs = False  # at temperature 1, which `TinkerRun` demands, raw and processed logprobs are the same

    async def fetch_info(self, *, patience_s: float = math.inf) -> Served:
        """Return an empty `Served`, because few servers of Tinker report the length of their context."""
        return Served()

    async def tokenize(self, text: str, *, patience_s: float = math.inf) -> list[int] | None:
        """Return None: these servers do not tokenize."""
        return None

    async def aclose(self) -> None:
        """Do nothing: the server holds nothing open."""


class TinkerServer(TokensOnly):
    """Samples with Tinker's SDK. Retries and errors are the same as with every model server.

    Args:
        policy: the weights to sample from.
        settings: the time limit of a request, the retries, and the patience with a server that fails.
        chat: the conversation's format, with the tokens that end an answer.
    """

    def __init__(self, policy: Policy, settings: AgentSettings, chat: Chat) -> None:
        self.settings = settings
        self.url = policy.name
        self.endpoint = Endpoint(settings, self.url, settings.model or self.url, policy.info)
        self._policy = policy
        self._stop_tokens = sorted(chat.end_tokens)

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float | None,
        top_k: int | None = None,
        seed: int | None = None,
        patience_s: float = math.inf,
    ) -> Sampled:
        """Return one completion of the prompt, with the version of the weights from which it was sampled.

        Raises:
            ModelError: as `GenerateServer.sample` says.
        """
        from tinker import types

        params = types.SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if temperature is None else temperature,
            top_k=-1 if top_k is None else top_k,
            seed=seed,
            stop=self._stop_tokens,
        )
        model_input = types.ModelInput.from_ints(list(prompt))
        return await self.endpoint.ask(
            lambda: self._ask(model_input, params),
            tokens=lambda sampled: len(prompt) + len(sampled.tokens),
            patience_s=patience_s,
        )

    async def _ask(self, prompt: Any, params: Any) -> Sampled:
        from tinker import RequestFailedError

        client, version = self._policy.current
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                answer = await _awaitable(client.sample(prompt=prompt, num_samples=1, sampling_params=params))
        except RequestFailedError as error:  # the server accepted the request, but could not carry it out
            raise BadCompletion(f"Tinker could not sample: {error}", hint="look at the server's own log") from error
        try:
            (sequence,) = answer.sequences
            logprobs = [min(each, 0.0) for each in sequence.logprobs]  # rounding to float32 may give a value above 0
            sampled = Sampled(list(sequence.tokens), logprobs, str(sequence.stop_reason), weight_version=str(version))
            return check_sampled(sampled, prompt.length, params.max_tokens)
        except (TypeError, ValueError) as error:
            raise BadCompletion(
                f"Tinker gave no tokens with logprobs: {error}", hint="check which versions the server was made for"
            ) from error


def _awaitable(answer: Any) -> Awaitable[Any]:
    """Return an answer of the SDK as an awaitable. Older versions of the SDK give a `concurrent.futures.Future`."""
    return answer if hasattr(answer, "__await__") else asyncio.wrap_future(answer)
