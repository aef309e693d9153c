"""Samples from a transformer, many prompts at a time, in a separate thread, and remembers each token that was drawn."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from hermes_core import UsageError

log = logging.getLogger(__name__)

Plan = Sequence[Collection[int] | None]
"""The allowed tokens at each position of a completion, or None for any. After the plan's end, any token is allowed."""

MakePlan = Callable[[Sequence[int], random.Random], Plan]
"""Returns the plan for the completion of a prompt."""


@dataclass(frozen=True)
class SampledCompletion:
    """One completion, exactly as it was sampled."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The tokens after the prompt, including the end of turn if the model wrote it."""
    logprobs: tuple[float, ...]
    """For each token, the natural logarithm of its probability under softmax(logits / temperature) over the whole
    vocabulary. A plan limits the tokens that are drawn, but does not change these values: a trainer computes the same
    values from the same weights."""
    forced: tuple[bool, ...]
    """For each token, whether a plan left the model no other choice."""
    temperature: float
    finish_reason: str
    """`stop` or `length`."""
    version: int
    """Number of times that the weights had been lent before this completion."""


@dataclass(eq=False)
class _BatchRow:
    """One completion that is being sampled."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    plan: Plan
    seed: int | None = None
    draws: Any = None
    """The row's own random numbers, if it has a seed."""
    future: Future[SampledCompletion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)

    def allowed(self) -> Collection[int] | None:
        return self.plan[len(self.tokens)] if len(self.tokens) < len(self.plan) else None


