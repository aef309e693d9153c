"""What an edit does not touch stays as it is, byte for byte, however a model quotes what is around it."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.tools.fuzzy import replace_text
from hermes_core.tools.v4a import apply_hunks, parse_patch

BODIES = ["x = 1", "e\u0301te\u0301 = 2", "“it’s” — 3", "a\rb", "tail  ", "tab\t", "\udce9", "if a:"]
lines = st.tuples(st.sampled_from(["", "  ", "\t", "\t  "]), st.sampled_from(BODIES), st.sampled_from(["\n", "\r\n"]))
PLAIN = str.maketrans("“”’—", '""\'-')
QUOTES = {
    "as shown": lambda line: line,
    "without blanks at the end": lambda line: line.rstrip(" \t"),
    "in plain punctuation": lambda line: line.translate(PLAIN),
}


@pytest.mark.parametrize("form", ["replace", "patch"])
@given(st.lists(lines, min_size=3, max_size=9), st.data())
def test_what_an_edit_does_not_touch_stays_as_it_is(form: str, written: list[Any], data: st.DataObject) -> None:
    contents = [f"{indent}{number} {body}" for number, (indent, body, _) in enumerate(written)]
    ends = [end for *_, end in written]
    ends[-1] = data.draw(st.sampled_from(["", ends[-1]]))
    first = data.draw(st.integers(0, len(contents) - 1))
    last = data.draw(st.integers(first, len(contents) - 1))
    way = data.draw(st.sampled_from([way for way in QUOTES if form == "replace" or "punctuation" not in way]))
    quoted = [QUOTES[way](unicodedata.normalize("NFC", line)) for line in contents[first : last + 1]]
    touched = data.draw(st.integers(first, last))
    indent = written[touched][0]
    changed = [*quoted]
    changed[touched - first] = f"{indent}NEW"
    text = "".join(map(str.__add__, contents, ends))
    if form == "replace":
        done = replace_text(text, "\n".join(quoted), "\n".join(changed)).text
    else:
        marked = [
            [f"-{line}", f"+{indent}NEW"] if n == touched - first else [f" {line}"] for n, line in enumerate(quoted)
        ]
        hunk = "\n".join(line for each in marked for line in each)
        (file,) = parse_patch(f"*** Begin Patch\n*** Update File: f\n{hunk}\n*** End Patch")
        done = apply_hunks(text, file)
    # Blanks after the last line that is quoted may be outside the quotation.
    line = contents[touched]
    expected = [
        "".join(map(str.__add__, [*contents[:touched], f"{indent}NEW{blanks}", *contents[touched + 1 :]], ends))
        for blanks in ("", line[len(line.rstrip(" \t")) :])
    ]
    assert done == expected[0] or (touched == last and done == expected[1])


EDITS = {  # the text, what is quoted, its replacement, the text then
    "spaces for tabs": (
        "def f():\n\tif x:\n\t\ty()\n",
        "        y()",
        "        if z:\n            y()",
        "def f():\n\tif x:\n\t\tif z:\n\t\t\ty()\n",
    ),
    "two spaces for tabs": (
        "def f():\n\treturn 1\n",
        "  return 1\n",
        "  if x:\n    return 1\n",
        "def f():\n\tif x:\n\t\treturn 1\n",
    ),
    "tabs for spaces": (
        "if a:\n    if b:\n        c()\n",
        "\tif b:\n\t\tc()",
        "\tif b:\n\t\tc()\n\t\tif d:\n\t\t\te()",
        "if a:\n    if b:\n        c()\n        if d:\n            e()\n",
    ),
    "two for four": (
        "def f():\n    return 1\n",
        "def f():\n  return 1",
        "def f():\n  if x:\n    return 1",
        "def f():\n    if x:\n        return 1\n",
    ),
    "two for four in one line": (
        "def f():\n    return 1\n",
        "  return 1",
        "  if x:\n    return 1",
        "def f():\n    if x:\n        return 1\n",
    ),
    "fewer blanks in one line": (
        "class A:\n    def f():\n        return 1\n",
        "    return 1",
        "    if x:\n        return 1\n    return 2",
        "class A:\n    def f():\n        if x:\n            return 1\n        return 2\n",
    ),
    "plain quotes": (
        "x = f(“it’s”, 1)  # “ok”\n",
        'x = f("it\'s", 1)  # "ok"',
        'x = f("it\'s", 2)  # "ok"',
        "x = f(“it’s”, 2)  # “ok”\n",
    ),
    "escaped quotes": (
        'print("a\\n", "b")\n',
        'print(\\"a\\n\\", \\"b\\")',
        'print(\\"a\\n\\", \\"c\\n\\")',
        'print("a\\n", "c\\n")\n',
    ),
    "a line after the last": ("a\r\nb", "b", "b\nc", "a\r\nb\r\nc"),
    "a line between": ("a\r\nb\n", "a\nb", "a\nx\nb", "a\r\nx\r\nb\n"),
    "accents": ("cafe\u0301\n", "caf\u00e9", "caf\u00e9!", "cafe\u0301!\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_changes_what_it_quotes(edit: str) -> None:
    text, old, new, expected = EDITS[edit]
    assert replace_text(text, old, new).text == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_a_byte_order_mark_is_not_seen_and_stays(slot: Any) -> None:
    slot.write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert (await slot("read_file", path="a.txt"))["content"] == "1|one\n2|two"
    patch = "*** Begin Patch\n*** Update File: a.txt\n@@ one\n-two\n+2\n+3\n*** End Patch"
    assert (await slot("patch", mode="patch", patch=patch))["success"]
    assert (await slot("patch", path="a.txt", old_string="one\n2", new_string="1\n2"))["matched"] == "exact"
    assert (slot.path / "a.txt").read_bytes() == b"\xef\xbb\xbf1\r\n2\r\n3\r\n"
    await slot("write_file", path="a.txt", content="new\n")
    assert (slot.path / "a.txt").read_bytes() == b"\xef\xbb\xbfnew\n"
