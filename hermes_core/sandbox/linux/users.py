"""Gives slots' users names: adds lines to /etc/passwd and /etc/group, or to copies of them.

Runs on hosts too: Python >= 3.7, light imports. On a host, both files are only read. Each failure is an OSError.
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
    """The id of a user and its group, the user's name, and the user's home."""
    Lists = tuple[bytes, bytes]
    """The contents of /etc/passwd and /etc/group."""
    Bind = tuple[str, str, bool]

NAME = "agent"
"""The name of a slot's user if the slot sees no users of other slots."""

_ETC = "/etc"
_PATHS = ("/etc/passwd", "/etc/group")
_MOST = 1 << 20
"""Maximum number of bytes of a list. A system with a larger list stays unchanged."""
_MARK = b"slot of hermes-rl"
"""The comment in our lines. In a restored snapshot, we recognise the lines of an earlier sandbox by it."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read() -> Lists:
    """Return the system's lists. A missing list is empty. Raises OSError for a link, and for too large a list."""
    passwd, group = map(_read, _PATHS)
    return passwd, group


def add(lists: Lists, users: Iterable[User]) -> Lists:
    """Return lists in which these users have names. If a name is taken, underscores are added to it.

    Lines of an earlier call are replaced; all other lines stay unchanged. Our lines come first, because the first line
    for an id counts.
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
    for uid, text, home in users:
        name, number = text.encode("ascii"), b"%d" % uid
        while name in taken:
            name += b"_"
        taken.add(name)
        place = b"/" if ":" in home or "\n" in home else os.fsencode(home)
        ours.append(b":".join((name, b"*", number, number, _MARK, place, b"/bin/sh")))
        our_groups.append(_group_line(name, number))
    return b"\n".join(ours + others), b"\n".join(our_groups + groups)


def name_in(lists: Lists | None, uid: int | None) -> str | None:
    """Return the name that these lists give a user; None if they give none."""
    if lists is None or uid is None:
        return None
    number = b"%d" % uid
    for line in lists[0].split(b"\n"):
        fields = line.split(b":")
        if fields[2:3] == [number]:
            return fields[0].decode("utf-8", "replace")
    return None


def write_system(users: Iterable[User]) -> None:
    """Give these users names in the system itself. Only for a system that no one else uses.

    Raises:
        OSError: /etc or a list is a mount or a link, so it may belong to a host; or a list can't be written.
    """
    if os.path.islink(_ETC) or not mounts.read_mounts().keys().isdisjoint((_ETC, *_PATHS)):
        raise OSError(errno.EXDEV, "its lists of users are not part of the sandbox's root", _ETC)
    lists = read()
    # Groups first, so that each user that has a name has a named group too.
    for path, old, new in reversed(list(zip(_PATHS, lists, add(lists, users)))):
        if new != old:
            _replace(path, new)


def write_copies(lists: Lists, directory: str) -> list[Bind]:
    """Write lists into a directory, unless it has them. Return the binds that show them in place of the system's.

    Raises:
        OSError: a list can't be written.
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
    """Replace a file atomically. It keeps its owner and mode. Everyone may read a new file."""
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
