"""The runtime: everything by name, two side by side, and all of it closed whatever fails."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field, SecretStr

from hermes_core.agents.base import AgentSettings
from hermes_core.environment import Environment, EnvironmentConfig
from hermes_core.errors import ConfigError, PluginError, ProvisionError, UnknownNameError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.registry import Registrar
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Diagnosis,
    Isolation,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
)
from hermes_core.settings import Settings
from hermes_core.tools.base import Tool
from hermes_core.tools.registry import expand_toolset, resolve_tools


class PaperConfig(SandboxConfig):
    colour: str = "white"


class PaperBackend(Backend):
    """Makes nothing; knows how often it was closed."""

    name = "paper"
    config_class = PaperConfig
    capabilities = Capabilities(isolation=frozenset({Isolation.USER}))

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.closed = 0

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise ProvisionError("paper holds nothing")

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        return []

    async def terminate_id(self, sandbox_id: str) -> None:
        return

    async def check(self) -> Diagnosis:
        return Diagnosis(True, "fine")

    async def aclose(self) -> None:
        self.closed += 1


class PaperEnvironmentConfig(EnvironmentConfig):
    pages: int = 1


class PaperEnvironment(Environment):
    name: ClassVar[str] = "paper"
    config_class = PaperEnvironmentConfig

    def items(self) -> Sequence[Any]:
        return []

    def format_prompt(self, item: Any) -> str:
        return "fold it"


class PaperAgent:
    name = "paper"

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings

    async def run(self, task: Any) -> Any:
        return task.result

    async def aclose(self) -> None:
        return


class Anything(BaseModel):
    pass


async def nothing(context: Any, params: Any) -> ExecutionResult:
    return ExecutionResult(True)


def tool(name: str, *toolsets: str) -> Tool:
    return Tool(name=name, params=Anything, handler=nothing, description="Does nothing.", toolsets=toolsets)


@hookimpl
def hermes_register_backends(registry: Any) -> None:
    registry.add("paper", PaperBackend, aliases=("sheet",))
    registry.add("torn", lambda settings: 1 / 0)
    registry.add("missing-sdk", "no_such_sdk:Backend")
    registry.add("impostor", dict)


@hookimpl
def hermes_register_environments(registry: Any) -> None:
    registry.add("paper", PaperEnvironment)
    registry.add("impostor", dict)


@hookimpl
def hermes_register_agents(registry: Any) -> None:
    registry.add("paper", PaperAgent)


PAPER = SimpleNamespace(
    __name__="paper",
    hermes_register_backends=hermes_register_backends,
    hermes_register_environments=hermes_register_environments,
    hermes_register_agents=hermes_register_agents,
)


def new_runtime(*plugins: object, **settings: Any) -> Runtime:
    return Runtime(Settings(**settings), plugins=(PAPER, *plugins), load_entry_points=False)


def tools_of(**hooks: Any) -> SimpleNamespace:
    return SimpleNamespace(hermes_register_tools=hookimpl(hooks.pop("register")), **hooks)


async def test_a_backend_is_made_once_and_closed_with_the_runtime() -> None:
    async with new_runtime() as runtime:
        backend = runtime.backend("paper")
        assert isinstance(backend, PaperBackend)
        assert runtime.backend("paper") is runtime.backend("sheet") is backend
        assert backend.settings is runtime.settings
    assert backend.closed == 1
    await runtime.aclose()
    assert backend.closed == 1
    with pytest.raises(UsageError, match="closed"):
        runtime.backend("paper")


async def test_two_runtimes_live_side_by_side() -> None:
    async with new_runtime(model="one") as first, new_runtime(model="two", owner="me") as second:
        assert first.backend("paper") is not second.backend("paper")
        assert first.tools is not second.tools
        assert first.agent("paper").settings.model == "one"  # type: ignore[attr-defined]
        assert second.agent("paper").settings.model == "two"  # type: ignore[attr-defined]
        assert second.owner == "me"
        assert first.owner != new_runtime().owner
        assert first.tool_backend("paper") is not first.tool_backend("paper")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("papre", UnknownNameError, "unknown backend 'papre'.*did you mean 'paper'"),
        ("torn", PluginError, "backend 'torn' of plugin 'paper' .*cannot be made: ZeroDivisionError"),
        ("missing-sdk", PluginError, "cannot be loaded: ModuleNotFoundError: No module named 'no_such_sdk'"),
        ("impostor", PluginError, "cannot be made|not a Backend"),
    ],
)
async def test_a_backend_that_cannot_be_had_is_explained(name: str, error: type[Exception], message: str) -> None:
    async with new_runtime() as runtime:
        with pytest.raises(error, match=message):
            runtime.backend(name)


class WrongKey(SandboxConfig):
    unsupported = ("image", "procesors")


class OneWord(SandboxConfig):
    unsupported = "image"  # type: ignore[assignment]


def able(isolation: Any = frozenset({Isolation.USER}), **can: Any) -> dict[str, Any]:
    return {"capabilities": Capabilities(isolation, **can)}


def no_capabilities(backend: Any) -> Any:
    raise KeyError("inside")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"config_class": dict}, "has <class 'dict'> as config_class.*make it a subclass of SandboxConfig"),
        ({"config_class": WrongKey}, "WrongKey.unsupported names 'procesors', which is none of its settings"),
        ({"config_class": OneWord}, "OneWord.unsupported is 'image'.*write the names of settings"),
        ({"capabilities": {"attach": True}}, "has a dict as capabilities.*write capabilities = Capabilities"),
        ({"capabilities": property(no_capabilities)}, "its capabilities can't be read: KeyError: 'inside'"),
        (able({"user"}), r"isolation of its capabilities is {'user'}.*frozenset\({Isolation.SHARED}\)"),
        (able([Isolation.USER]), r"isolation of its capabilities is \["),
        (able(network=frozenset({"open"})), r"network of its capabilities is .*frozenset\({Network.NONE}\)"),
        (able(attach="yes"), "attach of its capabilities is 'yes'.*write attach=True or leave it out"),
        (able(attach=True), "declares attach=True and has no method attach .*write what CanAttach"),
        (able(snapshot=True), "declares snapshot=True and has no method snapshot or restore"),
        (able(builds=True), "declares builds=True and has no method prepare_image .*leave out builds=True"),
    ],
)
async def test_a_backend_that_declares_something_wrong_is_refused(declared: dict[str, Any], message: str) -> None:
    wrong = type("Wrong", (PaperBackend,), declared)
    plugin = SimpleNamespace(
        __name__="wrong", hermes_register_backends=hookimpl(lambda registry: registry.add("wrong", wrong))
    )
    async with new_runtime(plugin) as runtime:
        with pytest.raises(PluginError, match=f"^backend 'wrong' of plugin 'wrong' .*{message}"):
            runtime.backend("wrong")
        assert runtime.backend("paper")


async def test_what_is_made_has_the_name_that_it_is_registered_under() -> None:
    class Quiet:
        name = "quiet"

        def __init__(self, settings: Any) -> None: ...

        async def run(self, task: Any) -> None: ...

        async def aclose(self) -> None: ...

    class Calm(Quiet):
        name = property(lambda self: "calm")  # type: ignore[assignment]

    class Empty(Environment):
        name = "empty"

        async def items(self) -> Any: ...

        def format_prompt(self, item: Any) -> Any: ...

        async def verify(self, item: Any, rollout: Any) -> Any: ...

    plugin = SimpleNamespace(
        __name__="copies",
        hermes_register_backends=hookimpl(lambda registry: registry.add("copy", PaperBackend)),
        hermes_register_agents=hookimpl(lambda registry: [registry.add(each, Quiet) for each in ("a", "b")]),
        hermes_register_environments=hookimpl(lambda registry: registry.add("void", Empty)),
    )
    calm = SimpleNamespace(__name__="calm", hermes_register_agents=hookimpl(lambda registry: registry.add("c", Calm)))
    async with new_runtime(plugin, calm) as runtime:
        assert (runtime.backend("copy").name, runtime.backend("paper").name) == ("copy", "paper")
        assert [runtime.agent(name).name for name in "abc"] == ["a", "b", "calm"]
        assert (runtime.environment("void").name, Empty.name) == ("void", "empty")


async def test_profiles_come_from_the_settings_or_the_caller() -> None:
    settings = {"big": {"cpu": 4, "colour": "red"}, "small": {}}
    async with new_runtime(profiles=settings, default_profile="big") as runtime:
        status = runtime.tool_backend("paper").list_profiles()
        assert set(status) == {"big", "small"}
        backend = runtime.tool_backend(
            "paper", profiles={"big": PaperConfig(cpu=2), "other": {"memory": 64}}, config={"slots_per_sandbox": 3}
        )
        profiles = backend.list_profiles()
        assert set(profiles) == {"big", "other"}
        assert {profile["slots_per_sandbox"] for profile in profiles.values()} == {3}
        assert profiles["big"]["cpu"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"profiles": {"a": {"colur": "x"}}},
            UnknownNameError,
            "key 'colur' of profile 'a'.*'colour'",
        ),
        ({"config": {"cpu": -1}}, ConfigError, "profile 'default' of backend 'paper': cpu"),
        ({"profiles": {"a": SandboxConfig()}}, ConfigError, "is a SandboxConfig .use PaperConfig"),
        ({"isolation": "usr"}, UnknownNameError, "isolation level 'usr'.*did you mean 'user'"),
    ],
)
async def test_a_wrong_profile_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    async with new_runtime() as runtime:
        with pytest.raises(error, match=message):
            runtime.tool_backend("paper", **arguments)


async def test_environments_check_their_settings() -> None:
    async with new_runtime() as runtime:
        environment = runtime.environment("paper", {"pages": "3", "max_items": 2})
        assert isinstance(environment.config, PaperEnvironmentConfig)
        assert (environment.config.pages, environment.config.max_items) == (3, 2)
        ready = PaperEnvironmentConfig(pages=7)
        assert runtime.environment("paper", ready).config is ready
        assert runtime.environment("paper").config == PaperEnvironmentConfig()
        with pytest.raises(UnknownNameError, match=r"key 'page' of environment 'paper'.*did you mean 'pages'"):
            runtime.environment("paper", {"page": 3})
        with pytest.raises(ConfigError, match=r"environment 'paper': pages must be .*'many'"):
            runtime.environment("paper", {"pages": "many"})
        with pytest.raises(PluginError, match="not an Environment class"):
            runtime.environment("impostor")


async def test_an_agent_gets_what_it_does_not_set_from_the_runtime() -> None:
    async with new_runtime(model="m", base_url="http://r", api_key=SecretStr("k" * 10)) as runtime:
        filled = runtime.agent("paper", AgentSettings(base_url="http://own", max_turns=3)).settings  # type: ignore[attr-defined]
        assert (filled.model, filled.base_url, filled.max_turns) == ("m", "http://own", 3)
        assert filled.api_key.get_secret_value() == "k" * 10
        assert runtime.agent("paper", AgentSettings(model=None)).settings.model is None  # type: ignore[attr-defined]


class StubbornSettings(AgentSettings):
    """Settings of its own."""

    tries: int = Field(default=2, ge=1)


class StubbornAgent:
    """An agent with settings of its own."""

    name = "stubborn"
    config_class = StubbornSettings

    def __init__(self, settings: StubbornSettings) -> None:
        self.settings = settings

    async def run(self, task: Any) -> Any:
        return task.result

    async def aclose(self) -> None:
        """Holds nothing."""


class WrongAgent(StubbornAgent):
    config_class = dict  # type: ignore[assignment]


async def test_an_agent_s_own_settings_are_checked_by_its_class() -> None:
    @hookimpl
    def register(registry: Any) -> None:
        registry.add("stubborn", StubbornAgent)
        registry.add("wrong", WrongAgent)

    async with new_runtime(SimpleNamespace(hermes_register_agents=register), model="m") as runtime:
        for given in ({"tries": "3"}, StubbornSettings(tries=3)):
            settings = runtime.agent("stubborn", given).settings  # type: ignore[attr-defined]
            assert isinstance(settings, StubbornSettings) and (settings.tries, settings.model) == (3, "m")
        plain = runtime.agent("stubborn", AgentSettings(max_turns=4)).settings  # type: ignore[attr-defined]
        assert isinstance(plain, StubbornSettings) and (plain.tries, plain.max_turns) == (2, 4)
        with pytest.raises(UnknownNameError, match=r"key 'trys' of agent 'stubborn'.*did you mean 'tries'"):
            runtime.agent("stubborn", {"trys": 1})
        with pytest.raises(ConfigError, match="agent 'stubborn': tries must be at least 1, not 0"):
            runtime.agent_settings({"tries": 0}, "stubborn")
        with pytest.raises(PluginError, match="subclass of AgentSettings"):
            runtime.agent("wrong")


async def test_an_agent_is_given_a_model_if_it_can_use_one() -> None:
    class Asks:
        config_class = AgentSettings

        def __init__(self, settings: AgentSettings, model: Any = None) -> None:
            self.settings, self.model = settings, model

        @classmethod
        def on_model(cls, settings: AgentSettings, model: Any) -> Asks:
            return cls(settings, model)

        async def run(self, task: Any) -> Any: ...

        async def aclose(self) -> None: ...

    class Agents:
        HERMES_PLUGIN_API = 1

        @hookimpl
        def hermes_register_agents(self, registry: Registrar) -> None:
            registry.add("asks", Asks)

    async with Runtime(load_entry_points=False, plugins=[Agents()]) as runtime:
        model: Any = object()
        agent: Any = runtime.agent("asks", {"max_turns": 3}, model=model)
        assert agent.model is model and agent.settings.max_turns == 3
        for name in ("nop", "cheat:all"):
            with pytest.raises(UsageError, match="can't be given a model"):
                runtime.agent(name, model=model)
        with pytest.raises(ConfigError, match="its settings have several"):
            runtime.agent("asks", {"models": {"a": 1, "b": 1}}, model=model)


async def test_everything_is_closed_last_made_first_even_if_some_fail() -> None:
    order: list[str] = []

    def agent(name: str, error: Exception | None = None) -> Any:
        async def aclose() -> None:
            order.append(name)
            if error is not None:
                raise error

        return lambda settings: SimpleNamespace(name=name, run=nothing, aclose=aclose)

    @hookimpl
    def register(registry: Any) -> None:
        registry.add("a", agent("a"))
        registry.add("b", agent("b", OSError("b is stuck")))
        registry.add("c", agent("c", ValueError("c as well")))
        registry.add("d", agent("d"))

    runtime = new_runtime(SimpleNamespace(hermes_register_agents=register))
    backend = runtime.backend("paper")
    for name in "abcd":
        runtime.agent(name)
    with pytest.raises(ExceptionGroup) as caught:
        await runtime.aclose()
    assert order == ["d", "c", "b", "a"]
    assert backend.closed == 1  # type: ignore[attr-defined]
    assert [str(error) for error in caught.value.exceptions] == ["c as well", "b is stuck"]


async def test_what_is_closed_before_the_runtime_is_let_go() -> None:
    async with new_runtime() as runtime:
        async with runtime.tool_backend("paper", config={"min_sandboxes": 0}) as backend:
            pass
        agent = runtime.agent("paper")
        await runtime.close(agent)
        gone = [weakref.ref(backend), weakref.ref(agent)]
        del backend, agent
        gc.collect()
        assert [one() for one in gone] == [None, None]


async def test_a_cancelled_close_still_closes_the_rest() -> None:
    closed: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            closed.append("slow")

    async def quick() -> None:
        closed.append("quick")

    @hookimpl
    def register(registry: Any) -> None:
        registry.add("quick", lambda settings: SimpleNamespace(run=nothing, aclose=quick))
        registry.add("slow", lambda settings: SimpleNamespace(run=nothing, aclose=slow))

    runtime = new_runtime(SimpleNamespace(hermes_register_agents=register))
    runtime.agent("quick")
    runtime.agent("slow")
    closing = asyncio.create_task(runtime.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == ["slow", "quick"]


async def test_the_tools_of_all_plugins_are_together() -> None:
    def register(registry: Any) -> None:
        registry.add(tool("fold", "paper"))
        registry.add_toolset("craft", tools=("fold",), includes=("terminal",))
        registry.add_distribution("half", {"craft": 50, "file": 100})

    async with new_runtime(tools_of(register=register)) as runtime:
        assert {"fold", "terminal", "read_file"} <= set(runtime.tools.names())
        assert set(expand_toolset(runtime.tools, "craft")) == {"fold", "terminal", "process"}
        assert resolve_tools(runtime.tools, distribution="half", seed=1)


async def test_a_tool_that_two_plugins_claim_is_refused_by_name_when_used() -> None:
    def register(registry: Any) -> None:
        registry.add(tool("terminal"))
        registry.add_toolset("file", tools=("terminal",))
        registry.add_distribution("default", {"file": 100})

    async with new_runtime(tools_of(register=register, __name__="rival")) as runtime:
        assert "read_file" in runtime.tools.names()
        assert "terminal" not in runtime.tools.names()
        with pytest.raises(PluginError, match=r"tool 'terminal' is claimed by plugin 'core' .* and plugin 'rival'"):
            runtime.tools.get("terminal")
        with pytest.raises(PluginError, match="toolset 'file' is claimed by"):
            expand_toolset(runtime.tools, "file")
        with pytest.raises(PluginError, match="distribution 'default' is claimed by"):
            resolve_tools(runtime.tools, distribution="default")


async def test_a_toolset_that_misses_a_tool_of_two_plugins_is_refused() -> None:
    def register(registry: Any) -> None:
        registry.add(tool("terminal", "paper"))
        registry.add(tool("fold", "paper"))

    async with new_runtime(tools_of(register=register, __name__="rival")) as runtime:
        for toolset in ("paper", "terminal"):
            with pytest.raises(PluginError, match=r"tool 'terminal' is claimed by .* and plugin 'rival'"):
                resolve_tools(runtime.tools, [toolset])
        assert resolve_tools(runtime.tools, ["safe"]) == ["read_file", "search_files"]


async def test_a_tool_that_one_plugin_adds_twice_is_an_error_of_that_plugin() -> None:
    def register(registry: Any) -> None:
        registry.add(tool("fold"))
        registry.add(replace(tool("fold"), description="Folds."))

    with pytest.raises(PluginError, match=r"tool 'fold' is registered twice: as 'Does nothing\.' and as 'Folds\.'"):
        new_runtime(tools_of(register=register))


async def test_a_toolset_that_could_not_work_is_refused_alone() -> None:
    def register(registry: Any) -> None:
        registry.add_distribution("wrong", {"file": 120})
        registry.add_toolset("all", tools=("terminal",))

    async with new_runtime(tools_of(register=register)) as runtime:
        assert "terminal" in runtime.tools.names()
        with pytest.raises(ConfigError, match="120"):
            resolve_tools(runtime.tools, distribution="wrong")


def test_an_agent_that_gives_a_setting_of_every_agent_another_type_is_refused() -> None:
    class Agent:
        config_class: type[AgentSettings]

    class Narrow(Agent):
        class config_class(AgentSettings):
            model: str = "mine"
            max_turns: int = 3

    class Other(Agent):
        class config_class(AgentSettings):
            seed: tuple[str, ...] = ()  # type: ignore[assignment]

    class Plugin:
        @hookimpl
        def hermes_register_agents(self, registry: Any) -> None:
            registry.add("narrow", Narrow)
            registry.add("other", Other)

    runtime = new_runtime(Plugin())
    assert runtime.agent_config_class("narrow") is Narrow.config_class
    with pytest.raises(PluginError, match=r"agent 'other' .* gives seed of AgentSettings another type .*another name"):
        runtime.agent_config_class("other")
