"""Rows of SWE-bench, SWE-Gym and R2E-Gym as tasks, the names of their tests and images, and what is refused."""

import json
import logging

import pytest
from hermes_swe_smith.config import SweSmithConfig, image_name
from hermes_swe_smith.dataset import load_tasks
from hermes_swe_smith.environment import SweSmithEnvironment
from hermes_swe_smith.names import UnsupportedRow
from hermes_swe_smith.repos import Catalog
from hermes_swe_smith.rows import parse_row

from hermes_core.errors import ConfigError, DatasetError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FIX = "diff --git a/pkg/core.py b/pkg/core.py\n--- a/pkg/core.py\n+++ b/pkg/core.py\n@@ -1 +1 @@\n-x = 3\n+x = 2"
TEST_PATCH = (
    "diff --git a/tests/test_core.py b/tests/test_core.py\n--- a/tests/test_core.py\n+++ b/tests/test_core.py\n"
    "@@ -1 +1 @@\n-assert True\n+assert x == 2\n"
)


def parse(fields, **config):
    return parse_row(fields, "tasks.jsonl, line 3", SweSmithConfig(**config))


def swe_bench(**changes):
    """A row of SWE-bench Verified, with each of its fields."""
    fields = {
        "repo": "owner/name",
        "instance_id": "Owner__name-1234",
        "base_commit": COMMIT,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "It is broken.",
        "hints_text": "Look at pkg/core.py, line 1.",
        "created_at": "2022-03-01T00:00:00Z",
        "version": "1.3",
        "FAIL_TO_PASS": json.dumps(["tests/test_core.py::test_x"]),
        "PASS_TO_PASS": json.dumps(["tests/test_core.py::test_y"]),
        "environment_setup_commit": "f" * 40,
        "difficulty": "15 min - 1 hour",
    }
    return {**fields, **changes}


def swe_gym(**changes):
    """A row of SWE-Gym: lists, and no `environment_setup_commit`."""
    row = swe_bench(FAIL_TO_PASS=["tests/test_core.py::test_x"], PASS_TO_PASS=[], **changes)
    return {key: value for key, value in row.items() if key not in ("environment_setup_commit", "difficulty")}


@pytest.mark.parametrize("row", [swe_bench(), swe_gym()], ids=["swe-bench", "swe-gym"])
def test_a_row_of_swe_bench(row):
    task = parse(row)
    assert (task.variant, task.base_is, task.patch_is) == ("swe-bench", "buggy", "fix")
    assert (task.base_commit, task.repo, task.directory) == (COMMIT, "owner/name", "name")
    assert task.fail_to_pass == ("tests/test_core.py::test_x",)
    assert task.patch.endswith("+x = 2\n")
    assert task.test_patch == TEST_PATCH
    assert task.has_test_patch
    assert "Look at" not in task.problem_statement + task.text


def test_names_of_images():
    names = {
        "docker.io/swebench/sweb.eval.x86_64.{id_1776}:latest": "sweb.eval.x86_64.owner_1776_name-1234:latest",
        "docker.io/xingyaoww/sweb.eval.x86_64.{id_s}": "sweb.eval.x86_64.owner_s_name-1234",
        "local/{id}": "local/owner__name-1234",
    }
    for template, name in names.items():
        assert parse(swe_bench(), image_template=template).image.endswith(name)
        assert SweSmithEnvironment(SweSmithConfig(image_template=template)).item_images
    assert parse(swe_bench(docker_image="own:1"), use_image_name=True).image == "own:1"
    assert parse(swe_bench(docker_image="own:1")).image is None
    with pytest.raises(DatasetError, match="'image_name' is missing") as refused:
        parse(swe_bench(), use_image_name=True)
    assert "image_template" in str(refused.value)


@pytest.mark.parametrize("template", ["x/{instance_id}", "x/{0}", "x/{id", "x/{id.real.x}", "x/{}"])
def test_a_template_with_another_name_is_refused(template):
    with pytest.raises(ValueError, match="id_1776"):
        SweSmithConfig(image_template=template)
    with pytest.raises(ValueError, match="id_1776"):
        image_name(template, "a")


