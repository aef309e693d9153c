"""The commands that a project would install (`console_scripts`), read from its packaging files without running them."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

FILES = ("pyproject.toml", "setup.cfg", "setup.py")
"""Where they are declared, at the top of a checkout."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_TARGET = re.compile(r"[\w.]+:[\w.]+")


def console_scripts(files: Mapping[str, str]) -> dict[str, str]:
    """Command to `module:attribute`, for what can be understood; what a setup.py computes is not.

    Args:
        files: the texts of those of `FILES` that there are.
    """
    found: dict[str, str] = {}
    found.update(_from_pyproject(files.get("pyproject.toml", "")))
    found.update(_from_setup_cfg(files.get("setup.cfg", "")))
    found.update(_from_setup_py(files.get("setup.py", "")))
    return {name: target for name, target in found.items() if _NAME.fullmatch(name) and _TARGET.fullmatch(target)}


def wrapper(python: str, target: str) -> str:
    """The text of a command that calls the target in whatever checkout PYTHONPATH names."""
    module, _, attribute = target.partition(":")
    return (
        f"#!{python}\nimport sys\nfrom functools import reduce\nfrom importlib import import_module\n"
        f"sys.exit(reduce(getattr, {attribute.split('.')!r}, import_module({module!r}))())\n"
    )


def _from_pyproject(text: str) -> dict[str, str]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}
    tables = (_table(data, "tool", "poetry", "scripts"), _table(data, "project", "scripts"))
    return {name: _bare(target) for table in tables for name, target in table.items() if isinstance(target, str)}


def _table(data: Any, *path: str) -> dict[str, Any]:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _from_setup_cfg(text: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        lines = parser.get("options.entry_points", "console_scripts", fallback="")
    except configparser.Error:
        return {}
    return _from_lines(lines.splitlines())


def _from_setup_py(text: str) -> dict[str, str]:
    """What a literal `entry_points={"console_scripts": [...]}` says."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                continue
            lines = value.get("console_scripts") if isinstance(value, dict) else None
            if isinstance(lines, str):
                lines = lines.splitlines()
            if isinstance(lines, list | tuple):
                found.update(_from_lines(line for line in lines if isinstance(line, str)))
    return found


def _from_lines(lines: Iterable[str]) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): _bare(target) for name, sign, target in pairs if sign}


def _bare(target: str) -> str:
    """The target without extras: `module:attribute [extra]`."""
    return target.partition("[")[0].strip()
