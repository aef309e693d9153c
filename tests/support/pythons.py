"""The interpreters that are here, of every version that a sandbox or a host may have."""

from __future__ import annotations

import subprocess
from pathlib import Path

OLDEST, *NEWER = ["3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]
PLACES = [Path.home() / ".pyenv/versions", Path("/usr/local/bin"), Path("/usr/bin"), Path("/opt")]


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version; None if there is none."""
    for place in PLACES:
        for path in sorted([*place.glob(f"python{version}"), *place.glob(f"{version}*/bin/python{version}")]):
            if subprocess.run([path, "-c", "import tarfile, ctypes"], capture_output=True, check=False).returncode == 0:
                return str(path)
    return None
