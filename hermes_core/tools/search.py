"""The tool `search_files`: by content with ripgrep (find and grep where the slot has none), by name with find."""

from __future__ import annotations

import asyncio
import posixpath
from typing import Any

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import CommandResult, SlotCommands
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.files import path_error
from hermes_core.tools.search_results import Place, SearchEngine, SearchOutput, SearchParams

SKIPPED = (".git", ".*.git", ".hg", ".svn", ".bzr", ".jj", ".hermes-*", "node_modules", "__pycache__")
"""Globs of names that are not searched, unless `path` itself is one of them or inside one, because they are not the
user's work. `.*.git` is a git directory next to its checkout (SWE-smith's tasks have one); `.hermes-*` are files of
ours that are being written."""

TIMEOUT_S = 60.0
_KEPT_BYTES = 4 << 20
"""Number of bytes kept of a search's output. Only the first half is used."""

DESCRIPTION = """\
Search the workspace. target=content: `pattern` is a regular expression, the answer the lines that match (or, by \
output_mode, only the files, or a count for each). target=files: `pattern` is a glob of file names such as *.py or \
src/**/test_*.py. Page with offset and limit. Directories such as .git and node_modules are left out."""

Answer = dict[str, Any]

_ENGINE = "hermes.search_engine"
# Find out what the slot has: ripgrep, GNU's grep with Perl's regular expressions, or any grep. A constant without
# arguments.
_PROBE = """\
command -v rg >/dev/null 2>&1 && { echo rg; exit; }
echo x | grep -qP '\\w' 2>/dev/null && echo x | grep -HZ x >/dev/null 2>&1 && { echo gnu; exit; }
echo posix
"""

# Any grep: it may not be able to end a path with a NUL, so each file that matches is searched once more, separately.
# Arguments: the pattern, the output mode's flag, lines of context, the files. Prints `path NUL lines NUL` for each.
_EACH = """\
pattern=$1 mode=$2 context=$3
shift 3
grep -lsE -e "$pattern" -- "$@" | while IFS= read -r file; do
    printf '%s\\000' "$file"
    grep "$mode" -C "$context" -sE -e "$pattern" -- "$file" | tr -d '\\000'
    printf '\\000'
done
"""


async def run_search(ctx: CallContext, params: SearchParams) -> Answer:
    """Search. The answer lists what was found, how much there is in all, and how to see more."""
    commands = ctx.require_commands()
    limit_s = min(TIMEOUT_S, ctx.timeout_s or TIMEOUT_S)
    try:
        place = await _place(commands, params.path)
    except CommandError as error:
        return await path_error(commands, params.path, error)
    globs = (
        params.globs if place.start == "." else []
    )  # a file that was named itself is searched even if the glob does not match it
    if params.target == "files":
        engine, argv = SearchEngine.FIND, [*_find(globs, place.start), "-print0"]
    else:
        engine = await _engine(ctx, commands)
        argv = _content_argv(engine, params, globs, place.start)
    result = await commands.run(argv, cwd=place.directory, timeout_s=limit_s, output_limit=_KEPT_BYTES)
    # The output is data here, not text to show. If it was cut, only the first half, which is complete, can be read.
    data = result.stdout[: _KEPT_BYTES // 2] if result.stdout_truncated else result.stdout
    found = SearchOutput(params, place, engine, globs, whole=not result.stdout_truncated and not result.timed_out)
    answer = await asyncio.to_thread(found.answer, data)  # in a thread, because some MB of output take time
    if result.timed_out:
        return {**answer, "note": f"stopped after {limit_s:g} s: these are not all; narrow the path or the pattern"}
    if not answer["total_count"] and (result.returncode != 0 or engine is SearchEngine.POSIX):
        return _failure(result) or answer
    return answer


async def _place(commands: SlotCommands, path: str) -> Place:
    kind = (await commands.stat(path)).kind
    if kind == "link":  # `stat` does not follow it; if it can be listed, it is a directory
        try:
            await commands.list_dir(path, max_entries=1)
            kind = "dir"
        except CommandError as error:
            kind = "dir" if error.code == "too_large" else "file"
    if kind == "dir":
        return Place(path, ".")
    directory, name = posixpath.split(path)
    return Place(directory or ".", f"./{name}")


async def _engine(ctx: CallContext, commands: SlotCommands) -> SearchEngine:
    """Return the best search program that the slot has. It is determined once."""
    if _ENGINE not in ctx.state:
        answer = (await commands.run(["sh", "-c", _PROBE], timeout_s=10)).text.strip()
        ctx.state[_ENGINE] = answer if answer in tuple(SearchEngine) else SearchEngine.POSIX
    return SearchEngine(ctx.state[_ENGINE])


# Command lines. Text from the model is always a separate argument, and can't be mistaken for an option.


def _content_argv(engine: SearchEngine, params: SearchParams, globs: list[str], start: str) -> list[str]:
    mode = {"content": "-n", "files_only": "-l", "count": "-c"}[params.output_mode]
    flags = [mode, "-C", str(params.context)] if params.context and mode == "-n" else [mode]
    if engine is SearchEngine.RIPGREP:
        argv = ["rg", "--no-config", "--no-messages", "--color=never", "--no-heading", "--with-filename", "--null"]
        argv += ["--hidden", "--no-ignore", "--sort=path", *flags]
        argv += [f"--glob={glob}" for glob in globs] + [f"--glob=!{name}" for name in SKIPPED]
        return [*argv, "-e", params.pattern, "--", start]
    if engine is SearchEngine.GNU:
        search = ["grep", "-HIsZP", "--color=never", *flags, "-e", params.pattern, "--"]
    elif mode == "-l":
        search = ["grep", "-lsE", "-e", params.pattern, "--"]
    else:
        search = ["sh", "-c", _EACH, "sh", params.pattern, mode, str(params.context)]
    return [*_find(globs, start), "-exec", *search, "{}", "+"]


def _find(globs: list[str], start: str) -> list[str]:
    """Return a find command for files whose names the globs can match. `SearchOutput` checks their directories."""
    skipped = [word for name in SKIPPED for word in ("-o", "-name", name)][1:]
    prune = ["(", *skipped, ")", "-prune", "-o"] if start == "." else []
    names = [glob.rpartition("/")[2] for glob in globs]
    tests = [word for name in names for word in ("-o", "-name", name)][1:]
    wanted = ["(", *tests, ")"] if tests and "**" not in names else []
    return ["find", start, *prune, "-type", "f", *wanted]


def _failure(result: CommandResult) -> Answer | None:
    """Return what went wrong with a search that found nothing. A file that can't be read, or is gone, does not
    count."""
    usual = ("ermission denied", "No such file")
    complaints = [line for line in result.error_text.splitlines() if not any(words in line for words in usual)]
    return {"error": "the search failed: " + "\n".join(complaints)[:1000]} if complaints else None


SEARCH_FILES = Tool(
    "search_files", SearchParams, run_search, DESCRIPTION, toolsets=("file", "safe"), parallel_safe=True
)
