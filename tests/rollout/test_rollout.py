"""One rollout against slots that fail on demand: what real sandboxes can't be made to do at a chosen moment."""

import asyncio
import contextlib
import gc
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from hermes_core.agents.base import AgentSettings, StopReason
from hermes_core.agents.baselines import NopAgent, OracleAgent
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.environment import Environment, FollowUp
from hermes_core.errors import (
    CommandError,
    ErrorKind,
    FailureKind,
    InfraError,
    ModelError,
    PolicyError,
    SandboxLost,
    SetupFailed,
    SlotLost,
    SlotUnclean,
    VerifierError,
)
from hermes_core.plugins.calling import EnvironmentHooks
from hermes_core.plugins.manager import PluginManager
from hermes_core.rollout.limits import Limits
from hermes_core.rollout.rollout import RolloutContext, begin, run_rescoring, run_rollout
from hermes_core.rollout.trajectory import Trajectory
from hermes_core.sandbox.commands import CommandResult, ExecutionResult, SandboxImage, Slot, SlotCommands
from hermes_core.tools.base import Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.slot_tools import SLOT_TOOLS

ITEM = {"id": "one"}
IMAGE = SandboxImage("python:3.12", "sha256:00")


class Commands(SlotCommands):
    """A slot's commands: what is run is noted, and fails where the test says so."""

    def __init__(self, backend, slot):
        super().__init__("/data/slot_0")
        self._backend, self._slot = backend, slot

    async def _run(self, command):
        self._backend.note(f"run {command.args}", self._slot)
        return CommandResult(exit_code=0, stdout=b"out")


Commands.__abstractmethods__ = frozenset()  # nothing else is asked for


class Slots:
    """A tool backend without sandboxes."""

    def __init__(self, *failures, isolation="user"):
        self.log, self.failures, self.given, self.images, self.phases = [], list(failures), 0, [], []
        self.isolation = isolation

    def note(self, event, slot):
        self.log.append(event)
        for failure in self.failures:
            if failure[0] == event:
                self.failures.remove(failure)
                raise failure[1]

    @asynccontextmanager
    async def lease(
        self,
        trajectory_id=None,
        *,
        profile=None,
        image=None,
        cwd=None,
        env=None,
        as_image=False,
        network=None,
        phase=None,
        traffic=None,
        group=None,
        verification=False,
        apart_from=None,
    ):
        kind = "fresh" if verification else "slot"
        self.phases.append(phase)
        self.images.append(image)
        self.note(f"acquire {kind}", None)
        self.given += 1
        try:
            box = f"s{self.given}", "box", "default", f"/data/{kind}", self.given, self.isolation
            yield Slot(*box, trajectory_id, IMAGE)
        finally:
            self.note(f"release {kind}", None)

    def commands(self, slot):
        return Commands(self, slot)

    preparation = commands

    async def release(self, slot, *, reset_workspace):
        self.note("release slot", slot)

    def tool(self, name):
        return SLOT_TOOLS[name]

    async def empty(self, slot):
        self.note("empty", slot)

    async def execute(self, slot, tool, args, *, timeout_s=None, user=None):
        tool_name = tool if isinstance(tool, str) else tool.name
        self.note(f"execute {tool_name} in {slot.workspace_dir}", slot)
        return ExecutionResult(True, output=json.dumps([getattr(tool_name, "name", tool_name), dict(args)]))

    async def enter_phase(self, slot, phase):
        self.phases.append(phase)

    async def kill_everything(self, slot):
        self.note("kill", slot)

    async def prepare(self, slot, key, build, *, private=False):
        await build(self.commands(slot), f"/data/prepared/{key}")
        return f"/data/prepared/{key}"


class Plain(Environment):
    """Hooks that do what the test says."""

    name = "plain"

    def __init__(self, **hooks):
        super().__init__()
        self.hooks = hooks

    def items(self):
        return [ITEM]

    def format_prompt(self, item):
        return f"do {item['id']}"

    async def _do(self, name, default, **given):
        hook = self.hooks.get(name)
        return default if hook is None else await hook(SimpleNamespace(**given))

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool, rollout):
        return await self._do("setup", {"made": True}, exec_tool=exec_tool, rollout=rollout)

    async def continue_trajectory(self, item, result, workspace_meta, rollout):
        return await self._do("continue", None, result=result, rollout=rollout, meta=workspace_meta)

    async def solve_trajectory(self, item, exec_tool, workspace_meta, rollout):
        await self._do("solve", None, rollout=rollout, meta=workspace_meta)

    async def verify_and_score_trajectory(self, item, result, *, exec_tool, workspace_meta, rollout):
        return await self._do("verify", 1.0, result=result, rollout=rollout, meta=workspace_meta, exec_tool=exec_tool)


class Doing:
    """An agent that does what the test says."""

    name = "doing"

    def __init__(self, work):
        self._work = work

    async def run(self, task):
        task.result.messages.extend(task.messages)
        await self._work(task)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self):
        pass


class Nothing(BaseModel):
    text: str = ""


def tools() -> ToolRegistry:
    registry = ToolRegistry()

    async def look(context, args):
        assert context.commands is None
        assert context.slot is None
        context.state["calls"] = context.state.get("calls", 0) + 1
        return {"output": args.text, "calls": context.state["calls"]}

    async def never(context, args):
        raise AssertionError("the backend runs it")

    registry.add(Tool("look", Nothing, look, "Looks.", where="driver", parallel_safe=True))
    registry.add(Tool("shell", Nothing, never, "Runs."))
    registry.add(Tool("hidden", Nothing, never, "Not given to this rollout."))
    return registry


