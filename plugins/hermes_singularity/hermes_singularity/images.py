"""Makes images ready: each is unpacked once into a directory, which all containers of it share."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from hermes_core import ImageError, ProvisionError, SandboxImage, SingleFlight, TaskSet, complete
from hermes_core.sandbox.local import container, host
from hermes_core.sandbox.local.launch import launcher_argv, request_file
from hermes_singularity.config import SingularityConfig
from hermes_singularity.runtime import variables_for_downloads

log = logging.getLogger("hermes_core.singularity")

_ARCHIVES = ("docker-archive:", "oci-archive:")
_ADDRESS = re.compile(r"[a-z][a-z0-9-]*://\S+")
_SAID_LINES, _LINE_BYTES = 20, 500
_PIECE = 1 << 20
_LAYERS = ("images", "layers", "scratch")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*m")


class ImageSource(NamedTuple):
    """What an image is made from: its name for Apptainer, and a digest that changes with its content."""

    name: str
    digest: str
    folder: str
    """The directory in which Apptainer runs, for the relative paths in a definition file."""
    is_content: bool
    """Whether the digest is one of the content, and not of an address."""


class Images:
    """Unpacks images into directories, once for each content, also with other drivers of this host."""

    def __init__(self) -> None:
        self._work = TaskSet()
        self._under_way: SingleFlight[None] = SingleFlight("the making of an image")
        self._places = asyncio.Semaphore(0)
        self._allowed = 0
        self._digests: dict[tuple[object, ...], str] = {}

    async def ensure(self, image: str, config: SingularityConfig, program: str) -> tuple[Path, SandboxImage]:
        """Return the directory of an image, which is made if need be, and what is known of the image.

        Callers who want the same image share one attempt, which is broken off when the last of them is cancelled.

        Raises:
            ImageError: there is no such image, it can't be built, or it took too long.
            ProvisionError: a registry does not answer, or the disk is full.
        """
        if (directory := _directory(image)) is not None:
            return directory, SandboxImage(image)
        source = await asyncio.to_thread(self._source, image)
        base = await asyncio.to_thread(_open_base, config)
        target = base / "images" / source.digest[:32]
        if not target.is_dir():
            await self._under_way.get(self._work, partial(self._make, source, base, config, program), target)
        return target, SandboxImage(image, f"sha256:{source.digest}" if source.is_content else None)

    async def aclose(self) -> None:
        """Cancel the work in progress. Idempotent."""
        await self._work.aclose()

    def _source(self, image: str) -> ImageSource:
        """Return what an image is made from. Blocks while it reads a file. Raises ImageError."""
        kind = next((each for each in _ARCHIVES if image.startswith(each)), "")
        if not kind and _ADDRESS.fullmatch(image):
            return ImageSource(image, hashlib.sha256(image.encode()).hexdigest(), "/", False)
        path = Path(image.removeprefix(kind)).expanduser().absolute()
        if not path.is_file():
            if kind or image.startswith(("/", ".", "~")) or image.endswith((".sif", ".def", ".img")):
                raise ImageError(f"image {image!r}: there is no file {path}", hint="check its path on this host")
            return self._source(f"docker://{image}")
        try:
            digest = self._digest(path)
            if path.suffix == ".def":
                digest = _digest_of_definition(path)
        except OSError as error:
            raise ImageError(f"image {image!r} can't be read: {error}", hint="check the rights of the file") from error
        if container.owner_outside() != os.geteuid() and not path.stat().st_mode & 0o004:
            raise ImageError(
                f"image {image!r}: its file can't be read by every user, and containers of root are not root outside",
                hint=f"`chmod o+r {path}`",
            )
        return ImageSource(f"{kind}{path}", digest, str(path.parent), True)

    def _digest(self, path: Path) -> str:
        info = path.stat()
        known = (path, info.st_ino, info.st_size, info.st_mtime_ns)
        if known not in self._digests:
            with path.open("rb") as file:
                self._digests[known] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[known]

    async def _make(self, source: ImageSource, base: Path, config: SingularityConfig, program: str) -> None:
        while self._allowed < config.images_at_a_time:
            self._allowed += 1
            self._places.release()
        async with self._places:
            log.info("making image %s", source.name)
            await _build(source, base, config, program)
            log.info("image %s is ready", source.name)


async def _build(source: ImageSource, base: Path, config: SingularityConfig, program: str) -> None:
    key = source.digest[:32]
    target, scratch = base / "images" / key, base / "scratch" / key
    variables = variables_for_downloads(scratch, os.environ)
    variables |= dict.fromkeys(("APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR"), str(base / "layers"))
    new = str(scratch / "image")  # Apptainer makes its own directories beside it
    request = {
        "lock": str(base / f"{key}.lock"),
        "target": str(target),
        "new": new,
        "scratch": str(scratch),
        "command": [program, "build", "--sandbox", new, source.name],
        "environment": variables,
        "directory": source.folder,
    }
    status, said = 1, ""
    try:
        async with asyncio.timeout(config.image_timeout_s):
            status, said = await _run(request)
    except TimeoutError as error:
        raise ImageError(
            f"image {source.name} was not made within {config.image_timeout_s:g} s", hint="raise image_timeout_s"
        ) from error
    if status != 0 or not target.is_dir():
        raise classify_failure(source.name, said or f"exit status {status}")


async def _run(request: Mapping[str, object]) -> tuple[int, str]:
    """Run Apptainer by the launcher. Return its exit status, and the last lines that it wrote."""
    process = _start(request)
    assert process.stdout is not None
    reading = asyncio.create_task(asyncio.to_thread(_last_lines, process.stdout))
    try:
        said = await asyncio.shield(reading)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # it removes what it has begun
        await complete(asyncio.to_thread(process.wait))
        await complete(asyncio.wait([reading]))
        process.stdout.close()
    return process.returncode, said


def _start(request: Mapping[str, object]) -> subprocess.Popen[bytes]:
    with request_file(request) as descriptor:
        return subprocess.Popen(
            launcher_argv("build", descriptor),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={},
            pass_fds=(descriptor,),
            start_new_session=True,
        )


def _last_lines(stream: IO[bytes]) -> str:
    last: deque[str] = deque(maxlen=_SAID_LINES)
    while line := stream.readline(1 << 16):
        text = _COLOURS.sub(b"", line)[:_LINE_BYTES].decode("utf-8", "replace").strip()
        if text and not text.startswith(("INFO:", "WARNING:")):
            last.append(text)
    return "\n".join(last)


_SIGNS: tuple[tuple[type[ProvisionError], tuple[str, ...], str], ...] = (
    (ProvisionError, ("no space left on device", "disk quota exceeded"), "make room, or set image_dir to another disk"),
    (
        ImageError,
        ("unauthorized", "denied", "authentication required", "toomanyrequests"),
        "for a private image, set APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD",
    ),
    (ImageError, ("manifest unknown", "name unknown"), "check the image's name and tag"),
    (ImageError, ("unsquashfs",), "check that the file is whole, and that squashfs-tools are installed"),
    (
        ProvisionError,
        ("dial tcp", "no such host", "timeout", "connection refused", "tls", "x509", "connection reset"),
        "check the network and its proxy; without a registry, make a SIF file or a `docker save` archive elsewhere",
    ),
)
"""Each error class with parts of Apptainer's message by which it is recognised, and a hint. The first match counts."""


