"""A small model that writes the tool calls of an agent by itself: what samples from it need force nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_testing.tiny_model.folder import make_tokenizer

from tests.tiny_model.plans import ordinary
from tests.vllm.conftest import random_weights

DOCS = Path(__file__).resolve().parents[2] / "docs"

COMMANDS = [
    "cat calc.py",
    "ls -la",
    "sed -i 's/a - b/a + b/' calc.py  # naïve",
    "PYTHONPATH=. python3 -c 'import calc; print(calc.add(2, 3))'",
    "grep -n return *.py | head",
    "cat missing.txt",
]
THINK, THOUGHT = "<think>\n", "\n</think>\n\n"
ENDS = ["I fixed it.", "All done: `calc.py` adds now.", "Nothing is left to do."]

CONTEXT = 32_768

SURE = 15.0
"""The logit of what comes next in the form. All other tokens together have about 9: a few steps are wild."""
NEVER = 12.0
"""How far down the pieces of the form are where they don't belong."""
BRIEF = 7.0
"""The logit of a thought's end, within it: one token in six or so."""


def make_writer(
    folder: Path, tool: tuple[str, str, dict[str, Any]], last_command: str | None = None
) -> tuple[Any, Any]:
    """Save a model whose answers have the form of Qwen3's, and return its tokenizer and weights.

    It thinks some random tokens, then makes a call or two, or ends with a text. The pieces of the form are tokens of
    their own, and the output layer says which one follows another, after prompts of any length. All else is random
    weights.

    Args:
        tool: the tool's name, its argument that has the command, and further arguments.
        last_command: ends the conversation in place of a text.
    """
    name, argument, others = tool
    form = json.dumps({"name": name, "arguments": {argument: "COMMAND", **others}})
    before, after = f"<tool_call>\n{form}\n</tool_call>".split("COMMAND")
    commands = [json.dumps(command)[1:-1] for command in (*COMMANDS, *filter(None, [last_command]))]
    ends = () if last_command else ENDS
    texts = [path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))]
    tokenizer = make_tokenizer(folder, "qwen3", texts, vocabulary=4000)
    random = ordinary(tokenizer)
    again, done = f"\n{before}", {tokenizer.eos_token: 1.0}
    calls = [f"{command}{after}" for command in commands]
    first, second = calls[::2], calls[1::2]  # no two calls of an answer are equal: hermes-agent leaves out the second
    follow: dict[str, dict[str, float]] = {
        "\n": {THINK: 1.0},  # the last token of a prompt
        THOUGHT: {before: 0.8 if ends else 1.0, **dict.fromkeys(ends, 0.2 / len(ENDS))},
        before: dict.fromkeys(first, 1 / len(first)),
        again: dict.fromkeys(second, 1 / len(second)),
        **{call: {tokenizer.eos_token: 0.7, again: 0.3} for call in first},
        **dict.fromkeys((*second, *ends), done),
    }
    tokenizer.add_tokens([THINK, THOUGHT, before, again, *calls, *ENDS])
    tokenizer.save_pretrained(folder)
    weights = random_weights(tokenizer, context=CONTEXT)
    _follow(weights, tokenizer, follow, random)
    weights.save_pretrained(folder)
    return tokenizer, weights


def _follow(weights: Any, tokenizer: Any, follow: Mapping[str, Mapping[str, float]], random: frozenset[int]) -> None:
    """Write into the output layer what follows what."""
    import torch

    def token(text: str) -> int:
        (one,) = tokenizer.encode(text, add_special_tokens=False)
        return int(one)

    with torch.inference_mode():
        for layer in weights.model.layers:
            layer.self_attn.o_proj.weight *= 0.02  # the prompt has a part in each state, and its last token the largest
            layer.mlp.down_proj.weight *= 0.02
        weights.model.embed_tokens.weight[:, 0] = 1.0  # a feature that all have in common
        before, others = sorted(random)[:64], sorted(random)[64:512]
        ids = torch.tensor([[*before, last] for last in (*map(token, follow), *others)])
        states = weights.model(ids).last_hidden_state[:, -1]
        own, common = states[: len(follow)], states[len(follow) :].mean(0)
        # One direction for each state of the form, and one for all others: of no weight in any other of these states.
        directions = torch.linalg.pinv(torch.vstack([own, common])).T
        form = sorted(set(range(len(tokenizer))) - random)
        head = weights.lm_head.weight
        head[form] = -NEVER * directions.sum(0)
        head[token(THOUGHT)] = BRIEF * directions.sum(0)
        for here, nexts in zip(directions, follow.values(), strict=False):
            for after, share in nexts.items():
                head[token(after)] += (NEVER + SURE + math.log(share)) * here
