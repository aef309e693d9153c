"""Tasks as folders: reads `task.toml` and `instruction.md`, and says why a task can't run here."""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from hermes_core import DatasetError, Image, ImageBuild
from hermes_harbor.config import HarborConfig
from hermes_harbor.task_toml import MAIN_SERVICE, TaskToml, unknown_keys

log = logging.getLogger("hermes_core.harbor")

MAX_TEXT = 1 << 20
"""Maximum number of bytes of a `task.toml` and of an instruction."""

DOCKERFILE = "Dockerfile"

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_COMPOSE = (
    "environment/docker-compose.yaml",
    "environment/docker-compose.yml",
    "environment/singularity-compose.yaml",
    "tests/docker-compose.yaml",
)


class Refused(DatasetError):
    """A task that is valid, and can't run here."""


@dataclass(frozen=True)
class Task:
    """One task."""

    id: str
    folder: Path
    toml: TaskToml
    instruction: str
    image: Image
    """The image of its sandboxes: by name, or built from `environment/Dockerfile`."""
    workdir: str | None
    """Where its commands start, an absolute path. None is the working directory of its image."""
    variables: Mapping[str, str]
    """The environment variables of all of its commands."""
    verifier_variables: Mapping[str, str]
    """More variables, for its tests."""

    def renamed(self, name: str) -> Task:
        """Return the same task under another id."""
        return replace(self, id=name)

    @property
    def tests(self) -> Path:
        """Return the folder of its tests."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        """Return the folder of its solution."""
        return self.folder / "solution"


def task_folders(name: str) -> list[Path]:
    """Return the folders of the tasks in a dataset, by name: the folder itself, or those in it. Blocking.

    Raises:
        DatasetError: there are none.
    """
    folder = Path(name).expanduser()
    if (folder / "task.toml").is_file():
        return [folder]
    if not folder.is_dir():
        raise DatasetError(f"there is no folder {folder}", hint="dataset_name is a task's folder, or a folder of tasks")
    found = sorted(path.parent for path in folder.glob("*/task.toml") if path.is_file())
    if not found:
        raise DatasetError(f"no task.toml in {folder} or in a folder in it", hint="name a task, or a folder of tasks")
    return found


def load_task(folder: Path, config: HarborConfig) -> Task:
    """Return the task in a folder. Blocking.

    Raises:
        Refused: it can't run here; says why.
        DatasetError: it is wrong; names the file and the key.
    """
    place = folder / "task.toml"
    try:
        table = tomllib.loads(read_text(place))
    except tomllib.TOMLDecodeError as error:
        raise DatasetError(f"{place}: not TOML: {error}", hint="mend the file") from error
    toml = checked(table, str(place))
    if unknown := [*unknown_keys(TaskToml, table)]:
        log.warning("%s: keys without a meaning: %s", place, ", ".join(unknown[:10]))
    if reasons := [*refusals(toml, folder, config)]:
        raise Refused(
            f"task {folder.name!r} can't run here: {'; '.join(reasons)}",
            hint="leave such tasks out with --env.skip_refused=true",
        )
    instruction = folder / "instruction.md"
    for path in (instruction, folder / "tests" / "test.sh"):
        if not path.is_file():
            raise DatasetError(f"task {folder.name!r} has no {path.relative_to(folder)}", hint=f"write {path}")
    return made_task(folder, toml, strip_canary(read_text(instruction)), config)


def checked(table: Mapping[str, object], where: str) -> TaskToml:
    """Return the table of a `task.toml` as a model.

    Raises:
        DatasetError: a key is wrong; names it.
    """
    try:
        return TaskToml.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        reason = first["msg"].removeprefix("Value error, ")
        raise DatasetError(f"{where}, key {key!r}: {reason}", hint="see docs/harbor.md for the keys") from error


def made_task(folder: Path, toml: TaskToml, instruction: str, config: HarborConfig) -> Task:
    """Return the task of these parts, with the variables of the host in it.

    Raises:
        DatasetError: a variable is not set on this host.
    """
    return Task(
        id=toml.task.name if toml.task else folder.name,
        folder=folder,
        toml=toml,
        instruction=instruction,
        image=task_image(toml, folder, config),
        workdir=toml.environment.workdir or config.workdir,
        variables=resolved(toml.environment.env, f"task {folder.name!r}, environment.env"),
        verifier_variables=resolved(toml.verifier.env, f"task {folder.name!r}, verifier.env"),
    )


def task_image(toml: TaskToml, folder: Path, config: HarborConfig) -> Image:
    """Return the image of a task's sandboxes.

    Raises:
        DatasetError: there is none.
    """
    named = toml.environment.docker_image or config.image
    if named and not config.force_build:
        return named
    if not has_dockerfile(folder):
        raise DatasetError(f"task {folder.name!r} has no environment/{DOCKERFILE}", hint="name an image")
    return ImageBuild(folder / "environment", timeout_s=toml.environment.build_timeout_sec)


def has_dockerfile(folder: Path) -> bool:
    """Return whether an image can be built for the task in this folder. Links may lead to anywhere, so they don't
    count."""
    context = folder / "environment"
    return (context / DOCKERFILE).is_file() and not context.is_symlink() and not (context / DOCKERFILE).is_symlink()


def refusals(toml: TaskToml, folder: Path, config: HarborConfig) -> Iterator[str]:
    """Yield the reasons why a task can't run here; none if it can."""
    environment, verifier = toml.environment, toml.verifier
    for place, each in (("environment", environment), ("verifier.environment", verifier.environment)):
        if each is None:
            continue
        if each.os == "windows":
            yield f"{place}.os is windows, and sandboxes are Linux"
        if each.tpu is not None:
            yield f"{place}.tpu asks for a TPU, and no backend has any"
        if each.gpus and "gpus" not in config.accept:
            yield f"{place}.gpus asks for GPUs (accept gpus if the profile has them)"
    for name in _COMPOSE:
        if (folder / name).is_file():
            yield f"{name} asks for several containers"
    yield from _of_services(toml)
    if "network" not in config.accept:
        yield from _of_network(toml)
    dockerfile = folder / "environment" / DOCKERFILE
    if not has_dockerfile(folder) and (config.force_build or not (environment.docker_image or config.image)):
        yield f"it has no {dockerfile.relative_to(folder)}, and names no environment.docker_image (see --env.image)"
    if toml.agent.user not in (None, 0, "0", "root") and "agent_user" not in config.accept:
        yield f"agent.user is {toml.agent.user!r}, and agents are root (accept agent_user)"
    if toml.steps:
        yield "it has steps, which are not supported yet"
    if toml.mode() == "separate":
        yield "its tests run in a separate sandbox, which is not supported yet"
    if environment.mcp_servers:
        yield "environment.mcp_servers names tools, which are not supported yet"
    if (folder / "trajectory.json").exists():
        yield "trajectory.json is an earlier conversation, which is not supported"


