"""The direct mode: slots of a sandbox without a guest. Each command is run by `sh` over a channel of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Self

from hermes_core.errors import ChannelLost, CommandError, InfraError, PolicyError, ProvisionError, SandboxLost, SlotLost
from hermes_core.sandbox.commands import PREPARE, Call, call_directly
from hermes_core.sandbox.contract import Isolation, Sandbox
from hermes_core.sandbox.direct import sh
from hermes_core.sandbox.direct.commands import DirectCommands, DirectSlot
from hermes_core.sandbox.direct.sh import Shell
from hermes_core.sandbox.guest_client.connection import GuestLife, GuestSettings

log = logging.getLogger(__name__)

_NEEDED = ("mkfifo", "head", "tail", "stat", "find", "grep", "tar", "readlink", "rm", "mv", "chmod", "mkdir", "dd")

_PROBE = """
for each in bash setsid "$@"; do command -v "$each" >/dev/null 2>&1 && echo "$each"; done
grep -q . /proc/self/environ 2>/dev/null && echo proc
nproc 2>/dev/null
[ "$(id -u 2>/dev/null)" != 0 ] || echo root
true
"""

_HEARTBEAT = """
mkdir -p "${1%/*}" || exit 1
while IFS= read -r beat; do echo "$beat" >"$1" && echo "$beat"; done
"""

_OPEN = """
umask 077
mkdir -p "$1" "$2/home" "$2/tmp" "$2/run"
"""

_WIPE = f"""
chmod -R u+rwx "$1" "$2" 2>/dev/null
rm -rf "$1" "$2"
if [ -e "$1" ] || [ -e "$2" ]; then fail 'files are left'; fi
{_OPEN}"""


class DirectClient:
    """The `Client` of a sandbox that has no Python, or whose slot is root. It serves `shared` slots, or the one slot of
    a `dedicated` sandbox.

    Processes of a slot are found by a mark in their environment. A process can remove its mark, so a search that finds
    none proves nothing. Therefore a used `dedicated` sandbox is replaced, never reset.
    """

    own_users = False

    def __init__(self, sandbox: Sandbox, settings: GuestSettings, tools: frozenset[str]) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self.granted = Isolation.DEDICATED if settings.slots == 1 else Isolation.SHARED
        self.processors = max((int(word) for word in tools if word.isdecimal()), default=1)
        self.life: GuestLife | None = None
        self._shell = Shell(
            sandbox,
            program="bash" if "bash" in tools else "sh",
            session="setsid" if "setsid" in tools else "",
            can_kill="proc" in tools,
        )
        self.lost = self._shell.lost
        self._secret = secrets.token_hex(8)
        self._slots: dict[int, DirectSlot] = {}
        self.missing = tuple(self._missing(can_kill="proc" in tools))

    def _missing(self, *, can_kill: bool) -> list[str]:
        missing = [
            "isolation between slots above shared, unless each sandbox has one slot",
            "a preparation user apart from the slots",
            "hiding the sandbox's own environment variables from commands",
            "proof that a killed slot is dead: a process that clears its environment is not found",
            "telling exit status 128 + n from signal n",
            "telling a program that can't be loaded (its format, its interpreter) from one that ended with 126 or 127",
            "SIGINT and SIGQUIT: sh starts commands that ignore both",
            "background processes that outlive the driver's connection, and the end of their input",
            "spooled output",
            "streamed output",
            "terminals (pty)",
            "ports whose connections end on the driver (forward)",
        ]
        if not can_kill:
            missing.append("killing what a slot left running (no /proc): its sandbox is replaced instead")
        return missing

    @classmethod
    async def start(cls, sandbox: Sandbox, settings: GuestSettings, *, as_root: bool = False) -> Self:
        """Find out which programs the sandbox has, and start the heartbeat.

        Args:
            as_root: refuse a sandbox whose own user is not root.

        Raises:
            PolicyError: the requested isolation is impossible without Python, or commands would not run as root.
            ProvisionError: the sandbox lacks programs that the direct mode needs.
            ChannelLost, SandboxLost: the sandbox could not be reached.
        """
        try:
            tools = frozenset((await sh.helper(sandbox, _PROBE, *_NEEDED)).decode().split())
        except sh.Ended as error:
            raise ChannelLost("sh ended before it said a word", sandbox_id=sandbox.id) from error
        if absent := [name for name in _NEEDED if name not in tools]:
            raise ProvisionError(
                f"the sandbox has neither a guest nor {', '.join(absent)}",
                hint="use an image with python3 (3.7 or later) and no slot_user: root, or with a full busybox",
                sandbox_id=sandbox.id,
                retryable=False,
            )
        if as_root and "root" not in tools:
            raise PolicyError(
                "slot_user is 'root', and the sandbox's own user is not",
                hint="leave out the backend's setting for the sandbox's user, or slot_user",
                sandbox_id=sandbox.id,
            )
        client = cls(sandbox, settings, tools)
        if client.granted < settings.isolation:
            raise PolicyError(
                f"without Python a sandbox of {settings.slots} slots can't grant {settings.isolation.label!r}",
                hint="use an image with python3 (3.7 or later), slots_per_sandbox: 1, or level shared",
                sandbox_id=sandbox.id,
            )
        without = "for a slot that is root of its sandbox" if as_root else "without Python in the image"
        instead = "isolation private-root" if as_root else "an image with python3 (3.7 or later)"
        if settings.has_secrets:
            raise PolicyError(
                f"{without}, commands would see all of the sandbox's secrets, and nothing masks them",
                hint=f"use {instead}, or leave out secrets and slot_secrets",
                sandbox_id=sandbox.id,
            )
        if settings.process_memory is not None:
            raise PolicyError(
                f"{without}, nothing limits the memory of a process (process_memory)",
                hint=f"use {instead}, or leave out process_memory (--confine sets it)",
                sandbox_id=sandbox.id,
            )
        client._shell.work.spawn(client._heartbeat(), f"heartbeat of {sandbox.id}")
        return client

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        """Stop using the sandbox. With `end_sandbox`, make its watchdog end it. Idempotent."""
        if self._shell.closed:
            return
        self._shell.closed = True
        await self._shell.work.aclose()
        if end_sandbox and not self.lost.is_set():
            with contextlib.suppress(InfraError, CommandError, sh.Ended):
                await sh.helper(self.sandbox, 'echo end >"$1"', self._heartbeat_path)

    # --- slots ------------------------------------------------------------------------------------------------------

    def _slot(self, index: int) -> DirectSlot:
        """Return the state of a slot. Without a guest, the preparation's slot (`PREPARE`) has the same user as all
        others."""
        if index not in self._slots:
            base = self.settings.workspace_base
            workspace = f"{base}/prepared" if index == PREPARE else f"{base}/slot_{index}"
            scratch = f"{base}/.direct/prepare" if index == PREPARE else f"{base}/.direct/slot_{index}"
            self._slots[index] = DirectSlot(workspace, scratch, f"{self._secret}-{index}.")
        return self._slots[index]

    def commands(
        self, index: int, call: Call = call_directly, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> DirectCommands:
        """Return the commands of a slot, as `GuestClient.commands` does."""
        return DirectCommands(self._shell, {**self.settings.env, **(env or {})}, self._slot(index), call, cwd)

    async def open_slot(self, index: int) -> str:
        """Make the slot's directories, and return its workspace. Idempotent."""
        slot = self._slot(index)
        await self._shell.script(_OPEN, *slot.directories)
        return slot.workspace

    async def kill_slot(self, index: int, *, forget: bool = False) -> None:
        """Kill all processes with the slot's mark, and forget its background processes.

        Raises:
            SlotLost: processes are left, or can't be searched for.
            SandboxLost: the sandbox has ended.
        """
        # Even if nothing was started in the slot: otherwise the pool would give an ended sandbox to the next caller.
        await self._shell.check_alive(None)
        slot = self._slot(index)
        if slot.used:
            await self._shell.kill(f"={slot.mark}", "KILL")
            await slot.forget_processes()

    async def reset_slot(self, index: int) -> None:
        """Kill all processes with the slot's mark, and remove its files.

        Raises:
            SlotLost: it is the used slot of a dedicated sandbox, or processes or files are left.
            SandboxLost: the sandbox has ended.
        """
        await self._shell.check_alive(None)  # for an unused slot, no other request would notice the end
        slot = self._slot(index)
        if not slot.used:
            return
        if self.granted is Isolation.DEDICATED:
            raise SlotLost(
                "without Python nothing but a new sandbox is proof of a clean slot", sandbox_id=self.sandbox.id
            )
        await self.kill_slot(index)
        try:
            await self._shell.script(_WIPE, *slot.directories)
        except CommandError as error:
            raise SlotLost(f"the slot could not be emptied: {error}", sandbox_id=self.sandbox.id) from error
        slot.used = False

    async def is_crowded(self, index: int) -> bool:
        """Return False, because without a guest we don't know whose files fill the disk."""
        return False

    # --- the heartbeat ----------------------------------------------------------------------------------------------

    @property
    def _heartbeat_path(self) -> str:
        return f"{self.settings.state_dir}/heartbeat"

    async def _heartbeat(self) -> None:
        """Send heartbeats to the sandbox's watchdog, and set `lost` when the sandbox can't be reached for too long."""
        last_answer_at = time.monotonic()
        while not self.lost.is_set():
            try:
                channel = await self._shell.open(_HEARTBEAT, [self._heartbeat_path], {"HERMES_DIRECT_HELPER": "1"})
                try:
                    while True:
                        async with asyncio.timeout(self.settings.orphan_ttl_s):
                            await channel.write(b"%d %d\n" % (time.time_ns(), self.settings.orphan_ttl_s))
                            if not await channel.read(sh.READ_SIZE):
                                raise ChannelLost("the heartbeat ended")
                        last_answer_at = time.monotonic()
                        await asyncio.sleep(self._interval)
                finally:
                    await channel.aclose()
            except SandboxLost:
                return
            except (InfraError, TimeoutError) as error:
                with contextlib.suppress(InfraError):
                    await self._shell.check_alive(error)
                if time.monotonic() - last_answer_at > self.settings.orphan_ttl_s:
                    log.warning("sandbox %s could not be reached in time", self.sandbox.id)
                    self.lost.set()
                await asyncio.sleep(self._interval / 4)

    @property
    def _interval(self) -> float:
        return max(0.1, min(5.0, self.settings.orphan_ttl_s / 6))
