"""Planned faults of the emulator's RPCs, and the log of requests."""

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
"""Number of requests that are kept, the latest ones."""
_UNRECORDED = frozenset({"TaskExecStdinWrite", "SandboxStdinWriteV2", "TaskExecStdinWriteStream"})
"""RPCs that carry input of commands. The log has their names only, because input may be large."""


@dataclass
class RpcFault:
    """A fault in calls of one RPC. `ModalEmulator.fault` and `FaultOptions` say what the fields mean."""

    method: str
    status: str | None = None
    message: str = ""
    after: int = 0
    times: int = 1
    delay_s: float = 0.0
    retry_after_s: float | None = None
    lose_answer: bool = False
    cut_after_bytes: int | None = None

    def strikes(self) -> bool:
        """Count a call. Return whether it is to fail."""
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
        """Raise the error; without a status, wait forever."""
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
            KeyError: gRPC has no such status.
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
        """Add a request."""
        self._kept.append((next(self._numbers), method, None if method in _UNRECORDED else message))

    def since(self, number: int, method: str | None) -> list[dict[str, Any]]:
        """Return the requests from a number on, each as `{"number", "method", "request"}` with its protobuf fields."""
        return [
            {
                "number": at,
                "method": name,
                "request": {} if message is None else MessageToDict(message, preserving_proto_field_name=True),
            }
            for at, name, message in list(self._kept)
            if at >= number and method in (None, name)
        ]
