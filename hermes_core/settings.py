"""Settings: environment variables, `.env` and YAML read once into frozen models. `os.environ` is never written."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from hermes_core.errors import ConfigError, UnknownNameError
from hermes_core.validation import HINTS, SECRET_NAME, each_once, validate_data

if TYPE_CHECKING:
    from yaml import MappingNode, Node

log = logging.getLogger(__name__)

VARIABLES = {
    "HERMES_PLUGINS": "plugins",
    "HERMES_OWNER": "owner",
    "HERMES_STATE_DIR": "state_dir",
    "HERMES_PROFILES_FILE": "profiles_file",
    "HERMES_MODEL": "model",
    "OPENAI_BASE_URL": "base_url",
    "OPENAI_API_KEY": "api_key",
    "ANTHROPIC_BASE_URL": "anthropic_base_url",
    "ANTHROPIC_API_KEY": "anthropic_api_key",
    "HERMES_TELEMETRY": "telemetry",
}
"""The environment variables that are read, each with the setting that it sets."""

READ_ELSEWHERE = ("HERMES_CONFIG", "HERMES_ENV_FILE")
"""Other variables of ours: two files that `Settings.load` reads."""

_SHORTEST_SECRET = 8


class Settings(BaseModel):
    """The settings of a runtime. Make them directly in code, or with `load` from the environment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plugins: tuple[str, ...] | None = None
    """Entry-point names of the plugins to load. None loads every installed plugin. Built-ins are always loaded."""
    owner: str | None = None
    """The owner that sandboxes are labelled with. None gives each runtime an id of its own. A runtime with a name takes
    over the sandboxes that an earlier runtime of that name left."""
    state_dir: Path = Field(default_factory=lambda: default_state_dir(os.environ))
    """The directory for records that outlive the process; `~/.local/state/hermes-rl` by default."""
    model: str | None = None
    """The model of agents that name none."""
    base_url: str | None = None
    """The OpenAI-compatible endpoint of agents that name none. None is OpenAI's own."""
    api_key: SecretStr | None = None
    """The key of that endpoint."""
    anthropic_base_url: str | None = None
    """The endpoint of agents that use Anthropic's API. None is Anthropic's own."""
    anthropic_api_key: SecretStr | None = None
    """The key of that endpoint."""
    profiles_file: Path | None = None
    """A YAML file with `default_profile` and `profiles`, read once by `load`."""
    default_profile: str = "default"
    """The profile used when none is named."""
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Profiles by name. Their keys are settings of the backend that uses them; that backend checks them."""
    telemetry: bool = False
    """Whether to send spans and metrics of rollouts to OpenTelemetry. Needs `hermes-rl-otel`; the variables `OTEL_*`
    say where they go."""
    secrets: dict[str, SecretStr] = Field(default_factory=dict)
    """Secret values by name. They are replaced in logs, results and trajectories."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Read the settings once. Arguments override the environment, which overrides `.env`, which overrides YAML.

        `HERMES_CONFIG` names a YAML file of settings. `HERMES_ENV_FILE` names the `.env` file; the default is `.env` in
        the current directory, and an empty value means none. `HERMES_PLUGINS` is a comma-separated list; an empty value
        loads no plugin.

        Args:
            environ: the environment; None is this process's.

        Raises:
            UnknownNameError: a key does not exist. The error names the nearest key.
            ConfigError: a value has the wrong form, or a file can't be read.
        """
        environ = os.environ if environ is None else environ
        dotenv = read_dotenv(environ)
        variables = {**dotenv, **environ}
        values: dict[str, Any] = {"state_dir": default_state_dir(environ)}
        if config := variables.get("HERMES_CONFIG"):
            values.update(read_mapping(Path(config), "HERMES_CONFIG"))
        for variable, key in VARIABLES.items():
            if variables.get(variable):
                values[key] = variables[variable]
        if "HERMES_PLUGINS" in variables:
            values["plugins"] = tuple(variables["HERMES_PLUGINS"].replace(",", " ").split())
        values.update(given)
        if path := values.get("profiles_file"):
            profiles, default = read_profiles(Path(path), "profiles_file (HERMES_PROFILES_FILE)")
            values = {"profiles": profiles, "default_profile": default, **values}
        if isinstance(values.setdefault("secrets", {}), Mapping):
            values["secrets"] = {**_secrets(variables), **values["secrets"]}
        _warn_of_misspelt(variables)
        return validate_data(cls, values, "the settings")

    def redactor(self) -> Redactor:
        """Return a `Redactor` for the secrets in these settings."""
        known = {name: secret.get_secret_value() for name, secret in self.secrets.items()}
        for name, key in (("OPENAI_API_KEY", self.api_key), ("ANTHROPIC_API_KEY", self.anthropic_api_key)):
            if key is not None:
                known.setdefault(name, key.get_secret_value())
        of_urls = {
            **url_secrets("base_url", self.base_url or ""),
            **url_secrets("anthropic_base_url", self.anthropic_base_url or ""),
        }
        return Redactor({**known, **of_urls})


class Redactor:
    """Replaces secret values in a text by their names. Call it as `redact(text)`.

    Values shorter than 8 characters are not replaced, because they would match far too much.

    Args:
        secrets: values by name. The first name of a value counts.
    """

    def __init__(self, *secrets: Mapping[str, str]) -> None:
        self._secrets = secrets
        self._names: dict[str, str] = {}
        for name, value in (pair for secret in secrets for pair in secret.items()):
            for line in (value, *value.splitlines()):
                if len(line.strip()) >= _SHORTEST_SECRET:
                    for spelling in _spellings(line.strip()):
                        self._names.setdefault(spelling, name)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """Return the text without the secrets."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: f"[redacted: {self._names[match.group()]}]", text)

    def with_secrets(self, *secrets: Mapping[str, str]) -> Redactor:
        """Return a redactor that replaces these values, too, still in one pass over a text."""
        return Redactor(*self._secrets, *secrets)


