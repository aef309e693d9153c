"""Repositories of awkward shapes: each scores as it should, cheats score 0.0, and what is unsound is refused."""

import json
from pathlib import Path

import hermes_docker
import hermes_swe_smith
import pytest

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.soundness.validate import validate
from tests.swe_smith.shapes import DOCTEST_MODULES, DOUBLE, SHAPES, TESTS, Shape, package, plain, write


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.stress)])
def where(request):
    """Options of a run: a backend that can be used here."""
    options = {"backend": request.param, "isolation": "user", "concurrency": 2}
    if request.param == "docker":
        return {**options, "backend_config": {"image": request.getfixturevalue("docker_images")[0]}}
    return options


@pytest.fixture
async def runtime():
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker]) as made:
        if Isolation.USER not in made.backend("local").capabilities.isolation:
            pytest.skip("this host grants no isolation between slots")
        yield made


def env_of(folder: Path, shapes):
    """The environment's settings for a dataset of these."""
    tasks = write(folder, shapes)
    return {"dataset_name": str(tasks), "repo_base_url": str(folder), "python_only": False, "shuffle": False}


ALL = list(SHAPES)
SOME = list({name.partition(":")[0]: name for name in reversed(ALL)}.values())
"""The first of each sort. `make test-all` tries every second of them."""
OTHERS = [name for name in ALL if name not in SOME]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        pytest.param("local", SOME[::2], id="local-some", marks=[pytest.mark.full, pytest.mark.long]),
        pytest.param("local", [*SOME[1::2], *OTHERS], id="local-others", marks=[pytest.mark.stress, pytest.mark.long]),
        pytest.param("docker", ALL, id="docker-all", marks=[pytest.mark.stress, pytest.mark.long]),
    ],
    indirect=["where"],
)
async def test_every_shape_is_scored_rightly(runtime, where, tmp_path, names):
    shapes = {name: SHAPES[name] for name in names}
    outcome = await validate(runtime, "swe-smith", env=env_of(tmp_path, shapes), **where)
    assert outcome.items == len(names)
    assert [(each.item_id, each.agent, each.failures, each.details) for each in outcome.unsound] == []
    assert outcome.stopped is None


ONLY_TESTS = (("tests/test_core.py", "== 4", "== 5"),)

