"""What each level promises between the slots of one sandbox: the table of the threat model, cell by cell."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).resolve().parents[2] / "docs" / "how-it-works" / "threat-model.md"

FILES, PROCESSES, TMP, NAMES, NETWORK, DRIVER = COLUMNS = (
    "files",
    "signals, ptrace, environ",
    "/tmp, /dev/shm",
    "process names, command lines",
    "localhost ports, abstract sockets",
    "the driver's files and processes",
)
YES, NO, AGAINST_WRITING = "yes", "no", "against writing only"
TABLE = {
    "shared": (NO, NO, NO, NO, NO, NO),
    "user": (YES, YES, AGAINST_WRITING, NO, NO, YES),
    "namespace": (YES, YES, YES, YES, YES, YES),
    "private-root": (YES, YES, YES, YES, YES, YES),
}
CELLS = [(level, column, cell) for level, cells in TABLE.items() for column, cell in zip(COLUMNS, cells, strict=True)]

VICTIM = """if 1:
    import json, os, signal, socket, sys, time
    mark = sys.argv[1]
    files = [mark, os.environ["HOME"] + "/" + mark, os.environ["TMPDIR"] + "/" + mark]
    open_to_all = ["/tmp/" + mark, "/dev/shm/" + mark]
    for path in files + open_to_all:
        with open(path, "w") as file:
            file.write("content of " + mark)
    port = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\\0" + mark)
    abstract.listen()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    facts = {"pid": os.getpid(), "port": port.getsockname()[1], "mark": mark, "workspace": os.getcwd(),
             "files": [os.path.abspath(path) for path in files], "open": open_to_all}
    with open("facts.new", "w") as file:
        json.dump(facts, file)
    os.rename("facts.new", "facts")
    time.sleep(600)
"""
"""Runs in slot `b`, with its mark in its command line and environment, and has something in every column."""

ATTACK = """if 1:
    import ctypes, json, os, signal, socket, sys
    facts, column, everyone = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3] == "everyone"
    mark, pid = facts["mark"], facts["pid"]
    got = []
    def attempt(what, call, *arguments):
        try:
            result = call(*arguments)
        except OSError:
            return
        if result is None or mark in str(result):
            got.append(what)
    def text(path):
        with open(path, errors="replace") as file:
            return file.read()
    def write(path):
        with open(path, "r+") as file:
            file.write("x")
    def plant(path):
        open(path, "x").close()
    def opens(path):
        open(path, "rb").close()
    def ptrace(pid):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(0x4206, pid, None, None) != 0:  # PTRACE_SEIZE, which does not stop it
            raise OSError(ctypes.get_errno(), "ptrace")
    def connect(family, address):
        with socket.socket(family) as client:
            client.connect(address)
    # Its pid may be another's here: whoever is shown is tried, but for ourselves and our parent.
    shown = {int(name) for name in os.listdir("/proc") if name.isdigit()} if everyone else set()
    others = sorted(({pid} | shown) - {os.getpid(), os.getppid()})
    if column == "files":
        for path in facts["files"]:
            attempt("read " + path, text, path)
            attempt("write " + path, write, path)
        for path in sorted({os.path.dirname(path) for path in facts["files"]}):
            attempt("list " + path, os.listdir, path)
            attempt("plant " + path + "/planted", plant, path + "/planted")
    elif column == "signals, ptrace, environ":
        for other in others:
            attempt("environ", text, "/proc/%d/environ" % other)
            attempt("root", os.listdir, "/proc/%d/root/" % other + facts["workspace"])
            attempt("directory", os.listdir, "/proc/%d/cwd/" % other)
            attempt("memory", opens, "/proc/%d/mem" % other)
            attempt("signal", os.kill, other, signal.SIGUSR1)
            if everyone:
                attempt("ptrace", ptrace, other)
    elif column == "/tmp, /dev/shm":
        for path in facts["open"]:
            attempt("list " + path, os.listdir, os.path.dirname(path))
            attempt("read " + path, text, path)
            attempt("write " + path, write, path)
            attempt("remove " + path, os.unlink, path)
    elif column == "process names, command lines":
        for other in others:
            attempt("command line", text, "/proc/%d/cmdline" % other)
    else:
        attempt("port", connect, socket.AF_INET, ("127.0.0.1", facts["port"]))
        attempt("abstract socket", connect, socket.AF_UNIX, "\\0" + mark)
    print(json.dumps(sorted(set(got))))
"""

READ_ALL = """if 1:
    import json, os, sys
    marks, paths = json.loads(sys.argv[1]), sys.argv[2:]
    got = []
    def look(path):
        try:
            with open(path, errors="replace") as file:
                data = file.read()
        except OSError:
            return
        got.extend([path, mark] for mark in marks if mark in data)
    for path in paths:
        look(path)
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        look("/proc/%s/environ" % pid)
        look("/proc/%s/cmdline" % pid)
    print(json.dumps(got))
