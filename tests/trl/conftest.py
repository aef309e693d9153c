"""What the tests of the TRL adapter need: TRL itself, an environment that can fail in every way, a tiny model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine, Plan
from hermes_testing.tiny_model.folder import FORMATS, make_model
from hermes_testing.tiny_model.server import TinyModelServer
from hermes_trl import HermesSpec

from hermes_core import Environment, InfraError, LoopThread, SetupFailed, hookimpl
from tests.support.exactness import COMMAND
from tests.tiny_model.plans import Gap, letters, make_plan

ISOLATION = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}
"""The weakest level that this user can have here."""


class Notes(Environment):
    """Write a word into a file. An item may break the sandbox, the setup or the verification, so many times."""

    name = "notes"
    default_toolsets = ("terminal",)

    def __init__(self, *items: Mapping[str, Any]) -> None:
        super().__init__()
        self._items = [{"id": str(number), "word": "fox", **item} for number, item in enumerate(items or ({},))]
        self.broken: dict[str, int] = {}
        self.hanging = 0
        """How many verifications are going to hang."""
        self.verified_at_once = self._verifying = 0

    def items(self) -> Sequence[Mapping[str, Any]]:
        return self._items

    def format_prompt(self, item: Mapping[str, Any]) -> str:
        return f"Write {item['word']} to note.txt."

    def _break(self, item: Mapping[str, Any], where: str, error: Exception) -> None:
        """Raise the error, as often as the item says."""
        if item.get("breaks") == where and self.broken.get(item["id"], 0) < item.get("times", 1000):
            self.broken[item["id"]] = self.broken.get(item["id"], 0) + 1
            raise error

    @hookimpl
    async def setup_trajectory_workspace(self, item: Mapping[str, Any]) -> dict[str, Any]:
        self._break(item, "infra", InfraError("the host burns"))
        self._break(item, "setup", SetupFailed("no such dataset"))
        return {}

    @hookimpl
    async def verify_and_score_trajectory(self, item: Mapping[str, Any], exec_tool: Any) -> float:
        self._verifying += 1
        self.verified_at_once = max(self.verified_at_once, self._verifying)
        try:
            self._break(item, "verifier", ValueError("the judge sleeps"))
            if self.hanging:
                self.hanging -= 1
                await asyncio.sleep(60)
            found = await exec_tool(
                "bash", {"command": f"sleep 0.2; cat note.txt; test $(cat note.txt) = {item['word']}"}
            )
            return float(found.success)
        finally:
            self._verifying -= 1


@pytest.fixture(scope="session")
def trl_extra(torch_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where TRL is not installed; imports it where it is, whatever it warns of."""
    missing = [name for name in ("trl", "accelerate", "datasets") if importlib.util.find_spec(name) is None]
    require("trl", f'{", ".join(missing)} not installed; `make setup EXTRAS="torch trl"`' if missing else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer  # noqa: F401


@pytest.fixture
def offline(trl_extra: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, and caches in the test's folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # it would leave a thread
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # so would this
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def sandboxes(tmp_path: Path) -> Path:
    """The `state_dir` of the backend."""
    return tmp_path / "sandboxes"


@pytest.fixture
def form() -> str:
    """The chat format of the model."""
    return "chatml"


@pytest.fixture
def tokenizer(trl_extra: None, tokenizers: Callable[[str], Any], form: str) -> Any:
    """A tokenizer. If it is of ChatML, TRL can parse its calls."""
    from trl.chat_template_utils import qwen3_template

    made = tokenizers(form)
    made.response_template = qwen3_template
    return made


@pytest.fixture
def new_trainer(offline: None, tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a GRPOTrainer for a tiny model on this processor."""
    from trl import GRPOConfig, GRPOTrainer

    def make(
        model: Any = None, *, rollouts: int = 4, steps: int = 1, config: Mapping[str, Any] = {}, **given: Any
    ) -> Any:
        args = GRPOConfig(
            **{
                "output_dir": str(tmp_path / "trained"),
                "per_device_train_batch_size": rollouts,
                "num_generations": rollouts,
                "max_completion_length": 1024,
                "max_steps": 1,
                "logging_steps": 1,
                "learning_rate": 1e-3,
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "shuffle_dataset": False,
                **config,
            }
        )
        model = make_model(tokenizer, context=4096, layers=1) if model is None else model
        return GRPOTrainer(model, args=args, processing_class=tokenizer, **given)

    yield make


def call(command: str, tool: str = "terminal") -> str:
    """What a model writes to run a command."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'command': command}})}\n</tool_call>"


def scripted(trainer: Any, tokenizer: Any, say: Callable[[str, int], str]) -> None:
    """Let a script take the place of the trainer's model: `say(prompt, number of the row)` is an answer's text."""

    def generate(prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        texts = [tokenizer.decode(ids) for ids in prompt_ids]
        said = [say(text, number) for number, text in enumerate(texts)]
        return [tokenizer.encode(f"{each}<|im_end|>", add_special_tokens=False) for each in said], None

    trainer._generate_single_turn = generate


def plans(tokenizer: Any, tool: str = "terminal") -> Callable[[Sequence[int], random.Random], Plan]:
    """Two calls, the second with a word that the model draws, and a last word."""
    drawn = Gap(3, letters(tokenizer))

    def plan(prompt: Sequence[int], chance: random.Random) -> Plan:
        turn = tokenizer.decode(prompt).count(FORMATS["chatml"].result)
        write = call(f"echo {chance.choice(('fox', 'ant'))} > note.txt", tool)
        say = call("echo WORD", tool).split("WORD")
        return make_plan(tokenizer, [[write], [say[0], drawn, say[1]], ["Done ", drawn]][min(turn, 2)])

    return plan


class Served:
    """A tiny model, the engine that samples from it, and the settings of an agent that uses it."""

    def __init__(self, engine: Engine, base_url: str, tokenizer: Any, loop: LoopThread) -> None:
        self.engine, self.model, self._loop = engine, engine.model, loop
        self.agent = {
            "base_url": base_url,
            "model": "tiny",
            "tokenizer_name": tokenizer.name_or_path,
            "endpoint_patience_s": 0.5,
            "check_patience_s": 1.0,
            "max_retry_wait_s": 0.1,
        }
        self._loop = loop

    def stop(self) -> None:
        """End the server."""
        self._loop.close()


@pytest.fixture
def served(tokenizer: Any) -> Iterator[Served]:
    """The model behind a server of tokens, in a thread of its own."""
    with Engine(make_model(tokenizer, context=4096, layers=1), plan=plans(tokenizer)) as engine:
        server = TinyModelServer(engine, tokenizer, wires=["tokens"])

        async def close() -> None:
            await server.__aexit__(None, None, None)

        loop = LoopThread("tiny server", close)
        try:
            loop.call(server.__aenter__())
            yield Served(engine, server.base_url, tokenizer, loop)
        finally:
            loop.close()


@pytest.fixture
def agent(request: pytest.FixtureRequest, served: Served, tokenizer: Any) -> dict[str, Any]:
    """The options of a spec with the agent `model`, or `program`: then the served model calls that one's tool."""
    if request.param == "model":
        return {"agent": served.agent, **ISOLATION}
    request.getfixturevalue("program_agents")
    served.engine.plan = plans(tokenizer, "bash")
    return {"agent": {**served.agent, "name": "program", "command": COMMAND}}


def kill_sandboxes(spec: HermesSpec) -> None:
    """End every sandbox of the run, as a host that fails would."""

    async def kill() -> None:
        backend = (await spec.run.context()).backend.backend
        for sandbox in await backend.list(spec.run.session.runtime.owner):
            await backend.terminate_id(sandbox.sandbox_id)

    spec.run.call(kill())
