"""Runs a task of Inspect without Inspect's eval: makes the prompts of its samples, and scores conversations."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hermes_core import ConfigError, DatasetError, VerifierError
from hermes_inspect.version import INSPECT

with INSPECT.imports():
    from inspect_ai import Task
    from inspect_ai._eval.context import init_task_context
    from inspect_ai._eval.loader import load_tasks, resolve_task_sandbox
    from inspect_ai._eval.task.sandbox import read_sandboxenv_file, resolve_sample_files, resolve_sandbox
    from inspect_ai._util.error import PrerequisiteError
    from inspect_ai._util.registry import registry_params, registry_unqualified_name
    from inspect_ai.dataset import Sample
    from inspect_ai.log._transcript import Transcript, init_transcript
    from inspect_ai.model import (
        ChatMessage,
        ChatMessageUser,
        ModelName,
        ModelOutput,
        get_model,
        messages_from_openai,
        messages_to_openai,
    )
    from inspect_ai.scorer import Score, Scorer, Target
    from inspect_ai.scorer._scorer import unique_scorer_name
    from inspect_ai.solver import TaskState
    from inspect_ai.solver._task_state import set_sample_state
    from inspect_ai.util import SandboxEnvironment
    from inspect_ai.util._sandbox.context import (
        copy_sandbox_environment_files,
        sandbox_default_context_var,
        sandbox_environments_context_var,
        sandbox_with_environments_context_var,
        setup_sandbox_environment,
    )
    from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy
    from inspect_ai.util._store import init_subtask_store

    from hermes_inspect.config import HermesSandboxConfig, read_config

GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""The reward for a score that is a word. Inspect's metrics read these words in the same way."""

NO_MODEL = "none/none"
"""Inspect's name for no model."""

REPLACE = "set use_solver to false, and the prompt is the sample's input; or run the task with Inspect"

Answer = Callable[[TaskState], TaskState]
"""Replaces the model: gets the state at the solver's first call of `generate`, and returns the state after it."""


class _GenerateCalled(BaseException):
    """The solver has called `generate`. A `BaseException`, so that no `except Exception` of a solver catches it."""

    def __init__(self, state: TaskState) -> None:
        super().__init__()
        self.state = state


def load(spec: str, arguments: Mapping[str, Any]) -> Task:
    """Return a task by `FILE@TASK`, by a file with one task, or by a name that a package registers. Blocks.

    While a file is loaded, Inspect changes the working directory of this process.

    Raises:
        DatasetError: there is no such task, or it can't be loaded.
    """
    try:
        tasks = load_tasks([spec], dict(arguments))
    except Exception as error:  # the task's own code runs
        raise DatasetError(f"the Inspect task {spec!r} can't be loaded: {error}") from error
    if len(tasks) != 1:
        raise DatasetError(f"{spec!r} names {len(tasks)} Inspect tasks, not one", hint="write FILE@TASK")
    return tasks[0]


