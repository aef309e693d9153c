"""Agents that are programs in the slot. A program sends its model calls to a port of the slot, and the driver answers
them."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import platform
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from hermes_agents.serving.bounds import Bounds
from hermes_agents.serving.conversations import Conversations
from hermes_agents.serving.gateway import Gateway
from hermes_agents.serving.http import Handle
from hermes_agents.serving.upstream import Upstream
from hermes_core import (
    AgentContext,
    AgentResult,
    AgentSettings,
    AgentSlot,
    AgentTask,
    CommandError,
    CommandResult,
    ConfigError,
    Diagnosis,
    ExactSettings,
    InfraError,
    Message,
    ModelAgent,
    SetupFailed,
    SharesModel,
    SlotCommands,
    StopReason,
    UsageError,
    open_exact_agent,
)
from hermes_core.agents.replies import sayable

MAX_ARGUMENT = 100_000
"""Maximum number of bytes of a prompt that is an argument. The limit of Linux is a little higher."""

TAIL = 16_000
"""Number of bytes at the end of a program's output that the record keeps."""

_NAMED = 64
"""Maximum number of settings that the record names. A program can name any number of them."""

MCP_SERVER = '"{server}": {"type": "http", "url": "{url}/mcp/{server}", "headers": {"Authorization": "Bearer {key}"}}'
"""An MCP server in the form that most clients read, below the key `mcpServers`."""

ANY_DIALECT = "any"
"""The dialect of a program whose dialect is not known."""

_PLACES = re.compile(r"\{(prompt|prompt_file|install|folder|model|url|key)\}")

# This script prints the machine's type, and then each of its arguments that the slot lacks.
_PROBE = """
uname -m
for need in "$@"; do
  case $need in
    glibc) [ -e /lib64/ld-linux-x86-64.so.2 ] || [ -e /lib/ld-linux-aarch64.so.1 ] && continue ;;
    python3.*) [ "$(python3 -c 'import sys; print("python3.%d" % sys.version_info[1])')" = "$need" ] && continue ;;
    *) command -v "$need" >/dev/null && continue ;;
  esac
  echo "$need"
done
"""

_MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}
"""Linux's names of machine types that other systems name differently."""

_MISSING = {"glibc": "the loader of glibc: its image has musl or nothing"}
"""Descriptions of needs that are not the name of a program."""


_OF_THE_PROGRAM = {
    "compact_at": "shortens its conversations itself",
    "ephemeral_system_prompt": "has its own system prompt",
    "prefill_messages": "writes its conversations itself",
}
"""Settings of the agent `model` that programs can't have, each with the reason."""


class Package(Protocol):
    """The source of a program. The driver fetches the program once, and sends it to each sandbox."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the programs and libraries that the slot must have to run the program, as in `AgentProgram.needs`."""

    def check(self, name: str, version: str) -> Diagnosis:
        """Return whether the driver has the program, or could fetch it.

        Raises:
            ConfigError: there can be no such program here.
        """

    async def fetch(self, name: str, version: str) -> Path:
        """Return the folder with the program. Fetch the program if the folder does not exist yet.

        Raises:
            ConfigError: the program can't be fetched.
        """


