"""What the tests of Apptainer share: the real program and two images from `.ci/apptainer`, sandboxes that are ended."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hermes_singularity.backend import SingularityBackend
from hermes_singularity.config import SingularityConfig

from hermes_core.sandbox.contract import Isolation, SandboxSpec


@pytest.fixture
def place(apptainer: Path) -> Iterator[Path]:
    """A directory for this test's sandboxes, of which nothing is to be left."""
    path = Path(tempfile.mkdtemp(prefix="hermes-singularity-", dir="/var/tmp"))
    path.chmod(0o711)  # root of a container is not root outside
    yield path
    left = sorted(each.name for each in path.iterdir())
    shutil.rmtree(path)
    assert left == []


@pytest.fixture
def profile(apptainer: Path, place: Path) -> dict[str, Any]:
    """The settings of a profile with the small image, whose sandboxes are in `place`."""
    return {
        "image": f"docker-archive:{apptainer}/busybox.tar",
        "state_dir": str(place),
        "orphan_ttl_s": 60,
    }


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend(owner: str) -> AsyncIterator[SingularityBackend]:
    """A backend; what is left of the test's owner is ended."""
    made = SingularityBackend()
    yield made
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def spec(owner: str, profile: dict[str, Any]) -> Callable[..., SandboxSpec]:
    """`spec(isolation, **config)`: with a creation id of its own, or the one that is given."""

    def make(
        isolation: Isolation = Isolation.DEDICATED, *, creation_id: str | None = None, **config: Any
    ) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner=owner,
            config=SingularityConfig(**{**profile, **config}),
            isolation=isolation,
        )

    return make
