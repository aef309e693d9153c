"""What opening a run does, in which order, and what it leaves: on the real local backend."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from hermes_core.agents.base import AgentSettings
from hermes_core.environment import Environment
from hermes_core.errors import ModelError, PluginError, PolicyError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.options import RunOptions
from hermes_core.runs.session import open_session, redactor
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Capabilities, Isolation, SandboxConfig
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.settings import Settings

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


class Noted(Environment):
    """Notes what is called of it."""

    name = "noted"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def setup(self) -> None:
        self.calls.append("setup")

    async def aclose(self) -> None:
        self.calls.append("aclose")

    def items(self) -> list[dict[str, str]]:
        return []

    def format_prompt(self, item: Any) -> str:
        return "p"

    async def verify_and_score_trajectory(self, item: Any) -> float:
        return 1.0


class Worker:
    """An agent whose endpoint is in trouble."""

    name = "worker"
    asked = closed = 0

    async def check_endpoint(self) -> None:
        self.asked += 1
        raise ModelError("in trouble")

    async def aclose(self) -> None:
        self.closed += 1


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as one:
        yield one


def options(**given: Any) -> RunOptions:
    return RunOptions.model_validate({**ISOLATION, **given})


@pytest.mark.parametrize(
    ("agent", "given"),
    [
        ("nop", {"backend": "locl"}),
        ("nop", {"isolation": "usr"}),
        ("nop", {"profile": "none"}),
        ("nop", {"backend_config": {"slots_per_sandbox": 1, "max_sandboxes": 1}}),
        ("nop2", {}),
        ("oracle", {}),
    ],
)
async def test_what_is_wrong_is_found_before_the_dataset_is_read(runtime, agent, given):
    environment = Noted()
    with pytest.raises(UsageError):
        async with open_session(runtime, environment, agent, options(**given)):
            pass
    assert environment.calls == []


async def test_slots_that_are_root_are_refused_where_files_are_hidden_from_them(runtime):
    environment = Noted()
    environment.hides_files = True
    with pytest.raises(PolicyError, match="'noted' hides files from its slots"):
        async with open_session(runtime, environment, "nop", options(backend_config={"slot_user": "root"})):
            pass
    assert environment.calls == [], "the dataset was not read"


async def test_an_endpoint_in_trouble_is_found_before_a_sandbox_is_made(runtime):
    environment, agent = Noted(), Worker()
    async with open_session(runtime, environment, agent, options()) as session:
        assert environment.calls == ["setup"]
        with pytest.raises(ModelError, match="in trouble"):
            async with session.sandboxes(3):
                pass
    assert await runtime.backend("local").list(runtime.owner) == []
    assert (environment.calls, agent.closed) == (["setup", "aclose"], 0)


async def test_where_nothing_is_to_be_done_nothing_is_made_or_asked(runtime):
    agent = Worker()
    async with open_session(runtime, Noted(), agent, options()) as session, session.sandboxes(0):
        assert (session.room, agent.asked) == (0, 0)
        assert await runtime.backend("local").list(runtime.owner) == []


async def test_there_is_room_for_the_rollouts_that_there_are(runtime):
    async with open_session(runtime, Noted(), "nop", options(concurrency=4)) as session:
        async with session.sandboxes(2, start=False):
            assert session.room == 2
        async with session.sandboxes() as context:
            assert session.room == 4
            assert len(await runtime.backend("local").list(runtime.owner)) == 1
            assert context.profile == "default"
    assert await runtime.backend("local").list(runtime.owner) == []


class Choosy(LocalBackend):
    """Declares two levels, of which a profile with a memory limit for processes can't have one."""

    name = "choosy"
    capabilities = Capabilities(isolation=frozenset({Isolation.NAMESPACE, Isolation.DEDICATED}))

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        return self.capabilities.isolation - ({Isolation.NAMESPACE} if config.process_memory else set())


class Single(Choosy):
    name = "single"
    capabilities = Capabilities(isolation=frozenset({Isolation.DEDICATED}))


class Choices:
    @hookimpl
    def hermes_register_backends(self, registry: Any) -> None:
        registry.add("choosy", Choosy)
        registry.add("single", Single)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("choosy", "the profile's settings exclude namespace: `hermes-rl backends choosy` lists the settings"),
        ("single", "`hermes-rl doctor single` says why"),
    ],
)
async def test_who_gets_a_sandbox_for_each_slot_is_told_where_to_learn_why(tmp_path, caplog, backend, why):
    given = options(backend=backend, isolation="user", backend_config={"process_memory": 512})
    settings = Settings(state_dir=tmp_path / "state")
    async with (
        Runtime(settings, plugins=[Choices()], load_entry_points=False) as runtime,
        open_session(runtime, Noted(), "nop", given) as session,
        session.sandboxes(1, start=False),
    ):
        pass
    assert caplog.messages[-1].endswith(f"which takes longer to start; {why}")


async def test_a_run_without_mcp_servers_does_not_need_their_package(runtime, monkeypatch):
    monkeypatch.setattr("hermes_core.mcp.opening.importlib.util.find_spec", lambda name: None)
    async with open_session(runtime, Noted(), "nop", options()) as session, session.sandboxes(1, start=False):
        assert session.room == 1


async def test_what_loads_the_dataset_can_be_another_and_what_it_raises_is_told(runtime):
    environment = Noted()

    async def load() -> None:
        raise ValueError("no such column")

    with pytest.raises(PluginError, match="no such column"):
        async with open_session(runtime, environment, "nop", options(), load=load):
            pass
    assert environment.calls == ["aclose"]


def test_secrets_of_several_servers_are_taken_out(runtime):
    keys = ("sk-number-one", "sk-number-two")
    redact = redactor(runtime, *(AgentSettings(api_key=SecretStr(key)) for key in keys))
    assert redact(" ".join(keys)) == " ".join(["[redacted: the agent's api_key]"] * 2)
