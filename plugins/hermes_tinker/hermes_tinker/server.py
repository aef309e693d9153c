"""Tinker's sampler as a token-exact server of the agent loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import Any

from hermes_core import AgentSettings, BadCompletion, Chat, Endpoint, Served
from hermes_core.agents.exact.wires import Sampled, checked


class Policy:
    """The weights that are trained, and a client that samples from the newest saved ones.

    Args:
        training: Tinker's `TrainingClient`.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._client: Any = None
        self._version = -1

    @property
    def current(self) -> tuple[Any, int]:
        """Return the `SamplingClient` of the newest saved weights, and how many were saved before them."""
        return self._client, self._version

    @property
    def name(self) -> str:
        """Return the name of the training run."""
        return f"tinker://{self._training.model_id}"

    def save(self) -> None:
        """Save the weights as they are now; what is sampled from now on is sampled from them. Blocks."""
        from tinker.lib.retry_handler import RetryConfig

        # The requests are repeated here, as those of all model servers.
        once = RetryConfig(enable_retry_logic=False)
        self._client = self._training.save_weights_and_get_sampling_client(retry_config=once)
        self._version += 1

    async def info(self) -> Any:
        """Return what Tinker says about the training run."""
        return await self._training.get_info_async()


class TokensOnly:
    """What takes and gives nothing but tokens, with clients that are the caller's."""

    raw_logprobs = False  # they are, and no temperature but 1 is accepted: see `TinkerRun`

    async def served(self, *, patience_s: float = math.inf) -> Served:
        """Return that nothing is known: few servers tell the length of a context."""
        return Served()

    async def tokenize(self, text: str, *, patience_s: float = math.inf) -> list[int] | None:
        """Return None: there is nobody to ask."""
        return None

    async def aclose(self) -> None:
        """Do nothing: it holds nothing open."""


class TinkerServer(TokensOnly):
    """Samples with Tinker's SDK, with the patience and the failures of any other model server.

    Args:
        policy: samples.
        settings: the patience, the time limit and the retries.
        chat: knows the tokens that end an answer.
    """

    def __init__(self, policy: Policy, settings: AgentSettings, chat: Chat) -> None:
        self.settings = settings
        self.url = policy.name
        self.endpoint = Endpoint(settings, self.url, settings.model or self.url, policy.info)
        self._policy = policy
        self._ends = sorted(chat.end_tokens)

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
        """Return one completion of the prompt, with the version of the weights that it was sampled from.

        Raises:
            ModelError: as `GenerateServer.sample` says.
        """
        from tinker import types

        params = types.SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if temperature is None else temperature,
            top_k=-1 if top_k is None else top_k,
            seed=seed,
            stop=self._ends,
        )
        asked = types.ModelInput.from_ints(list(prompt))
        return await self.endpoint.ask(
            lambda: self._ask(asked, params),
            tokens=lambda sampled: len(prompt) + len(sampled.tokens),
            patience_s=patience_s,
        )

    async def _ask(self, prompt: Any, params: Any) -> Sampled:
        from tinker import RequestFailedError

        client, version = self._policy.current
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                answer = await _awaitable(client.sample(prompt=prompt, num_samples=1, sampling_params=params))
        except RequestFailedError as error:  # the server took the request, and could not do it
            raise BadCompletion(f"Tinker could not sample: {error}", hint="look at the server's own log") from error
        try:
            (sequence,) = answer.sequences
            # A float32 may be a rounding error above 0.
            logprobs = [min(each, 0.0) for each in sequence.logprobs]
            sampled = Sampled(list(sequence.tokens), logprobs, str(sequence.stop_reason), weight_version=str(version))
            return checked(sampled, prompt.length, params.max_tokens)
        except (TypeError, ValueError) as error:
            raise BadCompletion(
                f"Tinker gave no tokens with logprobs: {error}", hint="check which versions the server was made for"
            ) from error


def _awaitable(answer: Any) -> Awaitable[Any]:
    """Return an answer of the SDK as something to await: later versions give futures that can be awaited."""
    return answer if hasattr(answer, "__await__") else asyncio.wrap_future(answer)
