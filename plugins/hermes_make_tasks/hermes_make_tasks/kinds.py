"""The kinds of bugs. Each kind finds the places of a function that it can change, and yields the edits of the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hermes_make_tasks.sources import DEFINITIONS, Edit, Function, SourceFile, Span, nested_blocks


@dataclass(frozen=True)
class Mutation:
    """A change of one function."""

    kind: str
    edits: tuple[Edit, ...]
    lines: tuple[int, int]
    """The first and the last line that run whenever the changed code does. Tests that run none of these lines can't
    notice the change."""


class FunctionSite:
    """A function of a source, with the queries that the kinds of bugs need."""

    def __init__(self, source: SourceFile, function: Function) -> None:
        self.source = source
        self.function = function
        self.blocks = [*_blocks(function.node)]
        self.statements = [statement for block in self.blocks for statement in block]

    def text(self, span: Span) -> str:
        """Return the text of a place."""
        return self.source.text[span[0] : span[1]]

    def expressions(self) -> Iterator[tuple[ast.stmt, ast.expr]]:
        """Yield every expression with its statement, except for expressions in annotations, in f-strings (whose places
        are not known in every Python), and in definitions inside this function."""
        for statement in self.statements:
            yield from ((statement, each) for each in _expressions(statement))

    def inner(self, node: ast.expr, parent: ast.expr) -> Span:
        """Return the place of a part of an expression, with its parentheses."""
        return self.source.with_parentheses(node, self.source.span(parent))

    def argument(self, node: ast.expr | ast.keyword, call: ast.Call) -> Span:
        """Return the place of an argument of a call, with its own parentheses."""
        end = self.source.span(call)[1]
        opening = next(
            token for token in self.source.tokens_in(self.source.span(call.func)[1], end) if token.string == "("
        )
        inside = (opening.end, end - 1)
        if not isinstance(node, ast.keyword):
            return self.source.with_parentheses(node, inside)
        return self.source.span(node)[0], self.source.with_parentheses(node.value, inside)[1]

    def operator(self, left: ast.expr, right: ast.expr, *words: str) -> Span | None:
        """Return the place of the operator between two operands."""
        start, end = self.source.span(left)[1], self.source.span(right)[0]
        found = self.source.tokens_in(start, end)
        for index in range(len(found) - len(words) + 1):
            part = found[index : index + len(words)]
            if [token.string for token in part] == [*words]:
                return part[0].start, part[-1].end
        return None


Changes = Iterator[tuple[ast.stmt, list[Edit]]]
"""Each change as its edits, with the statement that they are in."""

_KINDS: dict[str, tuple[str, Callable[[FunctionSite], Changes]]] = {}


def kinds() -> dict[str, str]:
    """Return a summary of each kind, by its name."""
    return {name: summary for name, (summary, _) in _KINDS.items()}


def mutations(source: SourceFile, function: Function, wanted: Sequence[str]) -> Iterator[Mutation]:
    """Yield every change of these kinds to a function. The changed text may not parse, or may mean the same."""
    place = FunctionSite(source, function)
    for kind in wanted:
        for statement, edits in _KINDS[kind][1](place):
            yield Mutation(kind, tuple(sorted(edits)), _lines(statement, function))


def _lines(statement: ast.stmt, function: Function) -> tuple[int, int]:
    if statement is function.node:
        return function.lines[0], function.lines[-1]
    first_block = next(nested_blocks(statement), None)
    last = statement.end_lineno or statement.lineno
    if first_block is not None:
        last = max(statement.lineno, first_block[0].lineno - 1)
    elif isinstance(statement, DEFINITIONS):
        last = statement.lineno
    return statement.lineno, last


def _kind(name: str, summary: str) -> Callable[[Callable[[FunctionSite], Changes]], Callable[[FunctionSite], Changes]]:
    def register(find: Callable[[FunctionSite], Changes]) -> Callable[[FunctionSite], Changes]:
        _KINDS[name] = (summary, find)
        return find

    return register


# ---------------------------------------------------------------------- operators


_BINARY: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "/")),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("/", "*")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.BitXor: ("^", ("&",)),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ast.Lt: (("<",), ("<=", ">")),
    ast.LtE: (("<=",), ("<", ">=")),
    ast.Gt: ((">",), (">=", "<")),
    ast.GtE: ((">=",), (">", "<=")),
    ast.Eq: (("==",), ("!=",)),
    ast.NotEq: (("!=",), ("==",)),
    ast.In: (("in",), ("not in",)),
    ast.NotIn: (("not", "in"), ("in",)),
    ast.Is: (("is",), ("is not",)),
    ast.IsNot: (("is", "not"), ("is",)),
}
_OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    **{kind: new[0] for kind, (_, new) in _COMPARISONS.items() if len(new) == 1},
}


@_kind("op-change", "an operator becomes a related one: + and -, < and <=, == and !=, and and or, in and not in")
def _op_change(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY and not _is_text(node.left):
            sign, others = _BINARY[type(node.op)]
            yield from _replace(statement, place.operator(node.left, node.right, sign), others)
        elif isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                words, others = _COMPARISONS[type(op)]
                yield from _replace(statement, place.operator(left, right, *words), others)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield from _replace(statement, place.operator(left, right, word), (other,))
    for statement in place.statements:
        if isinstance(statement, ast.AugAssign) and type(statement.op) in _BINARY:
            sign, others = _BINARY[type(statement.op)]
            span = place.operator(statement.target, statement.value, f"{sign}=")
            yield from _replace(statement, span, tuple(f"{other}=" for other in others))


@_kind("op-drop", "a `not` or a minus sign is gone")
def _op_drop(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield statement, [Edit(place.source.span(node)[0], place.inner(node.operand, node)[0], "")]


@_kind("op-swap", "the operands of an operator change places: a - b becomes b - a")
def _op_swap(place: FunctionSite) -> Changes:
    directed = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift, ast.MatMult)
    ordered = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In)
    for statement, node in place.expressions():
        if isinstance(node, ast.BinOp) and not _is_text(node.left):
            if isinstance(node.op, directed) or (isinstance(node.op, ast.Add) and _is_text(node.right)):
                yield statement, _exchange(place, place.inner(node.left, node), place.inner(node.right, node))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ordered):
            right = node.comparators[0]
            yield statement, _exchange(place, place.inner(node.left, node), place.inner(right, node))


@_kind("op-shorten", "a part of a chain of operators is gone: a and b and c becomes a and c")
def _op_shorten(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.BoolOp):
            for left, right in pairwise(node.values):
                end, start = place.inner(left, node)[1], place.inner(right, node)
                yield statement, [Edit(end, start[1], "")]
            first, second = place.inner(node.values[0], node), place.inner(node.values[1], node)
            yield statement, [Edit(first[0], second[0], "")]
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
            middle = place.inner(node.left.right, node.left)
            yield statement, [Edit(place.inner(node.left.left, node.left)[1], middle[1], "")]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _replace(statement: ast.stmt, span: Span | None, others: Sequence[str]) -> Changes:
    if span is not None:
        yield from ((statement, [Edit(*span, other)]) for other in others)


def _exchange(place: FunctionSite, one: Span, other: Span) -> list[Edit]:
    return [Edit(*one, place.text(other)), Edit(*other, place.text(one))]


# ---------------------------------------------------------------------- conditions and branches


@_kind("condition-invert", "the condition of an if, a while, a conditional expression or a filter is inverted")
def _condition_invert(place: FunctionSite) -> Changes:
    for statement in place.statements:
        if isinstance(statement, ast.If | ast.While):
            yield statement, _invert(place, statement.test)
        elif isinstance(statement, ast.Match):
            yield from ((statement, _invert(place, case.guard)) for case in statement.cases if case.guard)
    for statement, node in place.expressions():
        if isinstance(node, ast.IfExp):
            yield statement, _invert(place, node.test)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            tests = [test for generator in node.generators for test in generator.ifs]
            yield from ((statement, _invert(place, test)) for test in tests)


def _invert(place: FunctionSite, test: ast.expr) -> list[Edit]:
    start, end = place.source.span(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return [Edit(start, place.inner(test.operand, test)[0], "")]
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        words, _ = _COMPARISONS[type(test.ops[0])]
        if (span := place.operator(test.left, test.comparators[0], *words)) is not None:
            return [Edit(*span, _OPPOSITE[type(test.ops[0])])]
    if isinstance(test, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant):
        return [Edit(start, start, "not ")]
    return [Edit(start, start, "not ("), Edit(end, end, ")")]


@_kind("branch-swap", "two branches change places: those of an if, of a conditional expression, of a match")
def _branch_swap(place: FunctionSite) -> Changes:
    for statement in place.statements:
        if isinstance(statement, ast.If) and statement.orelse:
            other = statement.orelse
            if len(other) == 1 and isinstance(other[0], ast.If) and _is_elif(place, other[0]):
                other = other[0].body
            yield from _swap_blocks(place, statement, statement.body, other)
        elif isinstance(statement, ast.Match):
            for one, two in pairwise(statement.cases):
                yield from _swap_blocks(place, statement, one.body, two.body)
    for statement, node in place.expressions():
        if isinstance(node, ast.IfExp):
            yield statement, _exchange(place, place.inner(node.body, node), place.inner(node.orelse, node))


def _swap_blocks(place: FunctionSite, statement: ast.stmt, one: list[ast.stmt], two: list[ast.stmt]) -> Changes:
    spans = [place.source.whole_lines(block[0], block[-1]) for block in (one, two)]
    if spans[0] is None or spans[1] is None:
        return
    if place.source.indentation(one[0]) != place.source.indentation(two[0]):
        return
    texts = [place.text(span).rstrip("\r\n") for span in spans if span]
    ends = [(span[0], span[0] + len(text)) for span, text in zip(spans, texts, strict=True) if span]
    yield statement, [Edit(*ends[0], texts[1]), Edit(*ends[1], texts[0])]


def _is_elif(place: FunctionSite, node: ast.If) -> bool:
    return place.source.text.startswith("elif", place.source.span(node)[0])


@_kind("remove-branch", "an if without else, an elif or an else is gone")
def _remove_branch(place: FunctionSite) -> Changes:
    for block in place.blocks:
        for statement in block:
            if not isinstance(statement, ast.If) or _is_elif(place, statement):
                continue
            if statement.orelse:
                yield from _shorter_chain(place, statement)
            else:
                yield statement, _remove_statement(place, block, statement)


def _shorter_chain(place: FunctionSite, statement: ast.If) -> Changes:
    """Yield the removal of each elif of a chain, and of its else."""
    node = statement
    while node.orelse:
        last = node.body[-1]
        follows = node.orelse[0]
        if len(node.orelse) == 1 and isinstance(follows, ast.If) and _is_elif(place, follows):
            lines = place.source.whole_lines(follows, follows.body[-1])
            if lines is not None:
                yield statement, [Edit(*lines, "")]
            node = follows
            continue
        words = place.source.tokens_in(place.source.span(last)[1], place.source.span(follows)[0])
        word = next((token for token in words if token.string == "else"), None)
        end = place.source.whole_lines(node.orelse[0], node.orelse[-1])
        if word is not None and end is not None:
            start = place.source.starts[place.source.line_of(word.start) - 1]
            if not place.source.text[start : word.start].strip():
                yield statement, [Edit(start, end[1], "")]
        return


@_kind("loop-control", "break and continue change places")
def _loop_control(place: FunctionSite) -> Changes:
    for statement in place.statements:
        if isinstance(statement, ast.Break | ast.Continue):
            word = "continue" if isinstance(statement, ast.Break) else "break"
            yield statement, [Edit(*place.source.span(statement), word)]


# ---------------------------------------------------------------------- removal


def _removal(*kinds: type[ast.stmt], least: int = 1) -> Callable[[FunctionSite], Changes]:
    def find(place: FunctionSite) -> Changes:
        several = sum(isinstance(statement, kinds) for statement in place.statements) >= least
        for block in place.blocks if several else ():
            for statement in block:
                text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if isinstance(statement, kinds) and not text:
                    yield statement, _remove_statement(place, block, statement)

    return find


_kind("remove-assignment", "an assignment is gone")(_removal(ast.Assign, ast.AugAssign, ast.AnnAssign))
_kind("remove-call", "a call whose value nobody uses is gone, or a del")(_removal(ast.Expr, ast.Delete))
_kind("remove-loop", "a for or while loop is gone")(_removal(ast.For, ast.AsyncFor, ast.While))
_kind("remove-return", "one of several returns is gone")(_removal(ast.Return, least=2))
_kind("remove-raise", "a raise is gone")(_removal(ast.Raise))


def _remove_statement(place: FunctionSite, block: Sequence[ast.stmt], statement: ast.stmt) -> list[Edit]:
    """Return the edits that remove a statement. `pass` or a bare `return` replaces the statement if its block would be
    empty, or if other code is on its lines."""
    lines = place.source.whole_lines(statement)
    if lines is None or len(block) == 1:
        word = "return" if isinstance(statement, ast.Return) else "pass"
        return [Edit(*place.source.span(statement), word)]
    return [Edit(*lines, "")]


@_kind("remove-wrapper", "a with or a try is gone, and its body stays")
def _remove_wrapper(place: FunctionSite) -> Changes:
    for statement in place.statements:
        if not isinstance(statement, ast.With | ast.AsyncWith | ast.Try | getattr(ast, "TryStar", ast.Try)):
            continue
        whole, body = (
            place.source.whole_lines(statement),
            place.source.whole_lines(statement.body[0], statement.body[-1]),
        )
        outer, inner = place.source.indentation(statement), place.source.indentation(statement.body[0])
        if whole is None or body is None or not inner.startswith(outer) or _has_long_text(place, body):
            continue
        lines = re.findall(r"[^\n]*\n|[^\n]+", place.text(body))
        dedented = [outer + line.removeprefix(inner) if line.startswith(inner) else line for line in lines]
        yield statement, [Edit(*whole, "".join(dedented))]


def _has_long_text(place: FunctionSite, span: Span) -> bool:
    """Return whether the place has a string of several lines. An edit would change the string's white space."""
    return any("\n" in token.string for token in place.source.tokens_in(*span))