@dataclass(frozen=True)
class AgentProgram:
    """A program, and how it is run as an agent.

    In `argv`, `env` and `files` these words are replaced: `{model}`, `{url}` (the model's address, without `/v1`),
    `{key}` (which the program must send with its model calls), `{install}` (the folder of the fetched program),
    `{folder}` (a folder for the program's own files, new for each rollout), `{prompt}`, and `{prompt_file}` (a file
    with the prompt). In `files` the values are escaped as in JSON, a form that TOML and YAML accept, too; and `{mcp}`
    is replaced by the rollout's MCP servers, with commas between them.
    """

    name: str
    argv: tuple[str, ...]
    """The command line. `{args}` stands for the user's own arguments. Without `{prompt}` and `{prompt_file}`, the
    prompt is the standard input."""
    again: tuple[str, ...] = ()
    """The command line that continues the program's conversation with the user's next message. Without it, the further
    parts of a task are left out."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, in addition to those of `ProgramAgent`."""
    env_when_answered: Mapping[str, str] = field(default_factory=dict)
    """More environment variables, for a program whose requests the run's own endpoint answers (without `upstream`)."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files below `{folder}`, by path."""
    mcp: str = ""
    """The text of one MCP server in a file of `files`. `{server}` is the server's name. The server speaks streamable
    HTTP at `{url}/mcp/{server}`, and wants the header `Authorization: Bearer {key}`. Empty for a program that can't use
    MCP servers."""
    instructions: str = ""
    """The file below `{folder}` from which the program reads its user's instructions, such as `AGENTS.md`. The task's
    system messages are written to this file. If the program has no such file, they are the beginning of the prompt."""
    skills: str = ""
    """The folder below `{folder}` in which the program looks for skills; empty if it knows no skills."""
    needs: tuple[str, ...] = ()
    """The needs of the program in the slot: names of programs; `glibc`; `python3.N`."""
    dialect: str = "chat"
    """The API in which the program calls the model: `chat`, `responses`, `anthropic` or `gemini`; `any` if it is not
    known."""
    package: Package | None = None
    """The source of the program; None if it is in the slot anyway."""
    version: str | None = None
    """The version that is fetched."""
    tried: str = ""
    """The features of the program that were tried, and the version with which they were tried."""

    async def fetch(self, version: str | None = None) -> Path | None:
        """Fetch the program, unless the driver already has it. Return its folder on the driver; None if the program has
        no package.

        Args:
            version: the version to fetch; None is the program's `version`.

        Raises:
            ConfigError: the program can't be fetched.
        """
        return None if self.package is None else await self.package.fetch(self.name, version or self.version or "")

    def check(self) -> Diagnosis:
        """Return whether the driver has the program, or could fetch it.

        Raises:
            ConfigError: there can be no such program here.
        """
        if self.package is None:
            return Diagnosis(True, "it is not fetched, because it is part of the sandbox")
        return self.package.check(self.name, self.version or "")

    @property
    def _needs(self) -> tuple[str, ...]:
        """Return the needs of the program and of its package in the slot."""
        return self.needs + (self.package.needs if self.package is not None else ())

    async def check_slot(self, commands: SlotCommands) -> None:
        """Check that the slot has what the program needs.

        Raises:
            SetupFailed: something is missing.
        """
        if not self._needs and self.package is None:
            return
        probe = await commands.run(["sh", "-c", _PROBE, "sh", *self._needs])
        if not probe.ok:
            raise SetupFailed(f"the slot can't run sh: {probe.error_text.strip()[-300:]}")
        machine, *missing = probe.text.split()
        here = _MACHINES.get(platform.machine(), platform.machine())
        if self.package is not None and machine != here:
            raise SetupFailed(f"the sandbox is {machine}, and {self.name} was fetched for the driver's machine, {here}")
        if missing:
            raise SetupFailed(
                f"{self.name} needs {', '.join(_MISSING.get(each, each) for each in missing)}, which the slot lacks",
                hint="use an image that has it, or another agent: `hermes-rl agents NAME` says what each needs",
            )

    def describe(self) -> dict[str, str | tuple[str, ...]]:
        """Return texts that say how the program is fetched and run; see `InstallableProgram.describe`."""
        return {
            "version": self.version or "",
            "tried": self.tried or "not tried",
            "dialect": self.dialect,
            "the slot needs": self._needs,
            "command": " ".join(self.argv),
            "to go on": " ".join(self.again),
            "instructions": self.instructions or "stand before the prompt",
            "skills": self.skills or "not known to it",
            "MCP servers": self.mcp or "can't be given any",
            **{f"variable {key}": value for key, value in self.env.items()},
            **{f"variable {key}, without upstream": value for key, value in self.env_when_answered.items()},
            **{f"file {path}": text for path, text in self.files.items()},
        }