@dataclass(frozen=True)
class LoadedTask:
    """A task whose solver and scorers run with an agent's conversation instead of a model.

    To make a prompt, the solver runs until it first calls `generate`. To score a conversation, the solver runs again,
    and its call returns the conversation. So solvers that read the answer, such as `multiple_choice`, work.
    """

    task: Task
    use_solver: bool = True
    """Whether to run the solver. If not, the prompt is the sample's input, and scorers get the conversation as it
    is."""
    grader: str | None = None
    """The model that scorers ask, by Inspect's name."""

    @property
    def scorers(self) -> dict[str, Scorer]:
        """Return the task's scorers by the names that Inspect's logs use."""
        names: list[str] = []
        for scorer in self.task.scorer or ():
            names.append(unique_scorer_name(scorer, names))
        return dict(zip(names, self.task.scorer or (), strict=True))

    def check(self) -> None:
        """Check that the task can be run without Inspect's eval.

        Raises:
            DatasetError: the task can't be run; the message has the reason.
            ConfigError: a scorer asks a model, but the settings name none.
        """
        task = self.task
        for unfit, reason in (
            (task.sample_source is not None, "makes its samples while it runs"),
            (task.setup is not None, "has a setup solver, which would run before the agent"),
            (task.cleanup is not None, "has a cleanup function, which needs the state of Inspect's eval"),
            (not task.scorer, "has no scorer"),
        ):
            if unfit:
                raise DatasetError(f"the Inspect task {task.name!r} {reason}", hint="run it with Inspect")
        for name, scorer in self.scorers.items():
            asks = registry_unqualified_name(scorer).startswith("model_graded")
            model = self.grader or task.model_roles or registry_params(scorer).get("model")
            if asks and not model:
                raise ConfigError(f"the scorer {name!r} asks a model", hint="name one: --env.grader=openai/MODEL")

    async def place(self, sample: Sample) -> HermesSandboxConfig | None:
        """Return the settings of the sample's sandbox; None if it has no sandbox.

        Raises:
            ConfigError: the settings demand something that a slot can't provide, such as several containers.
        """
        spec = await resolve_sandbox(resolve_task_sandbox(self.task, None), sample, self.task.name)
        if spec is None:
            return HermesSandboxConfig() if sample.files or sample.setup else None
        if spec.type not in ("docker", "hermes", "local"):
            raise ConfigError(f"it runs in a sandbox {spec.type!r}", hint="run it with Inspect")
        return read_config(spec.config)

    async def prompt(self, sample: Sample) -> list[dict[str, Any]]:
        """Return the agent's prompt, as messages in the OpenAI form.

        Raises:
            DatasetError: the solver never calls `generate`, or the prompt is not only text.
        """
        messages: list[dict[str, Any]] = await messages_to_openai((await self._run_to_generate(sample)).messages)
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                if any(part["type"] != "text" for part in content):
                    raise DatasetError(
                        f"the input of sample {sample.id!r} is not only text", hint="run it with Inspect"
                    )
                message["content"] = "\n".join(part["text"] for part in content)
        return messages

    async def rehearse(self, sample: Sample) -> None:
        """Run the solver with an empty answer, to check that it asks the model only once.

        Raises:
            DatasetError: the solver asks the model again.
        """
        state = await self._run_to_generate(sample)
        try:
            await self.state(sample, [*await messages_to_openai(state.messages), {"role": "assistant", "content": ""}])
        except VerifierError as error:
            raise DatasetError(f"{self._label(sample)}: {error.message}", hint=error.hint) from error
        except PrerequisiteError as error:  # raised by `get_model()`, as there is no model
            raise DatasetError(f"{self._label(sample)}: its solver asks the model itself", hint=REPLACE) from error
        except Exception:  # a solver may fail on an empty answer, but work with the agent's answer
            pass

    async def state(self, sample: Sample, conversation: Sequence[Mapping[str, Any]], model: str = "none") -> TaskState:
        """Return the state for scorers after this conversation, which is in the OpenAI form.

        Raises:
            VerifierError: the solver does not end with one answer of the model.
            Exception: whatever the solver raises.
        """
        messages = await messages_from_openai(copy.deepcopy(list(conversation)), model)  # the call changes its argument
        answers = [message for message in messages if message.role == "assistant"]
        expected = await self._run_to_generate(sample)
        answered = False

        def answer(state: TaskState) -> TaskState:
            nonlocal answered
            if answered:
                raise VerifierError("its solver asks the model more than once", hint=REPLACE)
            if _texts(state.messages) != _texts(expected.messages):
                raise VerifierError("its solver writes another prompt each time", hint=REPLACE)
            answered = True
            state.messages = messages
            if answers:
                state.output = ModelOutput.from_message(answers[-1])
            return state

        state = self._begin(sample, model)
        state = await self._solve(state, answer) if self.use_solver else answer(state)
        state.completed = True
        set_sample_state(state)
        return state

    async def score(self, state: TaskState) -> dict[str, Score]:
        """Return the score of each scorer. Unlike solvers, scorers may ask models.

        Raises:
            VerifierError: a scorer gave no score.
            Exception: whatever a scorer raises.
        """
        init_task_context(get_model(self.grader or NO_MODEL), self.task.model_roles)
        scores: dict[str, Score] = {}
        for name, scorer in self.scorers.items():
            state.scores = dict(scores)
            score = await scorer(state, state.target)
            if score is None:
                raise VerifierError(f"the scorer {name!r} gave no score")
            scores[name] = score
        return scores

    async def _run_to_generate(self, sample: Sample) -> TaskState:
        state = self._begin(sample, "none")
        if not self.use_solver:
            return state
        try:
            await self._solve(state, _stop)
        except _GenerateCalled as called:
            return called.state
        except Exception as error:  # the task's own code
            message = f"{self._label(sample)}: its solver failed before `generate`: {error}"
            raise DatasetError(message, hint=REPLACE) from error
        raise DatasetError(f"{self._label(sample)}: its solver never calls `generate`", hint=REPLACE)

    async def _solve(self, state: TaskState, answer: Answer) -> TaskState:
        async def generate(state: TaskState, *_: Any, **__: Any) -> TaskState:
            return answer(state)

        solved: TaskState = await self.task.solver(state, generate)
        return solved

    def _begin(self, sample: Sample, model: str) -> TaskState:
        """Return the initial state of a sample, and make it the state of the running asyncio task."""
        fresh = copy.deepcopy(sample)
        messages: list[ChatMessage] = (
            fresh.input if isinstance(fresh.input, list) else [ChatMessageUser(content=fresh.input)]
        )
        state = TaskState(
            model=ModelName(f"hermes/{model}"),
            sample_id=sample.id,
            epoch=1,
            input=fresh.input,
            messages=messages,
            target=Target(fresh.target),
            choices=fresh.choices,
            metadata=fresh.metadata,
        )
        init_task_context(get_model(NO_MODEL))
        init_subtask_store(state.store)
        init_transcript(Transcript())
        set_sample_state(state)
        return state

    def _label(self, sample: Sample) -> str:
        return f"sample {sample.id!r} of the Inspect task {self.task.name!r}"


