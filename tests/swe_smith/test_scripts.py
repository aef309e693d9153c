"""The commands of a project, from its packaging files."""

import os
import subprocess
import sys

import pytest
from hermes_swe_smith.scripts import console_scripts, metadata, wrapper

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
    python, command = tmp_path / "python", tmp_path / "command"
    python.symlink_to(sys.executable)  # which may have a space in its path, as no virtual environment of a slot has
    command.write_text(wrapper(str(python), "thing:A.main"))
    command.chmod(0o755)
    done = subprocess.run([command], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "called\n")


@pytest.mark.parametrize(
    ("files", "name", "version"),
    [
        ({"pyproject.toml": "[project]\nname = 'My.Pkg'\nversion = '1.2'\n"}, "My.Pkg", "1.2"),
        ({"pyproject.toml": "[tool.poetry]\nname = 'pkg'\nversion = '3.0b1'\n"}, "pkg", "3.0b1"),
        ({"pyproject.toml": "[project]\nname = 'pkg'\ndynamic = ['version']\n"}, "pkg", "0.0.0"),
        (
            {
                "pyproject.toml": "[project]\nname = 'my-pkg'\ndynamic = ['version']\n",
                "src/my_pkg/__init__.py": "__version__: str = '4'",
            },
            "my-pkg",
            "4",
        ),
        (
            {
                "pyproject.toml": "[project]\nname = 'pkg'\n[tool.hatch.version]\npath = 'pkg/about.py'\n",
                "pkg/about.py": "VERSION = '5'",
            },
            "pkg",
            "5",
        ),
        (
            {
                "pyproject.toml": "[project]\nname = 'pkg'\n[tool.setuptools.dynamic]\nversion = {file = 'VERSION'}\n",
                "VERSION": "6.1\n",
            },
            "pkg",
            "6.1",
        ),
        ({"setup.cfg": "[metadata]\nname = pkg\nversion = attr: pkg.a.V\n", "pkg/a.py": "V = '7'"}, "pkg", "7"),
        ({"setup.py": "setup(name='pkg', version=read())"}, "pkg", "0.0.0"),
        ({"setup.py": "setup(name='pkg', version='8')", "setup.cfg": "[metadata]\nlicense = x\n"}, "pkg", "8"),
        ({"pyproject.toml": "[project]\nname = 'pkg'\nversion = '../x'\n"}, "pkg", "0.0.0"),
    ],
)
def test_the_name_and_the_version_are_those_that_it_would_be_installed_with(files, name, version):
    found = metadata(files)
    folder = f"{name.lower().replace('.', '_').replace('-', '_')}-{version}.dist-info"
    assert found[f"{folder}/METADATA"].splitlines()[1:] == [f"Name: {name}", f"Version: {version}"]


@pytest.mark.parametrize("name", ["", "../x", "a b", "x\\nVersion: 1"])
def test_no_metadata_without_a_name(name):
    assert metadata({"pyproject.toml": f'[project]\nname = "{name}"\nversion = "1"\n'}) == {}


def test_entry_points_of_every_group_but_plugins_of_pytest():
    files = {
        "pyproject.toml": "[project]\nname = 'p'\nversion = '1'\n[project.entry-points.'p.plugins']\na = 'b:c'\n",
        "setup.cfg": "[options.entry_points]\npytest11 =\n    x = y\nP.More =\n    Big = d.e:F [extra]\n",
        "setup.py": "setup(entry_points={'console_scripts': 'run = p:main'})",
    }
    text = metadata(files)["p-1.dist-info/entry_points.txt"]
    assert text.split("\n\n") == ["[console_scripts]\nrun = p:main", "[p.plugins]\na = b:c", "[P.More]\nBig = d.e:F\n"]
