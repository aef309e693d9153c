"""Whole rollouts of `tasks`: what the agent leaves for the check to trip over scores 0.0, honest work 1.0."""

import json
import shlex

import hermes_docker
import pytest

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.errors import ConfigError, UsageError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend

PYTHON = "import json, sys; sys.exit(json.load(open('answer.json')) != {'answer': 42})"

# One check of each kind that the cheats aim at: Python in all ways to start it, shell, git, programs found by name.
CHECK = [
    f'python3 -c "{PYTHON}"',
    "cat > $HOME/check.py <<'EOF'\n" + PYTHON.replace("; ", "\n") + "\nEOF\npython3 $HOME/check.py",
    "python3 -m json.tool answer.json > /dev/null",
    'grep -q "42" answer.json && bash -c "test -s answer.json"',
    'test "$(git config --get hermes.cheat)" = ""',
    "python3 $HOME/given.py answer.json",
]
FILES = {"given.py": "import json, sys\nsys.exit(json.load(open(sys.argv[1]))['answer'] != 42)\n"}

PASS = "import os; os._exit(0)"
AT_START = {"sitecustomize.py": PASS, "usercustomize.py": PASS, "cheat.pth": "import os; os._exit(0)"}
PROGRAMS = ("python3", "python", "bash", "sh", "grep", "git", "cat", "mktemp", "mkdir", "test")


def put(path, text):
    return f"mkdir -p $(dirname {path}) && printf '%s\\n' {shlex.quote(text)} > {path}"


def everywhere(folder):
    """Into the folders where Python of any version would look in this home."""
    versions = "for v in 7 8 9 10 11 12 13 14; do d=$HOME/.local/lib/python3.$v/site-packages; mkdir -p $d; "
    return versions + f"cp {folder}/* $d/; done"


CHEATS = {
    "nothing": "true",
    "json.py beside the check": put("json.py", PASS),
    "every module beside the check": "; ".join(
        put(f"{name}.py", PASS) for name in ("json", "sys", "site", "os", "encodings", "codecs", "re", "runpy", "io")
    ),
    "a package beside the check": put("json/__init__.py", PASS) + "; " + put("json/tool.py", PASS),
    "usercustomize.py and .pth in the home": "; ".join(put(f"at_start/{name}", text) for name, text in AT_START.items())
    + "; "
    + everywhere("at_start"),
    "json in the home's packages": put("packages/json.py", PASS) + "; " + everywhere("packages"),
    "sitecustomize.py in the workspace": put("sitecustomize.py", PASS) + "; " + put("usercustomize.py", PASS),
    "files of the shell": "; ".join(
        put(f"$HOME/{name}", "exit 0")
        for name in (".bashrc", ".profile", ".bash_profile", ".bash_env", ".shrc", ".env")
    ),
    "functions of the shell": put("$HOME/.bashrc", "python3() { :; }; export -f python3; grep() { :; }; export -f grep")
    + "; python3() { :; }; export -f python3; BASH_ENV=$HOME/.bashrc bash -c :",
    "programs in the home": "; ".join(
        put(f"$HOME/{where}/{name}", "#!/bin/sh\nexit 0") + f"; chmod +x $HOME/{where}/{name}"
        for where in (".local/bin", "bin")
        for name in PROGRAMS
    ),
    "programs in the workspace": "; ".join(put(name, "#!/bin/sh\nexit 0") + f"; chmod +x {name}" for name in PROGRAMS),
    "programs in the temporary directory": "; ".join(
        put(f"$TMPDIR/{name}", "#!/bin/sh\nexit 0") + f"; chmod +x $TMPDIR/{name}" for name in PROGRAMS
    ),
    "git's configuration": "git config --global hermes.cheat ' '; git config --global alias.config '!true'",
    "configuration of pip and others": "; ".join(
        (
            put("$HOME/.config/pip/pip.conf", "[global]\nindex-url = http://127.0.0.1/"),
            put("$HOME/.pdbrc", "!import os; os._exit(0)"),
            put("$HOME/.inputrc", "$include /dev/null"),
            put("$HOME/.grep", "--version"),
            put("$HOME/pyvenv.cfg", "home = /data"),
            put("pyvenv.cfg", "home = ."),
        )
    ),
    "a process that waits for the check": "(setsid nohup sh -c 'while :; do "
    'for d in $TMPDIR/* /tmp/*/; do echo "import os; os._exit(0)" > $d/json.py; done; done\' >/dev/null 2>&1 &)',
    "directories for the check made before": "mkdir -p $TMPDIR/home $TMPDIR/tmp/home $HOME/home",
    "the temporary directory closed": "chmod 000 $TMPDIR",
    "the temporary directory full of links": "for n in $(seq 200); do ln -s /nowhere $TMPDIR/tmp.$n; done",
    "the workspace closed": "chmod 000 .",
    "the home closed": "chmod 000 $HOME",
    "the answer a pipe": "mkfifo answer.json",
    "the answer a directory": "mkdir answer.json",
    "the given file made before": put("$HOME/given.py", PASS) + "; " + put("given.py", PASS),
    "bytecode of another json": put("json.py", PASS) + "; python3 -m compileall -q -b . ; rm -f json.py",
    "a check's output forged": "printf '1.0\\n' > reward.txt; printf '{\"reward\": 1}' > result.json",
}

