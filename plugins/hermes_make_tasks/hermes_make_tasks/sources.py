"""Reads a stranger's Python sources without running them: decodes them as Python does, and parses them within bounds.

Places are character offsets in a source's text. A change is a list of edits of that text, so that everything else
(formatting, comments, line ends, encoding) stays the same byte for byte.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import codecs
import io
import re
import symtable
import tokenize
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

MAX_BYTES = 1 << 20
MAX_DEPTH = 120
"""Maximum depth of a syntax tree. Code that people write has less than half of it."""

_ENCODINGS = re.compile(r"utf-8(-sig)?|ascii|iso8859-\d+|cp\d+|koi8-[rut]|mac-\w+|(euc|shift)_\w+|gb\w+|big5\w*")
"""Encodings that are decoded. Some of Python's other encodings are slow on hostile data, or give no text."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Unreadable(Exception):
    """A source is left out; the message is the reason."""


class Edit(NamedTuple):
    """Replaces the characters from `start` to `end`."""

    start: int
    end: int
    text: str


Span = tuple[int, int]


class Token(NamedTuple):
    """A token that is not white space or a comment."""

    start: int
    end: int
    string: str


@dataclass(frozen=True)
class Function:
    """A function or method of a source."""

    name: str
    """The qualified name, without `<locals>`: `Class.method.inner`."""
    node: FunctionNode
    of_class: ast.ClassDef | None
    """The class whose method the function is; None if it is no method."""

    @property
    def lines(self) -> range:
        """Return the numbers of the body's lines, from 1."""
        return range(self.node.body[0].lineno, (self.node.end_lineno or self.node.lineno) + 1)

    @property
    def shape(self) -> str:
        """Return a value that is equal for functions which differ only in names and constants."""
        return " ".join(type(node).__name__ for node in ast.walk(self.node))

    @property
    def complexity(self) -> int:
        """Return the complexity as SWE-smith counts it: the number of decisions, plus 1."""
        count = 1
        for node in ast.walk(self.node):
            if isinstance(node, ast.If | ast.While | ast.For):
                count += 1
            elif isinstance(node, ast.BoolOp):
                count += len(node.values) - 1
            elif isinstance(node, ast.Try):
                count += len(node.handlers)
            elif isinstance(node, ast.Compare):
                count += len(node.ops)
        return count


@dataclass(frozen=True)
class SourceFile:
    """A Python file of the repository."""

    path: str
    """The path, relative to the checkout."""
    text: str
    encoding: str
    tree: ast.Module = field(repr=False)

    def encode(self, text: str) -> bytes:
        """Return a changed text in the file's encoding.

        Raises:
            Unreadable: the encoding lacks a character.
        """
        try:
            return text.encode(self.encoding)
        except UnicodeError as error:
            raise Unreadable(f"{self.path}: {error}") from error

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each line, and of the end."""
        return [0, *(match.end() for match in re.finditer("\n", self.text)), len(self.text)]

    def offset(self, line: int, utf8_column: int) -> int:
        """Return the offset of a position that `ast` gives as a line and a column in UTF-8 bytes."""
        start = self.starts[line - 1]
        text = self.text[start : self.starts[line]]
        if text.isascii():
            return start + utf8_column
        return start + len(text.encode()[:utf8_column].decode("utf-8", "ignore"))

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.ExceptHandler) -> Span:
        """Return the place of a node, without parentheses around it and without decorators."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def line_of(self, offset: int) -> int:
        """Return the number, from 1, of the line that an offset is in."""
        return bisect.bisect_right(self.starts, offset, hi=len(self.starts) - 1)

    @cached_property
    def tokens(self) -> list[Token]:
        """The source's tokens.

        Raises:
            Unreadable: Python's tokenizer and its parser read the source differently.
        """
        found = []
        left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        try:
            for token in tokenize.generate_tokens(io.StringIO(self.text, newline="").readline):
                if token.type not in left_out and token.string:
                    start, end = (self.starts[row - 1] + column for row, column in (token.start, token.end))
                    found.append(Token(start, end, token.string))
        except (tokenize.TokenError, SyntaxError, IndexError) as error:
            raise Unreadable(f"{self.path} can't be split into tokens: {error}") from error
        return found

    @cached_property
    def _token_starts(self) -> list[int]:
        return [token.start for token in self.tokens]

    def tokens_in(self, start: int, end: int) -> list[Token]:
        """Return the tokens between two offsets."""
        first = bisect.bisect_left(self._token_starts, start)
        last = bisect.bisect_left(self._token_starts, end)
        return self.tokens[first:last]

    def with_parentheses(self, node: ast.expr, inside: Span) -> Span:
        """Return the place of an expression, with the parentheses around it as far as they are within `inside`."""
        start, end = self.span(node)
        while True:
            before = self._token_before(start)
            after = self._token_after(end)
            if before is None or after is None or (before.string, after.string) != ("(", ")"):
                return start, end
            if before.start < inside[0] or after.end > inside[1]:
                return start, end
            start, end = before.start, after.end

    def _token_before(self, offset: int) -> Token | None:
        index = bisect.bisect_left(self._token_starts, offset) - 1
        return self.tokens[index] if index >= 0 and self.tokens[index].end <= offset else None

    def _token_after(self, offset: int) -> Token | None:
        index = bisect.bisect_left(self._token_starts, offset)
        return self.tokens[index] if index < len(self.tokens) else None

    def whole_lines(self, first: ast.stmt, last: ast.stmt | None = None) -> Span | None:
        """Return the lines of some statements with their decorators, or None if other code is on them."""
        last = last or first
        decorators = getattr(first, "decorator_list", ())
        start = self._at_sign(decorators[0]) if decorators else self.span(first)[0]
        end = self.span(last)[1]
        begin, stop = self.starts[self.line_of(start) - 1], self.starts[self.line_of(end)]
        if self.text[begin:start].strip(" \t\f") or not re.fullmatch(r"[ \t\f]*(#.*)?\r?\n?", self.text[end:stop]):
            return None
        return begin, stop

    def _at_sign(self, decorator: ast.expr) -> int:
        before = self._token_before(self.with_parentheses(decorator, (0, len(self.text)))[0])
        return before.start if before is not None else self.span(decorator)[0]

    def indentation(self, node: ast.stmt) -> str:
        """Return the white space at the beginning of a statement's line."""
        start = self.span(node)[0]
        return self.text[self.starts[node.lineno - 1] : start]

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """Every function and method, in the order of the text."""
        found = []
        pending: list[tuple[ast.AST, str, ast.ClassDef | None]] = [(self.tree, "", None)]
        while pending:
            node, prefix, of_class = pending.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.append(Function(f"{prefix}{child.name}", child, of_class))
                    pending.append((child, f"{prefix}{child.name}.", None))
                elif isinstance(child, ast.ClassDef):
                    pending.append((child, f"{prefix}{child.name}.", child))
                elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                    pending.append((child, prefix, of_class))
        return tuple(sorted(found, key=lambda each: (each.node.lineno, each.node.col_offset)))

    def apply_edits(self, edits: Sequence[Edit]) -> str:
        """Return the source's text with some edits, which must not overlap."""
        return apply_edits(self.text, edits)


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Return the text with some edits.

    Raises:
        ValueError: two edits overlap.
    """
    pieces, end = [], 0
    for edit in sorted(edits):
        if edit.start < end:
            raise ValueError("edits overlap")
        pieces += [text[end : edit.start], edit.text]
        end = edit.end
    return "".join([*pieces, text[end:]])


def read_source(path: str, data: bytes) -> SourceFile:
    """Return a file as a source. Blocking: it may take a second.

    Raises:
        Unreadable: the file is too large, no Python for this interpreter, nested too deep, or in an unknown encoding.
    """
    if len(data) > MAX_BYTES:
        raise Unreadable(f"{path} has more than {MAX_BYTES} bytes")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if not _ENCODINGS.fullmatch(codecs.lookup(encoding).name):
            raise Unreadable(f"{path} is in {encoding}")
        text = data.decode(encoding)
        if text.encode(encoding) != data:
            raise Unreadable(f"{path} is in {encoding}, and would not be written as it is")
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise Unreadable(f"{path} can't be decoded: {error}") from error
    if re.search(r"\r(?!\n)", text):
        raise Unreadable(f"{path} has carriage returns within lines")
    tree = parse_source(text, path)
    if (depth := _depth(tree)) > MAX_DEPTH:
        raise Unreadable(f"{path} is nested {depth} deep")
    return SourceFile(path, text, encoding, tree)


def parse_source(text: str, path: str) -> ast.Module:
    """Return the text's syntax tree.

    Raises:
        Unreadable: the text has no syntax tree.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{path} can't be parsed: {error or type(error).__name__}") from error


