"""Who is let in, and who is believed: host keys, private keys, hosts between, accounts that talk at login."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hermes_ssh.config import SshConfig
from hermes_ssh.connect import LoginRefused, Unreachable, connect
from hermes_ssh.hosts import Host
from hermes_ssh.known_hosts import HostKeyError

from hermes_core.errors import ChannelLost, ConfigError, HermesError, ProvisionError


def no_secret(name: str) -> str:
    raise ConfigError(f"there is no secret {name!r}")


async def probe(server: Any, secret: Callable[[str], str] = no_secret, **more: Any) -> dict[str, Any]:
    """Ask the host what it can do."""
    config = SshConfig(**server.config(**more))
    host = Host(config.access(config.all_hosts[0]), secret)
    try:
        return await host.ask({"op": "probe"})
    finally:
        await host.aclose()


async def test_an_account_that_is_not_root_is_let_in(server: Any, leak_check: None) -> None:
    found = await probe(server)
    assert found["root"] is False
    assert found["python"].startswith("3.")


async def test_one_connection_is_made_for_all_also_when_the_one_who_began_is_cancelled(server: Any) -> None:
    config = SshConfig(**server.config())
    host = Host(config.access(config.all_hosts[0]), no_secret)
    first, *others = (asyncio.create_task(host.ask({"op": "probe"})) for _ in range(3))
    await asyncio.sleep(0.01)
    first.cancel()
    try:
        assert [found["root"] for found in await asyncio.gather(*others)] == [False, False]
    finally:
        await host.aclose()
    assert first.cancelled() and server.log().count("Accepted publickey") == 1


async def test_who_waits_for_a_connection_hears_that_it_was_closed(server: Any) -> None:
    config = SshConfig(**server.config())
    host = Host(config.access(config.all_hosts[0]), no_secret)
    waiting = [asyncio.create_task(host.ask({"op": "probe"})) for _ in range(2)]
    await asyncio.sleep(0.01)
    await host.aclose()
    for task in waiting:
        with pytest.raises(Unreachable, match="was closed"):
            await task


async def test_an_unknown_host_key_and_the_line_that_accepts_it(server: Any) -> None:
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyError) as caught:
        await probe(server)
    fingerprints = [fingerprint(path) for path in server.made.glob("host_*.pub")]
    assert any(each in caught.value.message for each in fingerprints), caught.value.message
    assert not caught.value.retryable
    line = str(caught.value.hint).partition("accept it by: ")[2]
    subprocess.run(line, shell=True, check=True)
    assert (await probe(server))["root"] is False


async def test_a_changed_host_key_and_the_line_that_accepts_it(server: Any, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other")
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other}\n")
    with pytest.raises(HostKeyError, match="CHANGED") as caught:
        await probe(server)
    assert "SHA256:" in caught.value.message
    line = str(caught.value.hint).partition("accept it by: ")[2]
    subprocess.run(line, shell=True, check=True, capture_output=True)
    assert (await probe(server))["root"] is False
    assert other not in server.known_hosts.read_text()


async def test_the_kind_of_key_that_is_known_is_asked_for(server: Any) -> None:
    for key in list(server.keys()):
        server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {key}\n")
        assert (await probe(server))["root"] is False


async def test_nothing_is_sent_to_a_host_that_is_not_believed(make_server: Callable[..., Any]) -> None:
    server = make_server(LogLevel="VERBOSE")
    server.known_hosts.write_text("")
    with pytest.raises(HostKeyError):
        await probe(server)
    assert "hermes-ssh" not in server.log()


async def test_a_wrong_key(server: Any, tmp_path: Path) -> None:
    new_key(tmp_path / "wrong")
    server.config_file.write_text(server.config_file.read_text().replace(f"{server.made}/client", f"{tmp_path}/wrong"))
    with pytest.raises(LoginRefused, match="wrong: refused") as caught:
        await probe(server)
    assert not caught.value.retryable and caught.value.hint


async def test_a_key_that_is_not_there(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder").mkdir()
    for identity in (str(tmp_path / "missing"), "~/missing", str(tmp_path / "folder")):
        with pytest.raises(ConfigError, match=f"no key {tmp_path}/"):
            await probe(server, identity=identity)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can read. pytest closes its own to them whenever another run of it begins."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_a_key_with_a_passphrase(make_server: Callable[..., Any], tmp_path: Path, open_folder: Path) -> None:
    public = new_key(tmp_path / "locked", "open sesame")
    (open_folder / "authorized").write_text(public + "\n")
    server = make_server(AuthorizedKeysFile=str(open_folder / "authorized"), StrictModes="no")
    server.config_file.write_text(server.config_file.read_text().replace(f"{server.made}/client", f"{tmp_path}/locked"))
    with pytest.raises(LoginRefused, match="needs a passphrase"):
        await probe(server)
    with pytest.raises(ConfigError, match="no secret 'MY_PASSWORD'"):
        await probe(server, passphrase_secret="MY_PASSWORD")
    with pytest.raises(LoginRefused):
        await probe(server, {"P": "wrong"}.__getitem__, passphrase_secret="P")
    assert (await probe(server, {"P": "open sesame"}.__getitem__, passphrase_secret="P"))["root"] is False


async def test_a_key_of_the_agent(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL) as agent:
        try:
            monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
            deadline = time.monotonic() + 10
            while subprocess.run(["ssh-add", "-q", str(server.made / "client")], capture_output=True).returncode:
                assert time.monotonic() < deadline
            config = {
                "host": f"{server.account}@127.0.0.1:{server.port}",
                "config_file": "/dev/null",
                "known_hosts": str(server.known_hosts),
            }
            monkeypatch.setenv("HOME", str(tmp_path))
            assert (await probe(server, **config))["root"] is False
            with pytest.raises(LoginRefused, match="no key to try"):
                await probe(server, **config, agent=False)
        finally:
            agent.terminate()


async def test_a_wrong_password_is_named_and_not_shown(make_server: Callable[..., Any]) -> None:
    server = make_server(PasswordAuthentication="yes")
    config = {"password_secret": "MY_PASSWORD", "config_file": None, "known_hosts": str(server.known_hosts)}
    with pytest.raises(LoginRefused, match="password MY_PASSWORD: refused") as caught:
        await probe(
            server,
            {"MY_PASSWORD": "not it"}.__getitem__,
            **config,
            host=f"{server.account}@127.0.0.1:{server.port}",
            identity=None,
            agent=False,
        )
    assert "not it" not in str(caught.value)


async def test_through_a_host_between(make_server: Callable[..., Any]) -> None:
    gate, server = make_server(), make_server()
    server.config_file.write_text(gate.stanza("gate") + server.stanza("test") + "  ProxyJump gate\n")
    assert (await probe(server))["root"] is False
    assert "Accepted publickey" in gate.log()
    gate.known_hosts.write_text("")
    with pytest.raises(HostKeyError, match=str(gate.port)):
        await probe(server)


async def test_through_a_program(server: Any, leak_check: None) -> None:
    program = (
        "import socket,sys,threading,os\n"
        f"s=socket.create_connection(('127.0.0.1',{server.port}))\n"
        "def up():\n"
        " while d:=os.read(0,65536): s.sendall(d)\n"
        " os._exit(0)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while d:=s.recv(65536): os.write(1,d)\n"
    )
    (server.directory / "proxy.py").write_text(program)
    text = server.config_file.read_text().replace(f"Port {server.port}\n", f"Port {server.port}\n  ProxyCommand x\n")
    server.config_file.write_text(text.replace("ProxyCommand x", f"ProxyCommand python3 {server.directory}/proxy.py"))
    assert (await probe(server))["root"] is False
    server.config_file.write_text(text.replace("ProxyCommand x", "ProxyCommand false"))
    with pytest.raises(Unreachable):
        await probe(server, connect_timeout_s=5)


async def test_nobody_is_there(server: Any) -> None:
    server.stop()
    with pytest.raises(Unreachable, match="refused") as caught:
        await probe(server)
    assert not caught.value.retryable and "ssh test" in str(caught.value.hint)


@pytest.mark.parametrize("spoken", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
async def test_a_busy_server_drops_connections_at_first(server: Any, spoken: bytes) -> None:
    """As sshd does beyond MaxStartups, before it has said anything; or a little later."""
    kept: list[asyncio.Task[None]] = []
    came = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        if came <= 2:
            writer.write(spoken)
            writer.close()
            return
        on = await asyncio.open_connection("127.0.0.1", server.port)
        kept.extend(asyncio.create_task(carry(*each)) for each in ((reader, on[1]), (on[0], writer)))

    async with await asyncio.start_server(take, "127.0.0.1", 0) as gate:
        port = gate.sockets[0].getsockname()[1]
        for path in (server.config_file, server.known_hosts):
            path.write_text(path.read_text().replace(str(server.port), str(port)))
        assert (await probe(server))["root"] is False
        await asyncio.gather(*kept)
    assert came == 3


async def test_a_host_that_was_there_may_come_back(server: Any) -> None:
    config = SshConfig(**server.config())
    host = Host(config.access(config.all_hosts[0]), no_secret)
    try:
        await host.ask({"op": "probe"})
        server.stop()
        with pytest.raises((Unreachable, ChannelLost)) as caught:
            for _ in range(5):
                await host.ask({"op": "probe"})
        assert getattr(caught.value, "retryable", True)
    finally:
        await host.aclose()


async def test_who_listens_and_says_nothing(server: Any) -> None:
    server.process.send_signal(19)
    try:
        with pytest.raises(Unreachable):
            await probe(server, connect_timeout_s=0.5)
    finally:
        server.process.send_signal(18)


async def test_an_account_that_talks_at_login(make_server: Callable[..., Any]) -> None:
    noisy = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo warning >&2; eval \"$SSH_ORIGINAL_COMMAND\""
    server = make_server(ForceCommand=noisy)
    assert (await probe(server))["root"] is False


async def test_a_host_without_our_python(server: Any) -> None:
    with pytest.raises(ProvisionError, match="can't run our program with '/nonexistent/python3'") as caught:
        await probe(server, python="/nonexistent/python3")
    assert not caught.value.retryable


async def test_a_server_that_allows_no_session(make_server: Callable[..., Any]) -> None:
    server = make_server(MaxSessions="0")
    with pytest.raises(HermesError, match="allows no session"):
        await probe(server)


def test_a_connection_by_itself(server: Any, leak_check: None) -> None:
    config = SshConfig(**server.config())
    connection = connect(config.access("test"), no_secret)
    session = connection.start("printf out; exit 3")
    assert session.read(100) == b"out"
    assert session.wait() == 3
    session.close()
    connection.close()
    assert not connection.alive


def new_key(path: Path, passphrase: str = "") -> str:
    """A new key pair; its public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def fingerprint(path: Path) -> str:
    return subprocess.run(["ssh-keygen", "-lf", str(path)], capture_output=True, text=True, check=True).stdout.split()[
        1
    ]
