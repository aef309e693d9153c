"""The environment `prompts`: a JSONL file of prompts, without a check. It makes data, and gives no rewards."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hermes_core.datasets.intake import DatasetConfig
from hermes_core.datasets.rows import RowFile
from hermes_core.environment import Environment, Item, Need
from hermes_core.errors import SetupFailed
from hermes_core.handles import RolloutHandle
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.sandbox.commands import CommandResult
from hermes_core.validation import words

OUTPUT_KEPT = 4000
"""Number of characters of a failed command's output that are kept."""


class PromptsConfig(DatasetConfig):
    """The settings of `prompts`."""

    dataset_name: str
    """The JSONL file."""
    setup_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit in seconds of each setup command, and of each command of a solution."""
    needs: tuple[Need, ...] = ()
    """What each slot must have to itself: `network` if items name a port, `tmp` if they name a file in /tmp."""


def _commands(value: object) -> tuple[str, ...]:
    commands = value if isinstance(value, list | tuple) else [value]
    for command in commands:
        if not isinstance(command, str) or not command.strip():
            raise ValueError("must be a shell command or a list of shell commands")
        if "\0" in command:
            raise ValueError("holds a NUL byte, which no command can")
    return tuple(commands)


def _files(value: object) -> object:
    for name in value if isinstance(value, Mapping) else ():
        path = PurePosixPath(str(name))
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in str(name):
            raise ValueError(f"has {str(name)!r}, which is not the path of a file below its directory")
    return value


def _words(value: object) -> object:
    return words(value) if isinstance(value, str | list) else value


Commands = Annotated[tuple[str, ...], BeforeValidator(_commands)]
"""Shell commands, run in the slot one after the other, until one fails."""
Files = Annotated[dict[str, str], BeforeValidator(_files)]
"""Text files, by path."""


class PromptRow(BaseModel):
    """One line of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str | None = Field(default=None, min_length=1)
    """The row's name, unique in the file. None makes one of the line's content, and of the number of equal lines before
    it. So equal lines are items of their own, and a file can grow or be sorted before a run is resumed."""
    prompt: str = Field(min_length=1)
    """The user message that tells the agent what to do."""
    image: str | None = Field(default=None, min_length=1)
    """An image for its sandboxes, instead of the profile's image."""
    profile: str | None = Field(default=None, min_length=1)
    """The profile of its sandboxes (image, resources, limits), instead of the run's."""
    cwd: str | None = Field(default=None, min_length=1)
    """The directory in which its commands and tools start, absolute or relative to the workspace."""
    workspace: Files = Field(default_factory=dict)
    """Text files that are written before the agent begins, by path below `cwd`."""
    setup: Commands = ()
    """Commands that then prepare the workspace."""
    toolsets: Annotated[tuple[str, ...] | None, BeforeValidator(_words)] = None
    """The toolsets of the model; an empty list gives it no tools. None is the environment's."""
    distribution: str | None = Field(default=None, min_length=1)
    """The distribution from which its toolsets are drawn. None is the environment's."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Other data of the row, for its record."""

    @model_validator(mode="after")
    def _one_source_of_tools(self) -> PromptRow:
        if self.toolsets is not None and self.distribution is not None:
            raise ValueError("names toolsets and a distribution; name one of them")
        return self


class PromptsEnvironment(Environment):
    """Prompts without a check. A rollout that ends without a failure has no reward.

    A rollout gets a slot if the model is offered a tool that runs in a sandbox, or if its row asks for anything that
    only a sandbox has: an image, a directory, files or setup commands.
    """

    name = "prompts"
    config_class = PromptsConfig
    config: PromptsConfig
    row_class: ClassVar[type[PromptRow]] = PromptRow
    scored = False

    def __init__(self, config: PromptsConfig) -> None:
        super().__init__(config)
        self.needs = frozenset(config.needs)
        self._items: Sequence[Item] = ()
        self._rows: RowFile[PromptRow] | None = None

    async def setup(self) -> None:
        """Read the file.

        Raises:
            DatasetError: the file can't be read, or one of its lines is wrong; names the file, the line and the field.
        """
        name, skip = self.config.dataset_name, self.config.skip_refused
        self._rows = await asyncio.to_thread(RowFile, self.row_class, name, skip=skip)
        self._items = items = await asyncio.to_thread(_Items, self._rows)
        self.item_images = items.have_images

    async def aclose(self) -> None:
        """Close the file."""
        if self._rows is not None:
            self._rows.close()

    def items(self) -> Sequence[Item]:
        """Return the rows, in the file's order."""
        return self._items

    def format_prompt(self, item: Item) -> str:
        """Return the row's prompt as it is."""
        return str(item["prompt"])

    def image(self, item: Item) -> str | None:
        """Return the row's own image, if it has one."""
        named: str | None = item["image"]
        return named

    def profile(self, item: Item) -> str | None:
        """Return the row's own profile, if it names one."""
        named: str | None = item["profile"]
        return named

    def cwd(self, item: Item) -> str | None:
        """Return the row's own directory, if it has one."""
        named: str | None = item["cwd"]
        return named

    def toolsets(self, item: Item) -> Sequence[str] | None:
        """Return the row's own toolsets, if it names them."""
        named: Sequence[str] | None = item["toolsets"]
        return named

    def distribution(self, item: Item) -> str | None:
        """Return the row's own distribution, if it names one."""
        named: str | None = item["distribution"]
        return named

    def uses_slot(self, item: Item) -> bool:
        """Return whether the row asks for anything that only a sandbox has."""
        return any(item[field] for field in ("image", "profile", "cwd", "workspace", "setup"))

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Write the row's files and run its setup commands, in the agent's slot."""
        for name, text in item["workspace"].items():
            await rollout.commands.write_file(name, text.encode())
        failed = await run_all(rollout, item["setup"], self.config.setup_timeout_s)
        if failed is not None:
            raise SetupFailed(f"a set-up command of item {item['id']!r} failed with {describe_failure(failed)}")
        return {}


class _Items(Sequence[Item]):
    """The rows as items, each with an id."""

    def __init__(self, rows: RowFile[PromptRow]) -> None:
        self._rows = rows
        self._copies = array("Q")
        """For each line, the number of equal lines before it."""
        self.have_images = len(rows) > 0
        """Whether each item names an image."""
        seen: Counter[str] = Counter()
        for index, row in enumerate(rows):
            name = _name(rows.line(index))
            self._copies.append(seen[name])
            seen[name] += 1
            self.have_images &= row.image is not None

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        item = self._rows[index].model_dump()
        if item["id"] is None:
            copies = self._copies[index]
            item["id"] = _name(self._rows.line(index)) + (f"-{copies + 1}" if copies else "")
        return item


def _name(line: bytes) -> str:
    return hashlib.sha256(line.strip()).hexdigest()[:16]


async def run_all(
    rollout: RolloutHandle, commands: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> CommandResult | None:
    """Run commands in the agent's slot, in order, until one fails. Return the failed command's result, or None."""
    for command in commands:
        done = await rollout.commands.run(command, env=env, timeout_s=timeout_s, merge_stderr=True)
        if not done.ok:
            return done
    return None


def tail(result: CommandResult) -> str:
    """Return the end of a command's output."""
    return result.text.strip()[-OUTPUT_KEPT:]


def describe_failure(result: CommandResult) -> str:
    """Return a text that says how a command failed, with the end of its output."""
    how = "a time-out" if result.timed_out else f"status {result.returncode}"
    return f"{how}: {output}" if (output := tail(result)) else how
