"""Whole rollouts of hostile agents: none gains a reward, none gets rid of its 0, and honest neighbours keep their 1.0.

`test_cheats.py` has what a model would try; this is what an attacker would: odd names and trees, what dies or floods
while the work is taken, tests that fight the process that runs them, arguments of tools that cost the driver.
"""

# ruff: noqa: E501
# (commands stand as an attacker would type them)

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import hermes_docker
import hermes_swe_smith
import pytest
from hermes_swe_smith import demo_tasks

from hermes_core.agents.base import AgentResult, StopReason
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime

PROJECT = Path(demo_tasks.__file__).parent / "project"
TASK = "func_pm_remove_cond__k3x81qzd"
FIX = "sed -i 's/^    return value$/    return -value if negative else value/' ledgerline/amounts.py"


def python(source):
    return f"python3 -c {shlex.quote(source)}"


def in_tests(source):
    """The code that is tested runs this, in pytest's process, when it is imported."""
    return (
        f"printf %s {shlex.quote(source)} > ledgerline/evil.py; sed -i '1i from . import evil' ledgerline/__init__.py"
    )


SEND = """
import os, json
def send(data):
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"): os.write(fd, data)
        except OSError: pass
"""

# While the agent works: its own processes and directories.
PROCESSES = {
    "kills all it can": "(sleep 1; kill -9 -1) & kill -TERM -1; kill -9 -1",
    "stops all it can": "kill -STOP -1",
    "stops and continues in a loop": "(setsid sh -c 'while :; do kill -STOP -1; kill -CONT -1; done' >/dev/null 2>&1 &)",
    "fork bomb": "(setsid sh -c 'f() { f | f & }; f' >/dev/null 2>&1 &); sleep 1",
    "a thousand sleepers": "for i in $(seq 1000); do (setsid sleep 1000 >/dev/null 2>&1 &); done",
    "ignores every signal": python(
        "import os, signal, time\n"
        "for n in range(1, 65):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "if os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(1000)\n"
    ),
    "holds its output open": "sleep 1000 & sleep 1000 &",
    "floods its output": "yes '\033]0;x\007\033[2J' | head -c 300000000",
    "binary output": "head -c 3000000 /dev/urandom",
    "limits of its own": "ulimit -f 0; ulimit -n 3; ulimit -u 1; exec sleep 0",
    "no descriptors left": python(
        "import os\ntry:\n    while True: os.pipe()\nexcept OSError: pass\nos.fork() or os.setsid()"
    ),
    "vforks and waits": python("import os, subprocess\nfor _ in range(300): subprocess.Popen(['sleep', '1000'])"),
    "many threads": python(
        "import threading, time, os\nif os.fork(): os._exit(0)\nos.setsid()\n"
        "try:\n    for _ in range(100000): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "except RuntimeError: time.sleep(1000)\n"
    ),
    "namespaces in namespaces": "for i in $(seq 40); do unshare -U true; done; unshare -Urmpf --mount-proc sleep 1000 & sleep 0.5",
    "mounts over its checkout": "unshare -Urm sh -c 'mount -t tmpfs x . ; sleep 1000' & sleep 0.5",
    "a stopped shell": "kill -STOP $$",
    "locks and leases": python(
        "import fcntl, os\nif os.fork(): os._exit(0)\nos.setsid()\nimport glob, time\n"
        "for path in glob.glob('ledgerline/*') + glob.glob('../.venv/lib/python3*/site-packages/*/*.py')[:2000]:\n"
        "    try:\n        f = os.open(path, os.O_RDONLY); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except OSError: pass\ntime.sleep(1000)\n"
    ),
    "inotify and timers": python(
        "import ctypes, os, time\nif os.fork(): os._exit(0)\nos.setsid(); c = ctypes.CDLL(None)\n"
        "while c.inotify_init() >= 0: pass\n"
        "while c.timerfd_create(1, 0) >= 0: pass\n"
        "while c.epoll_create(1) >= 0: pass\ntime.sleep(1000)\n"
    ),
    "abstract sockets by the thousand": python(
        "import socket, os, time\nif os.fork(): os._exit(0)\nos.setsid(); s = []\n"
        "try:\n    for n in range(100000):\n        x = socket.socket(socket.AF_UNIX); x.bind('\\0hermes-%d' % n); s.append(x)\n"
        "except OSError: pass\ntime.sleep(1000)\n"
    ),
    "keys": python(
        "import ctypes\nc = ctypes.CDLL(None)\n"
        "print([c.syscall(248, b'user', b'k%d' % n, b'x' * 100, 100, -4) for n in range(300)][-1])"
    ),
    "message queues": python(
        "import ctypes\nc = ctypes.CDLL(None)\n"
        "print([c.mq_open(b'/hermes%d' % n, 0o102, 0o666, None) for n in range(300)][-1], c.shmget(77, 1 << 20, 0o1666))"
    ),
    "cron and at": "mkdir -p ~/.config/systemd/user /var/spool/cron/crontabs; echo '* * * * * touch /tmp/owned' | crontab -; "
    "echo 'touch /tmp/owned' | at now; systemctl --user daemon-reload; systemd-run --user sleep 100; true",
}

