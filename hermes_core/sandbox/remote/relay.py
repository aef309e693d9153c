"""Channels to sandboxes that a `keeper` keeps: how it is started, and the relay that leads to it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.process import AsyncioStreamChannel
from hermes_core.sandbox.remote.program import command_line, message, pack_request

KEEPER = "hermes_core.sandbox.remote.keeper"
"""The module whose `main` carries out the requests of relays."""

_END = "\0hermes-end "

_RELAY = """
import array, os, socket, sys, time
place, usual, name = map(os.path.expandvars, sys.argv[1:4])
place = os.path.abspath(os.path.expanduser(place)) if place else "%s-%d" % (usual, os.geteuid())
deadline = time.monotonic() + float(sys.argv[4])
null, words = os.open(os.devnull, os.O_RDWR), os.dup(2)
keeper = socket.socket(socket.AF_UNIX)
while True:
    try:
        os.chdir(place)
        if os.stat(".").st_uid != os.geteuid(): sys.exit(place + " belongs to another user")
        keeper.connect(name)
        break
    except (FileNotFoundError, ConnectionRefusedError):
        if time.monotonic() > deadline: sys.exit("there is no keeper")
        time.sleep(0.02)
keeper.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
for stream in (0, 1, 2): os.dup2(null, stream)
status = keeper.recv(1)
if status: os.write(words, ("\\0hermes-end %d" % status[0]).encode())
"""
"""The program of a channel. It passes its standard streams on, and writes the exit status that comes back to standard
error.

Arguments: the directory of sandboxes or nothing, the usual directory, the socket's name, the seconds to wait for it.
"""


def keeper_script(python: str, request: Mapping[str, Any]) -> str:
    """Return a shell script that becomes a `keeper`, with this request for its `main`."""
    text = base64.encodebytes(message(request, main=KEEPER)).decode("ascii")
    return f"#!/bin/sh\n{command_line(python, encoded=True)} <<'END'\n{text}END\n"


def relay_command(python: str, request: Mapping[str, Any], wait_s: float) -> list[str]:
    """Return the command of a channel to a `keeper`.

    Args:
        request: the one that the keeper was started with.
        wait_s: time limit in seconds for the keeper to start.
    """
    arguments = [request["directory"] or "", request["usual"], request["socket"], str(wait_s)]
    return [python, "-I", "-S", "-X", "utf8", "-c", _RELAY, *arguments]


class RelayChannel(AsyncioStreamChannel):
    """A channel over a child process that carries the streams of a relay.

    The child's own exit status says nothing: it may fail, and then the program in the sandbox goes on.
    """

    @classmethod
    async def start(cls, argv: Sequence[str], request: Mapping[str, Any], *, env: Mapping[str, str]) -> RelayChannel:
        """Start the child, which runs a `relay_command` somewhere, with a request.

        Raises:
            ChannelLost: the child can't be started.
        """
        try:
            channel = await cls.spawn(argv, env=env)
        except OSError as error:
            raise ChannelLost(f"{argv[0]} can't be started: {error.strerror}") from error
        try:
            await channel.write(pack_request(request))
        except ChannelLost:
            pass  # the child has ended already: the reader of its output will see
        except BaseException:
            await channel.aclose()
            raise
        return channel

    async def wait(self) -> int:
        """Return the exit status of the program. Raises `ChannelLost` if the channel has ended before it."""
        status = await super().wait()
        _, mark, ours = super().stderr_tail.rpartition(_END)
        number = ours.split(maxsplit=1)[:1]
        if not mark or not number or not number[0].isdigit():
            raise ChannelLost(f"the channel's process ended with status {status}: {self.stderr_tail}")
        return int(number[0])

    @property
    def stderr_tail(self) -> str:
        """Return the last bytes of the program's standard error, or else of the child's."""
        words, mark, _ = super().stderr_tail.rpartition(_END)
        return words.strip() if mark else super().stderr_tail
