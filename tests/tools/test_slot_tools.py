"""The raw slot tools, as hooks call them."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_core.errors import ErrorKind
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.slot_tools import SLOT_TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def call(slot: Any, name: str, **args: Any) -> ExecutionResult:
    return await slot.tools.call(SLOT_TOOLS[name], slot.ctx, args)


async def test_bash_keeps_the_streams_apart_and_the_output_whole(slot: Any) -> None:
    result = await call(slot, "bash", command="seq 100000; echo oops >&2")
    assert result.success and result.error_kind is None and result.error == "oops\n"
    assert result.output == "".join(f"{n}\n" for n in range(1, 100001))
    assert result.metadata["stdout_bytes"] == len(result.output) and result.metadata["truncated"] is False
    assert result.metadata["duration_s"] > 0


@pytest.mark.parametrize(
    ("command", "code", "signal", "kind"),
    [
        ("exit 5", 5, None, ErrorKind.COMMAND),
        ("exit 124", 124, None, ErrorKind.COMMAND),
        ("kill -9 $$", 137, 9, ErrorKind.COMMAND),
        ("sleep 60", 124, None, ErrorKind.TIMEOUT),
    ],
)
async def test_how_it_ended(slot: Any, command: str, code: int, signal: int | None, kind: ErrorKind) -> None:
    result = await call(slot.as_other_trajectory(timeout_s=0.5), "bash", command=command)
    assert not result.success and result.error_kind is kind
    assert result.metadata["exit_code"] == code
    assert result.metadata["timed_out"] is (kind is ErrorKind.TIMEOUT)
    if kind is not ErrorKind.TIMEOUT:
        assert result.metadata["signal"] == signal


async def test_directory_environment_input_and_merging(slot: Any) -> None:
    (slot.path / "d").mkdir()
    command = 'pwd; echo "$A"; cat >&2'
    result = await call(slot, "bash", command=command, cwd="d", env={"A": "$x"}, stdin="in", merge_stderr=True)
    assert result.output == f"{slot.path}/d\n$x\nin" and result.error == ""


async def test_files_as_they_are(slot: Any) -> None:
    content = "é\n\n" * 100_000
    written = await call(slot, "write_file", path="a/b", content=content)
    assert written.success and written.metadata["bytes_written"] == len(content.encode())
    read = await call(slot, "read_file", path="a/b")
    assert read.output == content and read.metadata == {"size": len(content.encode()), "truncated": False}


async def test_failures_are_results(slot: Any) -> None:
    missing = await call(slot, "read_file", path="none")
    assert not missing.success and missing.metadata["code"] == "not_found"
    nowhere = await call(slot, "bash", command="true", cwd="none")
    assert not nowhere.success and nowhere.error_kind is ErrorKind.COMMAND
    wrong = await call(slot, "bash", cmd="true")
    assert not wrong.success and "did you mean" not in wrong.output and "command" in wrong.error
    assert "NUL" in (await call(slot, "bash", command="a\0b")).error
