"""The tool `patch`: replaces a quoted part of a file, or applies a patch to several files, all or none of them."""

from __future__ import annotations

import asyncio
import posixpath
from codecs import BOM_UTF8
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field, model_validator

from hermes_core.errors import CommandError, HermesError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.tools.base import CallContext, CommandText, Text, Tool, ToolParams
from hermes_core.tools.diffs import DIFF_CHARS, make_diff
from hermes_core.tools.files import path_error, write_error
from hermes_core.tools.fuzzy import ReplaceError, replace_text
from hermes_core.tools.limits import cut_output
from hermes_core.tools.v4a import FilePatch, PatchError, apply_hunks, parse_patch

MAX_BYTES = 4 << 20
"""Maximum size in bytes of a file that the tool can change."""

DESCRIPTION = """\
Change files. mode=replace: in `path`, replace old_string by new_string. Quote old_string exactly and with enough \
lines around it to be unique, or set replace_all; small differences in blanks are forgiven. mode=patch: `patch` \
changes several files, all or none of them, in this format:
*** Begin Patch
*** Update File: path/to/file
@@ a line above the change (optional)
 a line that stays
-a line that goes
+a line that comes
*** Add File: path/to/new
+its first line
*** Delete File: path/to/old
*** End Patch
The answer has a diff of what was changed."""

_CHECK_TIMEOUT_S = 5.0
# The check runs in the slot: its Python has the right grammar, and hostile text can only harm its own slot.
_CHECK = """\
import ast, sys
try:
    ast.parse(sys.stdin.buffer.read())
except SyntaxError as error:
    print("line %s: %s" % (error.lineno, error.msg))
except Exception as error:
    print(error)
"""

Answer = dict[str, Any]


class PatchParams(ToolParams):
    """Parameters of `patch`."""

    mode: Literal["replace", "patch"] = Field(default="replace", description="How the change is said.")
    path: CommandText | None = Field(default=None, description="For replace: the file.")
    old_string: Text | None = Field(default=None, description="For replace: the text to replace.")
    new_string: Text | None = Field(default=None, description="For replace: what to put there.")
    replace_all: bool = Field(default=False, description="For replace: every place instead of the only one.")
    patch: Text | None = Field(default=None, description="For patch: from '*** Begin Patch' to '*** End Patch'.")

    @model_validator(mode="after")
    def _complete(self) -> PatchParams:
        needed = {"replace": ("path", "old_string", "new_string"), "patch": ("patch",)}[self.mode]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)}: needed for mode {self.mode!r}")
        return self


class _Unusable(HermesError):
    """A file that can't be changed; `answer` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer["error"]))
        self.answer = answer


@dataclass(frozen=True)
class _PatchedFile:
    """A file's bytes, which can be edited as text and written back without loss."""

    data: bytes
    mode: int | None = None
    """The file's permissions, if a file that replaces it must have them, too."""

    @property
    def text(self) -> str:
        """Return the file's text without its byte order mark, which models don't see."""
        return self.data.removeprefix(BOM_UTF8).decode("utf-8", "surrogateescape")

    def with_text(self, text: str) -> _PatchedFile:
        mark = BOM_UTF8 if self.data.startswith(BOM_UTF8) else b""
        return replace(self, data=mark + text.encode("utf-8", "surrogateescape"))


@dataclass
class _Changes:
    """Files before and after the changes; None stands for a missing file. `apply` writes the changes."""

    commands: SlotCommands
    before: dict[str, _PatchedFile | None] = field(default_factory=dict)
    after: dict[str, _PatchedFile | None] = field(default_factory=dict)

    async def get(self, path: str) -> _PatchedFile | None:
        """Return the file as changed so far.

        Raises:
            _Unusable: the file is too large, or can't be read.
        """
        if path not in self.before:
            self.before[path] = self.after[path] = await self._read(path)
        return self.after[path]

    async def existing(self, path: str) -> _PatchedFile:
        """Like `get`, but raise `_Unusable` if there is no such file, or it is not text."""
        file = await self.get(path)
        if file is None:
            missing = CommandError(f"{path} does not exist", code="not_found")
            raise _Unusable(await path_error(self.commands, path, missing))
        if b"\0" in file.data:
            raise _Unusable({"error": f"{path} is binary data, not text"})
        return file

    async def _read(self, path: str) -> _PatchedFile | None:
        try:
            content = await self.commands.read_file(path, limit=MAX_BYTES + 1)
        except CommandError as error:
            if error.code == "not_found":
                return None
            raise _Unusable(await path_error(self.commands, path, error)) from error
        if content.size > MAX_BYTES:
            raise _Unusable({"error": f"{path} has {content.size} bytes, more than the {MAX_BYTES} that patch handles"})
        return _PatchedFile(content.data)

    def list_changes(self) -> list[str]:
        return [path for path, file in self.after.items() if file != self.before[path]]

    async def apply(self) -> str | None:
        """Write all changes, new content before removals. If a write fails, undo the others. Return a text on the
        problem, or None."""
        done: list[str] = []
        for path in sorted(self.list_changes(), key=lambda path: self.after[path] is None):
            try:
                await self._store(path, self.after[path])
            except CommandError as error:
                return write_error(path, error) + await self._undo(done)
            done.append(path)
        return None

    async def _store(self, path: str, file: _PatchedFile | None) -> None:
        if file is None:
            await self.commands.remove(path)
        else:
            await self.commands.write_file(path, file.data, mode=file.mode)

    async def _undo(self, paths: list[str]) -> str:
        left = []
        for path in reversed(paths):
            try:
                await self._store(path, self.before[path])
            except CommandError:
                left.append(path)
        return f"; these could not be put back as they were: {', '.join(left)}" if left else "; nothing was changed"