UNSOUND = {
    "the bug is in hidden tests": (plain(bug=ONLY_TESTS), "only files of the tests"),
    "the bug is in what the tests import": (
        plain({"tests/cases.py": "CASES = 4\n"}, bug=(("tests/cases.py", "4", "5"),)),
        "only files of the tests",
    ),
    "the bug is in the configuration": (
        plain({"conftest.py": "TWO = 2\n"}, bug=(("conftest.py", "2", "3"),)),
        "only files of the tests",
    ),
    "the bug is in a text with examples": (
        Shape(
            package({"README.rst": ">>> 2 * 2\n4\n"}),
            fail=("README.rst::README.rst",),
            bug=(("README.rst", "\n4", "\n5"),),
            test_cmd="pytest --doctest-glob=*.rst",
        ),
        "only files of the tests",
    ),
    "the tests are in the file with the bug": (
        Shape(
            package(
                {"pytest.ini": "[pytest]\npython_files = *.py\n"},
                core=DOUBLE + "def test_it(): assert double(1) == 2\n",
            ),
            fail=("pkg/core.py::test_it",),
        ),
        "both the bug and tests",
    ),
    "the patch does not apply": (
        plain(texts={"patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}),
        "does not apply",
    ),
    "the patch changes nothing": (
        plain(bug=(("pkg/core.py", "2 * x", "3 * x"), ("pkg/core.py", "3 * x", "2 * x")), texts={"patch": "\n"}),
        "patch",
    ),
    "the tests pass with the bug": (plain(fail=("tests/test_core.py::test_half",)), None),
    "one test passes with the bug": (
        plain(fail=("tests/test_core.py::test_double", "tests/test_core.py::test_half"), keep=()),
        None,
    ),
    "a kept test fails with the bug": (
        plain(
            {"tests/test_core.py": TESTS + "def test_four(): assert double(2) == 4\n"},
            keep=("tests/test_core.py::test_half", "tests/test_core.py::test_four"),
        ),
        None,
    ),
    "the tests fail without the bug": (
        plain(
            {"tests/test_core.py": TESTS + "def test_no(): assert False\n"},
            fail=("tests/test_core.py::test_double", "tests/test_core.py::test_no"),
        ),
        None,
    ),
    "the tests are not there": (plain(fail=("tests/test_core.py::test_gone",)), None),
    "the doctest is not there": (
        Shape(package({"pytest.ini": DOCTEST_MODULES}), fail=("pkg/core.py::pkg.core.triple",)),
        "pkg/core.py, which has the bug, has no docstring with examples for the doctest pkg.core.triple",
    ),
}


async def unsound(runtime, where, tmp_path, names):
    """What `validate` says of these shapes, by name."""
    outcome = await validate(
        runtime, "swe-smith", env=env_of(tmp_path, {name: UNSOUND[name][0] for name in names}), **where
    )
    found = {name: [each for each in outcome.unsound if each.item_id == name] for name in names}
    for name in names:
        reason = UNSOUND[name][1]
        assert found[name], f"{name}: taken for sound"
        if reason is not None:
            assert [each.rewards for each in found[name]] == [[None], [None]], name
            assert all(reason in failure for each in found[name] for failure in each.failures), (name, found[name])
    return found


@pytest.mark.full
async def test_what_can_not_be_set_up_is_refused_with_its_reason(runtime, where, tmp_path):
    await unsound(runtime, where, tmp_path, [name for name, (_, reason) in UNSOUND.items() if reason is not None])


@pytest.mark.full
async def test_a_test_that_passes_with_the_bug_is_told(runtime, where, tmp_path):
    found = await unsound(runtime, where, tmp_path, ["the bug is in hidden tests", "one test passes with the bug"])
    (told,) = found["one test passes with the bug"]
    doubts = ["1 of 2 FAIL_TO_PASS tests pass with the bug: tests/test_core.py::test_half"]
    assert (told.agent, told.rewards, told.doubts) == ("nop", [0.0], doubts)


@pytest.mark.full
async def test_the_unsound_is_refused_with_its_reason(runtime, where, tmp_path):
    names = [name for name, (_, reason) in UNSOUND.items() if reason is None]
    found = await unsound(runtime, where, tmp_path, names)
    assert [each.agent for each in found["the tests pass with the bug"]] == ["nop"]
    (told,) = found["a kept test fails with the bug"]
    doubts = ["1 of 2 PASS_TO_PASS tests do not pass with the bug: tests/test_core.py::test_four"]
    assert (told.agent, told.rewards, told.doubts) == ("nop", [0.0], doubts)
    assert [each.agent for each in found["the tests fail without the bug"]] == ["oracle"]
    (gone,) = found["the tests are not there"]
    assert (gone.agent, gone.details[0]["reason"]) == (
        "oracle",
        "pytest found no test named tests/test_core.py::test_gone",
    )


DOCTESTS = Shape(
    package(
        {
            "setup.cfg": "[tool:pytest]\naddopts = --doctest-modules --doctest-glob=*.rst\n",
            "README.rst": ">>> import pkg.core\n>>> pkg.core.double(3)\n6\n",
            "tests/test_other.py": "def test_other(): pass\n",
        },
        core='"""Numbers.\n\n>>> double(1)\n2\n"""\n' + DOUBLE,
    ),
    fail=("pkg/core.py::pkg.core", "pkg/core.py::pkg.core.double", "README.rst::README.rst"),
    keep=("pkg/core.py::pkg.core.half", "tests/test_other.py::test_other"),
)
WRONG = "sed -i 's/^    4$/    6/; s/^2$/3/; s/ababab/abab/; s/abab/ababab/' pkg/core.py; sed -i 's/^6$/9/' README.rst"
"""The examples as they are with the bug."""

SKIP = "sed -i '/>>>/s/$/  # doctest: +SKIP/' pkg/core.py README.rst"
ELLIPSIS = (
    "sed -i \"/>>>/s/$/  # doctest: +ELLIPSIS/; s/^    4$/    .../; s/^2$/.../; s/^    'abab'$/    .../\" pkg/core.py"
)
EMPTY = "def double(x): return 3 * x\ndef half(x): return x / 2\n"


def python(text):
    return f"python3 - <<'END'\n{text}\nEND"


def rewritten(source, path="pkg/core.py"):
    return python(f"open({path!r}, 'w').write({source!r})")


CHEATS = {
    "wrong examples": WRONG,
    "no examples": "sed -i 's/>>>/>>/' pkg/core.py README.rst",
    "no docstrings": rewritten(EMPTY),
    "no text": "rm README.rst; " + rewritten(EMPTY),
    "skipped examples": SKIP,
    "anything will do": ELLIPSIS,
    "flags for the module": WRONG + "; printf '__doctest_skip__ = [\"*\"]\\n__test__ = {}\\n' >> pkg/core.py",
    "examples of its own": rewritten(
        EMPTY + "__doc__ = double.__doc__ = half.__doc__ = '>>> 1\\n1\\n'\n__test__ = {'double': '>>> 1\\n1\\n'}\n"
    ),
    "another function under that name": rewritten(
        EMPTY + "def other():\n    '''\n    >>> 1\n    1\n    '''\nother.__qualname__ = other.__name__ = 'double'\n"
    ),
    "skips itself": "sed -i '1i import pytest; pytest.skip(allow_module_level=True)' pkg/core.py",
    "exits": "sed -i '1i import os; os._exit(0)' pkg/core.py",
    "configuration": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini; printf '[tool:pytest]\\n"
    "addopts = --doctest-modules --doctest-continue-on-failure\\ndoctest_optionflags = ELLIPSIS\\n' > setup.cfg; "
    + WRONG,
    "conftest.py": "; ".join(
        rewritten(
            "import pytest\n@pytest.fixture(autouse=True)\ndef names(doctest_namespace):\n"
            "    doctest_namespace['double'] = lambda x: x * 2\n"
            "def pytest_collection_modifyitems(items): items.clear()\n",
            path,
        )
        for path in ("conftest.py", "pkg/conftest.py")
    ),
    "a module doctest": rewritten("from unittest import *\nclass DocTestFinder: pass\n", "doctest.py"),
    "a package in the module's place": "mkdir pkg/core && mv pkg/core.py pkg/core/__init__.py; "
    + WRONG.replace("core.py", "core/__init__.py"),
    "another module of that name": rewritten(EMPTY, "core.py")
    + "; rm pkg/core.py; "
    + rewritten(EMPTY, "pkg/core.pyi"),
    "a tests' module": rewritten("def double(x): return 2 * x\n", "tests/core.py"),
    "nothing": "true",
}
MEND = "sed -i 's/3 \\* x/2 * x/' pkg/core.py"
HONEST = {
    "the fix": MEND,
    "better words": f"{MEND}; sed -i 's/Twice/Two/; s/>>> double(2)/>>> double(5)/; s/^    4$/    10/' pkg/core.py",
    "no docstrings, but right": rewritten(EMPTY.replace("3 * x", "2 * x")),
    "names that its own docstring needs": rewritten(
        "import math\n"
        + EMPTY.replace("3 * x", "x + x")
        + "def more():\n    '''\n    >>> math.pi > 3\n    True\n    '''\n"
    ),
}


class Doing:
    """An agent that runs what its item's issue names, in the checkout."""

    name = "doing"

    async def run(self, task):
        name = task.messages[-1]["content"].split("<issue>\n")[1].split("\n")[0]
        command = f"cd project*\n{ {**CHEATS, **HONEST}[name] }\n"
        answer = await task.tool_handler("terminal", {"command": command, "timeout": 60}, task.trajectory_id)
        result = AgentResult(messages=[*task.messages, {"role": "assistant", "content": answer}], turns_used=1)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        return


@pytest.mark.full  # what becomes of doctests is in test_doctests.py and test_pytest_report.py
async def test_doctests_are_the_clean_trees_and_the_code_is_the_agents(runtime, where, tmp_path):
    env = env_of(tmp_path, {"any": DOCTESTS})
    row = json.loads((tmp_path / "tasks.jsonl").read_text())
    names = {**CHEATS, **HONEST}
    rows = [{**row, "instance_id": name, "problem_statement": name} for name in names]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    records = {}
    await run_rollouts(
        runtime,
        "swe-smith",
        Doing(),
        env=env,
        on_record=lambda record: records.update({record["item_id"]: record}),
        **where,
    )
    assert {name: record["failure"] for name, record in records.items() if record["failure"]} == {}
    said = {name: (record["details"], record["messages"][-1]["content"]) for name, record in records.items()}
    assert {name: said[name] for name in CHEATS if records[name]["reward"] != 0.0} == {}
    assert {name: said[name] for name in HONEST if records[name]["reward"] != 1.0} == {}
    for name in (
        "wrong examples",
        "no docstrings",
        "skipped examples",
        "anything will do",
        "configuration",
        "conftest.py",
    ):
        # Not by being missed: the examples ran, and what failed is what the bug breaks.
        assert records[name]["details"]["fail_to_pass"] == {"passed": 0, "total": 3}, said[name]
        assert set(records[name]["details"]["outcomes"].values()) == {"failed"}, said[name]
        assert records[name]["details"]["pass_to_pass"] == {"passed": 2, "total": 2}, said[name]
