"""The record of a rollout: its fields, what is cut, what is redacted, whose doing a failure was."""

import asyncio
import json

import pytest

from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, TurnRecord
from hermes_core.errors import (
    CommandError,
    DatasetError,
    FailureKind,
    InfraError,
    ModelError,
    PolicyError,
    SandboxLost,
    SetupFailed,
    UsageError,
    VerifierError,
)
from hermes_core.records.jsonable import MAX_PATCH, MAX_TEXT, find_changed_fields, json_line, plain
from hermes_core.records.record import record_schema
from hermes_core.records.tokens import SPELT
from hermes_core.rollout.command_log import MOST_COMMANDS
from hermes_core.rollout.trajectory import Trajectory, failure_kind
from hermes_core.runs.group import Rolled


def new(**changes) -> Trajectory:
    return Trajectory("tasks", "item", "item", 0, "model", "local", **changes)


def test_the_record_has_exactly_the_fields_of_the_format():
    record = new().to_record().to_json()
    assert set(record) == set(record_schema()["required"])
    assert list(record["timings"]) == ["acquire_s", "setup_s", "agent_s", "verify_s", "release_s"]
    assert (record["sequences"], record["stop_reason"]) == ([], None)
    assert json.loads(json_line(record)) == record


def test_ids_are_unique():
    assert len({new().trajectory_id for _ in range(1000)}) == 1000


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(VerifierError, match="finite"):
        new().score(reward, {})


def test_details_become_plain_json():
    class Odd:
        def __str__(self) -> str:
            return "odd"

    nested: list = []
    nested.append(nested)
    details = {"nan": float("nan"), 1: (1, 2), "set": {3}, "bytes": b"x", "odd": Odd(), "loop": nested}
    details["\ud800"] = "\ud800"
    trajectory = new()
    trajectory.score(1, details)
    got = json.loads(json_line(trajectory.to_record().to_json()))["details"]
    assert (got["nan"], got["1"], got["set"], got["bytes"], got["odd"]) == ("nan", [1, 2], [3], "b'x'", "odd")


def test_overlong_texts_are_cut_and_named():
    trajectory = new()
    trajectory.result.messages.append({"role": "tool", "content": "a" * MAX_TEXT + "b" * MAX_TEXT})
    record = trajectory.to_record().to_json()
    text = record["messages"][0]["content"]
    assert len(text) < MAX_TEXT + 100
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert record["cut"] == [f"messages.0.content: {2 * MAX_TEXT} characters, {MAX_TEXT} kept"]


def test_the_short_fields_of_an_item_are_kept():
    loop: list = []
    loop.append(loop)
    item = {"id": "a", "n": 1, "tests": ["t"] * 10, "text": "x" * 5000, "many": ["x"] * 5000, "loop": loop, "é": None}
    assert new(item=item).to_record().item == {"id": "a", "n": 1, "tests": ["t"] * 10, "é": None}
    many = new(item={f"field {number}": "x" * 3000 for number in range(100)}).to_record()
    assert list(many.item) == [f"field {number}" for number in range(10)]


def test_an_item_s_fields_that_are_not_as_a_record_has_them_are_named():
    def hide(text: str) -> str:
        return text.replace("sekret", "***")

    item = {"id": "a", "n": 1.5, "tests": ("t", {"u": None}), "key": "a sekret", "odd": object(), "names": {"x", "y"}}
    kept = json.loads(new(item=item).to_record(hide).line())["item"]
    assert find_changed_fields(kept, {**item, "odd": object(), "new": 1, "text": "x" * 5000}, hide) == []
    assert find_changed_fields(kept, {**item, "tests": ["t", {"u": 0}], "key": "another sekret"}, hide) == [
        "tests",
        "key",
    ]
    assert find_changed_fields(kept, {"id": "a", "n": "x" * 5000}, hide) == ["n", "tests", "key", "odd", "names"]


def test_what_the_model_and_the_hooks_wrote_is_redacted():
    trajectory = new(item={"id": "the sekret"})
    error = CallError(CallErrorKind.FAILED, "no sekret")
    trajectory.result.calls.append(CallRecord(0, 1, "sekret", "sekret", '{"key": "sekret"}', error=error))
    trajectory.result.turns.append(TurnRecord(0, "sekret", sampling={"key": "sekret"}))
    trajectory.commands._add("setup", "echo sekret", 0.0, (0, b"sekret", 0))
    assert b"sekret" in trajectory.to_record().line()
    assert b"sekret" not in trajectory.to_record(lambda text: text.replace("sekret", "***")).line()


def test_commands_that_were_left_out_are_named():
    trajectory = new()
    for _ in range(MOST_COMMANDS + 5):
        trajectory.commands._add("setup", "true", 0.0, (0, b"", 0))
    record = trajectory.to_record()
    assert (len(record.sandbox_commands), record.cut) == (MOST_COMMANDS, ("sandbox_commands: 5 left out",))


