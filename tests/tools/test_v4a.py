"""The multi-file patch format: what it says, what is wrong with it, and applying it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.tools.v4a import FilePatch, Hunk, PatchError, apply_hunks, parse_patch


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def applied(text: str, *lines: str) -> str:
    (file,) = parse_patch(patch("*** Update File: f", *lines))
    return apply_hunks(text, file)


def test_all_three_kinds() -> None:
    update, add, delete = parse_patch(
        patch(
            "*** Update File: ./src//a.py",
            "*** Move to: src/b.py",
            "@@ class A",
            "@@ def f(self):",
            " stays",
            "-goes",
            "+comes",
            "*** End of File",
            "",
            "*** Add File: new file.txt",
            "+one",
            "+",
            "+two",
            "*** Delete File: old.txt",
        )
    )
    hunk = Hunk(4, ((" ", "stays"), ("-", "goes"), ("+", "comes")), ("class A", "def f(self):"), True)
    assert update == FilePatch("update", "src/a.py", (hunk,), move_to="src/b.py")
    assert add == FilePatch("add", "new file.txt", content="one\n\ntwo\n")
    assert delete == FilePatch("delete", "old.txt")


def test_crlf_and_blank_lines_around_are_forgiven() -> None:
    (file,) = parse_patch("\n" + patch("*** Add File: a", "+x").replace("\n", "\r\n") + "\r\n\n")
    assert file.content == "x\n"


def test_an_empty_file() -> None:
    assert parse_patch(patch("*** Add File: a")) == [FilePatch("add", "a")]


def test_a_context_line_that_looks_like_the_end_is_context() -> None:
    assert applied("*** End Patch\nx\n", " *** End Patch", "-x", "+y") == "*** End Patch\ny\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with"),
        ("*** Update File: a", "begins with"),
        ("*** Begin Patch\n*** Add File: a\n+x", "ends with"),
        (patch(), "names no file"),
        (patch("*** Change File: a"), "expected"),
        (patch("*** Update File: "), "path is needed"),
        (patch("*** Update File: a\0b"), "path is needed"),
        (patch("*** Update File: a"), "nothing is changed"),
        (patch("*** Update File: a", "@@ x"), "changes nothing"),
        (patch("*** Update File: a", " x"), "changes nothing"),
        (patch("*** Update File: a", "x"), "begins with ' '"),
        (patch("*** Add File: a", "x"), "begins with '+'"),
        (patch("*** Delete File: a", "-x"), "expected"),
        (patch("*** Delete File: a") + "\nmore", "more text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, says: str) -> None:
    with pytest.raises(PatchError, match=r"line \d+ of the patch") as caught:
        parse_patch(text)
    assert says in str(caught.value)


words = [
    "*** Begin Patch",
    "*** End Patch",
    "*** Update File: a",
    "*** Add File: b",
    "*** Delete File: c",
    "*** Move to: d",
]
words += [
    "*** End of File",
    "@@",
    "@@ x",
    "@@ -1,2 +3 @@ y",
    " x",
    "-x",
    "+x",
    "",
    "x",
    "***",
    "*** Update File:",
    " ",
    "\r",
]


@given(st.lists(st.sampled_from(words), max_size=12).map("\n".join) | st.text(max_size=200))
def test_any_text_parses_or_raises_the_typed_error(text: str) -> None:
    for candidate in (text, f"*** Begin Patch\n{text}\n*** End Patch"):
        try:
            files = parse_patch(candidate)
        except PatchError:
            continue
        for file in files:
            try:
                apply_hunks("x\ny\n", file)
            except PatchError:
                continue


texts = st.lists(st.sampled_from(["a", "b", "c", "", "  d", "e "]), max_size=8)


@given(texts, texts, texts, texts)
def test_a_quoted_change_does_just_that(before: list[str], old: list[str], new: list[str], after: list[str]) -> None:
    lines = ["top", *before, "begin", *old, "end", *after, "bottom"]
    hunk = [" begin", *(f"-{line}" for line in old), *(f"+{line}" for line in new), " end"]
    if not old and not new:
        return
    text = "".join(f"{line}\n" for line in lines)
    expected = ["top", *before, "begin", *new, "end", *after, "bottom"]
    assert applied(text, *hunk) == "".join(f"{line}\n" for line in expected)


# --- where -----------------------------------------------------------------------------------------------------------

FILE = "class A:\n    def f(self):\n        return 1\n\nclass B:\n    def f(self):\n        return 1\n"


def test_an_ambiguous_place_is_refused_with_the_number() -> None:
    with pytest.raises(PatchError, match=r"there 2 times \(line 3, 7 of the file\)") as caught:
        applied(FILE, "-        return 1", "+        return 2")
    assert "@@" in str(caught.value)


@pytest.mark.parametrize("hint", ["@@ class B:", "@@ class B", "@@ class B: @@", "@@ -5,3 +5,3 @@ class B:"])
def test_a_hint_says_which(hint: str) -> None:
    assert applied(FILE, hint, "-        return 1", "+        return 2") == FILE[:-2] + "2\n"


def test_a_hint_that_is_quoted_again_as_the_first_line() -> None:
    text = applied(
        FILE, "@@ class B:", "@@     def f(self):", "     def f(self):", "-        return 1", "+        return 2"
    )
    assert text == FILE[:-2] + "2\n"


def test_a_missing_hint_is_an_error() -> None:
    with pytest.raises(PatchError, match="no line 'class C'"):
        applied(FILE, "@@ class C", "-        return 1", "+x")


def test_hunks_apply_from_top_to_bottom() -> None:
    text = applied(FILE, " class A:", "-    def f(self):", "+    def g(self):", "@@", "-class B:", "+class C:")
    assert text == FILE.replace("f(self)", "g(self)", 1).replace("class B", "class C")
    with pytest.raises(PatchError, match="not found"):
        applied(FILE, "-class B:", "+class C:", "@@", "-class A:", "+class D:")


def test_end_of_file_says_which() -> None:
    assert applied("x\ny\nx\n", "-x", "+z", "*** End of File") == "x\ny\nz\n"


def test_added_lines_without_context() -> None:
    assert applied("a\nb\n", "+c") == "a\nb\nc\n"
    assert applied("a\nb\n", "@@ a", "+c") == "a\nc\nb\n"
    assert applied("", "+c") == "c\n"


def test_looser_quotation_keeps_the_file_s_own_lines() -> None:
    text = applied("if x:\n\tkeep()  \n\tgo()\n", "     keep()", "-    go()", "+    come()")
    assert text == "if x:\n\tkeep()  \n\tcome()\n"


def test_no_newline_at_the_end_stays_so() -> None:
    assert applied("a\nb", " a", "-b", "+c") == "a\nc"


def test_everything_can_be_removed() -> None:
    assert applied("a\nb\n", "-a", "-b") == ""


def test_not_found_says_what_and_where() -> None:
    with pytest.raises(PatchError, match=r"change at line 3 of the patch were not found \(the first is 'nope'\)"):
        applied(FILE, "-nope", "+x")


@pytest.mark.parametrize("part", ["@@ u", "@@\n-u\n+v"])
def test_more_changes_than_can_be_looked_for_are_refused(part: str) -> None:
    text = "".join(f"x{number}\n" for number in range(20_000))
    with pytest.raises(PatchError, match="too many"):
        applied(text, *[part] * 2000, "-x1", "+x2")


def test_the_end_of_the_file_is_one_place_among_many() -> None:
    assert applied("a\n" * 5, "@@", "-a", "-a", "+b", "*** End of File") == "a\na\na\nb\n"
