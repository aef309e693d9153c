"""hermes-agent's own batch runner works in slots, and what it writes is a run of ours."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hermes_testing.scripted_server import Reply, ScriptedServer, ToolScript, call

from hermes_core import export_run, merge_runs, read_records

from .conftest import PLACES, Home

pytestmark = [pytest.mark.full, pytest.mark.long]

OTHER_IMAGE = "hermes-test-other:latest"


def solver(prompt: str):
    """The model: writes a number, a file with tags in it, and says what it has done."""
    yield call("terminal", command=f"echo {prompt[-1]} > out.txt; cat out.txt; pwd")
    yield [call("write_file", path="mod.py", content='TEXT = "<tool_call>"\n'), call("read_file", path="out.txt")]
    return Reply("Done.", reasoning="It is\nwritten.")


async def batch(
    home: Home,
    rows: Sequence[Mapping[str, str]],
    *,
    resume: bool = False,
    terminal: str = "slots-local",
    model: Callable[..., Any] = solver,
) -> tuple[list[dict[str, Any]], int]:
    """The rows that the batch runner has written, and how many requests it made for them."""
    data = home.work / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with ScriptedServer(ToolScript(model)) as server:
        given = {
            "dataset_file": data.name,
            "batch_size": 1,
            "run_name": "numbers",
            "distribution": "terminal_only",
            "model": "scripted",
            "base_url": server.base_url,
            "api_key": "none",
            "num_workers": 2,
            "max_turns": 6,
            **({"resume": True} if resume else {}),
        }
        options = [f"--{name}={value}" for name, value in given.items()]
        environ = home.environ(terminal, TERMINAL_CONTAINER_PERSISTENT="false")
        program = [sys.executable, "-m", "batch_runner", *options]
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        running = await asyncio.create_subprocess_exec(*program, cwd=home.work, env=environ, **pipes)
        said, _ = await running.communicate()
        files = [*(home.work / "data" / "numbers").glob("batch_*.jsonl")]
        written = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert len(written) == len(rows), said.decode()[-3000:]
        return sorted(written, key=lambda row: row["prompt_index"]), server.request_count


def numbers(count: int) -> list[dict[str, str]]:
    """Rows whose prompts `solver` solves."""
    return [{"prompt": f"Write the number {number}"} for number in range(count)]


def told(rows: list[dict[str, Any]]) -> list[list[str]]:
    return sorted([part["value"] for part in row["conversations"]] for row in rows)


async def test_its_runs_can_be_merged_and_exported_word_for_word(home: Home, tmp_path: Path, isolates: None) -> None:
    from hermes_agent.command import batch_runs

    rows, _ = await batch(home, numbers(2))
    for row in rows:
        answer = json.loads(row["conversations"][3]["value"].splitlines()[1])["content"]
        assert answer["output"].splitlines()[0] == str(row["prompt_index"])
        assert answer["output"].splitlines()[1].startswith("/data/slot_"), "it ran in a slot"
    done = CliRunner().invoke(batch_runs, [str(home.work / "data/numbers"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    records = [*read_records(tmp_path / "run")]
    assert [message["role"] for message in records[0]["messages"]] == [
        *("user", "assistant", "tool", "assistant", "tool", "tool", "assistant")
    ]
    assert [turn["message"] for turn in records[0]["turns"]] == [1, 3, 6]
    assert [(made["turn"], made["message"], made["name"]) for made in records[0]["calls"]] == [
        *((0, 2, "terminal"), (1, 4, "write_file"), (1, 5, "read_file"))
    ]
    assert records[0]["messages"][-1]["reasoning_content"] == "It is\nwritten."
    assert {"terminal", "write_file"} <= {schema["function"]["name"] for schema in records[0]["tool_schemas"]}
    assert merge_runs([tmp_path / "run", tmp_path / "run"], tmp_path / "merged").repeated == 2
    export_run(tmp_path / "merged", "sharegpt", tmp_path / "exported")
    lines = [line for file in (tmp_path / "exported").rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert told([json.loads(line) for line in lines]) == told(rows)

    more, requests = await batch(home, numbers(3), resume=True)
    assert told(more[:2]) == told(rows)
    assert requests <= 5, "only the new prompt is run"


@pytest.fixture
def other_image(docker_images: None) -> str:
    """Another image than the one of the settings, which says that it is another."""
    import docker

    dockerfile = f"FROM {PLACES['slots-docker']['TERMINAL_DOCKER_IMAGE']}\nRUN echo other >/image\n"
    client = docker.from_env()
    # It stays: sandboxes that a killed worker leaves behind use it until their watchdogs end them.
    client.images.build(fileobj=io.BytesIO(dockerfile.encode()), tag=OTHER_IMAGE)
    client.close()
    return OTHER_IMAGE


def looker(prompt: str):
    """The model: looks which image it is in."""
    yield call("terminal", command="cat /image || echo the usual")
    return Reply("Done.", reasoning="I have looked.")


async def test_a_row_with_an_image_has_a_slot_in_it(home: Home, other_image: str) -> None:
    rows = [{"prompt": "Look."}, {"prompt": "Look again.", "image": other_image}]
    written, _ = await batch(home, rows, terminal="slots-docker", model=looker)
    answers = [json.loads(row["conversations"][3]["value"].splitlines()[1])["content"]["output"] for row in written]
    assert [answer.splitlines()[-1] for answer in answers] == ["the usual", "other"]


@pytest.fixture
def hermes_program(require: Callable[[str, str | None], None]) -> None:
    """The program that `--agent hermes` sends into slots has been fetched."""
    from hermes_agents import packages

    there = any(packages.cache().glob("hermes-*"))
    require("agents", None if there else "hermes-agent is not fetched; `hermes-rl agents install hermes`")


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with its calls numbered, and their arguments as values."""
    numbers: dict[str, str] = {}
    plain = json.loads(json.dumps([message for message in messages if message["role"] != "system"]))
    for message in plain:
        for made in message.get("tool_calls", ()):
            made["id"] = numbers.setdefault(made["id"], str(len(numbers)))
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        if "tool_call_id" in message:
            message["tool_call_id"] = numbers[message["tool_call_id"]]
            message["content"] = json.loads(message["content"])
    return plain


async def test_a_rollout_of_the_agent_hermes_has_the_same_messages(
    home: Home, tmp_path: Path, isolates: None, hermes_program: None
) -> None:
    from hermes_agent.trajectories import read_batch_run

    await batch(home, numbers(1))
    [theirs] = read_batch_run(home.work / "data/numbers")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Write the number 0"}\n')
    async with ScriptedServer(ToolScript(solver)) as server:
        given = ["--env.dataset_name=prompts.jsonl", "--agent=hermes", "--model=scripted", "--isolation=namespace"]
        program = [sys.executable, "-m", "hermes_core", "rollout", "prompts", *given, f"--base-url={server.base_url}"]
        running = await asyncio.create_subprocess_exec(
            *program, "--out=run", cwd=tmp_path, env={**home.environ("local"), "OPENAI_API_KEY": "none"}
        )
        assert await running.wait() == 0
    [ours] = read_records(tmp_path / "run")
    assert without_ids(ours["messages"]) == without_ids([*theirs.messages])
