"""Makes short programs of failing tests: the steps that a user would take, up to the statement that fails."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hermes_make_tasks import example_run
from hermes_make_tasks.sources import DEFINITIONS, Edit, Function, SourceFile, Unreadable, apply_edits, parse_source

MOST_LINES, MOST_CHARS = 40, 2500
"""Maximum size of an example in lines and characters. Longer ones are left out, not cut."""

_BUILTINS = {*dir(builtins), "__name__"}


@dataclass(frozen=True)
class FailedTest:
    """A failed test, as the survey sees it."""

    node_id: str
    line: int
    """The line of the test's function that failed, or 0 if it is not known."""
    values: Mapping[str, str]
    """The test's arguments, as code."""
    error: str
    """The exception's type and message."""
    session: str = ""
    """For a doctest: its examples, up to the example that failed."""


def examples_of(source: SourceFile, failed: FailedTest) -> Iterator[str]:
    """Yield programs with the steps of a test up to its failure: first a program with only the needed steps, then a
    program with all of them."""
    path, _, rest = failed.node_id.partition("::")
    name = re.sub(r"\[.*", "", rest).replace("::", ".")
    function = next((each for each in source.functions if each.name == name), None)
    if function is None or isinstance(function.node, ast.AsyncFunctionDef) or failed.line not in function.lines:
        return
    parameters = {each.arg for each in ast.walk(function.node.args) if isinstance(each, ast.arg)}
    if not parameters - {"self"} <= set(failed.values):
        return
    reached = [statement for statement in function.node.body if statement.lineno <= failed.line]
    steps = [(statement, *_as_plain(source, statement)) for statement in reached if not _is_text(statement)]
    hidden = {function.node.name, PurePosixPath(path).stem}
    for chosen in (_find_needed(steps), steps):
        lines = [f"{key} = {failed.values[key]}" for key in sorted(parameters - {"self"})]
        body = "\n".join([*lines, *(text for _, _, text in chosen)])
        code = _with_globals(source, body)
        if code is not None and not hidden & _names(parse_source(code, "example")):
            yield code


_BINDING = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)

Step = tuple[ast.stmt, ast.stmt, str]
"""A statement of the test, the same statement without unittest's methods, and the text of the latter."""


def _find_needed(steps: Sequence[Step]) -> list[Step]:
    """Return the last step, and the earlier steps that bind names that it uses, directly or indirectly."""
    needed, chosen = _names(steps[-1][1]), [steps[-1]]
    for step in reversed(steps[:-1]):
        simple = isinstance(step[1], _BINDING) and _find_bindings(step[1])
        if not _is_claim(step[1], needed) and (simple or _names(step[1])) & needed:
            chosen.insert(0, step)
            needed |= _names(step[1])
    return chosen


def _is_claim(statement: ast.stmt, needed: set[str]) -> bool:
    """Return whether a statement only checks something: it is an assertion, or expects an exception."""
    expects = isinstance(statement, ast.With) and "raises" in ast.unparse(statement.items[0].context_expr).split("(")[0]
    return isinstance(statement, ast.Assert) or (expects and not _find_bindings(statement) & needed)


def _with_globals(source: SourceFile, body: str) -> str | None:
    """Return the body, preceded by the definitions and imports of its module that it uses; None if that is impossible
    or too long."""
    try:
        tree = parse_source(body, "example")
    except Unreadable:
        return None
    missing = _names(tree) - _find_bindings(tree) - _BUILTINS
    before: dict[int, str] = {}
    stars = {}
    for index, statement in reversed([*enumerate(source.tree.body)]):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            stars[index] = ast.unparse(statement)
        elif (
            found := (_find_bindings(statement) if not isinstance(statement, DEFINITIONS) else {statement.name})
            & missing
        ):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                kept = [each for each in statement.names if (each.asname or each.name.split(".")[0]) in found]
                if getattr(statement, "level", 0):
                    return None
                before[index] = ast.unparse(_with_names(statement, kept))
            else:
                before[index] = f"\n{_text(source, statement)}\n"
                missing |= _names(statement) - _find_bindings(statement) - _BUILTINS
            missing -= found
    if "pytest" in missing:
        before[-1] = "import pytest"
        missing.discard("pytest")
    if missing:
        before.update(stars)
    above = [before[index] for index in sorted(before)]
    code = "\n".join([*above, *([""] if above else []), body])
    if (missing and not stars) or len(code) > MOST_CHARS or code.count("\n") >= MOST_LINES:
        return None
    return code


