"""Makes a task's trees in the sandbox and the agent's checkout, and takes the work that the agent leaves.

The repository and the clean tree stay in a directory that no slot can read. A slot gets a tar of one tree, through the
driver. The agent's `.git` is made in the agent's slot from that tree alone, and has the objects of only one commit. So
the fix is not in it.
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
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from hermes_swe_smith.attribution import CHECKOUT_CODES, OperationRefused, blame_agent_or_infra
from hermes_swe_smith.canary import Canary
from hermes_swe_smith.network import git_was_cut_off
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask

log = logging.getLogger("hermes_core.swe_smith")

OPERATION_TIMEOUT_S = 300.0
CPU_S = 60
"""Seconds of processor time that each process may use for an agent's work."""
CHUNK = 1 << 20
ANSWER_LIMIT = 8 << 20
PIECES_AHEAD = 4
ROOM, ROOM_INODES = 16 << 20, 1000
"""Bytes and inodes that must be free before tests run, because tests could fail when a neighbour fills the disk."""

_LOADER = "import sys; sys.path.insert(0, sys.argv[1]); from hermes_swe_smith.trees import main; main()"

# Prints the digest of the agent's tree, and makes a tar of it. The file $1 has its repository, its id and its digest.
_ARCHIVE = """{ IFS= read -r GIT_DIR && read -r tree && read -r digest; } <"$1" && export GIT_DIR &&
  echo "$digest" && exec git -c tar.umask=0022 archive --format=tar --prefix=./ -o "$2" "$tree"
"""

# With `bigFileThreshold` git writes one pack. A file for each object would take twice the time.
_COMMIT = """
git -c core.compression=0 -c core.bigFileThreshold=1 -c core.fsync=none -c core.protectNTFS=false add -A -f
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z
git -c gc.auto=0 -c maintenance.auto=false commit -q --no-verify --allow-empty -m "The project as it is"
"""

# Makes a repository of the directory $1. An agent's repository has its objects in $2, beside the checkout, so that a
# tar of the work does not have them. The attributes $3 make git keep each file byte for byte.
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
"""The link to the tests' virtual environment, beside the checkout."""


@dataclass(frozen=True)
class PreparedRepository:
    """A prepared repository, in the site's private space."""

    directory: str
    """The directory that holds `repo.git`."""
    scripts: Mapping[str, str]
    """The commands that the project would install, each with its `module:attribute`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The files of the `.dist-info` that the project would install, relative to `site-packages`."""

    @property
    def git_dir(self) -> str:
        """Return the path of the bare repository."""
        return f"{self.directory}/repo.git"


@dataclass(frozen=True)
class TreeUnderTest:
    """The tree on which the tests are run, in the site's private space until `remove_tested` removes it."""

    directory: str
    """The directory with everything made of the agent's work: the tar, the patch, and git's objects."""
    tar: str
    digest: str
    """The digest of the unpacked tar, as `manifest.py` computes it."""
    restored: tuple[str, ...]
    """Files of the tests that the agent changed and that were restored."""
    removed: tuple[str, ...]
    """Files of the agent that were left out, because Python would import them in place of other modules."""
    doctests: Mapping[str, tuple[str, int]]
    """Each doctest's docstring and the number of its first line, from 0, by node id."""
    patch: str = ""
    """The agent's work, as a patch to the tree that it started from."""
    canary: Canary | None = None
    """Our failing tests among the task's tests, if there are any."""


async def prepare_programs(site: SlotHandle | NewSandbox) -> str:
    """Return the directory with `trees.py` and its imports, as files, so that Python compiles them only once."""

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
    """Run an operation of `trees.py`, and return its answer.

    Args:
        commands: the commands of the preparation user.
        programs: the result of `prepare_programs` for the same sandbox.

    Raises:
        OperationRefused: the operation refused; `code` is the reason.
        SetupFailed: the operation failed, took too long, or the sandbox has no python3.
        Disturbed: the operation's process was killed.
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
    """Raise `Disturbed` if a command was killed, for example by the kernel for want of memory."""
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
    """Return the repository on the site's sandbox. It is made once for each sandbox, repository and commit.

    Args:
        known: repositories that were prepared before, by sandbox and directory; this one is added.

    Raises:
        DatasetError: the bundle or the commit can't be used.
        SetupFailed: the repository could not be cloned.
        InfraError: the repository's server could not be reached.
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
            raise _repository_error(task, source, refused.message) from refused
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


