"""`hermes-rl new KIND NAME`: write a plugin's package that installs and passes its tests without changes."""

from __future__ import annotations

import importlib.resources
import importlib.util
import keyword
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

import click

from hermes_core.cli.support import new_runtime
from hermes_core.errors import OutputError, UsageError
from hermes_core.printing import say
from hermes_core.runtime import Runtime

KINDS = ("environment", "tool", "agent", "backend", "parser", "sink")

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_MOST_CHARS = 40
_NOT_SOURCE = re.compile(r"__pycache__|\..*|.*\.pyc")


@click.command()
@click.argument("kind", type=click.Choice(KINDS), metavar="KIND")
@click.argument("name", metavar="NAME")
@click.option(
    *("--dir", "parent"),
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default=".",
    metavar="DIR",
    help="The folder that the package's own folder is made in [the working directory].",
)
@click.pass_obj
def new(verbose: int, kind: str, name: str, parent: Path) -> None:
    """Write a plugin's package into the new folder NAME.

    KIND is environment, tool, agent, backend, parser or sink. The package installs, passes its tests and mypy --strict
    as it is: change it from there.
    """
    folder = write_package(new_runtime(verbose), kind, name, parent)
    say(f"wrote {folder}: a working {kind}, with its tests\n")
    say(f"  cd {folder}\n  pip install -e '.[dev]'\n  pytest\n  mypy")


def write_package(runtime: Runtime, kind: str, name: str, parent: Path) -> Path:
    """Write the package of a plugin, and return its folder.

    Args:
        runtime: has the plugins whose names are taken.

    Raises:
        UsageError: the name is not valid for a package or is taken, or the folder exists.
        OutputError: the files can't be written.
    """
    names = spellings(kind, name)
    _check_free(runtime, kind, names[f"example_{kind}"], names[f"example-{kind}"])
    folder = parent / name
    placeholder = re.compile("|".join(map(re.escape, names)))

    def fill(text: str) -> str:
        return placeholder.sub(lambda found: names[found[0]], text)

    try:
        folder.mkdir()
    except FileExistsError:
        raise UsageError(f"{folder} exists already", hint="choose another name, or another --dir") from None
    except OSError as error:
        raise OutputError(f"{folder} can't be made: {error}", hint="choose another --dir") from error
    try:
        for path, content in template(kind):
            file = folder / fill(str(path))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(fill(content))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OutputError(f"{folder} can't be written: {error}", hint="choose another --dir") from error
    return folder


def spellings(kind: str, name: str) -> dict[str, str]:
    """Return a replacement for each spelling of the template's own name.

    Raises:
        UsageError: the name is not valid for a package.
    """
    if not _NAME.fullmatch(name) or len(name) > _MOST_CHARS:
        hint = (
            f"use words of lower-case letters and digits, joined by '-' or '_', a letter first; {_MOST_CHARS} at most"
        )
        raise UsageError(f"{name!r} can't be the name of a plugin", hint=hint)
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in ("tests", "example_" + kind):
        raise UsageError(f"a Python package can't be called {package!r} here", hint="choose another name")
    return {
        f"example_{kind}": package,
        f"example-{kind}": package.replace("_", "-"),
        f"Example{kind.capitalize()}": _class_name(kind, package),
    }


def _class_name(kind: str, package: str) -> str:
    """Return the class name for a package, such as `RewardsSink` for `rewards`. The kind at its end keeps the name
    different from those of imported classes."""
    name, suffix = "".join(part.capitalize() for part in package.split("_")), kind.capitalize()
    return name if name.endswith(suffix) and name != suffix else name + suffix


def _check_free(runtime: Runtime, kind: str, package: str, name: str) -> None:
    if package in sys.stdlib_module_names or importlib.util.find_spec(package) is not None:
        raise UsageError(f"a Python module {package!r} already exists", hint="choose another name")
    for entry in runtime.plugin_manager.claims:
        if entry.kind == kind and {package, name} & {entry.name, *entry.aliases}:
            raise UsageError(
                f"{kind} {entry.name!r} already exists, provided by {entry.plugin.label}", hint="choose another name"
            )


def template(kind: str) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path and the text of each file of a kind's template: a working package called `example_KIND`."""
    yield from _files(importlib.resources.files("hermes_core.cli") / "templates" / kind, PurePosixPath())


def _files(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if _NOT_SOURCE.fullmatch(entry.name):
            continue
        if entry.is_dir():
            yield from _files(entry, path / entry.name)
        else:
            yield path / entry.name, entry.read_text()
