"""The raw namespace calls: every failure is an OSError that names its call; a root holds what was named, read-only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_core.sandbox.linux import mounts, namespaces, probe

SOURCE = Path(namespaces.__file__)
ROOT = os.geteuid() == 0


def in_child(program: str, *arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run a program in which everything of the module is a global, in a process without threads."""
    text = f"import sys\nsys.path.insert(0, {str(SOURCE.parents[1])!r})\nfrom linux import mounts, namespaces\n"
    text += "from linux.mounts import *\nfrom linux.namespaces import *\nfrom linux.probe import probe_process\n"
    text += "import os, json, errno\n" + textwrap.dedent(program)
    return subprocess.run([python, "-I", "-S", "-c", text, *arguments], capture_output=True, text=True, timeout=60)


def printed(program: str, *arguments: str) -> str:
    done = in_child(program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def allowed() -> bool:
    done = in_child("print(json.dumps(probe_process()))")
    probe = json.loads(done.stdout)
    return bool(probe["namespaces"] or probe["user_namespaces"])


needs_namespaces = pytest.mark.skipif(not allowed(), reason="this host allows no namespaces")
ENTER = """
unshare(user=os.geteuid() != 0, mount=True, pid=True, ipc=True, net=True, uts=True)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hermes-test-", dir="/tmp") as directory:
        path = Path(directory)
        path.chmod(0o755)
        (path / "new").mkdir()
        yield path


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("mount('x', '/no/such', 'tmpfs', 0)", "mount x on /no/such"),
        ("setns(os.getpid(), ['mnt', 'nonsense'])", "unknown namespace nonsense"),
        ("join([('mnt', os.open('/dev/null', 0))])", "setns mnt"),
        ("restrict('/no/such', MS_RDONLY)", "/no/such"),
        ("setns(2**22 + 1, ['mnt'])", "/proc/4194305/ns/mnt"),
    ],
)
def test_a_failure_names_its_call(call: str, text: str) -> None:
    program = f"""
    try:
        {call}
    except (OSError, ValueError) as error:
        print(str(error), getattr(error, "filename", None))
    """
    assert text in printed(program)


def test_a_refused_unshare_says_which() -> None:
    program = """
    if os.geteuid() == 0:
        become(12345, 12345)
    try:
        unshare(mount=True, net=True)
    except PermissionError as error:
        print(error)
    """
    assert "unshare net+mnt: Operation not permitted" in printed(program)


@needs_namespaces
def test_probing_tries_and_leaves_no_child() -> None:
    program = """
    found = probe_process()
    try:
        os.waitpid(-1, os.WNOHANG)
        found["child"] = True
    except ChildProcessError:
        pass
    print(json.dumps(found))
    """
    found = json.loads(printed(program))
    assert found.keys() == {"root", "namespaces", "user_namespaces", "network", "reason"}
    assert found["root"] is ROOT
    assert found["namespaces"] or found["user_namespaces"]


def test_probing_says_why_not() -> None:
    program = """
    import resource
    def refuse(**kinds):
        raise OSError(errno.EPERM, "unshare user+mnt: Operation not permitted")
    namespaces.unshare = refuse
    print(json.dumps(probe_process()))
    """
    found = json.loads(printed(program))
    assert not (found["namespaces"] or found["user_namespaces"] or found["network"])
    assert "unshare user+mnt: Operation not permitted" in found["reason"]


@needs_namespaces
@pytest.mark.root
@pytest.mark.parametrize("mounted", ["a directory", "a mount"])
def test_a_chroot_can_have_no_namespaces(mounted: str, place: Path) -> None:
    program = """
    from linux.probe import CHROOT, probe_host
    place, mounted = sys.argv[1:]
    unshare(mount=True)
    make_private()
    if mounted == "a mount":
        mount(place, place, None, 0x1000)
    os.mkdir(place + "/proc")
    mount("proc", place + "/proc", "proc", 0)
    print(probe_host()["reason"] == CHROOT)
    os.chroot(place)
    os.chdir("/")
    found = probe_host()
    print(found["reason"] == CHROOT, found["namespaces"] or found["user_namespaces"] or found["network"])
    """
    assert printed(program, str(place), mounted).splitlines() == ["False", "True False"]


@needs_namespaces
def test_a_user_namespace_has_one_user() -> None:
    program = """
    unshare(user=True, mount=True, inside_uid=1000, inside_gid=1001)
    print(os.geteuid(), os.getegid(), open("/proc/self/uid_map").read().split()[2], open("/proc/self/setgroups").read())
    """
    assert printed(program) == "1000 1001 1 deny"


@needs_namespaces
def test_a_process_can_be_joined_and_ones_own_namespaces_are_left_out() -> None:
    program = """
    ready, go = os.pipe(), os.pipe()
    inner = os.fork()
    if inner == 0:
        unshare(user=os.geteuid() != 0, mount=True, ipc=True, net=True, uts=True)
        os.close(go[1]); os.write(ready[1], b"x"); os.read(go[0], 1); os._exit(0)
    os.close(ready[1]); os.read(ready[0], 1)
    kinds = ["user", "mnt", "pid", "ipc", "net", "uts"]
    before = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in kinds}
    theirs = {kind: os.stat(f"/proc/{inner}/ns/{kind}").st_ino for kind in kinds}
    count = len(os.listdir("/proc/self/fd"))
    setns(inner, kinds)
    after = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in kinds}
    assert after == theirs and after["pid"] == before["pid"] and after["mnt"] != before["mnt"]
    assert len(os.listdir("/proc/self/fd")) == count
    setns(inner, kinds)
    print("joined")
    """
    assert printed(program) == "joined"


@needs_namespaces
def test_a_root_holds_what_was_named_parents_first(place: Path) -> None:
    for name in ("a/b", "c", "w"):
        (place / name).mkdir(parents=True)
    (place / "a" / "file").write_text("in a")
    (place / "c" / "file").write_text("in c")
    (place / "a" / "b" / "hidden").write_text("x")
    program = (
        ENTER
        + """