def _stop(state: TaskState) -> NoReturn:
    raise _GenerateCalled(state)


def _texts(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


# ------------------------------------------------------------------ sandboxes


def enter(sandbox: SandboxEnvironment | None) -> None:
    """Make this sandbox the result of `sandbox()` in the running asyncio task; None means no sandbox."""
    sandbox_environments_context_var.set({} if sandbox is None else {"default": SandboxEnvironmentProxy(sandbox)})
    sandbox_with_environments_context_var.set({})
    sandbox_default_context_var.set("default")


async def prepare(sample: Sample, sandbox: SandboxEnvironment) -> None:
    """Copy the sample's files into its sandbox, and run its setup script there, with Inspect's own functions.

    Raises:
        RuntimeError, OSError: a copy or the script failed.
    """
    enter(sandbox)
    init_transcript(Transcript())
    files, setup = await asyncio.to_thread(asyncio.run, _read(sample))
    environments = sandbox_environments_context_var.get()
    await copy_sandbox_environment_files(files, environments)
    if setup is not None:
        await setup_sandbox_environment(setup, environments)


async def _read(sample: Sample) -> tuple[dict[str, bytes], bytes | None]:
    """Return the contents of the sample's files, which may be URLs, and of its setup script. Blocks."""
    files = {
        path: await read_sandboxenv_file(contents)
        for path, contents in resolve_sample_files(sample.files or {}).items()
    }
    setup = await read_sandboxenv_file(sample.setup) if sample.setup else None
    if setup is not None and not setup.lstrip().startswith(b"#!"):
        setup = b"#!/usr/bin/env bash\n\n" + setup
    return files, setup


# ------------------------------------------------------------------ rewards


def reward(scores: Mapping[str, Score], choice: str | None) -> float:
    """Return the reward: the only score, or the one that `choice` names as SCORER or SCORER/KEY.

    Raises:
        VerifierError: the score is neither a finite number nor a word of `GRADES`.
    """
    name, _, key = (choice or next(iter(scores))).partition("/")
    score = scores[name]
    value = score.value
    if isinstance(value, Mapping):
        if not key and len(value) > 1:
            hint = f"name one: --env.score={name}/{next(iter(value))}"
            raise VerifierError(f"the scorer {name!r} gives several values: {', '.join(value)}", hint=hint)
        key = key or next(iter(value), "")
        if key not in value:
            raise VerifierError(f"the scorer {name!r} gives no value {key!r}, but {', '.join(value) or 'none'}")
        value = value[key]
    number = _number(value)
    if number is None:
        why = score.reason or score.explanation or "not a number"
        raise VerifierError(f"the score {value!r} of {name!r} is no reward: {why}")
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, str) and (grade := GRADES.get(value, GRADES.get(value.lower()))) is not None:
        return grade
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
