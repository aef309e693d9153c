"""Turns the names of tests in SWE-bench and similar datasets into pytest's node ids, or refuses them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hermes_core import DatasetError

_UNITTEST = re.compile(r"\w+ \([\w.]+\)")
_BARE = re.compile(r"[A-Za-z_]\w*(\[.*\])?")
_CHANGED = re.compile(r"^\+\+\+ b/(.+?)\t?$", re.MULTILINE)


class UnsupportedRow(DatasetError):
    """A row that is valid, but whose tests can't be run here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="tests are run with pytest, as path::name")


def node_ids(names: Iterable[str], test_patch: str, where: str, *, drop: bool) -> tuple[str, ...]:
    """Return pytest's node id of each test.

    A name without a file belongs to the only file of tests that the test patch changes.

    Args:
        where: the row's place and the field, for messages.
        drop: whether to leave out names that were cut off. SWE-bench took names from the output of its runners, and cut
            them at a space.

    Raises:
        UnsupportedRow: a name comes from a runner other than pytest, or was cut off.
    """
    files = sorted(path for path in set(_CHANGED.findall(test_patch)) if _is_test_module(path))
    found = []
    for name in names:
        if "::" in name and "[" in name[len(test_file(name)) :] and not name.endswith("]"):
            if not drop:
                raise _refusal(where, name, "whose name was cut off")
        elif "::" in name:
            found.append(name)
        elif _UNITTEST.fullmatch(name):
            raise _refusal(where, name, "a name that unittest's or Django's runner prints")
        elif not _BARE.fullmatch(name):
            raise _refusal(where, name, "which is no node id of pytest")
        elif len(files) == 1:
            found.append(f"{files[0]}::{name}")
        else:
            raise _refusal(where, name, f"without its file, and the test patch changes {len(files)} files of tests")
    return tuple(found)


def test_file(node_id: str) -> str:
    """Return the file of a pytest node id, relative to the checkout. Its path may contain `::` and `[`."""
    path, python, _ = node_id.partition(".py::")
    return path + ".py" if python else node_id.split("::", 1)[0]


def _refusal(where: str, name: str, reason: str) -> UnsupportedRow:
    return UnsupportedRow(f"{where} has {name[:200]!r}, {reason}")


def _is_test_module(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(".py") and (name.startswith("test") or name.endswith("_test.py"))
