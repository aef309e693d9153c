"""The refusal of a request."""

from __future__ import annotations


class Refusal(Exception):
    """A request that cannot be done; `kind` is an ErrorKind's word."""

    def __init__(self, kind: str, code: str, message: str) -> None:
        super().__init__(message)
        self.error = {"kind": kind, "code": code, "message": message}
