"""The time limits of a rollout."""

from __future__ import annotations

from pydantic import BaseModel, Field

SPARE_S = 600.0
"""Seconds that the default deadline of a rollout adds to the sum of all other limits."""


class Limits(BaseModel):
    """Time limits of a rollout in seconds, and the number of restarts. The first sentence of a setting's docstring is
    also its `--help`."""

    rollout_timeout: float | None = Field(default=3600.0, gt=0)
    """Agent time limit in seconds, without its waits for the model; what was done by then is scored. None is no
    limit."""
    model_timeout: float | None = Field(default=3600.0, gt=0)
    """Total seconds that a rollout may wait for the model; then it fails as `model`. None is no limit."""
    setup_timeout: float = Field(default=1800.0, gt=0)
    """Time limit in seconds for the setup of a workspace; then the rollout fails as `setup`."""
    verify_timeout: float = Field(default=3600.0, gt=0)
    """Time limit in seconds for the verification; then the rollout fails as `verifier`."""
    deadline: float | None = Field(default=None, gt=0)
    """Time limit in seconds for a whole rollout, from its beginning through all restarts until its slot is released.
    The agent is stopped early enough that its work can be verified. A rollout that is not over by then fails as
    `infra`, and its slot is released in the background. None is the sum of the other limits and ten minutes more; if
    one of them is None, there is no deadline."""
    infra_retries: int = Field(default=2, ge=0)
    """How often a rollout is started again, on a fresh slot, after an infrastructure failure."""

    @property
    def deadline_s(self) -> float | None:
        """Return the deadline in seconds: as set, or computed from the other limits; None is no deadline."""
        parts = [self.setup_timeout, self.rollout_timeout, self.model_timeout, self.verify_timeout]
        known = [part for part in parts if part is not None]
        return self.deadline or (sum(known) + SPARE_S if known == parts else None)
