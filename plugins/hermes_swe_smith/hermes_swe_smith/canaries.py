"""Puts canaries among a task's tests: tests of ours whose outcome is known before they run.

Code under test runs in pytest's process, so it can make tests pass that fail. Canaries show that it did. They lie in
the files of the real tests, at random places, under names made from the names there. There are three kinds:

- `twin`: a copy of a FAIL_TO_PASS test with one expected value changed, or with a false comparison at its end. It runs
  the code that the original runs. Whoever lets the failing tests of a function pass, lets it pass too.
- `fail`: compares two values that differ, and nothing else. It stands in for twins where there can be none.
- `pass`: compares two equal values, and nothing else.

A canary must not disturb the tests around it, so only tests are copied that share nothing with others, and files stay
as they are if they or their `conftest.py` files look at line numbers, at their own names or at outcomes.

Sent into the sandbox with `trees.py`; standard library only, Python >= 3.8.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable, Iterator

    Scope = ast.Module | ast.ClassDef
    Edit = tuple[int, int, int, bytes]
    """A line, the first column, the column behind the last, and the text that belongs there."""

TWIN, FAIL, PASS = "twin", "fail", "pass"

FILES_WITH_TWINS, OTHER_FILES = 2, 1
"""The most files of FAIL_TO_PASS tests that get canaries, and the most others, if those get none. For each test that
fails, pytest reads the whole file, so a few are enough."""
TWINS = 3
"""The most twins in a file."""

_MAX_BYTES = 1 << 20
_MAX_LINES = 120

_UNUSUAL = re.compile(rb"[\r\f\0]|\A\xef\xbb\xbf|\A(?:.*\n)?[ \t]*#.*coding[:=][ \t]*(?!utf-?8)", re.IGNORECASE)
_OWN_TEXT = re.compile(
    rb"lineno|line_number|\b(?:getsource\w*|findsource|currentframe|_getframe|linecache|traceback|inspect|snapshot|co_name"
    rb"|load_tests|__all__)\b|\b(?:globals|locals|vars|dir)\(|\bast\.parse|sys\.modules\[__name__\]"
)
"""What a test module may contain that looks at its own text or names."""
_OUTCOMES = re.compile(
    rb"pytest_runtest_(?:makereport|logreport|protocol)|pytest_exception_interact|shouldstop|shouldfail|incremental"
    rb"|pytest\.exit"
)
"""What a `conftest.py` may contain that acts on tests that fail."""
_AGAIN = re.compile(rb"--reruns|\bretries\b|--stepwise|--sw\b|--pdb|fail[_-]fast")
"""Options in a configuration that act on tests that fail."""
_WARNINGS_FAIL = re.compile(rb"filterwarnings\s*=\s*\[?\s*['\"]?\s*error|addopts.*-W[\s'\",]*error")
"""With these, what a failing test does not close fails another test."""
_NAMES = re.compile(rb"\b(?:def|class) (\w+)")
_LITERALS = re.compile(rb"""(?<=[\s(\[,=])(?:"[\w .-]{2,30}"|'[\w .-]{2,30}'|\d{1,5})(?=[\s,)\]])""")

_SAFE_FIXTURES = {"tmp_path", "tmpdir", "monkeypatch", "capsys", "caplog", "recwarn", "request"}
_SHARED = {
    *("open", "socket", "subprocess", "Popen", "threading", "Thread", "multiprocessing", "Process", "asyncio", "sleep"),
    *("environ", "putenv", "chdir", "sqlite3", "requests", "urlopen", "fork", "sys", "gc", "atexit", "signal"),
    *("logging", "cache_info", "cache_clear", "import_module", "reload", "pytester", "testdir", "runpytest"),
}
"""Names of what outlives a test, or is slow."""
_WORDS = ("again", "nested", "twice", "simple", "other", "mixed", "given", "plain")
_VALUES = (b'"alpha"', b'"left"', b"12", b"350", b"[1, 2, 3]", b"4096")
_VARIABLES = ("value", "result", "expected", "found", "actual")

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = (*_Function, ast.ClassDef)


class Canary(NamedTuple):
    """One canary."""

    node_id: str
    kind: str
    original: str
    """The node id of the test that a twin can't pass with; empty if it can't pass whatever else does."""


class Placed(NamedTuple):
    """What was done."""

    files: dict[str, bytes]
    """The new content of the files with canaries."""
    canaries: list[Canary]
    left_out: dict[str, str]
    """Why files have none."""


class _Unfit(Exception):
    """A file can't have canaries, for this reason."""


