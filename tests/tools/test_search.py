"""`search_files` in a real slot, which has Python or has not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hermes_core.tools import search

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(params=["in_slot", "beside_driver"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "beside_driver":

        async def no_python(*_: object) -> None:
            return None

        monkeypatch.setattr(search, "_in_slot", no_python)
    return request.param


@pytest.fixture
def project(slot: Any, engine: str) -> Any:
    slot.write("a.py", "import os\n\ndef find_me():\n    return 1\n")
    slot.write("src/b.py", "x = find_me()\ny = find_me()\n")
    slot.write("src/deep/c.txt", "nothing\nfind_me here\n")
    slot.write(".hidden/d.py", "find_me\n")
    slot.write(".git/e.py", "find_me\n")
    slot.write("node_modules/f.py", "find_me\n")
    slot.write("binary.bin", b"\0\0find_me\n")
    return slot


async def test_lines_that_match(project: Any) -> None:
    assert await project("search_files", pattern=r"find_me\(\)") == {
        "matches": [
            {"path": "a.py", "line": 3, "content": "def find_me():"},
            {"path": "src/b.py", "line": 1, "content": "x = find_me()"},
            {"path": "src/b.py", "line": 2, "content": "y = find_me()"},
        ],
        "total_count": 3,
        "truncated": False,
    }


async def test_hidden_files_are_searched_and_skipped_places_only_when_named(project: Any, engine: str) -> None:
    found = (await project("search_files", pattern="find_me", output_mode="files_only"))["files"]
    assert found == [".hidden/d.py", "a.py", "src/b.py", "src/deep/c.txt"]
    named = await project("search_files", pattern="find_me", path=".git", output_mode="files_only")
    assert named["files"] == [".git/e.py"]


HIDDEN = (".git/a", ".code.git/a", "deep/.code.git/objects/a", ".hg/a", ".svn/a", ".bzr/a", ".jj/a", ".hermes-7-0a1b")


async def test_version_control_and_files_of_ours_are_left_out(slot: Any, engine: str) -> None:
    kept = [".github/a", ".gitignore", ".hermes", "code.git.py", "deep/a"]
    for name in (*HIDDEN, *kept):
        slot.write(name, "find_me\n")
    files = await slot("search_files", pattern="*", target="files")
    assert files["files"] == kept
    assert (await slot("search_files", pattern="find_me", output_mode="files_only"))["files"] == kept
    globbed = await slot("search_files", pattern="find_me", file_glob="a", output_mode="files_only")
    assert globbed["files"] == [".github/a", "deep/a"], "a glob that is wanted brings nothing of them back"
    named = await slot("search_files", pattern="find_me", path="deep/.code.git", output_mode="files_only")
    assert named["files"] == ["deep/.code.git/objects/a"]
    assert (await slot("search_files", pattern="find_me", path=".hermes-7-0a1b"))["total_count"] == 1


async def test_counts(project: Any) -> None:
    answer = await project("search_files", pattern="find_me", path="src", output_mode="count")
    assert answer["counts"] == {"src/b.py": 2, "src/deep/c.txt": 1}
    assert answer["total_matches"] == 3 and answer["total_count"] == 2


@pytest.mark.parametrize(
    ("glob", "files"),
    [
        ("*.txt", ["src/deep/c.txt"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**", ["src/b.py", "src/deep/c.txt"]),
        ("**/deep/*.{py,txt}", ["src/deep/c.txt"]),
        ("{a,b}.py", ["a.py", "src/b.py"]),
    ],
)
async def test_file_globs_mean_the_same_everywhere(project: Any, glob: str, files: list[str]) -> None:
    answer = await project("search_files", pattern="find_me", file_glob=glob, output_mode="files_only")
    assert answer["files"] == files


async def test_one_file(project: Any) -> None:
    answer = await project("search_files", pattern="find_me", path="src/b.py", file_glob="*.nothing")
    assert [match["path"] for match in answer["matches"]] == ["src/b.py", "src/b.py"]
    absolute = await project("search_files", pattern="find_me", path=f"{project.path}/src/b.py")
    assert absolute["matches"][0]["path"] == f"{project.path}/src/b.py"


async def test_context_lines_are_marked(slot: Any, engine: str) -> None:
    slot.write("a-1-b.txt", "1\n2\nhit\n4\n5\n6\nhit\n8\n")
    answer = await slot("search_files", pattern="hit", context=1, limit=1)
    assert answer["matches"] == [
        {"path": "a-1-b.txt", "line": 2, "content": "2", "context": True},
        {"path": "a-1-b.txt", "line": 3, "content": "hit"},
        {"path": "a-1-b.txt", "line": 4, "content": "4", "context": True},
    ]
    assert answer["truncated"] and answer["hint"] == "go on with offset=1"


async def test_pages_hold_every_match_once(slot: Any, engine: str) -> None:
    for n in range(5):
        slot.write(f"f{n}", "hit\n" * 5)
    seen, offset = [], 0
    while True:
        answer = await slot("search_files", pattern="hit", limit=7, offset=offset)
        seen += [(match["path"], match["line"]) for match in answer["matches"]]
        assert answer["total_count"] == 25
        if not answer["truncated"]:
            break
        offset += 7
    assert seen == [(f"f{n}", line) for n in range(5) for line in range(1, 6)]


@pytest.mark.parametrize("pattern", ["-e", "--help", "$(touch pwned)", "'; touch pwned #", "a b", "é€", "\\{\\}"])
async def test_patterns_and_paths_are_data(slot: Any, engine: str, pattern: str) -> None:
    text = pattern.replace("\\", "")
    name = f"-{text}.txt"
    slot.write(name, f"<{text}>\n")
    quoted = "".join(f"[{c}]" if c in "$()" else c for c in pattern)
    answer = await slot("search_files", pattern=quoted)
    assert answer["matches"] == [{"path": name, "line": 1, "content": f"<{text}>"}]
    assert (await slot("search_files", pattern=quoted, path=name))["total_count"] == 1
    assert (await slot("search_files", pattern=f"-{text}*", target="files"))["files"] == [name]
    assert not (slot.path / "pwned").exists()


async def test_a_wrong_expression_is_an_answer(slot: Any, engine: str) -> None:
    slot.write("a", "x\n")
    answer = await slot("search_files", pattern="(unclosed")
    assert "the search failed" in answer["error"]


CASES = {  # pattern, the file, what is found in it
    "an end before CRLF": ("b$", b"a\r\nb\r\nbc\r\n", [(2, "b")]),
    "a start after a BOM": ("^a", b"\xef\xbb\xbfab\nba\n", [(1, "ab")]),
    "UTF-16": ("^h.t$", "hit\r\nhat\r\n".encode("utf-16"), [(1, "hit"), (2, "hat")]),
    "not UTF-8": ("h.t", b"caf\xe9 hit\n", [(1, "caf\ufffd hit")]),
    "a look-ahead": ("hi(?=t)", b"hi\nhit\n", [(2, "hit")]),
    "a class": ("^[[:alpha:]]+[^[:space:]]$", b"ab1\na b\n", [(1, "ab1")]),
    "a named group": (r"(?<x>[ab])(?P=x)", b"ab\nbb\n", [(2, "bb")]),
    "no end of the line": ("hit$", b"a\nhit", [(2, "hit")]),
    "binary": ("hit", b"\0\0hit\n", []),
}


@pytest.mark.parametrize("case", CASES)
async def test_lines_mean_the_same_everywhere(slot: Any, engine: str, case: str) -> None:
    pattern, data, found = CASES[case]
    slot.write("a", data)
    answer = await slot("search_files", pattern=pattern)
    assert [(each["line"], each["content"]) for each in answer["matches"]] == found


async def test_a_huge_line_hides_nothing_and_its_match_is_shown(slot: Any, engine: str) -> None:
    slot.write("a.min.js", "x" * 6_000_000 + " hit " + "y" * 1000)
    slot.write("b.py", "hit\n")
    one, other = (await slot("search_files", pattern="hit"))["matches"]
    assert " hit " in one["content"] and len(one["content"]) == 506 and other["content"] == "hit"


async def test_links_are_files_and_what_never_ends_is_none(slot: Any, engine: str) -> None:
    slot.write("real/a", "hit\n")
    (slot.path / "file").symlink_to("real/a")
    (slot.path / "directory").symlink_to("real")
    (slot.path / "circle").symlink_to(".")
    (slot.path / "dangling").symlink_to("gone")
    os.mkfifo(slot.path / "fifo")
    assert (await slot("search_files", pattern="*", target="files"))["files"] == ["file", "real/a"]
    assert (await slot("search_files", pattern="hit", output_mode="files_only"))["files"] == ["file", "real/a"]
    assert (await slot("search_files", pattern="hit", path="file"))["total_count"] == 1
    assert (await slot("search_files", pattern="hit", path="fifo"))["total_count"] == 0


async def test_a_slow_pattern_is_stopped(slot: Any, engine: str) -> None:
    slot.write("a", "hit\n")
    slot.write("b", "a" * 60 + "\n")
    short = slot.as_other_trajectory(timeout_s=0.5)
    answer = await short("search_files", pattern="hit|(a*)*b")
    assert "stopped after 0.5 s" in answer["note"] and answer["truncated"] is True


async def test_nothing_found(slot: Any, engine: str) -> None:
    slot.write("a", "x\n")
    for mode, key in (("content", "matches"), ("files_only", "files"), ("count", "counts")):
        answer = await slot("search_files", pattern="zzz", output_mode=mode)
        assert not answer[key] and answer["total_count"] == 0 and not answer["truncated"]


async def test_many_matches_are_counted_and_a_page_of_them_is_shown(slot: Any, engine: str) -> None:
    slot.write("big", ("hit " + "x" * 400 + "\n") * 20_000)
    answer = await slot("search_files", pattern="hit", limit=1000)
    assert answer["truncated"] and answer["total_count"] == 20_000
    assert sum(len(match["content"]) for match in answer["matches"]) <= 50_000
    shown = len(answer["matches"])
    assert 50 < shown < 1000 and answer["hint"] == f"go on with offset={shown}"


async def test_long_lines_are_cut(slot: Any, engine: str) -> None:
    slot.write("a", "hit" + "x" * 10_000 + "\n")
    answer = await slot("search_files", pattern="hit")
    assert len(answer["matches"][0]["content"]) == 503


# --- by name ---------------------------------------------------------------------------------------------------------


async def test_files_by_name(slot: Any) -> None:
    for name in ("a.py", "src/test_a.py", "src/deep/test_b.py", "src/c.js", "node_modules/d.py"):
        slot.write(name, "")

    async def files(pattern: str, **args: Any) -> list[str]:
        return (await slot("search_files", pattern=pattern, target="files", **args))["files"]

    assert await files("*.py") == ["a.py", "src/deep/test_b.py", "src/test_a.py"]
    assert await files("src/**/test_*.py") == ["src/deep/test_b.py", "src/test_a.py"]
    assert await files("src/*") == ["src/c.js", "src/test_a.py"]
    assert await files("*.{js,py}", path="src") == ["src/c.js", "src/deep/test_b.py", "src/test_a.py"]
    assert await files("a.py") == ["a.py"]
    assert await files("*.py", limit=1, offset=1) == ["src/deep/test_b.py"]


async def test_older_names_of_the_targets(slot: Any) -> None:
    slot.write("a.py", "x\n")
    assert (await slot("search_files", pattern="x", target="grep"))["total_count"] == 1
    assert (await slot("search_files", pattern="*.py", target="find"))["files"] == ["a.py"]


async def test_a_missing_path_brings_similar_names(slot: Any) -> None:
    (slot.path / "source").mkdir()
    answer = await slot("search_files", pattern="x", path="sorce")
    assert "does not exist" in answer["error"] and answer["similar_files"] == ["source"]


async def test_a_link_to_a_directory_is_searched(slot: Any) -> None:
    slot.write("real/a", "hit\n")
    slot.write("real/b", "hit\n")
    (slot.path / "link").symlink_to("real")
    (slot.path / "one").symlink_to("real/a")
    assert (await slot("search_files", pattern="hit", path="link"))["matches"][0]["path"] == "link/a"


async def test_a_python_that_is_none_is_not_believed(slot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slot.write("a", "hit\n")
    monkeypatch.setattr(search, "_PROGRAM", ["-c", "print('garbage')"])
    assert await search._in_slot(slot.commands, {"directory": ".", "limit_s": 60}) is None


async def test_a_time_out_gives_what_there_is(slot: Any) -> None:
    short = slot.as_other_trajectory(timeout_s=0.003)
    answer = await short("search_files", pattern="*", target="files", path="/usr")
    assert "stopped after 0.003 s" in answer["note"] and answer["truncated"] is True


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"pattern": "a\nb"}, "newline"),
        ({"pattern": "x", "file_glob": "!*.py"}, "negated"),
        ({"pattern": ""}, "at least 1"),
        ({"pattern": "x", "path": "a\0"}, "NUL"),
        ({"pattern": "x", "target": "names"}, "'content' or 'files'"),
    ],
)
async def test_wrong_arguments_are_answers(slot: Any, args: dict[str, Any], says: str) -> None:
    assert says in (await slot("search_files", **args))["error"]
