"""The program that `sandbox.filesystem` runs in a sandbox: argv[1] is a command as JSON, and errors are JSON, too."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

KINDS = {
    errno.ENOENT: "NotFound",
    errno.EISDIR: "IsDirectory",
    errno.ENOTDIR: "NotDirectory",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.ENOTEMPTY: "DirectoryNotEmpty",
    errno.EEXIST: "PathAlreadyExists",
}


def fail(kind: str, message: str) -> NoReturn:
    """Write an error to standard error, and exit."""
    sys.stderr.write(json.dumps({"error_kind": kind, "message": message, "detail": ""}))
    sys.exit(1)


def read_file(path: Path, given: Any) -> None:
    """Write the file's bytes to standard output."""
    with path.open("rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)


def write_file(path: Path, given: Any) -> None:
    """Write the whole file from standard input."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        fail("IsDirectory", "Is a directory")
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with part.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    part.replace(path)


def list_files(path: Path, given: Any) -> None:
    """List the entries of a directory."""
    if path.is_file():
        fail("NotDirectory", "Not a directory")
    sys.stdout.write(json.dumps([_info(each) for each in sorted(path.iterdir())]))


def stat_file(path: Path, given: Any) -> None:
    """Print the metadata of a path."""
    sys.stdout.write(json.dumps(_info(path)))


def make_directory(path: Path, given: Any) -> None:
    """Make a directory, with or without its parents."""
    if given["parents"] and os.path.lexists(path) and not path.is_dir():
        fail("PathAlreadyExists", "Path already exists")
    path.mkdir(parents=given["parents"], exist_ok=given["parents"])


def remove(path: Path, given: Any) -> None:
    """Remove a file, or a directory with its contents."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
    elif given["recursive"]:
        shutil.rmtree(path)
    else:
        path.rmdir()


OPERATIONS: dict[str, Callable[[Path, Any], None]] = {
    "ReadFile": read_file,
    "WriteFile": write_file,
    "ListFiles": list_files,
    "Stat": stat_file,
    "MakeDirectory": make_directory,
    "Remove": remove,
}


def _info(path: Path) -> dict[str, Any]:
    found = path.lstat()
    link = stat.S_ISLNK(found.st_mode)
    return {
        "name": path.name or "/",
        "path": str(path),
        "type": "symlink" if link else "directory" if stat.S_ISDIR(found.st_mode) else "file",
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "permissions": stat.filemode(found.st_mode)[1:],
        "owner": _name(pwd.getpwuid, found.st_uid),
        "group": _name(grp.getgrgid, found.st_gid),
        "modified_time": found.st_mtime,
        "symlink_target": str(path.readlink()) if link else None,
    }


def _name(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def main() -> None:
    """Run the command in argv[1]."""
    ((operation, given),) = json.loads(sys.argv[1]).items()
    run = OPERATIONS.get(operation)
    if run is None:
        fail("NotSupported", f"Unsupported operation {operation}")
    try:
        run(Path(given["path"]), given)
    except OSError as error:
        fail(KINDS.get(error.errno or 0, "Other"), os.strerror(error.errno) if error.errno else str(error))


if __name__ == "__main__":
    main()
