"""Each kind of bug changes what it says, leaves every other byte alone, and can be undone."""

from __future__ import annotations

import ast
import io
import random
import tokenize

import pytest
from hermes_make_tasks.kinds import kinds, mutations
from hermes_make_tasks.sources import Edit, Unreadable, apply_edits, meaning, read_source, unbound
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = {
    "op-change": ("return a + b", ["return a - b"]),
    "op-drop": ("return not a", ["return a"]),
    "op-swap": ("return (a + 1) - b", ["return b - (a + 1)"]),
    "op-shorten": ("return a and b and c", ["return a and c", "return a and b", "return b and c"]),
    "condition-invert": ("return 1 if a is None else 2", ["return 1 if a is not None else 2"]),
    "branch-swap": ("if a:\n    b()\nelse:  # or\n    c()", ["if a:\n    c()\nelse:  # or\n    b()"]),
    "remove-branch": ("if a:\n    b()\nelif c:\n    d()\nelse:\n    e()", ["if a:\n    b()\nelse:\n    e()"]),
    "loop-control": ("for x in a:\n    break", ["for x in a:\n    continue"]),
    "remove-assignment": ("b = 1  # one\nreturn b", ["return b"]),
    "remove-call": ("b()\nreturn a", ["return a"]),
    "remove-loop": ("for x in a:\n    b()\nreturn a", ["return a"]),
    "remove-return": ("if a:\n    return 1\nreturn 2", ["if a:\n    return\nreturn 2", "if a:\n    return 1\n"]),
    "remove-raise": ("if a:\n    raise b\nreturn 1", ["if a:\n    pass\nreturn 1"]),
    "remove-wrapper": ("try:\n    b()\n\n    # why\n    c(\n  1)\nexcept a:\n    d()", ["b()\n\n# why\nc(\n  1)\n"]),
    "constant-change": ("return a[1], 2.5, True", ["return a[2], 2.5, True", "return a[0], 2.5, True"]),
    "bound-shift": ("return a[b:]", ["return a[b + 1:]"]),
    "call-reorder": ("b = a(1)\nc(b)\nreturn b", ["c(b)\nb = a(1)\nreturn b"]),
    "argument-swap": ("return f(a, (b), *c)", ["return f((b), a, *c)"]),
    "argument-drop": ("return f(a, b=b, c=c)", ["return f(a, c=c)", "return f(a, b=b)"]),
    "name-change": ("return a", ["return b"]),
    "except-narrow": ("try:\n    b()\nexcept (c, d):\n    e()", ["try:\n    b()\nexcept (c,):\n    e()"]),
}


def changed(text: str, kind: str) -> list[str]:
    source = read_source("m.py", text.encode())
    found = [each for function in source.functions for each in mutations(source, function, [kind])]
    assert {each.kind for each in found} <= {kind}
    return [source.apply_edits(each.edits) for each in found]


def function(body: str) -> str:
    return "def f(a, b, c):\n" + "".join(f"    {line}".rstrip() + "\n" for line in body.split("\n"))


@pytest.mark.parametrize("kind", kinds())
def test_a_kind_does_what_it_says(kind: str) -> None:
    body, expected = EXAMPLES[kind]
    assert set(map(function, expected)) <= {
        text if text.endswith("\n") else text + "\n" for text in changed(function(body), kind)
    } | {text + "\n" for text in changed(function(body), kind)}


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def f(a):\n    b = a\n    return b\n", set()),
        ("def f(a):\n    return b\n", {"b"}),
        ("import os\nfrom x import y as b\ndef f(): return b, os, len, g\ndef g(): pass\n", set()),
        ("def f():\n    global c\n    c = 1\ndef g(): return c\n", set()),
        ("def f(a):\n    def g(): return a, b\n    b = 1\n    return [x for x in g()]\n", set()),
        ("class A:\n    x = 1\n    def f(self): return self.x, self.f, self.y\n", {"self.y"}),
        ("class A:\n    def __init__(self): self.y = 1\n    def f(self): return self.y\n", set()),
    ],
)
def test_names_that_nothing_binds(text: str, missing: set[str]) -> None:
    assert unbound(text, "m.py") == missing


