"""Many task folders: each is loaded, refused or wrong as it says, solved on Docker, and read alike by Harbor itself."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hermes_harbor.config import HarborConfig
from hermes_harbor.task_toml import Table, TaskToml, _table_of
from hermes_harbor.tasks import UnsupportedTask, load_task, parse_task_toml

from hermes_core.errors import DatasetError
from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from tests.harbor.harbor_tasks import BUSYBOX
from tests.harbor.task_folders import FOLDERS, TESTS_INSIDE, scored


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_loaded_refused_or_wrong(tmp_path, name, monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    folder = FOLDERS[name]
    folder.write(tmp_path / "task")
    config = HarborConfig(dataset_name=str(tmp_path), **folder.config)
    if folder.is_ in ("run", "loaded"):
        task = load_task(tmp_path / "task", config)
        assert task.parts and all(part.instruction and "canary" not in part.instruction for part in task.parts)
        return
    with pytest.raises(DatasetError, match=folder.reason) as raised:
        load_task(tmp_path / "task", config)
    assert isinstance(raised.value, UnsupportedTask) == (folder.is_ == "refused")
    assert raised.value.hint


def keys(model: type[Table], place: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _table_of(field.annotation)
        yield f"{place}{name}"
        if inner is not None and model.__name__ != "StepTable":  # a step's tables are those of the task
            yield from keys(inner, f"{place}{name}.")


def used(table: object, place: str = "") -> Iterator[str]:
    for each in table if isinstance(table, list) else [table]:
        if isinstance(each, Mapping):
            for name, value in each.items():
                yield f"{place}{name}"
                yield from used(value, f"{place}{name}.")


def test_the_folders_use_every_key():
    written = {key for folder in FOLDERS.values() if folder.is_ != "wrong" for key in used(tomllib.loads(folder.toml))}
    of_environment = {key for key in keys(TaskToml) if key.startswith("verifier.environment.")}
    missing = {*keys(TaskToml)} - of_environment - written - {"environment.docker_image"}
    assert missing == set()
    assert {"version", "environment.memory", "environment.storage", "environment.allow_internet"} <= written


@pytest.fixture
def images(docker_images):
    """The images of the tasks; one with tests is built."""
    import docker

    test = scored('[ "$(pwd)" = /checks ] && grep -qx "$WANTED" /app/out')
    files = {"Dockerfile": f"FROM {BUSYBOX}\nCOPY test.sh /tests/test.sh\n", "test.sh": f"#!/bin/sh\n{test}"}
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    context.seek(0)
    client = docker.from_env()
    try:
        client.images.build(fileobj=context, custom_context=True, tag=TESTS_INSIDE, rm=True)
    finally:
        client.close()


ON_DOCKER = ("python", "steps", "image of the tests", "Dockerfile of the tests")
"""Those to which the image matters, and one of steps. The others can do without."""


async def check_all(runtime: Runtime, dataset: Path, names: Sequence[str], backend: str, **env: Any) -> None:
    """The solution of each scores one, and nothing zero."""
    for name in names:
        FOLDERS[name].write(dataset / name)
    env["dataset_name"] = str(dataset)
    outcome = await validate(runtime, "harbor", env=env, concurrency=2, backend=backend)
    assert outcome.sound, outcome.unsound
    assert outcome.items == len(names) >= 4


@pytest.mark.full
async def test_the_solution_of_each_scores_one_and_nothing_zero(host_runtime, tmp_path):
    names = [name for name, folder in FOLDERS.items() if folder.is_ == "run" and name not in ON_DOCKER]
    await check_all(host_runtime, tmp_path, names, "local", accept=["image"])


@pytest.mark.long
async def test_the_solution_scores_one_and_nothing_zero_in_a_container(runtime, images, tmp_path):
    await check_all(runtime, tmp_path, ON_DOCKER, "docker")


HARBOR = """
import json, sys, warnings
warnings.simplefilter("ignore")
from harbor.models.task.task import Task
found = {}
for name, folder in json.load(sys.stdin).items():
    try:
        found[name] = Task(folder).config.model_dump(mode="json")
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
json.dump(found, sys.stdout)
"""


@pytest.fixture
def harbor() -> str:
    """A Python with the package `harbor`: that of `HARBOR_PYTHON`, or this one."""
    if named := os.environ.get("HARBOR_PYTHON"):
        return named
    if importlib.util.find_spec("harbor") is None:
        pytest.skip("harbor is not installed, and HARBOR_PYTHON names no Python that has it")
    return sys.executable


def told(ours: Any, theirs: Any) -> Any:
    """Return what Harbor says, as far as our models say it, in our form."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {key: told(value, theirs.get(key, {} if key == "headers" else None)) for key, value in ours.items()}
    if isinstance(ours, list) and isinstance(theirs, list):
        return [told(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    if isinstance(ours, dict) and isinstance(theirs, str):  # an artifact by its path alone
        return {**ours, "source": theirs, "destination": None, "exclude": [], "service": None}
    return theirs


@pytest.mark.full
def test_harbor_reads_each_folder_alike(tmp_path, harbor):
    folders = {str(number): folder for number, folder in enumerate(FOLDERS.values())}
    for number, folder in folders.items():
        folder.write(tmp_path / number)
    asked = json.dumps({number: str(tmp_path / number) for number in folders})
    done = subprocess.run([harbor, "-c", HARBOR], input=asked, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for name, number in zip(FOLDERS, folders, strict=True):
        folder, theirs = FOLDERS[name], answers[number]
        assert isinstance(theirs, dict) == folder.taken_by_harbor, (name, theirs)
        if folder.is_ != "wrong":
            text = (tmp_path / number / "task.toml").read_text()
            ours = parse_task_toml(tomllib.loads(text), name).model_dump(mode="json")
            assert told(ours, theirs) == ours, name
