"""Whose socket is at the other end of a connection: the guard of ports where slots share a loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hermes_core.sandbox.guest import peers
from hermes_core.sandbox.linux.processes import has_open_socket

USER = 61_234
BY_ANOTHER = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); input(); s.close()"


@pytest.fixture(params=["netlink", "tables"])
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listening socket, with the kernel asked in either way."""
    if request.param == "tables":
        monkeypatch.setattr(peers, "_has_netlink", lambda: False)
    elif not peers._has_netlink():
        pytest.skip("this kernel can't be asked for one socket")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def eventually(value: Callable[[], object], wanted: object) -> None:
    deadline = time.monotonic() + 10
    while value() != wanted:
        assert time.monotonic() < deadline, value()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")], ids=["v4", "mapped"]
)
def test_the_user_of_an_open_connection(listener: socket.socket, family: int, address: str) -> None:
    client = socket.socket(family)
    client.connect((address, listener.getsockname()[1]))
    sock, _ = listener.accept()
    with client, sock:
        inode = os.fstat(client.fileno()).st_ino
        assert peers.find_owner(sock) == (os.geteuid(), inode)
        assert has_open_socket(inode)
        client.shutdown(socket.SHUT_WR)
        assert peers.find_owner(sock) == (os.geteuid(), inode)
        client.close()
        assert not has_open_socket(inode)
        eventually(lambda: peers.find_owner(sock), None)


@pytest.mark.root
def test_another_user_s_connection(listener: socket.socket) -> None:
    argv = [sys.executable, "-c", BY_ANOTHER, str(listener.getsockname()[1])]
    with subprocess.Popen(["/usr/bin/setpriv", f"--reuid={USER}", "--clear-groups", *argv], stdin=-1) as other:
        sock, _ = listener.accept()
        with sock:
            assert (peers.find_owner(sock) or ())[:1] == (USER,)
            other.communicate(b"\n")
            eventually(lambda: peers.find_owner(sock), None)


def test_one_that_was_reset_is_nobody_s(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        sock, _ = listener.accept()
        peers.reset(sock)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    client = socket.create_connection(listener.getsockname())
    sock, _ = listener.accept()
    with sock:
        peers.reset(client)
        eventually(lambda: peers.find_owner(sock), None)
