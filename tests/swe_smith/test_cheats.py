"""Whole rollouts on real sandboxes: every cheat scores 0.0 on a task left unsolved, honest work 1.0."""

import json
import shlex
from pathlib import Path

import hermes_docker
import hermes_ssh
import hermes_swe_smith
import pytest
from hermes_swe_smith import cheats, workspace
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.rows import parse_row

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.errors import UnknownNameError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.soundness.validate import validate
from tests.swe_smith import more_cheats

TASK = "func_pm_remove_cond__k3x81qzd"
"""`parse_amount` has lost the line that makes an amount in brackets negative."""

FIX = "sed -i 's/^    return value$/    return -value if negative else value/' ledgerline/amounts.py"


def put(path, text):
    return f"mkdir -p $(dirname {path}) && printf %s {shlex.quote(text)} > {path}"


# --- work that can't be taken, read or unpacked --------------------------------------------------------------------

# A name that is the head of a gzip file: an extra field, for which `tarfile` throws away as much of what it unpacks,
# and a stored block of that length, which is the rest of the tar's header. The file's content is what follows.
SWALLOWED = """\
import io, tarfile, zlib
tests = {}
for node_id in NODE_IDS:
    path, name = node_id.split("::")
    name, bracket, parameters = name.partition("[")
    tests.setdefault(path, {}).setdefault(name, []).extend([parameters[:-1]] if bracket else [])
archive = io.BytesIO()
with tarfile.open(fileobj=archive, mode="w") as tar:
    tar.add("ledgerline")
    for path, names in tests.items():
        text = "import pytest\\n"
        for name, ids in names.items():
            given = ", ".join(f"pytest.param(0, id={each!r})" for each in ids)
            text += f"@pytest.mark.parametrize('x', [{given}])\\n" if ids else ""
            text += f"def {name}({'x' * bool(ids)}): pass\\n"
        member = tarfile.TarInfo(path)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
packer = zlib.compressobj(wbits=-15)
data = packer.compress(archive.getvalue()) + packer.flush()
with open(b"\\x1f\\x8b\\x08\\x04" + b"abcdef" + b"\\xef\\x01" + b"x" + b"\\xef\\x01\\x10\\xfe", "wb") as file:
    file.write(data)
"""

DEEP = "d" * 200

EXPONENTIAL = "a/**/" * 14 + "b"

UNTAKEABLE = {
    "a name that is a compressed tree": f"python3 - <<'EOF'\n{SWALLOWED}EOF",
    "a name that is a broken compressed tree": "echo x >\"$(printf '\\037\\213\\010\\004abcdef\\001\\001')\"",
    "six million emoji": "python3 -c \"open('ledgerline/e.txt', 'w').write(chr(0x1f600) * 6_000_000)\"",
    "a .gitignore at the end of the longest path": "python3 - <<'EOF'\nimport os\n"
    f"for _ in range(20):\n    os.mkdir({DEEP!r}); os.chdir({DEEP!r})\n"
    "left = 4060 - 20 * 201 - len('/.gitignore')\n"
    "os.mkdir('e' * left); os.chdir('e' * left); open('.gitignore', 'w').write('x')\nEOF",
    "thousands of names of one large file": "head -c 30000000 /dev/urandom >f; "
    "python3 -c \"import os; [os.link('f', f'l{n}') for n in range(4000)]\"",
    "an exponential .gitignore": f"printf '{EXPONENTIAL}\\n' >.gitignore; "
    "mkdir -p $(printf 'a/%.0s' $(seq 60)) && touch $(printf 'a/%.0s' $(seq 60))x",
    "an exponential .gitattributes": f"printf '{EXPONENTIAL} text diff crlf\\n' >.gitattributes; "
    "mkdir -p $(printf 'a/%.0s' $(seq 60)) && touch $(printf 'a/%.0s' $(seq 60))x",
    "a .gitignore without end": "yes '!*/**/a*b*c*d' | head -c 6000000 >.gitignore",
    "a sparse file": "truncate -s 1T ledgerline/sparse",
    "many empty files": "python3 -c \"[open(f'ledgerline/{n}', 'w').close() for n in range(200_000)]\"",
    "lines without end": "python3 -c \"open('README.md', 'w').write(chr(10) * 30_000_000)\"",
    "bytecode": "printf '!__pycache__/\\n!*.pyc\\n' >.gitignore; python3 -m compileall -q .; "
    "printf 'raise SystemExit(0)' >conftest.py; python3 -m compileall -q conftest.py "
    "--invalidation-mode unchecked-hash; rm conftest.py; cp __pycache__/*.pyc .",
    "a checkout that is a file": "cd ..; rm -rf ledgerline; echo x >ledgerline",
    "a workspace without rights": "chmod 000 . ..",
}
"""Attempts to have a rollout without a reward, or a reward without work: 0, and whoever asks is told why."""

