"""The user's handle of the emulator, which is a process that ends with its owner and is controlled over a pipe."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Self, TypedDict, Unpack


class EmulatorError(RuntimeError):
    """The emulator refused, or is gone."""


class FaultOptions(TypedDict, total=False):
    """How calls of an RPC fail."""

    message: str
    """The message that goes with the status."""
    after: int
    """Number of calls that succeed first; 0 by default."""
    times: int
    """Number of calls that fail then; 1 by default, and -1 for all."""
    delay_s: float
    """Seconds to wait before the failure."""
    retry_after_s: float
    """The advice that goes with RESOURCE_EXHAUSTED: seconds after which the client may try again."""
    lose_answer: bool
    """Whether the call's work is done and only its answer is lost."""
    cut_after_bytes: int
    """Number of bytes after which a stream is cut."""


class ModalEmulator:
    """A local stand-in for Modal that serves the real SDK. A context manager; any thread may use it.

        with ModalEmulator() as emulator:
            os.environ.update(emulator.environment)      # before `import modal`

    Args:
        mode: `namespaces` gives each sandbox its own files, processes and network; `plain` runs commands as they are;
            `auto` is `namespaces` where this machine allows it.
        port: the port on loopback; 0 is any free one.

    Raises:
        EmulatorError: the emulator could not be started.
    """

    def __init__(self, mode: str = "auto", port: int = 0) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hermes_modal_emulator", "--mode", mode, "--port", str(port), "--owned"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("MODAL_")},
        )
        try:
            self.environment: dict[str, str] = self._ask("environment")
            """The environment variables to set before `import modal`."""
            self.mode: str = self._ask("mode")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the emulator's process."""
        return self._process.pid

    def fault(self, method: str, status: str | None = None, **options: Unpack[FaultOptions]) -> None:
        """Make later calls of an RPC fail. Without `status`, they are never answered or, if `delay_s` is given, late.

        Args:
            method: the RPC: `SandboxCreateV2`, `TaskExecStart`, `TaskExecStdioRead`, …
            status: the gRPC status: `UNAVAILABLE`, `RESOURCE_EXHAUSTED`, `UNAUTHENTICATED`, …
            options: see `FaultOptions`.
        """
        self._ask("fault", method=method, status=status, **options)

    def clear_faults(self) -> None:
        """Remove all faults."""
        self._ask("clear_faults")

    def requests(self, method: str | None = None, since: int = 0) -> list[dict[str, Any]]:
        """Return the requests so far, of one RPC or of all, each as `{"number", "method", "request"}`."""
        requests: list[dict[str, Any]] = self._ask("requests", since=since, method=method)
        return requests

    def add_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Add a secret, as `modal secret create NAME KEY=VALUE` does."""
        self._ask("add_secret", name=name, values=dict(values))

    def set(self, **options: Any) -> None:
        """Change `max_sandboxes`, `page_size`, `auth_ttl_s`, `router_ttl_s`, `refused_tokens`, `missing_images`."""
        self._ask("set", **options)

    def sandboxes(self, *, running: bool = True) -> list[dict[str, Any]]:
        """Return the running sandboxes, or all so far, each as `{"id", "v2", "running", "tags", "created"}`."""
        return [each for each in self._ask("sandboxes") if each["running"] or not running]

    def kill_sandbox(self, sandbox_id: str) -> None:
        """Kill the sandbox now, as if its worker had died."""
        self._ask("kill_sandbox", sandbox_id=sandbox_id)

    def revoke_tokens(self) -> None:
        """Make routers refuse all tokens issued so far, even those that have not expired."""
        self._ask("revoke_tokens")

    def outage(self, seconds: float) -> None:
        """Cut every connection, and refuse new ones for some seconds. Sandboxes live on. Blocks during the outage."""
        self._ask("outage", seconds=seconds)

    def close(self) -> None:
        """End the emulator with all of its sandboxes. Idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            line = json.dumps({"id": next(self._numbers), "call": call, "arguments": arguments}) + "\n"
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except (OSError, ValueError) as error:
                raise EmulatorError(f"the emulator is gone: {error}") from error
        if not answer:
            raise EmulatorError(f"the emulator is gone; its status was {self._process.wait(30)}")
        outcome = json.loads(answer)
        if "error" in outcome:
            raise EmulatorError(outcome["error"])
        return outcome["value"]