def place(
    files: dict[str, bytes], around: dict[str, bytes], listed: dict[str, list[str]], hidden: set[str], seeds: list[str]
) -> Placed:
    """Put canaries into some of the files.

    Args:
        files: the test modules.
        around: the `conftest.py` files and configurations of the project.
        listed: some node ids of tests in each of the modules.
        hidden: the FAIL_TO_PASS tests. Their modules come first, and they alone have twins.
        seeds: the first decides about places and kinds, the second about names and values.
    """
    layout, chance = random.Random(seeds[0]), random.Random(seeds[1])
    placed = Placed({}, [], {})
    project = _Project(around)
    first = [path for path in files if not hidden.isdisjoint(listed[path])]
    others = [path for path in files if path not in first]
    for paths, most in ((first, FILES_WITH_TWINS), (others, OTHER_FILES)):
        layout.shuffle(paths)
        for path in paths if not placed.files or paths is first else ():
            if len(placed.files) == most:
                break
            try:
                project.check(path)
                module = _Module(path, files[path], project, layout, chance)
                canaries = module.populate(listed[path], hidden)
                placed.files[path] = module.text()
            except _Unfit as unfit:
                placed.left_out[path] = str(unfit)
            except Exception as error:  # an odd module must not end the verification; the record says what happened
                placed.left_out[path] = f"{type(error).__name__}: {error}"
            else:
                placed.canaries.extend(canaries)
    chance.shuffle(placed.canaries)
    return placed


class _Project:
    """What is known of all of a project's tests."""

    def __init__(self, around: dict[str, bytes]) -> None:
        self.conftests = {path: text for path, text in around.items() if path.split("/")[-1] == "conftest.py"}
        settings = [text for path, text in around.items() if path not in self.conftests]
        self._repeats = any(map(_AGAIN.search, settings))
        self.copies = not any(map(_WARNINGS_FAIL.search, settings))

    def above(self, path: str) -> list[bytes]:
        """Return the `conftest.py` files that apply to a file."""
        return [text for place, text in self.conftests.items() if path.startswith(place[: -len("conftest.py")])]

    def check(self, path: str) -> None:
        """Refuse a file where a failing test would have consequences."""
        if self._repeats:
            raise _Unfit("the configuration acts on tests that fail")
        if any(map(_OUTCOMES.search, self.above(path))):
            raise _Unfit("a conftest.py acts on tests that fail")


