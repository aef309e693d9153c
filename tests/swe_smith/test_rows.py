"""Rows of every variant as tasks, and the refusal of what could be two things."""

import array
import json

import pytest
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.rows import parse_row

from hermes_core.errors import DatasetError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def row(**changes):
    fields = {
        "instance_id": "owner__name.01234567.func_pm_op_swap__abcdefgh",
        "patch": "diff --git a/x.py b/x.py\n",
        "FAIL_TO_PASS": ["tests/test_x.py::test_a"],
        "PASS_TO_PASS": ["tests/test_x.py::test_b", "tests/test_y.py::test_c"],
        "image_name": "",
        "repo": "swesmith/owner__name.01234567",
        "problem_statement": "It is broken.",
    }
    return {**fields, **changes}


def parse(fields, **config):
    return parse_row(fields, "tasks.jsonl, line 3", SweSmithConfig(**config))


def test_the_seven_fields():
    task = parse(row())
    assert (task.variant, task.base_is, task.patch_is) == ("swe-smith", "clean", "bug")
    assert task.base_commit is None
    assert task.directory == "name"
    assert task.node_ids == ("tests/test_x.py::test_a", "tests/test_x.py::test_b", "tests/test_y.py::test_c")
    assert task.test_files == ("tests/test_x.py", "tests/test_y.py")
    assert task.fail_to_pass_files == ("tests/test_x.py",)


def test_rows_of_mid_2025_have_the_commit_of_the_buggy_tree():
    task = parse(row(base_commit=COMMIT, created_at="2025-06-01"))
    assert (task.variant, task.base_is, task.patch_is) == ("swe-smith-2025", "buggy", "bug")


def oracle_row(**changes):
    return row(repo="owner/name", base_commit=COMMIT, text="[start of x.py]", **changes)


def test_whether_an_oracle_patch_is_the_fix_must_be_said():
    with pytest.raises(DatasetError, match="patch_is"):
        parse(oracle_row())
    fix = parse(oracle_row(), patch_is="fix")
    assert (fix.variant, fix.base_is, fix.patch_is) == ("oracle", "buggy", "fix")
    bug = parse(oracle_row(), patch_is="bug")
    assert (bug.base_is, bug.patch_is) == ("clean", "bug")
    assert bug.directory == "name"


def test_a_row_can_say_itself_whether_its_patch_is_the_fix():
    fix, bug = (parse(oracle_row(patch_is=said)) for said in ("fix", "bug"))
    assert (fix.base_is, fix.patch_is) == ("buggy", "fix")
    assert (bug.base_is, bug.patch_is) == ("clean", "bug")
    assert parse(oracle_row(patch_is="fix"), patch_is="fix").patch_is == "fix"
    with pytest.raises(DatasetError, match="'patch_is' is 'fix', and the setting patch_is is 'bug'") as refused:
        parse(oracle_row(patch_is="fix"), patch_is="bug")
    assert "leave out the setting" in str(refused.value)


def test_an_oracle_row_without_patch_is_the_buggy_tree():
    task = parse(oracle_row(patch=None))
    assert (task.base_is, task.patch) == ("buggy", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"base_commit": COMMIT},
        {"base_commit": COMMIT, "text": "x"},
        {"base_commit": COMMIT, "created_at": "2025", "text": "x"},
        {"base_commit": COMMIT, "created_at": "2025", "repo": "owner/name"},
    ],
)
def test_what_could_be_two_variants_is_refused_until_it_is_said(changes):
    with pytest.raises(DatasetError, match=r"set variant to") as refused:
        parse(row(**changes))
    assert "line 3" in str(refused.value)
    assert parse(row(**changes), variant="swe-smith-2025").base_is == "buggy"


def test_null_counts_as_absent():
    assert parse(row(base_commit=None, created_at=None, text=None)).variant == "swe-smith"


