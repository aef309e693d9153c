"""Images: already present, pulled, or built from a folder. Each is fetched once, a few at the same time, with progress
in the log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors
from docker import APIClient
from docker.utils.build import exclude_paths

from hermes_core import ConfigError, ProvisionError, SingleFlight, TaskSet
from hermes_docker.config import DockerConfig
from hermes_docker.daemon import Daemon

log = logging.getLogger("hermes_core.docker")

AT_A_TIME = 2
"""Maximum number of images that are pulled or built at the same time."""

PROGRESS_S = 5.0
"""Seconds between progress messages in the log."""

BUILT = "hermes-rl-built"
"""The repository name of images that are built here. Their tag is derived from their sources."""

_LOG_LINES = 20


class ImageMissing(ProvisionError):
    """There is no such image, neither here nor in its registry."""

    retryable = False


class RegistryRefused(ProvisionError):
    """The registry requires a login, or does not allow this user to have the image."""

    retryable = False


class RegistryUnreachable(ProvisionError):
    """The registry does not answer."""


class DiskFull(ProvisionError):
    """The daemon's disk has no room for the image."""

    retryable = False


class BuildFailed(ProvisionError):
    """A Dockerfile's step failed."""

    retryable = False


class Images:
    """Makes the images of the profiles available on the daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._work = TaskSet()
        self._under_way: SingleFlight[None] = SingleFlight("the pull or build of an image", go_on=True)
        self._closing = threading.Event()

    async def ensure(self, config: DockerConfig) -> str:
        """Return the name of the profile's image, once the daemon has it.

        If a caller is cancelled, the work continues for others that wait for the same image, or for the next caller.

        Raises:
            ImageMissing, RegistryRefused, RegistryUnreachable, DiskFull, BuildFailed: the class says what went wrong.
            ConfigError: the profile names a folder without a Dockerfile.
            DaemonError: the daemon can't be reached.
        """
        if config.dockerfile is not None:
            folder = Path(config.dockerfile)
            tag = await asyncio.to_thread(tag_of, folder, config.platform)
            fetch = partial(self._build, folder=folder, tag=tag, platform=config.platform)
        else:
            assert config.image is not None, "a profile has one or the other"
            tag = config.image
            fetch = partial(self._pull, image=tag, platform=config.platform)
        if await self._daemon.call(lambda api: _has(api, tag)):
            return tag
        await self._under_way.get(self._work, partial(self._fetch, fetch), (tag, config.platform))
        return tag

    async def digest(self, image: str) -> str:
        """Return the digest by which the image's registry knows it. One that was built here has only its id.

        Raises:
            DaemonError: the daemon can't be reached, or no longer has it.
        """
        return await self._daemon.call(lambda api: _digest(api, image))

    async def aclose(self) -> None:
        """Cancel the work in progress. Idempotent."""
        self._closing.set()
        await self._work.aclose()

    async def _fetch(self, fetch: Callable[[APIClient], None]) -> None:
        async with self._places:
            await self._daemon.call(fetch)

    def _pull(self, api: APIClient, image: str, platform: str | None) -> None:
        log.info("pulling image %s", image)
        name, tag = _split(image)
        try:
            for _ in self._told(api.pull(name, tag=tag, platform=platform, stream=True, decode=True), image):
                pass
        except (docker.errors.APIError, _Said) as error:
            kind, hint = failure(error)
            said = f"image {image!r} can't be pulled: {said_by(error)}"
            raise kind(said, hint=f"{hint}; {_ANOTHER}") from error
        if not _has(api, image):
            raise ImageMissing(f"image {image!r} does not exist after its pull", hint="check its name and platform")
        log.info("image %s is there", image)

    def _build(self, api: APIClient, folder: Path, tag: str, platform: str | None) -> None:
        log.info("building image %s from %s", tag, folder)
        lines: list[str] = []
        try:
            events = api.build(path=str(folder), tag=tag, platform=platform, rm=True, forcerm=True, decode=True)
            for event in self._told(events, tag):
                if line := str(event.get("stream", "")).strip():
                    log.debug("%s: %s", tag, line)
                    lines = [*lines, line[:500]][-_LOG_LINES:]
        except (docker.errors.APIError, _Said) as error:
            kind, hint = failure(error, otherwise=BuildFailed)
            said = "\n".join(lines)
            raise kind(f"building {folder} failed: {said_by(error)}\n{said}".strip(), hint=hint) from error
        log.info("image %s is built", tag)

    def _told(self, events: Iterator[Mapping[str, Any]], image: str) -> Iterator[Mapping[str, Any]]:
        """Yield the daemon's progress events, and log some of them. Raise `_Said` for an error among them."""
        layers: dict[str, tuple[int, int]] = {}
        last, failed = time.monotonic(), ""
        for event in events:
            if self._closing.is_set():
                raise ProvisionError(f"image {image!r}: broken off, the backend is being closed")
            if "error" in event:
                failed = str(event["error"])  # keep the last error; a connection that is read to its end can be reused
            detail = event.get("progressDetail") or {}
            if detail.get("total"):
                layers[str(event.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
            if layers and time.monotonic() - last > PROGRESS_S:
                last = time.monotonic()
                done, total = (sum(part) >> 20 for part in zip(*layers.values(), strict=True))
                log.info("image %s: %d of %d MiB so far", image, done, total)
            yield event
        if failed:
            raise _Said(failed)


class _Said(Exception):
    """An error among the daemon's progress events."""


def said_by(error: Exception) -> str:
    """Return the daemon's message."""
    return str(getattr(error, "explanation", None) or error).strip()


_CHECK_NAME = "check its name and tag; a private one needs `docker login` by the user who runs this"
_LOAD = "or bring it from elsewhere, with `docker save` there and `docker load` here"
_ANOTHER = "or name another image with `--backend.image=NAME`: `docker images` lists those that need no pull"

_SIGNS: tuple[tuple[type[ProvisionError], tuple[str, ...], str], ...] = (
    (DiskFull, ("no space left on device",), "`docker system prune` frees room"),
    (RegistryRefused, ("toomanyrequests", "rate limit"), f"`docker login` raises the registry's limit; {_LOAD}"),
    # The message for a missing image may look the same: "repository does not exist or may require 'docker login':
    # denied: …".
    (
        RegistryRefused,
        ("unauthorized", "authentication required", "no basic auth", "denied: ", "forbidden"),
        _CHECK_NAME,
    ),
    (
        ImageMissing,
        (
            "not found",
            "manifest unknown",
            "does not exist",
            "no such image",
            "no matching manifest",
            "invalid reference",
        ),
        _CHECK_NAME,
    ),
    (
        RegistryUnreachable,
        ("dial tcp", "no such host", "timeout", "connection refused", "tls", "x509", "eof", "canceled"),
        f"check the daemon's network and proxy; {_LOAD}",
    ),
)
"""Texts in the daemon's messages that identify a failure. The first one that is found counts."""


def failure(error: Exception, otherwise: type[ProvisionError] = ProvisionError) -> tuple[type[ProvisionError], str]:
    """Return the error class and hint for an image that could not be made available, by the daemon's message."""
    said = said_by(error).lower()
    for kind, signs, hint in _SIGNS:
        if any(sign in said for sign in signs):
            return kind, hint
    return otherwise, "`docker info` and the daemon's log say more"


def tag_of(folder: Path, platform: str | None = None) -> str:
    """Return the tag for a build of this folder. It changes with any file that the build can see. Blocking.

    Raises:
        ConfigError: there is no Dockerfile in it.
    """
    if not (folder / "Dockerfile").is_file():
        raise ConfigError(f"{folder} has no Dockerfile", hint="let `dockerfile` name the folder that it is in")
    ignore = folder / ".dockerignore"
    patterns = [line.strip() for line in ignore.read_text("utf-8").splitlines()] if ignore.is_file() else []
    digest = hashlib.sha256((platform or "").encode())
    excluded = [line for line in patterns if line and not line.startswith("#")]
    for name in sorted(exclude_paths(str(folder), excluded, dockerfile="Dockerfile")):
        path = folder / name
        digest.update(f"\0{name}\0{path.lstat().st_mode:o}\0".encode("utf-8", "surrogateescape"))
        if path.is_symlink():
            digest.update(os.fsencode(path.readlink()))
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{BUILT}:{digest.hexdigest()[:24]}"


def _has(api: APIClient, image: str) -> bool:
    try:
        api.inspect_image(image)  # type: ignore[no-untyped-call]  # the stubs leave it out
    except docker.errors.NotFound:
        return False
    return True


def _digest(api: APIClient, image: str) -> str:
    found = api.inspect_image(image)  # type: ignore[no-untyped-call]  # as above
    names = found.get("RepoDigests") or [""]
    return str(names[0].partition("@")[2] or found["Id"])


def _split(image: str) -> tuple[str, str | None]:
    """Return the name and the tag (or digest) of an image. Without a tag, the daemon would pull every tag."""
    if "@" in image:
        return image, None
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")
