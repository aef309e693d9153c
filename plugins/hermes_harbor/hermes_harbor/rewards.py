"""Reads the rewards that a task's tests have written. They come from a sandbox, so only numbers are accepted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from hermes_core import VerifierError

MAX_REWARD_BYTES = 64 << 10
"""Maximum size of a file with a reward in bytes."""

MAX_REWARDS = 100
"""Maximum number of rewards in a file."""

_HINT = (
    "the task's tests must write a number to /logs/verifier/reward.txt, or a number or numbers by name to reward.json"
)


def rewards_in(name: str, data: bytes) -> dict[str, float]:
    """Return the rewards in a file, by name. A number without a name gets the name `reward`.

    Raises:
        VerifierError: the file is empty or too large, or a value is no finite number.
    """
    if len(data) > MAX_REWARD_BYTES:
        raise VerifierError(f"{name} has more than {MAX_REWARD_BYTES} bytes", hint=_HINT)
    if not data.strip():
        raise VerifierError(f"{name} is empty", hint=_HINT)
    try:
        value = json.loads(data) if name.endswith(".json") else float(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{name} holds {_excerpt(data)}, which is no reward", hint=_HINT) from error
    values = value if isinstance(value, Mapping) else {"reward": value}
    if not 0 < len(values) <= MAX_REWARDS:
        raise VerifierError(f"{name} has {len(values)} rewards", hint=_HINT)
    return {str(key)[:200]: _number(name, each) for key, each in values.items()}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerifierError(f"{name} holds {_excerpt(value)}, which is no number", hint=_HINT)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise VerifierError(f"{name} holds {_excerpt(value)}, which is not finite", hint=_HINT)
    return number


def the_reward(rewards: Mapping[str, float], key: str, least: float, most: float) -> float:
    """Return the reward that counts: the one with the name `key`, or the only one.

    Raises:
        VerifierError: there are several rewards, and none has the name `key`; or the reward is out of range.
    """
    if key not in rewards and len(rewards) > 1:
        raise VerifierError(
            f"the tests wrote the rewards {', '.join(sorted(rewards)[:10])}, none of them named {key!r}",
            hint="name one of them with --env.reward_key",
        )
    reward = rewards[key] if key in rewards else next(iter(rewards.values()))
    if not least <= reward <= most:
        raise VerifierError(
            f"the reward is {reward:g}, which is not between {least:g} and {most:g}",
            hint="if the task's rewards have another range, set --env.least_reward and --env.most_reward",
        )
    return reward


def _excerpt(value: object) -> str:
    return repr(value)[:100]
