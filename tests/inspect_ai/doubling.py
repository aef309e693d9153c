"""An eval of ten samples for Inspect, with a model that follows a script: `python doubling.py LOGS [slow]`.

With `slow`, it is as many samples as a sandbox has slots, and each sleeps in its first command.
"""

from __future__ import annotations

import os
import sys

from inspect_ai import Task, eval, task  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash, text_editor
from inspect_ai.util import sandbox

SAMPLES, SLOTS = 10, 8


@scorer(metrics=[accuracy()])
def doubled():
    async def score(state: TaskState, target: Target) -> Score:
        answer = await sandbox().read_file("answer")
        edited = await sandbox().exec(["cat", "/tmp/edited"])
        return Score(value=answer == f"{target.text}\n" and edited.stdout == "done\n", answer=answer)

    return score


@task
def doubling() -> Task:
    return Task(
        dataset=[
            Sample(
                id=number, input=f"Double {number}", target=str(2 * number), files={"given": str(number)}, setup=SETUP
            )
            for number in range(SAMPLES)
        ],
        solver=[use_tools(bash(timeout=60), text_editor()), generate()],
        scorer=doubled(),
        sandbox="hermes",
    )


SETUP = "echo done >/tmp/setup"


def scripted(slow: bool):
    """Double the number with bash, then use the editor, which needs Inspect's tools in the sandbox; then say so."""
    wait = f"sleep 300.{os.getpid()}; " if slow else ""
    calls = [
        ("bash", {"command": f"{wait}test -f /tmp/setup && echo $((2 * $(cat given))) >answer; ls"}),
        ("text_editor", {"command": "create", "path": "/tmp/edited", "file_text": "done\n"}),
    ]

    def answer(messages, tools, tool_choice, config):
        turn = sum(message.role == "assistant" for message in messages)
        if turn < len(calls):
            output = ModelOutput.for_tool_call("mockllm/model", *calls[turn])
        else:
            output = ModelOutput.from_content("mockllm/model", "It is done.")
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else it downloads a tokenizer
        return output

    return answer


if __name__ == "__main__":
    slow = "slow" in sys.argv
    model = get_model("mockllm/model", custom_outputs=scripted(slow))
    limit = SLOTS if slow else None
    eval(doubling(), model=model, limit=limit, log_dir=sys.argv[1], display="none", log_realtime=False)
