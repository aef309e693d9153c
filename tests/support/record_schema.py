"""Each record that your test makes fits the published JSON schema, or the test fails.

This holds in every test, without a fixture. The records are checked when the test is over, because it may measure.
A test of records that don't fit sets `CHECKED_RECORDS` to 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from hermes_core.records.jsonable import json_line
from hermes_core.records.record import Record, record_schema

SCHEMA = jsonschema.Draft202012Validator(record_schema())

CHECKED_RECORDS = 100
"""The number of records of one test that are checked against the schema."""


@pytest.fixture(autouse=True)
def _records_fit_the_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every record that a test makes fits the published schema. It is checked after the test, which may measure."""
    made: list[dict[str, Any]] = []
    to_json = Record.to_json

    def noted(record: Record) -> dict[str, Any]:
        value = to_json(record)
        if len(made) < CHECKED_RECORDS:
            made.append(value)
        return value

    monkeypatch.setattr(Record, "to_json", noted)
    yield
    for value in made:
        for error in SCHEMA.iter_errors(_shortened(json.loads(json_line(value)))):
            pytest.fail(f"a record does not fit its schema: {error.json_path}: {error.message}", pytrace=False)


def _shortened(value: Any) -> Any:
    """The value, of whose long lists of numbers only what their items differ in is left: a schema has looked at each of
    100,000 tokens for minutes."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > 100 and {type(item) for item in value} <= {int, float}:
        return [min(value), max(value), *{type(item): item for item in value}.values()]
    return [_shortened(item) for item in value]
