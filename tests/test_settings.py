"""Settings: what comes first, what is refused, and which values never reach a log."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from hermes_core.errors import ConfigError, UnknownNameError
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.settings import RedactingFormatter, Redactor, Settings, read_mapping
from hermes_core.validation import validate_data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_source_comes_before_the_next(here: Path) -> None:
    (here / "settings.yaml").write_text(
        "model: from-yaml\nbase_url: http://yaml\nowner: from-yaml\ndefault_profile: x\n"
    )
    (here / ".env").write_text("HERMES_MODEL=from-dotenv\nHERMES_OWNER=from-dotenv\nOPENAI_BASE_URL=http://dotenv\n")
    environ = {"HERMES_CONFIG": "settings.yaml", "HERMES_MODEL": "from-environ", "HERMES_OWNER": "from-environ"}
    settings = Settings.load(environ, owner="given")
    assert settings.owner == "given"
    assert settings.model == "from-environ"
    assert settings.base_url == "http://dotenv"
    assert settings.default_profile == "x"


def test_the_environment_is_read_once_and_never_written(here: Path) -> None:
    (here / ".env").write_text("OPENAI_API_KEY=sk-from-the-file\nSOMETHING_ELSE=1\n")
    before = dict(os.environ)
    environ = {"HERMES_MODEL": "first"}
    settings = Settings.load(environ)
    environ["HERMES_MODEL"] = "second"
    assert settings.model == "first"
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "sk-from-the-file"
    assert dict(os.environ) == before
    with pytest.raises(ValidationError, match="frozen"):
        settings.model = "third"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "plugins"), [(None, None), ("", ()), (" ", ()), ("a,b", ("a", "b")), ("a, b ,", ("a", "b"))]
)
def test_the_list_of_plugins(here: Path, value: str | None, plugins: tuple[str, ...] | None) -> None:
    assert Settings.load({} if value is None else {"HERMES_PLUGINS": value}).plugins == plugins


def test_an_empty_variable_is_no_setting(here: Path) -> None:
    settings = Settings.load({"HERMES_MODEL": "", "OPENAI_API_KEY": "", "HERMES_STATE_DIR": ""})
    assert settings.model is settings.api_key is None
    assert settings.state_dir.is_absolute()


def test_the_state_directory_follows_xdg(here: Path) -> None:
    assert Settings.load({"XDG_STATE_HOME": "/var/state"}).state_dir == Path("/var/state/hermes-rl")
    assert Settings.load({"XDG_STATE_HOME": "relative"}).state_dir == Path.home() / ".local/state/hermes-rl"
    assert Settings.load({"HERMES_STATE_DIR": "/elsewhere"}).state_dir == Path("/elsewhere")


def test_a_misspelt_variable_is_mentioned_and_another_programs_is_not(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Settings.load({"HERMES_PLUGIN": "a", "HERMES_HOME": "/x"})
    assert caplog.messages == ["the environment variable HERMES_PLUGIN is not read: did you mean HERMES_PLUGINS?"]


def test_profiles_come_from_their_file(here: Path) -> None:
    (here / "profiles.yaml").write_text("default_profile: big\nprofiles:\n  big: {cpu: 4}\n  small:\n    cpu: 1\n")
    settings = Settings.load({"HERMES_PROFILES_FILE": "profiles.yaml"})
    assert settings.default_profile == "big"
    assert settings.profiles == {"big": {"cpu": 4}, "small": {"cpu": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile: {}", "did you mean 'profiles'"),
        ("profiles: 3", "profiles must be a mapping, not 3"),
        ("profiles: {}", "has no profiles"),
        ("profiles: {a: 3}", "profiles.a must be a mapping, not 3"),
        ("- a\n- b", "does not hold a mapping"),
        ("1: a", "does not hold a mapping"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
    ],
)
def test_a_wrong_profiles_file_is_refused(here: Path, text: str, message: str) -> None:
    (here / "profiles.yaml").write_text(text)
    with pytest.raises(ConfigError if "mean" not in message else UnknownNameError, match=message):
        Settings.load({"HERMES_PROFILES_FILE": "profiles.yaml"})


def test_missing_and_unreadable_files_are_named(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml, named by HERMES_CONFIG, can't be read"):
        Settings.load({"HERMES_CONFIG": "nowhere.yaml"})
    with pytest.raises(ConfigError, match="HERMES_ENV_FILE names nowhere"):
        Settings.load({"HERMES_ENV_FILE": "nowhere"})
    (here / "latin").write_bytes(b"K=\xff\n")
    with pytest.raises(ConfigError, match="latin can't be read"):
        Settings.load({"HERMES_ENV_FILE": "latin"})
    (here / "empty.yaml").write_text("")
    assert read_mapping(here / "empty.yaml") == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '{"mcpServers": {"a": {"url": "x"}, "a": {"url": "y"}}}',
            "not valid JSON: the key 'a' stands there",
        ),
        (
            "a.yaml",
            "b:\n- {a: 1}\n- a: 1\n  c: 2\n  a: 3\n",
            "line 5, column 3: not valid YAML: the key 'a' stands here",
        ),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(here: Path, name: str, text: str, message: str) -> None:
    (here / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_mapping(here / name)


def test_mappings_that_are_used_twice_or_merged_are_no_keys_that_stand_there_twice(here: Path) -> None:
    (here / "a.yaml").write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\ne: &e [*a, *a, *e, {1: 2, '1': 3}]\n")
    read = read_mapping(here / "a.yaml")
    assert read["d"] == {"b": 3, "c": 2}
    assert read["e"][3] == {1: 2, "1": 3}


def test_dotenv_values_are_taken_as_they_stand(here: Path) -> None:
    (here / ".env").write_text("OPENAI_API_KEY='pa${HOME}ss$word'\n")
    key = Settings.load({}).api_key
    assert key is not None
    assert key.get_secret_value() == "pa${HOME}ss$word"
    assert Settings.load({"HERMES_ENV_FILE": ""}).api_key is None


def test_secrets_that_the_driver_knows_are_redacted(here: Path) -> None:
    (here / ".env").write_text("WANDB_API_KEY=wandb-0123456789\n")
    environ = {
        "OPENAI_API_KEY": "sk-abcdefghijkl",
        "MODAL_TOKEN_ID": "ak-modal-token",
        "DB_PASSWORD": "short",
        "GITHUB_TOKEN": "ghp_0123456789",
        "SSH_PRIVATE_KEY": str(here),
        "GIT_CONFIG_KEY_0": "safe.directory",
        "TOKENIZER_NAME": "some-tokenizer",
    }
    redact = Settings.load(environ, secrets={"given": SecretStr("given-secret-value")}).redactor()
    text = "sk-abcdefghijkl ak-modal-token ghp_0123456789 wandb-0123456789 given-secret-value"
    names = ("OPENAI_API_KEY", "MODAL_TOKEN_ID", "GITHUB_TOKEN", "WANDB_API_KEY", "given")
    assert redact(text) == " ".join(f"[redacted: {name}]" for name in names)
    untouched = f"short {here} safe.directory some-tokenizer"
    assert redact(untouched) == untouched


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "GITHUB_PAT",
        "MYSQL_PWD",
        "SSH_PASSPHRASE",
        "REDIS_AUTH",
        "HFTOKEN",
        "SMTP_PASS",
        "SIGNING_KEY",
        "AWS_CREDENTIALS",
    ],
)
@pytest.mark.parametrize("value", ["correct-horse", "/begins/with+a=slash", "~tilde-first", "123456789012"])
def test_secrets_are_known_by_the_names_that_programs_give_them_whatever_they_begin_with(
    here: Path, name: str, value: str
) -> None:
    assert Settings.load({name: value}).redactor()(f"<{value}>") == f"<[redacted: {name}]>"


def test_names_that_only_look_like_those_of_secrets_are_none(here: Path) -> None:
    environ = {
        "PWD": "/nowhere/at-all",
        "OLDPWD": "/nowhere/else",
        "TOKENIZER_NAME": "some-tokenizer",
        "FAIL_TO_PASS": "test_something",
        "KEYMAP": "colemak-dh",
    }
    assert Settings.load(environ).secrets == {}


@pytest.mark.parametrize(
    ("url", "hidden"),
    [
        ("http://me:pa55w0rd-long@host:1/v1", "pa55w0rd-long"),
        ("http://me:pw@host:1/v1", "me:pw"),
        ("https://ghp_0123456789@host/v1", "ghp_0123456789"),
        ("postgres://me:p%40ss-word-1@host/db", "p@ss-word-1"),
        ("https://host/v1?api_key=query-0123456789", "query-0123456789"),
    ],
)
def test_what_a_url_carries_is_redacted(here: Path, url: str, hidden: str) -> None:
    for settings in (Settings(base_url=url), Settings.load({"DATABASE_URL": url})):
        assert hidden not in settings.redactor()(f"{url} and {hidden}" if len(hidden) >= 8 else url)


def test_an_account_in_a_url_is_no_secret(here: Path) -> None:
    assert Settings.load({"DOCKER_HOST": "ssh://hermes-agent@host", "BROKEN": "http://[::1"}).secrets == {}


def test_a_settings_repr_shows_no_secret(here: Path) -> None:
    settings = Settings.load({"OPENAI_API_KEY": "sk-abcdefghijkl"})
    assert "sk-abc" not in repr(settings) + str(settings) + settings.model_dump_json()


def test_redaction_takes_the_longest_match_and_each_line_of_a_long_one() -> None:
    redact = Redactor({"short": "abcdefgh", "long": "abcdefgh-ijkl", "pem": "-----BEGIN\nMIIE0123456789\n-----END"})
    assert redact("abcdefgh-ijkl abcdefgh MIIE0123456789") == "[redacted: long] [redacted: short] [redacted: pem]"
    assert Redactor({})("anything") == "anything"
    assert Redactor({"odd": "a.b*c(d)e["})("a.b*c(d)e[ axbbbc") == "[redacted: odd] axbbbc"


def test_more_secrets_are_redacted_in_the_same_pass() -> None:
    redact = Redactor({"first": "abcdefgh"}).with_secrets({"again": "abcdefgh", "long": "abcdefgh-ijkl"})
    assert redact("abcdefgh-ijkl abcdefgh") == "[redacted: long] [redacted: first]"


def test_logs_are_redacted_with_their_tracebacks() -> None:
    formatter = RedactingFormatter(Redactor({"KEY": "sk-abcdefghijkl"}), "%(message)s")
    try:
        raise ValueError("refused: sk-abcdefghijkl")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "key %s", ("sk-abcdefghijkl",), info)
    text = formatter.format(record)
    assert "sk-abc" not in text
    assert text.count("[redacted: KEY]") >= 2


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    count: int = Field(default=1, ge=0)
    inner: Inner | None = None
    many: dict[str, list[Inner]] = Field(default_factory=dict)
    api_key: str | None = Field(default=None, min_length=20)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"cuont": 1}, UnknownNameError, r"unknown key 'cuont' of profile 'x' \(did you mean 'count'"),
        ({"inner": {"widht": 1}}, UnknownNameError, r"in inner.*did you mean 'width'"),
        ({"many": {"a": [{"widht": 1}]}}, UnknownNameError, r"in many\.a\.0.*did you mean 'width'"),
        ({"count": "many"}, ConfigError, "profile 'x': count must be a whole number, not 'many'"),
        ({"count": -1, "inner": 3}, ConfigError, "count must be at least 0, not -1; inner must be "),
    ],
)
def test_bad_data_is_named_by_key(data: dict[str, Any], error: type[ConfigError], message: str) -> None:
    with pytest.raises(error, match=message):
        validate_data(Outer, data, "profile 'x'")


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_data(Outer, {"api_key": "sk-tooshort"}, "agent")
    assert "sk-tooshort" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_default_that_cannot_be_made_is_told_with_its_setting():
    class Config(SandboxConfig):
        port: int = Field(default_factory=lambda: int("many"))

    with pytest.raises(ConfigError, match=r"profile 'a': the default of port can't be made: ValueError: .*'many'"):
        Config.from_dict("a", {})
    assert Config.from_dict("a", {"port": 3}).port == 3


def test_a_secret_within_json_is_redacted(here: Path) -> None:
    secret = 'a "quoted" é\\ secret'
    redact = Redactor({"KEY": secret})
    for ascii_only in (True, False):
        text = json.dumps({"command": f"echo {secret}!"}, ensure_ascii=ascii_only)
        assert json.loads(redact(text)) == {"command": "echo [redacted: KEY]!"}
