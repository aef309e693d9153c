"""The backend contract: what a sandbox provider implements (creation and one primitive, the channel)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hermes_core.errors import ConfigError, PluginError, PolicyError, UnknownNameError
from hermes_core.sandbox.watchdog import watchdog_command


class Isolation(IntEnum):
    """What separates the slots of one sandbox, weakest to strongest. `docs/threat-model.md` says what each promises."""

    SHARED = 0
    USER = 1
    NAMESPACE = 2
    DEDICATED = 3

    @classmethod
    def parse(cls, value: str | Isolation) -> Isolation:
        """The level of that name.

        Raises:
            UnknownNameError: no level has this name.
        """
        if isinstance(value, Isolation):
            return value
        try:
            return cls[value.upper()]
        except KeyError:
            raise UnknownNameError("isolation level", value, [level.label for level in cls]) from None

    @property
    def label(self) -> str:
        """The level's name as people write it: `user`."""
        return self.name.lower()


class Network(StrEnum):
    """A sandbox's network policy: none at all, the provider's ordinary network, or that one until it is prepared."""

    NONE = "none"
    OPEN = "open"
    SETUP = "setup"
    """Open while the environment prepares the sandbox, before its first lease; then none, for all slots."""


class SlotUser(StrEnum):
    """Who the commands of a slot are run by."""

    OWN = "own"
    """A user of the slot's own, which is not the sandbox's: or the profile is refused."""
    ROOT = "root"
    """Root of the sandbox, at level `dedicated` only. There is no guest in the sandbox, and it serves one lease."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend's sandboxes can do. What is not declared is refused, never silently ignored."""

    isolation: frozenset[Isolation]
    network: frozenset[Network] = frozenset({Network.OPEN})
    attach: bool = False
    snapshot: bool = False
    gpu: bool = False
    memory_limit: bool = True
    """Whether `memory` is a limit. With some providers it is what is reserved, and more may be had."""
    on_driver_host: bool = False
    """Whether its sandboxes are on the driver's host: below level `user`, commands have the driver's rights there."""

    def least(self, isolation: Isolation) -> Isolation:
        """Return the weakest declared level that is no weaker than this one; this one itself if there is none."""
        return min((level for level in self.isolation if level >= isolation), default=isolation)


class Prices(BaseModel):
    """What a sandbox costs by the hour, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sandbox: float = Field(default=0.0, ge=0)
    """Each sandbox, whatever its size."""
    cpu: float = Field(default=0.0, ge=0)
    """Each core of `cpu`."""
    memory: float = Field(default=0.0, ge=0)
    """Each GiB of `memory`."""
    gpu: float = Field(default=0.0, ge=0)
    """Each GPU."""

    def per_hour(self, cpu: float | None, memory: int | None, gpus: int | None) -> float:
        """The price of one sandbox.

        Raises:
            ValueError: something has a price, and how much of it a sandbox has is not said.
        """
        for key, price, amount in (("cpu", self.cpu, cpu), ("memory", self.memory, memory), ("gpu", self.gpu, gpus)):
            if price and amount is None:
                raise ValueError(f"prices.{key} is set, and {key} is not: set it, or use prices.sandbox")
        return self.sandbox + self.cpu * (cpu or 0) + self.memory * (memory or 0) / 1024 + self.gpu * (gpus or 0)


@dataclass(frozen=True)
class TerminalVariables:
    """The environment variables from which the terminal tool takes a backend's settings."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """By variable, the setting of every profile that does not say it itself: `TERMINAL_DOCKER_IMAGE`: `image`."""
    lists: tuple[str, ...] = ()
    """Those of them that hold a JSON list."""
    of_profile: tuple[str, ...] = ()
    """The last words of variables that set one profile's: `IMAGE` of `TERMINAL_MODAL_PROFILE_<NAME>_IMAGE`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings of profiles where nobody says anything else."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Variables that can say one thing alone."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Variables that others read, and why they say nothing here."""


