"""axolotl's chat-template strategy tokenizes exports, and trains on what the model wrote and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hermes_core.export.exporting import export_run
from tests.export.conftest import MakeRun, rollout


@pytest.fixture
def axolotl_extra(datasets_extra: Any, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where axolotl is not installed."""
    require("axolotl", None if find_spec("axolotl") else "axolotl is not installed: pip install axolotl")


def trained(labels: list[int], tokenizer: Any) -> Iterator[str]:
    """The texts of the parts that are trained on."""
    part: list[int] = []
    for label in [*labels, -100]:
        if label != -100:
            part.append(label)
        elif part:
            yield tokenizer.decode(part)
            part = []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parquet", [False, True])
def test_axolotl_trains_on_the_answers(
    make_run: MakeRun,
    axolotl_extra: None,
    tokenizers: Callable[[str], Any],
    datasets_extra: Any,
    tmp_path: Path,
    parquet: bool,
) -> None:
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    tokenizer = tokenizers("chatml")
    export_run(make_run([rollout(), rollout("b", said="Other.")]), "trl", tmp_path / "trl", parquet=parquet)
    rows = datasets_extra.load_dataset(str(tmp_path / "trl"), split="train", cache_dir=str(tmp_path / "cache"))
    strategy = ChatTemplateStrategy(
        ChatTemplatePrompter(tokenizer, chat_template=tokenizer.chat_template, max_length=8192),
        tokenizer,
        train_on_inputs=False,
        sequence_len=8192,
        roles_to_train=["assistant"],
        train_on_eos="turn",
        eot_tokens=["<|im_end|>"],
    )
    call = '<tool_call>\n{"name": "%s", "arguments": {"command": "echo %s"}}\n</tool_call>'
    for row, said in zip(rows, ("Done.", "Other."), strict=True):
        tokenized = strategy.tokenize_prompt(row)
        assert list(trained(tokenized["labels"], tokenizer)) == [
            f"I look.\n{call % ('bash', said)}\n{call % ('read', said)}<|im_end|>",
            f"{said}<|im_end|>",
        ]