def test_functions_that_differ_in_names_and_constants_have_one_shape() -> None:
    one, two, three = read_source(
        "m.py",
        b"def a(x):\n    if x > 1:\n        return 'a'\n\n\ndef b(y):\n    if y > 2:\n        return 'b'\n\n\n"
        b"def c(x):\n    if x < 1:\n        return 'a'\n",
    ).functions
    assert one.shape == two.shape != three.shape


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("return a", 1),
        ("return a < b < c", 3),
        ("if a:\n    return b\nelif c:\n    return 1", 3),
        ("for x in a:\n    while b and c or a: pass", 5),
        ("try:\n    a()\nexcept b:\n    c()\nexcept c:\n    d()", 3),
    ],
)
def test_complexity_is_counted_as_swe_smith_does(body: str, complexity: int) -> None:
    [found] = read_source("m.py", function(body).encode()).functions
    assert found.complexity == complexity


AWKWARD = '''\
import os; VALUE = 1

@decorated(lambda x: x + 1)
async def fetch(self, *parts, limit=10, deep: int = 0) -> "int | None":
\t"""Say > what, not 1 + 1."""
\tasync with self.lock, open(parts[0]) as file:
\t\tif limit > 0 and not deep or (limit == -deep): return [part async for part in file if part != "ü"]
\ttry:
\t\ttotal = (
\t\t\tlimit
\t\t\t- deep  # less
\t\t) * 2
\texcept (ValueError, KeyError) as error:
\t\traise RuntimeError(f"{limit - 1} of {deep!r}", "a" "b") from error
\telse:
\t\twhile total: total -= 1; continue
\tfinally:
\t\tself.close(total, limit, key="größe", other=None)
\t\tself.flush()

\tdef inner(x, y=(1, 2)):
\t\tnonlocal total
\t\tmatch x:
\t\t\tcase [1, *rest] if rest and y:
\t\t\t\treturn rest[y[0]:len(rest)]
\t\t\tcase {"a": b}:
\t\t\t\treturn b if b else -b
\t\t\tcase _:
\t\t\t\tpass
\t\tfor i in range(len(y)):
\t\t\tif i not in y: break
\t\telse:
\t\t\treturn i ** 2 ** y
\treturn inner(total, y=total) or \\
\t\tVALUE
class Under(Base):
\tdef method(self): """Text."""; return super().method(1)[::2]
'''

