"""`process`: background processes of a real slot, and how the original got each of them wrong."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def start(slot: Any, command: str, **args: Any) -> str:
    return (await slot("terminal", command=command, background=True, **args))["session_id"]


async def ended(slot: Any, session_id: str) -> dict[str, Any]:
    answer = await slot("process", action="wait", session_id=session_id, timeout=20)
    assert answer["status"] == "exited"
    return answer


async def test_the_exit_code_is_the_processes_own(slot: Any) -> None:
    session = await start(slot, "echo out; echo err >&2; exit 42")
    assert await ended(slot, session) == {
        "session_id": session,
        "status": "exited",
        "exit_code": 42,
        "output": "out\nerr\n",
    }


async def test_list_tells_running_and_exited_apart(slot: Any) -> None:
    assert await slot("process", action="list") == {"processes": []}
    (slot.path / "sub").mkdir()
    done, runs = await start(slot, "echo bye; exit 3"), await start(slot, "echo hi; sleep 60", workdir="sub")
    await ended(slot, done)
    while not (await slot("process", action="poll", session_id=runs))["output_preview"]:
        await asyncio.sleep(0.02)
    first, second = (await slot("process", action="list"))["processes"]
    assert first["session_id"] == done and first["status"] == "exited" and first["exit_code"] == 3
    assert second["session_id"] == runs and second["status"] == "running" and "exit_code" not in second
    assert second["cwd"] == str(slot.path / "sub") and second["output_preview"] == "hi\n"
    assert second["pid"] > 0 and second["uptime_seconds"] >= 0 and second["command"] == "echo hi; sleep 60"
    assert abs(datetime.fromisoformat(second["started_at"]).timestamp() - datetime.now().timestamp()) < 60


async def test_poll_gives_the_newest_output(slot: Any) -> None:
    session = await start(slot, "seq 1 5000")
    await ended(slot, session)
    answer = await slot("process", action="poll", session_id=session)
    assert answer["status"] == "exited" and answer["exit_code"] == 0
    assert len(answer["output_preview"]) == 1000 and answer["output_preview"].endswith("4999\n5000\n")


async def test_log_without_an_offset_gives_the_newest_lines(slot: Any) -> None:
    session = await start(slot, "seq 1 1000")
    await ended(slot, session)
    answer = await slot("process", action="log", session_id=session)
    assert answer["output"] == "\n".join(str(n) for n in range(801, 1001))
    assert answer["total_lines"] == 1000 and answer["showing"] == "lines 800 to 999" and answer["dropped_bytes"] == 0
    newest = await slot("process", action="log", session_id=session, limit=2)
    assert newest["output"] == "999\n1000"


async def test_log_pages_from_the_first_line(slot: Any) -> None:
    session = await start(slot, "seq 1 25")
    await ended(slot, session)
    seen = []
    for offset in range(0, 30, 10):
        page = await slot("process", action="log", session_id=session, offset=offset, limit=10)
        seen += page["output"].split("\n")
    assert seen == [str(n) for n in range(1, 26)]
    beyond = await slot("process", action="log", session_id=session, offset=25)
    assert beyond["output"] == "" and beyond["showing"] == "no lines"


async def test_log_offset_0_is_the_first_line_still_held_and_says_what_was_dropped(slot: Any) -> None:
    session = await start(slot, "seq 1 100000")
    await ended(slot, session)
    answer = await slot("process", action="log", session_id=session, offset=0, limit=1)
    first = int(answer["output"])
    assert first > 1 and answer["total_lines"] == 100000 - first + 1
    assert answer["dropped_bytes"] == len("".join(f"{n}\n" for n in range(1, first)))
    assert str(answer["dropped_bytes"]) in answer["note"]


async def test_characters_are_whole_wherever_the_log_was_cut(slot: Any) -> None:
    session = await start(slot, "yes € | head -c 900001 | tr -d '\\n'; sleep 60")
    while True:
        poll = await slot("process", action="poll", session_id=session)
        if len(poll["output_preview"]) == 1000:
            break
        await asyncio.sleep(0.05)
    log = await slot("process", action="log", session_id=session, offset=0)
    assert set(poll["output_preview"]) == {"€"} and "\ufffd" not in log["output"]


async def test_wait_is_held_to_the_terminal_s_time_limit(slot: Any) -> None:
    short = slot.as_other_trajectory(timeout_s=0.3)
    session = await start(short, "echo tick; sleep 60")
    answer = await short("process", action="wait", session_id=session, timeout=500)
    assert answer["status"] == "timeout" and answer["output"] == "tick\n"
    assert "500 s" in answer["timeout_note"] and "0.3 s" in answer["timeout_note"]
    assert (await short("process", action="wait", session_id=session))["status"] == "timeout"


async def test_kill_reports_what_happened(slot: Any) -> None:
    session = await start(slot, "sleep 60")
    answer = await slot("process", action="kill", session_id=session)
    assert answer["status"] == "killed" and answer["exit_code"] == -15
    again = await slot("process", action="kill", session_id=session)
    assert again["status"] == "already_exited" and again["exit_code"] == -15


async def test_kill_ends_what_ignores_terms_and_what_it_started(slot: Any) -> None:
    session = await start(
        slot, "trap '' TERM; (echo $BASHPID > child; while :; do sleep 1; done) & while :; do sleep 1; done"
    )
    while not (slot.path / "child").exists() or not slot.read("child"):
        await asyncio.sleep(0.02)
    answer = await slot("process", action="kill", session_id=session)
    assert answer["status"] == "killed" and answer["exit_code"] == -9
    child = slot.read("child").strip()
    assert (await slot("terminal", command=f"kill -0 {child}"))["exit_code"] != 0


async def test_a_killed_process_that_ends_by_itself_keeps_its_exit_code(slot: Any) -> None:
    session = await start(slot, "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done")
    while not (await slot("process", action="poll", session_id=session))["output_preview"]:
        await asyncio.sleep(0.02)
    answer = await slot("process", action="kill", session_id=session)
    assert answer == {"session_id": session, "status": "killed", "exit_code": 7}


async def test_write_and_submit_feed_its_input(slot: Any) -> None:
    session = await start(slot, 'read a; read b; echo "<$a|$b>"')
    assert (await slot("process", action="write", session_id=session, data="on"))["bytes_written"] == 2
    assert (await slot("process", action="submit", session_id=session, data="e ü"))["bytes_written"] == 5
    assert (await slot("process", action="submit", session_id=session))["status"] == "ok"
    assert (await ended(slot, session))["output"] == "<one ü|>\n"
    late = await slot.result("process", action="write", session_id=session, data="x")
    assert not late.success and late.to_tool_result()["status"] == "already_exited"


async def test_an_unknown_session_is_told_and_what_there_is(slot: Any) -> None:
    session = await start(slot, "sleep 60")
    for action in ("poll", "log", "wait", "kill", "write", "submit"):
        result = await slot.result("process", action=action, session_id="proc_0123456789ab", data="x")
        answer = result.to_tool_result()
        assert not result.success and answer["status"] == "not_found" and session in answer["error"]


async def test_end_of_file_is_typed_as_ctrl_d(slot: Any) -> None:
    session = await start(slot, "cat; echo end")
    answer = await slot("process", action="write", session_id=session, data="text\x04")
    assert answer["status"] == "ok" and answer["bytes_written"] == 4
    assert (await ended(slot, session))["output"] == "textend\n"


async def test_a_kill_names_the_signal_that_it_took(slot: Any) -> None:
    session = await start(slot, "trap '' TERM; echo go; while :; do sleep 0.1; done")
    while not (await slot("process", action="poll", session_id=session))["output_preview"]:
        await asyncio.sleep(0.02)
    answer = await slot("process", action="kill", session_id=session)
    assert answer == {"session_id": session, "status": "killed", "exit_code": -9, "signal": "SIGKILL"}


# --- terminals ------------------------------------------------------------------------------------------------------


async def screen(slot: Any, session: str, text: str) -> dict[str, Any]:
    """The screen, once it shows the text."""
    for _ in range(300):
        answer = await slot("process", action="log", session_id=session)
        if text in answer["screen"]:
            return answer
        await asyncio.sleep(0.05)
    raise AssertionError(answer["screen"])


async def test_a_program_in_a_terminal_is_seen_as_a_screen(slot: Any) -> None:
    session = await start(slot, "stty size; PYTHON_BASIC_REPL=1 python3 -qi", pty=True)
    await screen(slot, session, ">>>")
    await slot("process", action="submit", session_id=session, data="6 * 7; print('\\r\\x1b[31mred\\x1b[0m€')")
    answer = await screen(slot, session, "42\nred€")
    assert answer["screen"].startswith("30 120\n>>> 6 * 7")
    assert answer["size"] == {"rows": 30, "columns": 120} and answer["cursor"]["column"] == 4
    raw = await slot("process", action="log", session_id=session, offset=0)
    assert "\x1b[31mred" in raw["output"] and "screen" not in raw
    assert (await slot("process", action="list"))["processes"][-1]["pty"] is True
    await slot("process", action="write", session_id=session, data="\x04")
    assert (await ended(slot, session))["exit_code"] == 0


async def test_ctrl_c_is_typed(slot: Any) -> None:
    session = await start(slot, "sleep 1000", pty=True)
    await slot("process", action="write", session_id=session, data="\x03")
    answer = await ended(slot, session)
    assert (answer["exit_code"], answer["signal"]) == (-2, "SIGINT")


async def test_a_foreground_command_in_a_terminal(slot: Any) -> None:
    answer = await slot("terminal", command="[ -t 1 ] && stty size; cat; exit 3", pty=True)
    assert answer["output"] == "30 120\n" and answer["exit_code"] == 3
    drawn = await slot("terminal", command="printf 'gone\\033[2J\\033[H\\033[31mnew\\033[0m'", pty=True)
    assert drawn["output"] == "new"


async def test_the_end_of_a_slot_s_lease_ends_its_terminals(slot: Any, guest: Any) -> None:
    session = await start(slot, "trap '' HUP TERM; cat", pty=True)
    index = int(slot.path.name.rpartition("_")[2])
    await guest.client.kill_slot(index)
    assert (await slot("process", action="poll", session_id=session))["signal"] == "SIGKILL"
    await guest.client.kill_slot(index, forget=True)
    assert (await slot("process", action="list"))["processes"] == []


# --- wrong use ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"action": "poll"}, "session_id: is required for action 'poll'"),
        ({"action": "write", "session_id": "proc_1"}, "data: is required"),
        ({"action": "stop"}, "'kill'"),
        ({}, "action: is required"),
        ({"action": "log", "session_id": "p", "offset": -1}, "greater than or equal to 0"),
        ({"action": "wait", "session_id": "p", "timeout": 0}, "greater than 0"),
    ],
)
async def test_wrong_arguments_are_answers(slot: Any, args: dict[str, Any], says: str) -> None:
    assert says in (await slot("process", **args))["error"]


async def test_an_unknown_id_names_the_known_ones(slot: Any) -> None:
    assert "none" in (await slot("process", action="poll", session_id="proc_0"))["error"]
    session = await start(slot, "true")
    assert session in (await slot("process", action="poll", session_id="proc_0"))["error"]
