"""Checks of the separation between the slots of a sandbox, at each isolation level: the table of the threat model."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass

import pytest

from hermes_core import Isolation, SlotCommands
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import until

SHARED = {Isolation.SHARED: "shared is directories; it keeps nothing apart (see the threat model)"}
NETWORK = {**SHARED, Isolation.USER: "at user a sandbox has one network (see the threat model)"}
NAMES = {**SHARED, Isolation.USER: "at user process names and command lines may be visible (see the threat model)"}
TMP = {**SHARED, Isolation.USER: "at user a sandbox has one /tmp: names are visible (see the threat model)"}

PYTHON = "isolation between slots above shared"
"""A feature that a sandbox without Python lacks. The attacks are written in Python, so they can't be run there."""

HARMLESS = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18}
"""Capabilities that a slot with its own root directory may have, because they apply only there: CHOWN, DAC_OVERRIDE,
FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT."""

PTRACE = """
import ctypes, os, sys
# Its number may be another's here: whoever is shown is tried.
for pid in [sys.argv[1], *(name for name in os.listdir("/proc") if name.isdigit())]:
    if int(pid) in (os.getpid(), os.getppid()) or ctypes.CDLL(None).ptrace(0x4206, int(pid), None, None) != 0:
        continue
    with open("/proc/%s/cmdline" % pid) as file:
        print("traced" if sys.argv[2] in file.read() else "")
"""
SERVER = """
import socket, sys, time
port = socket.create_server(("127.0.0.1", 0))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0" + sys.argv[1])
abstract.listen()
open("port.new", "w").write(str(port.getsockname()[1]))
import os; os.rename("port.new", "port")
time.sleep(600)
"""
CONNECT = """
import socket, sys
family, address = (socket.AF_INET, ("127.0.0.1", int(sys.argv[2]))) if sys.argv[1] == "port" else (
    socket.AF_UNIX, "\\0" + sys.argv[2])
socket.socket(family).connect(address)
"""
SHARED_MEMORY = """
import ctypes, sys
libc = ctypes.CDLL(None)
sys.exit(0 if libc.shmget(int(sys.argv[1]), 4096 if sys.argv[2] == "make" else 0,
    0o1666 if sys.argv[2] == "make" else 0) >= 0 else 1)
"""


@dataclass
class Pair:
    """An attacker's slot, and a victim's slot with a target for each attack."""

    slot: SlotCommands
    other: SlotCommands
    mark: str
    pid: str
    home: str
    tmp: str

    async def got(self, command: str) -> bool:
        """Return whether the attacker's command reveals the victim's mark."""
        return self.mark in (await self.slot.run(command)).text

    async def got_process(self, name: str) -> bool:
        """Return whether the file `name` in /proc of any process that the attacker sees has the victim's mark."""
        script = f'for p in /proc/[0-9]*; do case "$p" in /proc/$$|/proc/$PPID) ;; *) cat "$p/{name}" ;; esac; done'
        return await self.got(f"{{ {script}; }} 2>/dev/null")


async def _pair(kit: Kit) -> Pair:
    """Return two slots of one sandbox. A process in the second has a mark in its command line and environment."""
    slot, other = await kit.neighbours()
    mark = "mark" + secrets.token_hex(8)
    script = (
        f'echo {mark} >secret; echo {mark} >"$HOME/secret"; echo {mark} >"$TMPDIR/secret"; '
        f'echo "$HOME" >home; echo "$TMPDIR" >tmp; echo $$ >pid; MARK={mark} sh -c "sleep 600; : {mark}"'
    )
    await other.start(script)

    async def has_begun() -> bool:
        return bool((await other.run("cat pid 2>/dev/null")).text)

    await until(has_begun, 10, "the victim's process did not begin")
    pid, home, tmp = (await other.run("cat pid home tmp")).text.split()
    return Pair(slot, other, mark, pid, home, tmp)


@pytest.mark.levels(documented=SHARED)
async def a_neighbours_files_can_not_be_read(kit: Kit) -> None:
    """A slot can't read a neighbour's workspace, home or temporary files, nor list them."""
    both = await _pair(kit)
    for place in (both.other.workspace_dir, both.home, both.tmp):
        assert not await both.got(f"cat {place}/secret"), f"it read {place}/secret"
    listed = await both.slot.run(["ls", "-A", both.other.workspace_dir])
    own = both.slot.workspace_dir == both.other.workspace_dir  # two sandboxes: the same path is the slot's own there
    assert own or not listed.ok or not listed.stdout, f"it listed a neighbour's workspace: {listed.text!r}"


@pytest.mark.levels(documented=SHARED)
async def a_neighbours_files_can_not_be_changed(kit: Kit) -> None:
    """A slot can't write, plant or remove anything in a neighbour's directories."""
    both = await _pair(kit)
    # The workspace comes last: if each slot has its own sandbox, the attacker's own workspace has the same path.
    for place in (both.home, both.tmp, both.other.workspace_dir):
        await both.slot.run(f"echo changed >{place}/secret; touch {place}/planted; rm -rf {place}")
    look = 'cat secret "$HOME/secret" "$TMPDIR/secret"; ls planted "$HOME/planted" "$TMPDIR/planted" 2>/dev/null; true'
    assert (await both.other.run(look)).text == f"{both.mark}\n" * 3, "the neighbour's files afterwards"


