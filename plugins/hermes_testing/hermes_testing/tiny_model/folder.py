"""Generates a tokenizer and a small transformer with random weights, without any download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hermes_core import UnknownNameError


@dataclass(frozen=True)
class ChatFormat:
    """The tokens and texts with which one family of chat models marks turns, tool calls and results."""

    end_of_turn: str
    """The token that ends an answer."""
    special: tuple[str, ...]
    """The other special tokens. The first one is the padding token, and the beginning token if the template uses it."""
    call: str
    """The form in which the model writes a tool call; `{name}` is a JSON string, `{arguments}` a JSON object."""
    result: str
    """The text that begins a tool's result in the prompt."""
    calls_per_answer: int = 2
    """Maximum number of calls in one answer."""
    thinks: bool = False
    """Whether an answer begins with `<think>…</think>`."""


_TAGGED = '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'

FORMATS = {
    "chatml": ChatFormat("<|im_end|>", ("<|endoftext|>", "<|im_start|>"), _TAGGED, "<tool_response>"),
    "llama3": ChatFormat(
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
        '{{"name": {name}, "parameters": {arguments}}}',
        "ipython<|end_header_id|>",
        calls_per_answer=1,
    ),
    "qwen3": ChatFormat("<|im_end|>", ("<|endoftext|>", "<|im_start|>"), _TAGGED, "<tool_response>", thinks=True),
}
"""ChatML with Hermes tool calls, Llama 3.1, and Qwen3 with thinking. The templates are shorter versions of the models'
public templates."""


def chat_format(name: str) -> ChatFormat:
    """Return the format of that name.

    Raises:
        UnknownNameError: there is no such format.
    """
    if name not in FORMATS:
        raise UnknownNameError("chat format", name, FORMATS)
    return FORMATS[name]


def make_tokenizer(folder: Path, form: str = "chatml", texts: Iterable[str] = (), vocabulary: int = 600) -> Any:
    """Train a byte-level BPE tokenizer on `texts` and save it with the chat template of `form`.

    The tokenizer loses nothing: decoding the tokens of a text gives the same text.

    Args:
        folder: the folder for the tokenizer, from which `AutoTokenizer.from_pretrained` can load it.
        texts: the training texts, which become few tokens. The template's own words are added to them.
        vocabulary: maximum number of tokens; 256 of them are the bytes.

    Returns:
        The tokenizer, a `transformers.PreTrainedTokenizerFast`.

    Raises:
        UnknownNameError: there is no such format.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    chat = chat_format(form)
    template = files(__package__).joinpath("templates", f"{form}.jinja").read_text("utf-8")
    call = chat.call.format(name=json.dumps("terminal"), arguments=json.dumps({"command": "ls"}))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*chat.special, chat.end_of_turn],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([template, call, *texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=chat.special[0],
        eos_token=chat.end_of_turn,
        pad_token=chat.special[0],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(tokenizer: Any, *, width: int = 64, layers: int = 2, context: int = 4096, seed: int = 0) -> Any:
    """Return a Llama with random weights and as many tokens as `tokenizer`, in evaluation mode, in float32.

    Args:
        width: the width of the residual stream; its heads are 8 wide.
        context: the longest sequence, in tokens.
        seed: the same seed gives the same weights. The global random state is not changed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 8,
        max_position_embeddings=context,
        initializer_range=width**-0.5,  # with the usual 0.02, for widths of thousands, attention would learn nothing
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()
