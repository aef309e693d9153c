"""The base class of environments: items, a prompt for each, and hooks that prepare, verify and solve a task."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hermes_core.cheats import Cheat, usual_cheats
from hermes_core.errors import DatasetError, SetupFailed, UsageError
from hermes_core.handles import RolloutHandle
from hermes_core.mcp.servers import McpServer
from hermes_core.sandbox.commands import Cwd
from hermes_core.sandbox.contract import Isolation, Network, NetworkPlan, SlotUser
from hermes_core.sandbox.images import Image
from hermes_core.sandbox.pool.provision import PrepareSandbox

Item = Mapping[str, Any]
"""One task of an environment: a row of its dataset."""

Score = tuple[float, Mapping[str, Any]]
"""A finite reward, and details for the record."""

_ID_FIELDS = ("id", "instance_id", "problem_id", "task_id")


class Need(StrEnum):
    """Things that each slot must have to itself, in addition to what its isolation level promises."""

    NETWORK = "network"
    """A private localhost: servers of other slots can't be reached there, and their ports don't clash with this
    slot's."""
    TMP = "tmp"
    """A private /tmp."""


@dataclass(frozen=True)
class FollowUp:
    """The user's next message, when the agent is done with a part of its task."""

    text: str
    agent_timeout_s: float | None = None
    """The agent's time limit for the part that begins now, as `Environment.agent_timeout_s`. The run's own limit is for
    all parts together."""


class EnvironmentConfig(BaseModel):
    """Settings that every environment has. Environments subclass it to add their own. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    max_items: int = Field(default=0, ge=0)
    """Maximum number of items, applied after shuffling. 0 is all."""
    shuffle: bool = False
    """Whether to take the items in a random order that depends on `seed`, instead of the order of the dataset."""
    seed: int = 0
    """Random seed for the order of items."""
    system_prompt: str | None = None
    """The first message of every rollout, if any."""
    enabled_toolsets: tuple[str, ...] | None = None
    """The toolsets of the model. None is the environment's default. Cannot be combined with `distribution`."""
    disabled_toolsets: tuple[str, ...] = ()
    """Toolsets to remove from the enabled ones."""
    distribution: str | None = None
    """The distribution from which each group draws its toolsets. Cannot be combined with `enabled_toolsets`."""

    @model_validator(mode="after")
    def _one_source_of_tools(self) -> EnvironmentConfig:
        if self.enabled_toolsets is not None and self.distribution is not None:
            raise ValueError("enabled_toolsets and distribution exclude each other: name one of them")
        return self


