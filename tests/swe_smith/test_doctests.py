"""The docstrings of doctests, found in sources by the names that pytest gives the tests."""

import ast
import doctest
import types
from inspect import cleandoc

import pytest
from hermes_swe_smith.doctests import docstring, objects

SOURCE = '''\
"""The module.

>>> 1
1
"""
__test__ = {"a.b": ">>> 2\\n2\\n", "other": 5}

def plain():
    """>>> 3
    3"""

def plain_words():
    """No examples."""

async def waits():
    """
    >>> 4
    4
    """

class Outer:
    """
    >>> 5
    5
    """
    class Inner:
        @property
        def size(self):
            """>>> 6"""
        @size.setter
        def size(self, value): pass

if not True:
    def chosen():
        """>>> 7"""
else:
    with open("/dev/null"):
        def chosen():
            """>>> 8"""

def outside():
    def inside():
        """>>> 9"""
'''


@pytest.mark.parametrize(
    ("name", "first", "line"),
    [
        ("pkg.mod", "1", 0),
        ("pkg.mod.__test__.a.b", "2", 5),
        ("pkg.mod.plain", "3", 8),
        ("mod.plain", "3", 8),
        ("src.pkg.mod.plain", "3", 8),
        ("pkg.mod.waits", "4", 15),
        ("pkg.mod.Outer", "5", 21),
        ("pkg.mod.Outer.Inner.size", "6", 28),
        ("pkg.mod.chosen", "8", 38),
        ("pkg.mod.plain_words", None, None),
        ("pkg.mod.outside.inside", "9", 42),
        ("pkg.mod.nothing", None, None),
        ("pkg.mod.__test__.other", None, None),
        ("pkg.mod.__test__.c", None, None),
    ],
)
def test_docstrings_by_name(name, first, line):
    found = docstring(ast.parse(SOURCE), "src/pkg/mod.py", name)
    assert found == (None if first is None else (found[0], line))
    assert first is None or found[0].split(">>> ")[1].startswith(first)


def test_the_library_finds_the_same():
    module = types.ModuleType("mod")
    exec(SOURCE.replace(', "other": 5', ""), vars(module))
    tests = doctest.DocTestFinder().find(module)
    theirs = {test.name: cleandoc(test.docstring) for test in tests if test.examples}  # since 3.13 they are dedented
    tree = ast.parse(SOURCE)
    assert len(theirs) == 7
    assert {name: cleandoc(docstring(tree, "mod.py", name)[0]) for name in theirs} == theirs


@pytest.mark.parametrize(
    ("path", "name", "of"),
    [
        ("pkg/mod.py", "pkg.mod.Class.method", [["Class", "method"]]),
        ("pkg/mod.py", "mod", [[]]),
        ("pkg/pkg.py", "pkg.pkg.f", [["f"], ["pkg", "f"]]),
        ("pkg/__init__.py", "pkg.f", [["f"]]),
        ("a/pkg/__init__.py", "a.pkg.__init__.f", [["f"], ["__init__", "f"]]),
        ("pkg/mod.py", "test_it", []),
        ("pkg/mod.py", "test_it[pkg.mod]", []),
        ("pkg/mod.py", "module.f", []),
        ("README.rst", "README.rst", []),
        ("__init__.py", "__init__.f", [["f"]]),
    ],
)
def test_what_a_name_can_be_of(path, name, of):
    assert objects(path, name) == of


def test_a_test_function_that_is_called_like_its_module_is_no_doctest():
    tree = ast.parse('""">>> 1"""\ndef check_a(): pass\n')
    assert docstring(tree, "check_a.py", "check_a") is None
    assert docstring(ast.parse('""">>> 1"""\n'), "check_a.py", "check_a") == (">>> 1", 0)