def _with_names(statement: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import(names)
    return ast.ImportFrom(statement.module, names, statement.level)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _find_bindings(tree: ast.AST) -> set[str]:
    """Return the names that code binds, those of its functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _text(source: SourceFile, node: ast.stmt) -> str:
    """Return a statement's text without its indentation. Lines that begin within a string stay as they are."""
    span = source.whole_lines(node)
    if span is None:
        return ast.unparse(node)
    starts = {start for start in source.starts if span[0] <= start < span[1]}
    for token in source.tokens_in(*span):
        starts -= {*range(token.start + 1, token.end)}
    edits = []
    for start in sorted(starts):
        end = start
        while end < start + node.col_offset and source.text[end] in " \t":
            end += 1
        edits.append(Edit(start, end, ""))
    return apply_edits(source.text[: span[1]], edits)[span[0] :].rstrip()


# ---------------------------------------------------------------------- unittest


_COMPARED = {
    **dict.fromkeys(("Equal", "Equals", "DictEqual", "ListEqual", "TupleEqual", "SetEqual", "MultiLineEqual"), ast.Eq),
    **{"NotEqual": ast.NotEq, "Is": ast.Is, "IsNot": ast.IsNot, "In": ast.In, "NotIn": ast.NotIn},
    **{"Greater": ast.Gt, "GreaterEqual": ast.GtE, "Less": ast.Lt, "LessEqual": ast.LtE},
}


def _as_plain(source: SourceFile, statement: ast.stmt) -> tuple[ast.stmt, str]:
    """Return a statement without the methods of `unittest.TestCase`, and its text."""
    text = ast.unparse(statement)
    plain = ast.fix_missing_locations(_PlainValue().visit(parse_source(text, "example"))).body[0]
    changed = ast.unparse(plain)
    return plain, _text(source, statement) if changed == text else changed


class _PlainValue(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Make `self.assertEqual(a, b)` an `assert a == b`, and translate other assertions in the same way."""
        name, given = _read_assertion(node.value)
        if name in _COMPARED and len(given) >= 2:
            return ast.Assert(ast.Compare(given[0], [_COMPARED[name]()], [given[1]]))
        if name in ("True", "False") and given:
            return ast.Assert(given[0] if name == "True" else ast.UnaryOp(ast.Not(), given[0]))
        if name in ("IsNone", "IsNotNone") and given:
            operator = ast.Is() if name == "IsNone" else ast.IsNot()
            return ast.Assert(ast.Compare(given[0], [operator], [ast.Constant(None)]))
        if name == "IsInstance" and len(given) >= 2:
            return ast.Assert(ast.Call(ast.Name("isinstance", ast.Load()), [*given[:2]], []))
        if name == "Raises" and len(given) >= 2:
            assert isinstance(node.value, ast.Call)
            call = ast.Expr(ast.Call(given[1], given[2:], node.value.keywords))
            return ast.With([ast.withitem(_raises(given[:1], []))], [call])
        return node

    def visit_withitem(self, node: ast.withitem) -> ast.withitem:
        """Make `self.assertRaises(E)` a `pytest.raises(E)`."""
        name, given = _read_assertion(node.context_expr)
        if name in ("Raises", "RaisesRegex") and given:
            match = [ast.keyword("match", given[1])] if len(given) > 1 else []
            node.context_expr = _raises(given[:1], match)
        return node


def _read_assertion(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return the X and the arguments of `self.assertX(…)`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.assert"):
        return ast.unparse(node.func).removeprefix("self.assert"), node.args
    return "", []


def _raises(given: list[ast.expr], match: list[ast.keyword]) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name("pytest", ast.Load()), "raises", ast.Load()), given, match)


# ---------------------------------------------------------------------- descriptions of failures


@dataclass(frozen=True)
class ExampleRun:
    """The outcome of an example."""

    error: str = ""
    """The exception's type and message; empty if the example ran to its end."""
    line: int = 0
    """The last line of the example that ran."""
    values: tuple[str, ...] = ()
    """The values of the last assertion's subjects."""

    @property
    def kind(self) -> str:
        """Return the exception's type."""
        return self.error.partition(":")[0]


def names_a_missing_name(error: str) -> bool:
    """Return whether an exception says that a name does not exist."""
    kind, _, message = error.partition(": ")
    missing = kind == "AttributeError" and "has no attribute" in message and not message.startswith("'NoneType'")
    return kind in ("NameError", "UnboundLocalError") or missing


def describe_failure(code: str, ran: ExampleRun, clean: ExampleRun) -> tuple[str, str]:
    """Return a title, and a text with the actual and the expected behaviour."""
    tree = parse_source(code, "example")
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= ran.line]
    statement = max(inside, key=lambda node: (node.lineno, node.col_offset), default=tree.body[-1])
    called = _find_call(tree, statement)
    if "DID NOT RAISE" in ran.error:
        expected = re.sub(r".*[. ]|'>", "", ran.error)
        done = ast.unparse(statement.body[-1]) if isinstance(statement, ast.With) else ""
        called = f"`{done}`" if 0 < len(done) <= 70 and "\n" not in done else called
        return f"{called} does not raise {expected}", f"Nothing is raised. It should raise `{expected}`."
    if not isinstance(statement, ast.Assert) or ran.kind != "AssertionError":
        verb = "does not do what it should" if ran.kind in ("AssertionError", "Failed") else f"raises {ran.kind}"
        return (
            f"{_find_call(tree, statement)} {verb}",
            f"It ends with\n\n{_block(ran.error)}\n\nand should run to its end.",
        )
    named = [f"`{ast.unparse(each)}`" for each in example_run.subjects(statement.test)]
    said = [*zip(named, ran.values, clean.values, strict=False)]
    wrong = next((each for each in said if each[1] != each[2]), None)
    if wrong is None:
        return f"{called} does not do what it should", "The assertion does not hold."
    return (
        f"{called if called.endswith(')`') else wrong[0]} gives a wrong result",
        f"{wrong[0]} is\n\n{_block(wrong[1])}\n\nand should be\n\n{_block(wrong[2])}",
    )


def describe_doctest_failure(failed: FailedTest) -> tuple[str, str, str]:
    """Return a title, the session, and a text with the actual behaviour, for a doctest that failed."""
    session, _, got = failed.session.partition("\0")
    typed = re.findall(r"^>>> (.*)", session, re.MULTILINE)[-1]
    return (
        f"`{typed}` gives a wrong result",
        session.rstrip(),
        f"In place of the last result comes\n\n{_block(got or failed.error)}",
    )


def _find_call(tree: ast.Module, node: ast.AST, depth: int = 3) -> str:
    """Return the code that a title names: the outermost call in a statement; or the call in a statement that binds its
    names; or else the statement itself."""
    node = node.body[-1] if isinstance(node, ast.With) else node
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    named = [(ast.unparse(each), ast.unparse(each.func)) for each in calls]
    for whole, function in named:
        if function not in _BUILTINS and not function.startswith("pytest."):
            return f"`{whole}`" if len(whole) <= 70 else f"`{function}(…)`"
    binding = [
        each for each in tree.body if isinstance(each, ast.Assign | ast.With) and _find_bindings(each) & _names(node)
    ]
    found = [_find_call(tree, each, depth - 1) for each in binding if depth and each is not node]
    for name in found:
        if name.endswith(")`"):
            return name
    whole = ast.unparse(node)
    return f"`{whole}`" if len(whole) <= 70 and "\n" not in whole else "The last line"


def _block(text: str) -> str:
    return textwrap.indent(text, "    ")


def gives_away(text: str, function: Function, lines: tuple[int, int]) -> bool:
    """Return whether a text contains a private name, or three words in a row from the changed place, so that a search
    would find it."""
    if re.search(r"(?<!\w)_[a-z]\w*", text):
        return True
    text = " ".join(text.replace("\\", "").split())
    for node in ast.walk(function.node):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and lines[0] - 2 <= node.lineno <= lines[1] + 2
        ):
            words = node.value.split()
            if any(" ".join(words[start : start + 3]) in text for start in range(len(words) - 2)):
                return True
    return False
