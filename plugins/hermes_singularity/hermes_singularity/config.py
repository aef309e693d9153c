"""The settings of a profile of the `singularity` backend."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from pydantic import Field, field_validator, model_validator

from hermes_core import SandboxConfig, TerminalVariables

_OWN = ("/", "/data", "/dev", "/proc", "/tmp", "/var/tmp")
"""The directories that a container has from us or from Apptainer."""


class SingularityConfig(SandboxConfig):
    """A profile of the `singularity` backend. Its containers use the processors and the memory of the host."""

    unsupported = ("cpu", "memory")
    terminal = TerminalVariables(
        {"TERMINAL_SINGULARITY_IMAGE": "image"},
        unread={
            "TERMINAL_CONTAINER_CPU": "an ordinary user's containers have no limits of their own",
            "TERMINAL_CONTAINER_MEMORY": "an ordinary user's containers have no limits of their own",
        },
    )

    image: str | None = "docker://python:3.11"
    """The image: a SIF file, a definition file (`*.def`), a directory with a root file system, `docker-archive:FILE`,
    `oci-archive:FILE`, or an address such as `docker://python:3.11`. Any other name is one of Docker's registry."""
    volumes: tuple[str, ...] = ()
    """The mounts: `/on/the/host:/in/the/container`, with `:ro` if read-only. Nothing else of the host is mounted."""
    gpus: bool = False
    """Whether containers have the host's NVIDIA GPUs and their drivers (`--nv`)."""
    tmpfs_size: int | None = Field(default=None, gt=0)
    """Keep what a container writes in memory, up to this many MiB. None keeps it on disk, in `state_dir`."""
    state_dir: str | None = None
    """The directory of the sandboxes, on a local disk and never on a network one. None is `hermes-rl-containers-<uid>`
    in the directory for temporary files."""
    image_dir: str | None = None
    """The directory in which images are kept unpacked, on a local disk. None is `hermes-rl-images-<uid>` in the
    directory for temporary files."""
    images_at_a_time: int = Field(default=2, ge=1, le=64)
    """How many images are fetched or built at the same time, over all pools. With several profiles, the largest value
    counts."""
    image_timeout_s: float = Field(default=1800.0, gt=0)
    """Time limit in seconds for fetching or building one image."""
    arguments: tuple[str, ...] = ()
    """More arguments of `apptainer exec`, such as `--rocm`."""

    @model_validator(mode="before")
    @classmethod
    def _show_volumes(cls, given: Any) -> Any:
        """Slots of level `namespace` see only the system, and what is in `visible_paths`."""
        if not isinstance(given, Mapping) or not isinstance(given.get("volumes"), Sequence):
            return given
        targets = [part[1] for each in given["volumes"] if len(part := str(each).split(":")) > 1]
        return {**given, "visible_paths": tuple(dict.fromkeys([*given.get("visible_paths", ()), *targets]))}

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of a container: 0, or None for all of the host's."""
        return None if self.gpus else 0

    @field_validator("image")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        if not value or value != value.strip() or value.startswith("-") or "\0" in value:
            raise ValueError("name an image: a SIF file, a definition file, a directory, or docker://python:3.11")
        return value

    @field_validator("volumes")
    @classmethod
    def _can_be_mounted(cls, volumes: tuple[str, ...]) -> tuple[str, ...]:
        for volume in volumes:
            match = re.fullmatch(r"(/[^:,]*):(/[^:,]*)(:ro|:rw)?", volume)
            if match is None:
                raise ValueError(f"must be /SOURCE:/TARGET or /SOURCE:/TARGET:ro, without commas, not {volume!r}")
            if str(PurePosixPath(match[2])) in _OWN:
                raise ValueError(f"{volume!r} would hide a directory that each container has of its own")
        return volumes
