"""The guest on every interpreter that is here, end to end; and a clear word where it can't run."""

from __future__ import annotations

import asyncio
import os
import zlib
from pathlib import Path

import pytest

import hermes_core
from hermes_core.errors import NoPythonError
from hermes_core.sandbox.commands import WindowSize
from hermes_core.sandbox.guest_client.bundle import payload
from hermes_core.sandbox.guest_client.client import GuestClient
from tests.support.pythons import NEWER, OLDEST, interpreter

ROOT = os.geteuid() == 0


@pytest.mark.parametrize("version", [OLDEST, *(pytest.param(each, marks=pytest.mark.full) for each in NEWER)])
async def test_end_to_end(rigged, version, level):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    async with rigged(level, python=python) as rig:
        index = await rig.index()
        slot = rig.client.commands(index)
        result = await slot.run("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
        assert (await slot.run(["ls", "/proc/self/fd"])).text.split() == ["0", "1", "2", "3"]
        assert (await slot.run("yes | head -1; echo ${PIPESTATUS[0]}")).text == "y\n141\n"
        assert (await slot.run("#" * 150_000 + "\ncat", stdin=b"x" * 300_000)).stdout_bytes == 300_000
        assert (await slot.run("trap '' TERM; sleep 1000 & sleep 1000", timeout_s=0.2)).timed_out
        with pytest.raises(Exception, match="command not found"):
            await slot.run(["no-such-program"])
        with pytest.raises(Exception, match="format"):
            await slot.write_file("bad", b"\x7fELFxxxx", mode=0o755)
            await slot.run(["./bad"])
        data = os.urandom(1_000_000)
        await slot.write_file("d/\udcff €", data)
        archive = await slot.tar_out("d")
        await slot.tar_in("e", archive)
        assert (await slot.read_file("e/\udcff €")).data == data
        process = await slot.start("cat; exit 4")
        await slot.write(process.process_id, b"hello", eof=True)
        assert (await slot.wait(process.process_id)).exit_code == 4
        assert (await slot.log(process.process_id)).data == b"hello"
        terminal = await slot.run("tty >/dev/null && stty size; exit 6", pty=WindowSize(20, 70))
        assert (terminal.stdout, terminal.exit_code) == (b"20 70\r\n", 6)
        running = asyncio.ensure_future(slot.run("sleep 0.3; echo resumed", stdin=b"y" * 500_000))
        await asyncio.sleep(0.1)
        rig.sandbox.cut()
        assert (await running).text == "resumed\n"
        if level != "shared":
            await slot.run("kill -9 -1")
        await slot.run("sleep 1000 & (setsid sleep 1000 &)")
        await rig.client.reset_slot(index)
        assert await slot.list_dir() == []


@pytest.mark.skipif(interpreter("3.6") is None, reason="there is no Python 3.6 here")
async def test_an_interpreter_that_is_too_old(host_sandbox):
    sandbox = host_sandbox(interpreter("3.6"))
    try:
        with pytest.raises(NoPythonError, match=r"3\.6.*needs 3\.7"):
            await GuestClient.start(sandbox, sandbox.settings("shared"))
    finally:
        await sandbox.terminate()


def test_what_is_sent_names_no_path_of_the_driver():
    sent = zlib.decompress(payload()[4:])
    assert b"<hermes_guest.guest.slot>" in sent
    assert str(Path(hermes_core.__file__).parent).encode() not in sent
