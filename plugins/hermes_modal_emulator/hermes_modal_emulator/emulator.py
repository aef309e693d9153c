"""The user's handle of the emulator: a process of its own that ends with its owner and is controlled over a pipe."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


class EmulatorError(RuntimeError):
    """The emulator refused, or is gone."""


class ModalEmulator:
    """A local stand-in for Modal that serves the real SDK; a context manager. Safe to use from any thread.

        with ModalEmulator() as emulator:
            os.environ.update(emulator.environment)      # before `import modal`

    Args:
        mode: `namespaces` gives each sandbox its own files, processes and network; `plain` runs commands as they are;
            `auto` is `namespaces` where this machine allows it.
        port: of loopback; 0 is any.

    Raises:
        EmulatorError: it could not be started.
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
            """What to set before `import modal`."""
            self.mode: str = self._ask("mode")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return the id of the emulator's process."""
        return self._process.pid

    def fault(
        self,
        method: str,
        status: str | None = None,
        *,
        message: str = "",
        after: int = 0,
        times: int = 1,
        delay_s: float = 0.0,
        retry_after_s: float | None = None,
        lose_answer: bool = False,
        cut_after_bytes: int | None = None,
    ) -> None:
        """Make later calls of an RPC fail. Without a status, delay or loss they are never answered.

        Args:
            method: the RPC: `SandboxCreateV2`, `TaskExecStart`, `TaskExecStdioRead`, …
            status: the gRPC status: `UNAVAILABLE`, `RESOURCE_EXHAUSTED`, `UNAUTHENTICATED`, …
            after: how many calls succeed first.
            times: how many calls fail; -1 means all of them.
            delay_s: how long to wait first, in seconds.
            retry_after_s: the advice that goes with RESOURCE_EXHAUSTED.
            lose_answer: do the work, but lose its answer.
            cut_after_bytes: cut the stream after so many bytes.
        """
        given = {key: value for key, value in locals().items() if key != "self"}
        self._ask("fault", **given)

    def clear_faults(self) -> None:
        """Remove all faults."""
        self._ask("clear_faults")

    def requests(self, method: str | None = None, since: int = 0) -> list[dict[str, Any]]:
        """Return the requests so far, of one RPC or of all: `{"number", "method", "request"}`."""
        found: list[dict[str, Any]] = self._ask("requests", since=since, method=method)
        return found

    def add_secret(self, name: str, values: Mapping[str, str]) -> None:
        """Add a secret, as `modal secret create NAME KEY=VALUE` does."""
        self._ask("add_secret", name=name, values=dict(values))

    def set(self, **options: Any) -> None:
        """Change `max_sandboxes`, `page_size`, `auth_ttl_s`, `router_ttl_s`, `refused_tokens`, `missing_images`."""
        self._ask("set", **options)

    def sandboxes(self, *, running: bool = True) -> list[dict[str, Any]]:
        """Return `{"id", "v2", "running", "tags", "created"}` of the running sandboxes, or of all so far."""
        return [each for each in self._ask("sandboxes") if each["running"] or not running]

    def kill_sandbox(self, sandbox_id: str) -> None:
        """Kill the sandbox now, as if its worker had died."""
        self._ask("kill_sandbox", sandbox_id=sandbox_id)

    def revoke_tokens(self) -> None:
        """Make routers refuse all tokens issued so far, even those that have not expired."""
        self._ask("revoke_tokens")

    def outage(self, seconds: float) -> None:
        """Cut every connection, and refuse new ones for so long; sandboxes live on. Blocks meanwhile."""
        self._ask("outage", seconds=seconds)

    def close(self) -> None:
        """End it, with all of its sandboxes. Idempotent."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, call: str, **given: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            line = json.dumps({"id": next(self._numbers), "call": call, "given": given}) + "\n"
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except (OSError, ValueError) as error:
                raise EmulatorError(f"the emulator is gone: {error}") from error
        if not answer:
            raise EmulatorError(f"the emulator is gone; its status was {self._process.wait(30)}")
        said = json.loads(answer)
        if "error" in said:
            raise EmulatorError(said["error"])
        return said["value"]
