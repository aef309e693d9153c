"""Models of the tables of a `task.toml`, for schema 1.0 to 1.4, with the deprecated keys."""

from __future__ import annotations

import difflib
import ipaddress
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAIN_SERVICE = "main"
"""The name of the agent's own container as a service of Docker Compose."""

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
_PER_MB = {"K": 1 / 1024, "M": 1, "G": 1024}
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CREDENTIAL = re.compile(r"key|secret|token|password|credential|auth|cookie", re.IGNORECASE)
_OF_VARIABLES = re.compile(r"\s*(?:[A-Za-z]+\s+)?\$\{\w+(?::-)?\}(?:[\s:-]*\$\{\w+(?::-)?\})*\s*")
_ORG_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*")


def _host(entry: str) -> str:
    """Return an allowed host in its canonical form: a name, `*.name`, an address or a range of addresses."""
    text = entry.strip().lower().rstrip(".")
    if "%" not in text:
        try:
            return str(ipaddress.ip_network(text)) if "/" in text else str(ipaddress.ip_address(text))
        except ValueError:
            pass
    name = text.removeprefix("*.")
    if re.fullmatch(r"[0-9.]+", name) or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"has {entry!r}; an entry is a host name, *.name, an address, or a range such as 10.0.0.0/8")
    return text


def _service(name: str) -> str:
    if not _SERVICE.fullmatch(name.strip()):
        raise ValueError(f"{name!r} can't be the name of a service")
    return name.strip()


def _without_parents(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} has '..' in it")
    return path


def _destination(path: str | None) -> str | None:
    if not path:
        return None
    parts = PurePosixPath(path).parts
    if "\\" in path or PurePosixPath(path).is_absolute() or ".." in parts or not parts:
        raise ValueError(f"{path!r} must be a relative path with forward slashes and without '..'")
    if path.rstrip("/") == "manifest.json":
        raise ValueError("'manifest.json' is reserved")
    return path


def _step_name(name: str) -> str:
    device = re.fullmatch(
        r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[1-9¹²³])", name.split(".", maxsplit=1)[0].rstrip(" ").lower()
    )
    if (
        not name.strip()
        or name in (".", "..")
        or name[-1] in ". "
        or device
        or re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name)
    ):
        raise ValueError(f"{name!r} must be the name of one directory on every system")
    if len(name.encode()) > 255:
        raise ValueError("must have at most 255 bytes")
    return name


Hosts = list[Annotated[str, AfterValidator(_host)]]
User = str | int | None
NetworkMode = Literal["public", "no-network", "allowlist"]
Seconds = Annotated[float, Field(gt=0)]


class Table(BaseModel):
    """A table of the file. It ignores unknown keys, as Harbor does; `unknown_keys` finds them."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class NetworkRules(Table):
    """The network of a table's commands."""

    network_mode: NetworkMode | None = None
    allowed_hosts: Hosts | None = None

    @model_validator(mode="after")
    def _hosts_of_an_allowlist(self) -> NetworkRules:
        if self.network_mode != "allowlist" and self.allowed_hosts:
            raise ValueError('allowed_hosts needs network_mode = "allowlist"')
        return self


class Author(Table):
    """An author of the task."""

    name: str
    email: str | None = None


class TaskTable(Table):
    """The table `[task]`."""

    name: str
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _org_and_name(cls, name: str) -> str:
        if not _ORG_NAME.fullmatch(name) or ".." in name:
            raise ValueError(f"must be ORGANIZATION/NAME, not {name!r}")
        return name


class AgentTable(NetworkRules):
    """The table `[agent]`."""

    timeout_sec: Seconds | None = None
    """The agent's time limit; None is no limit."""
    user: User = None


