"""Makes a task's trees in the sandbox and the checkout that an agent gets, and takes the work that it leaves.

The repository and the clean tree stay in a directory that no slot can read. What reaches a slot is a tar of one tree,
through the driver, and the agent's `.git` is made in its own slot from that tree alone: it has one commit and no other
object, so there is no way from it to the fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import posixpath
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hermes_core import (
    CommandError,
    CommandResult,
    DatasetError,
    Disturbed,
    HermesError,
    InfraError,
    NewSandbox,
    SetupFailed,
    SlotCommands,
    SlotHandle,
    alongside,
)
from hermes_swe_smith import doctests, guard, manifest, scripts, trees
from hermes_swe_smith.canary import Canary
from hermes_swe_smith.network import git_was_cut_off
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask

log = logging.getLogger("hermes_core.swe_smith")

OPERATION_TIMEOUT_S = 300.0
CPU_S = 60
"""The processor time that each process may use for an agent's work, in seconds."""
CHUNK = 1 << 20
ANSWER_LIMIT = 8 << 20
PIECES_AHEAD = 4
ROOM, ROOM_INODES = 16 << 20, 1000
"""The free space that a disk needs before tests run. With less, tests could fail because a neighbour fills the disk."""

T = TypeVar("T")

_LOADER = "import sys; sys.path.insert(0, sys.argv[1]); from hermes_swe_smith.trees import main; main()"

# Tells git to make a tar of the tree that the file `agent` names, and its digest.
_ARCHIVE = """{ IFS= read -r GIT_DIR && read -r tree && read -r digest; } <"$1" && export GIT_DIR &&
  echo "$digest" && exec git -c tar.umask=0022 archive --format=tar --prefix=./ -o "$2" "$tree"
"""

# With that threshold git writes one pack, where a file for each object would take twice the time.
_COMMIT = """
git -c core.compression=0 -c core.bigFileThreshold=1 -c core.fsync=none -c core.protectNTFS=false add -A -f
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git -c gc.auto=0 -c maintenance.auto=false commit -q --no-verify --allow-empty -m "The project as it is"
"""

# Makes a repository of the directory $1. An agent's has its objects in $2, beside the checkout, so that taking the
# agent's work is not taking them too. Git keeps each file as it is, byte for byte, whatever attributes the project has.
_TRACK = f"""set -e
cd "$1"
git -c init.defaultBranch=main init -q --template= ${{2:+--separate-git-dir "$2"}}
info=$(git rev-parse --git-dir)/info
mkdir "$info"
printf %s "$3" > "$info/attributes"
{_COMMIT}"""

_CHECKOUT = f"""set -e
ln -sfn "$4" .venv
{_TRACK}"""

ENVIRONMENT_LINK = ".venv"
"""The virtual environment of the tests, beside the checkout."""


OF_THE_CHECKOUT = ("too_large", "not_found", "not_a_directory", "permission")
"""Error codes of a checkout that the agent alone can have caused: the score is 0."""
OF_THE_WORK = (*OF_THE_CHECKOUT, "work")


class OperationRefused(HermesError):
    """An operation of `trees.py` could not be done, for the reason `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class PreparedRepository:
    """A prepared repository, in the site's private space."""

    directory: str
    """The directory that holds `repo.git`."""
    scripts: Mapping[str, str]
    """The commands that the project would install, each with its `module:attribute`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The files of the `.dist-info` that it would install, relative to `site-packages`."""

    @property
    def git_dir(self) -> str:
        """Return the path of the bare repository."""
        return f"{self.directory}/repo.git"


@dataclass(frozen=True)
class Tested:
    """What is to be tested, in the site's private space until `forget_tested` removes it."""

    directory: str
    """The directory of what was made from the agent's work: the tar, the patch, and git's objects."""
    tar: str
    digest: str
    """The digest of the unpacked tar, as `manifest.py` computes it."""
    restored: tuple[str, ...]
    """Files of the tests that the agent had changed, and that were restored."""
    removed: tuple[str, ...]
    """Files of the agent that were left out, because they would replace others."""
    doctests: Mapping[str, tuple[str, int]]
    """The docstrings whose doctests are run, with their line, by node id."""
    patch: str = ""
    """The agent's work, as a patch to the tree that it started from."""
    canary: Canary | None = None
    """Tests of ours beside the real ones."""