def test_half_a_patch_is_never_kept():
    record = new(patch="x" * (MAX_PATCH + 1)).to_record().to_json()
    assert record["patch"] is None
    assert "patch" in record["cut"][0]
    assert new(patch="x" * MAX_PATCH).to_record().to_json()["patch"] == "x" * MAX_PATCH


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_what_nests_without_end_is_cut(wrap):
    """Its text nests as deep, and took the interpreter's recursion limit: no record at all."""
    value = 1
    for _ in range(5000):
        value = wrap(value)
    text = json.dumps(plain(value))
    assert "nested more than" in text and len(text) < 1000


def test_secrets_are_redacted_everywhere():
    trajectory = new(patch="+ sekret")
    trajectory.result.messages.append({"role": "user", "content": ["sekret", {"text": "my sekret"}]})
    trajectory.score(1.0, {"output": "sekret", "sekret.py": {"sekret": "x" * (MAX_TEXT + 1)}})
    with trajectory.records_failure(), trajectory.stage("verify"):
        raise VerifierError("it said sekret")
    record = trajectory.to_record(lambda text: text.replace("sekret", "***")).to_json()
    assert "sekret" not in json_line(record).decode()
    assert record["failure"]["message"] == "it said ***"


@pytest.mark.parametrize(
    ("error", "stage", "kind"),
    [
        (SandboxLost("x"), "setup", FailureKind.INFRA),
        (SandboxLost("x"), "agent", FailureKind.INFRA),
        (SandboxLost("x"), "verify", FailureKind.INFRA),
        (OSError("x"), "acquire", FailureKind.INFRA),
        (RuntimeError("x"), "setup", FailureKind.SETUP),
        (PolicyError("x"), "setup", FailureKind.SETUP),
        (CommandError("x"), "setup", FailureKind.SETUP),
        (ModelError("x"), "agent", FailureKind.MODEL),
        (RuntimeError("x"), "agent", FailureKind.MODEL),
        (SetupFailed("x"), "agent", FailureKind.SETUP),
        (DatasetError("x"), "agent", FailureKind.SETUP),
        (RuntimeError("x"), "verify", FailureKind.VERIFIER),
        (VerifierError("x"), "verify", FailureKind.VERIFIER),
    ],
)
def test_whose_doing_a_failure_was(error, stage, kind):
    assert failure_kind(error, stage) is kind


def test_a_failure_says_where_and_takes_the_reward_away():
    trajectory = new()
    with trajectory.records_failure(), trajectory.stage("verify"):
        trajectory.score(1.0, {})
        raise VerifierError("broken", hint="fix it")
    record = trajectory.to_record().to_json()
    assert record["reward"] is None
    assert record["failure"] == {"kind": "verifier", "stage": "verify", "message": "broken (fix it)"}


def test_the_stage_that_failed_is_the_innermost_not_the_release_that_follows():
    trajectory = new()
    with trajectory.records_failure():
        try:
            with trajectory.stage("setup"):
                raise ValueError("no")
        finally:
            with trajectory.measure("release"):
                pass
    assert (trajectory.failure.kind, trajectory.failure.stage) == (FailureKind.SETUP, "setup")
    assert trajectory.failure.message == "ValueError: no"


def test_an_interruption_leaves_no_record_without_reward_and_failure():
    trajectory = new()
    with pytest.raises(KeyboardInterrupt), trajectory.records_failure(), trajectory.stage("agent"):
        raise KeyboardInterrupt
    assert (trajectory.failure.kind, trajectory.failure.message) == (
        FailureKind.CANCELLED,
        "the rollout was ended by KeyboardInterrupt",
    )


def test_an_infrastructure_failure_wins_over_what_a_hook_made_of_it():
    trajectory = new()
    lost = InfraError("gone")
    with trajectory.records_failure(), trajectory.stage("setup"):
        trajectory.note_infra(lost)
        raise RuntimeError("can't set up")
    assert (trajectory.failure.kind, trajectory.failure.message) == (FailureKind.INFRA, "gone")


def test_wrong_use_met_while_acquiring_is_nothing_of_this_rollout():
    trajectory = new()
    with pytest.raises(UsageError), trajectory.records_failure(), trajectory.stage("acquire"):
        raise UsageError("no such profile")
    assert (trajectory.reward, trajectory.failure.kind) == (None, FailureKind.CANCELLED), "it was not begun"


def test_a_score_stands_when_the_rollout_is_cancelled_after_it():
    trajectory = new()
    with pytest.raises(asyncio.CancelledError), trajectory.records_failure():
        with trajectory.stage("verify"):
            trajectory.score(1.0, {})
        raise asyncio.CancelledError
    assert (trajectory.reward, trajectory.failure) == (1.0, None)


