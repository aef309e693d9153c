"""An observer that sends spans and metrics of rollouts to OpenTelemetry. They hold no texts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from hermes_core import __version__, hookimpl

_NS = 1_000_000_000


def open_telemetry() -> Telemetry:
    """Return an observer that sends, by OTLP over HTTP, to the collector that the `OTEL_*` variables name."""
    resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "hermes-rl"}))
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Telemetry(tracers, MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource))


class Telemetry:
    """Makes the spans and metrics of rollouts. Their names follow the `gen_ai` conventions where these define one.

    When a rollout has ended, its spans are made from its record: one for the rollout, one for each answer of the model
    and one for each tool call. No span holds a prompt, an answer, arguments or output.

    Args:
        tracers: the provider of the tracer that makes the spans.
        meters: the provider of the meter that counts the metrics.
    """

    def __init__(self, tracers: trace.TracerProvider, meters: metrics.MeterProvider) -> None:
        self._providers: tuple[trace.TracerProvider | metrics.MeterProvider, ...] = (tracers, meters)
        self._tracer = tracers.get_tracer("hermes-rl", __version__)
        meter = meters.get_meter("hermes-rl", __version__)
        self._active = meter.create_up_down_counter("hermes.rollouts.active", description="Rollouts that run")
        self._sandboxes = meter.create_up_down_counter("hermes.sandboxes", description="Sandboxes that there are")
        self._rollouts = meter.create_counter("hermes.rollouts", description="Rollouts that ended")
        self._reward = meter.create_histogram("hermes.rollout.reward", description="Rewards of rollouts")
        self._stages = meter.create_histogram("hermes.stage.duration", "s", "Time that each stage took")
        self._waits = meter.create_histogram("hermes.model.wait", "s", "Time that a rollout waited for its endpoint")
        self._cost = meter.create_counter("hermes.model.cost", "USD", "Price of the model's answers")
        self._turns = meter.create_histogram("gen_ai.client.operation.duration", "s", "Time that an answer took")
        self._tokens = meter.create_histogram("gen_ai.client.token.usage", "{token}", "Tokens of an answer")
        self._calls = meter.create_histogram("hermes.tool.duration", "s", "Time that a tool call took")
        self._alive: dict[str, dict[str, str]] = {}
        """The attributes of each sandbox that is counted, by its id."""

    async def aclose(self) -> None:
        """Send the spans and metrics that are still buffered. Idempotent."""
        providers, self._providers = self._providers, ()
        for provider in providers:
            if (shutdown := getattr(provider, "shutdown", None)) is not None:
                await asyncio.to_thread(shutdown)

    @hookimpl
    def hermes_trajectory_started(self, environment: str) -> None:
        """Count one more running rollout."""
        self._active.add(1, {"hermes.environment": environment})

    @hookimpl
    def hermes_trajectory_finished(self, record: Mapping[str, Any]) -> None:
        """Make the spans of a rollout that has ended, and count it."""
        self._active.add(-1, {"hermes.environment": record["environment"]})
        self._count(record)
        self._trace(record)

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id: str, backend: str, profile: str) -> None:
        """Count one more existing sandbox."""
        self._alive[sandbox_id] = attributes = {"hermes.backend": backend, "hermes.profile": profile}
        self._sandboxes.add(1, attributes)

    @hookimpl
    def hermes_sandbox_lost(self, sandbox_id: str) -> None:
        """Count one existing sandbox less, unless this was done before: a sandbox may be lost, and then terminated."""
        self._forget(sandbox_id)

    @hookimpl
    def hermes_sandbox_terminated(self, sandbox_id: str) -> None:
        """Count one existing sandbox less, unless this was done before: a sandbox may be lost, and then terminated."""
        self._forget(sandbox_id)

    def _forget(self, sandbox_id: str) -> None:
        if (attributes := self._alive.pop(sandbox_id, None)) is not None:
            self._sandboxes.add(-1, attributes)

    def _count(self, record: Mapping[str, Any]) -> None:
        shared = _common_attributes(record)
        outcome = record["failure"]["kind"] if record["failure"] else "finished"
        self._rollouts.add(1, {**shared, "hermes.outcome": outcome})
        if record["reward"] is not None:
            self._reward.record(record["reward"], shared)
        for stage, seconds in record["timings"].items():
            if seconds is not None:
                self._stages.record(seconds, {**shared, "hermes.stage": stage.removesuffix("_s")})
        if record["turns"]:
            self._waits.record(record["waited_s"], shared)
        if record["usage"]["cost"] is not None:
            self._cost.add(record["usage"]["cost"], shared)
        for turn in record["turns"]:
            request = {"gen_ai.operation.name": "chat", "gen_ai.request.model": record["model"] or "unknown"}
            self._turns.record(turn["ended"] - turn["started"], request)
            self._tokens.record(turn["prompt_tokens"], {**request, "gen_ai.token.type": "input"})
            self._tokens.record(turn["completion_tokens"], {**request, "gen_ai.token.type": "output"})
        for call in record["calls"]:
            if call["ended"] is not None:
                error = {"error.type": call["error"]["kind"]} if call["error"] else {}
                self._calls.record(call["ended"] - call["started"], {"gen_ai.tool.name": call["name"], **error})

    def _trace(self, record: Mapping[str, Any]) -> None:
        rollout = self._tracer.start_span(
            f"rollout {record['environment']}",
            start_time=_ns(record["started"]),
            attributes=_rollout_attributes(record),
        )
        inside = trace.set_span_in_context(rollout)
        for turn in record["turns"]:
            self._tracer.start_span(
                f"chat {record['model'] or ''}".strip(),
                inside,
                trace.SpanKind.CLIENT,
                start_time=_ns(turn["started"]),
                attributes=_turn_attributes(record, turn),
            ).end(_ns(turn["ended"]))
        for call in record["calls"]:
            if call["ended"] is None:
                continue
            span = self._tracer.start_span(
                f"execute_tool {call['name']}",
                inside,
                start_time=_ns(call["started"]),
                attributes=_call_attributes(call),
            )
            _mark_failed(span, call["error"])
            span.end(_ns(call["ended"]))
        _mark_failed(rollout, record["failure"])
        rollout.end(_ns(record["ended"]))


def _common_attributes(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a rollout's attributes for metrics. Each attribute has few values, so that there are few time series."""
    shared = {"environment": record["environment"], "agent": record["agent"], "backend": record["backend"]}
    return {f"hermes.{key}": value for key, value in shared.items()} | (
        {"gen_ai.request.model": record["model"]} if record["model"] else {}
    )


