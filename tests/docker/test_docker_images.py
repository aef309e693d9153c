"""Images: pulled once however many ask, built once per content, removed by a budget, and told apart when they can't be
had."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import tarfile
import threading
import types
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker import APIClient
from docker.auth import AuthConfig
from hermes_docker import built, images
from hermes_docker.backend import DockerBackend
from hermes_docker.config import DockerConfig
from hermes_docker.daemon import translate_error
from hermes_docker.images import (
    BuildFailed,
    DiskFull,
    ImageMissing,
    RegistryRefused,
    RegistryUnreachable,
    failure,
    tag_of,
)

from hermes_core.aio import BrokenOff
from hermes_core.errors import ImageError, ProvisionError
from hermes_core.sandbox.commands import SandboxImage
from hermes_core.sandbox.images import ImageBuild
from hermes_core.settings import Settings

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


async def made(backend: DockerBackend, config: DockerConfig) -> str:
    return await backend.prepare_image(config.source, config)


async def test_many_who_want_one_image_pull_it_once(backend: DockerBackend, registry: Registry, api: APIClient) -> None:
    config = DockerConfig(image=f"{registry.host}/there:1")
    try:
        names = await asyncio.gather(*(made(backend, config) for _ in range(8)))
        assert set(names) == {config.image}
        assert sum(line.startswith("GET") and "/blobs/" in line for line in registry.asked) == 2
        asked = len(registry.asked)
        await made(backend, config)
        assert len(registry.asked) == asked, "it is there: nobody is asked"
    finally:
        api.remove_image(config.image, force=True)


async def asking_for_a_layer(registry: Registry) -> None:
    async with asyncio.timeout(20):
        while not any("/blobs/" in line for line in registry.asked):
            await asyncio.sleep(0.01)


async def test_a_pull_goes_on_as_long_as_somebody_waits_for_it(
    backend: DockerBackend, registry: Registry, api: APIClient
) -> None:
    config = DockerConfig(image=f"{registry.host}/there:1")
    registry.serves.clear()
    left, stays = (asyncio.create_task(made(backend, config)) for _ in range(2))
    await asking_for_a_layer(registry)
    left.cancel()
    await asyncio.wait([left])
    assert left.cancelled()
    registry.serves.set()
    try:
        assert await stays == config.image
        [known] = api.inspect_image(config.image)["RepoDigests"]
        assert known == f"{config.image.rpartition(':')[0]}@{(await backend._images.about(config.image)).digest}"
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
        await made(backend, DockerConfig(image=f"{registry.host}/there:1"))
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
def test_the_daemons_words_tell_whose_failure_it_is(said: str, kind: type[ProvisionError], advice: str) -> None:
    found, hint = failure(images._EventError(said))
    assert found is kind
    assert advice in hint


@pytest.mark.filterwarnings("ignore:docker-credential-it")
@pytest.mark.parametrize("config", [{"credsStore": "it"}, {"credHelpers": {"quay.io": "it"}}])
@pytest.mark.parametrize("works", ["is not there", "fails"])
def test_a_helper_for_credentials_that_fails_is_named(
    config: dict[str, Any], works: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if works == "fails":
        (tmp_path / "docker-credential-it").write_text("#!/bin/sh\necho no key; exit 1\n")
        (tmp_path / "docker-credential-it").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    credentials = AuthConfig(config)
    for ask in (lambda: credentials.resolve_authconfig("quay.io"), credentials.get_all_credentials):
        with pytest.raises(Exception, match="docker-credential-it") as caught:  # a pull's, and a build's
            ask()
        error = translate_error(caught.value)
        assert isinstance(error, ImageError) and error.hint is not None
        assert "docker-credential-it" in error.message and "config.json" in error.hint


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
    tag = await made(backend, config)
    try:
        built = api.inspect_image(tag)["Id"]
        (folder / "notes").write_text("b")
        assert await made(backend, config) == tag
        sandbox = await backend.create(spec(image=None, dockerfile=str(folder)))
        assert api.inspect_container(sandbox.id)["Image"] == built
        assert sandbox.image == SandboxImage(tag, built)
        assert (sandbox.image.workdir, sandbox.image.user) == ("/", "root")
        channel = await sandbox.open(["cat", "/copy"])
        assert await channel.read(10) == b"one"
        await channel.aclose()
        await sandbox.terminate()
    finally:
        api.remove_image(tag, force=True)
    (folder / "file").write_text("two")
    assert tag_of(ImageBuild(folder)) != tag


def extend(folder: Path, *lines: str) -> None:
    (folder / "Dockerfile").write_text((folder / "Dockerfile").read_text() + "".join(f"{line}\n" for line in lines))


async def test_what_an_image_says_of_its_programs(
    backend: DockerBackend, folder: Path, api: APIClient, spec: Callable[..., Any]
) -> None:
    extend(folder, "WORKDIR /srv/$HOME", "WORKDIR here", "USER 7:8")
    sandbox = await backend.create(spec(image=None, dockerfile=str(folder)))
    assert sandbox.image is not None
    assert (sandbox.image.workdir, sandbox.image.user) == ("/srv/here", "7:8")
    await sandbox.terminate()
    api.remove_image(sandbox.image.name, force=True)


@pytest.fixture
async def logging_backend(tmp_path_factory: pytest.TempPathFactory, owner: str) -> AsyncIterator[DockerBackend]:
    """A backend that keeps the output of builds, in the directory `docker-builds` of its state directory."""
    made = DockerBackend(Settings(state_dir=tmp_path_factory.mktemp("state")))
    yield made
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN echo almost; exit 3", r"returned a non-zero code: 3"),
        ("RUN echo almost; : no such host, not found, denied: timeout; exit 1", r"returned a non-zero code: 1"),
        ("COPY ../out /", "forbidden path|not found|no such file"),
        ("TIMEOUT 3", "unknown instruction: TIMEOUT"),
        ("RUN --mount=type=cache,target=/x true", r"(?s)BuildKit.*name its image"),
    ],
)
async def test_a_build_that_fails_is_the_fault_of_the_image(
    logging_backend: DockerBackend, folder: Path, line: str, said: str
) -> None:
    extend(folder, line)
    with pytest.raises(ImageError, match=said) as failed:
        await made(logging_backend, DockerConfig(dockerfile=str(folder)))
    assert not failed.value.retryable
    if "almost" in line:
        assert isinstance(failed.value, BuildFailed) and "almost" in failed.value.message
        log = Path(str(failed.value.hint).rpartition(" ")[2])
        assert "almost" in log.read_text()


async def test_the_output_of_a_build_is_kept_up_to_a_limit(
    logging_backend: DockerBackend, folder: Path, api: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_docker.build_log.MAX_BYTES", 2000)
    monkeypatch.setattr("hermes_docker.build_log.KEPT", 2)
    for number in range(3):
        extend(folder, f"RUN i=0; while [ $i -lt 500 ]; do i=$((i + 1)); echo line $i of {number}; done; echo the last")
        api.remove_image(await made(logging_backend, DockerConfig(dockerfile=str(folder))), force=True)
    assert logging_backend._images._logs is not None
    logs = sorted(logging_backend._images._logs.iterdir(), key=lambda each: each.stat().st_mtime)
    assert len(logs) == 2
    text = logs[-1].read_text()
    assert text.startswith("Step 1/7 : FROM") and "bytes or more are left out" in text and "the last" in text
    assert len(text) < 10_000


async def test_an_output_that_can_not_be_kept_is_no_failure(
    backend: DockerBackend, folder: Path, api: APIClient, caplog: pytest.LogCaptureFixture
) -> None:
    backend._images._logs = folder / "Dockerfile" / "logs"
    api.remove_image(await made(backend, DockerConfig(dockerfile=str(folder))), force=True)
    assert "the output of a build can't be kept" in caplog.text


def runs(api: APIClient, command: str) -> bool:
    """Return whether a container of a build runs this command."""
    return any(command in each["Command"] for each in api.containers())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_build_has_a_time_limit(logging_backend: DockerBackend, folder: Path, api: APIClient) -> None:
    extend(folder, "RUN echo begins; sleep 61")
    with pytest.raises(BuildFailed, match=r"(?s)took longer than 10 s.*begins") as failed:
        await logging_backend.prepare_image(ImageBuild(folder, timeout_s=10), DockerConfig())
    assert "raise the limit" in str(failed.value.hint)
    await until(lambda: not runs(api, "sleep 61"))


@pytest.mark.parametrize("command", ["sleep 62", "sleep 63"])
async def test_a_build_that_nobody_waits_for_is_broken_off(folder: Path, api: APIClient, command: str) -> None:
    extend(folder, f"RUN {command}")
    backend, config = DockerBackend(), DockerConfig(dockerfile=str(folder))
    first, second = (asyncio.create_task(made(backend, config)) for _ in range(2))
    await until(lambda: runs(api, command))
    first.cancel()
    await asyncio.wait([first])
    assert runs(api, command), "the second one waits for it"
    if command == "sleep 62":
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
    await backend.aclose()
    if command == "sleep 63":
        with pytest.raises(BrokenOff):
            await second
    await until(lambda: not runs(api, command))


async def test_two_drivers_that_build_the_same_leave_one_image(
    backend: DockerBackend, folder: Path, api: APIClient
) -> None:
    extend(folder, "RUN sleep 1; date +%N >/time")
    other = DockerBackend()
    config, before = DockerConfig(dockerfile=str(folder)), {each["Id"] for each in api.images()}
    try:
        tags = await asyncio.gather(*(made(each, config) for each in (backend, other)))
        assert len({*tags}) == 1
        new = [each for each in api.images() if each["Id"] not in before]
        assert [each["RepoTags"] for each in new] == [[tags[0]]]
    finally:
        await other.aclose()
        api.remove_image(tag_of(ImageBuild(folder)), force=True)


async def test_an_image_that_is_removed_is_built_again(
    backend: DockerBackend, folder: Path, api: APIClient, spec: Callable[..., Any]
) -> None:
    config = DockerConfig(dockerfile=str(folder))
    tag = await made(backend, config)
    api.remove_image(tag, force=True)
    sandbox = await backend.create(spec(image=tag))  # as a pool does that knows only the name
    await sandbox.terminate()
    api.remove_image(tag, force=True)
    with pytest.raises(ImageMissing, match="built here and is gone"):
        await made(DockerBackend(), DockerConfig(image=tag))


async def test_a_folder_that_changes_before_its_build(
    backend: DockerBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = images.tag_of

    def then_changed(build: ImageBuild, platform: str | None = None) -> str:
        tag = real(build, platform)
        (folder / "file").write_text("two")
        return tag

    monkeypatch.setattr(images, "tag_of", then_changed)
    with pytest.raises(BuildFailed, match="was changed while"):
        await made(backend, DockerConfig(dockerfile=str(folder)))


async def test_old_images_are_removed_by_a_budget(
    backend: DockerBackend, folder: Path, api: APIClient, spec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = uuid.uuid4().hex[:8]  # the same test may run elsewhere on this daemon
    monkeypatch.setattr(built, "REPOSITORY", f"hermes-rl-built-by-{own}")
    monkeypatch.setattr(built, "LABEL", f"hermes-rl.built-by-{own}")
    monkeypatch.setattr(built, "SPARED", timedelta(seconds=-1))
    config = DockerConfig(built_images=2)

    async def build(content: str) -> str:
        (folder / "file").write_text(content)
        return await backend.prepare_image(ImageBuild(folder), config)

    def there(*tags: str) -> list[bool]:
        return [images._has(api, tag) for tag in tags]

    others = (f"theirs-{own}:1", f"theirs-{own}:2")
    tags = [await build("a")]
    for other in others:
        api.tag(tags[0], *other.split(":"))
    try:
        list(api.build(fileobj=io.BytesIO(f"FROM {tags[0]}\nRUN echo theirs >/x\n".encode()), tag=others[1], rm=True))
        api.remove_image(others[0])
        sandbox = await backend.create(spec(image=tags[0]))
        tags += [await build(content) for content in "bc"]
        assert there(*tags, others[1]) == [True, True, True, True], "a container has the oldest"
        backend._images._used.clear()
        assert await build("b") == tags[1], "its use is noted"
        tags.append(await build("d"))
        assert there(*tags, others[1]) == [True, True, False, True, True]
        await sandbox.terminate()
        tags.append(await build("e"))
        assert there(*tags, others[1]) == [False, False, False, True, True, True]
        monkeypatch.setattr(built, "SPARED", timedelta(minutes=10))
        tags.append(await build("f"))
        assert there(*tags[3:]) == [True, True, True], "they were just used"
    finally:
        for tag in (*tags, *others):
            with contextlib.suppress(docker.errors.APIError):
                api.remove_image(tag, force=True)


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
        patch.setattr(backend._daemon, "follow", refused)
        await made(backend, DockerConfig())
    for advice in ("docker login", "docker load", "--backend.image=NAME"):
        assert advice in str(failed.value.hint)


async def test_wrong_images_and_folders_are_refused(backend: DockerBackend, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no Dockerfile"):
        await made(backend, DockerConfig(dockerfile=str(tmp_path)))
    for wrong in (
        {"image": "a", "dockerfile": "b"},
        {"image": ""},
        {"volumes": ("/only",)},
        {"volumes": ("/a:relative",)},
        {"network": "none", "network_name": "n"},
    ):
        with pytest.raises(ValueError):
            DockerConfig(**wrong)


@pytest.mark.parametrize("at_a_time", [1, 3])
async def test_so_many_images_are_built_at_a_time(
    backend: DockerBackend, folder: Path, api: APIClient, at_a_time: int
) -> None:
    folders = []
    for number in range(3):
        folders.append(folder / f"../{folder.name}-{number}")
        folders[-1].mkdir()
        (folders[-1] / "Dockerfile").write_text(f"FROM hermes-test-busybox:latest\nRUN sleep 6{number}.5\n")
    config = DockerConfig(images_at_a_time=at_a_time)
    tasks = [asyncio.create_task(backend.prepare_image(ImageBuild(each), config)) for each in folders]

    def building() -> int:
        return sum(runs(api, f"sleep 6{number}.5") for number in range(3))

    await until(lambda: building() == at_a_time)
    await asyncio.sleep(2)
    assert building() == at_a_time
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: not building())
