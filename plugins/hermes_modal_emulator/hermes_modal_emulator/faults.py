"""The faults that the emulator is told to produce, and the record of its requests."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as pb

RECORDED = 20_000
"""How many requests are remembered."""
_UNRECORDED = frozenset({"TaskExecStdinWrite", "SandboxStdinWriteV2", "TaskExecStdinWriteStream"})
"""RPCs that carry input. Only that they came is recorded."""


@dataclass
class RpcFault:
    """One fault in calls of one RPC.

    If an answer is lost, the work is done, then the call fails with `status`, or hangs if there is none.
    """

    method: str
    """The RPC's name: `SandboxCreateV2`, `TaskExecStdioRead`, …"""
    status: str | None = None
    """The gRPC status to fail with: `UNAVAILABLE`, `RESOURCE_EXHAUSTED`, …"""
    message: str = ""
    after: int = 0
    """How many calls succeed before the first that fails."""
    times: int = 1
    """How many calls fail; -1 means every one from then on."""
    delay_s: float = 0.0
    """How long to wait first, in seconds."""
    retry_after_s: float | None = None
    """With RESOURCE_EXHAUSTED: after how many seconds the client is told to retry."""
    lose_answer: bool = False
    cut_after_bytes: int | None = None
    """For streams: fail after so many bytes of the call."""

    def strikes(self) -> bool:
        """Count a call; whether it is one that goes wrong."""
        if self.after > 0:
            self.after -= 1
            return False
        if self.times == 0:
            return False
        self.times -= self.times > 0
        return True

    def error(self) -> GRPCError:
        """Return the error that the call fails with."""
        details = None if self.retry_after_s is None else [pb.RPCRetryPolicy(retry_after_secs=self.retry_after_s)]
        return GRPCError(Status[self.status or "UNAVAILABLE"], self.message or f"a fault in {self.method}", details)

    async def fail(self) -> None:
        """Raise the failure; without a status there is never an answer."""
        if self.status is None:
            await asyncio.Event().wait()
        raise self.error()


class Faults:
    """The faults that are yet to happen."""

    def __init__(self) -> None:
        self._faults: list[RpcFault] = []

    def add(self, fault: RpcFault) -> None:
        """Add a fault for later calls.

        Raises:
            KeyError: gRPC does not have this status.
        """
        if fault.status is not None:
            Status[fault.status]
        self._faults.append(fault)

    def clear(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def next(self, method: str) -> RpcFault | None:
        """Return the fault of this call, if it has one."""
        return next((fault for fault in self._faults if fault.method == method and fault.strikes()), None)


class RequestLog:
    """The last requests, in order."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: deque[tuple[int, str, Any]] = deque(maxlen=RECORDED)

    def add(self, method: str, message: Any) -> None:
        """Remember one."""
        self._kept.append((next(self._numbers), method, None if method in _UNRECORDED else message))

    def since(self, number: int, method: str | None) -> list[dict[str, Any]]:
        """Return requests from a number on: `{"number", "method", "request"}`, with the fields' own names."""
        return [
            {
                "number": at,
                "method": name,
                "request": {} if message is None else MessageToDict(message, preserving_proto_field_name=True),
            }
            for at, name, message in list(self._kept)
            if at >= number and method in (None, name)
        ]
