"""Reads task folders, and refuses tasks that can't run here, with the reasons."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from hermes_core import DatasetError, Image, ImageBuild, McpServer
from hermes_harbor import task_toml
from hermes_harbor.config import HarborConfig
from hermes_harbor.networks import explain_differences
from hermes_harbor.task_toml import (
    MAIN_SERVICE,
    AgentTable,
    Artifact,
    EnvironmentTable,
    Healthcheck,
    StepTable,
    TaskToml,
    Verifier,
    unknown_keys,
)
from hermes_harbor.variables import resolve_variables

log = logging.getLogger("hermes_core.harbor")

MAX_TEXT = 1 << 20
"""Maximum number of bytes of a `task.toml` and of an instruction."""

DOCKERFILE = "Dockerfile"

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_COMPOSE = (
    "environment/docker-compose.yaml",
    "environment/singularity-compose.yaml",
    "tests/docker-compose.yaml",
)


class UnsupportedTask(DatasetError):
    """A task that is valid, but can't run here."""


@dataclass(frozen=True)
class VerifierSandbox:
    """A separate sandbox for the tests of a part."""

    image: Image | None
    """The sandbox's image; None is the task's own."""
    workdir: str | None
    """The directory in which the tests start. None is the working directory of the image."""
    variables: Mapping[str, str]
    has_tests: bool
    """Whether the image contains the tests. If not, they are sent to the sandbox."""


@dataclass(frozen=True)
class TaskPart:
    """The unit that an agent works on and that is scored: the whole task, or a step of it."""

    name: str
    """The step's name; empty for the whole task."""
    instruction: str
    tests: tuple[Path, ...]
    """The folders of the tests. Files of later ones replace those of earlier ones."""
    solution: Path
    """The folder of the solution."""
    workdir: Path | None
    """A folder of files to copy into the working directory when the part begins; None if there is none."""
    agent: AgentTable
    verifier: Verifier
    """The settings of the tests, except for the values of `env`, which are in `verifier_variables`."""
    verifier_variables: Mapping[str, str]
    place: VerifierSandbox | None
    """The sandbox of the tests; None is the agent's sandbox."""
    healthcheck: Healthcheck | None
    artifacts: tuple[Artifact, ...]
    min_reward: Mapping[str, float]
    """The least rewards, by name, with which the next step is begun."""


@dataclass(frozen=True)
class HarborTask:
    """One task."""

    id: str
    folder: Path
    toml: TaskToml
    image: Image | None
    """The image of the sandboxes: a name, or a build of `environment/Dockerfile`. None is the profile's image."""
    workdir: str | None
    """The absolute path in which commands start. None is the working directory of the image."""
    variables: Mapping[str, str]
    """The environment variables of all commands."""
    parts: tuple[TaskPart, ...]
    """The whole task as one part, or its steps in order."""
    mcp_servers: Mapping[str, McpServer] = field(default_factory=dict)
    """The MCP servers of the agent, by name."""

    def with_id(self, name: str) -> HarborTask:
        """Return the same task under another id."""
        return replace(self, id=name)


def task_folders(folder: Path) -> list[Path]:
    """Return the task folders of a dataset, sorted: the folder itself, or the folders in it. Blocking.

    Raises:
        DatasetError: there are no task folders.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    if not folder.is_dir():
        raise DatasetError(f"there is no folder {folder}", hint="dataset_name is a task's folder, or a folder of tasks")
    found = sorted(path.parent for path in folder.glob("*/task.toml") if path.is_file())
    for path in sorted(folder.glob("*/instruction.md")):
        if path.parent not in found:
            log.warning("%s is no task, as it has no task.toml", path.parent)
    if not found:
        raise DatasetError(f"no task.toml in {folder} or in a folder in it", hint="name a task, or a folder of tasks")
    return found


def load_task(folder: Path, config: HarborConfig) -> HarborTask:
    """Return the task in a folder. Blocking.

    Raises:
        UnsupportedTask: the task can't run here; the message has the reasons.
        DatasetError: the task is wrong; the message names the file and the key.
    """
    check_links(folder)
    place = folder / "task.toml"
    try:
        table = tomllib.loads(read_text(place))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError(f"{place}: not TOML: {error}", hint="fix the file") from error
    toml = parse_task_toml(table, str(place))
    if unknown := [*unknown_keys(TaskToml, table)]:
        log.warning("%s: keys without a meaning: %s", place, ", ".join(unknown[:10]))
    if reasons := [*refusals(toml, folder, config)]:
        raise UnsupportedTask(f"task {folder.name!r} can't run here: {'; '.join(reasons)}", hint="change the task")
    return make_task(folder, toml, config)


def check_links(folder: Path) -> None:
    """Refuse links that lead out of a task's folder, because its files are sent to models and sandboxes. Blocking.

    Of `environment`, only the Dockerfile is checked: the other files belong to the image.

    Raises:
        DatasetError: a link leads out of the folder.
    """
    top = folder.resolve()
    for place, folders, files in os.walk(folder):
        names = [*folders, *files]
        if Path(place) == folder / "environment":
            names = ["Dockerfile"]
            folders.clear()
        for path in (Path(place) / name for name in names):
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise DatasetError(f"{path} is a link that leads out of its task", hint="put a copy there")


def content_digest(folder: Path) -> str:
    """Return a digest of a task's files: of their names, contents and executable bits, and of the targets of links.
    Blocking.

    Raises:
        DatasetError: a file can't be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.rglob("*")):
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                kind, content = "link", os.fsencode(path.readlink())
            elif stat.S_ISREG(status.st_mode):
                kind = "program" if status.st_mode & 0o100 else "file"
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            else:
                continue
            name = os.fsencode(path.relative_to(folder))
            digest.update(f"{kind} {len(name)} {len(content)} ".encode() + name + content)
    except OSError as error:
        raise DatasetError(f"{error.filename} can't be read: {error.strerror}", hint="check its rights") from error
    return f"sha256:{digest.hexdigest()}"


