"""Unpacks the archives of a dataset's rows on the driver. They come from strangers, so the size and the number of their
files are bounded."""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import io
import lzma
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

from hermes_core import DatasetError

OVERHEAD = 4096
"""Bytes that an archive may have for each file besides the file's content."""

_COMPRESSIONS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class _TooLarge(Exception):
    """An archive has too many bytes or files."""


class _Outside(Exception):
    """A member of an archive would leave its folder, or is neither a file, a folder nor a link."""


class _BoundedStream(io.RawIOBase):
    """A stream that fails after `limit` bytes, because a few compressed bytes can decompress to any number of bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._left = limit

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge
        return data


def _plain(packed: IO[bytes]) -> IO[bytes]:
    """Return the decompressed stream."""
    begin = packed.read(6)
    packed.seek(0)
    decompress = next((opener for magic, opener in _COMPRESSIONS.items() if begin.startswith(magic)), None)
    plain: IO[bytes] = packed if decompress is None else decompress(packed)
    return plain


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write a member of an archive. The filters of `tarfile` would do this, but only from Python 3.11.4 on.

    Raises:
        _Outside: the member is a device, or would be outside of the folder, directly or through a link.
    """
    path = folder / member.name.lstrip("/")
    _inside(path.parent, folder, member)
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.isdir():
        _inside(path, folder, member)
        path.mkdir(exist_ok=True)
    elif member.issym():
        _inside(path.parent / member.linkname, folder, member)
        path.symlink_to(member.linkname)
    elif member.islnk():
        target = folder / member.linkname.lstrip("/")
        _inside(target, folder, member)
        path.hardlink_to(target)
    elif (content := tar.extractfile(member)) is not None:
        with content, path.open("xb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(0o755 if member.mode & 0o100 else 0o644)
    else:
        raise _Outside(f"{member.name!r} is neither a file, a folder nor a link")


def _inside(path: Path, folder: Path, member: tarfile.TarInfo) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise _Outside(f"{member.name!r} leads out of the archive's folder")


def unpack(text: str, folder: Path, where: str, *, max_bytes: int, max_files: int) -> None:
    """Unpack a base64 text of a tar archive, compressed or not, into a new folder. Blocking.

    Args:
        where: the archive's place, for messages: `tasks.jsonl, line 3, field 'tests_tar'`.

    Raises:
        DatasetError: the text is no such archive, or too large, or has a device or a member outside of the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left, files = max_bytes, 0
    try:
        packed = io.BytesIO(base64.b64decode(text, validate=True))
        with tarfile.open(fileobj=_BoundedStream(_plain(packed), max_bytes + OVERHEAD * max_files), mode="r|") as tar:
            for member in tar:
                left, files = left - member.size, files + 1
                if left < 0 or files > max_files:
                    raise _TooLarge
                _extract(tar, member, folder)
    except _TooLarge:
        raise DatasetError(
            f"{where}: it has more than {max_bytes} bytes or {max_files} files",
            hint="raise --env.max_archive_bytes or --env.max_archive_files if you trust it",
        ) from None
    except _Outside as error:
        raise DatasetError(f"{where}: {error}", hint="an archive's files must stay in their folder") from error
    except (binascii.Error, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise DatasetError(f"{where}: no archive: {error}", hint="it must be a tar in base64, and whole") from error
