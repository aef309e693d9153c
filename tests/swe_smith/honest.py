"""Small projects that canaries must not disturb, and that must not disturb canaries: their files and node ids."""

# ruff: noqa: E501
# (files, which are easier to read unbroken)

CORE = "def double(x):\n    return 2 * x\n"
PLAIN = "def test_double():\n    assert double(2) == 4\n\n\ndef test_text():\n    assert double('ab') == 'abab'\n"
FROM = "from core import double\n\n\n"
KNOWN = "KNOWN = ('test_double', 'test_text')\n"


def ini(*lines):
    return {"pytest.ini": "\n".join(["[pytest]", *lines, ""])}


def in_tests(text, *, beginning=FROM):
    return {"tests/test_core.py": beginning + text}


def conftest(text):
    return {"tests/conftest.py": "import pytest\n" + text}


METHODS = "    def test_double(self):\n        assert double(2) == 4\n\n    def test_text(self):\n        assert double('a') == 'aa'\n"
IN_CLASS = {"fail": ["tests/test_core.py::TestCore::test_double"], "keep": ["tests/test_core.py::TestCore::test_text"]}

WORKING = {
    "plugins that are switched off": (ini("addopts = -p no:cacheprovider -p no:tmpdir -p no:monkeypatch -p no:doctest"), {}),
    "all is strict": (ini("addopts = --strict-markers --strict-config -x --maxfail=1", "xfail_strict = true"), {}),
    "xdist": (ini("addopts = -n 2"), {}),
    "a time limit": (ini("timeout = 30"), {}),
    "warnings are errors": (ini("filterwarnings =", "    error"), {}),
    "a test for one way of collecting": (ini("addopts = --import-mode=importlib", "testpaths = nowhere"), {}),
    "other names": (
        {
            **ini("python_files = check_*.py", "python_functions = check_*"),
            "tests/check_core.py": FROM + PLAIN.replace("test_", "check_"),
        },
        {"fail": ["tests/check_core.py::check_double"], "keep": ["tests/check_core.py::check_text"]},
    ),
    "names that end so": (
        {
            **ini("python_functions = *_is_right"),
            **in_tests("def double_is_right():\n    assert double(2) == 4\n\n\ndef a_text_is_right():\n    assert double('a') == 'aa'\n"),
        },
        {"fail": ["tests/test_core.py::double_is_right"], "keep": ["tests/test_core.py::a_text_is_right"]},
    ),
    "a class": (in_tests("class TestCore:\n" + METHODS), IN_CLASS),
    "a unittest class": (
        in_tests(
            "class TestCore(unittest.TestCase):\n    def setUp(self):\n        self.two = 2\n\n"
            "    def test_double(self):\n        self.assertEqual(double(self.two), 4)\n\n"
            "    def test_text(self):\n        self.assertEqual(double('a'), 'aa')\n\n\n"
            "if __name__ == '__main__':\n    unittest.main()\n",
            beginning="import unittest\n" + FROM,
        ),
        IN_CLASS,
    ),
    "a class in a class": (
        in_tests("class TestCore:\n    class TestInner:\n" + "".join("    " + line + "\n" for line in METHODS.splitlines())),
        {
            "fail": ["tests/test_core.py::TestCore::TestInner::test_double"],
            "keep": ["tests/test_core.py::TestCore::TestInner::test_text"],
        },
    ),
    "tabs": (in_tests("class TestCore:\n" + METHODS.replace("    ", "\t")), IN_CLASS),
    "one line each": (in_tests("def test_double(): assert double(2) == 4\ndef test_text(): assert double('ab') == 'abab'\n"), {}),
    "types": (
        in_tests(PLAIN.replace("test_double()", "test_double(two: Two) -> None").replace("():", "() -> None:")
        + "\n\n@pytest.fixture\ndef two() -> Two:\n    return Two()\n", beginning="import pytest\n" + FROM + "class Two: pass\n\n\n"),
        {},
    ),
    "umlauts": (in_tests(PLAIN.replace("'ab'", "'äb'").replace("'abab'", "'äbäb'").replace("(2)", "(len('äö'))")), {}),
    "parameters": (
        in_tests(
            "@pytest.mark.parametrize(('x', 'y'), [(1, 2), ('ä', 'ää'), (2, 4), ([1], [1, 1])])\n"
            "def test_double(x, y):\n    assert double(x) == y\n\n\ndef test_text():\n    assert double('ab') == 'abab'\n",
            beginning="import pytest\n" + FROM,
        ),
        {"fail": ["tests/test_core.py::test_double[2-4]", "tests/test_core.py::test_double[x3-y3]"]},
    ),
    "a variable for a while": (
        in_tests("@mock.patch.dict(os.environ, {'A': '4'})\ndef test_double():\n    with mock.patch.dict(os.environ, {'B': '2'}):\n"
        "        assert double(2) == 4\n\n\ndef test_text():\n    assert double('a') == 'aa'\n", beginning="import os\nfrom unittest import mock\n" + FROM),
        {},
    ),
    "a class with parameters": (
        in_tests("@pytest.mark.parametrize('n', [1, 2])\nclass TestCore:\n" + METHODS.replace("self", "self, n")
        + "\n\ndef test_text():\n    assert double('a') == 'aa'\n", beginning="import pytest\n" + FROM),
        {"fail": [f"tests/test_core.py::TestCore::test_double[{n}]" for n in (1, 2)]},
    ),
    "a fixture with parameters": (
        {
            **conftest("@pytest.fixture(params=[1, 2])\ndef n(request):\n    return request.param\n"),
            **in_tests(PLAIN.replace("test_double()", "test_double(n)")),
        },
        {"fail": [f"tests/test_core.py::test_double[{n}]" for n in (1, 2)]},
    ),
    "a fixture around all": (
        conftest("@pytest.fixture(autouse=True)\ndef around(tmp_path, monkeypatch):\n    monkeypatch.chdir(tmp_path)\n    yield\n"),
        {},
    ),
    "others are not collected": (conftest("collect_ignore_glob = ['other*']\n"), {}),
    "the order is another": (conftest("def pytest_collection_modifyitems(items):\n    items.reverse()\n"), {}),
    "a name that is defined twice": (in_tests("def test_double():\n    assert 1 == 2\n\n\n" + PLAIN), {}),
    "a counter that all share": (
        {
            **in_tests("COUNT = []\n\n\ndef test_double():\n    COUNT.append(1)\n    assert double(2) == 4\n\n\n"
            "def test_text():\n    assert double('a') == 'aa'\n"),
        },
        {},
    ),
}  # fmt: skip
"""Canaries do what they should."""

