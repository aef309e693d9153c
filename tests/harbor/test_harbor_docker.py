"""Tasks on Docker: solved and not, time limits, variables, rewards that are no rewards, tools that are missing."""

from __future__ import annotations

import contextlib

import docker
import pytest

from hermes_core.envs.validate import validate
from hermes_core.errors import PolicyError, UsageError
from tests.harbor.harbor_tasks import BUSYBOX, PYTHON, TEST, Shell, roll_out, write_task


async def test_the_solution_scores_one_and_nothing_zero(runtime, tmp_path):
    write_task(tmp_path / "tasks" / "small")
    write_task(tmp_path / "tasks" / "python", image=PYTHON)
    write_task(tmp_path / "tasks" / "status", test=TEST + "exit 7\n")
    write_task(
        tmp_path / "tasks" / "json",
        test=TEST + 'echo "{\\"reward\\": $(cat /logs/verifier/reward.txt)}" >/logs/verifier/reward.json\n'
        "echo 0.5 >/logs/verifier/reward.txt",
    )
    outcome = await validate(
        runtime, "harbor", env={"dataset_name": str(tmp_path / "tasks")}, concurrency=2, backend="docker"
    )
    assert outcome.sound, outcome.unsound
    assert outcome.items == 4


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


BAD = {
    "missing": ("echo the pipe broke", "neither reward.json nor reward.txt; the end of their output: the pipe broke"),
    "empty": (": >/logs/verifier/reward.txt", "is empty"),
    "nan": ("echo nan >/logs/verifier/reward.txt", "not finite"),
    "high": ("echo 1.5 >/logs/verifier/reward.txt", "not between 0 and 1"),
    "word": ("echo passed >/logs/verifier/reward.txt", "no reward"),
    "huge": ("dd if=/dev/zero bs=1024 count=200 2>/dev/null | tr '\\0' 0 >/logs/verifier/reward.txt", "more than"),
    "link": ("echo 1 >/r; ln -s /r /logs/verifier/reward.txt", "is a link"),
    "directory": ("mkdir /logs/verifier/reward.txt", "is a dir"),
    "moved": ("mkdir /v; echo 1 >/v/reward.txt; rm -r /logs/verifier; ln -s /v /logs/verifier", "can't be trusted"),
    "json": ('echo 1 >/logs/verifier/reward.txt; echo \'{"a": 1, "b": 1}\' >/logs/verifier/reward.json', "a, b"),
    "broken json": ("echo 1 >/logs/verifier/reward.txt; echo '{' >/logs/verifier/reward.json", "no reward"),
}


async def test_what_is_no_reward_is_a_failure_of_the_verifier_and_no_zero(runtime, tmp_path):
    for name, (test, _) in BAD.items():
        write_task(tmp_path / "tasks" / name, test=test)
    records = await roll_out(runtime, tmp_path / "tasks", "nop")
    for name, (_, reason) in BAD.items():
        record = records[name]
        assert (record["reward"], record["failure"]["kind"]) == (None, "verifier"), name
        assert f"task '{name}'" in record["failure"]["message"] and reason in record["failure"]["message"], name


NO_TOOLS = "echo 'curl: (6) Could not resolve host: astral.sh'\nuvx pytest --ctrf /logs/verifier/ctrf.json\n"


async def test_tests_without_their_tools_are_told_apart(runtime, tmp_path, caplog):
    reward = "echo 0 >/logs/verifier/reward.txt\n"
    write_task(tmp_path / "tasks" / "lacking", test=NO_TOOLS + reward)
    write_task(tmp_path / "tasks" / "silent", test=NO_TOOLS)
    write_task(tmp_path / "tasks" / "reported", test=NO_TOOLS + "echo '{}' >/logs/verifier/ctrf.json\n" + reward)
    write_task(tmp_path / "tasks" / "solved", test=NO_TOOLS + "echo 1 >/logs/verifier/reward.txt\n")
    records = await roll_out(runtime, tmp_path / "tasks", "nop")
    for name in ("lacking", "silent"):
        assert (records[name]["reward"], records[name]["failure"]["kind"]) == (None, "verifier")
        assert "could not run: curl: (6) Could not resolve host" in records[name]["failure"]["message"]
    assert [records[name]["reward"] for name in ("reported", "solved")] == [0.0, 1.0]
    assert "2 of 4 verifications lacked their own tools" in caplog.text


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
