"""What the adapter's tests need: the extra, a tokenizer in a folder, tasks, environments, and servers of tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any

import hermes_agents
import httpx
import pytest
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.exactness import COMMAND
from tests.support.selection import makes_tests_full
from tests.support.token_server import TokenServer

NEEDED = ("atroposlib", "transformers", "wandb")

SANDBOX = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}
"""The weakest level that this user can have here."""


PROGRAM = {"agent": "program", "agent_options": {"command": COMMAND}, "isolation": "user"}
"""The settings of an environment whose agent is a program."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How exact all the runs of `test_exact_training_data` were, together."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    runs = [value for report in reports for name, value in report.user_properties if name == "exactness"]
    if runs:
        total = {key: sum(run[key] for run in runs) for key in ("trajectories", "answers", "trained", "drawn")}
        ways = {kind: len({run[kind] for run in runs}) for kind in ("form", "wire")}
        terminalreporter.write_line(
            f"exactness: {total['trajectories']} trajectories with {total['answers']} answers, {ways['form']} chat "
            f"templates and {ways['wire']} wires: {total['trained']} trained tokens, {total['drawn']} of them drawn, "
            f"each within {max(run['worst'] for run in runs):.1e} of the logprob that the weights give"
        )


@pytest.fixture(scope="session")
@makes_tests_full
def atropos_extra(require: Callable[[str, str | None], None]) -> None:
    """Skips the test where the extra is not installed; imports it where it is, whatever it warns of."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    require("atropos", f"{', '.join(missing)} not installed; `make setup EXTRAS=atropos`" if missing else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import hermes_atropos.env  # noqa: F401


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts have the command `atropos`, and no other plugin."""
    monkeypatch.setenv("HERMES_PLUGINS", "atropos")


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for processes that are to find no torch. It is in no lock of the extra, and takes as long to import as
    all the rest; transformers imports it where it is."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["torch"] = None\n')
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizers: Callable[[str], Any]) -> str:
    """A folder with a ChatML tokenizer."""
    folder: str = tokenizers("chatml").name_or_path
    return folder


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, load_entry_points=False, plugins=[hermes_agents]) as one:
        yield one


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """Six tasks: write a number into a file."""
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"id": f"task-{n}", "prompt": f"Write {n} into out.txt", "check": f"grep -qx {n} out.txt"} for n in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def obedient(prompt: str) -> Generator[ScriptedCall, Any, str]:
    """A model that does what the tasks ask for."""
    number = re.search(r"Write (\d+)", prompt)
    assert number is not None
    yield call("terminal", command=f"echo {number[1]} > out.txt")
    return "Done <b>&</b> dusted."


@pytest.fixture
def obedient_play() -> Callable[[str], Generator[ScriptedCall, Any, str]]:
    """That model, for a `ToolScript` with something else around it."""
    return obedient


@pytest.fixture
async def obedient_server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(ToolScript(obedient)) as server:
        yield server


MakeEnv = Callable[..., Any]


@pytest.fixture
def make_env(atropos_extra: None, runtime: Runtime, tasks: str, tokenizer_folder: str, tmp_path: Path) -> MakeEnv:
    """`make_env(base_url, server_type="openai", kind=None, **settings)`: an environment, by default that of `tasks`."""
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from hermes_atropos import load_environment

    def make(base_url: str, server_type: str = "openai", kind: Any = None, **settings: Any) -> Any:
        kind = kind or load_environment("tasks", runtime)
        given = {
            "tokenizer_name": tokenizer_folder,
            "dataset_name": tasks,
            "total_steps": 6,
            "group_size": 2,
            "data_path_to_save_groups": str(tmp_path / "data" / "groups.jsonl"),
            "ensure_scores_are_not_same": False,
            "include_messages": True,
            "max_num_workers": 3,
            "agent_temperature": 1.0,
            **SANDBOX,
            **settings,
        }
        server = APIServerConfig(
            base_url=base_url, model_name="scripted", api_key="none", server_type=server_type, timeout=300
        )
        return kind(kind.env_config_cls(**given), [server], runtime=runtime)

    return make


@pytest.fixture
def program(isolates: None) -> dict[str, Any]:
    """The settings of an environment whose agent is a program, where it can run."""
    return PROGRAM


def obedient_text(prompt: str) -> str:
    """What `obedient` does, as text."""
    if "<tool_response>" in prompt:
        return "Done."
    number = re.search(r"Write (\d+)", prompt)
    command = f"echo {number[1] if number else 0} > out.txt"
    return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"


@pytest.fixture
async def token_server(tokenizers: Callable[[str], Any]) -> AsyncIterator[TokenServer]:
    async with TokenServer(tokenizers("chatml"), obedient_text) as server:
        yield server


class RunApi:
    """atroposlib's own `run-api` in a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(120):
            while True:
                try:
                    await client.get(self.url)
                    return
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
async def run_api(atropos_extra: None, tmp_path: Path) -> AsyncIterator[RunApi]:
    if importlib.util.find_spec("fastapi") is None:
        pytest.skip("run-api needs fastapi; `make setup EXTRAS=atropos`")
    api = RunApi(tmp_path / "api.log")
    await api.start()
    try:
        yield api
    finally:
        api.kill()


class Trainer:
    """Takes batches from the API until it has had enough; registers anew where the API has forgotten it."""

    def __init__(self, url: str, *, batch_size: int = 4, max_token_len: int = 4096) -> None:
        self.url, self.batch_size, self.max_token_len = url, batch_size, max_token_len
        self.batches: list[list[dict[str, Any]]] = []

    async def run(self, batches: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30) as client:
            while len(self.batches) < batches:
                try:
                    answer = (await client.get("/batch")).json()
                    if answer.get("status") == "error":
                        await client.post("/register", json=self._registration())
                    if answer.get("batch"):
                        self.batches.append(answer["batch"])
                        continue
                except (httpx.HTTPError, ValueError):
                    pass
                await asyncio.sleep(0.05)

    def _registration(self) -> dict[str, Any]:
        about = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "", "save_checkpoint_interval": 0}
        sizes = {"batch_size": self.batch_size, "max_token_len": self.max_token_len}
        return {**about, **sizes, "starting_step": len(self.batches), "num_steps": 1000}

    def sequences(self) -> list[tuple[str, int]]:
        """What was trained on: trajectory id and number of the sequence."""
        return [
            (about["trajectory_id"], about["sequence"])
            for batch in self.batches
            for group in batch
            for about in group["overrides"]
            if about.get("trainable", True)
        ]


@pytest.fixture
def make_trainer() -> type[Trainer]:
    return Trainer
