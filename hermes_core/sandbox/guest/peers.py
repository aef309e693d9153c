"""Who is at the other end of a connection over the loopback, and guards that say by this whether it is served.

A guard is called with a connection, and answers by a call, at once or later.
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
"""A netlink header, and an inet_diag_req_v2 with ports and addresses in the network's order."""
_ANSWER_FROM, _STATE, _OWNER = 16, 17, 80
"""Where an answer's inet_diag_msg begins, and in it the state, and the user and the inode."""
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT, _LISTEN = 1, 4, 5, 8, 10
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def everybody(_sock: socket.socket, answer: Answer) -> None:
    """Serve every connection: nobody else's programs are there."""
    answer(True)


def of_users(first: int, last: int) -> Guard:
    """Return a guard that serves the programs of these users."""

    def guard(sock: socket.socket, answer: Answer) -> None:
        found = holder(sock)
        answer(found is not None and first <= found[0] <= last)

    return guard


def of_processes(ask: Callable[[int, Answer], object]) -> Guard:
    """Return a guard that serves the programs of some processes; `ask` says whether one of them has a socket."""

    def guard(sock: socket.socket, answer: Answer) -> None:
        found = holder(sock)
        if found is None:
            answer(False)
        else:
            ask(found[1], lambda holds: answer(holds and holder(sock) == found))

    return guard


def holder(sock: socket.socket) -> tuple[int, int] | None:
    """Return the user and the inode of the socket at the other end of a connection; None if no program has it open.

    Whoever has closed its socket already is nobody. While our own end is connected, nobody else's can have the same
    addresses, save one that only tries to connect: so neither can one be shown that has taken a closed one's place.
    """
    try:
        find = _by_netlink if _has_netlink() else _by_tables
        state, uid, inode = find(sock.getpeername(), sock.getsockname())
        own = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:  # it is gone, or the kernel does not tell
        return None
    is_open = inode and state in (_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2) and own in (_ESTABLISHED, _CLOSE_WAIT)
    return (uid, inode) if is_open else None


def reset(sock: socket.socket) -> None:
    """Close a connection, so that its other end gets an error and no end of file."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass
    sock.close()


@functools.lru_cache(maxsize=None)
def _has_netlink() -> bool:
    """Return whether this kernel can be asked for one socket: where it lacks that, it says that there is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen(1)
        try:
            return _by_netlink(probe.getsockname(), ("0.0.0.0", 0))[0] == _LISTEN
        except OSError:
            return False


def _by_netlink(client: Address, server: Address) -> tuple[int, int, int]:
    """Return the state, the user and the inode of the client's socket, however many others there are.

    Raises:
        OSError: there is none, or the kernel can't be asked.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as diag:
        ports = [struct.pack(">H", port) for _, port in (client, server)]
        addresses = [socket.inet_aton(host) for host, _ in (client, server)]
        header = (_ASK.size, _BY_FAMILY, _REQUEST, 0, 0)
        ask = (socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY_STATE)
        diag.setblocking(False)  # it answers in the call that asks
        diag.send(_ASK.pack(*header, *ask, *ports, *addresses, 0, _NO_COOKIE))
        answer = diag.recv(8192)
    if struct.unpack_from("=H", answer, 4)[0] == _ERROR:
        number = -struct.unpack_from("=i", answer, _ANSWER_FROM)[0]
        raise OSError(number, "the kernel knows of no such connection")
    uid, inode = struct.unpack_from("=II", answer, _OWNER)
    return answer[_STATE], uid, inode


def _by_tables(client: Address, server: Address) -> tuple[int, int, int]:
    """Return the same from the tables of all connections; of nobody if it is in neither."""
    wanted = {prefix + _hex(client): prefix + _hex(server) for prefix in ("", _mapped())}
    for words in _rows():
        if wanted.get(words[1]) == words[2]:
            return int(words[3], 16), int(words[7]), int(words[9])
    return 0, 0, 0


def _rows() -> Iterator[list[str]]:
    for path in _TABLES:
        try:
            with open(path) as file:
                next(file, "")
                for line in file:
                    yield line.split()
        except FileNotFoundError:  # without IPv6 there is but one
            continue


def _hex(address: Address) -> str:
    (word,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return "%08X:%04X" % (word, address[1])


def _mapped() -> str:
    """Return what comes before an IPv4 address where it is shown as one of IPv6: three words, by the byte order."""
    return "0000000000000000" + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")
