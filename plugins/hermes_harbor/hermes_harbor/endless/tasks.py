"""Reads the task folders of endless-terminals: the description, the definition of the container, the tests that pass
before the agent works, and the tests that pass when the task is solved."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core import DatasetError, Intake, read_rows, validate_row
from hermes_harbor.endless.config import EndlessConfig
from hermes_harbor.endless.definition import Definition, Unsupported, parse
from hermes_harbor.tasks import UnsupportedTask

INITIAL, FINAL = "test_initial_state.py", "test_final_state.py"
MAX_FILE = 4 << 20
"""The largest size of a file of a task."""


class TaskJson(BaseModel):
    """The fields of a `task.json` that are used. Its `truth` is dropped here, so that no agent sees it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    description: str | None = None
    instruction: str | None = None


class ExtraInfo(BaseModel):
    """The fields of a row's `extra_info` that are used."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_dir: str = Field(min_length=1)
    max_time: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The agent's time limit in seconds."""


class EndlessRow(BaseModel):
    """The fields of a row for SkyRL that are used. The field `prompt` is not used, because it demands a notation for
    commands."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    extra_info: ExtraInfo


@dataclass(frozen=True)
class Tests:
    """A file of tests."""

    name: str
    source: str
    node_ids: tuple[str, ...]
    """The node ids of the tests, without parameters."""


@dataclass(frozen=True)
class EndlessTask:
    """One task."""

    id: str
    folder: Path
    description: str
    definition: Definition
    image: str | None
    initial: Tests
    final: Tests
    agent_timeout_s: float | None = None

    @property
    def solution(self) -> str | None:
        """Return the text of `solution.sh`, an addition of ours to the format; None if there is none."""
        path = self.folder / "solution.sh"
        return _text(path) if path.is_file() else None


def tasks_of(config: EndlessConfig, intake: Intake) -> Iterable[tuple[str, Callable[[], EndlessTask]]]:
    """Yield the place of each task, with a function that reads it or raises `DatasetError`. Blocking.

    Tasks come in the order of the dataset's rows, or of the folders' names.

    Args:
        intake: counts other parts of the dataset that can't be used.

    Raises:
        DatasetError: the dataset can't be read.
    """
    top = Path(config.dataset_name).expanduser()
    if (top / "container.def").is_file() or (top / "environment").is_dir():
        yield str(top), partial(_task, top.resolve(), None, config)
    elif top.is_dir() and (found := sorted(path.parent for path in top.glob("*/task.json"))):
        for folder in found:
            yield str(folder), partial(_task, folder, None, config)
    elif top.is_dir() and any(top.glob("*/task.toml")):
        raise DatasetError(f"no folder in {top} has a task.json", hint="folders with a task.toml are tasks of harbor")
    else:
        for where, fields in read_rows(config.dataset_name, config.dataset_split, intake):
            yield where, partial(_task_of_row, fields, where, config)


def _task_of_row(fields: Mapping[str, Any], where: str, config: EndlessConfig) -> EndlessTask:
    parent = Path(config.tasks_dir or ".").expanduser()
    extra = validate_row(EndlessRow, fields, where).extra_info
    named = Path(extra.task_dir)
    folder = next((each for each in (parent / named, parent / named.name) if each.is_dir()), None)
    if folder is None:
        raise DatasetError(
            f"{where}, field 'extra_info.task_dir': there is no folder {parent / named}",
            hint="set --env.tasks_dir to the folder that holds the tasks' folders",
        )
    return _task(folder, extra.max_time, config)


def _task(folder: Path, limit: float | None, config: EndlessConfig) -> EndlessTask:
    place = folder / "container.def"
    if not place.is_file():
        raise DatasetError(
            f"{folder} has no container.def", hint="folders with environment/Dockerfile are tasks of harbor"
        )
    fields = _json(folder / "task.json")
    task = validate_row(TaskJson, fields, str(folder / "task.json"))
    description = task.description or task.instruction
    if not description or not description.strip():
        raise DatasetError(f"{folder / 'task.json'} has no description", hint="it is what the agent is asked to do")
    try:
        definition = parse(_text(place))
    except Unsupported as error:
        raise UnsupportedTask(f"{place}: {error}", hint="fix the file") from error
    image = (config.image or definition.image) if config.use_images else None
    if image is None and config.use_images:
        raise UnsupportedTask(
            f"{place} starts from {definition.source}, which only Apptainer reads",
            hint="set --env.image to an image of the same system, or --env.use_images=false for the profile's",
        )
    return EndlessTask(
        id=folder.name,
        folder=folder,
        description=description.strip(),
        definition=definition,
        image=image,
        initial=_tests(folder / INITIAL),
        final=_tests(folder / FINAL),
        agent_timeout_s=limit,
    )


def _tests(path: Path) -> Tests:
    source = _text(path)
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnsupportedTask(f"{path} is no Python: {error}", hint="fix the file") from error
    names = tuple(_names(module))
    if not names:
        raise UnsupportedTask(f"{path} has no tests", hint="fix the file")
    return Tests(path.name, source, tuple(f"{path.name}::{name}" for name in names))


def _names(module: ast.Module) -> Iterable[str]:
    """Yield the names of a module's tests, by pytest's default rules."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_test_case(node)):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test"):
                    yield f"{node.name}::{each.name}"


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "TestCase" for base in node.bases)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE:
            raise DatasetError(f"{path} has more than {MAX_FILE} bytes", hint="is it a task's file?")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} can't be read: {error}", hint="each task has this file, in UTF-8") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path} is no JSON: {error}", hint="it is a JSON object") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{path} is no JSON object", hint="it is a JSON object")
    return value
