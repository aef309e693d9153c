"""Secrets that only the sandbox knows, masked in what its commands write."""

from __future__ import annotations

import re

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHORTEST = 8
"""Bytes of a secret at least: shorter ones would mask half of every log."""


def values_of(names: Iterable[str], environment: Mapping[bytes, bytes]) -> tuple[bytes, ...]:
    """Return these variables' values, and each line of values that have several; the longest first."""
    found: set[bytes] = set()
    for name in names:
        value = environment.get(name.encode("utf-8", "surrogateescape"), b"")
        found.update(part.strip() for part in (value, *value.splitlines()))
    return tuple(sorted((value for value in found if len(value) >= SHORTEST), key=lambda value: (-len(value), value)))


class Mask:
    """Writes `*` over each byte of the values in a stream, wherever its pieces are cut.

    As many bytes go out as came in, so that offsets stay true. What may be the beginning of a value is held back until
    the next piece, or `rest`.
    """

    def __init__(self, values: tuple[bytes, ...]) -> None:
        self._values = values
        self._pattern = re.compile(b"|".join(re.escape(value) for value in values))
        self._longest = len(values[0])
        self._held = b""

    @property
    def holds(self) -> bool:
        """Return whether something is held back."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Take the stream's next piece, and return what can be passed on."""
        masked = self._pattern.sub(_stars, self._held + data)
        cut = len(masked) - self._begun(masked)
        self._held = masked[cut:]
        return masked[:cut]

    def rest(self) -> bytes:
        """Return what is held back, as nothing more comes for now."""
        held, self._held = self._held, b""
        return held

    def _begun(self, data: bytes) -> int:
        """Return the length of the longest end of `data` that a value begins with."""
        for length in range(min(self._longest - 1, len(data)), 0, -1):
            end = data[-length:]
            if any(value.startswith(end) for value in self._values):
                return length
        return 0


def _stars(found: re.Match[bytes]) -> bytes:
    return b"*" * len(found.group())
