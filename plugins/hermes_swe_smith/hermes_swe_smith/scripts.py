"""Reads from packaging files which commands and metadata a project would install, without running the files."""

from __future__ import annotations

import ast
import configparser
import contextlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_VERSIONED = ("__init__", "__about__", "__version__", "_version", "version", "about")

FILES = (
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    *(f"{root}*/{name}.py" for root in ("", "src/") for name in _VERSIONED),
    *("*.py", "src/*.py", "VERSION", "VERSION.txt", "version.txt"),
)
"""Packaging files of a checkout, and files from which packaging files may take the version; `*` stands for any name."""

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_TARGET = re.compile(r"[\w.]+:[\w.]+")
_VERSION = re.compile(r"[A-Za-z0-9][\w.!+-]*", re.ASCII)
_UNKNOWN = "0.0.0"
"""The version of a project that computes its version, for example from tags."""

EntryPoints = dict[str, dict[str, str]]
"""Entry points: for each group, `module:attribute` by name."""


def console_scripts(files: Mapping[str, str]) -> dict[str, str]:
    """Return `module:attribute` for each command, except for those that a setup.py computes.

    Args:
        files: the texts of the existing files of `FILES`, by path.
    """
    points = _entry_points(files).get("console_scripts", {})
    return {name: target for name, target in points.items() if _NAME.fullmatch(name) and _TARGET.fullmatch(target)}


def metadata(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the project's `.dist-info`, relative to `site-packages`; none if the project has no name.

    The group `pytest11` is left out, because pytest would load its plugins, which are the agent's code.
    """
    name, version = _name_and_version(files)
    if not _NAME.fullmatch(name):
        return {}
    if not _VERSION.fullmatch(version):
        version = _UNKNOWN
    lines = []
    for group, points in _entry_points(files).items():
        if group != "pytest11":
            lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items()), ""]
    folder = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version.replace('-', '_')}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/entry_points.txt": "\n".join(lines),
    }


def wrapper(python: str, target: str) -> str:
    """Return the text of a command that calls the target, which is imported from the checkout in PYTHONPATH."""
    module, _, attribute = target.partition(":")
    return (
        f"#!{python}\nimport sys\nfrom functools import reduce\nfrom importlib import import_module\n"
        f"sys.exit(reduce(getattr, {attribute.split('.')!r}, import_module({module!r}))())\n"
    )


def _name_and_version(files: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and the version from the packaging files. The version may come from a file that they name."""
    pyproject, cfg, setup = pyproject_in(files), _setup_cfg(files), _setup_py(files)
    project, poetry = table(pyproject, "project"), table(pyproject, "tool", "poetry")
    declared = {**setup, **dict(cfg.items("metadata") if cfg.has_section("metadata") else ()), **poetry, **project}
    name, version = declared.get("name"), declared.get("version")
    dynamic = table(pyproject, "tool", "setuptools", "dynamic", "version")
    if isinstance(version, str) and version.startswith(("attr:", "file:")):
        kind, _, where = version.partition(":")
        dynamic = {kind: where.strip()}
    elif isinstance(version, str):
        return str(name or ""), version
    hatch, flit = table(pyproject, "tool", "hatch", "version"), table(pyproject, "tool", "flit", "module")
    module = str(flit.get("name") or name).replace("-", "_")
    if isinstance(dynamic.get("file"), str):
        version = files.get(dynamic["file"], "").strip()
    elif isinstance(hatch.get("path"), str):
        version = _find_assignment(files.get(hatch["path"], ""), ("__version__", "VERSION", "version"))
    else:
        module, _, attribute = str(dynamic.get("attr") or f"{module}.__version__").rpartition(".")
        paths = [f"{root}{module.replace('.', '/')}{end}" for root in ("", "src/") for end in (".py", "/__init__.py")]
        version = next((found for path in paths if (found := _find_assignment(files.get(path, ""), (attribute,)))), "")
    return str(name or ""), version


def _find_assignment(source: str, names: tuple[str, ...]) -> str:
    """Return the literal text that a module assigns to one of the names; empty if there is none."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(getattr(statement, "value", None), "value", None)
        if isinstance(value, str) and any(isinstance(target, ast.Name) and target.id in names for target in targets):
            return value
    return ""


def _entry_points(files: Mapping[str, str]) -> EntryPoints:
    """Return the entry points in all packaging files. Values that are no text are left out."""
    pyproject, cfg = pyproject_in(files), _setup_cfg(files)
    options = dict(cfg.items("options.entry_points")) if cfg.has_section("options.entry_points") else {}
    places: list[Mapping[str, Any]] = [
        {"console_scripts": table(pyproject, "tool", "poetry", "scripts")},
        table(pyproject, "tool", "poetry", "plugins"),
        {"console_scripts": table(pyproject, "project", "scripts")},
        table(pyproject, "project", "entry-points"),
        options,
        table(_setup_py(files), "entry_points"),
    ]
    found: EntryPoints = {}
    for place in places:
        for group, points in place.items():
            found.setdefault(group, {}).update(_points(points))
    return {group: points for group, points in found.items() if points}


def _points(value: object) -> dict[str, str]:
    """Return the targets by name. `value` is a table, or a text with lines `name = target`."""
    if isinstance(value, dict):
        return {name: _bare(target) for name, target in value.items() if isinstance(target, str)}
    lines = value.splitlines() if isinstance(value, str) else value
    if not isinstance(lines, list | tuple):
        return {}
    pairs = (line.partition("=") for line in lines if isinstance(line, str))
    return {name.strip(): _bare(target) for name, sign, target in pairs if sign}


def pyproject_in(files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of `pyproject.toml`; an empty table if it is missing or can't be read."""
    try:
        return tomllib.loads(files.get("pyproject.toml", ""))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def table(data: Any, *path: str) -> dict[str, Any]:
    """Return the table at the end of a path of keys; an empty one if there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _setup_cfg(files: Mapping[str, str]) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    with contextlib.suppress(configparser.Error):
        parser.read_string(files.get("setup.cfg", ""))
    return parser


def _setup_py(files: Mapping[str, str]) -> dict[str, Any]:
    """Return the literal arguments `name`, `version` and `entry_points` of any call in a setup.py."""
    try:
        tree = ast.parse(files.get("setup.py", ""))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("entry_points", "name", "version"):
            with contextlib.suppress(ValueError, TypeError):
                found.setdefault(node.arg, ast.literal_eval(node.value))
    return found


def _bare(target: str) -> str:
    """Return the target without extras: `module:attribute [extra]`."""
    return target.partition("[")[0].strip()
