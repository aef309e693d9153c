"""Small repositories of awkward shapes, each with one bug: a dataset made when it is asked for."""

# ruff: noqa: E501
# (the repositories' files, which are easier to read unbroken)

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes_swe_smith.trees import ATTRIBUTES

_NEEDED = ("iniconfig==2.3.1", "packaging==26.3", "pluggy==1.7.0")
PYTEST_7 = (*_NEEDED, "pytest==7.4.4")
PYTEST = (*_NEEDED, "pytest==8.3.5")  # the last that does not need Pygments, which takes longest to install
PYTEST_9 = (*_NEEDED, "Pygments==2.21.0", "pytest==9.0.2")
ASYNCIO = (*_NEEDED, "Pygments==2.21.0", "pytest==8.4.2", "pytest-asyncio==1.4.0", "typing_extensions==4.15.0")

Files = Mapping[str, str | bytes]
Change = tuple[str, str, str]
"""A path, and what is replaced there by what."""


@dataclass(frozen=True)
class Shape:
    """A repository, its bug, and its tests."""

    files: Files
    fail: tuple[str, ...]
    """Fail with the bug and pass without."""
    keep: tuple[str, ...] = ()
    """Pass in both."""
    bug: tuple[Change, ...] = (("pkg/core.py", "2 * x", "3 * x"),)
    pythonpath: str = "."
    test_cmd: str = "python -m pytest"
    requirements: tuple[str, ...] = PYTEST
    programs: tuple[str, ...] = ()
    """Which of the files can be executed."""
    texts: Mapping[str, str] = field(default_factory=dict)


def write(folder: Path, shapes: Mapping[str, Shape]) -> Path:
    """Write `tasks.jsonl` (whose path it gives), `repos.json` and the bundles. Blocking."""
    entries, rows = [], []
    for number, (name, shape) in enumerate(shapes.items()):
        root = folder / f"repository{number}"
        repo = f"swesmith/shapes__project{number}.01234567"
        write_files(root, shape.files)
        for program in shape.programs:
            (root / program).chmod(0o755)
        git(root, "init", "-q", "-b", "main")
        (root / ".git/info").mkdir(exist_ok=True)
        (root / ".git/info/attributes").write_text(ATTRIBUTES)
        git(root, "add", "-A", "-f")
        git(root, "commit", "-q", "-m", "clean")
        git(root, "bundle", "create", "-q", str(folder / f"{number}.bundle"), "main")
        commit = git(root, "rev-parse", "HEAD").decode().strip()
        for path, old, new in shape.bug:
            content = (root / path).read_bytes()
            assert old.encode() in content, (name, path, old)
            (root / path).write_bytes(content.replace(old.encode(), new.encode()))
        patch = git(root, "diff", "HEAD").decode()
        entries.append(
            {
                "repo": repo,
                "bundle": f"{number}.bundle",
                "base_commit": commit,
                "python": ">=3.9",
                "requirements": shape.requirements,
                "pythonpath": shape.pythonpath,
                "test_cmd": shape.test_cmd,
            }
        )
        row = {
            "instance_id": name,
            "repo": repo,
            "patch": patch,
            "FAIL_TO_PASS": shape.fail,
            "PASS_TO_PASS": shape.keep,
            "image_name": "",
            "problem_statement": name,
        }
        rows.append({**row, **shape.texts})
    (folder / "repos.json").write_text(json.dumps(entries))
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tasks


