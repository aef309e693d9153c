"""A driver of its own, as whatever user it is started: one sandbox, slots by name, told what to do in lines of JSON.

`driver_process.py STATE_DIR LEVEL CONFIG` reads one request a line on standard input, does them all at the same time,
and writes one answer a line. It ends, and its sandbox with it, when its input ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import hermes_core
from hermes_core.errors import HermesError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Slot, SlotCommands
from hermes_core.tool_backend import ToolBackend

PREPARATION = "preparation"
"""The name that stands for the preparation user instead of a slot."""

SECRET = "-".join(["only", "the", "driver", "knows"])  # in no file
_JOIN_SESSION_KEYRING, _SET_TIMEOUT, _SESSION_KEYRING, _USER_KEYRING, _KEPT_S = 1, 15, -3, -4, 300
_ADD_KEY, _KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine, (-1, -1))


class Driver:
    """The slots, by name; a method `op_…` for every request."""

    def __init__(self, backend: ToolBackend) -> None:
        self._backend = backend
        self._slots: dict[str, Slot] = {}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = getattr(self, f"op_{request.pop('op')}")
        try:
            return {"result": await operation(**request)}
        except HermesError as error:
            return {"error": str(error), "kind": type(error).__name__, "code": getattr(error, "code", None)}

    async def op_acquire(self, slot: str) -> dict[str, Any]:
        leased = self._slots[slot] = await self._backend.acquire(slot)
        return {"workspace": leased.workspace_dir, "sandbox": leased.sandbox_id, "isolation": leased.isolation}

    async def op_release(self, slot: str) -> None:
        await self._backend.release(self._slots.pop(slot), reset_workspace=True)

    async def op_kill(self, slot: str) -> None:
        await self._backend.kill_everything(self._slots[slot])

    async def op_run(self, slot: str, command: Any, stdin: str | None, timeout_s: float, spool: bool) -> dict[str, Any]:
        done = await self._commands(slot).run(
            command, stdin=None if stdin is None else stdin.encode(), timeout_s=timeout_s, spool=spool
        )
        return {
            "status": done.returncode,
            "out": done.text,
            "err": done.error_text,
            "timed_out": done.timed_out,
            "spool": done.spool_path,
        }

    async def op_start(self, slot: str, command: Any) -> str:
        return (await self._commands(slot).start(command)).process_id

    async def op_read(self, slot: str, path: str) -> str:
        return (await self._commands(slot).read_file(path)).data.decode()

    async def op_write(self, slot: str, path: str, text: str) -> None:
        await self._commands(slot).write_file(path, text.encode())

    async def op_prepare(self, slot: str, key: str, command: str, private: bool) -> str:
        async def build(commands: SlotCommands, directory: str) -> None:
            done = await commands.run(command, cwd=directory)
            assert done.ok, done

        return await self._backend.prepare(self._slots[slot], key, build, private=private)

    async def op_healthy(self) -> int:
        return int(self._backend.get_status()["healthy_sandboxes"])

    def _commands(self, slot: str) -> SlotCommands:
        if slot == PREPARATION:
            return self._backend.preparation(next(iter(self._slots.values())))
        return self._backend.commands(self._slots[slot])


async def serve(state_dir: str, level: str, config: dict[str, Any]) -> None:
    keys = keep_in_keyrings(SECRET)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    async with (
        Runtime(load_entry_points=False) as runtime,
        runtime.tool_backend("local", isolation=level, config={**config, "state_dir": state_dir}) as backend,
        asyncio.TaskGroup() as group,
    ):
        driver = Driver(backend)
        say({"pid": os.getpid(), "checkout": str(Path(hermes_core.__file__).resolve().parents[1]), "keys": keys})

        async def handle(number: int, request: dict[str, Any]) -> None:
            say({"number": number, **await driver.answer(request)})

        while line := await reader.readline():
            number, request = json.loads(line)
            group.create_task(handle(number, request))


def keep_in_keyrings(secret: str) -> list[int]:
    """Put the secret where a login and a ticket cache put theirs; the keyrings, none where the kernel has no keys."""
    libc = ctypes.CDLL(None)
    data = secret.encode()
    libc.syscall(_KEYCTL, ctypes.c_long(_JOIN_SESSION_KEYRING), None, 0, 0, 0)
    keyrings = []
    for keyring in (_SESSION_KEYRING, _USER_KEYRING):
        added = libc.syscall(
            _ADD_KEY, b"user", b"drivers-key", data, ctypes.c_size_t(len(data)), ctypes.c_long(keyring)
        )
        if added > 0:
            libc.syscall(_KEYCTL, ctypes.c_long(_SET_TIMEOUT), ctypes.c_long(added), ctypes.c_long(_KEPT_S), 0, 0)
            keyrings.append(libc.syscall(_KEYCTL, ctypes.c_long(0), ctypes.c_long(keyring), 0, 0, 0))
    return keyrings


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(state_dir: str, level: str, config: str) -> int:
    try:
        asyncio.run(serve(state_dir, level, json.loads(config)))
    except HermesError as error:
        say({"error": str(error), "kind": type(error).__name__, "code": None})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