class SandboxConfig(BaseModel):
    """The settings of one profile. Backends subclass it to add their own settings. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    unsupported: ClassVar[tuple[str, ...]] = ()
    """Settings of this class that the backend can't give: a profile that sets one of them is refused."""
    terminal: ClassVar[TerminalVariables] = TerminalVariables()

    name: str = "default"
    """The profile's name."""
    image: str | None = None
    """The image that the sandbox is made from, as the provider names it. `local` has no images."""
    cpu: float | None = Field(default=None, gt=0)
    """CPU cores of one sandbox. None is the provider's default."""
    memory: int | None = Field(default=None, gt=0)
    """Memory of one sandbox in MiB. None is the provider's default."""
    slots_per_sandbox: int = Field(default=10, ge=1, le=256)
    """Number of slots in one sandbox."""
    min_sandboxes: int = Field(default=1, ge=0)
    """Number of sandboxes kept warm."""
    max_sandboxes: int = Field(default=5, ge=1)
    """Maximum number of sandboxes."""
    reserve_slots: int = Field(default=1, ge=0)
    """Number of slots reserved for verification, so that rollouts never wait for each other."""
    idle_timeout: float = Field(default=120, gt=0)
    """Seconds after which an idle sandbox is ended, if there are more than `min_sandboxes`."""
    acquire_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that `acquire` waits for a slot before it fails."""
    execution_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit in seconds of a tool call that names none."""
    orphan_ttl_s: float = Field(default=30.0, gt=0)
    """Seconds without a heartbeat of the driver after which a sandbox ends itself."""
    network: Network = Network.OPEN
    """The sandbox's network policy."""
    snapshot: bool = False
    """Whether the environment prepares one sandbox and the others are made from its snapshot. Network `setup` implies
    this on backends that can make snapshots."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every command. They are not secret."""
    slot_variables: tuple[str, ...] = ()
    """Variables of the sandbox, for example of its image, that commands see. Of all others they see only PATH."""
    slot_secrets: tuple[str, ...] = ()
    """Secret variables of the sandbox that commands see. Their values are replaced by `*` in the output of commands,
    but not in files that are read. Code in a slot can still use the values."""
    slot_user: SlotUser | None = None
    """The user that commands run as. None means: a user of the slot's own at the levels `user` and `namespace`, and
    also at `dedicated` if the sandbox can provide one (it has Python, and is root's or may make namespaces). Otherwise,
    and at `shared`, it is the sandbox's own user, which is root in most images."""
    max_processes: int = Field(default=512, ge=16)
    """Maximum number of processes of one slot."""
    process_memory: int | None = Field(default=None, ge=64)
    """Memory that each process of a slot may allocate, in MiB (`RLIMIT_DATA`); None is no limit. Neither the sum over
    processes nor the memory that they share is limited. Needs Python in the sandbox."""
    visible_paths: tuple[str, ...] = ()
    """More paths of the sandbox (on `local`: of the host) that slots of level `namespace` can read."""
    prices: Prices | None = None
    """What a sandbox costs by the hour. The summary of a run then states its cost."""
    max_cost: float | None = Field(default=None, gt=0)
    """Maximum cost of the profile's sandboxes while a tool backend lives. At nine tenths of it, no more sandboxes are
    made. At all of it, no more rollouts get a slot. Running rollouts are finished and verified."""

    @property
    def gpu_count(self) -> int | None:
        """How many GPUs a sandbox has; None if that is not known."""
        return 0

    @property
    def has_secrets(self) -> bool:
        """Whether the sandbox itself has secrets in its environment, of which commands see `slot_secrets` alone."""
        return bool(self.slot_secrets)

    @property
    def price_per_hour(self) -> float | None:
        """What a sandbox costs by the hour; None if that is not known."""
        return None if self.prices is None else self.prices.per_hour(self.cpu, self.memory, self.gpu_count)

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Self:
        """The profile of a mapping of its keys; backends take other names for them here, and texts.

        Raises:
            ConfigError, UnknownNameError: names the profile and the key.
        """
        from hermes_core.validation import validated

        if not isinstance(data, Mapping):
            raise ConfigError(f"profile {name!r} is not a mapping", hint="write `key: value` lines below it")
        return validated(cls, {**data, "name": name}, f"profile {name!r}")

    @field_validator("env_vars")
    @classmethod
    def _can_be_set(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                shown = name.partition("=")[0]  # what comes after it may be a value
                raise ValueError(f"holds {shown!r}, which no process can have: no name, or one with `=` or a NUL byte")
        return variables

    @model_validator(mode="after")
    def _can_be_counted(self) -> Self:
        if not self.price_per_hour and self.max_cost is not None:
            raise ValueError("max_cost is set, and no price: set prices, such as `prices: {sandbox: 0.5}` by the hour")
        return self


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that a backend needs to create one sandbox."""

    creation_id: str
    """Set at creation as label, tag or record: creating twice with one id gives one sandbox."""
    owner: str
    """Who the sandbox belongs to: one id per runtime."""
    config: SandboxConfig
    isolation: Isolation
    """The weakest level that the sandbox must be able to give its slots."""
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def command(self, state_dir: str) -> tuple[str, ...]:
        """Return the main process of the sandbox: core's watchdog, whose exit ends the sandbox.

        Args:
            state_dir: the `Sandbox.state_dir` that the sandbox will have, or its path relative to the directory in
                which the backend starts the command.
        """
        return watchdog_command(f"{state_dir}/heartbeat", self.config.orphan_ttl_s)

    def check_existing(self, isolation: str, sandbox_id: str) -> None:
        """Refuse a sandbox that has this creation id already, if it was made with a weaker level.

        Raises:
            PolicyError: it was.
        """
        if Isolation.parse(isolation) < self.isolation:
            raise PolicyError(
                f"the sandbox was made with isolation {isolation!r}, not {self.isolation.label!r}",
                hint="terminate it first, or use another creation id",
                sandbox_id=sandbox_id,
            )


class SandboxStatus(StrEnum):
    """Whether a sandbox runs, has ended, or is not known to its provider any more."""

    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"


@dataclass(frozen=True)
class SandboxInfo:
    """One line of `Backend.list()`: what the provider says about a sandbox that carries our label."""

    sandbox_id: str
    owner: str
    creation_id: str
    created: float
    """Seconds since the epoch."""
    status: SandboxStatus


@dataclass(frozen=True)
class Diagnosis:
    """Whether a backend can be used here, and what to do if not: a line of `hermes-rl doctor`."""

    usable: bool
    summary: str
    details: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


class Channel(ABC):
    """A duplex byte stream to one process in a sandbox, with backpressure both ways.

    Every await may be cancelled. A transport that dies raises `ChannelLost` from `read` and `write`; a process that
    ends gives `b""` from `read` and its status from `wait`.
    """

    @abstractmethod
    async def read(self, n: int) -> bytes:
        """Up to `n` bytes of standard output, at least one; `b""` at the end of the stream."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write all of `data` to standard input; returns once the transport has taken it."""

    @abstractmethod
    async def wait(self) -> int:
        """The exit status of the process, once it has ended."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the stream (the process may live on). Idempotent; never raises `ChannelLost`."""

    @property
    def stderr_tail(self) -> str:
        """The last few KB of standard error, for error messages."""
        return ""


class Sandbox(ABC):
    """One isolated machine. Only the pool that created it terminates it."""

    id: str
    workspace_base: str = "/data"
    """Where slots' workspaces are, as seen from inside the sandbox."""
    state_dir: str = "/data/.hermes"
    """The guest's own directory, as seen from inside the sandbox; no slot can read it."""
    uid_base: int | None = None
    """The first of 512 user ids that are this sandbox's alone (`hermes_core.sandbox.uids` reserves them on this host),
    for a guest that is root to give to its slots. Without them, such a guest can keep no slots apart."""
    lifetime_s: float | None = None
    """Seconds after which the provider ends it, whatever it does; None is never. It is replaced before that."""

    @abstractmethod
    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox and give the stream to it.

        Raises:
            ChannelLost: the provider could not be reached.
            SandboxLost: the sandbox is not there any more.
        """

    @abstractmethod
    async def status(self) -> SandboxStatus:
        """What the provider says about this sandbox now."""

    async def cut_network(self) -> None:
        """Leave the sandbox without a network. For backends that declare `Network.SETUP`.

        Raises:
            InfraError: it can't be proved that none is left.
            PluginError: the backend declares what it does not have.
        """
        raise PluginError(f"{type(self).__name__} has no cut_network, and its backend declares network 'setup'")

    @abstractmethod
    async def terminate(self) -> None:
        """End the sandbox with all of its processes and files. Idempotent; returns when it is gone."""


class CanAttach(Protocol):
    """What a backend has that declares `attach`."""

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox that runs already. `SandboxLost` if it does not."""


class CanSnapshot(Protocol):
    """What a backend has that declares `snapshot`."""

    async def snapshot(self, sandbox: Sandbox) -> str:
        """Keep the files of a running sandbox as they are now; the id of that. The sandbox goes on.

        Raises:
            InfraError: the provider failed.
        """

    async def restore(self, spec: SandboxSpec, snapshot_id: str) -> Sandbox:
        """As `Backend.create`, with the files of a snapshot. Raises as that does."""


class Backend(ABC):
    """Makes sandboxes of one kind. Slots, pools, commands and files are core's, built on `Sandbox.open`."""

    name: ClassVar[str]
    config_class: ClassVar[type[SandboxConfig]] = SandboxConfig
    capabilities: Capabilities

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox of this spec, or give the one that exists for its `creation_id`.

        Raises:
            ProvisionError: the provider failed; says which step and what to do.
            PolicyError: the spec asks for what this backend cannot grant.
        """

    @abstractmethod
    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """The sandboxes that carry our label, of one owner or of all."""

    @abstractmethod
    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox that we hold no handle of. Idempotent."""

    @abstractmethod
    async def check(self) -> Diagnosis:
        """Whether this backend can be used here. Never raises for an unusable host."""

    def note_profile(self, config: SandboxConfig) -> None:
        """Told of every profile that is going to be used, for a provider where `list` has to know where to look."""
        return

    async def aclose(self) -> None:
        """Release the connection to the provider. Does not end sandboxes."""
        return