@pytest.mark.levels(documented=SHARED)
async def links_lead_nowhere_new(kit: Kit) -> None:
    """A file operation through a link out of the slot has only the slot's rights."""
    both = await _pair(kit)
    await both.slot.run(f"ln -s {both.other.workspace_dir}/secret link; ln -s {both.other.workspace_dir} dir")
    if both.slot.workspace_dir == both.other.workspace_dir:
        return
    for path in ("link", "dir/secret"):
        try:
            content = await both.slot.read_file(path)
        except Exception as error:
            assert type(error).__name__ == "CommandError", "the refusal"
        else:
            assert both.mark not in content.data.decode("utf-8", "replace"), "it read a neighbour's file by a link"


@pytest.mark.levels(documented=SHARED)
async def a_neighbour_can_not_be_signalled(kit: Kit) -> None:
    """A slot can't signal a neighbour's processes, neither by number nor by signalling everything it sees."""
    both = await _pair(kit)
    everything = 'for p in /proc/[0-9]*; do kill -9 "${p#/proc/}"; done; kill -9 -1'
    # A slot that has its own sandbox may be root. If the sandbox separates nothing, `kill -9 -1` would kill the host.
    found = f"grep -q {both.mark} /proc/{both.pid}/cmdline && kill -9 {both.pid}"
    await both.slot.run(found if kit.is_dedicated else f"kill -9 {both.pid}; {everything}")
    alive = [each for each in await both.other.processes() if each.running]
    assert len(alive) == 1, "running processes of the neighbour afterwards"
    assert (await both.other.run("echo fine")).text == "fine\n", "the neighbour's next command"


@pytest.mark.levels(documented=SHARED)
async def a_neighbours_environment_can_not_be_read(kit: Kit) -> None:
    """A slot can't read the environment of a neighbour's processes."""
    both = await _pair(kit)
    assert not await both.got_process("environ"), "it read a neighbour's environment"


@pytest.mark.levels(documented=SHARED)
async def a_neighbours_processes_can_not_be_entered(kit: Kit) -> None:
    """A slot can't reach a neighbour's files or memory through /proc."""
    both = await _pair(kit)
    assert not await both.got_process("cwd/secret"), "it read a neighbour's file by /proc/PID/cwd"
    assert not await both.got_process(f"root{both.other.workspace_dir}/secret"), "it did by /proc/PID/root"
    opened = "if : <$p/mem; then cat $p/cmdline; fi"
    found = await both.slot.run(f"for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || {opened}; done")
    assert both.mark not in found.text, "it opened the memory of a neighbour's process"


@pytest.mark.levels(documented=SHARED)
@pytest.mark.needs(PYTHON)
async def a_neighbour_can_not_be_traced(kit: Kit) -> None:
    """A slot can't attach to a neighbour's process as a debugger does."""
    both = await _pair(kit)
    seen = await both.slot.run(["python3", "-c", PTRACE, both.pid, both.mark])
    assert "traced" not in seen.text, "it attached to a neighbour's process as a debugger does"


@pytest.mark.levels(documented=NAMES)
async def a_neighbours_command_lines_are_hidden(kit: Kit) -> None:
    """A slot does not see what a neighbour runs."""
    both = await _pair(kit)
    assert not await both.got_process("cmdline"), "it saw a neighbour's command line"


@pytest.mark.levels(documented=SHARED)
async def a_neighbours_temporary_files_are_its_own(kit: Kit) -> None:
    """A slot can't read, change or remove a neighbour's private files in /tmp and /dev/shm."""
    both = await _pair(kit)
    paths = f"/tmp/{both.mark} /dev/shm/{both.mark}"
    await both.other.run(f"umask 077; for p in {paths}; do echo {both.mark} >$p; done 2>/dev/null")
    there = (await both.other.run(f"cat {paths} 2>/dev/null; true")).text
    assert there, "the neighbour itself can't write to /tmp"
    assert not await both.got(f"cat {paths} 2>/dev/null"), "it read a neighbour's temporary file"
    await both.slot.run(f"for p in {paths}; do echo x >>$p; rm -f $p; done 2>/dev/null")
    assert (await both.other.run(f"cat {paths} 2>/dev/null; true")).text == there, "the neighbour's files afterwards"


@pytest.mark.levels(documented=TMP)
async def the_names_of_temporary_files_are_hidden(kit: Kit) -> None:
    """Each slot has a /tmp and a /dev/shm of its own."""
    both = await _pair(kit)
    await both.other.run(f"touch /tmp/{both.mark} /dev/shm/{both.mark} 2>/dev/null")
    assert not await both.got("ls -A /tmp /dev/shm"), "it saw the name of a neighbour's temporary file"


