"""Starts SkyRL's open Tinker server, on a CPU with JAX, for tests and examples without an account."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hermes_core import ConfigError

TESTED = "0.4.0"
"""The version of SkyRL that was tested."""

_UV = """#!/bin/sh
# SkyRL's API must be the child of a `uv run --`, and starts its engine by another. The real uv would install packages.
while [ "$1" != -m ]; do shift; done
case $2 in
*.api) "$HERMES_SKYRL_PYTHON" "$@" ;;
*) exec "$HERMES_SKYRL_PYTHON" "$@" ;;
esac
"""

_START_S, _END_S = 600.0, 10.0


@contextmanager
def skyrl_server(
    python: str | Path,
    model: Path,
    state: Path,
    *,
    adapters: int = 2,
    rank: int = 32,
    prompts: int = 32,
    sequences: int = 8,
) -> Iterator[str]:
    """Serve a model during the block, and yield the server's URL.

    Args:
        python: an interpreter with `skyrl==0.4.0`, its Tinker server and JAX; see `docs/guides/tinker.md`.
        model: a folder with a small Llama 3 or Qwen 3 model and its tokenizer.
        state: a folder for the server's log, database and checkpoints.
        adapters: maximum number of LoRA adapters at the same time: one more than there are training clients.
        rank: maximum rank of an adapter.
        prompts: number of prompts in one sampling batch.
        sequences: number of sequences in one training batch, best the size of a group. JAX compiles each new batch
            shape, which takes seconds, so equal sizes are faster.

    Raises:
        ConfigError: the server did not start; its log has the reason.
    """
    shims = state / "bin"
    shims.mkdir(parents=True, exist_ok=True)
    (shims / "uv").write_text(_UV)
    (shims / "uv").chmod(0o755)
    port = _free_port()
    backend = {
        "max_lora_adapters": adapters,
        "max_lora_rank": rank,
        "sample_max_num_sequences": prompts,
        "train_micro_batch_size": sequences,
    }
    options = {
        "base-model": model.resolve(),
        "backend": "jax",
        "backend-config": json.dumps(backend),
        "checkpoints-base": (state / "checkpoints").resolve(),
        "database-url": f"sqlite:///{(state / 'tinker.db').resolve()}",
        "host": "127.0.0.1",
        "port": port,
    }
    environment = {
        **os.environ,
        "PATH": f"{shims.resolve()}{os.pathsep}{os.environ['PATH']}",
        "HERMES_SKYRL_PYTHON": str(python),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (state / "server.log").open("wb") as log:
        command = [str(shims / "uv"), "run", "--", "-m", "skyrl.tinker.api", *arguments]
        server = subprocess.Popen(command, cwd=state, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, server, state / "server.log")
        yield url
    finally:
        _end(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
            return
        time.sleep(0.2)
    last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
    raise ConfigError(
        f"SkyRL's Tinker server did not start: {last_line or 'its log is empty'}",
        hint=f"check the interpreter and the model; the log is {log}",
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its engine, which are one process group."""
    import signal

    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)
