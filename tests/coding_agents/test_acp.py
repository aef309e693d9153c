"""What the client of the Agent Client Protocol makes of the lines of a stranger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hermes_agents import acp
from hermes_agents.acp import AcpAgent, AcpFailed, AcpSettings, Peer
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.errors import ConfigError
from hermes_core.sandbox.programs import SlotProgram

KEYS = st.sampled_from(["id", "method", "params", "result", "error", "update", "sessionUpdate", "options", "kind"])
VALUES = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["session/request_permission", "allow_once"])
MESSAGES = st.dictionaries(
    KEYS, st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
)


class Writing:
    """A program that writes these pieces, one for each request at first, and keeps what it is told."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [*pieces]
        self.told: list[dict[str, Any]] = []

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def write(self, data: bytes) -> None:
        assert data.endswith(b"\n") and data.count(b"\n") == 1
        self.told.append(json.loads(data))


def peer_of(program: Writing) -> Peer:
    return Peer(cast("SlotProgram", program), Counter())


@given(st.lists(MESSAGES.map(lambda message: json.dumps(message).encode() + b"\n") | st.binary(max_size=50)))
async def test_any_line_is_answered_if_it_asks_and_breaks_nothing(lines: list[bytes]) -> None:
    program = Writing(lines)
    peer = peer_of(program)
    await peer.receive()
    asked = [each for line in b"".join(lines).split(b"\n")[:-1] if "method" in (each := acp._message(line) or {})]
    ids = [each["id"] for each in asked if "id" in each and isinstance(each["method"], str)]
    assert [each["id"] for each in program.told] == ids
    assert all(("result" in each) != ("error" in each) for each in program.told)
    with pytest.raises(AcpFailed, match="ended"):
        await peer.call("session/new")


@pytest.mark.parametrize(
    "pieces",
    [[b"x" * (1 << 20)] * 17, [b"\n" * 100_000] * 4],
    ids=["a line", "lines"],
)
async def test_a_flood_ends_the_conversation(pieces: list[bytes]) -> None:
    program = Writing(pieces)
    peer = peer_of(program)
    await peer.receive()
    with pytest.raises(AcpFailed, match="wrote too much"):
        await peer.call("session/prompt")
    assert program.told == []


def test_its_name_is_in_what_is_wrong_with_its_settings() -> None:
    with pytest.raises(ConfigError, match="agent `acp` has no command"):
        AcpAgent(AcpSettings(model="m", base_url="http://localhost/v1"))