async def prepare_programs(site: SlotHandle | NewSandbox) -> str:
    """Return the directory of `trees.py` and what it imports: files, so Python compiles them once per sandbox."""

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
    payload: bytes | AsyncIterator[bytes] = b"",
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
        Disturbed: it was killed.
    """
    argv = ["python3", "-I", "-S", "-c", _LOADER, programs, operation]
    head = json.dumps(dict(arguments)).encode() + b"\n"
    data = head + payload if isinstance(payload, bytes) else _after(head, payload)
    try:
        done = await commands.run(argv, stdin=data, env=env, timeout_s=timeout_s, output_limit=ANSWER_LIMIT)
    except CommandError as error:
        raise SetupFailed(f"{operation}: {error.message}", hint="the sandbox needs python3 and git") from error
    check_undisturbed(operation, done)
    if not done.ok:
        reason = f"no end after {timeout_s:g} s" if done.timed_out else done.error_text.strip()[-2000:]
        raise SetupFailed(
            f"{operation} failed: {reason or done.returncode}", hint="the sandbox needs git and python3 >= 3.8"
        )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise SetupFailed(f"{operation} gave no answer: {done.text[-500:]!r}") from error
    if answer.get("error") == "failed":
        raise SetupFailed(f"{operation} failed: {answer['message']}")
    if "error" in answer:
        raise OperationRefused(answer["error"], answer["message"])
    return answer


def check_undisturbed(what: str, done: CommandResult) -> None:
    """Raise `Disturbed` if a command of ours was killed: by the kernel, say, for want of memory."""
    if done.signal == signal.SIGKILL and not done.timed_out:
        raise Disturbed(f"{what} was killed", hint="has the sandbox enough memory?")


async def prepare_repository(
    site: SlotHandle | NewSandbox,
    task: SweTask,
    source: RepositorySource,
    env: Mapping[str, str],
    timeout_s: float,
    *,
    known: dict[tuple[str, str], PreparedRepository],
) -> PreparedRepository:
    """Return the repository on the site's sandbox. It is made once per sandbox, repository and commit.

    Args:
        known: repositories that were prepared before, by sandbox and directory; this one is added.

    Raises:
        DatasetError: the bundle or the commit can't be used.
        SetupFailed: it could not be cloned.
        InfraError: its server could not be reached.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        arguments: dict[str, Any] = {"repo": f"{directory}/repo.git", "commit": source.commit, "url": source.url}
        arguments["read"], arguments["checkout"] = scripts.FILES, source.checkout
        if source.bundle is not None:
            arguments["bundle"] = f"{directory}/source.bundle"
            await send_file(commands, f"{directory}/source.bundle", source.bundle())
        try:
            answer = await operate(commands, programs, "make_repository", arguments, env=env, timeout_s=timeout_s)
        except OperationRefused as refused:
            what = f"instance {task.instance_id!r}: repository {task.repo!r} at {source.commit or 'its head'}"
            if source.checkout is not None:
                raise SetupFailed(
                    f"{what} can't be taken from the image: {refused.message}", hint="check image and repo_base_url"
                ) from refused
            if source.bundle is None and git_was_cut_off(refused.message):
                raise InfraError(
                    f"{what} can't be reached: {refused.message}", hint="check the network, and repo_base_url"
                ) from refused
            if source.bundle is None:
                raise SetupFailed(f"{what} can't be cloned: {refused.message}", hint="check repo_base_url") from refused
            raise DatasetError(
                f"{what}: {refused.message}", hint="is the bundle whole, and is this commit in it?"
            ) from refused
        if source.bundle is not None:
            await commands.remove(f"{directory}/source.bundle")
        files = answer["files"]
        declared = {"scripts": scripts.console_scripts(files), "metadata": scripts.metadata(files)}
        await commands.write_file(f"{directory}/project.json", json.dumps(declared).encode())

    programs = await prepare_programs(site)
    directory = await site.prepare(f"swe-smith-repo-{source.key}", build, private=True)
    place = (site.sandbox_id, directory)
    if place not in known:
        declared = await site.preparation.read_file(f"{directory}/project.json")
        known[place] = PreparedRepository(directory, **json.loads(declared.data))
    return known[place]


