"""Tells by what git and pip say whether they failed because the network did."""

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
    """Whether git could not reach the server; what a server answers is no such failure."""
    return _GIT.search(said) is not None


def pip_was_cut_off(said: str) -> bool:
    """Whether pip gave up on an index after its last retry; an index that answers is no such failure."""
    return _PIP.search(said) is not None