# ---------------------------------------------------------------------- constants


@_kind("constant-change", "a number or a truth value changes, also a default")
def _constant_change(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.Constant):
            yield from _other_constants(place, statement, node)
    arguments = place.function.node.args
    for default in [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]:
        if isinstance(default, ast.Constant):
            yield from _other_constants(place, place.function.node, default)


def _other_constants(place: FunctionSite, statement: ast.stmt, node: ast.Constant) -> Changes:
    span = place.source.span(node)
    written = place.text(span)
    if isinstance(node.value, bool):
        yield statement, [Edit(*span, str(not node.value))]
    elif isinstance(node.value, int) and re.fullmatch(r"\d{1,18}", written):
        yield statement, [Edit(*span, str(node.value + 1))]
        if node.value > 0:
            yield statement, [Edit(*span, str(node.value - 1))]
    elif isinstance(node.value, float) and re.fullmatch(r"\d{1,12}\.\d{0,12}", written):
        yield statement, [Edit(*span, repr(node.value + 1.0))]


_NO_END = (ast.Constant, ast.Starred)


@_kind("bound-shift", "a bound of a slice or a range is off by one")
def _bound_shift(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield statement, _plus(place, bound, "+ 1")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
            ends = node.args[-1:] if len(node.args) < 3 else []
            yield from ((statement, _plus(place, end, "- 1")) for end in ends if not isinstance(end, _NO_END))


def _plus(place: FunctionSite, node: ast.expr, more: str) -> list[Edit]:
    start, end = place.source.span(node)
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.BinOp | ast.UnaryOp):
        return [Edit(end, end, f" {more}")]
    return [Edit(start, start, "("), Edit(end, end, f") {more}")]