def _spellings(secret: str) -> Iterator[str]:
    """Yield a secret unchanged, and in the forms that it has inside JSON, because the arguments of a tool call are JSON
    text."""
    yield secret
    for ascii_only in (True, False):
        yield json.dumps(secret, ensure_ascii=ascii_only)[1:-1]


class RedactingFormatter(logging.Formatter):
    """A formatter that removes secrets from its output, including tracebacks. It can also shorten tracebacks to their
    last line."""

    def __init__(self, redact: Redactor, fmt: str, *, tracebacks: bool = True) -> None:
        super().__init__(fmt)
        self._redact = redact
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as redacted text."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not self._tracebacks:
            record = copy.copy(record)  # other handlers may need the traceback
            record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}: {error}", ()
            record.exc_info = record.exc_text = None
        return self._redact(super().format(record))


def read_mapping(path: Path, named_by: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Args:
        named_by: where the path comes from, for messages: a variable.

    Raises:
        ConfigError: the file can't be read, is not YAML or JSON, names a key twice, or is not a mapping with words as
            keys.
    """
    import yaml

    parse, form = (_json_value, "JSON") if path.suffix == ".json" else (_yaml_value, "YAML")
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        place = f"{path}, named by {named_by}," if named_by else str(path)
        raise ConfigError(f"{place} can't be read: {error.strerror}", hint="check the path") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}", hint="fix the file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid {form}: {message}", hint="fix the file") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{path} does not hold a mapping of settings", hint="write `key: value` lines")
    return data


def _json_value(text: str) -> Any:
    return json.loads(text, object_pairs_hook=each_once)


def _yaml_value(text: str) -> Any:
    """Return the value of a YAML text. A mapping that has a key twice is refused, because PyYAML would silently take
    the last value."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        for mapping in _mappings(root):
            keys = set()
            for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in keys:
                    problem = f"the key {key.value!r} stands here for the second time"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                keys.add((key.tag, key.value))
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _mappings(root: Node | None) -> Iterator[MappingNode]:
    """Yield each mapping of a YAML document once. With anchors, a mapping can stand in several places, and even inside
    itself."""
    from yaml import CollectionNode, MappingNode

    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, MappingNode):
            yield node
            todo += [part for pair in node.value for part in pair]
        else:
            todo += node.value


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return `hermes-rl` below `XDG_STATE_HOME`, which is `~/.local/state` unless set."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "hermes-rl"