def _depth(tree: ast.AST) -> int:
    """Return the depth of a tree, counted only to a little more than `MAX_DEPTH`."""
    level, depth = [tree], 0
    while level and depth <= MAX_DEPTH:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def unbound(text: str, path: str) -> set[str]:
    """Return the names that a module reads but never binds, and the attributes of `self` that it reads but never sets.

    Raises:
        Unreadable: the text can't be compiled.
    """
    try:
        pending = [symtable.symtable(text, path, "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{path} can't be compiled: {error or type(error).__name__}") from error
    read: set[str] = set()
    bound = {each.get_name() for each in pending[0].get_symbols() if each.is_assigned() or each.is_imported()}
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and symbol.is_global():
                read.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                bound.add(symbol.get_name())
    for node in ast.walk(parse_source(text, path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                read.add(f"self.{node.attr}")
        elif isinstance(node, ast.Attribute):
            bound.add(f"self.{node.attr}")
        elif isinstance(node, DEFINITIONS):
            bound.add(f"self.{node.name}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(f"self.{node.id}")
    return read - bound - set(dir(builtins))


Meaning = tuple[object, ...]


def meaning(text: str, path: str) -> Meaning:
    """Return a value that is equal for texts that compile to the same code, even on other lines.

    Raises:
        Unreadable: the text can't be compiled.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(text, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"{path} can't be compiled: {error or type(error).__name__}") from error
    return _meaning(code)


def _meaning(code: types.CodeType) -> Meaning:
    constants = tuple(_constant(each) for each in code.co_consts)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    table = getattr(code, "co_exceptiontable", b"")
    return (code.co_name, code.co_code, table, constants, names, shape)


def _constant(value: object) -> object:
    """Return a constant with its type, because 1, 1.0 and True are equal, but not the same code."""
    if isinstance(value, types.CodeType):
        return _meaning(value)
    if isinstance(value, tuple | frozenset):
        parts = [_constant(each) for each in value]
        return (type(value).__name__, tuple(sorted(parts, key=repr) if isinstance(value, frozenset) else parts))
    return (type(value).__name__, repr(value))


def nested_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of statements of a compound statement, also of its branches and handlers, but not the body of a
    definition."""
    if isinstance(node, DEFINITIONS):
        return
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for name in ("handlers", "cases"):
        for part in getattr(node, name, ()):
            yield part.body
