"""Slots that are root of roots of their own in one container, and the container of each where that can't be had."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from docker import APIClient

from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.settings import Settings
from tests.isolation.root_attacks import ATTACKS, LOW_PORT, SETTINGS

pytestmark = pytest.mark.full

SPY = "open('/owned', 'a').write(__name__ + chr(10))\n"
"""A slot puts this where the modules of Python are."""

BOMB = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    time.sleep(60)
"""


@pytest.fixture
async def slots(python_image: str) -> AsyncIterator[Any]:
    """The backend, and two slots of one container."""
    config = {
        **{"image": python_image, "cap_add": ["SYS_ADMIN"], "slots_per_sandbox": 3, "max_sandboxes": 1},
        **{"max_processes": 64, "reserve_slots": 0},
    }
    async with (
        Runtime(Settings(plugins=("docker",))) as runtime,
        runtime.tool_backend("docker", isolation="private-root", config=config) as backend,
    ):
        yield backend, await backend.acquire("a"), await backend.acquire("b")


async def python(commands: SlotCommands, program: str) -> Any:
    done = await commands.run(["python3", "-I", "-S", "-c", program], timeout_s=60)
    assert done.ok, done
    return json.loads(done.text)


async def said(commands: SlotCommands, command: str) -> str:
    return (await commands.run(command, timeout_s=60)).text.strip()


async def test_two_slots_of_one_container_own_their_roots(slots: Any, api: APIClient) -> None:
    backend, a, b = slots
    assert a.isolation == b.isolation == "private-root" and a.sandbox_id == b.sandbox_id
    one, other = backend.commands(a), backend.commands(b)
    host = await said(other, "cat /etc/hosts; ls /etc /usr/bin")
    changes = "set -e; echo x >/usr/bin/new; echo x >>/etc/hosts; rm -rf /usr/share/doc /usr/bin/env; mkdir /app /tests"
    assert (await one.run(f"{changes}; useradd -m task; su task -c 'touch ~/his'; stat -c %U /home/task/his")).ok
    assert await said(other, "cat /etc/hosts; ls /etc /usr/bin") == host
    made = api.exec_create(a.sandbox_id, ["ls", "-d", "/app", "/usr/bin/new", "/usr/bin/env"], stderr=False)
    listed = api.exec_start(made["Id"]).decode().split("\n")  # nor is it in the container
    assert "/usr/bin/env" in listed and not {"/app", "/usr/bin/new"} & {*listed}
    await backend.kill_everything(a)
    assert await said(one, "ls -d /app; stat -c %U /home/task/his") == "/app\ntask"
    await backend.release(a, reset_workspace=True)
    again = backend.commands(await backend.acquire("a"))
    assert await said(again, "cat /etc/hosts; ls /etc /usr/bin") == host
    assert await said(again, "ls -d /app /tests /home/task 2>/dev/null") == ""
    assert await python(again, LOW_PORT) == {"80": "ok"}


async def test_it_changes_no_device_of_the_container_and_reads_nothing_in_proc_that_not_all_may(slots: Any) -> None:
    backend, a, b = slots
    one, other = backend.commands(a), backend.commands(b)
    modes = "stat -L -c %a /dev/null /dev/zero /dev/urandom /dev/stdin"
    before = await said(other, modes)
    await one.run("chmod 0 /dev/null /dev/zero /dev/urandom /dev/stdin /proc/self/fd/0 /proc/keys; echo x >/dev/null")
    assert await said(other, modes) == before == "666\n" * 3 + "666"
    closed = "for f in $(find /proc -maxdepth 1 -type f ! -perm -004; ls -d /proc/kpage*); do head -c 1 $f; done"
    assert await said(one, closed) == ""
    assert await said(one, "ls /proc/kpagecount") == "/proc/kpagecount"


async def test_nothing_but_its_own_is_in_its_reach(slots: Any) -> None:
    backend, a, b = slots
    commands = backend.commands(a)
    for name, program in ATTACKS.items():
        assert await python(commands, program) == {}, name
    assert await python(commands, SETTINGS) == [[], [], False]
    paths = "/data/.hermes /data/slot_1 /data/.slots/slot_1 /data/.slots/trash /data/prepared/private /dev/vda"
    assert await said(commands, f"ls -d {paths} 2>/dev/null") == ""
    assert (await backend.commands(b).run("true")).ok


async def test_its_processes_are_bounded(slots: Any) -> None:
    backend, a, b = slots
    await backend.commands(a).start(["python3", "-c", BOMB])
    assert await said(backend.commands(b), "for i in 1 2 3 4 5 6 7 8; do true | true; done; echo fine") == "fine"
    await backend.release(a, reset_workspace=True)
    commands = backend.commands(await backend.acquire("a"))
    version = tuple(int(part) for part in (await said(commands, "uname -r")).split(".")[:2])
    bound = int(await said(commands, "cat /proc/sys/kernel/pid_max"))
    assert bound == 64 + 300 or version < (6, 14)


async def test_what_it_puts_in_the_place_of_pythons_modules_is_never_run_by_its_parent(slots: Any) -> None:
    backend, a, _ = slots
    commands = backend.commands(a)
    folder = await said(commands, "python3 -c 'import os; print(os.path.dirname(os.__file__))'")
    await commands.write_file("/tmp/spy.py", SPY.encode())
    await commands.run(
        f"cp -a {folder}/encodings /tmp; find {folder} -name '*.py' -exec cp /tmp/spy.py {{}} ';'\n"
        f"rm -rf {folder}/__pycache__"
    )
    await commands.write_file("file", b"text")
    assert (await commands.read_file("file")).data == b"text"
    await commands.stat("file")
    await commands.list_dir("/usr")
    await commands.tar_in("there", await commands.tar_out("/etc"))
    for name in ("nothing", "/etc/shadow/x"):
        with pytest.raises(Exception, match=r"[Nn]o"):
            await commands.read_file(name)
    assert await said(commands, "cat /owned 2>/dev/null") == ""
    await commands.run(f"cp -a /tmp/encodings/. {folder}/encodings; python3 -I -S -c 'import tarfile'")
    assert "tarfile" in await said(commands, "cat /owned")  # it works where it is run


async def test_without_the_capability_it_is_a_container_each(python_image: str) -> None:
    config = {"image": python_image, "slot_user": "root", "max_sandboxes": 2, "reserve_slots": 0}
    async with (
        Runtime(Settings(plugins=("docker",))) as runtime,
        runtime.tool_backend("docker", isolation="private-root", config=config) as backend,
    ):
        a, b = await backend.acquire("a"), await backend.acquire("b")
        assert a.isolation == b.isolation == "dedicated" and a.sandbox_id != b.sandbox_id
        assert await said(backend.commands(a), "id -u") == "0"
