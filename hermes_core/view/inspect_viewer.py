"""Starts Inspect's viewer, where it is installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hermes_core.errors import OutputError, UsageError

INSTALL = "pip install inspect-ai"
"""The line that installs Inspect."""

ENDING_S = 5.0
"""Seconds that the viewer may take to end."""


def command() -> list[str]:
    """Return the command that runs Inspect, as installed for this Python, or else found on the PATH.

    Raises:
        UsageError: Inspect is not installed; the hint has the line that installs it.
    """
    if importlib.util.find_spec("inspect_ai") is not None:
        return [sys.executable, "-m", "inspect_ai"]
    if found := shutil.which("inspect"):
        return [found]
    raise UsageError(
        "Inspect, which has the viewer, is not installed",
        hint=f"`{INSTALL}`; or read the run in the terminal: hermes-rl show RUN",
    )


@contextmanager
def running(inspect: Sequence[str], logs: Path, host: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the viewer for the logs of a folder while the block runs."""
    options = ["--log-dir", str(logs), "--host", host, "--port", str(port), "--no-trust-content"]
    viewer = subprocess.Popen([*inspect, "view", "start", *options], stdin=subprocess.DEVNULL)
    try:
        yield viewer
    finally:
        viewer.terminate()
        try:
            viewer.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            viewer.kill()
            viewer.wait()


def bundle(inspect: Sequence[str], logs: Path, folder: Path) -> None:
    """Make a folder with the viewer and the logs, for any static web server.

    Raises:
        OutputError: Inspect failed.
    """
    options = ["--log-dir", str(logs), "--output-dir", str(folder), "--overwrite"]
    done = subprocess.run(
        [*inspect, "view", "bundle", *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last_line = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise OutputError(
            f"`inspect view bundle` failed: {' '.join(last_line)}", hint="check the folder's name and its disk"
        )
