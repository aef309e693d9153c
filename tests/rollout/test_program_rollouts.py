"""Agents that are programs in the slot: what they are given, how they end, and what of it is a reward."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import hermes_agents
import pytest
from hermes_agents.program import AgentProgram, CommandAgent, ProgramAgent, ProgramSettings
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call

from hermes_core.agents.base import StopReason
from hermes_core.agents.model import ModelAgent
from hermes_core.datasets.tasks import TasksEnvironment
from hermes_core.errors import ConfigError, UsageError
from hermes_core.export.atif import trajectory
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
OURS = "python3 -c " + shlex.quote((ROOT / "examples/agent_program/agent.py").read_text("utf-8"))
ROW = {"id": "one", "prompt": "Write the word done into out.txt.", "check": "grep -qx done out.txt"}


def solver(prompt: str) -> Any:
    said = yield call("bash", command="pwd; echo done >out.txt; cat out.txt")
    assert "done" in said and "[exit status 0]" in said
    return "I wrote it."


async def rollout(
    tmp_path: Path,
    script: Any = None,
    *,
    agent: Any = "program",
    command: str = OURS,
    level: str = "user",
    rows: Sequence[dict[str, Any]] = (ROW,),
    faults: Sequence[Fault] = (),
    environment: type[TasksEnvironment] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The record of the only item."""
    tmp_path.mkdir(exist_ok=True)
    where = {"dataset_name": str(tmp_path / "tasks.jsonl"), "shuffle": False}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records: list[dict[str, Any]] = []
    options = {name: settings.pop(name) for name in ("mcp", "rollout_timeout", "allow_unisolated") if name in settings}
    async with (
        ScriptedServer(script or ToolScript(solver), faults=faults) as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=[hermes_agents]) as runtime,
        AsyncExitStack() as closing,
    ):
        asks = {"model": "scripted", "base_url": server.base_url, **settings}
        if not isinstance(agent, str):
            agent = await closing.enter_async_context(aclosing(agent(ProgramSettings(**asks))))
        elif agent == "program":
            asks["command"] = command
        await run_rollouts(
            runtime,
            "tasks" if environment is None else environment(environment.config_class(**where)),
            agent,
            env=where if environment is None else None,
            settings=asks if isinstance(agent, str) else None,
            isolation=level,
            concurrency=1,
            on_record=lambda record: records.append(dict(record)),
            **options,
        )
    [record] = records
    return record


@pytest.mark.parametrize("level", ["user", "namespace"])
async def test_a_program_solves_a_task_with_the_runs_model(tmp_path: Path, level: str) -> None:
    record = await rollout(tmp_path, level=level)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert record["messages"][1]["content"] == ROW["prompt"]
    assert [turn["model"] for turn in record["turns"]] == ["scripted"] * 2
    assert [(each["name"], each["turn"]) for each in record["calls"]] == [("bash", 0)]
    program = record["program"]
    assert (program["exit_code"], program["signal"], program["output"]) == (0, None, "I wrote it.\n")
    assert program["requests"]["answered"] == 2
    assert [tool["function"]["name"] for tool in record["tool_schemas"]] == ["bash"]


async def test_a_program_at_level_shared_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at level shared nothing keeps others from it") as refused:
        await rollout(tmp_path, level="shared", allow_unisolated=True)
    assert "--isolation user" in str(refused.value.hint)


@pytest.mark.parametrize("level", ["user", "namespace"])
async def test_the_programs_own_files_are_neither_in_the_workspace_nor_temporary(tmp_path: Path, level: str) -> None:
    """Codex makes its helpers in no folder that is for temporary files."""
    code = 'case $HERMES_PROMPT_FILE in "$PWD"/* | "$TMPDIR"/* | /tmp/*) ;; "$HOME"/*) echo done >out.txt ;; esac'
    record = await rollout(tmp_path, level=level, command=f"sh -c {shlex.quote(code)}")
    assert record["reward"] == 1.0, record


