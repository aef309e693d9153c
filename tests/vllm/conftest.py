"""A real vLLM, which needs no GPU for a small model, and can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

import pytest
from hermes_testing.tiny_model.folder import make_tokenizer

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.token_server import Given
from tests.vllm import record

HOW = "`make setup EXTRAS=vllm`, then `.venv-vllm/bin/python -m pytest -m full tests/vllm`"
ROOT = Path(__file__).resolve().parents[2]
START_S = 600.0
"""Seconds that a server may take to start, on a machine that others use, too."""


@pytest.fixture(scope="session")
def vllm_extra(exact_extra: None, torch_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where vLLM is not installed beside the tests."""
    require("vllm", None if importlib.util.find_spec("vllm") else f"vllm not installed; {HOW}")


@pytest.fixture(scope="session")
def model(vllm_extra: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tokenizer and random weights, and these weights. One answer of twenty tokens or so ends by
    itself."""
    import torch

    folder = tmp_path_factory.mktemp("model")
    schemas = Runtime(Settings(), load_entry_points=False).tools.schemas(("terminal",))
    tokenizer = make_tokenizer(folder, "chatml", [json.dumps(schemas), json.dumps(schemas, indent=4)], vocabulary=3000)
    weights = random_weights(tokenizer, context=4096)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        weights.model.embed_tokens.weight[:, 0] = 4.0  # one feature that is the same everywhere
        states = weights.model(torch.randint(len(tokenizer), (1, 200))).last_hidden_state[0, :, 0]
        weights.lm_head.weight[tokenizer.eos_token_id] = 0.0
        weights.lm_head.weight[tokenizer.eos_token_id, 0] = 4.7 / states.mean()
    weights.save_pretrained(folder)
    return folder, weights


def random_weights(tokenizer: Any, *, context: int) -> Any:
    """Return a small Llama whose heads are as wide as vLLM's kernels want them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        initializer_range=1 / 16,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


class Server:
    """`vllm serve` on a loopback port. It keeps the port when it starts again."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self.model = str(model)
        self._log = folder / "vllm.log"
        # The package asks for the version of a distribution named `vllm`, which it is not.
        about = folder / "named" / "vllm-0.32.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        self._record = folder / "record.jsonl"
        self._env = {
            **os.environ,
            "PYTHONPATH": f"{about.parent}{os.pathsep}{ROOT}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            record.FILE: str(self._record),
        }
        self._running: subprocess.Popen[bytes] | None = None

    async def start(self, *options: str) -> None:
        """Start it, and wait until it answers."""
        command = [
            *(Path(sys.executable).with_name("vllm"), "serve", self.model, "--host", "127.0.0.1", "--port", self.port),
            *("--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", 8),
            *("--max-model-len", 4096, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--middleware", f"{record.__name__}.{record.Record.__name__}", *options),
        ]
        with self._log.open("ab") as log:
            self._running = self._spawn([str(each) for each in command], log)
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._answers):
                assert self._running.poll() is None, self._log.read_text("utf-8", "replace")[-4000:]
                await asyncio.sleep(0.5)

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def sampled(self) -> list[Given]:
        """What it has sampled by its completions API, as it wrote that down itself."""
        return list(record.completions(self._record))

    def kill(self) -> None:
        """End it and all that it has started, at once. Idempotent."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.base_url.removesuffix('/v1')}/health", timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False


@pytest.fixture
async def server(model: tuple[Path, Any], tmp_path: Path) -> AsyncIterator[Server]:
    """A server of the model, which the test starts."""
    one = Server(model[0], tmp_path)
    try:
        yield one
    finally:
        one.kill()
