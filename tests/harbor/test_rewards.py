"""Rewards that tests write: numbers, numbers by name, and everything that is no reward."""

from __future__ import annotations

import pytest
from hermes_harbor.rewards import MAX_REWARD_BYTES, rewards_in, the_reward

from hermes_core.errors import VerifierError
from tests.harbor.harbor_tasks import roll_out_here, write_task


@pytest.mark.parametrize(
    ("name", "data", "rewards"),
    [
        ("reward.txt", b"1\n", {"reward": 1.0}),
        ("reward.txt", b" 0.25", {"reward": 0.25}),
        ("reward.json", b"0.5", {"reward": 0.5}),
        ("reward.json", b'{"reward": 1}', {"reward": 1.0}),
        ("reward.json", b'{"a": 1, "b": 0.5}', {"a": 1.0, "b": 0.5}),
    ],
)
def test_numbers_alone_and_by_name_are_read(name, data, rewards):
    assert rewards_in(name, data) == rewards


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("reward.txt", b"", "is empty"),
        ("reward.txt", b" \n", "is empty"),
        ("reward.txt", b"nan", "not finite"),
        ("reward.txt", b"inf", "not finite"),
        ("reward.txt", b"passed", "no reward"),
        ("reward.txt", b"\xff\xfe", "no reward"),
        ("reward.txt", "١".encode(), "no reward"),
        ("reward.txt", b"0" * MAX_REWARD_BYTES + b"1", "more than"),
        ("reward.json", b"", "is empty"),
        ("reward.json", b"NaN", "not finite"),
        ("reward.json", b"1e999", "not finite"),
        ("reward.json", b"1" + b"0" * 400, "not finite"),
        ("reward.json", b"1" * 5000, "no reward"),
        ("reward.json", b"[" * 50_000, "no reward"),
        ("reward.json", b'{"reward": "1"}', "no number"),
        ("reward.json", b'{"reward": true}', "no number"),
        ("reward.json", b'{"reward": [1]}', "no number"),
        ("reward.json", b'{"reward": NaN}', "not finite"),
        ("reward.json", b"null", "no number"),
        ("reward.json", b"{}", "0 rewards"),
        ("reward.json", b'{"reward": 1', "no reward"),
    ],
)
def test_other_files_are_no_reward(name, data, reason):
    with pytest.raises(VerifierError, match=reason):
        rewards_in(name, data)


def test_the_reward_that_counts():
    assert the_reward({"reward": 0.5, "style": 1.0}, "reward", 0, 1) == 0.5
    assert the_reward({"reward": 0.5, "style": 1.0}, "style", 0, 1) == 1.0
    assert the_reward({"accuracy": 0.25}, "reward", 0, 1) == 0.25
    assert the_reward({"reward": -1.0}, "reward", -1, 1) == -1.0
    with pytest.raises(VerifierError, match="a, b, none of them named 'reward'"):
        the_reward({"a": 1.0, "b": 1.0}, "reward", 0, 1)
    for value in (1.5, -0.1):
        with pytest.raises(VerifierError, match="not between 0 and 1"):
            the_reward({"reward": value}, "reward", 0, 1)


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


@pytest.mark.full
async def test_what_is_no_reward_is_a_failure_of_the_verifier_and_no_zero(host_runtime, tmp_path):
    for name, (test, _) in BAD.items():
        write_task(tmp_path / "tasks" / name, test=test)
    records = await roll_out_here(host_runtime, tmp_path / "tasks", "nop")
    for name, (_, reason) in BAD.items():
        record = records[name]
        assert (record["reward"], record["failure"]["kind"]) == (None, "verifier"), name
        assert f"task '{name}'" in record["failure"]["message"] and reason in record["failure"]["message"], name


NO_TOOLS = "echo 'curl: (6) Could not resolve host: astral.sh'\nuvx pytest --ctrf /logs/verifier/ctrf.json\n"


@pytest.mark.full
async def test_tests_without_their_tools_are_told_apart(host_runtime, tmp_path, caplog):
    reward = "echo 0 >/logs/verifier/reward.txt\n"
    write_task(tmp_path / "tasks" / "lacking", test=NO_TOOLS + reward)
    write_task(tmp_path / "tasks" / "silent", test=NO_TOOLS)
    write_task(tmp_path / "tasks" / "reported", test=NO_TOOLS + "echo '{}' >/logs/verifier/ctrf.json\n" + reward)
    write_task(tmp_path / "tasks" / "solved", test=NO_TOOLS + "echo 1 >/logs/verifier/reward.txt\n")
    records = await roll_out_here(host_runtime, tmp_path / "tasks", "nop")
    for name in ("lacking", "silent"):
        assert (records[name]["reward"], records[name]["failure"]["kind"]) == (None, "verifier")
        assert "could not run: curl: (6) Could not resolve host" in records[name]["failure"]["message"]
    assert [records[name]["reward"] for name in ("reported", "solved")] == [0.0, 1.0]
    assert "2 of 4 verifications lacked their own tools" in caplog.text
