"""A slot's parent that dies before it has said a word, one that does not see its own child yet, and one that is faster
than the process that made it."""

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
plan = SimpleNamespace(has_namespaces=sys.argv[1] == "namespace")
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


# What /proc hides for a moment: a child between its spawn and the end of its exec, which may not be dumped then.
HIDDEN = """\
import os, socket, sys
from hermes_core.sandbox.linux import descriptors, processes
from hermes_core.sandbox.guest.parent import Parent, encode_message, receive_message

look = processes._fields
hidden = set()
processes._fields = lambda name: [] if name in hidden else look(name)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    ours.close()
    parent = Parent(theirs, owns_all=False)
    tell = parent._tell
    def hide(message, fds=None):
        hidden.add(str(message.get("pid")))
        return tell(message, fds)
    parent._tell = hide
    parent.serve()
theirs.close()
null = os.open(os.devnull, os.O_RDWR)
command = {"id": "1", "cwd": "/", "argv": ["/bin/sleep", "1000"], "env": {"HERMES_COMMAND": "1"}}
descriptors.send(ours, encode_message(command), (null, null, null))
print(receive_message(ours)[0].keys())
descriptors.send(ours, encode_message({"end": "1", "grace": float(sys.argv[1])}))
ours.settimeout(10)
print(receive_message(ours)[0])
"""


@pytest.mark.parametrize(("grace", "status"), [(5, 15), (0, 9)])
def test_a_command_that_ends_before_proc_shows_it(grace, status):
    """Else it is never ended: it is taken for gone, and then its slot is emptied, with the neighbours in it."""
    done = subprocess.run([sys.executable, "-c", HIDDEN, str(grace)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[1:] == [str({"exit": "1", "status": status})], done.stderr


# The process that makes namespaces is slow to tell the number of their first process.
SLOW_MAKER = """\
import os, sys, time
from hermes_core.sandbox.guest import confine, link
from hermes_core.sandbox.guest.loop import Loop
from hermes_core.sandbox.guest.workspace import Workspace

tell = confine._tell
def tell_late(sock, message):
    time.sleep(0.3)
    tell(sock, message)
confine._tell = tell_late
base = sys.argv[1]
os.mkdir(base + "/root")
os.makedirs(base + "/.slots/spares")
os.makedirs(base + "/prepared/shared")
plan = confine.Plan(
    workspace=Workspace(base, 0, None), mechanism="namespace", uid=None, counted_as=None, layers=None, lists=None,
    user_namespace=os.geteuid() != 0, net_namespace=True, max_processes=0, process_memory=0,
    max_files=1024, visible=[], scratch=base + "/root", wipe=False, swept=[],
)
loop = Loop()
def hear(message, fds):
    print(message, born.pid not in (None, maker))
    loop.stop()
born = link.Link(loop, plan, hear, loop.stop)
maker = born.pid
loop.run()
"""


@pytest.mark.usefixtures("isolates")
def test_a_parent_is_known_by_its_number_before_it_is_heard_of(tmp_path):
    """Else the pipes of its first command are sought with the process that made it: the output was lost."""
    tmp_path.chmod(0o755)
    arguments = [sys.executable, "-c", SLOW_MAKER, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'ready': True} True\n", done.stderr