class _Module:
    """A test module that gets canaries.

    Raises:
        _Unfit: it can't have any.
    """

    def __init__(self, path: str, data: bytes, project: _Project, layout: random.Random, chance: random.Random) -> None:
        if len(data) > _MAX_BYTES:
            raise _Unfit("it is too large")
        if _UNUSUAL.search(data) or not _is_utf8(data):  # where columns would be counted in another way
            raise _Unfit("its text is of an unusual form")
        if _OWN_TEXT.search(data):
            raise _Unfit("it may look at its own text or names")
        self.tree = _parsed(data)
        self._path = path
        self._lines = (data if data.endswith(b"\n") else data + b"\n").splitlines(keepends=True)
        self._layout, self._chance = layout, chance
        self._fixtures = _Fixtures([self.tree, *_trees(project.above(path))])
        self._copies = project.copies
        self._taken = {name.decode() for name in _NAMES.findall(data)}
        self._values = _LITERALS.findall(data)
        self._added: list[tuple[int, bytes]] = []

    def populate(self, node_ids: list[str], hidden: set[str]) -> list[Canary]:
        """Add canaries, and return them."""
        self._taken.update(node_id.partition("[")[0].split("::")[-1] for node_id in node_ids)
        tests = [test for test in map(self._test, node_ids) if test]
        if not tests:
            raise _Unfit("none of its tests is a function at its top level or in a class there")
        twins = self._twins([test for test in tests if test.node_id in hidden])
        canaries = twins + self._plain_ones(tests, [PASS] if twins else [FAIL, PASS])
        if not canaries:
            raise _Unfit("none of its tests has neighbours that could be canaries")
        return canaries

    def text(self) -> bytes:
        """Return the module with its canaries."""
        lines = list(self._lines)
        for index, block in sorted(self._added, key=lambda added: added[0], reverse=True):
            lines.insert(index, block)
        return b"".join(lines)

    def _test(self, node_id: str) -> _Test | None:
        name, bracket, parameters = node_id[len(self._path) + 2 :].partition("[")
        *classes, name = name.split("::")
        scope: Scope = self.tree
        for each in classes:
            inner = [node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == each]
            if not inner:
                return None
            scope = inner[-1]
        found = [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name]
        return _Test(node_id, scope, classes, found[-1], bracket + parameters) if found else None

    # --- twins -------------------------------------------------------------------------------------------------------

    def _twins(self, tests: list[_Test]) -> list[Canary]:
        by_function = {test.function: test for test in self._layout.sample(tests, len(tests))}
        twins: list[Canary] = []
        while by_function and len(twins) < TWINS:
            for function, test in list(by_function.items()):
                twin = self._twin(test) if len(twins) < TWINS and self._can_be_copied(function) else None
                if twin is None:
                    del by_function[function]
                else:
                    twins.append(twin)
        return twins

    def _can_be_copied(self, function: ast.FunctionDef) -> bool:
        """Return whether another run of a test changes nothing for others."""
        first, last = _extent(function)
        return (
            self._copies
            and last - first < _MAX_LINES
            and all(map(_is_harmless, function.decorator_list))
            and self._fixtures.are_safe(function)
        )

    def _twin(self, test: _Test) -> Canary | None:
        first, last = _extent(test.function)
        block = self._lines[first - 1 : last]
        name = self._name(test.function.name)
        changes = list(self._changes(test))
        change = self._layout.choice(changes) if changes else None
        edits = [self._renamed(test.function, name)] + ([change.edit] if change else [])
        for row, begin, end, text in sorted(edits, reverse=True):
            line = block[row - first]
            block[row - first] = line[:begin] + text + line[end:]
        if change is None:
            if test.function.body[0].lineno == test.function.lineno or _has(test.function, ast.Return):
                return None
            block += self._comparison(test.function, equal=False)
        early = (each for part in _evaluated_early(test.function) for each in ast.walk(part))
        needed = {each.id for each in early if isinstance(each, ast.Name)}
        if _has(test.function, ast.ClassDef):  # which may be registered under its name: first comes the original
            needed.add(test.function.name)
        self._insert(test.scope, b"".join(block), needed)
        node_id = self._node_id(test, name)
        if change is None:
            return Canary(node_id + test.bracket, TWIN, "")
        return Canary(node_id + change.bracket, TWIN, test.node_id)

    def _renamed(self, function: ast.FunctionDef, name: str) -> Edit:
        line = self._lines[function.lineno - 1]
        begin = line.find(function.name.encode(), function.col_offset + len("def "))
        return function.lineno, begin, begin + len(function.name.encode()), name.encode()

    def _changes(self, test: _Test) -> Iterator[_Change]:
        """Yield ways to make a test fail by one other value in it."""
        for statement in _always_run(test.function.body):
            for expected in _expected(statement):
                if isinstance(expected, ast.Name):
                    yield from self._other_parameter(test, expected.id)
                    continue
                for constant in _constants(expected):
                    edit = self._other_value(constant)
                    if edit:
                        yield _Change(edit, test.bracket)

    def _other_value(self, constant: ast.Constant) -> Edit | None:
        segment = self._segment(constant)
        other = _other(segment, self._chance) if segment else None
        if other is None:
            return None
        return constant.lineno, constant.col_offset, constant.end_col_offset or 0, other

    def _other_parameter(self, test: _Test, name: str) -> Iterator[_Change]:
        """Yield the change of a value that only one comparison uses, in the test's row of parameters."""
        uses = [node for node in ast.walk(test.function) if isinstance(node, ast.Name) and node.id == name]
        table = _table(test.function.decorator_list[0]) if len(test.function.decorator_list) == 1 else None
        if len(uses) != 1 or table is None or name not in table.names:
            return
        ids = [f"[{table.row_id(index)}]" for index in range(len(table.rows))]
        if ids.count(test.bracket) != 1:
            return
        index, column = ids.index(test.bracket), table.names.index(name)
        for constant in _constants(table.rows[index][column]):
            edit = self._other_value(constant)
            if edit is None:
                continue
            bracket = test.bracket
            if table.is_shown(index, column):
                cell = self._segment(table.rows[index][column])
                if cell is None:
                    continue
                start = table.rows[index][column].col_offset
                cell = cell[: edit[1] - start] + edit[3] + cell[edit[2] - start :]
                bracket = f"[{table.row_id(index, {column: ast.literal_eval(cell.decode())})}]"
            if bracket == test.bracket or bracket not in ids:
                yield _Change(edit, bracket)

    # --- plain ones --------------------------------------------------------------------------------------------------

    def _plain_ones(self, tests: list[_Test], kinds: list[str]) -> list[Canary]:
        """Add canaries of these kinds, if there is a test that shows that functions beside it have no parameters."""
        beside = [test for test in tests if not test.bracket]
        return [self._plain(self._layout.choice(beside), kind) for kind in kinds] if beside else []

    def _plain(self, beside: _Test, kind: str) -> Canary:
        name = self._name(beside.function.name)
        owner = b"self" if isinstance(beside.scope, ast.ClassDef) else b""
        returns = beside.function.returns
        typed = b" -> None" if isinstance(returns, ast.Constant) and returns.value is None else b""
        indent = self._indent(beside.function)
        head = indent + b"def " + name.encode() + b"(" + owner + b")" + typed + b":\n"
        self._insert(beside.scope, head + b"".join(self._comparison(beside.function, equal=kind == PASS)), set())
        return Canary(self._node_id(beside, name), kind, "")

    def _comparison(self, function: ast.FunctionDef, *, equal: bool) -> list[bytes]:
        """Return the lines that compare a variable with a value, in the style of a test."""
        first, last = _extent(function)
        indent = self._indent(function.body[-1])
        if function.body[-1].lineno == function.lineno:
            indent += b"    "
        value, other = self._pair()
        names = [each for each in _VARIABLES if each not in _names_in(function)]
        variable = self._chance.choice(names or ["some_value"]).encode()
        right = value if equal else other
        if any(b"self.assert" in line for line in self._lines[first - 1 : last]):
            check = b"self.assertEqual(" + variable + b", " + right + b")"
        else:
            check = b"assert " + variable + b" == " + right
        return [indent + variable + b" = " + value + b"\n", indent + check + b"\n"]

    def _indent(self, statement: ast.stmt) -> bytes:
        line = self._lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def _pair(self) -> tuple[bytes, bytes]:
        """Return the source of a value, and of another that differs from it."""
        known = self._chance.sample(self._values, min(20, len(self._values)))
        for value in [*known, *self._chance.sample(_VALUES, len(_VALUES))]:
            other = _other(value, self._chance)
            if other is not None:
                return value, other
        raise _Unfit("no value was found for a comparison")

    # --- names and places --------------------------------------------------------------------------------------------

    def _node_id(self, test: _Test, name: str) -> str:
        return "::".join([self._path, *test.classes, name])

    def _name(self, like: str) -> str:
        """Return a new name for a test, made from the names of the module's tests."""
        pool = sorted({word for name in self._taken for word in name.split("_")[1:] if len(word) > 2} | set(_WORDS))
        words, usual = like.split("_"), like.startswith("test")
        while True:
            new = list(words)
            last = max(1, len(words) - 1) if usual else 1  # others may be found by the ends of their names
            new.insert(self._chance.randint(1, last), self._chance.choice(pool))
            if usual and len(new) > 3 and self._chance.random() < 0.5:
                del new[self._chance.randint(1, len(new) - 2)]
            name = "_".join(new) if len(words) > 1 else like + self._chance.choice(pool).capitalize()
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _insert(self, scope: Scope, block: bytes, needed: set[str]) -> None:
        """Add a function at a random place of a scope, behind everything that is evaluated with its definition."""
        body = scope.body
        first = 1 + next(index for index, node in enumerate(body) if isinstance(node, _Function))
        defining = [index for index, node in enumerate(body) if needed and needed & _bound(node)]
        first = max([first, *(index + 1 for index in defining)])
        gaps = [index for index in range(first, len(body)) if isinstance(body[index], _Definition)]
        index = self._layout.choice([*gaps, len(body)])
        _parsed(block if isinstance(scope, ast.Module) else b"class _:\n" + block)
        blank = b"\n" * (2 if isinstance(scope, ast.Module) else 1)
        if index == len(body):
            self._added.append((body[-1].end_lineno or 0, blank + block))
            return
        line = _extent(body[index])[0] - 1
        while self._lines[line - 1].lstrip().startswith(b"#"):
            line -= 1
        self._added.append((line, block + blank))

    def _segment(self, node: ast.AST) -> bytes | None:
        """Return the text of an expression that is in one line."""
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not line or line != end:
            return None
        return self._lines[line - 1][node.col_offset : node.end_col_offset]  # type: ignore[attr-defined]


