"""The environment `endless-terminals` on Docker: initial states, users, scores, forgeries, and what fails the setup."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.terminal_tasks import Made, image_with_pytest, write_task, write_tasks
from hermes_core.agents.base import AgentResult, AgentTask
from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from tests.harbor.harbor_tasks import Shell, roll_out
from tests.rollout.test_full_disk import FILLS
from tests.support.ways_out import WAYS

TASK = Made(
    "Write the word hello to /home/user/greeting.",
    "    useradd -m -s /bin/bash user\n    echo secret > /root/secret\n    chmod 700 /root\n    echo 1 > /srv/state\n",
    "import os, pytest\n\n@pytest.mark.parametrize('path', ['/srv/state', '/home/user'])\n"
    "def test_there(path):\n    assert os.path.exists(path)\n",
    "import os, subprocess\n\n"
    "def test_greeting():\n    assert open('/home/user/greeting').read().strip() == 'hello'\n\n"
    "def test_state():\n    assert subprocess.check_output(['cat', '/srv/state'], text=True) == '1\\n'\n"
    "    assert os.getcwd() == '/home/user'\n",
    "echo hello > greeting\n",
    "    export TASK_COLOUR=green\n",
)


@pytest.fixture(scope="module")
def image(docker_images: tuple[str, str]) -> Iterator[str]:
    """An image with Python and pytest."""
    with image_with_pytest(docker_images[0], f"hermes-test-endless:{uuid.uuid4().hex[:12]}") as tag:
        yield tag


CONFIG = {"cap_add": ["SYS_ADMIN"], "slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0}
"""One container, in which each slot has a root of its own."""


async def rolled(runtime: Runtime, folder: Path, agent: Any = "oracle", *, config: Any = None, **env: Any) -> Any:
    """Return the records by item."""
    options = {"backend_config": CONFIG if config is None else config, "infra_retries": 0}
    return await roll_out(runtime, folder, agent, environment="endless-terminals", env=env, **options)


class Chosen(Shell):
    """An agent that runs the command for the word that its task begins with."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        super().__init__()
        self.by_name = commands

    async def run(self, task: AgentTask) -> AgentResult:
        name = str(task.messages[-1]["content"]).split(":")[0]
        return await Shell(self.by_name[name]).run(task)


async def test_the_solution_scores_one_and_nothing_zero(runtime: Runtime, tmp_path: Path, image: str) -> None:
    write_tasks(tmp_path / "tasks", 3, source=image)
    outcome = await validate(
        runtime,
        "endless-terminals",
        env={"dataset_name": str(tmp_path / "tasks")},
        concurrency=4,
        backend="docker",
        backend_config=CONFIG,
    )
    assert outcome.sound, outcome.unsound
    assert outcome.items == 3


@pytest.mark.parametrize("config", [CONFIG, {}], ids=["private-root", "dedicated"])
async def test_what_the_agent_is(runtime: Runtime, tmp_path: Path, image: str, config: Any) -> None:
    write_task(tmp_path / "task", TASK, source=image)
    agent = Shell(
        "id -un; pwd; echo $HOME $USER $TASK_COLOUR; cat /root/secret; ls -a /; ls -a ~; touch /srv/x",
        "setsid sleep 1000 & echo hello > greeting",
    )
    record = (await rolled(runtime, tmp_path / "task", agent, config=config))["task"]
    assert agent.answers, record["failure"]
    said = agent.answers[0]["output"]
    assert said.splitlines()[:3] == ["user", "/home/user", "/home/user user green"]
    assert said.count("Permission denied") == 2
    for hidden in ("hermes-tests", "test_", ".post"):
        assert hidden not in said
    assert "SECRET" not in json.dumps(dict(record), default=str)
    assert (record["reward"], record["failure"]) == (1.0, None), record["details"]
    assert record["details"]["passed"] == record["details"]["total"] == 2


async def test_the_file_tools_are_the_users_too(runtime: Runtime, tmp_path: Path, image: str) -> None:
    write_task(tmp_path / "task", TASK, source=image)
    agent = Tools(
        ("write_file", {"path": "greeting", "content": "hello\n"}),
        ("read_file", {"path": "greeting"}),
        ("read_file", {"path": "/root/secret"}),
        ("write_file", {"path": "/srv/state", "content": "2"}),
        ("terminal", {"command": "ls -l greeting"}),
    )
    env = {"enabled_toolsets": ["terminal", "file"]}
    record = (await rolled(runtime, tmp_path / "task", agent, **env))["task"]
    written, read, secret, state, listed = agent.answers
    assert "error" not in written or not written["error"], written
    assert "hello" in json.dumps(read)
    assert "error" in secret
    assert "Permission denied" in state["error"]
    assert " user user " in listed["output"]
    assert record["reward"] == 1.0, record["details"]


class Tools(Shell):
    """An agent that calls tools, one after the other."""

    def __init__(self, *calls: tuple[str, dict[str, Any]]) -> None:
        super().__init__()
        self.calls = calls

    async def run(self, task: AgentTask) -> AgentResult:
        for name, arguments in self.calls:
            self.answers.append(json.loads(await task.tool_handler(name, arguments, task.trajectory_id)))
        return await super().run(task)


