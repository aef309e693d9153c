"""The settings of a profile of the `docker` backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from docker.types import Mount
from pydantic import Field, field_validator, model_validator

from hermes_core import Image, ImageBuild, Network, SandboxConfig, TerminalVariables

SYS_ADMIN = "SYS_ADMIN"
DEFAULT_IMAGE = "python:3.11"


class DockerConfig(SandboxConfig):
    """A profile of the `docker` backend."""

    terminal = TerminalVariables(
        {
            "TERMINAL_DOCKER_IMAGE": "image",
            "TERMINAL_DOCKER_VOLUMES": "volumes",
            "TERMINAL_CONTAINER_CPU": "cpu",
            "TERMINAL_CONTAINER_MEMORY": "memory",
        },
        lists=("TERMINAL_DOCKER_VOLUMES",),
    )

    image: str | None = DEFAULT_IMAGE
    """The image; pulled when the daemon does not have it."""
    dockerfile: str | None = None
    """A folder with a Dockerfile, built once per content of the folder. Instead of `image`."""
    built_images: int = Field(default=200, ge=1)
    """How many of the images that were built here are kept. After a build, the least recently used go, but none that a
    container has, or that was used in the last ten minutes."""
    images_at_a_time: int = Field(default=2, ge=1, le=64)
    """How many images are pulled or built at the same time, over all pools. With several profiles, the largest value
    counts."""
    platform: str | None = None
    """The platform of the image, such as `linux/amd64`; None is the daemon's own."""
    user: str | None = None
    """The user of the sandbox's processes; None is root, which the levels `user` and `namespace` need."""
    shm_size: int | None = Field(default=None, gt=0)
    """The size of /dev/shm in MiB; None is the daemon's default."""
    gpus: int | None = Field(default=None, ge=-1)
    """How many GPUs; -1 is all of them."""
    tmpfs: dict[str, str] = Field(default_factory=dict)
    """Directories kept in memory, with their mount options: `{"/tmp": "size=512m,exec"}`."""
    read_only: bool = False
    """Whether the image's files can't be changed. The slots' directories can; /tmp only if `tmpfs` names it."""
    volumes: tuple[str, ...] = ()
    """The mounts: `/on/the/daemons/host:/in/sandbox`, or `volume:/in/sandbox`, with `:ro` if read-only."""
    network_name: str | None = None
    """The name of a network of the daemon, in place of the default bridge."""
    pids_limit: int = Field(default=4096, ge=64)
    """Maximum number of processes of the whole sandbox; `max_processes` is the limit of one slot."""
    cap_add: tuple[str, ...] = ()
    """Kernel capabilities beside those that slots of level `user` need. `namespace` and `private-root` need
    SYS_ADMIN."""
    security_opt: tuple[str, ...] = ()
    """Further security options, such as `apparmor=unconfined` where AppArmor forbids mounts to level `namespace`."""

    @property
    def source(self) -> Image:
        """Return the image of the containers, or the folder that it is built from."""
        if self.dockerfile is not None:
            return ImageBuild(Path(self.dockerfile))
        assert self.image is not None, "validation demands one of the two"
        return self.image

    @property
    def gpu_count(self) -> int | None:
        """Return the number of GPUs of a container; None for all GPUs."""
        return None if self.gpus == -1 else self.gpus or 0

    @field_validator("network", mode="before")
    @classmethod
    def _bridge_is_open(cls, value: Any) -> Any:
        return Network.OPEN if value == "bridge" else value

    @field_validator("volumes")
    @classmethod
    def _can_be_mounted(cls, volumes: tuple[str, ...]) -> tuple[str, ...]:
        for volume in volumes:
            mount(volume)
        return volumes

    @field_validator("cap_add")
    @classmethod
    def _without_prefix(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.upper().removeprefix("CAP_") for name in names)

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, given: Any) -> Any:
        """`image` has a default, which `dockerfile` replaces."""
        if isinstance(given, Mapping) and given.get("dockerfile") and not given.get("image"):
            return {**given, "image": None}
        return given

    @model_validator(mode="after")
    def _agree(self) -> DockerConfig:
        if self.image and self.dockerfile:
            raise ValueError("image and dockerfile are both set")
        if not self.image and not self.dockerfile:
            raise ValueError(f"image is empty: leave it out for {DEFAULT_IMAGE}, or set dockerfile")
        if self.network_name and self.network not in (Network.OPEN, Network.SETUP):
            raise ValueError(f"network_name is set, and network is {self.network.value}")
        return self


def mount(volume: str) -> Mount:
    """Return the mount for a line of `volumes`.

    Raises:
        ValueError: the line is not valid.
    """
    source, colon, rest = volume.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not colon or not PurePosixPath(target).is_absolute() or mode not in ("", "ro", "rw"):
        raise ValueError(f"must be SOURCE:/TARGET or SOURCE:/TARGET:ro, not {volume!r}")
    return Mount(target, source, type="bind" if source.startswith("/") else "volume", read_only=mode == "ro")
