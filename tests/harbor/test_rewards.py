"""Rewards that tests write: numbers, numbers by name, and everything that is no reward."""

from __future__ import annotations

import pytest
from hermes_harbor.rewards import MAX_REWARD_BYTES, rewards_in, the_reward

from hermes_core.errors import VerifierError


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
def test_rewards(name, data, rewards):
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
def test_what_is_no_reward(name, data, reason):
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
