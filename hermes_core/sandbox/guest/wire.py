"""Frames: a length-prefixed JSON header and raw bytes, the same both ways (used by the guest and by the driver)."""

from __future__ import annotations

import json
import struct

_LENGTHS = struct.Struct(">II")
MAX_HEADER = 4 << 20
MAX_DATA = 16 << 20
CHUNK = 64 << 10
"""Bytes of one piece of a stream: small enough that a neighbour's answer never waits long behind it."""
WINDOW = 256 << 10
"""Bytes of a stream that may be under way without the receiver's word."""


class FrameError(Exception):
    """The bytes on the channel are not frames: something else is talking."""


def encode(header, data=b""):
    """One frame: two 32-bit big-endian lengths, the header as JSON, the data as it is."""
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    return _LENGTHS.pack(len(text), len(data)) + text + data


class Decoder:
    """Cuts a byte stream into frames. Holds at most one incomplete frame; sizes are bounded."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data):
        """Add bytes; the list of (header, data) that are complete now. Raises FrameError for anything else."""
        self._buffer += data
        frames = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= 8:
                header_size, data_size = _LENGTHS.unpack_from(view, start)
                if header_size > MAX_HEADER or data_size > MAX_DATA:
                    raise FrameError("not a frame: %r" % bytes(view[start : start + 40]))
                body = start + 8 + header_size
                end = body + data_size
                if len(view) < end:
                    break
                frames.append((_parse(bytes(view[start + 8 : body])), bytes(view[body:end])))
                start = end
        del self._buffer[:start]
        return frames


def _parse(text):
    try:
        header = json.loads(text.decode("ascii"))
    except ValueError as error:
        raise FrameError("a frame's header is not JSON: %r" % text[:40]) from error
    if not isinstance(header, dict):
        raise FrameError("a frame's header is not an object: %r" % text[:40])
    return header
