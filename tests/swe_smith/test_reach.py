"""The warning of solutions that agents could read: a whole run on an image in which the project lies everywhere."""

import json
import logging
import socket
import uuid

import docker
import hermes_docker
import hermes_swe_smith
import pytest
from hermes_swe_smith.reach import modules_of

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from tests.swe_smith.shapes import PYTEST, PYTEST_7, Shape, write

MODULE = "ledgerline/amounts"

PLACES = {
    "installed": f"/usr/lib/python3/dist-packages/{MODULE}.py",
    "installed for another Python": f"/usr/local/lib/python3.9/site-packages/{MODULE}.py",
    "in a virtual environment": f"/opt/tool/lib/python3.11/site-packages/{MODULE}.py",
    "in conda's cache": f"/opt/conda/pkgs/ledgerline-1.0-py_0/site-packages/{MODULE}.py",
    "vendored": f"/usr/lib/python3/dist-packages/other/_vendor/{MODULE}.py",
    "bytecode alone": "/usr/lib/python3.11/ledgerline/__pycache__/amounts.cpython-311.pyc",
    "compiled": "/opt/compiled/ledgerline/amounts.cpython-311-x86_64-linux-gnu.so",
    "a checkout": f"/testbed/{MODULE}.py",
    "documentation": f"/usr/share/doc/ledgerline/examples/{MODULE}.py",
    "uv's cache": f"/var/cache/uv/archive-v0/x/{MODULE}.py",
    "a wheel": "/usr/share/python-wheels/ledgerline-1.0-py3-none-any.whl",
    "a source archive": "/tmp/Ledgerline-1.0.tar.gz",
    "an egg": "/srv/ledgerline-1.0-py3.11.egg",
}
FOLDERS = {
    "a bare repository": ("/srv/git/ledgerline.git", ("objects", "refs")),
    "pip's cache": ("/var/cache/pip", ("http-v2",)),
}
NOT_THE_PROJECT = (
    "/usr/share/amounts.py",
    "/opt/other/amounts.py",
    "/opt/my-ledgerline-1.0.whl",
    "/root/ledgerline.git",
)


@pytest.fixture(scope="module")
def image(docker_images):
    """An image with a file of the project in each place."""
    client = docker.from_env()
    made = [f"mkdir -p $(dirname {path}) && echo x > {path}" for path in (*PLACES.values(), *NOT_THE_PROJECT)]
    made += [f"mkdir -p {path}/{name}; touch {path}/HEAD" for path, names in FOLDERS.values() for name in names]
    made.append("install -m 600 /dev/null /opt/ledgerline-2.0.whl; chmod 700 /root")
    container = client.containers.create(docker_images[0], ["sh", "-ec", "; ".join(made)], entrypoint="")
    tag = f"hermes-test-reach:{uuid.uuid4().hex[:12]}"
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0, container.logs()
        container.commit(tag)
        yield tag
    finally:
        container.remove(force=True)
        client.images.remove(tag, force=True)
        client.close()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "hermes_core.swe_smith"]


async def test_every_place_of_the_project_is_told_once(image, caplog):
    caplog.set_level(logging.DEBUG, "hermes_core.swe_smith")
    records = []
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker]) as runtime:
        outcome = await validate(
            runtime, "swe-smith", env={"dataset_name": "demo"}, backend="docker", backend_config={"image": image}
        )
        await run_rollouts(
            runtime,
            "swe-smith",
            "nop",
            env={"dataset_name": "demo", "max_items": 1},
            backend="docker",
            backend_config={"image": image, "network": "setup"},
            on_record=records.append,
        )
    assert outcome.sound
    assert [record["reward"] for record in records] == [0.0]
    told = [line for line in warnings_of(caplog) if "all that was found" in line]
    assert len(told) == 2  # validate's, which says it once for all of its rollouts, and the other run's
    for lines in told[:1]:
        found = set(json.loads(lines.split("found: ")[1].replace("'", '"')))
        assert {*PLACES.values(), *(path for path, _ in FOLDERS.values())} <= found
        assert not found & {*NOT_THE_PROJECT, "/opt/ledgerline-2.0.whl"}
    shown = [record for record in caplog.records if "may be the solution" in record.getMessage()]
    assert {record.levelno for record in shown} == {logging.WARNING}


@pytest.mark.full  # installs two real environments
async def test_the_environment_of_another_task_is_searched_too(caplog, tmp_path):
    """pytest needs what the second task's project is called, so that both tasks' environments hold a copy."""
    vendored = Shape(
        {"attr/extra.py": "x = 1\n", "tests/test_x.py": "from attr.extra import x\ndef test_x(): assert x == 1\n"},
        ("tests/test_x.py::test_x",),
        bug=(("attr/extra.py", "1", "2"),),
        requirements=PYTEST_7,
    )
    installed = Shape(
        {
            "iniconfig/exceptions.py": "x = 1\n",
            "tests/test_x.py": "def test_x(): assert open('iniconfig/exceptions.py').read() == 'x = 1\\n'\n",
        },
        ("tests/test_x.py::test_x",),
        bug=(("iniconfig/exceptions.py", "1", "2"),),
        requirements=PYTEST,
    )
    tasks = write(tmp_path, {"vendored": vendored, "installed": installed})
    env = {"dataset_name": str(tasks), "repo_base_url": str(tmp_path), "python_only": False, "shuffle": False}
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith]) as runtime:
        await run_rollouts(runtime, "swe-smith", "nop", env=env, backend="local", concurrency=1)
    told = [line for line in warnings_of(caplog) if "/prepared/" in line and "iniconfig/exceptions.py" in line]
    assert len(told) == 2  # one for each environment
    assert all(line.startswith("swesmith/shapes__project1") for line in told)


async def test_an_index_that_slots_can_reach_is_told(docker_images, caplog, monkeypatch, tmp_path):
    """A listener on the driver's loopback, which `local` shares at `user`, stands in for the index."""

    async def told(isolation):
        caplog.clear()
        async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith]) as runtime:
            env = {"dataset_name": "demo", "max_items": 1, "installer_variables": ("PIP_FIND_LINKS",)}
            await run_rollouts(runtime, "swe-smith", "nop", env=env, backend="local", isolation=isolation)
        return [line for line in warnings_of(caplog) if "can reach" in line]

    with socket.create_server(("127.0.0.1", 0)) as index:
        port = index.getsockname()[1]
        monkeypatch.setenv("UV_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        (line,) = await told("user")
        assert f"127.0.0.1:{port}" in line and "network: setup, or none" in line
        assert await told("namespace") == []


def test_a_patch_names_the_modules_that_it_changes():
    patch = (
        "--- a/src/a/b.py\n+++ b/src/a/b.py\n@@ -1 +1 @@\n--- a\n+++ /dev/null\n--- a/docs/x.rst\n+++ b/docs/x.rst\n"
    )
    assert modules_of(patch, ("src",)) == {"a/b"}
    assert modules_of(patch, (".",)) == {"src/a/b"}
    assert modules_of(patch, None) == {"a/b"}
    assert modules_of("", None) == set()
