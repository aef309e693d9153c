"""Messages of MCP servers: cut out of a stream of bytes, within bounds, and without notifications."""

from __future__ import annotations

from typing import Any

from mcp_types import JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter
from pydantic import ValidationError

from hermes_core.sandbox.programs import Flooded, LineCutter

MAX_MESSAGE = 4 << 20
"""Maximum number of bytes of one message."""

MAX_UNASKED = 10_000
MAX_UNASKED_BYTES = 32 << 20
"""Maximum number of lines, and of bytes, that a server may write between two requests."""

REQUEST_LINES = 100
"""Number of lines as which a request of the server counts, because answering it takes time."""

MAX_OBJECTS = 30_000
"""Maximum number of objects and lists in one message, because parsing them blocks the event loop."""

MAX_PARTS = 1000
"""Maximum number of parts of a tool's result."""

MAX_LISTED = 2000
"""Maximum number of tools that a server may list."""

_JUNK_CHARS = 100


class MessageInbox:
    """Reads messages, one on each line, from a program's standard output. Lines that are no messages are left out.

    Notifications are left out, too, because nothing uses them and a server could send any number.
    """

    def __init__(self) -> None:
        self._lines = LineCutter(MAX_MESSAGE)
        self._left, self._left_bytes = MAX_UNASKED, MAX_UNASKED_BYTES
        self.junk = ""
        """The beginning of the first line that is no message."""

    def allow(self) -> None:
        """Reset the counts of lines and bytes, because a request is sent."""
        self._left, self._left_bytes = MAX_UNASKED, MAX_UNASKED_BYTES

    def feed(self, data: bytes) -> list[JSONRPCMessage]:
        """Add output of the program. Return the messages that are complete now.

        Raises:
            Flooded: the server writes too much.
        """
        self._left_bytes -= len(data)
        lines = self._lines.feed(data)
        self._left -= len(lines)
        if self._left < 0 or self._left_bytes < 0:
            raise Flooded(
                f"it wrote more than {MAX_UNASKED} lines or {MAX_UNASKED_BYTES >> 20} MiB that nobody asked for"
            )
        return [message for line in lines if (message := self._message(line)) is not None]

    def _message(self, line: bytes) -> JSONRPCMessage | None:
        if not line.strip():
            return None
        if line.count(b"{") + line.count(b"[") > MAX_OBJECTS:
            raise Flooded(f"it wrote a message of more than {MAX_OBJECTS} objects")
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except (ValidationError, RecursionError):
            text = line.decode("utf-8", "replace")[:_JUNK_CHARS].strip()
            if '"jsonrpc"' in text:  # it may be an expected answer
                raise Flooded(f"it wrote a message that can't be read: {text!r}") from None
            self.junk = self.junk or text
            return None
        if isinstance(message, JSONRPCNotification):
            return None
        if isinstance(message, JSONRPCRequest):
            self._left -= REQUEST_LINES
        if isinstance(message, JSONRPCResponse):
            _shorten(message.result)
        return message


def _shorten(result: dict[str, Any]) -> None:
    """Remove the parts of a tool's result after the first thousand, because checking them would take long.

    Raises:
        Flooded: the answer lists too many tools.
    """
    if isinstance(content := result.get("content"), list) and len(content) > MAX_PARTS:
        note = f"[{len(content) - MAX_PARTS} more parts: left out]"
        result["content"] = [*content[:MAX_PARTS], {"type": "text", "text": note}]
    if isinstance(tools := result.get("tools"), list) and len(tools) > MAX_LISTED:
        raise Flooded(f"it lists {len(tools)} tools at once")
