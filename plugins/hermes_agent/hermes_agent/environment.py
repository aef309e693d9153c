"""An environment of hermes-agent whose commands run in a slot. hermes-agent's tools use it like its own
environments."""

from __future__ import annotations

import itertools
import logging
import os
import posixpath
import shlex
from collections import deque
from collections.abc import Callable
from typing import Any

from hermes_agent.running import SessionCommand
from hermes_agent.slots import SessionSlot, Slots
from hermes_agent.version import HERMES_AGENT
from hermes_core import HermesError, InfraError, StaleSlotError
from hermes_core.sandbox.linux.processes import MARK

with HERMES_AGENT.imports():
    from tools.environments.base import BaseEnvironment
    from tools.interrupt import is_interrupted

log = logging.getLogger(__name__)

# Prints where the session begins: in the requested directory if it is writable, or else in the slot's workspace.
_LOOK = 'cd -- {cwd} 2>/dev/null && [ -w . ] || cd -- {workspace}; printf "%s\\n" "$PWD" "${{TMPDIR:-/tmp}}"'

_LOOK_S = 30.0

# Saves a login shell's variables, functions and aliases for the session's commands, as hermes-agent's own script does,
# but without that script's eight processes. {own} is our variable by which the processes of a command are found.
_BEGIN = """\
umask 077; unset {own}
{{ export -p && compgen -A function >{scratch}
while IFS= read -r __hermes_name; do
[[ $__hermes_name == _[!_]* ]] || declare -f -- "$__hermes_name"
done <{scratch}
alias -p; echo 'shopt -s expand_aliases'; echo 'set +e'; echo 'set +u'; }} >{snapshot} || exit
builtin cd -- {cwd} 2>/dev/null
printf '\\n{mark}'; builtin pwd -P; printf '{mark}\\n'"""

# The wrapper of a command. It does what hermes-agent's own wrapper does, but without a subshell for `pwd`, and with
# `mv` only if a variable has changed.
_WRAPPER = """\
{source}
builtin cd -- {cwd} || exit 126
eval {command}
__hermes_ec=$?
umask 077; unset {own}
{keep}
printf '\\n{mark}'; builtin pwd -P; printf '{mark}\\n'
exit $__hermes_ec"""

_SOURCE = "source {snapshot} >/dev/null 2>&1 || true"

# Overwrites the scratch file up to a NUL instead of making it anew. A pipe would need a subshell, and four times the
# time.
_KEEP = """\
{{ {{ export -p && printf '\\0'; }} 1<>{scratch} &&
mapfile -d '' -n 1 __hermes_old <{snapshot} && mapfile -d '' -n 1 __hermes_new <{scratch} &&
[[ ${{__hermes_old[0]}} != "${{__hermes_new[0]}}" ]] &&
{{ printf %s "${{__hermes_new[0]}}" >{new}$BASHPID && mv -f {new}$BASHPID {snapshot} || rm -f {new}$BASHPID; }}
}} 2>/dev/null"""


