"""What a reward function carries out of a real slot: never more than a limit, whatever the agent left there."""

from hermes_core.agents.baselines import NopAgent
from hermes_core.envs.base import Environment
from hermes_core.envs.runner import run_rollouts
from hermes_core.envs.tool_context import ToolContext
from hermes_core.hookspecs import hookimpl
from hermes_core.runtime import Runtime

DEEP = """\
import os
os.chdir("d")
for _ in range(19):
    os.mkdir("n" * 200)
    os.chdir("n" * 200)
open("f", "w").close()
"""


class Carrying(Environment):
    """Its verification is what the test says."""

    name = "carrying"

    def __init__(self, carry):
        super().__init__()
        self.carry = carry

    def items(self):
        return [{"id": "one"}]

    def format_prompt(self, item):
        return "leave something"

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        await self.carry(ToolContext(rollout))
        return 1.0, {}


async def carried(carry):
    records = []
    async with Runtime(load_entry_points=False) as runtime:
        await run_rollouts(
            runtime, Carrying(carry), NopAgent(), on_record=records.append, isolation="user", infra_retries=0
        )
    return records[0]


async def test_files_of_any_size_and_name_cost_no_more_than_a_limit(tmp_path):
    """A file of a terabyte costs an agent nothing, and was read whole into the driver's memory."""
    seen = {}
    place = tmp_path / "/".join(["local" * 40] * 2)

    async def carry(context):
        await context.terminal("truncate -s 1T huge; truncate -s 65M large; : > empty; mkdir d; echo x > d/short")
        await context.write_file("deep.py", DEEP)
        assert (await context.terminal("python3 deep.py"))["exit_code"] == 0
        seen["huge"] = [await context.read_file("huge"), await context.download_file("huge", tmp_path / "huge")]
        seen["large"] = [await context.read_file("large"), await context.download_file("large", tmp_path / "large")]
        seen["empty"] = await context.download_file("empty", tmp_path / "empty")
        seen["dir"] = await context.download_dir("d", place)

    record = await carried(carry)
    assert (record["reward"], record["failure"]) == (1.0, None)
    assert ["error" in each for each in seen["huge"]] == [True, True] and not (tmp_path / "huge").exists()
    assert "more than" in seen["large"][0]["error"] and seen["large"][1] == {"success": True, "bytes": 65 << 20}
    assert seen["empty"]["success"] and (tmp_path / "empty").read_bytes() == b""
    assert (place / "short").read_text() == "x\n" and seen["dir"]["left_out"]
