"""Ways in which an agent can break the slot that its work is taken from: one line each, tried in every kind of slot.

None of them may end a rollout without a reward: see "What an agent can cause" in the threat model. A way is bounded:
none fills a disk of the host, and none starts more than a hundred processes.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend

_PYTHON = "python3 -I -S -c"


class Way(NamedTuple):
    """What an agent does in its slot.

    Attributes:
        shell: run by the tool `terminal`; how it ends is its own affair.
        root: it only makes sense where the agent is root of its slot.
    """

    shell: str
    root: bool = True


_DIRECTORIES = "/ /data /data/* /tmp /var /var/tmp /etc /root /home /dev /dev/shm /usr /usr/bin /bin /lib /run /opt"

WAYS: Mapping[str, Way] = {
    # --- its root is locked ---
    "locks its root": Way("chmod 000 /"),
    "locks every directory": Way(f"chmod 000 {_DIRECTORIES} 2>&1"),
    "locks the way to its workspace": Way('d=$PWD; while [ "$d" != / ]; do d=$(dirname "$d"); chmod 000 "$d"; done'),
    "gives its root away": Way("chown 1234:1234 / /data /etc /tmp; chmod 700 /"),
    "lets nobody change its root": Way("chattr -R +i / 2>&1 | tail -1; chattr +i / /data /etc . 2>&1"),
    # --- something else is in the place of a directory ---
    **{
        f"puts {what} in the place of {place}": Way(
            f"cd /; rm -rf {place} 2>/dev/null; mv {place} /gone; {make} {place}"
        )
        for place, (what, make) in itertools.chain(
            itertools.product(
                ("/data", "/dev", "/proc"),
                (("a link", "ln -s /nowhere"), ("a file", "touch"), ("a pipe", "mkfifo")),
            ),
            ((place, ("a circle", f"ln -s {place}")) for place in ("/data", "/tmp", "/var", "/etc", "/proc", "/root")),
        )
    },
    "has a link to its root everywhere": Way(
        "cd /; for d in data tmp var root home srv; do rm -rf $d; ln -s / $d; done"
    ),
    "moves everything away": Way("cd /; mkdir gone; mv data tmp var etc root home opt srv gone 2>&1"),
    "removes everything": Way("rm -rf --no-preserve-root / 2>/dev/null"),
    "removes its programs": Way("rm -rf /usr/bin/git /usr/bin/env /bin/sh /bin/bash /usr/lib/git-core"),
    "removes its libraries": Way("rm -rf /lib/*/libc.so.6 /usr/lib/*/libc.so.6 /lib64/ld-*"),
    "removes its users": Way("rm -f /etc/passwd /etc/group; mkdir /etc/passwd"),
    # --- what its programs do ---
    "has a shell that fails": Way(
        "for s in /bin/sh /bin/bash; do rm -f $s; printf '#!/nothing' >$s; chmod 755 $s; done"
    ),
    "has a shell that stops": Way(
        "cp /bin/sleep /tmp/s; for s in sh bash dash; do rm -f /bin/$s; cp /tmp/s /bin/$s; done; kill -STOP $$"
    ),
    "has a git that fails": Way("g=$(command -v git); rm -f $g; printf '#!/bin/sh\\nexit 128' >$g; chmod 755 $g"),
    "has a git that floods": Way(
        "g=$(command -v git); rm -f $g; printf '#!/bin/sh\\nyes | head -c 9000000' >$g; chmod 755 $g"
    ),
    "preloads what is none": Way("echo /etc/hostname >/etc/ld.so.preload"),
    "has settings of git that fail": Way("printf '[' | tee /etc/gitconfig ~/.gitconfig .git/config >/dev/null", False),
    # --- its processes ---
    "kills all that it can": Way("kill -9 $PPID; kill -9 1; kill -9 -1", False),
    "stops the parents of its commands": Way("kill -STOP 1; kill -STOP $PPID; sleep 0.1; kill -STOP $$", False),
    "fills its table of processes": Way("for i in $(seq 100); do sleep 1000 & done", False),
    "opens all that it may": Way(f"{_PYTHON} 'import os\nwhile 1: os.dup(0)'", False),
    "leaves what ignores signals": Way("trap '' TERM INT HUP; (while :; do sleep 1; done) & true", False),
    # --- its devices ---
    "locks its devices": Way(
        f"chmod 000 /dev/null /dev/zero /dev/urandom /dev/tty 2>&1; chmod 000 /dev/stdin; {_PYTHON} '"
        "import os\n"
        "for fd in range(10):\n"
        "    try: os.fchmod(fd, 0)\n"
        "    except OSError as error: print(error)\n'; rm -f /dev/null; mkdir /dev/null",
    ),
    # --- its workspace ---
    "locks its workspace": Way("chmod 000 . $HOME $TMPDIR", False),
    "removes its workspace": Way('d=$PWD; cd /; chmod -R 777 "$d"; rm -rf "$d" "$HOME" "$TMPDIR"', False),
    "puts a circle in the place of its work": Way("for f in * .git; do rm -rf $f; ln -s $f $f; done", False),
    "makes its work unreadable": Way("chmod -R 000 .; mkfifo pipe", False),
}
"""By what the agent does. Each leaves the task undone, so that its reward is 0."""


def skip_without(level: str) -> None:
    """Skip the test where local slots can't have this level."""
    if Isolation.parse(level) not in LocalBackend().capabilities.isolation:
        pytest.skip(f"this host grants no isolation {level}")


class Ways:
    """An agent that goes another of these ways in each of its rollouts.

    Args:
        unseen: a directory of the host's. Where it is to be seen, nothing is broken: that is no slot of its own.

    Attributes:
        went: the names of ways by the ids of rollouts.
    """

    name = "ways"

    def __init__(self, ways: Mapping[str, Way], unseen: Path) -> None:
        self._ways = ways
        self._guard = f"[ ! -e {shlex.quote(str(unseen))} ] || exit\n"
        self._left = iter(ways)
        self.went: dict[str, str] = {}

    async def run(self, task: AgentTask) -> AgentResult:
        name = self.went.setdefault(task.trajectory_id, "") or next(self._left)
        self.went[task.trajectory_id] = name
        for command in (self._guard + self._ways[name].shell, "true"):
            said = await task.tool_handler("terminal", {"command": command, "timeout": 10}, task.trajectory_id)
            task.result.messages.append({"role": "tool", "content": json.dumps(said)[:2000]})
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return