place = sys.argv[1]
build_root(place + "/new", symlinks=[("a", "/link"), ("nowhere", "/a")], masks=["/a/b"],
    binds=[(place + "/c/file", "/home/x/y/file", False), (place + "/c", "/a/b/c", False),
           (place + "/w", "/w", True), (place + "/a", "/a", False)],
    tmpfs=[("/tmp", 1 << 20, 0o1777), ("/home/x/deep", None, 0o700)])
print(sorted(os.listdir("/")), os.listdir("/a/b"), open("/a/b/c/file").read(), open("/home/x/y/file").read())
print(os.readlink("/link"), oct(os.stat("/tmp").st_mode), oct(os.stat("/home/x").st_mode), os.getcwd(), os.getpid())
for path in ("/x", "/a/x", "/a/b/x", "/a/b/c/x", "/home/x/y/file", "/home/x", "/proc/x"):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY)); print("wrote", path)
    except OSError as error:
        pass
open("/w/x", "w").write("w"); open("/tmp/x", "w"); open("/home/x/deep/x", "w")
flags = {line.split()[4]: line.split()[5] for line in open("/proc/self/mountinfo")}
assert all("nosuid" in f for f in flags.values()), flags
assert all("nodev" in f or p.startswith("/dev/") for p, f in flags.items()), flags
"""
    )
    lines = printed(program, str(place)).split("\n")
    assert lines == [
        "['a', 'dev', 'home', 'link', 'proc', 'tmp', 'w'] ['c'] in c in c",
        "a 0o41777 0o40755 / 1",
    ]
    assert (place / "w" / "x").read_text() == "w"
    assert [path.name for path in (place / "new").iterdir()] == []


@needs_namespaces
@pytest.mark.parametrize("way", ["restrict", "restrict_by_remount"])
def test_read_only_reaches_the_mounts_below(place: Path, way: str) -> None:
    (place / "with space" / "sub").mkdir(parents=True)
    program = (
        ENTER
        + """
place, way = sys.argv[1] + "/with space", sys.argv[2]
make_private()
mount("tmpfs", place + "/sub", "tmpfs", MS_NOEXEC)
os.mkdir(place + "/sub/deeper")
mount("tmpfs", place + "/sub/deeper", "tmpfs", 0)
mount(place, place, None, 0x5000)
getattr(mounts, way)(place, MS_RDONLY | MS_NOSUID)
for path in ("", "/sub", "/sub/deeper"):
    try:
        open(place + path + "/x", "w"); print("wrote", path)
    except OSError as error:
        print(errno.errorcode[error.errno], bool(os.statvfs(place + path).f_flag & os.ST_NOEXEC))
"""
    )
    assert printed(program, str(place), way).split("\n") == ["EROFS False", "EROFS True", "EROFS False"]


@needs_namespaces
def test_a_kernel_without_mount_setattr_will_do(place: Path) -> None:
    (place / "a").mkdir()
    program = (
        "mounts._SYS_MOUNT_SETATTR = 100000\n"
        + ENTER
        + """
build_root(sys.argv[1] + "/new", binds=[(sys.argv[1] + "/a", "/a", False), (sys.argv[1] + "/a", "/b", True)])
open("/b/x", "w")
open("/dev/null", "w").write("x")
try:
    open("/a/x", "w")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    )
    assert printed(program, str(place)) == "EROFS"


@needs_namespaces
def test_a_planted_link_does_not_move_a_mount(place: Path) -> None:
    (place / "w").mkdir()
    (place / "w" / "link").symlink_to("/etc")
    program = (
        ENTER
        + """
try:
    build_root(sys.argv[1] + "/new", binds=[(sys.argv[1] + "/w", "/w", True), ("/usr", "/w/link/x", False)])
except OSError as error:
    print(errno.errorcode[error.errno], error.filename)
"""
    )
    assert printed(program, str(place)) == "ELOOP /w/link/x"


