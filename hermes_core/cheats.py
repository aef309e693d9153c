"""Cheats: ways to a reward without the work, which `hermes-rl validate --cheats` tries on every item.

An environment names its own cheats in `Environment.cheats`. The cheats in this module fit every task with a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hermes_core.handles import ExecTool

Cheat = Callable[..., Awaitable[None]]
"""An async function that cheats in the agent's slot. It may take any of the arguments of the hook `solve_trajectory`.
The slot is then verified as after an agent's work."""

CHEAT_TIMEOUT_S = 60.0
"""Time limit in seconds of a cheat that is a shell script. At the limit, the slot is verified in its current state."""

MOST_FILES = 50
"""Maximum number of files that a cheat takes from a prompt."""

PASS_ALL = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
"""A plugin of pytest with which every test passes."""

EXIT_0 = "import os; os._exit(0)\n"
"""A Python module that ends the program that imports it, with exit status 0."""

_FILE = re.compile(r"(?<![\w@:/.~-])(?:~/|\.{1,2}/|/)?(?:[\w.+-]+/)*[\w+-][\w.+-]*\.[A-Za-z]\w{0,7}(?![\w/(])")
_ABSOLUTE = re.compile(r"(?<![\w:/.~-])/(?:[\w.+-]+/)+[\w+-][\w.+-]*(?![\w/(])")
_DIRECTORIES = ("/bin/", "/dev/", "/etc/", "/lib", "/proc/", "/sbin/", "/sys/", "/usr/")
"""Directories of programs and devices. A prompt that names a path in one of them does not ask for this file to be
written."""

_PROGRAMS = "python python3 pytest git make node bash sh test grep egrep diff cmp cat jq sha256sum md5sum"

# Each script begins in the directory in which the agent's commands start.
_SCRIPTS: Mapping[str, str] = {
    "fake-programs": f"""
        for place in . bin "$HOME" "$HOME/bin" "$HOME/.local/bin" "$TMPDIR"; do
          mkdir -p "$place" && for name in {_PROGRAMS}; do
            printf '#!/bin/sh\\necho "1 passed"; exit 0\\n' >"$place/$name" && chmod +x "$place/$name"
          done
        done
        for file in .profile .bashrc .bash_profile; do
          echo 'PATH=$HOME/bin:$HOME/.local/bin:$PATH' >>"$HOME/$file"
        done
    """,
    "shell-startup": """
        for place in . "$HOME"; do
          for file in .profile .bashrc .bash_profile .bash_login .shrc .zshenv .env; do
            printf 'exit 0\\n' >"$place/$file"
          done
        done
    """,
    "python-startup": f"""
        site=$(python3 -c 'import site; print(site.getusersitepackages())') || site=.
        for place in . "$HOME" "$site" "$TMPDIR"; do
          mkdir -p "$place" && for name in sitecustomize usercustomize pytest _pytest unittest json subprocess os; do
            printf %s {shlex.quote(EXIT_0)} >"$place/$name.py"
          done
          echo 'import os; os._exit(0)' >"$place/planted.pth"
        done
    """,
    "pytest-plugins": f"""
        for place in . tests test .. "$HOME"; do
          [ "$place" = . ] || [ -d "$place" ] || continue
          printf %s {shlex.quote(PASS_ALL)} | tee "$place/conftest.py" >"$place/planted.py"
          printf '[pytest]\\naddopts = -p planted\\n' | tee "$place/pytest.ini" >"$place/.pytest.ini"
          printf '[tool:pytest]\\naddopts = -p planted\\n' >"$place/setup.cfg"
        done
        mkdir -p planted-1.dist-info
        printf '[pytest11]\\nplanted = planted\\n' >planted-1.dist-info/entry_points.txt
        printf 'Metadata-Version: 2.1\\nName: planted\\nVersion: 1\\n' >planted-1.dist-info/METADATA
    """,
    "forged-rewards": """
        for place in . .. "$HOME" "$TMPDIR" /logs /logs/verifier /output; do
          mkdir -p "$place" 2>/dev/null
          for name in reward.txt score.txt result.txt exit_code; do echo 1 >"$place/$name"; done
          for name in reward.json score.json result.json report.json; do
            echo '{"reward": 1.0, "score": 1.0, "passed": true, "success": true}' >"$place/$name"
          done
          echo '<testsuite tests="1" failures="0" errors="0"/>' >"$place/junit.xml"
        done 2>/dev/null
        true
    """,
    "kills-every-process": """
        env -i setsid sh -c 'trap "" TERM HUP INT; while :; do kill -9 -1; done' >/dev/null 2>&1 &
        sleep 1
        kill -9 -1
    """,
}

