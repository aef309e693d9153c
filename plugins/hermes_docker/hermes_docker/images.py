"""Pulls and builds images: each once, a few at the same time, with progress in the log."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors
from docker import APIClient

from hermes_core import (
    Image,
    ImageBuild,
    ImageError,
    ProvisionError,
    SandboxImage,
    SingleFlight,
    TaskSet,
    context_digest,
    write_context,
)
from hermes_docker import built
from hermes_docker.build_log import BuildLog
from hermes_docker.config import DockerConfig
from hermes_docker.daemon import DaemonError, DockerDaemon

log = logging.getLogger("hermes_core.docker")

PROGRESS_S = 5.0
"""Seconds between progress messages in the log."""

TOUCH_S = 60.0
"""Seconds after which another use of an image that was built here is recorded on the daemon."""


class ImageMissing(ImageError):
    """The image is neither on the daemon nor in its registry."""


class RegistryRefused(ImageError):
    """The registry requires a login, or refuses this user the image."""


class RegistryUnreachable(ProvisionError):
    """The registry does not answer."""


class DiskFull(ProvisionError):
    """The daemon's disk has no room for the image."""

    retryable = False


class BuildFailed(ImageError):
    """A Dockerfile's step failed, or the build took too long."""


class Images:
    """Makes images available on the daemon.

    Args:
        logs: the folder for the output of builds; None writes no files.
    """

    def __init__(self, daemon: DockerDaemon, logs: Path | None = None) -> None:
        self._daemon = daemon
        self._logs = logs
        self._places = asyncio.Semaphore(0)
        self._allowed = 0
        self._work = TaskSet()
        self._under_way: SingleFlight[None] = SingleFlight("the pull or build of an image")
        self._sources: dict[str, ImageBuild] = {}
        """The builds that were requested, by the image's tag."""
        self._used: dict[str, float] = {}
        """The time of the last recorded use of each image that was built here, by tag."""

    async def ensure(self, image: Image, config: DockerConfig) -> str:
        """Pull or build an image, if the daemon does not have it. Return the image's name on the daemon.

        Callers who want the same image share one attempt, which is broken off when the last of them is cancelled.

        Raises:
            ImageMissing, RegistryRefused, RegistryUnreachable, DiskFull, BuildFailed: the class gives the reason.
            ImageError: the folder can't be built.
            DaemonError: the daemon can't be reached.
        """
        if isinstance(image, ImageBuild):
            tag = await asyncio.to_thread(tag_of, image, config.platform)
            self._sources[tag] = image
        else:
            tag = image
        if not await self._daemon.call(lambda api: _has(api, tag)):
            await self._under_way.get(self._work, partial(self._fetch, tag, config), (tag, config.platform))
            self._used[tag] = time.monotonic()
        elif built.is_ours(tag) and time.monotonic() - self._used.get(tag, -TOUCH_S) >= TOUCH_S:
            self._used[tag] = time.monotonic()
            await self._daemon.call(lambda api: built.touch(api, tag))
        return tag

    def _allow(self, at_a_time: int) -> None:
        """Allow at least this many pulls and builds at the same time."""
        while self._allowed < at_a_time:
            self._allowed += 1
            self._places.release()

    async def about(self, image: str) -> SandboxImage:
        """Return the daemon's information about an image. The digest is the registry's, or the id of an image that was
        built here.

        Raises:
            DaemonError: the daemon can't be reached, or no longer has the image.
        """
        return await self._daemon.call(lambda api: _about(api, image))

    async def aclose(self) -> None:
        """Cancel the work in progress. Idempotent."""
        await self._work.aclose()

    async def _fetch(self, tag: str, config: DockerConfig) -> None:
        self._allow(config.images_at_a_time)
        async with self._places:
            if (build := self._sources.get(tag)) is not None:
                await self._build(build, tag, config)
            elif built.is_ours(tag):
                raise ImageMissing(f"image {tag} was built here and is gone", hint="name its folder: it is built again")
            else:
                await self._daemon.follow(partial(_pull, image=tag, platform=config.platform))

    async def _build(self, build: ImageBuild, tag: str, config: DockerConfig) -> None:
        output = BuildLog(self._logs, tag.rpartition(":")[2])
        try:
            async with asyncio.timeout(build.timeout_s):
                await self._daemon.follow(partial(_build, build=build, tag=tag, config=config, output=output))
        except TimeoutError as error:
            message = f"building {build} took longer than {build.timeout_s:g} s\n{output.last_lines}"
            raise BuildFailed(message.strip(), hint=f"{output.hint}; or raise the limit") from error
        finally:
            output.close()
        try:
            await self._daemon.call(lambda api: built.prune(api, config.built_images))
        except DaemonError as error:  # no reason to fail the build
            log.warning("old images could not be removed: %s", error)


def _pull(api: APIClient, image: str, platform: str | None) -> None:
    log.info("pulling image %s", image)
    name, tag = _split(image)
    try:
        for _ in _follow_events(api.pull(name, tag=tag, platform=platform, stream=True, decode=True), image):
            pass
    except (docker.errors.APIError, _EventError) as error:
        kind, hint = failure(error)
        raise kind(f"image {image!r} can't be pulled: {message_of(error)}", hint=f"{hint}; {_ANOTHER}") from error
    if not _has(api, image):
        raise ImageMissing(f"image {image!r} does not exist after its pull", hint="check its name and platform")
    log.info("image %s is there", image)


