"""An environment's hooks: any signature that users know, sync or async, wrapped by plugins, one instance each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_core.agents.base import AgentResult
from hermes_core.errors import PluginError, SetupFailed, UsageError, VerifierError
from hermes_core.plugins.calling import EnvironmentHooks, HookArguments
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.manager import PluginManager

ROLLOUT: Any = SimpleNamespace(trajectory_id="t-1")
NO_TOOL: Any = None
ARGUMENTS = HookArguments({"id": 1}, ROLLOUT, NO_TOOL)
WITH_META = replace(ARGUMENTS, workspace_meta={"a": 1})
RESULT = AgentResult()


class Familiar:
    """Keyword-only arguments, a default, and no marks: as people's subclasses are written."""

    name = "familiar"

    async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str, exec_tool: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"made for": trajectory_id, "item": item["id"]}

    async def verify_and_score_trajectory(
        self, item: Any, result: Any, *, trajectory_id: str, exec_tool: Any, workspace_meta: Any = None
    ) -> tuple[float, dict[str, Any]]:
        return 0.5, {"meta": workspace_meta}


class Marked:
    name = "marked"

    def __init__(self, reward: float) -> None:
        self.reward = reward
        self.solved = False

    @hookimpl
    def verify_and_score_trajectory(self, item: Any) -> float:
        return self.reward

    @hookimpl(specname="solve_trajectory")
    def reference(self, rollout: Any, **rest: Any) -> None:
        self.solved = "workspace_meta" in rest


def managed(*extra: object) -> PluginManager:
    return PluginManager(extra=extra, load_entry_points=False)


def plugins(*extra: object) -> list[tuple[str, object]]:
    return managed(*extra).registered


async def test_keyword_only_and_defaulted_arguments_arrive() -> None:
    hooks = EnvironmentHooks(Familiar(), plugins())
    assert await hooks.setup(ARGUMENTS) == {"made for": "t-1", "item": 1}
    assert await hooks.verify(WITH_META, RESULT) == (0.5, {"meta": {"a": 1}})
    assert not hooks.can_solve
    with pytest.raises(UsageError, match="'familiar' has no reference solution"):
        await hooks.solve(ARGUMENTS)


async def test_plain_functions_a_bare_number_and_a_specname_do() -> None:
    environment = Marked(1)
    hooks = EnvironmentHooks(environment, plugins())
    assert await hooks.setup(ARGUMENTS) == {}
    assert await hooks.verify(ARGUMENTS, RESULT) == (1.0, {})
    await hooks.solve(ARGUMENTS)
    assert environment.solved


async def test_instances_do_not_answer_for_each_other() -> None:
    manager = plugins()
    first, second = EnvironmentHooks(Marked(1), manager), EnvironmentHooks(Marked(0), manager)
    assert [(await hooks.verify(ARGUMENTS, RESULT))[0] for hooks in (first, second, first)] == [1.0, 0.0, 1.0]


async def test_wrappers_receive_an_awaitable_and_return_another() -> None:
    class Doubling:
        @hookimpl(wrapper=True)
        def verify_and_score_trajectory(self, *, trajectory_id: str) -> Generator[None, Any, Any]:
            scoring = yield

            async def doubled() -> tuple[float, dict[str, Any]]:
                reward, details = await scoring
                return reward * 2, {**details, "doubled": trajectory_id}

            return doubled()

    class AddingOne:
        @hookimpl(wrapper=True, tryfirst=True)
        def verify_and_score_trajectory(self) -> Generator[None, Any, Any]:
            scoring = yield

            async def more() -> tuple[float, dict[str, Any]]:
                reward, details = await scoring
                return reward + 1, details

            return more()

    hooks = EnvironmentHooks(Marked(3), plugins(AddingOne(), Doubling()))
    assert await hooks.verify(ARGUMENTS, RESULT) == (7.0, {"doubled": "t-1"})


async def test_a_wrapper_can_try_again_and_see_what_was_raised() -> None:
    class Flaky:
        calls = 0

        async def setup_trajectory_workspace(self) -> dict[str, Any]:
            self.calls += 1
            if self.calls < 3:
                raise ConnectionError("not yet")
            return {"calls": self.calls}

        def verify_and_score_trajectory(self) -> float:
            return 1.0

    class Retrying:
        @hookimpl(wrapper=True)
        def setup_trajectory_workspace(self) -> Generator[None, Any, Any]:
            attempt = yield

            async def persistent() -> Any:
                while True:
                    try:
                        return await attempt
                    except ConnectionError:
                        await asyncio.sleep(0)

            return persistent()

    assert await EnvironmentHooks(Flaky(), plugins(Retrying())).setup(ARGUMENTS) == {"calls": 3}
    with pytest.raises(ConnectionError, match="not yet"):
        await EnvironmentHooks(Flaky(), plugins()).setup(ARGUMENTS)


async def test_a_wrapper_that_returns_nothing_is_told_so() -> None:
    class Forgetful:
        @hookimpl(wrapper=True)
        def verify_and_score_trajectory(self) -> Generator[None, Any, None]:
            yield

    with pytest.raises(PluginError, match=r"Forgetful\.verify_and_score_trajectory returned None, not an awaitable"):
        await EnvironmentHooks(Marked(1), plugins(Forgetful())).verify(ARGUMENTS, RESULT)


@pytest.mark.parametrize("score", [None, "1.0", float("nan"), float("inf"), (1.0,), (1.0, "details"), [1.0, {}]])
async def test_a_score_that_is_none_is_the_verifiers_failure(score: Any) -> None:
    with pytest.raises(VerifierError, match="return a finite reward"):
        await EnvironmentHooks(Marked(score), plugins()).verify(ARGUMENTS, RESULT)


