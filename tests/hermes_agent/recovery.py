"""A program: a session that is killed with background processes, or, with the argument `again`, goes on with them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

LOOP = "while true; do echo tick; sleep 1; done"
TASK = "sleep 3; echo finished; exit 5"


def tool(name: str, **args: Any) -> Any:
    from model_tools import handle_function_call

    return json.loads(handle_function_call(name, args, task_id="chat", session_id="chat"))


def begin() -> None:
    tool("write_file", path="kept.txt", content="kept")
    tool("terminal", command=LOOP, background=True)
    tool("terminal", command=TASK, background=True, notify_on_complete=True)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on() -> None:
    from tools.terminal_tool import cleanup_vm

    found = {process["command"]: process["session_id"] for process in tool("process", action="list")["processes"]}
    waited = tool("process", action="wait", session_id=found[TASK], timeout=60)
    time.sleep(2.5)  # hermes-agent reads the output of a process in a sandbox every two seconds
    ticks = tool("process", action="poll", session_id=found[LOOP])["output_preview"]
    killed = tool("process", action="kill", session_id=found[LOOP])
    left = tool("terminal", command="cat kept.txt; ps ax | grep -c '[d]o echo tick'")
    cleanup_vm("chat")
    sys.__stdout__.write(json.dumps({"waited": waited, "ticks": ticks, "killed": killed, "left": left}))


if __name__ == "__main__":
    go_on() if sys.argv[1:] == ["again"] else begin()