# What the checkout, the home and the workspace are when the work is taken.
TREES = {
    "the workspace is gone": "cd / && rm -rf $HOME/* $OLDPWD/.. 2>/dev/null",
    "the workspace can't be entered": "chmod 000 .. . ~ $TMPDIR",
    "the workspace is elsewhere": "cd ../.. && W=$OLDPWD && mv $W/.. ./other 2>&1; true",
    "the checkout is a pipe": "cd .. && rm -rf ledgerline && mkfifo ledgerline",
    "the checkout is a socket": "cd .. && rm -rf ledgerline && "
    + python("import socket; socket.socket(socket.AF_UNIX).bind('ledgerline')"),
    "the checkout is a link to itself": "cd .. && rm -rf ledgerline && ln -s ledgerline ledgerline",
    "the checkout is /proc": "cd .. && rm -rf ledgerline && ln -s /proc ledgerline",
    "the checkout is /proc/self/root": "cd .. && rm -rf ledgerline && ln -s /proc/self/root/dev ledgerline",
    "the checkout is the environment": "cd .. && rm -rf ledgerline && ln -s .venv/lib/ ledgerline",
    "an exabyte": "truncate -s 8E big 2>/dev/null || truncate -s 7E big || truncate -s 15T big",
    "250 MB of nothing": "truncate -s 250M ledgerline/hole.bin",
    "a line of 100 MB": python("open('ledgerline/line.txt', 'w').write('x' * (100 << 20))"),
    "100 MB of lines": python("open('ledgerline/lines.txt', 'w').write('ab\\n' * (33 << 20))"),
    "20,000 files": python("import os\nos.mkdir('many')\nfor n in range(20000): open('many/%d' % n, 'w').close()"),
    "20,000 directories": python("import os\nfor n in range(20000): os.makedirs('many/%d' % n)"),
    "30,000 links with long targets": python(
        "import os\nos.mkdir('many')\nfor n in range(30000): os.symlink('x' * 4000, 'many/%d' % n)"
    ),
    "500 levels": python("import os\nfor n in range(500): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"),
    "5,000 levels": python("import os\nfor n in range(5000): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"),
    "4,000 hard links": "cp README.md big; " + python("import os\nfor n in range(4000): os.link('big', 'l%d' % n)"),
    "a .gitignore that is a pipe": "mkfifo .gitignore; mkfifo ledgerline/.gitattributes; mkfifo pytest.ini",
    "a .gitignore that is a link": "ln -s /proc/self/environ .gitignore; ln -s /dev/zero ledgerline/.gitignore",
    "a .gitignore that is a directory": "mkdir -p .gitignore/.gitignore; touch .gitignore/.gitignore/.gitignore",
    "a .gitignore of 20 MB": "yes '!a[b-c]*?/**/x' | head -c 20000000 > .gitignore; touch a b c",
    "a .gitignore of junk": "printf '[[[[\\n\\\\\\n!\\n**\\n\\0\\n[^\\n\\377\\n/\\n//\\n#\\n' > .gitignore; touch a b c",
    "3,000 .gitignore files": python(
        "import os\nfor n in range(3000):\n    os.makedirs('m/%d' % n); open('m/%d/.gitignore' % n, 'w').write('*.o\\n')\n"
        "    open('m/%d/f' % n, 'w').close()"
    ),
    "a file where a directory was": "rm -rf ledgerline tests; touch ledgerline tests",
    "directories where files were": "rm -f pyproject.toml ledgerline/amounts.py; "
    "mkdir -p pyproject.toml/a conftest.py/b ledgerline/amounts.py/c; touch pyproject.toml/a/x conftest.py/b/x ledgerline/amounts.py/c/x",
    "links to what should not be read": "ln -sf /proc/self/mem ledgerline/amounts.py; ln -s /dev/zero a; ln -s /etc/shadow b; ln -s / c",
    "its module is endless": "ln -sf /dev/zero ledgerline/amounts.py",
    "its module is a pipe in /proc": "ln -sf /proc/self/fd/0 ledgerline/amounts.py",
    "nothing can be read": "chmod -R 000 . ",
    "a repository in the repository": "git init -q sub; cd sub; git commit -q --allow-empty -m x; echo x > y; cd ..; git add sub; "
    "printf '[submodule \"s\"]\\npath=sub\\nurl=--upload-pack=touch${IFS}/tmp/owned\\n' > .gitmodules",
    "alternates and includes": "mkdir -p .git 2>/dev/null; d=$(git rev-parse --git-dir); echo /data/prepared/private > $d/objects/info/alternates; "
    "git config include.path /dev/zero; rm -f .git; ln -s / .git",
}

