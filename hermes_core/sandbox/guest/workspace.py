"""A slot's directories: where they are, who owns them, and how they are emptied."""

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
"""With less than a tenth of the disk free, discarded files are removed at once."""
_FULL = 100
"""With less than a hundredth of its space free, the disk counts as full."""
_COUNTED = 50_000
"""Maximum number of a slot's files that are counted. A slot with more has filled the disk itself."""
_LOOKED_AT = 200_000
"""Maximum number of files, of all slots, that are looked at in shared directories. The guest can't serve meanwhile."""
_SPARES = 10
"""The number of empty directories kept ready, enough for two resets. On a large, full disk a mkdir takes 1 ms."""


class Workspace:
    """The directories of one slot.

    Args:
        base: the directory of all workspaces, as seen from the guest.
        index: the slot's number, or `PREPARE`.
        uid: the id of the user, and of the group, that owns them. None is the guest's own.
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
        """The changes of a slot to its own root directory."""

    def make(self) -> None:
        """Make the directories that are missing, and set all owners and modes. Raises OSError."""
        self._directory(self._private, 0o700, None)
        for path in (self.path, self.home, self.tmp):
            self._directory(path, 0o700, self.uid)
        # The slot can read its spooled output but not change it. Other slots' users can't reach it.
        self._directory(self.spool, 0o755, None)
        os.chmod(self._private, 0o755 if self.uid is None else 0o750)
        if self.uid is not None:
            os.chown(self._private, -1, self.uid)
        if self.index == PREPARE:
            os.chmod(self.path, 0o755)
            self._directory(os.path.join(self.path, "shared"), 0o755, self.uid)
            self._directory(os.path.join(self.path, "private"), 0o700, self.uid)

    def _directory(self, path: str, mode: int, uid: int | None) -> None:
        if os.path.islink(path):  # the preparation user may have put it into its own directory
            os.unlink(path)
        if not os.path.isdir(path) and not self._take_spare(path):
            os.mkdir(path)
        os.chmod(path, mode)
        if uid is not None:
            os.chown(path, uid, uid)

    def _take_spare(self, path: str) -> bool:
        """Rename one of the spare directories to `path`. Return False if there is none."""
        shelf = _spares(self._base)
        for name in os.listdir(shelf):
            try:
                os.rename(os.path.join(shelf, name), path)
            except FileNotFoundError:
                continue  # another slot took it
            return True
        return False

    def discard(self) -> None:
        """Move the directories to the trash. If the disk is almost full, also remove them, so that the next lease does
        not find it full. Raises OSError."""
        targets = []
        for number, path in enumerate((self.path, self._private)):
            target = os.path.join(trash(self._base), "%d-%s" % (number, os.urandom(6).hex()))
            try:
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
                os.rename(path, target)
            except FileNotFoundError:
                continue
            targets.append(target)
        if _room_is_scarce(self._base):
            for target in targets:
                remove_tree(target)

    def remove(self) -> None:
        """Remove the directories. Raises OSError."""
        for path in (self.path, self._private):
            remove_tree(path)

    def is_crowded(self, slots: int, open_to_all: Iterable[str]) -> bool:
        """Return whether the disk is full of others' files: this slot uses less than half of its share of the disk.

        Args:
            slots: the number of slots that share the disk.
            open_to_all: other directories where the slot may have files.

        Raises:
            OSError: the slot's files can't be counted.
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
        """Yield the slot's files and directories, and those of its user in `open_to_all` on the same disk."""
        for top in (self.path, self._private):
            for folder, folders, names in os.walk(top, onerror=_raise):
                for name in folders + names:
                    yield os.lstat(os.path.join(folder, name))
        disk, budget = os.stat(self._base).st_dev, _LOOKED_AT
        for top in open_to_all:
            for folder, folders, names in os.walk(top) if os.stat(top).st_dev == disk else ():
                budget -= len(folders) + len(names)
                if budget < 0:
                    raise OSError(errno.EFBIG, "more files than can be looked at", top)
                for name in folders + names:
                    try:
                        info = os.lstat(os.path.join(folder, name))
                    except OSError:  # another slot has removed it meanwhile
                        continue
                    if info.st_uid == self.uid:
                        yield info

    def spool_file(self) -> str:
        """Return the path of a new file in the spool directory."""
        return os.path.join(self.spool, "%s.log" % os.urandom(6).hex())

    def show_users(self, lists: users.Lists) -> list[tuple[str, str, bool]]:
        """Write these lists of users to a directory of the slot. Return the binds that show them. Raises OSError."""
        return users.write_copies(lists, self._private)

    def binds(self, own_root: bool = False) -> list[tuple[str, str, bool]]:
        """Return the binds of these directories in the slot's mount namespace: (source, target, writable).

        Args:
            own_root: whether the slot has a root directory of its own, with a home and temporary directories.
        """
        binds = [(self.path, self.path, True), (self.spool, self.spool, False)]
        if not own_root:
            binds += [(self.home, self.home, True), (self.tmp, "/tmp", True), (self.tmp, "/var/tmp", True)]
        if self.index != PREPARE:
            shared = os.path.join(self._base, "prepared", "shared")
            binds.append((shared, shared, False))
        return binds

    def environment(
        self, user: str, shell: str, home: str, tmp: str, variables: Mapping[str, str], inherit: Iterable[str]
    ) -> dict[str, Any]:
        """Return the environment of every command of the slot.

        Args:
            user: the name of the slot's user.
            home: the home of the slot's user.
            tmp: the slot's directory for temporary files.
            variables: variables that the driver sets.
            inherit: names of the sandbox's variables that the slot sees.
        """
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
            "HOME": home,
            "TMPDIR": tmp,
            "USER": user,
            "LOGNAME": user,
            "SHELL": shell,
            # git refuses to commit without a name, and to read the repositories of the preparation's user.
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
        env.update(variables)
        return env


