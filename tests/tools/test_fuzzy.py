"""Replacing quoted text: exactly, by looser ways, and never anything outside the match."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hermes_core.tools.fuzzy import ReplaceError, find_apart, find_lines, replace_text

small = st.text(alphabet="ab \n\t", max_size=8)
anything = st.text(max_size=40)


# --- exact ---------------------------------------------------------------------------------------------------------


@given(anything, st.text(min_size=1, max_size=10), anything, anything)
def test_a_unique_text_is_replaced_and_nothing_else(before: str, old: str, after: str, new: str) -> None:
    text = before + old + after
    assume(old != new and _count(text, old) == 1)
    done = replace_text(text, old, new)
    assert (done.text, done.strategy, done.count) == (before + new + after, "exact", 1)


@given(small, st.text(alphabet="ab", min_size=1, max_size=2), st.text(alphabet="xy", max_size=2))
def test_replace_all_is_what_str_replace_does(text: str, old: str, new: str) -> None:
    assume(old in text)
    done = replace_text(text, old, new, replace_all=True)
    assert done.text == text.replace(old, new) and done.count == text.count(old)


@given(anything, st.text(min_size=1, max_size=5), anything)
def test_there_and_back_again(before: str, old: str, after: str) -> None:
    text = before + old + after
    assume(_count(text, old) == 1)
    new = "\u2400unique\u2400"
    assume(new not in text)
    there = replace_text(text, old, new)
    assert replace_text(there.text, new, old).text == text


def _count(text: str, old: str) -> int:
    return len(re.findall(f"(?={re.escape(old)})", text))


@pytest.mark.parametrize(("text", "times"), [("x = 1\nx = 1\n", 2), ("x = 1\n" * 30, 30)])
def test_an_ambiguous_text_is_refused_with_the_number_of_places(text: str, times: int) -> None:
    with pytest.raises(ReplaceError, match=rf"there {times} times \(line 1, 2") as caught:
        replace_text(text, "x = 1", "x = 2")
    assert "replace_all" in str(caught.value)


def test_overlapping_places_are_ambiguous_too() -> None:
    with pytest.raises(ReplaceError, match=r"2 times \(line 1\)"):
        replace_text("aaa", "aa", "b")


@pytest.mark.parametrize(("old", "new", "says"), [("", "x", "empty"), ("a", "a", r"same \(give another text")])
def test_nothing_to_do_is_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(ReplaceError, match=says):
        replace_text("a", old, new)


# --- looser ways ----------------------------------------------------------------------------------------------------

FILE = """\
class Stack:
    def push(self, item):
        if item is None:
            raise ValueError("none")
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""


def changed(text: str, old: str, new: str) -> tuple[str, str]:
    done = replace_text(text, old, new)
    assert done.count == 1
    return done.strategy, done.text


def test_blanks_at_line_ends() -> None:
    strategy, text = changed("a = 1  \nb = 2\t\nc\n", "a = 1\nb = 2\n", "a = 3\n")
    assert (strategy, text) == ("trailing_whitespace", "a = 3\nc\n")


def test_less_indentation_than_the_file_s() -> None:
    old = 'if item is None:\n    raise ValueError("none")'
    new = 'if item is None:\n    log()\n\n    raise TypeError("none")'
    strategy, text = changed(FILE, old, new)
    assert strategy == "indentation_shift"
    put = '        if item is None:\n            log()\n\n            raise TypeError("none")\n'
    assert text == FILE.replace('        if item is None:\n            raise ValueError("none")\n', put)


def test_more_indentation_than_the_file_s() -> None:
    old = "            def pop(self):\n                return self.items.pop()\n"
    new = "            def pop(self):\n                return self.items.pop(0)\n        x = 1\n"
    strategy, text = changed(FILE, old, new)
    assert strategy == "indentation_shift"
    assert text.endswith("    def pop(self):\n        return self.items.pop(0)\nx = 1\n")


def test_tabs_for_spaces() -> None:
    file = "def f():\n\tif x:\n\t\ty()\n\tz()\n"
    strategy, text = changed(file, "    if x:\n        y()\n", "    if x:\n        y()\n        w()\n            v()\n")
    assert strategy == "indentation"
    assert text == "def f():\n\tif x:\n\t\ty()\n\t\tw()\n\t\t\tv()\n\tz()\n"


def test_runs_of_blanks() -> None:
    assert changed("call( a,   b )\n", "call( a, b )", "call(b)") == ("whitespace", "call(b)\n")


def test_blank_lines_around_the_quotation() -> None:
    strategy, text = changed(FILE, "\n\ndef pop(self):\n\n", "\ndef poop(self):\n\n")
    assert (strategy, text) == ("edges", FILE.replace("pop(self)", "poop(self)"))


def test_escaped_escapes() -> None:
    assert changed('print("a")\nb()\n', r"print(\"a\")\nb()", r"print(\"c\")\nd()") == ("escapes", 'print("c")\nd()\n')


def test_typographic_punctuation() -> None:
    strategy, text = changed("say(“it’s” — x)\n", 'say("it\'s" - x)', "say(y)")
    assert (strategy, text) == ("punctuation", "say(y)\n")
    strategy, text = changed('say("it\'s")\n', "say(“it’s”)", "say(y)")
    assert (strategy, text) == ("punctuation", "say(y)\n")


def test_anchors_with_a_middle_that_is_alike() -> None:
    old = 'def push(self, item):\n  if item is None:\n    raise ValueError("nothing")\n    self.items.append(item)\n'
    strategy, text = changed(FILE, old, "def push(self, item):\n    self.items.append(item)\n")
    assert strategy == "anchors"
    assert text == FILE.replace('        if item is None:\n            raise ValueError("none")\n', "")


