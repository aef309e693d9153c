"""The commands `export` and `merge`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hermes_core.cli.main import main
from tests.export.conftest import MakeRun, failed, rollout


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def hermes_rl(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_an_export_says_what_it_did(make_run: MakeRun) -> None:
    run = make_run([rollout(), rollout(index=1, reward=0.0), failed("lost")])
    done = hermes_rl("export", run, "--to", "openai", "--solved", "--deduplicate")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "1 rollouts of 1 items exported as openai",
        "left out: 1 reward too low, or none (0 solved, mean reward 0.000)",
        "left out: 1 failure: infra",
        "tool bash: 1 calls, 0 failed",
        "tool read: 1 calls, 1 failed",
        "written to exports/run-openai",
    ]
    assert len(Path("exports/run-openai/train.jsonl").read_text().splitlines()) == 1
    again = hermes_rl("export", run, "--to", "openai")
    assert again.exit_code == 2
    assert again.output.startswith("error: exports/run-openai exists already (choose another folder with --out")


def test_secrets_of_the_environment_are_removed(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    run = make_run([rollout(said="The key is sk-0123456789.")])
    assert hermes_rl("export", run, "--to", "openai", "--out", "out").exit_code == 0
    assert "[redacted: OPENAI_API_KEY]" in Path("out/train.jsonl").read_text()
    assert hermes_rl("merge", run, "--out", "joined").exit_code == 0
    assert "sk-0123456789" not in Path("joined/trajectories.jsonl").read_text()


def test_results_are_json_if_asked(make_run: MakeRun) -> None:
    run = make_run([rollout(), failed("lost")])
    done = hermes_rl("export", run, "--to", "atif", "--failure", "none", "--out", "out", "--json")
    assert json.loads(done.output)["left_out"] == {"failure: infra": 1}
    joined = hermes_rl("merge", run, run, "--out", "joined", "--json")
    assert {"rollouts": 2, "repeated": 2}.items() <= json.loads(joined.output).items()


def test_wrong_use_is_told(make_run: MakeRun) -> None:
    run = make_run([rollout()])
    for arguments, said in [
        (("export", run), "missing option '--to'"),
        (("export", run, "--to", "opnai"), "openai"),
        (("export", run, "--to", "trl", "--failure", "infre"), "infra"),
        (("export", run, "--to", "trl", "--per-item", 0), "from 1 on"),
        (("export", "nowhere", "--to", "trl"), "nowhere"),
        (("merge", run), "missing option '--out'"),
    ]:
        done = hermes_rl(*arguments)
        assert done.exit_code == 2, done.output
        assert said in done.output
