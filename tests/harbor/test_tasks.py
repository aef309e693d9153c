"""Task folders: what is read, and why a task is refused before any sandbox is made."""

from __future__ import annotations

import pytest
from hermes_harbor.config import HarborConfig
from hermes_harbor.environment import HarborEnvironment
from hermes_harbor.tasks import dockerfile_workdir, load_task, resolved, strip_canary

from hermes_core.errors import DatasetError
from tests.harbor.harbor_tasks import write_task


def environment(folder, **config):
    return HarborEnvironment(HarborConfig(dataset_name=str(folder), **config))


async def set_up(folder, **config):
    made = environment(folder, **config)
    await made.setup()
    return made


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("Do it.\n", "Do it.\n"),
        ("<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\n\nDo it.", "Do it."),
        ("\n\nDo it.", "Do it."),
        ("# Title\nabout a canary\n", "# Title\nabout a canary\n"),
        ("Do it.\n<!-- canary -->", "Do it.\n<!-- canary -->"),
        ("# canary", ""),
    ],
)
def test_canary_lines_are_not_shown(text, seen):
    assert strip_canary(text) == seen


def test_variables_of_the_host(monkeypatch):
    monkeypatch.setenv("SET", "value")
    monkeypatch.delenv("UNSET", raising=False)
    given = {"a": "${SET}", "b": "${UNSET:-default}", "c": "${UNSET:-}", "d": "literal $SET", "e": "${SET:-x}"}
    assert resolved(given, "here") == {"a": "value", "b": "default", "c": "", "d": "literal $SET", "e": "value"}
    with pytest.raises(DatasetError, match=r"here: f is \$\{UNSET\}, which is not set"):
        resolved({"f": "${UNSET}"}, "here")


@pytest.mark.parametrize(
    ("dockerfile", "place"),
    [
        ("FROM x\nWORKDIR /srv\nworkdir  a/b\n", "/srv/a/b"),
        ('FROM x\nWORKDIR "/srv"\n', "/srv"),
        ("FROM x\nWORKDIR /srv\nWORKDIR $HOME\n", None),
        ("FROM x\n", None),
    ],
)
def test_the_working_directory_of_a_dockerfile(tmp_path, dockerfile, place):
    (tmp_path / "Dockerfile").write_text(dockerfile)
    assert dockerfile_workdir(tmp_path / "Dockerfile") == place


def test_what_a_task_says(tmp_path):
    toml = """
    [task]
    name = "org/one"
    [agent]
    timeout_sec = 30
    [environment]
    env = {A = "${NOT_SET_ANYWHERE:-a}"}
    """.replace("    ", "")
    task = load_task(write_task(tmp_path / "one", toml), HarborConfig(dataset_name="x"))
    assert (task.id, task.workdir, task.variables) == ("org/one", "/app", {"A": "a"})
    assert task.instruction == "Write hello to /app/out.\n"


async def test_one_folder_and_a_folder_of_folders(tmp_path):
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "no task").mkdir()
    assert [item["id"] for item in (await set_up(tmp_path)).items()] == ["a", "b"]
    assert [item["id"] for item in (await set_up(tmp_path / "b")).items()] == ["b"]
    for path in (tmp_path / "no task", tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match=r"no task|no folder"):
            await set_up(path)
    write_task(tmp_path / "c", '[task]\nname = "o/same"')
    write_task(tmp_path / "d", '[task]\nname = "o/same"')
    with pytest.raises(DatasetError, match=r"two tasks .* named 'o/same'"):
        await set_up(tmp_path)


REFUSED = {
    "windows": ('[environment]\nos = "windows"', {}, "sandboxes are Linux"),
    "tpu": ('[environment.tpu]\ntype = "v6e"\ntopology = "2x4"', {}, "TPU"),
    "compose": ("", {"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml asks for several"),
    "singularity": ("", {"environment/singularity-compose.yaml": ""}, "asks for several"),
    "compose of the tests": ("", {"tests/docker-compose.yaml": ""}, "tests/docker-compose.yaml asks for several"),
    "service": ('artifacts = [{source = "/x", service = "db"}]', {}, "service 'db'"),
    "collected service": ('[[verifier.collect]]\ncommand = "c"\nservice = "db"', {}, "service 'db'"),
    "gpus": ("[environment]\ngpus = 1", {}, "accept gpus"),
    "network": ("[environment]\nallow_internet = false", {}, "'no-network' .accept network"),
    "network of the agent": ('[agent]\nnetwork_mode = "no-network"', {}, "agent.network_mode"),
    "user": ('[agent]\nuser = "me"', {}, "accept agent_user"),
    "trajectory": ("", {"trajectory.json": "{}"}, "trajectory.json"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_can_t_run_here_is_refused_at_load(tmp_path, name, caplog):
    toml, files, reason = REFUSED[name]
    write_task(tmp_path / "bad", toml, files=files)
    with pytest.raises(DatasetError, match=f"task 'bad' can't run here: .*{reason}"):
        await set_up(tmp_path)
    with pytest.raises(DatasetError, match="no task"):
        await set_up(tmp_path, skip_refused=True)
    write_task(tmp_path / "good")
    assert [item["id"] for item in (await set_up(tmp_path, skip_refused=True)).items()] == ["good"]
    assert "left out: task 'bad'" in caplog.text


async def test_what_may_be_accepted(tmp_path):
    toml = '[agent]\nuser = "me"\n[environment]\ngpus = 1\nallow_internet = false'
    write_task(tmp_path / "a", toml)
    accept = ("network", "gpus", "agent_user")
    assert len((await set_up(tmp_path, accept=accept)).items()) == 1


async def test_an_image_for_tasks_without_one(tmp_path):
    write_task(tmp_path / "a", image=None)
    write_task(tmp_path / "b", image="own")
    with pytest.raises(DatasetError, match=r"names no environment\.docker_image"):
        await set_up(tmp_path)
    made = await set_up(tmp_path, image="given")
    assert [made.image(item) for item in made.items()] == ["given", "own"]
    assert made.item_images


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"toml": "[agent\n"}, "not TOML"),
        ({"toml": '[agent]\ntimeout_sec = "long"'}, r"task.toml, key 'agent.timeout_sec'"),
        ({"toml": '[environment]\nenv = {A = "${NOT_SET_ANYWHERE}"}'}, "not set here"),
        ({"instruction": None}, "no instruction.md"),
        ({"test": None}, "no tests/test.sh"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path, change, reason):
    write_task(tmp_path / "bad", **change)
    with pytest.raises(DatasetError, match=reason):
        await set_up(tmp_path, skip_refused=True)


async def test_an_instruction_that_is_no_text(tmp_path):
    (write_task(tmp_path / "bad") / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(DatasetError, match="UTF-8"):
        await set_up(tmp_path)


async def test_keys_without_a_meaning_are_logged(tmp_path, caplog):
    write_task(tmp_path / "a", "[agent]\ntimeout_secs = 1")
    await set_up(tmp_path)
    assert "keys without a meaning: agent.timeout_secs" in caplog.text
