"""Serves a gRPC service of the SDK, with a log of its requests and with planned faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from google.protobuf.message_factory import GetMessageClass
from grpclib.const import Cardinality, Handler

from hermes_modal_emulator.cloud import Cloud
from hermes_modal_emulator.faults import RpcFault

_KINDS = {
    (False, False): Cardinality.UNARY_UNARY,
    (False, True): Cardinality.UNARY_STREAM,
    (True, False): Cardinality.STREAM_UNARY,
    (True, True): Cardinality.STREAM_STREAM,
}


class Service:
    """A service whose methods are the RPCs of its descriptor. An RPC without a method is answered with UNIMPLEMENTED.

    The method of a unary RPC takes the request and its metadata, and returns the answer. The method of an RPC that
    streams its answer takes the request and a sink. The method of an RPC that receives a stream takes the stream.
    """

    descriptor: ClassVar[Any]

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def check(self, method: str, metadata: dict[str, str]) -> None:
        """Raise `GRPCError` if the caller may not call this method."""

    def __mapping__(self) -> dict[str, Handler]:
        handlers = {}
        for method in self.descriptor.methods:
            serve = getattr(self, method.name, None)
            if serve is not None:
                kind = _KINDS[method.client_streaming, method.server_streaming]
                handlers[f"/{self.descriptor.full_name}/{method.name}"] = Handler(
                    self._handler(method.name, serve, kind),
                    kind,
                    GetMessageClass(method.input_type),
                    GetMessageClass(method.output_type),
                )
        return handlers

    def _handler(self, name: str, serve: Callable[..., Awaitable[Any]], kind: Cardinality) -> Any:
        async def handle(stream: Any) -> None:
            metadata = {key: value for key, value in (stream.metadata or {}).items() if isinstance(value, str)}
            request = None if kind.client_streaming else await stream.recv_message()
            self.cloud.requests.add(name, request)
            fault = self.cloud.faults.next(name)
            if fault is not None:
                await asyncio.sleep(fault.delay_s)
                if not fault.lose_answer and fault.cut_after_bytes is None and fault.status is not None:
                    raise fault.error()
                if not fault.lose_answer and fault.cut_after_bytes is None and not fault.delay_s:
                    await fault.fail()
            self.check(name, metadata)
            if kind is Cardinality.UNARY_UNARY:
                answer = await serve(request, metadata)
                if fault is not None and fault.lose_answer:
                    await fault.fail()
                await stream.send_message(answer)
            elif kind is Cardinality.UNARY_STREAM:
                await serve(request, _Sink(stream, fault))
            else:
                await serve(stream)

        return handle


class _Sink:
    """The answers of a streaming RPC, which a fault may cut short."""

    def __init__(self, stream: Any, fault: RpcFault | None) -> None:
        self._stream = stream
        self._fault = fault
        self._left = None if fault is None else fault.cut_after_bytes

    async def send(self, message: Any, size: int) -> None:
        """Send an answer that carries `size` bytes."""
        if self._left is not None and self._fault is not None:
            self._left -= size
            if self._left < 0:
                await self._fault.fail()
        await self._stream.send_message(message)