def context(environment=None, agent=None, backend=None, **changes) -> RolloutContext:
    environment, registry = environment or Plain(), tools()
    return RolloutContext(
        environment=environment,
        hooks=EnvironmentHooks(environment, PluginManager(load_entry_points=False).registered),
        agent=agent or NopAgent(AgentSettings()),
        backend=backend or Slots(),
        backend_name="fake",
        tools=registry,
        tool_names=("look", "shell"),
        tool_schemas=registry.schemas(("look", "shell")),
        **changes,
    )


async def roll(*args, **kwargs) -> Trajectory:
    return await run_rollout(context(*args, **kwargs), ITEM, Trajectory("plain", "one", "one", 0, "doing", "fake"))


def raising(error):
    async def hook(_):
        raise error

    return hook


async def test_the_stages_come_in_order_and_each_is_timed():
    backend = Slots()

    async def setup(given):
        await given.rollout.commands.run("setup")
        return {"made": True}

    async def solve(given):
        assert given.meta == {"made": True}
        await given.rollout.commands.run("solve")

    async def verify(given):
        assert given.meta == {"made": True}
        await given.rollout.commands.run("verify")
        return 0.5, {"said": "half"}

    done = await roll(Plain(setup=setup, solve=solve, verify=verify), OracleAgent(), backend)
    assert backend.log == ["acquire slot", "run setup", "run solve", "kill", "run verify", "release slot"]
    assert (done.reward, done.details, done.failure) == (0.5, {"said": "half"}, None)
    assert backend.phases == ["setup", *["agent", "verify"] * 2]  # the user is asked for more in between
    record = done.to_record().to_json()
    assert all(seconds >= 0 for seconds in record["timings"].values())
    assert record["stop_reason"] == "finished"
    assert record["messages"] == [{"role": "user", "content": "do one"}]


@pytest.mark.parametrize(
    ("hook", "error", "kind", "stage", "released"),
    [
        ("setup", SetupFailed("no"), "setup", "setup", 1),
        ("setup", OSError("no"), "setup", "setup", 1),
        ("setup", InfraError("no"), "infra", "setup", 3),
        ("verify", VerifierError("no"), "verifier", "verify", 1),
        ("verify", ZeroDivisionError(), "verifier", "verify", 1),
        ("verify", InfraError("no"), "infra", "verify", 3),
    ],
)
async def test_a_hook_that_fails_ends_in_the_record_and_the_slot_is_released(hook, error, kind, stage, released):
    backend = Slots()
    done = await roll(Plain(**{hook: raising(error)}), backend=backend)
    assert (done.reward, str(done.failure.kind), done.failure.stage) == (None, kind, stage)
    assert backend.log.count("release slot") == released


def fine(given):
    """What a verification may give, or a set-up."""
    return 1.0 if hasattr(given, "result") else {}


async def left(given):
    given.exec_tool("bash", {"command": "true"})
    return fine(given)


async def taken_for_a_result(given):
    return float(given.exec_tool("bash", {"command": "true"}).success)


async def taken_for_true(given):
    return 1.0 if given.rollout.exec_tool("bash", {"command": "true"}) else 0.0


async def left_in_a_fresh_slot(given):
    async with given.rollout.fresh_slot() as fresh:
        fresh.exec_tool("bash", {"command": "true"})
    return fine(given)


@pytest.mark.parametrize("call", [left, taken_for_a_result, taken_for_true, left_in_a_fresh_slot])
@pytest.mark.parametrize(("hook", "kind"), [("setup", "setup"), ("verify", "verifier")])
async def test_a_tool_call_that_a_hook_does_not_await_is_told_and_not_scored(hook, kind, call):
    backend = Slots()
    done = await roll(Plain(**{hook: call}), backend=backend)
    gc.collect()  # Python would warn here of a coroutine that was never awaited, which is an error in these tests
    assert (done.reward, str(done.failure.kind)) == (None, kind)
    assert "exec_tool(…) was not awaited, and has not run" in done.failure.message
    assert "write `await exec_tool(…)`" in done.failure.message
    assert not any(event.startswith("execute") for event in backend.log)


async def asked_for_a_command(given):
    fresh = given.rollout.fresh_slot()
    return await fresh.exec_tool("bash", {"command": "true"})


async def awaited_instead(given):
    await given.rollout.fresh_slot()


async def entered_without_async(given):
    with given.rollout.fresh_slot():
        pass


@pytest.mark.parametrize("use", [asked_for_a_command, awaited_instead, entered_without_async])
async def test_a_fresh_slot_that_is_not_entered_says_how_it_is(use):
    backend = Slots()
    done = await roll(Plain(verify=use), backend=backend)
    assert (done.reward, str(done.failure.kind)) == (None, "verifier")
    assert "fresh_slot(…) was not entered (write `async with rollout.fresh_slot(…) as …:`)" in done.failure.message
    assert not any("fresh" in event for event in backend.log)


