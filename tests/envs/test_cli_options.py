"""`--env.KEY=VALUE`: how it is split off, typed and merged."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from hermes_core.cli.options import merged, read_config, read_value, split_dotted
from hermes_core.errors import ConfigError, UnknownNameError, UsageError


def test_both_spellings_and_flags_are_split_from_the_other_arguments():
    rest, found = split_dotted(
        ["tasks", "--env.dataset-name=a=b.jsonl", "--items", "3", "--env.max_items", "2", "--env.shuffle", "--json"]
    )
    assert rest == ["tasks", "--items", "3", "--json"]
    assert found == {"env": {"dataset_name": "a=b.jsonl", "max_items": "2", "shuffle": None}}


def test_after_two_dashes_nothing_is_an_option():
    assert split_dotted(["--", "--env.a=1"]) == (["--", "--env.a=1"], {})


def test_a_value_may_look_like_a_negative_number():
    assert split_dotted(["--env.seed", "-1"])[1] == {"env": {"seed": "-1"}}


def test_unknown_section_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'env'"):
        split_dotted(["--envs.a=1"])


def test_an_option_without_a_key_is_refused():
    with pytest.raises(UsageError, match=r"--env\.KEY=VALUE"):
        split_dotted(["--env.=1"])


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("3", int, "3"),  # pydantic reads numbers and booleans itself
        ("a,b", str, "a,b"),
        ("a, b", tuple[str, ...], ["a", "b"]),
        ("", tuple[str, ...], []),
        ('["a,b", "c"]', list[str], ["a,b", "c"]),
        ("a", tuple[str, ...] | None, ["a"]),
        ("null", tuple[str, ...] | None, None),
        ("none", str | None, None),
        ("none", str, "none"),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ("not json", dict[str, int], "not json"),
        ("none", Literal["none", "open"], "none"),
        ("7", Any, 7),
    ],
)
def test_a_value_is_read_as_its_type_asks(text, annotation, value):
    assert read_value(text, annotation) == value


class Inner(BaseModel):
    flag: bool = False


class Config(BaseModel):
    names: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    inner: Inner = Inner()


def test_the_command_line_wins_over_the_file_key_by_key():
    file = {"names": ["x"], "variables": {"A": "1", "B": "2"}}
    values = merged(file, {"names": "y,z", "variables.B": "3", "inner.flag": "yes"}, Config)
    config = Config.model_validate(values)
    assert config.names == ("y", "z")
    assert config.variables == {"A": "1", "B": "3"}
    assert config.inner.flag is True
    assert file["variables"]["B"] == "2"


def test_unknown_keys_are_left_for_the_model_to_refuse():
    assert merged({}, {"nonsense": "1"}, Config) == {"nonsense": "1"}


def test_a_file_has_sections(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("env: {max_items: 3}\nagent: oracle\nbackend: {name: local}\nrun: {concurrency: 2}\n")
    assert read_config(path) == {
        "env": {"max_items": 3},
        "agent": {"name": "oracle"},
        "backend": {"name": "local"},
        "run": {"concurrency": 2},
    }


def test_an_unknown_section_of_a_file_names_the_nearest(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("agents: {}\n")
    with pytest.raises(UnknownNameError, match="did you mean 'agent'"):
        read_config(path)


def test_a_section_that_is_no_mapping_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("env: [1]\n")
    with pytest.raises(ConfigError, match="section 'env'"):
        read_config(path)
