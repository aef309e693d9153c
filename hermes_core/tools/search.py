"""The tool `search_files`: searches files by content, or by name."""

from __future__ import annotations

import asyncio
import inspect
import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import MAX_FILE_BYTES, SlotCommands
from hermes_core.tools import search_program
from hermes_core.tools.base import CallContext, CommandText, Tool, ToolParams
from hermes_core.tools.files import path_error
from hermes_core.tools.limits import OUTPUT_CHARS

SKIPPED = (".git", ".*.git", ".hg", ".svn", ".bzr", ".jj", ".hermes-*", "node_modules", "__pycache__")
"""Globs for names of files and directories that are not the user's work, and are not searched unless `path` is such a
name or inside such a directory. `.*.git` is a git directory next to its checkout (as in SWE-smith's tasks); `.hermes-*`
are temporary files of hermes-rl."""

TIMEOUT_S = 60.0
MAX_GLOBS = 32
"""Maximum number of globs from expanding braces."""

_ANSWER_BYTES = 8 << 20
"""Maximum number of bytes kept of the program's output. The first half of them is always kept."""

_END_S = 10.0
"""Seconds that the program may take to start and to end, in addition to its time limit."""

DESCRIPTION = """\
Search the workspace. target=content: `pattern` is a regular expression as in Python, the answer the lines that match \
(or, by output_mode, only the files, or a count for each). target=files: `pattern` is a glob of file names such as \
*.py or src/**/test_*.py. Page with offset and limit. Directories such as .git and node_modules are left out, and \
those that are links, unless path names them."""

Answer = dict[str, Any]

_PROGRAM = ["-I", "-S", "-W", "ignore", "-X", "utf8", "-c", inspect.getsource(search_program)]
"""The arguments with which Python runs the program."""

_UNDONE = {"error": "the search failed: it could not be done in time; narrow the path or the pattern"}


