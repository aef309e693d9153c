"""The backend contract. A sandbox provider implements the creation of sandboxes and one primitive, the channel."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Protocol, Self, runtime_checkable

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from hermes_core.errors import ConfigError, PluginError, PolicyError, UnknownNameError
from hermes_core.sandbox.commands import SandboxImage
from hermes_core.sandbox.egress.hosts import EVERYWHERE, HostRules, parse_hosts
from hermes_core.sandbox.images import Image
from hermes_core.sandbox.watchdog import watchdog_command


class Isolation(IntEnum):
    """How the slots of one sandbox are separated, from weakest to strongest. The threat model says what each level
    promises."""

    SHARED = 0
    USER = 1
    NAMESPACE = 2
    PRIVATE_ROOT = 3
    """A slot is root of a root directory of its own, which starts as the sandbox's system or image."""
    DEDICATED = 4

    @classmethod
    def parse(cls, value: str | Isolation) -> Isolation:
        """Return the level with this name.

        Raises:
            UnknownNameError: no level has this name.
        """
        if isinstance(value, Isolation):
            return value
        try:
            return cls[value.upper().replace("-", "_")]
        except KeyError:
            raise UnknownNameError("isolation level", value, [level.label for level in cls]) from None

    @property
    def label(self) -> str:
        """Return the level's name as users write it: `user`, `private-root`."""
        return self.name.lower().replace("_", "-")


class Network(StrEnum):
    """A network policy. Backends enforce all but `allow`, which core makes of `none`."""

    NONE = "none"
    """No network."""
    OPEN = "open"
    """The provider's ordinary network."""
    SETUP = "setup"
    """Open while the environment prepares the sandbox, before its first lease. After that, no slot has a network."""
    ALLOW = "allow"
    """No network, but a proxy on the driver, through which programs reach the allowed hosts."""


class Phase(StrEnum):
    """A part of a rollout that can have a network policy of its own."""

    SETUP = "setup"
    """What the environment does before the agent begins."""
    AGENT = "agent"
    VERIFY = "verify"
    """The verification, once the agent's processes are dead."""


def _split_hosts(given: Any) -> Any:
    """Return a list of hosts for a text from the command line."""
    if not isinstance(given, str):
        return given
    with suppress(ValueError):
        return json.loads(given)
    return [host.strip() for host in given.split(",") if host.strip()]


def _check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    parse_hosts(hosts)
    return hosts


Hosts = Annotated[tuple[str, ...], BeforeValidator(_split_hosts), AfterValidator(_check_hosts)]
"""Hosts as users write them: see `parse_hosts`."""


class NetworkPolicy(BaseModel):
    """The network of one phase of a rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    network: Network = Network.ALLOW
    """`allow` or `none`; `open` only if it is the policy of all phases."""
    allowed_hosts: Hosts = ()
    """What may be reached: names, `*.NAME`, `*`, addresses, ranges, or `code-hosts` and `package-indexes`; each with
    `:PORT` if it is not 80 or 443."""
    denied_hosts: Hosts = ()
    """What may not be reached although `allowed_hosts` covers it."""

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        _need_hosts(self)
        return self


def _need_hosts(policy: NetworkPolicy | SandboxConfig) -> None:
    """Check that there are hosts if, and only if, the policy is `allow`.

    Raises:
        ValueError: there are none, or there are some.
    """
    if policy.network is Network.ALLOW:
        if not policy.allowed_hosts:
            raise ValueError("network is allow, and allowed_hosts is empty: list hosts, or use network: none")
    elif policy.allowed_hosts or policy.denied_hosts:
        key = "allowed_hosts" if policy.allowed_hosts else "denied_hosts"
        raise ValueError(f"{key} is set, and network is {policy.network.value}: use network: allow")


@dataclass(frozen=True)
class NetworkPlan:
    """The networks of a rollout's phases."""

    setup: NetworkPolicy
    agent: NetworkPolicy
    verify: NetworkPolicy
    profile: NetworkPlan | None = None
    """The networks of the profile, for the plan of an item. What they do not permit, the item's do not either."""

    def __post_init__(self) -> None:
        policies = {self.setup.network, self.agent.network, self.verify.network}
        if policies - {Network.NONE, Network.ALLOW} and len(policies) > 1:
            raise ConfigError(
                f"phases have the networks {', '.join(sorted(policies))}, and one sandbox can't have them all",
                hint="use none and allow; allow with allowed_hosts `*` reaches every host of the internet by its name",
            )

    def within(self, profile: NetworkPlan) -> NetworkPlan:
        """Return this plan of an item, limited by its profile's. Only the profile can permit addresses that are not the
        internet's."""
        return replace(self, profile=profile)

    @property
    def filters(self) -> bool:
        """Return whether a phase has a proxy, for which the sandbox must have no network."""
        return any(each.network is Network.ALLOW for each in (self.setup, self.agent, self.verify))

    def make_rules(self, phase: Phase) -> tuple[HostRules, ...] | None:
        """Return the rules of a phase with a proxy, of which none may refuse; None if it has no proxy."""
        policy: NetworkPolicy = getattr(self, phase.value)
        if policy.network is not Network.ALLOW:
            return None
        if self.profile is None:
            setting = "" if policy is self.agent else f"{phase}_network."
            return (HostRules(policy.allowed_hosts, policy.denied_hosts, setting=setting),)
        own = HostRules(policy.allowed_hosts, policy.denied_hosts, setting="the item's ", for_item=True)
        if getattr(self.profile, phase.value).network is Network.OPEN:
            return (own, HostRules(EVERYWHERE))
        limits = self.profile.make_rules(phase)
        return None if limits is None else (own, *limits)