async def test_a_server_that_keeps_tokens_is_told_the_task_and_what_to_do_with_thinking(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    class Watched(ModelAgent):
        def session(self, **options: Any) -> Any:
            given.append(options)
            return super().session(**options)

    class Ours(ProgramAgent):
        program = AgentProgram("ours", tuple(shlex.split(OURS)))

    def agent(settings: ProgramSettings) -> ProgramAgent:
        return Ours(settings, Watched(settings))

    record = await rollout(tmp_path, agent=agent, keep_thinking=False)
    assert record["reward"] == 1.0, record
    [options] = given
    assert (options["keep_thinking"], options["own"]()) == (False, set())


async def test_the_prompt_goes_through_no_shell(tmp_path: Path) -> None:
    """By argument, by file and by standard input, and nothing in it is replaced."""
    prompt = "-n $(touch pwned) `id` \"quotes\" 'more' {key} {prompt_file} \\ ünïcode\n" + "x" * 50_000
    code = (
        "import os, sys\n"
        "given = sys.argv[1], open(sys.argv[2]).read(), open(os.environ['HERMES_PROMPT_FILE']).read()\n"
        "assert given[0] == given[1] == given[2], given\n"
        "open('out.txt', 'w').write(given[0])"
    )
    command = f"python3 -c {shlex.quote(code)} {{prompt}} {{prompt_file}}"
    check = "test ! -e pwned && [ $(wc -c <out.txt) = " + str(len(prompt.encode())) + " ]"
    row = {**ROW, "prompt": prompt, "check": check}
    record = await rollout(tmp_path, command=command, rows=[row])
    assert (record["reward"], record["stop_reason"]) == (1.0, "finished"), record


async def test_a_prompt_that_is_too_long_for_an_argument(tmp_path: Path) -> None:
    record = await rollout(tmp_path, command="echo {prompt}", rows=[{**ROW, "prompt": "x" * 100_001}])
    assert record["failure"]["kind"] == "setup" and "{prompt_file}" in record["failure"]["message"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/agent", "/no/such/agent"),
        ("sh -c 'echo no loader >&2; exit 127'", "ended with 127 before the model had answered it: no loader"),
        ("sh -c 'kill -9 $$'", "ended with 137"),
    ],
)
async def test_a_program_that_can_not_be_started_is_no_reward(tmp_path: Path, command: str, said: str) -> None:
    record = await rollout(tmp_path, command=command)
    assert record["reward"] is None and record["failure"]["kind"] == "setup"
    assert said in record["failure"]["message"]


ASKS = "import os, urllib.request as u; u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '%s', b'%s', %s))"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("/chat/completions", "no JSON", {"authorization": "Bearer KEY"}), "was refused"),
        (("/completions", "{}", {"authorization": "Bearer KEY"}), "before the model had answered it"),
        (("/chat/completions", "{}", {"authorization": "Bearer wrong"}), "before the model had answered it"),
    ],
)
@pytest.mark.parametrize("end", ["", " || exit 0"])
async def test_a_program_that_can_not_speak_with_its_model_is_no_reward(
    tmp_path: Path, asked: tuple[Any, ...], said: str, end: str
) -> None:
    code = ASKS % asked
    code = code.replace("'Bearer KEY'", "'Bearer ' + os.environ['OPENAI_API_KEY']")
    record = await rollout(tmp_path, command=f"sh -c {shlex.quote(f'python3 -c {shlex.quote(code)}{end}')}")
    assert record["reward"] is None and record["failure"]["kind"] == "setup", record
    assert said in record["failure"]["message"]


async def test_a_program_that_ran_and_failed_is_scored(tmp_path: Path) -> None:
    record = await rollout(tmp_path, command=OURS, script=ToolScript(bad_solver))
    assert (record["reward"], record["failure"], record["stop_reason"]) == (0.0, None, "program_failed")
    assert record["program"]["signal"] == 9 or record["program"]["exit_code"] != 0
    assert record["messages"][-1]["role"] == "tool"


@pytest.mark.parametrize(("status", "reason"), [(0, "finished"), (1, "program_failed")])
async def test_a_program_that_says_that_it_failed_is_scored(tmp_path: Path, status: int, reason: str) -> None:
    """Also if the model's last words look like the end, as those of a summary do that the program can't use."""
    record = await rollout(tmp_path, command=f"sh -c {shlex.quote(f'{OURS}; exit {status}')}")
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, reason)
    assert record["program"]["exit_code"] == status and record["messages"][-1]["role"] == "assistant"


