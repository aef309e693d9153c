"""Each format's rows, value by value, and read back by the models of other tools where they are installed."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import FailureKind, UsageError
from hermes_core.export.exporting import export_run
from hermes_core.export.selection import ExportFilters
from hermes_core.records.record import Record
from hermes_core.records.tokens import TokenSequence
from tests.export.conftest import SEQUENCE, MakeRun, failed, rollout, tool


def exported(run: Path, to: str, **options: Any) -> list[dict[str, Any]]:
    out = run.parent / f"{run.name}-{to}"
    export_run(run, to, out, **options)
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def test_openai_rows_are_what_went_over_the_wire(make_run: MakeRun) -> None:
    record = rollout()
    (row,) = exported(make_run([record]), "openai")
    assert row["messages"] == list(record.messages)
    assert row["tools"] == list(record.tool_schemas)
    assert isinstance(row["messages"][2]["tool_calls"][0]["function"]["arguments"], str)
    assert {key: row[key] for key in ("trajectory_id", "item_id", "reward", "model", "stop_reason", "failure")} == {
        "trajectory_id": "greet-0",
        "item_id": "greet",
        "reward": 1.0,
        "model": "tiny",
        "stop_reason": "finished",
        "failure": None,
    }


def test_trl_rows_have_arguments_as_objects_and_tools_as_text(make_run: MakeRun) -> None:
    record = rollout()
    (row,) = exported(make_run([record]), "trl")
    calls = row["messages"][2]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"command": "echo Done."}] * 2
    assert json.loads(row["tools"]) == list(record.tool_schemas)
    assert row["messages"][2]["reasoning_content"] == "Hm."


@pytest.mark.parametrize("to", ["openai", "trl"])
def test_a_conversation_that_was_summarised_is_a_row_for_each_part_that_the_model_saw(
    make_run: MakeRun, to: str
) -> None:
    record = rollout()
    head, last = list(record.messages[:5]), record.messages[5]
    request, summary, begun = ({"role": role, "content": role} for role in ("user", "assistant", "user"))
    first, second = record.turns
    whole = replace(
        record,
        messages=[*head, request, summary, begun, last],
        turns=(first, replace(second, message=6, compacted=True), replace(second, message=8)),
    )
    ended = replace(whole, rollout_index=1, messages=whole.messages[:8], turns=whole.turns[:2])
    rows = [[message["content"] for message in row["messages"]] for row in exported(make_run([whole, ended]), to)]
    told = [message["content"] for message in (*head, request, summary)]
    assert rows == [told, ["Be brief.", "user", "Done."], told]


def test_tokens_are_those_of_the_record(make_run: MakeRun) -> None:
    second = TokenSequence.of([9, 8], [-100, 8], [1.0, -2.0])
    run = make_run([rollout(sequences=(SEQUENCE, second)), rollout(index=1, sequences=())])
    rows = exported(run, "tokens")
    assert [(row["trajectory_id"], row["sequence"]) for row in rows] == [("greet-0", 0), ("greet-0", 1)]
    assert rows[0]["input_ids"] == SEQUENCE.tokens.tolist()
    assert rows[0]["labels"] == SEQUENCE.masks.tolist()
    assert rows[0]["logprobs"] == [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -0.125, -1.5]
    assert rows[0]["attention_mask"] == [1] * 9


SYSTEM = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
    "You may call one or more functions to assist with the user query. If available tools are not relevant in assisting"
    " with user query, just respond in natural conversational language. Don't make assumptions about what values to "
    "plug into functions. After calling & executing the functions, you will be provided with function results within "
    "<tool_response> </tool_response> XML tags. Here are the available tools:\n<tools>\n"
    '[{"name": "bash", "description": "Use bash", "parameters": {"type": "object", "properties": {"command": '
    '{"type": "string"}}, "required": ["command"]}, "required": null}, {"name": "read", "description": "Use read", '
    '"parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}, '
    '"required": null}]\n</tools>\n'
    "For each function call return a JSON object, with the following pydantic model json schema for each:\n"
    "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'}, "
    "'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}\n"
    "Each function call should be enclosed within <tool_call> </tool_call> XML tags.\n"
    "Example:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"
)

CALL = '<tool_call>\n{"name": "%s", "arguments": {"command": "echo Done."}}\n</tool_call>'
RESULT = '<tool_response>\n{"tool_call_id": "call_greet_0_%d", "name": "%s", "content": %s}\n</tool_response>'


def test_sharegpt_rows_are_those_of_the_batch_runner(make_run: MakeRun) -> None:
    quiet = rollout("wave", said="Waved.", tool_schemas=[], calls=())
    quiet.messages[2:5] = []
    rows = exported(make_run([rollout(), quiet]), "sharegpt")
    assert rows[0] == {
        "prompt_index": 0,
        "conversations": [
            {"from": "system", "value": SYSTEM},
            {"from": "human", "value": "Do greet é."},
            {
                "from": "gpt",
                "value": f"<think>\nHm.\n</think>\nI look.\n{CALL % 'bash'}\n{CALL % 'read'}",
            },
            {
                "from": "tool",
                "value": "\n".join(
                    [
                        RESULT % (0, "bash", '{"output": "hi", "exit_code": 0}'),
                        RESULT % (1, "read", '{"error": "no file"}'),
                    ]
                ),
            },
            {"from": "gpt", "value": "<think>\n</think>\nDone."},
        ],
        "metadata": {"batch_num": 0, "timestamp": "1970-01-01T00:16:50+00:00", "model": "tiny"},
        "completed": True,
        "partial": False,
        "api_calls": 2,
        "toolsets_used": [],
        "tool_stats": {
            "bash": {"count": 1, "success": 1, "failure": 0},
            "read": {"count": 1, "success": 0, "failure": 1},
        },
        "tool_error_counts": {"bash": 0, "read": 1},
    }
    assert rows[1]["prompt_index"] == 1
    assert rows[1]["tool_stats"].keys() == {"bash", "read"}, "every row has all tools"
    assert "<tools>\n[]\n</tools>" in rows[1]["conversations"][0]["value"]


def group(*rewards: float | None, item: str = "greet") -> list[Record]:
    return [rollout(item, index, said=f"Answer {index}.", reward=reward) for index, reward in enumerate(rewards)]


def test_pairs_are_the_best_with_the_worst_of_a_group(make_run: MakeRun) -> None:
    other = rollout("wave", 0, reward=0.0)
    rows = exported(make_run([*group(0.0, 1.0, 0.5, 0.25, None), other]), "preference")
    assert [(row["chosen_id"], row["rejected_id"]) for row in rows] == [
        ("greet-1", "greet-0"),
        ("greet-2", "greet-3"),
    ]
    assert (rows[0]["score_chosen"], rows[0]["score_rejected"]) == (1.0, 0.0)
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["chosen"][-1]["content"] == "Answer 1."
    assert rows[0]["rejected"][-1]["content"] == "Answer 0."
    assert rows[0]["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"command": "echo Answer 1."}


def test_conditions_of_rewards_and_of_items_are_about_pairs(make_run: MakeRun) -> None:
    run = make_run([*group(0.0, 1.0, 0.5, 0.25), *group(0.0, 0.5, item="wave")])
    solved = exported(run, "preference", filters=ExportFilters(solved=True))
    assert [row["chosen_id"] for row in solved] == ["greet-1"]
    export_run(run, "preference", run.parent / "one", filters=ExportFilters(per_item=1))
    rows = (run.parent / "one" / "train.jsonl").read_text().splitlines()
    assert [json.loads(row)["chosen_id"] for row in rows] == ["greet-1", "wave-1"]


def test_rollouts_with_other_prompts_are_no_pair(make_run: MakeRun) -> None:
    better, worse = group(1.0, 0.0)
    worse.messages[1]["content"] = "Something else."
    run = make_run([better, worse])
    with pytest.raises(UsageError, match=r"2 in no pair \(a pair needs two rollouts of a group with the same prompt"):
        export_run(run, "preference", run.parent / "out")


def test_prompts_that_differ_by_the_slot_alone_are_a_pair_with_the_prompt_of_the_better(make_run: MakeRun) -> None:
    """Programs write the directory of their slot and their own folder into their prompts."""
    records = [
        rollout(index=index, said=f"In /data/slot_{slot}/x, not /data/slot_{slot}1.", reward=reward)
        for index, (slot, reward) in enumerate([(3, 1.0), (7, 0.0)])
    ]
    for record, slot in zip(records, (3, 7), strict=True):
        record.messages[0]["content"] = (
            f"You are in /data/slot_{slot}/repo; notes: /data/slot_{slot}/.agent-aB12{slot}z."
        )
        record.messages[3]["content"] = f"/data/slot_{slot}/.agent-aB12{slot}z/notes and .agent-other"
    (row,) = exported(make_run(records), "preference")
    assert row["prompt"][0]["content"] == "You are in /data/slot_3/repo; notes: /data/slot_3/.agent-aB123z."
    assert row["chosen"][-1]["content"] == "In /data/slot_3/x, not /data/slot_31."
    assert row["rejected"][-1]["content"] == "In /data/slot_3/x, not /data/slot_71."
    assert row["rejected"][1]["content"] == "/data/slot_3/.agent-aB123z/notes and .agent-other"
    assert row["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {
        "command": "echo In /data/slot_3/x, not /data/slot_71."
    }


def test_only_rollouts_in_pairs_are_counted(make_run: MakeRun) -> None:
    run = make_run([*group(0.0, 1.0, 0.5), rollout("wave")])
    done = export_run(run, "preference", run.parent / "out")
    assert (done.rows, done.rollouts, done.items, done.left_out) == (1, 2, 1, {"in no pair": 2})
    assert done.tools["bash"].calls == 2


@pytest.fixture
def atif() -> Any:
    return pytest.importorskip("atif", reason="atif is not installed: `make setup` installs it")


def test_atif_files_are_read_by_its_model(make_run: MakeRun, atif: Any) -> None:
    malformed = rollout("odd")
    malformed.messages[2]["tool_calls"][0]["function"]["arguments"] = "{not json"
    run = make_run([rollout(), malformed, failed("lost"), rollout("old", calls=(), turns=(), sequences=())])
    done = export_run(run, "atif", run.parent / "atif")
    assert (done.rows, done.left_out) == (3, {"no messages": 1})
    for path in (run.parent / "atif").glob("*.json"):
        text = path.read_text()
        assert atif.Trajectory.model_validate_json(text).to_json_dict() == json.loads(text), "nothing is lost"
    whole = atif.Trajectory.model_validate_json((run.parent / "atif" / "greet-0.json").read_text())
    assert [step.source for step in whole.steps] == ["system", "user", "agent", "agent"]
    assert whole.steps[2].timestamp == "1970-01-01T00:16:41+00:00"
    assert [result.source_call_id for result in whole.steps[2].observation.results] == [
        call.tool_call_id for call in whole.steps[2].tool_calls
    ]
    assert whole.steps[2].observation.results[1].extra["error"] == {"kind": "failed", "message": "no file"}
    first, second = (step.metrics for step in whole.steps[2:])
    assert (first.prompt_token_ids, first.completion_token_ids, first.logprobs) == ([1, 2, 3], [10, 11], [-0.5, -0.25])
    assert (second.prompt_token_ids, second.completion_token_ids) == ([1, 2, 3, 10, 11, 4, 5], [12, 13])
    assert (first.prompt_tokens, first.completion_tokens, first.cost_usd) == (3, 2, 0.25)
    assert whole.extra["reward"] == 1.0
    odd = json.loads((run.parent / "atif" / "odd-0.json").read_text())["steps"][2]["tool_calls"][0]
    assert (odd["arguments"], odd["extra"]) == ({}, {"arguments": "{not json"})


def test_tokens_that_do_not_fit_the_answers_are_not_guessed(make_run: MakeRun) -> None:
    run = make_run([rollout(sequences=(TokenSequence.of([1, 2], [-100, 2], [1.0, -1.0]),))])
    export_run(run, "atif", run.parent / "atif")
    steps = json.loads((run.parent / "atif" / "greet-0.json").read_text())["steps"]
    assert all("completion_token_ids" not in step.get("metrics", {}) for step in steps)


def test_tokens_stand_at_their_answers_in_whatever_order_the_sequences_are(make_run: MakeRun) -> None:
    later = TokenSequence.of(SEQUENCE.tokens, [*[-100] * 7, *SEQUENCE.masks[7:]], [*[1.0] * 7, *SEQUENCE.logprobs[7:]])
    first = TokenSequence.of(SEQUENCE.tokens[:5], SEQUENCE.masks[:5], SEQUENCE.logprobs[:5])
    run = make_run([rollout(sequences=(later, first))])
    export_run(run, "atif", run.parent / "atif")
    steps = json.loads((run.parent / "atif" / "greet-0.json").read_text())["steps"]
    assert [step["metrics"]["completion_token_ids"] for step in steps[2:]] == [[10, 11], [12, 13]]


def test_a_job_of_harbor_has_a_trial_for_each_rollout(make_run: MakeRun) -> None:
    strange = rollout("../a b", patch="+ x\n")
    run = make_run([rollout(), rollout(index=1, reward=0.0), failed("lost"), strange, rollout("..-a-b", reward=0.5)])
    job = run.parent / "job"
    done = export_run(run, "harbor", job)
    assert done.rows == 5
    trials = sorted(path.name for path in job.iterdir() if path.is_dir())
    assert trials[0].startswith("a-b-")
    assert trials[1:] == ["a-b__0", "greet__0", "greet__1", "lost__0"]
    assert (job / "greet__0" / "verifier" / "reward.txt").read_text() == "1.0\n"
    assert "make test\n1 passed" in (job / "greet__0" / "verifier" / "test-stdout.txt").read_text()
    lost = json.loads((job / "lost__0" / "result.json").read_text())
    assert lost["exception_info"]["exception_type"] == "InfraError"
    assert lost["verifier_result"] is None
    assert not (job / "lost__0" / "verifier" / "reward.txt").exists()
    assert (job / "a-b__0" / "agent" / "patch.diff").read_text() == "+ x\n"
    stats = json.loads((job / "result.json").read_text())["stats"]
    assert (stats["n_completed_trials"], stats["n_errored_trials"]) == (5, 1)
    assert stats["evals"]["model__tiny__tasks"]["reward_stats"]["reward"]["0.0"] == ["greet__1"]


def test_a_rollout_whose_agent_never_began_is_in_the_evaluation_of_the_others(make_run: MakeRun) -> None:
    configuration = {"environment": "tasks", "agent": "model", "agent_settings": {"model": "tiny"}}
    run = make_run([rollout(), failed("lost")], configuration=configuration)
    export_run(run, "harbor", run.parent / "job")
    evals = json.loads((run.parent / "job" / "result.json").read_text())["stats"]["evals"]
    assert {name: (found["n_trials"], found["n_errors"]) for name, found in evals.items()} == {
        "model__tiny__tasks": (2, 1)
    }


def test_a_log_of_inspect_has_the_chosen_rollouts(make_run: MakeRun) -> None:
    run = make_run([rollout(), rollout(index=1, reward=0.0), failed("lost")])
    done = export_run(run, "eval", run.parent / "eval", filters=ExportFilters(failures=("none",)))
    (log,) = (run.parent / "eval").glob("*.eval")
    assert [path.name for path in (run.parent / "eval").iterdir() if path.name not in (log.name, "README.md")] == []
    with zipfile.ZipFile(log) as members:
        header = json.loads(members.read("header.json"))
        summaries = json.loads(members.read("summaries.json"))
    assert (header["status"], header["results"]["total_samples"], done.rows) == ("success", 2, 2)
    assert [(sample["id"], sample["epoch"]) for sample in summaries] == [("greet", 1), ("greet", 2)]


TABLES = ("openai", "trl", "sharegpt", "tokens", "preference")


def ten_tools() -> list[Record]:
    """A rollout for each of ten tools, each with a parameter of its own, and one without tools; all in one group."""
    records = []
    for number in range(10):
        name, key = f"tool_{number}", f"key_{number}"
        record = rollout("many", number, said=f"Answer {number}.", reward=float(number % 2))
        call = record.messages[2]["tool_calls"][0]
        call["function"].update(name=name, arguments=json.dumps({key: [number, {"deep": number}]}))
        calls = (replace(record.calls[0], name=name), record.calls[1])
        records.append(replace(record, tool_schemas=[tool(name, key)], calls=calls))
    return [*records, rollout("plain", tool_schemas=[])]


@pytest.fixture
def without_nulls() -> Callable[[Any], Any]:
    """Removes keys without a value: a table has every key in every row."""

    def remove(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: remove(part) for key, part in value.items() if part is not None}
        return [remove(part) for part in value] if isinstance(value, list) else value

    return remove


@pytest.mark.parametrize("to", TABLES)
def test_parquet_holds_the_rows_of_jsonl(make_run: MakeRun, to: str, without_nulls: Callable[[Any], Any]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = make_run(ten_tools())
    rows = exported(run, to)
    export_run(run, to, run.parent / "parquet", parquet=True)
    table = parquet.read_table(run.parent / "parquet" / "train.parquet")
    assert table.schema.names == list(rows[0])

    def decoded(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        if kind == "json":
            return json.loads(value)
        if isinstance(kind, list):
            return [decoded(part, kind[0]) for part in value]
        return {key: decoded(value[key], part) for key, part in kind.items()} if isinstance(kind, dict) else value

    from hermes_core.export.formats import FORMATS

    columns = FORMATS[to].columns
    assert columns is not None
    read = [{name: decoded(row[name], kind) for name, kind in columns.items()} for row in table.to_pylist()]
    assert without_nulls(read) == without_nulls(rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", TABLES)
@pytest.mark.parametrize("parquet", [False, True])
def test_datasets_reads_rows_of_ten_tools(
    make_run: MakeRun, datasets_extra: Any, to: str, parquet: bool, without_nulls: Callable[[Any], Any]
) -> None:
    run = make_run(ten_tools())
    rows = exported(run, to)
    export_run(run, to, run.parent / "out", parquet=parquet)
    loaded = datasets_extra.load_dataset(str(run.parent / "out"), split="train", cache_dir=str(run.parent / "cache"))
    read = list(loaded)
    if to == "sharegpt" and not parquet:  # of JSON, it takes every text that looks like a time for one
        for row, expected in zip(read, rows, strict=True):
            row["metadata"]["timestamp"] = expected["metadata"]["timestamp"]
    assert without_nulls(read) == without_nulls(rows)


def test_failures_are_exported_where_they_can_be_told(make_run: MakeRun) -> None:
    broken = replace(rollout("half"), reward=None, failure=failed("x", kind=FailureKind.MODEL).failure)
    run = make_run([rollout(), broken])
    assert [row["item_id"] for row in exported(run, "openai")] == ["greet"]
    (row,) = exported(run, "trl", filters=ExportFilters(failures=("model",)))
    assert (row["item_id"], row["failure"], row["reward"]) == ("half", "model", None)
    assert export_run(run, "atif", run.parent / "atif").rollouts == 2
