"""Compares a server's host key with the keys in `known_hosts` files. The error's hint has the command that would accept
the key."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hermes_core import ProvisionError


class HostKeyError(ProvisionError):
    """A server has a key that was not accepted before. Nothing was sent to the server."""

    retryable = False


@dataclass(frozen=True)
class _Known:
    marker: str
    patterns: tuple[str, ...]
    kind: str
    blob: str

    def matches(self, name: str) -> bool:
        """Return whether the line is about this host: `!` excludes, `*` and `?` are wildcards, `|1|…` is hashed."""
        is_included = False
        for pattern in self.patterns:
            if pattern.startswith("|1|"):
                is_included = is_included or paramiko.HostKeys.hash_host(name, pattern) == pattern
            elif fnmatch.fnmatchcase(name, _literal_brackets(pattern.removeprefix("!"))):
                if pattern.startswith("!"):
                    return False
                is_included = True
        return is_included


class KnownHosts:
    """The keys in some files. A file that can't be read counts as empty.

    Args:
        files: the files; messages name the first one as the place for a new key.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._entries = [entry for path in self._files for entry in _read(path)]

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of a host's known keys, which the host is asked for first."""
        return [entry.kind for entry in self._entries if not entry.marker and entry.matches(name)]

    def check(self, name: str, key: paramiko.PKey) -> None:
        """Check that a host may have this key.

        Raises:
            HostKeyError: the key is unknown, revoked, or differs from the known one.
        """
        kind, blob = key.get_name(), key.get_base64()
        known = [entry for entry in self._entries if entry.matches(name)]
        label = f"{kind} {key.fingerprint}"
        if any(entry.marker == "@revoked" and entry.blob == blob for entry in known):
            raise HostKeyError(f"the host key of {name} is revoked: {label}", hint="do not use this host")
        plain = [entry for entry in known if not entry.marker]
        if any(entry.blob == blob for entry in plain):
            return
        file = shlex.quote(str(self._files[0]))
        accept = f"echo {shlex.quote(f'{name} {kind} {blob}')} >> {file}"
        compare = "if it equals what `ssh-keygen -lf` says of the key on the host itself, accept it by:"
        if not plain:
            raise HostKeyError(f"the host key of {name} is not known: {label}", hint=f"{compare} {accept}")
        raise HostKeyError(
            f"the host key of {name} has CHANGED, somebody may be in between: it shows {label}, known is another",
            hint=f"{compare} ssh-keygen -R {shlex.quote(name)} -f {file} && {accept}",
        )


def _read(path: Path) -> list[_Known]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            entries.append(_Known(marker, tuple(words[0].split(",")), words[1], words[2]))
    return entries


def _literal_brackets(pattern: str) -> str:
    """Escape the brackets of `[name]:port`, which `fnmatch` would take for a set of characters."""
    return pattern.replace("[", "[[]")
