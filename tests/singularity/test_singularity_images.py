"""Images of every kind, unpacked once by the real program, and what becomes of those that can't be made."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hermes_singularity.backend import SingularityBackend

from hermes_core.errors import ImageError, ProvisionError
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec
from tests.support.processes import runs

Spec = Callable[..., SandboxSpec]


async def output_of(sandbox: Sandbox, script: str) -> str:
    """What a script prints in a sandbox; it has to succeed."""
    async with aclosing(await sandbox.open(["sh", "-ec", script])) as channel:
        output = b""
        while data := await channel.read(1 << 16):
            output += data
        assert await channel.wait() == 0, channel.stderr_tail
    return output.decode()


@pytest.fixture
def images(place: Path, profile: dict[str, Any]) -> Iterator[Path]:
    """The directory of this test's images, empty at first; nothing unfinished is to be left in it."""
    path = place.with_name(f"{place.name}-images")
    profile["image_dir"] = str(path)
    yield path
    left = [*path.glob("scratch/*")]
    shutil.rmtree(path)
    assert left == []


@pytest.fixture
def busybox(apptainer: Path) -> str:
    return f"docker-archive:{apptainer}/busybox.tar"


def definition(folder: Path, post: str, *, bootstrap: str = "docker-archive", source: str, files: str = "") -> Path:
    """A definition file that everyone can read."""
    path = folder / "image.def"
    path.write_text(f"Bootstrap: {bootstrap}\nFrom: {source}\n{files}\n%post\n    {post}\n")
    return path


@pytest.fixture
def folder(place: Path) -> Iterator[Path]:
    """A folder for image files, which everyone can read."""
    path = place.with_name(f"{place.name}-files")
    path.mkdir(mode=0o755)
    yield path
    shutil.rmtree(path)


async def test_an_archive_is_unpacked_once_for_all(images: Path, spec: Spec, backend: SingularityBackend) -> None:
    other = SingularityBackend()
    first, second, third = await asyncio.gather(backend.create(spec()), backend.create(spec()), other.create(spec()))
    (unpacked,) = (images / "images").iterdir()
    assert first.image is not None and str(first.image.digest).startswith("sha256:")
    await output_of(first, "echo changed >/etc/own; rm /bin/ls; test -e /etc/own")
    assert await output_of(second, "ls -d /bin/ls; test ! -e /etc/own") == "/bin/ls\n"
    assert not (unpacked / "etc/own").exists()
    await third.terminate()
    await other.aclose()


async def test_a_sif_file_and_what_is_wrong_with_a_broken_one(
    images: Path, folder: Path, busybox: str, spec: Spec, backend: SingularityBackend
) -> None:
    sif = folder / "image.sif"
    subprocess.run(["apptainer", "build", str(sif), busybox], check=True, capture_output=True)
    sif.chmod(0o644)
    sandbox = await backend.create(spec(image=str(sif)))
    assert "busybox" in await output_of(sandbox, "readlink /bin/sh")
    data = sif.read_bytes()
    sif.write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageError, match=r"image\.sif can't be made"):
        await backend.create(spec(image=str(sif)))


async def test_a_definition_file_is_built_again_when_what_it_names_changes(
    images: Path, folder: Path, apptainer: Path, spec: Spec, backend: SingularityBackend
) -> None:
    (folder / "greeting").write_text("hello\n")
    path = definition(
        folder, "id -u >/built", source=f"{apptainer}/busybox.tar", files="%files\n    greeting /greeting"
    )
    sandbox = await backend.create(spec(image=str(path)))
    assert await output_of(sandbox, "cat /built /greeting") == "0\nhello\n"
    (folder / "greeting").write_text("hello again\n")
    sandbox = await backend.create(spec(image=str(path)))
    assert await output_of(sandbox, "cat /greeting") == "hello again\n"
    assert len([*(images / "images").iterdir()]) == 2