# Attributes and names that change nothing of honest work beside them.
ODD_NAMES = python(
    "import os\n"
    "for name in [b'-rf', b'--', b'*', b'a\\nb', b'a\\rb', b' ', b'\\t', b'a ', b'a.', b'\\\\', b'a\\\\b', b':(exclude)x', b':', b'!x', "
    "b'x' * 255, b'\\xff\\xfe', b'caf\\xc3\\xa9', b'cafe\\xcc\\x81', b'.git ', b'.git.', b'git~1', b'.git::$INDEX_ALLOCATION', "
    "b'.gi\\xe2\\x80\\x8ct', b'CON', b'aux.py', b'\"q\"', b'$(x)', b'`x`', b'a\\x01b', b'\\x1b[2J', b'\\x7f', b'%s%n', b'.hermes-1', "
    "b'pax_global_header', b'@LongLink', b'././@x', b'#x', b'{arch}', b'a\\tb', b'\\xe2\\x80\\xae', b'\\xed\\xa0\\x80']:\n"
    "    name = name.replace(b'/', b'_')\n"
    "    try: open(name, 'wb').close()\n"
    "    except OSError as error: print(name, error)\n"
)
HONEST = {
    "the fix": FIX,
    "the fix among odd names": f"{ODD_NAMES}; {FIX}",
    "the fix among attributes": f"{FIX}; printf '* binary export-ignore export-subst ident filter=x working-tree-encoding=UTF-16 "
    "eol=crlf text=auto\\n[attr]binary -text\\n*.py diff=x merge=x -diff\\n' | tee .gitattributes > ledgerline/.gitattributes",
    "the fix among modes": f"{FIX}; touch a b c; chmod 7777 a; chmod 4000 b; mkdir d e; chmod 2777 d; chmod 1777 e; "
    "setfattr -n user.x -v y a; setfacl -m u:0:rwx a; chattr +i c; true",
    "the fix under a strange index": f"{FIX}; git update-index --assume-unchanged ledgerline/amounts.py; "
    "git update-index --skip-worktree README.md; git replace HEAD HEAD; true",
    "the fix among pipes and sockets": f"{FIX}; mkfifo p q; ln -s p s; ln -s s t; ln -s u v; ln -s v u; "
    + python("import socket; socket.socket(socket.AF_UNIX).bind('sock')"),
    "the fix and a Latin-1 file": f"{FIX}; printf '# -*- coding: latin-1 -*-\\nx = \"\\351\"\\n' > ledgerline/latin.py; "
    "printf '\\377\\376a\\000' > utf16.txt; printf 'a\\r\\nb\\rc' > ends.txt",
    "the fix and case twins": f"{FIX}; mkdir Tests LEDGERLINE; touch Tests/Test_amounts.py LEDGERLINE/amounts.py PYPROJECT.TOML",
    "the fix and all processes stopped": f"{FIX}; kill -STOP -1",
    "the fix and all processes killed": f"{FIX}; kill -9 -1",
}

