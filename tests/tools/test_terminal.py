"""`terminal`: output, exit codes, time limits, background starts, in a real slot."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest

from hermes_core.errors import ErrorKind
from hermes_core.tools.limits import OUTPUT_CHARS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_answer_has_both_streams_in_order_and_the_exit_code(slot: Any) -> None:
    answer = await slot("terminal", command="echo one; echo two >&2; echo three; exit 3")
    assert answer == {"output": "one\ntwo\nthree\n", "exit_code": 3, "error": None}


async def test_success_has_no_error_kind_and_failure_is_data(slot: Any) -> None:
    assert (await slot.result("terminal", command="true")).error_kind is None
    result = await slot.result("terminal", command="false")
    assert (result.success, result.error_kind, result.metadata["exit_code"]) == (False, ErrorKind.COMMAND, 1)


async def test_a_time_out_is_124_says_so_and_keeps_the_output(slot: Any) -> None:
    begin = time.monotonic()
    result = await slot.result("terminal", command="echo before; sleep 60", timeout=0.4)
    assert time.monotonic() - begin < 10
    answer = result.to_tool_result()
    assert answer["exit_code"] == 124 and answer["output"] == "before\n"
    assert "timed out after 0.4 s" in answer["error"]
    assert result.error_kind is ErrorKind.TIMEOUT and result.metadata["timed_out"] is True


async def test_a_commands_own_124_is_no_time_out(slot: Any) -> None:
    result = await slot.result("terminal", command="echo done; exit 124")
    assert result.to_tool_result() == {"output": "done\n", "exit_code": 124, "error": None}
    assert result.error_kind is ErrorKind.COMMAND


async def test_a_signal_is_named(slot: Any) -> None:
    answer = await slot("terminal", command="kill -SEGV $$")
    assert answer["exit_code"] == 139 and "SIGSEGV" in answer["error"]


async def test_a_model_may_not_have_more_time_than_its_caller_gives(slot: Any) -> None:
    short = slot.as_other_trajectory(timeout_s=0.4)
    answer = await short("terminal", command="sleep 30", timeout=600)
    assert answer["exit_code"] == 124
    assert "600 s" in answer["timeout_note"] and "0.4 s" in answer["timeout_note"]


async def test_the_caller_s_limit_holds_when_the_model_names_none(slot: Any) -> None:
    short = slot.as_other_trajectory(timeout_s=0.4)
    assert (await short("terminal", command="sleep 30"))["exit_code"] == 124


async def test_long_output_keeps_its_head_and_tail_and_counts_the_rest(slot: Any) -> None:
    answer = await slot("terminal", command="seq 1 300000")
    output = answer["output"]
    assert len(output) <= OUTPUT_CHARS
    assert output.startswith("1\n2\n3\n") and output.endswith("299999\n300000\n")
    (notice,) = re.findall(r"\n\n\[\.\.\. (\d+) bytes omitted[^\]]*\]\n\n", output)
    head, _, tail = re.split(r"\n\n(\[\.\.\.[^\]]*\])\n\n", output)
    everything = "".join(f"{n}\n" for n in range(1, 300001))
    assert everything.startswith(head) and everything.endswith(tail)
    assert int(notice) == len(everything) - len(head) - len(tail)
    assert 0.38 < len(head) / (len(head) + len(tail)) < 0.42


async def test_no_character_is_cut_in_two_and_other_bytes_become_replacement_characters(slot: Any) -> None:
    result = await slot.result("terminal", command="printf '\\377'; yes äöü€😀 | head -n 40000; printf '\\342\\202'")
    output = result.output
    assert output[0] == "\ufffd" and output[-1] == "\ufffd" and output.count("\ufffd") == 2
    assert result.metadata["truncated"] is True and len(output) <= OUTPUT_CHARS


async def test_workdir_is_a_directory_of_this_command_only(slot: Any) -> None:
    (slot.path / "a b").mkdir()
    assert (await slot("terminal", command="pwd", workdir="a b"))["output"] == f"{slot.path}/a b\n"
    assert (await slot("terminal", command="pwd", workdir="/"))["output"] == "/\n"
    assert (await slot("terminal", command="pwd"))["output"] == f"{slot.path}\n"


async def test_a_missing_workdir_is_an_answer(slot: Any) -> None:
    result = await slot.result("terminal", command="pwd", workdir="nowhere")
    answer = result.to_tool_result()
    assert answer["exit_code"] == -1 and answer["output"] == "" and "not run" in answer["error"]
    assert result.error_kind is ErrorKind.COMMAND


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "command: is required"),
        ({"command": "a\0b"}, "NUL"),
        ({"command": "\ud800"}, "surrogate"),
        ({"command": ""}, "at least 1"),
        ({"command": "true", "timeout": 0}, "greater than 0"),
        ({"command": "true", "timeuot": 3}, "did you mean 'timeout'"),
        ({"command": ["ls"]}, "valid string"),
        ({"command": "pwd", "workdir": "a\0"}, "NUL"),
    ],
)
async def test_wrong_arguments_are_answers(slot: Any, args: dict[str, Any], says: str) -> None:
    result = await slot.result("terminal", **args)
    assert not result.success and result.metadata["invalid_arguments"] is True
    assert says in result.to_tool_result()["error"]


async def test_quotes_dollars_and_newlines_reach_the_shell_as_they_are(slot: Any) -> None:
    answer = await slot("terminal", command="cat <<'END'\n'\"$HOME `x` \\ | é\nEND")
    assert answer["output"] == "'\"$HOME `x` \\ | é\n"


async def test_a_command_that_leaves_something_behind_returns(slot: Any) -> None:
    begin = time.monotonic()
    assert (await slot("terminal", command="sleep 60 & echo started"))["output"] == "started\n"
    assert time.monotonic() - begin < 10


async def test_a_background_start_returns_at_once(slot: Any) -> None:
    begin = time.monotonic()
    answer = await slot("terminal", command="sleep 60", background=True, timeout=5)
    assert time.monotonic() - begin < 10
    assert re.fullmatch(r"proc_[0-9a-f]{12}", answer["session_id"])
    assert answer["pid"] > 0 and answer["exit_code"] == 0 and answer["error"] is None
    assert answer["output"] == "Background process started"
    assert answer["session_id"] in answer["note"] and "does not apply" in answer["timeout_note"]


async def test_every_answer_is_json(slot: Any) -> None:
    for args in ({"command": "printf '\\377\\000'"}, {"command": "x", "workdir": "nowhere"}, {"command": 3}):
        json.dumps(await slot("terminal", **args))


async def test_cancelling_kills_the_command(slot: Any) -> None:
    call = asyncio.create_task(slot("terminal", command="echo $$ > pid; exec sleep 60"))
    while not (slot.path / "pid").exists() or not slot.read("pid"):
        await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    pid = slot.read("pid").strip()
    for _ in range(200):
        if (await slot("terminal", command=f"kill -0 {pid}"))["exit_code"]:
            return
        await asyncio.sleep(0.05)
    pytest.fail("it still runs")


FIND_SHELL = (
    "case $(tr '\\0' ' ' </proc/$$/cmdline) in *needle*) echo found;; esac; env | grep -c HERMES_SHELL_TEXT; exit 3"
)


async def test_a_command_that_looks_for_a_program_does_not_find_its_own_shell(slot: Any) -> None:
    answer = await slot("terminal", command=FIND_SHELL)
    assert (answer["output"], answer["exit_code"]) == ("0\n", 3)


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("set -e; false; echo not here", "", 1),
        ("trap 'echo end' EXIT; (exit 5)", "end\n", 5),
        ("exec sh -c 'echo $0; exit 4'; echo not here", "sh\n", 4),
        ("echo one # a comment; cat", "one\n", 0),
        ("cat; echo $#", "0\n", 0),
        ("echo $((1 + 1))\ncat <<END\n$HOME(\nEND", None, 0),
        ("kill -9 $$; echo not here", "", 137),
    ],
)
async def test_a_compound_command_is_what_it_was(slot: Any, command: str, output: str | None, exit_code: int) -> None:
    answer = await slot("terminal", command=command)
    assert answer["exit_code"] == exit_code and output in (None, answer["output"])
