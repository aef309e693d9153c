"""A complete example: `python -m hermes_swe_smith.demo` rolls out and scores the tasks that ship with this package.

Three agents work on them, on this machine and without a model: the reference solution, an agent that does nothing, and
the real agent loop over HTTP, with a scripted endpoint that this program starts on loopback.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import hermes_swe_smith
from hermes_core import HermesError, Isolation, RunSummary, Runtime, Settings, run_rollouts

try:
    from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call
except ModuleNotFoundError as error:
    if __name__ != "__main__" or error.name != "hermes_testing":
        raise
    click.echo("error: the demo needs hermes-rl-testing (pip install 'hermes-rl-swe-smith[demo]')", err=True)
    sys.exit(2)

CONCURRENCY = 2
ENVIRONMENT = {"dataset_name": "demo", "shuffle": False}


@dataclass(frozen=True)
class Fix:
    """The scripted model's knowledge of a bug: how to find it, and how to fix it."""

    issue: str
    """Words that occur in the issue."""
    pattern: str
    path: str
    old: str
    new: str


FIXES = (
    Fix("brackets", "negative", "amounts.py", "    return value\n", "    return -value if negative else value\n"),
    Fix("loses January", "number == 12", "report.py", "year + 1, 1", "year + 1, 0"),
    Fix(
        "order in which they were typed",
        "return entries",
        "entries.py",
        "    return entries\n",
        "    return sorted(entries, key=lambda entry: entry.day)\n",
    ),
    Fix("One decimal", "cents", "amounts.py", '.rjust(2, "0")', '.ljust(2, "0")'),
)


def play(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """Yield the tool calls of the scripted model, which looks, edits and tests, and return its last message."""
    fix = next((fix for fix in FIXES if fix.issue in prompt), None)
    if fix is None:  # before the first rollout, a run checks the endpoint with another prompt
        return "Ready."
    path = f"ledgerline/ledgerline/{fix.path}"
    matches = yield call("search_files", pattern=fix.pattern, path="ledgerline/ledgerline")
    source = yield call("read_file", path=path)
    if fix.pattern not in json.dumps(matches) or not source.get("content"):
        return "I can't find the cause."
    yield call("patch", path=path, old_string=fix.old, new_string=fix.new)
    tests = "cd ledgerline && PATH=$PWD/../.venv/bin:$PATH PYTHONPATH=$PWD python -m pytest -q"
    result = yield call("terminal", command=tests)
    return f"Fixed in {path}. The tests end with status {result.get('exit_code')}."


def main() -> int:
    """Run the demo. Return the exit status: 0 if every score is right."""
    began = time.monotonic()
    messages: Counter[str] = Counter()

    def first(record: logging.LogRecord) -> bool:  # each of the three runs would log the same warning
        messages[record.getMessage()] += 1
        return messages[record.getMessage()] == 1

    logging.getLogger(f"{hermes_swe_smith.__name__}.reach").addFilter(first)
    out = Path("demo-out", time.strftime("%Y%m%d-%H%M%S"))
    try:
        good = asyncio.run(_demo(out))
    except HermesError as error:
        click.echo(f"error: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
    click.echo(f"\nDone in {time.monotonic() - began:.0f} s. The trajectories are in {out}/*/trajectories.jsonl")
    command = Path(sys.executable).parent / "hermes-rl"
    if command.is_relative_to(Path.cwd()):
        command = command.relative_to(Path.cwd())
    click.echo("With your own model (any OpenAI-compatible endpoint; its key in OPENAI_API_KEY):\n")
    click.echo(f"  {command} rollout swe-smith --env.dataset_name=demo --model MODEL --base-url URL --out runs/mine\n")
    if not good:
        click.echo("But the scores are not what they should be: see above.", err=True)
    return 0 if good else 1


async def _demo(out: Path) -> bool:
    # Only this plugin and the built-in parts, so that other plugins, installed or missing, make no difference.
    runtime = Runtime(Settings.load(), plugins=[hermes_swe_smith], load_entry_points=False)
    async with runtime, ScriptedServer(ToolScript(play)) as server:
        isolation = await _isolation(runtime)
        scripted = {"model": "scripted", "base_url": server.base_url, "api_key": "none"}
        expected = (("oracle", 1.0, None), ("nop", 0.0, None), ("model", 1.0, scripted))
        outcomes = []
        for agent, reward, settings in expected:
            click.echo(f"\n{_TITLES[agent]}")
            summary = await _run(runtime, agent, settings, isolation, out / agent)
            outcomes.append(summary.complete and summary.mean_reward == reward)
        _show_conversation(out / "model" / "trajectories.jsonl")
        return all(outcomes)


_TITLES = {
    "oracle": "oracle: the reference solution, so 1.0 on every task",
    "nop": "nop: nothing is done, so 0.0 on every task",
    "model": "model: the agent loop over HTTP, against a scripted endpoint on loopback",
}


async def _isolation(runtime: Runtime) -> Isolation:
    """Return the weakest level for rollouts with a model; `shared` if this host grants the user no isolation."""
    click.echo(
        "4 small SWE-smith tasks on the `local` backend: sandboxes on this machine, no Docker, no key, no model."
    )
    diagnosis = await runtime.backend("local").check()
    if Isolation.USER in runtime.backend("local").capabilities.isolation:
        return Isolation.USER
    click.echo(f"\nThis host isolates nothing for you here: {diagnosis.summary}")
    for line in diagnosis.advice:
        click.echo(f"  {line}")
    click.echo(
        "The tasks and the scripted model are our own, so they run with --allow-unisolated. Don't do that with yours."
    )
    return Isolation.SHARED


async def _run(
    runtime: Runtime, agent: str, settings: Mapping[str, Any] | None, isolation: Isolation, out: Path
) -> RunSummary:
    return await run_rollouts(
        runtime,
        "swe-smith",
        agent,
        env=ENVIRONMENT,
        settings=settings,
        out_dir=out,
        on_record=_show_record,
        isolation=isolation.label,
        allow_unisolated=isolation < Isolation.USER,
        concurrency=CONCURRENCY,
    )


def _show_record(record: Mapping[str, Any]) -> None:
    name = record["item_id"].rsplit(".", 1)[-1].split("__")[0]
    if record["failure"]:
        click.echo(f"  {name:28} {record['failure']['kind']} failure: {record['failure']['message']}")
        return
    details, seconds = record["details"], sum(value or 0.0 for value in record["timings"].values())
    broken, kept = details["fail_to_pass"], details["pass_to_pass"]
    click.echo(
        f"  {name:28} reward {record['reward']:.1f}   fixed {broken['passed']} of {broken['total']} broken tests, "
        f"{kept['passed']} of {kept['total']} others still pass   {seconds:.1f} s"
    )


def _show_conversation(path: Path) -> None:
    """Print the tool calls of the first trajectory."""
    with path.open(encoding="utf-8") as lines:
        record = json.loads(next(lines))
    click.echo(f"\nWhat it did on {record['item_id']}:")
    for message in record["messages"]:
        for tool_call in message.get("tool_calls") or ():
            function = tool_call["function"]
            click.echo(f"  {function['name']} {function['arguments'][:100]}")
        if message["role"] == "assistant" and message.get("content"):
            click.echo(f"  says: {message['content'][:200]}")


if __name__ == "__main__":
    sys.exit(main())
