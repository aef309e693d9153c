"""Recognises failures of the network in the messages of git and pip."""

from __future__ import annotations

import re

_GIT = re.compile(
    r"Could not resolve (host|proxy|hostname)\b|Failed to connect to |Connection (refused|timed out|reset by peer)"
)
# pip announces each retry. After the last one, it treats an index that was not reached as an empty one.
_PIP = re.compile(
    r"Retrying \(Retry\(total=0,.*(NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError)"
    r"[\s\S]*\(from versions: none\)"
)


def git_was_cut_off(output: str) -> bool:
    """Return whether git could not reach the server. An answer with an error does not count."""
    return _GIT.search(output) is not None


def pip_was_cut_off(output: str) -> bool:
    """Return whether pip could not reach an index. An answer with an error does not count."""
    return _PIP.search(output) is not None
