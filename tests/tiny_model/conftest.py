"""A tiny model for each chat format, where torch is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import FORMATS, make_model, make_tokenizer


@dataclass(frozen=True)
class Tiny:
    """A tokenizer, the folder that it is in, and a random model with as many tokens."""

    form: str
    folder: Path
    tokenizer: Any
    model: Any


def _made(form: str, folder: Path) -> Tiny:
    tokenizer = make_tokenizer(folder, form)
    return Tiny(form, folder, tokenizer, make_model(tokenizer))


@pytest.fixture(scope="session")
def tiny(torch_extra: None, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """One in the format ChatML."""
    return _made("chatml", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", params=sorted(FORMATS))
def each_tiny(torch_extra: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """One in each format."""
    return _made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[Engine]:
    """An engine with the model of `tiny`, and no plan."""
    with Engine(tiny.model) as running:
        yield running
