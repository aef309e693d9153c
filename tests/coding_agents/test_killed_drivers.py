"""A driver that is killed while real coding agents work: nothing of them stays, and the run can be finished."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith.demo import ENVIRONMENT, FIXES
from hermes_testing.scripted_server import Reply, ScriptedServer

from tests.coding_agents.conftest import END_S
from tests.coding_agents.test_real_agents import script
from tests.support.killed_runs import gone, scored, start, traces

pytestmark = [pytest.mark.full, pytest.mark.long]

ORPHAN_TTL_S = 5.0
AT_ONCE = 2


class Pausing:
    """The scripted model. Until it is told to go on, it answers the later tasks only once, and then lets them wait."""

    def __init__(self, agent: str) -> None:
        self._answer = script(agent)
        self._waiting = asyncio.Semaphore(0)
        self.goes_on = False

    async def __call__(self, request: dict[str, Any]) -> Reply:
        said = str([each["content"] for each in request["messages"] if each["role"] == "user"])
        later = any(fix.issue in said for fix in FIXES[AT_ONCE:])
        if later and not self.goes_on and any(each["role"] == "tool" for each in request["messages"]):
            self._waiting.release()
            await asyncio.Event().wait()
        return self._answer(request)

    async def all_wait(self) -> None:
        """Wait until all that run at a time do."""
        for _ in range(AT_ONCE):
            await self._waiting.acquire()


@pytest.mark.parametrize(
    ("agent", "program"),
    [
        ("codex", "/codex"),
        pytest.param("claude-code", "/claude", marks=pytest.mark.stress),
        pytest.param("kimi-code", "b'kimi-code", marks=pytest.mark.stress),  # as it calls itself
    ],
)
async def test_a_killed_run_leaves_no_agent_and_can_be_finished(
    tmp_path: Path, isolates: None, indexes: None, sandboxes: Path, agent: str, program: str
) -> None:
    """The driver dies when two tasks are solved, and agents work on the two others."""
    model, out = Pausing(agent), tmp_path / "out"
    async with ScriptedServer(model) as server:
        command = [
            *(sys.executable, "-m", "hermes_core", "rollout", "swe-smith", "--agent", agent, "--out", str(out)),
            *("--model", "scripted", "--base-url", server.base_url, "--concurrency", str(AT_ONCE), "--resume"),
            *(f"--env.{name}={str(value).lower()}" for name, value in ENVIRONMENT.items()),
            *(f"--backend.state_dir={sandboxes}", f"--backend.orphan_ttl_s={ORPHAN_TTL_S}", "--isolation", "namespace"),
        ]
        driver = await start(command)
        ended, waiting = asyncio.create_task(driver.communicate()), asyncio.create_task(model.all_wait())
        await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), ended.result()
        assert sum(program in each for each in traces(sandboxes)) >= AT_ONCE
        driver.kill()
        await ended
        assert len(scored(out)) == AT_ONCE
        assert await gone(sandboxes, ORPHAN_TTL_S + END_S) == []
        model.goes_on = True
        driver = await start(command)
        output, _ = await driver.communicate()
    assert driver.returncode == 0, output.decode()
    assert sorted(scored(out).values()) == [1] * len(FIXES)
    assert await gone(sandboxes, END_S) == []