async def prepare_trees(
    site: SlotHandle | NewSandbox, task: SweTask, repository: PreparedRepository, *, hide: bool
) -> str:
    """Return the directory of the task's trees. They are made once per sandbox and task.

    Raises:
        DatasetError: the task's patch does not apply, or its tests are missing; names the instance.
    """

    async def build(commands: SlotCommands, directory: str) -> None:
        arguments = {
            "repo": repository.git_dir,
            "task": directory,
            "base_is": task.base_is,
            "patch_is": task.patch_is,
            "has_test_patch": task.has_test_patch,
            "test_files": task.test_files,
            "doctests": task.doctests,
            "hidden": task.fail_to_pass_files if hide and not task.has_test_patch else (),
        }
        patches = json.dumps({"patch": task.patch, "test_patch": task.test_patch}).encode()
        try:
            await operate(commands, programs, "make_trees", arguments, patches)
        except OperationRefused as refused:
            raise DatasetError(
                f"instance {task.instance_id!r}: {refused.message}",
                hint="is the row of this repository and commit? `variant` and `patch_is` say how it is read",
            ) from refused

    programs = await prepare_programs(site)
    parts = (
        repository.directory,
        task.instance_id,
        task.patch,
        task.test_patch,
        task.base_is,
        task.patch_is,
        str(hide),
        *task.node_ids,
        programs,
    )
    key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return await site.prepare(f"swe-smith-task-{key}", build, private=True)


async def give_checkout(site: SlotHandle, task: SweTask, trees_dir: str, environment: TestEnvironment) -> None:
    """Put the buggy tree into the slot, as a git repository of one commit, with the virtual environment beside it.

    Raises:
        SetupFailed: git does not work in the slot.
    """
    await _unpack_untouched(site, trees_dir, site.commands, task.directory)
    done = await _track(site.commands, _CHECKOUT, task.directory, f"../.{task.directory}.git", environment.venv)
    if not done.ok:
        raise SetupFailed(
            f"instance {task.instance_id!r}: no repository could be made: {done.error_text.strip()[-1000:]}",
            hint="the slot's user must be able to run git",
        )


async def take_work(
    site: SlotHandle,
    task: SweTask,
    trees_dir: str,
    environment: TestEnvironment,
    *,
    canary: Canary | None,
    max_workspace: int,
    max_patch: int,
) -> Tested:
    """Take the agent's work from its slot. Its processes must be dead.

    Args:
        canary: tests of ours that are added.

    Raises:
        OperationRefused: the checkout is gone, or can't be taken; `message` says why.
        InfraError: an untouched checkout can't be taken either.
    """
    arguments = {
        **_test_arguments(task, trees_dir, environment, canary),
        "max_workspace": max_workspace,
        "max_patch": max_patch,
    }
    programs = await prepare_programs(site)

    async def take(checkout: str) -> Tested:
        with _undecided():
            async with _work(site, trees_dir) as directory:
                pipe = _Pipe()
                async with alongside(pipe.feed(site.commands, checkout, max_workspace)) as packing:
                    argued = {**arguments, "work": directory}
                    try:
                        answer = await operate(site.preparation, programs, "take_work", argued, pipe.pieces())
                    except HermesError:
                        if packing.done():
                            packing.result()  # why it got half an archive
                        raise
                    await packing
                patch = b"".join([piece async for piece in read_pieces(site.preparation, f"{directory}/patch")])
                return _tested(directory, answer, patch.decode(), canary)

    async def control() -> None:
        checkout = f"untouched-{uuid.uuid4().hex}"
        with _undecided():
            digest = await _unpack_untouched(site, trees_dir, site.commands, checkout)
            await _check(site.commands, checkout, digest)  # also for room: on a disk that others fill, it may just fit
        await forget_tested(site, await take(checkout))

    clear = site.commands.clear
    room = (lambda: clear(keep=[task.directory]), clear)
    return await _decided("the work can't be taken", lambda: take(task.directory), room, control)


async def take_patch(
    site: SlotHandle,
    task: SweTask,
    trees_dir: str,
    environment: TestEnvironment,
    patch: str,
    *,
    canary: Canary | None,
) -> Tested:
    """Take the agent's work from a recorded patch, as `take_work` does.

    Raises:
        OperationRefused: it does not apply to this task.
    """
    data = patch.encode("utf-8", "surrogateescape")
    programs = await prepare_programs(site)
    async with _work(site, trees_dir) as directory:
        arguments = {**_test_arguments(task, trees_dir, environment, canary), "work": directory}
        answer = await operate(site.preparation, programs, "give_tests", arguments, data)
        return _tested(directory, answer, patch, canary)