BY_THE_TESTS = ("a name that is a compressed tree", "a name that is a broken compressed tree", "bytecode")

FILLED = {
    "a full home": f"{FIX}; head -c 1G /dev/zero >~/fill",
    "a full workspace": f"{FIX}; head -c 1G /dev/zero >../fill",
    "full temporary files": f"{FIX}; head -c 1G /dev/zero >$TMPDIR/fill",
    "a full /tmp": f"{FIX}; mkdir -p /tmp/mine; head -c 1G /dev/zero >/tmp/mine/fill; chmod 000 /tmp/mine",
    "a full disk and no work": "head -c 1G /dev/zero >~/fill",
    "a full checkout": f"{FIX}; head -c 1G /dev/zero >fill",
}
"""What the agent holds beside its work is freed before its work is given up; what it holds in its checkout counts."""

GIVES_NO_REWARD = ("a full disk and no work", "a full checkout")

BESIDE = {
    "hoards": "head -c 1G /dev/zero >~/fill; sleep 25",
    "solves beside a hoarder": f"{FIX}; sleep 3",
}

HONEST = {
    "the fix": FIX,
    "the fix, committed": f"{FIX} && git checkout -q -b mine && git commit -qam done",
    "the fix, staged": f"{FIX} && git add -A",
    "the fix, and no repository": f"{FIX} && rm -rf .git",
    "adds files": "mkdir ledgerline/money && git mv ledgerline/amounts.py ledgerline/money/__init__.py && "
    + FIX.replace("ledgerline/amounts.py", "ledgerline/money/__init__.py")
    + " && printf 'from ledgerline.money import *\\n' > ledgerline/amounts.py",
    "deletes files": f"{FIX} && rm README.md && mv ledgerline/amounts.py ledgerline/cents.py && "
    "sed -i 's/ledgerline.amounts/ledgerline.cents/' ledgerline/*.py",
    "adds tests": f"{FIX} && "
    + put(
        "tests/test_mine.py",
        "from ledgerline import parse_amount\ndef test_it(mine): assert parse_amount('(1)') == mine\n",
    )
    + " && "
    + put("tests/conftest.py", "import pytest\n@pytest.fixture\ndef mine(): return -100\n")
    + " && cd .. && cd ledgerline && PYTHONPATH=. ../.venv/bin/python -m pytest -q tests/test_mine.py",
    "odd names": f"{FIX} && python3 - <<'EOF'\nimport os\n"
    "for name in (b'\\x1f\\x8b\\x08', b'BZh9', b'a\\nb', b' ', b'-rf', b'\\xff', b'\\xef\\xbb\\xbf', b'\\r', "
    "b':(glob)*', b'\\\\', b'git~1', b'.git ', '.g\\u200cit'.encode(), b'n' * 255, b'11 path=x\\n', b'*', b'...'):\n"
    "    open(name, 'w').close()\n    os.makedirs(b'in/' + name); open(b'in/' + name + b'/' + name, 'w').close()\nEOF",
    "a file of two names": f"{FIX} && mkdir -p a/.git && ln ledgerline/amounts.py a/.git/x && "
    "ln a/.git/x a/y && ln a/y ledgerline/z.py",
    "leaves a mess": f"{FIX} && PYTHONPATH=. ../.venv/bin/python -m pytest -q; touch a.log; mkdir -p build/x; "
    "printf '\\377' > ledgerline/data.bin; mkfifo ledgerline/fifo; ln -s /nowhere dangling; (sleep 100 &)",
}
ODD_BUT_HONEST = ("the fix, and no repository", "adds tests", "odd names")


class Doing:
    """An agent that runs the commands which its item stands for, each in the checkout, by way of the model's tool."""

    name = "doing"

    def __init__(self, task):
        self.said = {}
        self.task = task

    def command(self, name):
        """A cheat of the plugin's battery, or one of the commands above."""
        if name in (scripts := {**cheats.SCRIPTS, **more_cheats.SCRIPTS}):
            return cheats.command(self.task, scripts[name], fix=True)
        own = {"nothing": "true", **UNTAKEABLE, **FILLED, **BESIDE, **HONEST}[name]
        return f"cd ledgerline\n{own}\n".replace("NODE_IDS", repr([*self.task.node_ids]))

    async def run(self, task):
        name = task.messages[-1]["content"].split("<issue>\n")[1].split("\n")[0]
        given = {"command": self.command(name), "timeout": 60}
        answer = await task.tool_handler("terminal", given, task.trajectory_id)
        self.said[name] = json.loads(answer)
        result = AgentResult(messages=[*task.messages, {"role": "assistant", "content": answer}], turns_used=1)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        return


