"""Teaches a random model the form of a tool call, and a little of the task: most words and boxes are drawn."""

import json
import random
from pathlib import Path

import torch
from boxes import BOXES, WORDS
from grpo import MASKED, padded, trained_logprobs

from hermes_core.testing.tiny_model.folder import make_tokenizer
from hermes_core.tools.process import PROCESS
from hermes_core.tools.schema import function_schema
from hermes_core.tools.terminal import TERMINAL

TEMPLATE = Path(__file__).with_name("template.jinja")
TOOLS = [function_schema(tool) for tool in (TERMINAL, PROCESS)]
RIGHT = 0.25
"""The share of conversations that do what was asked for. Without any, the model first has to find out that the prompt
matters, which takes most of a run."""


def conversation(chance):
    """A rollout in the right form. Most of them write any word to any box, whatever was asked for."""
    word, box = chance.choice(WORDS), chance.choice(BOXES)
    right = chance.random() < RIGHT
    command = f"echo {word} > {box}" if right else f"echo {chance.choice(WORDS)} > {chance.choice(BOXES)}"
    call = json.dumps({"name": "terminal", "arguments": {"command": command}})
    return [
        {"role": "user", "content": f"Write {word} to {box}."},
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "tool", "content": json.dumps({"output": "", "exit_code": 0, "error": None})},
        {"role": "assistant", "content": "Done."},
    ]


def tokenizer_of(folder):
    """A tokenizer for such conversations, saved in a folder."""
    chance = random.Random(0)
    said = [message["content"] for _ in range(200) for message in conversation(chance)]
    tokenizer = make_tokenizer(folder, "chatml", [*said, "system user assistant tool terminal process"])
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    return tokenizer


def tokens_of(tokenizer, messages):
    """A conversation's tokens and masks, each answer made into tokens by itself, as a server sees it."""
    tokens, masks, text = [], [], ""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:index], tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
            new = tokenizer.encode(prompt.removeprefix(text), add_special_tokens=False)
            said = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
            tokens += [*new, *said]
            masks += [*[MASKED] * len(new), *said]
            text = prompt + message["content"] + tokenizer.eos_token
    return tokens, masks


def warm_up(model, tokenizer, steps, *, rate=3e-3, batch=8, seed=1):
    """Supervised steps on such conversations. Gives the last loss."""
    chance = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        rows = [tokens_of(tokenizer, conversation(chance)) for _ in range(batch)]
        ids = padded([tokens for tokens, _ in rows], 0)
        trained = padded([masks for _, masks in rows], MASKED) != MASKED
        loss = -trained_logprobs(model, ids, trained).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()