# ---------------------------------------------------------------------- calls


@_kind("call-reorder", "two statements that follow each other, at least one of them a call, change places")
def _call_reorder(place: FunctionSite) -> Changes:
    plain = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign)
    for block in place.blocks:
        for one, two in pairwise(block):
            if not (isinstance(one, plain) and isinstance(two, plain)) or not (_calls(one) or _calls(two)):
                continue
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                continue
            if all(place.source.whole_lines(each) for each in (one, two)):
                yield one, _exchange(place, place.source.span(one), place.source.span(two))


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


@_kind("argument-swap", "two arguments of a call change places")
def _argument_swap(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if isinstance(node, ast.Call):
            for one, two in pairwise(node.args):
                if not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                    yield statement, _exchange(place, place.argument(one, node), place.argument(two, node))


@_kind("argument-drop", "a keyword argument of a call is gone")
def _argument_drop(place: FunctionSite) -> Changes:
    for statement, node in place.expressions():
        if not isinstance(node, ast.Call):
            continue
        every: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        spans = sorted(place.argument(each, node) for each in every)
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            span = place.argument(keyword, node)
            index = spans.index(span)
            if index:
                yield statement, [Edit(spans[index - 1][1], span[1], "")]
            elif len(spans) > 1:
                yield statement, [Edit(span[0], spans[1][0], "")]
            else:
                yield statement, [Edit(*span, "")]


@_kind("name-change", "another parameter of the function is used in place of the right one")
def _name_change(place: FunctionSite) -> Changes:
    arguments = place.function.node.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if place.function.of_class is not None:
        named = named[1:]
    if len(named) < 2:
        return
    following = dict(zip(named, [*named[1:], named[0]], strict=True))
    for statement, node in place.expressions():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in following:
            yield statement, [Edit(*place.source.span(node), following[node.id])]


@_kind("except-narrow", "an except catches one kind of exception less")
def _except_narrow(place: FunctionSite) -> Changes:
    for statement in place.statements:
        for handler in getattr(statement, "handlers", ()):
            if isinstance(handler.type, ast.Tuple) and len(handler.type.elts) > 1:
                one, two = handler.type.elts[-2:]
                end = place.source.span(two)[1]
                comma = "," if len(handler.type.elts) == 2 else ""
                yield statement, [Edit(place.source.span(one)[1], end, comma)]


# ---------------------------------------------------------------------- the parts of a function


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the function's blocks of statements, without the blocks of definitions inside it."""
    pending = [function.body]  # type: ignore[attr-defined]
    while pending:
        block = pending.pop()
        yield block
        for statement in block:
            pending.extend(nested_blocks(statement))


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(statement, DEFINITIONS):
        return
    pending: list[ast.AST] = [*_parts(statement)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr) or type(node).__name__ == "TemplateStr":
            continue
        if isinstance(node, ast.expr):
            yield node
        pending.extend(reversed([*ast.iter_child_nodes(node)]))


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement's own parts, without inner statements and annotations."""
    for name, value in ast.iter_fields(statement):
        if name == "annotation":
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.ExceptHandler):
                yield from [part.type] if part.type else []
            elif isinstance(part, ast.match_case):
                yield from [part.guard] if part.guard else []
            elif isinstance(part, ast.AST) and not isinstance(part, ast.stmt):
                yield part