def classify_failure(image: str, said: str) -> ProvisionError:
    """Return the error for an image that could not be made, by Apptainer's last lines."""
    message, text = f"image {image} can't be made: {said}", said.lower()
    for kind, signs, hint in _SIGNS:
        if any(sign in text for sign in signs):
            return kind(message, hint=hint)
    return ImageError(message, hint="`apptainer build` with the same image says more")


def _directory(image: str) -> Path | None:
    """Return the directory with this path, for an image that needs no unpacking. Raises ImageError if it can't be
    used."""
    path = Path(image).expanduser().absolute()
    if not path.is_dir() or ":" in image:
        return None
    if not (path / "bin" / "sh").exists() and not (path / "bin").is_symlink():
        raise ImageError(f"image {image!r}: {path} has no root file system (no bin/sh)", hint="name another directory")
    if path.stat().st_uid != container.owner_outside():
        raise ImageError(
            f"image {image!r}: {path} belongs to another user than containers here, which could not change its files",
            hint=f"pack it: `apptainer build image.sif {path}`, and name image.sif",
        )
    return path


def _digest_of_definition(path: Path) -> str:
    """Return a digest of a definition file, and of the sizes and times of the files that it names."""
    text = path.read_bytes()
    digest = hashlib.sha256(text)
    for word in sorted({*text.decode("utf-8", "replace").split()}):
        named = path.parent / word
        try:
            info = named.stat()
        except (OSError, ValueError):
            continue
        digest.update(f"\0{word} {info.st_size} {info.st_mtime_ns}".encode())
    return digest.hexdigest()


def _open_base(config: SingularityConfig) -> Path:
    """Return the directory of the images, which is made if need be."""
    base = Path(host.open_place(host.place_of(config.image_dir, f"{host_directory()}/hermes-rl-images"), "image_dir"))
    for name in _LAYERS:
        (base / name).mkdir(mode=0o755, exist_ok=True)
        if (owner := container.owner_outside()) != os.geteuid():
            os.chown(base / name, owner, owner)
    return base


def host_directory() -> str:
    """Return the host's directory for temporary files."""
    import tempfile

    return str(Path(tempfile.gettempdir()).absolute())