def bad_solver(prompt: str) -> Any:
    yield call("bash", command="kill -9 $PPID")
    return "never"


async def test_what_the_endpoint_refuses_for_good_is_a_model_failure(tmp_path: Path) -> None:
    """Whatever the program's exit status says."""

    def script(request: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in request["messages"]):
            return Fault(401, "incorrect API key provided", "invalid_api_key")
        return ToolScript(solver)(request)

    command = f"sh -c {shlex.quote(OURS + ' || exit 0')}"
    record = await rollout(tmp_path, script, command=command, endpoint_patience_s=0)
    assert record["reward"] is None and record["failure"]["kind"] == "model", record
    assert record["stop_reason"] == "model_error"


async def test_the_limit_of_turns_ends_it(tmp_path: Path) -> None:
    def script(request: dict[str, Any]) -> Any:
        return Reply(None, [call("bash", command="true")])

    record = await rollout(tmp_path, script, max_turns=3)
    assert (record["reward"], record["stop_reason"], len(record["turns"])) == (0.0, "max_turns", 3)
    assert record["program"]["refusal"] == "the rollout has ended: it had 3 model calls"


FORGETS = """
import json, os, sys, urllib.error, urllib.request

def ask(**body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/responses", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

first = ask(model="m", input=sys.stdin.read(), text={"format": {"type": "json_object"}}, temperature=0)
try:
    ask(model="m", input="Go on.", previous_response_id=first["id"])
except urllib.error.HTTPError:
    pass
"""


async def test_the_record_says_what_a_program_did_not_get(tmp_path: Path) -> None:
    """The program hides that it was refused something, and its rollout is scored."""
    record = await rollout(tmp_path, lambda request: Reply("Yes."), command=f"python3 -c {shlex.quote(FORGETS)}")
    program = record["program"]
    assert (record["reward"], program["exit_code"], program["requests"]["refused"]) == (0.0, 0, 1), record
    assert "previous_response_id is not supported" in program["refusal"]
    assert program["overridden"] == ["temperature", "text"]


async def test_the_wait_for_the_model_does_not_count(tmp_path: Path) -> None:
    """An agent with seconds of its own may wait for its model for longer, and is ended when it hangs by itself."""

    async def slow(request: dict[str, Any]) -> Any:
        await asyncio.sleep(4.5)
        return ToolScript(sleeper)(request)

    def sleeper(prompt: str) -> Any:
        yield call("bash", command="echo done >out.txt; echo $PPID; sleep 1000")
        return "never"

    record = await rollout(tmp_path, slow, rollout_timeout=4.0)
    assert (record["reward"], record["stop_reason"]) == (1.0, "time_limit"), record
    assert record["program"]["exit_code"] is None


async def test_a_program_that_never_asks_is_ended_at_its_limit_and_scored(tmp_path: Path) -> None:
    record = await rollout(tmp_path, command="sleep 1000", rollout_timeout=1.0)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (0.0, None, "time_limit"), record


async def test_its_environment_has_a_key_that_is_worth_nothing_outside(tmp_path: Path) -> None:
    command = "sh -c 'env; echo done >out.txt'"
    record = await rollout(tmp_path, command=command, api_key="a-real-secret", variables={"MINE": "{key}"})
    output = record["program"]["output"]
    assert record["reward"] == 1.0 and "a-real-secret" not in json.dumps(record)
    said = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    assert said["OPENAI_API_KEY"] == said["ANTHROPIC_API_KEY"] == "[key]"
    assert said["OPENAI_BASE_URL"] == said["ANTHROPIC_BASE_URL"] + "/v1"
    assert said["OPENAI_MODEL"] == "scripted" and said["MINE"] == "{key}"


async def test_the_end_of_a_long_output_is_kept(tmp_path: Path) -> None:
    command = 'sh -c \'head -c 3000000 /dev/zero | tr "\\\\0" x; printf "\\\\377the end" >&2; echo done >out.txt\''
    record = await rollout(tmp_path, command=command)
    program = record["program"]
    assert record["reward"] == 1.0 and program["output_bytes"] == 3_000_008
    assert len(program["output"]) < 20_000 and program["output"].endswith("\ufffdthe end")


