"""Finds the docstrings of doctests in sources, without running them.

An agent may change a source file that has doctests. So the examples of the clean tree are run with the agent's code.
This module is sent into the sandbox with `trees.py`; standard library only, Python >= 3.8.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterator

    Docstring = tuple[str, int]
    """The text, and the number of its first line, from 0."""
    Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def objects(path: str, name: str) -> list[list[str]]:
    """Return the objects that a doctest's name can mean: `[["Class", "method"]]` for `pkg.mod.Class.method` in
    `src/pkg/mod.py`.

    A name begins with the module's name, which may start at any directory of the path. So a name can have several
    meanings. A name without a meaning is not the name of a doctest.
    """
    if not path.endswith(".py"):
        return []
    parts, words = path[:-3].split("/"), name.split(".")
    whole = (parts, parts[:-1]) if parts[-1] == "__init__" else (parts,)
    modules = [module[start:] for module in whole for start in range(len(module))]
    return [words[len(module) :] for module in modules if words[: len(module)] == module]


def docstring(module: ast.Module, path: str, name: str) -> Docstring | None:
    """Return the docstring with the examples of the doctest `name`; None if the source has no such docstring."""
    if any(isinstance(each, _DEFINITIONS) and each.name == name for each in module.body):
        return None  # a test function with the name of its module
    found = [_docstring(module, words) for words in objects(path, name)]
    return next(filter(None, found), None)


def _docstring(node: Scope, words: list[str]) -> Docstring | None:
    if not words:
        return _with_examples(node.body[0].value if node.body and isinstance(node.body[0], ast.Expr) else None)
    if words[0] == "__test__" and isinstance(node, ast.Module):
        return _with_examples(_test_dictionary(node).get(".".join(words[1:])))
    found = None
    for definition in _statements(node):
        if isinstance(definition, _DEFINITIONS) and definition.name == words[0]:
            found = _docstring(definition, words[1:]) or found  # of several definitions, the last one counts
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a body and of its branches, but not those inside definitions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child
            if not isinstance(child, _DEFINITIONS):
                yield from _statements(child)


def _test_dictionary(module: ast.Module) -> dict[object, ast.expr]:
    """Return the entries of `__test__ = {"name": ...}`."""
    for statement in module.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)):
            continue
        if any(isinstance(target, ast.Name) and target.id == "__test__" for target in statement.targets):
            pairs = zip(statement.value.keys, statement.value.values)  # noqa: B905 - not on 3.8
            return {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
    return {}


def _with_examples(value: ast.expr | None) -> Docstring | None:
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and ">>>" in value.value:
        return value.value, value.lineno - 1
    return None
