"""A slot's directories: where they are, who owns them, and how they become empty."""

from __future__ import annotations

import errno
import os

from ..linux import users
from ..linux.removal import remove_tree

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, NoReturn

PREPARE = -1
"""The index of the preparation user's slot."""
_PRIVATE = ".slots"
_SCARCE = 10
"""Less than one part in so many being free is too little for the trash to wait."""
_FULL = 100
"""With less than one part in so many being free, a disk is full."""
_COUNTED = 50_000
"""Files that are counted at most: a slot with more has filled the disk itself."""
_LOOKED_AT = 200_000
"""Files of all slots that are looked at most, in directories of everybody's: the guest does nothing else meanwhile."""
_SPARES = 10
"""Empty directories kept ready: what two resets take. On a large, well-filled disk one mkdir takes a millisecond."""


class Workspace:
    """The directories of one slot.

    Args:
        base: the directory of all workspaces, as seen from the guest.
        index: the slot's number, or `PREPARE`.
        uid: the user (and group) that owns them; None is ours.
    """

    def __init__(self, base: str, index: int, uid: int | None) -> None:
        self.index = index
        self.uid = uid
        self._base = base
        name = "prepare" if index == PREPARE else "slot_%d" % index
        self.path = os.path.join(base, "prepared" if index == PREPARE else name)
        self._private = os.path.join(base, _PRIVATE, name)
        self.home = os.path.join(self._private, "home")
        self.tmp = os.path.join(self._private, "tmp")
        self.spool = os.path.join(self._private, "spool")
        self.changes = os.path.join(self._private, "root")
        """What a slot with a root of its own has changed there."""

    def make(self) -> None:
        """Make what is missing. Raises OSError."""
        self._directory(self._private, 0o700, None)
        for path in (self.path, self.home, self.tmp):
            self._directory(path, 0o700, self.uid)
        # The slot reads its spooled output and can't change it; other slots' users can't get through to it.
        self._directory(self.spool, 0o755, None)
        os.chmod(self._private, 0o755 if self.uid is None else 0o750)
        if self.uid is not None:
            os.chown(self._private, -1, self.uid)
        if self.index == PREPARE:
            os.chmod(self.path, 0o755)
            self._directory(os.path.join(self.path, "shared"), 0o755, self.uid)
            self._directory(os.path.join(self.path, "private"), 0o700, self.uid)

    def _directory(self, path: str, mode: int, uid: int | None) -> None:
        if os.path.islink(path):  # put there by the preparation user, whose directory some of them are in
            os.unlink(path)
        if not os.path.isdir(path) and not self._take_spare(path):
            os.mkdir(path)
        os.chmod(path, mode)
        if uid is not None:
            os.chown(path, uid, uid)

    def _take_spare(self, path: str) -> bool:
        """Put one of the directories that were made beforehand there; False if there is none."""
        shelf = _spares(self._base)
        for name in os.listdir(shelf):
            try:
                os.rename(os.path.join(shelf, name), path)
            except FileNotFoundError:
                continue  # another slot was quicker
            return True
        return False

    def discard(self) -> None:
        """Take the directories out of the way at once; what empties the trash may take its time. Raises OSError.

        Where room is scarce they are removed here and now: the next lease shall not find the disk full of them.
        """
        discarded = []
        for number, path in enumerate((self.path, self._private)):
            target = os.path.join(trash(self._base), "%d-%s" % (number, os.urandom(6).hex()))
            try:
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
                os.rename(path, target)
            except FileNotFoundError:
                continue
            discarded.append(target)
        if _room_is_scarce(self._base):
            for target in discarded:
                remove_tree(target)

    def remove(self) -> None:
        """Remove everything of the slot from the disk. Raises OSError."""
        for path in (self.path, self._private):
            remove_tree(path)

    def crowded(self, slots: int, open_to_all: Iterable[str]) -> bool:
        """Return whether the disk is full, and not of this slot's files: it has less than half of its part of the disk.

        Args:
            slots: how many share the disk.
            open_to_all: other directories where it may have files.

        Raises:
            OSError: its files can't be counted.
        """
        disk = os.statvfs(self._base)
        if disk.f_bavail * _FULL >= disk.f_blocks and disk.f_favail * _FULL >= disk.f_files:
            return False
        room = disk.f_blocks * disk.f_frsize // (2 * slots)
        files = min(disk.f_files // (2 * slots) or _COUNTED, _COUNTED)
        for info in self._files(open_to_all):
            room -= info.st_blocks * 512
            files -= 1
            if room < 0 or files < 0:
                return False
        return True

    def _files(self, open_to_all: Iterable[str]) -> Iterator[os.stat_result]:
        """Yield its files and directories, and those of its user in other directories of the same disk."""
        for top in (self.path, self._private):
            for folder, folders, names in os.walk(top, onerror=_raise):
                for name in folders + names:
                    yield os.lstat(os.path.join(folder, name))
        disk, left = os.stat(self._base).st_dev, _LOOKED_AT
        for top in open_to_all:
            for folder, folders, names in os.walk(top) if os.stat(top).st_dev == disk else ():
                left -= len(folders) + len(names)
                if left < 0:
                    raise OSError(errno.EFBIG, "more files than can be looked at", top)
                for name in folders + names:
                    try:
                        info = os.lstat(os.path.join(folder, name))
                    except OSError:  # another slot's, which is at work
                        continue
                    if info.st_uid == self.uid:
                        yield info

    def spool_file(self) -> str:
        """Return a new file's path in the spool directory."""
        return os.path.join(self.spool, "%s.log" % os.urandom(6).hex())

    def show_users(self, lists: users.Lists) -> list[tuple[str, str, bool]]:
        """Keep these lists of users here; return what shows them in a namespace of its own. Raises OSError."""
        return users.write_copies(lists, self._private)

    def binds(self, own_root: bool = False) -> list[tuple[str, str, bool]]:
        """Return what a slot's own namespace shows of them: (source, target, writable).

        Args:
            own_root: its home and its directories for temporary files are those of a root of its own.
        """
        found = [(self.path, self.path, True), (self.spool, self.spool, False)]
        if not own_root:
            found += [(self.home, self.home, True), (self.tmp, "/tmp", True), (self.tmp, "/var/tmp", True)]
        if self.index != PREPARE:
            shared = os.path.join(self._base, "prepared", "shared")
            found.append((shared, shared, False))
        return found

    def environment(
        self, user: str, shell: str, home: str, tmp: str, given: Mapping[str, str], inherit: Iterable[str]
    ) -> dict[str, Any]:
        """Return the environment of every command of the slot.

        Args:
            user: the name of the slot's user.
            home: the home of the slot's user.
            tmp: the slot's own directory for temporary files.
            given: the driver's variables.
            inherit: which of the sandbox's own it sees.
        """
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": home,
            "TMPDIR": tmp,
            "USER": user,
            "LOGNAME": user,
            "SHELL": shell,
            # What the user is called does not tell git whom to name, and what is prepared belongs to another one.
            "GIT_AUTHOR_NAME": "agent",
            "GIT_AUTHOR_EMAIL": "agent@localhost",
            "GIT_COMMITTER_NAME": "agent",
            "GIT_COMMITTER_EMAIL": "agent@localhost",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        if "HERMES_SANDBOX_ID" in os.environ:
            env["HERMES_SANDBOX_ID"] = os.environ["HERMES_SANDBOX_ID"]
        env.update((name, os.environ[name]) for name in inherit if name in os.environ)
        env.update(given)
        return env


def uid_offset(index: int) -> int:
    """Return where in the sandbox's block of user ids a slot's is."""
    # The second of the block is never anyone's: what signals a slot's user has it as its real one.
    return 0 if index == PREPARE else 2 + index


def places(base: str) -> list[str]:
    """Return the directories that a slot's directories are shown in, and that of what is prepared."""
    return [os.path.join(base, _PRIVATE), os.path.join(base, "prepared", "shared")]


def slot_users(base: str, first: int, slots: int) -> list[users.User]:
    """Return the users of a sandbox's slots that have ids of the block from `first` on."""
    return [
        (
            first + uid_offset(index),
            users.NAME + ("-prepare" if index == PREPARE else str(index)),
            Workspace(base, index, None).home,
        )
        for index in (PREPARE, *range(slots))
    ]


def _raise(error: OSError) -> NoReturn:
    raise error


def _room_is_scarce(base: str) -> bool:
    """Return whether most of the disk's blocks or files are taken."""
    disk = os.statvfs(base)
    return disk.f_bavail * _SCARCE < disk.f_blocks or disk.f_favail * _SCARCE < disk.f_files


def trash(base: str) -> str:
    """Return where discarded directories wait for removal: on the same file system, so that a rename is enough."""
    return os.path.join(base, _PRIVATE, "trash")


def _spares(base: str) -> str:
    return os.path.join(base, _PRIVATE, "spares")


def stock(base: str) -> None:
    """Make empty directories for the next resets, which nobody but us has had a hand on. Raises OSError."""
    shelf = _spares(base)
    for _ in range(len(os.listdir(shelf)), _SPARES):
        os.mkdir(os.path.join(shelf, os.urandom(6).hex()), 0o700)


def prepare_base(base: str) -> None:
    """Make the directories that all slots share. Raises OSError."""
    private = os.path.join(base, _PRIVATE)
    for path, mode in ((base, 0o711), (private, 0o711), (trash(base), 0o700), (_spares(base), 0o700)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)


def adopt(base: str, uid: int | None) -> None:
    """Keep of a snapshot what is prepared, and give it to its user here, who may be another one. Raises OSError."""
    remove_tree(os.path.join(base, _PRIVATE))
    prepared = os.path.join(base, "prepared")
    if uid is None or os.path.islink(prepared):
        return
    for directory, folders, files in os.walk(prepared):
        os.chown(directory, uid, uid)
        for name in folders + files:
            os.chown(os.path.join(directory, name), uid, uid, follow_symlinks=False)


def remove_base(base: str) -> None:
    """Remove what `prepare_base` made, and the base itself if nothing else is in it. Raises OSError."""
    remove_tree(os.path.join(base, _PRIVATE))
    try:
        os.rmdir(base)
    except OSError:
        pass