WITHOUT = {
    "files that look at lines": in_tests(
        PLAIN + "\n\ndef test_place():\n    assert test_double.__code__.co_firstlineno == 4\n"
    ),
    "files that look at themselves": in_tests(
        PLAIN + "\n\nALL = [name for name in globals() if name.startswith('test')]\n"
    ),
    "ends of lines": in_tests(PLAIN.replace("\n", "\r\n")),
    "a byte order mark": in_tests(PLAIN, beginning="\ufeff" + FROM),
    "another encoding": in_tests(PLAIN, beginning="# coding: latin-1\n" + FROM),
    "steps": {**ini("addopts = --stepwise")},
    "tests that depend on each other": conftest(
        "def pytest_runtest_makereport(item, call):\n    if call.excinfo is not None:\n        item.parent.failed = item\n"
        "def pytest_runtest_setup(item):\n    if getattr(item.parent, 'failed', None):\n        pytest.xfail('it failed')\n"
    ),
    "a test that ends the session": conftest(
        "def pytest_exception_interact(node):\n    node.session.shouldstop = 'enough'\n"
    ),
}
"""None are placed, and the record says why."""

UNFIT = {
    "unknown tests are skipped": conftest(
        KNOWN + "@pytest.fixture(autouse=True)\ndef known(request):\n"
        "    if request.node.name not in KNOWN:\n        pytest.skip('unknown')\n"
    ),
    "unknown tests fail": conftest(
        KNOWN + "@pytest.fixture(autouse=True)\ndef known(request):\n    assert request.node.name in KNOWN\n"
    ),
    "unknown tests are left out": conftest(
        KNOWN
        + "def pytest_collection_modifyitems(items):\n    items[:] = [each for each in items if each.name in KNOWN]\n"
    ),
}
"""They do not work in the project. The reference solution shows it."""
