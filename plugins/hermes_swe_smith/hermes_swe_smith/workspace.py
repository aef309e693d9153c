"""A task's trees in the sandbox, the checkout that an agent gets, and the work that it leaves.

The repository and the clean tree stay in a directory that no slot can read. What reaches a slot is a tar of one tree,
through the driver, and the agent's `.git` is made in its own slot from that tree alone: it has one commit and no other
object, so there is no way from it to the fix.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_core.errors import CommandError, DatasetError, HermesError, SetupFailed
from hermes_swe_smith import guard, scripts, trees

if TYPE_CHECKING:
    from hermes_core.envs.workspace import LeasedSlot
    from hermes_core.sandbox.commands import SlotCommands
    from hermes_core.sandbox.preparation import NewSandbox
    from hermes_swe_smith.dependencies import TestEnvironment
    from hermes_swe_smith.repos import Source
    from hermes_swe_smith.rows import Task

OPERATION_TIMEOUT_S = 300.0
CHUNK = 4 << 20

_LOADER = "import sys; sys.path.insert(0, sys.argv[1]); from hermes_swe_smith.trees import main; main()"

# Tells git to make a tar of the tree that the file `agent` names.
_ARCHIVE = """{ IFS= read -r GIT_DIR && read -r tree; } <"$1" && export GIT_DIR &&
  exec git -c tar.umask=0022 archive --format=tar -o "$2" "$tree"
