"""Where your test's sandboxes are: `sandboxes` is a folder for local ones, `where` a backend and a level.

A test with `where` runs at `local user` in `make test`, and in namespaces and in Docker as well in `make test-all`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def sandboxes() -> Iterator[Path]:
    """A folder for local sandboxes. It is not below /tmp, of which slots may have their own."""
    folder = Path(tempfile.mkdtemp(prefix="hermes-test-", dir="/srv" if os.geteuid() == 0 else "/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    params=["local user", *(pytest.param(each, marks=pytest.mark.full) for each in ("local namespace", "docker user"))]
)
def where(request: pytest.FixtureRequest) -> dict[str, object]:
    """Options of a run: a backend that can be used here, and the level."""
    from hermes_core.sandbox.contract import Isolation
    from hermes_core.sandbox.local.backend import LocalBackend

    backend, level = request.param.split()
    config = {}
    if backend == "docker":
        config = {"image": request.getfixturevalue("docker_images")[0]}
    elif Isolation.parse(level) not in LocalBackend().capabilities.isolation:
        pytest.skip(f"this host grants no isolation {level}")
    return {"backend": backend, "isolation": level, "backend_config": config}
