"""`read_file` and `write_file` in a real slot."""

from __future__ import annotations

import asyncio
import difflib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_lines_have_numbers(slot: Any) -> None:
    slot.write("a.txt", "one\n\n  three é\n")
    assert await slot("read_file", path="a.txt") == {
        "content": "1|one\n2|\n3|  three é",
        "total_lines": 3,
        "file_size": 16,
        "truncated": False,
    }


async def test_a_last_line_without_a_newline_counts(slot: Any) -> None:
    slot.write("a.txt", "one\ntwo")
    answer = await slot("read_file", path="a.txt")
    assert answer["content"] == "1|one\n2|two" and answer["total_lines"] == 2


async def test_paging_gives_every_line_once(slot: Any) -> None:
    slot.write("a.txt", "".join(f"line {n}\n" for n in range(1, 1201)))
    answer = await slot("read_file", path="a.txt")
    assert answer["content"].count("\n") == 499 and answer["truncated"] is True
    assert "1 to 500 of 1200" in answer["hint"] and "offset=501" in answer["hint"]
    answer = await slot("read_file", path="a.txt", offset=501, limit=2000)
    assert answer["content"].startswith("501|line 501\n") and answer["content"].endswith("\n1200|line 1200")
    assert answer["truncated"] is False and "hint" not in answer


async def test_long_lines_are_cut_and_say_by_how_much(slot: Any) -> None:
    slot.write("a.txt", "é" * 2000 + "\n" + "é" * 2003 + "\nend\n")
    answer = await slot("read_file", path="a.txt")
    assert answer["content"] == f"1|{'é' * 2000}\n2|{'é' * 2000}... [6 bytes more]\n3|end"


async def test_one_answer_is_bounded_and_says_where_to_go_on(slot: Any) -> None:
    slot.write("a.txt", "".join(f"{n}{'x' * 1000}\n" for n in range(1, 1001)))
    answer = await slot("read_file", path="a.txt", limit=2000)
    assert len(answer["content"]) < 55_000 and answer["total_lines"] == 1000
    shown = answer["content"].count("\n") + 1
    assert f"offset={shown + 1}" in answer["hint"]


async def test_lines_are_found_across_the_parts_of_a_large_file(slot: Any) -> None:
    line = "é" * 333 + "\n"
    slot.write("a.txt", line * 5000 + "last\n")
    answer = await slot("read_file", path="a.txt", offset=4999)
    assert answer["content"] == f"4999|{line}5000|{line}5001|last" and answer["total_lines"] == 5001


async def test_a_huge_file_is_not_read_to_its_end(slot: Any) -> None:
    with open(slot.path / "huge", "wb") as file:
        file.write(b"first\n" + b"x\n" * (6 << 20))
    answer = await slot("read_file", path="huge", limit=1)
    assert answer["content"] == "1|first" and answer["total_lines"] is None and "offset=2" in answer["hint"]


async def test_empty_and_beyond_the_end(slot: Any) -> None:
    slot.write("empty", "")
    answer = await slot("read_file", path="empty")
    assert answer["content"] == "" and answer["total_lines"] == 0 and "empty" in answer["hint"]
    slot.write("two", "1\n2\n")
    assert "has 2 lines" in (await slot("read_file", path="two", offset=3))["error"]


async def test_crlf_is_said_and_not_shown(slot: Any) -> None:
    slot.write("dos.txt", "a\r\nb\r\n")
    answer = await slot("read_file", path="dos.txt")
    assert answer["content"] == "1|a\n2|b" and "CRLF" in answer["hint"]


async def test_bytes_that_are_not_utf8_are_shown_and_said(slot: Any) -> None:
    slot.write("latin.txt", b"caf\xe9\n")
    answer = await slot("read_file", path="latin.txt")
    assert answer["content"] == "1|caf\ufffd" and "not UTF-8" in answer["hint"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"abc\0def", "binary data"),
        ("hi".encode("utf-16"), "UTF-16"),
        (b"\x7fELF\x02", "an ELF program"),
    ],
)
async def test_binary_files_are_recognised(slot: Any, data: bytes, kind: str) -> None:
    slot.write("file", data)
    result = await slot.result("read_file", path="file")
    assert not result.success and kind in result.to_tool_result()["error"]


async def test_a_wrong_name_brings_similar_ones(slot: Any) -> None:
    for name in ("parser.py", "parsers.py", "test_parser.py", "Parser.md", "parse.txt", "parser_old.py", "zzz"):
        slot.write(f"src/{name}", "")
    answer = await slot("read_file", path="src/parser.pi")
    assert "src/parser.pi does not exist" in answer["error"]
    assert answer["similar_files"][0] == "src/parser.py"
    assert 2 <= len(answer["similar_files"]) <= 5 and "src/zzz" not in answer["similar_files"]
    assert "similar_files" not in await slot("read_file", path="no/such/dir")


