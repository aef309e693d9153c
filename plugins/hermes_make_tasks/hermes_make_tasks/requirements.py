"""Finds the requirements of a project and its tests in the packaging files, without running these files."""

from __future__ import annotations

import configparser
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_swe_smith.scripts import pyproject_in, table

FILES = ("pyproject.toml", "setup.cfg", "setup.py")
"""Files of a checkout that are read."""

_FOR_TESTS = ("test", "tests", "testing")
_FOR_DEVELOPERS = ("dev", "develop", "development")
_SELF = re.compile(r"\s*([\w.-]+)\s*\[([^\]]*)\]\s*")


def find_requirements(files: Mapping[str, str]) -> list[str] | None:
    """Return the requirements of the project and of its tests; None if only the build backend knows them.

    The requirements of the tests come from an extra or a dependency group for tests, or else from one for development.
    """
    pyproject = pyproject_in(files)
    project = table(pyproject, "project")
    dynamic = project.get("dynamic", ())
    if project.get("name") and not {"dependencies", "optional-dependencies"} & {*dynamic}:
        own, extras = _texts(project.get("dependencies")), table(project, "optional-dependencies")
        groups = {**_groups(pyproject), **{name: _texts(lines) for name, lines in extras.items()}}
        return _expand_extras([*own, *_of_tests(groups)], str(project["name"]), groups)
    cfg = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error):
        cfg.read_string(files.get("setup.cfg", ""))
    if cfg.has_option("metadata", "name") and "install_requires" not in files.get("setup.py", ""):
        own = _lines(cfg.get("options", "install_requires", fallback=""))
        extras = dict(cfg.items("options.extras_require")) if cfg.has_section("options.extras_require") else {}
        groups = {**_groups(pyproject), **{name: _lines(lines) for name, lines in extras.items()}}
        return _expand_extras([*own, *_of_tests(groups)], cfg.get("metadata", "name"), groups)
    if "setup.py" not in files and not project and not cfg.has_section("metadata") and "tool" not in pyproject:
        return []
    return None


def with_pytest(lines: Sequence[str]) -> list[str]:
    """Return the requirements with pytest among them."""
    named = any(re.match(r"\s*pytest\b(?!-)", line) for line in lines)
    return [*lines, *([] if named else ["pytest>=7"])]


def are_pins(lines: Sequence[str]) -> bool:
    """Return whether each requirement names one version, and pytest is among them. Then no version has to be found."""
    pins = all(re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.!+-]+", line) for line in lines)
    return pins and any(line.startswith("pytest==") for line in lines)


def import_path(files: Mapping[str, str], sources: Sequence[str]) -> str:
    """Return the directory of the checkout from which the project is imported. For most projects, that is `src` or `.`.

    Args:
        sources: the paths of the project's Python files.
    """
    setuptools = table(pyproject_in(files), "tool", "setuptools")
    where = table(setuptools, "packages", "find").get("where")
    folders = [table(setuptools, "package-dir").get(""), *(where if isinstance(where, list) else [])]
    for folder in (*folders, "src"):
        plain = isinstance(folder, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", folder)
        if plain and any(path.startswith(f"{folder}/") for path in sources):
            return str(folder)
    return "."


def _of_tests(groups: Mapping[str, list[str]]) -> list[str]:
    for names in (_FOR_TESTS, _FOR_DEVELOPERS):
        found = [lines for name, lines in groups.items() if name.lower() in names]
        if found:
            return [line for lines in found for line in lines]
    return []


def _groups(pyproject: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the dependency groups by name, each with the requirements of the groups that it includes."""
    tables = table(pyproject, "dependency-groups")

    def lines(name: str, seen: frozenset[str]) -> list[str]:
        found = []
        for entry in tables.get(name, ()) if isinstance(tables.get(name), list) and name not in seen else ():
            if isinstance(entry, str):
                found.append(entry)
            elif isinstance(entry, dict) and isinstance(entry.get("include-group"), str):
                found += lines(entry["include-group"], seen | {name})
        return found

    return {name: lines(name, frozenset()) for name in tables}


def _expand_extras(lines: Sequence[str], project: str, groups: Mapping[str, list[str]]) -> list[str]:
    """Return the requirements, with the project's own extras (`project[extra]`) written out."""
    found: dict[str, None] = {}
    pending, seen = [*lines], set()
    while pending:
        line = pending.pop(0)
        match = _SELF.fullmatch(line)
        if match and _plain(match[1]) == _plain(project):
            for extra in (each.strip() for each in match[2].split(",")):
                if extra not in seen:
                    seen.add(extra)
                    pending += groups.get(extra, [])
        else:
            found[line.strip()] = None
    return [line for line in found if line]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _lines(text: str) -> list[str]:
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in stripped if line]
