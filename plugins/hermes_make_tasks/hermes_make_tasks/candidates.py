"""Chooses the changes to try, in an order that depends on the seed alone, and combines changes that were kept."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hermes_make_tasks.bench import Surveyed
from hermes_make_tasks.kinds import Mutation, mutations
from hermes_make_tasks.sources import Edit, Function, SourceFile, apply_edits

LEAST_COMPLEXITY = 3
"""Functions of a lower complexity are not changed. This is SWE-smith's own limit."""

COMBINED = {
    "combine-functions": "two or three kept bugs of one file, in different functions",
    "combine-files": "two or three kept bugs of different files",
}
"""Kinds of bugs that combine bugs of other kinds."""


@dataclass(frozen=True)
class FunctionChange:
    """A change of one function."""

    path: str
    function: str
    mutation: Mutation


@dataclass(frozen=True)
class BugCandidate:
    """A bug that may become a task."""

    kind: str
    parts: tuple[FunctionChange, ...]

    @cached_property
    def key(self) -> str:
        """Return a hash of the change, which is the same in every run."""
        text = "\0".join(f"{part.path}\0{edit}" for part in self.parts for edit in map(tuple, part.mutation.edits))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Return the changed functions, each as path and qualified name."""
        return list(dict.fromkeys((part.path, part.function) for part in self.parts))

    def edits(self) -> dict[str, list[Edit]]:
        """Return the edits by file."""
        found: dict[str, list[Edit]] = defaultdict(list)
        for part in self.parts:
            found[part.path] += part.mutation.edits
        return dict(found)


def singles(
    sources: Mapping[str, SourceFile], surveyed: Surveyed, kinds: Sequence[str], seed: int, per_function: int
) -> list[BugCandidate]:
    """Return changes of one function each, in lines that tests run. Blocking.

    The first changes are of as many functions and kinds as possible. Functions below `LEAST_COMPLEXITY` are left out.

    Args:
        per_function: the most changes of one function.
    """
    covered: dict[str, int] = defaultdict(int)
    for test in surveyed.tests:
        for path, bits in test.lines.items():
            covered[path] |= bits
    by_function = []
    for path, source in sorted(sources.items()):
        for function in source.functions:
            if function.complexity < LEAST_COMPLEXITY:
                continue
            found = _of_function(
                source, function, covered[path], kinds, random.Random(f"{seed} {path} {function.name}")
            )
            by_function.append(list(itertools.islice(found, per_function)))
    order = random.Random(f"{seed}")
    chosen: list[BugCandidate] = []
    for turn in range(per_function):
        have = [found for found in by_function if len(found) > turn]
        chosen += [found[turn] for found in order.sample(have, len(have))]
    return chosen


def _of_function(
    source: SourceFile, function: Function, covered: int, kinds: Sequence[str], order: random.Random
) -> Iterator[BugCandidate]:
    """Yield the function's changes in covered lines, one of each kind in turn.

    Args:
        covered: the lines that tests run: bit n stands for line n.
    """
    by_kind: dict[str, list[BugCandidate]] = defaultdict(list)
    seen = {source.text}
    for mutation in mutations(source, function, kinds):
        first, last = mutation.lines
        if not covered >> first & ((1 << (last - first + 1)) - 1):
            continue
        try:
            text = apply_edits(source.text, mutation.edits)
        except ValueError:
            continue
        if text not in seen:
            seen.add(text)
            by_kind[mutation.kind].append(
                BugCandidate(mutation.kind, (FunctionChange(source.path, function.name, mutation),))
            )
    for found in by_kind.values():
        order.shuffle(found)
    turns = itertools.zip_longest(*order.sample(list(by_kind.values()), len(by_kind)))
    yield from (candidate for turn in turns for candidate in turn if candidate is not None)


def most_of_a_kind(tasks: int, kinds: int) -> float:
    """Return the maximum number of tasks of one kind among `tasks` tasks: twice the kind's share, but at least two.

    The number of wanted tasks does not count, so that a run that goes on with a higher number decides as before.
    """
    return max(2.0, 2 * (tasks + 1) / max(1, kinds))


def combinations(
    kept: Sequence[BugCandidate], kinds: Sequence[str], seed: int, most: int, *, but: Sequence[BugCandidate] = ()
) -> list[BugCandidate]:
    """Return up to `most` combinations of kept changes of one function each.

    Args:
        kinds: the kinds of `COMBINED` to make.
        but: combinations that were tried already.
    """
    known = {candidate.key for candidate in but}
    order = random.Random(f"{seed} {len(kept)}")
    by_file: dict[str, list[BugCandidate]] = defaultdict(list)
    for candidate in kept:
        by_file[candidate.parts[0].path].append(candidate)
    found: dict[str, BugCandidate] = {}
    for _ in range(10 * most):
        kind, size = order.choice(sorted(kinds)), order.choice((2, 2, 3))
        if kind == "combine-functions":
            rich = [path for path in sorted(by_file) if len(by_file[path]) >= size]
            chosen = order.sample(by_file[order.choice(rich)], size) if rich else []
        else:
            files = order.sample(sorted(by_file), size) if len(by_file) >= size else []
            chosen = [order.choice(by_file[path]) for path in files]
        parts = tuple(part for candidate in chosen for part in candidate.parts)
        if parts and len({(part.path, part.function) for part in parts}) == size and not _overlap(parts):
            combined = BugCandidate(kind, tuple(sorted(parts, key=lambda part: (part.path, part.mutation.edits))))
            if combined.key not in known:
                found.setdefault(combined.key, combined)
        if len(found) == most:
            break
    return list(found.values())


def _overlap(parts: Sequence[FunctionChange]) -> bool:
    edits = sorted((part.path, edit.start, edit.end) for part in parts for edit in part.mutation.edits)
    return any(one[0] == two[0] and two[1] < one[2] for one, two in itertools.pairwise(edits))
