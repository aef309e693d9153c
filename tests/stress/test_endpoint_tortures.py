"""Model servers that hang, are slow, refuse, fail and die, in real seconds and with default patience, before
`hermes-rl rollout` and `hermes-rl atropos serve`: no reward from any of it, no item lost, and what the user sees.

`-s` shows the tables.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Answer, Fault, Reply, ScriptedServer, call

pytestmark = pytest.mark.stress

_PATH = Path(__file__).parents[1] / "atropos" / "conftest.py"
_spec = importlib.util.spec_from_file_location("atropos_tools", _PATH)
assert _spec is not None and _spec.loader is not None
atropos_tools = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(atropos_tools)
atropos_extra = atropos_tools.atropos_extra

NEVER = 3600.0
LEVEL = ["--isolation", "user"] if os.geteuid() == 0 else ["--isolation", "shared", "--allow-unisolated"]
NOISE = re.compile(r"Traceback|^(DEBUG|INFO)|^  File |never awaited|exception was never retrieved", re.M)
SHOWN = re.compile(r"^(WARNING|ERROR|error|failures|stopped|  model)", re.I)


@dataclass(frozen=True)
class Torture:
    """What is wrong with the server, from which request on, and for how long."""

    fault: Fault | None
    """None: nobody listens."""
    seconds: float
    after: int = 16
    """Requests that are answered before it begins."""
    request_timeout_s: float | None = None
    share: int = 1
    """Of so many requests, one meets the trouble."""
    code: int = 0
    lists_models: bool = False
    """Whether requests for its models are answered all the time."""
    says: tuple[str, ...] = ("answers again",)
    """Words on standard error or output."""

    @property
    def lasts(self) -> bool:
        return self.seconds == NEVER


TORTURES = {
    "503 for good": Torture(Fault(503, "overloaded"), NEVER, code=3, says=("HTTP 503", "look at the server's own log")),
    "hung for 60 s": Torture(Fault(delay_s=NEVER), 60, request_timeout_s=15),
    "hung for good": Torture(Fault(delay_s=NEVER), NEVER, code=3, says=("is silent", "answers nothing")),
    "hung model": Torture(
        Fault(delay_s=NEVER),
        NEVER,
        request_timeout_s=45,
        code=3,
        lists_models=True,
        says=("still lists its models", "did not answer in time"),
    ),
    "20 s an answer": Torture(Fault(delay_s=20), 60, says=()),
    "404 for 15 s": Torture(Fault(404, "loading"), 15),
    "503 for 75 s": Torture(Fault(503, "overloaded"), 75),
    "401 for 15 s": Torture(Fault(401, "no such key"), 15),
    "429 for 60 s": Torture(Fault(429, "slow down", headers={"Retry-After": "5"}), 60),
    "500 in half": Torture(Fault(500, "oops"), 120, share=2, says=()),
    "dead for 30 s": Torture(None, 30),
    "dead for good": Torture(None, NEVER, code=3, says=("could not be reached", "check that the server runs")),
    "401 from the start": Torture(
        Fault(401, "no such key"), NEVER, after=0, code=3, says=("refused the API key (HTTP 401)", "set a key that")
    ),
}


class TorturedServer(ScriptedServer):
    """Speaks the chat API and the tokens' wire of Atropos' example trainer, except while its trouble lasts."""

    def __init__(self, torture: Torture, tokenizer: Any = None) -> None:
        super().__init__(self._chat)
        self.torture, self.tokenizer = torture, tokenizer
        self.asked = self.troubled = 0
        self.until: float | None = None
        self._deaths: list[asyncio.Task[None]] = []

    def _chat(self, request: dict[str, Any]) -> Reply:
        return Reply("Done.") if len(request["messages"]) > 1 else Reply(tool_calls=[call("terminal", command=WORK)])

    async def _respond(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, int, bytes]:
        if method == "POST":
            self.asked += 1
        if self.asked > self.torture.after or not self.torture.after:
            if self.until is None:
                self.until = time.monotonic() + self.torture.seconds
                if self.torture.fault is None:
                    self._deaths.append(asyncio.create_task(self._die()))
            met = self.asked % self.torture.share == 0 and not (self.torture.lists_models and method == "GET")
            if time.monotonic() < self.until and met:
                self.troubled += 1
                fault = self.torture.fault or Fault(delay_s=NEVER)
                if fault.status != 200:
                    return fault, fault.status, json.dumps({"error": {"message": fault.message}}).encode()
                _, status, payload = await self._well(method, path, headers, body)
                return fault, status, payload
        return await self._well(method, path, headers, body)

    async def _die(self) -> None:
        self._port = int(self.base_url.rpartition(":")[2].removesuffix("/v1"))
        await self.__aexit__(None, None, None)
        await asyncio.sleep(self.torture.seconds)
        await self.__aenter__()

    async def heal(self) -> None:
        for death in self._deaths:
            death.cancel()
        await asyncio.gather(*self._deaths, return_exceptions=True)
        self.until = 0.0
        if self._server is None:
            await self.__aenter__()

    async def _well(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[Answer, int, bytes]:
        if self.tokenizer is None or path != "/generate":
            return await super()._respond(method, path, headers, body)
        asked = json.loads(body)
        text = self._text(self.tokenizer.decode(asked["prompt"]["prompt_token_ids"]))
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        reason = "stop" if len(tokens) <= asked["max_tokens"] else "length"
        tokens = tokens[: asked["max_tokens"]]
        answer = {
            "text": [self.tokenizer.decode(tokens, skip_special_tokens=True)],
            "finish_reasons": [reason],
            "logprobs": [[[{str(token): -0.25}] for token in tokens]],
        }
        return Reply(), 200, json.dumps(answer).encode()

    def _text(self, prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "Done."
        made = {"name": "terminal", "arguments": {"command": WORK}}
        return f"<tool_call>\n{json.dumps(made)}\n</tool_call>"


WORK = "touch a"
ITEMS = 12
AT_A_TIME = 6


@dataclass
class Run:
    """What a run of the program came to."""

    name: str
    torture: Torture
    folder: Path
    code: int | None = None
    seconds: float = 0.0
    troubled: int = 0
    items: set[str] = field(default_factory=set)
    """Those that reached the trainer, or the output."""
    before: list[dict[str, Any]] | None = None
    """The records before the run was resumed."""

    @property
    def out(self) -> str:
        return (self.folder / "out.log").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err.log").read_text()

    def records(self) -> list[dict[str, Any]]:
        if self.before is not None:
            return self.before
        for path in ("out/trajectories.jsonl", "data/groups.trajectories.jsonl"):
            if (self.folder / path).exists():
                return [json.loads(line) for line in (self.folder / path).read_text().splitlines()]
        return []

    def problems(self) -> list[str]:
        """What is not as it should be."""
        found, records, torture = [], self.records(), self.torture
        if self.code != torture.code:
            found.append(f"exit code {self.code}, not {torture.code}")
        if NOISE.search(self.err + self.out):
            found.append("a traceback")
        found += [f"does not say {words!r}" for words in torture.says if words not in self.err + self.out]
        if bad := [record for record in records if record["reward"] not in (None, 1.0)]:
            found.append(f"{len(bad)} records with a reward that the trouble made")
        if bad := [record for record in records if (record["reward"] is None) != (record["failure"] is not None)]:
            found.append(f"{len(bad)} records with both or neither of reward and failure")
        failures = Counter(record["failure"]["kind"] for record in records if record["failure"])
        if wrong := set(failures) - ({"model", "cancelled"} if torture.lasts else {"cancelled"}):
            found.append(f"failures of kind {wrong}: {failures}")
        if failures["model"] > AT_A_TIME:
            found.append(f"{failures['model']} rollouts that the model failed: some were begun after it was given up")
        if not torture.after and records:
            found.append(f"{len(records)} rollouts were begun")
        if not torture.lasts and (lost := {f"t{n}" for n in range(ITEMS)} - self.items):
            found.append(f"items that were lost: {sorted(lost)}")
        return found

    def told(self) -> list[str]:
        """The lines that tell of the trouble, each once."""
        lines = [re.sub(r"^[\d:., -]+", "", line) for line in (self.err + self.out).splitlines()]
        return list(dict.fromkeys(line for line in lines if SHOWN.search(line)))


async def ran(run: Run, command: list[str], *, until: Callable[[], Any] | None = None) -> None:
    """Run the program to its end, and `until` beside it."""
    run.folder.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "HERMES_PLUGINS"}
    environment |= {"XDG_STATE_HOME": str(run.folder / "state"), "HERMES_OWNER": f"tortures-{os.getpid()}-{id(run)}"}
    began = time.monotonic()
    with (run.folder / "out.log").open("wb") as out, (run.folder / "err.log").open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hermes_core", *command),
            **{"cwd": run.folder, "env": environment, "stdout": out, "stderr": err},
        )
        beside = asyncio.create_task(until()) if until is not None else None
        try:
            async with asyncio.timeout(600):
                run.code = await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])
    run.seconds = time.monotonic() - began


def dataset(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [{"id": f"t{n}", "prompt": "Make the file a.", "check": "test -f a"} for n in range(ITEMS)]
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told_and_checked(command: str, runs: list[Run]) -> None:
    """Print the table, and fail if anything is not as it should be."""
    print(f"\n{command}\n{'trouble':20} {'exit':>4} {'s':>4} {'asked':>5} {'records':>28}  what the user sees")
    for run in runs:
        kinds = Counter(
            record["failure"]["kind"] if record["failure"] else f"reward {record['reward']:g}"
            for record in run.records()
        )
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
        first, *more = run.told() or ["nothing"]
        print(f"{run.name:20} {run.code!s:>4} {run.seconds:4.0f} {run.troubled:5} {counted:>28}  {first[:400]}")
        for line in more[:12]:
            print(f"{'':66}{line[:400]}")
    assert {run.name: problems for run in runs if (problems := run.problems())} == {}


async def test_no_torture_of_an_endpoint_is_a_reward_in_a_run(tmp_path: Path) -> None:
    tasks = dataset(tmp_path / "rows")
    resumed: dict[str, tuple[bool, int | None, int]] = {}

    async def one(name: str, torture: Torture) -> Run:
        run = Run(name, torture, tmp_path / name.replace(" ", "-"))
        async with TorturedServer(torture) as server:
            limit = [f"--agent.request_timeout_s={torture.request_timeout_s}"] if torture.request_timeout_s else []
            command = [
                *("rollout", "tasks", f"--env.dataset_name={tasks}", "--out", str(run.folder / "out"), *LEVEL),
                *("--model", "scripted", "--base-url", server.base_url, "--concurrency", str(AT_A_TIME), *limit),
                *("--group-size", "2"),
            ]
            await ran(run, command)
            run.troubled = server.troubled
            if torture.lasts and torture.after:
                done = run.records()
                await server.heal()
                again = Run("resumed", torture, run.folder / "resumed")
                await ran(again, [*command, "--resume"])
                resumed[name] = ("--resume" in run.out, again.code, len(run.records()))
                run.before = done
        run.items = {record["item_id"] for record in run.records() if record["reward"] is not None}
        return run

    async with asyncio.TaskGroup() as group:
        tasks_ = [group.create_task(one(*each)) for each in TORTURES.items()]
    told_and_checked("hermes-rl rollout", [task.result() for task in tasks_])
    lasting = [name for name, torture in TORTURES.items() if torture.lasts and torture.after]
    assert resumed == dict.fromkeys(lasting, (True, 0, 2 * ITEMS)), "what was done is kept, and the rest is done"


async def test_no_torture_of_an_endpoint_is_a_reward_in_serve_mode(
    atropos_extra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_PLUGINS", "atropos")
    from hermes_testing.tiny_model.folder import make_tokenizer
    from transformers import AutoTokenizer

    tasks = dataset(tmp_path / "rows")
    make_tokenizer(tmp_path / "tokenizer", "chatml")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    at_once = asyncio.Semaphore(4)  # each is half a gigabyte of imports

    async def one(name: str, torture: Torture) -> Run:
        run = Run(name, torture, tmp_path / name.replace(" ", "-"))
        run.folder.mkdir()
        api = atropos_tools.RunApi(run.folder / "api.log")
        async with at_once, TorturedServer(torture, tokenizer) as server:
            await api.start()
            trainer = atropos_tools.Trainer(api.url, max_token_len=16000)
            limit = [f"--openai.timeout={torture.request_timeout_s:.0f}"] if torture.request_timeout_s else []
            level = ["--env.isolation", LEVEL[1], *(["--env.allow_unisolated", "true"] if LEVEL[2:] else [])]
            try:
                await ran(
                    run,
                    [
                        *("atropos", "serve", "tasks", "--env.dataset_name", str(tasks), "--env.group_size=2"),
                        *(
                            "--env.tokenizer_name",
                            str(tmp_path / "tokenizer"),
                            "--env.max_num_workers",
                            str(AT_A_TIME // 2),
                        ),
                        *("--env.rollout_server_url", api.url, "--env.total_steps", str(ITEMS), *level, *limit),
                        *("--env.data_path_to_save_groups", "data/groups.jsonl"),
                        *("--env.ensure_scores_are_not_same=false", "--openai.base_url", server.base_url),
                        *("--openai.server_type", "vllm"),
                    ],
                    until=lambda: trainer.run(ITEMS),
                )
            finally:
                api.kill()
            run.troubled = server.troubled
        run.items = {group["group_overrides"]["item_id"] for batch in trainer.batches for group in batch}
        return run

    async with asyncio.TaskGroup() as group:
        tasks_ = [group.create_task(one(*each)) for each in TORTURES.items()]
    told_and_checked("hermes-rl atropos serve", [task.result() for task in tasks_])
