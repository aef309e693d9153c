"""The way to the driver: the connection that it has now, and the streams that wait for room in it."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .connection import Connection


class Outlet:
    """Frames to whichever connection is the driver's."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self._paused: list[Callable[[], object]] = []

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame; without a connection it is dropped, as a resumed driver asks again."""
        if self.connection is not None:
            self.connection.send(header, data)

    def congested(self) -> bool:
        """Whether streams have to wait: no driver, or enough under way already."""
        return self.connection is None or self.connection.congested()

    def pause(self, resume: Callable[[], object]) -> None:
        """A stream waits for room, and is to be resumed when there is some."""
        if resume not in self._paused:
            self._paused.append(resume)

    def resume_paused(self) -> None:
        """There is room again."""
        waiting, self._paused = self._paused, []
        for resume in waiting:
            resume()
