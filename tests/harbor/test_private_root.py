"""Tasks in slots that are root of roots of their own: on the host's system, and several in one container."""

from __future__ import annotations

import os
from pathlib import Path

import hermes_harbor
import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.soundness.validate import validate
from tests.harbor.harbor_tasks import PYTHON, TEST, Shell, roll_out, write_task

OWNS_PATHS = """
[ "$(id -u)" = 0 ] && [ "$HOME" = /root ] && [ -f /usr/local/bin/tool ] && grep -q ^task: /etc/passwd || {
  echo 0 >/logs/verifier/reward.txt; exit
}
"""
SOLVE = "echo hello >/app/out; echo x >/usr/local/bin/tool; echo 'task:x:1500:1500::/home/task:/bin/sh' >>/etc/passwd\n"


def write_tasks(folder: Path, image: str | None) -> None:
    write_task(folder / "usual", image=image)
    write_task(folder / "paths", '[environment]\nworkdir = "/app"\n', image=image, solve=SOLVE, test=OWNS_PATHS + TEST)
    write_task(folder / "user", "[verifier]\nuser = 'nobody'\n", image=image, test="id -un >/tmp/me\n" + TEST)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's driver can give slots roots of their own")
async def test_on_the_hosts_own_system(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", PYTHON)
    env = {"dataset_name": str(tmp_path / "tasks"), "accept": ["image"]}
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, plugins=[hermes_harbor], load_entry_points=False) as runtime:
        outcome = await validate(runtime, "harbor", env=env, concurrency=2, backend="local")
    assert outcome.sound, outcome.unsound
    assert outcome.items == 3
    assert not Path("/usr/local/bin/tool").exists() and not Path("/app/out").exists()


@pytest.mark.full
async def test_the_rollouts_of_a_group_share_a_container(runtime: Runtime, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", PYTHON)
    given = {"backend_config": {"cap_add": ["SYS_ADMIN"]}}
    env = {"dataset_name": str(tmp_path / "tasks")}
    outcome = await validate(runtime, "harbor", env=env, concurrency=2, backend="docker", **given)
    assert outcome.sound, outcome.unsound
    agent = Shell(
        "cat /proc/sys/kernel/hostname; cat /proc/self/mountinfo | head -1; ls /sys/class/net 2>/dev/null; id -u"
    )
    await roll_out(runtime, tmp_path / "tasks" / "usual", agent, group_size=3, concurrency=3, **given)
    said = [answer["output"].split("\n") for answer in agent.answers]
    assert len(said) == 3 and len({lines[0] for lines in said}) == 1
    assert all(" / / " in lines[1] and "overlay" in lines[1] for lines in said)
    assert len({lines[1].split("upperdir=")[1].split(",")[0] for lines in said}) == 3
