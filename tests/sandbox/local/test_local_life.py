"""A local sandbox's life: made once per creation id, entered, ended; and what is left when someone dies: nothing."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

import hermes_core
from hermes_core.errors import ChannelLost, PolicyError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Isolation, Network, SandboxConfig, SandboxSpec, SandboxStatus
from hermes_core.sandbox.linux.probe import CHROOT
from hermes_core.sandbox.local import directories, launch, processes
from hermes_core.sandbox.local import host as sandboxes
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.local.host import Probe
from hermes_core.sandbox.local.sandbox import LocalSandbox
from hermes_core.sandbox.pool.profile_check import check_profile

SLEEPER = "setsid sleep 100 >/dev/null 2>&1 </dev/null &"
_PR_SET_CHILD_SUBREAPER = 36
LEVELS = [
    Isolation.USER,
    *(pytest.param(level, marks=pytest.mark.full) for level in (Isolation.SHARED, Isolation.NAMESPACE)),
]


@pytest.mark.full  # the kit does it as well
@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("level", LEVELS)
def test_many_come_and_go_and_nothing_is_left(host, tools, level: Isolation) -> None:
    async def scenario() -> None:
        backend = host.backend()

        async def one() -> LocalSandbox:
            sandbox = await backend.create(tools.spec(level))
            assert (await tools.run(sandbox, "sh", "-c", f"{SLEEPER} echo hello")).out == "hello\n"
            assert await sandbox.status() is SandboxStatus.RUNNING
            await sandbox.terminate()
            assert await sandbox.status() is SandboxStatus.GONE
            return sandbox

        for _ in range(2):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one()) for _ in range(4)]
        assert await backend.list() == []
        ids = [task.result().id for task in tasks]
        assert tools.argv_of_living([str(host.state_dir), *ids]) == []
        assert str(host.state_dir) not in Path("/proc/self/mountinfo").read_text()

    host.run(scenario)


def test_creating_and_ending_are_quick(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        created, ended = [], []
        for _ in range(5):
            begin = time.perf_counter()
            sandbox = await backend.create(tools.spec())
            created.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            await sandbox.terminate()
            ended.append(time.perf_counter() - begin)
        assert min(created) < 2 and min(ended) < 2, (created, ended)  # the figures are in benchmarks

    host.run(scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_status_signal_and_streams_of_a_program_come_through(host, tools, level: Isolation) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, level) as sandbox:
            ran = await tools.run(sandbox, "sh", "-c", 'echo "$0 $A"; echo bad >&2; exit 3', "x y", env={"A": "b c"})
            assert (ran.status, ran.out, ran.err) == (3, "x y b c\n", "bad")
            assert (await tools.run(sandbox, "sh", "-c", "kill -9 $$")).status == 137
            ran = await tools.run(sandbox, "no-such-program")
            assert ran.status == 127 and "no-such-program: not found" in ran.err
            assert (await tools.run(sandbox, "/etc/passwd")).status == 126
            assert (await tools.run(sandbox, "pwd")).out == sandbox.workspace_base + "\n"
            assert (await tools.run(sandbox, "sh", "-c", "yes | head -n 1")).out == "y\n"
            channel = await sandbox.open(["cat"])
            async with asyncio.TaskGroup() as group:
                group.create_task(channel.write(bytes(3_000_000)))
                size = 0
                while size < 3_000_000:
                    size += len(await channel.read(1 << 18))
            await channel.aclose()

    host.run(scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_a_program_outlives_its_channel_and_gets_end_of_file(host, tools, level: Isolation) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, level) as sandbox:
            channel = await sandbox.open(["sh", "-c", "echo ready; cat >input; sleep 0.1; echo done >after"])
            assert await channel.read(100) == b"ready\n"
            await channel.write(b"text")
            await channel.aclose()
            data = sandbox.directory / "data"
            await tools.until(lambda: (data / "after").exists() and (data / "after").read_text() == "done\n")
            assert (data / "input").read_text() == "text"

    host.run(scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_carrier_of_a_channel_does_not_hold_up_the_sandboxs_end(host, tools, level: Isolation) -> None:
    """Whatever the host's init is: a zombie keeps a pid namespace from ending, and here nobody reaps what is left."""

    async def scenario() -> None:
        libc = ctypes.CDLL(None)
        async with tools.sandbox(host, level) as sandbox:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                for _ in range(5):
                    channel = await sandbox.open(["sh", "-c", "echo ready; sleep 0.05"])
                    assert await channel.read(6) == b"ready\n"
                    await channel.aclose()
                begin = time.perf_counter()
                await sandbox.terminate()
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            assert time.perf_counter() - begin < 15  # it gives up after 30 s

    host.run(scenario)