class Engine:
    """One model and the thread that runs it: `with Engine(model) as engine: engine.submit([1, 2], …).result()`.

    Waiting prompts are sampled together, as one batch with a key-value cache, until all of them are done; then the
    next batch starts. A batch is sampled with one set of weights.

    Args:
        model: a causal model of `transformers`; from now on it belongs to the engine. `weights` lends it.
        stop: the tokens that end a completion; None takes them from the model's own configuration.
        plan: makes the plan of each completion, for a random model that has to write tool calls; None means no plan.
        max_batch: maximum number of prompts that are sampled together.
        max_waiting: maximum number of prompts that may wait; further prompts are refused.
        raw_logprobs: whether to return logprobs at temperature 1, at whatever temperature tokens are drawn. vLLM does
            so, unless it is started with `--logprobs-mode processed_logprobs`.
        keep: maximum number of latest completions in `sampled`.
        seed: the random seed. The same tokens are drawn again only if the prompts come in the same batches.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop: Collection[int] | None = None,
        plan: MakePlan | None = None,
        max_batch: int = 64,
        max_waiting: int = 4096,
        raw_logprobs: bool = False,
        keep: int = 10_000,
        seed: int = 0,
    ) -> None:
        self.model = model
        own = model.config.eos_token_id
        self.stop = frozenset(stop if stop is not None else [own] if isinstance(own, int) else own)
        self.plan = plan
        self.context: int = model.config.max_position_embeddings
        self.sampled: deque[SampledCompletion] = deque(maxlen=keep)
        """The latest completions."""
        self.version = 0
        """Number of times that the weights have been lent."""
        self.raw_logprobs = raw_logprobs
        self._max_batch = max_batch
        self._waiting: queue.Queue[_BatchRow | None] = queue.Queue(max_waiting)
        self._weights = threading.Lock()
        self._random = random.Random(seed)
        self._seed = seed
        self._thread = threading.Thread(target=self._run, name="tiny model", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread after its current batch. Prompts that still wait are cancelled."""
        with self._weights:
            waiting = list(self._drain())
            self._waiting.put_nowait(None)
        for row in waiting:
            row.future.cancel()
        self._thread.join()

    def submit(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> Future[SampledCompletion]:
        """Complete a prompt.

        Args:
            max_tokens: maximum number of tokens of the completion.
            temperature: 0 takes the likeliest token each time, and returns logprobs at temperature 1.
            seed: the seed of this completion alone; a plan does not depend on it.

        Raises:
            UsageError: the prompt is empty, has an invalid token, or leaves no room for `max_tokens`.
            queue.Full: too many prompts wait already.
        """
        if not prompt or not all(0 <= token < self.model.config.vocab_size for token in prompt):
            raise UsageError(
                "the prompt is not a sequence of tokens", hint=f"ids are below {self.model.config.vocab_size}"
            )
        if not 1 <= max_tokens <= self.context - len(prompt):
            raise UsageError(
                f"the model's maximum context length is {self.context} tokens: {len(prompt)} in the prompt and"
                f" {max_tokens} to be written are too many or none",
                hint="shorten the prompt or ask for fewer tokens",
            )
        plan = self.plan(prompt, self._random) if self.plan is not None else ()
        row = _BatchRow(tuple(prompt), max_tokens, temperature, plan, seed)
        self._waiting.put_nowait(row)
        return row.future

    @contextlib.contextmanager
    def weights(self) -> Iterator[Any]:
        """Lend the model for the length of a block, in which nothing is sampled, to train it or to load other weights.

        Wait first for the batch that is being sampled. The next batch has a new `version`.
        """
        with self._weights:
            yield self.model
            self.version += 1

    def _drain(self) -> Iterator[_BatchRow]:
        with contextlib.suppress(queue.Empty):
            while True:
                if (row := self._waiting.get_nowait()) is not None:
                    yield row

    def _run(self) -> None:
        """Run the thread: wait for a prompt, take all waiting prompts, and sample their completions."""
        import torch

        torch.set_num_threads(1)  # for work started by this thread: it is so little that two threads would mostly wait
        draws = torch.Generator().manual_seed(self._seed)
        while (first := self._waiting.get()) is not None:
            rows = [first]
            with contextlib.suppress(queue.Empty):
                while len(rows) < self._max_batch:
                    row = self._waiting.get_nowait()
                    if row is None:
                        self._waiting.put_nowait(None)
                        break
                    rows.append(row)
            rows = [row for row in rows if row.future.set_running_or_notify_cancel()]
            if not rows:
                continue
            with self._weights, torch.inference_mode():
                try:
                    self._sample(rows, draws)
                except Exception as error:
                    log.exception("a batch of %d prompts failed", len(rows))
                    for row in rows:
                        if not row.future.done():
                            row.future.set_exception(error)

    def _sample(self, rows: list[_BatchRow], draws: Any) -> None:
        """Sample all rows to their ends. Prompts are padded on the left; a row that is done leaves the batch."""
        import torch

        for row in rows:
            row.draws = None if row.seed is None else torch.Generator().manual_seed(row.seed)
        longest = max(len(row.prompt) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, longest - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[index, longest - len(row.prompt) :] = 1
        places, cache = (mask.cumsum(1) - 1).clamp(min=0), None
        while rows:
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            chosen = self._choose(rows, out.logits[:, -1].float(), draws)
            left = [index for index, row in enumerate(rows) if not self._finish(row)]
            rows = [rows[index] for index in left]
            keep = torch.tensor(left, dtype=torch.long)
            if len(left) < len(chosen):
                cache.batch_select_indices(keep)
            ids = chosen[keep, None]
            mask = torch.cat([mask[keep], torch.ones_like(ids)], 1)
            places = places[keep, -1:] + 1

    def _choose(self, rows: Sequence[_BatchRow], logits: Any, draws: Any) -> Any:
        """Draw the next token of each row, and add it and its logprob to the row. This uses the Gumbel-max trick, with
        which the probabilities of the tokens that a plan allows need not sum to 1."""
        import torch

        temperatures = torch.tensor([[row.temperature or 1.0] for row in rows])
        logprobs = torch.log_softmax(logits / temperatures, -1)
        noise = torch.empty_like(logprobs).exponential_(generator=draws)
        for row, own in zip(rows, noise, strict=True):
            if row.draws is not None:
                own.exponential_(generator=row.draws)
        scores = logprobs - noise.log() * torch.tensor([[float(row.temperature > 0)] for row in rows])
        allowed = [row.allowed() for row in rows]
        for index, ids in enumerate(allowed):
            if ids is not None:
                some = torch.tensor(sorted(ids))
                narrowed = torch.full_like(scores[index], -torch.inf)
                narrowed[some] = scores[index, some]
                scores[index] = narrowed
        chosen = scores.argmax(-1)
        told = torch.log_softmax(logits, -1) if self.raw_logprobs else logprobs
        said = told.gather(1, chosen[:, None])[:, 0].tolist()
        for row, token, logprob, ids in zip(rows, chosen.tolist(), said, allowed, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.forced.append(ids is not None and len(ids) == 1)
        return chosen

    def _finish(self, row: _BatchRow) -> bool:
        """Return whether the row is done. If so, give its caller the result."""
        stopped = row.tokens[-1] in self.stop
        if not stopped and len(row.tokens) < row.max_tokens:
            return False
        sampled = SampledCompletion(
            row.prompt,
            tuple(row.tokens),
            tuple(row.logprobs),
            tuple(row.forced),
            row.temperature,
            "stop" if stopped else "length",
            self.version,
        )
        self.sampled.append(sampled)
        row.future.set_result(sampled)
        return True
