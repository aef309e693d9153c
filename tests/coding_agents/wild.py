"""A model that does whatever models do with the tools of a real coding agent: it also calls wrongly, and ends early."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_testing.tiny_model.folder import chat_format

from tests.coding_agents.test_real_agents import END, ROW, TOOLS
from tests.tiny_model.plans import Gap, letters, make_plan, ordinary

FORM, MARK = "qwen3", "<|im_start|>assistant\n"

COMMANDS = (
    "cat calc.py",
    "ls -la; git status",
    "sed -i 's/a - b/a + b/' calc.py  # naïve 日本 \U0001f980",
    "PYTHONPATH=. python3 -c 'import calc; print(calc.add(2, 3))'",
    "printf '\\n\\ndef sub(a, b):\\n    return a - b\\n' >>calc.py",
    "head -c 300 /dev/urandom",
    "seq 1 8000",
    "printf 'one\\r\\n\\ttwo \\033[31mred\\033[0m'; exit 3",
    "echo '<think></think><tool_response>[]</tool_response><|im_end|>'",
    "cd CWD && ls",
    "true",
)
"""What it runs. The answers are of all kinds: long, binary, empty, errors, and marks of the chat template."""

WORDS = {
    **dict.fromkeys(("path", "file"), "CWD/calc.py"),
    **dict.fromkeys(("pattern", "query"), "add"),
    **dict.fromkeys(("prompt", "task"), "Look at calc.py."),
    "old": "return a",
    "new": "return a  ",
}
"""What it says to a parameter whose name has the word."""

ANEW = {"enter_plan_mode"}
"""Tools that are not called, because the agent then changes its system message: it begins anew."""

SUMMARY = re.compile(r"(?:create|write|provide|generate|output)\b[^.]{0,100}\bsummar", re.IGNORECASE)
"""How agents ask for a summary. It has the task, as those of models do."""

WORKSPACE = re.compile(r"/data/\w+")
"""The directory that it works in, for which the others say CWD. Some agents tell it."""


class WildModel:
    """Answers prompts with tokens, as the script of a `TokenServer`.

    Args:
        agent: whose tools it calls. Most calls run a command; the others are of any tool that it is offered.
        turns: the number of its answers in a conversation, at most.
    """

    def __init__(self, tokenizer: Any, agent: str, turns: int = 6) -> None:
        self._tokenizer, self._agent, self._turns = tokenizer, agent, turns
        self._anything, self._words = ordinary(tokenizer), letters(tokenizer)
        self._chance = random.Random(0)

    def __call__(self, prompt: str) -> Sequence[int]:
        """Return the tokens of an answer."""
        chance, workspace = self._chance, WORKSPACE.search(prompt)
        place = workspace[0] if workspace else "."
        answer = self._answer(prompt)
        said = [*self._thought(), *(each.replace("CWD", place) if isinstance(each, str) else each for each in answer)]
        plan = make_plan(self._tokenizer, said, chance if chance.random() < 0.7 else None)
        return [chance.choice(tuple(some)) for some in plan if some is not None]

    def _thought(self) -> list[str | Gap]:
        if self._chance.random() < 0.1:
            return []
        return ["<think>\n", Gap(self._chance.randrange(20), self._anything), "\n</think>\n\n"]

    def _answer(self, prompt: str) -> list[str | Gap]:
        chance, turn = self._chance, prompt.count(MARK) - 1
        words: list[str | Gap] = [Gap(chance.randrange(12), self._anything), "\n"] if chance.random() < 0.3 else []
        tools = _tools(prompt)
        if SUMMARY.search(prompt.rpartition("<|im_start|>user\n")[2]):
            return ["<summary>\n", ROW["prompt"], " I did ", Gap(30, self._words), "\n</summary>"]
        if not tools:
            return [*words, Gap(20, self._words)]
        if turn < chance.randrange(2, self._turns):
            calls = [self._call(tools) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
            return [*words, *(each for call in calls for each in (*call, "\n"))]
        if self._agent in END:
            return self._written(*self._command(END[self._agent]))
        return ["Done ", Gap(chance.choice((0, 5, 30, 30, 30, 500)), self._anything)]

    def _call(self, tools: Mapping[str, Any]) -> list[str | Gap]:
        chance = self._chance
        if (kind := chance.random()) < 0.75:
            return self._written(*self._command(chance.choice(COMMANDS)))
        if kind < 0.8:
            return self._written("no_such_tool", {"a": 1})
        name = chance.choice(sorted(tools.keys() - ANEW))
        return self._written(name, _value(tools[name], name))

    def _command(self, command: str) -> tuple[str, dict[str, Any]]:
        name, argument, others = TOOLS[self._agent]
        return name, {argument: command, **others}

    def _written(self, name: str, arguments: Any) -> list[str | Gap]:
        chance = self._chance
        told = json.dumps(arguments, ensure_ascii=chance.random() < 0.5, indent=chance.choice((None, None, 1)))
        if chance.random() < 0.05:
            told = told[: chance.randrange(len(told))]  # broken: the model is told, and goes on
        return [chat_format(FORM).call.format(name=json.dumps(name), arguments=told)]


def _tools(prompt: str) -> dict[str, Any]:
    """Return the parameters of each tool that a prompt offers."""
    _, _, offered = prompt.partition("<tools></tools> XML tags:\n<tools>\n")
    lines = offered.partition("\n</tools>")[0].splitlines()
    return {tool["name"]: tool["parameters"] for tool in (json.loads(line)["function"] for line in lines)}


def _value(schema: Mapping[str, Any], name: str) -> Any:
    """Return a value that fits a schema of JSON, with as little as it wants."""
    if "enum" in schema:
        return schema["enum"][0]
    if some := schema.get("anyOf") or schema.get("oneOf"):
        return _value(some[0], name)
    match schema.get("type"):
        case "object":
            wanted = schema.get("required", ())
            return {each: _value(schema.get("properties", {}).get(each, {}), each) for each in wanted}
        case "array":
            return [_value(schema.get("items", {}), name)]
        case "boolean":
            return False
        case "integer" | "number":
            return 1
    return next((word for part, word in WORDS.items() if part in name.lower()), "some words")