class Environment(ABC):
    """Base class of environments: items, a prompt for each, and hooks that core calls in every rollout.

    The hooks are ordinary methods, plain or `async`, marked with `hermes_core.plugins.hookspecs.hookimpl`. A hook may
    leave out arguments that it does not need; arguments may be positional or keyword-only:

    - `setup_trajectory_workspace(item, trajectory_id, exec_tool, rollout) -> dict` prepares the agent's slot; the other
      hooks get its return value as `workspace_meta`.
    - `verify_and_score_trajectory(item, result, trajectory_id, exec_tool, workspace_meta, rollout)` returns a finite
      reward, or a reward and a dict of details. The agent's processes are dead when it is called.
    - `solve_trajectory(item, exec_tool, workspace_meta, rollout)` applies the reference solution in the agent's slot,
      for the agent `oracle` and for `hermes-rl validate`.
    - `continue_trajectory(item, result, trajectory_id, exec_tool, workspace_meta, rollout)` returns what the user says
      when the agent is done: a `FollowUp` or a text, with which the agent goes on; or None at the end. The agent's
      processes live on, unless it calls `rollout.kill_everything()`.

    `exec_tool` (`ExecTool`) and `rollout` (`RolloutHandle`) are bound to the agent's own slot. One instance serves many
    rollouts at the same time: don't store per-rollout state on it.

    An environment whose rollouts record a patch may also be a `CanScorePatch`, for `hermes-rl rescore`.
    """

    # The hooks, for type checkers: an environment has only the hooks that it defines, with the arguments that it wants.
    setup_trajectory_workspace: Callable[..., Awaitable[Mapping[str, Any] | None] | Mapping[str, Any] | None]
    verify_and_score_trajectory: Callable[..., Awaitable[Score | float] | Score | float]
    solve_trajectory: Callable[..., Awaitable[None] | None]
    continue_trajectory: Callable[..., Awaitable[FollowUp | str | None] | FollowUp | str | None]

    name: ClassVar[str]
    """The environment's name on the command line and in records."""
    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    isolation: Isolation = Isolation.USER
    """The weakest isolation between slots that the tasks accept."""
    needs: frozenset[Need] = frozenset()
    """What each slot must have to itself. Tasks that name a port need `Need.NETWORK`. If this is not empty, isolation
    levels below `namespace` are refused, and so are backends that can't provide it."""
    hides_files: bool = False
    """Whether the environment hides files from slots (`prepare(key, build, private=True)`). Nothing can be hidden from
    root, so a profile with `slot_user: root` is then refused at the start of a run."""
    slot_user: SlotUser | None = None
    """The user that the slots must have. A profile that names none gets it; one with another user is refused at the
    start of a run. None is any."""
    share_network: bool = False
    """Whether slots of level `private-root` have the sandbox's network, which they then share. A profile can say
    otherwise."""
    default_toolsets: tuple[str, ...] = ("terminal", "file")
    """Toolsets of the model if the configuration names none."""

    scored: bool = True
    """Whether rollouts are verified. If not, the verify hook is never called, and a rollout that ends without a failure
    has no reward."""
    item_images: bool = False
    """Whether `image` names an image for each item. Sandboxes are then made only when a rollout asks for one."""

    as_image: bool = False
    """Whether commands run like programs of the image: with the image's variables, and the agent's commands as the
    image's user."""

    left_out: frozenset[str] = frozenset()
    """The ids of items that `select_items` leaves out. A run sets them, from its quarantine."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config = config if config is not None else self.config_class()

    async def setup(self) -> None:
        """Load and check the dataset. Called once, before the first rollout.

        Raises:
            DatasetError: the dataset or one of its rows can't be used. The error names the row and the field.
        """
        return

    async def aclose(self) -> None:
        """Release what `setup` acquired. Called once, after the last rollout."""
        return

    @abstractmethod
    def items(self) -> Sequence[Item]:
        """Return every item of the dataset, in the dataset's order. `select_items` applies `shuffle` and
        `max_items`."""

    @abstractmethod
    def format_prompt(self, item: Item) -> str:
        """Return the user message that tells the agent what to do."""

    def item_id(self, item: Item) -> str:
        """Return the item's id, which is unique in the dataset.

        Raises:
            DatasetError: the item has none of the usual fields for an id.
        """
        for field in _ID_FIELDS:
            if isinstance(value := item.get(field), (str, int)) and str(value):
                return str(value)
        raise DatasetError(
            f"an item of environment {self.name!r} has no id",
            hint=f"give each row one of the fields {', '.join(_ID_FIELDS)}, or override item_id()",
        )

    @property
    def least_isolation(self) -> Isolation:
        """Return the weakest isolation level that satisfies `isolation` and `needs`."""
        return max(self.isolation, Isolation.NAMESPACE) if self.needs else self.isolation

    def image(self, item: Item) -> Image | None:
        """Return the image for this item's sandboxes, by name or to be built, or None for the profile's image."""
        return None

    def images(self, item: Item) -> Sequence[Image]:
        """Return all images that the item's rollouts use. The images are made ready before a rollout begins, if
        possible while earlier rollouts run."""
        image = self.image(item)
        return () if image is None else (image,)

    def cwd(self, item: Item) -> str | Cwd | None:
        """Return the directory in which commands and tools start: relative to the workspace, absolute, or `Cwd.IMAGE`
        for the image's own. None is the workspace."""
        return None

    def network(self, item: Item) -> Network | NetworkPlan | None:
        """Return the network policy of this item's slots, or one for each phase; None is the profile's. Items with the
        same image share sandboxes if these all have a network, or all have none."""
        return None

    def variables(self, item: Item) -> Mapping[str, str]:
        """Return the environment variables of every command in this item's slots, in addition to the profile's."""
        return {}

    def agent_timeout_s(self, item: Item) -> float | None:
        """Return the agent's time limit in seconds for this item, without its waits for the model. None is the run's
        own limit, which also counts if it is shorter. Each `FollowUp` sets a limit of its own for the part that it
        begins."""
        return None

    def agent_user(self, item: Item) -> str | None:
        """Return the user that the agent's tools run as, in Docker's form `USER[:GROUP]`, by name or number. The slots
        must be root (`slot_user`), and hooks still run as root. None is the slot's user, or with `as_image` the image's
        user."""
        return None

    def toolsets(self, item: Item) -> Sequence[str] | None:
        """Return the toolsets for this item's rollouts; empty for no tools. None is the configuration's."""
        return None

    def distribution(self, item: Item) -> str | None:
        """Return the distribution from which this item's toolsets are drawn. None is the configuration's, unless
        `toolsets` names some."""
        return None

    def mcp_servers(self, item: Item) -> Mapping[str, McpServer]:
        """Return this item's own MCP servers, by name. Its rollouts are offered their tools in addition to others.

        Each is a program that is started in the slot after its setup. An item can't bring a server with a URL or on the
        driver: instead of such a server, the one of the same name in `RunOptions.mcp` is used, if there is one.
        """
        return {}

    def skills(self, item: Item) -> str | None:
        """Return the directory in the slot with this item's skills: folders with a file `SKILL.md`. They are copied to
        where an agent that is a program looks for them; other agents do not get them."""
        return None

    def uses_slot(self, item: Item) -> bool:
        """Return whether the hooks use a slot. If not, and if no tool of a rollout runs in a sandbox, it gets none."""
        return True

    def cheats(self) -> Mapping[str, Cheat]:
        """Return ways to a reward without the work, by name, for `hermes-rl validate --cheats` and agents `cheat:NAME`.

        Each is an async function that cheats in the agent's slot, with the arguments of `solve_trajectory` that it
        wants. Names have lower-case letters, digits and hyphens, and don't depend on the dataset: this is called before
        `setup`. An override may return others, or add its own to `super().cheats()`, which fit every task with a shell.
        """
        return usual_cheats(self.format_prompt)

    def doubt(self, item: Item, agent: str, details: Mapping[str, Any]) -> str | None:
        """Return why an item is not sound although a baseline got the right reward; None if there is no doubt. This is
        for `hermes-rl validate`.

        Args:
            agent: `oracle`, which got 1.0, or `nop`, which got 0.0.
            details: the details that the verification returned with the reward.
        """
        return None

    def profile(self, item: Item) -> str | None:
        """Return the profile (image, resources, limits) for this item's sandboxes, or None for the run's profile."""
        return None

    prepare_sandbox: PrepareSandbox | None = None
    """`async prepare_sandbox(self, sandbox)` puts everything into a new sandbox that setup and verification would
    otherwise fetch. It is for profiles with the network `setup`, which is cut when it returns. An environment where it
    is None can't run with such profiles."""

    def select_items(self) -> Sequence[Item]:
        """Return the items of a run: `items()` in the configured order and number, without the items in `left_out`.
        Each item is read from `items()` when it is used."""
        rows = self.items()
        order: Sequence[int] = range(len(rows))
        if self.config.shuffle:
            order = random.Random(self.config.seed).sample(order, len(rows))
        if self.left_out:
            order = [index for index in order if self.item_id(rows[index]) not in self.left_out]
        return _Selected(rows, order[: self.config.max_items or None])

    def initial_messages(self, item: Item) -> list[dict[str, Any]]:
        """Return the messages with which a rollout of this item starts: the system prompt, if any, and the prompt."""
        messages: list[dict[str, Any]] = []
        if self.config.system_prompt:
            messages.append({"role": "system", "content": self.config.system_prompt})
        prompt = self.format_prompt(item)
        if inspect.iscoroutine(prompt):
            prompt.close()  # avoids Python's warning that the coroutine was never awaited
            raise SetupFailed(
                f"format_prompt of environment {self.name!r} is async, and is called without await",
                hint="write `def format_prompt(self, item)`; what has to be awaited belongs in setup()",
            )
        if not isinstance(prompt, str):
            raise SetupFailed(
                f"format_prompt of environment {self.name!r} gave {prompt!r}, not a text",
                hint="return what the agent is asked to do, for every item",
            )
        messages.append({"role": "user", "content": prompt})
        return messages


@runtime_checkable
class CanScorePatch(Protocol):
    """An environment that can score a patch without an agent."""

    async def score_patch(self, item: Item, patch: str, rollout: RolloutHandle) -> Score:
        """Score a patch that a rollout has recorded, in a slot of its own. Raise as the verify hook does."""
        ...


def check_scores_patches(environment: Environment) -> CanScorePatch:
    """Return the environment, if it can score a patch.

    Raises:
        UsageError: the environment can't score patches.
    """
    if not isinstance(environment, CanScorePatch):
        raise UsageError(
            f"environment {environment.name!r} can't verify a patch by itself", hint="it would need score_patch()"
        )
    return environment


class _Selected(Sequence[Item]):
    """A selection of rows, in another order."""

    def __init__(self, rows: Sequence[Item], order: Sequence[int]) -> None:
        self._rows = rows
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return _Selected(self._rows, self._order[index])
        return self._rows[self._order[index]]
