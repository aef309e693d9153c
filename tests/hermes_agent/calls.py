"""A program: sessions of hermes-agent at once, as many as its argument says, each with twenty tool calls. Prints the
results as JSON.

It runs in a process of its own, because hermes-agent reads its settings when it is imported.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TEXT = "".join(f"line {number}\n" for number in range(1, 41))
SCRIPT = "from hermes_tools import terminal, read_file\nprint(terminal('echo inside')['output'])\nprint(6 * 7)\n"

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("terminal", {"command": "mkdir -p {session} && cd {session}"}),
    ("terminal", {"command": "pwd; export NAME={session}"}),
    ("terminal", {"command": 'echo "$NAME"; echo problem >&2; exit 3'}),
    ("write_file", {"path": "deep/text.txt", "content": TEXT}),
    ("write_file", {"path": "deep/mod.py", "content": "VALUE = 1\n\n\ndef double(x):\n    return 2 * x\n"}),
    ("read_file", {"path": "deep/text.txt", "offset": 10, "limit": 5}),
    ("read_file", {"path": "deep/txet.txt"}),
    ("patch", {"path": "deep/mod.py", "old_string": "VALUE = 1", "new_string": "VALUE = 2"}),
    ("patch", {"path": "deep/mod.py", "old_string": "not there", "new_string": "x"}),
    ("write_file", {"path": "deep/broken.py", "content": "def broken(:\n"}),
    ("search_files", {"pattern": "double", "path": "deep"}),
    ("search_files", {"pattern": "*.py", "target": "files", "path": "."}),
    ("terminal", {"command": "cd deep && python3 -c 'import mod; print(mod.double(mod.VALUE))'"}),
    ("terminal", {"command": "sleep 30", "timeout": 1}),
    ("terminal", {"command": "seq 1 30000"}),
    ("terminal", {"command": "echo started; sleep 1; echo done; exit 4", "background": True}),
    ("process", {"action": "wait", "timeout": 30}),
    ("process", {"action": "log"}),
    ("execute_code", {"code": SCRIPT}),
    ("terminal", {"command": "ls -R ..; printf 'caf\\xc3\\xa9 \\xff'; kill -9 $$"}),
]
"""What each session does. `process` means the session's own background process."""


def session(number: int) -> list[dict[str, Any]]:
    """Make the calls of one session. Return what each answered."""
    from model_tools import handle_function_call

    task, process_id, results = f"session-{number}", "", []
    for name, given in CALLS:
        args = {key: value.format(session=task) if key == "command" else value for key, value in given.items()}
        if name == "process":
            args["session_id"] = process_id
        answer = json.loads(handle_function_call(name, args, task_id=task, session_id=task))
        process_id = answer.get("session_id", process_id) if given.get("background") else process_id
        results.append({"tool": name, "args": given, "answer": answer})
    return results


def plain(results: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Return results without what differs from run to run."""
    text = json.dumps(results).replace(base, "BASE")
    text = re.sub(r"proc_[0-9a-f]{12}", "PROCESS", text)
    text = re.sub(r'"(pid|uptime_seconds|duration_seconds|started_at)": [^,}]+', r'"\1": 0', text)
    plain: list[dict[str, Any]] = json.loads(text)
    return plain


def main() -> None:
    sessions = int(sys.argv[1])
    with ThreadPoolExecutor(sessions) as threads:
        done = [*threads.map(session, range(sessions))]
    named = [plain(results, results[1]["answer"]["output"].rpartition("/")[0]) for results in done]
    # Concurrent calls of execute_code leave hermes-agent's closed replacement in `sys.stdout`.
    sys.__stdout__.write(json.dumps(named))


if __name__ == "__main__":
    main()