# Code under test, in the fresh slot.
TESTS = {
    "kills all it can while tested": in_tests("import os\nos.kill(-1, 9)"),
    "stops all it can while tested": in_tests("import os, signal\nos.kill(-1, signal.SIGSTOP)"),
    "stops the supervisor": in_tests("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"),
    "terminates the supervisor": in_tests("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nos._exit(0)"),
    "forks while tested": in_tests("import os\nwhile True:\n    try: os.fork()\n    except OSError: os._exit(0)"),
    "leaves children while tested": in_tests(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)"
    ),
    "floods while tested": in_tests("import sys\nfor _ in range(300): sys.__stdout__.write('x' * 1000000)"),
    "crashes": in_tests("import ctypes\nctypes.string_at(0)"),
    "recurses": in_tests("import sys\nsys.setrecursionlimit(10**8)\nf = lambda: f()\nf()"),
    "exits pytest": in_tests("import pytest\npytest.exit('done', returncode=0)"),
    "skips it all": in_tests("import pytest\npytest.skip('no', allow_module_level=True)"),
    "interrupts": in_tests("raise KeyboardInterrupt"),
    "generator exit": in_tests("raise GeneratorExit"),
    "an exception without a text": in_tests(
        "class E(BaseException):\n    def __str__(self): raise MemoryError\n    __repr__ = __str__\nraise E"
    ),
    "an exception with an endless text": in_tests("raise ValueError('x' * (300 << 20))"),
    "an alarm": in_tests("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)"),
    "limits itself": in_tests(
        "import resource\nfor n in range(16):\n    try: resource.setrlimit(n, (1, 1))\n    except Exception: pass"
    ),
    "removes everything while tested": in_tests(
        "import shutil, os\nshutil.rmtree(os.path.expanduser('~'), True); shutil.rmtree('.', True)"
    ),
    "closes its descriptors": in_tests("import os\nos.closerange(0, 65536)"),
    "sends an outcome that is none": in_tests(SEND + 'send(b\'{"index": 0, "outcome": ""}\\n\')'),
    "sends two outcomes in one": in_tests(SEND + 'send(b\'{"index": 0, "outcome": "pX"}\\n\')'),
    "sends a negative index": in_tests(SEND + 'send(b\'{"index": -1, "outcome": "p"}\\n\' * 99)'),
    "sends an endless index": in_tests(SEND + 'send(b\'{"index": 1e999, "outcome": "p"}\\n\')'),
    "sends a deep status": in_tests(SEND + "send(b'{\"status\": ' + b'[' * 940 + b']' * 940 + b'}\\n'); os._exit(0)"),
    "sends a deeper status": in_tests(
        SEND + "send(b'{\"status\": ' + b'[' * 99999 + b']' * 99999 + b'}\\n'); os._exit(0)"
    ),
    "sends a large status": in_tests(SEND + "send(b'{\"status\": \"' + b'x' * (40 << 20) + b'\"}\\n'); os._exit(0)"),
    "sends a status of digits": in_tests(SEND + "send(b'{\"status\": ' + b'9' * 4000 + b'}\\n'); os._exit(0)"),
    "sends a broken one": in_tests(
        SEND + 'send(b\'{"broken": "pytest", "status": null, "pytest": null}\\n\'); os._exit(0)'
    ),
    "sends half a surrogate": in_tests(
        SEND + 'send(b\'{"status": 0, "where": "\\\\ud800", "text": "\\\\udfff"}\\n\'); os._exit(0)'
    ),
    "sends without an end of line": in_tests(SEND + "send(b'x' * (60 << 20))"),
    "sends lists": in_tests(SEND + 'send(b\'[]\\n1\\nnull\\n"x"\\n{"text": [], "where": {}}\\n\')'),
    "goes on after the last word": in_tests(
        "import atexit, threading, time\natexit.register(time.sleep, 1000)\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()"
    ),
    "fills its disk while tested": in_tests(
        "import os, tempfile\ntry:\n    with open(os.path.join(tempfile.gettempdir(), 'x'), 'wb') as f:\n"
        "        for _ in range(500): f.write(b'x' * 1000000)\nexcept OSError: pass"
    ),
}

