"""`patch` in a real slot: replacing, patches over several files, all or nothing, byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hermes_core.tools.patch import MAX_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


# --- replace ---------------------------------------------------------------------------------------------------------


async def test_replace_answers_with_the_diff(slot: Any) -> None:
    slot.write("a.txt", "one\ntwo\nthree\n")
    answer = await slot("patch", path="a.txt", old_string="two", new_string="2")
    assert answer == {
        "success": True,
        "diff": "--- a/a.txt\n+++ b/a.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n",
        "replacements": 1,
        "matched": "exact",
    }
    assert slot.read("a.txt") == "one\n2\nthree\n"


async def test_an_ambiguous_text_changes_nothing_and_says_how_many(slot: Any) -> None:
    slot.write("a.txt", "x\nx\nx\n")
    result = await slot.result("patch", path="a.txt", old_string="x", new_string="y")
    assert not result.success and "3 times" in result.to_tool_result()["error"]
    assert slot.read("a.txt") == "x\nx\nx\n"
    answer = await slot("patch", path="a.txt", old_string="x", new_string="y", replace_all=True)
    assert answer["replacements"] == 3 and slot.read("a.txt") == "y\ny\ny\n"


async def test_a_loose_match_says_so(slot: Any) -> None:
    slot.write("a.py", "class A:\n    def f(self):\n        return 1\n")
    answer = await slot(
        "patch", path="a.py", old_string="def f(self):\n    return 1", new_string="def f(self):\n    return 2"
    )
    assert answer["matched"] == "indentation_shift"
    assert slot.read("a.py") == "class A:\n    def f(self):\n        return 2\n"


async def test_other_bytes_of_the_file_stay_as_they_are(slot: Any) -> None:
    slot.write("a", b"\xff\xfe caf\xe9\nold\n\xc3\x28\r\n")
    slot.write("a", b"caf\xe9 \xff\nold\n\xc3\x28\r\n")
    answer = await slot("patch", path="a", old_string="old", new_string="né")
    assert answer["success"] and (slot.path / "a").read_bytes() == b"caf\xe9 \xff\nn\xc3\xa9\n\xc3\x28\r\n"


async def test_crlf_files_are_changed_as_models_quote_them_and_stay_crlf(slot: Any) -> None:
    slot.write("dos.txt", b"a\r\nb\r\nc\r\n")
    answer = await slot("patch", path="dos.txt", old_string="a\nb\n", new_string="x\ny\nz\n")
    assert answer["matched"] == "exact" and (slot.path / "dos.txt").read_bytes() == b"x\r\ny\r\nz\r\nc\r\n"


async def test_permissions_and_links_stay(slot: Any) -> None:
    os.chmod(slot.write("run.sh", "echo a\n"), 0o755)
    (slot.path / "link").symlink_to("run.sh")
    await slot("patch", path="link", old_string="a", new_string="b")
    assert (slot.path / "link").is_symlink() and slot.read("run.sh") == "echo b\n"
    assert (slot.path / "run.sh").stat().st_mode & 0o777 == 0o755


async def test_python_that_no_longer_parses_is_said(slot: Any) -> None:
    slot.write("a.py", "def f():\n    return 1\n")
    answer = await slot("patch", path="a.py", old_string="return 1", new_string="return (1")
    assert answer["success"] and answer["syntax_errors"]["a.py"].startswith("line 2: ")
    assert "syntax_errors" not in await slot("patch", path="a.py", old_string="(1", new_string="1")


async def test_a_missing_file_brings_similar_names(slot: Any) -> None:
    slot.write("parser.py", "x\n")
    answer = await slot("patch", path="parsr.py", old_string="x", new_string="y")
    assert answer["success"] is False and answer["similar_files"] == ["parser.py"]


async def test_binary_large_and_impossible_files_are_answers(slot: Any) -> None:
    slot.write("bin", b"a\0b")
    slot.write("large", b"x" * (MAX_BYTES + 1))
    (slot.path / "dir").mkdir()
    for path, says in (("bin", "binary"), ("large", "bytes"), ("dir", "directory"), ("/proc/1/mem", "")):
        answer = await slot("patch", path=path, old_string="x", new_string="y")
        assert answer["success"] is False and says in answer["error"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"path": "a", "old_string": "x"}, "new_string: needed for mode 'replace'"),
        ({"mode": "patch"}, "patch: needed for mode 'patch'"),
        ({"mode": "diff"}, "'replace' or 'patch'"),
        ({"path": "a\0", "old_string": "x", "new_string": "y"}, "NUL"),
    ],
)
async def test_wrong_arguments_are_answers(slot: Any, args: dict[str, Any], says: str) -> None:
    assert says in (await slot("patch", **args))["error"]


# --- patches over several files --------------------------------------------------------------------------------------


async def test_several_files_at_once(slot: Any) -> None:
    slot.write("a.py", "x = 1\ny = 2\n")
    slot.write("gone.txt", "bye\n")
    os.chmod(slot.write("old.sh", "echo a\n"), 0o755)
    answer = await slot(
        "patch",
        mode="patch",
        patch=patch(
            "*** Update File: a.py",
            " x = 1",
            "-y = 2",
            "+y = 3",
            "*** Add File: new/b.txt",
            "+hello",
            "*** Delete File: gone.txt",
            "*** Update File: old.sh",
            "*** Move to: bin/new.sh",
            "-echo a",
            "+echo b",
        ),
    )
    assert answer["success"], answer
    assert answer["files_modified"] == ["a.py"] and answer["files_created"] == ["new/b.txt", "bin/new.sh"]
    assert answer["files_deleted"] == ["gone.txt", "old.sh"]
    assert "-y = 2\n+y = 3\n" in answer["diff"] and "--- /dev/null\n+++ b/new/b.txt\n" in answer["diff"]
    assert tree(slot.path) == {"a.py": b"x = 1\ny = 3\n", "new/b.txt": b"hello\n", "bin/new.sh": b"echo b\n"}
    assert (slot.path / "bin/new.sh").stat().st_mode & 0o777 == 0o755


async def test_two_parts_on_one_file_follow_each_other(slot: Any) -> None:
    slot.write("a", "1\n2\n")
    text = patch("*** Update File: a", "-1", "+one", "*** Update File: ./a", "-one", "+uno")
    assert (await slot("patch", mode="patch", patch=text))["success"]
    assert slot.read("a") == "uno\n2\n"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["*** Update File: b", "-nothing", "+x"], "were not found"),
        (["*** Update File: missing", "-x", "+y"], "does not exist"),
        (["*** Delete File: missing"], "does not exist"),
        (["*** Add File: b", "+x"], "exists already"),
        (["*** Update File: b", "*** Move to: a", "-2", "+3"], "exists already"),
        (["*** Update File: b", "=2"], "begins with"),
        (["*** Delete File: dir"], "directory"),
        (["*** Add File: a/below", "+x"], "a/below"),
    ],
)
async def test_all_or_nothing(slot: Any, lines: list[str], says: str) -> None:
    slot.write("a", "1\n")
    slot.write("b", "2\n")
    (slot.path / "dir").mkdir()
    before = tree(slot.path)
    text = patch("*** Update File: a", "-1", "+one", "*** Add File: c", "+new", *lines)
    answer = await slot("patch", mode="patch", patch=text)
    assert answer["success"] is False and says in answer["error"]
    assert tree(slot.path) == before


async def test_a_write_that_fails_is_undone_with_the_ones_before(slot: Any) -> None:
    slot.write("a", "1\n")
    slot.write("b", "2\n")
    before = tree(slot.path)
    text = patch("*** Update File: a", "-1", "+x", "*** Delete File: b", "*** Add File: /proc/none/c", "+x")
    answer = await slot("patch", mode="patch", patch=text)
    assert answer["success"] is False and "nothing was changed" in answer["error"]
    assert tree(slot.path) == before


async def test_a_removal_that_fails_is_undone_too(slot: Any) -> None:
    slot.write("a", "1\n")
    fixed = "/proc/version"  # can be read, can't be removed
    text = patch("*** Update File: a", "-1", "+x", f"*** Delete File: {fixed}")
    answer = await slot("patch", mode="patch", patch=text)
    assert answer["success"] is False and "nothing was changed" in answer["error"]
    assert slot.read("a") == "1\n"


async def test_without_python_in_the_slot_there_is_no_syntax_check(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = slot.commands.run

    async def without_python(command: Any, **options: Any) -> Any:
        if not isinstance(command, str) and command[0] == "python3":
            command = ["no-such-python3", *command[1:]]
        return await run(command, **options)

    assert shutil.which("no-such-python3") is None
    monkeypatch.setattr(slot.commands, "run", without_python)
    slot.write("a.py", "x\n")
    answer = await slot("patch", path="a.py", old_string="x", new_string="(")
    assert answer["success"] and "syntax_errors" not in answer