def _repository_error(task: SweTask, source: RepositorySource, reason: str) -> HermesError:
    what = f"instance {task.instance_id!r}: repository {task.repo!r} at {source.commit or 'its head'}"
    if source.checkout is not None:
        return SetupFailed(f"{what} can't be taken from the image: {reason}", hint="check image and repo_base_url")
    if source.bundle is not None:
        return DatasetError(f"{what}: {reason}", hint="is the bundle whole, and is this commit in it?")
    if git_was_cut_off(reason):
        return InfraError(f"{what} can't be reached: {reason}", hint="check the network, and repo_base_url")
    return SetupFailed(f"{what} can't be cloned: {reason}", hint="check repo_base_url")


async def prepare_trees(
    site: SlotHandle | NewSandbox, task: SweTask, repository: PreparedRepository, *, hide: bool
) -> str:
    """Return the directory of the task's trees. They are made once for each sandbox and task.

    Args:
        hide: whether the agent's tree lacks the files of the FAIL_TO_PASS tests.

    Raises:
        DatasetError: the task's patch does not apply, or its tests are missing; the message names the instance.
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
    """Unpack the agent's tree in the slot, as a git repository of one commit, with the virtual environment beside it.

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
) -> TreeUnderTest:
    """Take the agent's work from its slot, once the agent's processes are dead.

    Args:
        canary: failing tests to add to the task's tests.
        max_workspace, max_patch: the largest checkout and the largest patch, in bytes.

    Raises:
        OperationRefused: the checkout can't be taken, because of the agent.
        InfraError: an untouched checkout can't be taken either.
    """
    arguments = {
        **_test_arguments(task, trees_dir, environment, canary),
        "max_workspace": max_workspace,
        "max_patch": max_patch,
    }
    programs = await prepare_programs(site)

    async def take(checkout: str) -> TreeUnderTest:
        async with _new_directory(site, trees_dir) as directory:
            pipe = _Pipe()
            async with alongside(pipe.feed(site.commands, checkout, max_workspace)) as packing:
                request = {**arguments, "work": directory}
                try:
                    answer = await operate(site.preparation, programs, "take_work", request, pipe.pieces())
                except HermesError:
                    if packing.done():
                        packing.result()  # raises the reason why the operation got only half an archive
                    raise
                await packing
            patch = b"".join([piece async for piece in read_pieces(site.preparation, f"{directory}/patch")])
            return _new_tested(directory, answer, patch.decode(), canary)

    async def take_untouched() -> None:
        checkout = f"untouched-{uuid.uuid4().hex}"
        digest = await _unpack_untouched(site, trees_dir, site.commands, checkout)
        await _check_unpacked(site.commands, checkout, digest)  # also checks the free space: neighbours may use it up
        await remove_tested(site, await take(checkout))

    return await blame_agent_or_infra(
        "the work can't be taken",
        with_work=lambda: take(task.directory),
        with_untouched_tree=take_untouched,
        clear_for_retry=lambda: site.commands.clear(keep=[task.directory]),
        clear_for_untouched_tree=site.commands.clear,
    )


async def take_patch(
    site: SlotHandle,
    task: SweTask,
    trees_dir: str,
    environment: TestEnvironment,
    patch: str,
    *,
    canary: Canary | None,
) -> TreeUnderTest:
    """Make the tree under test from a recorded patch, as `take_work` does from a checkout.

    Raises:
        OperationRefused: the patch does not apply to the task's tree.
    """
    data = patch.encode("utf-8", "surrogateescape")
    programs = await prepare_programs(site)
    async with _new_directory(site, trees_dir) as directory:
        arguments = {**_test_arguments(task, trees_dir, environment, canary), "work": directory}
        answer = await operate(site.preparation, programs, "give_tests", arguments, data)
        return _new_tested(directory, answer, patch, canary)


async def unpack_tested(site: SlotHandle, tested: TreeUnderTest, to: SlotCommands, directory: str) -> None:
    """Unpack the tree under test in a slot, check that nothing else is there, and make it a git repository.

    Args:
        site: the slot from which the work was taken.
        to: the commands of the slot in which the tests are run.

    Raises:
        OperationRefused: the agent's work can't be unpacked, but an untouched tree can.
        InfraError: an untouched tree can't be unpacked either.
    """
    trees_dir = posixpath.dirname(tested.directory)

    async def unpack() -> None:
        await to.tar_in(directory, read_pieces(site.preparation, tested.tar))
        await _check_unpacked(to, directory, tested.digest)

    async def unpack_untouched() -> None:
        digest = await _unpack_untouched(site, trees_dir, to, directory)
        await _check_unpacked(to, directory, digest)

    async def clear() -> None:
        await to.clear()
        await site.commands.clear()  # the agent's slot, whose work is taken already

    await blame_agent_or_infra(
        "the work can't be unpacked as it was taken",
        with_work=unpack,
        with_untouched_tree=unpack_untouched,
        clear_for_retry=clear,
        clear_for_untouched_tree=clear,
    )
    await track(to, directory)