class ProgramSettings(ExactSettings):
    """Settings of an agent that is a program: those of the model that it asks, and its own."""

    version: str | None = Field(default=None, min_length=1)
    """Version of the program. None is the one that hermes-rl was tried with."""
    args: tuple[str, ...] = ()
    """More arguments for the program."""
    variables: dict[str, str] = Field(default_factory=dict)
    """More environment variables for the program. Do not put secrets there: everything in the slot can read them."""
    upstream: Literal["anthropic", "responses"] | None = None
    """The API to which the program's requests are passed on as they are: Anthropic's Messages or OpenAI's Responses, at
    `base_url`. The sampling is then the program's, too. None has them answered by the run's own endpoint, whatever the
    program speaks. Exact tokens can't be had so."""
    keep_thinking: bool = True
    """Whether the tokens of thinking stay in the conversation if the program leaves it out of what it sends. Otherwise
    its conversation forks there, and what the model sees is what the program sends. Only for token-exact rollouts."""

    @property
    def settings_prefix(self) -> str:
        """Return the prefix of the fields of `Settings` from which the model's URL and key come."""
        return "anthropic_" if self.upstream == "anthropic" else ""

    @model_validator(mode="before")
    @classmethod
    def _of_the_model_alone(cls, value: Any) -> Any:
        given = value.keys() & _OF_THE_PROGRAM.keys() if isinstance(value, Mapping) else ()
        for name in sorted(given):
            raise ValueError(f"{name} is only for the agent `model`: a program {_OF_THE_PROGRAM[name]}")
        return value


class ProgramAgent:
    """Runs a program in the slot on each task. The attribute `program` of a subclass names the program.

    The program's environment has `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, the same for `ANTHROPIC` and
    `GEMINI` (`GOOGLE_GEMINI_BASE_URL`), and `HERMES_PROMPT_FILE`. The key is worth nothing outside of the slot, and
    after the rollout.

    Args:
        settings: the settings of the program, and of the model that it calls.
        model: the agent whose model the program calls. None makes an agent from the settings. If the settings have a
            `tool_call_parser`, `open` makes it.

    Raises:
        ConfigError: as `ModelAgent`.
    """

    config_class: type[AgentSettings] = ProgramSettings
    in_slot = True
    program: AgentProgram

    def __init__(self, settings: ProgramSettings, model: SharesModel | Upstream | None = None) -> None:
        _check_upstream(settings, self.program, model)
        self.settings = settings
        self._model = model
        if model is None and settings.tool_call_parser is None:
            self._model = Upstream(settings, settings.upstream) if settings.upstream else ModelAgent(settings)

    @property
    def name(self) -> str:
        """Return the program's name."""
        return self.program.name

    @property
    def version(self) -> str | None:
        """Return the version of the program, if it is known."""
        return self.settings.version or self.program.version

    @classmethod
    def on_model(cls, settings: ProgramSettings, model: SharesModel) -> Self:
        """Return an agent of this class that asks this model; see `CanUseModel`."""
        return cls(settings, model)

    async def open(self, context: AgentContext) -> Self:
        """Return this agent, or, if its settings have a `tool_call_parser`, an agent on a token-exact model; see
        `CanOpen`. Raise as `open_exact_agent`."""
        if self._model is not None:
            return self
        parsers = context.parsers(self.settings.tool_call_parser or "auto")
        # The program has tools and a system prompt of its own.
        model = await open_exact_agent(self.settings, parsers, tools=True, system=True, server=context.server)
        return self.on_model(self.settings, model)

    async def check_endpoint(self) -> None:
        """Check that the model can be used, and fetch the program.

        Raises:
            ModelError: the model can't be used.
            ConfigError: the program can't be fetched.
        """
        await self._ready_model.check_endpoint()
        await self.program.fetch(self.version)

    async def aclose(self) -> None:
        """Close the connections to the model."""
        if self._model is not None:
            await self._model.aclose()

    def program_for(self, task: AgentTask) -> AgentProgram:
        """Return the program as it is run on one task."""
        return self.program

    @property
    def takes_mcp(self) -> bool:
        """Return whether the program can use the tools of MCP servers."""
        return bool(self.program.mcp)

    @property
    def _ready_model(self) -> SharesModel | Upstream:
        if self._model is None:
            raise UsageError("this agent has no model yet", hint="use run_rollouts(…), or give it one with `on_model`")
        return self._model

    async def run(self, task: AgentTask) -> AgentResult:
        """Run the program on one task until it ends; see `Agent.run`.

        Raises:
            SetupFailed: the program could not be started, or ended before the model had answered a call.
        """
        if task.slot is None:
            raise UsageError(f"{self.name} is a program in a slot, and this rollout has none")
        program = self.program_for(task)
        instructions, prompt = (
            _divide_messages(task.messages) if program.instructions else ("", prompt_of(task.messages))
        )
        await program.check_slot(task.slot.commands)
        install = await self._install(task.slot)
        task.result.messages.extend(copy.deepcopy(task.messages))
        asked, bounds = Conversations(prompt), Bounds(calls=self.settings.max_turns)
        async with (
            self._ready_model.session(own=asked.trainable_answers, keep_thinking=self.settings.keep_thinking) as server,
            _mcp_routes(task) as routes,
            Gateway(server, task, self.settings, conversations=asked, bounds=bounds, routes=routes) as gateway,
        ):
            folder = await _new_folder(task.slot.commands)
            running = RunningProgram(
                program, self.settings, task.slot, gateway, install, folder, task.result, tuple(task.mcp_tools)
            )
            try:
                await running.lay_out(instructions, task.skills)
                await gateway.while_it_answers(self.work(running, task, prompt))
            except CommandError as error:
                if gateway.failure is not None:
                    raise gateway.failure from error
                if not gateway.log:
                    hint = error.hint or "it must be in the sandbox: docs/guides/agent-programs.md says how"
                    raise SetupFailed(f"{self.name} can't be run: {error.message}", hint=hint) from error
                task.result.stop(StopReason.PROGRAM_FAILED)  # the state that its own work left is its result
        return task.result

    async def work(self, running: RunningProgram, task: AgentTask, prompt: str) -> None:
        """Run the program on the prompt, and again for each further message of the user.

        Raises:
            CommandError, SetupFailed: the program can't be run.
            ModelError: the model failed.
        """
        await running.run(running.program.argv, prompt)
        while running.program.again and (said := await task.follow_up()) is not None:
            await running.run(running.program.again, prompt_of([said]))

    async def _install(self, slot: AgentSlot) -> str:
        """Return the folder of the program in the sandbox; empty if the program has no package."""
        folder = await self.program.fetch(self.version)
        if folder is None:
            return ""

        async def send(commands: SlotCommands, directory: str) -> None:
            async with _tar(folder) as parts:
                await commands.tar_in(directory, parts)

        return await slot.prepare(f"agent-{folder.name}", send)


