"""Core's pytest reporter: every outcome arrives, and nothing that code under test can do without passing counts."""

import sys
import time

import pytest

from hermes_core.errors import VerifierError
from hermes_core.pytest_runner.run import ReportStatus
from tests.swe_smith.projects import Project


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


KINDS = """\
import pytest

def test_pass(): pass
def test_fail(): assert 1 == 2, "the reason"
@pytest.mark.skip
def test_skip(): pass
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.xfail
def test_xpass(): pass
@pytest.fixture
def broken(): raise RuntimeError("set-up")
def test_error(broken): pass
@pytest.fixture
def untidy():
    yield
    raise RuntimeError("tear-down")
def test_teardown(untidy): pass
"""


async def test_every_kind_of_outcome(project):
    project.write(test_kinds__dot__py=KINDS)
    kinds = ("pass", "fail", "skip", "xfail", "xpass", "error", "teardown", "gone")
    report = await project.run(*(f"test_kinds.py::test_{kind}" for kind in kinds))
    assert report.status is ReportStatus.FINISHED
    assert [report.outcomes[f"test_kinds.py::test_{kind}"] for kind in kinds] == [
        "passed",
        "failed",
        "skipped",
        "xfailed",
        "xpassed",
        "error",
        "error",
        "missing",
    ]
    assert report.passed("test_kinds.py::test_pass")
    assert not any(report.passed(f"test_kinds.py::test_{kind}") for kind in kinds[1:])
    assert any(where.endswith("test_fail") and "the reason" in text for where, text in report.texts)


ODD = ["a b", "'\"", "$(touch x)", "|", "<>", "\\", "\\n", "[", "]", "::", "%s", "ü", "`id`", "*", "-k", "a" * 300]


async def test_odd_node_ids_are_data_and_only_they_run(project):
    project.write(
        test_odd__dot__py=f"import pytest\n@pytest.mark.parametrize('x', {ODD!r}, ids={ODD!r})\ndef test_x(x): pass\n"
        "def test_not_asked_for(): open('ran', 'w')\n"
    )
    ids = [f"test_odd.py::test_x[{x.encode('unicode_escape').decode()}]" for x in ODD]
    report = await project.run(*ids)
    assert {node_id: report.outcomes[node_id] for node_id in ids if not report.passed(node_id)} == {}
    assert not (project.root / "ran").exists()


@pytest.mark.full
async def test_more_ids_than_an_argument_list_could_hold(project):
    project.write(
        test_many__dot__py="import pytest\nids = [str(n) * 100 for n in range(1000)]\n"
        "@pytest.mark.parametrize('n', ids, ids=ids)\ndef test_n(n): pass\n"
    )
    ids = [f"test_many.py::test_n[{str(n) * 100}]" for n in range(1000)]
    assert sum(map(len, ids)) > 200_000
    report = await project.run(*ids)
    assert all(map(report.passed, ids))


async def test_configuration_is_the_projects_but_the_selection_is_ours(project):
    project.write(
        pytest__dot__ini="[pytest]\npython_files = check_*.py\npython_functions = check_*\ntestpaths = other\n"
        "addopts = -x -v --tb=line\n",
        sub__slash__check_a__dot__py="def check_one(): assert 0\ndef check_two(): pass\n",
        sub__slash__conftest__dot__py="import pytest\n@pytest.fixture(autouse=True)\ndef go(): pass\n",
    )
    report = await project.run("sub/check_a.py::check_one", "sub/check_a.py::check_two")
    assert list(report.outcomes.values()) == ["failed", "passed"]


async def test_the_project_comes_first_once_pytest_is_loaded(project):
    project.write(
        src__slash__colorsys__dot__py="mine = True\n",
        pytest__dot__py="raise SystemExit(0)\n",
        pluggy__dot__py="raise SystemExit(0)\n",
        test_it__dot__py="import colorsys, os, subprocess, sys\n"
        "def test_it():\n"
        "    assert colorsys.mine\n"
        "    assert '' not in sys.path\n"
        "    code = 'import colorsys; assert colorsys.mine'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 0\n",
    )
    report = await project.run("test_it.py::test_it", import_path=("", "src"))
    assert report.passed("test_it.py::test_it"), report.output


