"""OpenTelemetry for hermes-rl: spans and metrics of rollouts, sent while the setting `telemetry` is on."""

from __future__ import annotations

from hermes_core import Registrar, hookimpl

HERMES_PLUGIN_API = 1


@hookimpl
def hermes_register_observers(registry: Registrar) -> None:
    """Add the observer `otel`."""
    registry.add(
        "otel",
        "hermes_otel.telemetry:open_telemetry",
        summary="Sends spans and metrics of rollouts to OpenTelemetry",
        requires=("a collector that takes OTLP over HTTP",),
    )