# Calls of the model's tools; each answer is for the model, whatever it is.
LONG = "a" * 300_000
TOOLS = {
    "a command of 300 KB": [("terminal", {"command": f"true {LONG}"})],
    "a command of 20 MB": [("terminal", {"command": "true " + "a" * (20 << 20)})],
    "a directory that is none": [("terminal", {"command": "true", "workdir": "/proc/self/fd/0"})],
    "a directory of 300 KB": [("terminal", {"command": "true", "workdir": LONG})],
    "odd time limits": [("terminal", {"command": "true", "timeout": t}) for t in (5e-324, 1.7e308, 1e20, float("inf"))],
    "odd intervals": [("terminal", {"command": "sleep 100", "background": True, "check_interval": 1.7e308})],
    "a path of 300 KB": [("read_file", {"path": LONG}), ("write_file", {"path": LONG, "content": ""})],
    "paths out of the slot": [
        ("read_file", {"path": path})
        for path in (
            "/proc/1/environ",
            "/proc/1/mem",
            "/proc/self/root/etc/shadow",
            "../../slot_1/x",
            "/dev/zero",
            "/dev/stdin",
            "/proc/self/fd/0",
            "/proc/kmsg",
            "/data/prepared/private",
            "/dev/tty",
            "/proc/self/pagemap",
        )
    ],
    "writes out of the slot": [
        ("write_file", {"path": path, "content": "x"})
        for path in (
            "/etc/x",
            "/proc/self/mem",
            "/dev/full",
            "/proc/1/oom_score_adj",
            "../../x",
            "/data/prepared/x",
            "/proc/sysrq-trigger",
            "/dev/shm/../mem",
            "/proc/self/attr/current",
            "ledgerline/",
            "..",
            "/",
        )
    ],
    "odd lines": [("read_file", {"path": "ledgerline/README.md", "offset": 10**18, "limit": 2000})],
    "a pattern that backtracks": [
        ("terminal", {"command": "printf 'a%.0s' $(seq 5000) > as; for i in $(seq 50); do cat as; echo; done > many"}),
        ("search_files", {"pattern": "(a+)+$b|(a|aa)+c", "path": "many"}),
        ("search_files", {"pattern": "(.*)(.*)(.*)(.*)(.*)(.*)\\1\\2\\3x"}),
    ],
    "a pattern of 300 KB": [
        ("search_files", {"pattern": LONG}),
        ("search_files", {"pattern": "*" * 3000, "target": "files"}),
    ],
    "a pattern that is an option": [
        ("search_files", {"pattern": "--pre=sh"}),
        ("search_files", {"pattern": "x", "path": "-exec"}),
        ("search_files", {"pattern": "-delete", "target": "files"}),
        ("search_files", {"pattern": "x", "file_glob": "-o -delete"}),
        ("search_files", {"pattern": "x", "file_glob": "{" + ",".join("abc" * 40) + "}" * 30}),
        ("search_files", {"pattern": "(", "path": "."}),
        ("search_files", {"pattern": "x", "path": "/proc"}),
    ],
    "lines with numbers of 5,000 digits": [
        (
            "terminal",
            {
                "command": "for m in n c; do printf 'x\\000%s:x\\n' $(printf '9%.0s' $(seq 5000)) > f$m; done; "
                "printf 'x\\n' > $(printf 'a\\n./b'); true"
            },
        ),
        ("search_files", {"pattern": "x"}),
        ("search_files", {"pattern": "x", "output_mode": "count"}),
    ],
    "20,000 names": [
        ("terminal", {"command": "mkdir m; cd m; seq 20000 | xargs touch"}),
        ("search_files", {"pattern": "{" + ",".join(f"**/*{n}*/**/*{n}?" for n in range(32)) + "}", "target": "files"}),
        ("read_file", {"path": "m/none"}),
    ],
    "a quotation of much the same": [
        ("terminal", {"command": python("open('same', 'w').write('a' * (3 << 20))")}),
        ("patch", {"path": "same", "old_string": "a" * (1 << 20) + "b", "new_string": ""}),
    ],
    "patches that are none": [
        ("patch", {"mode": "patch", "patch": patch})
        for patch in (
            "*** Begin Patch\n*** Update File: /proc/self/mem\n@@\n-a\n+b\n*** End Patch",
            "*** Begin Patch\n*** Add File: /etc/x\n+a\n*** End Patch",
            "*** Begin Patch\n*** Delete File: .\n*** End Patch",
            "*** Begin Patch\n*** Update File: a\n*** Move to: ../../x\n*** End Patch",
            "*** Begin Patch\n" + "*** Delete File: x\n" * 200 + "*** End Patch",
            "\0",
            "*** Begin Patch",
        )
    ],
    "syntax that nests": [
        ("write_file", {"path": "n.py", "content": "x = 1\n"}),
        ("patch", {"path": "n.py", "old_string": "1", "new_string": "(" * 20000 + "1" + ")" * 20000}),
    ],
    "processes that talk": [
        ("terminal", {"command": "yes", "background": True}),
        ("process", {"action": "list"}),
        ("process", {"action": "log", "session_id": "../../x", "limit": 10**9}),
        ("process", {"action": "kill", "session_id": "1"}),
        ("process", {"action": "write", "session_id": "x", "data": "x" * (1 << 20)}),
    ],
    "a terminal that floods": [("terminal", {"command": "timeout 3 cat /dev/urandom", "pty": True})],
    "arguments that nest": [
        ("terminal", {"command": json.loads("[" * 500 + "]" * 500)}),
        ("terminal", {"command": "true", "x" * 99999: 1}),
    ],
    "a tool that is none": [("no\ud800ne", {}), ("", {}), ("x" * 99999, {})],
}

