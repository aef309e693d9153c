"""What this host allows its local sandboxes: tried in a process of its own, as trying it means to fork."""

from __future__ import annotations

import marshal
import subprocess
from dataclasses import dataclass

from hermes_core.sandbox.local.launch import launcher_argv

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Probe:
    """The outcome of `guest.probe.what_works`."""

    root: bool
    namespaces: bool
    """Namespaces as we are."""
    user_namespaces: bool
    """Namespaces by way of a user namespace."""
    network: bool
    reason: str

    @property
    def isolates(self) -> bool:
        """Whether sandboxes can have namespaces of their own, one way or the other."""
        return self.namespaces or self.user_namespaces


def probe_host() -> Probe:
    """Try it. Blocking, about 30 ms."""
    try:
        done = subprocess.run(
            launcher_argv("probe", 0),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={},
            timeout=_LIMIT_S,
            check=True,
        )
        return Probe(**marshal.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, EOFError, TypeError) as error:
        detail = getattr(error, "stderr", b"") or b""
        reason = f"the launcher fails: {error} {detail.decode('utf-8', 'replace').strip()[-500:]}".strip()
        return Probe(root=False, namespaces=False, user_namespaces=False, network=False, reason=reason)
