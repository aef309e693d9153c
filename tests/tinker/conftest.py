"""What the tests of the Tinker adapter need: its SDK, SkyRL's server with a tiny model, an environment that fails."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from hermes_core import InfraError, SetupFailed, hookimpl

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "learning_run"

AGENT = {"max_token_length": 512, "max_tokens": 48, "max_turns": 3}
"""Settings under which a conversation is short."""


@pytest.fixture(scope="session")
def tinker_extra(torch_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where Tinker's SDK is not installed."""
    there = importlib.util.find_spec("tinker") is not None
    require("tinker", None if there else "tinker is not installed; `make setup EXTRAS=tinker`")


@pytest.fixture(scope="session")
def cookbook_extra(tinker_extra: None, require: Callable[[str, str | None], None]) -> None:
    """Skips the test where Tinker's cookbook is not installed."""
    there = importlib.util.find_spec("tinker_cookbook") is not None
    require("tinker", None if there else "tinker_cookbook is not installed; `make setup EXTRAS=tinker`")


@dataclass
class Open:
    """An open Tinker server with a tiny model that can write calls."""

    url: str
    folder: Path
    model: Any
    """The model itself, in torch."""
    tokenizer: Any

    @cached_property
    def shared(self) -> Any:
        """A training client for tests that don't look at its weights. Each needs seconds and an adapter."""
        return self.client()

    @cached_property
    def untrained(self) -> Any:
        """A training client for tests that look at its weights and never train them."""
        return self.client()

    def client(self, url: str | None = None) -> Any:
        """A training client with an adapter of its own, which changes nothing yet."""
        import tinker

        service = tinker.ServiceClient(base_url=url or self.url, api_key="tml-none")
        return service.create_lora_training_client(base_model=str(self.folder), rank=32)


@pytest.fixture(scope="session")
def example() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the learning run."""
    sys.path.insert(0, str(EXAMPLE))
    yield importlib.import_module
    sys.path.remove(str(EXAMPLE))
    for name in ("boxes", "grpo", "warm_up"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def skyrl(
    tinker_extra: None,
    require: Callable[[str, str | None], None],
    example: Callable[[str], Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Open]:
    """SkyRL's server, in the Python that HERMES_SKYRL names."""
    from hermes_testing.tiny_model.folder import FORMATS, make_model
    from hermes_tinker.testing import skyrl_server

    python = os.environ.get("HERMES_SKYRL", "")
    require("skyrl", None if python else "HERMES_SKYRL names no Python with SkyRL's server, see docs/guides/tinker.md")
    out = tmp_path_factory.mktemp("skyrl")
    folder, warm = out / "model", example("warm_up")
    tokenizer = warm.tokenizer_of(folder)
    llama = FORMATS["llama3"]  # its template is one of those that are tested with this model
    tokenizer.add_tokens([*llama.special, llama.end_of_turn], special_tokens=True)
    tokenizer.save_pretrained(folder)
    model = make_model(tokenizer, width=64, layers=1, context=2048)
    warm.warm_up(model, tokenizer, 60, rate=1e-3)  # at higher rates, its float32 numbers round to fewer digits
    model.save_pretrained(folder)
    with skyrl_server(python, folder, out / "state", adapters=10) as url:
        yield Open(url, folder.resolve(), model.eval(), tokenizer)


@pytest.fixture(scope="session")
def troubled(example: Callable[[str], Any]) -> Callable[..., Any]:
    """Makes `boxes` with this many items, of which one breaks: `where` as often as `times` says."""
    boxes = example("boxes")

    class Troubled(boxes.Boxes):  # type: ignore[misc, name-defined]
        """Boxes whose sandbox, setup or verification breaks for the first item."""

        name = "troubled"

        def __init__(self, where: str = "", times: int = 1000, count: int = 4) -> None:
            super().__init__(boxes.BoxesConfig(count=count, seed=0))
            self.where, self.times = where, times

        def _break(self, item: Mapping[str, Any], where: str, error: Exception) -> None:
            if item["id"] == "boxes-0" and self.where == where and self.times > 0:
                self.times -= 1
                raise error

        @hookimpl
        async def setup_trajectory_workspace(self, item: Mapping[str, Any]) -> dict[str, Any]:
            self._break(item, "infra", InfraError("the host burns"))
            self._break(item, "setup", SetupFailed("no such dataset"))
            return {}

        @hookimpl
        async def verify_and_score_trajectory(self, item: Mapping[str, Any], exec_tool: Any) -> Any:
            self._break(item, "verifier", ValueError("the judge sleeps"))
            return await super().verify_and_score_trajectory(item, exec_tool)

    return Troubled