# Of a project whose tests lie in `checks`, beside `src`: what is loaded in place of them, of pytest or of the library.
FORGE = """
import _pytest.runner as runner
real = runner.CallInfo.from_call.__func__
def from_call(cls, f, when, reraise=None):
    return cls(None, None, 0, 1, 1, when, _ispytest=True) if when == "call" else real(cls, f, when, reraise)
runner.CallInfo.from_call = classmethod(from_call)
"""
IN_PLACE = (
    FORGE
    + """
__file__ = {real!r} if {real!r}.startswith("/") else __import__("os").getcwd() + "/" + {real!r}
exec(compile(open(__file__).read(), __file__, "exec"))
"""
)


def in_place_of(path, where):
    return python(
        f"import os\nos.makedirs(os.path.dirname({where!r}) or '.', exist_ok=True)\n"
        f"open({where!r}, 'w').write({IN_PLACE.format(real=path)!r})"
    )


def forged_cache(path, seconds):
    """What pytest keeps of a test file that it has rewritten; believed when size and time are right."""
    tag = "__import__('importlib.util').util.MAGIC_NUMBER"
    name = f"{path.rpartition('/')[0] or '.'}/__pycache__/{path.rpartition('/')[2][:-3]}.cpython-%d%d-pytest-8.3.5.pyc"
    return python(
        "import marshal, os, struct, sys, time\n"
        f"path = {path!r}; name = {name!r} % sys.version_info[:2]\nos.makedirs(os.path.dirname(name), exist_ok=True)\n"
        f"code = compile({FORGE!r} + open(path).read(), path, 'exec')\n"
        f"head = {tag} + b'\\0' * 4 + struct.pack('<LL', int(time.time()) + {seconds}, os.path.getsize(path))\n"
        "open(name, 'wb').write(head + marshal.dumps(code)); open('.gitignore', 'w').write('!__pycache__\\n!*.pyc\\n')"
    )


SHADOWS = {
    "a package in place of a test module": in_place_of("checks/test_amounts.py", "checks/test_amounts/__init__.py"),
    "a package in place of conftest.py": in_place_of("conftest.py", "conftest/__init__.py"),
    "a library's module beside conftest.py": in_place_of("/dev/null", "colorsys.py"),
    "a library's module beside the tests": in_place_of("/dev/null", "checks/colorsys.py"),
    **{f"a forged cache of conftest.py, {n} s from now": forged_cache("conftest.py", n) for n in range(4)},
}

TABLES = {"processes": PROCESSES, "trees": TREES, "tests": TESTS, "tools": TOOLS}


