"""TRL trains on exports: its tokens and labels are ours, whether it tokenizes messages itself or takes exact tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine, Plan
from hermes_testing.tiny_model.folder import FORMATS, make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.export.exporting import export_run
from hermes_core.records.store import records
from tests.rollout.test_exact_rollouts import ISOLATION, rollout, tasks
from tests.tiny_model.plans import make_plan

GENERATION = (
    (
        "'<|im_start|>assistant\\n' + (message.content or '') -}}",
        "'<|im_start|>assistant\\n' -}}{% generation %}{{- message.content or '' -}}",
    ),
    (
        "{{- '<|im_end|>\\n' -}}\n    {%- elif message.role == 'tool' -%}",
        "{{- '<|im_end|>' -}}{% endgeneration %}{{- '\\n' -}}\n    {%- elif message.role == 'tool' -%}",
    ),
)
"""What marks the model's own part of the ChatML template, as TRL needs it."""


@pytest.fixture
def trl_extra(torch_extra: None, datasets_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where TRL is not installed."""
    missing = [name for name in ("trl", "accelerate") if find_spec(name) is None]
    require("trl", f"{' and '.join(missing)} not installed: pip install trl" if missing else None)


def answers_of(tokenizer: Any) -> Callable[[Sequence[int], random.Random], Plan]:
    """Answers in the words of the chat template: two calls, then a text."""

    def plan(prompt: Sequence[int], chance: random.Random) -> Plan:
        turn = tokenizer.decode(prompt).count(FORMATS["chatml"].result)
        call = FORMATS["chatml"].call.format(name='"terminal"', arguments=f'{{"command": "echo {turn} > out.txt"}}')
        return make_plan(tokenizer, [call if turn < 2 else "Done."])

    return plan


@pytest.fixture
async def run(tokenizers: Callable[[str], Any], trl_extra: None, tmp_path: Path) -> Path:
    """A token-exact run of four rollouts, whose model writes as its template does."""
    tokenizer = tokenizers("chatml")
    with Engine(make_model(tokenizer, context=8192), plan=answers_of(tokenizer)) as engine:
        async with TinyModelServer(engine, tokenizer, wires=["tokens"], model="tiny-model") as server:
            code, said = await rollout(
                tmp_path,
                *(tasks(tmp_path, 2), "--env.enabled_toolsets=terminal", "--group-size", 2),
                *("--parser", "auto", "--base-url", server.base_url, "--model", "tiny-model"),
                *(f"--agent.tokenizer_name={tokenizer.name_or_path}", "--out", tmp_path / "run", *ISOLATION),
            )
    assert code == 0, said
    return tmp_path / "run"


def trained(rows: Any, tokenizer: Any, folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Train one step, and return the tokens and labels that TRL trained on, in their order."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        report_to=[],
        save_strategy="no",
        **options,
    )
    trainer = SFTTrainer(make_model(tokenizer, context=8192), config, train_dataset=rows, processing_class=tokenizer)
    result = trainer.train()
    assert math.isfinite(result.training_loss)
    dataset: Any = trainer.train_dataset
    return [(row["input_ids"], row["labels"]) for row in dataset]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parquet", [pytest.param(False, marks=pytest.mark.stress), True])
def test_trl_trains_on_our_tokens_and_labels(
    run: Path, tokenizers: Callable[[str], Any], datasets_extra: Any, tmp_path: Path, parquet: bool
) -> None:
    tokenizer = tokenizers("chatml")
    template = tokenizer.chat_template
    for plain, marked in GENERATION:
        assert plain in template
        template = template.replace(plain, marked)

    def loaded(to: str) -> Any:
        export_run(run, to, tmp_path / to, parquet=parquet)
        return datasets_extra.load_dataset(str(tmp_path / to), split="train", cache_dir=str(tmp_path / "cache"))

    ours = [
        (sequence.tokens.tolist(), sequence.masks.tolist()) for record in records(run) for sequence in record.sequences
    ]
    assert len(ours) == 4
    assert trained(loaded("tokens"), tokenizer, tmp_path / "one") == ours
    tokenizer.chat_template, own = template, tokenizer.chat_template
    try:
        by_messages = trained(loaded("trl"), tokenizer, tmp_path / "two", assistant_only_loss=True)
    finally:
        tokenizer.chat_template = own
    # The template writes a line break after an answer. The last answer's was never sent to the server.
    (line_break,) = tokenizer.encode("\n")
    assert by_messages == [([*tokens, line_break], [*labels, -100]) for tokens, labels in ours]
