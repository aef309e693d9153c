"""Rows whose images have the repository: stand-ins for those of SWE-bench and of R2E-Gym, on Docker."""

import io
import json
import logging
import tarfile
import uuid

import docker
import hermes_docker
import hermes_swe_smith
import pytest

from benchmarks.terminal_tasks import packages
from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from tests.swe_smith.test_environment import Shell, roll_out
from tests.swe_smith.test_other_datasets import change, r2e, swe_bench

CONDA = "/opt/miniconda3/envs/testbed"
PROJECT = {
    "pkg/__init__.py": "from pkg._version import version\n",
    "pkg/core.py": "x = 3\n",
    "tests/test_core.py": "from pkg.core import x\ndef test_int(): assert x == int(x)\n",
    ".gitignore": "_version.py\n.venv\n",
}
OLD = PROJECT["tests/test_core.py"]
TEST_PATCH = """\
diff --git a/tests/test_core.py b/tests/test_core.py
--- a/tests/test_core.py
+++ b/tests/test_core.py
@@ -1,2 +1,3 @@
 from pkg.core import x
 def test_int(): assert x == int(x)
+def test_x(): assert x == 2
"""
MAKE = """set -e
cd /testbed
git init -q
git config user.name t
git config user.email t@example.org
git add -A
git commit -q -m base
echo 'x = 2' >pkg/core.py
git commit -q -a -m fix
git tag later
git reset -q --hard HEAD^
echo 'version = 1' >pkg/_version.py
python3 -m venv --without-pip {venv}
cp -r /packages/. {venv}/lib/python3*/site-packages/
echo /testbed >$(echo {venv}/lib/python3*/site-packages)/project.pth
git rev-parse HEAD
"""


def packed(files):
    """A tar of the files in `testbed`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"testbed/{path}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def built(docker_images):
    """`built(tag, venv)` makes an image, and gives the base commit."""
    client = docker.from_env()
    run, tags = uuid.uuid4().hex[:12], []

    def build(tag, venv, pytest_version=None):
        tag = f"hermes-test-swe-{run}.{tag}:latest"
        script = MAKE.format(venv=venv)
        if pytest_version:
            where = f"$(echo {venv}/lib/python3*/site-packages)/pytest/__init__.py"
            script = script.replace(
                "git rev-parse", f"echo '__version__ = \"{pytest_version}\"' >{where}\ngit rev-parse"
            )
        container = client.containers.create(docker_images[0], ["sh", "-ec", script], entrypoint="")
        try:
            container.put_archive("/", packed(PROJECT))
            container.put_archive("/", packages("packages"))
            container.start()
            assert container.wait()["StatusCode"] == 0, container.logs()
            commit = container.logs(stderr=False).decode().split()[-1]
            container.commit(tag)
            tags.append(tag)
        finally:
            container.remove(force=True)
        return tag, commit

    yield build
    for tag in tags:
        client.images.remove(tag, force=True)
    client.close()


@pytest.fixture
async def runtime():
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker]) as made:
        yield made


def write(folder, *rows):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset_name": str(path), "repo_base_url": "image:/testbed"}


async def test_a_row_of_swe_bench_in_its_image(runtime, built, tmp_path, caplog):
    tag, commit = built("owner_1776_name-1234", CONDA)
    row = swe_bench(
        base_commit=commit,
        test_patch=TEST_PATCH,
        PASS_TO_PASS='["tests/test_core.py::test_int"]',
    )
    template = tag.replace("owner_1776_name-1234", "{id_1776}")
    env = {**write(tmp_path, row), "image_template": template}
    with caplog.at_level(logging.WARNING, "hermes_core.swe_smith"):
        outcome = await validate(runtime, "swe-smith", env=env, backend="docker")
    assert outcome.sound, outcome.unsound
    assert "agents can read what may be the solution" in caplog.text
    assert "/testbed/.git/objects" in caplog.text
    seen = Shell(
        "cd name && git log --oneline | wc -l && cat pkg/_version.py tests/test_core.py && "
        "PATH=$PWD/../.venv/bin:$PATH python -c 'import pkg.core; print(pkg.core.__file__)' && "
        "echo 'def test_x(): pass' >tests/test_core.py"
    )
    record = (await roll_out(runtime, seen, env=env, backend="docker"))["Owner__name-1234"]
    answer = json.loads(record["messages"][-1]["content"])["output"]
    assert answer.startswith(f"1\nversion = 1\n{OLD}")
    assert answer.splitlines()[-1].endswith("/name/pkg/core.py")
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["restored"] == ["tests/test_core.py"]
    assert record["details"]["failing"] == ["tests/test_core.py::test_x"]
    fixed = Shell("cd name && echo 'x = 2' >pkg/core.py && echo 'import os; os._exit(0)' >tests/test_core.py")
    record = (await roll_out(runtime, fixed, env=env, backend="docker"))["Owner__name-1234"]
    assert (record["reward"], record["failure"]) == (1.0, None)


async def test_a_row_of_r2e_in_its_image(runtime, built, tmp_path):
    tag, _ = built("r2e", "/testbed/.venv")
    executed = {
        "test_file_names": ["test_1.py"],
        "test_file_codes": ["from pkg.core import x\nclass TestX:\n    def test_x(self): assert x == 2\n"],
        "old_commit_res_stdout": "= short test summary info =\nFAILED r2e_tests/test_1.py::TestX::test_x\n",
    }
    row = r2e(
        docker_image=tag,
        execution_result_content=json.dumps(executed),
        expected_output_json='{"TestX.test_x": "PASSED"}',
        parsed_commit_content=json.dumps(
            {"file_diffs": [change("pkg/core.py", ("deleted", "x = 3"), ("added", "x = 2"))]}
        ),
    )
    env = {**write(tmp_path, row), "use_image_name": True}
    outcome = await validate(runtime, "swe-smith", env=env, backend="docker")
    assert outcome.sound, outcome.unsound


async def test_an_image_that_can_not_be_used_is_a_failure_of_the_setup(runtime, built, docker_images, tmp_path):
    old, commit = built("old", CONDA, "6.2.5")
    images = {"old": old, "none": docker_images[0], "wrong": old}
    rows = [
        swe_bench(instance_id=name, docker_image=tag, base_commit=commit, test_patch=TEST_PATCH)
        for name, tag in images.items()
    ]
    rows[2]["base_commit"] = "0" * 40
    env = {**write(tmp_path, *rows), "use_image_name": True}
    records = await roll_out(runtime, "oracle", env=env, backend="docker")
    failures = {name: record["failure"] for name, record in records.items()}
    assert {failure["kind"] for failure in failures.values()} == {"setup"}
    assert "pytest 6.2.5; 7.0 or newer is needed" in failures["old"]["message"]
    assert "no repository in /testbed" in failures["none"]["message"]
    assert "can't be taken from the image" in failures["wrong"]["message"]
    env["image_python"] = "/opt/nowhere/bin/python"
    rows[:] = rows[:1]
    record = (await roll_out(runtime, "oracle", env={**env, **write(tmp_path, *rows)}, backend="docker"))["old"]
    assert "no Python in /opt/nowhere/bin/python" in record["failure"]["message"]