def parse_task_toml(table: Mapping[str, object], where: str) -> TaskToml:
    """Return the model of a `task.toml`.

    Raises:
        DatasetError: a key is wrong; the message names it.
    """
    try:
        return TaskToml.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        reason = first["msg"].removeprefix("Value error, ")
        raise DatasetError(f"{where}, key {key!r}: {reason}", hint="see docs/guides/harbor.md for the keys") from error


def make_task(folder: Path, toml: TaskToml, config: HarborConfig, instruction: str | None = None) -> HarborTask:
    """Return the task of a folder and its `task.toml`, with variables of this host filled in. Blocking.

    Args:
        instruction: the instruction of a task that has no `instruction.md`.

    Raises:
        DatasetError: a file is missing, or a variable is not set on this host.
    """
    task = HarborTask(
        id=toml.task.name if toml.task else folder.name,
        folder=folder,
        toml=toml,
        image=task_image(toml, folder, config),
        workdir=toml.environment.workdir or config.workdir,
        variables=resolve_variables(toml.environment.env, f"task {folder.name!r}, environment.env"),
        parts=(),
        mcp_servers={each.name: _mcp_server(each) for each in toml.environment.mcp_servers},
    )
    if toml.steps:
        return replace(task, parts=tuple(_step(task, step, config) for step in toml.steps))
    return replace(task, parts=(_whole(task, config, instruction),))


def _whole(task: HarborTask, config: HarborConfig, instruction: str | None) -> TaskPart:
    toml, tests = task.toml, task.folder / "tests"
    return TaskPart(
        name="",
        instruction=_instruction(task.folder, task.folder) if instruction is None else instruction,
        tests=(tests,),
        solution=task.folder / "solution",
        workdir=None,
        agent=toml.agent,
        verifier=toml.verifier,
        verifier_variables=resolve_variables(toml.verifier.env, f"task {task.folder.name!r}, verifier.env"),
        place=_place(task, None, (tests,), config),
        healthcheck=None,
        artifacts=tuple(toml.artifacts),
        min_reward={},
    )


def _step(task: HarborTask, step: StepTable, config: HarborConfig) -> TaskPart:
    toml, folder = task.toml, task.folder / "steps" / step.name
    tests = (task.folder / "tests", folder / "tests")
    own = step.verifier.model_fields_set
    verifier = toml.verifier.model_copy(
        update={
            **{key: getattr(step.verifier, key) for key in ("timeout_sec", "user") if key in own},
            "env": {**toml.verifier.env, **step.verifier.env},
            "collect": [*toml.verifier.collect, *step.verifier.collect],
        }
    )
    gate = step.min_reward
    has_solution = (folder / "solution").is_dir()
    return TaskPart(
        name=step.name,
        instruction=_instruction(task.folder, folder),
        tests=tests,
        solution=(folder if has_solution else task.folder) / "solution",
        workdir=folder / "workdir" if (folder / "workdir").is_dir() else None,
        agent=toml.agent.model_copy(update={key: getattr(step.agent, key) for key in step.agent.model_fields_set}),
        verifier=verifier,
        verifier_variables=resolve_variables(
            verifier.env, f"task {task.folder.name!r}, step {step.name!r}, verifier.env"
        ),
        place=_place(task, step, tests, config),
        healthcheck=step.healthcheck,
        artifacts=(*toml.artifacts, *step.artifacts),
        min_reward={"reward": gate} if isinstance(gate, float) else gate or {},
    )


def _instruction(task: Path, folder: Path) -> str:
    path = folder / "instruction.md"
    if not path.is_file():
        raise DatasetError(f"task {task.name!r} has no {path.relative_to(task)}", hint=f"write {path}")
    return strip_canary(read_text(path))


