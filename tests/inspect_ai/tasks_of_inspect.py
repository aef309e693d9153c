"""Tasks for Inspect: one that fits for each thing that the environment `inspect` promises, and those that don't fit."""

from __future__ import annotations

from contextlib import suppress

from hermes_inspect import HermesSandbox
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Target, accuracy, choice, includes, match, mean, model_graded_qa, scorer
from inspect_ai.solver import (
    TaskState,
    basic_agent,
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import bash
from inspect_ai.util import ComposeConfig, ComposeService, SandboxEnvironmentSpec, sandbox

from hermes_core import Runtime


@scorer(metrics=[accuracy()])
def doubled():
    async def score(state: TaskState, target: Target) -> Score:
        answer = await sandbox().read_file("answer")
        setup = await sandbox().exec(["cat", "setup-ran"])
        return Score(value="C" if answer == f"{target.text}\n" and setup.success else "I", answer=answer)

    return score


@task
def doubling(count: int = 3) -> Task:
    return Task(
        dataset=[
            Sample(
                id=f"double-{n}", input="Double it", target=str(2 * n), files={"given": str(n)}, setup="echo >setup-ran"
            )
            for n in range(1, count + 1)
        ],
        solver=[use_tools(bash()), generate()],
        scorer=doubled(),
        sandbox="hermes",
    )


CAPITAL = Sample(input="What is the capital of France?", target="Paris", metadata={"hint": "seine"})


@task
def question() -> Task:
    solver = [system_message("Be brief."), prompt_template("{prompt} (Hint: {hint})"), generate()]
    return Task(dataset=[CAPITAL], solver=solver, scorer=match())


@task
def choices() -> Task:
    sample = Sample(id="x", input="Which is even?", choices=["one", "two", "three"], target="B")
    return Task(dataset=[sample], solver=multiple_choice(), scorer=choice())


@scorer(metrics=[mean()])
def valued(value):
    async def score(state: TaskState, target: Target) -> Score | None:
        if value == "raise":
            raise ValueError("the scorer is broken")
        return None if value == "none" else Score(value=float("nan") if value == "nan" else value)

    return score


@scorer(metrics=[mean()])
def loses_the_sandbox():
    """Ends the sandbox, and hides that it can't be used any more."""

    async def score(state: TaskState, target: Target) -> Score:
        async with Runtime() as runtime:
            await runtime.backend("local").terminate_id(sandbox().as_type(HermesSandbox)._slot.sandbox_id)
        with suppress(Exception):
            await sandbox().read_file("answer")
        return Score(value=1)

    return score


@task
def losing() -> Task:
    return Task(dataset=[CAPITAL], scorer=loses_the_sandbox(), sandbox="hermes")


@task
def scored(value: str | float | dict = 1) -> Task:
    return Task(dataset=[CAPITAL], scorer=valued(value))


@task
def two_scorers() -> Task:
    return Task(dataset=[CAPITAL], scorer=[match(), valued({"a": 0.25, "b": 0.75}), valued(0.5)])


@task
def graded() -> Task:
    return Task(dataset=[CAPITAL], scorer=model_graded_qa())


@solver
def prepares():
    async def solve(state, generate):
        return state

    return solve


@solver
def twice():
    async def solve(state, generate):
        return await generate(await generate(state))

    return solve


@solver
def asks_itself():
    async def solve(state, generate):
        await get_model().generate("What?")
        return await generate(state)

    return solve


@task
def with_setup() -> Task:
    return Task(dataset=[CAPITAL], setup=prepares(), scorer=match())


@task
def without_scorer() -> Task:
    return Task(dataset=[CAPITAL])


@task
def with_agent() -> Task:
    return Task(dataset=[CAPITAL], solver=basic_agent(), scorer=includes())


@task
def asking_twice() -> Task:
    return Task(dataset=[CAPITAL], solver=twice(), scorer=includes())


@task
def criticising() -> Task:
    return Task(dataset=[CAPITAL], solver=[generate(), self_critique()], scorer=includes())


@task
def asking_itself() -> Task:
    return Task(dataset=[CAPITAL], solver=asks_itself(), scorer=includes())


@task
def two_services() -> Task:
    compose = ComposeConfig(services={"a": ComposeService(image="x"), "b": ComposeService(image="y")})
    return Task(dataset=[CAPITAL], scorer=includes(), sandbox=SandboxEnvironmentSpec("docker", compose))


@task
def with_image() -> Task:
    compose = ComposeConfig(services={"default": ComposeService(image="python:3.12", working_dir="/work")})
    return Task(dataset=[CAPITAL], scorer=includes(), sandbox=SandboxEnvironmentSpec("docker", compose))
