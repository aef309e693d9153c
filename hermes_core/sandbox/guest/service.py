"""The guest's own process: cut off from the bridge that has started it, it runs the daemon until its end."""

from __future__ import annotations

import gc
import os
import signal

from . import confine
from .daemon import Daemon
from .loop import Loop
from .parent import close_all_but

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    import socket
    from typing import NoReturn


def serve(listener: socket.socket, state_dir: str) -> NoReturn:
    """Serve until the sandbox is to end; never returns."""
    log = os.open(os.path.join(state_dir, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    close_all_but({0, 1, 2, listener.fileno()})
    listener.setblocking(False)
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    confine.become_subreaper()
    loop = Loop()
    Daemon(loop, listener, state_dir)
    gc.collect()
    gc.freeze()  # what is here now stays: collections need not look at it, nor forked parents copy it
    loop.run()
    os._exit(0)
