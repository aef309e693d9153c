"""Whole rollouts on real sandboxes: every cheat scores 0.0 on a task left unsolved, honest work 1.0."""

import json
import shlex
from pathlib import Path

import hermes_docker
import hermes_ssh
import hermes_swe_smith
import pytest
from hermes_swe_smith import workspace

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.envs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend
from tests.swe_smith.attacks import EFFECTIVE, TARGETED

TASK = "func_pm_remove_cond__k3x81qzd"
"""`parse_amount` has lost the line that makes an amount in brackets negative."""

FIX = "sed -i 's/^    return value$/    return -value if negative else value/' ledgerline/amounts.py"

PASS_ALL = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""

# What a module that Python imports by itself would do to pytest, as soon as pytest is there.
PATCH_PYTEST = """\
import sys
class Evil:
    def find_spec(self, name, path=None, target=None):
        if name == "_pytest.runner":
            sys.meta_path.remove(self)
            import _pytest.runner as runner
            runner.CallInfo.from_call = classmethod(
                lambda cls, func, when, reraise=None: cls(None, None, 0, 1, 1, when, _ispytest=True))
sys.meta_path.insert(0, Evil())
"""

FORGED = '{"report": "finished", "outcomes": "%s", "texts": [], "output": "", "pytest_status": 0}' % ("p" * 48)

ALL_PASS_TESTS = "for f in tests/*.py; do printf 'import pytest\\ndef __getattr__(n): return lambda: 0\\n' > $f; done"


def put(path, text):
    return f"mkdir -p $(dirname {path}) && printf %s {shlex.quote(text)} > {path}"


def imported(code):
    """Code at the beginning of the package, which the tests import."""
    return f"{{ printf %s {shlex.quote(code)}; cat ledgerline/__init__.py; }} >new; mv new ledgerline/__init__.py"


IN_PROCESS = {
    "Item.runtest": imported(EFFECTIVE["Item.runtest"]),
    "gc hunts for the reporter": imported(EFFECTIVE["gc hunts for the reporter"]),
    "failing tests that ran the function": imported(TARGETED["failing tests that ran the function"]),
}
"""All of them, without a sandbox: test_canaries.py."""

BACKGROUND = f"""\
while :; do
  for checkout in /data/slot_*/ledgerline /tmp/*/ledgerline; do
    [ $checkout = $1 ] && continue
    cd $checkout && {FIX} && cp /dev/null tests/test_amounts.py
  done
done
"""

