"""Environments for TRL's `environment_factory`, whose methods are the tools of a rollout, and the reward functions."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hermes_core import ConfigError, DrivenRollout, Record, RolloutEnded
from hermes_trl.run import ITEM, TrlRun

RewardFunction = Callable[..., list[float | None]]

_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
_RESERVED = ("reset", "get_reward")


class RolloutEnvironment:
    """Runs one rollout at a time. The subclass that `environment_class` makes has a method for each tool.

    There is no `get_reward`: TRL would call it for one rollout after the other, and without the model's last message.
    `environment_reward` verifies all rollouts at the same time.
    """

    def __init__(self, run: TrlRun) -> None:
        self.record: Record | None = None
        """The record of the rollout, once it is scored."""
        self._run = run
        self._rollout: DrivenRollout | None = None

    def reset(self, prompt: Sequence[Mapping[str, Any]], **_row: Any) -> None:
        """Begin a rollout of the prompt's item in a fresh slot, and drop the rollout before.

        After a failure to begin, tool calls are answered with an error, and the rollout gets no reward.

        Raises:
            UsageError, PolicyError: no slot can be had with these settings.
        """
        last, self._rollout, self.record = self._rollout, None, None
        if last is not None:
            self._run.call(self._run.drop(last))
        self._rollout = self._run.call(self._run.begin(item_of(prompt)))

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the answer to a tool call. If the rollout has ended, raise RolloutEnded, which TRL shows the model."""
        if self._rollout is None:
            raise RolloutEnded("no rollout has begun", hint="call reset first")
        return self._run.call(self._rollout.call(tool, arguments))


def item_of(prompt: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the item that a prompt of `train_dataset` belongs to.

    Raises:
        ConfigError: the prompt has no id, so it does not come from `train_dataset`.
    """
    item_id = prompt[-1].get(ITEM) if prompt and isinstance(prompt[-1], Mapping) else None
    if not isinstance(item_id, str):
        raise ConfigError(
            f"the last message of a prompt has no {ITEM!r}, so nobody knows which task it is",
            hint=f"use train_dataset of HermesSpec; if you change its prompts, keep the field {ITEM!r}",
        )
    return item_id


def environment_class(run: TrlRun) -> type[RolloutEnvironment]:
    """Return a class with the run's tools as methods, because TRL looks for tools on the class.

    Raises:
        UsageError: as `TrlRun.tools` says.
        ConfigError: a tool can't be a method.
    """
    return type(run.session.name, (RolloutEnvironment,), {each.__name__: each for each in map(_method, run.tools())})


def _method(schema: Mapping[str, Any]) -> Callable[..., str]:
    """Return a method that calls a tool, with the signature and the docstring from which TRL makes its schema.

    Raises:
        ConfigError: the tool's name or a parameter's name can't be used for a method.
    """
    function = schema["function"]
    name: str = function["name"]
    properties: Mapping[str, Mapping[str, Any]] = function["parameters"]["properties"]
    required = function["parameters"].get("required", ())
    if unfit := [each for each in (name, *properties) if not each.isidentifier()]:
        raise ConfigError(f"tool {name!r}: {unfit[0]!r} is no name in Python", hint="use rollout_func with this tool")
    if name in _RESERVED or name.startswith("_"):
        raise ConfigError(f"a tool named {name!r} can't be a method for TRL", hint="use rollout_func with this tool")

    def method(self: RolloutEnvironment, /, **arguments: Any) -> str:
        # TRL fills in the default None for parameters that the model left out.
        return self._call(name, {key: each for key, each in arguments.items() if each is not None or key in required})

    order = sorted(properties, key=lambda each: each not in required)
    hints = {each: _hint(properties[each], optional=each not in required) for each in order}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            each, kind, annotation=hints[each], default=inspect.Parameter.empty if each in required else None
        )
        for each in order
    ]
    method.__name__ = method.__qualname__ = name
    method.__annotations__ = {**hints, "return": str}
    method.__doc__ = _docstring(function["description"], {each: properties[each] for each in order})
    signature = inspect.Signature([inspect.Parameter("self", kind), *parameters], return_annotation=str)
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _hint(schema: Mapping[str, Any], *, optional: bool) -> Any:
    """Return the type hint from which TRL makes this schema, or the closest one; `Any` where there is none."""
    if "enum" in schema:
        hint: Any = Literal[tuple(schema["enum"])]
    elif (kind := schema.get("type")) == "array" and isinstance(schema.get("items"), Mapping):
        hint = list[_hint(schema["items"], optional=False)]  # type: ignore[misc]
    else:
        hint = _TYPES.get(kind, Any) if isinstance(kind, str) else Any
    return hint | None if optional and hint is not Any else hint


def _docstring(description: str, properties: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a docstring for the parser of transformers. `Args:` in the description is replaced, because the parser
    would take it for the beginning of the arguments."""
    text = re.sub(r"\b(Args|Returns|Raises):", r"\1 -", description.strip())
    if not properties:
        return text
    lines = [f"    {name}: {' '.join(str(each.get('description', name)).split())}" for name, each in properties.items()]
    return "\n".join([text, "", "Args:", *lines])


def environment_reward(
    *,
    completions: Sequence[Any],
    environments: Sequence[RolloutEnvironment] | None = None,
    reward: Sequence[float | None] | None = None,
    failure: Sequence[str | None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return the environment's reward of each rollout; None for a rollout that failed, which TRL leaves out.

    Args:
        environments: the environments of `environment_factory`, whose rollouts are verified here, at the same time.
        reward, failure: columns of `rollout_func`, which has verified its rollouts.
    """
    if environments is not None:
        _score(environments, completions)
        reward = [_reward(each) for each in environments]
        failure = [_failure(each) for each in environments]
    rewards, failures = list(reward or ()), list(failure or ())
    if log_metric is not None and rewards:
        log_metric("hermes/unscored", sum(each is None for each in rewards) / len(rewards))
    if log_extra is not None:
        log_extra("failure", [each or "" for each in failures])
    return rewards


def only_scored(function: RewardFunction) -> RewardFunction:
    """Wrap a reward function so that it returns None for rollouts without a reward of the environment.

    Otherwise TRL would train on such rollouts with the rewards of `function` alone.
    """

    @functools.wraps(function)
    def score(
        *, environments: Sequence[RolloutEnvironment] | None = None, reward: Sequence[float | None] = (), **columns: Any
    ) -> list[float | None]:
        base_rewards = reward if environments is None else [_reward(each) for each in environments]
        rewards = function(environments=environments, reward=reward, **columns)
        return [None if base is None else each for base, each in zip(base_rewards, rewards, strict=True)]

    return score


def _score(environments: Sequence[RolloutEnvironment], completions: Sequence[Any]) -> None:
    """End the rollouts that were not scored yet, and keep their records in the environments."""
    ending = [
        (each, rollout, _last_text(completion))
        for each, completion in zip(environments, completions, strict=True)
        if (rollout := each._rollout) is not None
    ]
    if not ending:
        return
    run = ending[0][0]._run
    for (each, _, _), record in zip(ending, run.call(run.end([pair[1:] for pair in ending])), strict=True):
        each.record, each._rollout = record, None


def _last_text(completion: Any) -> str:
    """Return the model's last message."""
    last = completion[-1] if isinstance(completion, Sequence) and completion else completion
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else last
    return content if isinstance(content, str) else ""


def _reward(environment: RolloutEnvironment) -> float | None:
    return None if environment.record is None else environment.record.reward


def _failure(environment: RolloutEnvironment) -> str | None:
    record = environment.record
    return f"{record.failure.kind}: {record.failure.message}" if record and record.failure else None
