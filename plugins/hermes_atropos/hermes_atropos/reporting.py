"""Reports of an environment: records and metrics as lines of JSON, and a wandb run if it is enabled."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hermes_atropos.json_lines import JsonLines
from hermes_atropos.metrics import Metrics, keep_plain
from hermes_atropos.wandb_run import WandbRun
from hermes_core import AgentResult, Group, Rolled

log = logging.getLogger(__name__)

_EVALUATING: ContextVar[bool] = ContextVar("evaluating", default=False)
"""Whether the current task was started by `evaluate`."""


async def run_evaluation(evaluate: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> None:
    """Call `evaluate`. The rollouts that it starts are recorded as an evaluation's."""
    token = _EVALUATING.set(True)
    try:
        await evaluate(*args, **kwargs)
    finally:
        _EVALUATING.reset(token)


class RolloutReporter:
    """Counts rollouts and writes their records. Rollouts of evaluations are counted and written separately."""

    def __init__(self) -> None:
        self.training = Metrics("train")
        self.evaluation = Metrics("eval")
        """Metrics of the rollouts that are not for the trainer."""
        self.wandb_run: WandbRun | None = None
        """The wandb run, if wandb is enabled and the environment runs."""
        self._paths: dict[Metrics, Path] = {}
        self._files: dict[Metrics, JsonLines] = {}
        self._metrics_path: Path | None = None
        self._stack = ExitStack()

    @contextmanager
    def open(self, training: Path, evaluations: Path, *, only_evaluates: bool) -> Iterator[None]:
        """Open the files for records, for the length of the block.

        Args:
            training: path of the records for the trainer.
            evaluations: path of the records of evaluations.
            only_evaluates: whether there is no training. Then the file `training` is not touched.

        Raises:
            OutputError: a file can't be opened.
        """
        self._paths = {self.training: evaluations if only_evaluates else training, self.evaluation: evaluations}
        self._metrics_path = self._paths[self.training].with_suffix(".metrics.jsonl")
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
        """Return the metrics that count the rollouts of the current task."""
        return self.evaluation if _EVALUATING.get() else self.training

    def add(self, rolled: Rolled, result: AgentResult) -> None:
        """Count a rollout that has ended, and write its record."""
        self.metrics.add(rolled, result.tool_errors, result.turns_used)
        if rolled.mask_sample:
            log.warning("trajectory %s is not used: %s", rolled.record.trajectory_id, rolled.refused)
        self._file(self.metrics).write({**rolled.record.to_json(), **rolled.labels})

    def add_group(self, group: Group) -> None:
        """Count a group that has ended."""
        self.metrics.add_group(group)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write metrics beside the records, and log them."""
        plain = keep_plain(metrics)
        if self._metrics_path is not None:
            with JsonLines(self._metrics_path) as lines:
                lines.write({"step": step, **plain})
        log.info("step %d: %s", step, plain)