FORGERIES = {
    "conftest": "echo 'import os; os._exit(0)' > conftest.py; cp conftest.py /tmp/conftest.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; cp pytest.ini /tmp/pytest.ini",
    "user site": "mkdir -p .local/lib/python3.11/site-packages; "
    "echo 'import os; os._exit(0)' > .local/lib/python3.11/site-packages/sitecustomize.py",
    "modules": "for each in pytest json os subprocess; do echo 'raise SystemExit(0)' > $each.py; done",
    "programs": "mkdir -p bin; for each in python3 sh cat setpriv; do printf '#!/bin/sh\\necho 1\\n' > bin/$each; "
    "chmod +x bin/$each; done; echo 'PATH=~/bin:$PATH' > .profile; cp .profile .bashrc",
    "daemon": "nohup sh -c 'while :; do echo hello > greeting.done; done' >/dev/null 2>&1 & sleep 0.2; rm -f greeting",
}


async def test_forgeries_score_zero(runtime: Runtime, tmp_path: Path, image: str) -> None:
    """The other test of the file is not affected. What the daemon wrote while the agent lived counts, as it should."""
    for name in FORGERIES:
        environment = "    export PATH=/home/user/bin:$PATH\n"
        made = replace(TASK, description=f"{name}: do nothing", environment=environment)
        write_task(tmp_path / "tasks" / name, made, source=image)
    records = await rolled(runtime, tmp_path / "tasks", Chosen(FORGERIES))
    outcomes = {
        name: (each["reward"], each["failure"], each["details"].get("passed")) for name, each in records.items()
    }
    assert outcomes == dict.fromkeys(FORGERIES, (0.0, None, 1)), records


@pytest.mark.stress
@pytest.mark.parametrize("config", [CONFIG, {"max_sandboxes": 4}], ids=["private-root", "dedicated"])
async def test_every_way_to_break_a_slot_ends_with_a_reward_of_0(
    runtime: Runtime, tmp_path: Path, image: str, config: Any
) -> None:
    """As in tests/rollout/test_every_way_to_break_a_slot_ends_with_a_reward_of_0.py, by an agent that is not root."""
    ways = {name.replace(" ", "-").replace("'", ""): way.shell for name, way in WAYS.items() if not way.root}
    for name in ways:
        write_task(tmp_path / "tasks" / name, replace(TASK, description=f"{name}: do nothing"), source=image)
    records = await rolled(runtime, tmp_path / "tasks", Chosen(ways), config=config)
    assert {name: (each["reward"], each["failure"]) for name, each in records.items()} == dict.fromkeys(
        ways, (0.0, None)
    )


@pytest.mark.full
@pytest.mark.parametrize("fill", FILLS)
async def test_a_full_disk_is_no_way_out(runtime: Runtime, tmp_path: Path, image: str, fill: str) -> None:
    write_task(tmp_path / "task", TASK, source=image)
    config = {**CONFIG, "tmpfs": {"/data": "size=64m,nr_inodes=8k,mode=711"}}
    record = (await rolled(runtime, tmp_path / "task", Shell(FILLS[fill]), config=config))["task"]
    assert (record["reward"], record["failure"]) == (0.0, None)


SETUPS = {
    "initial state": (replace(TASK, post=TASK.post.replace("echo 1 > /srv/state", "true")), "initial state fails"),
    "post fails": (replace(TASK, post="    echo before; false; echo after\n"), "%post failed: status 1: before"),
    "root": (replace(TASK, post="    useradd -o -u 0 -m user\n"), "user is root"),
    "collection": (replace(TASK, initial="import nowhere\n\ndef test_x(): pass\n"), "test_initial_state.py::test_x"),
    "no user": (
        replace(TASK, post="    mkdir -p /home/user/data\n    echo 1 > /home/user/data/x\n    echo 1 > /srv/state\n"),
        "",
    ),
}


async def test_a_state_that_is_not_the_initial_one_is_a_failure_of_the_setup(
    runtime: Runtime, tmp_path: Path, image: str
) -> None:
    for name, (made, _) in SETUPS.items():
        write_task(tmp_path / "tasks" / name, made, source=image)
    # A user that no task makes has the id 1000, and owns its home.
    agent = Shell('[ "$(id -u)" = 1000 ] && echo 2 > data/x && echo hello > greeting')
    records = await rolled(runtime, tmp_path / "tasks", agent)
    assert records["no user"]["reward"] == 1.0, records["no user"]
    for name, (_, message) in SETUPS.items():
        if message:
            assert records[name]["reward"] is None
            assert records[name]["failure"]["kind"] == "setup"
            assert message in records[name]["failure"]["message"]


async def test_an_image_without_pytest_is_a_failure_of_the_setup(
    runtime: Runtime, tmp_path: Path, docker_images: tuple[str, str]
) -> None:
    made = replace(TASK, post="    mkdir -p /srv\n    echo 1 > /srv/state\n")
    write_task(tmp_path / "task", made, source="./ubuntu_22.04.sif", bootstrap="localimage")
    for image, message in zip(docker_images, ("No module named 'pytest'", "no python3"), strict=True):
        record = (await rolled(runtime, tmp_path / "task", "nop", config={}, image=image))["task"]
        assert record["failure"]["kind"] == "setup"
        assert message in record["failure"]["message"]