class Healthcheck(Table):
    """The table `[environment.healthcheck]`, with the meaning of Docker's HEALTHCHECK."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(default=0.0, ge=0)
    """Seconds at the beginning in which failures do not count."""
    start_interval_sec: float = Field(default=5.0, ge=0)
    """Seconds between two checks during the start period."""
    retries: int = Field(default=3, ge=1)
    """Number of failures in a row after which the sandbox is unhealthy."""


class Tpu(Table):
    """The table `[environment.tpu]`."""

    type: str = Field(min_length=1)
    topology: str = Field(pattern=r"^\s*[1-9]\d*(x[1-9]\d*)+\s*$")


class McpServerTable(Table):
    """An entry of `[[environment.mcp_servers]]`."""

    name: str
    transport: Annotated[
        Literal["stdio", "sse", "streamable-http"],
        BeforeValidator(lambda value: "streamable-http" if value == "http" else value),
    ] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @field_validator("headers")
    @classmethod
    def _without_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or "\r" in value or "\n" in value:
                raise ValueError(f"{name!r} is no valid header")
            if value.strip() and _CREDENTIAL.search(name) and not _OF_VARIABLES.fullmatch(value):
                raise ValueError(f"{name!r} must name a variable, such as 'Bearer ${{TOKEN}}', and hold no secret")
        return headers

    @model_validator(mode="after")
    def _of_its_transport(self) -> McpServerTable:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("transport stdio needs `command`")
            if self.headers:
                raise ValueError("transport stdio has no headers")
        elif not self.url:
            raise ValueError(f"transport {self.transport} needs `url`")
        return self


class EnvironmentTable(NetworkRules):
    """The table `[environment]`, and `[verifier.environment]`."""

    network_mode: NetworkMode = "public"
    docker_image: str | None = None
    build_timeout_sec: Seconds = 600.0
    os: Annotated[
        Literal["linux", "windows"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
    ] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpServerTable] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, given: Any) -> Any:
        """Replace deprecated keys by their successors."""
        if not isinstance(given, Mapping):
            return given
        table = dict(given)
        for old in ("memory", "storage"):
            size, new = table.pop(old, None), f"{old}_mb"
            if isinstance(size, str):
                megabytes = _megabytes(old, size)
                if table.setdefault(new, megabytes) != megabytes:
                    raise ValueError(f"{old} = {size!r} and {new} = {table[new]!r} disagree; leave out {old}")
        internet = table.pop("allow_internet", None)
        if isinstance(internet, bool) and "network_mode" not in table and table.get("allowed_hosts") is None:
            table["network_mode"] = "public" if internet else "no-network"
        return table


def _megabytes(key: str, size: str) -> int:
    parts = _SIZE.fullmatch(size.strip())
    if parts is None:
        raise ValueError(f"{key} = {size!r} must be a number with G, M or K, such as '2G'")
    return int(float(parts[1]) * _PER_MB[parts[2].upper()])


class Collect(Table):
    """An entry of `[[verifier.collect]]`: a command that runs before artifacts are collected."""

    command: str
    service: Annotated[str, AfterValidator(_service)] = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User = None


class Verifier(NetworkRules):
    """The table `[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[Collect] = []

    @model_validator(mode="after")
    def _one_place(self) -> Verifier:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" and a table [verifier.environment] exclude each other')
        return self

    @property
    def own_mode(self) -> Literal["shared", "separate"] | None:
        """Return the place of the tests that this table sets: `shared` or `separate`; None if it sets none."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class Artifact(Table):
    """An entry of `artifacts`."""

    source: Annotated[str, AfterValidator(_without_parents)]
    destination: Annotated[str | None, AfterValidator(_destination)] = None
    exclude: list[str] = []
    service: Annotated[str, AfterValidator(_service)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, given: Any) -> Any:
        return {"source": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _absolute_elsewhere(self) -> Artifact:
        if self.service not in (None, MAIN_SERVICE) and not self.source.startswith("/"):
            raise ValueError(f"source {self.source!r} of service {self.service!r} must be an absolute path")
        return self


class Solution(Table):
    """The table `[solution]`."""

    env: dict[str, str] = {}


class StepTable(Table):
    """An entry of `[[steps]]`."""

    name: Annotated[str, AfterValidator(_step_name)]
    agent: AgentTable = AgentTable()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    """The least reward with which the next step is begun: a number for the reward named `reward`, or a table of numbers
    by the rewards' names."""
    healthcheck: Healthcheck | None = None
    artifacts: list[Artifact] = []


class TaskToml(Table):
    """The whole file."""

    schema_version: str = "1.4"
    """The version is not checked, because publishers also write versions of their own tasks here."""
    task: TaskTable | None = None
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: AgentTable = AgentTable()
    verifier: Verifier = Verifier()
    environment: EnvironmentTable = EnvironmentTable()
    solution: Solution = Solution()
    artifacts: list[Artifact] = []
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "version" in given:
            table = dict(given)
            table.setdefault("schema_version", table.pop("version"))
            return table
        return given

    @field_validator("steps")
    @classmethod
    def _unique(cls, steps: list[StepTable] | None) -> list[StepTable] | None:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps or ()]
        if len(set(names)) < len(names):
            raise ValueError("has two steps with one name")
        return steps

    def mode(self, step: StepTable | None = None) -> Literal["shared", "separate"]:
        """Return the place of the tests: `shared` is the agent's sandbox, `separate` a sandbox of their own."""
        return (step.verifier.own_mode if step else None) or self.verifier.own_mode or "shared"


def unknown_keys(model: type[BaseModel], given: object, place: str = "") -> Iterator[str]:
    """Yield the keys of a table that its model does not have, each with its place and a similar key:
    `agent.timeout_secs (did you mean 'timeout_sec'?)`."""
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        name = f"{place}{key}"
        field = model.model_fields.get(key)
        if field is None:
            if key not in _DEPRECATED.get(model, ()):
                near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.7)
                yield f"{name} (did you mean {near[0]!r}?)" if near else name
        elif (inner := _table_of(field.annotation)) is not None:
            for each in value if isinstance(value, list) else [value]:
                yield from unknown_keys(inner, each, f"{name}.")


_DEPRECATED: Mapping[type[BaseModel], tuple[str, ...]] = {
    TaskToml: ("version",),
    EnvironmentTable: ("memory", "storage", "allow_internet"),
}


def _table_of(annotation: Any) -> type[Table] | None:
    """Return the table's model in a field's type, such as `list[Author]`; None if the type has no such model."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next((found for each in get_args(annotation) if (found := _table_of(each)) is not None), None)
