"""Reading endless-terminals: container definitions, task folders, rows, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hermes_harbor.endless.config import EndlessConfig
from hermes_harbor.endless.definition import PATH, Unsupported, parse
from hermes_harbor.endless.environment import EndlessTerminalsEnvironment
from hermes_harbor.endless.tasks import EndlessTask, tasks_of

from benchmarks.terminal_tasks import write_task, write_tasks
from hermes_core.datasets.intake import Intake
from hermes_core.errors import DatasetError
from tests.harbor.test_endless import TASK

DEFINITION = """\
# made by a model
Bootstrap: docker
From: docker://ubuntu:22.04

%files
    data/in.csv /srv/in.csv
    notes

%post -c /bin/bash
    useradd -m user
    cat <<EOF > /home/user/x
unindented 100%
  %indented
EOF

%environment
    # of the user
    export HOME=/home/user
    export PATH=/opt/bin:/home/user/bin:${PATH}
    LABEL="a b"  # a comment
    export TWICE=$LABEL-$LABEL
    export PLAIN='$LABEL'

%runscript
    exec false

%labels
    Author Somebody
"""


def test_a_container_definition_is_read() -> None:
    read = parse(DEFINITION)
    assert (read.bootstrap, read.image, read.shell) == ("docker", "ubuntu:22.04", "bash")
    assert read.post.startswith(
        "    useradd -m user\n    cat <<EOF > /home/user/x\nunindented 100%\n  %indented\nEOF\n"
    )
    assert read.variables == {
        "HOME": "/home/user",
        "PATH": f"/opt/bin:{PATH}",  # without what the agent can write, as root runs programs too
        "LABEL": "a b",
        "TWICE": "a b-a b",
        "PLAIN": "$LABEL",
    }
    assert read.files == (("data/in.csv", "/srv/in.csv"), ("notes", "/notes"))
    assert read.ignored == ("runscript", "labels")
    assert parse(DEFINITION.replace("\n", "\r\n")) == read


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Bootstrap: docker\n", "", "Bootstrap is ''"),
        ("Bootstrap: docker", "Bootstrap: debootstrap", "Bootstrap is 'debootstrap'"),
        ("From: docker://ubuntu:22.04\n", "", "From is missing"),
        ("From:", "Stage: one\nFrom:", "the header has stage"),
        ("From:", "Fr om\nFrom:", "the header has the line 'Fr om'"),
        ("%files\n", "%files from one\n", "there are no stages"),
        ("data/in.csv", "../in.csv", "no file of the task's folder"),
        ("data/in.csv", "/etc/shadow", "no file of the task's folder"),
        ("%labels", "%setup", "%setup: it runs on the host"),
        ("%labels", "%appinstall x", "%appinstall: this section is not known"),
        ("-c /bin/bash", "-c /usr/bin/python3", "only -c with sh or bash"),
        ("useradd -m user", "echo export A=1 >>$APPTAINER_ENVIRONMENT", "only Apptainer has"),
        ("export HOME=/home/user", "source /etc/profile", "is more than a variable"),
        ("export HOME=/home/user", "export HOME=$(pwd)", "is more than a variable"),
        ("export HOME=/home/user", "export HOME=$OTHER", "$OTHER is not known"),
        ("export HOME=/home/user", "export LD_PRELOAD=/home/user/x.so", "would change root's commands"),
        ("export HOME=/home/user", "export HOME=a b", "is not one value"),
    ],
)
def test_a_definition_that_asks_for_too_much_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(Unsupported) as refused:
        parse(DEFINITION.replace(old, new))
    assert reason in str(refused.value)


async def loaded(**settings: Any) -> EndlessTerminalsEnvironment:
    environment = EndlessTerminalsEnvironment(EndlessConfig(**settings))
    await environment.setup()
    return environment


async def test_a_folder_of_tasks(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 7, source="ubuntu:22.04")
    environment = await loaded(dataset_name=str(tmp_path / "tasks"))
    assert [item["id"] for item in environment.items()] == [f"task_{number:06d}" for number in range(7)]
    item = environment.items()[0]
    assert environment.image(item) == "ubuntu:22.04"
    prompt = environment.format_prompt(item)
    assert "has version" in prompt
    assert "/home/user" in prompt
    assert "SECRET" not in prompt + json.dumps(list(environment.items()))
    assert environment.agent_user(item) == "user"
    config = EndlessConfig(dataset_name=str(tmp_path / "tasks/task_000003"))
    ((_, read),) = tasks_of(config, Intake("tasks", skip=False))
    one = read()
    assert isinstance(one, EndlessTask)
    assert one.final.node_ids == (
        "test_final_state.py::TestSettings::test_port",
        "test_final_state.py::TestSettings::test_old",
    )


async def test_a_folder_of_harbor_s_tasks_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/task.toml").touch()
    with pytest.raises(DatasetError, match=r"has a task.json .*tasks of harbor"):
        await loaded(dataset_name=str(tmp_path))


async def test_rows_for_skyrl(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", 3, source="ubuntu:22.04")
    rows = [
        {
            "data_source": "endless",
            "prompt": [{"role": "system", "content": "Answer with <command>"}],
            "env_class": "endless",
            "reward_spec": {"method": "rule", "ground_truth": "x"},
            "extra_info": {"task_dir": f"./tasks/task_{number:06d}", "max_time": limit},
        }
        for number, limit in ((2, "300"), (0, 7))
    ]
    place = tmp_path / "train.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = await loaded(dataset_name=str(place), tasks_dir=str(tmp_path))
    assert [item["id"] for item in environment.items()] == ["task_000002", "task_000000"]
    assert [environment.agent_timeout_s(item) for item in environment.items()] == [300.0, 7.0]
    assert "<command>" not in environment.format_prompt(environment.items()[0])
    # The folders may have moved since the rows were made.
    moved = await loaded(dataset_name=str(place), tasks_dir=str(tmp_path / "tasks"))
    assert len(moved.items()) == 2
    with pytest.raises(DatasetError, match=r"line 1, field 'extra_info.task_dir': there is no folder"):
        await loaded(dataset_name=str(place), tasks_dir=str(tmp_path / "elsewhere"))


async def test_a_task_without_an_image_of_docker_needs_one(tmp_path: Path) -> None:
    write_task(tmp_path / "task", TASK, source="./ubuntu_22.04.sif", bootstrap="localimage")
    name = str(tmp_path / "task")
    with pytest.raises(DatasetError, match=r"starts from ./ubuntu_22.04.sif, which only Apptainer reads") as refused:
        await loaded(dataset_name=name)
    assert "--env.image" in str(refused.value)
    environment = await loaded(dataset_name=name, image="mine:1")
    assert environment.image(environment.items()[0]) == "mine:1"
    environment = await loaded(dataset_name=name, use_images=False)
    assert environment.image(environment.items()[0]) is None
    assert not environment.item_images


async def test_tasks_that_can_not_run_are_refused_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    top = tmp_path / "tasks"
    write_tasks(top, 1, source="ubuntu:22.04")
    write_task(top / "a", replace(TASK, final="def test_x(:\n"), source="ubuntu:22.04")
    write_task(top / "b", replace(TASK, final="x = 1\n"), source="ubuntu:22.04")
    write_task(top / "c", replace(TASK, environment="    . /etc/profile\n"), source="ubuntu:22.04")
    with pytest.raises(DatasetError) as refused:
        await loaded(dataset_name=str(top))
    for reason in ("is no Python", "has no tests", "is more than a variable"):
        assert reason in str(refused.value)
    with caplog.at_level(logging.WARNING, "hermes_core.harbor"):
        environment = await loaded(dataset_name=str(top), skip_refused=True)
    assert len(environment.items()) == 1
    assert "left out (skip_refused): 3 of 4 can't be used" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("task.json", "{}", "has no description"),
        ("task.json", "[]", "is no JSON object"),
        ("task.json", "[" * 100_000, "is no JSON"),
        ("task.json", '{"description": 3}', "description"),
        ("test_final_state.py", None, "can't be read"),
        ("test_final_state.py", "x" * (5 << 20), "more than"),
        ("container.def", None, "has no container.def"),
    ],
    ids=range(7),
)
async def test_what_is_wrong_is_told_or_left_out(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    folder = write_task(tmp_path / "tasks" / "one", TASK, source="ubuntu:22.04")
    shutil.copytree(folder, tmp_path / "tasks" / "two")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(DatasetError, match=message):
        await loaded(dataset_name=str(tmp_path / "tasks"))
    environment = await loaded(dataset_name=str(tmp_path / "tasks"), skip_refused=True)
    assert [item["id"] for item in environment.items()] == ["two"]