async def test_the_record_and_atif_name_the_program(tmp_path: Path) -> None:
    record = await rollout(tmp_path, version="1.2.3")
    assert record["versions"]["program"] == "1.2.3"
    from hermes_core.records.record import Record

    read = Record.from_json(record)
    assert read.program == record["program"]
    about = trajectory(read)["agent"]
    assert (about["name"], about["version"], about["extra"]["exit_code"]) == ("program", "1.2.3", 0)
    assert about["extra"]["requests"]["answered"] >= 1 and "output" not in about["extra"]
    spoken = {**(read.program or {}), "acp": {"agent": "Kimi Code 2.1.0"}}
    about = trajectory(dataclasses.replace(read, program=spoken))["agent"]
    assert (about["name"], about["version"]) == ("Kimi Code", "2.1.0")
    atif = pytest.importorskip("atif", reason="atif is not installed: `make setup` installs it")
    assert atif.Trajectory.model_validate(trajectory(read)).to_json_dict() == trajectory(read)


class Fetched:
    """A package that is a folder of the test."""

    needs = ("sh",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str]] = []

    async def fetch(self, name: str, version: str) -> Path:
        self.asked.append((name, version))
        return self.folder


class Installed(ProgramAgent):
    program = AgentProgram("installed", ("sh",))


async def test_what_was_fetched_is_sent_once_and_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "fetched" / "bin").mkdir(parents=True)
    tool = tmp_path / "fetched" / "bin" / "tool"
    tool.write_text('#!/bin/sh\nread said <"$1"; echo "$said" "$2" >out.txt; echo >>"$0" || echo read-only >>out.txt\n')
    tool.chmod(0o755)
    package = Fetched(tmp_path / "fetched")

    class Tool(Installed):
        program = AgentProgram(
            "tool",
            ("{install}/bin/tool", "{folder}/config/conf.json", "{args}"),
            files={"config/conf.json": '{"model": "{model}"}'},
            package=package,
            version="7",
        )

    check = """[ "$(cat out.txt)" = '{"model": "scripted"} -x
read-only' ]"""
    record = await rollout(tmp_path, agent=Tool, rows=[{**ROW, "check": check}], args=["-x"])
    assert (record["reward"], record["failure"]) == (1.0, None), record
    assert set(package.asked) == {("tool", "7")} and record["versions"]["tool"] == "7"


async def test_what_the_slot_lacks_is_named(tmp_path: Path) -> None:
    class Needs(Installed):
        program = AgentProgram("needs", ("true",), needs=("sh", "no-such-program", "python3.3"))

    record = await rollout(tmp_path, agent=Needs)
    assert record["failure"]["kind"] == "setup"
    assert "needs no-such-program, python3.3, which the slot lacks" in record["failure"]["message"]


class TwoParts(TasksEnvironment):
    """Tasks whose user says more, once."""

    name = "two-parts"
    said = 0

    @hookimpl
    async def continue_trajectory(self, rollout: Any) -> str | None:
        await rollout.kill_everything()  # as a check of the first part does
        self.said += 1
        return "And now the second part." if self.said == 1 else None


async def test_a_program_that_can_go_on_gets_the_further_parts(tmp_path: Path) -> None:
    code = (
        "import json, os, sys, urllib.request\n"
        "path = sys.argv[1]\n"
        "told = json.load(open(path)) if os.path.exists(path) else []\n"
        "told.append({'role': 'user', 'content': sys.stdin.read()})\n"
        "body = json.dumps({'model': 'any', 'messages': told}).encode()\n"
        "headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))\n"
        "told.append(answer['choices'][0]['message'])\n"
        "json.dump(told, open(path, 'w'))\n"
        "open('out.txt', 'a').write(told[-1]['content'])\n"
    )
    argv = ("python3", "-c", code, "{folder}/told.json")

    class GoesOn(Installed):
        program = AgentProgram("goes-on", argv, again=argv)

    def script(request: dict[str, Any]) -> Reply:
        return Reply(f"answer {sum(message['role'] == 'user' for message in request['messages'])};")

    check = "[ \"$(cat out.txt)\" = 'answer 1;answer 2;' ]"
    for kind, reward in ((GoesOn, 1.0), (Alone, 0.0)):
        Alone.program = AgentProgram("alone", argv)
        record = await rollout(
            tmp_path / kind.__name__, script, agent=kind, environment=TwoParts, rows=[{**ROW, "check": check}]
        )
        assert (record["reward"], record["stop_reason"]) == (reward, "finished"), record
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]