async def run_patch(ctx: CallContext, params: PatchParams) -> Answer:
    """Make the change. The answer has a diff, or says why nothing was changed."""
    changes = _Changes(ctx.require_commands())
    try:
        if params.mode == "replace":
            answer = await _replace(changes, params, await ctx.path(params.path or ""))
        else:
            answer = await _patch(ctx, changes, params.patch or "")
    except _Unusable as error:
        return {"success": False, **error.answer}
    except (ReplaceError, PatchError) as error:
        return {"success": False, "error": str(error)}
    if problem := await changes.apply():
        return {"success": False, "error": problem}
    return {**answer, **await _syntax_errors(changes)}


async def _replace(changes: _Changes, params: PatchParams, path: str) -> Answer:
    file = await changes.existing(path)
    old, new = params.old_string or "", params.new_string or ""
    # In a thread, because a search for similar text can be too long for the event loop.
    done = await asyncio.to_thread(replace_text, file.text, old, new, replace_all=params.replace_all)
    changes.after[path] = file.with_text(done.text)
    diff = await asyncio.to_thread(make_diff, path, _text(file), _text(changes.after[path]))
    return {"success": True, "diff": diff, "replacements": done.count, "matched": done.strategy}


async def _patch(ctx: CallContext, changes: _Changes, patch: str) -> Answer:
    for each in parse_patch(patch):
        move_to = each.move_to and await ctx.path(each.move_to)
        await _plan(changes, replace(each, path=await ctx.path(each.path), move_to=move_to))
    answer: Answer = {"success": True, "diff": await asyncio.to_thread(_diff, changes)}
    for word, was, now in (("modified", True, True), ("created", False, True), ("deleted", True, False)):
        paths = [
            path
            for path in changes.list_changes()
            if (changes.before[path] is not None) is was and (changes.after[path] is not None) is now
        ]
        if paths:
            answer[f"files_{word}"] = paths
    return answer


async def _plan(changes: _Changes, patch: FilePatch) -> None:
    path = patch.path
    if patch.action == "add":
        await _check_free(changes, path)
        changes.after[path] = _PatchedFile(patch.content.encode())
    elif patch.action == "delete":
        file = await changes.get(path) or await changes.existing(path)  # raises, with similar names
        changes.before[path] = replace(file, mode=await _mode(changes, path))
        changes.after[path] = None
    else:
        file = await changes.existing(path)
        changed = file.with_text(await asyncio.to_thread(apply_hunks, file.text, patch))
        target = patch.move_to or path
        if target != path:
            await _check_free(changes, target)
            changed = replace(changed, mode=await _mode(changes, path))
            changes.after[path] = None
        changes.after[target] = changed


async def _mode(changes: _Changes, path: str) -> int | None:
    """Return the permissions of an existing file; None for a link, or for a file that the patch itself creates."""
    if changes.before[path] is None:
        return None
    stat = await changes.commands.stat(path)
    return stat.mode if stat.kind == "file" else None


async def _check_free(changes: _Changes, path: str) -> None:
    if await changes.get(path) is not None:
        raise PatchError(f"{path} exists already", hint="change it with '*** Update File: '")


def _diff(changes: _Changes) -> str:
    diffs = (
        make_diff(path, _text(changes.before[path]), _text(changes.after[path])) for path in changes.list_changes()
    )
    return cut_output("".join(diffs).encode(), limit=DIFF_CHARS)[0]


def _text(file: _PatchedFile | None) -> str | None:
    return None if file is None else file.text.replace("\r\n", "\n")


async def _syntax_errors(changes: _Changes) -> Answer:
    """Return the syntax errors of changed Python files, by path."""
    found = {}
    for path in changes.list_changes():
        file = changes.after[path]
        if file is not None and posixpath.splitext(path)[1] in (".py", ".pyi"):
            problem = await _syntax_error(changes.commands, file.data)
            if problem:
                found[path] = problem
    return {"syntax_errors": found} if found else {}


async def _syntax_error(commands: SlotCommands, data: bytes) -> str | None:
    """Return the syntax error of this Python text; None if there is none, or the slot has no Python to check."""
    argv = ["python3", "-I", "-W", "ignore", "-c", _CHECK]
    try:
        result = await commands.run(argv, stdin=data, timeout_s=_CHECK_TIMEOUT_S, output_limit=4096)
    except CommandError:
        return None
    return result.text.strip() or None if result.ok else None


PATCH = Tool("patch", PatchParams, run_patch, DESCRIPTION, toolsets=("file",))
