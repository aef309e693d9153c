"""Masks secrets that only the sandbox knows in the output of commands."""

from __future__ import annotations

import re

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHORTEST = 8
"""Minimum length of a secret in bytes. Shorter values would mask too much of every log."""


def values_of(names: Iterable[str], environment: Mapping[bytes, bytes]) -> tuple[bytes, ...]:
    """Return the values of these variables, and each line of values with several lines, the longest first."""
    values: set[bytes] = set()
    for name in names:
        value = environment.get(name.encode("utf-8", "surrogateescape"), b"")
        values.update(part.strip() for part in (value, *value.splitlines()))
    return tuple(sorted((value for value in values if len(value) >= SHORTEST), key=lambda value: (-len(value), value)))


class Mask:
    """Replaces each byte of the secrets in a stream by `*`, also if a secret is spread over several pieces.

    The number of bytes stays the same, so offsets stay true. A possible beginning of a secret is held back until the
    next piece, or `rest`.
    """

    def __init__(self, values: tuple[bytes, ...]) -> None:
        self._values = values
        self._pattern = re.compile(b"|".join(re.escape(value) for value in values))
        self._longest = len(values[0])
        self._held = b""

    @property
    def holds(self) -> bool:
        """Return whether bytes are held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take the next piece of the stream, and return the bytes that are complete."""
        masked = self._pattern.sub(_stars, self._held + data)
        cut = len(masked) - self._partial_length(masked)
        self._held = masked[cut:]
        return masked[:cut]

    def rest(self) -> bytes:
        """Return the bytes that were held back."""
        held, self._held = self._held, b""
        return held

    def _partial_length(self, data: bytes) -> int:
        """Return the length of the longest suffix of `data` that is a proper prefix of a secret."""
        for length in range(min(self._longest - 1, len(data)), 0, -1):
            end = data[-length:]
            if any(value.startswith(end) for value in self._values):
                return length
        return 0


def _stars(match: re.Match[bytes]) -> bytes:
    return b"*" * len(match.group())
