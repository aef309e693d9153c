"""The parser: a call is a line `@call NAME {JSON}`, and everything else is what the model says."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core import ParsedCall, ParsedText, ParseProblem

CALL = re.compile(r"^@call[ \t]+(\S+)[ \t]*(.*)$", re.MULTILINE)


class ExampleParser:
    """Keeps nothing from one text to the next: one parser serves all rollouts."""

    name = "example-parser"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
        """Take one answer of a model apart. Never raises: a call that can't be read is a problem, told to the model."""
        calls: list[ParsedCall] = []
        problems: list[ParseProblem] = []
        for line in CALL.finditer(text):
            name, written = line.groups()
            try:
                arguments = json.loads(written or "{}")
            except (ValueError, RecursionError) as error:
                problem = f"the arguments of {name} are not valid JSON: {error}"
                problems.append(ParseProblem(problem, raw=line[0], start=line.start(), name=name))
                continue
            if isinstance(arguments, dict):
                calls.append(ParsedCall(name, arguments, raw=line[0], start=line.start()))
            else:
                problem = f"the arguments of {name} are not a JSON object"
                problems.append(ParseProblem(problem, raw=line[0], start=line.start(), name=name))
        return ParsedText(CALL.sub("", text).strip(), calls=tuple(calls), problems=tuple(problems))