"""


class Victim:
    """What runs in slot `b` of a driver, and what slot `a` gets of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.mark = "mark-" + uuid.uuid4().hex
        command = ["env", "MARK=" + self.mark, "python3", "-I", "-S", "-c", VICTIM, self.mark]
        driver.call("start", slot="b", command=command)
        self.facts = json.loads(driver.until("b", "cat facts"))

    def attack(self, column: str, *, everyone: bool = True) -> list[str]:
        """What the attack of a column gets, in words; `everyone`: of all processes that are shown, not of this one."""
        words = ["everyone" if everyone else "one"]
        got = self.driver.python("a", ATTACK, json.dumps(self.facts), column, *words)
        return [word for word in got if not word.startswith("plant") or self._is_there(word.removeprefix("plant "))]

    def _is_there(self, path: str) -> bool:
        """Whether what was planted is where it should be, or in a directory of the attacker's by the same name."""
        return bool(self.driver.run("b", ["test", "-e", path]).status == 0)

    def close(self) -> None:
        self.driver.run("b", ["rm", "-f", "facts", *self.facts["files"], *self.facts["open"]])
        self.driver.call("kill", slot="b")


@pytest.fixture(params=[(level, column) for level, column, cell in CELLS if cell == YES and column != DRIVER])
def kept_apart(request: pytest.FixtureRequest, drivers: Any) -> tuple[Any, str]:
    level, column = request.param
    return _granted(drivers, level), column


def _granted(drivers: Any, level: str) -> Any:
    if level == "private-root" and drivers.account.uid != 0:
        pytest.skip("only root's driver can give slots roots of their own")
    return drivers.shared(level)


@pytest.mark.few(4)
def test_what_the_table_says_is_kept_apart_is(kept_apart: tuple[Any, str]) -> None:
    driver, column = kept_apart
    victim = Victim(driver)
    try:
        assert victim.attack(column) == []
        assert driver.run("b", f"cat {victim.mark}").out == "content of " + victim.mark
    finally:
        victim.close()


@pytest.mark.parametrize("level", [level for level, cells in TABLE.items() if cells[COLUMNS.index(DRIVER)] == YES])
def test_what_is_the_drivers_is_not_there(drivers: Any, level: str) -> None:
    driver = _granted(drivers, level)
    account = drivers.account
    pid = driver.facts["pid"]
    marks = ["secret of", "key-in-the-drivers-environment", "only-the-driver-knows", str(account.folder)]
    paths = [*account.secrets, MODEL, f"{driver.facts['checkout']}/hermes_core/errors.py"]
    paths += [f"/proc/{pid}/{name}" for name in ("environ", "cmdline", "mem", "maps", "root/etc/passwd")]
    paths += driver.state_dir.glob("*/record.json")
    assert driver.python("a", READ_ALL, json.dumps([*marks, "root:", "sandbox_id", "HermesError"]), *paths) == []
    assert all(path.read_text().startswith("secret of") for path in account.secrets)


# --- what is open, as documented -----------------------------------------------------------------------------------


@pytest.mark.full
def test_at_shared_everything_is_open(ordinary: Any) -> None:
    with ordinary.started("shared", "a", "b") as driver:
        victim = Victim(driver)
        for column, expected in (
            (FILES, {"read", "write", "list", "plant"}),
            (PROCESSES, {"environ", "directory", "memory", "root", "signal"}),
            (NAMES, {"command"}),
            (NETWORK, {"port", "abstract"}),
            (TMP, {"list", "read", "write", "remove"}),
        ):
            assert {got.split(" ")[0] for got in victim.attack(column, everyone=False)} == expected
        secret = ordinary.account.secrets[0]
        assert driver.python("a", READ_ALL, '["secret of"]', secret) == [[str(secret), "secret of"]]
        victim.close()


def test_at_user_the_sandbox_has_one_tmp_and_one_network(root: Any) -> None:
    driver = root.shared("user")
    assert driver.granted == "user"
    victim = Victim(driver)
    try:
        assert set(victim.attack(TMP)) == {
            f"{what} {place}/{victim.mark}" for what in ("list", "read") for place in ("/tmp", "/dev/shm")
        }
        assert victim.attack(NETWORK) == ["abstract socket", "port"]
        assert victim.attack(NAMES) == []  # more than is promised: `local` hides them
        driver.run("b", f"chmod 666 /tmp/{victim.mark}")
        assert set(victim.attack(TMP)) >= {"read /tmp/" + victim.mark, "write /tmp/" + victim.mark}
    finally:
        victim.close()


def test_an_ordinary_user_is_given_more_than_asked_for(ordinary: Any) -> None:
    assert ordinary.shared("user").granted == "namespace"


def test_more_than_there_is_is_refused(ordinary: Any) -> None:
    with pytest.raises(Exception, match="can't grant isolation 'dedicated'") as refused:
        ordinary.shared("dedicated")
    assert refused.value.kind == "PolicyError"


# --- the document --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> str:
    return MODEL.read_text(encoding="utf-8")


def test_the_document_has_this_table(model: str) -> None:
    lines = [line.replace("`", "").strip("|").split("|") for line in model.split("\n") if line.startswith("|")]
    rows: dict[str, tuple[str, ...]] = {}
    for cells in lines:  # of several tables, the first
        rows.setdefault(cells[0].strip(), tuple(cell.strip() for cell in cells[1:]))
    assert rows[""] == COLUMNS
    assert {level: rows[level] for level in TABLE} == TABLE


@pytest.mark.parametrize(("level", "column"), [(level, column) for level, column, cell in CELLS if cell != YES])
def test_the_document_says_what_is_open(model: str, level: str, column: str) -> None:
    open_there = re.findall(rf"^- `{level}`, (.+?): ", model, re.MULTILINE)
    whole_level = all(cell == NO for cell in TABLE[level])
    assert (open_there == ["everything in the table"]) if whole_level else (column in open_there)
