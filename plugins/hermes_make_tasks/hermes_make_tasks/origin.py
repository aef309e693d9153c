"""The origin of a repository: a path, a bundle or a URL. The driver only copies its files.

Git reads the files in the sandbox only. Of a repository at a path, the driver sends git's objects and refs, without
configuration and hooks.
"""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_core import DatasetError, UsageError

MAX_BYTES = 2 << 30
"""Maximum number of bytes of a repository that is sent to a sandbox."""

_URL = re.compile(r"(https?|ssh|git)://|[\w.-]+@[\w.-]+:")
_NAMES = ("HEAD", "packed-refs", "shallow", "refs", "objects")
_REF = re.compile(r"[A-Za-z0-9_][\w./@+-]{0,200}")


@dataclass(frozen=True)
class RepositoryOrigin:
    """The repository that the command line names."""

    given: str
    url: str | None = None
    bundle: Path | None = None
    git_dir: Path | None = None

    @classmethod
    def parse(cls, given: str) -> RepositoryOrigin:
        """Return the origin that a path, a bundle's path or a URL names. Blocking.

        Raises:
            UsageError: `given` names none of these, or the repository shares another one's files.
        """
        if _URL.match(given):
            return cls(given, url=given)
        path = Path(given).expanduser()
        if path.is_file():
            return cls(given, bundle=path)
        if not path.exists():
            raise UsageError(f"there is no repository {given}", hint="give a path, a bundle, or https://…")
        git_dir = path / ".git" if os.path.lexists(path / ".git") else path
        if (git_dir != path and not stat.S_ISDIR(git_dir.lstat().st_mode)) or os.path.lexists(git_dir / "commondir"):
            raise UsageError(f"{given} is a part of another repository", hint=_clone(path))
        if not os.path.lexists(git_dir / "HEAD") or not (git_dir / "objects").is_dir():
            raise UsageError(
                f"{given} is not a git repository",
                hint=f"make one of it: `git init`, `git add -A` and `git commit -m clean` in {given}",
            )
        return cls(given, git_dir=git_dir)

    @property
    def name(self) -> str:
        """Return the repository's name as `owner__name`: the last two parts of a URL, or `local` and the last part
        of a path."""
        plain = re.sub(r"^\w+://|\.(git|bundle)$", "", self.given.rstrip("/"))
        parts = [part for part in re.split(r"[/:]", plain if self.url else str(Path(plain).absolute())) if part]
        words = parts[-2:] if self.url and len(parts) > 1 else ["local", *parts[-1:]]
        return "__".join(
            re.sub(r"[^\w.-]+|^[.-]+|_{2,}", "-", word, flags=re.ASCII).strip("-.") or "x" for word in words
        )

    def archive(self) -> Iterator[bytes]:
        """Yield a tar with the parts of a path's git directory that git needs to read commits. Blocking.

        Raises:
            DatasetError: the git directory can't be read, needs files from elsewhere, or is too large.
        """
        assert self.git_dir is not None
        if os.path.lexists(self.git_dir / "objects/info/alternates"):
            raise DatasetError(f"{self.given} borrows objects of another repository", hint=_clone(self.given))
        for name in ("refs", "objects"):  # without these directories, even empty ones, git sees no repository
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield info.tobuf(tarfile.PAX_FORMAT)
        left = MAX_BYTES
        for name in _NAMES:
            top = self.git_dir / name
            for path in _files(top):
                if path.is_symlink():
                    raise DatasetError(f"{path} is a link, which may lead anywhere", hint=_clone(self.given))
                arcname = f"{name}/{path.relative_to(top)}" if path != top else name
                try:
                    size, data = _read(path)
                except OSError as error:
                    raise DatasetError(f"{path} can't be read: {error.strerror}", hint="give a bundle") from error
                left -= size
                if left < 0:
                    raise DatasetError(f"{self.given} has more than {MAX_BYTES} bytes", hint="give a shallow bundle")
                info = tarfile.TarInfo(arcname)
                info.size = size
                yield info.tobuf(tarfile.PAX_FORMAT)
                yield from data
                yield b"\0" * (-size % tarfile.BLOCKSIZE)
        yield b"\0" * 2 * tarfile.BLOCKSIZE


def check_ref(ref: str) -> str:
    """Return `ref` unchanged if it can be the name of a commit.

    Raises:
        UsageError: `ref` can't be the name of a commit.
    """
    if not _REF.fullmatch(ref) or ".." in ref or "@{" in ref:
        raise UsageError(f"{ref!r} is not the name of a commit", hint="give a branch, a tag or a commit id")
    return ref


def _clone(given: Path | str) -> str:
    return f"if you trust what it leads to, clone it, and give the clone: `git clone --no-local {given} DIR`"


def _files(top: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder. A link is yielded itself, not its target."""
    if top.is_symlink() or top.is_file():
        yield top
        return
    for folder, directories, names in os.walk(top):  # it does not follow links
        directories.sort()
        links = [name for name in directories if Path(folder, name).is_symlink()]
        yield from (Path(folder, name) for name in sorted([*names, *links]))


def _read(path: Path) -> tuple[int, Iterator[bytes]]:
    """Return a file's size in bytes, and exactly that many bytes in pieces; size 0 if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = io.FileIO(descriptor)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        return 0, iter(())

    def pieces(left: int) -> Iterator[bytes]:
        with file:
            while left:
                piece = file.read(min(left, 1 << 20)) or b"\0" * left  # the file shrank: git will report it as broken
                left -= len(piece)
                yield piece

    return info.st_size, pieces(info.st_size)
