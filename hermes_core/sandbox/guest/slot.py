"""A slot in the guest: its parent process, its commands, and getting it clean again."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from ..linux import processes, removal, users
from . import peers
from .confine import Plan
from .link import Link, Spawn, out_of_resources
from .parent import encode_message, in_parts
from .streams import Drains
from .wire import Refusal
from .workspace import PREPARE, Workspace

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .execution import Execution
    from .forward import ForwardListener
    from .site import Site

    Error = dict[str, str]
    Reply = Callable[[Error | None], object]

NEW, STARTING, READY, EMPTYING, BROKEN = "new", "starting", "ready", "emptying", "broken"
_CLEAN_TIMEOUT_S = _DEATH_TIMEOUT_S = 15.0
"""How long a reset waits for the proof that a slot is clean, and for the death of its parent. What a slot has made, the
kernel takes apart at its death: for seconds if there are millions of it. Ended before the driver's own patience is."""
_PATIENCE_S = 120.0
"""The same where what the slot holds is still wanted. Nothing of it runs any more: what has been sent a KILL and still
counts as a process is only slow to die, having thousands of sockets to close, say."""
_START_TIMEOUT_S = 30.0
_FIRST_RETRY_S, _LAST_RETRY_S, _RETRY_REFUSED_S = 0.004, 0.25, 0.1
"""The pause before the second try, twice as long before each further one, and the longest. What dies does so at once,
or slowly: each try takes a process."""
_NOBODY = -1
_OF_THE_HOST = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = 3
_USER_IN_NAMESPACE = 1000
"""The slot's user inside a user namespace of its own."""