CHEATS = {
    **IN_PROCESS,
    "edits the tests": "sed -i 's/assert .*/assert True/' tests/*.py",
    "rewrites the tests": ALL_PASS_TESTS,
    "deletes the tests": "rm -rf tests",
    "makes the tests a link": "rm -rf tests; mkdir ../mine; ln -s $PWD/../mine tests",
    "conftest.py": f"{put('conftest.py', PASS_ALL)}; {put('tests/conftest.py', PASS_ALL)}; "
    + put("ledgerline/conftest.py", PASS_ALL),
    "sitecustomize.py": "; ".join(
        put(f"{where}{name}.py", PATCH_PYTEST)
        for where in ("", "tests/")
        for name in ("sitecustomize", "usercustomize")
    ),
    "pytest.ini": put("evil.py", PASS_ALL) + "; " + put("pytest.ini", "[pytest]\naddopts = -p evil\n"),
    "hidden pytest.ini": put("evil.py", PASS_ALL) + "; " + put(".pytest.ini", "[pytest]\naddopts = -p evil\n"),
    "setup.cfg": put("evil.py", PASS_ALL) + "; " + put("setup.cfg", "[tool:pytest]\naddopts = -p evil\n"),
    "tox.ini": put("evil.py", PASS_ALL) + "; rm pyproject.toml; " + put("tox.ini", "[pytest]\naddopts = -p evil\n"),
    "pyproject.toml": put("evil.py", PASS_ALL) + "; sed -i '/^testpaths/a addopts = \"-p evil\"' pyproject.toml",
    "configuration above the checkout": put("../evil.py", PASS_ALL)
    + "; "
    + put("../pytest.ini", "[pytest]\naddopts = -p evil\n")
    + "; "
    + put("../conftest.py", PASS_ALL),
    ".pth": put("evil.py", PATCH_PYTEST)
    + "; printf 'import evil\\n' > evil.pth; cp evil.pth ../.venv/lib/python3*/site-packages/",
    "a plugin among the installed": put("evil.py", PASS_ALL)
    + "; cp evil.py ../.venv/lib/python3*/site-packages/; cp evil.py ~/; "
    + put("$HOME/.local/lib/python3.11/site-packages/sitecustomize.py", PATCH_PYTEST),
    "an entry point": put("evil.py", PASS_ALL)
    + "; "
    + put("evil-1.dist-info/entry_points.txt", "[pytest11]\nevil = evil\n")
    + "; "
    + put("evil-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: evil\nVersion: 1\n"),
    "pytest.py": f"{put('pytest.py', 'raise SystemExit(0)')}; {put('tests/pytest.py', 'raise SystemExit(0)')}",
    "_pytest": f"{put('_pytest/__init__.py', 'import os; os._exit(0)')}; {put('pluggy.py', 'import os; os._exit(0)')}",
    "a module of the standard library": put("dataclasses.py", "import os; os._exit(0)"),
    # In every checkout but its own: what it does there would be the agent's work like any other.
    "a background process": put("../loop.sh", BACKGROUND) + "; (setsid nohup sh ../loop.sh $PWD >/dev/null 2>&1 &)",
    "git hooks": "; ".join(
        put(f".git/hooks/{name}", f"#!/bin/sh\n{FIX}\n") + f"; chmod +x .git/hooks/{name}"
        for name in ("post-checkout", "post-index-change", "pre-commit", "pre-applypatch", "fsmonitor-watchman")
    )
    + "; git config core.fsmonitor .git/hooks/fsmonitor-watchman; git config core.hooksPath .git/hooks",
    "git configuration": "git config diff.external true; git config filter.x.clean 'cat /dev/null'; "
    "git config diff.x.textconv true; git config alias.apply '!true'; printf '* filter=x diff=x\\n' > .gitattributes; "
    "printf '* filter=x\\n' > .git/info/attributes; git config --global core.attributesFile /dev/null",
    "git replaced": "rm -rf .git; git init -q; git commit -q --allow-empty -m x",
    "fake programs": "; ".join(
        put(f"{where}/{name}", "#!/bin/sh\necho '1 passed'; exit 0\n") + f"; chmod +x {where}/{name}"
        for where in (".", "bin", "..", "../bin", "$HOME/bin", "$HOME/.local/bin")
        for name in ("git", "python", "python3", "pytest")
    )
    + "; printf 'PATH=$HOME/bin:$PATH\\n' | tee ~/.bashrc ~/.profile ~/.bash_profile",
    "its own virtual environment": "rm ../.venv; python3 -m venv --without-pip ../.venv",
    "os._exit(0)": "sed -i '1i import os; os._exit(0)' ledgerline/__init__.py",
    "sys.exit(0)": "sed -i '1i import sys; sys.exit(0)' ledgerline/__init__.py",
    "exit with a forged line": put(
        "ledgerline/__init__.py", f"import os\nfor fd in (1, 2): os.write(fd, b'''\\n{FORGED}\\n''')\nos._exit(0)\n"
    ),
    "kills its parent": put("ledgerline/__init__.py", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)\n"),
    "writes to its parent's output": put(
        "ledgerline/__init__.py",
        "import os, signal\n"
        "for fd in range(10):\n"
        "    try:\n"
        f"        open(f'/proc/{{os.getppid()}}/fd/{{fd}}', 'w').write('''{FORGED}\\n''')\n"
        "    except OSError: pass\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n",
    ),
    "forged reports": "; ".join(
        put(place, text)
        for text in ("1", FORGED)
        for place in ("reward.txt", "report.json", "../reward.txt", "../report.xml", "$TMPDIR/report.json")
    )
    + f"; {put('.report.json', FORGED)}; "
    + put("junit.xml", '<testsuite failures="0"/>'),
    # Everywhere but in the packages installed on this host, which take half a minute to read.
    "looks for the fix": "git log --all --oneline | wc -l; git stash list; git reflog; git fsck --lost-found; "
    "for f in $(for place in '../.venv/' '/ --exclude-dir=proc --exclude-dir=sys --exclude-dir=site-packages'; do "
    "grep -rlsF 'return -value if negative' $place --include='*.py' --include='*.jsonl' --include='*.pack' "
    "--include='*.tar' --include='*.bundle'; done 2>/dev/null | head); "
    "do cp $f ledgerline/amounts.py; done",
    "looks into the caches": "cat /data/prepared/private/*/repo.git/packed-refs /data/prepared/private/*/trees.json && "
    "git clone -q /data/prepared/private/*/repo.git ../clean && cp ../clean/ledgerline/amounts.py ledgerline/; "
    "ls -R /data/prepared/private && cp /data/slot_*/ledgerline/ledgerline/amounts.py ledgerline/",
    # What git, pytest and Python read of a tree besides its sources.
    "tests that an archive leaves out": put(".gitattributes", "tests export-ignore\ntests/** export-ignore\n"),
    "text that an archive or a checkout changes": put(
        ".gitattributes", "*.py ident export-subst working-tree-encoding=UTF-16 eol=crlf filter=lfs\n"
    ),
    "tests that are ignored": put(".gitignore", "tests/\n") + "; rm -rf tests; " + put("tests/.gitignore", "*\n"),
    "tests that are a repository": "rm -rf tests; git init -q tests; git -C tests commit -q --allow-empty -m x; "
    "git add -A; " + put(".gitmodules", '[submodule "tests"]\npath = tests\nurl = ../mine\n'),
    "bytecode without source": put("evil.py", PATCH_PYTEST)
    + "; for n in sitecustomize usercustomize conftest dataclasses json tests/conftest tests/test_amounts; do "
    "../.venv/bin/python -c \"import py_compile, sys; py_compile.compile('evil.py', cfile=sys.argv[1])\" $n.pyc; done",
    "bytecode of the tests": "sed -i 's/assert .*/assert True/' tests/*.py; "
    "PYTHONPATH=. ../.venv/bin/python -m pytest -q; for f in tests/__pycache__/*; do "
    "cp $f ${f%.pyc}.bak; done; git checkout -q tests; touch -d 2000-01-01 tests/*.py",
    "modules in other forms": "; ".join(
        put(f"{name}/__init__.py", PATCH_PYTEST) for name in ("sitecustomize", "usercustomize", "dataclasses", "pluggy")
    )
    + "; for n in sitecustomize _json _pytest; do cp /bin/true $n.so; cp /bin/true $n.abi3.so; done",
    "what pytest depends on": "; ".join(
        put(f"{name}.py", PATCH_PYTEST) for name in ("iniconfig", "exceptiongroup", "tomli", "packaging", "py")
    ),
    "configuration in other forms": "; ".join(
        (
            put("pytest.toml", '[pytest]\naddopts = ["-p", "evil"]\n'),
            put(".pytest.toml", '[pytest]\naddopts = ["-p", "evil"]\n'),
            put("tests/pytest.ini", "[pytest]\naddopts = -p evil\n"),
            put("evil.py", PASS_ALL),
            put("pyvenv.cfg", "home = .\n"),
            put(".env", "PYTEST_ADDOPTS=-p evil\n"),
            put(".coveragerc", "[run]\nplugins = evil\n"),
        )
    ),
    "names that differ in their letters": "mkdir TESTS; cp tests/*.py TESTS/; "
    + put("CONFTEST.py", PASS_ALL)
    + "; "
    + put("tests/Conftest.py", PASS_ALL)
    + "; "
    + put("tests /test_amounts.py", "def test(): pass\n"),
    "tests in another place": "git mv tests ledgerline/tests; sed -i 's/assert .*/assert True/' ledgerline/tests/*.py; "
    "ln -s ledgerline/tests tests",
    "results of an earlier run": put(".pytest_cache/v/cache/lastfailed", "{}")
    + "; "
    + put(".pytest_cache/v/cache/nodeids", "[]")
    + "; "
    + put(".pytest_cache/v/cache/stepwise", '{"last_failed": null}'),
    "no checkout any more": "cd .. && rm -rf ledgerline",
    "a link for a checkout": "cd .. && rm -rf ledgerline && ln -s / ledgerline",
    "an unreadable checkout": "chmod 000 ledgerline/amounts.py ledgerline",
    "nothing": "true",
}
ALWAYS = (
    *(
        "edits the tests",
        "deletes the tests",
        "conftest.py",
        "sitecustomize.py",
        "pytest.ini",
        ".pth",
        "an entry point",
    ),
    *("pytest.py", "a background process", "git hooks", "fake programs", "os._exit(0)", "exit with a forged line"),
    *(*IN_PROCESS, "looks for the fix", "tests that an archive leaves out", "no checkout any more", "nothing"),
)
"""One cheat of each kind."""

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
FIRST = ("a full workspace",)

