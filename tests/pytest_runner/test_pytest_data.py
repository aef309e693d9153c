"""What a test process sends to its supervisor, and that one to the driver, is data: nothing of it breaks either."""

import json
import math
import signal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_core.errors import Disturbed, VerifierError
from hermes_core.pytest_runner.report import MISSING, Results, _disk_is_full
from hermes_core.pytest_runner.run import ReportStatus, _report
from hermes_core.sandbox.commands import CommandResult

IDS = ["t.py::a", "t.py::b", "t.py::c"]
BEGUN = b'{"supervisor": 7}\n'
KNOWN = {"passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"}

ODD = [
    *("", "zz", "pf", "P", "\ud800", "-", "p" * 5000, None, True, 1.0, [], ["p"], {"p": "p"}, -1, 3, 1 << 70, math.nan),
    json.loads("[" * 200 + "]" * 200),
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
SENT = ["index", "outcome", "where", "text", "pytest", "status", "broken"]
REPORTED = [
    "report",
    "outcomes",
    "texts",
    "output",
    "pytest_status",
    "duration_s",
    "exit_code",
    "oom_kills",
    "disk_full",
]
fields = st.sampled_from([*SENT, *REPORTED, "supervisor"])
events = st.dictionaries(fields, anything | st.sampled_from(["p", "f", 0, 1, "finished", "cut", "ppp"]), max_size=6)
lines = events.map(lambda event: json.dumps(event).encode()) | st.binary(max_size=200)
BOMB = b"[" * 100_000


def finished(codes="ppp", **fields) -> bytes:
    answer = {"report": "finished", "outcomes": codes, "texts": [], "output": "", "pytest": "8", "pytest_status": 0}
    return json.dumps({**answer, "duration_s": 1.0, "exit_code": 0, **fields}).encode() + b"\n"


def reported(stdout: bytes, **how):
    return _report(CommandResult(**{"exit_code": 0, "stdout": stdout, **how}), IDS, "python")


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(lines, max_size=8), st.integers(1, 100))
@example([b"\xff\xfe{}", BOMB, b'{"index":0,"outcome":""}', b'{"index":1,"outcome":"pX"}', b"9" * 5000], 1 << 16)
@example([b'{"index":1e999,"outcome":"p"}', b'{"index":true,"outcome":"p"}', b'{"index":-1,"outcome":"p"}'], 7)
def test_the_supervisor_drops_what_no_reporter_sends(sent, size):
    results = Results(len(IDS))
    data = b"".join(line.replace(b"\n", b" ") + b"\n" for line in sent)
    for begin in range(0, len(data), size):
        results.add(data[begin : begin + size])
    assert len(results.outcomes) == len(IDS)
    assert {*results.outcomes} <= {*"pfesxX", MISSING}
    assert all(len(text) == 2 and all(isinstance(part, str) for part in text) for text in results.texts)
    json.dumps([results.outcomes, results.texts, results.facts])


@pytest.mark.parametrize("index", [0.0, True, "0", -1, 3, 1 << 80, None, [0]])
def test_an_index_that_is_none_counts_for_no_test(index):
    results = Results(3)
    results.add(json.dumps({"index": index, "outcome": "p"}).encode() + b"\n")
    assert results.outcomes == [MISSING] * 3


def test_a_line_without_an_end_is_not_kept_and_the_next_one_counts():
    results = Results(2)
    for _ in range(64):
        results.add(b"x" * (1 << 16))
    assert len(results._lines._partial) <= 1 << 20
    results.add(b'\n{"index":1,"outcome":"p"}\n')
    assert results.outcomes == [MISSING, "p"]


def test_a_flood_is_not_read_to_its_end():
    results = Results(1)
    for _ in range(1025):
        results.add(b"\n" * (1 << 16))
    results.add(b'{"index":0,"outcome":"p"}\n')
    assert results.outcomes == [MISSING]


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(lines, max_size=4), st.booleans())
@example([BOMB], True)
@example([finished("zz")], True)
@example([finished("pp")], True)
@example([finished(["p", "p", "p"])], True)
@example([finished(report="done")], True)
@example([finished(report=[])], True)
@example([finished(texts=[["a"], "bc", [1, 2], None])], True)
@example([finished(duration_s="1", output=1, pytest=[], pytest_status="0")], True)
def test_a_report_is_one_or_is_none(sent, begun):
    try:
        report = reported((BEGUN if begun else b"") + b"\n".join(sent))
    except VerifierError as error:
        assert not begun or b'"broken"' in b"".join(sent) or b'"supervisor"' in b"".join(sent), error
        return
    assert list(report.outcomes) == IDS
    assert {*report.outcomes.values()} <= KNOWN
    assert isinstance(report.output, str)
    assert isinstance(report.duration_s, float)
    assert report.complete or not any(map(report.passed, IDS))


@pytest.mark.parametrize(
    "answer",
    [
        *(finished(codes) for codes in ("", "pp", "pppp", "ppz", "pp\ud800", None, ["p"] * 3, 3)),
        *(finished(report=word) for word in ("no_report", "", None, 1, ["finished"], {})),
        *(b"", b"{}\n", b"[]\n", BOMB, b"\xff" * 9 + b"\n", finished() * 2, b"\n" + finished()),
    ],
)
def test_what_is_no_report_counts_as_none(answer):
    report = reported(BEGUN + answer)
    assert report.status is ReportStatus.NO_REPORT
    assert {*report.outcomes.values()} == {"missing"}


def test_what_a_report_says_of_itself_is_taken_by_its_kind():
    report = reported(BEGUN + finished("pfs", texts=[["t.py::b", "\ud800"], ["x"], 1], pytest=5, output=None))
    assert [*report.outcomes.values()] == ["passed", "failed", "skipped"]
    assert (report.texts, report.output, report.pytest_version) == ([("t.py::b", "\ud800")], "", None)


KILLED = {"exit_code": None, "signal": signal.SIGKILL}


@pytest.mark.parametrize(
    ("answer", "how", "killed"),
    [
        (finished(), {}, None),
        (finished(oom_kills=True), {}, "for want of memory"),
        (finished(disk_full=True), {}, "the disk was full"),
        (finished(report="cut", exit_code=-9), {}, "the test process was killed"),
        (finished(report="cut", exit_code=-11), {}, None),
        (finished(report="timed_out", exit_code=-9), {}, None),
        (b"", KILLED, "the supervisor of the tests was killed"),
        (b"", {"exit_code": 1}, None),
        (b"", {**KILLED, "timed_out": True}, None),
    ],
)
def test_what_was_killed_is_told(answer, how, killed):
    said = reported(BEGUN + answer, **how).disturbance
    assert killed in said if killed else said is None


def test_a_supervisor_that_never_began_is_no_matter_of_the_tests():
    with pytest.raises(Disturbed):
        reported(b"", **KILLED)
    with pytest.raises(VerifierError):
        reported(b"", exit_code=1)


def test_a_disk_without_room_is_told(tmp_path):
    assert _disk_is_full("/proc")  # a file system that has no block to give
    assert not _disk_is_full(str(tmp_path))
    assert not _disk_is_full(str(tmp_path / "gone"))
