"""Agents that forge their reward: each scores 0.0, and the record says what was tried."""

from __future__ import annotations

import pytest
from hermes_harbor.cheats import FORGERIES, HIDDEN_DAEMON

from hermes_core.soundness.validate import validate
from tests.harbor.harbor_tasks import BUSYBOX, PYTHON, Shell, roll_out, roll_out_here, write_task


async def check_forgeries(run, runtime, dataset, names):
    write_task(dataset / "task")
    for name in names:
        record = (await run(runtime, dataset, Shell(FORGERIES[name])))["task"]
        assert (record["reward"], record["failure"]) == (0.0, None), name
        assert record["details"]["tampered"] and "tampered with" in record["details"]["reason"], name


@pytest.mark.full
async def test_a_forged_reward_scores_zero_and_is_recorded(host_runtime, tmp_path):
    await check_forgeries(roll_out_here, host_runtime, tmp_path, FORGERIES)


async def test_a_forged_reward_scores_zero_in_a_container(runtime, tmp_path):
    await check_forgeries(roll_out, runtime, tmp_path, ("reward-before-the-tests", "logs-are-a-file"))


async def test_a_daemon_that_writes_the_reward_later_is_dead(runtime, tmp_path):
    # It waits for the tests: written before them, the reward would be found out, however late they begin.
    daemon = HIDDEN_DAEMON.replace("while :", "while [ ! -e /tests ]; do sleep 0.1; done; while :")
    assert daemon != HIDDEN_DAEMON
    for image in (BUSYBOX, PYTHON):
        write_task(tmp_path / "task", test="echo 0 >/logs/verifier/reward.txt\nsleep 5", image=image)
        record = (await roll_out(runtime, tmp_path, Shell(daemon, daemon)))["task"]
        assert (record["reward"], record["failure"]) == (0.0, None), image
        assert "tampered" not in record["details"]


async def test_what_was_planted_for_the_tests_is_removed(runtime, tmp_path):
    test = """
    cd /tests && PYTHONPATH=/ python3 -c 'import conftest' && echo 1 >/logs/verifier/reward.txt && exit
    python3 -c 'import test_it; test_it.test_it()' && echo 1 >/logs/verifier/reward.txt && exit
    echo 0 >/logs/verifier/reward.txt
    """
    files = {"tests/test_it.py": "def test_it():\n    assert open('/app/out').read() == 'hello\\n'\n"}
    write_task(tmp_path / "task", test=test, files=files, image=PYTHON)
    agent = Shell(
        "mkdir /tests; for each in /tests/test_it.py /tests/conftest.py /conftest.py /tests/io.py; do "
        "echo 'raise SystemExit(0)' >$each; done; echo '[pytest]' >/pytest.ini; : >/etc/ld.so.preload"
    )
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["removed"] == ["/tests", "/conftest.py", "/pytest.ini", "/etc/ld.so.preload"]


async def test_what_can_t_be_removed_is_a_forgery(runtime, tmp_path):
    write_task(tmp_path / "task", test="[ ! -e /tests/conftest.py ] || echo 1 >/logs/verifier/reward.txt", image=PYTHON)
    agent = Shell(
        "mkdir /tests; echo >/tests/conftest.py; printf '#!/bin/sh\nexit 0\n' >/tmp/rm; chmod 755 /tmp/rm; "
        "cp /tmp/rm $(command -v rm)"
    )
    record = (await roll_out(runtime, tmp_path, agent))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert "/tests can't be removed" in record["details"]["tampered"]


async def test_a_reward_after_the_limit_is_none(runtime, tmp_path):
    write_task(
        tmp_path / "task",
        "[verifier]\ntimeout_sec = 1",
        test="trap 'echo 1 >/logs/verifier/reward.txt; exit' TERM\nsleep 30 & wait",
    )
    record = (await roll_out(runtime, tmp_path, "nop"))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["reason"] == "the tests did not end within 1 s"


async def test_what_the_tests_left_running_writes_no_reward(runtime, tmp_path):
    test = "env -i setsid sh -c 'sleep 1.5; echo 1 >/logs/verifier/reward.txt' & echo 0 >/logs/verifier/reward.txt"
    write_task(tmp_path / "task", test=test)
    assert (await roll_out(runtime, tmp_path, "nop"))["task"]["reward"] == 0.0


async def test_an_agent_that_breaks_its_sandbox_scores_zero(runtime, tmp_path):
    write_task(tmp_path / "task")
    for command in ("rm -rf /app; echo >/app", "rm -rf /app /tmp /root"):
        record = (await roll_out(runtime, tmp_path, Shell(command)))["task"]
        assert (record["reward"], record["failure"]) == (0.0, None), command


@pytest.mark.full
async def test_validate_tries_cheats_and_finds_the_task_with_weak_tests(host_runtime, tmp_path):
    write_task(tmp_path / "tasks" / "good")
    write_task(
        tmp_path / "tasks" / "weak",
        test="if [ -e /app/out ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt",
    )
    outcome = await validate(
        host_runtime,
        "harbor",
        env={"dataset_name": str(tmp_path / "tasks"), "accept": ["image"]},
        cheats=["reward-before-the-tests", "linked-logs", "hidden-daemon", "planted-tests", "empty-files"],
        backend="local",
        concurrency=2,
    )
    assert [(each.item_id, str(each.reason), each.agent) for each in outcome.findings] == [
        ("weak", "cheat-solves", "cheat:empty-files")
    ]
    assert outcome.complete


async def test_a_cheat_overwrites_what_the_tests_run_as_far_as_the_agent_may(host_runtime, tmp_path):
    test = "#!/bin/sh\ncd /app; if ./check && /app/more; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
    for name, user in {"weak": "root", "locked": "nobody"}.items():
        toml = f'[agent]\nuser = "{user}"\n[[steps]]\nname = "one"\n'
        step = {
            "instruction.md": "Do it.\n",
            "tests/test.sh": test,
            "solution/solve.sh": "#!/bin/sh\necho hello >/tmp/out\n",
        }
        step |= {f"workdir/{script}": "#!/bin/sh\ngrep -q hello /tmp/out\n" for script in ("check", "more")}
        files = {f"steps/one/{path}": text for path, text in step.items()}
        write_task(tmp_path / name, toml, test=None, solve=None, instruction=None, files=files)
        for script in ("check", "more"):
            (tmp_path / name / "steps/one/workdir" / script).chmod(0o755)
    env = {"dataset_name": str(tmp_path), "accept": ["image"]}
    given = {"cheats": ["overwritten-scripts"], "backend": "local", "concurrency": 2}
    outcome = await validate(host_runtime, "harbor", env=env, **given)
    found = [(each.item_id, str(each.reason), each.agent) for each in outcome.findings]
    assert found == [("weak", "cheat-solves", "cheat:overwritten-scripts")]
