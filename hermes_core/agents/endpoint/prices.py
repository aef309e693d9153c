"""The prices of a model's tokens: the price table and the price of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core.settings import read_mapping


class TokenPrices(BaseModel):
    """The prices of a million tokens of one model, in US dollars. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompt: float = Field(ge=0)
    """Price of a million tokens of prompts."""
    cached: float | None = Field(default=None, ge=0)
    """Price of a million tokens of prompts that the endpoint has in its cache. None is the price of all others."""
    completion: float = Field(ge=0)
    """Price of a million tokens of answers, reasoning included."""

    def cost(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """Return the price of an answer in US dollars. `cached_tokens` are a part of `prompt_tokens`."""
        cached = min(cached_tokens, prompt_tokens)
        of_cached = self.prompt if self.cached is None else self.cached
        millionths = (prompt_tokens - cached) * self.prompt + cached * of_cached + completion_tokens * self.completion
        return millionths / 1e6


def read_prices(given: Any) -> Any:
    """Return a price table. If `given` is a text or a path, it names a YAML or JSON file with the table; any other
    value is returned unchanged.

    Raises:
        ConfigError: the file can't be read.
    """
    return read_mapping(Path(given).expanduser(), "prices") if isinstance(given, str | Path) else given
