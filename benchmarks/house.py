"""Figures of the code itself: its size by room, its names, and how wide its interfaces are.

    python -m benchmarks.house                 # this checkout
    python -m benchmarks.house ../before .     # two, side by side

A room is a package below `hermes_core` or `plugins`. Templates of `hermes-rl new` are left out: they are data.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MOST_PARAMETERS, MOST_METHODS, MOST_IMPORTS = 8, 15, 15

_IRREGULAR = frozenset(
    {
        *("told", "shown", "said", "made", "found", "given", "known", "written", "kept", "left", "sent", "held"),
        *("taken", "begun", "done", "drawn", "paid", "spent", "bound", "hidden", "chosen", "broken", "driven"),
        *("built", "lent", "met", "put", "understood", "caught", "heard", "lost", "thrown"),
    }
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_PARTICIPLES = ["need", "feed", "seed", "embed", "speed", "exceed", "succeed", "proceed"]


@dataclass
class House:
    """What was counted in one checkout."""

    rooms: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    classes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


def count_house(root: Path) -> House:
    """Count what is in a checkout."""
    house = House()
    for room, path in sources(root):
        text = path.read_text()
        count_lines(house.rooms[room], text)
        if room != "tests":
            count_names(house, ast.parse(text))
    house.counts["class names defined more than once"] = sum(number > 1 for number in house.classes.values())
    return house


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield each module with its room."""
    for top in ("hermes_core", "plugins", "tests"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).parts
            if "templates" in parts or any(part.startswith((".", "build")) for part in parts):
                continue
            depth = {"hermes_core": 3 if parts[1] == "sandbox" else 2, "plugins": 2, "tests": 1}[top]
            yield "/".join(parts[: min(depth, len(parts) - 1)]), path


def count_lines(room: Counter[str], text: str) -> None:
    """Add a module's lines of each kind. A line is of the first kind that fits: docstring, code, comment, blank."""
    lines = text.splitlines()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    room["modules"] += 1
    room["lines"] += len(lines)
    room["docstrings"] += len(docs)
    room["code"] += len(code - docs)
    room["comments"] += len(comments)


def count_names(house: House, tree: ast.Module) -> None:
    """Add what is counted of a module's names and interfaces."""
    counts = house.counts
    imported = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hermes_")
    ]
    counts[f"modules that import more than {MOST_IMPORTS} project names"] += (
        sum(len(node.names) for node in imported) > MOST_IMPORTS
    )
    counts["Any"] += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
    counts["getattr and hasattr"] += sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            house.classes[node.name] += 1
            public = [each for each in node.body if isinstance(each, _FUNCTIONS) and not each.name.startswith("_")]
            counts[f"classes with more than {MOST_METHODS} public methods"] += len(public) > MOST_METHODS
        elif isinstance(node, _FUNCTIONS):
            counts["functions"] += 1
            counts["functions named by a participle"] += is_participle(node.name)
            counts[f"functions with more than {MOST_PARAMETERS} parameters"] += parameters(node) > MOST_PARAMETERS


def is_participle(name: str) -> bool:
    """Return whether a function's name begins with a past participle."""
    first = name.strip("_").split("_")[0]
    return first in _IRREGULAR or (first.endswith("ed") and len(first) > 3 and first not in _NO_PARTICIPLES)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function has, without `self` and `cls`."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(each.arg not in {"self", "cls"} for each in given)


def print_houses(houses: Mapping[str, House]) -> None:
    """Print the figures of some checkouts side by side."""
    for kind in ("lines", "code", "docstrings", "comments", "modules"):
        print(f"\n{kind:58}" + "".join(f"{name[-12:]:>13}" for name in houses))
        rooms = sorted({room for house in houses.values() for room in house.rooms})
        for room in (*rooms, "core", "core and plugins"):
            row = [total(house, room, kind) for house in houses.values()]
            print(f"  {room:56}" + "".join(f"{number:13,}" for number in row))
    print()
    for what in sorted({what for house in houses.values() for what in house.counts}):
        print(f"{what:58}" + "".join(f"{house.counts[what]:13,}" for house in houses.values()))
    for name, house in houses.items():
        twice = sorted(each for each, number in house.classes.items() if number > 1)
        print(f"\nclasses defined more than once in {name}: {', '.join(twice) or 'none'}")


def total(house: House, room: str, kind: str) -> int:
    """Return a figure of a room, or of several."""
    prefixes = {"core": ("hermes_core",), "core and plugins": ("hermes_core", "plugins")}.get(room)
    if prefixes is None:
        return house.rooms[room][kind]
    return sum(counts[kind] for name, counts in house.rooms.items() if name.startswith(prefixes))


def main(paths: Sequence[str]) -> None:
    """Print the figures of these checkouts, or of this one."""
    print_houses({path: count_house(Path(path)) for path in paths or ["."]})


if __name__ == "__main__":
    main(sys.argv[1:])