class CommandSettings(ProgramSettings):
    """Settings of the agent `program`."""

    command: str = ""
    """Command line of the program. It is split into words like a shell's and not run by one; `{prompt}`,
    `{prompt_file}`, `{model}`, `{url}` and `{key}` are replaced. Without `{prompt}` and `{prompt_file}`, the prompt is
    the standard input."""


class CommandAgent(ProgramAgent):
    """Runs any command that is in the slot.

    Raises:
        ConfigError: there is no command.
    """

    config_class = CommandSettings
    called = "program"
    """The agent's name."""

    def __init__(self, settings: CommandSettings, model: SharesModel | Upstream | None = None) -> None:
        try:
            words = shlex.split(settings.command)
        except ValueError as error:
            raise ConfigError(f"agent.command can't be split into words: {error}", hint="close the quotes") from error
        if not words:
            raise ConfigError(
                f"the agent `{self.called}` has no command", hint="give --agent.command='my-agent --task {prompt_file}'"
            )
        self.program = AgentProgram(
            self.called,
            (*words, "{args}"),
            env={"HERMES_MCP_FILE": "{folder}/mcp.json"},
            files={"mcp.json": '{"mcpServers": {{mcp}}}'},
            mcp=MCP_SERVER,
            dialect=ANY_DIALECT,
        )
        super().__init__(settings, model)