class _Test(NamedTuple):
    """A listed test, and the function that it is."""

    node_id: str
    scope: Scope
    classes: list[str]
    function: ast.FunctionDef
    bracket: str
    """Its parameters, as at the end of the node id."""


class _Change(NamedTuple):
    edit: Edit
    bracket: str


class _Fixtures:
    """The fixtures that the functions of a module can use."""

    def __init__(self, modules: Iterable[ast.Module]) -> None:
        self._functions: dict[str, list[ast.FunctionDef]] = {}
        for function in (each for module in modules for each in _functions(module)):
            if any("fixture" in _names_in(decorator) for decorator in function.decorator_list):
                self._functions.setdefault(function.name, []).append(function)

    def are_safe(self, function: ast.FunctionDef, *, depth: int = 0) -> bool:
        """Return whether a function, and all fixtures that it uses, share nothing with others."""
        arguments = function.args
        unusual = arguments.vararg or arguments.kwarg or arguments.defaults or arguments.kwonlyargs or depth > 5
        if unusual or any(_SHARED & _names_in(part) for each in function.body for part in _not_restored(each)):
            return False
        if _has(function, ast.Global):
            return False
        given = {name for each in function.decorator_list for name in _parametrized(each)} | {"self"} | _SAFE_FIXTURES
        return all(name.arg in given or self._is_safe(name.arg, depth + 1) for name in arguments.args)

    def _is_safe(self, name: str, depth: int) -> bool:
        found = self._functions.get(name, [])
        lasting = any("scope" in _keywords(each) for function in found for each in function.decorator_list)
        return bool(found) and not lasting and all(self.are_safe(function, depth=depth) for function in found)