TEXTS = {
    "tabs": AWKWARD.encode(),
    "CRLF": AWKWARD.replace("\n", "\r\n").encode(),
    "latin-1": b"# -*- coding: latin-1 -*-\n" + AWKWARD.encode("latin-1"),
    "BOM": b"\xef\xbb\xbf" + AWKWARD.encode(),
    "no end of line": AWKWARD.rstrip("\n").encode(),
    "form feed": AWKWARD.replace("\n@decorated", "\n\x0c\n@decorated").encode(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_change_of_an_awkward_source_parses_and_can_be_undone(name: str) -> None:
    data = TEXTS[name]
    source = read_source("m.py", data)
    before, tried, sound = meaning(source.text, "m.py"), 0, set()
    for function in source.functions:
        for mutation in mutations(source, function, list(kinds())):
            tried += 1
            text = source.apply_edits(mutation.edits)
            assert apply_edits(text, undoing(source.text, mutation.edits)) == source.text
            assert source.encode(source.apply_edits([])) == data
            try:
                differs = meaning(text, "m.py") != before
            except Unreadable:
                continue
            if differs:
                sound.add(mutation.kind)
                ast.parse(source.encode(text))  # as Python reads the file
                assert source.encode(text) != data
    assert tried > 60
    assert len(sound) >= 20, set(kinds()) - sound


def undoing(text: str, edits: tuple[Edit, ...]) -> list[Edit]:
    """The edits of the changed text that give the first text again."""
    found, moved = [], 0
    for edit in sorted(edits):
        start = edit.start + moved
        found.append(Edit(start, start + len(edit.text), text[edit.start : edit.end]))
        moved += len(edit.text) - (edit.end - edit.start)
    return found


NAMES = st.sampled_from(["a", "b", "x.y", "f(a)", "a[0]", "(a)", "-a", "1", "'t'", "(not a)", "(a if b else x)"])
OPERATORS = st.sampled_from(["+", "-", "*", "//", "<", ">=", "==", "in", "not in", "is", "and", "or", "**"])
EXPRESSIONS = st.recursive(
    NAMES,
    lambda inner: (
        st.builds("({} {} {})".format, inner, OPERATORS, inner)
        | st.builds("f({}, k={})".format, inner, inner)
        | st.builds("{} {} {}".format, NAMES, OPERATORS, inner)
    ),
    max_leaves=6,
)
SIMPLE = st.one_of(
    st.builds("a = {}".format, EXPRESSIONS),
    st.builds("f({})".format, EXPRESSIONS),
    st.builds("return {}".format, EXPRESSIONS),
    st.just("raise a"),
    st.just("a += 1  # more"),
)


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for text in lines for line in text.split("\n")]


BLOCKS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(
            lambda test, body, other: "\n".join(
                [f"if {test}:", *indented(body), *(["else:", *indented(other)] if other else [])]
            ),
            EXPRESSIONS,
            st.lists(inner, min_size=1, max_size=2),
            st.lists(inner, max_size=2),
        ),
        st.builds(lambda body: "\n".join(["for a in b:", *indented(body)]), st.lists(inner, min_size=1, max_size=2)),
        st.builds(
            lambda body: "\n".join(["try:", *indented(body), "except (A, B):", "    pass"]),
            st.lists(inner, min_size=1, max_size=2),
        ),
    ),
    max_leaves=5,
)


@given(st.lists(BLOCKS, min_size=1, max_size=4), st.sampled_from(["\n", "\r\n"]), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_change_of_any_function_parses_and_can_be_undone(blocks: list[str], line_end: str, seed: int) -> None:
    text = "\n".join(["def f(a, b, *c, k=1):", *indented(blocks), ""]).replace("\n", line_end)
    source = read_source("m.py", text.encode())
    found = [each for function in source.functions for each in mutations(source, function, list(kinds()))]
    for mutation in random.Random(seed).sample(found, min(len(found), 12)):
        changed = source.apply_edits(mutation.edits)
        assert apply_edits(changed, undoing(text, mutation.edits)) == text
        assert changed.count("\n") == changed.count("\r\n") or line_end == "\n"
        ast.parse(changed)
        list(tokenize.generate_tokens(io.StringIO(changed).readline))


def test_equal_code_has_an_equal_meaning() -> None:
    one = "def f(a):\n    # why\n    return (a + 1)\n"
    assert meaning(one, "m.py") == meaning("def f(a): return a+1\n", "m.py")
    assert meaning("x = 1\n", "m.py") != meaning("x = 1.0\n", "m.py")
    assert meaning("x = 1\n", "m.py") != meaning("x = True\n", "m.py")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"def f(:\n", "can't be parsed"),
        (b"x = '\x00'\n", "null bytes"),
        (b"# coding: nothing\n", "can't be decoded"),
        (b"# coding: idna\nx = 1\n", "is in idna"),
        (b"x = '\xff'\n", "can't be decoded"),
        (b"x = 1\r# old\r", "carriage returns"),
        (b"x = " + b"(" * 300 + b")" * 300, "can't be parsed"),
        (b"x = " + b"-" * 5000 + b"1", "can|deep"),
        (b"x = " + b"[" * 150 + b"]" * 150, "deep"),
        (b"x = a" + b".a" * 400, "deep"),
        (b"#" * (1 << 20) + b"\n", "more than"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_source_that_can_not_be_used_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=f"odd.py.*{reason}|{reason}"):
        read_source("odd.py", data)