@needs_namespaces
def test_a_file_can_be_replaced_while_it_is_mounted_over(place: Path) -> None:
    """As a system's list of users is when it gets another one."""
    (place / "copy").write_text("ours")
    (place / "users").touch()
    program = """
import signal, time
top, end = sys.argv[1], time.monotonic() + 1
if (system := os.fork()) == 0:
    while True:
        os.close(os.open(top + "/new/users", os.O_CREAT))
        os.rename(top + "/new/users", top + "/users")
try:
    unshare(user=os.geteuid() != 0, mount=True)
    make_private()
    while time.monotonic() < end:
        mounts._mount_all("", [(top + "/copy", top + "/users", False)], [], [])
        libc.umount2(os.fsencode(top + "/users"), 2)
finally:
    os.kill(system, signal.SIGKILL)
    os.waitpid(system, 0)
"""
    printed(program, str(place))


def test_what_is_bound_can_not_be_masked(place: Path) -> None:
    with pytest.raises(ValueError, match="both bound and masked: /usr"):
        mounts._mount_all("/nowhere", [("/usr", "/usr", False)], [], ["/usr"])


def test_the_systems_directories_come_with_their_links() -> None:
    binds, symlinks = mounts.system_binds()
    targets = [target for _, target, _ in binds]
    assert "/usr" in targets and "/etc" in targets and len(set(targets)) == len(targets)
    assert not any(writable for _, _, writable in binds)
    for text, path in symlinks:
        assert os.readlink(path) == text and path not in targets
    for path in mounts.SYSTEM_DIRECTORIES:
        assert not os.path.isdir(path) or path in targets or path in [link for _, link in symlinks]


def extra_targets(extra: list[str], masks: list[str] | None = None) -> list[str]:
    plain = {target for _, target, _ in mounts.system_binds()[0]}
    return [target for _, target, _ in mounts.system_binds(extra, masks or [])[0] if target not in plain]


def test_extra_paths_are_bound_once_and_not_inside_one_another(place: Path) -> None:
    for name in ("a/b/c", "a2", "real"):
        (place / name).mkdir(parents=True)
    (place / "link").symlink_to("real")
    top = str(place)
    wanted = [
        f"{top}/a/b",
        f"{top}/a",
        f"{top}/a/",
        f"{top}/a2",
        f"{top}/missing",
        "/usr/bin",
        "/bin/sh",
        "/etc/passwd",
    ]
    assert extra_targets(wanted) == [f"{top}/a", f"{top}/a2"]
    assert extra_targets([f"{top}/link"]) == [f"{top}/link", f"{top}/real"]
    assert extra_targets(["/usr/bin"], ["/usr/share"]) == []
    assert extra_targets(["/usr/bin"], ["/usr/bin"]) == ["/usr/bin"]
    assert extra_targets([f"{top}/a", f"{top}/a/b/c"], [f"{top}/a/b"]) == [f"{top}/a", f"{top}/a/b/c"]
    with pytest.raises(ValueError, match="as a whole"):
        mounts.system_binds(["/usr/.."])


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="needs root")
def test_becoming_someone_leaves_nothing_behind() -> None:
    program = """
    import ctypes
    os.setgroups([4, 5])
    death_signal(15)
    become(12345, 12346)
    pdeath = ctypes.c_int()
    libc.prctl(2, ctypes.byref(pdeath))
    status = open("/proc/self/status").read()
    fields = dict(line.split(":\\t") for line in status.splitlines() if ":\\t" in line)
    print(os.getresuid(), os.getresgid(), os.getgroups(), pdeath.value, fields["NoNewPrivs"])
    print({fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")})
    try:
        os.setuid(0)
    except PermissionError:
        print("for good")
    """
    assert printed(program).split("\n") == [
        "(12345, 12345, 12345) (12346, 12346, 12346) [] 15 1",
        "{'0000000000000000'}",
        "for good",
    ]


@needs_namespaces
def test_sysv_objects_are_off_only_where_asked() -> None:
    program = (
        ENTER
        + """
make_private()
mount("proc", "/proc", "proc", 0)
print(libc.shmget(0, 4096, 0o1600) >= 0, no_sysv_ipc(), libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600))
"""
    )
    assert printed(program) == "True True -1 -1"


@pytest.mark.parametrize("path, tops, below", [
    ("/a/b", ["/a"], True), ("/a", ["/a"], True), ("/ab", ["/a"], False), ("/a", ["/"], True), ("/a", [], False),
])  # fmt: skip
def test_below_is_by_whole_names(path: str, tops: list[str], below: bool) -> None:
    assert mounts.is_below(path, tops) is below


def test_errors_of_a_child_are_told() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the disk is on fire")

    def crash() -> None:
        os._exit(3)

    check: Callable[[Callable[[], None]], str] = probe.in_child
    assert check(lambda: None) == ""
    assert check(fail) == "the disk is on fire"
    assert "wait status" in check(crash)
