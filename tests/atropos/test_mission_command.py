"""The command that users were promised, as it is written, with server and tokenizer in `.env`, on emulated clouds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hermes_testing.scripted_server import ScriptedServer, ToolScript

COMMAND = """process --env.use_wandb false --env.total_steps 2 --env.group_size 1 --env.max_items 2
--env.tool_pool_mode modal --env.modal_image python:3.11 --env.modal_slots_per_sandbox 10 --env.modal_min_sandboxes 1"""


ON_NOMAD = """process --env.use_wandb false --env.total_steps 2 --env.group_size 1 --env.max_items 2
--env.tool_pool_mode nomad --env.sandbox_image python:3.11 --env.slots_per_container 10 --env.min_containers 1"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("atropos_extra"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the emulator's sandboxes need /data or namespaces; root has them"),
]


async def run_command(command: str, variables: dict[str, str], tokenizer_folder: str, folder: Path) -> list[object]:
    """Run a command of SWE-smith's demo in `folder`. Return the scores of its groups."""
    from hermes_swe_smith.demo import play

    async with ScriptedServer(ToolScript(play)) as server:
        (folder / ".env").write_text(
            f"ATROPOS_SERVER_BASE_URL={server.base_url}\nATROPOS_SERVER_MODEL=scripted\n"
            f"ATROPOS_SERVER_API_KEY=none\nATROPOS_TOKENIZER_NAME={tokenizer_folder}\n"
        )
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES_", "MODAL_"))}
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "hermes_swe_smith", *shlex.split(command), "--env.dataset_name=demo"],
            cwd=folder,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    groups = [json.loads(line) for line in (folder / told["written"]).read_text().splitlines()]
    return [group["scores"] for group in groups]


async def test_the_command_works_as_written(tokenizer_folder: str, tmp_path: Path) -> None:
    from hermes_modal_emulator import ModalEmulator

    with ModalEmulator() as emulator:
        scores = await run_command(COMMAND, emulator.environment, tokenizer_folder, tmp_path)
    assert scores == [[1.0], [1.0]]


@pytest.mark.full
async def test_the_command_on_nomad(tokenizer_folder: str, tmp_path: Path) -> None:
    from tests.nomad.conftest import Cluster

    pytest.importorskip("aiohttp")  # of the emulated cluster
    with contextlib.closing(Cluster()) as cluster:
        scores = await run_command(ON_NOMAD, {"NOMAD_ADDR": cluster.address}, tokenizer_folder, tmp_path)
        assert cluster.ask("state")["jobs"] == []
    assert scores == [[1.0], [1.0]]
