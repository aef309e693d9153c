"""Teaches a random model the form of a tool call, and a little of the task: most words and boxes are drawn."""

import json
import random
import runpy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from boxes import BOXES, WORDS
from grpo import MASKED, padded, trained_logprobs
from hermes_testing.tiny_model.folder import make_tokenizer

from hermes_core.tools.process import PROCESS
from hermes_core.tools.schema import function_schema
from hermes_core.tools.terminal import TERMINAL

TEMPLATE = Path(__file__).with_name("template.jinja")
PROGRAM = Path(__file__).parents[1] / "agent_program" / "agent.py"
RIGHT = 0.25
"""The share of conversations that do what was asked for. Without any, the model first has to find out that the prompt
matters, which takes most of a run."""


@dataclass(frozen=True)
class Form:
    """The form of an agent's conversations."""

    before: Sequence[Mapping[str, Any]]
    """The messages before the task."""
    tools: Sequence[Mapping[str, Any]]
    """What the model is offered; the first runs a command."""
    result: str
    """What it answers to a command without output."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The agent's own settings."""


def program_form():
    """The form of the agent program, in its own words. Its command line holds it, so slots need not see this folder."""
    program = runpy.run_path(str(PROGRAM))
    return Form(
        [{"role": "system", "content": program["SYSTEM"]}],
        [program["BASH"]],
        "\n[exit status 0]",
        {"command": shlex.join(["python3", "-c", PROGRAM.read_text("utf-8")])},
    )


FORMS = {
    "model": Form(
        [],
        [function_schema(tool) for tool in (TERMINAL, PROCESS)],
        json.dumps({"output": "", "exit_code": 0, "error": None}),
    ),
    "program": program_form(),
}
"""By the name of the agent."""


def conversation(chance, form=FORMS["model"]):
    """A rollout in the right form. Most of them write any word to any box, whatever was asked for."""
    word, box = chance.choice(WORDS), chance.choice(BOXES)
    right = chance.random() < RIGHT
    command = f"echo {word} > {box}" if right else f"echo {chance.choice(WORDS)} > {chance.choice(BOXES)}"
    call = json.dumps({"name": form.tools[0]["function"]["name"], "arguments": {"command": command}})
    return [
        *form.before,
        {"role": "user", "content": f"Write {word} to {box}."},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": form.result},
        {"role": "assistant", "content": "Done."},
    ]


def tokenizer_of(folder, form=FORMS["model"]):
    """A tokenizer for such conversations, saved in a folder."""
    chance = random.Random(0)
    said = [message["content"] for _ in range(200) for message in conversation(chance, form)]
    names = [tool["function"]["name"] for tool in form.tools]
    tokenizer = make_tokenizer(folder, "chatml", [*said, " ".join(["system user assistant tool", *names])])
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    return tokenizer


def tokens_of(tokenizer, messages, tools):
    """A conversation's tokens and masks, each answer made into tokens by itself, as a server sees it."""
    tokens, masks, text = [], [], ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:index], tools=tools, tokenize=False, add_generation_prompt=True
            )
            new = tokenizer.encode(prompt.removeprefix(text), add_special_tokens=False)
            said = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            tokens += [*new, *said]
            masks += [*[MASKED] * len(new), *said]
            text = prompt + message["content"] + tokenizer.eos_token
    return tokens, masks


def warm_up(model, tokenizer, steps, form=FORMS["model"], *, rate=3e-3, batch=8, seed=1):
    """Supervised steps on such conversations. Gives the last loss."""
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        rows = [tokens_of(tokenizer, conversation(chance, form), form.tools) for _ in range(batch)]
        ids = padded([tokens for tokens, _ in rows], 0)
        trained = padded([masks for _, masks in rows], MASKED) != MASKED
        loss = -trained_logprobs(model, ids, trained).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()