"""

# The objects lie beside the checkout, so that taking the agent's work is not taking them too.
_CHECKOUT = """set -e
ln -sfn "$1" .venv
cd "$2"
git -c init.defaultBranch=main init -q --template= --separate-git-dir "../.$2.git"
git -c core.looseCompression=0 add -A -f
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git -c gc.auto=0 -c maintenance.auto=false commit -q --no-verify --allow-empty -m "The project as it is"
"""

ENVIRONMENT_LINK = ".venv"
"""Beside the checkout: the virtual environment of its tests."""


class OperationRefused(HermesError):
    """An operation of `trees.py` could not be done, for the reason `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Repository:
    """A prepared repository, in the site's private space."""

    directory: str
    """Holds `repo.git`."""
    scripts: Mapping[str, str]
    """The commands that the project would install, each with its `module:attribute`."""

    @property
    def git_dir(self) -> str:
        """The bare repository."""
        return f"{self.directory}/repo.git"


@dataclass(frozen=True)
class Tested:
    """What is to be tested, as a tar in the site's private space that `give_tested` removes."""

    tar: str
    restored: tuple[str, ...]
    """Files that belong to the tests and that the agent had changed: they are as they were."""
    removed: tuple[str, ...]
    """Files of the agent that would take the place of others."""
    patch: str = ""
    """The agent's work, against the tree that it started from."""


async def prepare_programs(site: LeasedSlot | NewSandbox) -> str:
    """The directory of `trees.py` and what it imports: files, so that Python compiles them once per sandbox."""

    async def build(commands: SlotCommands, directory: str) -> None:
        for name, text in _sources().items():
            await commands.write_file(f"{directory}/hermes_swe_smith/{name}.py", text.encode())

    content = "\0".join(f"{name}\0{text}" for name, text in _sources().items())
    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return await site.prepare(f"swe-smith-programs-{key}", build, private=True)


async def operate(
    commands: SlotCommands,
    programs: str,
    operation: str,
    arguments: Mapping[str, Any],
    payload: bytes = b"",
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = OPERATION_TIMEOUT_S,
) -> dict[str, Any]:
    """Do one operation of `trees.py` with the preparation user's commands.

    Args:
        programs: what `prepare_programs` gave, on the same sandbox.

    Raises:
        OperationRefused: it can't be done; `code` says why.
        SetupFailed: it broke, took too long, or the sandbox has no python3.
    """
    argv = ["python3", "-I", "-S", "-c", _LOADER, programs, operation]
    data = json.dumps(dict(arguments)).encode() + b"\n" + payload
    try:
        done = await commands.run(argv, stdin=data, env=env, timeout_s=timeout_s, output_limit=64 << 20)
    except CommandError as error:
        raise SetupFailed(f"{operation}: {error.message}", hint="the sandbox needs python3 and git") from error
    if not done.ok:
        reason = f"no end after {timeout_s:g} s" if done.timed_out else done.error_text.strip()[-2000:]
        raise SetupFailed(
            f"{operation} failed: {reason or done.returncode}", hint="the sandbox needs git and python3 >= 3.8"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise OperationRefused(answer["error"], answer["message"])
    return answer


async def prepare_repository(
    site: LeasedSlot | NewSandbox,
    task: Task,
    source: Source,
    env: Mapping[str, str],
    timeout_s: float,
    *,
    known: dict[tuple[str, str], Repository],
) -> Repository:
    """The repository on the site's sandbox: made once per sandbox, repository and commit.

    Args:
        known: those that were prepared before, by sandbox and directory; this one is added.

    Raises:
        DatasetError: the bundle or the commit can't be used.
        SetupFailed: it could not be cloned.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        arguments: dict[str, Any] = {"repo": f"{directory}/repo.git", "commit": source.commit, "url": source.url}
        arguments["read"] = scripts.FILES
        if source.bundle is not None:
            arguments["bundle"] = f"{directory}/source.bundle"
            await _send(commands, f"{directory}/source.bundle", source.bundle())
        try:
            answer = await operate(commands, programs, "make_repository", arguments, env=env, timeout_s=timeout_s)
        except OperationRefused as refused:
            what = f"instance {task.instance_id!r}: repository {task.repo!r} at {source.commit or 'its head'}"
            if source.bundle is None:
                raise SetupFailed(f"{what} can't be cloned: {refused.message}", hint="check repo_base_url") from refused
            raise DatasetError(
                f"{what}: {refused.message}", hint="is the bundle whole, and of that commit?"
            ) from refused
        if source.bundle is not None:
            await commands.remove(f"{directory}/source.bundle")
        declared = json.dumps(scripts.console_scripts(answer["files"]))
        await commands.write_file(f"{directory}/scripts.json", declared.encode())

    programs = await prepare_programs(site)
    directory = await site.prepare(f"swe-smith-repo-{source.key}", build, private=True)
    place = (site.sandbox_id, directory)
    if place not in known:
        declared = await site.preparation.read_file(f"{directory}/scripts.json")
        known[place] = Repository(directory, json.loads(declared.data))
    return known[place]


async def prepare_trees(site: LeasedSlot | NewSandbox, task: Task, repository: Repository, *, hide: bool) -> str:
    """The directory of the task's trees: once per sandbox and task.

    Raises:
        DatasetError: the task's patch does not apply, or its tests are not there; names the instance.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        arguments = {
            "repo": repository.git_dir,
            "task": directory,
            "base_is": task.base_is,
            "patch_is": task.patch_is,
            "test_files": task.test_files,
            "hidden": task.fail_to_pass_files if hide else (),
            "has_fix": bool(task.patch),
        }
        patches = json.dumps({"patch": task.patch, "test_patch": task.test_patch}).encode()
        try:
            await operate(commands, programs, "make_trees", arguments, patches)
        except OperationRefused as refused:
            raise DatasetError(
                f"instance {task.instance_id!r}: {refused.message}",
                hint="is the row of this repository and commit? `variant` and `patch_is` say how it is read",
            ) from refused

    parts = (
        repository.directory,
        task.instance_id,
        task.patch,
        task.test_patch,
        task.base_is,
        task.patch_is,
        str(hide),
    )
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    programs = await prepare_programs(site)
    return await site.prepare(f"swe-smith-task-{key}", build, private=True)


async def give_checkout(site: LeasedSlot, task: Task, trees_dir: str, environment: TestEnvironment) -> None:
    """Put the buggy tree into the slot, as a git repository of one commit, with the virtual environment beside it.

    Raises:
        SetupFailed: git does not work in the slot.
    """
    private = site.preparation
    tar = f"{trees_dir}/{uuid.uuid4().hex}.tar"
    archive = ["sh", "-c", _ARCHIVE, "sh", f"{trees_dir}/agent", tar]
    try:
        made = await private.run(archive, env=trees.OWN_CONFIGURATION_ONLY, timeout_s=OPERATION_TIMEOUT_S)
        if not made.ok:
            raise SetupFailed(f"instance {task.instance_id!r}: no tar of its tree: {made.error_text.strip()[-1000:]}")
        await site.commands.tar_in(task.directory, _read(private, tar))
    finally:
        await _remove(private, tar)
    script = ["sh", "-c", _CHECKOUT, "sh", environment.venv, task.directory]
    done = await site.commands.run(script, timeout_s=OPERATION_TIMEOUT_S, merge_stderr=True)
    if not done.ok:
        raise SetupFailed(
            f"instance {task.instance_id!r}: no repository could be made in the slot: {done.text.strip()[-1000:]}",
            hint="the slot's user must be able to run git",
        )


async def take_work(
    site: LeasedSlot, task: Task, trees_dir: str, environment: TestEnvironment, *, max_workspace: int, max_patch: int
) -> Tested:
    """The work of the agent, whose processes are dead, from its slot.

    Raises:
        OperationRefused: there is no checkout any more, or it can't be taken; `message` says why.
    """
    try:
        left = await site.files(task.directory, max_bytes=max_workspace)
    except CommandError as error:
        raise OperationRefused(error.code, f"the checkout can't be read: {error.message}") from error
    arguments = {**_test_arguments(task, trees_dir, environment), "max_bytes": max_patch}
    programs = await prepare_programs(site)
    return _tested(await operate(site.preparation, programs, "take_work", arguments, left))


async def take_patch(site: LeasedSlot, task: Task, trees_dir: str, environment: TestEnvironment, patch: str) -> Tested:
    """The same from a recorded patch.

    Raises:
        OperationRefused: it does not apply to this task.
    """
    data = patch.encode("utf-8", "surrogateescape")
    arguments = _test_arguments(task, trees_dir, environment)
    programs = await prepare_programs(site)
    return _tested(await operate(site.preparation, programs, "give_tests", arguments, data))


async def give_tested(site: LeasedSlot, tested: Tested, to: SlotCommands, directory: str) -> None:
    """Unpack what is to be tested in a slot."""
    await to.tar_in(directory, _read(site.preparation, tested.tar))


async def forget_tested(site: LeasedSlot, tested: Tested) -> None:
    """Remove the tar."""
    await _remove(site.preparation, tested.tar)


async def apply_fix(site: LeasedSlot, task: Task, trees_dir: str) -> None:
    """Apply the reference solution in the agent's slot, and do nothing else there.

    Raises:
        SetupFailed: the row has none, or it does not apply to what is in the slot.
    """
    if not task.patch:
        raise SetupFailed(f"instance {task.instance_id!r} has no reference solution", hint="its row has no patch")
    fix = await site.preparation.read_file(f"{trees_dir}/fix.patch")
    done = await site.commands.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=task.directory,
        stdin=fix.data,
        timeout_s=OPERATION_TIMEOUT_S,
    )
    if not done.ok:
        raise SetupFailed(f"instance {task.instance_id!r}: the fix does not apply: {done.error_text.strip()[-1000:]}")


def _test_arguments(task: Task, trees_dir: str, environment: TestEnvironment) -> dict[str, Any]:
    return {
        "task": trees_dir,
        "test_files": task.test_files,
        "import_path": environment.pythonpath,
        "modules": environment.notes,
    }


def _tested(answer: Mapping[str, Any]) -> Tested:
    return Tested(answer["tar"], tuple(answer["restored"]), tuple(answer["removed"]), answer.get("patch", ""))


async def _remove(commands: SlotCommands, path: str) -> None:
    with contextlib.suppress(CommandError):
        await commands.remove(path)


async def _send(commands: SlotCommands, path: str, data: bytes) -> None:
    for start in range(0, max(len(data), 1), CHUNK):
        await commands.write_file(path, data[start : start + CHUNK], append=start > 0)


async def _read(commands: SlotCommands, path: str) -> AsyncIterator[bytes]:
    offset = 0
    while True:
        part = await commands.read_file(path, offset=offset, limit=CHUNK)
        if part.data:
            yield part.data
        offset += len(part.data)
        if not part.data or offset >= part.size:
            return


@functools.cache
def _sources() -> dict[str, str]:
    """The programs' modules by name."""
    files = [Path(module.__file__ or "") for module in (guard, trees)]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
