"""What a local sandbox sees and what it does not: the driver's own things, at `user` and above."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import hermes_core
from hermes_core.errors import ConfigError, PolicyError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation, Network
from hermes_core.sandbox.local import view
from hermes_core.sandbox.local.backend import LocalConfig
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

CHECKOUT = Path(hermes_core.__file__).resolve().parents[1]


@pytest.fixture
def dataset() -> Iterator[Path]:
    """A directory that every user of the host could read."""
    directory = Path(tempfile.mkdtemp(prefix="dataset-", dir="/var/tmp"))
    directory.chmod(0o755)
    (directory / "tasks.jsonl").write_text("the answer")
    yield directory
    (directory / "tasks.jsonl").unlink()
    directory.rmdir()


@pytest.mark.parametrize("level", [Isolation.USER, pytest.param(Isolation.NAMESPACE, marks=pytest.mark.full)])
def test_the_drivers_files_are_not_there(host, tools, dataset: Path, level: Isolation) -> None:
    homes = [str(Path.home()), os.path.expanduser("~root")]

    program = """if 1:
        import json, os, sys
        prefixes = json.loads(sys.argv[1])
        def tree(top):
            found = []
            for place, directories, files in os.walk(top):
                directories[:] = [d for d in directories if os.path.join(place, d) not in prefixes]
                found += [os.path.join(place, file) for file in files]
            return found
        print(json.dumps([os.listdir("/"), [file for top in sys.argv[2:] for file in tree(top)]]))"""
    prefixes = view.interpreter_prefixes()
    system = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "nix", "dev", "proc", "run"}

    async def scenario() -> None:
        arguments = (json.dumps(prefixes), *homes, str(CHECKOUT), str(dataset))
        async with tools.sandbox(host, level) as sandbox:
            top, found = json.loads(await tools.python(sandbox, program, *arguments))
        assert set(top) <= system | {"data", "tmp", "var"} | {Path(prefix).parts[1] for prefix in prefixes}
        assert found == []

    host.run(scenario)


def test_the_drivers_processes_and_environment_are_not_there(host, tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    program = """if 1:
        import os, json
        pids = [p for p in os.listdir("/proc") if p.isdigit()]
        environs = b""
        for p in pids:
            try:
                environs += open(f"/proc/{p}/environ", "rb").read()
            except PermissionError:  # who waits for the program can't be inspected
                pass
        commands = b"".join(open(f"/proc/{p}/cmdline", "rb").read() for p in pids)
        print(json.dumps([len(pids), b"sk-secret" in environs, b"py" + b"test" in commands, dict(os.environ)]))"""

    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            pids, secret, commands, environment = json.loads(await tools.python(sandbox, program))
        assert pids <= 4  # the watchdog and its sleep, the program and who waits for it
        assert not secret and not commands
        assert environment.pop("HERMES_SANDBOX_ID") == sandbox.id
        assert environment.pop("PATH").startswith(str(Path(view.interpreter()).parent) + ":")
        assert environment.pop("LANG") == "C.UTF-8"
        assert environment.keys() <= {"LC_CTYPE"}  # which Python sets itself

    host.run(scenario)


def test_a_program_inherits_no_descriptor(host, tools) -> None:
    leaked = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    os.dup2(leaked, 77, inheritable=True)
    listing = "[fd for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)]"
    program = f"import os; print(sorted({listing}))"

    async def scenario() -> None:
        for level in (Isolation.SHARED, Isolation.NAMESPACE):
            async with tools.sandbox(host, level) as sandbox:
                assert await tools.python(sandbox, program) == "['0', '1', '2']"

    try:
        host.run(scenario)
    finally:
        os.close(leaked)
        os.close(77)


def test_the_first_process_holds_nothing_of_ours(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            ran = await tools.run(sandbox, "sh", "-c", "cd /proc/1/fd; for fd in *; do readlink $fd; done")
            targets = {line for line in ran.out.split() if "uids" not in line}
            assert targets == {"/dev/null"}, ran

    host.run(scenario)


def test_the_interpreter_is_ours_wherever_it_is(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            assert await tools.python(sandbox, "import sys; print(sys.executable)") == view.interpreter()
            ran = await tools.run(sandbox, "sh", "-c", "command -v python3")
            assert Path(ran.out.strip()).parent == Path(view.interpreter()).parent
            ran = await tools.run(sandbox, "python3", "-m", "venv", "--without-pip", "/data/venv")
            assert ran.status == 0, ran

    host.run(scenario)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be another user")
@pytest.mark.skipif(not sys.base_prefix.startswith("/root/"), reason="the interpreter is not below a private home")
def test_an_interpreter_below_a_private_home_runs_for_a_slots_user(host, tools) -> None:
    if not host.root:
        pytest.skip("an ordinary user has no other")
    program = """if 1:
        import os, sys, subprocess
        os.setgroups([])
        uid = int(sys.argv[1])
        os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
        print(subprocess.check_output([sys.executable, "-c", "import json, ssl; print('runs')"], text=True))"""

    async def scenario() -> None:
        async with tools.sandbox(host, Isolation.USER) as sandbox:
            assert await tools.python(sandbox, program, str(sandbox.uid_base + 2)) == "runs"

    host.run(scenario)


def test_the_system_can_be_read_but_not_written(host, tools) -> None:
    paths = ["/x", "/usr/x", "/etc/x", "/opt/x", "/dev/x", str(Path(view.interpreter()).parent / "x")]
    program = """if 1:
        import sys
        for path in sys.argv[1:]:
            try:
                open(path, "w")
            except OSError as error:
                print(error.errno)
            else:
                print("wrote", path)"""

    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            assert "wrote" not in await tools.python(sandbox, program, *paths)
            ran = await tools.run(sandbox, "sh", "-c", "cat /etc/resolv.conf >/dev/null && ls /usr/bin/env")
            assert ran.status == 0, ran

    host.run(scenario)


def test_what_can_be_written_is_private_to_the_sandbox(host, tools) -> None:
    mark = uuid.uuid4().hex

    async def scenario() -> None:
        async with tools.sandbox(host) as one, tools.sandbox(host) as two:
            script = "for d in /data /tmp /var/tmp /dev/shm; do echo x > $d/$0 || exit 1; stat -c %a $d; done"
            ran = await tools.run(one, "sh", "-c", script, mark)
            assert ran.status == 0 and ran.out.split() == ["755", "1777", "1777", "1777"], ran
            ran = await tools.run(two, "sh", "-c", "ls /data /tmp /var/tmp /dev/shm")
            assert mark not in ran.out
            assert not [d for d in ("/data", "/tmp", "/var/tmp", "/dev/shm") if Path(d, mark).exists()]

    host.run(scenario)


def test_no_user_of_the_host_gets_into_a_sandboxs_directory(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            assert sandbox.directory.stat().st_mode & 0o777 == 0o700

    host.run(scenario)


def test_visible_paths_are_there_and_their_neighbours_are_not(host, tools, dataset: Path) -> None:
    (dataset / "file").write_text("one file")
    (dataset / "file").chmod(0o644)
    visible = (str(dataset / "file"),)

    async def scenario() -> None:
        async with tools.sandbox(host, visible_paths=visible) as sandbox:
            ran = await tools.run(sandbox, "sh", "-c", 'cat "$0"/file; ls "$0"; echo x > "$0"/file', str(dataset))
            assert ran.out.split("\n")[0].startswith("one file") and "tasks.jsonl" not in ran.out
            assert ran.status != 0 and "ead-only" in ran.err

    try:
        host.run(scenario)
        assert (dataset / "file").read_text() == "one file"
    finally:
        (dataset / "file").unlink()


@pytest.mark.parametrize("path", ["/", "/data", "/tmp", "/proc/1", "relative", "/no/such/path"])
def test_what_can_not_be_made_visible_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match="visible_paths"):
        view.view([path], [])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can put things into system directories")
def test_our_working_directory_in_a_system_directory_is_masked(host, tools, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tempfile.mkdtemp(prefix="hermes-test-", dir="/opt"))
    place.chmod(0o755)
    (place / "checkout").mkdir()
    (place / "checkout" / "secret").write_text("key")
    (place / "checkout" / "shown").mkdir()
    (place / "checkout" / "shown" / "file").write_text("shown")
    (place / "dataset").mkdir()
    (place / "dataset" / "answers").write_text("answers")
    (place / "neighbour").write_text("visible")
    config = {"visible_paths": (str(place / "checkout" / "shown"),), "hidden_paths": (str(place / "dataset"),)}

    async def scenario() -> None:
        os.chdir(place / "checkout")
        async with tools.sandbox(host, **config) as sandbox:
            ran = await tools.run(
                sandbox, "sh", "-c", "cd $0 && find . -mindepth 1 | sort; touch checkout/x", str(place)
            )
            expected = ["./checkout", "./checkout/shown", "./checkout/shown/file", "./dataset", "./neighbour"]
            assert ran.out.split() == expected, ran
            assert ran.status != 0

    before = os.getcwd()
    try:
        host.run(scenario)
    finally:
        os.chdir(before)
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        place.rmdir()


def test_a_home_around_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/home/someone")
    monkeypatch.setenv("HOME", "/home/someone")
    with pytest.raises(PolicyError, match="around the home"):
        view.view([], [])


@pytest.mark.parametrize("path", ["/usr", "/usr/bin", "/usr/bin/env", "/usr/local", "/etc", view.interpreter()])
def test_what_can_not_be_hidden_is_refused_and_not_just_left_visible(path: str) -> None:
    with pytest.raises(ConfigError, match="can't be hidden"):
        view.view([], [path])


def test_what_is_not_visible_anyway_may_be_named_as_hidden() -> None:
    assert view.view([], ["/root", "/nowhere", "/usr/nowhere"]).masks == view.view([], []).masks


def test_packages_that_were_removed_since_the_search_are_not_masked():
    found = view.package_folders(view.interpreter_prefixes())
    gone = view.view([], [], packages=[*found, "/usr/lib/nowhere/site-packages"])
    assert gone.masks == view.view([], [], packages=found).masks


def test_without_a_network_there_is_loopback_and_nothing_else(host, tools) -> None:
    program = """if 1:
        import socket, sys
        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname()).close()
        print([name for _, name in socket.if_nameindex()])
        try:
            socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)
        except OSError as error:
            print(type(error).__name__)"""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            async with tools.sandbox(host, network=Network.NONE) as sandbox:
                assert (await tools.python(sandbox, program, port)).split("\n") == ["['lo']", "ConnectionRefusedError"]
            async with tools.sandbox(host) as sandbox:
                assert "Error" not in await tools.python(sandbox, program, port)

    host.run(scenario)


def test_system_v_objects_and_queues_are_off(host, tools) -> None:
    program = """if 1:
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600))"""

    async def scenario() -> None:
        async with tools.sandbox(host, Isolation.USER) as sandbox:
            assert await tools.python(sandbox, program) == "-1 -1 -1"

    host.run(scenario)


def test_devices_and_terminals_work(host, tools) -> None:
    program = """if 1:
        import os, pty, multiprocessing.synchronize as s, multiprocessing
        pid, fd = pty.fork()
        if pid == 0:
            os.write(1, os.ttyname(0).encode()); os._exit(0)
        assert os.read(fd, 100).startswith(b"/dev/pts/")
        os.waitpid(pid, 0)
        multiprocessing.Lock()
        open("/dev/null", "w").write("x")
        assert len(open("/dev/urandom", "rb").read(8)) == 8
        print("fine")"""

    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            assert await tools.python(sandbox, program) == "fine"

    host.run(scenario)


def test_files_in_memory_are_bounded(host, tools) -> None:
    async def scenario() -> None:
        async with tools.sandbox(host, tmpfs_size=8) as sandbox:
            ran = await tools.run(sandbox, "sh", "-c", "head -c 6M /dev/zero >/data/a && head -c 6M /dev/zero >/tmp/b")
            assert ran.status != 0 and "space" in ran.err
            assert list(sandbox.directory.joinpath("data").iterdir()) == []

    host.run(scenario)


def test_a_slots_namespace_can_be_built_inside(host, tools) -> None:
    """What the guest does for a slot of level `namespace`, in the sandbox of root and of an ordinary user."""
    linux = Path(hermes_core.__file__).parent / "sandbox" / "linux"
    mounts = (linux / "mounts.py").read_text()
    for line in ("from __future__ import annotations\n", "from .namespaces import check, libc\n"):
        assert line in mounts
        mounts = mounts.replace(line, "")
    program = (
        (linux / "namespaces.py").read_text()
        + mounts
        + """