class SlotEnvironment(BaseEnvironment):
    """The environment of a session, in a slot that it leases.

    Args:
        slots: the slots of the backend.
        session: the task id, which is the lease's name.
        image: an image to use instead of the configured one.
        cwd: the directory of the first command. If it is not writable in the slot, the workspace takes its place.
        timeout: the time limit of a command in seconds.
        lost: called once, when the slot is lost.

    Raises:
        HermesError: there is no slot.
    """

    def __init__(
        self, slots: Slots, session: str, *, image: str | None, cwd: str, timeout: int, lost: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._ended = True
        self._lost = lost
        self._requested_cwd = cwd
        self._error: HermesError | None = None
        self.lease: SessionSlot = slots.lease(session, image, is_interrupted)
        self._ended = False
        try:
            begin, self._temp = self._look(cwd)
            super().__init__(cwd=begin, timeout=timeout)
            self._scratch = f"{self._snapshot_path}.scratch"
            self._scratch_numbers = itertools.count()
            self._free: deque[str] = deque()
            """Scratch files that no command uses now. Commands of a session that run at the same time need one each."""
            self._begin = begin
            self._persistent = os.environ.get("TERMINAL_CONTAINER_PERSISTENT", "true").lower() in {"true", "1", "yes"}
            self.init_session()
        except BaseException:
            self.cleanup()
            raise

    def init_session(self) -> None:
        """Save a login shell's variables for the session's commands. If that fails, each command gets a login shell."""
        script = _BEGIN.format(cwd=self._quote_cwd_for_cd(self.cwd), **self._names())
        command = self._run_bash(script, login=True, timeout=self._snapshot_timeout)
        result = self._wait_for_process(command, timeout=self._snapshot_timeout)
        self._snapshot_ready = result["returncode"] == 0
        if self._snapshot_ready:
            self._update_cwd(result)
        else:
            log.warning("no login shell in session %s: %s", self.lease.slot.trajectory_id, result["output"].strip())

    def get_temp_dir(self) -> str:
        """Return the slot's own directory for temporary files."""
        return self._temp

    def execute(self, command: str, cwd: str = "", *, bounded_capture: bool = False, **options: Any) -> dict[str, Any]:
        """Run a command, and return its output and its exit status.

        Raises:
            HermesError: the slot is lost, and the command's outcome is not known. A foreground command of the model
                (`bounded_capture`) gets the error as its output instead, because hermes-agent repeats commands that
                raise.
        """
        if self._error is None:
            where = self._begin if cwd == self._requested_cwd else cwd
            result: dict[str, Any] = super().execute(command, where, bounded_capture=bounded_capture, **options)
        if self._error is None:
            return result
        if not bounded_capture:
            raise self._error
        return {"output": f"[The sandbox failed: {self._error}]", "returncode": -1}

    def cleanup(self, *, force_remove: bool = False) -> None:
        """End the lease: kill the slot's processes, and remove its files. Idempotent."""
        if not self._ended:
            self._ended = True
            self._slots.release(self.lease)

    def _run_bash(
        self, cmd_string: str, *, login: bool = False, timeout: int = 120, stdin_data: str | None = None
    ) -> SessionCommand:
        scratch = self._free.popleft() if self._free else f"{self._scratch}{next(self._scratch_numbers)}"
        argv = ["bash", *(["-l"] if login else []), "-c", cmd_string.replace(self._scratch, scratch)]
        return SessionCommand(self._slots, self.lease, argv, stdin_data, done=lambda: self._free.append(scratch))

    def _wrap_command(self, command: str, cwd: str) -> str:
        names = self._names()
        return _WRAPPER.format(
            source=_SOURCE.format(**names) if self._snapshot_ready else "",
            cwd=self._quote_cwd_for_cd(cwd),
            command=shlex.quote(command),
            keep=_KEEP.format(**names) if self._snapshot_ready else "",
            **names,
        )

    def _names(self) -> dict[str, str]:
        paths = {"snapshot": self._snapshot_path, "scratch": self._scratch, "new": f"{self._snapshot_path}.tmp."}
        quoted = {name: shlex.quote(path) for name, path in paths.items()}
        return {**quoted, "own": MARK, "mark": self._cwd_marker}

    def _wait_for_process(self, proc: SessionCommand, timeout: int = 120, **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = super()._wait_for_process(proc, timeout=timeout, **options)
        if proc.error is not None:
            self._note(proc.error)
        return result

    def _note(self, error: HermesError) -> None:
        """Log a command's error. If the slot is lost, give it up, so that the session's next command gets another
        slot."""
        log.warning("a command of session %s failed: %s", self.lease.slot.trajectory_id, error)
        if isinstance(error, (InfraError, StaleSlotError)) and self._error is None:
            self._error = error
            self._lost()

    def _look(self, cwd: str) -> tuple[str, str]:
        """Return the directory in which the session begins, and the slot's directory for temporary files."""
        preferred = posixpath.join("/", cwd) if cwd else self.lease.slot.workspace_dir
        command = _LOOK.format(cwd=shlex.quote(preferred), workspace=shlex.quote(self.lease.slot.workspace_dir))
        work = self.lease.commands.run(["sh", "-c", command], timeout_s=_LOOK_S)
        lines = self._slots.start(work).outcome.result().text.splitlines()
        return (lines[-2], lines[-1]) if len(lines) >= 2 else (self.lease.slot.workspace_dir, "/tmp")