class Alone(Installed):
    """The same without a way to go on."""


class Skilled(TasksEnvironment):
    """Its tasks have instructions and skills."""

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Whisper."}, *super().initial_messages(item)]

    def skills(self, item: Any) -> str:
        return "sk"


class Reads(ProgramAgent):
    """Writes down what it is given, and nothing more."""

    program = AgentProgram(
        "reads",
        ("sh", "-c", 'cat "$1/a/RULES.md" - "$1/b/c/brewing/SKILL.md" >out.txt', "sh", "{folder}"),
        instructions="a/RULES.md",
        skills="b/c",
    )


class Unaware(Reads):
    """The same without places for them."""

    program = AgentProgram("unaware", ("sh", "-c", "cat >out.txt"))


async def test_instructions_and_skills_are_put_where_a_program_looks_for_them(tmp_path: Path) -> None:
    row = {**ROW, "prompt": "Hello.", "setup": ["mkdir -p sk/brewing; echo Boil. >sk/brewing/SKILL.md"]}
    given = "[ \"$(tr -d '\\n' <out.txt)\" = '{}' ]"
    for kind, text in ((Reads, "Whisper.Hello.Boil."), (Unaware, "Whisper.Hello.")):
        check = {"check": given.format(text)}
        record = await rollout(tmp_path / kind.__name__, agent=kind, environment=Skilled, rows=[{**row, **check}])
        assert (record["reward"], record["failure"]) == (1.0, None), record


class Missing(Reads):
    program = AgentProgram("missing", ("no-such-agent",))


async def test_a_command_that_the_slot_does_not_have_is_named_with_what_to_do(tmp_path: Path) -> None:
    record = await rollout(tmp_path, agent=Missing)
    assert record["failure"]["kind"] == "setup"
    said = record["failure"]["message"]
    assert "command not found: no-such-agent (it must be in the sandbox: docs/guides/agent-programs.md" in said


class Lists(Reads):
    """Fails if there is a file for instructions."""

    program = AgentProgram("lists", ("sh", "-c", 'test ! -e "$1/RULES.md"', "sh", "{folder}"), instructions="RULES.md")


class Names(Reads):
    """Fails without the file that its command line names."""

    program = AgentProgram("names", ("test", "-e", "{folder}/RULES.md"), instructions="RULES.md")


@pytest.mark.parametrize("kind", [Lists, Names])
async def test_without_instructions_there_is_no_file_unless_the_command_line_names_it(
    tmp_path: Path, kind: type[ProgramAgent]
) -> None:
    record = await rollout(tmp_path, agent=kind)
    assert record["failure"] is None, record


async def test_skills_that_are_not_there_are_a_failure_of_the_setup(tmp_path: Path) -> None:
    record = await rollout(tmp_path, agent=Reads, environment=Skilled)
    assert record["failure"]["kind"] == "setup" and "skills can't be copied" in record["failure"]["message"], record
    assert "hook `skills`" in record["failure"]["message"]


def test_settings_that_a_program_can_not_have() -> None:
    with pytest.raises(ConfigError, match="no command"):
        CommandAgent(CommandAgent.config_class(model="m", base_url="http://localhost/v1"))
    with pytest.raises(ConfigError, match="split"):
        CommandAgent(CommandAgent.config_class(command="'", model="m", base_url="http://localhost/v1"))
    runtime = Runtime(Settings(), load_entry_points=False, plugins=[hermes_agents])
    for name, value in {"compact_at": 100, "prefill_messages": [], "ephemeral_system_prompt": "x"}.items():
        with pytest.raises(ConfigError, match=f"{name} is only for the agent `model`: a program "):
            runtime.agent_settings({name: value, "command": "x"}, "program")
        assert name not in ProgramSettings.model_fields


async def test_exact_tokens_need_a_model_of_their_own() -> None:
    agent = Installed(ProgramSettings(tool_call_parser="auto", model="m"))
    with pytest.raises(UsageError, match="no model yet"):
        await agent.check_endpoint()
    assert StopReason("program_failed") in StopReason
