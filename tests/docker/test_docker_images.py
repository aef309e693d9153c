"""Images: pulled once however many ask, built once per content, and told apart when they can't be had."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker import APIClient
from hermes_docker import images
from hermes_docker.backend import DockerBackend
from hermes_docker.config import DockerConfig
from hermes_docker.images import (
    BuildFailed,
    DiskFull,
    ImageMissing,
    RegistryRefused,
    RegistryUnreachable,
    failure,
    tag_of,
)

from hermes_core.errors import ConfigError, ProvisionError
from hermes_core.sandbox.commands import SandboxImage

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """A registry on loopback that serves one image `there:1`, refuses `private`, and does not know any other."""

    def __init__(self) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w:gz") as archive:
            entry = tarfile.TarInfo("hello")
            entry.size = 5
            archive.addfile(entry, io.BytesIO(b"there"))
        plain = hashlib.sha256(__import__("gzip").decompress(layer.getvalue())).hexdigest()
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain}"]},
        }
        self.blobs = {self._digest(data): data for data in (layer.getvalue(), json.dumps(config).encode())}
        layer_digest, config_digest = self.blobs
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": self._described("application/vnd.docker.container.image.v1+json", config_digest),
                "layers": [self._described("application/vnd.docker.image.rootfs.diff.tar.gzip", layer_digest)],
            }
        ).encode()
        self.asked: list[str] = []
        self.serves = threading.Event()
        self.serves.set()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.asked.append(f"{self.command} {self.path}")
                status, kind, body = registry.answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if kind == MANIFEST:
                    self.send_header("Docker-Content-Digest", registry._digest(body))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @staticmethod
    def _digest(data: bytes) -> str:
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _described(self, kind: str, digest: str) -> dict[str, Any]:
        return {"mediaType": kind, "size": len(self.blobs[digest]), "digest": digest}

    def answer(self, path: str) -> tuple[int, str, bytes]:
        if path == "/v2/":
            return 200, "application/json", b"{}"
        if path.startswith("/v2/private/"):
            return 403, "application/json", b'{"errors":[{"code":"DENIED","message":"requested access is denied"}]}'
        if path.startswith("/v2/there/manifests/"):
            return 200, MANIFEST, self.manifest
        if path.startswith("/v2/there/blobs/"):
            self.serves.wait(30)
            return 200, "application/octet-stream", self.blobs[path.rpartition("/")[2]]
        return 404, "application/json", b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.serves.set()
    made.server.shutdown()
    made.server.server_close()


async def test_many_who_want_one_image_pull_it_once(backend: DockerBackend, registry: Registry, api: APIClient) -> None:
    config = DockerConfig(image=f"{registry.host}/there:1")
    try:
        names = await asyncio.gather(*(backend._images.ensure(config) for _ in range(8)))
        assert set(names) == {config.image}
        assert sum(line.startswith("GET") and "/blobs/" in line for line in registry.asked) == 2
        asked = len(registry.asked)
        await backend._images.ensure(config)
        assert len(registry.asked) == asked, "it is there: nobody is asked"
    finally:
        api.remove_image(config.image, force=True)


async def asking_for_a_layer(registry: Registry) -> None:
    async with asyncio.timeout(20):
        while not any("/blobs/" in line for line in registry.asked):
            await asyncio.sleep(0.01)


async def test_a_pull_goes_on_without_those_who_asked_for_it(
    backend: DockerBackend, registry: Registry, api: APIClient
) -> None:
    config = DockerConfig(image=f"{registry.host}/there:1")
    registry.serves.clear()
    tasks = [asyncio.create_task(backend._images.ensure(config)) for _ in range(2)]
    await asking_for_a_layer(registry)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    again = asyncio.create_task(backend._images.ensure(config))
    registry.serves.set()
    try:
        assert await again == config.image
        [known] = api.inspect_image(config.image)["RepoDigests"]
        assert known == f"{config.image.rpartition(':')[0]}@{await backend._images.digest(config.image)}"
        assert sum(line.startswith("GET") and "/blobs/" in line for line in registry.asked) == 2
    finally:
        api.remove_image(config.image, force=True)


@pytest.mark.parametrize(("image", "kind"), [("{host}/nothing:1", ImageMissing), ("{host}/private:1", RegistryRefused)])
async def test_an_image_that_can_not_be_had(
    backend: DockerBackend, registry: Registry, image: str, kind: type[ProvisionError], spec: Callable[..., Any]
) -> None:
    with pytest.raises(kind) as failed:
        await backend.create(spec(image=image.format(host=registry.host)))
    assert not failed.value.retryable
    assert image.format(host=registry.host) in str(failed.value)
    assert "--backend.image=NAME" in str(failed.value.hint)


async def test_a_registry_that_is_not_there(backend: DockerBackend, registry: Registry) -> None:
    registry.server.shutdown()
    registry.server.server_close()
    with pytest.raises(RegistryUnreachable) as failed:
        await backend._images.ensure(DockerConfig(image=f"{registry.host}/there:1"))
    assert failed.value.retryable


@pytest.mark.parametrize(
    ("said", "kind", "advice"),
    [
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", DiskFull, "system prune"),
        (
            "pull access denied for x, repository does not exist or may require 'docker login': denied: requested "
            "access to the resource is denied",
            RegistryRefused,
            "name and tag",
        ),
        (
            "pull access denied for x, repository does not exist or may require 'docker login'",
            ImageMissing,
            "name and tag",
        ),
        ("manifest for x:1 not found: manifest unknown: manifest unknown", ImageMissing, "name and tag"),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", ImageMissing, "name and tag"),
        ("unauthorized: authentication required", RegistryRefused, "docker login"),
        ("toomanyrequests: You have reached your pull rate limit", RegistryRefused, "raises the registry's limit"),
        ("Get https://r/v2/: dial tcp: lookup r: no such host", RegistryUnreachable, "docker load"),
        ("something new", ProvisionError, "docker info"),
    ],
)
def test_the_daemons_words(said: str, kind: type[ProvisionError], advice: str) -> None:
    found, hint = failure(images._Said(said))
    assert found is kind
    assert advice in hint


@pytest.fixture
def folder(tmp_path: Path, busybox_image: str) -> Path:
    (tmp_path / "Dockerfile").write_text(f"FROM {busybox_image}\nCOPY file /file\nRUN cat /file >/copy\n")
    (tmp_path / "file").write_text("one")
    (tmp_path / ".dockerignore").write_text("# what the build does not see\nnotes\n")
    (tmp_path / "notes").write_text("a")
    return tmp_path


async def test_a_folder_is_built_once_per_content(
    backend: DockerBackend, folder: Path, api: APIClient, spec: Callable[..., Any]
) -> None:
    config = DockerConfig(dockerfile=str(folder))
    tag = await backend._images.ensure(config)
    try:
        built = api.inspect_image(tag)["Id"]
        (folder / "notes").write_text("b")
        assert await backend._images.ensure(config) == tag
        sandbox = await backend.create(spec(image=None, dockerfile=str(folder)))
        assert api.inspect_container(sandbox.id)["Image"] == built
        assert sandbox.image == SandboxImage(tag, built)
        channel = await sandbox.open(["cat", "/copy"])
        assert await channel.read(10) == b"one"
        await channel.aclose()
        await sandbox.terminate()
    finally:
        api.remove_image(tag, force=True)
    (folder / "file").write_text("two")
    assert tag_of(folder) != tag


async def test_a_build_that_fails_shows_its_last_words(backend: DockerBackend, folder: Path) -> None:
    (folder / "Dockerfile").write_text((folder / "Dockerfile").read_text() + "RUN echo almost; exit 3\n")
    with pytest.raises(BuildFailed, match=r"(?s)returned a non-zero code: 3.*almost") as failed:
        await backend._images.ensure(DockerConfig(dockerfile=str(folder)))
    assert not failed.value.retryable


async def test_the_default_image_gives_way_to_a_folder_and_its_pull_says_what_to_do(
    backend: DockerBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DockerConfig().image == "python:3.11"
    assert DockerConfig(dockerfile=str(folder)).image is None

    async def refused(call: Callable[[Any], object]) -> bool:
        def pull(*_: Any, **__: Any) -> Iterator[dict[str, str]]:
            yield {"error": "toomanyrequests: You have reached your pull rate limit"}

        def inspect_image(_: str) -> None:
            raise docker.errors.NotFound("none")

        return bool(call(types.SimpleNamespace(pull=pull, inspect_image=inspect_image)))

    with (
        monkeypatch.context() as patch,
        pytest.raises(RegistryRefused, match=r"'python:3\.11' can't be pulled: toomanyrequests") as failed,
    ):
        patch.setattr(backend._daemon, "call", refused)
        await backend._images.ensure(DockerConfig())
    for advice in ("docker login", "docker load", "--backend.image=NAME"):
        assert advice in str(failed.value.hint)


async def test_wrong_profiles(backend: DockerBackend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Dockerfile"):
        await backend._images.ensure(DockerConfig(dockerfile=str(tmp_path)))
    for wrong in (
        {"image": "a", "dockerfile": "b"},
        {"image": ""},
        {"volumes": ("/only",)},
        {"volumes": ("/a:relative",)},
        {"network": "none", "network_name": "n"},
    ):
        with pytest.raises(ValueError):
            DockerConfig(**wrong)
