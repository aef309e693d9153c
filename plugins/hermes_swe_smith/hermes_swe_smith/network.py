"""Tells from the messages of git and pip whether they failed because of the network."""

from __future__ import annotations

import re

_GIT = re.compile(
    r"Could not resolve (host|proxy|hostname)\b|Failed to connect to |Connection (refused|timed out|reset by peer)"
)
# Each retry is announced; after the last one, an index that was not reached is the same to pip as an empty one.
_PIP = re.compile(
    r"Retrying \(Retry\(total=0,.*(NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError)"
    r"[\s\S]*\(from versions: none\)"
)


def git_was_cut_off(said: str) -> bool:
    """Return whether git could not reach the server. An error that the server answers does not count."""
    return _GIT.search(said) is not None


def pip_was_cut_off(said: str) -> bool:
    """Return whether pip gave up on an index after its last retry. An error that the index answers does not count."""
    return _PIP.search(said) is not None
