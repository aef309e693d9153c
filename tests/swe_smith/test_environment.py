"""The environment on the local backend: scores, rescoring, set-up failures, repositories from a URL."""

import json
import os
import subprocess
import venv
from pathlib import Path

import hermes_swe_smith
import pytest
from hermes_swe_smith import dependencies, workspace

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.errors import PolicyError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.soundness.rescore import rescore


@pytest.fixture
async def runtime():
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith]) as made:
        if Isolation.USER not in made.backend("local").capabilities.isolation:
            pytest.skip("this host grants no isolation between slots")
        yield made


class Shell:
    """An agent that runs one command in the workspace."""

    name = "shell"

    def __init__(self, command):
        self.command = command

    async def run(self, task):
        answer = await task.tool_handler("terminal", {"command": self.command, "timeout": 60}, task.trajectory_id)
        result = AgentResult(messages=[*task.messages, {"role": "assistant", "content": answer}], turns_used=1)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        return


async def roll_out(runtime, agent="oracle", *, out_dir=None, isolation="user", env=(), **options):
    """The records by item id."""
    records = {}
    await run_rollouts(
        runtime,
        "swe-smith",
        agent,
        env={"shuffle": False, **dict(env)},
        out_dir=out_dir,
        on_record=lambda record: records.update({record["item_id"]: record}),
        isolation=isolation,
        concurrency=2,
        **options,
    )
    return records


def rows_of(dataset):
    return [json.loads(line) for line in (dataset / "tasks.jsonl").read_text().splitlines()]


