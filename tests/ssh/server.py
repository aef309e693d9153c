"""A real SSH server of a test's own: sshd with the keys and the account that `.ci/ssh` has made."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """Why there can be no server here; None if there can."""
    named = os.environ.get("HERMES_TEST_SSH_CONFIG", "")
    if not named:
        return 'HERMES_TEST_SSH_CONFIG is not set; `eval "$(.ci/ssh)"` as root sets it'
    if not (Path(named).parent / "sshd_config").is_file():
        return f"{named} is none of `.ci/ssh`"
    return None if os.geteuid() == 0 else "the tests are not run by root, who starts sshd"


class Server:
    """One sshd on a port of its own, with options that come before those of its configuration."""

    def __init__(self, directory: Path, **options: str) -> None:
        self.made = Path(os.environ["HERMES_TEST_SSH_CONFIG"]).parent
        self.directory = directory
        self.options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.known_hosts = directory / "known_hosts"
        self.known_hosts.write_text("".join(f"[127.0.0.1]:{self.port} {key}\n" for key in self.keys()))
        self.config_file = directory / "ssh_config"
        self.config_file.write_text(self.stanza("test"))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def account(self) -> str:
        return "hermes-ssh"

    def keys(self) -> list[str]:
        """The host keys, as known_hosts writes them."""
        return [" ".join(path.read_text().split()[:2]) for path in sorted(self.made.glob("host_*.pub"))]

    def stanza(self, name: str) -> str:
        """What the client's configuration says of this server."""
        return (
            f"Host {name}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {self.account}\n"
            f"  IdentityFile {self.made}/client\n  IdentitiesOnly yes\n  UserKnownHostsFile {self.known_hosts}\n"
        )

    def start(self) -> None:
        """Start it, unless it runs; it answers when this returns."""
        options = [
            word for key, value in {"PidFile": "none", **self.options}.items() for word in ("-o", f"{key}={value}")
        ]
        command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.made / "sshd_config"), "-p", str(self.port), *options]
        with (self.directory / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self.listens():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log()
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, with every connection. Idempotent."""
        if self.process is not None:
            processes = self.connections()
            self.process.kill()
            self.process.wait()
            self.process = None
            _send(processes, signal.SIGKILL)
            while self.listens():  # a connection's process that had just been forked has the listening socket too
                time.sleep(0.02)

    def listens(self) -> bool:
        """Whether anything takes connections at its port."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except ConnectionRefusedError:
            return False
        except OSError:  # such as a reset, by a process that is about to end
            pass
        return True

    def log(self) -> str:
        return (self.directory / "sshd.log").read_text("utf-8", "replace")

    def connections(self) -> list[int]:
        """The processes that carry the connections to this server."""
        assert self.process is not None
        found, waiting = [], [self.process.pid]
        while waiting:
            for pid in children(waiting.pop()):
                if name_of(pid) == "sshd":
                    found.append(pid)
                    waiting.append(pid)
        return found

    def cut(self) -> int:
        """Cut every connection; how many processes that took."""
        return _send(self.connections(), signal.SIGKILL)

    def freeze(self) -> list[int]:
        """Stop them as they are, as a network that swallows everything would; their pids."""
        pids = self.connections()
        _send(pids, signal.SIGSTOP)
        return pids

    def config(self, **more: Any) -> dict[str, Any]:
        """The settings of a profile whose one host this is."""
        return {"host": "test", "config_file": str(self.config_file), **more}


def _send(pids: list[int], number: signal.Signals) -> int:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return len(pids)


def children(pid: int) -> list[int]:
    """The children of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def name_of(pid: int) -> str:
    """The program's name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
