"""`hermes-rl rollout|validate|rescore` as processes: exit codes, output, signals, and `kill -9`."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hermes_testing.scripted_server import Fault, ScriptedServer

from hermes_core.cli.main import main
from tests.support.forked_program import run_program

ISOLATION = ["--isolation", "user"] if os.geteuid() == 0 else ["--isolation", "shared", "--allow-unisolated"]
PROGRAM = [sys.executable, "-m", "hermes_core"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of the program: no plugins, its records in the test's own folder."""
    root = str(Path(__file__).parents[2])
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": root,
        "HERMES_PLUGINS": "",
        "HERMES_ENV_FILE": "",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


@pytest.fixture
def run(environ, tmp_path):
    def call(*arguments, timeout=60, **changes) -> subprocess.CompletedProcess:
        return run_program([*map(str, arguments)], {**environ, **changes}, tmp_path, timeout=timeout)

    return call


@pytest.fixture
def refused(environ, tmp_path, monkeypatch):
    """What the program says in this process, where it ends before anything is begun: exit code 2, and no output."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments) -> str:
        done = CliRunner(env=environ).invoke(main, [*map(str, arguments)])
        assert (done.exit_code, done.stdout) == (2, ""), done.stderr
        return done.stderr

    return call


@pytest.fixture
def dataset(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps({"prompt": "p", **row}) + "\n" for row in rows))
        return f"--env.dataset_name={path}"

    return write


GOOD = {"id": "good", "check": "test -f a", "solution": "touch a"}


def slow(count: int, mark: str) -> list[dict]:
    """Tasks that take a while, each with a process in the background that carries the mark in its command line."""
    setup = [f"sh -c 'sleep 1000; true' {mark} > /dev/null 2>&1 & sleep 0.1"]
    solution = ["sleep 0.1", "touch a"]
    return [{"id": str(n), "setup": setup, "check": "test -f a", "solution": solution} for n in range(count)]


@pytest.fixture
def mark() -> str:
    return f"mark-{uuid.uuid4().hex}"


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_bytes().splitlines()]


def test_a_run_with_all_scored_exits_with_0_and_prints_where_things_are(run, dataset, tmp_path):
    out = tmp_path / "out"
    done = run("rollout", "tasks", dataset(GOOD), "--agent", "oracle", "--out", out, *ISOLATION)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 scored, 1 solved, mean reward 1.000" in done.stdout
    assert str(out / "trajectories.jsonl") in done.stdout
    assert (out / ".trajectories.jsonl.index").exists(), "show would have to read all records first"
    assert done.stderr.splitlines()[0] == "1 rollout"
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.root
def test_confine_takes_the_network_away_and_limits_memory(run, dataset, tmp_path, isolates):
    look = "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '; ulimit -d"
    task = {"id": "look", "check": f"({look}) >found; printf 'lo\\n4194304\\n' | cmp - found"}
    open_ = run("rollout", "tasks", dataset(task), "--agent", "nop", "--json", *ISOLATION)
    confined = run("rollout", "tasks", dataset(task), "--agent", "nop", "--json", *ISOLATION, "--confine")
    assert json.loads(open_.stdout)["solved"] == 0
    assert json.loads(confined.stdout)["solved"] == 1


def test_json_is_the_summary_and_nothing_else_on_standard_output(run, dataset):
    done = run("rollout", "tasks", dataset(GOOD), "--agent", "nop", "--json", *ISOLATION)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["scored"], summary["mean_reward"]) == (1, 0.0)
    assert f"records go to {summary['out_dir']}\n" in done.stderr


def test_some_not_scored_exits_with_3_and_says_why(run, dataset):
    broken = {"id": "broken", "setup": "echo no luck >&2; exit 7", "check": "true"}
    silent = {"id": "silent", "setup": "exit 8", "check": "true"}
    done = run("rollout", "tasks", dataset(GOOD, broken, silent), "--agent", "oracle", *ISOLATION)
    assert done.returncode == 3
    assert "1 of 3 scored" in done.stdout
    assert "  setup: a set-up command of item 'silent' failed with status 8\n      silent\n" in done.stdout
    assert "  setup: a set-up command of item 'broken' failed with status 7: no luck\n      broken\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout", "tsks"], "did you mean 'tasks'"),
        (["rollout", "tasks"], "dataset_name is missing"),
        (["rollout", "tasks", "--env.dataset_nam=x"], "did you mean 'dataset_name'"),
        (["rollout", "tasks", "--evn.dataset_name=x"], "did you mean 'env'"),
        (["rollout", "tasks", "--agent", "oracl", "DATASET"], "did you mean 'oracle'"),
        (["rollout", "tasks", "--agent", "oracle", "--backend", "locl", "DATASET"], "did you mean 'local'"),
        (["rollout", "tasks", "--agent", "oracle", "--isolation", "usr", "DATASET"], "did you mean 'user'"),
        (["rollout", "tasks", "--agent", "oracle", "--backend.cpus=1", "DATASET"], "did you mean 'cpu'"),
        (["rollout", "tasks", "--agent.max_turn=3", "DATASET"], "did you mean 'max_turns'"),
        (["rollout", "tasks", "--agent", "oracle", "--items", "0", "DATASET"], "--items"),
        (["rollout", "tasks", "--agent", "oracle", "--stop-on-infra", "2", "DATASET"], "stop_on_infra"),
        (["rollout", "tasks", "--agent", "oracle", "--rollout-timeout", "nan", "DATASET"], "rollout_timeout"),
        (["rollout", "tasks", "DATASET"], "no model is named"),
        (["rollout", "tasks", "--agent", "oracle", "--out", "/proc/nowhere", "DATASET"], "output folder"),
        (["rollout", "tasks", "--agent", "oracle", "--env.dataset_name=/nowhere"], "can't read /nowhere"),
        (["validate", "tasks", "--repeat", "0", "DATASET"], "--repeat"),
        (["rescore", "/nowhere"], "/nowhere"),
        (["rescore", "."], "run.json"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_to_do(refused, dataset, arguments, message):
    path = dataset(GOOD)
    said = refused(*[path if argument == "DATASET" else argument for argument in arguments])
    assert message in said
    assert "Traceback" not in said


def test_a_file_configures_and_the_command_line_wins(run, dataset, tmp_path):
    option = dataset(GOOD, {**GOOD, "id": "second"}, {**GOOD, "id": "third"})
    path = option.partition("=")[2]
    level = ISOLATION[1]
    (tmp_path / "run.yaml").write_text(
        f"env: {{dataset_name: {path}, max_items: 2}}\n"
        "agent: oracle\n"
        "backend: {name: local, slots_per_sandbox: 6}\n"
        f"run: {{isolation: {level}, allow_unisolated: true, group_size: 2, concurrency: 1}}\n"
    )
    done = run("rollout", "tasks", "--config", "run.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"] == 4
    done = run("rollout", "tasks", "--config", "run.yaml", "--json", "--items", "1", "--agent", "nop", "--out", "out")
    assert json.loads(done.stdout)["mean_reward"] == 0.0
    configuration = json.loads((tmp_path / "out" / "run.json").read_text())["configuration"]
    assert (configuration["env"]["max_items"], configuration["agent"], configuration["group_size"]) == (1, "nop", 2)
    assert configuration["backend_config"] == {"slots_per_sandbox": 6}


def test_a_profile_is_chosen_by_name_and_a_wrong_one_is_refused(run, dataset, tmp_path):
    (tmp_path / "profiles.yaml").write_text(
        "profiles:\n  small: {env_vars: {SIZE: small}}\n  big: {env_vars: {SIZE: big}, slots_per_sandbox: 3}\n"
    )
    rows = dataset({"id": "a", "check": 'test "$SIZE" = big', "solution": "true"})
    rollout = ["rollout", "tasks", rows, "--agent", "nop", "--json", *ISOLATION]

    def summary(*arguments) -> tuple[int, list[str]]:
        done = run(*rollout, *arguments, HERMES_PROFILES_FILE="profiles.yaml")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["solved"], list(found["sandbox_s"])

    assert summary() == (0, ["small"])
    assert summary("--profile", "big", "--out", "out") == (1, ["big"])  # and no sandbox of another profile was made
    assert json.loads((tmp_path / "out/run.json").read_text())["configuration"]["profile"] == "big"
    refused = run(*rollout, "--profile", "bgi", HERMES_PROFILES_FILE="profiles.yaml")
    assert refused.returncode == 2
    assert "did you mean 'big'" in refused.stderr


async def test_secrets_are_in_no_file(run, dataset, tmp_path):
    async with ScriptedServer((), faults=[Fault(500, "no sk-not-to-be-seen")]) as server:
        settings = ["--model", "scripted", "--base-url", server.base_url, "--agent.max_retries=0"]
        arguments = ["rollout", "tasks", dataset(GOOD), "--out", "out", *settings, *ISOLATION]
        done = await asyncio.to_thread(run, *arguments, OPENAI_API_KEY="sk-not-to-be-seen")
    assert done.returncode == 3, done.stderr
    assert records(tmp_path / "out")[0]["failure"]["kind"] == "model"
    files = [path for path in (tmp_path / "out").iterdir() if path.is_file()]
    assert len(files) >= 3
    assert not any(b"sk-not-to-be-seen" in path.read_bytes() for path in files)
    assert "sk-not-to-be-seen" not in done.stdout + done.stderr


@pytest.mark.full  # test_secrets_are_in_no_file stands for it
async def test_a_password_in_the_endpoints_url_is_in_no_file(run, dataset, tmp_path):
    async with ScriptedServer((), faults=[Fault(500, "not today")]) as server:
        url = server.base_url.replace("//", "//someone:sekret-pw@")
        options = ["--model", "scripted", "--base-url", url, "--agent.max_retries=0", "--out", "out", *ISOLATION]
        done = await asyncio.to_thread(run, "rollout", "tasks", dataset(GOOD), *options)
    assert done.returncode == 3, done.stderr
    assert server.base_url.partition("//")[2] in (tmp_path / "out/run.json").read_text()
    texts = [path.read_text() for path in (tmp_path / "out").iterdir()] + [done.stdout, done.stderr]
    assert not any("sekret-pw" in text for text in texts)


@pytest.mark.full
def test_validate_lists_what_is_wrong_and_what_is_flaky(run, dataset):
    flaky = {"id": "flaky", "check": "test -f a && test $(( $(date +%s%N) / 1000 % 2 )) = 0", "solution": "touch a"}
    done = run(
        "validate",
        "tasks",
        dataset(GOOD, {"id": "solved", "check": "true", "solution": "true"}, {"id": "none", "check": "false"}, flaky),
        *["--repeat", "12", "--json", *ISOLATION],
    )
    assert done.returncode == 1, done.stderr
    outcome = json.loads(done.stdout)
    found = {(one["item_id"], one["agent"]): one for one in outcome["unsound"]}
    assert set(found) == {("solved", "nop"), ("none", "oracle"), ("flaky", "oracle")}
    assert found["flaky", "oracle"]["flaky"] is True
    assert found["solved", "nop"]["rewards"] == [1.0] * 12
    assert "no solution" in found["none", "oracle"]["failures"][0]


def test_validate_says_why_a_reward_is_wrong(run, dataset):
    row = {"id": "a", "check": "echo the answer is missing; test -f answer", "solution": "true"}
    done = run("validate", "tasks", dataset(row), *ISOLATION)
    assert done.returncode == 1, done.stderr
    said = "gold-fails: a on local\n  the reference solution gets 0; output: the answer is missing"
    assert said in done.stdout


@pytest.mark.full  # one more start of the program for one more message
def test_the_traceback_of_a_hook_is_shown_where_it_is_asked_for(run, tmp_path):
    (tmp_path / "broken_hook.py").write_text(
        "from hermes_core.environment import Environment\n"
        "from hermes_core.plugins.hookspecs import hookimpl\n"
        "class Broken(Environment):\n"
        "    name = 'broken'\n"
        "    def items(self):\n        return [{'id': '1'}]\n"
        "    def format_prompt(self, item):\n        return 'p'\n"
        "    @hookimpl\n"
        "    def verify_and_score_trajectory(self, item):\n        return item['reward']\n"
        "@hookimpl\n"
        "def hermes_register_environments(registry):\n    registry.add('broken', Broken)\n"
    )
    metadata = tmp_path / "broken_hook-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-hook\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[hermes_core]\nbroken = broken_hook\n")
    places = {"HERMES_PLUGINS": "broken", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    rollout = ["rollout", "broken", "--agent", "nop", *ISOLATION]
    short, whole = run(*rollout, **places), run("--traceback", *rollout, **places)
    assert (short.returncode, whole.returncode) == (3, 3), short.stderr
    assert "KeyError: 'reward'" in short.stderr and "Traceback" not in short.stderr
    assert 'broken_hook.py", line 11, in verify_and_score_trajectory' in whole.stderr


def test_validate_of_sound_items_exits_with_0_and_writes_a_table_and_an_empty_quarantine(run, dataset, tmp_path):
    done = run("validate", "tasks", dataset(GOOD), "--out", "out", "--progress", "json", *ISOLATION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "item  backend  gold  nop  result",
        "good  local    1/1   0/1  sound",
        "",
        "1 of 1 items are sound; each tried once with either baseline, on local",
        "results: out/validation.md; quarantine: out/quarantine.json",
    ]
    assert json.loads((tmp_path / "out/quarantine.json").read_text())["items"] == []
    assert "| good | local | 1/1 | 0/1 | sound |" in (tmp_path / "out/validation.md").read_text()
    states = [json.loads(line) for line in done.stderr.splitlines()]
    assert {state["run"] for state in states} == {"local"} and states[-1]["finished"] == 2


@pytest.fixture
def flavours(tmp_path):
    """The file with two profiles of one backend."""
    path = tmp_path / "profiles.yaml"
    flavours = {name: {"env_vars": {"FLAVOUR": name}} for name in ("one", "two")}
    path.write_text(json.dumps({"default_profile": "one", "profiles": flavours}))
    return {"HERMES_PROFILES_FILE": str(path)}


@pytest.mark.full  # test_validate.py has two
def test_validate_on_several_backends_tells_how_they_differ(run, dataset, tmp_path, flavours):
    row = {"id": "apart", "check": "test -f a && test $FLAVOUR = one", "solution": "touch a"}
    several = ["--backends", "local:one,local:two", "--backend.max_processes=100"]
    done = run("validate", "tasks", dataset(GOOD, row), *several, "--out", "out", *ISOLATION, **flavours)
    assert done.returncode == 1, done.stderr
    assert "differs: apart\n  oracle gets local:one 1, local:two 0\n" in done.stdout
    for place in ("local-one", "local-two"):
        configuration = json.loads((tmp_path / "out" / place / "run.json").read_text())["configuration"]
        assert configuration["backend_config"] == {"max_processes": "100"}
        assert (configuration["agent"], configuration["agents"]) == ("validate", ["oracle", "nop"])
    refusals = {
        ("--backends", "local", "--backend", "local"): "in place of --backend",
        ("--backends", "local,local"): "each backend once",
        ("--backends", "local,locl"): "unknown backend 'locl'",
        ("--backends", "local", "--backend.imag=x"): "unknown setting 'imag'",
        ("--cheat", "none"): "unknown cheat 'none'",
    }
    for options, said in refusals.items():
        refused = CliRunner().invoke(main, ["validate", "tasks", dataset(GOOD), *options])
        assert refused.exit_code == 2 and said in refused.stderr, refused.output


@pytest.mark.full
async def test_an_interrupted_validation_prints_what_is_known_and_goes_on(environ, dataset, tmp_path, mark, run):
    unsound = {"id": "unsound", "check": "true", "solution": "true"}
    arguments = ["validate", "tasks", dataset(unsound, *slow(20, mark)), "--out", "out", "--backend.orphan_ttl_s=2"]
    arguments += ["--concurrency", "2", *ISOLATION]
    program = await start(environ, tmp_path, *arguments)
    place = tmp_path / "out/local"
    assert await until(lambda: (place / "trajectories.jsonl").exists() and len(records(place)) > 4, 60)
    program.send_signal(signal.SIGINT)
    output, _ = await asyncio.wait_for(program.communicate(), 30)
    assert program.returncode == 130, output.decode()
    assert b"nop-scores: unsound on local" in output and b"interrupted; `--out out --resume` goes on" in output
    written = json.loads((tmp_path / "out/quarantine.json").read_text())
    assert [each["item_id"] for each in written["items"]] == ["unsound"]
    assert written["validated"]["complete"] is False
    scored = {each["trajectory_id"] for each in records(place) if not each["failure"]}

    program = await start(environ, tmp_path, *arguments, "--resume")
    assert await until(lambda: len(records(place)) > len(scored) + 2, 60)
    program.kill()
    await program.communicate()
    assert await until(lambda: processes_with(mark) == [], 15)
    done = run(*arguments, "--resume", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["complete"], told["count"]) == (True, {"sound": 20, "unsound": 1, "not tried": 0})
    last = Counter((each["item_id"], each["rollout_index"]) for each in records(place))
    assert last == {(str(item), index): 1 for item in ["unsound", *range(20)] for index in range(2)}
    assert scored <= {each["trajectory_id"] for each in records(place)}


async def start(environ, tmp_path, *arguments) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *PROGRAM,
        *arguments,
        env=environ,
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that carry the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            found += [line] if mark in line else []
    return found


async def until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return bool(met)


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_run_ends_at_once_with_130_and_leaves_no_process(
    environ, dataset, tmp_path, mark, number, isolates
):
    arguments = ["rollout", "tasks", dataset(*slow(400, mark)), "--agent", "oracle", "--out", "out", *ISOLATION]
    program = await start(environ, tmp_path, *arguments)
    assert await until(lambda: processes_with(mark), 60)
    program.send_signal(number)
    began = time.monotonic()
    output, _ = await asyncio.wait_for(program.communicate(), 60)
    assert program.returncode == 130, output.decode()
    assert time.monotonic() - began < 25
    assert b"Traceback" not in output
    assert b"interrupted; `--out out --resume` goes on with it\n" in output
    assert processes_with(mark) == []
    assert {one["failure"]["kind"] for one in records(tmp_path / "out") if one["failure"]} == {"cancelled"}


@pytest.mark.full  # runs that were cancelled are resumed in test_run_rollouts.py
@pytest.mark.parametrize(("kills", "items"), [(3, 10), pytest.param(8, 30, marks=pytest.mark.stress)])
async def test_killed_again_and_again_it_is_resumed_until_each_rollout_is_scored_once(
    environ, dataset, tmp_path, run, mark, kills, items
):
    chance = random.Random(20)
    arguments = ["rollout", "tasks", dataset(*slow(items, mark)), "--agent", "oracle", "--out", "out", "--resume"]
    arguments += ["--group-size", "2", "--backend.orphan_ttl_s=2", *ISOLATION]
    for _ in range(kills):
        program = await start(environ, tmp_path, *arguments)
        assert await until(lambda: processes_with(mark), 60)
        await asyncio.sleep(chance.uniform(0, 0.8))
        program.kill()
        await program.communicate()
    assert await until(lambda: processes_with(mark) == [], 15)
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scored"] == 2 * items
    scored = Counter((one["item_id"], one["rollout_index"]) for one in records(tmp_path / "out"))
    assert scored == {(str(item), index): 1 for item in range(items) for index in range(2)}
    assert processes_with(mark) == []


def test_only_chosen_failures_are_repeated_and_programs_can_follow(run, dataset, tmp_path):
    flaky = {"id": "flaky", "setup": f"test -e {tmp_path}/ready", "check": "true", "solution": "true"}
    arguments = ["rollout", "tasks", dataset(GOOD, flaky), "--agent", "oracle", "--out", "out", *ISOLATION]
    first = run(*arguments, "--progress", "json")
    assert first.returncode == 3
    states = [json.loads(line) for line in first.stderr.splitlines() if line.startswith("{")]
    assert [states[0]["event"], states[-1]["event"]] == ["begin", "end"]
    assert (states[-1]["finished"], states[-1]["failures"]) == (1, {"setup": 1})
    kept = {one["item_id"]: one["trajectory_id"] for one in records(tmp_path / "out")}
    other = run(*arguments, "--retry-failed", "model", "--progress", "none")
    assert (other.returncode, other.stderr) == (3, "")
    assert {one["item_id"]: one["trajectory_id"] for one in records(tmp_path / "out")} == kept
    again = run(*arguments, "--retry-failed", "setup", "--progress", "plain")
    assert again.returncode == 3  # it failed as before, and only it was done again
    now = {one["item_id"]: one["trajectory_id"] for one in records(tmp_path / "out")}
    assert (now["good"] == kept["good"], now["flaky"] == kept["flaky"]) == (True, False)
