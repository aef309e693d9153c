"""Computes the digest of a tree, from git's entries or from the files of an unpacked tree, to check unpacked trees.

This module is sent into the sandbox, also into slots; standard library only, Python >= 3.8. As a program it prints a
directory's digest, and the free bytes and inodes, each the lesser number of its disk and the disk of temporary files.
"""

# ruff: noqa: PTH115, PTH118, PTH123, T201
# (pathlib would be one import more)

from __future__ import annotations

import hashlib
import os
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable, Iterator

    Entry = tuple[str, str]  # mode and object id, as git has them
    Tree = dict[str, Entry]  # path to entry, of every file of a tree

FILE, PROGRAM, LINK, MODULE = "100644", "100755", "120000", "160000"
BLOCK = 1 << 20


def of_tree(files: Tree) -> str:
    """Return the digest of a tree's entries. Another repository's commit (`MODULE`) counts as an empty directory."""
    return _digest((os.fsencode(path), mode, "" if mode == MODULE else name) for path, (mode, name) in files.items())


def of_directory(path: str) -> str:
    """Return the digest of the paths, modes and contents of all files below a directory, with those in `.git`."""
    return _digest(_entries(os.fsencode(path)))


def room(paths: Iterable[str]) -> tuple[int, int]:
    """Return the smallest numbers of free bytes and of free inodes of the file systems of some paths."""
    disks = [os.statvfs(path) for path in paths]
    # Some file systems have no fixed number of inodes, and report 0.
    inodes = [disk.f_favail if disk.f_files else sys.maxsize for disk in disks]
    return min(disk.f_bavail * disk.f_frsize for disk in disks), min(inodes)


def blob_name(size: int, pieces: Iterable[bytes]) -> str:
    """Return git's name for a file's content."""
    name = hashlib.sha1(b"blob %d\0" % size)
    for piece in pieces:
        name.update(piece)
    return name.hexdigest()


def _digest(entries: Iterable[tuple[bytes, str, str]]) -> str:
    digest = hashlib.sha256()
    for path, mode, name in sorted(entries):
        digest.update(b"%d %s %s %s\n" % (len(path), path, mode.encode(), name.encode()))
    return digest.hexdigest()


def _entries(root: bytes) -> Iterator[tuple[bytes, str, str]]:
    pending = [b""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(root, folder)) as found:
            names = [os.path.join(folder, entry.name) for entry in found]
        if folder and not names:
            yield folder, MODULE, ""
        for name in names:
            mode, blob = _entry(os.path.join(root, name))
            if mode:
                yield name, mode, blob
            else:
                pending.append(name)


def _entry(path: bytes) -> Entry:
    """Return a path's mode and blob name as in git; two empty texts for a directory."""
    info = os.lstat(path)
    if stat.S_ISDIR(info.st_mode):
        return "", ""
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink(path)
        return LINK, blob_name(len(target), [target])
    if not stat.S_ISREG(info.st_mode):
        return "other", ""
    with open(path, "rb") as file:
        name = blob_name(info.st_size, iter(lambda: file.read(BLOCK), b""))
    return (PROGRAM if info.st_mode & 0o100 else FILE), name


if __name__ == "__main__":
    print(of_directory(sys.argv[1]), *room([sys.argv[1], os.environ.get("TMPDIR", "/tmp")]))