def test_the_environment_of_the_profile_and_the_spec_is_in_every_program(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, env_vars={"FROM_PROFILE": "1", "PATH": "/data/bin:/usr/bin:/bin"}) as sandbox:
            again = await host.backend().attach(sandbox.id)
            for each in (sandbox, again):
                ran = await tools.run(each, "env")
                assert "FROM_PROFILE=1" in ran.out and "PATH=/data/bin:" in ran.out

    host.run(scenario)


def test_one_lease_is_one_sandbox(host, tools) -> None:
    creation_id = uuid.uuid4().hex

    async def scenario() -> None:
        backends = [host.backend() for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(backend.create(tools.spec(creation_id=creation_id))) for backend in backends]
        first, *others = [task.result() for task in tasks]
        assert isinstance(first, LocalSandbox)
        assert {other.id for other in others} == {first.id}
        assert {other.record.init for other in others} == {first.record.init}
        await tools.run(others[0], "sh", "-c", "echo x >/data/file")
        assert (await tools.run(others[1], "cat", "/data/file")).out == "x\n"
        (info,) = await backends[0].list("tests")
        assert (info.sandbox_id, info.creation_id, info.status) == (first.id, creation_id, SandboxStatus.RUNNING)
        assert abs(info.created - time.time()) < 60
        assert await backends[0].list("someone else") == []
        with pytest.raises(PolicyError, match="was made with isolation 'user'"):
            async with tools.sandbox(host, Isolation.USER, creation_id="weak"):
                await backends[0].create(tools.spec(creation_id="weak"))
        async with asyncio.TaskGroup() as group:
            for other in others:
                group.create_task(other.terminate())
        again = await backends[0].create(tools.spec(creation_id=creation_id))
        assert again.id == first.id and (await tools.run(again, "ls", "/data")).out == ""
        assert await first.status() is SandboxStatus.RUNNING
        await backends[1].terminate_id(again.id)
        assert await again.status() is SandboxStatus.GONE
        await backends[1].terminate_id(again.id)
        await backends[1].terminate_id("local-unknown")

    host.run(scenario)


