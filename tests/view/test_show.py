"""`hermes-rl show`: tables, one rollout as text, filters, JSON; a terminal obeys nothing of a record."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hermes_core.agents.base import CallError, CallErrorKind
from hermes_core.cli.main import main
from hermes_core.errors import FailureKind
from hermes_core.records.record import Failure, SandboxCommand
from tests.view.conftest import summarised

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\x00 [bold red]x[/bold red] [link=http://e]y[/link] :smile: \ud800"
)


def show(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["show", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def run(make_record: Any, write_run: Any, failed_call: Any) -> Path:
    """Three items: one solved of two, one that hit a limit after a failed call, one without a reward."""
    path: Path = write_run(
        [
            make_record(),
            make_record(index=1, reward=0.0),
            make_record("hard", reward=0.5, stop_reason="max_turns", calls=(failed_call,)),
            make_record("lost", reward=None, details={}, stop_reason=None),
        ]
    )
    return path


def test_a_run_is_a_table_with_what_it_came_to(run: Path) -> None:
    page = show(run)
    assert "4 rollouts of 3 items: 3 scored, 1 solved, mean reward 0.500" in page
    assert "pass@1 0.250 (over 2 of 3 items)   pass@2 1.000 (over 1 of 3 items)" in page
    assert "1 of 3 items solved at least once" in page
    assert "failures: 1 infra" in page
    assert "stopped at a limit: 1 max_turns" in page
    assert "cost: $0.0800, $0.0800 per solved rollout" in page
    assert "tokens: 7.6k read (5% cached), 400 written" in page
    (lost,) = (text.split() for text in page.splitlines() if text.startswith("lost/0"))
    assert lost == ["lost/0", "-", "infra", "-", "2", "1", "2.0k", "10.0", "$0.0200"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--solved"], ["greet/0"]),
        (["--unsolved"], ["greet/1", "hard/0", "lost/0"]),
        (["--failure", "infra"], ["lost/0"]),
        (["--failure", "any"], ["lost/0"]),
        (["--failure", "none"], ["greet/0", "greet/1", "hard/0"]),
        (["--failure", "model"], []),
        (["--failure", "model", "--failure", "infra"], ["lost/0"]),
        (["--stop", "max_turns"], ["hard/0"]),
        (["--stop", "limit"], ["hard/0"]),
        (["--min-reward", "0.5"], ["greet/0", "hard/0"]),
        (["--max-reward", "0.5"], ["greet/1", "hard/0"]),
        (["--tool", "patch"], ["hard/0"]),
        (["--failed-tool", "patch"], ["hard/0"]),
        (["--sort", "reward"], ["lost/0", "greet/1", "hard/0", "greet/0"]),
        (["--rows", "1"], ["greet/0"]),
    ],
)
def test_rollouts_are_filtered_sorted_and_limited(run: Path, options: list[str], left: list[str]) -> None:
    page = show(run, *options)
    assert [text.split()[0] for text in page.splitlines() if "/0 " in text or "/1 " in text] == left
    assert ("… and 3 more: --rows 0 shows all" in page) is (options[0] == "--rows")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stop", "max_turn"], "stopped with 'max_turn'; there are: finished, max_turns (did you mean 'max_turns'?)"),
        (["--stop", "lenght"], "stopped with 'lenght'; there are: finished, max_turns (did you mean 'length'?)"),
        (["--tool", "pathc"], "called 'pathc'; there are: patch, terminal (did you mean 'patch'?)"),
        (["--failed-tool", "zzz"], "called 'zzz'; there are: patch, terminal\n"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--items"], ["--json"], ["greet"]])
def test_a_filter_that_stands_for_nothing_is_an_error(
    run: Path, options: list[str], said: str, more: list[str]
) -> None:
    assert f"no rollout of this run {said}" in show(run, *options, *more, code=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--failure", "infraa"], "unknown kind of failure 'infraa' (did you mean 'infra'?"),
        (["--unsolved", "--solved"], "solved and unsolved can't be asked for together (leave out one of them)"),
        (["--tools", "--items"], "--items and --tools can't be given together (leave out all but one of them)"),
        (["--items", "--report", "--json"], "--items and --report can't be given together"),
        (["--tools", "--sort", "cost"], "--tools can't be sorted: the most failed calls come first (leave out --sort)"),
    ],
)
def test_options_that_stand_for_nothing_or_exclude_each_other_are_an_error(
    run: Path, options: list[str], said: str
) -> None:
    assert said in show(run, *options, code=2)


@pytest.mark.parametrize("what", [[], ["--items"], ["--tools"], ["--report"]])
def test_filters_that_leave_nothing_say_what_there_is(run: Path, what: list[str]) -> None:
    said = "none of the 4 rollouts fits the filters (stopped: 2 finished, 1 max_turns; failures: 1 infra)"
    assert show(run, "--stop", "length", *what).splitlines()[1:] == [said]


@pytest.mark.parametrize("code", [0, 2])
def test_a_tool_whose_calls_succeeded_did_not_fail(make_record: Any, write_run: Any, code: int) -> None:
    record = make_record()
    run = write_run([dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], exit_code=code),))])
    assert "greet/0" in show(run, "--tool", "terminal")
    assert "greet/0" not in show(run, "--failed-tool", "terminal")


def test_a_limit_is_shown_with_its_value(make_record: Any, write_run: Any) -> None:
    stopped = ["max_turns", "time_limit", "context_length"]
    run = write_run([make_record(index=index, stop_reason=reason) for index, reason in enumerate(stopped)])
    about = json.loads((run / "run.json").read_text())
    about["configuration"] |= {"agent_settings": {"max_turns": 12, "max_tokens": None}, "rollout_timeout": 25.0}
    (run / "run.json").write_text(json.dumps(about))
    assert "stopped at a limit: 1 max_turns (12), 1 time_limit (25 s), 1 context_length\n" in show(run)
    about["configuration"]["deadline"] = 60.0
    (run / "run.json").write_text(json.dumps(about))
    assert "1 time_limit, " in show(run)


def test_what_filters_leave_has_no_pass_at_k(run: Path) -> None:
    for options in ([], ["--items"], ["--json"]):
        assert "pass@1" in show(run, *options) or '"1":' in show(run, *options)
        assert "pass@" not in (page := show(run, "--unsolved", *options)) and '"1":' not in page


def test_a_joined_run_has_all_agents_in_its_headline(make_record: Any, write_run: Any) -> None:
    run = write_run([make_record(), make_record(index=1, agent="nop", backend="docker")])
    assert "agent model, nop · backend docker, local · model" in show(run)


def test_of_a_script_that_did_what_it_should_the_first_line_is_shown(make_record: Any, write_run: Any) -> None:
    ran = [SandboxCommand("verify", "# makes a room\nset -e\nmkdir x", 1.0, 2.0, code) for code in (0, 1)]
    page = show(write_run([make_record(sandbox_commands=tuple(ran))]), "greet/0")
    assert page.count("# makes a room") == 2 and page.count("mkdir x") == 1


def test_items_have_their_pass_at_k(run: Path) -> None:
    rows = {text.split()[0]: text.split() for text in show(run, "--items").splitlines() if "$" in text}
    assert rows["greet"] == ["greet", "-", "2", "2", "1", "0.500", "0.500", "1.000", "20.0", "$0.0400"]
    assert rows["lost"][1:7] == ["1", "infra", "1", "0", "0", "-"]


@pytest.mark.parametrize(
    ("by", "order"), [("item", ["greet", "hard", "worse"]), ("reward", ["worse", "hard", "greet"])]
)
def test_items_have_one_order_for_people_and_programs(
    make_record: Any, write_run: Any, by: str, order: list[str]
) -> None:
    scores = {"greet": [0.0, 1.0], "hard": [0.25], "worse": [-2.0, None]}
    run = write_run(make_record(item, index, reward) for item in scores for index, reward in enumerate(scores[item]))
    table = show(run, "--items", "--sort", by).splitlines()
    assert [text.split()[0] for text in table if "$" in text and "cost: " not in text] == order
    assert [item["item_id"] for item in json.loads(show(run, "--items", "--sort", by, "--json"))] == order


def test_tools_are_listed_with_what_went_wrong(run: Path) -> None:
    page = show(run, "--tools")
    patch, terminal = (text.split() for text in page.splitlines() if text.startswith(("patch ", "terminal ")))
    assert patch == ["patch", "1", "1", "100%", "0", "1", "1.00", "1", "invalid_arguments"], "the most failures first"
    assert terminal == ["terminal", "3", "0", "0%", "3", "3", "1.00", "-"], "a non-zero exit is no failure"
    assert "\npatch: 1 × path is missing\n\nterminal: 3 × exit code 2\n" in page
    assert "a non-zero exit is no failure of the call" in page
    assert "a non-zero exit is" not in show(run, "--tools", "--tool", "patch")
    first = show(run, "--tools", "--rows", "1")
    assert "patch " in first
    assert "terminal" not in first
    assert "… and 1 more: --rows 0 shows all" in first
    assert show(run, "--tools", "--rows", "0") == page


def test_errors_that_are_alike_are_one(make_record: Any, write_run: Any, failed_call: Any) -> None:
    messages = [
        "the text to replace was not found (the nearest is line 7, 'return 1': read the file again)",
        "the text to replace was not found (read the file again)",
        *["src/a.py does not exist", "lib/b/c.py does not exist\nmore"],
        *["line 3 of 'a b' can't be read", "line 12 of 'c' can't be read"],
        "a fourth",
    ]
    calls = [dataclasses.replace(failed_call, error=CallError(CallErrorKind.FAILED, text)) for text in messages]
    page = show(write_run([make_record(calls=calls[:3]), make_record(index=1, calls=calls[3:])]), "--tools")
    for text in ("the text to replace was not found", "… does not exist", "line … of … can't be read"):
        assert f"\npatch: 2 × {text}\n" in page
    assert "a fourth" not in page


def test_one_rollout_is_told_from_its_prompt_to_its_report(run: Path) -> None:
    page = show(run, "greet/0")
    told = [
        "reward 1.00 · stopped: finished · 2 turns · 1 tool calls · 2.0k tokens · 10.0 s · $0.0200",
        "agent         2.0 s         3.0 s",
        "of the agent's: model 1.5 s, tools 1.0 s, waited for the endpoint 0.50 s",
        "Make the tests pass.",
        "TURN 1  at 2.0 s · took 1.0 s · waited 0.50 s · 900 → 80 tokens · $0.0100",
        "thinking:",
        "Hm.",
        "I look.",
        "→ terminal  make test",
        "← 1.0 s · exit code 2 · 4.1k bytes dropped",
        "output: 2 failed",
        "TURN 2",
        "VERIFIER'S REPORT",
        "reason: 1 of 2 tests failed",
        "$ pytest -q",
        "exit code 1, 4.0 s",
    ]
    places = [page.find(text) for text in told]
    assert -1 not in places, told[places.index(-1)] + page
    assert places == sorted(places)
    assert show(run, "greet-0-0123") == page


def test_an_error_that_the_answer_has_is_shown_once(make_record: Any, write_run: Any) -> None:
    message = 'mode must be one of "replace", "patch"'
    record = make_record()
    record.messages[3]["content"] = json.dumps({"error": message})
    wrong = CallError(CallErrorKind.INVALID_ARGUMENTS, message)
    run = write_run([dataclasses.replace(record, calls=(dataclasses.replace(record.calls[0], error=wrong),))])
    page = show(run, "greet/0")
    assert page.count(message) == 1
    assert "· invalid_arguments\n" in page


def test_of_several_rollouts_of_an_item_the_reports_are_shown(run: Path) -> None:
    page = show(run, "greet")
    assert page.count("reason: 1 of 2 tests failed") == 2
    assert "Make the tests pass." not in page
    assert "`hermes-rl show RUN greet/0` shows all turns" in page
    assert "greet/1" not in show(run, "greet", "--solved", "--report")


def test_reports_name_the_calls_that_failed(make_record: Any, write_run: Any, failed_call: Any) -> None:
    ran = dataclasses.replace(failed_call, name="terminal", error=None, exit_code=1)
    run = write_run([make_record(calls=[failed_call, ran, failed_call]), make_record(index=1, calls=[ran])])
    page = show(run, "greet")
    assert page.count("failed calls: ") == 1, "a command's exit code is no failure of a call"
    assert "failed calls: patch 2\ncommands with a non-zero exit: terminal 1\n" in page
    assert page.count("commands with a non-zero exit: terminal 1\n") == 2


def test_a_report_that_rollouts_have_in_common_is_shown_once(make_record: Any, write_run: Any) -> None:
    def record(index: int, **given: Any) -> Any:
        said = {"output": f"/data/slot_{index}/a.py: 1 failed in 0.{index}1s"}
        return make_record(index=index, **{"reward": 0.0, "details": said} | given)

    run = write_run([record(0), record(1, details={"output": "other"}), record(2), make_record("next", reward=0.0)])
    page = show(run, "--report")
    assert page.count("1 failed in") == 1
    told = ("greet/0", "greet/2", "2 rollouts, the same report", "1 failed in", "greet/1")
    places = [page.index(text) for text in told]
    assert places == sorted(places)
    assert page.index("output: other") > places[-1]
    assert page.count("the same report") == 1


def test_several_items_and_patterns_can_be_named(run: Path) -> None:
    def headings(*names: str) -> list[str]:
        return [text.split()[0] for text in show(run, *names, "--report").splitlines() if "-0123456789abcdef" in text]

    assert headings("hard", "greet/1") == ["greet/1", "hard/0"]
    assert headings("gr*", "greet/0") == ["greet/0", "greet/1"]
    assert headings("*/0", "--solved") == ["greet/0"]
    assert "unknown item 'gret'" in show(run, "greet", "gret", code=2)
    assert "unknown item 'x*'" in show(run, "x*", code=2)
    assert [text.split()[0] for text in show(run, "gr*", "hard", "--items").splitlines()] == ["item", "greet", "hard"]


def test_white_space_around_an_argument_is_seen(make_record: Any, write_run: Any) -> None:
    arguments = {"old_string": "  return 1", "new_string": "", "path": "a.py", "content": "\tx" * 40}
    call = {"name": "patch", "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    page = show(write_run([make_record(messages=[{"role": "user", "content": "Go."}, message])]), "greet/0")
    assert 'old_string: "  return 1"   new_string: ""   path: a.py\n' in page
    assert '"\\tx\\tx' in page


def test_a_reward_without_a_report_says_so(make_record: Any, write_run: Any) -> None:
    run = write_run([make_record(details={})])
    assert "VERIFIER'S REPORT  the verifier gave a reward and no report" in show(run, "greet/0")


@pytest.mark.parametrize(
    ("code", "signal", "stopped", "ended", "said"),
    [
        (0, None, "finished", "exit code 0", False),
        (3, None, "program_failed", "exit code 3", True),
        (None, 11, "program_failed", "signal 11", True),
        (None, None, "time_limit", "ended from outside", True),
    ],
)
def test_a_program_says_how_it_ended(
    make_record: Any, write_run: Any, code: int | None, signal: int | None, stopped: str, ended: str, said: bool
) -> None:
    program = {"exit_code": code, "signal": signal, "output": "no more room", "output_bytes": 12, "requests": {}}
    run = write_run([make_record(program=program, stop_reason=stopped)])
    page = show(run, "greet/0")
    assert f"PROGRAM  {ended}\n" in page and ("no more room" in page) is said
    assert "no more room" in show(run, "greet/0", "--full")
    assert "refused" not in page
    more = {"refusal": "it can't be read", "overridden": ["n", "seed"]}
    page = show(write_run([make_record(program=program | more, stop_reason=stopped)]), "greet/0")
    assert f"PROGRAM  {ended}\n  a model call was refused: it can't be read\n  settings that" in page
    assert "did not get: n, seed\n" in page


def test_a_report_has_the_texts_of_lists_and_no_endless_lines(make_record: Any, write_run: Any) -> None:
    texts = [["tests/a.py::test_a", "E  assert 1\nE  assert 2"], ["tests/a.py::test_b", "E  assert 3"]]
    page = show(
        write_run([make_record(details={"texts": texts, "output": "x" * 3000 + "\nend"})]), "greet/0", "--report"
    )
    assert "    tests/a.py::test_a\n    E  assert 1\n    E  assert 2\n    tests/a.py::test_b\n" in page
    assert "    … 2000 characters left out, --full shows them …\n" in page
    assert "    end\n" in page


def test_what_an_agent_without_a_model_ran_is_shown(make_record: Any, write_run: Any) -> None:
    ran = (SandboxCommand("agent", "sh solve.sh", 0.0, 1.0, 2, "solve.sh: 1: no such directory"),)
    oracle = make_record(agent="oracle", turns=(), calls=(), sandbox_commands=ran)
    page = show(write_run([oracle]), "greet")
    assert "COMMANDS OF AGENT" in page and "no such directory" in page
    assert "COMMANDS OF AGENT" not in show(write_run([make_record(sandbox_commands=ran)]), "greet")


@pytest.mark.parametrize(("stage", "shown"), [("setup", ["setup"]), ("agent", []), ("verify", ["verify"])])
def test_a_failure_has_the_commands_of_its_stage(
    make_record: Any, write_run: Any, stage: str, shown: list[str]
) -> None:
    ended = None if stage == "verify" else 0
    ran = [SandboxCommand(stage, "true", 1.0, 2.0, ended, "")] if stage == "verify" else []
    ran = [SandboxCommand("setup", "make setup", 0.0, 1.0, 0, ""), *ran]
    failure = Failure(FailureKind.INFRA, stage, "the sandbox was lost")
    page = show(
        write_run([make_record(reward=None, failure=failure, details={}, sandbox_commands=tuple(ran))]), "greet"
    )
    assert [name for name in ("setup", "agent", "verify") if f"COMMANDS OF {name.upper()}" in page] == shown
    assert ("    no exit code, 1.0 s\n" in page) is (stage == "verify")


def test_a_failure_says_why(run: Path) -> None:
    page = show(run, "lost")
    assert "no reward: infra failure at verify" in page
    assert "the sandbox was lost" in page


def test_an_unknown_item_is_an_error_with_the_nearest(run: Path) -> None:
    assert "unknown item 'gret'" in show(run, "gret", code=2)
    assert "no rollout of lost fits the filters" in show(run, "lost", "--solved", code=2)
    assert "does not exist" in show(run / "none", code=2)


def test_an_unknown_rollout_of_an_item_is_an_error_with_their_number(run: Path) -> None:
    page = show(run, "greet/9", code=2)
    assert f"unknown rollout 'greet/9' of {run} (rollouts of 'greet': 2, numbered 0 to 1)" in page


def test_programs_get_json(run: Path) -> None:
    whole = json.loads(show(run, "--json"))
    assert (whole["rollouts"], whole["scored"], whole["solved"]) == (4, 3, 1)
    assert whole["pass_at_k"] == {"1": 0.25, "2": 1.0}
    assert [row["item_id"] for row in whole["rows"]] == ["greet", "greet", "hard", "lost"]
    assert "offset" not in whole["rows"][0]
    assert whole["rows"][2]["tools"]["patch"]["failed"] == {"invalid_arguments": 1}
    (record,) = json.loads(show(run, "lost", "--json"))
    assert record["failure"]["kind"] == "infra"
    assert [tool["tool"] for tool in json.loads(show(run, "--tools", "--json"))] == ["patch", "terminal"]
    terminal = json.loads(show(run, "--tools", "--json"))[1]
    assert (terminal["failures"], terminal["exits"]) == (0, {"2": 3})
    greet = json.loads(show(run, "--items", "--json"))[0]
    assert (greet["rollouts"], greet["pass_at_k"]) == (2, {"1": 0.5, "2": 1.0})


def test_long_texts_are_cut_unless_all_is_asked_for(make_record: Any, write_run: Any) -> None:
    text = "\n".join(f"line {number}" for number in range(500)) + "y" * 10_000
    run = write_run([make_record(details={"output": text})])
    page = show(run, "greet")
    assert "lines left out, --full shows them" in page
    assert "characters left out" in page
    assert "line 250" not in page
    assert "line 250\n" in show(run, "greet", "--full")


def hostile_record(make_record: Any) -> Any:
    """A record with hostile text wherever a model, a sandbox or a dataset can write."""
    record = make_record(HOSTILE)
    messages: list[Any] = [{"role": "user", "content": HOSTILE}]
    for message in record.messages[2:]:
        messages.append({**message, "content": HOSTILE, "reasoning_content": HOSTILE})
    function = {"name": HOSTILE, "arguments": json.dumps({"command": HOSTILE, "other": HOSTILE, HOSTILE: 1})}
    messages[1]["tool_calls"] = [
        {"id": HOSTILE, "function": function},
        {"function": {"name": "x", "arguments": HOSTILE}},
    ]
    messages.append({"role": HOSTILE, "content": [{"type": "text", "text": HOSTILE}]})
    messages.append({"role": "tool", "tool_call_id": "c", "content": json.dumps({HOSTILE: HOSTILE * 9})})
    (call,), (ran,) = record.calls, record.sandbox_commands
    texts = dict.fromkeys(("trajectory_id", "group", "agent", "backend", "model", "environment", "isolation"), HOSTILE)
    return dataclasses.replace(
        record,
        messages=messages,
        calls=(dataclasses.replace(call, name=HOSTILE, message=2),),
        sandbox_commands=(dataclasses.replace(ran, command=HOSTILE, output=HOSTILE),),
        details={HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]},
        **texts,
    )


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("options", [[], ["--items"], ["--tools"], ["--report"], [HOSTILE], ["--json"], ["none"]])
def test_a_terminal_obeys_nothing_of_a_record(
    make_record: Any, write_run: Any, options: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    options = [text.encode("utf-8", "replace").decode() for text in options]
    run = write_run([hostile_record(make_record)])
    result = CliRunner().invoke(main, ["show", str(run), *options], color=terminal)
    page = result.output
    for style in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;7m", "\x1b[2;3m"):
        page = page.replace(style, "")
    assert "owned" in page
    obeyed = [character for character in page if not character.isprintable() and character not in "\n"]
    coloured = [part for part in page.split("\x1b[")[1:] if not part[:8].split("m")[0].replace(";", "").isdigit()]
    assert not coloured
    assert set(obeyed) <= ({"\x1b"} if terminal else set())
    assert terminal or "[bold red]x[/bold red]" in page
    assert "http://e" in page
    assert "😄" not in page


def test_a_run_without_rewards_is_not_called_unscored(make_record: Any, write_run: Any) -> None:
    given = {"reward": None, "failure": None, "details": {}}
    lost = make_record("lost", reward=None)
    run = write_run([make_record(**given), make_record(index=1, **given), lost], "prompts")
    page = show(run)
    assert "3 rollouts of 2 items: 2 finished; the environment gives no rewards" in page
    assert "scored" not in page
    assert "cost: $0.0600\n" in page
    assert show(run, "--items").splitlines()[-2].split()[:4] == ["greet", "-", "2", "2"]
    assert "finished; the environment gives no rewards · stopped: finished · 2 turns" in show(run, "greet/0")
    assert "no reward: infra failure at verify" in show(run, "lost")


def test_a_summary_is_named(make_record: Any, write_run: Any) -> None:
    page = show(write_run([summarised(make_record())]), "greet/0")
    assert "TURN 2: SUMMARY" in page
    assert page.index("TURN 2: SUMMARY") < page.index("I looked.") < page.index("TURN 3")


def test_what_was_refused_is_shown(make_record: Any, write_run: Any) -> None:
    traffic = {"reached": {"pypi.org:443": 3}, "refused": {f"h{number}.org:443": 1 for number in range(7)}}
    traffic |= {"failed": 2, "bytes_sent": 1200, "bytes_received": 5_100_000}
    nothing = {"reached": {}, "refused": {}, "failed": 0, "bytes_sent": 0, "bytes_received": 0}
    run = write_run([make_record(network={"agent": traffic, "verify": nothing})])
    page = show(run, "greet/0")
    assert "NETWORK\n  agent: reached pypi.org:443 (3); 1.2k bytes sent, 5.1M received, 2 failed\n" in page
    assert "    refused h0.org:443 (1), h1.org:443 (1)" in page and "and 2 more\n" in page and "h6.org" not in page
    assert "verify:" not in page.partition("NETWORK")[2].partition("\n\n")[0]
    assert "h6.org:443 (1)" in show(run, "greet/0", "--full")
    assert "NETWORK" not in show(write_run([make_record(network={"verify": nothing})]), "greet/0")
    assert "NETWORK" not in show(write_run([make_record()]), "greet/0")