def _of_services(toml: TaskToml) -> Iterator[str]:
    steps = toml.steps or ()
    named = {each.service for part in (toml, *steps) for each in part.artifacts}
    named |= {each.service for part in (toml, *steps) for each in part.verifier.collect}
    for service in sorted({name for name in named if name is not None} - {MAIN_SERVICE}):
        yield f"it names the service {service!r} of another container"


def _of_network(toml: TaskToml) -> Iterator[str]:
    modes = {"environment": toml.environment.network_mode, "agent": toml.agent.network_mode}
    for place, mode in {**modes, "verifier": toml.verifier.network_mode}.items():
        if mode not in (None, "public"):
            yield f"{place}.network_mode is {mode!r} (accept network if the profile gives that)"


def strip_canary(text: str) -> str:
    """Return an instruction without the canary lines at its beginning, and the empty lines after them."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)


def resolved(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Return variables whose values may be `${NAME}` or `${NAME:-default}`, of this host's environment.

    Raises:
        DatasetError: one without a default is not set.
    """
    values = {}
    for name, value in variables.items():
        template = _VARIABLE.fullmatch(value)
        found = value if template is None else os.environ.get(template[1], template[2])
        if found is None:
            raise DatasetError(f"{where}: {name} is {value}, which is not set here", hint=f"export {value[2:-1]}=…")
        values[name] = found
    return values


def read_text(path: Path) -> str:
    """Return a text file of a task.

    Raises:
        DatasetError: it can't be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
        if len(data) > MAX_TEXT:
            raise DatasetError(f"{path} has more than {MAX_TEXT} bytes", hint="is it the right file?")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} can't be read: {error}", hint="it must be a text in UTF-8") from error