def test_anchors_with_a_middle_of_something_else_are_not_enough() -> None:
    old = (
        "def push(self, item):\n    completely(different, things)\n    are.written[here]\n    self.items.append(item)\n"
    )
    with pytest.raises(ReplaceError, match="not found"):
        replace_text(FILE, old, "x")


def test_an_exact_place_is_preferred_to_looser_ones() -> None:
    assert changed("  x = 1\nx = 1;\n", "x = 1;", "y") == ("exact", "  x = 1\ny\n")


def test_looser_places_can_be_ambiguous() -> None:
    with pytest.raises(ReplaceError, match=r"2 times \(line 1, 3\)"):
        replace_text("  f(a,  b)\n\n  f(a,  b)\n", "f(a, b)\n", "g\n")
    done = replace_text("  f(a,  b)\n\n  f(a,  b)\n", "f(a, b)\n", "g\n", replace_all=True)
    assert (done.text, done.count) == ("  g\n\n  g\n", 2)


def test_a_last_line_without_newline_stays_without() -> None:
    assert changed("  a\n  b", "a\nb\n", "c\nd\n") == ("indentation_shift", "  c\n  d")


def test_blank_text_is_never_looked_for_loosely() -> None:
    with pytest.raises(ReplaceError, match="not found"):
        replace_text("a\n\nb\n", " \n", "x")


def test_not_found_names_the_nearest_line() -> None:
    with pytest.raises(ReplaceError, match=r"nearest is line 5, 'self\.items\.append\(item\)'"):
        replace_text(FILE, "self.items.appendd(items)", "x")


lines = st.lists(st.sampled_from(["x", "y = 1", "z()", "", "if a:", "“q”", "w   w"]), min_size=1, max_size=6)


@given(lines, lines, lines, st.sampled_from(["", "  ", "\t", "    "]), st.booleans())
def test_whatever_finds_it_nothing_outside_is_changed(
    before: list[str], block: list[str], after: list[str], indent: str, end: bool
) -> None:
    marks = ["<<BEFORE>>", *before], [*after, "<<AFTER>>"]
    found = [f"{indent}{line}  " for line in block]
    text = "\n".join([*marks[0], *found, *marks[1]]) + "\n"
    old = "\n".join(block) + ("\n" if end else "")
    try:
        done = replace_text(text, old, "NEW\n" if end else "NEW")
    except ReplaceError:
        return
    head, _, tail = done.text.partition("NEW")
    assert done.count == 1
    assert text.startswith(head.rstrip(" \t")) and text.endswith(tail)
    assert len(head) + len(tail) <= len(text)


@given(
    st.text(alphabet="ab \n\t\\n\"'“’", max_size=40), st.text(alphabet="ab \n\t\\n\"'“’", max_size=12), st.booleans()
)
def test_any_arguments_give_a_text_or_the_typed_error(text: str, old: str, replace_all: bool) -> None:
    try:
        replace_text(text, old, "\u2400", replace_all=replace_all)
    except ReplaceError as error:
        assert error.message


def test_hostile_text_is_bounded_in_time() -> None:
    begin = time.process_time()
    text = "\n".join(["a" * 250] * 3000 + [f"{'ab' * 100}{n}" for n in range(3000)])
    with pytest.raises(ReplaceError):
        replace_text(text, "\n".join(["a" * 249] + ["b a " * 50] * 50 + ["a" * 249]), "x")
    assert time.process_time() - begin < 5


# --- hostile texts --------------------------------------------------------------------------------------------------


@given(st.text(alphabet="ab", max_size=12), st.text(alphabet="ab", min_size=1, max_size=3))
def test_places_apart_are_those_of_replace_and_tell_an_overlap(text: str, old: str) -> None:
    places = list(find_apart(text, old))
    every = [match.start() for match in re.finditer(f"(?={re.escape(old)})", text)]
    assert places[:2] == every[:2]
    assert set(places) <= set(every) and len(places) in (text.count(old), text.count(old) + 1)


def test_lines_are_looked_at_once_each() -> None:
    seen = 0

    def key(line: str) -> str:
        nonlocal seen
        seen += 1
        return line

    assert list(find_lines(["a"] * 2000, ["a"] * 1000 + ["b"], key)) == []
    assert seen == 3001
    assert list(find_lines(["a"] * 6, ["a", "a"], key, 1)) == [1, 2, 3]


@pytest.mark.few(2)
@pytest.mark.parametrize("old", ["a" * (1 << 20) + "b", "a\n" * (1 << 18) + "b", "a\\n" * (1 << 18) + "b"])
@pytest.mark.parametrize("text", ["a" * (2 << 20), "a \n" * (1 << 19)])
def test_much_of_the_same_is_soon_looked_through(text: str, old: str) -> None:
    """Quadratic work took an hour here, some of it with the interpreter's lock held, so that the driver stood still."""
    began = time.thread_time()
    with pytest.raises(ReplaceError, match="not found"):
        replace_text(text, old, "x")
    assert time.thread_time() - began < 30


@pytest.mark.full
def test_long_quotations_are_not_anchored() -> None:
    lines = ["x y"] * 300_000
    with pytest.raises(ReplaceError, match="not found"):
        replace_text("\n".join(["S"] * 20 + lines + ["E"] * 20), "\n".join(["S", *["z"] * 300_000, "E"]), "")