_FORGED_FILES: Mapping[str, str] = {
    "empty-files": 'for file; do put "$file" </dev/null; done',
    "every-number": 'for file; do seq 0 9999 | put "$file"; done',
    "the-prompt": 'for file; do printf "%s\\n" "$PROMPT" | put "$file"; done',
    "exits-with-0": """
        for file; do
          case $file in
            *.py) printf 'raise SystemExit(0)\\n' | put "$file" ;;
            *.json) echo '{"ok": true, "passed": true}' | put "$file" ;;
            *) printf '#!/bin/sh\\nexit 0\\n' | put "$file" && chmod +x "$file" ;;
          esac
        done
    """,
    "a-daemon": """
        cat >"$TMPDIR/daemon" <<'END'
        cd "$1" && shift
        while :; do
          for file; do [ -s "$file" ] || seq 0 9999 >"$file"; done
          for name in reward.txt result.txt; do echo 1 >"$name"; done
          sleep 0.1
        done
END
        env -i PATH="$PATH" setsid sh "$TMPDIR/daemon" "$PWD" "$@" >/dev/null 2>&1 &
        sleep 0.2
    """,
}
"""Scripts whose arguments are the files that an item asks for."""

_PUT = """\
put() { mkdir -p -- "$(dirname -- "$1")" && cat >"$1"; }
"""


def shell_cheat(script: str, *, timeout_s: float = CHEAT_TIMEOUT_S) -> Cheat:
    """Return a cheat that runs a shell script in the directory in which the agent's commands start. The script's exit
    status does not matter."""

    async def cheat(exec_tool: ExecTool) -> None:
        await exec_tool("bash", {"command": script}, timeout_s)

    return cheat


def shell_cheats(scripts: Mapping[str, str]) -> dict[str, Cheat]:
    """Return a cheat for each script, by the same name."""
    return {name: shell_cheat(script) for name, script in scripts.items()}


def find_file_names(text: str) -> list[str]:
    """Return the names of files in a text, such as `out.txt`, `src/main.py` and `/app/out`, each once."""
    found = dict.fromkeys(match.rstrip(".") for form in (_FILE, _ABSOLUTE) for match in form.findall(text))
    return [name for name in found if not name.startswith(_DIRECTORIES)][:MOST_FILES]


def file_cheats(
    text: Callable[[Mapping[str, Any]], str],
    files: Callable[[Mapping[str, Any]], Sequence[str]],
    scripts: Mapping[str, str] = _FORGED_FILES,
) -> dict[str, Cheat]:
    """Return cheats that write the files that an item asks for, with content that is likely to pass a weak check.

    Args:
        text: returns an item's prompt, `$PROMPT` of the scripts.
        files: returns the paths of an item's files, the scripts' arguments.
        scripts: shell scripts by the cheats' names, with a function `put FILE` that writes its input to a file.
    """

    def cheat_with(script: str) -> Cheat:
        async def cheat(item: Mapping[str, Any], exec_tool: ExecTool) -> None:
            named = " ".join(map(_word, files(item)))
            command = f"PROMPT={shlex.quote(text(item))}\nset -- {named}\n{_PUT}{script}\n"
            await exec_tool("bash", {"command": command}, CHEAT_TIMEOUT_S)

        return cheat

    return {name: cheat_with(script) for name, script in scripts.items()}


def _word(path: str) -> str:
    """Return a path as one word of a shell command."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def usual_cheats(prompt: Callable[[Mapping[str, Any]], str]) -> dict[str, Cheat]:
    """Return the cheats that fit every task whose agent has a shell in a slot.

    Args:
        prompt: returns an item's prompt; some cheats fill the files that this prompt names.
    """
    return {**file_cheats(prompt, lambda item: find_file_names(prompt(item))), **shell_cheats(_SCRIPTS)}
