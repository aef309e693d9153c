"""What `validate` makes of the baselines' rewards, and of what an environment says beside them."""

from collections.abc import Mapping
from typing import Any

import pytest

from hermes_core.cli.report import validation_text
from hermes_core.environment import Environment
from hermes_core.envs.validate import Validation, Verdict, validate
from hermes_core.errors import PluginError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings


class Doubted(Environment):
    """Items that score rightly, of which some have a fault that no reward shows."""

    name = "doubted"

    def items(self) -> list[dict[str, Any]]:
        return [{"id": "good"}, {"id": "bad"}]

    def format_prompt(self, item: Any) -> str:
        return "p"

    @hookimpl
    async def solve_trajectory(self, exec_tool: Any) -> None:
        await exec_tool("bash", {"command": "touch done"})

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, exec_tool: Any) -> tuple[float, dict[str, Any]]:
        done = await exec_tool("bash", {"command": "test -f done"})
        return float(done.success), {"checks": 1 if item["id"] == "bad" else 2}

    def doubt(self, item: Any, agent: str, details: Mapping[str, Any]) -> str | None:
        return f"a check of {item['id']} is missing" if agent == "nop" and details["checks"] < 2 else None


class Broken(Doubted):
    def doubt(self, item: Any, agent: str, details: Mapping[str, Any]) -> str | None:
        raise KeyError("checks")


@pytest.fixture
async def runtime(tmp_path):
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as one:
        yield one


async def test_an_item_that_its_environment_doubts_is_not_sound(runtime):
    outcome = await validate(runtime, Doubted(), isolation="shared", allow_unisolated=True)
    (verdict,) = outcome.unsound
    assert (verdict.item_id, verdict.agent, verdict.rewards) == ("bad", "nop", [0.0])
    assert verdict.doubts == ["a check of bad is missing"] and not verdict.flaky
    assert validation_text(outcome).splitlines() == [
        "wrong: bad with nop: 0",
        "  a check of bad is missing",
        "1 of 2 items are sound, each tried once with either agent",
    ]
    assert outcome.to_dict()["unsound"][0]["doubts"] == verdict.doubts


async def test_an_environment_that_fails_to_say_so_is_named(runtime):
    with pytest.raises(PluginError, match=r"'doubted' failed in doubt\(\): KeyError"):
        await validate(runtime, Broken(), isolation="shared", allow_unisolated=True)


@pytest.mark.parametrize(
    ("rewards", "doubts", "sound", "flaky"),
    [
        ([0.0, 0.0], [], True, False),
        ([0.0, 0.0], ["x"], False, True),
        ([0.0, 0.0], ["x", "x"], False, False),
        ([0.0, 1.0], [], False, True),
        ([0.0, 1.0], ["x"], False, False),
        ([None, 1.0], [], False, False),
    ],
)
def test_what_is_so_sometimes_only_is_flaky(rewards, doubts, sound, flaky):
    verdict = Verdict("a", "nop", rewards, doubts=doubts)
    assert (verdict.sound, verdict.flaky) == (sound, flaky)
    assert ("flaky" in validation_text(Validation(1, 2, (verdict,)))) == flaky
