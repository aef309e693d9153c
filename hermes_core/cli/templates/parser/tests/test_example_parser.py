"""What the parser reads, and what it does with text that it can't read."""

import random
import time

import pytest

import example_parser as plugin
from hermes_core import ParsedText, Runtime

PARSER = Runtime(plugins=[plugin], load_entry_points=False).parser("example-parser")


def parse(text: str) -> ParsedText:
    """Take a text apart."""
    return PARSER.parse(text, ())


def test_calls_and_words_are_told_apart() -> None:
    parsed = parse('I look.\n@call terminal {"command": "ls"}\n@call done')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("terminal", {"command": "ls"}), ("done", {})]
    assert parsed.content == "I look."
    assert parsed.problems == ()


@pytest.mark.parametrize("arguments", ['{"command": ', "[1]", '"ls"', "[" * 100_000])
def test_a_call_that_can_t_be_read_is_a_problem_of_its_own(arguments: str) -> None:
    parsed = parse(f'@call broken {arguments}\n@call terminal {{"command": "ls"}}')
    assert [problem.name for problem in parsed.problems] == ["broken"]
    assert [call.name for call in parsed.calls] == ["terminal"]


def test_no_text_makes_it_raise() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        parse("".join(draw.choices('@call x{}[]":, \n\\u0', k=draw.randrange(60))))


def test_its_time_is_linear() -> None:
    began = time.perf_counter()
    parse("@call x {" * 200_000)
    assert time.perf_counter() - began < 10