async def test_a_directory_is_used_as_it_is(
    images: Path, folder: Path, spec: Spec, backend: SingularityBackend
) -> None:
    await backend.create(spec())
    (unpacked,) = (images / "images").iterdir()
    sandbox = await backend.create(spec(image=str(unpacked)))
    assert await output_of(sandbox, "echo fine") == "fine\n" and sandbox.image is not None
    assert sandbox.image.digest is None and len([*(images / "images").iterdir()]) == 1
    with pytest.raises(ImageError, match="no root file system"):
        await backend.create(spec(image=str(folder)))
    if os.geteuid() == 0:
        (folder / "bin").mkdir()
        (folder / "bin/sh").touch()
        with pytest.raises(ImageError, match="belongs to another user") as refused:
            await backend.create(spec(image=str(folder)))
        assert "apptainer build image.sif" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("/nowhere/image.sif", "there is no file /nowhere/image.sif"),
        ("docker-archive:/nowhere/image.tar", "there is no file /nowhere/image.tar"),
        ("image-that-is-not-there.def", "there is no file"),
    ],
)
async def test_a_missing_file_is_told(
    images: Path, spec: Spec, backend: SingularityBackend, image: str, said: str
) -> None:
    images.mkdir()
    with pytest.raises(ImageError, match=said):
        await backend.create(spec(image=image))


async def test_a_step_that_fails_is_shown(
    images: Path, folder: Path, apptainer: Path, spec: Spec, backend: SingularityBackend
) -> None:
    path = definition(folder, "echo about to fail >&2; exit 7", source=f"{apptainer}/busybox.tar")
    with pytest.raises(ImageError, match="about to fail"):
        await backend.create(spec(image=str(path)))


async def test_a_registry_that_does_not_answer_is_no_fault_of_the_image(
    images: Path, spec: Spec, backend: SingularityBackend
) -> None:
    with pytest.raises(ProvisionError, match="refused") as failed:
        await backend.create(spec(image="docker://127.0.0.1:9/nothing:1"))
    assert failed.value.retryable and not isinstance(failed.value, ImageError)


@pytest.mark.parametrize(("ending", "seconds"), [("time limit", "8642"), ("cancelled", "8643")])
async def test_a_build_that_is_ended_leaves_nothing(
    images: Path, folder: Path, apptainer: Path, spec: Spec, backend: SingularityBackend, ending: str, seconds: str
) -> None:
    path = definition(folder, f"touch /begun; sleep {seconds}", source=f"{apptainer}/busybox.tar")
    limit = 5.0 if ending == "time limit" else 600.0
    creating = asyncio.ensure_future(backend.create(spec(image=str(path), image_timeout_s=limit)))
    while not runs(f"sleep {seconds}"):
        assert not creating.done(), creating
        await asyncio.sleep(0.05)
    if ending == "cancelled":
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    else:
        with pytest.raises(ImageError, match="not made within 5 s"):
            await creating
    assert not runs(f"sleep {seconds}")
    assert [*(images / "images").iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's containers have another user outside")
async def test_a_file_that_containers_can_not_read_is_told(
    images: Path, folder: Path, spec: Spec, backend: SingularityBackend
) -> None:
    images.mkdir()
    (folder / "image.sif").touch(mode=0o600)
    with pytest.raises(ImageError, match="can't be read by every user") as refused:
        await backend.create(spec(Isolation.SHARED, image=str(folder / "image.sif")))
    assert "chmod o+r" in str(refused.value.hint)


async def test_a_build_ends_with_its_driver(
    images: Path, folder: Path, apptainer: Path, profile: dict[str, Any]
) -> None:
    path = definition(folder, "touch /begun; sleep 8644", source=f"{apptainer}/busybox.tar")
    program = (
        "import asyncio, json, sys\n"
        "from hermes_singularity.images import Images\n"
        "from hermes_singularity.config import SingularityConfig\n"
        "config = SingularityConfig(**json.loads(sys.argv[1]))\n"
        "asyncio.run(Images().ensure(config.image, config, sys.argv[2]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    request = json.dumps({**profile, "image": str(path)})
    driver = subprocess.Popen([sys.executable, "-c", program, request, f"{apptainer}/apptainer"], env=environment)
    while not runs("sleep 864[4]"):
        assert driver.poll() is None
        await asyncio.sleep(0.05)
    driver.kill()
    driver.wait()
    async with asyncio.timeout(20):
        while runs("sleep 864[4]") or [*(images / "scratch").iterdir()]:
            await asyncio.sleep(0.05)