def uid_offset(index: int) -> int:
    """Return the offset of a slot's user id in the sandbox's block of user ids."""
    # The second id of the block is no slot's: it is our real uid when we kill a slot's processes (`Site.kill_user`).
    return 0 if index == PREPARE else 2 + index


def places(base: str) -> list[str]:
    """Return the directories that must exist in a slot's root, to mount the slot's and the prepared files in."""
    return [os.path.join(base, _PRIVATE), os.path.join(base, "prepared", "shared")]


def slot_users(base: str, first: int, slots: int) -> list[users.User]:
    """Return the users of a sandbox's slots. `first` is the first id of the sandbox's block."""
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
    """Return whether the disk has few free blocks or files."""
    disk = os.statvfs(base)
    return disk.f_bavail * _SCARCE < disk.f_blocks or disk.f_favail * _SCARCE < disk.f_files


def trash(base: str) -> str:
    """Return the directory for discarded files. It is on the same file system, so a rename moves them there."""
    return os.path.join(base, _PRIVATE, "trash")


def _spares(base: str) -> str:
    return os.path.join(base, _PRIVATE, "spares")


def make_spares(base: str) -> None:
    """Make empty directories for the next resets. Only we have ever had access to them. Raises OSError."""
    shelf = _spares(base)
    for _ in range(len(os.listdir(shelf)), _SPARES):
        os.mkdir(os.path.join(shelf, os.urandom(6).hex()), 0o700)


def prepare_base(base: str) -> None:
    """Make the base directory, and the directories below it that all slots share. Raises OSError."""
    private = os.path.join(base, _PRIVATE)
    for path, mode in ((base, 0o711), (private, 0o711), (trash(base), 0o700), (_spares(base), 0o700)):
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)


def adopt(base: str, uid: int | None) -> None:
    """Take over the base directory of a restored snapshot: keep only the prepared files. Raises OSError.

    Args:
        uid: the user that the prepared files are given to; None leaves their owner.
    """
    remove_tree(os.path.join(base, _PRIVATE))
    prepared = os.path.join(base, "prepared")
    if uid is None or os.path.islink(prepared):
        return
    for directory, folders, files in os.walk(prepared):
        os.chown(directory, uid, uid)
        for name in folders + files:
            os.chown(os.path.join(directory, name), uid, uid, follow_symlinks=False)


def remove_base(base: str) -> None:
    """Remove what `prepare_base` made, and the base directory if it is empty then. Raises OSError."""
    remove_tree(os.path.join(base, _PRIVATE))
    try:
        os.rmdir(base)
    except OSError:
        pass
