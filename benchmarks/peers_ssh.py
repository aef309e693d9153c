"""Slots of the `ssh` backend beside paramiko's `exec_command` and OpenSSH with ControlMaster, on real servers.

HERMES_TEST_SSH_CONFIG names a configuration file of OpenSSH's; measured are its hosts whose names begin with
`hermes-test`. What an account's login files cost meets every command of the peers', and none of ours: hence the notes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from benchmarks.host import NOT_GRANTED, acquire_all, refused
from benchmarks.measure import Rows
from benchmarks.peers import WORKERS, Party, Place, Table, Wanted, Workers, captured, cli_party, listing
from benchmarks.peers_docker import run, time_out
from hermes_core.errors import PluginError, PolicyError, ProvisionError, UnknownNameError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend

PARAMIKO, OPENSSH = "exec_command", "ControlMaster"
PEERS = {PARAMIKO: Wanted(latency=15), OPENSSH: Wanted()}
FIRST = "hermes-test"
SESSIONS = 2
"""Sessions at a time in one of the peers' connections. They have as many connections as they need: a session that was
closed counts for a moment longer, and a server that has too many of them (4 is the least here) refuses the next."""

_NULL = asyncio.subprocess.DEVNULL

LOGIN_FILES = (".bashrc", ".profile", ".bash_profile", ".bash_login", ".ssh/rc", "/etc/bash.bashrc")


async def rows(quick: bool) -> Rows:
    """Every figure for each host, or the reason why there is none."""
    config = Path(os.environ.get("HERMES_TEST_SSH_CONFIG", ""))
    names = await asyncio.to_thread(_hosts, config)
    if not names or shutil.which("ssh") is None:
        reason = "HERMES_TEST_SSH_CONFIG names no host `hermes-test`: `.ci/ssh` starts one"
        for row in Table("ssh", PEERS).left_out("there is no ssh command here" if names else reason):
            yield row
        return
    for name in names:
        async for row in _host_rows(name, config, quick):
            yield row


def _hosts(config: Path) -> list[str]:
    return hosts_of(config.read_text()) if config.is_file() else []


def hosts_of(config: str) -> list[str]:
    """The hosts of a configuration file that are ours to measure, in its order."""
    lines = (line.split() for line in config.splitlines())
    return [name for words in lines if words and words[0].lower() == "host" for name in words[1:] if _ours(name)]


def _ours(name: str) -> bool:
    return name.startswith(FIRST) and not set(name) & set("*?!")


async def _host_rows(name: str, config: Path, quick: bool) -> Rows:
    table = Table("ssh", PEERS, "" if name == FIRST else f", {name}")
    async with AsyncExitStack() as stack:
        try:
            backend = await stack.enter_async_context(_backend(name, config))
        except (PluginError, PolicyError, ProvisionError, UnknownNameError) as error:
            if not isinstance(error, PluginError | UnknownNameError) and not refused(error):
                raise
            for row in table.left_out(f"{NOT_GRANTED}: {error}"):
                yield row
            return
        slots = await acquire_all(backend, WORKERS)
        prefixes = await stack.enter_async_context(_masters(name, config))
        peers: dict[str, Party | str] = {OPENSSH: cli_party(prefixes)}
        peers = {PARAMIKO: await stack.enter_async_context(_paramiko(name, config)), **peers}
        here = _place(prefixes[0])
        ours = Workers([partial(run, backend, slot) for slot in slots], partial(time_out, backend, slots[0]))
        about = await _login_files(prefixes[0])
        async for row in table.speed(ours, peers, 1 if quick else 4, 0.3 if quick else 1.0, about):
            yield row
        async for row in table.output(ours, peers, 1 if quick else 5, 20.0):
            yield row
        async for row in table.left(ours, peers, {"ours": here, **dict.fromkeys(peers, here)}):
            yield row
        for slot in slots:
            await backend.release(slot)


@asynccontextmanager
async def _backend(name: str, config: Path) -> AsyncIterator[ToolBackend]:
    """A started backend with one sandbox there, at the level that an account which is not root can have."""
    settings = {
        "host": name,
        "config_file": str(config),
        "slots_per_sandbox": WORKERS + 1,
        "reserve_slots": 1,
        "min_sandboxes": 1,
        "max_sandboxes": 1,
    }
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(Settings(plugins=("ssh",))))
        backend = runtime.tool_backend("ssh", profiles={}, isolation="namespace", config=settings)
        yield await stack.enter_async_context(backend)


# --- the peers --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _masters(name: str, config: Path) -> AsyncIterator[Sequence[Sequence[str]]]:
    """What starts a command line for each worker: OpenSSH's client, over connections that stay open."""
    with tempfile.TemporaryDirectory(prefix="bench-ssh-") as scratch:
        base = ["ssh", "-F", str(config), "-o", "BatchMode=yes"]
        paths = [f"{scratch}/{number}" for number in range(-(-WORKERS // SESSIONS))]
        try:
            for path in paths:  # goes to the background when it is connected, and keeps whatever it writes to
                command = [*base, "-M", "-N", "-f", "-S", path, name]
                master = await asyncio.create_subprocess_exec(*command, stdin=_NULL, stdout=_NULL, stderr=_NULL)
                status = await master.wait()
                assert status == 0, f"{' '.join(command)} ended with status {status}"
            yield [[*base, "-S", paths[number // SESSIONS], name] for number in range(WORKERS)]
        finally:
            for path in paths:
                await captured(*base, "-S", path, "-O", "exit", name)


@asynccontextmanager
async def _paramiko(name: str, config: Path) -> AsyncIterator[Party]:
    """`SSHClient.exec_command` in threads. Its time limit is that of reading."""
    import paramiko

    found = paramiko.SSHConfig.from_path(str(config)).lookup(name)

    def connect() -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        client.load_host_keys(found["userknownhostsfile"])
        client.connect(
            found["hostname"],
            int(found.get("port", 22)),
            found.get("user"),
            key_filename=found.get("identityfile"),
            allow_agent=False,
            look_for_keys=False,
        )
        return client

    clients = [await asyncio.to_thread(connect) for _ in range(-(-WORKERS // SESSIONS))]

    def run_in(client: paramiko.SSHClient, command: str, limit_s: float | None = None) -> bytes:
        # A `stdin` that nobody holds closes itself. Where that meets the command's end the server, told of the end of
        # a channel that is gone, hangs up.
        stdin, stdout, _ = client.exec_command(command, timeout=limit_s)
        output = bytes(stdout.read())
        assert stdout.channel.recv_exit_status() == 0, command
        stdout.channel.close()
        stdin.close()
        return output

    async def run(client: paramiko.SSHClient, command: str) -> int:
        return len(await threads(run_in, client, command))

    async def time_out(command: str, limit_s: float) -> None:
        try:
            await threads(run_in, clients[0], command, limit_s)
        except TimeoutError:
            return

    with ThreadPoolExecutor(WORKERS) as executor:
        threads = partial(asyncio.get_running_loop().run_in_executor, executor)
        try:
            yield Workers([partial(run, clients[number // SESSIONS]) for number in range(WORKERS)], time_out)
        finally:
            for client in clients:
                await asyncio.to_thread(client.close)


# --- the host ---------------------------------------------------------------------------------------------------------


def _place(prefix: Sequence[str]) -> Place:
    """What runs on the host, slots in their own namespaces included."""

    async def processes() -> Mapping[int, str]:
        status, listed = await captured(*prefix, "ps -ww -eo pid=,args=")
        assert status == 0, listed
        return listing(listed)

    async def kill(pids: Sequence[int]) -> None:
        await captured(*prefix, f"kill -9 {' '.join(map(str, pids))}")

    return Place(processes, kill)


async def _login_files(prefix: Sequence[str]) -> str:
    """Which login files the account has, for a note."""
    status, listed = await captured(*prefix, f"ls -d {' '.join(LOGIN_FILES)} 2>/dev/null; true")
    assert status == 0, listed
    return f"the account's login files: {', '.join(listed.decode(errors='replace').split()) or 'none'}"
