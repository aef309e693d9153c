"""Runs `hermes-rl` in a process that is forked with its modules imported: a tenth of the time of a new interpreter."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "hermes_core.cli.main",
        "hermes_core.cli.rollouts",
        "hermes_core.cli.run_command",
        "hermes_core.cli.support",
        "hermes_core.cli.progress",
        "hermes_core.runs.session",
        "hermes_core.datasets.tasks",
        "hermes_core.soundness.validate",
        "hermes_core.sandbox.channels.blocking",
        "hermes_core.sandbox.guest_client.client",
        "hermes_core.sandbox.local.backend",
        "hermes_core.records.index",
    ]
)


def run_program(
    arguments: Sequence[str], environ: Mapping[str, str], cwd: Path, *, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `hermes-rl` with these arguments, in no more than this environment, without standard input.

    Raises:
        TimeoutExpired: it took too long, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _CONTEXT.Process(target=_program, args=([*arguments], {**environ}, cwd, out, err))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*arguments], timeout, out.read_bytes(), err.read_bytes())
        code = process.exitcode
        assert code is not None
        process.close()
        return subprocess.CompletedProcess([*arguments], code, out.read_text(), err.read_text())


def _program(arguments: list[str], environ: dict[str, str], cwd: Path, out: Path, err: Path) -> None:
    for descriptor, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["hermes-rl", *arguments]
    from hermes_core.cli.main import main

    main(prog_name="hermes-rl")