def test_a_name_without_file_is_of_the_one_file_that_the_test_patch_changes():
    task = parse(swe_bench(FAIL_TO_PASS=["test_x", "test_z[a b]"], PASS_TO_PASS='["test_y"]'))
    assert task.fail_to_pass == ("tests/test_core.py::test_x", "tests/test_core.py::test_z[a b]")
    assert task.pass_to_pass == ("tests/test_core.py::test_y",)
    both = TEST_PATCH + TEST_PATCH.replace("test_core", "test_other")
    with pytest.raises(UnsupportedRow, match="'test_x', without its file, and the test patch changes 2 files of tests"):
        parse(swe_bench(FAIL_TO_PASS=["test_x"], test_patch=both))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_x (app.tests.CoreTests)", "unittest's or Django's runner"),
        ("A message says what is wrong.", "no node id of pytest"),
        ("tests/test_core.py::test_x[a", "cut off"),
    ],
)
def test_names_of_other_runners_are_refused(name, reason):
    with pytest.raises(UnsupportedRow, match=reason) as refused:
        parse(swe_bench(FAIL_TO_PASS=[name]))
    assert "line 3, instance 'Owner__name-1234', field 'FAIL_TO_PASS'" in str(refused.value)


def test_a_name_that_was_cut_off_is_not_kept_among_those_that_pass():
    names = ["tests/test_core.py::test_y[a", "tests/test_core.py::test_y[b]"]
    assert parse(swe_bench(PASS_TO_PASS=names)).pass_to_pass == ("tests/test_core.py::test_y[b]",)


def test_rows_that_are_refused_are_left_out_if_that_is_said(caplog):
    django = swe_bench(instance_id="django__django-1", FAIL_TO_PASS=["test_x (a.B)"])
    rows = [("line 1", django), ("line 2", swe_bench()), ("line 3", {**django, "instance_id": "django__django-2"})]
    with pytest.raises(DatasetError, match="line 1") as refused:
        load_tasks(rows, SweSmithConfig())
    assert str(refused.value).count("skip_refused=true") == 1
    with caplog.at_level(logging.WARNING, "hermes_core.swe_smith"):
        assert list(load_tasks(rows, SweSmithConfig(skip_refused=True))) == ["Owner__name-1234"]
    assert "left out (skip_refused): 2 of 3 can't be used: line 1" in caplog.text
    assert "'test_x (a.B)'" in caplog.text
    with pytest.raises(DatasetError, match=r"nothing to do .* 1 of 1 can't be used"):
        load_tasks(rows[:1], SweSmithConfig(skip_refused=True))


TEST_FILE = """\
import unittest
from pkg.core import x

def test_one(): assert x == 2

class TestMore(unittest.TestCase):
    def test_two(self): assert x == 2
    def test_three(self): assert x == 2

def helper(): pass"""

BEFORE = """\
================ short test summary info ================
\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestMore::test_two\x1b[0m
FAILED r2e_tests/test_1.py::test_one - assert 3 == 2
FAILED r2e_tests/test_2.py::test_param[a.b-1] - assert 3 == 2
FAILED r2e_tests/test_2.py::TestSub::test_inherited
"""

EXPECTED = {
    "test_one": "PASSED",
    "\x1b[1mTestMore.test_two\x1b[0m": "PASSED",
    "TestMore.test_three - AssertionError": "FAILED",
    "test_param[a.b-1]": "PASSED",
    "TestSub.test_inherited": "PASSED",
    "": "FAILED",
}


def lines(*pairs):
    return {"all_lines": [{"type": kind, "content": text} for kind, text in pairs]}


def change(path, *pairs, old=1, new=1, **more):
    span = {"old_range": {"start": 1, "length": old}, "new_range": {"start": 1, "length": new}, "section": ""}
    return {
        "header": {"file": {"path": path}, "misc_line": None},
        "index_line": None,
        "is_binary_file": False,
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "hunks": [{"descriptor": span, "line_group": lines(*pairs)}],
        **more,
    }


