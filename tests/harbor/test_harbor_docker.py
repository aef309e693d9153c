"""Tasks on Docker: solved and not, time limits, variables, rewards that are no rewards, tools that are missing."""

from __future__ import annotations

import contextlib

import docker
import pytest

from hermes_core.errors import PolicyError, UsageError
from tests.harbor.harbor_tasks import BUSYBOX, PYTHON, Shell, roll_out, write_task


async def test_what_the_agent_finds(runtime, tmp_path):
    toml = """
    [environment]
    workdir = "/srv/work"
    env = {GREETING = "${NOT_SET_ANYWHERE:-hello}"}
    [verifier]
    env = {SECRET = "of the tests"}
    """.replace("    ", "")
    seen = """
    { [ "$SECRET" = 'of the tests' ] && [ "$GREETING" = hello ] && [ "$(pwd)" = /srv/work ]; } || exit 0
    cp /srv/work/seen /logs/verifier/reward.txt
    """
    write_task(tmp_path / "task", toml, test=seen)
    agent = Shell(
        "id -u; pwd; echo $GREETING-$SECRET; ls /tests /solution; ls /logs",
        "[ $GREETING = hello ] && echo 1 >seen",
    )
    records = await roll_out(runtime, tmp_path, agent)
    record = records["task"]
    assert record["messages"][0]["content"] == "Write hello to /app/out.\n"
    assert agent.answers[0]["output"].split("\n")[:3] == ["0", "/srv/work", "hello-"]
    assert agent.answers[0]["output"].splitlines()[-3:] == ["agent", "artifacts", "verifier"]
    assert (record["reward"], record["failure"]) == (1.0, None)


async def test_the_agent_is_the_tasks_user_and_its_tests_are_root(runtime, tmp_path):
    toml = '[agent]\nuser = "4321"\n[environment]\nworkdir = "/srv/work"'
    test = "[ -O /srv ] && cp /srv/work/seen /logs/verifier/reward.txt\n"
    # The image's user is made by the task's Dockerfile.
    users = "RUN echo 'me:x:4321:4321::/srv/work:/bin/sh' >>/etc/passwd && mkdir -p /srv/work && chown 4321 /srv/work"
    dockerfile = f"FROM {PYTHON}\n{users}\n"
    write_task(tmp_path / "task", toml, test=test, image=None, files={"environment/Dockerfile": dockerfile})
    agent = Shell("id -un; pwd; echo $HOME; touch /srv/x", "echo 1 >seen")
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert agent.answers, record["failure"]
    assert agent.answers[0]["output"].splitlines()[:3] == ["me", "/srv/work", "/srv/work"]
    assert "Permission denied" in agent.answers[0]["output"]
    assert (record["reward"], record["failure"]) == (1.0, None)


async def test_a_user_that_the_image_has_not_is_a_failure_of_the_setup(runtime, tmp_path):
    write_task(tmp_path / "task", '[agent]\nuser = "nowhere"')
    record = (await roll_out(runtime, tmp_path, "nop"))["task"]
    assert record["failure"]["kind"] == "setup"
    assert "there is no user nowhere" in record["failure"]["message"]


async def test_an_agent_out_of_time_is_verified(runtime, tmp_path):
    write_task(tmp_path / "task", "[agent]\ntimeout_sec = 1")
    record = (await roll_out(runtime, tmp_path, Shell("mkdir -p /app; echo hello >/app/out", "sleep 50")))["task"]
    assert (record["reward"], record["stop_reason"]) == (1.0, "time_limit")


async def test_a_task_whose_image_is_built(runtime, tmp_path):
    dockerfile = f"FROM {BUSYBOX}\nWORKDIR /app\nCOPY greeting .\n"
    files = {"environment/Dockerfile": dockerfile, "environment/greeting": "hello\n"}
    agent = Shell("pwd", "cp greeting out")
    write_task(tmp_path / "task", image=None, files=files)
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["failure"]) == (1.0, None)
    assert agent.answers[0]["output"].strip() == "/app"
    image = record["image"]["name"]
    assert image.startswith("hermes-rl-built:") and record["image"]["digest"].startswith("sha256:")
    (tmp_path / "task/environment/Dockerfile").write_text(dockerfile + "RUN exit 3\n")
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["failure"]["kind"]) == (None, "image")
    with contextlib.closing(docker.from_env()) as client:
        client.images.remove(image, force=True)


async def test_slots_that_are_not_root_are_refused_at_the_start(runtime, tmp_path):
    write_task(tmp_path / "task", image=PYTHON)
    with pytest.raises(PolicyError, match="needs slots with slot_user 'root', and profile 'default' has 'own'"):
        await roll_out(runtime, tmp_path, "nop", backend_config={"slot_user": "own"})
    with pytest.raises(UsageError, match="no isolation below 'private-root'"):
        await roll_out(runtime, tmp_path, "nop", isolation="user")


async def test_a_task_without_a_solution(runtime, tmp_path):
    write_task(tmp_path / "task", solve=None)
    record = (await roll_out(runtime, tmp_path))["task"]
    assert record["reward"] is None and "no solution/solve.sh" in record["failure"]["message"]
