"""The sandbox provider `hermes`, as Inspect loads it by its entry point."""

from __future__ import annotations

from hermes_inspect.version import INSPECT

with INSPECT.imports():
    from hermes_inspect.config import HermesSandboxConfig
    from hermes_inspect.sandbox import HermesSandbox

__all__ = ["HermesSandbox", "HermesSandboxConfig"]
