"""Code that changes pytest from within its process: what code under test can do so that tests pass that fail.

Each text is Python code for the end of a module that the tests import. A canary finds out who lets tests pass in this
way (`canary.py`). `cheats.py` tries some on every item.
"""

from __future__ import annotations

from collections.abc import Mapping

QUIET = """\
def quiet(real):
    def call(*args, **kwargs):
        try:
            return real(*args, **kwargs)
        except BaseException:
            return None
    return call
"""
"""A function that makes another one raise nothing."""

_REPORTER = """\
import gc
reporter = next(each for each in gc.get_objects() if type(each).__name__ == "Reporter")
"""

ATTACKS: Mapping[str, str] = {
    "item-runtest": QUIET + "import _pytest.python as p\np.Function.runtest = quiet(p.Function.runtest)\n",
    "patched-reports": """\
import _pytest.reports as r
def passed(cls, item, call, real=r.TestReport.from_item_and_call.__func__):
    report = real(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
r.TestReport.from_item_and_call = classmethod(passed)
""",
    "patched-reporter": _REPORTER
    + "type(reporter).send.__globals__['_outcome'] = lambda report: 'p' if report.when == 'call' else None\n",
    "gc-hunter": _REPORTER
    + """\
import os
for index in reporter.ids.values():
    reporter.send(index=index, outcome="p")
reporter.send(status=0)
os._exit(0)
""",
    "frames": """\
import sys
frame = sys._getframe()
while "reporter" not in frame.f_locals:
    frame = frame.f_back
reporter = frame.f_locals["reporter"]
def send(real=reporter.send, **event):
    real(**{key: "p" if key == "outcome" else value for key, value in event.items()})
reporter.send = send
""",
    "settrace": """\
import sys
def local(frame, event, arg):
    if event == "return" and arg is not None:
        arg.excinfo = None
    return local
def trace(frame, event, arg):
    return local if frame.f_code.co_name == "from_call" else None
sys.settrace(trace)
""",
    "fake-pytest": QUIET
    + """\
import builtins, functools, sys, types, pytest
class Marks:
    def __getattr__(self, name, real=pytest.mark):
        return getattr(real, name)
    def parametrize(self, *args, real=pytest.mark.parametrize, **kwargs):
        return lambda function: real(*args, **kwargs)(functools.wraps(function)(quiet(function)))
fake = types.ModuleType("pytest")
fake.__dict__.update(pytest.__dict__)
fake.mark = pytest.mark = Marks()
sys.modules["pytest"] = fake
real_import = builtins.__import__
def imported(name, *args, **kwargs):
    return fake if name == "pytest" else real_import(name, *args, **kwargs)
builtins.__import__ = imported
""",
    "dropped-assertions": """\
import ast, inspect, textwrap, _pytest.python
class Drop(ast.NodeTransformer):
    def visit_Assert(self, node):
        return ast.Pass()
def setup(self, real=_pytest.python.Function.setup):
    if self.obj.__code__.co_filename != "x":
        tree = Drop().visit(ast.parse(textwrap.dedent(inspect.getsource(self.obj))))
        tree.body[0].decorator_list = []
        names = {}
        exec(compile(ast.fix_missing_locations(tree), "x", "exec"), self.obj.__globals__, names)
        self.obj.__code__ = names[self.obj.__name__].__code__
    real(self)
_pytest.python.Function.setup = setup
""",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\n",
    "faulthandler": "import faulthandler, time\nfaulthandler.dump_traceback_later(0.01, exit=True)\ntime.sleep(1)\n",
}
"""The code, by name."""

IN_VAIN = ("atexit", "faulthandler")
"""Those that gain nothing, with a canary or without: the process ends, and an outcome that did not arrive is none."""
