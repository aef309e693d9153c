"""The name of the server in the first message of a TLS connection."""

from __future__ import annotations

HANDSHAKE = 0x16
"""The first byte of every TLS connection."""

MAX_HELLO = 64 << 10
"""Maximum number of bytes of the first message with its frames. Browsers send about 2 KB."""


class Incomplete(Exception):
    """More bytes are needed."""


class _Reader:
    """Reads fields from the beginning of some bytes. Raises ValueError where a field is longer than what is left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError("the first TLS message ends too early")
        self._at += count
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def field(self, size: int) -> _Reader:
        """Return a field that begins with its own length, a number of `size` bytes."""
        return _Reader(self.take(self.number(size)))


def find_server_name(data: bytes) -> str | None:
    """Return the name of the server that a client asks for in its first TLS message; None if it names none.

    Args:
        data: everything that the client has sent so far.

    Raises:
        Incomplete: the message has not arrived completely.
        ValueError: this is no such message.
    """
    hello = _Reader(_client_hello(data))
    hello.take(2 + 32)  # version and random
    hello.field(1)  # session
    hello.field(2)  # ciphers
    hello.field(1)  # compressions
    extensions = hello.field(2) if hello else hello
    while extensions:
        kind, content = extensions.number(2), extensions.field(2)
        if kind != 0:
            continue
        names = content.field(2)
        while names:
            kind_of_name, name = names.number(1), names.field(2)
            if kind_of_name == 0:
                return name.take(len(name._data)).decode("ascii", "backslashreplace")
    return None


def _client_hello(data: bytes) -> bytes:
    """Return the content of the first message, which may be divided into several records."""
    message, at = b"", 0
    while True:
        if len(message) >= 4:
            if message[0] != 1:
                raise ValueError("the first TLS message is not a client's")
            size = 4 + int.from_bytes(message[1:4], "big")
            if size > MAX_HELLO:
                raise ValueError("the first TLS message is too long")
            if len(message) >= size:
                return message[4:size]
        head = data[at : at + 5]
        if head[:1] not in (b"", b"\x16"):
            raise ValueError("the first TLS message is interrupted")
        length = int.from_bytes(head[3:5], "big")
        if len(head) < 5 or len(data) < at + 5 + length:
            raise Incomplete
        if not length:
            raise ValueError("a TLS record is empty")
        message += data[at + 5 : at + 5 + length]
        at += 5 + length
