"""A program: what users of hermes-agent know besides commands: interrupts, subagents, ends of sessions, a loss."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DAEMON = 'import os; os.fork() or os.setsid() or os.fork() or os.execvp("sleep", ["sleep", "345.5"])'
"""A program whose child leaves its session and its parent, as daemons do."""


def tool(task: str, name: str, **args: Any) -> Any:
    from model_tools import handle_function_call

    return json.loads(handle_function_call(name, args, task_id=task, session_id=task))


def interrupted() -> Any:
    """What a command answers that the user interrupts, in how many seconds, and what is left of it."""
    from tools.interrupt import set_interrupt

    answers: list[Any] = []
    began = time.monotonic()
    command = f"python3 -c '{DAEMON}'; sleep 345"
    thread = threading.Thread(target=lambda: answers.append(tool("chat", "terminal", command=command)))
    thread.start()
    while len(tool("chat", "terminal", command="pgrep -f '^sleep 345'")["output"].split()) < 2:
        time.sleep(0.1)
    set_interrupt(True, thread.ident)
    thread.join()
    set_interrupt(False, thread.ident)  # or else it counts for the next thread that gets this number
    left = tool("chat", "terminal", command="pgrep -f '^sleep 345'")["output"]
    return {**answers[0], "seconds": time.monotonic() - began, "left": left}


def variables() -> Any:
    """What commands see of variables that were set before, also if they run at once, and which files keep them."""

    def run(command: str) -> str:
        return tool("vars", "terminal", command=command)["output"]

    run("export LONG=$(head -c 100000 /dev/zero | tr '\\0' x) LINES2=$'a \\'b\\'\\nc' GONE=1; f() { :; }; plain=1")
    with ThreadPoolExecutor(6) as threads:
        asked = [f'sleep 0.0{number}; export N{number}=1; echo ${{#LONG}} "$LINES2"' for number in range(6)]
        at_once = [*threads.map(run, asked)]
    run("unset GONE LONG; export LAST=1")
    after = run('echo "${GONE-unset} ${LONG-unset} $LAST $LINES2 ${plain-unset}"')
    files = run("ls -A $TMPDIR | sed 's/.*[.]sh//' | sort")
    return {"at_once": at_once, "after": after, "files": files}


def subagent() -> Any:
    """What a subagent sees of its session's files, and what another session does."""
    from hermes_cli.plugins import invoke_hook

    tool("chat", "write_file", path="of-the-chat.txt", content="kept")
    invoke_hook("subagent_start", parent_session_id="chat", child_subagent_id="helper-1")
    return [
        tool(task, "terminal", command="ls of-the-chat.txt; pwd")["output"] for task in ("chat", "helper-1", "other")
    ]


def ended() -> Any:
    """What a session finds that begins again after its end."""
    from hermes_cli.plugins import invoke_hook

    tool("short", "write_file", path="secret.txt", content="of the session before")
    invoke_hook("on_session_finalize", session_id="short", platform="cli")
    return tool("short", "terminal", command="ls -A; true")["output"]


def lost() -> Any:
    """What the model is told when its sandbox is lost, and what the next command gets."""
    from tools.terminal_tool import get_active_env

    tool("unlucky", "terminal", command="touch file")
    environment = get_active_env("unlucky")
    environment._slots.release(environment.lease)
    return [tool("unlucky", "terminal", command="echo again; ls") for _ in range(2)]


def guarded() -> Any:
    """Whether commands need no approval: in slots, and in hermes-agent's environment of this host."""
    from tools.approval import _should_skip_container_guards

    return [_should_skip_container_guards(name) for name in ("slots-local", "local", "docker")]


def main() -> None:
    checks = (interrupted, variables, subagent, ended, lost, guarded)
    sys.__stdout__.write(json.dumps({check.__name__: check() for check in checks}))


if __name__ == "__main__":
    main()