import sys, traceback
uid = int(sys.argv[1])
os.makedirs("/data/.hermes/scratch"); os.makedirs("/data/slot_0"); os.chown("/data/slot_0", uid, uid)
os.makedirs("/data/slot_1")
unshare(mount=True, pid=True, ipc=True, net=True)
child = os.fork()
if child == 0:
    try:
        binds, symlinks = system_binds([sys.prefix])
        binds = binds + [("/data/slot_0", "/data/slot_0", True)]
        build_root("/data/.hermes/scratch", binds=binds, tmpfs=[("/tmp", None, 0o1777)], symlinks=symlinks)
        loopback_up()
        death_signal(9)
        become(uid, uid)
        pdeath = ctypes.c_int()
        libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(pdeath))
        assert pdeath.value == 9
        assert os.getpid() == 1 and os.listdir("/data") == ["slot_0"]
        open("/data/slot_0/mine", "w").close()
        status = open("/proc/self/status").read()
        for line in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"):
            assert line + ":\\t0000000000000000" in status, status
        assert "NoNewPrivs:\\t1" in status and {*os.getgroups()} <= {os.getgid()}
        code = "assert 'CapEff:\\\\t0000000000000000' in open('/proc/self/status').read(); 1 / 0"
        assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 1
        try:
            mount("tmpfs", "/tmp", "tmpfs", 0)
            print("could mount")
        except PermissionError:
            print("confined")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""
    )

    async def scenario() -> None:
        async with tools.sandbox(host) as sandbox:
            uid = 0 if sandbox.uid_base is None else sandbox.uid_base + 2
            ran = await tools.run(sandbox, "python3", "-I", "-S", "-c", program, str(uid))
            assert ran.out.strip() == "confined", ran

    host.run(scenario)


