"""Datasets from JSONL, Parquet, folders and hub names, and errors that name file and line."""

import json

import pytest
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.dataset import load_tasks
from hermes_swe_smith.environment import SweSmithEnvironment

from hermes_core.datasets.files import read_rows
from hermes_core.errors import ConfigError, DatasetError


def row(number=1, **changes):
    fields = {
        "instance_id": f"o__n.01234567.bug__{number}",
        "patch": "diff\n",
        "FAIL_TO_PASS": ["tests/test_x.py::a"],
        "PASS_TO_PASS": ["tests/test_x.py::b"],
        "image_name": "",
        "repo": "swesmith/o__n.01234567",
        "problem_statement": "broken",
    }
    return {**fields, **changes}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    return path


def load(name, **config):
    settings = SweSmithConfig(dataset_name=str(name), **config)
    return load_tasks(read_rows(settings.dataset_name, settings.dataset_split), settings)


def test_a_jsonl_file_is_read(tmp_path):
    path = write_jsonl(tmp_path / "tasks.jsonl", [row(1), row(2)])
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    assert list(load(path)) == ["o__n.01234567.bug__1", "o__n.01234567.bug__2"]


def test_parquet_is_the_same(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(1), row(2)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    assert load(tmp_path / "tasks.parquet") == load(write_jsonl(tmp_path / "tasks.jsonl", rows))


def test_a_broken_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "tasks.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(DatasetError, match=r"tasks\.parquet"):
        load(tmp_path / "tasks.parquet")


def test_a_folder_has_the_files_of_a_split(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-0.jsonl", [row(1)])
    write_jsonl(tmp_path / "data" / "train-1.jsonl", [row(2)])
    write_jsonl(tmp_path / "data" / "test-0.jsonl", [row(3)])
    assert [task[-1] for task in load(tmp_path)] == ["1", "2"]
    with pytest.raises(DatasetError, match="dataset_split"):
        load(tmp_path, dataset_split="dev")


@pytest.mark.parametrize(
    ("text", "line"), [("{", 1), ('{"instance_id": 1}\n', 1), ("\n[]\n", 2), ("\n\n\xff\n", 3)], ids=repr
)
def test_the_line_of_a_wrong_row_is_named(tmp_path, text, line):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DatasetError, match=f"line {line}") as error:
        load(path)
    assert str(path) in str(error.value)
    assert error.value.hint


def test_the_same_instance_twice(tmp_path):
    with pytest.raises(DatasetError, match=r"line 2: .* twice"):
        load(write_jsonl(tmp_path / "tasks.jsonl", [row(1), row(1)]))


def test_python_only(tmp_path):
    other = row(2, PASS_TO_PASS=["README.md::README.md"])
    path = write_jsonl(tmp_path / "tasks.jsonl", [row(1), other])
    assert len(load(path)) == 1
    assert len(load(path, python_only=False)) == 2
    with pytest.raises(DatasetError, match="python_only"):
        load(write_jsonl(path, [other]))


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/missing/thing", "~/missing.parquet"])
def test_a_missing_path_is_no_hub_name(name):
    with pytest.raises(DatasetError, match="there is no dataset at"):
        load(name)


def test_no_path_and_no_name():
    with pytest.raises(DatasetError, match="neither a path nor"):
        load("what is this?")


def test_a_hub_name_is_loaded_by_split(monkeypatch):
    import types

    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [row(1)]

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(load("owner/name", dataset_split="test")) == 1
    assert asked == [("owner/name", "test")]


async def test_setup_names_the_nearest_repository(swe_dataset, tmp_path):
    rows = [json.loads(line) for line in (swe_dataset / "tasks.jsonl").read_text().splitlines()]
    rows[0]["repo"] = rows[0]["repo"].replace("ledgerline", "ledgerlime")
    path = write_jsonl(tmp_path / "tasks.jsonl", rows)
    environment = SweSmithEnvironment(SweSmithConfig(dataset_name=str(path), repo_base_url=str(swe_dataset)))
    with pytest.raises(DatasetError, match="did you mean") as error:
        await environment.setup()
    assert rows[0]["instance_id"] in str(error.value)


async def test_setup_names_a_missing_bundle(swe_dataset, tmp_path):
    (tmp_path / "repos.json").write_bytes((swe_dataset / "repos.json").read_bytes())
    config = SweSmithConfig(dataset_name=str(swe_dataset / "tasks.jsonl"), repo_base_url=str(tmp_path))
    with pytest.raises(DatasetError, match=r"bundle .* missing: .*ledgerline\.bundle"):
        await SweSmithEnvironment(config).setup()


@pytest.mark.parametrize("base", ["/nowhere/at/all", "."])
async def test_setup_refuses_a_base_that_is_no_catalog(swe_dataset, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = SweSmithConfig(dataset_name=str(swe_dataset / "tasks.jsonl"), repo_base_url=base)
    with pytest.raises(ConfigError, match="repo_base_url"):
        await SweSmithEnvironment(config).setup()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_commit": "main"}, "base_commit"),
        ({"python": "three"}, "python"),
        ({"bundle": None}, "bundle"),
        ({"test_cmd": "tox -e py"}, "does not run pytest"),
        ({"test_cmd": "pytest | tail"}, "more than one command"),
        ({"pythonpath": "../x"}, "leaves the checkout"),
        ({"requirements": [], "requirements_file": "missing.txt"}, "missing.txt"),
        ({"requirements": [], "requirements_file": "/etc/passwd"}, "leads out of the folder"),
        ({"bundle": "/etc/passwd"}, "leads out of the folder"),
        ({"bundle": "./../../../../../../../etc/passwd"}, "leads out of the folder|is missing"),
    ],
)
async def test_setup_names_what_is_wrong_in_repos_json(swe_dataset, tmp_path, change, message):
    entries = json.loads((swe_dataset / "repos.json").read_text())
    entries[0].update(change)
    (tmp_path / "repos.json").write_text(json.dumps(entries))
    (tmp_path / "ledgerline.bundle").write_bytes((swe_dataset / "ledgerline.bundle").read_bytes())
    config = SweSmithConfig(dataset_name=str(swe_dataset / "tasks.jsonl"), repo_base_url=str(tmp_path))
    with pytest.raises(DatasetError, match=message):
        await SweSmithEnvironment(config).setup()


async def test_the_prompt_says_where_the_project_is_and_what_is_wrong():
    environment = SweSmithEnvironment(SweSmithConfig(dataset_name="demo"))
    await environment.setup()
    try:
        item = environment.items()[0]
        prompt = environment.format_prompt(item)
        assert "`ledgerline`" in prompt
        assert item["problem_statement"].strip() in prompt
        assert "PYTHONPATH=$PWD python -m pytest" in prompt
        assert item["FAIL_TO_PASS"][0] not in prompt
        assert len(environment.items()) == 4
    finally:
        await environment.aclose()


def test_prompt_mode_with_text(swe_dataset, tmp_path):
    import asyncio

    rows = [json.loads(line) for line in (swe_dataset / "tasks.jsonl").read_text().splitlines()][:1]
    rows[0]["text"] = "[start of the file]"
    path = write_jsonl(tmp_path / "tasks.jsonl", rows)
    for mode, expected in (("problem_statement", False), ("problem_statement+text", True)):
        config = SweSmithConfig(dataset_name=str(path), repo_base_url=str(swe_dataset), prompt_mode=mode)
        environment = SweSmithEnvironment(config)
        asyncio.run(environment.setup())
        assert ("[start of the file]" in environment.format_prompt(environment.items()[0])) is expected
