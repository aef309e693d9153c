"""Commands and files of another user in a slot that is root."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hermes_core.errors import CommandError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.as_user import AsUser
from hermes_core.sandbox.commands import Call, Connection, Operation, SlotCommands
from hermes_core.sandbox.contract import Isolation
from hermes_core.settings import Settings

T = TypeVar("T")

pytestmark = pytest.mark.root
USERS = (
    "echo 'task:x:1234:1234::/home/task:/bin/sh' >>/etc/passwd; mkdir -p /home/task; chown 1234:1234 /home/task; "
    "mkdir -m 700 /srv/private; echo secret >/srv/private/file; echo open >/srv/open"
)


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[SlotCommands]:
    """A slot's commands, which run as root."""
    settings = Settings(state_dir=tmp_path / "state")
    async with Runtime(settings, load_entry_points=False) as runtime:
        if Isolation.PRIVATE_ROOT not in runtime.backend("local").capabilities.isolation:
            pytest.skip("this host grants no roots of their own")
        backend = runtime.tool_backend("local", isolation="private-root", config={"slots_per_sandbox": 1})
        async with backend, backend.lease(cwd="/home/task") as slot:
            commands = backend.commands(slot)
            assert (await commands.run(USERS, cwd="/")).ok
            yield commands


async def test_commands(root: SlotCommands) -> None:
    user = AsUser(root, "task")
    done = await user.run('id -u; id -g; id -G; echo "$HOME $USER $TMPDIR"; umask; echo "it\'s $0"; exit 7', cwd="/")
    assert done.text.splitlines()[:5] == ["1234", "1234", "1234", "/home/task task /tmp", "0022"]
    assert done.text.splitlines()[5].startswith("it's ")
    assert done.exit_code == 7
    odd = ["", "a b", "'", "$(x)", "\n", "-c", "ü"]
    assert (await user.run(["printf", "%s|", *odd], cwd="/")).text == "|".join(odd) + "|"
    assert (await user.run(["cat"], stdin=b"in", cwd="/")).stdout == b"in"
    assert (await AsUser(root, "1234").run(["id", "-un"], cwd="/")).text == "task\n"
    assert (await user.run("kill -9 $$", cwd="/")).signal == 9
    started = await user.start("id -u; cat", cwd="/")
    await user.write(started.process_id, b"x\n")
    assert (await user.log(started.process_id, wait_s=30)).data.startswith(b"1234\n")
    await user.kill(started.process_id)


async def test_a_program_of_another_user_is_served_by_a_forward(root: SlotCommands) -> None:
    async def serve(connection: Connection) -> None:
        await connection.write(await connection.read())

    user = AsUser(root, "task")
    program = "import socket; s = socket.create_connection(('127.0.0.1', %d)); s.sendall(b'x'); print(s.recv(9))"
    async with user.forward(serve) as forward:
        assert (await user.run(["python3", "-c", program % forward.port], cwd="/")).text == "b'x'\n"


@pytest.mark.full
async def test_root_runs_no_program_that_the_user_put_into_path(root: SlotCommands) -> None:
    user = AsUser(root, "task")
    for name in ("sh", "setpriv", "su", "id"):
        await user.write_file(f"/home/task/bin/{name}", b"#!/bin/sh\necho planted $(/usr/bin/id -u)\n", mode=0o755)
    env = {"PATH": "/home/task/bin:/usr/bin:/bin"}
    assert (await user.run(["/usr/bin/id", "-u"], cwd="/", env=env)).text == "1234\n"
    assert (await user.run("id", cwd="/", env=env)).text.split()[-1] == "1234"
    await user.remove("/home/task/bin", recursive=True)


@pytest.mark.full
async def test_files(root: SlotCommands) -> None:
    user = AsUser(root, "task")
    await user.write_file("/home/task/a/b", b"one\0\xff", mode=0o640)
    await user.write_file("/home/task/a/b", b"two", append=True)
    assert (await user.read_file("/home/task/a/b")).data == b"one\0\xfftwo"
    part = await user.read_file("/home/task/a/b", offset=1, limit=2)
    assert (part.data, part.size) == (b"ne", 8)
    stat = await user.stat("/home/task/a/b")
    assert (stat.kind, stat.size, stat.mode) == ("file", 8, 0o640)
    assert (await root.run(["stat", "-c", "%u:%g", "/home/task/a/b"])).text == "1234:1234\n"
    assert [entry.path for entry in await user.list_dir("/home/task", recursive=True)] == ["a", "a/b"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("c/d")
        entry.size, entry.uid = 1, os.getuid()
        tar.addfile(entry, io.BytesIO(b"x"))
    await user.tar_in("/home/task/t", packed.getvalue())
    assert (await root.run(["stat", "-c", "%u", "/home/task/t/c/d"])).text == "1234\n"
    with tarfile.open(fileobj=io.BytesIO(await user.tar_out("/home/task/t"))) as tar:
        assert "./c/d" in tar.getnames()
    await user.remove("/home/task/a", recursive=True)


async def test_paths_start_where_the_lease_does(root: SlotCommands) -> None:
    user = AsUser(root, "task")
    await user.write_file("file", b"x")
    assert (await user.run("pwd; cat file")).text == "/home/task\nx"
    assert (await user.read_file("../task/file")).data == b"x"


async def test_each_operation_passes_the_call_once(root: SlotCommands) -> None:
    seen: list[str] = []

    def observe(call: Call, operation: Operation[T], /) -> Coroutine[Any, Any, T]:
        seen.append(operation.name)
        return call(operation)

    user = AsUser(root, "task").around(observe)
    await user.write_file("file", b"x")
    await user.run("true")
    assert await user.processes() == []
    assert seen == ["write_file", "run", "processes"]


async def test_it_has_the_users_rights(root: SlotCommands) -> None:
    user = AsUser(root, "task")
    for denied in (
        user.read_file("/srv/private/file"),
        user.write_file("/srv/open", b"mine"),
        user.write_file("/srv/new", b"mine"),
        user.remove("/srv/open"),
        user.list_dir("/srv/private"),
        user.tar_in("/srv/new", b"\0" * 1024),
        user.clear(),
    ):
        with pytest.raises(CommandError):
            await denied
    assert (await root.read_file("/srv/open")).data == b"open\n"
    assert (await user.run(["kill", "-0", "1"], cwd="/")).exit_code != 0


@pytest.mark.full
async def test_what_is_no_user_or_no_command(root: SlotCommands) -> None:
    done = await AsUser(root, "nowhere").run(["true"], cwd="/")
    assert (done.exit_code, done.error_text) == (126, "there is no user nowhere\n")
    for name in ("", "-x", "a b", "a;b", "../x", "a\n"):
        with pytest.raises(CommandError, match="can't be a user's name"):
            AsUser(root, name)
    user = AsUser(root, "task")
    with pytest.raises(CommandError, match="at most 100000 bytes"):
        await user.run("x" * 200_000)
    with pytest.raises(CommandError, match="is empty"):
        await user.run([])
    assert (await user.run(["nowhere"], cwd="/")).exit_code in (126, 127)