class SearchParams(ToolParams):
    """Parameters of `search_files`."""

    pattern: CommandText = Field(min_length=1, description="A regular expression, or for target=files a glob.")
    target: Literal["content", "files"] = Field(default="content", description="What to search: lines, or names.")
    path: CommandText = Field(default=".", min_length=1, description="The directory or file to search.")
    file_glob: CommandText | None = Field(default=None, description="For content: only files like this, as in *.py.")
    limit: int = Field(default=50, ge=1, le=1000, description="Results at most.")
    offset: int = Field(default=0, ge=0, description="Results to skip.")
    output_mode: Literal["content", "files_only", "count"] = Field(
        default="content", description="For content: the lines, the files that have some, or how many each has."
    )
    context: int = Field(default=0, ge=0, le=20, description="For content: lines to show around each match.")

    @field_validator("target", mode="before")
    @classmethod
    def _older_names(cls, value: object) -> object:
        return {"grep": "content", "find": "files"}.get(value, value) if isinstance(value, str) else value

    @field_validator("pattern")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if "\n" in value:
            raise ValueError("a search is within lines: the pattern can't contain a newline")
        return value

    @field_validator("file_glob")
    @classmethod
    def _no_negation(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("!"):
            raise ValueError("a glob can't be negated: say which files to search")
        return value or None

    @property
    def globs(self) -> list[str]:
        """Return the globs of wanted files; an empty list means all files."""
        glob = self.pattern if self.target == "files" else self.file_glob
        return expand_braces(glob) if glob else []


def expand_braces(glob: str) -> list[str]:
    """Expand braces: `*.{js,ts}` to `*.js` and `*.ts`. Braces that would give more than `MAX_GLOBS` globs are left."""
    pending, done = [glob], list[str]()
    while pending:
        each = pending.pop(0)
        braces = re.search(r"\{([^{}]*,[^{}]*)\}", each)
        words = braces[1].split(",") if braces else []
        if braces is None or len(words) + len(pending) + len(done) > MAX_GLOBS:
            done.append(each)
        else:
            pending = [each[: braces.start()] + word + each[braces.end() :] for word in words] + pending
    return list(dict.fromkeys(done))


async def run_search(ctx: CallContext, params: SearchParams) -> Answer:
    """Search. The answer has the findings, their total number, and how to see more."""
    commands, path = ctx.require_commands(), await ctx.path(params.path)
    try:
        directory, start = await _place(commands, path)
    except CommandError as error:
        return await path_error(commands, path, error)
    request = {**params.model_dump(), "directory": directory, "start": start, "skipped": SKIPPED}
    # If `path` is a file, it is searched even if the glob does not match.
    request |= {"globs": params.globs if start == "." else [], "chars": OUTPUT_CHARS}
    request |= {"limit_s": min(TIMEOUT_S, ctx.timeout_s or TIMEOUT_S)}
    return await _in_slot(commands, request) or await _beside_driver(commands, request)


async def _place(commands: SlotCommands, path: str) -> tuple[str, str]:
    """Return the directory to search from, and the part of it to search: `.`, or one file."""
    kind = (await commands.stat(path)).kind
    if kind == "link":  # not followed by `stat`; if it can be listed, it leads to a directory
        try:
            await commands.list_dir(path, max_entries=1)
            kind = "dir"
        except CommandError as error:
            kind = "dir" if error.code == "too_large" else "file"
    if kind == "dir":
        return path, "."
    directory, name = posixpath.split(path)
    return directory or ".", f"./{name}"


async def _in_slot(commands: SlotCommands, request: Answer) -> Answer | None:
    """Run the program in the slot and return its answer; None if the slot has no working Python."""
    try:
        result = await commands.run(
            ["python3", *_PROGRAM],
            cwd=request["directory"],
            stdin=_line({**request, "source": "slot"}),
            timeout_s=request["limit_s"] + _END_S,
            output_limit=_ANSWER_BYTES,
        )
    except CommandError:
        return None
    return _answer(result.stdout) or (_UNDONE if result.timed_out else None)


async def _beside_driver(commands: SlotCommands, request: Answer) -> Answer:
    """Run the program on the driver's host and return its answer, for a slot without Python. The slot needs only `find`
    and `tar`."""
    names = request["target"] == "files"
    argv = ["find", request["start"], *([*_name_condition(SKIPPED), "-prune", "-o"] if request["start"] == "." else [])]
    argv += ["(", "-type", "f", "-o", "-type", "l", "-exec", "test", "-f", "{}", ";", ")"]
    patterns = [glob.rpartition("/")[2] for glob in request["globs"]]  # names only: the program checks directories
    argv += _name_condition(patterns) if patterns and "**" not in patterns else []
    argv += ["-print0"] if names else ["-exec", "tar", "-chf", "-", "{}", "+"]
    result = await commands.run(
        argv, cwd=request["directory"], timeout_s=request["limit_s"] + _END_S, output_limit=MAX_FILE_BYTES
    )
    if not result.stdout and result.returncode:
        return {"error": f"the search failed: {result.error_text[:1000]}"}
    data = result.stdout[: MAX_FILE_BYTES // 2] if result.stdout_truncated else result.stdout
    request |= {"source": "names" if names else "archive", "cut": result.stdout_truncated or result.timed_out}
    return _answer(await asyncio.to_thread(_run_here, _line(request) + data, request["limit_s"] + _END_S)) or _UNDONE


def _name_condition(globs: Sequence[str]) -> list[str]:
    """Return arguments of `find` for names that match one of the globs."""
    return ["(", *[word for glob in globs for word in ("-o", "-name", glob)][1:], ")"]


def _run_here(given: bytes, limit_s: float) -> bytes:
    try:
        argv = [sys.executable, *_PROGRAM]
        return subprocess.run(argv, input=given, capture_output=True, timeout=limit_s, check=False).stdout
    except subprocess.TimeoutExpired:
        return b""


def _line(request: Answer) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _answer(output: bytes) -> Answer | None:
    """Return the program's answer; None if it gave none."""
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


SEARCH_FILES = Tool(
    "search_files", SearchParams, run_search, DESCRIPTION, toolsets=("file", "safe"), parallel_safe=True
)
"""The tool `search_files`."""