def write_beside(folder):
    """The demo's dataset with its sources in `src`, its tests in `checks`, and a conftest.py at the top."""
    project = folder / "project"
    (project / "src").mkdir(parents=True)
    shutil.copytree(PROJECT / "ledgerline", project / "src/ledgerline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PROJECT / "tests", project / "checks", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "conftest.py").write_text("import colorsys\n")
    (project / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    git = ["git", "-C", str(project), "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "bundle", "create", "-q", str(folder / "x.bundle"), "main"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    entry = {
        "repo": demo_tasks.REPO,
        "bundle": "x.bundle",
        "base_commit": commit,
        "python": ">=3.9",
        "test_cmd": "pytest",
    }
    entry |= {"requirements": demo_tasks.REQUIREMENTS, "pythonpath": "src"}
    (folder / "repos.json").write_text(json.dumps([entry]))
    rows = (PROJECT.parent / "tasks.jsonl").read_text()
    (folder / "tasks.jsonl").write_text(rows.replace("/ledgerline/", "/src/ledgerline/").replace("tests/", "checks/"))
    return folder


class Attacker:
    """An agent that does what its item stands for by way of the model's tools."""

    name = "attacker"

    def __init__(self, table):
        self.table = table
        self.said = {}

    async def run(self, task):
        name = task.messages[-1]["content"].split("<issue>\n")[1].split("\n")[0]
        does = self.table[name.partition(" #")[0]]
        if isinstance(does, str):
            does = [("terminal", {"command": f"cd ledgerline\n{does}\n", "timeout": 10})]
        answers = self.said[name] = []
        for tool, arguments in does:
            answers.append((await task.tool_handler(tool, arguments, task.trajectory_id))[:2000])
        result = AgentResult(messages=[*task.messages, {"role": "assistant", "content": "done"}], turns_used=1)
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self):
        return


async def rolled_out(table, where, tmp_path, dataset, **env):
    """The record of each, and of an honest neighbour after every fourth, by name; and what each agent was told."""
    row = next(
        r
        for r in map(json.loads, (dataset / "tasks.jsonl").read_text().splitlines())
        if r["instance_id"].endswith(TASK)
    )
    names = []
    for number, name in enumerate(table):
        names += [name, f"the fix #{number}"] if number % 4 == 3 else [name]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({**row, "instance_id": name, "problem_statement": name}) for name in names))
    records, agent = {}, Attacker({"the fix": FIX, **table})
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith, hermes_docker]) as runtime:
        await run_rollouts(
            runtime,
            "swe-smith",
            agent,
            env={
                "dataset_name": str(path),
                "repo_base_url": str(dataset),
                "shuffle": False,
                "test_timeout_s": 20,
                **env,
            },
            on_record=lambda record: records.update({record["item_id"]: record}),
            concurrency=2,
            infra_retries=0,
            **where,
        )
    assert set(records) == set(names)
    neighbours = {name: records.pop(name) for name in names if name not in table}
    assert {name: r for name, r in neighbours.items() if r["reward"] != 1.0} == {}
    return records, agent.said


@pytest.fixture
def dataset(tmp_path):
    """The demo's dataset."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    demo_tasks.write(folder)
    return folder


@pytest.mark.stress
@pytest.mark.parametrize("kind", TABLES)
async def test_attackers_get_nothing(kind, where, tmp_path, dataset):
    records, said = await rolled_out(TABLES[kind], where, tmp_path, dataset)
    assert {name: (r["failure"], said.get(name)) for name, r in records.items() if r["reward"] != 0.0} == {}


@pytest.mark.stress
async def test_honest_work_among_odd_things_scores_in_full(where, tmp_path, dataset):
    records, said = await rolled_out(HONEST, where, tmp_path, dataset)
    wrong = {name: record for name, record in records.items() if record["reward"] != 1.0}
    assert {name: (r["failure"], r["details"], said.get(name)) for name, r in wrong.items()} == {}


@pytest.mark.stress
async def test_what_takes_the_place_of_tests_gets_nothing(tmp_path):
    dataset = write_beside(tmp_path)
    table = {**SHADOWS, "the fix": FIX.replace("ledgerline/", "src/ledgerline/")}
    where = {"backend": "local", "isolation": "user"}
    records, said = await rolled_out(table, where, tmp_path, dataset)
    rewards = {name: record["reward"] for name, record in records.items()}
    assert rewards == {**dict.fromkeys(SHADOWS, 0.0), "the fix": 1.0}, (said, records)
