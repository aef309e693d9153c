"""The run of docs/guides/learning-run.md: a sound environment, a trainer that learns, parts that fit together."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_core.runtime import Runtime
from hermes_core.soundness.validate import validate
from tests.support.selection import makes_tests_full

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "learning_run"
MODULES = ("boxes", "grpo", "train", "warm_up")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
@makes_tests_full
def with_torch(require: Callable[[str, str | None], None]) -> None:
    missing = [name for name in ("torch", "atroposlib") if importlib.util.find_spec(name) is None]
    require("torch", f'no {", ".join(missing)} here; `make setup EXTRAS="atropos torch"`' if missing else None)
    import torch

    torch.set_num_threads(1)


async def test_the_environment_is_sound(example: Callable[[str], Any]) -> None:
    async with Runtime(plugins=[example("boxes")]) as runtime:
        outcome = await validate(runtime, "boxes", env={"count": 3}, repeat=1)
    assert outcome.sound, outcome.to_dict()


def test_a_step_makes_what_was_better_than_its_group_likelier(example: Callable[[str], Any], with_torch: None) -> None:
    import copy

    import torch
    from hermes_testing.tiny_model.folder import make_model

    from tests.tiny_model.token_exactness import recomputed_logprobs

    grpo = example("grpo")
    model = make_model(
        type("Words", (), {"__len__": lambda self: 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})()
    )
    before = [recomputed_logprobs(model, [5, 6, last], 2) for last in (7, 8, 9)]
    group = [
        grpo.Rollout([5, 6, last], [-100, -100, last], [1.0, 1.0, *said], score)
        for last, said, score in zip((7, 8, 9), before, (1.0, 0.0, 0.5), strict=True)
    ]
    changed = grpo.step(model, copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1), [group])
    after = [recomputed_logprobs(model, [5, 6, last], 2) for last in (7, 8, 9)]
    assert changed < 1e-5, "the logprobs are not those of the same tokens"
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert grpo.advantages([0.5, 0.5]) == [0.0, 0.0]


def test_it_counts_what_the_server_did_not_sample_so(example: Callable[[str], Any], with_torch: None) -> None:
    grpo, of_record = example("grpo"), example("train").of_record
    masks, logprobs = [grpo.MASKED, 3, 4, grpo.MASKED, 6], [1.0, -0.5, -0.25, 1.0, -2.0]
    sampled = [
        SimpleNamespace(prompt=(2,), tokens=(3, 4), logprobs=(-0.5, -0.25)),
        SimpleNamespace(prompt=(2, 3, 4, 5), tokens=(6,), logprobs=(-2.0,)),
    ]
    rollouts = [
        grpo.Rollout([2, 3, 4, 5, 6], masks, logprobs, 1.0),
        grpo.Rollout([2, 3, 4, 5, 6], masks, [*logprobs[:4], -2.5], 1.0),
        grpo.Rollout([1, 3, 4, 5, 6], masks, logprobs, 1.0),
    ]
    counts = [tuple(of_record([[rollout]], sampled).values()) for rollout in rollouts]
    assert counts == [(3, 0), (2, 1), (0, 3)]


@pytest.mark.parametrize("agent", ["model", "program"])
def test_the_warm_up_says_little_about_the_task(agent: str, example: Callable[[str], Any], with_torch: None) -> None:
    warm_up, chance = example("warm_up"), random.Random(0)
    form, right = warm_up.FORMS[agent], 0
    for _ in range(4000):
        asked, called, *_ = warm_up.conversation(chance, form)[len(form.before) :]
        word, box = asked["content"].removeprefix("Write ").removesuffix(".").split(" to ")
        right += f"echo {word} > {box}" in called["content"]
    assert right / 4000 == pytest.approx(warm_up.RIGHT + (1 - warm_up.RIGHT) / 16, abs=0.02)
    assert warm_up.RIGHT <= 0.25, "what is left to learn is most of the task"


@pytest.fixture
def with_trl(with_torch: None, require: Callable[[str, str | None], None]) -> None:
    there = importlib.util.find_spec("trl") is not None
    require("trl", None if there else 'trl is not installed; `make setup EXTRAS="torch trl"`')


@pytest.mark.stress  # TRL's trainer and our environments: tests/trl
def test_trl_trains_on_the_same_environment(with_trl: None, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE / "with_trl.py", "--out", tmp_path / "run", "--batches", "2", "--warm-up", "30"]
    environment = {**os.environ, "HERMES_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "figures.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rollouts"]) for row in rows] == [(0, 64), (1, 64)]
    assert all(0 <= row["reward"] <= 1 for row in rows)


@pytest.mark.stress  # verifiers and our environments: tests/verifiers
@pytest.mark.parametrize("agent", ["model", "program"])
def test_verifiers_rolls_out_the_same_environment(
    agent: str, installed: Path, tmp_path: Path, require: Callable[[str, str | None], None]
) -> None:
    missing = [name for name in ("verifiers", "torch") if importlib.util.find_spec(name) is None]
    require("verifiers", f"{', '.join(missing)} not installed here" if missing else None)
    options = ["--out", tmp_path / "run", "--agent", agent, "--steps", "6"]
    command = [sys.executable, EXAMPLE / "with_verifiers.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HERMES_PLUGINS": "agents,boxes"}
    done = subprocess.run(
        [*command, "--warm-up", "30"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "figures.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))
    assert ["moved" in row for row in rows] == [False] * 4 + [True] * 2


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which the example is installed as a plugin."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, EXAMPLE], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    return site


@pytest.mark.full
def test_tinker_trains_on_the_same_environment(
    with_torch: None, require: Callable[[str, str | None], None], tmp_path: Path
) -> None:
    there = importlib.util.find_spec("tinker") is not None
    require("tinker", None if there else "tinker is not installed; `make setup EXTRAS=tinker`")
    skyrl = os.environ.get("HERMES_SKYRL")
    require("skyrl", None if skyrl else "HERMES_SKYRL names no Python with SkyRL's server, see docs/guides/tinker.md")
    command = [sys.executable, EXAMPLE / "with_tinker.py", "--out", tmp_path / "run", "--batches", "2"]
    environment = {**os.environ, "HERMES_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--skyrl", str(skyrl)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "figures.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rollouts"]) for row in rows] == [(0, 64), (1, 64)]
    assert all(row["drift"] is None or row["drift"] < 1e-5 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("agent", ["model", pytest.param("program", marks=pytest.mark.stress)])
def test_the_parts_fit_together(agent: str, with_torch: None, installed: Path, tmp_path: Path) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    out = tmp_path / "run"
    options = ["--out", out, "--agent", agent, "--steps", "5", "--warm-up", "30", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(installed), "HERMES_PLUGINS": "agents,atropos,boxes"}
    command = [sys.executable, EXAMPLE / "train.py", *options]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5))
    assert [row["rollouts"] for row in rows] == [64] * 5
    assert all(row["unrecorded"] == 0 < row["recorded"] for row in rows), "the trainer got what was not sampled"
    records = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert {record["agent"] for record in records} == {agent}
    assert ["moved" in row for row in rows] == [False] * 4 + [True]
