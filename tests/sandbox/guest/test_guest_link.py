"""A slot's parent that dies before it has said a word."""

import subprocess
import sys

import pytest

# The guest's loop takes the signals of the process that it is in: one of its own.
SCRIPT = """\
import os, sys, time
from types import SimpleNamespace
from hermes_core.sandbox.guest import link
from hermes_core.sandbox.guest.loop import Loop

link.parent_main = lambda sock, plan: os._exit(1)
loop, deaths = Loop(), []
plan = SimpleNamespace(mechanism=sys.argv[1])
born = link.Link(loop, plan, lambda message, fds: None, lambda: deaths.append(1))
os.waitid(os.P_PID, born.pid, os.WEXITED | os.WNOWAIT)
loop.reap()
assert deaths == [1], deaths
born.kill()
born.wake()
"""


@pytest.mark.parametrize("mechanism", ["user", "namespace"])
def test_a_parent_that_is_dead_and_reaped_is_not_signalled(mechanism):
    """Its number may be a stranger's by then; and where it is nobody's, the guest died of the error."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, mechanism], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