def r2e(**changes):
    """A row of R2E-Gym, with each of its fields."""
    executed = {
        "repo_name": "name",
        "new_commit_hash": "f" * 40,
        "test_file_names": ["test_1.py", "test_2.py"],
        "test_file_codes": [
            TEST_FILE,
            "from .test_1 import TestMore\nclass TestSub(TestMore): pass\ndef test_param(p): pass\n",
        ],
        "old_commit_res_stdout": BEFORE,
        "new_commit_res_stdout": "",
    }
    commit = {
        "file_diffs": [
            change("pkg/core.py", ("deleted", "x = 3"), ("added", "x = 2"), ("note", "No newline at end of file")),
            change("tests/test_core.py", ("deleted", "a"), ("added", "b")),
            change("docs/index.rst", ("deleted", "a"), ("added", "b")),
        ]
    }
    fields = {
        "repo_name": "name",
        "docker_image": f"namanjain12/name_final:{'f' * 40}",
        "commit_hash": "f" * 40,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps(executed),
        "modified_files": ["pkg/core.py"],
        "modified_entity_summaries": [],
        "relevant_files": ["pkg/core.py"],
        "num_non_test_files": 1,
        "prompt": "Write an issue",
        "problem_statement": "Here it is:\n[ISSUE]\nIt is broken.\n[/ISSUE]\n",
        "expected_output_json": json.dumps(EXPECTED),
    }
    return {**fields, **changes}


def test_a_row_of_r2e():
    task = parse(r2e(), use_image_name=True)
    assert (task.variant, task.base_is, task.patch_is, task.base_commit) == ("r2e", "buggy", "fix", None)
    assert (task.instance_id, task.repo, task.directory) == (f"name-{'f' * 40}", "r2e/name", "name")
    assert task.problem_statement == "It is broken."
    assert task.image == f"namanjain12/name_final:{'f' * 40}"
    assert task.fail_to_pass == (
        "r2e_tests/test_1.py::test_one",
        "r2e_tests/test_2.py::test_param[a.b-1]",
        "r2e_tests/test_2.py::TestSub::test_inherited",
    )
    assert task.pass_to_pass == ("r2e_tests/test_1.py::TestMore::test_two",)
    assert task.patch == (
        "diff --git a/pkg/core.py b/pkg/core.py\n--- a/pkg/core.py\n+++ b/pkg/core.py\n"
        "@@ -1,1 +1,1 @@\n-x = 3\n+x = 2\n\\ No newline at end of file\n"
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expected_output_json": '{"test_nowhere": "PASSED"}'}, UnsupportedRow, "'test_nowhere', which is in none"),
        (
            {"expected_output_json": '{"TestMore.test_two": "PASSED"}'},
            UnsupportedRow,
            "no test that the fix makes pass",
        ),
        ({"expected_output_json": "[]"}, DatasetError, "'expected_output_json' is no JSON object"),
        ({"expected_output_json": ""}, DatasetError, "'expected_output_json' is missing or empty"),
        ({"execution_result_content": "{}"}, DatasetError, "test_file_names"),
        ({"execution_result_content": "[" * 100_000}, DatasetError, "no JSON"),
        (
            {"execution_result_content": '{"test_file_names": ["x\\ny.py"], "test_file_codes": [""]}'},
            DatasetError,
            "no Python module",
        ),
        ({"parsed_commit_content": '{"file_diffs": [{}]}'}, DatasetError, "'parsed_commit_content' can't be read"),
        ({"commit_hash": 3}, DatasetError, "'commit_hash' is missing or empty"),
        ({"repo_name": "../x"}, DatasetError, "'repo'"),
    ],
)
def test_a_wrong_row_of_r2e_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        parse(r2e(**changes))


def test_the_repository_of_r2e_is_in_its_image(tmp_path):
    source = Catalog.open("image:/testbed/").source(parse(r2e()))
    assert (source.checkout, source.commit, source.url, source.bundle) == ("/testbed", None, None, None)
    assert Catalog.open("image:/testbed").source(parse(swe_bench())).commit == COMMIT
    with pytest.raises(DatasetError, match="image:/testbed"):
        Catalog.open("https://example.org").source(parse(r2e()))
    with pytest.raises(ConfigError, match="names no directory"):
        Catalog.open("image:testbed")
    with pytest.raises(ConfigError, match="image:/testbed"):
        Catalog.open(str(tmp_path))