async def test_many_long_names_hold_nobody_up(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare 10,000 names of 200 characters took half a minute of the event loop: of every rollout's."""
    compared: list[tuple[bool, int, int]] = []
    compare = difflib.get_close_matches

    def watched(word: str, among: Iterable[str], **how: Any) -> list[str]:
        names = list(among)
        on_loop = threading.current_thread() is threading.main_thread()
        compared.append((on_loop, len(names), max(map(len, [word, *names]))))
        return compare(word, names, **how)

    monkeypatch.setattr(difflib, "get_close_matches", watched)
    for number in range(600):
        slot.write(f"{number:06}{'a' * 193}", "")
    answer = await slot("read_file", path="999999" + "a" * 193)
    assert "does not exist" in answer["error"] and len(answer["similar_files"]) == 5
    assert compared == [(False, 500, 64)]


async def test_directories_pipes_and_forbidden_places_are_answers(slot: Any) -> None:
    (slot.path / "dir").mkdir()
    os.mkfifo(slot.path / "pipe")
    assert "search_files" in (await slot("read_file", path="dir"))["error"]
    assert "not a regular file" in (await slot("read_file", path="pipe"))["error"]
    assert "error" in await slot("read_file", path="/proc/1/mem")
    for path in ("a\0b", ""):
        assert "path" in (await slot("read_file", path=path))["error"]


async def test_absolute_paths_can_be_read(slot: Any, tmp_path: Any) -> None:
    (tmp_path / "x").write_text("outside\n")
    assert (await slot("read_file", path=str(tmp_path / "x")))["content"] == "1|outside"


async def test_paths_are_data(slot: Any) -> None:
    name = "a; touch pwned $(touch pwned) 'q' \"d\" \n -rf"
    assert (await slot("write_file", path=name, content="x\n"))["bytes_written"] == 2
    assert (await slot("read_file", path=name))["content"] == "1|x"
    assert sorted(os.listdir(slot.path)) == [name]


async def test_write_makes_directories_and_says_so(slot: Any) -> None:
    content = "é\n'$HOME'\0"
    assert await slot("write_file", path="a/b/c.txt", content=content) == {"bytes_written": 11, "dirs_created": True}
    assert slot.read("a/b/c.txt") == content
    assert await slot("write_file", path="a/b/c.txt", content="") == {"bytes_written": 0, "dirs_created": False}
    assert slot.read("a/b/c.txt") == ""


async def test_write_keeps_permissions(slot: Any) -> None:
    os.chmod(slot.write("run.sh", "old"), 0o750)
    await slot("write_file", path="run.sh", content="new")
    assert (slot.path / "run.sh").stat().st_mode & 0o777 == 0o750


async def test_writing_where_it_cannot_be_is_an_answer(slot: Any) -> None:
    (slot.path / "dir").mkdir()
    slot.write("file", "kept")
    assert "is a directory" in (await slot("write_file", path="dir", content="x"))["error"]
    assert "not written" in (await slot("write_file", path="file/below", content="x"))["error"]
    assert "not written" in (await slot("write_file", path="/proc/nothing/here", content="x"))["error"]
    assert "surrogate" in (await slot("write_file", path="x", content="\ud800"))["error"]
    assert slot.read("file") == "kept" and not (slot.path / "x").exists()


async def test_millions_of_short_lines_do_not_hold_up_the_loop(slot: Any) -> None:
    with open(slot.path / "huge", "wb") as file:
        file.write(b"x\n" * (16 << 20))
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            worked = time.thread_time()
            await asyncio.sleep(0.005)
            worst = max(worst, time.thread_time() - worked)

    watcher = asyncio.create_task(watch())
    answer = await slot("read_file", path="huge", offset=16_000_000, limit=2)
    watcher.cancel()
    assert answer["content"] == "16000000|x\n16000001|x"
    assert worst < 0.2


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize(("offset", "limit"), [(1, 1), (1, 5), (3, 1), (4, 2), (5, 9), (6, 1)])
async def test_every_page_is_right(slot: Any, ending: str, offset: int, limit: int) -> None:
    lines = ["a", "", "c", "d", "e"]
    slot.write("f", "\n".join(lines) + ending)
    answer = await slot("read_file", path="f", offset=offset, limit=limit)
    wanted = [f"{n}|{line}" for n, line in enumerate(lines, 1) if offset <= n < offset + limit]
    if wanted:
        assert answer["content"] == "\n".join(wanted) and answer["total_lines"] == 5
        assert answer["truncated"] is (offset + limit <= 5)
    else:
        assert "has 5 lines" in answer["error"]


async def test_the_home_directory_is_meant_by_a_tilde(slot: Any) -> None:
    home = (await slot("terminal", command="echo $HOME"))["output"].strip()
    await slot("write_file", path="~/notes/a.txt", content="one\n")
    assert (await slot("read_file", path="~/notes/a.txt"))["content"] == "1|one"
    assert (await slot("patch", path="~/notes/a.txt", old_string="one", new_string="two"))["success"]
    text = "*** Begin Patch\n*** Update File: ~/notes/a.txt\n*** Move to: ~/b.txt\n-two\n+hit\n*** End Patch"
    assert (await slot("patch", mode="patch", patch=text))["success"]
    assert (await slot("search_files", pattern="hit", path="~"))["matches"][0]["path"] == f"{home}/b.txt"
    assert (await slot("terminal", command="pwd", workdir="~/notes"))["output"] == f"{home}/notes\n"
    await slot("write_file", path="./~", content="a file of that name\n")
    assert [each.name for each in slot.path.iterdir()] == ["~"]


async def test_the_kernel_s_files_have_content_and_no_size(slot: Any) -> None:
    answer = await slot("read_file", path="/proc/self/status")
    assert answer["content"].startswith("1|Name:") and "hint" not in answer
    assert answer["total_lines"] > 20 and answer["file_size"] > 100