async def _serve(both: Pair) -> str:
    await both.other.start(["python3", "-c", SERVER, both.mark])

    async def listens() -> bool:
        return bool((await both.other.run("cat port 2>/dev/null")).text)

    await until(listens, 10, "the victim's server did not begin")
    return (await both.other.run("cat port")).text


@pytest.mark.levels(documented=NETWORK)
@pytest.mark.needs(PYTHON)
async def a_neighbours_port_is_out_of_reach(kit: Kit) -> None:
    """A slot can't connect to a neighbour's server on localhost."""
    both = await _pair(kit)
    port = await _serve(both)
    own = await both.other.run(["python3", "-c", CONNECT, "port", port])
    assert own.ok, f"the neighbour itself can't connect to it: {own.error_text}"
    assert not (await both.slot.run(["python3", "-c", CONNECT, "port", port])).ok, "it connected to it"


@pytest.mark.levels(documented=NETWORK)
@pytest.mark.needs(PYTHON)
async def a_neighbours_abstract_socket_is_out_of_reach(kit: Kit) -> None:
    """A slot can't connect to a neighbour's abstract socket."""
    both = await _pair(kit)
    await _serve(both)
    own = await both.other.run(["python3", "-c", CONNECT, "abstract", both.mark])
    assert own.ok, f"the neighbour itself can't connect to it: {own.error_text}"
    assert not (await both.slot.run(["python3", "-c", CONNECT, "abstract", both.mark])).ok, "it connected to it"


@pytest.mark.levels(documented=SHARED)
@pytest.mark.needs(PYTHON)
async def shared_memory_is_ones_own(kit: Kit) -> None:
    """A slot can't get at a neighbour's System V shared memory."""
    slot, other = await kit.neighbours()
    key = str(secrets.randbelow(1 << 30) + 1)
    await other.run(["python3", "-c", SHARED_MEMORY, key, "make"])
    found = await slot.run(["python3", "-c", SHARED_MEMORY, key, "find"])
    assert not found.ok, "it found a neighbour's shared memory segment"


@pytest.mark.levels(documented=SHARED)
async def no_privilege_is_to_be_had(kit: Kit) -> None:
    """Set-user-id programs give a slot no privileges; a slot that is root owns only its own root."""
    slot, other = await kit.neighbours()
    if kit.level is Isolation.PRIVATE_ROOT:
        await _is_root_of_its_own(slot)
        return
    if kit.direct:
        pytest.skip("a sandbox without Python runs its one slot as the sandbox's own user")
    if kit.is_dedicated:
        pytest.skip("a slot with a sandbox of its own may be root in it: the sandbox is what separates")
    await other.run("cp $(command -v id) ./id; chmod 4755 ./id")
    got = await slot.run(
        'cp "$(command -v id)" ./id; chmod 4755 ./id; ./id -u; grep -E "Cap(Eff|Prm|Bnd)" /proc/self/status'
    )
    assert got.text.split()[0] != "0", "commands run as root"
    capabilities = [int(word, 16) for word in got.text.split()[2::2]]
    assert capabilities == [0, 0, 0], "effective, permitted and bounding capabilities"


async def _is_root_of_its_own(slot: SlotCommands) -> None:
    assert (await slot.run("id -u")).text == "0\n", "the user of commands"
    status = (await slot.run('grep -E "Cap(Eff|Prm|Bnd)" /proc/self/status')).text.split()
    held = {number for word in status[1::2] for number in range(64) if int(word, 16) >> number & 1}
    assert held <= HARMLESS, f"it has capabilities beyond its own root: {sorted(held - HARMLESS)}"
    for command in ("mount -t tmpfs none /mnt", "mknod /tmp/memory c 1 1", "echo x >/proc/sys/kernel/core_pattern"):
        assert not (await slot.run(command)).ok, f"it could do this: {command}"


@pytest.mark.levels(documented=SHARED)
async def the_guest_can_not_be_read(kit: Kit) -> None:
    """Slots can't read the guest's own directory."""
    if kit.direct:
        pytest.skip("a sandbox without Python has no guest")
    slot = await kit.slot()
    async with kit.sandbox() as sandbox:
        base = slot.workspace_dir.rpartition("/")[0]
        state_dir = sandbox.state_dir.replace(sandbox.workspace_base, base, 1)
    listed = await slot.run(["ls", "-A", state_dir])
    assert not listed.ok, f"it listed {state_dir}: {listed.text!r}"


@pytest.mark.levels(documented=SHARED)
async def the_drivers_files_are_not_there(kit: Kit) -> None:
    """A slot can't reach a private file of the driver's host, nor the driver's process."""
    slot = await kit.slot()
    mark = "mark" + secrets.token_hex(8)
    with tempfile.NamedTemporaryFile(prefix="hermes-kit-") as file:
        file.write(mark.encode())
        file.flush()
        own = f"/proc/{os.getpid()}"
        got = await slot.run(f"cat {file.name} {own}/root{file.name} {own}/fd/{file.fileno()}")
        assert mark not in got.text, "it read a private file of the driver's host"
