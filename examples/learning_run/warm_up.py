"""Teaches a random model the form of a tool call, and not which choice is right: it takes any word and any box."""

import json
import random

import torch
from boxes import SH, choices, question
from grpo import MASKED, padded, trained_logprobs

from hermes_core.tools.schema import function_schema

TOOLS = [function_schema(SH)]


def conversation(chance):
    """A rollout in the right form, that writes any of the words to any of the boxes."""
    item = choices(chance)
    command = f"echo {chance.choice(item['words'])} > {chance.choice(item['boxes'])}"
    call = json.dumps({"name": "sh", "arguments": {"command": command}})
    return [
        {"role": "user", "content": question(item)},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": json.dumps({"output": "", "exit_code": 0, "error": None})},
        {"role": "assistant", "content": "Done."},
    ]


def texts(count=200, seed=0):
    """What the tokenizer is made from."""
    chance = random.Random(seed)
    return [json.dumps(TOOLS), *(message["content"] for _ in range(count) for message in conversation(chance))]


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