class _Table(NamedTuple):
    """What `pytest.mark.parametrize` was given: names, and rows of expressions."""

    names: list[str]
    rows: list[list[ast.expr]]

    def row_id(self, index: int, changed: dict[int, Any] | None = None) -> str:
        """Return the id that pytest gives a row, perhaps with other values in some columns."""
        shown = []
        for column, name in enumerate(self.names):
            if self.is_shown(index, column):
                value = ast.literal_eval(self.rows[index][column])
                shown.append(str((changed or {}).get(column, value)))
            else:
                shown.append(f"{name}{index}")
        return "-".join(shown)

    def is_shown(self, index: int, column: int) -> bool:
        """Return whether the id contains the value."""
        try:
            value = ast.literal_eval(self.rows[index][column])
        except ValueError:
            return False
        return value is None or isinstance(value, (str, int, float))


def _table(decorator: ast.expr) -> _Table | None:
    if not isinstance(decorator, ast.Call) or len(decorator.args) != 2 or decorator.keywords:
        return None
    names, rows = _parametrized(decorator), decorator.args[1]
    if not names or not isinstance(rows, (ast.List, ast.Tuple)):
        return None
    if len(names) == 1:
        return _Table(names, [[row] for row in rows.elts])
    cells = [row.elts for row in rows.elts if isinstance(row, (ast.List, ast.Tuple)) and len(row.elts) == len(names)]
    return _Table(names, cells) if len(cells) == len(rows.elts) else None