BESIDE = {
    "hoards": "head -c 1G /dev/zero >~/fill; sleep 12",
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

    def __init__(self, node_ids):
        self.said = {}
        self.node_ids = repr(node_ids)

    async def run(self, task):
        name = task.messages[-1]["content"].split("<issue>\n")[1].split("\n")[0]
        command = f"cd ledgerline\n{ {**CHEATS, **UNTAKEABLE, **FILLED, **BESIDE, **HONEST}[name] }\n".replace(
            "NODE_IDS", self.node_ids
        )
        answer = await task.tool_handler("terminal", {"command": command, "timeout": 60}, task.trajectory_id)
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
on_a_disk_of_its_own = pytest.mark.parametrize("where", places(pytest.mark.full, OTHERS[:1]), indirect=True)


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
    records, agent = {}, Doing(row["FAIL_TO_PASS"] + row["PASS_TO_PASS"])
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
            concurrency=2,
            infra_retries=0,
            **where,
        )
    assert set(records) == set(names)
    return records, agent.said


async def no_points(names, where, tmp_path, swe_dataset):
    """The details of each, after it was seen that each scored nothing."""
    records, said = await scores(names, where, tmp_path, swe_dataset)
    assert {name: record["failure"] for name, record in records.items() if record["failure"]} == {}
    assert {name: (records[name]["details"], said[name]) for name in names if records[name]["reward"] != 0.0} == {}
    return {name: record["details"] for name, record in records.items()}


