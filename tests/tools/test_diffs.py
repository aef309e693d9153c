"""Unified diffs: what they show can be applied, and gives the new text."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hermes_core.tools.diffs import DIFF_CHARS, make_diff

texts = st.tuples(st.lists(st.sampled_from(["a", "b", "c", "", "d"]), max_size=30), st.booleans()).map(
    lambda each: "\n".join(each[0]) + ("\n" if each[1] else "")
)


@given(texts, texts)
def test_a_diff_takes_the_old_text_to_the_new(old: str, new: str) -> None:
    diff = make_diff("f", old, new)
    assert (diff == "") == (old == new)
    assert apply(old, diff) == new


def apply(text: str, diff: str) -> str:
    """Apply a unified diff, checking every line and every number of it."""
    source = re.findall(r"[^\n]*\n|[^\n]+", text)
    result: list[str] = []
    place = 0
    body = re.findall(r"[^\n]*\n", diff)[2:]
    while body:
        header = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n", body.pop(0))
        assert header
        lengths = [1 if header[n] is None else int(header[n]) for n in (2, 4)]
        start = int(header[1]) - (1 if lengths[0] else 0)
        result += source[place:start]
        assert len(result) == int(header[3]) - (1 if lengths[1] else 0)
        place = start
        while any(lengths):
            line = body.pop(0)
            mark, content = line[0], line[1:]
            if body and body[0].startswith("\\"):
                body.pop(0)
                content = content[:-1]
            if mark != "+":
                assert source[place] == content
                place, lengths[0] = place + 1, lengths[0] - 1
            if mark != "-":
                result.append(content)
                lengths[1] -= 1
    return "".join(result + source[place:])


def test_git_takes_it(tmp_path: Path) -> None:
    old = "".join(f"line {n}\n" for n in range(50))
    new = old.replace("line 3\n", "").replace("line 40\n", "line forty\nand more\n") + "no end"
    (tmp_path / "f.txt").write_text(old)
    diff = make_diff("f.txt", old, new) + make_diff("/g", None, "x\n")
    subprocess.run(["git", "apply"], input=diff.encode(), cwd=tmp_path, check=True)
    assert (tmp_path / "f.txt").read_text() == new and (tmp_path / "g").read_text() == "x\n"


def test_new_and_removed_files() -> None:
    assert make_diff("a", None, "x\n") == "--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+x\n"
    assert make_diff("/a", "x\n", None) == "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"


def test_bounds_of_size_and_time() -> None:
    begin = time.process_time()
    diff = make_diff("a", "x\n" * 30_000, "".join(f"{n % 7}\n" for n in range(30_000)))
    assert len(diff) <= DIFF_CHARS and "omitted" in diff
    assert time.process_time() - begin < 2


def test_bytes_that_are_not_text() -> None:
    assert make_diff("a", b"\xff\n".decode(errors="surrogateescape"), "b\n").splitlines()[3] == "-\ufffd"
    assert make_diff("a", "\0", None) == "Binary file a differs\n"
