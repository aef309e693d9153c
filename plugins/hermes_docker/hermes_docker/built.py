"""The images that were built here: their names, and which of them to keep. Blocking, so call it in threads.

An image was built here if its only name is the name in its label. An image that somebody has built on top of it
inherits the label, but not the name.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import docker.errors
from docker import APIClient

from hermes_core import ProvisionError

log = logging.getLogger("hermes_core.docker")

REPOSITORY = "hermes-rl-built"
LABEL = "hermes-rl.built"
"""The label with the tag that the image was built for."""

SPARED = timedelta(minutes=10)
"""An image whose last use is at most this long before the newest use of any image is kept: a sandbox may just be made
from it."""

_PODMAN = "localhost/"
"""The prefix that Podman puts before a name without a registry."""


def tag(digest: str) -> str:
    """Return the name of an image whose sources have this digest."""
    return f"{REPOSITORY}:{digest[:24]}"


def is_ours(image: str) -> bool:
    """Return whether `image` is a name that only images built here have."""
    return image.startswith(f"{REPOSITORY}:")


def labels(image: str) -> dict[str, str]:
    """Return the labels for an image with this name."""
    return {LABEL: image.rpartition(":")[2]}


def name(api: APIClient, image_id: str, image: str) -> None:
    """Name a new image. If another driver has built the same image meanwhile, remove the new one instead.

    Raises:
        ProvisionError: `image_id` is empty, because the daemon did not say which image it has built.
    """
    if not image_id:
        raise ProvisionError(f"the daemon did not say which image it built as {image}", hint="`docker info` says more")
    try:
        known = api.inspect_image(image)["Id"]  # type: ignore[no-untyped-call]  # the stubs leave it out
    except docker.errors.NotFound:
        touch(api, image, image_id)
        return
    if known != image_id:
        log.info("image %s was built by another driver at the same time", image)
        _remove(api, image_id)


def touch(api: APIClient, image: str, image_id: str | None = None) -> None:
    """Record the use of an image, by naming it again: the daemon keeps the time of the last naming."""
    repository, _, word = image.rpartition(":")
    api.tag(image_id or image, repository, word, force=True)


def prune(api: APIClient, keep: int) -> list[str]:
    """Remove the least recently used images that were built here. Return their names.

    Args:
        keep: number of images to keep. Images that were used just now, or that containers have, are kept in any case.
    """
    images = [image for image in api.images(filters={"label": LABEL}) if _name(image)]
    if len(images) <= keep:
        return []
    last_use = {_name(image): _last_used(api, image) for image in images}
    oldest = sorted(last_use, key=lambda name: last_use[name])[: len(images) - keep]
    newest_use = max(last_use.values())
    removed = [name for name in oldest if newest_use - last_use[name] > SPARED and _remove(api, name)]
    if removed:
        log.info("%d images that were built here and not used for long are removed", len(removed))
    return removed


def _name(image: Any) -> str:
    """Return the name of an image that was built here; empty for any other image."""
    names = [each.removeprefix(_PODMAN) for each in image.get("RepoTags") or ()]
    ours = f"{REPOSITORY}:{(image.get('Labels') or {}).get(LABEL)}"
    return ours if names == [ours] else ""


def _last_used(api: APIClient, image: Any) -> datetime:
    """Return the time when an image was last named; the time of its build if the daemon does not keep the former."""
    try:
        info = api.inspect_image(image["Id"])  # type: ignore[no-untyped-call]  # as above
    except docker.errors.NotFound:  # somebody else has removed it
        return datetime.min.replace(tzinfo=UTC)
    times = info["Created"], (info.get("Metadata") or {}).get("LastTagTime") or info["Created"]
    return max(map(datetime.fromisoformat, times))


def _remove(api: APIClient, image: str) -> bool:
    """Remove an image, unless a container uses it. Return whether it is gone."""
    try:
        api.remove_image(image)
    except docker.errors.NotFound:
        return True
    except docker.errors.APIError as error:
        if error.status_code != 409:
            log.warning("image %s can't be removed: %s", image, error.explanation)
        return False
    return True