def test_beginning_again_forgets_the_attempt_and_counts_it():
    trajectory = new(patch="x")
    with trajectory.records_failure(), trajectory.stage("agent"):
        trajectory.result.messages.append({"role": "user", "content": "x"})
        raise InfraError("gone")
    trajectory.begin_again()
    record = trajectory.to_record().to_json()
    assert (record["failure"], record["messages"], record["patch"]) == (None, [], None)
    assert (record["details"], record["infra_retries"]) == ({}, 1)
    assert record["timings"]["agent_s"] is None


def node(tokens, masks, logprobs):
    return {"nodes": [{"tokens": tokens, "masked_tokens": masks, "logprobs": logprobs}]}


def test_the_tokens_of_a_token_exact_server_are_kept_as_they_are():
    trajectory = new()
    trajectory.result.managed_state = node([5, 6, 7], [-100, 6, 7], [1.0, -0.5, -0.0])
    record = trajectory.to_record().to_json()
    assert record["sequences"] == [{"tokens": [5, 6, 7], "masks": [-100, 6, 7], "logprobs": [1.0, -0.5, 0.0]}]
    assert record["tokens_refused"] is None


def test_tokens_that_spell_a_secret_are_not_kept_and_the_record_says_so():
    secret = "sk-0123456789"

    def record(said):
        trajectory = new(item={"note": secret})
        trajectory.result.messages.append({"role": "assistant", "content": said})
        trajectory.result.managed_state = node([5, 6, 7], [-100, 6, 7], [1.0, -0.5, -0.5])
        return trajectory.to_record(lambda text: text.replace(secret, "[redacted: KEY]"))

    kept = record(f"It is {secret}.")
    assert (kept.sequences, kept.tokens_refused) == ((), SPELT)
    assert Rolled.of(kept, exact=True).refused == f"tokens: {SPELT}", "so no trainer gets them"
    assert len(record("It is.").sequences) == 1, "a secret that the model never saw takes no tokens away"


def test_every_sequence_of_a_conversation_that_was_split_is_kept():
    trajectory = new()
    nodes = [*node([5, 6], [-100, 6], [1.0, -0.5])["nodes"], *node([7, 8], [-100, 8], [1.0, -1.5])["nodes"]]
    trajectory.result.managed_state = {"nodes": nodes}
    record = trajectory.to_record().to_json()
    assert [sequence["tokens"] for sequence in record["sequences"]] == [[5, 6], [7, 8]]
    assert [sequence["logprobs"] for sequence in record["sequences"]] == [[1.0, -0.5], [1.0, -1.5]]


def test_sequences_that_are_not_the_agents_are_left_out_and_forks_counted():
    trajectory = new()
    own, other = node([5, 6], [-100, 6], [1.0, -0.5])["nodes"], node([7, 8], [-100, 9], [1.0, -1.5])["nodes"]
    nodes = [{**own[0], "metadata": {"own": True}}, {**other[0], "metadata": {"own": False}}]
    trajectory.result.managed_state = {"nodes": nodes, "forks": {"parallel": 1}}
    record = trajectory.to_record()
    assert [sequence.tokens.tolist() for sequence in record.sequences] == [[5, 6]]
    assert (record.tokens_refused, record.forks) == (None, {"parallel": 1})
    trajectory.result.managed_state = {"nodes": nodes[1:], "forks": {"parallel": 1}}
    record = trajectory.to_record()
    assert (record.sequences, record.forks) == ((), {"parallel": 1})
    assert record.tokens_refused == "no conversation begins with the text of the task"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"nodes": []}, "kept no sequence"),
        ({}, "kept no sequence"),
        ({"nodes": [*node([1], [1], [-1.0])["nodes"], *node([1], [1], [2.0])["nodes"]]}, "sequence 1: the logprob"),
        (node([1, 2], [1], [-1.0, -1.0]), "not one sequence"),
        (node([1, 2], [-100, -100], [1.0, 1.0]), "no token is the model's"),
        (node([1, 2], [-100, 3], [1.0, -1.0]), "mask 1 is 3, and the token there is 2"),
        (node([1, 2], [-100, 2], [1.0, 1.0]), "logprob of token 1 is 1.0"),
        (node([1, 2], [-100, 2], [1.0, float("nan")]), "logprob of token 1 is nan"),
        (node([1, 2], [-100, 2], [1.0, None]), "not all numbers"),
        (node([1, 2**40], [-100, 2**40], [1.0, -1.0]), "not all numbers"),
    ],
)
def test_tokens_that_cannot_be_trained_on_are_refused_and_it_says_why(state, reason):
    trajectory = new()
    trajectory.result.managed_state = state
    record = trajectory.to_record().to_json()
    assert record["sequences"] == []
    assert reason in record["tokens_refused"]
