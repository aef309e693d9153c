"""The machines of sandboxes: namespaces over an overlay of this host's files, or plain processes of this host."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hermes_modal_emulator.commands import wait_for_exit

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
FS_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"
_UPPER_FD = 9
_ORDINARY = {
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "media", "mnt", "opt"),
    *("proc", "root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
}
"""Names that an image has in its root directory. Everything else there is this host's own, and is hidden."""
_LOOPBACK_UP = (
    "import fcntl,socket,struct as s;"
    "fcntl.ioctl(socket.socket(),0x8914,s.pack('16sh',b'lo',0x43)+bytes(14))"  # SIOCSIFFLAGS: UP, RUNNING, LOOPBACK
)


class MachineError(Exception):
    """The sandbox's machine could not be made."""


class NamespaceMachine:
    """A machine with mounts, pids and IPC of its own: a writable overlay in memory over this host's files, and a /tmp.

    It lives as long as its first process, which the kernel kills when the emulator ends. Its disk, which is memory,
    goes with it.
    """

    def __init__(
        self, base: Path, *, snapshot: Path | None, volumes: Mapping[str, Path], network: bool, workdir: str
    ) -> None:
        self._base = base
        self._snapshot, self._volumes, self._network, self._workdir = snapshot, volumes, network, workdir
        self._holder: asyncio.subprocess.Process | None = None
        self._init = 0

    def _script(self) -> str:
        top, root = shlex.quote(str(self._base)), shlex.quote(f"{self._base}/root")
        lines = [
            "set -e",
            f"mount -t tmpfs tmpfs {top}",
            f"mkdir {top}/upper {top}/work {root}",
        ]
        if self._snapshot is not None:
            lines.append(f"cp -a {shlex.quote(str(self._snapshot))}/. {top}/upper/")
        lines += [f"[ -e {top}/upper/{name} ] || mknod {top}/upper/{name} c 0 0" for name in self._names_to_hide()]
        lines += [
            f"exec {_UPPER_FD}<{top}/upper",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={top}/upper,workdir={top}/work {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
        ]
        for place, source in self._volumes.items():
            target = shlex.quote(f"{self._base}/root{place}")
            lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(source))} {target}"]
        if self._workdir:
            lines.append(f"mkdir -p {shlex.quote(f'{self._base}/root{self._workdir}')}")
        if not self._network:
            lines.append(f"{os.path.realpath(sys.executable)} -SEc {shlex.quote(_LOOPBACK_UP)}")
        # Process 1 has to reap orphans, which the shell's `wait` does. It keeps none of the emulator's pipes open.
        lines += [
            f"cd {root}",
            "pivot_root . .",
            "umount -l .",
            "cd /",
            "echo ready",
            "exec >/dev/null 2>&1",
            "while :; do sleep 86400 & wait $!; done",
        ]
        return "\n".join(lines)

    @staticmethod
    def _names_to_hide() -> list[str]:
        """Return names in the root directory that the overlay marks as removed. The top directory of Python stays,
        because `sandbox.filesystem` needs it."""
        ours = Path(os.path.realpath(sys.executable)).parts[1]
        return [shlex.quote(each.name) for each in Path("/").iterdir() if each.name not in _ORDINARY | {ours}]

    async def start(self) -> None:
        """Make the namespaces and the root. Raises `MachineError` if that fails."""
        self._base.mkdir(parents=True)
        flags = ["-m", "-p", "-i", "-f", "--kill-child", "--propagation", "private"]
        if os.geteuid() != 0:
            flags += ["-U", "-r"]
        if not self._network:
            flags.append("-n")
        # The function runs in the child before exec, so that the kernel kills the child when this process ends.
        self._holder = await asyncio.create_subprocess_exec(
            "unshare",
            *flags,
            "/bin/sh",
            "-c",
            self._script(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if await self._holder.stdout.readline() != b"ready\n":
            message = (await self._holder.stderr.read()).decode(errors="replace").strip()
            await self.stop()
            raise MachineError(f"no namespaces for the sandbox: {message}")
        self._init = _first_child(self._holder.pid)

    def argv(self, argv: Sequence[str], cwd: str) -> list[str]:
        """Return the command that runs `argv` by `nsenter`. If `cwd` is missing, it fails inside of the sandbox."""
        flags = ["-m", "-p", "-i"] + (["-U", "--preserve-credentials"] if os.geteuid() != 0 else [])
        if not self._network:
            flags.append("-n")
        enter = ["nsenter", "-t", str(self._init), *flags, "--"]
        return [*enter, "/bin/sh", "-c", 'cd "$0" || exit 125; exec "$@"', cwd, *argv]

    def cwd(self, wanted: str) -> str | None:
        """Return None, because `argv` changes to the directory inside of the sandbox."""
        return None

    async def snapshot(self, target: Path) -> None:
        """Copy the overlay's upper layer, whiteouts included."""
        source = f"/proc/{self._init}/fd/{_UPPER_FD}/."
        copying = await asyncio.create_subprocess_exec("cp", "-a", source, str(target), stderr=subprocess.PIPE)
        _, message = await copying.communicate()
        if copying.returncode:
            raise MachineError(message.decode(errors="replace").strip())

    async def stop(self) -> None:
        """Kill the first process, with which the kernel kills all others."""
        if self._holder is not None and self._holder.returncode is None:
            init = self._init
            self._holder.kill()
            await self._holder.wait()
            if init:
                await wait_for_exit(init)
        self._holder = None
        shutil.rmtree(self._base, ignore_errors=True)


class PlainMachine:
    """A machine that is this host itself, for hosts without namespaces. Sandboxes see each other's files."""

    def __init__(self, base: Path) -> None:
        self._base = base

    async def start(self) -> None:
        """Make the default directory."""
        self._base.mkdir(parents=True)

    def argv(self, argv: Sequence[str], cwd: str) -> list[str]:
        """Return the command unchanged."""
        return [*argv]

    def cwd(self, wanted: str) -> str | None:
        """Return the directory in which the process starts."""
        return str(self._base) if wanted == "/root" else wanted

    async def snapshot(self, target: Path) -> None:
        """Make an empty snapshot."""
        target.mkdir(parents=True)  # noqa: ASYNC240 - as quick as any call

    async def stop(self) -> None:
        """Kill the processes that the sandbox's commands left running, by a variable in their environment."""
        await asyncio.to_thread(_kill_marked, f"MODAL_SANDBOX_ID={self._base.name}".encode())
        shutil.rmtree(self._base, ignore_errors=True)


Machine = NamespaceMachine | PlainMachine
"""The processes and files of one sandbox."""


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _kill_marked(marker: bytes) -> None:
    """Kill every process with this variable in its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # it has ended, or is not ours
                continue


def namespaces_missing() -> str | None:
    """Return why sandboxes can't have their own namespaces here; None if they can."""

    async def attempt(base: Path) -> str | None:
        machine = NamespaceMachine(base / "probe", snapshot=None, volumes={}, network=True, workdir="")
        try:
            await machine.start()
        except (MachineError, OSError) as error:
            return str(error)
        await machine.stop()
        return None

    with tempfile.TemporaryDirectory(prefix="modal-emulator-") as folder:
        return asyncio.run(attempt(Path(folder)))


def _end_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
