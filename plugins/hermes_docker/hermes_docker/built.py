"""The images that were built here: their names, and which of them to keep. Blocking, so call it in threads.

An image is ours if its only name is one that we give, and its label says the same. An image that somebody has built on
one of ours inherits the label, but not the name.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

import docker.errors
from docker import APIClient

from hermes_core import ProvisionError

log = logging.getLogger("hermes_core.docker")

REPOSITORY = "hermes-rl-built"
LABEL = "hermes-rl.built"
"""The label with the tag that the image was built for."""

SPARED = timedelta(minutes=10)
"""An image that was used in this time before the last one is kept, because its sandbox may just be made."""

_PODMAN = "localhost/"
"""What Podman puts before a name without a registry."""


def tag(digest: str) -> str:
    """Return the name of the image with this digest of its sources."""
    return f"{REPOSITORY}:{digest[:24]}"


def is_ours(image: str) -> bool:
    """Return whether this is a name that only images have which were built here."""
    return image.startswith(f"{REPOSITORY}:")


def labels(image: str) -> dict[str, str]:
    """Return the labels for an image with this name."""
    return {LABEL: image.rpartition(":")[2]}


def name(api: APIClient, image_id: str, image: str) -> None:
    """Give a new image its name, unless another driver has built the same one meanwhile: then remove this one.

    Raises:
        ProvisionError: the daemon did not say which image it has built.
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
    """Note that an image is used now. The daemon keeps the time at which it was last given a name."""
    repository, _, word = image.rpartition(":")
    api.tag(image_id or image, repository, word, force=True)


def prune(api: APIClient, keep: int) -> list[str]:
    """Remove images that were built here and not used for the longest time. Return their names.

    Args:
        keep: number of images that stay. More stay if they were used just now, or containers have them.
    """
    ours = [image for image in api.images(filters={"label": LABEL}) if _name(image)]
    if len(ours) <= keep:
        return []
    used = {_name(image): _last_used(api, image) for image in ours}
    oldest = sorted(used, key=lambda each: used[each])[: len(ours) - keep]
    newest = max(used.values())
    removed = [image for image in oldest if newest - used[image] > SPARED and _remove(api, image)]
    if removed:
        log.info("%d images that were built here and not used for long are removed", len(removed))
    return removed


def _name(image: Any) -> str:
    """Return the name of an image of ours; empty if it is not ours."""
    names = [each.removeprefix(_PODMAN) for each in image.get("RepoTags") or ()]
    ours = f"{REPOSITORY}:{(image.get('Labels') or {}).get(LABEL)}"
    return ours if names == [ours] else ""


def _last_used(api: APIClient, image: Any) -> datetime:
    """Return when an image was last given its name; when it was built, where the daemon does not keep that."""
    try:
        found = api.inspect_image(image["Id"])  # type: ignore[no-untyped-call]  # as above
        return max(_time(found["Created"]), _time((found.get("Metadata") or {}).get("LastTagTime") or found["Created"]))
    except docker.errors.NotFound:  # somebody else has removed it
        return datetime.min.replace(tzinfo=_time("1970-01-01T00:00:00Z").tzinfo)


def _time(text: str) -> datetime:
    """Return a time of the daemon's, which has nanoseconds."""
    return datetime.fromisoformat(text)


def _remove(api: APIClient, image: str) -> bool:
    """Remove an image, unless a container has it. Return whether it is gone."""
    try:
        api.remove_image(image)
    except docker.errors.NotFound:
        return True
    except docker.errors.APIError as error:
        if error.status_code != 409:
            log.warning("image %s can't be removed: %s", image, error.explanation)
        return False
    return True
