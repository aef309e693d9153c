"""The settings of a profile of the `e2b` backend."""

from __future__ import annotations

import math

from pydantic import Field, field_validator, model_validator

from hermes_core import Network, SandboxConfig

LEAST_TIMEOUT_S = 60
"""Smallest timeout in seconds that a sandbox gets, so that it survives while E2B's API is out of reach."""


class E2bConfig(SandboxConfig):
    """A profile of the `e2b` backend."""

    unsupported = ("cpu", "memory")

    image: str | None = "base"
    """The E2B template, by name or id. It decides cores and memory."""
    max_lifetime: int = Field(default=3600, ge=LEAST_TIMEOUT_S, le=24 * 3600)
    """Seconds after which a sandbox is replaced: at most the session length of your E2B plan, which is 3600 or
    86400."""
    allow_out: tuple[str, ...] = ()
    """Hosts, addresses and CIDR blocks that the sandbox may reach although `deny_out` names them."""
    deny_out: tuple[str, ...] = ()
    """Addresses and CIDR blocks that the sandbox may not reach. `0.0.0.0/0` is all of them."""

    @property
    def timeout_s(self) -> int:
        """Return the seconds after the driver's last sign of life after which E2B itself ends the sandbox."""
        return min(max(LEAST_TIMEOUT_S, math.ceil(2 * self.orphan_ttl_s)), self.max_lifetime)

    @field_validator("image")
    @classmethod
    def _names_a_template(cls, image: str | None) -> str:
        if not image:
            raise ValueError("must name a template: leave it out for `base`")
        return image

    @model_validator(mode="after")
    def _agree(self) -> E2bConfig:
        if self.network is not Network.OPEN and (self.allow_out or self.deny_out):
            raise ValueError(f"network is {self.network}, and allow_out or deny_out is set: leave one of them out")
        if self.allow_out and not self.deny_out:
            raise ValueError("allow_out only makes exceptions from deny_out: set `deny_out: [0.0.0.0/0]`, too")
        return self
