"""Finds the owner of the other end of a loopback connection. Guards accept or refuse connections by this owner.

A guard is called with a connection and a function. It calls the function, now or later, with True if it accepts the
connection, otherwise with False.
"""

from __future__ import annotations

import functools
import socket
import struct
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Address = tuple[str, int]
    Answer = Callable[[bool], object]
    Guard = Callable[[socket.socket, Answer], object]

_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2  # of linux/netlink.h and linux/sock_diag.h
_ASK = struct.Struct("=IHHII BBBBI 2s2s 4s12x4s12x IQ")
"""A netlink header and an inet_diag_req_v2, with ports and addresses in network byte order."""
_ANSWER_FROM, _STATE, _OWNER = 16, 17, 80
"""Offsets in an answer: of the inet_diag_msg, of its state, and of its user and inode."""
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT, _LISTEN = 1, 4, 5, 8, 10
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def everybody(_sock: socket.socket, answer: Answer) -> None:
    """Accept every connection, because no one else's programs can connect."""
    answer(True)


def of_users(first: int, last: int) -> Guard:
    """Return a guard that accepts programs of the users from `first` to `last`."""

    def guard(sock: socket.socket, answer: Answer) -> None:
        owner = find_owner(sock)
        answer(owner is not None and first <= owner[0] <= last)

    return guard


def of_processes(ask: Callable[[int, Answer], object]) -> Guard:
    """Return a guard that accepts connections of certain processes. `ask(inode, answer)` calls `answer` with whether
    one of these processes has the socket with this inode open."""

    def guard(sock: socket.socket, answer: Answer) -> None:
        owner = find_owner(sock)
        if owner is None:
            answer(False)
        else:
            # Look again: until now, another program may have got the connection.
            ask(owner[1], lambda holds: answer(holds and find_owner(sock) == owner))

    return guard


def find_owner(sock: socket.socket) -> tuple[int, int] | None:
    """Return the user and the inode of the socket at the other end of a connection; None if no program has it open.

    A socket that was closed has no owner. Another program can reuse its addresses only to try to connect, because our
    end is still connected. So only connected states count.
    """
    try:
        find = _by_netlink if _has_netlink() else _by_tables
        state, uid, inode = find(sock.getpeername(), sock.getsockname())
        own = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:  # the socket is gone, or the kernel does not answer
        return None
    is_open = inode and state in (_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2) and own in (_ESTABLISHED, _CLOSE_WAIT)
    return (uid, inode) if is_open else None


def reset(sock: socket.socket) -> None:
    """Close a connection so that the other end gets an error, not an end of file."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass
    sock.close()


@functools.lru_cache(maxsize=None)
def _has_netlink() -> bool:
    """Return whether this kernel answers about single sockets. Without sock_diag it denies that any socket exists."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen(1)
        try:
            return _by_netlink(probe.getsockname(), ("0.0.0.0", 0))[0] == _LISTEN
        except OSError:
            return False


def _by_netlink(client: Address, server: Address) -> tuple[int, int, int]:
    """Return the state, the user and the inode of the client's socket. The cost does not grow with other sockets.

    Raises:
        OSError: there is no such socket, or the kernel can't be asked.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        ports = [struct.pack(">H", port) for _, port in (client, server)]
        addresses = [socket.inet_aton(host) for host, _ in (client, server)]
        header = (_ASK.size, _BY_FAMILY, _REQUEST, 0, 0)
        ask = (socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
        diag.setblocking(False)  # the answer is there when `send` returns
        diag.send(_ASK.pack(*header, *ask, *ports, *addresses, 0, _NO_COOKIE))
        answer = diag.recv(8192)
    if struct.unpack_from("=H", answer, 4)[0] == _ERROR:
        number = -struct.unpack_from("=i", answer, _ANSWER_FROM)[0]
        raise OSError(number, "the kernel knows of no such connection")
    uid, inode = struct.unpack_from("=II", answer, _OWNER)
    return answer[_STATE], uid, inode


def _by_tables(client: Address, server: Address) -> tuple[int, int, int]:
    """Return the state, the user and the inode of the client's socket, from the tables of all connections; (0, 0, 0) if
    neither table has the socket."""
    servers = {prefix + _hex(client): prefix + _hex(server) for prefix in ("", _ipv6_prefix())}
    for words in _rows():
        if servers.get(words[1]) == words[2]:
            return int(words[3], 16), int(words[7]), int(words[9])
    return 0, 0, 0


def _rows() -> Iterator[list[str]]:
    for path in _TABLES:
        try:
            with open(path) as file:
                next(file, "")
                for line in file:
                    yield line.split()
        except FileNotFoundError:  # the kernel has no IPv6
            continue


def _hex(address: Address) -> str:
    (word,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return "%08X:%04X" % (word, address[1])


def _ipv6_prefix() -> str:
    """Return the prefix of an IPv4-mapped address in /proc/net/tcp6: three words in the host's byte order."""
    return "0000000000000000" + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")