def dataset_of(names, folder: Path, dataset: Path) -> Path:
    """The one task, once under each of the names."""
    rows = [json.loads(line) for line in (dataset / "tasks.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["instance_id"].endswith(TASK))
    path = folder / "tasks.jsonl"
    lines = [json.dumps({**row, "instance_id": name, "problem_statement": name}) for name in names]
    path.write_text("\n".join(lines))
    return path


HERE = "local user"
OTHERS = ("local namespace", "docker user", "ssh namespace")


def places(mark, others=OTHERS):
    """The first place, and others with a mark."""
    return [HERE, *(pytest.param(each, marks=mark) for each in others)]


# A few of each kind are tried everywhere; the rest differ in nothing that depends on the place.
in_one_place = pytest.mark.parametrize("where", places(pytest.mark.stress), indirect=True)
on_a_disk_of_its_own = pytest.mark.parametrize("where", places(pytest.mark.stress, OTHERS[:1]), indirect=True)


@pytest.fixture(params=places(pytest.mark.full))
def where(request):
    """Options of a run: a backend that can be used here, its plugin, and the level."""
    backend, level = request.param.split()
    config = {}
    if backend == "docker":
        config = {"image": request.getfixturevalue("docker_images")[0]}
    elif backend == "ssh":
        config = {"host": "hermes-test", "config_file": request.getfixturevalue("ssh_config")}
    elif Isolation.parse(level) not in LocalBackend().capabilities.isolation:
        pytest.skip(f"this host grants no isolation {level}")
    return {"backend": backend, "isolation": level, "backend_config": config}


async def scores(names, where, tmp_path, swe_dataset, **env):
    """The record of each, by name, and what the agent was told."""
    dataset = dataset_of(names, tmp_path, swe_dataset)
    row = json.loads(dataset.read_text().splitlines()[0])
    records, agent = {}, Doing(parse_row(row, "the row", SweSmithConfig()))
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker, hermes_ssh]) as runtime:
        await run_rollouts(
            runtime,
            "swe-smith",
            agent,
            env={
                "dataset_name": str(dataset),
                "repo_base_url": str(swe_dataset),
                "shuffle": False,
                **env,
            },
            on_record=lambda record: records.update({record["item_id"]: record}),
            infra_retries=0,
            **{"concurrency": 2, **where},
        )
    assert set(records) == set(names)
    return records, agent.said


async def no_points(names, where, tmp_path, swe_dataset):
    """The details of each, after it was seen that each scored nothing."""
    records, said = await scores(names, where, tmp_path, swe_dataset)
    assert {name: record["failure"] for name, record in records.items() if record["failure"]} == {}
    assert {name: (records[name]["details"], said[name]) for name in names if records[name]["reward"] != 0.0} == {}
    return {name: record["details"] for name, record in records.items()}


ONE_OF_A_SORT = (
    "edits-the-tests",
    "conftest",
    "pytest-module",
    "patched-calls",
)
"""The ones that look for the fix are not among them: reading the whole system takes ten seconds."""
TAMPERS = {"patched-calls", "item-runtest", "gc-hunter", "settrace"}
SPARES_THE_TESTS = {"nothing", "conftest", "git-hooks", "background-process", "looks-for-the-fix", "fake-programs"}
"""They score nothing, but not by breaking the tests."""


async def test_cheats_score_nothing(where, tmp_path, swe_dataset):
    by_name = await no_points(ONE_OF_A_SORT, where, tmp_path, swe_dataset)
    as_expected(by_name)
    assert "conftest.py" in by_name["conftest"]["restored"]
    assert by_name["pytest-module"]["removed"] == ["pytest.py"]


SLOW = "looks-for-the-fix"
"""It reads the whole system, for half a minute. What there is to be found: test_reach.py."""
MORE = ["nothing", *(name for name in cheats.SCRIPTS if name not in (*ONE_OF_A_SORT, SLOW))]
ALL_OTHERS = [*more_cheats.SCRIPTS]


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [pytest.param(MORE, marks=pytest.mark.full), pytest.param(ALL_OTHERS, marks=pytest.mark.stress)],
    ids=["of each kind", "all others"],
)
@in_one_place
async def test_other_cheats_score_nothing(where, tmp_path, swe_dataset, names):
    as_expected(await no_points(names, where, tmp_path, swe_dataset))


def as_expected(by_name):
    """Those that spare the tests fail what the bug breaks, and those that tamper with them are seen."""
    for name in SPARES_THE_TESTS.intersection(by_name):
        assert by_name[name]["tests"] == "finished", (name, by_name[name])
        assert by_name[name]["pass_to_pass"] == {"passed": 43, "total": 43}, (name, by_name[name])
        assert by_name[name]["fail_to_pass"] == {"passed": 0, "total": 5}
    tampering({name: by_name[name] for name in by_name if name in cheats.SCRIPTS}, TAMPERS.intersection(by_name))