@dataclass(frozen=True)
class RunningProgram:
    """A program at work on one task."""

    program: AgentProgram
    settings: ProgramSettings
    slot: AgentSlot
    gateway: Gateway
    install: str
    folder: str
    result: AgentResult
    servers: Sequence[str] = ()
    """The names of the MCP servers that the program can use."""

    async def lay_out(self, instructions: str, skills: str | None) -> None:
        """Put the task's instructions and skills where the program looks for them.

        Without instructions, a file is written only if the command line names it, because some programs tell their
        model about an empty file.

        Raises:
            CommandError: there is no room for these files.
            SetupFailed: the skills can't be copied.
        """
        commands, program = self.slot.commands, self.program
        if program.instructions and (instructions or f"{{folder}}/{program.instructions}" in program.argv):
            await commands.write_file(f"{self.folder}/{program.instructions}", instructions.encode())
        if program.skills and skills is not None:
            copied = await commands.run(["sh", "-c", _COPY, "sh", skills, f"{self.folder}/{program.skills}"])
            if not copied.ok:
                raise SetupFailed(
                    f"the task's skills can't be copied: {copied.error_text.strip()[-300:]}",
                    hint="the environment's hook `skills` must name a directory that the slot has after its setup",
                )

    async def run(self, argv: Sequence[str], prompt: str) -> None:
        """Run the program once, and record how it ended.

        Raises:
            CommandError: the program can't be run.
            ModelError: the model failed.
            SetupFailed: the program failed, or all its calls were refused, before the model had answered one.
        """
        tail, done, calls = _OutputTail(), None, self.calls
        try:
            async with self.prepare(argv, prompt) as (line, env, _):
                stdin = None if _names_prompt(argv) else prompt.encode()
                done = await self.slot.commands.run(line, env=env, stdin=stdin, merge_stderr=True, stdout=tail)
        finally:
            self.tell(done, tail.text, tail.total)
        self.check(None if done.ok else f"ended with {done.returncode}", tail.text)
        otherwise = StopReason.FINISHED if done.ok else StopReason.PROGRAM_FAILED
        self.result.stop(self.stop_reason(otherwise, since=calls))

    @asynccontextmanager
    async def prepare(self, argv: Sequence[str], prompt: str) -> AsyncIterator[tuple[list[str], dict[str, str], str]]:
        """Write the program's files, and open its port to the model during the block. Yield the command line, the
        environment, and the port's URL.

        Raises:
            CommandError: the slot has no such port, or no room for the files.
            SetupFailed: the prompt is too long for an argument.
        """
        async with self.slot.commands.forward(self.gateway.serve, most=self.gateway.bounds.connections) as forward:
            yield *await self._prepare_command(argv, prompt, forward.url), forward.url

    def tell(self, done: CommandResult | None, output: str, output_bytes: int, **more: Any) -> None:
        """Record how the program ended, and the end of its output.

        Args:
            done: the result of the program's command; None if the program was ended from outside.
        """
        self.result.program = {
            "exit_code": done and done.exit_code,
            "signal": done and done.signal,
            "output": output.replace(self.gateway.key, "[key]"),
            "output_bytes": output_bytes,
            "requests": self.gateway.counts,
            "refusal": self.refusal,
            "overridden": sorted({name for call in self.gateway.log for name in call.overridden})[:_NAMED],
            **more,
        }

    def check(self, failed: str | None, output: str, *, begun: bool = True) -> None:
        """Check whether the state in which the program ended can be the rollout's result.

        Args:
            failed: how the program failed; None if it did not fail.
            begun: whether the program got its task.

        Raises:
            ModelError: the model failed.
            SetupFailed: the program failed before it had begun or before the model had answered a call, or none of its
                calls could be answered.
        """
        if self.gateway.failure is not None:
            raise self.gateway.failure
        if begun and (self.answers or not (failed or any(self.gateway.counts.values()))):
            return  # a program that calls no model may work in its own way
        said = [f"a request was refused: {self.refusal}" if self.refusal else "", output[-2000:].strip()]
        missed = "its task" if self.answers else "the model had answered it"
        raise SetupFailed(
            f"{self.program.name} {failed or 'ended'} before {missed}: "
            f"{'; '.join(filter(None, said)) or 'it said nothing'}",
            hint="see in docs/guides/agent-programs.md what a program is given, and how it asks the model",
        )

    @property
    def refusal(self) -> str | None:
        """Return the reason of the latest refusal of a model call; None if no call was refused."""
        return next((call.refusal for call in reversed(self.gateway.log) if call.refusal), None)

    @property
    def answers(self) -> int:
        """Return the number of model answers that the program was given, repeated ones included."""
        counts = self.gateway.counts
        return counts.get("answered", 0) + counts.get("replayed", 0)

    @property
    def calls(self) -> int:
        """Return the number of model calls that the program has made."""
        return self.gateway.counts.get("calls", 0)

    def stop_reason(self, otherwise: StopReason, *, since: int) -> StopReason:
        """Return why the program stopped, as the gateway saw it. A program that reports a failure has not finished.

        Args:
            otherwise: the stop reason that the program itself reports, for example by its exit status. It is used if
                the gateway saw no end of the conversation.
            since: the number of the program's model calls before this part of the task.
        """
        reason = self.gateway.stop_reason
        unseen = reason is StopReason.INTERRUPTED or self.calls == since
        failed = reason is StopReason.FINISHED and otherwise is StopReason.PROGRAM_FAILED
        return otherwise if unseen or failed else reason

    async def _prepare_command(self, argv: Sequence[str], prompt: str, url: str) -> tuple[list[str], dict[str, str]]:
        """Write the program's files, and return its command line and environment.

        Raises:
            SetupFailed: the prompt is too long for an argument.
            CommandError: there is no room for the files.
        """
        values = {
            "prompt": prompt,
            "prompt_file": f"{self.folder}/prompt.txt",
            "install": self.install,
            "folder": self.folder,
            "model": self.settings.model or "model",
            "url": url,
            "key": self.gateway.key,
        }
        servers = ", ".join(self.program.mcp.replace("{server}", name) for name in self.servers)
        for path, text in {**self.program.files, "prompt.txt": "{prompt}"}.items():
            written = prompt if path == "prompt.txt" else _fill(text.replace("{mcp}", servers), values, _quote)
            await self.slot.commands.write_file(f"{self.folder}/{path}", written.encode())
        line = [_fill(word, values) for word in _words(argv, self.settings.args)]
        if any(len(word.encode()) > MAX_ARGUMENT for word in line):
            raise SetupFailed(
                f"the prompt has more than {MAX_ARGUMENT} bytes, and {self.program.name} takes it as an argument",
                hint="use {prompt_file}, or the standard input",
            )
        answered = {} if self.settings.upstream else self.program.env_when_answered
        env = {**_ENVIRONMENT, **self.program.env, **answered}
        return line, {name: _fill(text, values) for name, text in env.items()} | self.settings.variables


