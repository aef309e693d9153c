"""Where a repository comes from: a path, a bundle or a URL. On the driver its files are only copied.

Git reads them in the sandbox. Of a path, what is sent there are the objects and the names of commits, without
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
"""The largest repository that is sent to a sandbox."""

_URL = re.compile(r"(https?|ssh|git)://|[\w.-]+@[\w.-]+:")
_NAMES = ("HEAD", "packed-refs", "shallow", "refs", "objects")
_REF = re.compile(r"[A-Za-z0-9_][\w./@+-]{0,200}")


@dataclass(frozen=True)
class Origin:
    """A repository, as it was named on the command line."""

    given: str
    url: str | None = None
    bundle: Path | None = None
    git_dir: Path | None = None
    """The directory with HEAD."""
    common_dir: Path | None = None
    """The directory with the objects: another one than `git_dir` for a worktree."""

    @classmethod
    def parse(cls, given: str) -> Origin:
        """Recognise what was named. Blocking.

        Raises:
            UsageError: it is nothing of these.
        """
        if _URL.match(given):
            return cls(given, url=given)
        path = Path(given).expanduser()
        if path.is_file():
            return cls(given, bundle=path)
        if not path.exists():
            raise UsageError(f"there is no repository {given}", hint="give a path, a bundle, or https://…")
        git_dir = path / ".git" if (path / ".git").exists() else path
        if git_dir.is_file():
            git_dir = _pointed_to(git_dir, "gitdir:")
        common = _pointed_to(git_dir / "commondir") if (git_dir / "commondir").is_file() else git_dir
        if not (git_dir / "HEAD").is_file() or not (common / "objects").is_dir():
            raise UsageError(
                f"{given} is not a git repository",
                hint=f"make one of it: `git init`, `git add -A` and `git commit -m clean` in {given}",
            )
        return cls(given, git_dir=git_dir, common_dir=common)

    @property
    def name(self) -> str:
        """Return `owner__name` for it: the last two parts of a URL, or `local` and the last part of a path."""
        plain = re.sub(r"^\w+://|\.(git|bundle)$", "", self.given.rstrip("/"))
        parts = [part for part in re.split(r"[/:]", plain if self.url else str(Path(plain).absolute())) if part]
        words = parts[-2:] if self.url and len(parts) > 1 else ["local", *parts[-1:]]
        return "__".join(
            re.sub(r"[^\w.-]+|^[.-]+|_{2,}", "-", word, flags=re.ASCII).strip("-.") or "x" for word in words
        )

    def archive(self) -> Iterator[bytes]:
        """Yield a tar of a path's git directory: what git needs to read commits from it. Blocking.

        Raises:
            DatasetError: it can't be read, borrows objects of another repository, or is too large.
        """
        assert self.git_dir is not None
        assert self.common_dir is not None
        if (self.common_dir / "objects/info/alternates").exists():
            raise DatasetError(
                f"{self.given} borrows objects of another repository",
                hint="give a bundle: `git bundle create FILE HEAD`",
            )
        for name in ("refs", "objects"):  # without them git sees no repository, and they may hold no file
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield info.tobuf(tarfile.PAX_FORMAT)
        left = MAX_BYTES
        for name in _NAMES:
            top = (self.git_dir if name == "HEAD" else self.common_dir) / name
            for path in _files(top):
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
    """Return the name of a commit.

    Raises:
        UsageError: it can't be one.
    """
    if not _REF.fullmatch(ref) or ".." in ref or "@{" in ref:
        raise UsageError(f"{ref!r} is not the name of a commit", hint="give a branch, a tag or a commit id")
    return ref


def _pointed_to(file: Path, word: str = "") -> Path:
    """Return the directory that a small file names."""
    text = file.read_text(encoding="utf-8", errors="surrogateescape")[:4096].strip().removeprefix(word).strip()
    return file.parent / text


def _files(top: Path) -> Iterator[Path]:
    if top.is_file():
        yield top
        return
    for folder, directories, names in os.walk(top):  # it does not follow links
        directories.sort()
        yield from (Path(folder, name) for name in sorted(names))


def _read(path: Path) -> tuple[int, Iterator[bytes]]:
    """Return a regular file's size, and exactly as many bytes, in pieces."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = io.FileIO(descriptor)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        return 0, iter(())

    def pieces(left: int) -> Iterator[bytes]:
        with file:
            while left:
                piece = file.read(min(left, 1 << 20)) or b"\0" * left  # it shrank: git will say that it is broken
                left -= len(piece)
                yield piece

    return info.st_size, pieces(info.st_size)