async def give_tested(site: SlotHandle, tested: Tested, to: SlotCommands, directory: str) -> None:
    """Unpack what is to be tested in a slot, check that nothing else is there, and make it a git repository.

    Raises:
        OperationRefused: this fails with the agent's work, but not with an untouched tree.
        InfraError: this fails with both.
    """
    trees_dir = posixpath.dirname(tested.directory)

    async def give() -> None:
        with _undecided():
            await to.tar_in(directory, read_pieces(site.preparation, tested.tar))
            await _check(to, directory, tested.digest)

    async def clear() -> None:
        await to.clear()
        await site.commands.clear()  # the work was taken from there

    async def control() -> None:
        with _undecided():
            digest = await _unpack_untouched(site, trees_dir, to, directory)
            await _check(to, directory, digest)

    await _decided("the work can't be unpacked as it was taken", give, (clear, clear), control)
    await track(to, directory)


async def track(commands: SlotCommands, directory: str) -> None:
    """Make a git repository of what is to be tested, because tests may ask git."""
    done = await _track(commands, _TRACK, directory, "")
    if not done.ok:  # that is for its tests to find out: what an agent leaves must not end its rollout
        log.warning("no git repository could be made of what is to be tested: %s", done.error_text.strip()[-1000:])


async def _track(commands: SlotCommands, script: str, directory: str, git_dir: str, *more: str) -> CommandResult:
    argv = ["sh", "-c", script, "sh", directory, git_dir, trees.ATTRIBUTES, *more]
    return await commands.run(argv, env=trees.OWN_CONFIGURATION_ONLY, timeout_s=OPERATION_TIMEOUT_S)


async def forget_tested(site: SlotHandle, tested: Tested) -> None:
    """Remove all that was made of the agent's work."""
    await _remove(site.preparation, tested.directory)


class _Undecided(HermesError):
    """A step with an agent's work failed, and the cause may be the work or us."""


@contextlib.contextmanager
def _undecided() -> Iterator[None]:
    """Raise `_Undecided` for every failure of a command or an operation but those that tell of the work itself."""
    try:
        yield
    except OperationRefused as refused:
        if refused.code in OF_THE_WORK:
            raise
        raise _Undecided(refused.message) from refused
    except (CommandError, SetupFailed, Disturbed) as error:
        raise _Undecided(error.message) from error


async def _decided(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    room: Sequence[Callable[[], Awaitable[None]]],
    control: Callable[[], Awaitable[None]],
) -> T:
    """Return the result of an attempt with the agent's work. `control` does the same with an untouched tree.

    If it fails twice with the agent's work and not with the untouched tree, the agent caused it and scores 0: an agent
    that could get its rollout discarded would learn to do so. If it fails with both, the agent did not cause it.

    Args:
        room: makes room on the disk before the second attempt, and before the control.

    Raises:
        OperationRefused: the agent caused the failure.
        InfraError: we caused it.
    """
    for make_room in room:
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                return await attempt()
        except (_Undecided, TimeoutError) as error:
            failure = error
        with contextlib.suppress(CommandError, TimeoutError):
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                await make_room()
    reason = getattr(failure, "message", f"no end after {OPERATION_TIMEOUT_S:g} s")
    try:
        async with asyncio.timeout(OPERATION_TIMEOUT_S):
            await control()
    except (_Undecided, OperationRefused, CommandError, TimeoutError) as error:
        raise InfraError(f"{what}, and nor can an untouched tree: {error}; {reason}") from failure
    raise OperationRefused("work", f"{what}, while an untouched tree can: {reason}") from failure


class _Pipe:
    """A directory's tar on its way from a slot, a few pieces at a time, so that its size does not matter here."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(PIECES_AHEAD)

    async def feed(self, commands: SlotCommands, path: str, max_bytes: int) -> None:
        """Pack the directory.

        Raises:
            OperationRefused: it is not a directory, or too large.
        """
        try:
            await commands.tar_out_to(self._pieces.put, path, max_bytes=max_bytes)
        except CommandError as error:
            await self._pieces.put(b"")
            if error.code not in OF_THE_CHECKOUT:
                raise
            raise OperationRefused(error.code, f"the checkout can't be read: {error.message}") from error
        await self._pieces.put(b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what was packed, as it arrives, until its end or a failure."""
        while piece := await self._pieces.get():
            yield piece


@contextlib.asynccontextmanager
async def _work(site: SlotHandle, trees_dir: str) -> AsyncIterator[str]:
    """Yield the path of a new directory for what is made from an agent's work. It is removed if that fails."""
    directory = f"{trees_dir}/work-{uuid.uuid4().hex}"
    try:
        yield directory
    except BaseException:
        await _remove(site.preparation, directory)
        raise