def _place(
    task: HarborTask, step: StepTable | None, tests: tuple[Path, ...], config: HarborConfig
) -> VerifierSandbox | None:
    """Return the sandbox for the tests of a part; None is the agent's sandbox.

    Raises:
        DatasetError: there are no tests.
    """
    toml = task.toml
    place = None
    if toml.mode(step) == "separate":
        tables = [each.verifier.environment for each in (toml, step) if each is not None]
        own = next((each for each in reversed(tables) if each is not None), None)
        images = (_image_of_tests(table, folder) for table, folder in zip(tables, tests, strict=True))
        of_task = "image" not in config.accept
        image = next((each for each in reversed([*images]) if each is not None and of_task), None)
        where = f"task {task.folder.name!r}, verifier.environment.env"
        place = VerifierSandbox(
            image=image,
            workdir=(own and own.workdir) or (config.workdir if image else task.workdir),
            variables=task.variables if own is None else resolve_variables(own.env, where),
            has_tests=image is not None,
        )
    if (place is None or not place.has_tests) and not any((each / "test.sh").is_file() for each in tests):
        path = tests[-1] / "test.sh"
        raise DatasetError(f"task {task.folder.name!r} has no {path.relative_to(task.folder)}", hint=f"write {path}")
    return place


def _image_of_tests(table: EnvironmentTable | None, folder: Path) -> Image | None:
    """Return the image that contains the tests of a folder: a name, or a build. None if there is no such image."""
    if table is not None and table.docker_image:
        return table.docker_image
    if not has_dockerfile(folder):
        return None
    return ImageBuild(folder, timeout_s=(table or EnvironmentTable()).build_timeout_sec)


def task_image(toml: TaskToml, folder: Path, config: HarborConfig) -> Image | None:
    """Return the image of a task's sandboxes; None, the profile's image, if the configuration accepts that.

    Raises:
        DatasetError: the task has no image.
    """
    if "image" in config.accept:
        return None
    named = toml.environment.docker_image or config.image
    if named and not config.force_build:
        return named
    if not has_dockerfile(folder / "environment"):
        raise DatasetError(f"task {folder.name!r} has no environment/{DOCKERFILE}", hint="name an image")
    return ImageBuild(folder / "environment", timeout_s=toml.environment.build_timeout_sec)


def has_dockerfile(context: Path) -> bool:
    """Return whether a folder has a Dockerfile. Links do not count, because they may lead anywhere."""
    return (context / DOCKERFILE).is_file() and not context.is_symlink() and not (context / DOCKERFILE).is_symlink()


def _mcp_server(given: task_toml.McpServerTable) -> McpServer:
    if given.transport == "stdio":
        return McpServer(command=given.command, args=tuple(given.args))
    return McpServer.model_construct(url=given.url)  # not validated, because the run has to replace the server


def refusals(toml: TaskToml, folder: Path, config: HarborConfig) -> Iterator[str]:
    """Yield the reasons why a task can't run here."""
    steps = toml.steps or ()
    own = {f"step {step.name!r}, verifier.environment": step.verifier.environment for step in steps}
    for place, each in {
        "environment": toml.environment,
        "verifier.environment": toml.verifier.environment,
        **own,
    }.items():
        if each is None:
            continue
        if each.os == "windows":
            yield f"{place}.os is windows, and sandboxes are Linux"
        if each.tpu is not None:
            yield f"{place}.tpu asks for a TPU, and no backend has any"
        if each.gpus and "gpus" not in config.accept:
            yield f"{place}.gpus asks for GPUs (accept gpus if the profile has them)"
    folders = [folder, *(folder / "steps" / step.name for step in steps)]
    for name in (each / name for name in _COMPOSE for each in folders):
        if name.is_file():
            yield f"{name.relative_to(folder)} asks for several containers"
    yield from _of_services(toml)
    if "network" not in config.accept:
        yield from explain_differences(toml)
    dockerfile = folder / "environment" / DOCKERFILE
    if (
        "image" not in config.accept
        and not has_dockerfile(dockerfile.parent)
        and (config.force_build or not (toml.environment.docker_image or config.image))
    ):
        yield f"it has no {dockerfile.relative_to(folder)}, and names no environment.docker_image (see --env.image)"
    if len({step.agent.user if "user" in step.agent.model_fields_set else toml.agent.user for step in steps}) > 1:
        yield "agent.user is not the same in all steps, and an agent stays one user"
    if "mcp_urls" not in config.accept:
        for server in toml.environment.mcp_servers:
            if server.transport != "stdio":
                yield (
                    f"environment.mcp_servers has {server.name!r} at a URL, which the driver does not reach for a task "
                    "(accept mcp_urls, and name a server of that name in --mcp FILE)"
                )
    for path in (each / "trajectory.json" for each in folders):
        if path.exists():
            yield f"{path.relative_to(folder)} is an earlier conversation, which is not supported"


def _of_services(toml: TaskToml) -> Iterator[str]:
    steps = toml.steps or ()
    named = {each.service for part in (toml, *steps) for each in part.artifacts}
    named |= {each.service for part in (toml, *steps) for each in part.verifier.collect}
    for service in sorted({name for name in named if name is not None} - {MAIN_SERVICE}):
        yield f"it names the service {service!r} of another container"


def strip_canary(text: str) -> str:
    """Return an instruction without the canary lines at its beginning and the empty lines after them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)


def read_text(path: Path) -> str:
    """Return a text file of a task.

    Raises:
        DatasetError: the file can't be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
        if len(data) > MAX_TEXT:
            raise DatasetError(f"{path} has more than {MAX_TEXT} bytes", hint="is it the right file?")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} can't be read: {error}", hint="it must be a text in UTF-8") from error