def read_dotenv(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the `.env` file unchanged, without interpolation."""
    name = environ.get("HERMES_ENV_FILE")
    if name == "":
        return {}
    path = Path(name or ".env")
    if not path.is_file():
        if name:
            raise ConfigError(f"HERMES_ENV_FILE names {name}, which is not a file", hint="check the path, or unset it")
        return {}
    from dotenv import dotenv_values

    try:
        values = dotenv_values(path, interpolate=False, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} can't be read: {error}", hint="fix the file, or set HERMES_ENV_FILE to another"
        ) from error
    return {key: value for key, value in values.items() if value is not None}


def read_profiles(path: Path, named_by: str = "") -> tuple[dict[str, Any], str]:
    """Return the profiles of a YAML file by name, and the name of the default profile: `default`, or else the first.

    Args:
        named_by: where the path comes from, for messages: a variable.

    Raises:
        ConfigError: the file can't be read, or has no profiles.
        UnknownNameError: the file has an unknown key, or its default profile does not exist.
    """
    data = read_mapping(path, named_by)
    known = ("profiles", "default_profile")
    for key in data:
        if key not in known:
            raise UnknownNameError("key", key, known, where=f"of {path}")
    profiles = data.get("profiles")
    if profiles and not isinstance(profiles, dict):
        raise ConfigError(f"{path}: profiles must be a mapping, not {profiles!r:.80}", hint=HINTS["dict_type"])
    if not profiles:
        raise ConfigError(f"{path} has no profiles", hint="write `profiles:`, and the profiles' names below it")
    found = {str(name): given or {} for name, given in profiles.items()}
    default = str(data.get("default_profile", "default" if "default" in found else next(iter(found))))
    if default not in found:
        raise UnknownNameError("profile", default, found, where=f"in default_profile of {path}")
    return found, default


def _secrets(variables: Mapping[str, str]) -> dict[str, SecretStr]:
    """Return values that look like secrets, by the variable's name, and secrets inside URLs. Paths on this disk are
    excluded."""
    found: dict[str, str] = {}
    for name, value in variables.items():
        if SECRET_NAME.search(name.upper()) and not _is_path(value):
            found[name] = value
        found.update(url_secrets(name, value))
    return {name: SecretStr(value) for name, value in found.items()}


def _is_path(value: str) -> bool:
    """Return whether the value is an existing path on this disk. A key may begin with a slash too."""
    if not value.startswith(("/", "~")):
        return False
    try:
        return Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, a user that does not exist
        return False


def url_secrets(name: str, value: str) -> dict[str, str]:
    """Return the password and the keys inside a URL, both as written and decoded, by names for messages.

    Args:
        name: the variable or setting that has the URL.
    """
    if "://" not in value:
        return {}
    try:
        url = urlsplit(value)
        query = parse_qsl(url.query)
    except ValueError:  # not a URL after all
        return {}
    login = url.netloc.rpartition("@")[0]
    user, _, password = login.partition(":")
    if not password and url.scheme in ("http", "https"):  # a token; in other schemes, it is the name of an account
        password = user
    secrets = {"password": password, **{key: text for key, text in query if SECRET_NAME.search(key.upper())}}
    if password:
        secrets["login"] = f"{url.scheme}://{login}@"  # long enough to be found, even if the password is short
    return {
        f"the {key} in {name}{mark}": text
        for key, spelt in secrets.items()
        for mark, text in (("", spelt), (", decoded", unquote(spelt)), (", encoded", quote(spelt, safe="")))
        if text
    }


def _warn_of_misspelt(variables: Mapping[str, str]) -> None:
    """Warn of variables whose names are close to ours. Others may belong to another program."""
    known = [*VARIABLES, *READ_ELSEWHERE]
    for name in variables:
        if name.startswith("HERMES_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                log.warning("the environment variable %s is not read: did you mean %s?", name, close[0])
