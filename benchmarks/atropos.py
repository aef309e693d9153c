"""What a token-exact turn costs the driver: the loop, the HTTP request, the parser, the bookkeeping, the check."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import Memory, Row, Rows, Target, p50, watch_stalls

NAME = "atropos"
AT_ONCE, TURNS = 100, 20
RESULT = "a line of output of a command that was run, as long as such lines are\n" * 12
"""What each tool call gives: 840 characters."""


async def rows(quick: bool) -> Rows:
    """Processor time of a turn, the longest stall, memory of a trajectory; 100 trajectories of 20 turns at a time."""
    needed = [name for name in ("transformers", "aiohttp") if importlib.util.find_spec(name) is None]
    cases = [
        (f"driver's time of a turn, {AT_ONCE} trajectories of {TURNS} turns", "ms", 5.0),
        ("the same: longest loop stall", "ms", 50.0),
        ("the same: memory of a trajectory", "KB", 300.0),
    ]
    if needed:
        for case, unit, limit in cases:
            yield Row(NAME, case, None, None, unit, Target(limit), (f"{', '.join(needed)} not installed",))
        return
    taken = [await _measure() for _ in range(1 if quick else 3)]
    for number, (case, unit, limit) in enumerate(cases):
        values = [each[number] for each in taken]
        shown = ", ".join(f"{value:.3g}" for value in values)
        notes = [f"{shown} {unit}"]
        if number == 0:
            notes.append(
                f"{taken[0][3]:.0f} tokens a trajectory; by the clock {p50([e[4] for e in taken]):.1f} ms a turn"
            )
        # The first round's memory is what counts: the later ones get again what it has given back.
        worst = max(values) if number else p50(values)
        yield Row(NAME, case, worst, None, unit, Target(limit), tuple(notes))


async def _measure() -> tuple[float, float, float, float, float]:
    """Milliseconds of a turn, of the longest stall; kilobytes and tokens of a trajectory; a turn by the clock."""
    from hermes_testing.tiny_model.folder import make_tokenizer

    from hermes_core.agents.base import AgentResult, AgentSettings
    from hermes_core.agents.exact.agent import ExactSession
    from hermes_core.agents.exact.chat import Chat
    from hermes_core.agents.exact.generate import GenerateServer
    from hermes_core.agents.loop import HermesAgentLoop
    from hermes_core.records.tokens import tokens_of
    from hermes_core.runtime import Runtime
    from hermes_core.settings import Settings

    settings = Settings()
    async with Runtime(settings, load_entry_points=False) as runtime:
        with tempfile.TemporaryDirectory() as folder:
            tools = runtime.tools.schemas(("terminal", "read_file", "write_file"))
            # Trained on what it is to read, it makes about as many tokens of it as real tokenizers do.
            tokenizer = make_tokenizer(
                Path(folder), "chatml", [json.dumps(tools), "a line of output of a command"], 3000
            )
        chat, parser = Chat(tokenizer), runtime.parsers.entry("hermes").load()()
        async with _server(tokenizer) as url:
            server = GenerateServer(AgentSettings(base_url=url), "vllm", at_once=AT_ONCE)

            async def handler(name: str, arguments: Mapping[str, Any], task_id: str) -> str:
                return json.dumps({"output": RESULT, "exit_code": 0, "error": None})

            async def one(number: int) -> tuple[AgentResult, ExactSession]:
                session = ExactSession(server, chat, parser, max_length=100_000)
                loop = HermesAgentLoop(session, tools, {"terminal"}, max_turns=TURNS + 1, tool_handler=handler)
                result = await loop.run([{"role": "user", "content": f"task {number}: {RESULT}"}])
                assert tokens_of(result.managed_state).refused is None
                return result, session

            await one(0)
            gc.collect()
            gc.freeze()  # as a long run does: what is alive at its start is not looked at again
            memory = Memory([os.getpid()])
            began, worked = time.perf_counter(), time.thread_time()
            async with watch_stalls() as stalls, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number)) for number in range(AT_ONCE)]
            worked, took = time.thread_time() - worked, time.perf_counter() - began
            turns = sum(task.result()[0].turns_used for task in tasks)
            tokens = sum(len(task.result()[1].nodes[0].tokens) for task in tasks)
            assert turns == AT_ONCE * (TURNS + 1)
            grown = memory.growth() / AT_ONCE / 1000
            await server.aclose()
            gc.unfreeze()
            return worked / turns * 1000, stalls.longest_s * 1000, grown, tokens / AT_ONCE, took / turns * 1000


@contextlib.asynccontextmanager
async def _server(tokenizer: Any) -> AsyncIterator[str]:
    call = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la; cat src/module.py"}}\n</tool_call>'
    end = [tokenizer.eos_token_id]
    mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
    about = {
        "call": [*tokenizer.encode(f"I look at what there is.\n{call}", add_special_tokens=False), *end],
        "end": [*tokenizer.encode("Done.", add_special_tokens=False), *end],
        "mark": mark,
        # The first prompt has three of the mark (system, user, assistant), and each turn two more.
        "turns": 3 + 2 * TURNS,
    }
    pipe = asyncio.subprocess.PIPE
    program = str(Path(__file__).with_name("exact_server.py"))
    process = await asyncio.create_subprocess_exec(sys.executable, program, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(about).encode() + b"\n")
        await process.stdin.drain()
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.stdin.close()
        await process.wait()