async def _unpack_untouched(site: SlotHandle, trees_dir: str, to: SlotCommands, directory: str) -> str:
    """Unpack the tree that agents start from, and return its digest.

    Raises:
        CommandError, SetupFailed: it can't be unpacked.
    """
    private = site.preparation
    tar = f"{trees_dir}/{uuid.uuid4().hex}.tar"
    archive = ["sh", "-c", _ARCHIVE, "sh", f"{trees_dir}/agent", tar]
    try:
        made = await private.run(archive, env=trees.OWN_CONFIGURATION_ONLY, timeout_s=OPERATION_TIMEOUT_S)
        if not made.ok:
            raise SetupFailed(f"no tar of the task's tree: {made.error_text.strip()[-1000:]}")
        await to.tar_in(directory, read_pieces(private, tar))
    finally:
        await _remove(private, tar)
    return made.text.strip()


async def _check(commands: SlotCommands, directory: str, digest: str) -> None:
    """Make sure that a directory holds what it should, and nothing beside, and that tests there will find some room.

    Raises:
        SetupFailed: it does not, or can't be looked at.
    """
    argv = ["python3", "-I", "-S", "-c", _sources()["manifest"], directory]
    done = await commands.run(argv, timeout_s=OPERATION_TIMEOUT_S)
    if not done.ok:
        raise SetupFailed(f"what was unpacked can't be looked at: {done.error_text.strip()[-1000:]}")
    found, room, inodes = done.text.split()
    if found != digest:
        raise SetupFailed("what was unpacked is not what was sent")
    if int(room) < ROOM or int(inodes) < ROOM_INODES:
        raise SetupFailed(f"{room} bytes and {inodes} inodes are left for the tests")


async def reference_fix(site: SlotHandle, trees_dir: str) -> str:
    """Return the patch that makes the clean tree of the tree that agents start from, but for the hidden files."""
    fix = await site.preparation.read_file(f"{trees_dir}/fix.patch")
    return fix.data.decode("utf-8", "surrogateescape")


async def apply_fix(site: SlotHandle, task: SweTask, trees_dir: str) -> None:
    """Apply the reference solution in the agent's slot, and do nothing else there.

    Raises:
        SetupFailed: the row has none, or it does not apply to what is in the slot.
    """
    if not task.patch:
        raise SetupFailed(f"instance {task.instance_id!r} has no reference solution", hint="its row has no patch")
    fix = await reference_fix(site, trees_dir)
    done = await site.commands.run(
        ["git", "apply", "--whitespace=nowarn", "-"],
        cwd=task.directory,
        stdin=fix.encode("utf-8", "surrogateescape"),
        env=trees.OWN_CONFIGURATION_ONLY,
        timeout_s=OPERATION_TIMEOUT_S,
    )
    if not done.ok:
        raise SetupFailed(f"instance {task.instance_id!r}: the fix does not apply: {done.error_text.strip()[-1000:]}")


def _test_arguments(
    task: SweTask, trees_dir: str, environment: TestEnvironment, canary: Canary | None
) -> dict[str, Any]:
    return {
        "more": {canary.path: canary.text} if canary else {},
        "task": trees_dir,
        "import_path": environment.pythonpath,
        "modules": environment.notes,
        "cpu_s": CPU_S,
    }


def _tested(directory: str, answer: Mapping[str, Any], patch: str, canary: Canary | None) -> Tested:
    undone = tuple(answer["restored"]), tuple(answer["removed"])
    return Tested(directory, answer["tar"], answer["digest"], *undone, answer["doctests"], patch, canary)


async def _remove(commands: SlotCommands, path: str) -> None:
    with contextlib.suppress(CommandError):
        await commands.remove(path, recursive=True)


async def _after(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for piece in rest:
        yield piece


async def send_file(commands: SlotCommands, path: str, data: bytes) -> None:
    """Write a file of any size, in pieces."""
    for start in range(0, max(len(data), 1), CHUNK):
        await commands.write_file(path, data[start : start + CHUNK], append=start > 0)


async def read_pieces(commands: SlotCommands, path: str) -> AsyncIterator[bytes]:
    """Yield the content of a file of any size, in pieces."""
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
    """Return the programs' modules by name."""
    files = [Path(module.__file__ or "") for module in (doctests, guard, manifest, trees)]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}
