"""The tool, called in a slot of a sandbox on this host as a model would call it."""

import asyncio
from collections.abc import Mapping
from typing import Any

import example_tool as plugin
from hermes_core import ExecutionResult, Runtime


def call(arguments: Mapping[str, Any], files: Mapping[str, str]) -> ExecutionResult:
    """Call the tool in a slot that has these files."""

    async def work() -> ExecutionResult:
        async with (
            Runtime(plugins=[plugin], load_entry_points=False) as runtime,
            runtime.tool_backend("local", isolation="shared") as backend,
            backend.lease("test") as slot,
        ):
            for path, content in files.items():
                await backend.execute(slot, "write_file", {"path": path, "content": content})
            return await backend.execute(slot, "example_tool", arguments)

    return asyncio.run(work())


def test_it_counts() -> None:
    result = call({"path": "notes.txt"}, {"notes.txt": "one two\nthree\n"})
    assert result.success
    assert result.to_tool_result() == {"lines": 2, "words": 3, "characters": 14, "truncated": False}


def test_a_missing_file_is_an_answer_to_the_model() -> None:
    result = call({"path": "missing.txt"}, {})
    assert not result.success
    assert "missing.txt" in result.error


def test_wrong_arguments_are_explained() -> None:
    result = call({"file": "notes.txt"}, {})
    assert "path: is required" in result.error