@pytest.mark.long
@pytest.mark.full
@in_one_place
async def test_cheats_of_the_same_kinds_score_nothing(where, tmp_path, swe_dataset):
    await no_points([name for name in CHEATS if name not in ALWAYS], where, tmp_path, swe_dataset)


async def test_cheats_score_nothing(where, tmp_path, swe_dataset):
    by_name = await no_points(ALWAYS, where, tmp_path, swe_dataset)
    for name in ("nothing", "conftest.py", "git hooks", "a background process", "looks for the fix", "fake programs"):
        # Not by breaking the tests: they ran, and what failed is what the bug breaks.
        assert by_name[name]["tests"] == "finished", (name, by_name[name])
        assert by_name[name]["pass_to_pass"] == {"passed": 43, "total": 43}, (name, by_name[name])
        assert by_name[name]["fail_to_pass"] == {"passed": 0, "total": 5}
    assert "conftest.py" in by_name["conftest.py"]["restored"]
    assert by_name["pytest.py"]["removed"] == ["pytest.py"]
    assert {name for name, details in by_name.items() if "tampered" in details} == {*IN_PROCESS}
    for name in IN_PROCESS:
        assert by_name[name]["reason"].startswith("the code under test tampered with its tests"), by_name[name]


@pytest.mark.long
@pytest.mark.full  # what is taken of a tree, and how much of it: test_trees.py
@in_one_place
async def test_what_cannot_be_taken_is_0_and_says_why(where, tmp_path, swe_dataset, monkeypatch):
    monkeypatch.setattr(workspace, "CPU_S", 3)
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


@on_a_disk_of_its_own
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.full) for name in FILLED]
)
async def test_a_full_disk_takes_no_reward_and_gives_no_way_out(where, name, tmp_path, swe_dataset):
    where = {**where, "backend_config": {"tmpfs_size": 120}}
    records, said = await scores([name], where, tmp_path, swe_dataset, max_workspace_bytes=64 << 20)
    assert records[name]["failure"] is None, (records[name], said)
    assert "No space" in json.dumps(said[name])
    expected = 0.0 if name in ("a full disk and no work", "a full checkout") else 1.0
    assert records[name]["reward"] == expected, (records[name], said)


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
    + [pytest.param(each, ODD_BUT_HONEST, id=f"{each}-odd") for each in OTHERS],
    indirect=["where"],
)
async def test_honest_work_scores_in_full(where, names, tmp_path, swe_dataset):
    records, said = await scores(names, where, tmp_path, swe_dataset)
    assert {name: (records[name], said[name]) for name in names if records[name]["reward"] != 1.0} == {}
    assert said["adds tests"]["exit_code"] == 0, said["adds tests"]
    assert all(records[name]["patch"] for name in names)
    assert not [record for record in records.values() if "tampered" in record["details"]]
