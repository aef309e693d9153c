"""A port in the agent's slot that a hook opens: it serves during the block, and the verification finds none of it."""

from __future__ import annotations

from typing import Any

from hermes_core.environment import Environment
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Connection
from hermes_core.settings import Settings

ASK = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); print(s.recv(9))"


class Asking(Environment):
    """A program in the slot asks the driver."""

    name = "asking"

    def items(self) -> list[dict[str, Any]]:
        return [{"id": "1"}]

    def format_prompt(self, item: Any) -> str:
        return "ask"

    @hookimpl
    async def setup_trajectory_workspace(self, item: Any, rollout: Any) -> dict[str, Any]:
        async def serve(connection: Connection) -> None:
            await connection.write(b"answer")

        async with rollout.commands.forward(serve) as forward:
            argv = ["python3", "-c", ASK, str(forward.port)]
            assert (await rollout.commands.run(argv)).text == "b'answer'\n"
        return {"argv": argv}

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, workspace_meta: Any, rollout: Any) -> float:
        again = await rollout.commands.run(workspace_meta["argv"])
        return float("Refused" in again.error_text)


async def test_a_hook_opens_a_port(tmp_path: Any) -> None:
    records: list[dict[str, Any]] = []
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        await run_rollouts(
            runtime, Asking(), "nop", backend="local", concurrency=1, infra_retries=0, on_record=records.append
        )
    assert [(record["reward"], record["failure"]) for record in records] == [(1.0, None)]