class _Round:
    """One way to a ready slot: what is wanted, and who waits for it."""

    def __init__(self, wipe: bool, replies: list[Reply], forget: bool = False) -> None:
        self.wipe = wipe
        self.forget = forget
        self.replies = replies
        self.since = time.monotonic()
        self.refusals = 0
        self._pause_s = _FIRST_RETRY_S
        self.dirty = False
        """Whether the last try found something of an earlier lease alive."""

    @property
    def patience(self) -> float:
        """Return the seconds until the slot is given up."""
        return _CLEAN_TIMEOUT_S if self.wipe else _PATIENCE_S

    def next_pause(self) -> float:
        """Return the seconds until the next try."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, _LAST_RETRY_S)
        return _RETRY_REFUSED_S if self.refusals else pause


class GuestSlot:
    """One workspace. All of its commands run below one parent process, made anew at each recycling.

    NEW → STARTING → READY, and back by way of EMPTYING whenever it is recycled; READY → STARTING when its own processes
    have killed the parent; STARTING → BROKEN, for good, when no proof that the slot is clean can be had.
    """

    def __init__(self, site: Site, index: int) -> None:
        self.site = site
        self.index = index
        self.mechanism = site.mechanism_of(index)
        self.uid = site.owner_of(index)
        self.workspace = site.workspaces[index] = Workspace(site.base, index, self.uid)
        self._lists = self._own_lists()
        self._name = users.name_in(self._lists or site.lists, self._inner_uid)
        self.drains = Drains(site.loop)
        self.executions: dict[str, Execution | ForwardListener] = {}
        """What it does, by the requests' ids."""
        self.on_forget: Callable[[], object] | None = None
        """Called when nobody will ask for the background processes any more."""
        self._sweeps: dict[str, list[Callable[[int], object]]] = {}
        self._asked: dict[int, Callable[[bool], object]] = {}
        """Who wants to know whether a process of ours has the socket with that inode."""
        self._state = NEW
        self._lived_in = False
        """Whether commands may have changed it since it was empty."""
        self._link: Link | None = None
        self._waiting: list[Spawn] = []
        self._round = _Round(False, [])
        self._next: _Round | None = None
        self._closing = False
        self.error: Error = {}
        """Why it is quarantined."""

    @property
    def broken(self) -> bool:
        """Return whether it is quarantined."""
        return self._state == BROKEN

    @property
    def crowded(self) -> bool:
        """Return whether the disk is full of what others have put there."""
        slots = 1 if self.index == PREPARE else self.site.config["slots"]
        try:
            return self.workspace.crowded(slots, self.site.world_writable)
        except OSError:  # it hides what it has
            return False

    @property
    def _inner_uid(self) -> int | None:
        """Return the user id that its commands see; None if they run as the sandbox's own user."""
        if self.mechanism == "shared":
            return None
        if self.mechanism == "root":
            return 0
        return _USER_IN_NAMESPACE if self.site.single_user else self.uid

    @property
    def _has_namespaces(self) -> bool:
        return self.mechanism in ("namespace", "root")

    @property
    def _has_network(self) -> bool:
        """Return whether it has a network of its own, with nothing but loopback.

        The preparation may need the sandbox's (an installer), and slots with a root may be given that.
        """
        shares = self.mechanism == "root" and self.site.config["share_network"]
        return self._has_namespaces and self.index != PREPARE and not shares

    def guard(self) -> peers.Guard:
        """Return what tells the connections of its programs on the loopback from those of others.

        Raises:
            Refusal: nothing does.
        """
        if self._has_network:
            return peers.everybody
        if self.mechanism == "root":  # the slots have the same users
            return peers.of_processes(self._ask_for_socket)
        if self.uid is not None:
            return peers.of_users(self.uid, self.uid)
        if self.site.is_dedicated:
            return peers.everybody if self.site.owns_system else peers.of_users(os.geteuid(), os.geteuid())
        message = "the slot shares its loopback with others, and nothing tells its connections from theirs"
        raise Refusal("command", "unguarded", message)

    def _own_lists(self) -> users.Lists | None:
        """Return the lists of users that only this slot sees."""
        if self.mechanism != "namespace" or self.site.lists is None or self._inner_uid is None:
            return None
        return users.add(self.site.lists, [(self._inner_uid, users.NAME, self.workspace.home)])

    # --- getting it ready -------------------------------------------------------------------------------------------

    def open(self, reply: Reply) -> None:
        """Make the slot ready for its first lease; idempotent."""
        if self._state == READY:
            reply(None)
        elif self._state == BROKEN:
            reply(self.error)
        elif self._state == NEW:
            self._round = _Round(False, [reply])
            self._start()
        else:
            self._round.replies.append(reply)

    def recycle(self, wipe: bool, reply: Reply, forget: bool = False) -> None:
        """Kill everything in the slot, prove it, empty its directories if `wipe`, and have a new parent ready.

        With `forget`, nobody will ask for the background processes.
        """
        if self._state == NEW:
            reply(None)
        elif self._state == BROKEN:
            reply(self.error)
        elif self._state == READY:
            self._empty(_Round(wipe, [reply], forget))
        elif self._next is None:
            self._next = _Round(wipe, [reply], forget)
        else:
            self._next.wipe = self._next.wipe or wipe
            self._next.forget = self._next.forget or forget
            self._next.replies.append(reply)

    def close(self) -> None:
        """Kill everything for good; used when the sandbox ends. May be called again until `dead`."""
        self._closing = True
        self._abandon(forget=True, error={"kind": "infra", "code": "ended", "message": "the sandbox has ended"})
        self._kill()

    @property
    def dead(self) -> bool:
        """Return whether the slot's parent is gone."""
        return self._link is None

    def _empty(self, wanted: _Round) -> None:
        self._state = EMPTYING
        self._round = wanted
        self._abandon(forget=wanted.forget)
        self._kill()
        if self._link is None:
            self._start()
            return
        # Otherwise the parent's death, seen by the loop, goes on from here.
        patience = _DEATH_TIMEOUT_S if wanted.wipe else _PATIENCE_S
        self.site.loop.later(patience, lambda: self._give_up_on(wanted, patience))

    def _give_up_on(self, wanted: _Round, patience: float) -> None:
        if self._state == EMPTYING and self._round is wanted:
            self._break("unclean", "its processes were not dead %d s after they had been killed" % patience)

    def _abandon(self, forget: bool, error: Error | None = None) -> None:
        """End what runs here, as killed or with an error; `forget`: nobody will ask for the background processes."""
        for execution in list(self.executions.values()):
            execution.killed_with_slot(error)
        self._waiting = []
        self._asked.clear()
        self._swept(list(self._sweeps), 0)
        self.drains.close()
        if forget and self.on_forget is not None:
            self.on_forget()

    def _kill(self) -> None:
        mechanism = self.mechanism
        if mechanism == "user" and self.uid is not None:
            self.site.kill_user(self.uid)
        elif mechanism == "shared":
            self._kill_descendants()
        if self._link is not None:
            self._link.kill()

    def _kill_descendants(self) -> None:
        """Kill the descendants that can be found. Without an own user or namespace that is best effort, no proof."""
        mark = self._mark("")

        def ours(pid: int, _process: processes.Process) -> bool:
            return (processes.mark_of(pid) or "").startswith(mark)

        leader = (self._link.pid if self._link is not None else None) or _NOBODY
        for _ in range(50):
            targets = [pid for pid in processes.family(leader, 0, ours) if pid != leader]
            if not targets:
                return
            for pid in targets:
                processes.send_signal(pid, signal.SIGKILL)

    def _start(self) -> None:
        """Start a new parent, which proves that nothing of the slot runs, and empty the directories."""
        self._state = STARTING
        if self._round.wipe:
            self.site.when_searched(self._fork)
        else:
            self._fork()

    def _fork(self) -> None:
        if self._state != STARTING or self._link is not None or self._closing:
            return
        self._round.dirty = False
        try:
            link = self._link = Link(self.site.loop, self._plan(), self._heard, self._parent_died)
        except OSError as error:
            self._retry("fork failed: %s" % error)
            return
        self.site.loop.later(_START_TIMEOUT_S, lambda: self._hurry(link))

    def _hurry(self, link: Link) -> None:
        """Kill a parent that took too long to get ready. Its death leads to the next try, or ends the last."""
        if self._link is link and self._state == STARTING:
            link.kill()

    def _plan(self) -> Plan:
        site = self.site
        own_user = self.mechanism != "shared"
        return Plan(
            workspace=self.workspace,
            mechanism=self.mechanism,
            uid=self._inner_uid,
            counted_as=site.uid_of(self.index),
            layers=site.layers if self.mechanism == "root" else None,
            lists=self._lists,
            user_namespace=site.single_user,
            net_namespace=self._has_network,
            max_processes=site.config["max_processes"] if own_user else 0,
            process_memory=site.config["process_memory"] if self.index != PREPARE else 0,
            max_files=site.soft_files,
            visible=[*site.config["visible_paths"], sys.base_prefix],
            scratch=site.scratch,
            wipe=self._round.wipe,
            swept=[*site.world_writable, *removal.find_open(self._others())],
        )

    def _others(self) -> list[str]:
        """Return the other slots' workspaces."""
        return [workspace.path for index, workspace in self.site.workspaces.items() if index != self.index]

    def _retry(self, reason: str) -> None:
        """Try again in a moment, as it is not clean or started yet, until it must be given up."""
        if time.monotonic() - self._round.since > self._round.patience:
            code = "unclean" if self._round.dirty else "unready"
            self._break(code, "the slot could not be made ready within %d s: %s" % (self._round.patience, reason))
            return
        if self.mechanism == "user" and self.uid is not None:
            self.site.kill_user(self.uid)
        self.site.loop.later(self._round.next_pause(), self._fork)

    def _became_ready(self) -> None:
        self._state = READY
        self._lived_in = True
        if self._round.wipe:
            self.site.empty_trash()
        replies, self._round.replies = self._round.replies, []
        waiting, self._waiting = self._waiting, []
        for spawn in waiting:
            self._hand_over(spawn)
        for reply in replies:
            reply(None)
        if self._next is not None and self._state == READY:
            wanted, self._next = self._next, None
            wanted.since = time.monotonic()
            self._empty(wanted)

    def _break(self, code: str, reason: str) -> None:
        """Quarantine it. `unclean`: something of its last lease is alive, or keeps us from entering it. `unready`: it
        lacks what we provide."""
        self._state = BROKEN
        error = self.error = {"kind": "infra", "code": code, "message": reason}
        self._abandon(forget=True, error=error)
        self._kill()
        replies = self._round.replies + (self._next.replies if self._next is not None else [])
        self._round.replies, self._next = [], None
        for reply in replies:
            reply(error)

    # --- what the parent says ---------------------------------------------------------------------------------------

    def _heard(self, message: dict[str, Any], fds: list[int]) -> None:
        if "ready" in message:
            if self._state == STARTING:
                self._became_ready()
        elif "dirty" in message:
            self._round.dirty = True  # it leaves by itself, and its death leads to the next try
        elif "refused" in message:
            self._round.refusals += 1
            self.site.empty_trash()  # what was discarded may take the room that is wanting
            if self._round.refusals >= _REFUSALS:
                self._break(self._blamed(message["errno"]), "it could not be confined: %s" % message["refused"])
        elif "socket" in message:
            self._heard_of_socket(message["socket"], message["held"])
        else:
            self._heard_of_command(message, fds)

    def _blamed(self, number: int | None) -> str:
        """Return the code for a slot that can't be entered: what is in it is to blame, if the host is not."""
        of_host = number in _OF_THE_HOST or (number in _FULL_DISK and self.crowded)
        return "unclean" if self._lived_in and not self._round.wipe and not of_host else "unready"

    def _heard_of_socket(self, inode: int, held: bool) -> None:
        answer = self._asked.pop(inode, None)
        if answer is not None:
            answer(held)

    def _heard_of_command(self, message: dict[str, Any], fds: list[int]) -> None:
        identity = message.get("started") or message.get("exit") or message.get("failed") or ""
        if "swept" in message:
            self._swept([message["swept"]], message["count"])
        execution = self.executions.get(identity)
        pipes = self._take_pipes(execution, message)
        if execution is None:
            return
        if "started" in message:
            execution.started(message["pid"], pipes or fds)
        elif "exit" in message:
            execution.exited(message["status"])
        else:
            execution.failed({"kind": "command", "code": message["code"], "message": message["message"]})

    def _take_pipes(self, execution: Execution | ForwardListener | None, message: dict[str, Any]) -> list[int]:
        """Take our ends of a command's pipes, if its parent has made them."""
        if not message.get("pipes") or self._link is None:
            return []
        taken: list[int] = []
        if execution is not None and not execution.ended:
            try:
                taken = self._link.take(message["pipes"])
            except ProcessLookupError:  # the parent is dead; that will be heard of
                pass
            except OSError as error:
                self.stop(execution.id, 0.0)
                execution.failed(out_of_resources(error))
        self._link.send(encode_message({"taken": message["started"]}))
        return taken

    def _parent_died(self) -> None:
        link = self._link
        if link is None:
            return
        self._link = None
        self._asked.clear()
        self._swept(list(self._sweeps), 0)
        self._waiting = link.drop() + self._waiting
        if self._closing or self._state == BROKEN:
            return
        if self._state == EMPTYING:
            self._start()
        elif self._state == STARTING:
            alive = "something of an earlier lease is not dead yet"
            self._retry(alive if self._round.dirty else "its parent process died")
        else:
            # The slot's own processes killed it: their doing, a matter of the command, never of the infrastructure.
            self._round = _Round(False, [])
            self._bury_commands()
            self._start()

    def _bury_commands(self) -> None:
        """End or watch the commands of a dead parent. As we are subreaper, we learn of the end of those that live on.

        If the slot has its own user, they have to end before a new parent can be proved alone.
        """
        if self.mechanism == "user" and self.uid is not None:
            self.site.kill_user(self.uid)
        for execution in list(self.executions.values()):
            if execution.ended or not execution.handed_over:
                continue
            if execution.pid is None or self._has_namespaces:
                execution.killed_with_slot()
            elif self._is_ours(execution.pid) or self.site.loop.reaped(execution.pid, execution.began):
                self.site.loop.watch(execution.pid, execution.exited, execution.began)
            else:
                execution.killed_with_slot()

    @staticmethod
    def _is_ours(pid: int) -> bool:
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    # --- commands ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment of every command of the slot."""
        site = self.site
        inherit = site.config.get("inherit", [])
        home = "/root" if self.mechanism == "root" else self.workspace.home
        tmp = "/tmp" if self._has_namespaces else self.workspace.tmp
        return self.workspace.environment(self._name or users.NAME, site.shell, home, tmp, site.config["env"], inherit)

    def belongings(self) -> dict[str, Any]:
        """Return where the slot's files are, for `clear`: its directories, and other places its user can write to."""
        workspace, own_tmp = self.workspace, self._has_namespaces
        homes = [] if self.mechanism == "root" else [workspace.home]  # that of root is a part of its image
        return {
            "path": workspace.path,
            "others": [*homes, "/tmp" if own_tmp else workspace.tmp],
            "swept": [] if own_tmp else self.site.world_writable,
            "uid": self.uid if self.mechanism == "user" else None,
        }

    def _mark(self, identity: str) -> str:
        return "%s/%d/%s" % (self.site.instance, self.index, identity)

    def spawn(self, execution: Execution, message: dict[str, Any], wants_input: bool, script: bytes = b"") -> None:
        """Make the parent start a command. A long script is sent by descriptor, as an argument's size is limited."""
        if self._state == NEW:
            self.open(lambda _error: None)
        message["id"] = execution.id
        if execution.pty is not None:
            message["pty"] = execution.pty
        if "env" in message:
            message["env"][processes.MARK] = self._mark(execution.id)
        if script:
            message["script"] = script.decode("latin-1")
        try:
            fds = execution.descriptors(wants_input)
        except OSError as error:
            execution.failed(out_of_resources(error))
            return
        if execution.fetches:
            message["pipes"] = [wants_input, len(execution.sinks)]
        self._hand_over(Spawn(execution, in_parts(encode_message(message)), fds))

    def listen(self, forward: ForwardListener, port: int) -> None:
        """Make the parent listen on a port of the slot's loopback; 0 is any."""
        self.executions[forward.id] = forward
        if self._state == NEW:
            self.open(lambda _error: None)
        self._hand_over(Spawn(forward, in_parts(encode_message({"id": forward.id, "listen": port})), []))

    def _ask_for_socket(self, inode: int, answer: Callable[[bool], object]) -> None:
        """Ask the parent, who sees the slot's processes alone, whether one of them has this socket."""
        if self._link is None or self._state != READY:
            answer(False)
            return
        self._asked[inode] = answer
        self._link.send(encode_message({"socket": inode}))

    def _hand_over(self, spawn: Spawn) -> None:
        if spawn.execution.ended:
            return
        if self._state == READY and self._link is not None:
            self._link.send(spawn)
        else:
            self._waiting.append(spawn)

    def stop(self, identity: str, grace: float) -> None:
        """Send TERM to a command and what it started, KILL after the grace period."""
        if self._link is not None and self._state == READY:
            self._link.wake()
            self._link.send(encode_message({"end": identity, "grace": grace}))

    def sweep(self, identity: str, grace: float, done: Callable[[int], object]) -> None:
        """Stop likewise what an ended command left running, then call `done` with the number of those processes."""
        if self._link is None or self._state != READY:
            done(0)  # nothing of it can have lived through that
            return
        self._sweeps.setdefault(identity, []).append(done)
        self._link.wake()
        self._link.send(encode_message({"end": identity, "grace": grace, "mark": self._mark(identity)}))

    def _swept(self, identities: list[str], count: int) -> None:
        for identity in identities:
            for done in self._sweeps.pop(identity, []):
                done(count)

    def last_resort(self, execution: Execution) -> None:
        """Empty the slot, as even KILL brought no exit: the parent does not answer (the slot may have stopped it)."""
        if not execution.ended and execution.status is None:
            self.recycle(False, lambda _error: None)
