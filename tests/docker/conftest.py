"""What the Docker tests share: the real daemon, the images that `.ci/docker` builds, sandboxes that are ended."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import docker
import pytest
from docker import APIClient
from hermes_docker.backend import DockerBackend
from hermes_docker.config import DockerConfig

from hermes_core.sandbox.contract import Isolation, SandboxSpec


@pytest.fixture(scope="session", autouse=True)
def _daemon(docker_images: tuple[str, str]) -> None:
    """Every test here needs it."""


@pytest.fixture(scope="session")
def python_image(docker_images: tuple[str, str]) -> str:
    return docker_images[0]


@pytest.fixture(scope="session")
def busybox_image(docker_images: tuple[str, str]) -> str:
    return docker_images[1]


@pytest.fixture
def api() -> Iterator[APIClient]:
    """The daemon, asked behind the backend's back."""
    client = docker.DockerClient.from_env()
    yield client.api
    client.close()


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend(owner: str) -> AsyncIterator[DockerBackend]:
    """A backend; what is left of the test's owner is ended."""
    made = DockerBackend()
    yield made
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def spec(owner: str, python_image: str) -> Callable[..., SandboxSpec]:
    """`spec(isolation, ttl_s, **config)`: with a creation id of its own, or the one that is given."""

    def make(
        isolation: Isolation = Isolation.USER, *, ttl_s: float = 60, creation_id: str | None = None, **config: Any
    ) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner=owner,
            config=DockerConfig(**{"image": python_image, "orphan_ttl_s": ttl_s, **config}),
            isolation=isolation,
            labels={"profile": "default"},
        )

    return make