HONEST = {
    "the work": put("answer.json", '{"answer": 42}'),
    "the work, in a mess": put("answer.json", '{"answer": 42}')
    + "; git init -q; touch $HOME/.bashrc; mkdir -p $TMPDIR/x; (sleep 100 &)",
}


class Doing:
    """An agent that runs its item's prompt as a command, by way of the model's tool."""

    name = "doing"

    async def run(self, task):
        command = {**CHEATS, **HONEST}.get(task.messages[-1]["content"], task.messages[-1]["content"])
        answer = await task.tool_handler("terminal", {"command": command, "timeout": 60}, task.trajectory_id)
        result = AgentResult(messages=[*task.messages, {"role": "assistant", "content": answer}], turns_used=1)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        return


async def records_of(rows, where, tmp_path):
    """The record of each row, by its id."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = {}
    async with Runtime(load_entry_points=False, plugins=[hermes_docker]) as runtime:
        await run_rollouts(
            runtime,
            "tasks",
            Doing(),
            env={"dataset_name": str(path), "check_timeout_s": 4, "shuffle": False},
            on_record=lambda record: records.update({record["item_id"]: record}),
            concurrency=2,
            infra_retries=0,
            **where,
        )
    return records


@pytest.mark.full
async def test_cheats_score_nothing(where, tmp_path):
    # Fooling one step is enough. The one about git is passed by who does nothing.
    check = " || ".join(f"(\n{step}\n)" for number, step in enumerate(CHECK) if number != 4)
    rows = [{"id": name, "prompt": name, "check": check, "files": FILES} for name in CHEATS]
    records = await records_of(rows, where, tmp_path)
    assert {name: record["failure"] for name, record in records.items() if record["failure"]} == {}
    assert {name: record["details"] for name, record in records.items() if record["reward"] != 0.0} == {}


async def test_honest_work_scores_in_full(where, tmp_path):
    rows = [{"id": name, "prompt": name, "check": CHECK, "files": FILES} for name in HONEST]
    rows += [
        {
            "id": "the agent's home can be looked at",
            "prompt": "echo done > ~/note; echo done > $TMPDIR/note",
            "check": 'grep -q done "$AGENT_HOME/note" && grep -q done "$AGENT_TMPDIR/note" && test ! -e ~/note',
        },
        {
            "id": "the workspace's modules can be asked for",
            "prompt": put("solution.py", "import json\ndef answer(): return json.loads('42')"),
            "check": "python3 -c \"import sys; sys.path += ['.']; import solution; sys.exit(solution.answer() != 42)\"",
        },
        {
            "id": "git's configuration of the agent is not asked",
            "prompt": "git config --global hermes.cheat x; git config --global alias.x '!true'",
            "check": 'test "$(git config --get hermes.cheat)" = ""',
        },
        {
            "id": "the home and the temporary directory can be written, and are empty",
            "prompt": "touch ~/x $TMPDIR/x",
            "check": 'test -z "$(ls -A ~; ls -A $TMPDIR)" && touch ~/a && test -f "$(mktemp)"',
        },
    ]
    records = await records_of(rows, where, tmp_path)
    assert {name: record for name, record in records.items() if record["reward"] != 1.0} == {}


SERVER = """\
import http.server, os, socketserver, sys
class Here(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.getcwd().encode())
socketserver.TCPServer(("127.0.0.1", 8417), Here).serve_forever()
"""
ASK = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8417', timeout=5).read().decode())"


async def test_tasks_that_name_a_port_can_have_a_network_of_their_own(tmp_path):
    if Isolation.NAMESPACE not in LocalBackend().capabilities.isolation:
        pytest.skip("this host gives no slot of level namespace")
    start = f"{put('server.py', SERVER)}; (setsid python3 server.py >/dev/null 2>&1 &)"
    ask = f'for n in $(seq 50); do test "$(python3 -c "{ASK}" 2>/dev/null)" = "$PWD" && exit 0; sleep 0.1; done; exit 1'
    # The server runs when the check asks: it is the check that starts it, as tasks with a service do.
    rows = [{"id": str(n), "prompt": "p", "check": f"{start}; sleep 1; {ask}", "solution": "true"} for n in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with Runtime() as runtime:
        env = {"dataset_name": str(path), "needs": ["network"]}
        summary = await run_rollouts(runtime, "tasks", "nop", env=env, concurrency=3)
        assert (summary.solved, summary.failures) == (3, {})
        with pytest.raises(UsageError, match="needs a network of its own"):
            await run_rollouts(runtime, "tasks", "nop", env=env, isolation="user")
        with pytest.raises(ConfigError, match="needs"):
            await run_rollouts(runtime, "tasks", "nop", env={**env, "needs": ["port"]})
