"""A project in a directory of this host, whose tests core's reporter runs without a sandbox."""

import asyncio
import os
import sys
from typing import NamedTuple

from hermes_swe_smith.canary import Canary, new_canary, separate_canary
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.rows import SweTask, parse_row

from hermes_core.errors import CommandError
from hermes_core.pytest_runner.run import run_pytest
from hermes_core.sandbox.commands import CommandResult


class Here:
    """A slot's commands, as far as a test run needs them: processes of this host."""

    async def run(self, command, *, stdin, timeout_s):
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1, cwd="/")
        except OSError as error:
            raise CommandError(str(error), code="not_found") from error
        out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        code = process.returncode
        return CommandResult(
            exit_code=code if code >= 0 else None, signal=-code if code < 0 else None, stdout=out, stderr=err
        )


class Placed(NamedTuple):
    """A task with a canary."""

    task: SweTask
    canary: Canary | None


class Project:
    def __init__(self, root):
        self.root = root
        root.mkdir()

    def write(self, **files):
        for name, text in files.items():
            self.put(name.replace("__slash__", "/").replace("__dot__", "."), text.encode())

    def put(self, name, content):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    async def run(self, *node_ids, timeout_s=60.0, python=sys.executable, import_path=("",), **options):
        paths = [os.path.normpath(self.root / part) for part in import_path]
        return await run_pytest(
            Here(),
            node_ids,
            python=python,
            root=str(self.root),
            timeout_s=timeout_s,
            import_path=paths,
            args=["-p", "no:asyncio", "-p", "no:hypothesispytest", *options.pop("args", ())],
            **options,
        )

    def place(self, fail, keep=()):
        """Put a canary beside the project's tests, as trees.py does."""
        row = {
            "instance_id": "o__n.01234567.x",
            "repo": "swesmith/o__n.01234567",
            "patch": "x",
            "problem_statement": "x",
            "FAIL_TO_PASS": list(fail),
            "PASS_TO_PASS": list(keep),
        }
        task = parse_row(row, "here", SweSmithConfig())
        canary = new_canary(task)
        if canary:
            self.put(canary.path, canary.text.encode())
        return Placed(task, canary)

    async def check(self, placed, **options):
        """Run the task's tests, and the canary's."""
        ids = sorted({*placed.task.node_ids, *(placed.canary.node_ids if placed.canary else ())})
        return separate_canary(await self.run(*ids, **options), placed.canary)
