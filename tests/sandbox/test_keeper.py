"""A keeper without the Slurm around it: programs outlive their channels, and nothing outlives the keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ChannelLost, HermesError, PolicyError, SandboxLost
from hermes_core.sandbox.contract import Isolation, SandboxConfig, SandboxSpec
from hermes_core.sandbox.remote import keeper
from hermes_core.sandbox.remote.host import RemoteHost, creation_request, sandbox_id_of
from hermes_core.sandbox.remote.relay import RelayChannel, keeper_script, relay_command

SPEC = SandboxSpec(uuid.uuid4().hex, "me", SandboxConfig(orphan_ttl_s=20), Isolation.SHARED)
NAME = sandbox_id_of(SPEC.creation_id)


class KeptHost(RemoteHost):
    """A keeper that is a child of the test, in a directory of its own."""

    def __init__(self, place: Path, **request: Any) -> None:
        self.name, self.place = "here", place
        self.request = {"directory": str(place), "usual": "", "socket": "me.socket", "sandbox_id": NAME, **request}
        self.process = subprocess.Popen(
            ["/bin/sh"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(keeper_script(sys.executable, {"patience_s": 20, **self.request}))
        self.process.stdin.close()

    async def open(self, request: Mapping[str, Any]) -> RelayChannel:
        carrier = ["/bin/sh", "-c", '"$@"; exit 9', "sh", *relay_command(sys.executable, self.request, 10)]
        return await RelayChannel.start(carrier, request, env={})

    def explain_silence(self, status: int, words: str) -> HermesError:
        return HermesError(f"{status}: {words}")

    async def ended(self) -> int:
        status = await asyncio.to_thread(self.process.wait, 30)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(f"/tmp/hermes-keeper-test-{uuid.uuid4().hex[:8]}")
    yield path
    assert not path.exists()


@pytest.fixture
async def kept(place: Path) -> AsyncIterator[KeptHost]:
    """A keeper with a sandbox, which is ended after the test."""
    host = KeptHost(place)
    answer = await host.ask(creation_request(SPEC))
    assert answer["sandbox_id"] == NAME and answer["running"]
    yield host
    host.process.terminate()
    await host.ended()


async def read_all(channel: RelayChannel) -> bytes:
    output = b""
    while data := await channel.read(1 << 16):
        output += data
    return output


def children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_a_channel_is_binary_and_has_a_status(kept: KeptHost) -> None:
    channel: Any = await kept.enter(NAME, ["sh", "-c", "head -c 5; echo words >&2; exit 7"], {})
    await channel.write(b"\0\xff\nab")
    assert await read_all(channel) == b"\0\xff\nab"
    assert await channel.wait() == 7 and channel.stderr_tail == "words"
    await channel.aclose()
    killed = await kept.enter(NAME, ["sh", "-c", "kill -9 $$"], {})
    assert await killed.wait() == 128 + 9
    await killed.aclose()


async def test_a_program_outlives_its_channel(kept: KeptHost) -> None:
    channel: Any = await kept.enter(NAME, ["sh", "-c", "echo $$; exec sleep 1000"], {})
    pid = int(await channel.read(100))
    await channel.aclose()  # which kills the relay
    with pytest.raises(ChannelLost):
        await channel.wait()
    await asyncio.sleep(0.3)
    assert runs(pid)
    kept.process.terminate()
    assert await kept.ended() == 0
    assert not runs(pid)


async def test_a_relay_that_is_killed_tells_no_status(kept: KeptHost) -> None:
    channel: Any = await kept.enter(NAME, ["sh", "-c", "echo up; sleep 1000"], {})
    assert await channel.read(3) == b"up\n"
    carriers = [pid for pid in children(os.getpid()) if pid != kept.process.pid]
    (relay,) = [pid for carrier in carriers for pid in children(carrier)]
    os.kill(relay, signal.SIGKILL)
    with pytest.raises(ChannelLost, match="status 9"):
        await channel.wait()
    await channel.aclose()


async def test_the_keeper_ends_with_its_sandbox(place: Path) -> None:
    host = KeptHost(place)
    await host.ask(creation_request(SPEC))
    assert (await host.ask({"op": "status", "sandbox_id": NAME}))["status"] == "running"
    with pytest.raises(SandboxLost):
        await host.enter("local-another", ["true"], {})
    await host.ask({"op": "terminate", "sandbox_id": NAME})
    assert await host.ended() == 0 and not place.exists()
    with pytest.raises(ChannelLost, match="no keeper"):
        await asyncio.wait_for(host.enter(NAME, ["true"], {}), 30)


async def test_a_keeper_that_nobody_asks(place: Path) -> None:
    began = time.monotonic()
    assert await KeptHost(place, patience_s=0.5).ended() == 0
    assert time.monotonic() - began < 15


async def test_a_keeper_whose_sandbox_is_refused_says_why_and_ends(place: Path) -> None:
    host = KeptHost(place)
    request = creation_request(SPEC)
    request["sandbox"]["record"]["isolation"] = "dedicated"
    with pytest.raises(PolicyError, match="host 'here': an account can't have isolation 'dedicated'"):
        await host.ask(request)
    assert await host.ended() == 0


async def test_a_directory_that_can_not_be_used(place: Path) -> None:
    host = KeptHost(place, directory="/proc/none")
    assert await asyncio.to_thread(host.process.wait, 30) == keeper.NO_DIRECTORY
    assert host.process.stderr is not None and "can't be made" in host.process.stderr.read()
    host.process.stderr.close()


async def test_keepers_of_one_directory_leave_each_other_alone(place: Path) -> None:
    specs = [SandboxSpec(f"{SPEC.creation_id}-{n}", "me", SPEC.config, Isolation.SHARED) for n in range(3)]
    names = [sandbox_id_of(spec.creation_id) for spec in specs]
    hosts = [KeptHost(place, socket=f"{name}.socket", sandbox_id=name) for name in names]
    while not (place / f"{names[2]}.socket").exists():
        await asyncio.sleep(0.02)
    hosts[2].process.kill()  # leaves its socket
    await hosts[2].ended()
    await asyncio.gather(*(host.ask(creation_request(spec)) for host, spec in zip(hosts[:2], specs, strict=False)))
    hosts[0].process.terminate()
    assert await hosts[0].ended() == 0
    assert (await hosts[1].ask({"op": "status", "sandbox_id": names[1]}))["status"] == "running"
    late = KeptHost(place, socket="late.socket", sandbox_id=names[0])
    await late.ask(creation_request(specs[0]))
    for host in (late, hosts[1]):
        host.process.terminate()
        assert await host.ended() == 0


async def test_a_keeper_does_not_end_the_sandbox_of_another_one(kept: KeptHost) -> None:
    second = KeptHost(kept.place, socket="second.socket")
    assert (await second.ask({"op": "status", "sandbox_id": NAME}))["status"] == "running"
    second.process.terminate()
    await second.ended()
    assert (await kept.ask({"op": "status", "sandbox_id": NAME}))["status"] == "running"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_nobody_else_reaches_a_keeper(kept: KeptHost) -> None:
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(kept.place / 'me.socket')!r})"
    done = subprocess.run(["/usr/bin/python3", "-c", code], user=65534, group=65534, capture_output=True, text=True)
    assert "PermissionError" in done.stderr
    relay = subprocess.run(
        relay_command("/usr/bin/python3", kept.request, 0), user=65534, group=65534, capture_output=True
    )
    assert b"belongs to another user" in relay.stderr
