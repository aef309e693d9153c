"""The reports of an environment: records and metrics as JSON lines, and a wandb run if enabled."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hermes_atropos.json_lines import JsonLines
from hermes_atropos.metrics import Metrics, plain_only
from hermes_atropos.wandb_run import WandbRun
from hermes_core import AgentResult, Group, Rolled

log = logging.getLogger(__name__)

_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)
"""Whether the current code was started by `evaluate`."""


async def evaluating(evaluate: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> None:
    """Call `evaluate`, and record its rollouts as an evaluation."""
    before = _EVALUATING.set(True)
    try:
        await evaluate(*args, **kwargs)
    finally:
        _EVALUATING.reset(before)


class RolloutReporter:
    """Counts rollouts, writes their records, and reports both. The trainer's are kept separate from evaluations."""

    def __init__(self) -> None:
        self.training = Metrics("train")
        self.evaluation = Metrics("eval")
        """Metrics of the rollouts that are not for the trainer."""
        self.wandb_run: WandbRun | None = None
        """The wandb run, if wandb is enabled and the environment runs."""
        self._paths: dict[Metrics, Path] = {}
        self._files: dict[Metrics, JsonLines] = {}
        self._told: Path | None = None
        self._stack = ExitStack()

    @contextmanager
    def open(self, training: Path, evaluations: Path, *, only_evaluates: bool) -> Iterator[None]:
        """Open the files for the records. The training's file is not touched if there is no training.

        Raises:
            OutputError: one can't be opened.
        """
        self._paths = {self.training: evaluations if only_evaluates else training, self.evaluation: evaluations}
        self._told = self._paths[self.training].with_suffix(".metrics.jsonl")
        with ExitStack() as self._stack:
            self._files = {}
            self._file(self.evaluation if only_evaluates else self.training)
            yield

    def _file(self, metrics: Metrics) -> JsonLines:
        if metrics not in self._files:
            self._files[metrics] = self._stack.enter_context(JsonLines(self._paths[metrics]))
        return self._files[metrics]

    @property
    def metrics(self) -> Metrics:
        """Return the metrics in which the caller's rollouts are counted."""
        return self.evaluation if _EVALUATING.get() else self.training

    def add(self, rolled: Rolled, result: AgentResult) -> None:
        """Count a rollout that ended, and write its record."""
        self.metrics.add(rolled, result.tool_errors, result.turns_used)
        if rolled.mask_sample:
            log.warning("trajectory %s is not used: %s", rolled.record.trajectory_id, rolled.refused)
        self._file(self.metrics).write({**rolled.record.to_json(), **rolled.labels})

    def add_group(self, group: Group) -> None:
        """Count a group that ended."""
        self.metrics.add_group(group)

    def tell(self, step: int, told: Mapping[str, Any]) -> None:
        """Write metrics beside the records, and log them."""
        shown = plain_only(told)
        if self._told is not None:
            with JsonLines(self._told) as lines:
                lines.write({"step": step, **shown})
        log.info("step %d: %s", step, shown)