async def test_metadata_that_is_no_mapping_is_a_failed_setup() -> None:
    class Odd(Marked):
        def setup_trajectory_workspace(self) -> Any:
            return ["not", "a", "mapping"]

    with pytest.raises(SetupFailed, match="not a mapping"):
        await EnvironmentHooks(Odd(1), plugins()).setup(ARGUMENTS)


async def test_cancelling_reaches_the_environment() -> None:
    class Slow(Marked):
        cancelled = False

        async def setup_trajectory_workspace(self) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    environment = Slow(1)
    task = asyncio.create_task(EnvironmentHooks(environment, plugins()).setup(ARGUMENTS))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.cancelled


class NoVerifier:
    pass


class Twice(Marked):
    @hookimpl(specname="verify_and_score_trajectory")
    def another(self) -> float:
        return 1.0


class WrongArgument:
    def verify_and_score_trajectory(self, *, trajektory_id: str) -> float:
        return 1.0


class WrappingItself:
    @hookimpl(wrapper=True)
    def verify_and_score_trajectory(self) -> Any:
        yield


class Registering(Marked):
    @hookimpl
    def hermes_register_tools(self, registry: Any) -> None: ...


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (NoVerifier(), "does not implement verify_and_score_trajectory"),
        (Twice(1), "more than once: another, verify_and_score_trajectory"),
        (WrongArgument(), "'trajektory_id'.*did you mean 'trajectory_id'"),
        (WrappingItself(), "as a wrapper"),
        (Registering(1), "not a hook that an environment can implement"),
    ],
)
def test_an_environment_whose_hooks_could_not_work_is_refused(environment: object, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        EnvironmentHooks(environment, plugins())


class Watching:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    @hookimpl
    def hermes_trajectory_finished(self, *, record: Any) -> None:
        self.seen.append(record["reward"])

    @hookimpl
    def hermes_sandbox_lost(self, reason: str, sandbox_id: str) -> None:
        self.seen.append((sandbox_id, reason))


class Failing:
    @hookimpl
    def hermes_trajectory_finished(self) -> None:
        raise RuntimeError("observer trouble")


def test_a_failing_observer_is_logged_by_name_and_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []
    events = managed(Failing(), Watching(seen), Failing()).events
    events.emit("trajectory_finished", trajectory_id="t", record={"reward": 1.0})
    assert seen == [1.0]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "plugin 'Failing' (given to the runtime) failed on the event trajectory_finished",
        "plugin 'Failing' (given to the runtime) failed on the event trajectory_finished",
    ]
    events.emit("sandbox_lost", sandbox_id="s", backend="local", profile="default", reason="gone")
    assert seen[1:] == [("s", "gone")]


def test_an_environment_observes_its_own_rollouts_only() -> None:
    seen: list[Any] = []

    class Both(Watching):
        def verify_and_score_trajectory(self) -> float:
            return 1.0

    manager = managed()
    hooks = EnvironmentHooks(Both(seen), manager.registered)
    hooks.events.emit("trajectory_finished", trajectory_id="t", record={"reward": 0.0})
    manager.events.emit("trajectory_finished", trajectory_id="t", record={"reward": 1.0})
    assert seen == [0.0]


class Cheating(Marked):
    name = "cheating"

    def __init__(self, cheats: Any) -> None:
        super().__init__(1)
        self.done: list[Any] = []
        self.named = cheats

    def cheats(self) -> Any:
        return self.named(self)


async def test_cheats_take_the_arguments_that_they_want_and_are_wrapped_by_plugins() -> None:
    counted: list[str] = []

    class Counting:
        @hookimpl(wrapper=True)
        def cheat_trajectory(self, cheat: str, trajectory_id: str) -> Generator[None, Any, Any]:
            counted.append(f"{cheat} in {trajectory_id}")
            return (yield)

    def named(environment: Cheating) -> dict[str, Any]:
        async def one(item: Any, *, workspace_meta: Any) -> None:
            environment.done.append((item, workspace_meta))

        def two() -> None:
            environment.done.append("two")

        return {"one": one, "two": two}

    environment = Cheating(named)
    hooks = EnvironmentHooks(environment, plugins(Counting()))
    for name in ("two", "one"):
        await hooks.cheat(name, WITH_META)
    assert environment.done == ["two", ({"id": 1}, {"a": 1})]
    assert counted == ["two in t-1", "one in t-1"]
    with pytest.raises(UsageError, match="unknown cheat 'three' of environment 'cheating'"):
        await hooks.cheat("three", ARGUMENTS)


@pytest.mark.parametrize(
    ("cheats", "said"),
    [
        (lambda environment: {"Upper": print}, "has a cheat named 'Upper'"),
        (lambda environment: {"a/b": print}, "has a cheat named 'a/b'"),
        (lambda environment: {"a": lambda slot: None}, "cheat_trajectory has no argument 'slot'"),
        (lambda environment: environment.missing, r"failed in cheats\(\): AttributeError"),
        (lambda environment: None, r"failed in cheats\(\): TypeError"),
    ],
)
def test_cheats_that_cannot_be_are_refused_by_name_when_they_are_asked_for(cheats: Any, said: str) -> None:
    hooks = EnvironmentHooks(Cheating(cheats), plugins())
    with pytest.raises(PluginError, match=said):
        hooks.check_cheat("a")


def test_an_environment_names_its_cheats_and_does_not_implement_the_hook() -> None:
    class Direct(Marked):
        def cheat_trajectory(self, cheat: str) -> None:
            raise AssertionError

    with pytest.raises(PluginError, match="'marked' implements cheat_trajectory"):
        EnvironmentHooks(Direct(1), plugins())