CALLS = {
    "commands.run": lambda rollout: rollout.commands.run("true"),
    "commands.start": lambda rollout: rollout.as_user("task").start("true"),
    "commands.write_file": lambda rollout: rollout.as_user("task").write_file("file", b""),
    "preparation.run": lambda rollout: rollout.preparation.run("true"),
    "prepare": lambda rollout: rollout.prepare("key", ["true"]),
    "files": lambda rollout: rollout.files(),
    "diff": lambda rollout: rollout.diff(),
    "empty": lambda rollout: rollout.empty(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("taken", [False, True])
async def test_no_call_that_a_hook_does_not_await_is_scored(name, taken):
    async def verify(given):
        made = CALLS[name](given.rollout)
        return float(bool(made)) if taken else 1.0

    done = await roll(Plain(verify=verify))
    gc.collect()
    assert (done.reward, str(done.failure.kind)) == (None, "verifier")
    assert f"{name}(…) was not awaited, and has not run" in done.failure.message


async def test_tool_calls_of_a_hook_may_run_at_the_same_time():
    async def verify(given):
        first = asyncio.create_task(given.exec_tool("bash", {"command": "1"}))
        results = await asyncio.gather(first, *(given.exec_tool("bash", {"command": "n"}) for _ in range(3)))
        return float(all(result.success for result in results))

    assert (await roll(Plain(verify=verify))).reward == 1.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1.0", (1.0, None)])
async def test_a_reward_that_is_none_is_the_verifiers_failure(reward):
    async def verify(_):
        return reward

    done = await roll(Plain(verify=verify))
    assert (done.reward, done.failure.kind) == (None, FailureKind.VERIFIER)


async def test_a_failing_model_is_not_verified_and_keeps_what_was_said():
    async def work(task):
        task.result.messages.append({"role": "assistant", "content": "half an answer"})
        task.result.stop(StopReason.MODEL_ERROR)
        raise ModelError("the endpoint is down")

    backend = Slots()
    done = await roll(agent=Doing(work), backend=backend)
    assert (done.failure.kind, done.failure.stage) == (FailureKind.MODEL, "agent")
    assert "kill" not in backend.log
    record = done.to_record().to_json()
    assert record["messages"][-1]["content"] == "half an answer"
    assert record["stop_reason"] == "model_error"


async def test_infrastructure_is_tried_again_on_a_fresh_slot_and_the_record_says_how_often():
    backend = Slots(("kill", SandboxLost("gone")), ("acquire slot", InfraError("none")))
    done = await roll(backend=backend)
    assert (done.reward, done.infra_retries) == (1.0, 2)
    assert done.to_record().infra_retries == 2
    assert backend.given == 2


async def test_infrastructure_that_keeps_failing_is_a_failure_and_never_a_reward():
    backend = Slots(*[("kill", SandboxLost("gone"))] * 5)
    done = await roll(backend=backend, limits=Limits(infra_retries=3))
    assert (done.reward, done.failure.kind, done.infra_retries) == (None, FailureKind.INFRA, 3)
    assert backend.given == 4


async def test_an_infrastructure_failure_that_a_hook_swallows_is_one_all_the_same():
    async def verify(given):
        try:
            await given.exec_tool("bash", {"command": "check"})
        except Exception:
            return 0.0
        return 1.0

    backend = Slots(("execute bash in /data/slot", SandboxLost("gone")))
    done = await roll(Plain(verify=verify), backend=backend, limits=Limits(infra_retries=0))
    assert (done.reward, done.failure.kind, done.failure.message) == (None, FailureKind.INFRA, "gone")


@pytest.mark.parametrize("call", ["run", "fresh", "acquire", "prepare"])
async def test_a_swallowed_infrastructure_failure_is_noticed_wherever_a_hook_meets_it(call):
    async def verify(given):
        try:
            if call == "run":
                await given.rollout.commands.run("check")
            elif call == "prepare":
                await given.rollout.prepare("key", "check")
            else:
                async with given.rollout.fresh_slot() as fresh:
                    await fresh.commands.run("check")
        except InfraError:
            pass
        return 0.0

    event = "acquire fresh" if call == "acquire" else "run check"
    done = await roll(Plain(verify=verify), backend=Slots((event, SandboxLost("gone"))), limits=Limits(infra_retries=0))
    assert (done.reward, done.failure.kind) == (None, FailureKind.INFRA)


async def test_an_infrastructure_failure_inside_a_group_of_tasks_wins():
    async def verify(given):
        async with asyncio.TaskGroup() as group:
            group.create_task(given.rollout.commands.run("check"))

    done = await roll(Plain(verify=verify), backend=Slots(*[("run check", SandboxLost("gone"))] * 3))
    assert (done.reward, done.failure.kind) == (None, FailureKind.INFRA)


async def test_no_slot_to_be_had_by_anyone_is_raised_not_recorded():
    with pytest.raises(PolicyError):
        await roll(backend=Slots(("acquire slot", PolicyError("no such level"))))


async def test_a_slot_that_cannot_be_released_does_not_cost_the_score():
    done = await roll(backend=Slots(("release slot", SandboxLost("gone"))))
    assert (done.reward, done.failure) == (1.0, None)


@pytest.mark.parametrize(("own", "of_the_run"), [(0.05, 60), (60, 0.05), (0.05, None)])
async def test_the_shorter_of_the_limits_of_the_item_and_of_the_run_counts(own, of_the_run):
    async def work(task):
        task.result.messages.append({"role": "assistant", "content": "so far"})
        await asyncio.sleep(60)

    environment = Plain()
    environment.agent_timeout_s = lambda item: own
    done = await roll(environment, Doing(work), limits=Limits(rollout_timeout=of_the_run))
    assert (done.reward, done.result.stop_reason) == (1.0, StopReason.TIME_LIMIT)


async def test_waiting_for_the_model_is_none_of_the_agents_time():
    async def work(task):
        for _ in range(3):
            async with task.waiting():
                await asyncio.sleep(0.3)
        task.result.messages.append({"role": "assistant", "content": "done"})
        task.result.stop(StopReason.FINISHED)

    done = await roll(agent=Doing(work), limits=Limits(rollout_timeout=0.5))
    assert (done.reward, done.result.stop_reason) == (1.0, StopReason.FINISHED)


async def test_waiting_has_a_limit_of_its_own_over_all_waits():
    async def work(task):
        task.result.messages.append({"role": "assistant", "content": "so far"})
        for _ in range(10):
            async with task.waiting():
                await asyncio.sleep(0.1)

    done = await roll(agent=Doing(work), limits=Limits(model_timeout=0.35))
    assert (done.reward, done.failure.kind) == (None, FailureKind.MODEL)
    assert "model_timeout" in done.failure.message


async def test_a_rollout_in_which_the_model_never_answered_is_the_models_failure():
    done = await roll(agent=Doing(lambda task: asyncio.sleep(60)), limits=Limits(rollout_timeout=0.05))
    assert (done.reward, done.failure.kind) == (None, FailureKind.MODEL)


async def test_a_solution_that_takes_too_long_is_verified_as_it_is():
    async def solve(_):
        await asyncio.sleep(60)

    done = await roll(Plain(solve=solve), OracleAgent(), limits=Limits(rollout_timeout=0.05))
    assert (done.reward, done.result.stop_reason) == (1.0, StopReason.TIME_LIMIT)


async def test_an_endpoint_that_is_down_is_recorded_and_goes_on_to_end_the_run():
    trajectory = Trajectory("plain", "one", "one", 0, "doing", "fake")
    work = Doing(lambda task: raising(EndpointDown("nobody there"))(task))
    with pytest.raises(EndpointDown):
        await run_rollout(context(agent=work), ITEM, trajectory)
    assert (trajectory.reward, trajectory.failure.kind) == (None, FailureKind.MODEL)


async def test_a_time_out_of_the_agents_own_is_not_the_rollouts():
    async def work(task):
        raise TimeoutError("a request")

    done = await roll(agent=Doing(work))
    assert (done.failure.kind, done.result.stop_reason) == (FailureKind.MODEL, StopReason.INTERRUPTED)


@pytest.mark.parametrize(("hook", "kind"), [("setup", FailureKind.SETUP), ("verify", FailureKind.VERIFIER)])
async def test_hooks_have_limits_of_their_own(hook, kind):
    async def forever(_):
        await asyncio.sleep(60)

    limits = Limits(setup_timeout=0.05, verify_timeout=0.05, rollout_timeout=60)
    done = await roll(Plain(**{hook: forever}), limits=limits)
    assert (done.failure.kind, done.failure.stage) == (kind, hook)
    assert "not done after 0.05 s" in done.failure.message


async def test_cancelling_releases_the_slot_and_is_recorded():
    started = asyncio.Event()

    async def work(task):
        started.set()
        await asyncio.sleep(60)

    backend, trajectory = Slots(), Trajectory("plain", "one", "one", 0, "doing", "fake")
    task = asyncio.create_task(run_rollout(context(agent=Doing(work), backend=backend), ITEM, trajectory))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.log == ["acquire slot", "release slot"]
    assert (trajectory.failure.kind, trajectory.failure.stage) == (FailureKind.CANCELLED, "agent")


async def test_a_prompt_that_cannot_be_made_is_the_tasks_fault():
    class Broken(Plain):
        def format_prompt(self, item):
            return item["missing"]

    done = await roll(Broken())
    assert done.failure.kind is FailureKind.SETUP


async def test_an_oracle_without_a_solution_is_told_so():
    class Unsolved(Plain):
        solve_trajectory = None

    done = await roll(Unsolved(), OracleAgent())
    assert "reference solution" in done.failure.message


async def test_tools_are_routed_and_the_model_is_told_json():
    told = {}

    async def work(task):
        assert [schema["function"]["name"] for schema in task.tool_schemas] == ["look", "shell"]
        assert task.parallel_safe == {"look"}
        for name, args in (("look", {"text": "a"}), ("shell", {"text": "b"}), ("look", {"text": "c"})):
            told[name] = json.loads(await task.tool_handler(name, args, task.trajectory_id))
        for name in ("hidden", "bash", "shel", "nonsense"):
            told[name] = json.loads(await task.tool_handler(name, {}, task.trajectory_id))

    backend = Slots()
    done = await roll(agent=Doing(work), backend=backend)
    assert done.failure is None
    assert told["look"] == {"output": "c", "calls": 2}
    assert json.loads(told["shell"]["output"]) == ["shell", {"text": "b"}]
    assert all("unknown tool" in told[name]["error"] for name in ("hidden", "bash", "shel", "nonsense"))
    assert "did you mean 'shell'" in told["shel"]["error"]
    assert [event for event in backend.log if event.startswith("execute")] == ["execute shell in /data/slot"]


async def test_arguments_that_a_tool_refuses_are_not_valid_by_its_schema():
    told = {}

    async def work(task):
        told.update(json.loads(await task.tool_handler("look", {"txt": "the sekret"}, task.trajectory_id)))

    done = await roll(agent=Doing(work), redact=lambda text: text.replace("sekret", "***"))
    assert done.failure is None
    assert told["invalid_arguments"] is True
    assert told["error"].startswith("wrong arguments for look") and "sekret" not in told["error"]


async def test_what_the_model_is_told_is_redacted():
    told = []

    async def work(task):
        told.append(await task.tool_handler("look", {"text": "the sekret"}, task.trajectory_id))

    await roll(agent=Doing(work), redact=lambda text: text.replace("sekret", "***"))
    assert "the ***" in told[0]
    assert "sekret" not in told[0]


async def test_whatever_the_model_is_told_every_endpoint_takes():
    class Odd(Plain):
        def format_prompt(self, item):
            return "do\0 one"

    told = []

    async def work(task):
        told.append(task.messages[-1]["content"])
        told.append(json.loads(await task.tool_handler("look", {"text": "a\0\x7f\x9b\ufffeb"}, task.trajectory_id)))
        told.append((await task.follow_up())["content"])

    await roll(Odd(**{"continue": parts("two\0")}), agent=Doing(work))
    assert told[0] == "do\ufffd one" and told[2] == "two\ufffd"
    assert "a\ufffd\ufffd\ufffd\ufffdb" in str(told[1])


async def test_an_answer_of_a_tool_says_what_the_record_keeps_of_the_call():
    def data(code, **more):
        return {"output": "", "exit_code": code, **more}

    results = {
        "status": ExecutionResult(True, metadata={"exit_code": 0, "bytes_dropped": 7}, answer=data(0, error=None)),
        "failing": ExecutionResult(False, metadata={"exit_code": 2}, error_kind=ErrorKind.COMMAND, answer=data(2)),
        "late": ExecutionResult(
            False, "", "late", {"exit_code": 124}, error_kind=ErrorKind.TIMEOUT, answer=data(124, error="late")
        ),
        "cut off": ExecutionResult(False, "", "late", {"timed_out": True}, error_kind=ErrorKind.TIMEOUT),
        "not run": ExecutionResult(False, "", "no", {"exit_code": -1}, answer=data(-1, error="no")),
        "broken": ExecutionResult(False, error="no", error_kind=ErrorKind.COMMAND),
        "other status": ExecutionResult(False, error="no", answer={"exit_code": 3, "error": "no"}),
    }
    said = {}

    class Answering(Slots):
        async def execute(self, slot, tool, args, *, timeout_s=None, user=None):
            return results[args["text"]]

    async def work(task):
        for which in results:
            said[which] = await task.tool_handler("shell", {"text": which}, task.trajectory_id)
        said["unknown"] = await task.tool_handler("shel", {}, task.trajectory_id)
        said["refused"] = await task.tool_handler("look", {"txt": ""}, task.trajectory_id)

    done = await roll(agent=Doing(work), backend=Answering())
    assert done.failure is None
    assert {which: (one.error and str(one.error.kind), one.exit_code) for which, one in said.items()} == {
        "status": (None, 0),
        "failing": (None, 2),
        "late": ("time_limit", 124),
        "cut off": ("time_limit", None),
        "not run": ("failed", None),
        "broken": ("failed", None),
        "other status": (None, 3),
        "unknown": ("unknown_tool", None),
        "refused": ("invalid_arguments", None),
    }
    assert said["status"].bytes_dropped == 7
    assert json.loads(said["late"]) == data(124, error="late")


async def test_the_record_has_what_the_hooks_ran_in_every_slot_and_when():
    async def setup(given):
        await given.rollout.commands.run(["ls", "a b"])
        await given.rollout.preparation.run(command="make")
        await given.rollout.prepare("key", ["install"])
        await given.exec_tool("bash", {"command": "echo é"})
        await given.exec_tool("write_file", {"path": "a", "content": "b"})
        return {}

    async def solve(given):
        await given.rollout.commands.run("solve")

    async def verify(given):
        async with given.rollout.fresh_slot() as fresh:
            await fresh.commands.run("check")
            await fresh.as_user("task").run(["check", "as user"])
            await fresh.as_user("task").write_file("file", b"")
        with contextlib.suppress(CommandError):
            await given.rollout.commands.run("missing")
        return 1.0

    backend = Slots(("run missing", CommandError("no such program: sekret")))
    done = await roll(
        Plain(setup=setup, solve=solve, verify=verify),
        OracleAgent(),
        backend,
        redact=lambda text: text.replace("sekret", "***"),
    )
    record = done.to_record(lambda text: text.replace("sekret", "***"))
    ran = [(each.stage, each.command, each.exit_code, each.output) for each in record.sandbox_commands]
    assert ran == [
        ("setup", "ls 'a b'", 0, "out"),
        ("setup", "make", 0, "out"),
        ("setup", "install", 0, "out"),
        ("setup", "echo é", None, '["bash", {"command": "echo \\u00e9"}]'),
        ("agent", "solve", 0, "out"),
        ("verify", "check", 0, "out"),
        ("verify", "check 'as user'", 0, "out"),
        ("verify", "missing", None, "no such program: ***"),
    ]
    times = [time for each in record.sandbox_commands for time in (each.started, each.ended)]
    assert [record.started, *times, record.ended] == sorted([record.started, *times, record.ended])


async def test_a_rollout_that_is_begun_again_or_cancelled_keeps_what_its_last_attempt_ran():
    async def setup(given):
        await given.rollout.commands.run("first")
        await given.rollout.commands.run("second")
        return {}

    backend = Slots(("run second", SandboxLost("gone")))
    again = await roll(Plain(setup=setup), backend=backend)
    assert [each.command for each in again.to_record().sandbox_commands] == ["first", "second"]

    async def forever(given):
        await given.rollout.commands.run("check")
        await asyncio.sleep(60)

    trajectory = Trajectory("plain", "one", "one", 0, "doing", "fake")
    running = asyncio.create_task(run_rollout(context(Plain(verify=forever)), ITEM, trajectory))
    while "verify" not in {each.stage for each in trajectory.commands}:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    record = trajectory.to_record()
    assert (record.failure.kind, record.isolation) == (FailureKind.CANCELLED, "user")
    assert [each.command for each in record.sandbox_commands] == ["check"]


async def test_the_record_says_what_was_rolled_out():
    versions = {"hermes-rl": "1", "python": "3"}
    base = context(seed=7, versions=versions)
    trajectory = begin(base, ITEM, "one", "group#1", 3)
    done = await run_rollout(base, ITEM, trajectory)
    record = done.to_record()
    assert (record.item, record.seed, record.versions) == (ITEM, 7, versions)
    assert (record.group, record.rollout_index, record.isolation) == ("group#1", 3, "user")
    assert record.image == IMAGE
    assert [schema["function"]["name"] for schema in record.tool_schemas] == ["look", "shell"]
    assert record.started <= record.ended


async def test_a_lost_sandbox_in_a_tool_call_ends_the_rollout_even_if_the_agent_goes_on():
    async def work(task):
        try:
            await task.tool_handler("shell", {}, task.trajectory_id)
        except InfraError:
            pass

    backend = Slots(("execute shell in /data/slot", SandboxLost("gone")))
    done = await roll(agent=Doing(work), backend=backend, limits=Limits(infra_retries=0))
    assert done.failure.kind is FailureKind.INFRA


async def test_observers_hear_of_every_tool_call():
    heard = []

    class Watched(Plain):
        pass

    environment = Watched()
    base = context(environment, Doing(lambda task: task.tool_handler("shell", {"text": "x"}, task.trajectory_id)))
    base.hooks.events.listen("tool_called", lambda **event: heard.append(event))
    trajectory = await run_rollout(base, ITEM, Trajectory("plain", "one", "one", 0, "doing", "fake"))
    assert [(event["tool_name"], event["arguments"]) for event in heard] == [("shell", {"text": "x"})]
    assert heard[0]["trajectory_id"] == trajectory.trajectory_id


async def test_a_fresh_slot_is_another_lease_and_is_given_back():
    async def verify(given):
        async with given.rollout.fresh_slot() as fresh:
            assert fresh.slot.slot_id != given.rollout.slot.slot_id
            result = await fresh.exec_tool("bash", {"command": "true"})
            await given.exec_tool("bash", {"command": "true"})
        return float(result.success)

    backend = Slots()
    done = await roll(Plain(verify=verify), backend=backend)
    assert done.reward == 1.0
    assert backend.log == [
        "acquire slot",
        "kill",
        "acquire fresh",
        "execute bash in /data/fresh",
        "execute bash in /data/slot",
        "release fresh",
        "release slot",
    ]


async def test_a_fresh_slot_of_another_image():
    class Pictured(Plain):
        def image(self, item):
            return "own"

    async def verify(given):
        async with given.rollout.fresh_slot(image="of the tests"), given.rollout.fresh_slot():
            return 1.0

    backend = Slots()
    assert (await roll(Pictured(verify=verify), backend=backend)).reward == 1.0
    assert backend.images == ["own", "of the tests", None]


def parts(*said):
    """A hook `continue_trajectory` that says these one after the other."""
    left = [*said]

    async def hook(given):
        await given.rollout.kill_everything()
        await given.rollout.commands.run("check")
        if isinstance(outcome := left.pop(0) if left else None, Exception):
            raise outcome
        return outcome

    return hook


async def test_the_agent_goes_on_as_long_as_the_environment_says_more():
    backend = Slots()
    done = await roll(Plain(**{"continue": parts("two", FollowUp("three"))}), OracleAgent(), backend)
    assert [message["content"] for message in done.result.messages] == ["do one", "two", "three"]
    assert backend.log == ["acquire slot", *["kill", "run check"] * 3, "kill", "release slot"]
    assert [each.stage for each in done.commands] == ["verify"] * 3
    assert (done.reward, done.failure) == (1.0, None)


@pytest.mark.parametrize(
    ("said", "kind"),
    [(VerifierError("no"), "verifier"), (InfraError("no"), "infra"), (7, "verifier"), (SetupFailed("no"), "setup")],
)
async def test_a_part_that_can_t_be_checked_is_a_failure(said, kind):
    done = await roll(Plain(**{"continue": parts(said, said, said)}))
    assert (done.reward, str(done.failure.kind), done.failure.stage) == (None, kind, "agent")


async def test_a_part_whose_check_met_the_agents_work_is_left_to_the_verification():
    async def verify(given):
        return 0.25

    done = await roll(Plain(verify=verify, **{"continue": parts(CommandError("no room", code="no_space"))}))
    assert (done.reward, done.failure, len(done.result.messages)) == (0.25, None, 1)


async def test_a_check_of_a_part_that_takes_too_long_is_a_failure():
    async def slow(given):
        await asyncio.sleep(5)

    done = await roll(Plain(**{"continue": slow}), limits=Limits(verify_timeout=0.05))
    assert (str(done.failure.kind), "not done after" in done.failure.message) == ("verifier", True)


@pytest.mark.parametrize(
    ("whole_s", "part_s", "works_s", "reason", "messages"),
    [
        (0.4, None, (0.1, 0.1), "finished", 2),
        (0.3, None, (0.2, 0.2), "time_limit", 2),
        (None, 0.1, (0.02, 0.3), "time_limit", 2),
        (5, 0.3, (0.2, 0.2), "finished", 2),
        (0.2, 5, (0.3, 0.0), "time_limit", 1),
    ],
)
async def test_the_agents_time_is_for_all_parts_and_for_each(whole_s, part_s, works_s, reason, messages):
    left = [FollowUp("two", agent_timeout_s=part_s), None]

    async def check(given):
        await asyncio.sleep(0.5)  # longer than any limit of the agent, and not its time
        return left.pop(0)

    async def work(task):
        await task.tool_handler("shell", {"text": "x"}, task.trajectory_id)
        for each_s in works_s:
            await asyncio.sleep(each_s)
            if (message := await task.follow_up()) is not None:
                task.result.messages.append(message)

    limits = Limits(rollout_timeout=whole_s, verify_timeout=5)
    done = await roll(Plain(**{"continue": check}), Doing(work), limits=limits)
    assert (str(done.result.stop_reason), len(done.result.messages), done.failure) == (reason, messages, None)


async def test_an_item_names_its_image():
    class Pictured(Plain):
        def image(self, item):
            return f"image-of-{item['id']}"

    backend = Slots()
    await roll(Pictured(), backend=backend)
    assert backend.images == ["image-of-one"]


@pytest.mark.parametrize(("works_s", "kind"), [(0.01, None), (5, FailureKind.VERIFIER)])
async def test_waiting_for_a_processor_is_not_the_hooks_time(works_s, kind):
    class Busy(Slots):
        @asynccontextmanager
        async def processor(self, slot, *, alone=False):
            await asyncio.sleep(0.3)
            yield

    async def verify(given):
        async with given.rollout.fresh_slot() as fresh, fresh.processor():
            await asyncio.sleep(works_s)
        return 1.0

    done = await roll(Plain(verify=verify), backend=Busy(), limits=Limits(verify_timeout=0.1))
    assert (done.failure and done.failure.kind) == kind


async def test_shell_commands_prepare_a_directory_and_a_failing_one_says_so():
    async def setup(given):
        return {"dir": await given.rollout.prepare("key", ["one", "two"])}

    backend = Slots()
    done = await roll(Plain(setup=setup), backend=backend)
    assert done.failure is None
    assert backend.log[1:3] == ["run one", "run two"]


async def test_a_recorded_patch_is_kept():
    async def verify(given):
        given.rollout.record_patch("--- a\n+++ b\n")
        return 1.0

    assert (await roll(Plain(verify=verify))).to_record().to_json()["patch"] == "--- a\n+++ b\n"


async def test_rescoring_asks_the_environment_and_begins_anew_like_a_rollout():
    class Patches(Plain):
        async def score_patch(self, item, patch, rollout):
            async with rollout.fresh_slot() as fresh:
                await fresh.commands.run(f"apply {patch}")
            return 1.0, {"patch": patch}

    backend = Slots(("run apply P", SandboxLost("gone")))
    trajectory = Trajectory("plain", "one", "one", 0, "doing", "fake")
    await run_rescoring(context(Patches(), backend=backend), ITEM, "P", trajectory)
    assert (trajectory.reward, trajectory.details, trajectory.infra_retries) == (1.0, {"patch": "P"}, 1)


def checking(outcomes, ran=None):
    """A hook that checks afresh: what it finds is worth what it says, and `killed` is a disturbance."""

    async def verify(given):
        async def lay_out(fresh):
            await fresh.commands.run("lay out")

        async def check(fresh):
            await fresh.commands.run("check")
            return outcomes.pop(0)

        found = await given.rollout.check_afresh(
            lay_out, check, disturbed=lambda found: found if found == "killed" else None
        )
        return float(found == "passed"), {"found": found}

    return verify


@pytest.mark.parametrize(
    ("outcomes", "reward", "repeated"),
    [
        (["passed"], 1.0, None),
        (["failed"], 0.0, None),
        (["killed", "passed"], 1.0, "killed"),
        (["killed", "killed"], 0.0, "killed"),
    ],
)
async def test_a_check_that_was_killed_is_repeated_once_and_the_record_says_so(outcomes, reward, repeated):
    backend = Slots()
    done = await roll(Plain(verify=checking(outcomes)), backend=backend)
    assert (done.reward, done.failure, outcomes) == (reward, None, [])
    assert done.to_record().check_repeated == repeated
    assert backend.log.count("empty") == backend.log.count("run check") - 1


async def test_a_check_is_repeated_though_the_agents_slot_can_not_be_emptied():
    """Without a guest a slot of level `dedicated` never can be: a check could get rid of its rollout."""
    backend = Slots(("empty", SlotLost("nothing but a new sandbox is proof")))
    limits = Limits(infra_retries=0)
    done = await roll(Plain(verify=checking(["killed", "failed"])), backend=backend, limits=limits)
    assert (done.reward, done.failure) == (0.0, None)


@pytest.mark.parametrize("code", ["killed", "no_space", "spawn"])
async def test_what_could_not_be_laid_out_is_laid_out_once_more(code):
    backend = Slots(("run lay out", CommandError("no", code=code)))
    done = await roll(Plain(verify=checking(["passed"])), backend=backend)
    assert (done.reward, done.repeated) == (1.0, "no")


async def test_what_can_never_be_laid_out_for_want_of_room_is_infrastructure():
    backend = Slots(*[("run lay out", CommandError("no", code="no_space"))] * 2)
    done = await roll(Plain(verify=checking([])), backend=backend, limits=Limits(infra_retries=0))
    assert (done.reward, done.failure.kind) == (None, FailureKind.INFRA)


async def test_what_can_be_laid_out_nowhere_is_the_agents_doing():
    backend = Slots(("run lay out", CommandError("no such name", code="invalid")))
    done = await roll(Plain(verify=checking([])), backend=backend)
    assert (done.reward, done.failure, done.repeated) == (0.0, None, None)
    assert "no such name" in done.details["reason"]


@pytest.mark.parametrize("event", ["kill", "execute shell in /data/slot", "run check"])
async def test_a_slot_that_does_not_die_is_the_agents_doing_wherever_it_is_met(event):
    async def work(task):
        await task.tool_handler("shell", {}, task.trajectory_id)

    async def verify(given):
        try:
            await given.rollout.commands.run("check")
        except Exception:
            pass
        return 1.0

    backend = Slots((event, SlotUnclean("alive")))
    done = await roll(Plain(verify=verify), Doing(work), backend)
    assert (done.reward, done.failure, done.infra_retries) == (0.0, None, 0)
    assert "alive" in done.details["reason"]


async def test_a_fresh_slot_that_does_not_die_is_nobodys_doing():
    backend = Slots(("run lay out", SlotUnclean("alive")))
    done = await roll(Plain(verify=checking([])), backend=backend, limits=Limits(infra_retries=0))
    assert (done.reward, done.failure.kind) == (None, FailureKind.INFRA)


@pytest.mark.parametrize(("call", "reward"), [("commands", 0.0), ("preparation", None)])
async def test_a_command_that_fails_in_verification_is_the_work_of_who_can_write_there(call, reward):
    async def verify(given):
        await getattr(given.rollout, call).run("look")

    backend = Slots(("run look", CommandError("nothing there", code="not_found")))
    done = await roll(Plain(verify=verify), backend=backend)
    assert done.reward == reward
    assert (done.failure is None) == (reward is not None)


async def endless(_):
    await asyncio.sleep(60)


async def deaf(_):
    """A hook that ignores its cancellation once, and goes on until 2.5 s are over."""
    until = asyncio.get_running_loop().time() + 2.5
    while (left := until - asyncio.get_running_loop().time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)
    return 1.0


async def timed(*args, **kwargs) -> tuple[Trajectory, float]:
    clock = asyncio.get_running_loop().time
    began = clock()
    done = await roll(*args, **kwargs)
    return done, clock() - began


@pytest.mark.few(2)
@pytest.mark.parametrize("hook", ["setup", "verify"])
@pytest.mark.parametrize("stuck", [endless, deaf])
async def test_what_is_not_over_at_the_deadline_is_no_reward_and_gives_its_slot_back(hook, stuck):
    backend = Slots()
    base = context(Plain(**{hook: stuck}), backend=backend, limits=Limits(deadline=0.6, verify_timeout=60))
    trajectory = Trajectory("plain", "one", "one", 0, "doing", "fake")
    async with asyncio.timeout(2.0):
        await run_rollout(base, ITEM, trajectory)
    record = trajectory.to_record()
    limited = hook == "verify" and stuck is endless  # which ended at a limit of its own, just before the deadline
    kind = FailureKind.VERIFIER if limited else FailureKind.INFRA
    assert (record.reward, record.failure.kind, record.failure.stage) == (None, kind, hook)
    assert limited or record.failure.message == "not over at its deadline of 0.6 s"
    while len(base.running):
        await asyncio.sleep(0.01)
    assert "release slot" in backend.log
    assert (trajectory.reward, trajectory.failure) == (None, record.failure), "what came later changes nothing"


async def test_no_slot_until_the_deadline_is_an_infrastructure_failure():
    class Full(Slots):
        @asynccontextmanager
        async def lease(self, *_, **__):
            await asyncio.sleep(60)
            yield

    done = await roll(backend=Full(), limits=Limits(deadline=0.1))
    assert (done.failure.kind, done.failure.stage) == (FailureKind.INFRA, "acquire")


async def test_an_agent_is_stopped_before_the_deadline_so_that_its_work_is_scored():
    async def work(task):
        task.result.messages.append({"role": "assistant", "content": "so far"})
        await asyncio.sleep(60)

    done, took_s = await timed(agent=Doing(work), limits=Limits(deadline=1.0))
    assert (done.reward, done.failure, done.result.stop_reason) == (1.0, None, StopReason.TIME_LIMIT)
    assert took_s > 0.6


@pytest.mark.parametrize(("waited_s", "kind"), [(0.0, None), (30.0, FailureKind.MODEL)])
async def test_an_endpoint_that_fails_until_the_deadline_is_not_the_agents_time_limit(waited_s, kind):
    async def work(task):
        task.result.messages.append({"role": "assistant", "content": "so far"})
        try:
            async with task.waiting():
                await asyncio.sleep(60)
        finally:
            task.result.waited_s += waited_s

    done = await roll(agent=Doing(work), limits=Limits(deadline=0.4))
    assert (done.failure and done.failure.kind) == kind
    assert done.reward == (1.0 if kind is None else None)


async def test_a_slow_release_costs_neither_the_score_nor_the_time():
    class Slow(Slots):
        may_end = asyncio.Event()

        @asynccontextmanager
        async def lease(self, trajectory_id=None, **given):
            async with super().lease(trajectory_id, **given) as slot:
                yield slot
                while not self.may_end.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await self.may_end.wait()

    for hooks, kind in (({}, None), ({"setup": raising(SetupFailed("no"))}, FailureKind.SETUP)):
        async with asyncio.timeout(30):  # it does not wait for a release that never ends
            done = await roll(Plain(**hooks), backend=Slow(), limits=Limits(deadline=0.5))
        assert (done.failure and done.failure.kind, done.reward) == (kind, 1.0 if kind is None else None)
    Slow.may_end.set()


async def test_nothing_is_begun_anew_when_the_agent_would_have_no_time():
    async def setup(_):
        await asyncio.sleep(0.5)
        raise SandboxLost("gone")

    done = await roll(Plain(setup=setup), limits=Limits(deadline=0.6))
    assert (done.failure.kind, done.infra_retries) == (FailureKind.INFRA, 0)

    async def slow(_):
        await asyncio.sleep(0.5)

    done = await roll(Plain(setup=slow), limits=Limits(deadline=0.6, infra_retries=0))
    assert (done.failure.kind, "no time for the agent" in done.failure.message) == (FailureKind.INFRA, True)