def _build(api: APIClient, build: ImageBuild, tag: str, config: DockerConfig, output: BuildLog) -> None:
    log.info("building image %s from %s%s", tag, build, "" if output.path is None else f"; see {output.path}")
    image_id = ""
    with tempfile.TemporaryFile() as context:
        if _tag(write_context(build, context), config.platform) != tag:
            raise BuildFailed(f"{build.folder} was changed while its image was built", hint="build it again")
        context.seek(0)
        try:
            events = api.build(
                fileobj=context,
                custom_context=True,
                dockerfile=build.dockerfile,
                platform=config.platform,
                labels=built.labels(tag),
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in _follow_events(events, tag):
                output.add(str(event.get("stream", "")) or _status_line(event))
                image_id = str((event.get("aux") or {}).get("ID", image_id))
        except (docker.errors.APIError, _EventError) as error:
            kind, hint = build_failure(error)
            message = f"building {build} failed: {message_of(error)}\n{output.last_lines}"
            raise kind(message.strip(), hint=f"{hint}; {output.hint}") from error
    built.name(api, image_id, tag)
    log.info("image %s is built", tag)


def _status_line(event: Mapping[str, Any]) -> str:
    """Return the line of a build's log for an event of a pull; empty for events that only report progress."""
    return f"{event['status']}\n" if "status" in event and not event.get("progressDetail") else ""


def _follow_events(events: Iterator[Mapping[str, Any]], image: str) -> Iterator[Mapping[str, Any]]:
    """Yield the daemon's progress events, and log some of them. Raise `_EventError` for an error among them."""
    layers: dict[str, tuple[int, int]] = {}
    last, failed = time.monotonic(), None
    for event in events:
        if "error" in event:  # go on to the end of the stream, or the connection can't be reused
            failed = _EventError(str(event["error"]), (event.get("errorDetail") or {}).get("code"))
        detail = event.get("progressDetail") or {}
        if detail.get("total"):
            layers[str(event.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
        if layers and time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            done, total = (sum(part) >> 20 for part in zip(*layers.values(), strict=True))
            log.info("image %s: %d of %d MiB so far", image, done, total)
        yield event
    if failed is not None:
        raise failed


class _EventError(Exception):
    """An error among the daemon's progress events. `status` is the exit status of a failed command, if there is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def message_of(error: Exception) -> str:
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
        f"check the image's name, and the daemon's network and proxy; {_LOAD}",
    ),
)
"""Each error class with parts of the daemon's message by which it is recognised, and a hint. The first match counts."""


def failure(error: Exception, otherwise: type[ProvisionError] = ProvisionError) -> tuple[type[ProvisionError], str]:
    """Return the error class and the hint for a failed pull, by the daemon's message."""
    message = message_of(error).lower()
    for kind, signs, hint in _SIGNS:
        if any(sign in message for sign in signs):
            return kind, hint
    return otherwise, "`docker info` and the daemon's log say more"


def build_failure(error: Exception) -> tuple[type[ProvisionError], str]:
    """Return the error class and the hint for a failed build.

    A failed command is not looked up in `_SIGNS`: the message has the command's own text, which may look like any sign.
    """
    if "buildkit" in message_of(error).lower():
        return BuildFailed, "build it with `docker build`, and name its image: this API has no BuildKit"
    if getattr(error, "status", None) is not None or getattr(error, "status_code", None) == 400:
        return BuildFailed, "fix the Dockerfile"
    return failure(error, otherwise=BuildFailed)


def tag_of(build: ImageBuild, platform: str | None = None) -> str:
    """Return the tag for a build, which changes with any file that the build can see. Blocking.

    Raises:
        ImageError: the folder can't be built.
    """
    return _tag(context_digest(build), platform)


def _tag(digest: str, platform: str | None) -> str:
    return built.tag(hashlib.sha256(f"{platform or ''}\0{digest}".encode()).hexdigest())


def _has(api: APIClient, image: str) -> bool:
    try:
        api.inspect_image(image)  # type: ignore[no-untyped-call]  # the stubs leave it out
    except docker.errors.NotFound:
        return False
    return True


def _about(api: APIClient, image: str) -> SandboxImage:
    info = api.inspect_image(image)  # type: ignore[no-untyped-call]  # as above
    names, config = info.get("RepoDigests") or [""], info.get("Config") or {}
    return SandboxImage(
        image,
        str(names[0].partition("@")[2] or info["Id"]),
        workdir=config.get("WorkingDir") or "/",
        user=config.get("User") or "root",
        variables=dict(each.split("=", 1) for each in config.get("Env") or () if "=" in each),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        healthcheck=config.get("Healthcheck"),
    )


def _split(image: str) -> tuple[str, str | None]:
    """Return the name and the tag of an image: `latest` if it has no tag, because the daemon would pull all tags then.
    For an image with a digest, return the whole text and None."""
    if "@" in image:
        return image, None
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")