class SlotUser(StrEnum):
    """The user that runs a slot's commands."""

    OWN = "own"
    """A user of the slot's own, different from the sandbox's user. The profile is refused if that is not possible."""
    ROOT = "root"
    """Root. At level `private-root` the slot is root of its own root directory, as all slots of that level are. At
    `dedicated` it is root of the sandbox: there is no guest in the sandbox, and it serves one lease."""


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a backend and its sandboxes. A request for an ability that is not declared is refused, never
    silently ignored."""

    isolation: frozenset[Isolation]
    """The levels that its sandboxes can give their slots."""
    network: frozenset[Network] = frozenset({Network.OPEN})
    """The network policies that the backend enforces. `allow` follows from `none`, and need not be declared."""
    attach: bool = False
    """Whether the backend has `attach`, which `hermes-rl reap` and taking over sandboxes need."""
    snapshot: bool = False
    """Whether the backend has `snapshot` and `restore`."""
    builds: bool = False
    """Whether the backend has `prepare_image`, which builds images of folders with a Dockerfile."""
    gpu: bool = False
    """Whether sandboxes can have GPUs. This is only shown to users; the `config_class` has the setting."""
    memory_limit: bool = True
    """Whether the setting `memory` is a limit. Some providers only reserve that much, and the sandbox may use more. It
    means nothing if the `config_class` names `memory` in `unsupported`."""
    on_driver_host: bool = False
    """Whether its sandboxes run on the driver's host. Below level `user`, commands then have the driver's rights
    there."""

    @property
    def policies(self) -> frozenset[Network]:
        """Return the network policies that profiles can have: those of the backend, and `allow` if there is `none`."""
        tells_slots_apart = any(level > Isolation.SHARED for level in self.isolation)
        allow = {Network.ALLOW} if Network.NONE in self.network and tells_slots_apart else set[Network]()
        return (self.network - {Network.ALLOW}) | allow

    def least(self, isolation: Isolation) -> Isolation:
        """Return the weakest declared level that is at least as strong as `isolation`; `isolation` if there is none."""
        return min((level for level in self.isolation if level >= isolation), default=isolation)


class Prices(BaseModel):
    """Prices of a sandbox per hour, in any currency."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sandbox: float = Field(default=0.0, ge=0)
    """Price per hour of each sandbox, independent of its size."""
    cpu: float = Field(default=0.0, ge=0)
    """Price per hour of each core of `cpu`."""
    memory: float = Field(default=0.0, ge=0)
    """Price per hour of each GiB of `memory`."""
    gpu: float = Field(default=0.0, ge=0)
    """Price per hour of each GPU."""

    def per_hour(self, cpu: float | None, memory: int | None, gpus: int | None) -> float:
        """Return the price of one sandbox per hour.

        Raises:
            ValueError: the sandbox's amount of a resource that has a price is unknown.
        """
        for key, price, amount in (("cpu", self.cpu, cpu), ("memory", self.memory, memory), ("gpu", self.gpu, gpus)):
            if price and amount is None:
                raise ValueError(f"prices.{key} is set, and {key} is not: set it, or use prices.sandbox")
        return self.sandbox + self.cpu * (cpu or 0) + self.memory * (memory or 0) / 1024 + self.gpu * (gpus or 0)


