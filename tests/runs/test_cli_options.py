"""Settings on the command line: how `--env.KEY=VALUE` is split off, typed and merged; options made for settings."""

from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import BaseModel, Field

from hermes_core.cli.options import (
    SettingOption,
    collect_settings,
    merge_options,
    read_config,
    read_value,
    setting_option,
    split_dotted,
)
from hermes_core.cli.rollouts import rescore, rollout, validate


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
    values = merge_options(file, {"names": "y,z", "variables.B": "3", "inner.flag": "yes"}, Config)
    config = Config.model_validate(values)
    assert config.names == ("y", "z")
    assert config.variables == {"A": "1", "B": "3"}
    assert config.inner.flag is True
    assert file["variables"]["B"] == "2"


def test_unknown_keys_are_left_for_the_model_to_refuse():
    assert merge_options({}, {"nonsense": "1"}, Config) == {"nonsense": "1"}


def test_a_file_has_sections(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("env: {max_items: 3}\nagent: oracle\nbackend: {name: local}\nrun: {concurrency: 2}\n")
    assert read_config(path) == {
        "env": {"max_items": 3},
        "agent": {"name": "oracle"},
        "backend": {"name": "local"},
        "run": {"concurrency": 2},
    }


class Made(BaseModel):
    count: int = Field(default=50, ge=1)
    """How many to make. More take longer."""
    share: float | None = Field(default=0.5, gt=0)
    """The largest share that may fail, e.g. of 10. None is no limit."""
    where: str | None = None
    """The folder. It is made. None is the working directory; it must be empty."""
    most: int = 0
    """The most that are kept. 0 is all."""
    tests: tuple[str, ...] = ()
    """Path of a test. Empty is all."""
    strict: bool = False
    """Whether to stop at a failure."""


@click.command()
@setting_option(Made, "count", metavar="N")
@setting_option(Made, "share")
@setting_option(Made, "where", "--to")
@setting_option(Made, "most")
@setting_option(Made, "tests")
@setting_option(Made, "strict")
@click.option("--other", default=1)
@click.pass_context
def make(ctx: click.Context, **given: Any) -> None:
    click.echo(repr(collect_settings(ctx, Made)))


@pytest.mark.parametrize(
    "line",
    [
        "--count N        How many to make [50].",
        "--share FLOAT    The largest share that may fail, e.g. of 10 [0.5].",
        "--to TEXT        The folder [the working directory].",
        "--most INTEGER   The most that are kept [all].",
        "--tests TEXT     Path of a test [all]. Can be given more than once.",
        "--strict         Whether to stop at a failure.",
    ],
)
def test_the_help_of_an_option_is_what_its_setting_says(line: str) -> None:
    assert f"  {line}\n" in CliRunner().invoke(make, ["--help"]).output


def test_only_what_is_given_is_set() -> None:
    assert CliRunner().invoke(make, []).output == "{}\n"
    given = ["--count", "3", "--to", "x", "--tests", "a", "--tests", "b", "--strict"]
    assert (
        CliRunner().invoke(make, given).output
        == repr({"count": 3, "where": "x", "tests": ("a", "b"), "strict": True}) + "\n"
    )
    assert "'x' is not a valid integer" in CliRunner().invoke(make, ["--count", "x"]).output


@pytest.mark.parametrize("command", [rollout, validate, rescore])
def test_the_options_of_a_run_have_no_defaults_of_their_own(command: click.Command) -> None:
    settings = [option for option in command.params if isinstance(option, SettingOption)]
    assert {"backend", "concurrency", "stop_on_infra"} <= {option.name for option in settings}
    assert [option.name for option in settings if option.default is not None] == []