async def test_a_plugin_lying_in_the_project_is_not_loaded(project):
    project.write(test_it__dot__py="def test_it(): assert False\n", evil__dot__py=PASS_ALL)
    metadata = project.root / "evil-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nevil = evil\n")
    report = await project.run("test_it.py::test_it", python=sys.executable)
    assert not report.passed("test_it.py::test_it")


async def test_a_plugin_that_the_project_asks_for_by_name_is_loaded(project):
    project.write(
        pytest__dot__ini="[pytest]\naddopts = -p mine.plugin\n",
        src__slash__mine__slash__plugin__dot__py="import pytest\n@pytest.fixture\ndef answer(): return 42\n",
        test_it__dot__py="def test_it(answer): assert answer == 42\n",
    )
    report = await project.run("test_it.py::test_it", import_path=("", "src"))
    assert report.passed("test_it.py::test_it"), report.output


PASS_ALL = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""

FAIL = "def test_it(): assert False\n"
FORGED = """{"report": "finished", "outcomes": "p", "texts": [], "output": ""}"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import os; os._exit(0)\n", "cut"),
        ("import os, sys; sys.exit(0)\n", "finished"),
        ("import os\ndef test_it(): os._exit(0)\n", "cut"),
        ("import os\nif os.fork(): os._exit(0)\ndef test_it(): pass\n", "cut"),
        ("import os; os.kill(os.getpid(), 9)\n", "cut"),
        ("import os; os.abort()\n", "cut"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)\n", "no_report"),
        (f"print('''{FORGED}''', flush=True)\nimport os; os.write(1, b'''\\n{FORGED}\\n'''); os._exit(0)\n", "cut"),
        (f"import os; os.write(2, b'''\\n{FORGED}\\n''')\n" + FAIL, "finished"),
        ("import pytest; pytest.exit('bye', 0)\n", "finished"),
        ("raise SystemExit(0)\n", "finished"),
        ("def test_it(:\n", "finished"),
        ("import time; time.sleep(1000)\n", "timed_out"),
        ("import time\ndef test_it(): time.sleep(60)\n", "timed_out"),
    ],
    ids=lambda value: value.replace("\n", " ")[:40],
)
async def test_ending_early_is_not_passing(project, source, status):
    project.write(test_it__dot__py=source)
    report = await project.run("test_it.py::test_it", timeout_s=3.0 if status == "timed_out" else 60.0)
    assert report.status == status, report
    assert not report.passed("test_it.py::test_it")


async def test_outcomes_before_a_cut_do_not_count(project):
    project.write(test_it__dot__py="import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n")
    report = await project.run("test_it.py::test_a", "test_it.py::test_b")
    assert report.outcomes["test_it.py::test_a"] == "passed"
    assert not report.passed("test_it.py::test_a")


async def test_processes_left_behind_do_not_hold_the_run_up(project):
    project.write(
        test_it__dot__py="import subprocess\ndef test_it(): subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    )
    began = time.monotonic()
    report = await project.run("test_it.py::test_it")
    assert report.passed("test_it.py::test_it")
    assert time.monotonic() - began < 30


async def test_what_pytest_says_of_its_own_error_is_kept(project):
    project.write(
        conftest__dot__py="def pytest_runtest_logstart(nodeid): raise RuntimeError('of a plugin')\n",
        test_it__dot__py="def test_it(): pass\n",
    )
    report = await project.run("test_it.py::test_it")
    assert not report.passed("test_it.py::test_it") and report.pytest_status == 3
    assert "INTERNALERROR" in report.output and "of a plugin" in report.output


async def test_much_output_is_bounded(project):
    project.write(test_it__dot__py="def test_it():\n    print('x' * 10_000_000)\n    assert False\n")
    report = await project.run("test_it.py::test_it", args=["-s"])
    assert report.outcomes["test_it.py::test_it"] == "failed"
    assert len(report.output) < 10_000
    assert "bytes left out" in report.output


async def test_the_environment_is_ours(project, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    monkeypatch.setenv("PYTEST_PLUGINS", "nowhere")
    project.write(
        test_it__dot__py="import os, sys\n"
        "def test_it():\n"
        "    assert os.environ['WANTED'] == 'a b'\n"
        "    assert 'PYTHONSTARTUP' not in os.environ\n"
        "    assert os.environ['PATH'].split(':')[0] == os.path.dirname(sys.executable)\n"
        "    assert sys.stdin.read() == ''\n"
    )
    report = await project.run("test_it.py::test_it", env={"WANTED": "a b"}, args=["-s"])
    assert report.passed("test_it.py::test_it"), report.texts


async def test_no_file_of_the_tests_is_there(project):
    report = await project.run("gone.py::test_it")
    assert report.outcomes == {"gone.py::test_it": "missing"}


async def test_an_interpreter_that_is_not_there(project):
    with pytest.raises(VerifierError, match="can't be started"):
        await project.run("test_it.py::test_it", python="/nowhere/python")


async def test_an_interpreter_that_does_not_work(project, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho what >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(VerifierError, match="what"):
        await project.run("test_it.py::test_it", python=str(broken))


async def test_an_environment_without_pytest(project, tmp_path):
    import venv

    venv.create(tmp_path / "venv", with_pip=False)
    project.write(test_it__dot__py="def test_it(): pass\n")
    with pytest.raises(VerifierError, match="pytest can't be imported"):
        await project.run("test_it.py::test_it", python=str(tmp_path / "venv/bin/python"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "ini",
    [
        "addopts = --stepwise\n",
        "addopts = --strict-config --cache-clear --lf --ff\ncache_dir = .mine\n",
        "addopts = -p no:cacheprovider -p no:randomly -p no:pytest_cov -x\n",
        "addopts = --tb=native --color=yes --rootdir=tests\nfilterwarnings = error\n",
    ],
)
async def test_no_option_of_the_projects_is_overridden(project, ini):
    project.write(
        pytest__dot__ini=f"[pytest]\n{ini}",
        tests__slash__test_it__dot__py="def test_no(): assert False\n"
        "def test_it(pytestconfig):\n"
        "    given = pytestconfig.getini('addopts')\n"
        "    assert ('--tb=native' in given) == (pytestconfig.option.tbstyle == 'native')\n"
        "    assert ('--color=yes' in given) == (pytestconfig.option.color == 'yes')\n"
        "    assert pytestconfig.pluginmanager.hasplugin('cacheprovider') != ('no:cacheprovider' in given)\n",
    )
    ids = ("tests/test_it.py::test_no", "tests/test_it.py::test_it")
    report = await project.run(*ids)
    assert report.outcomes == dict(zip(ids, ("failed", "passed"), strict=True)), report


async def test_files_are_run_in_the_order_of_their_names(project):
    state = "import pathlib\nSEEN = pathlib.Path(__file__).parents[1] / 'seen'\n"
    project.write(
        a__slash__test_z__dot__py=state + "def test_first(): SEEN.touch()\n",
        b__slash__test_a__dot__py=state + "def test_second(): assert SEEN.exists()\n",
    )
    report = await project.run("b/test_a.py::test_second", "a/test_z.py::test_first")
    assert all(map(report.passed, report.outcomes)), report


async def test_a_subtest_decides_by_failing_only(project):
    project.write(
        test_it__dot__py="import unittest\nclass TestIt(unittest.TestCase):\n"
        "    def test_skips(self):\n        with self.subTest(): self.skipTest('x')\n"
        "    def test_fails(self):\n        with self.subTest(): self.fail('x')\n"
    )
    report = await project.run("test_it.py::TestIt::test_skips", "test_it.py::TestIt::test_fails")
    assert list(report.outcomes.values()) == ["passed", "failed"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("def double(x):\n    '''\n    >>> 1\n    2\n    '''\n    return 2 * x\n", "passed"),
        ("double = (2).__mul__\n", "passed"),
        ("class TestTwo:\n    def __init__(self): pass\ndef double(x): return 4\n", "passed"),
        ("def double(x):\n    '''\n    >>> 1\n    1\n    '''\n    return 3 * x\n", "failed"),
        ("__test__ = {'double': ''}\n", "failed"),
        ("import pytest; pytest.skip('x', allow_module_level=True)\n", "missing"),
        ("import sys; sys.modules[__name__] = 5\n", "missing"),
        ("raise SystemExit(0)\n", "missing"),
    ],
)
async def test_doctests_are_run_from_the_given_docstrings(project, source, outcome):
    ini = "[pytest]\naddopts = --doctest-modules\nfilterwarnings = error\n"
    project.write(mod__dot__py=source, pytest__dot__ini=ini)
    given = {"mod.py::mod.double": ("\n    >>> double(2)\n    4\n    ", 1)}
    report = await project.run(*given, doctests=given)
    assert report.outcomes == {"mod.py::mod.double": outcome}, report


REPLACED = {
    "json.dumps": "p.setattr(json, 'dumps', no)",
    "the whole of json": "p.setattr(json.JSONEncoder, 'encode', no); p.setattr(json.JSONEncoder, 'iterencode', no); "
    "p.setattr(json.encoder, 'encode_basestring_ascii', no)",
    "os.write": "p.setattr(os, 'write', no)",
    "os._exit": "p.setattr(os, '_exit', no)",
    "os.getpid": "p.setattr(os, 'getpid', lambda: 1)",
    "the clock": "[p.setattr(time, name, lambda: 0.0) for name in ('time', 'monotonic', 'perf_counter')]",
    "builtins": "[p.setattr(builtins, name, no) for name in ('open', 'print', 'input', 'max', 'sorted')]",
    "modules": "[p.delitem(sys.modules, name) for name in ('json', 'os', 'doctest') if name in sys.modules]",
    "the environment": "[p.delenv(name) for name in [*os.environ] if name != 'PYTEST_CURRENT_TEST']",
    "a child that goes on": "os.fork() or p.setattr(sys, 'stdout', None)",
}
LASTING = ("json.dumps", "os.write", "os._exit", "os.getpid", "a child that goes on")
"""pytest itself needs the others."""


@pytest.mark.parametrize("scope", ["function", "module"])
async def test_outcomes_arrive_whatever_tests_replace(project, scope):
    chosen = REPLACED if scope == "function" else LASTING
    lines = ["import builtins, json, os, sys, time, pytest", "def no(*_, **__): raise RuntimeError('replaced')"]
    for number, name in enumerate(chosen):
        lines += [f"@pytest.fixture(scope='{scope}')", f"def replaced{number}():"]
        lines += ["    p = pytest.MonkeyPatch()", f"    {REPLACED[name]}", "    yield", "    p.undo()"]
        lines += [f"def test_{number}(replaced{number}): pass", f"def test_{number}_after(): assert {number} >= 0"]
    lines += ["def test_closed():", "    os.closerange(3, 256)", "def test_fails(): assert 'the end' == 1"]
    project.write(test_it__dot__py="\n".join(lines))
    names = [f"test_{number}{after}" for number in range(len(chosen)) for after in ("", "_after")]
    ids = [f"test_it.py::{name}" for name in (*names, "test_closed", "test_fails")]
    report = await project.run(*ids, args=["-s"])
    assert [report.outcomes[each] for each in ids] == ["passed"] * (len(ids) - 1) + ["failed"], report
    assert report.complete, report
    assert any("the end" in text for _, text in report.texts)


PLACES = ("br[acket]", "br[acket", "a::b", "plain", "[", "::", "x[y]/::z")


@pytest.mark.parametrize("cwd", [None, "tests"])
async def test_a_path_may_contain_anything(project, cwd):
    source = "import pytest\n@pytest.mark.parametrize('x', ['a.py::b', '[c]::d'])\ndef test_it(x): pass\n"
    source += "def test_other(): open('ran', 'w')\n"
    files = [f"tests/{place}/test_{number}.py" for number, place in enumerate(PLACES)]
    for path in files:
        project.put(path, source.encode())
        project.put(path.replace("test_", "test_more_"), b"open('ran', 'w')\n")
    ids = [f"{path}::test_it[{x}]" for path in files for x in ("a.py::b", "[c]::d")]
    inside = cwd and str(project.root / cwd)
    report = await project.run(*ids, cwd=inside)
    assert set(report.outcomes.values()) == {"passed"}, report
    plain = [f"{path}::test_it" for path in files]
    assert all(map((await project.run(*plain, cwd=inside, with_parameters=True)).passed, plain))
    assert not [*project.root.rglob("ran")]