def tampering(by_name, expected):
    """Those that were recorded as tampering are the expected ones."""
    assert {name for name, details in by_name.items() if "tampered" in details} == expected
    for name in expected:
        assert by_name[name]["reason"].startswith("the code under test tampered with its tests"), by_name[name]


@pytest.mark.long
@pytest.mark.full  # what is taken of a tree, and how much of it: test_trees.py
@in_one_place
async def test_what_cannot_be_taken_is_0_and_says_why(where, tmp_path, swe_dataset, monkeypatch):
    monkeypatch.setattr(workspace, "CPU_S", 1)
    env = {"max_workspace_bytes": 64 << 20}
    records, said = await scores(UNTAKEABLE, where, tmp_path, swe_dataset, **env)
    failed = {name: (record["failure"], said[name]) for name, record in records.items() if record["failure"]}
    assert failed == {}
    assert {name: (records[name], said[name]) for name in UNTAKEABLE if records[name]["reward"] != 0.0} == {}
    for name, record in records.items():
        details = record["details"]
        if name in BY_THE_TESTS:
            assert details["tests"] == "finished" and details["fail_to_pass"]["passed"] == 0, (name, details)
            assert details["pass_to_pass"] == {"passed": 43, "total": 43}, (name, details)
        else:
            assert details["reason"] and "tests" not in details, (name, details)


@pytest.mark.full
@on_a_disk_of_its_own
async def test_a_full_disk_takes_no_reward_and_gives_no_way_out(where, tmp_path, swe_dataset):
    # One at a time: each has the disk for itself, and finds it empty again.
    where = {**where, "backend_config": {"tmpfs_size": 120}, "concurrency": 1}
    records, said = await scores(FILLED, where, tmp_path, swe_dataset, max_workspace_bytes=64 << 20)
    assert {name: record["failure"] for name, record in records.items() if record["failure"]} == {}, said
    assert [name for name in FILLED if "No space" not in json.dumps(said[name])] == []
    expected = {name: 0.0 if name in GIVES_NO_REWARD else 1.0 for name in FILLED}
    assert {name: record["reward"] for name, record in records.items()} == expected, (records, said)


@pytest.mark.full
@on_a_disk_of_its_own
async def test_a_disk_that_a_neighbour_has_filled_is_no_0(where, tmp_path, swe_dataset):
    where = {**where, "backend_config": {"tmpfs_size": 120}}
    records, said = await scores(BESIDE, where, tmp_path, swe_dataset)
    assert "No space" in json.dumps(said["hoards"])
    assert (records["hoards"]["reward"], records["hoards"]["failure"]) == (0.0, None)
    victim = records["solves beside a hoarder"]
    # Begun anew, elsewhere; or it never began, where the hoarder was quicker than its set-up.
    assert victim["reward"] is None and victim["failure"]["kind"] in ("infra", "setup"), victim


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "names"),
    [pytest.param(HERE, HONEST, id=f"{HERE}-all")]
    + [pytest.param(OTHERS[0], ODD_BUT_HONEST, id=f"{OTHERS[0]}-odd", marks=pytest.mark.stress)]
    + [pytest.param(each, ODD_BUT_HONEST, id=f"{each}-odd") for each in OTHERS[1:]],
    indirect=["where"],
)
async def test_honest_work_scores_in_full(where, names, tmp_path, swe_dataset):
    records, said = await scores(names, where, tmp_path, swe_dataset)
    assert {name: (records[name], said[name]) for name in names if records[name]["reward"] != 1.0} == {}
    assert said["adds tests"]["exit_code"] == 0, said["adds tests"]
    assert all(records[name]["patch"] for name in names)
    assert not [record for record in records.values() if "tampered" in record["details"]]


@pytest.mark.full  # test_cheats_score_nothing has the same scripts
@pytest.mark.parametrize("where", [HERE], indirect=True)
async def test_validate_tries_the_environments_cheats(where):
    tried = ("os-exit", "patched-calls", "git-hooks")
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker, hermes_ssh]) as runtime:
        outcome = await validate(
            runtime, "swe-smith", env={"dataset_name": "demo", "max_items": 1}, cheats=tried, concurrency=2, **where
        )
        with pytest.raises(UnknownNameError, match="unknown cheat 'os-exits' of environment 'swe-smith'"):
            await validate(runtime, "swe-smith", env={"dataset_name": "demo"}, cheats=["os-exits"], **where)
    assert outcome.sound, outcome.to_dict()
    (rewards,) = (agents for result in outcome.results for agents in result.to_dict()["rewards"].values())
    assert rewards == {"oracle": [1.0], "nop": [0.0], **{f"cheat:{name}": [0.0] for name in tried}}
