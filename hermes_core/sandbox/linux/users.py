"""The names of slots' users: lines in the system's lists of users and groups, written to it or to copies of it.

Runs on hosts too: Python >= 3.7, light imports. The lists of a host are only read. Each failed call is an `OSError`.
"""

from __future__ import annotations

import errno
import os
import stat

from . import mounts

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable

    User = tuple[int, str, str]
    """A user (and group) id, the name that it should have, and its home."""
    Lists = tuple[bytes, bytes]
    """What is in /etc/passwd and /etc/group."""
    Bind = tuple[str, str, bool]

NAME = "agent"
"""A slot's user, where no other slot's has to be told from it."""

_ETC = "/etc"
_PATHS = ("/etc/passwd", "/etc/group")
_MOST = 1 << 20
"""Bytes of a list at most; systems with a larger one are left as they are."""
_MARK = b"slot of hermes-rl"
"""The comment in lines of ours, by which those of an earlier sandbox are known in a restored snapshot."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read() -> Lists:
    """Return the system's lists; one that is missing is empty. Raises OSError for links, and for what is too large."""
    passwd, group = map(_read, _PATHS)
    return passwd, group


def add(lists: Lists, users: Iterable[User]) -> Lists:
    """Return lists in which these users have names. Where a name is taken, underscores are added to it.

    The lines that are there stay as they are, but for those that an earlier call made. Ours come first: of several
    lines for one id the first counts, and no line of anyone else can spoil them.
    """
    passwd, group = lists
    others, old = [], set()
    for line in passwd.split(b"\n"):
        fields = line.split(b":")
        if fields[4:5] == [_MARK]:
            old.add(_group_line(fields[0], fields[3]))
        else:
            others.append(line)
    groups = [line for line in group.split(b"\n") if line not in old]
    taken = {line.partition(b":")[0] for line in others + groups}
    ours, our_groups = [], []
    for uid, wanted, home in users:
        name, number = wanted.encode("ascii"), b"%d" % uid
        while name in taken:
            name += b"_"
        taken.add(name)
        place = b"/" if ":" in home or "\n" in home else os.fsencode(home)
        ours.append(b":".join((name, b"*", number, number, _MARK, place, b"/bin/sh")))
        our_groups.append(_group_line(name, number))
    return b"\n".join(ours + others), b"\n".join(our_groups + groups)


def name_in(lists: Lists | None, uid: int | None) -> str | None:
    """Return the name of a user by these lists; None if it has none."""
    if lists is None or uid is None:
        return None
    number = b"%d" % uid
    for line in lists[0].split(b"\n"):
        fields = line.split(b":")
        if fields[2:3] == [number]:
            return fields[0].decode("utf-8", "replace")
    return None


def write_system(users: Iterable[User]) -> None:
    """Give these users names in the system itself. Only for a system that is a sandbox's own. Raises OSError.

    What is mounted there, or is elsewhere, may be a host's: it is left alone.
    """
    if os.path.islink(_ETC) or not mounts.mounted().keys().isdisjoint((_ETC, *_PATHS)):
        raise OSError(errno.EXDEV, "its lists of users are not part of the sandbox's root", _ETC)
    lists = read()
    # Groups first: whoever has a name has a group's too.
    for path, old, new in reversed(list(zip(_PATHS, lists, add(lists, users)))):
        if new != old:
            _replace(path, new)


def write_copies(lists: Lists, directory: str) -> list[Bind]:
    """Write lists into a directory that has none; return the mounts that show them in place of the system's.

    Raises:
        OSError: there is no room, say.
    """
    binds = []
    for path, content in zip(_PATHS, lists):
        if not os.path.islink(_ETC) and os.path.isfile(path) and not os.path.islink(path):
            copy = os.path.join(directory, os.path.basename(path))
            if not os.path.exists(copy):
                _replace(copy, content)
            binds.append((copy, path, False))
    return binds


def _group_line(name: bytes, number: bytes) -> bytes:
    return b"%s:*:%s:" % (name, number)


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return b""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file", path)
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    return content


def _replace(path: str, content: bytes) -> None:
    """Write a file at once, with the owner and the mode that it has; of a new one everyone may read."""
    try:
        old = os.lstat(path)
        owner, group, mode = old.st_uid, old.st_gid, stat.S_IMODE(old.st_mode)
    except FileNotFoundError:
        owner, group, mode = os.geteuid(), os.getegid(), 0o644
    new = path + ".hermes-rl"
    try:
        os.unlink(new)
    except FileNotFoundError:
        pass
    try:
        with open(os.open(new, _CREATE, 0o600), "wb") as file:
            file.write(content)
            os.fchown(file.fileno(), owner, group)
            os.fchmod(file.fileno(), mode)
        os.rename(new, path)
    except OSError:
        if os.path.lexists(new):
            os.unlink(new)
        raise
