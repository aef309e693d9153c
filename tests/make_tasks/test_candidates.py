"""The order of changes depends on the seed alone, spreads over functions and kinds, and combines no two twice."""

from __future__ import annotations

from hermes_make_tasks.bench import Surveyed, SurveyedTest
from hermes_make_tasks.candidates import BugCandidate, combinations, most_of_a_kind, singles
from hermes_make_tasks.difficulty import estimate
from hermes_make_tasks.kinds import kinds
from hermes_make_tasks.sources import read_source

TEXT = "".join(f"def f{n}(a, b):\n    if a > {n}:\n        return a - b\n    return b\n\n\n" for n in range(6))
SOURCES = {path: read_source(path, TEXT.encode()) for path in ("x.py", "y.py")}
EVERY_LINE = (1 << 60) - 1


def surveyed(**lines: int) -> Surveyed:
    test = SurveyedTest("t.py::a", "passed", 0.1, {f"{name}.py": bits for name, bits in lines.items()})
    return Surveyed((test,), SurveyedTest("", "", 0.0, {}))


def chosen(seed: int = 1, per_function: int = 9) -> list[BugCandidate]:
    return singles(SOURCES, surveyed(x=EVERY_LINE, y=EVERY_LINE), list(kinds()), seed, per_function)


def test_the_same_seed_gives_the_same_order() -> None:
    assert chosen() == chosen()
    assert [each.key for each in chosen(2)] != [each.key for each in chosen(1)]
    assert len({each.key for each in chosen()}) == len(chosen())


def test_the_first_changes_are_of_all_functions() -> None:
    first = chosen()[:12]
    assert len({each.functions[0] for each in first}) == 12
    assert len({each.kind for each in chosen()}) >= 6
    assert (
        max(
            map(
                len,
                [
                    [each for each in chosen(per_function=3) if each.functions == [function]]
                    for function in {each.functions[0] for each in first}
                ],
            ),
            default=0,
        )
        <= 3
    )


def test_only_lines_that_tests_run_are_changed() -> None:
    found = singles(SOURCES, surveyed(x=1 << 4), list(kinds()), 1, 9)
    assert {each.parts[0].path for each in found} == {"x.py"}
    assert {each.parts[0].function for each in found} == {"f0"}
    assert all(each.parts[0].mutation.lines[0] <= 4 <= each.parts[0].mutation.lines[1] for each in found)


def test_functions_that_decide_little_are_left_out() -> None:
    text = "def plain(a):\n    return a + 1\n\n\ndef rich(a):\n    if a > 1:\n        return a\n"
    sources = {"x.py": read_source("x.py", text.encode())}
    found = singles(sources, surveyed(x=EVERY_LINE), list(kinds()), 1, 9)
    assert {each.parts[0].function for each in found} == {"rich"}


def test_no_kind_has_more_than_twice_its_share() -> None:
    for kinds_given, tasks, most in ((25, 10, 2), (25, 99, 8), (1, 0, 2), (1, 10, 22), (2, 9, 10)):
        assert most_of_a_kind(tasks, kinds_given) == most


def test_no_combination_is_made_twice() -> None:
    kept, made = chosen()[:8], []
    for _ in range(10):
        new = combinations(kept, ["combine-files", "combine-functions"], 1, 3, but=made)
        made += new
    assert len({each.key for each in made}) == len(made) > 10
    for each in made:
        assert len(each.functions) == len(each.parts) in (2, 3)
        assert (len({path for path, _ in each.functions}) == 1) == (each.kind == "combine-functions")


def test_more_functions_and_a_farther_test_are_harder() -> None:
    near = SurveyedTest("t.py::a", "passed", 0.1, {"x.py": 1 << 2})
    far = SurveyedTest("t.py::b", "passed", 0.1, {"x.py": EVERY_LINE, "y.py": EVERY_LINE})
    single, both = chosen()[0], combinations(chosen()[:8], ["combine-files"], 1, 1)[0]
    assert estimate(single, [near], SOURCES)["distance"] == 1
    assert estimate(single, [far], SOURCES)["distance"] == 12
    scores = [
        estimate(*each, SOURCES)["score"]
        for each in ((single, [near] * 4), (single, [near]), (single, [far]), (both, [far]))
    ]
    assert scores == sorted(scores)
    assert len(set(scores)) == 4