def _parametrized(decorator: ast.expr) -> list[str]:
    """Return the names of the parameters."""
    names = decorator.args[0] if isinstance(decorator, ast.Call) and decorator.args else None
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return [name.strip() for name in names.value.split(",") if name.strip()]
    if isinstance(names, (ast.List, ast.Tuple)):
        return [each.value for each in names.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return []


def _is_harmless(decorator: ast.expr) -> bool:
    """Return whether a decorator leaves nothing behind when its test has run."""
    function = decorator.func if isinstance(decorator, ast.Call) else None
    marks = isinstance(function, ast.Attribute) and function.attr in ("parametrize", "skipif")
    return marks or _is_restoring(decorator)


def _is_restoring(node: ast.AST) -> bool:
    """Return whether it is a call of `patch.dict`, which undoes its changes: of `os.environ`, for example."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "dict"
        and "patch" in _names_in(node.func)
    )


def _not_restored(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names and attributes of a statement, except in calls that undo their changes."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield node
    for child in ast.iter_child_nodes(node):
        if not _is_restoring(child):
            yield from _not_restored(child)


def _keywords(decorator: ast.expr) -> list[str | None]:
    return [keyword.arg for keyword in decorator.keywords] if isinstance(decorator, ast.Call) else []


def _always_run(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and of its `with` blocks."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.With):
            yield from _always_run(statement.body)


def _expected(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement expects: expressions, one of which must have just this value for the test to pass."""
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compared = statement.test
        sides = [compared.left, *compared.comparators] if [*map(type, compared.ops)] == [ast.Eq] else []
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        equal = isinstance(function, ast.Attribute) and function.attr in ("assertEqual", "assertEquals")
        sides = statement.value.args[:2] if equal else []
    elif isinstance(statement, ast.With):
        return [each for item in statement.items for each in _matched(item.context_expr)]
    else:
        sides = []
    return [side for side in sides if isinstance(side, ast.Name)] + [
        side for side in sides if _is_display(side) and not all(map(_is_display, sides))
    ]


def _matched(context: ast.expr) -> list[ast.expr]:
    """Return the text that an expected exception must have, if it is no regular expression."""
    if not isinstance(context, ast.Call):
        return []
    texts = [keyword.value for keyword in context.keywords if keyword.arg == "match"]
    return [
        text
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and re.fullmatch(r"[\w ,'-]+", text.value)
    ]


def _is_display(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.Set, ast.Dict))


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constants of a list, tuple, set or dictionary, of those inside it, or the one that it is."""
    if isinstance(node, ast.Constant):
        yield node
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _constants(node.operand)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for each in node.elts:
            yield from _constants(each)
    elif isinstance(node, ast.Dict):
        for each in node.values:
            yield from _constants(each)


def _other(value: bytes, chance: random.Random) -> bytes | None:
    """Return the source of another value of the same kind that looks alike, or None."""
    text = value.decode()
    if text in ("True", "False"):
        return b"False" if text == "True" else b"True"
    before = _value(text)
    if before is None or "\\" in text:
        return None
    start = text.index(text[-1]) if isinstance(before, (str, bytes)) else -1
    places = [index for index in range(start + 1, len(text)) if text[index].isascii() and text[index].isalnum()]
    for index in chance.sample(places, len(places)):
        letter = text[index]
        kind = "0123456789" if letter.isdigit() else "abcdefghijklmnopqrstuvwxyz"
        other = chance.choice([each for each in kind if each != letter.lower()])
        new = text[:index] + (other.upper() if letter.isupper() else other) + text[index + 1 :]
        after = _value(new)
        if type(after) is type(before) and after != before:
            return new.encode()
    return None


def _value(text: str) -> Any:
    """Return the value of a literal of a simple kind, or None."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return value if type(value) in (str, bytes, int, float) else None


def _functions(scope: Scope) -> Iterator[ast.FunctionDef]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _extent(node: ast.stmt) -> tuple[int, int]:
    """Return the first line, with decorators, and the last."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]), node.end_lineno or 0


def _evaluated_early(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield what is evaluated when the function is defined."""
    yield from function.decorator_list
    yield from (argument.annotation for argument in function.args.args if argument.annotation)
    if function.returns:
        yield function.returns


def _bound(statement: ast.stmt) -> set[str]:
    """Return all names that a statement may define."""
    if isinstance(statement, _Definition):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, _Definition):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    return any(isinstance(each, kind) for each in ast.walk(node))


def _names_in(node: ast.AST) -> set[str]:
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
    return found


def _trees(texts: Iterable[bytes]) -> Iterator[ast.Module]:
    for text in texts:
        try:
            yield _parsed(text)
        except _Unfit:
            continue


def _parsed(data: bytes) -> ast.Module:
    """Return a module's tree.

    Raises:
        _Unfit: this Python can't read it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Unfit(f"this Python can't read it: {type(error).__name__}") from error
