"""Turns a row of R2E-Gym into the fields of a SWE-bench row.

R2E-Gym names tests as `Class.test`, without the file, and does not list the tests that the fix makes pass. Both follow
from `execution_result_content`, which has the sources of the tests, and their output before the fix.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hermes_core import DatasetError
from hermes_swe_smith.names import UnsupportedRow

FOLDER = "r2e_tests"
"""The tests' folder in the checkout."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = "short test summary info"
_STATUSES = ("PASSED", "FAILED", "ERROR")
_TESTS = re.compile(r"(^|/)([Tt]ests?/|test_[^/]*$)|_test\.py$")
_NAME = re.compile(r"\w[\w.-]*\.py", re.ASCII)
_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def as_swe_bench(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the row with the names and meanings of SWE-bench's fields; it has no `base_commit`.

    Raises:
        DatasetError: a field is missing or wrong; the message names the field.
        UnsupportedRow: the file of a test is not known, or the fix makes no test pass.
    """
    row = _R2eRow(fields, where)
    commit = row.text("commit_hash")
    name = row.text("repo_name")
    executed = row.document("execution_result_content")
    sources = _sources(row, executed)
    before = _statuses(str(executed.get("old_commit_res_stdout") or ""))
    expected = {_bare(key): status for key, status in row.document("expected_output_json").items()}
    ids = _node_ids(row, sources, [test for test, status in expected.items() if test and status == "PASSED"])
    fixed = [node_id for test, node_id in ids.items() if before.get(test) != "PASSED"]
    if not fixed:
        raise row.refusal("execution_result_content", "shows no test that the fix makes pass")
    statement = row.text("problem_statement")
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    return {
        **{key: fields[key] for key in ("instance_id", "docker_image", "image_name") if key in fields},
        "instance_id": fields.get("instance_id") or f"{name}-{commit}",
        "repo": name if "/" in name else f"r2e/{name}",
        "problem_statement": issue[1].strip() if issue else statement,
        "patch": _patch(row),
        "test_patch": "".join(_new_file(f"{FOLDER}/{path}", text) for path, text in sources.items()),
        "FAIL_TO_PASS": fixed,
        "PASS_TO_PASS": [node_id for node_id in ids.values() if node_id not in fixed],
    }


class _R2eRow:
    """A row's fields, each of which can be missing or wrong."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, "is missing or empty")
        return value

    def document(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self.text(name))
        except (ValueError, RecursionError):
            raise self.wrong(name, "is no JSON") from None
        if not isinstance(value, dict):
            raise self.wrong(name, "is no JSON object")
        return value

    def refusal(self, name: str, reason: str) -> UnsupportedRow:
        return UnsupportedRow(f"{self._where}, field {name!r} {reason}")

    def wrong(self, name: str, reason: str) -> DatasetError:
        return DatasetError(f"{self._where}, field {name!r} {reason}", hint="see the fields of R2E-Gym in the README")


def _bare(test: str) -> str:
    """Return a test's name without colours and without the reason that pytest appends."""
    return _COLOUR.sub("", test).split(" - ")[0]


def _statuses(output: str) -> dict[str, str]:
    """Return the tests' statuses from the summary that `pytest -rA` prints, by `Class.test`."""
    statuses = {}
    for line in _COLOUR.sub("", output).partition(_SUMMARY)[2].splitlines():
        status, _, test = line.strip().partition(" ")
        if status in _STATUSES and "::" in test:
            statuses[".".join(_bare(test).split("::")[1:])] = status
    return statuses


def _sources(row: _R2eRow, executed: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the tests' files by name."""
    names, codes = executed.get("test_file_names"), executed.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or len(names) != len(codes) or not names:
        raise row.wrong("execution_result_content", "has no test_file_names and test_file_codes of one length")
    files = {str(name).rpartition("/")[2]: code for name, code in zip(names, codes, strict=True)}
    for name, code in files.items():
        if not _NAME.fullmatch(name) or not isinstance(code, str):
            raise row.wrong("execution_result_content", f"has a test file {name[:100]!r}, which is no Python module")
    return {"__init__.py": "", **files}


def _node_ids(row: _R2eRow, sources: Mapping[str, str], tests: Iterable[str]) -> dict[str, str]:
    """Return pytest's node id of each test."""
    defined = {path: _definitions(text) for path, text in sources.items()}
    ids = {}
    for test in tests:
        plain, bracket, parameters = test.partition("[")
        parts = plain.split(".")
        places = [path for path, names in defined.items() if plain in names]
        # An inherited method is not in `names`, but its class is.
        places = places or [path for path, names in defined.items() if len(parts) > 1 and parts[0] in names]
        if len(places) != 1:
            number = len(places) or "none"
            reason = f"names {test[:200]!r}, which is in {number} of the row's test files"
            raise row.refusal("expected_output_json", reason)
        ids[test] = f"{FOLDER}/{places[0]}::{'::'.join(parts)}{bracket}{parameters}"
    return ids


def _definitions(text: str) -> set[str]:
    """Return the functions, classes and methods of a module, as `name` and `Class.name`."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found: set[str] = set()

    def collect(body: Iterable[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")

    collect(module.body, "")
    return found


def _patch(row: _R2eRow) -> str:
    """Return the fix as a diff: the commit's changes of Python files, without those of tests."""
    try:
        changes = row.document("parsed_commit_content")["file_diffs"]
        by_path = [(change["header"]["file"]["path"], change) for change in changes]
        sources = [(path, change) for path, change in by_path if path.endswith(".py") and not _TESTS.search(path)]
        return "".join(_file_diff(path, change) for path, change in sources)
    except (KeyError, TypeError, AttributeError) as error:
        raise row.wrong("parsed_commit_content", f"can't be read as changes of files: {error!r}") from None


def _file_diff(path: str, change: Mapping[str, Any]) -> str:
    lines = [f"diff --git a/{path} b/{path}"]
    if extra := change["header"].get("misc_line"):
        lines.append(extra)
    if not change.get("hunks"):
        return "\n".join(lines) + "\n" if extra else ""
    lines += [f"--- {change['minus_file']['path']}", f"+++ {change['plus_file']['path']}"]
    for hunk in change["hunks"]:
        old, new = (_span(hunk["descriptor"][which]) for which in ("old_range", "new_range"))
        lines.append(f"@@ -{old} +{new} @@")
        lines += [_MARKS[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


def _span(lines: Mapping[str, Any]) -> str:
    length = lines.get("length")
    return str(lines["start"]) if length is None else f"{lines['start']},{length}"


def _new_file(path: str, text: str) -> str:
    """Return a diff that adds a file."""
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    if not text:
        return head
    lines = text.removesuffix("\n").split("\n")
    added = "".join(f"+{line}\n" for line in lines)
    if not text.endswith("\n"):
        added += "\\ No newline at end of file\n"
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{added}"