_ENVIRONMENT = {
    "OPENAI_BASE_URL": "{url}/v1",
    "OPENAI_API_KEY": "{key}",
    "OPENAI_MODEL": "{model}",
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_API_KEY": "{key}",
    "ANTHROPIC_MODEL": "{model}",
    "GOOGLE_GEMINI_BASE_URL": "{url}",
    "GEMINI_API_KEY": "{key}",
    "GEMINI_MODEL": "{model}",
    "HERMES_PROMPT_FILE": "{prompt_file}",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""Environment variables of every program."""


class _OutputTail:
    """A receiver of output that keeps only the output's end."""

    def __init__(self) -> None:
        self.total = 0
        self._kept = bytearray()

    async def __call__(self, piece: bytes) -> None:
        """Add a piece of output."""
        self.total += len(piece)
        self._kept += piece
        del self._kept[:-TAIL]

    @property
    def text(self) -> str:
        """Return the kept end of the output as text."""
        return sayable(self._kept.decode("utf-8", "replace"))


def prompt_of(messages: Sequence[Message]) -> str:
    """Return the texts of messages, one after the other.

    Raises:
        SetupFailed: a part of a message is no text.
    """
    texts = []
    for message in messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise SetupFailed("the prompt has a part that is no text", hint="use the agent `model` for such tasks")
        texts += parts
    return "\n\n".join(text for text in texts if text)


def _check_upstream(settings: ProgramSettings, program: AgentProgram, model: SharesModel | Upstream | None) -> None:
    """Check that requests can be passed on as the settings say.

    Raises:
        ConfigError: the settings or the model want exact tokens, or the program speaks another dialect.
    """
    if settings.upstream is None:
        return
    if settings.tool_call_parser is not None or model is not None:
        raise ConfigError(
            f"upstream {settings.upstream!r} gives no tokens, and the run wants exact ones",
            hint="leave out upstream or the parser: what is passed on to a provider can be evaluated, not trained on",
        )
    if program.dialect not in (ANY_DIALECT, settings.upstream):
        raise ConfigError(
            f"{program.name} asks in the form {program.dialect}, and upstream {settings.upstream!r} takes no other",
            hint="leave out upstream: the requests are then answered by the run's own endpoint",
        )


def _divide_messages(messages: Sequence[Message]) -> tuple[str, str]:
    """Return the text of the system messages, and the text of all other messages.

    Raises:
        SetupFailed: a part of a message is no text.
    """
    system = [message for message in messages if message["role"] == "system"]
    return prompt_of(system), prompt_of([message for message in messages if message["role"] != "system"])


def _words(argv: Sequence[str], args: Sequence[str]) -> Iterator[str]:
    for word in argv:
        if word == "{args}":
            yield from args
        else:
            yield word


def _names_prompt(argv: Sequence[str]) -> bool:
    return any(place in ("prompt", "prompt_file") for word in argv for place in _PLACES.findall(word))


def _fill(text: str, values: Mapping[str, str], quoted: Callable[[str], str] = str) -> str:
    return _PLACES.sub(lambda place: quoted(values[place[1]]), text)


def _quote(value: str) -> str:
    return json.dumps(value)[1:-1]


_COPY = 'mkdir -p "$2" && cp -R "$1"/. "$2"'

# The folder is in the home directory and not in the workspace. Some programs refuse to make files in a directory for
# temporary files.
_NEW_FOLDER = """
case $PWD/ in "$HOME"/*) exec mktemp -d ;; esac
case $HOME/ in "$PWD"/*) exec mktemp -d ;; esac
mktemp -d "$HOME/.agent-XXXXXX" 2>/dev/null || exec mktemp -d
"""


async def _new_folder(commands: SlotCommands) -> str:
    """Return a new folder for the files of a program, which is not in the workspace.

    Raises:
        SetupFailed: no folder can be made.
    """
    made = await commands.run(["sh", "-c", _NEW_FOLDER])
    if not made.ok:
        raise SetupFailed(f"there is no room for the program's files: {made.error_text.strip()[-300:]}")
    return made.text.strip()


@asynccontextmanager
async def _mcp_routes(task: AgentTask) -> AsyncIterator[Mapping[str, Handle]]:
    """Serve the rollout's MCP servers during the block, and yield a handler for each path. The package `mcp` is loaded
    only if the rollout has MCP servers."""
    if not task.mcp_tools:
        yield {}
        return
    await asyncio.to_thread(importlib.import_module, "hermes_agents.serving.mcp")  # importing takes a second
    from hermes_agents.serving.mcp import mcp_routes

    async with mcp_routes(task) as routes:
        yield routes


@asynccontextmanager
async def _tar(folder: Path) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the pieces of an uncompressed tar of a folder on the driver.

    Raises:
        InfraError: the folder could not be read to its end.
    """
    line = ("tar", "-C", str(folder), "--owner=0", "--group=0", "--numeric-owner", "-cf", "-", ".")
    tar = await asyncio.create_subprocess_exec(
        *line, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    stdout = tar.stdout
    assert stdout is not None

    async def parts() -> AsyncIterator[bytes]:
        while part := await stdout.read(1 << 18):
            yield part
        if await tar.wait():
            raise InfraError(f"{folder} could not be read", hint="remove it: it is then fetched again")

    try:
        yield parts()
    finally:
        if tar.returncode is None:
            tar.kill()
        await tar.wait()
