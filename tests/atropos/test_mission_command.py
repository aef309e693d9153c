"""The command that users were promised, as it is written, with server and tokenizer in `.env`, on Modal's emulator."""

from __future__ import annotations

import asyncio
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


@pytest.mark.root
@pytest.mark.usefixtures("atropos_extra")
@pytest.mark.skipif(os.geteuid() != 0, reason="the emulator's sandboxes need /data or namespaces; root has them")
async def test_the_command_works_as_written(tokenizer_folder: str, tmp_path: Path) -> None:
    from hermes_modal_emulator import ModalEmulator
    from hermes_swe_smith.demo import play

    async with ScriptedServer(ToolScript(play)) as server:
        (tmp_path / ".env").write_text(
            f"ATROPOS_SERVER_BASE_URL={server.base_url}\nATROPOS_SERVER_MODEL=scripted\n"
            f"ATROPOS_SERVER_API_KEY=none\nATROPOS_TOKENIZER_NAME={tokenizer_folder}\n"
        )
        with ModalEmulator() as emulator:
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("HERMES_", "MODAL_"))}
            command = [sys.executable, "-m", "hermes_swe_smith", *shlex.split(COMMAND), "--env.dataset_name=demo"]
            done = await asyncio.to_thread(
                subprocess.run,
                command,
                cwd=tmp_path,
                env={**kept, **emulator.environment},
                capture_output=True,
                text=True,
                timeout=300,
            )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    groups = [json.loads(line) for line in (tmp_path / told["written"]).read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0], [1.0]]
