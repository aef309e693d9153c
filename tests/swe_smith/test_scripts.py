"""The commands of a project, from its packaging files."""

import os
import subprocess
import sys

import pytest
from hermes_swe_smith.scripts import console_scripts, wrapper

PYPROJECT = """\
[project.scripts]
dotenv = "dotenv.__main__:cli"
"bad name" = "x:y"
"../evil" = "x:y"
worse = "x:y; import os"
extra = "a.b:c.d [more]"
[tool.poetry.scripts]
poem = "a:b"
table = { reference = "x" }
"""

SETUP_CFG = """\
[options.entry_points]
console_scripts =
    one = a.b:main
    two=c:d
gui_scripts =
    three = e:f
"""

SETUP_PY = """\
from setuptools import setup
raise SystemExit("never run")
setup(name=compute(), entry_points={"console_scripts": ["four = g:h"], "other": ["x = y:z"]})
"""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"pyproject.toml": PYPROJECT}, {"dotenv": "dotenv.__main__:cli", "extra": "a.b:c.d", "poem": "a:b"}),
        ({"setup.cfg": SETUP_CFG}, {"one": "a.b:main", "two": "c:d"}),
        ({"setup.py": SETUP_PY}, {"four": "g:h"}),
        ({"pyproject.toml": "[", "setup.cfg": "what", "setup.py": "def"}, {}),
        ({"pyproject.toml": "project = 5", "setup.py": "setup(entry_points=f())"}, {}),
        ({"pyproject.toml": "[project]\nscripts = 5"}, {}),
    ],
)
def test_what_is_declared(files, expected):
    assert console_scripts(files) == expected


def test_a_wrapper_calls_the_checkout_that_pythonpath_names(tmp_path):
    (tmp_path / "thing.py").write_text(
        "class A:\n    @staticmethod\n    def main():\n        print('called')\n        return 3\n"
    )
    command = tmp_path / "command"
    command.write_text(wrapper(sys.executable, "thing:A.main"))
    command.chmod(0o755)
    done = subprocess.run([command], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "called\n")
