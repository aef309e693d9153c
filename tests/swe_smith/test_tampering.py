"""Whole rollouts in projects where canaries do not work, or disturb the real tests: nobody is punished for it."""

import hermes_swe_smith
import pytest

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from tests.swe_smith.shapes import TESTS, plain, write

COUNTS = """\
import pathlib
def test_count():
    with open("tests/test_core.py") as file:
        assert file.read().count("def test_") == 2
    assert len(list(pathlib.Path("tests").glob("test_*.py"))) == 2
"""
KNOWN = """\
import pytest
@pytest.fixture(autouse=True)
def known(request):
    if request.node.name not in ("test_double", "test_half"):
        pytest.skip("unknown")
"""
SKIPS = (
    f"import pytest\n{TESTS}@pytest.mark.skip\ndef test_skips(): pass\n@pytest.mark.xfail\ndef test_no(): assert 0\n"
)
SHAPES = {
    "works": plain(),
    "does not work": plain({"tests/conftest.py": KNOWN}),
    "disturbs": plain(
        {"tests/test_more.py": COUNTS}, keep=("tests/test_core.py::test_half", "tests/test_more.py::test_count")
    ),
    "skips": plain(
        {"tests/test_core.py": SKIPS}, keep=[f"tests/test_core.py::test_{name}" for name in ("half", "skips", "no")]
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("agent", ["oracle", pytest.param("nop", marks=pytest.mark.stress)])
async def test_honest_work_in_odd_projects(tmp_path, agent):
    tasks = write(tmp_path, SHAPES)
    details, rewards = {}, {}

    def keep(record):
        assert record["failure"] is None, record
        details[record["item_id"]], rewards[record["item_id"]] = record["details"], record["reward"]

    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith]) as runtime:
        if Isolation.USER not in runtime.backend("local").capabilities.isolation:
            pytest.skip("this host grants no isolation between slots")
        env = {"dataset_name": str(tasks), "repo_base_url": str(tmp_path), "shuffle": False}
        await run_rollouts(runtime, "swe-smith", agent, env=env, on_record=keep, isolation="user", concurrency=2)
    assert rewards == dict.fromkeys(SHAPES, 1.0 if agent == "oracle" else 0.0)
    assert not [name for name, said in details.items() if "tampered" in said]
    for said in details.values():
        assert said["pass_to_pass"]["passed"] == said["pass_to_pass"]["total"], said
    assert "no_canary" not in details["works"] and "no_canary" not in details["skips"]
    assert details["disturbs"]["no_canary"].endswith("tests/test_more.py::test_count")
    if agent == "oracle":  # beside failing tests, the canary need not work
        assert details["does not work"]["no_canary"].startswith("on the clean tree, tests/test_core_")
