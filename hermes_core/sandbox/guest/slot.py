"""A slot in the guest: its parent process, its commands, and how it is cleaned."""

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
"""How long a reset with `wipe` waits for the proof that a slot is clean, and for the death of its parent. The kernel
takes seconds to free the millions of objects that a slot may have made. The driver waits longer than this limit."""
_PATIENCE_S = 120.0
"""The same limit for a reset that keeps the files. A killed process that is still counted runs no more: it is only slow
to die, for example because it has thousands of sockets to close."""
_START_TIMEOUT_S = 30.0
_FIRST_RETRY_S, _LAST_RETRY_S, _RETRY_REFUSED_S = 0.004, 0.25, 0.1
"""The pause before the second try, the longest pause, and the pause after a refusal. We retry quickly at first, because
most processes die at once, and double the pause each time, because each try forks."""
_NO_PROCESS = -1
_HOST_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = 3
"""The slot is given up after so many parents that could not be confined."""
_USER_IN_NAMESPACE = 1000
"""The slot's user id inside its user namespace."""


class _Round:
    """One attempt to make the slot ready.

    Attributes:
        wipe: whether the slot's directories are emptied.
        forget: whether the slot's background processes are forgotten, because nobody will ask for them any more.
        replies: called at the end, with the error if it failed.
    """

    def __init__(self, wipe: bool, replies: list[Reply], forget: bool = False) -> None:
        self.wipe = wipe
        self.forget = forget
        self.replies = replies
        self.since = time.monotonic()
        self.refusals = 0
        self._pause_s = _FIRST_RETRY_S
        self.dirty = False
        """Whether the last try found a living process of an earlier lease."""

    @property
    def patience(self) -> float:
        """Return the seconds after which the slot is given up."""
        return _CLEAN_TIMEOUT_S if self.wipe else _PATIENCE_S

    def next_pause(self) -> float:
        """Return the seconds until the next try."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, _LAST_RETRY_S)
        return _RETRY_REFUSED_S if self.refusals else pause


class GuestSlot:
    """A slot: a workspace, and a parent process that starts all of its commands. Recycling replaces the parent.

    NEW → STARTING → READY. Recycling: READY → EMPTYING → STARTING. If the slot's own processes kill the parent: READY →
    STARTING. If the slot can't be made ready and proved clean: STARTING or EMPTYING → BROKEN, which is final.
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
        """The running commands and open forwards by the ids of their requests."""
        self.on_forget: Callable[[], object] | None = None
        """Called when the background processes are to be forgotten."""
        self._sweeps: dict[str, list[Callable[[int], object]]] = {}
        self._socket_answers: dict[int, Callable[[bool], object]] = {}
        """Functions by the inode of a socket. Each is called with whether a process of the slot has the socket open."""
        self._state = NEW
        self._was_used = False
        """Whether commands may have changed the workspace since it was empty."""
        self._link: Link | None = None
        self._waiting: list[Spawn] = []
        self._round = _Round(False, [])
        self._next: _Round | None = None
        self._closing = False
        self.error: Error = {}
        """Why the slot is quarantined."""

    @property
    def is_broken(self) -> bool:
        """Return whether the slot is quarantined."""
        return self._state == BROKEN

    @property
    def is_crowded(self) -> bool:
        """Return whether the disk is full of other slots' files."""
        slots = 1 if self.index == PREPARE else self.site.config["slots"]
        try:
            return self.workspace.is_crowded(slots, self.site.world_writable)
        except OSError:  # the slot made its own files unreadable
            return False

    @property
    def _inner_uid(self) -> int | None:
        """Return the user id of the slot's commands inside its namespaces; None if it is ours."""
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
        """Return whether the slot has a network namespace, with only a loopback.

        The preparation uses the sandbox's network, which an installer may need. Slots with their own root may share it.
        """
        shares = self.mechanism == "root" and self.site.config["share_network"]
        return self._has_namespaces and self.index != PREPARE and not shares

    def guard(self) -> peers.Guard:
        """Return the guard that recognises the connections of the slot's programs on the loopback.

        Raises:
            Refusal: the slot shares its loopback and its user with others.
        """
        if self._has_network:
            return peers.everybody
        if self.mechanism == "root":  # slots have the same user ids
            return peers.of_processes(self._ask_for_socket)
        if self.uid is not None:
            return peers.of_users(self.uid, self.uid)
        if self.site.is_dedicated:
            return peers.everybody if self.site.owns_system else peers.of_users(os.geteuid(), os.geteuid())
        message = "the slot shares its loopback with others, and nothing tells its connections from theirs"
        raise Refusal("command", "unguarded", message)

    def _own_lists(self) -> users.Lists | None:
        """Return the lists of users that only this slot sees; None if it sees the system's lists."""
        if self.mechanism != "namespace" or self.site.lists is None or self._inner_uid is None:
            return None
        return users.add(self.site.lists, [(self._inner_uid, users.NAME, self.workspace.home)])

    # --- getting the slot ready -------------------------------------------------------------------------------------

    def open(self, reply: Reply) -> None:
        """Make the slot ready for its first lease. Idempotent."""
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
        """Kill all processes of the slot, prove that none is left, empty its directories if `wipe`, and start a parent.

        With `forget`, its background processes are forgotten too.
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
        """Kill all processes of the slot, because the sandbox ends. Call it again until `dead`."""
        self._closing = True
        self._abandon(forget=True, error={"kind": "infra", "code": "ended", "message": "the sandbox has ended"})
        self._kill()

    @property
    def dead(self) -> bool:
        """Return whether the slot's parent is gone."""
        return self._link is None

    def _empty(self, round_: _Round) -> None:
        self._state = EMPTYING
        self._round = round_
        self._abandon(forget=round_.forget)
        self._kill()
        if self._link is None:
            self._start()
            return
        # `_parent_died` goes on from here.
        patience = _DEATH_TIMEOUT_S if round_.wipe else _PATIENCE_S
        self.site.loop.later(patience, lambda: self._give_up_on(round_, patience))

    def _give_up_on(self, round_: _Round, patience: float) -> None:
        if self._state == EMPTYING and self._round is round_:
            self._break("unclean", "its processes were not dead %d s after they had been killed" % patience)

    def _abandon(self, forget: bool, error: Error | None = None) -> None:
        """End all executions, as killed or with an error. With `forget`, forget the background processes."""
        for execution in list(self.executions.values()):
            execution.end_with_slot(error)
        self._waiting = []
        self._socket_answers.clear()
        self._report_sweeps(list(self._sweeps), 0)
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
        """Kill the descendants that we find. Without a user or namespace of its own, that proves nothing."""
        mark = self._mark("")

        def has_mark(pid: int, _process: processes.Process) -> bool:
            return (processes.mark_of(pid) or "").startswith(mark)

        leader = (self._link.pid if self._link is not None else None) or _NO_PROCESS
        for _ in range(50):  # a process may fork while we look
            targets = [pid for pid in processes.family(leader, 0, has_mark) if pid != leader]
            if not targets:
                return
            for pid in targets:
                processes.send_signal(pid, signal.SIGKILL)

    def _start(self) -> None:
        """Start a new parent. It proves that no process of the slot runs, and empties the directories if asked to."""
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
            link = self._link = Link(self.site.loop, self._plan(), self._on_message, self._parent_died)
        except OSError as error:
            self._retry("fork failed: %s" % error)
            return
        self.site.loop.later(_START_TIMEOUT_S, lambda: self._hurry(link))

    def _hurry(self, link: Link) -> None:
        """Kill a parent that takes too long to start. `_parent_died` tries again or gives up."""
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
            swept=[*site.world_writable, *removal.find_open(self._other_workspaces())],
        )

    def _other_workspaces(self) -> list[str]:
        return [workspace.path for index, workspace in self.site.workspaces.items() if index != self.index]

    def _retry(self, reason: str) -> None:
        """Try again after a pause, or give the slot up."""
        if time.monotonic() - self._round.since > self._round.patience:
            code = "unclean" if self._round.dirty else "unready"
            self._break(code, "the slot could not be made ready within %d s: %s" % (self._round.patience, reason))
            return
        if self.mechanism == "user" and self.uid is not None:
            self.site.kill_user(self.uid)
        self.site.loop.later(self._round.next_pause(), self._fork)

    def _became_ready(self) -> None:
        self._state = READY
        self._was_used = True
        if self._round.wipe:
            self.site.empty_trash()
        replies, self._round.replies = self._round.replies, []
        waiting, self._waiting = self._waiting, []
        for spawn in waiting:
            self._hand_over(spawn)
        for reply in replies:
            reply(None)
        if self._next is not None and self._state == READY:
            round_, self._next = self._next, None
            round_.since = time.monotonic()
            self._empty(round_)

    def _break(self, code: str, reason: str) -> None:
        """Quarantine the slot. The code `unclean`: a process of its last lease is alive, or its files keep the parent
        from starting. The code `unready`: the sandbox can't provide the resources that the slot needs."""
        self._state = BROKEN
        error = self.error = {"kind": "infra", "code": code, "message": reason}
        self._abandon(forget=True, error=error)
        self._kill()
        replies = self._round.replies + (self._next.replies if self._next is not None else [])
        self._round.replies, self._next = [], None
        for reply in replies:
            reply(error)

    # --- messages of the parent -------------------------------------------------------------------------------------

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        if "ready" in message:
            if self._state == STARTING:
                self._became_ready()
        elif "dirty" in message:
            self._round.dirty = True  # this parent exits, and then `_parent_died` tries again
        elif "refused" in message:
            self._round.refusals += 1
            self.site.empty_trash()  # discarded files may fill the disk
            if self._round.refusals >= _REFUSALS:
                self._break(self._error_code(message["errno"]), "it could not be confined: %s" % message["refused"])
        elif "socket" in message:
            self._on_socket_answer(message["socket"], message["held"])
        else:
            self._on_command_message(message, fds)

    def _error_code(self, number: int | None) -> str:
        """Return the code for a parent that failed with this errno: `unclean` if the slot's own files are the cause."""
        is_host_error = number in _HOST_ERRORS or (number in _FULL_DISK and self.is_crowded)
        return "unclean" if self._was_used and not self._round.wipe and not is_host_error else "unready"

    def _on_socket_answer(self, inode: int, held: bool) -> None:
        answer = self._socket_answers.pop(inode, None)
        if answer is not None:
            answer(held)

    def _on_command_message(self, message: dict[str, Any], fds: list[int]) -> None:
        identity = message.get("started") or message.get("exit") or message.get("failed") or ""
        if "swept" in message:
            self._report_sweeps([message["swept"]], message["count"])
        execution = self.executions.get(identity)
        pipes = self._take_pipes(execution, message)
        if execution is None:
            return
        if "started" in message:
            execution.record_start(message["pid"], pipes or fds)
        elif "exit" in message:
            execution.record_exit(message["status"])
        else:
            execution.fail({"kind": "command", "code": message["code"], "message": message["message"]})

    def _take_pipes(self, execution: Execution | ForwardListener | None, message: dict[str, Any]) -> list[int]:
        """Open our ends of a command's pipes, if the slot's parent has made them."""
        if not message.get("pipes") or self._link is None:
            return []
        fds: list[int] = []
        if execution is not None and not execution.ended:
            try:
                fds = self._link.take(message["pipes"])
            except ProcessLookupError:  # the parent is dead, and `_parent_died` will be called
                pass
            except OSError as error:
                self.stop(execution.id, 0.0)
                execution.fail(out_of_resources(error))
        self._link.send(encode_message({"taken": message["started"]}))
        return fds

    def _parent_died(self) -> None:
        link = self._link
        if link is None:
            return
        self._link = None
        self._socket_answers.clear()
        self._report_sweeps(list(self._sweeps), 0)
        self._waiting = link.drop() + self._waiting
        if self._closing or self._state == BROKEN:
            return
        if self._state == EMPTYING:
            self._start()
        elif self._state == STARTING:
            alive = "something of an earlier lease is not dead yet"
            self._retry(alive if self._round.dirty else "its parent process died")
        else:
            # The slot's own processes killed it. That is an error of the command, never one of the infrastructure.
            self._round = _Round(False, [])
            self._bury_commands()
            self._start()

    def _bury_commands(self) -> None:
        """End the commands of a dead parent, or watch those that live on: as we are subreaper, they are our children.

        If the slot has its own user, all are killed, because a new parent must be the only process of that user.
        """
        if self.mechanism == "user" and self.uid is not None:
            self.site.kill_user(self.uid)
        for execution in list(self.executions.values()):
            if execution.ended or not execution.handed_over:
                continue
            if execution.pid is None or self._has_namespaces:
                execution.end_with_slot()
            elif self._is_ours(execution.pid) or self.site.loop.was_reaped(execution.pid, execution.began):
                self.site.loop.watch(execution.pid, execution.record_exit, execution.began)
            else:
                execution.end_with_slot()

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
        """Return the arguments of `files._clear`: the slot's directories, and others that its user can write to."""
        workspace, own_tmp = self.workspace, self._has_namespaces
        homes = [] if self.mechanism == "root" else [workspace.home]  # root's home is part of its image
        return {
            "path": workspace.path,
            "others": [*homes, "/tmp" if own_tmp else workspace.tmp],
            "swept": [] if own_tmp else self.site.world_writable,
            "uid": self.uid if self.mechanism == "user" else None,
        }

    def _mark(self, identity: str) -> str:
        return "%s/%d/%s" % (self.site.instance, self.index, identity)

    def spawn(self, execution: Execution, message: dict[str, Any], wants_input: bool, script: bytes = b"") -> None:
        """Make the parent start a command. A `script` that is too long for an argument is passed by a descriptor."""
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
            execution.fail(out_of_resources(error))
            return
        if execution.fetches:
            message["pipes"] = [wants_input, len(execution.sinks)]
        self._hand_over(Spawn(execution, in_parts(encode_message(message)), fds))

    def listen(self, forward: ForwardListener, port: int) -> None:
        """Make the parent listen on a port of the slot's loopback. 0 is any free port."""
        self.executions[forward.id] = forward
        if self._state == NEW:
            self.open(lambda _error: None)
        self._hand_over(Spawn(forward, in_parts(encode_message({"id": forward.id, "listen": port})), []))

    def _ask_for_socket(self, inode: int, answer: Callable[[bool], object]) -> None:
        """Ask the parent, which sees only the slot's processes, whether one of them has this socket."""
        if self._link is None or self._state != READY:
            answer(False)
            return
        self._socket_answers[inode] = answer
        self._link.send(encode_message({"socket": inode}))

    def _hand_over(self, spawn: Spawn) -> None:
        if spawn.execution.ended:
            return
        if self._state == READY and self._link is not None:
            self._link.send(spawn)
        else:
            self._waiting.append(spawn)

    def stop(self, identity: str, grace: float) -> None:
        """Send TERM to a command and the processes that it started, and KILL after `grace` seconds."""
        if self._link is not None and self._state == READY:
            self._link.wake()
            self._link.send(encode_message({"end": identity, "grace": grace}))

    def sweep(self, identity: str, grace: float, answer: Callable[[int], object]) -> None:
        """Stop the processes that an ended command left running. Then call `answer` with their number."""
        if self._link is None or self._state != READY:
            answer(0)  # recycling kills them all
            return
        self._sweeps.setdefault(identity, []).append(answer)
        self._link.wake()
        self._link.send(encode_message({"end": identity, "grace": grace, "mark": self._mark(identity)}))

    def _report_sweeps(self, identities: list[str], count: int) -> None:
        for identity in identities:
            for answer in self._sweeps.pop(identity, []):
                answer(count)

    def last_resort(self, execution: Execution) -> None:
        """Empty the slot, because even KILL did not end a command. Maybe the slot has stopped its own parent."""
        if not execution.ended and execution.status is None:
            self.recycle(False, lambda _error: None)
