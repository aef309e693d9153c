"""The settings of a model server."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from hermes_core.agents.endpoint.prices import TokenPrices, read_prices


class EndpointSettings(BaseModel):
    """Where a model is, how its server is asked, and for how long. Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    """Name of the model, as its endpoint knows it."""
    base_url: str | None = None
    """OpenAI-compatible endpoint, which usually ends in `/v1`; its key comes from `OPENAI_API_KEY`. None is OpenAI's
    own."""
    api_key: SecretStr | None = None
    """The endpoint's key. None is for an endpoint that needs none."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds for one request, from the first byte sent to the last byte received."""
    endpoint_patience_s: float = Field(default=300.0, ge=0)
    """Seconds for which requests to a failing endpoint are repeated, from the first failure on. Then the run ends."""
    check_patience_s: float = Field(default=30.0, gt=0)
    """Seconds for which the check before the first sandbox waits for an endpoint that does not answer."""
    max_retries: int | None = Field(default=None, ge=0)
    """Maximum number of retries of one request after a temporary failure. None retries for `endpoint_patience_s`."""
    max_retry_wait_s: float = Field(default=60.0, ge=0)
    """Maximum wait in seconds before a request, whatever the endpoint says in `Retry-After` and of its limits."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Maximum number of requests per minute, of all rollouts together. Limits that the endpoint names in its headers
    are kept in any case."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Maximum number of tokens per minute, of prompts and answers, of all rollouts together."""
    max_response_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Maximum size of one response in bytes."""
    prices: Annotated[dict[str, TokenPrices] | None, BeforeValidator(read_prices)] = None
    """Prices of each model's tokens in US dollars per million: `{MODEL: {prompt, cached, completion}}`, or the name of
    a YAML or JSON file with that. Without the model's prices, the cost that the endpoint reports is recorded."""

    @property
    def settings_prefix(self) -> str:
        """Return the prefix of the fields of `Settings` that hold the endpoint and its key, such as `anthropic_`."""
        return ""

    @property
    def key_variable(self) -> str:
        """Return the environment variable with the endpoint's key."""
        return f"{self.settings_prefix or 'openai_'}api_key".upper()

    @property
    def price(self) -> TokenPrices | None:
        """Return the prices of the model; None if they are not known."""
        return (self.prices or {}).get(self.model or "")