@dataclass(frozen=True)
class TerminalVariables:
    """The environment variables that the terminal tool reads a backend's settings from."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Maps each variable to a setting, such as `TERMINAL_DOCKER_IMAGE` to `image`. It applies to every profile that
    does not have that setting."""
    lists: tuple[str, ...] = ()
    """The variables in `settings` that hold a JSON list."""
    of_profile: tuple[str, ...] = ()
    """Last words of the variables for a single profile, such as `IMAGE` of `TERMINAL_MODAL_PROFILE_<NAME>_IMAGE`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of profile settings that are set nowhere else."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Variables that accept only one value."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Maps each variable that only other programs read to the reason why it has no effect here."""


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
    """The network policy. `allow` lets programs reach only `allowed_hosts`, through a proxy."""
    allowed_hosts: Hosts = ()
    """For `network: allow`: what may be reached. Names, `*.NAME`, `*`, addresses, ranges such as `10.0.0.0/8`, or the
    lists `code-hosts` and `package-indexes`; each with `:PORT` if it is not 80 or 443."""
    denied_hosts: Hosts = ()
    """For `network: allow`: what may not be reached although `allowed_hosts` covers it, in the same form."""
    setup_network: NetworkPolicy | None = None
    """The network of the environment's setup and preparations, with the keys `network` (`allow` or `none`),
    `allowed_hosts` and `denied_hosts`. None is the agent's."""
    verify_network: NetworkPolicy | None = None
    """The network of the verification, like `setup_network`. None is the agent's."""
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
    also at `dedicated` if the sandbox can provide one (it has Python, and is root's or may make namespaces). At
    `private-root` it is root of the slot's own root directory. Otherwise, and at `shared`, it is the sandbox's own
    user, which is root in most images."""
    max_processes: int = Field(default=512, ge=16)
    """Maximum number of processes of one slot."""
    process_memory: int | None = Field(default=None, ge=64)
    """Memory that each process of a slot may allocate, in MiB (`RLIMIT_DATA`); None is no limit. Neither the sum over
    processes nor the memory that they share is limited. Needs Python in the sandbox."""
    visible_paths: tuple[str, ...] = ()
    """More paths of the sandbox that slots of level `namespace` can read; on `local` and `ssh`, more paths of the host
    that a sandbox shows at any level but `shared`. At `private-root` slots see what every user may read of them."""
    share_network: bool = False
    """Whether slots of level `private-root` have the sandbox's network, which they then share, instead of a loopback of
    their own."""
    prices: Prices | None = None
    """What a sandbox costs by the hour. The summary of a run then states its cost."""
    max_cost: float | None = Field(default=None, gt=0)
    """Maximum cost of the profile's sandboxes while a tool backend lives. At nine tenths of it, no more sandboxes are
    made. At all of it, no more rollouts get a slot. Running rollouts are finished and verified."""

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of a sandbox; None if it is not known."""
        return 0

    def for_backend(self) -> Self:
        """Return the settings that the backend gets. They have `network: none` in the place of `allow`."""
        if self.network is not Network.ALLOW:
            return self
        return self.model_copy(update={"network": Network.NONE, "allowed_hosts": (), "denied_hosts": ()})

    @property
    def network_plan(self) -> NetworkPlan:
        """Return the network of each phase of a rollout. That of `network: setup` begins when the network is cut."""
        network = Network.NONE if self.network is Network.SETUP else self.network
        agent = NetworkPolicy(network=network, allowed_hosts=self.allowed_hosts, denied_hosts=self.denied_hosts)
        return NetworkPlan(self.setup_network or agent, agent, self.verify_network or agent)

    @property
    def has_secrets(self) -> bool:
        """Return whether the sandbox's environment has secrets. Commands see only the secrets in `slot_secrets`."""
        return bool(self.slot_secrets)

    def root_of_sandbox(self, isolation: Isolation) -> bool:
        """Return whether a slot of this level is root of the sandbox, so that nothing in it can be protected."""
        return self.slot_user is SlotUser.ROOT and isolation is not Isolation.PRIVATE_ROOT

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of a sandbox per hour; None if it is not known."""
        return None if self.prices is None else self.prices.per_hour(self.cpu, self.memory, self.gpu_count)

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Self:
        """Return the profile described by a mapping of its keys. Backends override this to accept other names for keys,
        and texts as values.

        Raises:
            ConfigError, UnknownNameError: a key or a value is wrong. The message names the profile and the key.
        """
        from hermes_core.validation import validate_data

        if not isinstance(data, Mapping):
            raise ConfigError(f"profile {name!r} is not a mapping", hint="write `key: value` lines below it")
        return validate_data(cls, {**data, "name": name}, f"profile {name!r}")

    @field_validator("env_vars")
    @classmethod
    def _can_be_set(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not name or "=" in name or "\0" in name + value:
                shown = name.partition("=")[0]  # the part after `=` may be a secret
                raise ValueError(f"holds {shown!r}, which no process can have: no name, or one with `=` or a NUL byte")
        return variables

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        _need_hosts(self)
        for key in ("setup_network", "verify_network"):
            policy: NetworkPolicy | None = getattr(self, key)
            if policy is None:
                continue
            if self.network is Network.OPEN:
                raise ValueError(f"{key} is set, and network is open: use network: none or allow")
            if policy.network not in (Network.NONE, Network.ALLOW):
                raise ValueError(f"{key} has network {policy.network.value}: use none or allow")
        return self

    @model_validator(mode="after")
    def _can_be_counted(self) -> Self:
        if not self.price_per_hour and self.max_cost is not None:
            raise ValueError("max_cost is set, and no price: set prices, such as `prices: {sandbox: 0.5}` by the hour")
        return self


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that a backend needs to create one sandbox."""

    creation_id: str
    """Set at creation as a label, tag or record. Creating twice with the same id gives the same sandbox."""
    owner: str
    """The id of the sandbox's owner: one id per runtime."""
    config: SandboxConfig
    isolation: Isolation
    """The weakest level that the sandbox must be able to give its slots."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every program that `Sandbox.open` starts. Don't add `config.env_vars`: core gives these to the
    commands of slots itself."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels, such as the profile's name, for people who look at the provider's list. Core never reads them."""

    def command(self, state_dir: str) -> tuple[str, ...]:
        """Return the main process of the sandbox: core's watchdog, whose exit ends the sandbox.

        Args:
            state_dir: the `Sandbox.state_dir` that the sandbox will have, or its path relative to the directory in
                which the backend starts the command.
        """
        return watchdog_command(f"{state_dir}/heartbeat", self.config.orphan_ttl_s)

    def check_existing(self, isolation: str, sandbox_id: str) -> None:
        """Refuse an existing sandbox with this creation id if it was made with a level weaker than `isolation` here.

        Call it in `create` before an existing sandbox is returned, if your sandboxes differ by level.

        Args:
            isolation: the label of the level that the sandbox was made with, as kept with it at its creation.

        Raises:
            PolicyError: the sandbox was made with a weaker level.
        """
        if Isolation.parse(isolation) < self.isolation:
            raise PolicyError(
                f"the sandbox was made with isolation {isolation!r}, not {self.isolation.label!r}",
                hint="terminate it first, or use another creation id",
                sandbox_id=sandbox_id,
            )


class SandboxStatus(StrEnum):
    """Whether a sandbox runs, has ended, or is no longer known to its provider."""

    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"


@dataclass(frozen=True)
class SandboxInfo:
    """An entry of `Backend.list()`: a sandbox with our label."""

    sandbox_id: str
    owner: str
    creation_id: str
    created: float
    """Seconds since the epoch."""
    status: SandboxStatus


@dataclass(frozen=True)
class Diagnosis:
    """Whether a backend can be used here, and what to do if not. `hermes-rl doctor` prints it as one line."""

    usable: bool
    summary: str
    details: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


class Channel(ABC):
    """A byte stream in both directions to one process in a sandbox, with backpressure both ways.

    Every await may be cancelled. If the transport dies, `read` and `write` raise `ChannelLost`. If the process ends,
    `read` returns `b""` and `wait` returns its status.
    """

    @abstractmethod
    async def read(self, n: int) -> bytes:
        """Return 1 to `n` bytes of standard output, or `b""` at the end of the stream."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write all of `data` to standard input. Return once the transport has taken it."""

    @abstractmethod
    async def wait(self) -> int:
        """Wait for the process to end, and return its exit status."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the stream (the process may live on). Idempotent; never raises `ChannelLost`."""

    @property
    def stderr_tail(self) -> str:
        """Return the last few KB of standard error, for error messages."""
        return ""


class Sandbox(ABC):
    """One isolated machine. Only the pool that created it may terminate it."""

    id: str
    workspace_base: str = "/data"
    """The directory with the slots' workspaces, as a path inside the sandbox."""
    state_dir: str = "/data/.hermes"
    """The guest's own directory, as a path inside the sandbox. Slots can't read it."""
    uid_base: int | None = None
    """The first of 512 user ids that belong to this sandbox alone (`hermes_core.sandbox.uids` reserves them on this
    host). A guest that is root gives these ids to its slots. Without them, such a guest can't separate its slots."""
    own_system: bool = False
    """Whether the sandbox has a root directory of its own, as a container has, and not a host's. The guest then adds
    the slots' users to the sandbox's /etc/passwd and /etc/group."""
    slot_root: str | None = None
    """The directory, as a path inside the sandbox, that slots' root directories start from at level `private-root`.
    Slots don't see mounts below this directory, so the programs and /etc must not be mounted there. None is the
    sandbox's own root if `own_system`; otherwise the sandbox can't have slots of that level."""
    image: SandboxImage | None = None
    """The image of the sandbox, for the records of rollouts. None: the profile's image, of unknown digest."""
    lifetime_s: float | None = None
    """Seconds from the return of `create` until the provider ends the sandbox in any case. None is never. The pool
    replaces the sandbox before that."""

    @abstractmethod
    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox and return the stream to it.

        Raises:
            ChannelLost: the provider could not be reached.
            SandboxLost: the sandbox does not exist any more.
        """

    @abstractmethod
    async def status(self) -> SandboxStatus:
        """Ask the provider for the sandbox's present status."""

    async def cut_network(self) -> None:
        """Cut the sandbox off from every network. For backends that declare `Network.SETUP`.

        Raises:
            InfraError: it can't be proved that no network is left.
            PluginError: the backend declares `Network.SETUP` but can't cut the network.
        """
        raise PluginError(f"{type(self).__name__} has no cut_network, and its backend declares network 'setup'")

    @abstractmethod
    async def terminate(self) -> None:
        """End the sandbox with all of its processes and files. Idempotent; return when it is gone."""


@runtime_checkable
class CanAttach(Protocol):
    """The method that a backend needs for the capability `attach`."""

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raises `SandboxLost` if it does not run."""


class CanBuild(Protocol):
    """The method that a backend needs for the capability `builds`."""

    async def prepare_image(self, image: Image, config: SandboxConfig) -> str:
        """Build an image or fetch it, so that `create` finds it ready. Return the name that `create` takes as `image`.

        The name of an image that is built changes with the content of its folder, which `sandbox/images.py` reads and
        hashes. Concurrent calls for the same image share one attempt, which ends when the last of these calls is
        cancelled. If the image is gone when `create` is called, `create` makes it again.

        Args:
            config: the profile's settings, such as a platform. Its own `image` has no meaning here.

        Raises:
            ImageError: the image can't be had, and trying again does not help.
            ProvisionError: the provider, or a registry, failed.
        """


class CanSnapshot(Protocol):
    """The methods that a backend needs for the capability `snapshot`."""

    async def snapshot(self, sandbox: Sandbox) -> str:
        """Save the files of a running sandbox as they are now, and return the snapshot's id. The sandbox keeps running.

        Raises:
            InfraError: the provider failed.
        """

    async def restore(self, spec: SandboxSpec, snapshot_id: str) -> Sandbox:
        """Create a sandbox with the files of a snapshot. Otherwise like `Backend.create`, including the errors."""


class Backend(ABC):
    """Base class of backends. A backend makes sandboxes of one kind. Core builds slots, pools, commands and files on
    `Sandbox.open`."""

    name: ClassVar[str]
    config_class: ClassVar[type[SandboxConfig]] = SandboxConfig
    capabilities: Capabilities

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox of this spec, or return the existing one with its `creation_id`.

        Return only when the sandbox is ready for `open`: a program opened too early might run on the host.

        Raises:
            ProvisionError: the provider failed. The message says at which step, and the hint what to do.
            PolicyError: the spec asks for something that this backend cannot grant.
        """

    @abstractmethod
    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the sandboxes with our label, of one owner or of all."""

    @abstractmethod
    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id. Idempotent."""

    @abstractmethod
    async def check(self) -> Diagnosis:
        """Return whether this backend can be used here. Never raises because the host is unsuitable."""

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels that sandboxes of this profile can give their slots. Override this method if some of the
        declared levels depend on a profile's settings."""
        return self.capabilities.isolation

    def note_profile(self, config: SandboxConfig) -> None:
        """Called with each profile that will be used, for providers where `list` must know where to look."""
        return

    async def aclose(self) -> None:
        """Release the connection to the provider. Does not end sandboxes."""
        return