def _rollout_attributes(record: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("trajectory_id", "item_id", "rollout_index", "reward", "stop_reason", "waited_s", "infra_retries")
    attributes = {**_common_attributes(record), **{f"hermes.{key}": record[key] for key in keys}}
    return _without_none({**attributes, "hermes.cost": record["usage"]["cost"]})


def _turn_attributes(record: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    return _without_none(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": record["model"],
            "gen_ai.response.model": turn["model"],
            "gen_ai.response.finish_reasons": [turn["stop_reason"]] if turn["stop_reason"] else None,
            "gen_ai.usage.input_tokens": turn["prompt_tokens"],
            "gen_ai.usage.output_tokens": turn["completion_tokens"],
            "hermes.waited_s": turn["waited_s"],
        }
    )


def _call_attributes(call: Mapping[str, Any]) -> dict[str, Any]:
    return _without_none(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call["name"],
            "gen_ai.tool.call.id": call["id"],
            "hermes.exit_code": call["exit_code"],
        }
    )


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


def _mark_failed(span: trace.Span, failure: Mapping[str, str] | None) -> None:
    """Mark a span as failed if there is a failure: with its kind, and without its message, which may quote texts."""
    if failure is not None:
        span.set_attribute("error.type", failure["kind"])
        span.set_status(trace.Status(trace.StatusCode.ERROR, failure["kind"]))


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
