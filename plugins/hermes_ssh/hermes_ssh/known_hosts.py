"""Host keys: reads `known_hosts` files, compares them with a server's key, and refuses with the line that would accept
it."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from hermes_core import ProvisionError


class HostKeyError(ProvisionError):
    """A server showed a key that nobody has accepted, or another one than was accepted. Nothing was sent to it."""

    retryable = False


@dataclass(frozen=True)
class _Known:
    marker: str
    patterns: tuple[str, ...]
    kind: str
    blob: str

    def matches(self, name: str) -> bool:
        """Return whether the line is about this host: `!` excludes, `*` and `?` are wildcards, `|1|…` is hashed."""
        found = False
        for pattern in self.patterns:
            if pattern.startswith("|1|"):
                found = found or paramiko.HostKeys.hash_host(name, pattern) == pattern
            elif fnmatch.fnmatchcase(name, _literal_brackets(pattern.removeprefix("!"))):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


class KnownHosts:
    """The keys in some files. Missing files have none.

    Args:
        files: a new key is to be added to the first one.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self._entries = [entry for path in self._files for entry in _read(path)]

    def kinds(self, name: str) -> list[str]:
        """Return the kinds of the known keys of a host. The host is asked for these first."""
        return [entry.kind for entry in self._entries if not entry.marker and entry.matches(name)]

    def check(self, name: str, key: paramiko.PKey) -> None:
        """Check that `name` may have this key.

        Raises:
            HostKeyError: it is unknown, revoked, or differs from the known one.
        """
        kind, blob = key.get_name(), key.get_base64()
        known = [entry for entry in self._entries if entry.matches(name)]
        shown = f"{kind} {key.fingerprint}"
        if any(entry.marker == "@revoked" and entry.blob == blob for entry in known):
            raise HostKeyError(f"the host key of {name} is revoked: {shown}", hint="do not use this host")
        plain = [entry for entry in known if not entry.marker]
        if any(entry.blob == blob for entry in plain):
            return
        file = shlex.quote(str(self._files[0]))
        accept = f"echo {shlex.quote(f'{name} {kind} {blob}')} >> {file}"
        compare = "if it equals what `ssh-keygen -lf` says of the key on the host itself, accept it by:"
        if not plain:
            raise HostKeyError(f"the host key of {name} is not known: {shown}", hint=f"{compare} {accept}")
        raise HostKeyError(
            f"the host key of {name} has CHANGED, somebody may be in between: it shows {shown}, known is another",
            hint=f"{compare} ssh-keygen -R {shlex.quote(name)} -f {file} && {accept}",
        )


def _read(path: Path) -> list[_Known]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            found.append(_Known(marker, tuple(words[0].split(",")), words[1], words[2]))
    return found


def _literal_brackets(pattern: str) -> str:
    """Return the pattern with `[name]:port` escaped, because it is not a set of characters."""
    return pattern.replace("[", "[[]")