def dataset_with(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_slots_that_are_root_could_read_the_fix(runtime):
    with pytest.raises(PolicyError, match="'swe-smith' hides files from its slots"):
        await roll_out(runtime, env={"dataset_name": "demo"}, backend_config={"slot_user": "root"})


@pytest.mark.full  # rescoring: tests/soundness/test_rescore.py
async def test_a_recorded_patch_scores_the_same_again(runtime, tmp_path):
    env = {"dataset_name": "demo", "max_items": 1}
    records = await roll_out(runtime, out_dir=tmp_path / "run", env=env)
    assert [record["reward"] for record in records.values()] == [1.0]
    assert all(record["patch"].startswith("diff --git") for record in records.values())
    outcome = await rescore(runtime, tmp_path / "run", trust_run=True)
    assert outcome.agrees and outcome.patches == 1


async def test_a_row_that_can_t_be_set_up_fails_alone(runtime, swe_dataset, tmp_path):
    rows = rows_of(swe_dataset)[:3]
    rows[0]["patch"] = rows[0]["patch"].replace("return -value if negative", "return -value if positive")
    rows[1]["FAIL_TO_PASS"] = ["tests/test_gone.py::test_it"]
    env = {"dataset_name": dataset_with(tmp_path / "tasks.jsonl", rows), "repo_base_url": str(swe_dataset)}
    records = await roll_out(runtime, env=env)
    for row, message in ((rows[0], "`patch` does not apply"), (rows[1], "tests/test_gone.py")):
        record = records[row["instance_id"]]
        assert record["reward"] is None
        assert record["failure"]["kind"] == "setup"
        assert row["instance_id"] in record["failure"]["message"] and message in record["failure"]["message"]
    assert records[rows[2]["instance_id"]]["reward"] == 1.0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requirements": ["pytest==0.0.0.1"]}, "pip install"),
        ({"python": "3.6"}, "no Python 3.6"),
        ({"base_commit": "0" * 40}, "bundle"),
    ],
)
async def test_what_a_sandbox_lacks_is_named(runtime, swe_dataset, tmp_path, change, message, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://someone:their-password@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    entries = json.loads((swe_dataset / "repos.json").read_text())
    entries[0].update(change)
    (tmp_path / "repos.json").write_text(json.dumps(entries))
    (tmp_path / "ledgerline.bundle").write_bytes((swe_dataset / "ledgerline.bundle").read_bytes())
    env = {"dataset_name": str(swe_dataset / "tasks.jsonl"), "repo_base_url": str(tmp_path), "max_items": 1}
    (record,) = (await roll_out(runtime, "nop", env=env)).values()
    assert record["reward"] is None
    assert record["failure"]["kind"] == "setup"
    assert message in record["failure"]["message"]
    assert "their-password" not in json.dumps(record)


@pytest.mark.full
async def test_tests_that_do_not_end_score_zero(runtime, swe_dataset):
    env = {
        "dataset_name": str(swe_dataset / "tasks.jsonl"),
        "repo_base_url": str(swe_dataset),
        "max_items": 1,
        "test_timeout_s": 2,
    }
    agent = Shell("printf 'import time; time.sleep(1000)\\n' >> ledgerline/ledgerline/amounts.py")
    (record,) = (await roll_out(runtime, agent, env=env)).values()
    assert (record["reward"], record["failure"]) == (0.0, None)
    assert record["details"]["tests"] == "timed_out"
    assert "2 s" in record["details"]["reason"]


@pytest.mark.parametrize("hide", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_hidden_tests_and_how_the_checkout_looks(runtime, swe_dataset, hide):
    row = rows_of(swe_dataset)[0]
    look = (
        "cd ledgerline; ls -a .. . tests; git log --oneline --all; git status --short; find .git -name alternates; "
        "git count-objects; (echo x > ../.venv/x) 2>&1; (echo x > $(readlink ../.venv)/x) 2>&1"
    )
    env = {
        "dataset_name": str(swe_dataset / "tasks.jsonl"),
        "repo_base_url": str(swe_dataset),
        "max_items": 1,
        "hide_fail_to_pass": hide,
    }
    record = (await roll_out(runtime, Shell(look), env=env))[row["instance_id"]]
    said = json.loads(record["messages"][-1]["content"])["output"]
    hidden = sorted({node_id.split("::")[0] for node_id in row["FAIL_TO_PASS"]})
    assert [Path(name).name in said for name in hidden] == [not hide] * len(hidden), said
    assert said.count("The project as it is") == 1
    assert "alternates" not in said
    assert record["patch"] == ""


def git(where, *words, data=None):
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    env.update({f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")})
    done = subprocess.run(["git", *words], cwd=where, env=env, input=data, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.long
@pytest.mark.full  # installs a real environment
async def test_a_repository_from_a_url_with_nothing_known_of_it(runtime, swe_dataset, tmp_path):
    """A row of the oracle form: owner/name, a commit of the buggy tree, and the patch that fixes it."""
    row = rows_of(swe_dataset)[0]
    upstream = tmp_path / "upstream" / "someone" / "ledgerline"
    upstream.parent.mkdir(parents=True)
    git(tmp_path, "clone", "-q", str(swe_dataset / "ledgerline.bundle"), str(upstream), "-b", "main")
    git(upstream, "apply", "-", data=row["patch"].encode())
    git(upstream, "commit", "-q", "-a", "-m", "buggy")
    for path in [upstream, *upstream.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    fix = git(upstream, "diff", "HEAD", "HEAD^")
    row |= {"repo": "someone/ledgerline", "base_commit": git(upstream, "rev-parse", "HEAD").strip(), "text": "code"}
    env = {
        "dataset_name": dataset_with(tmp_path / "tasks.jsonl", [{**row, "patch": fix}]),
        "repo_base_url": f"file://{tmp_path / 'upstream'}",
        "patch_is": "fix",
    }
    looks = "ls .venv/lib/python3*/site-packages; cat .venv/../ledgerline/README.md"
    fixes = f"cd ledgerline && git apply <<'END'\n{fix}END"
    # `shared`, for this URL is a path of this host.
    agent = Shell(f"{looks}; {fixes}")
    (record,) = (await roll_out(runtime, agent, env=env, isolation="shared", allow_unisolated=True)).values()
    answer = json.loads(record["messages"][-1]["content"])
    assert answer["exit_code"] == 0, answer  # so the bug was there
    assert (record["failure"], record["reward"]) == (None, 1.0)
    said = answer["output"]
    assert "pytest" in said
    assert "ledgerline-1.0.dist-info" in said
    assert "\nledgerline\n" not in said, "the project's own code is in the environment"


async def test_pip_is_used_if_it_installs_for_other_interpreters(runtime, tmp_path, monkeypatch):
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    own, package = str(home / "bin/python3"), next(home.glob("lib/*/site-packages")) / "pip"
    monkeypatch.setattr(dependencies, "_candidates", lambda wanted: ["no-such-python", own])
    backend = runtime.tool_backend("local", isolation="shared")
    async with backend, backend.lease("t") as slot:
        installer = dependencies.Installer(backend.commands(slot), str(tmp_path), {}, 60)
        assert await installer.find_python("") == (own, False), "it has none"
        package.mkdir()
        for text, used in (("raise OSError", False), ("__version__ = '22.2.2'", False), ("__version__ = '23.0'", True)):
            (package / "__init__.py").write_text(text)
            assert await installer.find_python("") == (own, used), text


async def test_no_repository_at_the_url(runtime, swe_dataset, tmp_path):
    row = {**rows_of(swe_dataset)[0], "repo": "someone/ledgerline"}
    env = {"dataset_name": dataset_with(tmp_path / "tasks.jsonl", [row]), "repo_base_url": f"file://{tmp_path}/nowhere"}
    (record,) = (await roll_out(runtime, "nop", env=env)).values()
    assert record["failure"]["kind"] == "setup"
    assert "can't be cloned" in record["failure"]["message"] and "repo_base_url" in record["failure"]["message"]


async def test_a_server_that_is_out_of_reach_is_infrastructure(runtime, swe_dataset, tmp_path):
    row = {**rows_of(swe_dataset)[0], "repo": "someone/ledgerline"}
    env = {"dataset_name": dataset_with(tmp_path / "tasks.jsonl", [row]), "repo_base_url": "http://127.0.0.1:9"}
    (record,) = (await roll_out(runtime, "nop", env=env, infra_retries=0)).values()
    assert record["failure"]["kind"] == "infra", record["failure"]
    assert "can't be reached" in record["failure"]["message"]


DIE = "import os, signal, sys; os.kill(os.getpid(), signal.SIGKILL)"
DIE_ONCE = f"""
import os, sys, tempfile
if sys.argv[2] == "take_work":
    try:
        os.mkdir(tempfile.gettempdir() + "/died")
    except FileExistsError:
        pass
    else:
        {DIE}
{workspace._LOADER}
"""


@pytest.mark.parametrize(
    ("place", "program"), [(workspace, "_LOADER"), pytest.param(dependencies, "_NOTES", marks=pytest.mark.full)]
)
async def test_a_preparation_that_is_killed_is_infrastructure(runtime, swe_dataset, monkeypatch, place, program):
    """The kernel takes what it likes when there is no memory left; the row is not to blame."""
    monkeypatch.setattr(place, program, DIE)
    env = {"dataset_name": str(swe_dataset / "tasks.jsonl"), "repo_base_url": str(swe_dataset), "max_items": 1}
    (record,) = (await roll_out(runtime, "nop", env=env)).values()
    assert (record["reward"], record["failure"]["kind"]) == (None, "infra")
    assert "was killed" in record["failure"]["message"]


@pytest.mark.full  # tests/rollout/test_agent_exits.py kills verifications
async def test_work_whose_taking_is_killed_once_is_taken_again(runtime, swe_dataset, monkeypatch, caplog):
    monkeypatch.setattr(workspace, "_LOADER", DIE_ONCE)
    env = {"dataset_name": str(swe_dataset / "tasks.jsonl"), "repo_base_url": str(swe_dataset), "max_items": 1}
    (record,) = (await roll_out(runtime, "oracle", env=env)).values()
    assert (record["reward"], record.get("failure")) == (1.0, None)
    assert "begun anew" not in caplog.text