def test_lists_may_be_json_text_tuples_or_arrays():
    class Array:
        def tolist(self):
            return ["tests/test_x.py::test_b"]

    ids = ["tests/test_x.py::test_a[\"'$|<\\]"]
    task = parse(row(FAIL_TO_PASS=json.dumps(ids), PASS_TO_PASS=Array()))
    assert task.fail_to_pass == tuple(ids)
    assert task.pass_to_pass == ("tests/test_x.py::test_b",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("FAIL_TO_PASS", []),
        ("FAIL_TO_PASS", "tests/test_x.py::test_a"),
        ("FAIL_TO_PASS", [1]),
        ("PASS_TO_PASS", {"a": 1}),
        ("PASS_TO_PASS", array.array("i", [1])),
        ("FAIL_TO_PASS", ["/etc/passwd::x"]),
        ("FAIL_TO_PASS", ["../x.py::x"]),
        ("FAIL_TO_PASS", ["::x"]),
        ("PASS_TO_PASS", ["a\nb.py::x"]),
        ("repo", "name"),
        ("repo", "owner/../name"),
        ("repo", "owner/name;rm"),
        ("problem_statement", 5),
        ("problem_statement", ""),
        ("patch", ["x"]),
        ("patch_is", "mend"),
        ("base_commit", "main"),
        ("base_commit", "0123456"),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(DatasetError) as error:
        parse(row(**{field: value}))
    message = str(error.value)
    assert "tasks.jsonl, line 3" in message
    assert "owner__name.01234567.func_pm_op_swap__abcdefgh" in message
    assert field in message
    assert error.value.hint


@pytest.mark.parametrize("field", ["patch", "FAIL_TO_PASS", "PASS_TO_PASS", "repo", "problem_statement", "instance_id"])
@pytest.mark.parametrize("gone", ["absent", "null"])
def test_a_missing_field_is_named(field, gone):
    fields = row(**{field: None})
    if gone == "absent":
        del fields[field]
    with pytest.raises(DatasetError, match=field):
        parse(fields)


@pytest.mark.parametrize("name", ["id", "problem_id"])
def test_other_names_of_the_id(name):
    fields = row()
    fields[name] = fields.pop("instance_id")
    assert parse(fields).instance_id.startswith("owner__name")


PRO = {"fail_to_pass": "['tests/test_x.py::test_a[\\'x\\']']", "pass_to_pass": "['tests/test_x.py::test_b',]"}
TESTS = ("tests/test_x.py::test_a['x']", "tests/test_x.py::test_b")


def pro(**changes):
    fields = row(repo="owner/name", base_commit=COMMIT, test_patch="diff\n", dockerhub_tag="owner.name-1", **PRO)
    return {key: value for key, value in {**fields, **changes}.items() if not key.isupper()}


@pytest.mark.parametrize(
    "fields",
    [
        pro(),
        {key.upper(): value for key, value in pro().items()},
        {"instance": pro(), "problem_statement": "another", "prompt": "{}"},
        {"info": json.dumps(pro()), "answer": None},
        {"extra_info": {"index": 3, "instance": pro()}},
        {"responses_create_params": {"metadata": {"instance_id": "x", "instance_dict": json.dumps(pro())}}},
    ],
    ids=["lower case", "upper case", "instance", "JSON text", "two levels", "three levels"],
)
def test_other_ways_to_write_a_row(fields):
    task = parse(fields, image_template="pro/images:{dockerhub_tag}")
    assert (task.variant, task.node_ids, task.image) == ("swe-bench", TESTS, "pro/images:owner.name-1")
    assert (task.instance_id, task.problem_statement) == (row()["instance_id"], "It is broken.")


def test_the_tag_that_a_template_needs_is_asked_for():
    with pytest.raises(DatasetError, match="field 'dockerhub_tag' is missing"):
        parse(pro(dockerhub_tag=None), image_template="pro/images:{dockerhub_tag}")


@pytest.mark.parametrize(
    ("node_id", "path", "kept"),
    [
        ("tests/test_x.py::TestX::test_a@group", "tests/test_x.py", "tests/test_x.py::TestX::test_a"),
        ("tests/test_x.py::test_a[x@y]@a b", "tests/test_x.py", "tests/test_x.py::test_a[x@y]"),
        ("tests/test_x.py::test_a[x@y]", "tests/test_x.py", ""),
        ("tests/test_x.py::test_a[b.py::c]", "tests/test_x.py", ""),
        ("a@b/br[acket/a::b/test_x.py::test_a", "a@b/br[acket/a::b/test_x.py", ""),
        ("docs/a.rst::a.rst", "docs/a.rst", ""),
    ],
)
def test_the_parts_of_a_node_id(node_id, path, kept):
    for variant, repo in ((row, "swesmith/owner__name.01234567"), (pro, "owner/name")):
        task = parse(variant(FAIL_TO_PASS=[node_id], fail_to_pass=[node_id], repo=repo))
        assert task.fail_to_pass == (kept or node_id,) and task.fail_to_pass_files == (path,)


def test_a_patch_without_a_last_line_end_is_ended():
    assert parse(row(patch="diff")).patch == "diff\n"


@pytest.mark.parametrize(
    ("repo", "directory"),
    [
        ("swesmith/Suor__funcy.70fb6e8b", "funcy"),
        ("swesmith/a__b__c.70fb6e8b", "b__c"),
        ("swesmith/Suor__funcy.js.70fb6e8b", "funcy.js"),
        ("owner/name.git", "name"),
        ("owner/name.70fb6e8b", "name.70fb6e8b"),
    ],
)
def test_the_directory_of_a_repository_follows_from_its_name(repo, directory):
    assert parse(row(repo=repo)).directory == directory


def test_the_image_of_a_row_is_used_where_that_is_asked_for():
    named = row(image_name="example/image")
    assert parse(named).image is None
    assert parse(named, use_image_name=True).image == "example/image"
    with pytest.raises(DatasetError, match="image_name"):
        parse(row(image_name=""), use_image_name=True)