def test_what_has_ended_can_not_be_opened_or_attached_to(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        sandbox = await backend.create(tools.spec())
        channel = await sandbox.open(["sh", "-c", "echo in; sleep 100"])
        assert await channel.read(10) == b"in\n"
        await sandbox.terminate()
        assert await channel.read(10) == b""
        assert await channel.wait() == 137
        with pytest.raises(ChannelLost):
            for _ in range(100):
                await channel.write(b"x")
                await asyncio.sleep(0.01)
        await channel.aclose()
        with pytest.raises(SandboxLost):
            await sandbox.open(["true"])
        for wrong in (sandbox.id, "local-unknown", "../local-x", "local-/../..", ""):
            with pytest.raises(SandboxLost):
                await backend.attach(wrong)

    host.run(scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_the_watchdogs_end_is_the_sandboxs_end(host, tools, level: Isolation) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, level) as sandbox:
            script = f"mkdir .hermes; ({SLEEPER}); {SLEEPER} echo end >.hermes/heartbeat"
            assert (await tools.run(sandbox, "sh", "-c", script)).status == 0
            await tools.until(lambda: not sandbox.directory.exists())
            await tools.until(lambda: not processes.alive(*sandbox.record.supervisor))
            assert processes.find_marked(sandbox.id) == []
            assert await sandbox.status() is SandboxStatus.GONE

    host.run(scenario)


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_supervisor_takes_the_sandbox_with_it_and_the_next_driver_sweeps(
    host, tools, level: Isolation
) -> None:
    async def scenario() -> None:
        sandbox = await host.backend().create(tools.spec(level))
        await tools.run(sandbox, "sh", "-c", f"mkdir -p a/b && chmod 000 a; {SLEEPER}")
        os.kill(sandbox.record.supervisor[0], signal.SIGKILL)
        await tools.until(lambda: not processes.alive(*sandbox.record.init))
        await tools.until(lambda: not directories.is_held(str(sandbox.directory)))
        if level is not Isolation.SHARED:
            await tools.until(lambda: processes.find_marked(sandbox.id) == [])
        assert await sandbox.status() is SandboxStatus.ENDED
        with pytest.raises(SandboxLost):
            await sandbox.open(["true"])
        (host.state_dir / ".trash-old").mkdir()
        (host.state_dir / ".new-unfinished").mkdir()
        (host.state_dir / ".new-old").mkdir()
        os.utime(host.state_dir / ".new-old", (0, 0))
        other = await host.backend().create(tools.spec())
        assert host.left() == [".new-unfinished", other.id]
        assert processes.find_marked(sandbox.id) == []
        await sandbox.terminate()
        await other.terminate()
        (host.state_dir / ".new-unfinished").rmdir()

    host.run(scenario)


def test_ending_a_sandbox_whose_supervisor_was_killed_removes_its_files(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            os.kill(sandbox.record.supervisor[0], signal.SIGKILL)
            await sandbox.terminate()
            assert host.left() == []
            await sandbox.terminate()

    host.run(scenario)


@pytest.mark.full
def test_a_removal_that_takes_long_goes_on_after_the_end(host, tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_END_S", 2.0)

    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            await tools.run(sandbox, "sh", "-c", "mkdir many && cd many && seq 3000 | xargs touch")
            supervisor = sandbox.record.supervisor[0]
            async with asyncio.TaskGroup() as group:
                group.create_task(sandbox.terminate())
                await tools.until(lambda: not sandbox.directory.exists())
                os.kill(supervisor, signal.SIGSTOP)  # as if the disk were slow
            assert host.left() and processes.alive(*sandbox.record.supervisor)
            os.kill(supervisor, signal.SIGCONT)
            await tools.until(lambda: host.left() == [])

    host.run(scenario)


def test_a_driver_that_is_killed_leaves_nothing(host, tools) -> None:
    """The watchdog of a sandbox with a dead driver and no guest runs out of time, and takes everything with it."""
    script = textwrap.dedent("""
        import asyncio, os, sys
        sys.path[:0] = sys.argv[3:]
        if sys.argv[2] != "-":
            sys._base_executable, sys.base_prefix, sys.base_exec_prefix = sys.argv[2], "/usr", "/usr"
        from hermes_core.sandbox.contract import Isolation, SandboxSpec
        from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig

        async def main():
            backend = LocalBackend(state_dir=sys.argv[1])
            for number, level in enumerate((Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE)):
                spec = SandboxSpec(f"creation {number}", "killed", LocalConfig(orphan_ttl_s=3), level)
                sandbox = await backend.create(spec)
                work = "mkdir .hermes; echo 1 >.hermes/heartbeat; setsid sleep 1000 & echo; cat"
                channel = await sandbox.open(["sh", "-c", work])
                await channel.read(1)
                print(sandbox.id, sandbox.record.supervisor[0], sandbox.record.init[0], flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main())
        """)
    where = [str(Path(hermes_core.__file__).resolve().parents[1]), *(p for p in sys.path if p.endswith("-packages"))]

    async def scenario() -> None:
        base = sys._base_executable if os.geteuid() != 0 else "-"
        argv = [sys.executable, "-c", script, str(host.state_dir), base, *where]
        if os.geteuid() != 0 and not os.access(sys.executable, os.X_OK):
            pytest.skip("our interpreter can't be run by an ordinary user")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as driver:
            begun = [driver.stdout.readline().split() for _ in range(3)]
            there = host.left()
            driver.kill()
        assert all(len(words) == 3 for words in begun), begun
        ids = [words[0] for words in begun]
        assert there == sorted(ids)
        pids = [int(pid) for words in begun for pid in words[1:]]
        await tools.until(lambda: host.left() == [], 30)
        await tools.until(lambda: not any(processes.start_time(pid) for pid in pids), 30)
        assert [processes.find_marked(sandbox_id) for sandbox_id in ids] == [[], [], []]

    if not host.root and os.geteuid() == 0:
        pytest.skip("covered where the tests run as an ordinary user: our interpreter is root's alone")
    host.run(scenario)


def test_ctrl_c_at_the_drivers_terminal_does_not_reach_the_sandbox(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            channel = await sandbox.open(["cat"])
            assert os.getsid(sandbox.record.supervisor[0]) == sandbox.record.supervisor[0]
            for pid in (*sandbox.record.supervisor[:1], sandbox.record.init[0]):
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert await sandbox.status() is SandboxStatus.RUNNING
            await channel.write(b"x")
            assert await channel.read(1) == b"x"
            await channel.aclose()

    host.run(scenario)


@pytest.mark.parametrize("after_ms", [0, 5, 15, 30])
def test_a_cancelled_creation_leaves_nothing(host, tools, after_ms: int) -> None:
    async def scenario() -> None:
        backend = host.backend()
        assert await backend.list() == []
        spec = tools.spec()
        try:
            async with asyncio.timeout(after_ms / 1000):
                sandbox = await backend.create(spec)
            await sandbox.terminate()
        except TimeoutError:
            pass
        await tools.until(lambda: host.left() == [])
        assert tools.argv_of_living([str(host.state_dir), sandboxes.sandbox_id_of(spec.creation_id)]) == []

    host.run(scenario)


def test_what_is_given_up_is_removed_though_its_first_process_takes_a_while_to_die(tmp_path: Path) -> None:
    # From its fork to its exec the first process has a copy of the supervisor's lock.
    path, holder = directories.claim(str(tmp_path), "local-1")
    dying = subprocess.Popen(["sleep", "0.3"], pass_fds=(holder,))
    os.close(holder)
    supervisor = subprocess.Popen(["sleep", "100"])
    supervisor.returncode = 0  # it is reaped below
    (tmp_path / f".new-{supervisor.pid}-0123" / "data").mkdir(parents=True)
    launch._abandon(supervisor.pid, Path(path))
    assert os.listdir(tmp_path) == []
    assert dying.wait() == 0


def test_trees_of_any_kind_are_removed(host, tools) -> None:
    script = """if 1:
        import os
        os.mkdir("locked"); open("locked/file", "w").close(); os.chmod("locked", 0)
        os.makedirs("a/b"); open("a/b/c", "w").close(); os.chmod("a/b", 0o500); os.chmod("a", 0o100)
        os.symlink("/usr", "link"); os.symlink("loop", "loop"); os.mkfifo("pipe")
        os.mkdir("deep"); os.chdir("deep")
        for n in range(3000):
            os.mkdir("d" * 50); os.chdir("d" * 50)"""

    async def scenario() -> None:
        for level in (Isolation.SHARED, Isolation.NAMESPACE):
            async with tools.sandbox(host, level) as sandbox:
                await tools.python(sandbox, script)
            assert host.left() == []
        assert Path("/usr/bin").exists()

    host.run(scenario)


def test_user_ids_are_one_sandboxs_alone(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as one, tools.sandbox(host) as two:
            if not host.root:
                assert one.uid_base is None and two.uid_base is None
                return
            assert one.uid_base != two.uid_base
            for sandbox in (one, two):
                assert sandbox.uid_base >= 2_000_000_000 and sandbox.uid_base % 512 == 0
                assert (await host.backend().attach(sandbox.id)).uid_base == sandbox.uid_base

    host.run(scenario)


def test_records_are_readable_by_nobody_else(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, env_vars={"KEY": "secret"}) as sandbox:
            path = sandbox.directory / "record.json"
            assert path.stat().st_mode & 0o777 == 0o600
            assert json.loads(path.read_text())["owner"] == "tests"
            for pid in (sandbox.record.supervisor[0], sandbox.record.init[0]):
                assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()

    host.run(scenario)


@pytest.mark.parametrize(
    ("level", "config", "message"),
    [
        (Isolation.DEDICATED, {}, "can't have isolation 'dedicated'"),
        (Isolation.SHARED, {"network": Network.NONE}, "network 'none' needs"),
        (Isolation.SHARED, {"tmpfs_size": 10}, "tmpfs_size needs"),
    ],
)
def test_what_can_not_be_given_is_refused(host, tools, level: Isolation, config: dict, message: str) -> None:
    async def scenario() -> None:
        with pytest.raises(PolicyError, match=message):
            await host.backend().create(tools.spec(level, **config))

    host.run(scenario)


@pytest.mark.parametrize("setting", [{"image": "python:3.11"}, {"cpu": 2.0}, {"memory": 100}])
def test_what_a_host_can_not_give_is_refused_before_a_sandbox_is_made(setting: dict, tmp_path: Path) -> None:
    config = LocalConfig(**setting)
    with pytest.raises(PolicyError, match=f"sets {next(iter(setting))}, which backend 'local' can't give"):
        check_profile(LocalBackend(state_dir=str(tmp_path)), Isolation.SHARED, config, prepares=False)


def test_a_profile_of_another_class_will_do(host, tools) -> None:
    async def scenario() -> None:
        spec = tools.spec()
        object.__setattr__(spec, "config", SandboxConfig(env_vars={"A": "b"}))
        sandbox = await host.backend().create(spec)
        assert "A=b" in (await tools.run(sandbox, "env")).out
        await sandbox.terminate()

    host.run(scenario)


def test_an_untrustworthy_state_directory_is_refused(host, tools) -> None:
    async def scenario() -> None:
        places = {name: host.state_dir / name for name in ("link", "open", "file")}
        places["link"].symlink_to("/tmp")
        places["open"].mkdir()
        places["open"].chmod(0o777)
        places["file"].write_text("")
        for name, place in places.items():
            with pytest.raises((PolicyError, ProvisionError), match=r"directory .*/(link|open|file)"):
                await LocalBackend(state_dir=str(place)).create(tools.spec())
            with pytest.raises((PolicyError, ProvisionError), match=r"directory .*/(link|open|file)"):
                await LocalBackend().create(tools.spec(state_dir=str(place)))
            place.rmdir() if name == "open" else place.unlink()

    host.run(scenario)


def test_a_profile_may_name_its_own_state_directory(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        own = host.state_dir / "own"
        sandbox = await backend.create(tools.spec(state_dir=str(own)))
        assert sandbox.directory.parent == own and own.stat().st_mode & 0o777 == 0o711
        assert [info.sandbox_id for info in await backend.list()] == [sandbox.id]
        await backend.terminate_id(sandbox.id)
        assert not sandbox.directory.exists()
        own.rmdir()

    host.run(scenario)


class NoSuchCommand(SandboxSpec):
    """Of a sandbox whose main process can't be run."""

    def command(self, state_dir: str) -> tuple[str, ...]:
        return ("/no/such/watchdog",)


def test_a_command_that_can_not_be_run_is_a_clear_error_and_leaves_nothing(host, tools) -> None:
    async def scenario() -> None:
        spec = NoSuchCommand(**vars(tools.spec()))
        with pytest.raises(ProvisionError, match="No such file"):
            await host.backend().create(spec)
        assert host.left() == []

    host.run(scenario)


def test_a_host_without_file_descriptors_is_a_clear_error(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        await backend.list()
        assert backend.capabilities
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(ProvisionError, match="Too many open files"):
                await backend.create(tools.spec())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with tools.sandbox(host) as sandbox:
            assert await sandbox.status() is SandboxStatus.RUNNING

    host.run(scenario)


def test_doctor_tries_a_real_sandbox(host, tools) -> None:
    async def scenario() -> None:
        diagnosis = await host.backend().check()
        assert diagnosis.usable and diagnosis.summary.endswith(("level namespace", "level private-root"))
        assert any("interpreter" in line for line in diagnosis.details)
        assert any("--confine" in line for line in diagnosis.details)
        assert diagnosis.advice == ()

    host.run(scenario)


def test_doctor_says_when_the_interpreter_can_not_run(host, tools, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        from hermes_core.sandbox.local import view

        monkeypatch.setattr(view, "interpreter_prefixes", lambda: ())
        if view.interpreter().startswith("/usr/"):
            return
        diagnosis = await host.backend().check()
        assert not diagnosis.usable and "does not run" in diagnosis.summary

    host.run(scenario)


def test_a_host_without_namespaces_grants_only_shared(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        backend.__dict__["_probe"] = Probe(False, False, False, False, "unshare user: Operation not permitted")
        assert backend.capabilities.isolation == {Isolation.SHARED}
        with pytest.raises(PolicyError, match="Operation not permitted"):
            await backend.create(tools.spec(Isolation.USER))
        diagnosis = await backend.check()
        assert diagnosis.usable and "shared" in diagnosis.summary and diagnosis.advice
        assert any("Operation not permitted" in line for line in diagnosis.details)

    host.run(scenario)


def test_in_a_chroot_doctor_names_what_helps_there(host, tools) -> None:
    async def scenario() -> None:
        backend = host.backend()
        backend.__dict__["_probe"] = Probe(True, False, False, False, CHROOT)
        assert [line for line in (await backend.check()).advice if "pivot_root" in line]
        with pytest.raises(PolicyError, match=r"this is a chroot.*pivot_root"):
            await backend.create(tools.spec(Isolation.USER))

    host.run(scenario)


def test_the_profile_knows_its_keys() -> None:
    with pytest.raises(ValueError, match="tmpfs"):
        LocalConfig(tmpfs=5)
    with pytest.raises(ValueError, match="tmpfs_size"):
        LocalConfig(tmpfs_size=0)
