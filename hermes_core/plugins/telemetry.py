"""An observer that tells OpenTelemetry of rollouts: spans and metrics, without texts. Off unless it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hermes_core.errors import ConfigError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

_NS = 1_000_000_000


class Telemetry:
    """Spans and metrics of rollouts. Names of the `gen_ai` conventions are used where they have one.

    A rollout's spans are made from its record when it has ended: one for itself, one for each answer of the model, one
    for each tool call. None of them has a prompt, an answer, arguments or output in it.

    Args:
        tracers: where the spans go.
        meters: where the metrics go.
    """

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        self._providers: tuple[TracerProvider | MeterProvider, ...] = (tracers, meters)
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

    @classmethod
    def from_environment(cls) -> Telemetry:
        """Return one that sends to the collector that the `OTEL_*` variables name, by OTLP over HTTP.

        Raises:
            ConfigError: the SDK is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"telemetry is on, and OpenTelemetry is not installed: {error}", hint="pip install 'hermes-rl[otel]'"
            ) from error
        resource = Resource.create()  # from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "hermes-rl"}))
        tracers = TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        meters = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource)
        return cls(tracers, meters)

    async def aclose(self) -> None:
        """Send what is left. Idempotent."""
        providers, self._providers = self._providers, ()
        for provider in providers:
            if (shutdown := getattr(provider, "shutdown", None)) is not None:
                await asyncio.to_thread(shutdown)

    @hookimpl
    def hermes_trajectory_started(self, environment: str) -> None:
        """Count a rollout that runs."""
        self._active.add(1, {"hermes.environment": environment})

    @hookimpl
    def hermes_trajectory_finished(self, record: Mapping[str, Any]) -> None:
        """Make the spans of a rollout, and count it."""
        self._active.add(-1, {"hermes.environment": record["environment"]})
        self._count(record)
        self._trace(record)

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id: str, backend: str, profile: str) -> None:
        """Count a sandbox."""
        self._alive[sandbox_id] = kind = {"hermes.backend": backend, "hermes.profile": profile}
        self._sandboxes.add(1, kind)

    @hookimpl
    def hermes_sandbox_lost(self, sandbox_id: str) -> None:
        """Count a sandbox no longer."""
        self._forget(sandbox_id)

    @hookimpl
    def hermes_sandbox_terminated(self, sandbox_id: str) -> None:
        """Count a sandbox no longer."""
        self._forget(sandbox_id)

    def _forget(self, sandbox_id: str) -> None:
        if (kind := self._alive.pop(sandbox_id, None)) is not None:
            self._sandboxes.add(-1, kind)

    def _count(self, record: Mapping[str, Any]) -> None:
        about = _about(record)
        outcome = record["failure"]["kind"] if record["failure"] else "finished"
        self._rollouts.add(1, {**about, "hermes.outcome": outcome})
        if record["reward"] is not None:
            self._reward.record(record["reward"], about)
        for stage, seconds in record["timings"].items():
            if seconds is not None:
                self._stages.record(seconds, {**about, "hermes.stage": stage.removesuffix("_s")})
        if record["turns"]:
            self._waits.record(record["waited_s"], about)
        if record["usage"]["cost"] is not None:
            self._cost.add(record["usage"]["cost"], about)
        for turn in record["turns"]:
            asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": record["model"] or "unknown"}
            self._turns.record(turn["ended"] - turn["started"], asked)
            self._tokens.record(turn["prompt_tokens"], {**asked, "gen_ai.token.type": "input"})
            self._tokens.record(turn["completion_tokens"], {**asked, "gen_ai.token.type": "output"})
        for call in record["calls"]:
            if call["ended"] is not None:
                error = {"error.type": call["error"]["kind"]} if call["error"] else {}
                self._calls.record(call["ended"] - call["started"], {"gen_ai.tool.name": call["name"], **error})

    def _trace(self, record: Mapping[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        rollout = self._tracer.start_span(
            f"rollout {record['environment']}", start_time=_ns(record["started"]), attributes=_of_rollout(record)
        )
        inside = set_span_in_context(rollout)
        for turn in record["turns"]:
            self._tracer.start_span(
                f"chat {record['model'] or ''}".strip(),
                inside,
                SpanKind.CLIENT,
                start_time=_ns(turn["started"]),
                attributes=_of_turn(record, turn),
            ).end(_ns(turn["ended"]))
        for call in record["calls"]:
            if call["ended"] is None:
                continue
            span = self._tracer.start_span(
                f"execute_tool {call['name']}", inside, start_time=_ns(call["started"]), attributes=_of_call(call)
            )
            _mark(span, call["error"])
            span.end(_ns(call["ended"]))
        _mark(rollout, record["failure"])
        rollout.end(_ns(record["ended"]))


def _about(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what rollouts are told apart by in metrics. There are few of each."""
    known = {"environment": record["environment"], "agent": record["agent"], "backend": record["backend"]}
    return {f"hermes.{key}": value for key, value in known.items()} | (
        {"gen_ai.request.model": record["model"]} if record["model"] else {}
    )


def _of_rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("trajectory_id", "item_id", "rollout_index", "reward", "stop_reason", "waited_s", "infra_retries")
    found = {**_about(record), **{f"hermes.{key}": record[key] for key in keys}}
    return _known({**found, "hermes.cost": record["usage"]["cost"]})


def _of_turn(record: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    return _known(
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


def _of_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return _known(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call["name"],
            "gen_ai.tool.call.id": call["id"],
            "hermes.exit_code": call["exit_code"],
        }
    )


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


def _mark(span: Span, failure: Mapping[str, str] | None) -> None:
    """Mark a span as failed, with the kind of its failure and without its message, which may have texts in it."""
    from opentelemetry.trace import Status, StatusCode

    if failure is not None:
        span.set_attribute("error.type", failure["kind"])
        span.set_status(Status(StatusCode.ERROR, failure["kind"]))


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
