"""Frames between guest and driver, in both directions: a length-prefixed JSON header, then raw bytes."""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")
MAX_HEADER = 4 << 20
MAX_DATA = 16 << 20
CHUNK = 64 << 10
"""Maximum size of one piece of a stream in bytes: small, so that a neighbour's answer never waits long behind it."""
WINDOW = 256 << 10
"""Maximum number of bytes of a stream that are sent and not confirmed."""
CAPTURE_LIMIT = 2 << 20
"""Maximum number of bytes of one stream in an answer. An answer is one frame, and neighbours wait until it is sent."""


class Refusal(Exception):
    """A request that is refused. `kind` is the value of an ErrorKind."""

    def __init__(self, kind: str, code: str, message: str) -> None:
        super().__init__(message)
        self.error = {"kind": kind, "code": code, "message": message}


def beat_interval_s(ttl_s: float) -> float:
    """Return the seconds between a driver's heartbeats to a sandbox with this time to live."""
    return max(0.2, min(5.0, ttl_s / 6))


def silence_s(ttl_s: float) -> float:
    """Return the seconds after which a silent channel counts as broken."""
    return 2 * beat_interval_s(ttl_s) + 1.0


class FrameError(Exception):
    """The bytes on the channel are not frames."""


def encode(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    """Return one frame: two 32-bit big-endian lengths, the header as JSON, the data.

    Raises:
        FrameError: the frame is larger than the other side accepts.
    """
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_HEADER or len(data) > MAX_DATA:
        raise FrameError("too large for a frame: a header of %d bytes, data of %d" % (len(text), len(data)))
    return _LENGTHS.pack(len(text), len(data)) + text + data


class Decoder:
    """Cuts a byte stream into frames. Keeps at most one incomplete frame, of bounded size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Add bytes. Return (header, data) of each frame that is complete now.

        Raises:
            FrameError: the bytes are not a frame, and so all that follows is unreadable too.
        """
        self._buffer += data
        frames = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                # Checked before the second length has arrived, because a peer that only says "hello" never sends that.
                if _LENGTH.unpack_from(view, start)[0] > MAX_HEADER:
                    raise FrameError("not a frame: %r" % bytes(view[start : start + 40]))
                if len(view) - start < _LENGTHS.size:
                    break
                header_size, data_size = _LENGTHS.unpack_from(view, start)
                if data_size > MAX_DATA:
                    raise FrameError("not a frame: %r" % bytes(view[start : start + 40]))
                body = start + _LENGTHS.size + header_size
                end = body + data_size
                if len(view) < end:
                    break
                frames.append((_parse(bytes(view[start + _LENGTHS.size : body])), bytes(view[body:end])))
                start = end
        del self._buffer[:start]
        return frames


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame's header is not JSON: %r" % text[:40]) from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is not an object: %r" % text[:40])
    return header