async def track(commands: SlotCommands, directory: str) -> None:
    """Make a git repository of the tree under test, because tests may use git."""
    done = await _track(commands, _TRACK, directory, "")
    if not done.ok:  # an agent's work must not end its rollout; the tests fail if they need git
        log.warning("no git repository could be made of the tree under test: %s", done.error_text.strip()[-1000:])


async def _track(commands: SlotCommands, script: str, directory: str, git_dir: str, *more: str) -> CommandResult:
    argv = ["sh", "-c", script, "sh", directory, git_dir, trees.ATTRIBUTES, *more]
    return await commands.run(argv, env=trees.OWN_CONFIGURATION_ONLY, timeout_s=OPERATION_TIMEOUT_S)


async def remove_tested(site: SlotHandle, tested: TreeUnderTest) -> None:
    """Remove everything that was made of the agent's work."""
    await _remove(site.preparation, tested.directory)


class _Pipe:
    """Passes a directory's tar on from a slot, with at most `PIECES_AHEAD` pieces in the driver's memory."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(PIECES_AHEAD)

    async def feed(self, commands: SlotCommands, path: str, max_bytes: int) -> None:
        """Pack a directory.

        Raises:
            OperationRefused: there is no directory that can be read, or it is too large.
        """
        try:
            await commands.tar_out_to(self._pieces.put, path, max_bytes=max_bytes)
        except CommandError as error:
            await self._pieces.put(b"")
            if error.code not in CHECKOUT_CODES:
                raise
            raise OperationRefused(error.code, f"the checkout can't be read: {error.message}") from error
        await self._pieces.put(b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the tar as they arrive, until its end or a failure."""
        while piece := await self._pieces.get():
            yield piece


@contextlib.asynccontextmanager
async def _new_directory(site: SlotHandle, trees_dir: str) -> AsyncIterator[str]:
    """Yield the path of a new directory for the files made of an agent's work. Remove it if the block fails."""
    directory = f"{trees_dir}/work-{uuid.uuid4().hex}"
    try:
        yield directory
    except BaseException:
        await _remove(site.preparation, directory)
        raise


async def _unpack_untouched(site: SlotHandle, trees_dir: str, to: SlotCommands, directory: str) -> str:
    """Unpack the tree that agents start from, and return its digest.

    Raises:
        CommandError, SetupFailed: the tree can't be unpacked.
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


async def _check_unpacked(commands: SlotCommands, directory: str, digest: str) -> None:
    """Check that a directory has the tree with this digest and nothing else, and that its disk has room for tests.

    Raises:
        SetupFailed: the directory differs or can't be read, or the disk has too little room.
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
    """Return the patch from the tree that agents start from to the clean tree, without the hidden files."""
    fix = await site.preparation.read_file(f"{trees_dir}/fix.patch")
    return fix.data.decode("utf-8", "surrogateescape")


async def apply_fix(site: SlotHandle, task: SweTask, trees_dir: str) -> None:
    """Apply the reference solution in the agent's slot.

    Raises:
        SetupFailed: the row has no solution, or the solution does not apply to the checkout.
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


def _new_tested(directory: str, answer: Mapping[str, Any], patch: str, canary: Canary | None) -> TreeUnderTest:
    changes = tuple(answer["restored"]), tuple(answer["removed"])
    return TreeUnderTest(directory, answer["tar"], answer["digest"], *changes, answer["doctests"], patch, canary)


async def _remove(commands: SlotCommands, path: str) -> None:
    with contextlib.suppress(CommandError):
        await commands.remove(path, recursive=True)


async def _after(head: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for piece in rest:
        yield piece


async def send_file(commands: SlotCommands, path: str, data: bytes) -> None:
    """Write a file of any size in pieces."""
    for start in range(0, max(len(data), 1), CHUNK):
        await commands.write_file(path, data[start : start + CHUNK], append=start > 0)


async def read_pieces(commands: SlotCommands, path: str) -> AsyncIterator[bytes]:
    """Yield the content of a file of any size in pieces."""
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
