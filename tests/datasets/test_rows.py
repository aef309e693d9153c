"""Rows of datasets: read and checked, and named by their place where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from hermes_core import DatasetError, load_rows, read_jsonl, validate_row


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    files: dict[str, str] = {}


def test_rows_come_with_their_places_and_empty_lines_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": "b"}')
    assert list(read_jsonl(path)) == [(f"{path}, line 1", {"id": "a"}), (f"{path}, line 3", {"id": "b"})]


def test_a_row_is_checked_and_its_field_is_named() -> None:
    assert validate_row(Row, {"id": "a"}, "rows.jsonl, line 1").id == "a"
    with pytest.raises(DatasetError, match=r"rows\.jsonl, line 2, field 'files\.a\.py' must be a text, not 1") as wrong:
        validate_row(Row, {"id": "a", "files": {"a.py": 1}}, "rows.jsonl, line 2")
    assert wrong.value.hint == "the fields are id, files"
    with pytest.raises(DatasetError) as missing:
        validate_row(Row, {}, "line 1", lambda field: f"set {field}")
    assert missing.value.hint == "set id"


def test_a_file_s_rows_are_checked_and_the_first_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n')
    assert load_rows(Row, path) == [Row(id="a")]
    path.write_text('{"id": "a"}\n{\n' + '{"id": 1}\n' * 29)
    with pytest.raises(
        DatasetError,
        match=r"rows\.jsonl': 30 of 31 can't be used: line 2: not JSON: .*; line 3, field 'id' .*; and 20 more",
    ) as bad:
        load_rows(Row, path)
    assert "each line is one JSON object" in str(bad.value.hint)