@pytest.mark.parametrize("level", [Isolation.USER, Isolation.NAMESPACE])
def test_slots_users_have_names_and_the_hosts_lists_stay(host, level: Isolation) -> None:
    program = """if 1:
        import getpass, grp, json, os, pwd
        user = pwd.getpwuid(os.getuid())
        names = [user.pw_name, grp.getgrgid(os.getgid()).gr_name, getpass.getuser(), os.environ["LOGNAME"]]
        homes = [user.pw_dir, os.path.expanduser("~"), os.path.expanduser("~" + user.pw_name)]
        writable = [path for path in ("/etc", "/etc/passwd", "/etc/group") if os.access(path, os.W_OK)]
        print(json.dumps([names, homes, writable, pwd.getpwuid(0).pw_name]))"""
    lists = [Path("/etc/passwd"), Path("/etc/group")]

    async def scenario() -> None:
        before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in lists]
        profile = LocalConfig(slots_per_sandbox=2, max_sandboxes=1, reserve_slots=0)
        backend = ToolBackend(
            host.backend(), profiles={"default": profile}, tools=ToolRegistry(), isolation=level, owner="tests"
        )
        async with backend:
            for number in range(2):
                slot = await backend.acquire()
                wanted = f"agent{number}" if host.root and level is Isolation.USER else "agent"
                run = backend.commands(slot).run
                result = await run(["python3", "-c", program])
                assert result.text.startswith("["), result
                names, homes, writable, root = json.loads(result.text)
                assert names == [wanted] * 4 and len(set(homes)) == 1 and f"slot_{number}" in homes[0]
                assert (writable, root) == ([], "root")
                said = await run(r"whoami; id -un; id -gn; PS1='\u ' bash --norc -i 2>&1 </dev/null")
                assert said.text.split("\n")[:3] == [wanted] * 3 and f"{wanted} exit" in said.text, said
        assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in lists] == before

    host.run(scenario)


@pytest.mark.root
async def test_what_is_hidden_from_root_of_a_slot_may_be_gone_since_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"hermes-test-{uuid.uuid4().hex}"
    gone = f"/usr/local/share/{folder}/inner/secret"
    monkeypatch.setattr(view, "unreadable", lambda: (gone, "/etc/shadow", f"{gone}/below"))
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        if Isolation.PRIVATE_ROOT not in runtime.backend("local").capabilities.isolation:
            pytest.skip("this host grants no roots of their own")
        backend = runtime.tool_backend("local", isolation="private-root")
        async with backend, backend.lease() as slot:
            assert (await backend.commands(slot).run(f"id -u; ls /usr/local/share | grep {folder}")).text == "0\n"
