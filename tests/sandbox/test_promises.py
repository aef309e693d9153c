"""What a backend says wrongly is told as its author's fault, with the method that said it."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from typing import Any

import pytest

from hermes_core import runtime
from hermes_core.errors import PluginError, PolicyError, ProvisionError
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Diagnosis,
    Isolation,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
)
from hermes_core.sandbox.promises import diagnosis_of, levels_of, list_sandboxes

INFO = SandboxInfo("paper-1", "me", "c1", 1.5, SandboxStatus.RUNNING)


class Paper(Backend):
    """Says what a test wants it to."""

    name = "paper"
    capabilities = Capabilities(frozenset({Isolation.SHARED, Isolation.USER}))

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def _said(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise NotImplementedError

    async def list(self, owner: str | None = None) -> Any:
        return self._said()

    async def terminate_id(self, sandbox_id: str) -> None: ...

    async def check(self) -> Any:
        return self._said()

    def levels(self, config: SandboxConfig) -> Any:
        return self._said()

    async def aclose(self) -> None:
        if self.answer == "hangs":
            await asyncio.sleep(1000)
        self._said()


@pytest.mark.parametrize("answer", [[INFO], (INFO, replace(INFO, created=1)), []])
async def test_a_list_is_returned_as_it_is(answer: Any) -> None:
    assert await list_sandboxes(Paper(answer)) == list(answer)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned None, which is not a list of SandboxInfo"),
        ("paper-1", "which is not a list of SandboxInfo"),
        (["paper-1"], "which is not a list of SandboxInfo: it has 'paper-1'"),
        ([replace(INFO, created=datetime.datetime.now())], "created of a SandboxInfo is datetime"),  # type: ignore[arg-type]
        ([replace(INFO, status="up")], "status of a SandboxInfo is 'up', not a SandboxStatus"),  # type: ignore[arg-type]
        (KeyError("region"), "KeyError: 'region'"),
    ],
)
async def test_a_list_of_something_else_is_told(answer: Any, told: str) -> None:
    with pytest.raises(ProvisionError, match=rf"^Paper\.list\(\) .*{told}.*a bug in the plugin"):
        await list_sandboxes(Paper(answer))


def test_levels_are_those_that_are_declared_too() -> None:
    assert levels_of(Paper({Isolation.USER, Isolation.DEDICATED}), SandboxConfig()) == {Isolation.USER}


@pytest.mark.parametrize("answer", [None, [Isolation.USER], {"user"}, ValueError("no such key")])
def test_levels_of_another_type_are_told(answer: Any) -> None:
    with pytest.raises(ProvisionError, match=r"^Paper\.levels\(\) (raised|returned) .*a bug in the plugin"):
        levels_of(Paper(answer), SandboxConfig())


async def test_typed_errors_stay_what_they_are() -> None:
    with pytest.raises(PolicyError, match="not for you"):
        await list_sandboxes(Paper(PolicyError("not for you")))
    with pytest.raises(PolicyError, match="not for you"):
        levels_of(Paper(PolicyError("not for you")), SandboxConfig())


async def test_a_diagnosis_that_says_nothing_is_told() -> None:
    assert await diagnosis_of(Paper(Diagnosis(False, "no daemon"))) == Diagnosis(False, "no daemon")
    with pytest.raises(PluginError, match="with an empty field"):
        await diagnosis_of(Paper(Diagnosis(False, " ")))


async def test_a_backend_that_does_not_close_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CLOSE_S", 0.05)
    await runtime.close(Paper())
    with pytest.raises(ProvisionError, match=r"Paper\.aclose\(\) raised TimeoutError: it did not return within 0.05 s"):
        await runtime.close(Paper("hangs"))
    with pytest.raises(ProvisionError, match=r"Paper\.aclose\(\) raised KeyError: 'x'"):
        await runtime.close(Paper(KeyError("x")))
