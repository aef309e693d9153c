"""The spans and metrics of a run, with the SDK's own exporters in memory and with a collector."""

import http.server
import json
import threading

import hermes_otel
import pytest
from hermes_otel import telemetry as telemetry_module
from hermes_otel.telemetry import Telemetry
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, call
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hermes_core.errors import ConfigError, PluginError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

SECRET_PROMPT = "tell nobody of this prompt"


def script(request):
    if request["messages"][-1]["content"] == "fail":
        return Fault(400, "no such thing")
    if request["messages"][-1]["role"] == "tool":
        return Reply("An answer that nobody sees", usage=(20, 5))
    return Reply(tool_calls=[call("nothing", text="arguments")], usage=(10, 3))


def prompts(tmp_path, *texts):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {"dataset_name": str(path), "enabled_toolsets": ()}


@pytest.fixture
def exported():
    spans, metrics = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    return Telemetry(tracers, MeterProvider([metrics])), spans, metrics


async def run(tmp_path, telemetry, *texts):
    found = []
    runtime = Runtime(Settings(state_dir=tmp_path), plugins=[telemetry], load_entry_points=False)
    async with runtime, ScriptedServer(script) as server:
        settings = {"model": "scripted", "base_url": server.base_url}
        env = prompts(tmp_path, *texts)
        await run_rollouts(runtime, "prompts", env=env, settings=settings, on_record=found.append)
    return found


def points(metrics):
    """Return each metric's points, by its name."""
    (resource,) = metrics.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


async def test_a_rollout_is_a_span_with_one_for_each_answer_and_call(tmp_path, exported):
    telemetry, spans, _ = exported
    (record,) = await run(tmp_path, telemetry, SECRET_PROMPT)
    made = {span.name: span for span in spans.get_finished_spans()}
    assert sorted(made) == ["chat scripted", "execute_tool nothing", "rollout prompts"]
    rollout, answer, tool = made["rollout prompts"], made["chat scripted"], made["execute_tool nothing"]
    assert answer.parent.span_id == tool.parent.span_id == rollout.context.span_id
    assert rollout.attributes["hermes.item_id"] == record["item_id"]
    assert rollout.attributes["hermes.trajectory_id"] == record["trajectory_id"]
    assert (rollout.start_time, rollout.end_time) == (int(record["started"] * 1e9), int(record["ended"] * 1e9))
    assert rollout.start_time <= answer.start_time <= answer.end_time <= rollout.end_time
    assert answer.attributes["gen_ai.usage.input_tokens"] == 20
    assert (tool.status.status_code, tool.attributes["error.type"]) == (StatusCode.ERROR, "unknown_tool")
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert SECRET_PROMPT not in told and "nobody sees" not in told and "arguments" not in told


async def test_what_is_counted(tmp_path, exported):
    telemetry, spans, metrics = exported
    await run(tmp_path, telemetry, "one", "fail", "two")
    found = points(metrics)
    ended = {point.attributes["hermes.outcome"]: point.value for point in found["hermes.rollouts"]}
    assert ended == {"finished": 2, "model": 1}
    assert [point.value for point in found["hermes.rollouts.active"]] == [0]
    used = {point.attributes["gen_ai.token.type"]: point.sum for point in found["gen_ai.client.token.usage"]}
    assert used == {"input": 60, "output": 16}
    (failed,) = [
        span
        for span in spans.get_finished_spans()
        if span.status.status_code is StatusCode.ERROR and span.name.startswith("rollout")
    ]
    assert failed.attributes["error.type"] == "model"


def test_a_sandbox_that_is_lost_and_then_ended_is_gone_once(exported):
    telemetry, _, metrics = exported
    for number in ("a", "b"):
        telemetry.hermes_sandbox_created(number, "local", "default")
    telemetry.hermes_sandbox_lost("a")
    telemetry.hermes_sandbox_terminated("a")
    (point,) = points(metrics)["hermes.sandboxes"]
    assert point.value == 1


def test_it_is_off_unless_the_setting_is_on(monkeypatch):
    monkeypatch.setattr(telemetry_module, "open_telemetry", lambda: pytest.fail("telemetry is off"))
    Runtime(Settings(), plugins=[hermes_otel], load_entry_points=False)


def test_telemetry_without_a_plugin_says_what_to_install():
    with pytest.raises(ConfigError, match="no plugin in use sends it") as raised:
        Runtime(Settings(telemetry=True), load_entry_points=False)
    assert raised.value.hint == "pip install hermes-rl-otel"


@pytest.mark.entry_points
def test_telemetry_with_the_plugin_left_out_says_how_to_use_it():
    with pytest.raises(ConfigError, match="no plugin in use sends it") as raised:
        Runtime(Settings(telemetry=True, plugins=("docker",)))
    assert raised.value.hint == "add 'otel' to HERMES_PLUGINS"


class Deaf:
    async def aclose(self):
        pass


class HasADeafObserver:
    @hookimpl
    def hermes_register_observers(self, registry):
        registry.add("deaf", Deaf)


def test_an_observer_without_a_hook_is_refused():
    with pytest.raises(PluginError, match=r"observer 'deaf' of plugin 'HasADeafObserver' .* implements no hook"):
        Runtime(Settings(telemetry=True), plugins=[HasADeafObserver()], load_entry_points=False)


async def test_a_collector_gets_everything_before_the_program_ends(tmp_path, monkeypatch):
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        runtime = Runtime(Settings(state_dir=tmp_path, telemetry=True), plugins=[hermes_otel], load_entry_points=False)
        async with runtime, ScriptedServer(script) as model:
            settings = {"model": "scripted", "base_url": model.base_url}
            await run_rollouts(runtime, "prompts", env=prompts(tmp_path, "one"), settings=settings)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert {path for path, _ in got} == {"/v1/traces", "/v1/metrics"}
    assert any(b"rollout prompts" in body or body[:2] == b"\x1f\x8b" for _, body in got)
    assert any(b"hermes-rl" in body or body[:2] == b"\x1f\x8b" for _, body in got)