def write_files(root: Path, files: Files) -> None:
    """Write files byte for byte."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)


def git(where: Path, *words: str) -> bytes:
    """Run git, without anybody's configuration."""
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    env.update({f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")})
    return subprocess.run(["git", *words], cwd=where, env=env, capture_output=True, check=True).stdout


DOUBLE = '''\
def double(x):
    """Twice as much.

    >>> double(2)
    4
    >>> double("ab")
    'abab'
    """
    return 2 * x


def half(x):
    """
    >>> half(4)
    2.0
    """
    return x / 2
'''
TEST_DOUBLE = "from pkg.core import double, half\ndef test_double(): assert double(2) == 4\n"
TEST_HALF = "def test_half(): assert half(4) == 2\n"
TESTS = TEST_DOUBLE + TEST_HALF
DOCTEST_MODULES = "[pytest]\naddopts = --doctest-modules\n"


def package(more: Files = {}, *, core: str = DOUBLE, where: str = "pkg") -> Files:  # noqa: B006 - never changed
    return {f"{where}/__init__.py": "", f"{where}/core.py": core, **more}


def both(
    path: str, *, fail: Iterable[str] = ("test_double",), keep: Iterable[str] = ("test_half",)
) -> dict[str, tuple[str, ...]]:
    """The ids of tests that fail and that pass with the bug, in one file."""
    return {"fail": tuple(f"{path}::{name}" for name in fail), "keep": tuple(f"{path}::{name}" for name in keep)}


def plain(more: Files = {}, **options: object) -> Shape:  # noqa: B006 - never changed
    """A package with tests in `tests`."""
    return Shape(package({"tests/test_core.py": TESTS, **more}), **{**both("tests/test_core.py"), **options})


ODD = ["a b", "[x]", "a::b", "a/b.py::c", "ü", "\n", "\\", "'\"", "$(x)", "-k", "a\tb", "<|>", "", "%s", "\x00", "😀"]


def _odd_ids(names: Iterable[str]) -> list[str]:
    """As pytest writes them."""
    return [name.encode("unicode_escape").decode("ascii") for name in names]


SHAPES: dict[str, Shape] = {
    # Tests inside the package, beside what they test, and as a module that others import.
    "inside: tests": Shape(
        package({"pkg/tests/__init__.py": "", "pkg/tests/test_core.py": TESTS}), **both("pkg/tests/test_core.py")
    ),
    "inside: one module": Shape(package({"pkg/tests.py": TESTS}), **both("pkg/tests.py")),
    "beside: test_": Shape(package({"pkg/test_core.py": TESTS}), **both("pkg/test_core.py")),
    "beside: _test": Shape(package({"pkg/core_test.py": TESTS}), **both("pkg/core_test.py")),
    "imported: helpers": Shape(
        package(
            {
                "pkg/cli.py": "from pkg.tests.helpers import CASES\nfrom pkg.core import double\n"
                "def selftest(): return all(double(x) == y for x, y in CASES)\n",
                "pkg/tests/__init__.py": "",
                "pkg/tests/helpers.py": "CASES = [(1, 2), (2, 4)]\n",
                "pkg/tests/test_cli.py": "from pkg.cli import selftest\ndef test_double(): assert selftest()\n"
                "def test_half(): pass\n",
            }
        ),
        **both("pkg/tests/test_cli.py"),
    ),
    "imported: a package that is named like tests": Shape(
        {
            "test_kit/__init__.py": "from test_kit.core import double\n",
            "test_kit/core.py": DOUBLE,
            "test_kit/test_core.py": TESTS.replace("pkg", "test_kit"),
        },
        **both("test_kit/test_core.py"),
        bug=(("test_kit/core.py", "2 * x", "3 * x"),),
    ),
    # Doctests in sources.
    "doctest: a package": Shape(
        package({"pytest.ini": DOCTEST_MODULES}),
        **both("pkg/core.py", fail=["pkg.core.double"], keep=["pkg.core.half"]),
    ),
    "doctest: kept beside failing tests": Shape(
        package({"pytest.ini": DOCTEST_MODULES, "tests/test_core.py": TESTS}),
        fail=("tests/test_core.py::test_double", "pkg/core.py::pkg.core.double"),
        keep=("pkg/core.py::pkg.core.half", "tests/test_core.py::test_half"),
    ),
    "doctest: nothing but kept": Shape(
        package(
            {
                "setup.cfg": "[tool:pytest]\naddopts = --doctest-modules\n",
                "tests/test_core.py": TESTS.replace("2)", "3)").replace("4", "6", 1),
            },
            core=DOUBLE.replace(">>> double(\"ab\")\n    'abab'", ">>> double(0)\n    0").replace(
                ">>> double(2)\n    4\n    ", ""
            ),
        ),
        fail=("tests/test_core.py::test_double",),
        keep=("pkg/core.py::pkg.core.double", "pkg/core.py::pkg.core.half"),
    ),
    "doctest: one module": Shape(
        {"single.py": f'"""Small.\n\n>>> double(1)\n2\n"""\n{DOUBLE}'},
        **both("single.py", fail=["single", "single.double"], keep=["single.half"]),
        bug=(("single.py", "2 * x", "3 * x"),),
        test_cmd="python -m pytest --doctest-modules",
    ),
    "doctest: classes and branches": Shape(
        package(
            {"tox.ini": DOCTEST_MODULES},
            core='__test__ = {"more words": ">>> Box(1).twice\\n2\\n"}\n'
            "try:\n    import nowhere\n"
            "except ImportError:\n    class Box:\n"
            '        """\n        >>> Box(1).x\n        1\n        """\n        def __init__(self, x): self.x = x\n'
            '        @property\n        def twice(self):\n            """\n            >>> Box(3).twice\n            6\n'
            '            """\n            return 2 * self.x\n',
        ),
        **both("pkg/core.py", fail=["pkg.core.Box.twice", "pkg.core.__test__.more words"], keep=["pkg.core.Box"]),
        bug=(("pkg/core.py", "2 * self", "3 * self"),),
    ),
    "doctest: the docstring goes with the bug": Shape(
        package({"pytest.ini": DOCTEST_MODULES}),
        **both("pkg/core.py", fail=["pkg.core.double"], keep=["pkg.core.half"]),
        bug=(("pkg/core.py", DOUBLE[: DOUBLE.index("def half")], ""),),
    ),
    "doctest: a source that pytest would stumble over": Shape(
        package(
            {"pytest.ini": DOCTEST_MODULES + "filterwarnings = error\n"},
            core="class TestClient:\n    def __init__(self, x): pass\n" + DOUBLE,
        ),
        **both("pkg/core.py", fail=["pkg.core.double"], keep=["pkg.core.half"]),
    ),
    "doctest: src": Shape(
        package({"pytest.ini": DOCTEST_MODULES + "testpaths = src\n"}, where="src/pkg"),
        **both("src/pkg/core.py", fail=["pkg.core.double"], keep=["pkg.core.half"]),
        bug=(("src/pkg/core.py", "2 * x", "3 * x"),),
        pythonpath="src",
    ),
    "doctest: pytest 7": Shape(
        {"pkg/__init__.py": DOUBLE},
        **both("pkg/__init__.py", fail=["pkg.double"], keep=["pkg.half"]),
        bug=(("pkg/__init__.py", "2 * x", "3 * x"),),
        test_cmd="pytest --doctest-modules --import-mode=importlib",
        requirements=PYTEST_7,
    ),
    # Doctests in texts.
    "text: README": Shape(
        package({"README.rst": "Double::\n\n    >>> from pkg.core import double\n    >>> double(4)\n    8\n"}),
        fail=("README.rst::README.rst",),
        test_cmd="python -m pytest --doctest-glob=README.rst",
    ),
    "text: docs": Shape(
        package(
            {
                "pytest.ini": "[pytest]\naddopts = --doctest-glob=*.rst --doctest-glob=*.md\ndoctest_optionflags = ELLIPSIS\n",
                "docs/usage.rst": ">>> double(4)\n8\n",
                "docs/half.md": ">>> half(4)\n2...\n",
                "docs/conftest.py": "import pytest, pkg.core\n@pytest.fixture(autouse=True)\n"
                "def names(doctest_namespace): doctest_namespace.update(vars(pkg.core))\n",
            }
        ),
        fail=("docs/usage.rst::usage.rst",),
        keep=("docs/half.md::half.md",),
    ),
    # Styles of tests.
    "unittest: classes": plain(
        {
            "tests/test_core.py": "import unittest\nfrom pkg.core import double, half\n"
            "class Base(unittest.TestCase):\n    def setUp(self): self.two = 2\n"
            "class TestCore(Base):\n    def test_double(self):\n"
            "        for x in (0, 1):\n            with self.subTest(x=x): self.assertEqual(double(x), 2 * x)\n"
            "    def test_half(self): self.assertEqual(half(self.two), 1)\n"
        },
        **both("tests/test_core.py", fail=["TestCore::test_double"], keep=["TestCore::test_half"]),
    ),
    "unittest: subtests that are skipped": plain(
        {
            "tests/test_core.py": "import unittest\nfrom pkg.core import double, half\n"
            "class CoreCase(unittest.IsolatedAsyncioTestCase):\n    async def test_double(self): assert double(1) == 2\n"
            "    def test_half(self):\n        for x in (0, 1):\n            with self.subTest(x=x):\n"
            "                if x: self.skipTest('not this one')\n                self.assertEqual(half(x), 0)\n"
        },
        **both("tests/test_core.py", fail=["CoreCase::test_double"], keep=["CoreCase::test_half"]),
        requirements=PYTEST_9,
    ),
    "src: pytest alone": Shape(
        package({"tests/test_core.py": TESTS}, where="src/pkg"),
        **both("tests/test_core.py"),
        bug=(("src/pkg/core.py", "2 * x", "3 * x"),),
        pythonpath="src",
        test_cmd="pytest",
    ),
    "src: namespace package": Shape(
        {"src/ns/pkg/core.py": DOUBLE, "tests/unit/test_core.py": TESTS.replace("pkg.core", "ns.pkg.core")},
        **both("tests/unit/test_core.py"),
        bug=(("src/ns/pkg/core.py", "2 * x", "3 * x"),),
        pythonpath="src",
        test_cmd="PYTHONDEVMODE=1 python -m pytest --import-mode=importlib",
    ),
    "namespace: two roots": Shape(
        {
            "a/ns/one.py": DOUBLE,
            "b/ns/two.py": "from ns.one import double, half\n",
            "tests/test_core.py": TESTS.replace("pkg.core", "ns.two"),
        },
        **both("tests/test_core.py"),
        bug=(("a/ns/one.py", "2 * x", "3 * x"),),
        pythonpath="a:b",
    ),
    "conftest: parameters of the root": plain(
        {
            "conftest.py": "def pytest_generate_tests(metafunc):\n    if 'case' in metafunc.fixturenames:\n"
            "        metafunc.parametrize('case', [(0, 0), (1, 2)], ids=['zero', 'one [more]'])\n",
            "tests/test_core.py": "from pkg.core import double\ndef test_double(case): assert double(case[0]) == case[1]\n",
        },
        **both("tests/test_core.py", fail=["test_double[one [more]]"], keep=["test_double[zero]"]),
    ),
    "conftest: parameters from files": plain(
        {
            "conftest.py": "import pathlib\ndef pytest_generate_tests(metafunc):\n"
            "    metafunc.parametrize('path', sorted(pathlib.Path(__file__).parent.glob('cases/*.txt')), ids=lambda p: p.name)\n",
            "cases/0.txt": "0",
            "cases/1.txt": "2",
            "tests/test_core.py": "from pkg.core import double\n"
            "def test_double(path): assert double(int(path.stem)) == int(path.read_text())\n",
        },
        **both("tests/test_core.py", fail=["test_double[1.txt]"], keep=["test_double[0.txt]"]),
    ),
    # Configuration.
    "strict: pytest.ini": plain(
        {
            "pytest.ini": "[pytest]\naddopts = --strict-markers --strict-config --cache-clear -ra -x\nminversion = 7.0\n"
            "cache_dir = .cache/pytest\nxfail_strict = true\nmarkers =\n    quick: it is\n",
            "tests/test_core.py": "import pytest\n" + TESTS.replace("def", "@pytest.mark.quick\ndef"),
        }
    ),
    "strict: pyproject.toml": plain(
        {
            "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--strict-markers', '--strict-config', '--ff']\n"
            "required_plugins = ['pytest-asyncio>=0.21']\nminversion = '6.0'\nasyncio_mode = 'strict'\n",
            "tests/test_core.py": "def test_cache(pytestconfig): assert pytestconfig.cache.get('a/b', 1)\n" + TESTS,
        },
        **both("tests/test_core.py", keep=["test_half", "test_cache"]),
        requirements=ASYNCIO,
    ),
    "warnings: configuration": plain(
        {
            "setup.cfg": "[tool:pytest]\nfilterwarnings =\n    error\n    ignore:mine:UserWarning\n",
            "tests/test_core.py": "import warnings\n" + TESTS + "def test_warn(): warnings.warn('mine')\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_warn"]),
    ),
    "warnings: command": plain(
        {
            "tests/test_core.py": "import pytest, warnings\n"
            + TESTS
            + "def test_warn():\n    with pytest.raises(UserWarning): warnings.warn('x')\n"
        },
        **both("tests/test_core.py", keep=["test_half", "test_warn"]),
        test_cmd="python -m pytest -W error --disable-warnings --color=no --tb=no --verbose",
    ),
    "names: setup.cfg": plain(
        {
            "setup.cfg": "[tool:pytest]\ntestpaths = checks\npython_files = check_*.py\npython_classes = *Checks\n"
            "python_functions = check_*\n",
            "checks/check_core.py": "from pkg.core import double, half\nclass CoreChecks:\n"
            "    def check_double(self): assert double(1) == 2\ndef check_half(): assert half(2) == 1\n"
            "def check_core(): pass\n",
        },
        **both("checks/check_core.py", fail=["CoreChecks::check_double"], keep=["check_half", "check_core"]),
    ),
    "names: tox.ini": plain(
        {
            "tox.ini": "[pytest]\ntestpaths = spec\npython_files = *_spec.py\n",
            "spec/core_spec.py": TESTS,
        },
        **both("spec/core_spec.py"),
    ),
    "plugins: absent": plain(
        {"pytest.ini": "[pytest]\naddopts = -p no:randomly -p no:xdist -p no:cov -p no:cacheprovider\n"}
    ),
    "plugins: none by themselves": plain(test_cmd="PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -p no:doctest"),
    "options: traceback": plain(
        {"tests/test_core.py": TESTS + "def test_tb(request): assert request.config.getoption('tbstyle') == 'no'\n"},
        **both("tests/test_core.py", keep=["test_half", "test_tb"]),
        test_cmd="python -m pytest --tb=no",
    ),
    "options: color": plain(
        {
            "pytest.ini": "[pytest]\naddopts = --color=yes --tb=native\n",
            "tests/test_core.py": TESTS + "def test_color(pytestconfig):\n"
            "    assert (pytestconfig.option.color, pytestconfig.option.tbstyle) == ('yes', 'native')\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_color"]),
    ),
    "asyncio: auto": plain(
        {
            "pytest.ini": "[pytest]\nasyncio_mode = auto\n",
            "tests/test_core.py": TESTS.replace("def test", "async def test"),
        },
        requirements=ASYNCIO,
    ),
    "asyncio: strict": plain(
        {
            "tests/test_core.py": "import pytest\n" + TESTS.replace("def test", "@pytest.mark.asyncio\nasync def test"),
        },
        requirements=ASYNCIO,
        test_cmd="python -m pytest --asyncio-mode=strict",
    ),
    # What tests can look at.
    "metadata: version": plain(
        {
            "pyproject.toml": "[build-system]\nrequires = ['flit_core']\nbuild-backend = 'flit_core.buildapi'\n"
            "[project]\nname = 'My.Pkg'\nversion = '1.2.3'\ndescription = 'Small'\n",
            "pkg/__init__.py": "from importlib.metadata import version\n__version__ = version('my-pkg')\n",
            "tests/test_core.py": TESTS
            + "def test_version():\n    import pkg\n    assert pkg.__version__ == '1.2.3'\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_version"]),
    ),
    "metadata: version of an attribute": plain(
        {
            "setup.cfg": "[metadata]\nname = pkg\nversion = attr: pkg.__version__\n[options.entry_points]\n"
            "console_scripts =\n    pkg-double = pkg.core:main\npkg.plugins =\n    one = pkg.core:double\n",
            "pkg/__init__.py": "__version__ = '0.7'\n",
            "pkg/core.py": DOUBLE + "def main():\n    import sys\n    print(double(int(sys.argv[1])))\n",
            "tests/test_core.py": "import subprocess\nfrom importlib.metadata import entry_points, version\n"
            + TESTS
            + "def test_version(): assert version('pkg') == '0.7'\n"
            "def test_script(): assert subprocess.check_output(['pkg-double', '4']) == b'8\\n'\n"
            "def test_plugin(): assert [e.load() for e in entry_points(group='pkg.plugins')] == [double]\n",
        },
        **both(
            "tests/test_core.py", fail=["test_double", "test_script"], keep=["test_half", "test_version", "test_plugin"]
        ),
    ),
    "programs: python -m": plain(
        {
            "pkg/__main__.py": "import sys\nfrom pkg.core import double\nprint(double(int(sys.argv[1])))\n",
            "tests/test_core.py": "import subprocess, sys\n"
            + TEST_HALF.replace("half(4)", "4 // 2")
            + "def test_double():\n"
            "    assert subprocess.check_output([sys.executable, '-m', 'pkg', '4'], cwd='/') == b'8\\n'\n",
        }
    ),
    "programs: bin": plain(
        {
            "bin/double": "#!/usr/bin/env python\nimport sys\nfrom pkg.core import double\nprint(double(int(sys.argv[1])))\n",
            "tests/test_core.py": "import subprocess\n"
            + TEST_HALF.replace("half(4)", "4 // 2")
            + "def test_double():\n"
            "    assert subprocess.check_output(['bin/double', '4']) == b'8\\n'\n",
        },
        programs=("bin/double",),
    ),
    "git: files": plain(
        {
            ".gitignore": "*.log\n",
            "MANIFEST": "pkg/core.py\n",
            "tests/test_core.py": "import subprocess\n" + TESTS + "def test_files():\n"
            "    assert open('MANIFEST').read() == subprocess.check_output(['git', 'ls-files', 'pkg/core.py'], text=True)\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_files"]),
    ),
    "git: status": plain(
        {
            "generate.py": "from pkg.core import double\nopen('table.txt', 'w').write(str(double(4)))\n",
            "table.txt": "8",
            "tests/test_core.py": "import subprocess, sys\n"
            + TEST_HALF.replace("half(4)", "4 // 2")
            + "def test_double():\n"
            "    subprocess.run([sys.executable, 'generate.py'], check=True)\n"
            "    assert subprocess.check_output(['git', 'status', '--porcelain', '-uno']) == b''\n",
        }
    ),
    "build: setuptools": plain(
        {
            "pyproject.toml": "[build-system]\nrequires = ['setuptools', 'setuptools_scm']\n"
            "build-backend = 'setuptools.build_meta'\n[project]\nname = 'pkg'\ndynamic = ['version']\n",
            "pkg/__init__.py": "from importlib import metadata\n__version__ = metadata.version('pkg')\n",
        }
    ),
    "build: hatchling": plain(
        {
            "pyproject.toml": "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
            "[project]\nname = 'pkg'\ndynamic = ['version']\n[tool.hatch.version]\npath = 'pkg/__about__.py'\n",
            "pkg/__about__.py": '__version__ = "2.0"\n',
            "tests/test_core.py": TESTS + "def test_version():\n    from importlib import metadata\n"
            "    assert metadata.version('pkg') == '2.0'\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_version"]),
    ),
    # Names and texts.
    "ids: odd": plain(
        {
            "tests/test_core.py": f"import pytest\nfrom pkg.core import double\nODD = {ODD!r}\n"
            "@pytest.mark.parametrize('x', ODD, ids=ODD)\ndef test_double(x): assert double(x) == x + x\n"
            "@pytest.mark.parametrize('x', ODD)\ndef test_same(x): assert x in ODD\n"
        },
        fail=tuple(f"tests/test_core.py::test_double[{x}]" for x in _odd_ids(ODD) if x),
        keep=tuple(f"tests/test_core.py::test_same[{x}]" for x in _odd_ids(ODD)),
    ),
    "ids: paths": Shape(
        package({"tests/br[acket]/a::b/test_core.py": TESTS}), **both("tests/br[acket]/a::b/test_core.py")
    ),
    "ids: not escaped": plain(
        {
            "pytest.ini": "[pytest]\ndisable_test_id_escaping_and_forfeit_all_rights_to_community_support = True\n",
            "tests/test_core.py": "import pytest\nfrom pkg.core import double\n"
            "@pytest.mark.parametrize('x', ['ü', '日本', 'a b'])\ndef test_double(x): assert double(x) == x + x\n",
        },
        **both("tests/test_core.py", fail=["test_double[ü]", "test_double[日本]", "test_double[a b]"], keep=[]),
    ),
    "bytes: CRLF": Shape(
        package(
            {"pytest.ini": DOCTEST_MODULES, "tests/test_core.py": TESTS.replace("\n", "\r\n")},
            core=DOUBLE.replace("\n", "\r\n"),
        ),
        fail=("tests/test_core.py::test_double", "pkg/core.py::pkg.core.double"),
        keep=("tests/test_core.py::test_half", "pkg/core.py::pkg.core.half"),
    ),
    "bytes: other encodings": Shape(
        {
            "pkg/__init__.py": "# -*- coding: latin-1 -*-\nNAME = 'ü'\n".encode("latin-1"),
            "pkg/core.py": "\ufeff# 日本語\nLABEL = 'größer'\n" + DOUBLE.replace("ab", "ü"),
            "tests/test_core.py": TESTS + "def test_name():\n    import pkg\n    assert pkg.NAME == 'ü'\n",
            "tests/größe.txt": "ü",
            "pytest.ini": DOCTEST_MODULES,
        },
        fail=("tests/test_core.py::test_double", "pkg/core.py::pkg.core.double"),
        keep=("tests/test_core.py::test_half", "tests/test_core.py::test_name"),
    ),
    "bytes: attributes": plain(
        {
            ".gitattributes": "* text=auto eol=crlf\n*.py text ident export-subst filter=lfs\n*.txt working-tree-encoding=UTF-16\n",
            "pkg/core.py": "# $Id$ $Format:%H$\r\n" + DOUBLE.replace("\n", "\r\n"),
            "tests/data.txt": "4",
            "tests/test_core.py": TESTS + "def test_bytes():\n    source = open('pkg/core.py', 'rb').read()\n"
            "    assert source.startswith(b'# $Id$ $Format:%H$\\r\\n') and source.count(b'\\r\\n') == source.count(b'\\n')\n"
            "    assert open('tests/data.txt', 'rb').read() == b'4'\n",
        },
        **both("tests/test_core.py", keep=["test_half", "test_bytes"]),
    ),
    "library: __init__.py": Shape(
        {"pkg/__init__.py": DOUBLE, "tests/test_core.py": TESTS.replace("pkg.core", "pkg")},
        **both("tests/test_core.py"),
        bug=(("pkg/__init__.py", "2 * x", "3 * x"),),
    ),
    "library: __init__.py with doctests and tests": Shape(
        {"pkg/__init__.py": DOUBLE, "pkg/test_pkg.py": TESTS.replace("pkg.core", "pkg"), "pytest.ini": DOCTEST_MODULES},
        fail=("pkg/test_pkg.py::test_double", "pkg/__init__.py::pkg.double"),
        keep=("pkg/test_pkg.py::test_half", "pkg/__init__.py::pkg.half"),
        bug=(("pkg/__init__.py", "2 * x", "3 * x"),),
    ),
    "bugs: two files": plain(
        {
            "pkg/more.py": "def thrice(x): return 3 * x\n",
            "tests/test_core.py": TESTS
            + "def test_thrice():\n    from pkg.more import thrice\n    assert thrice(2) == 6\n",
        },
        **both("tests/test_core.py", fail=["test_double", "test_thrice"]),
        bug=(("pkg/core.py", "2 * x", "3 * x"), ("pkg/more.py", "3 * x", "4 * x")),
    ),
    "bugs: sources and tests": plain(
        {"tests/data.txt": "4"},
        bug=(("pkg/core.py", "2 * x", "3 * x"), ("tests/test_core.py", "== 4", "== 5"), ("tests/data.txt", "4", "5")),
    ),
}
