"""The unmodified SDK on the emulator, with both kinds of sandbox."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import modal
import pytest
from hermes_modal_emulator import ModalEmulator


@pytest.fixture
async def client(emulator: ModalEmulator, version: str) -> AsyncIterator[Any]:
    made = await modal.Client.from_credentials.aio("ak-emulator", "as-emulator")
    yield made
    await made.close.aio()


@pytest.fixture
async def app(client: Any) -> Any:
    return await modal.App.lookup.aio(f"sdk-{uuid.uuid4().hex[:8]}", client=client, create_if_missing=True)


@pytest.fixture
async def create(app: Any, client: Any) -> AsyncIterator[Callable[..., Any]]:
    made = []

    async def make(*argv: str, **given: Any) -> Any:
        sandbox = await modal.Sandbox.create.aio(*argv, app=app, client=client, **{"timeout": 300, **given})
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        await sandbox.terminate.aio()


async def run(sandbox: Any, script: str, **given: Any) -> tuple[Any, Any, int]:
    process = await sandbox.exec.aio("bash", "-c", script, **given)
    out, err, status = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio(), process.wait.aio())
    return out, err, status


async def test_the_sdk_runs_commands(create: Callable[..., Any], version: str) -> None:
    sandbox = await create()
    assert sandbox.object_id.startswith("sb-01") == (version == "v2")
    assert await run(sandbox, "echo out; echo err >&2; exit 3") == ("out\n", "err\n", 3)
    assert (await run(sandbox, "kill -9 $$"))[2] == 137
    out, _, status = await run(sandbox, "echo before; sleep 60", timeout=1)
    assert out == "before\n"
    assert status in (-1, 137), "the SDK's own deadline and the kill are at the same time: either may be first"
    process = await sandbox.exec.aio("cat", text=False)
    process.stdin.write(b"one\n")
    await process.stdin.drain.aio()
    process.stdin.write(b"\xfftwo\n")
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert await process.stdout.read.aio() == b"one\n\xfftwo\n"
    results = await asyncio.gather(*(run(sandbox, f"echo {n}; exit {n}") for n in range(20)))
    assert results == [(f"{n}\n", "", n) for n in range(20)]
    assert (await run(sandbox, "tty; stty size; echo E >&2", pty=True))[0].startswith("/dev/pts/")


async def test_megabytes_go_in_and_out(create: Callable[..., Any]) -> None:
    sandbox = await create()
    out, _, status = await run(sandbox, "head -c 50000000 /dev/zero", text=False)
    assert (len(out), status) == (50_000_000, 0)
    process = await sandbox.exec.aio("wc", "-c")
    for _ in range(4):
        process.stdin.write(b"x" * (2 << 20))
        await process.stdin.drain.aio()
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert (await process.stdout.read.aio()).strip() == str(8 << 20)


async def test_a_background_child_does_not_hold_the_command(create: Callable[..., Any]) -> None:
    sandbox = await create()
    began = asyncio.get_running_loop().time()
    assert await run(sandbox, "sleep 30 & echo on") == ("on\n", "", 0)
    assert asyncio.get_running_loop().time() - began < 10


async def test_a_sandbox_has_what_was_asked_for(
    create: Callable[..., Any], emulator: ModalEmulator, client: Any, namespaces: bool
) -> None:
    emulator.add_secret("my-secret", {"API_KEY": "sk-xyz"})
    image = modal.Image.from_registry("python:3.11").env({"FROM_IMAGE": "yes"})
    sandbox = await create(
        image=image,
        secrets=[modal.Secret.from_name("my-secret", client=client), modal.Secret.from_dict({"INLINE": "1"})],
        env={"GIVEN": "2"},
        cpu=1.5,
        memory=512,
        tags={"pool": "a"},
        workdir="/srv" if not namespaces else "/made/for/it",
    )
    out, _, _ = await run(sandbox, 'echo $API_KEY $INLINE $GIVEN $FROM_IMAGE $MORE "$(pwd)"', env={"MORE": "3"})
    assert out.split() == ["sk-xyz", "1", "2", "yes", "3", "/made/for/it" if namespaces else "/srv"]
    asked = [each for each in emulator.requests() if each["method"] in ("SandboxCreate", "SandboxCreateV2")][-1]
    definition = asked["request"]["definition"]
    assert (definition["resources"]["memory_mb"], definition["resources"]["milli_cpu"]) == (512, 1500)
    assert definition["timeout_secs"] == 300
    with pytest.raises(modal.exception.NotFoundError, match="my-other"):
        await create(secrets=[modal.Secret.from_name("my-other", client=client)])


async def test_the_sdk_reads_and_writes_files(create: Callable[..., Any], tmp_path: Any) -> None:
    sandbox = await create()
    base = f"/var/tmp/{uuid.uuid4().hex}"
    files = sandbox.filesystem
    await files.write_text.aio("hello", f"{base}/a/b.txt")
    assert await files.read_text.aio(f"{base}/a/b.txt") == "hello"
    assert [(each.name, each.type.value) for each in await files.list_files.aio(base)] == [("a", "directory")]
    assert (await files.stat.aio(f"{base}/a/b.txt")).size == 5
    with pytest.raises(modal.exception.SandboxFilesystemNotFoundError):
        await files.read_bytes.aio(f"{base}/nothing")
    await files.write_bytes.aio(b"z" * (5 << 20), f"{base}/big")
    assert len(await files.read_bytes.aio(f"{base}/big")) == 5 << 20
    await files.remove.aio(base, recursive=True)


async def test_sandboxes_are_found_by_tag_and_name(
    create: Callable[..., Any], app: Any, client: Any, emulator: ModalEmulator
) -> None:
    emulator.set(page_size=2)
    sandboxes = [await create(tags={"pool": "a", "n": str(n)}) for n in range(3)]
    named = await create(name="n1", tags={"pool": "b"})

    async def listed(**tags: str) -> set[str]:
        found = modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=client)
        return {each.object_id async for each in found}

    assert await listed(pool="a") == {each.object_id for each in sandboxes}
    assert await listed(n="1") == {sandboxes[1].object_id}
    await sandboxes[1].set_tags.aio({"pool": "c"})
    assert await sandboxes[1].get_tags.aio() == {"pool": "c"}
    assert await listed(pool="c") == {sandboxes[1].object_id}
    assert (await modal.Sandbox.from_name.aio(app.name, "n1", client=client)).object_id == named.object_id
    with pytest.raises(modal.exception.AlreadyExistsError):
        await create(name="n1")


async def test_snapshots_and_volumes_keep_files(create: Callable[..., Any], client: Any, namespaces: bool) -> None:
    if not namespaces:
        pytest.skip("sandboxes share this host's files")
    first = await create()
    assert (await run(first, "echo snap >/root/kept"))[2] == 0
    image = await first.snapshot_filesystem.aio()
    second = await create(image=image)
    assert (await run(second, "cat /root/kept; echo more >/root/second"))[0] == "snap\n"
    assert (await run(first, "test -e /root/second"))[2] == 1
    again = await second.snapshot_filesystem.aio()
    third = await create(image=modal.Image.from_id(again.object_id, client=client))
    assert (await run(third, "cat /root/kept /root/second"))[0] == "snap\nmore\n"
    volume = modal.Volume.from_name("v1", create_if_missing=True, client=client)
    writer = await create(volumes={"/vol": volume})
    assert (await run(writer, "echo on a volume >/vol/file"))[2] == 0
    reader = await create(volumes={"/vol": volume}, block_network=True)
    assert (await run(reader, "cat /vol/file"))[0] == "on a volume\n"
    assert (await run(reader, "exec 3<>/dev/tcp/1.1.1.1/53"))[2] != 0
    assert (await run(reader, "python3 -c 'import socket as s; s.socket().bind((\"127.0.0.1\", 8000))'"))[2] == 0


async def test_sandboxes_end_as_modals_do(create: Callable[..., Any], client: Any, namespaces: bool) -> None:
    main = await create("bash", "-c", "read x; echo got $x; exit 5")
    main.stdin.write("yo\n")
    await main.stdin.drain.aio()
    assert await main.stdout.read.aio() == "got yo\n"
    await main.wait.aio()
    assert main.returncode == 5
    short = await create(timeout=1)
    with pytest.raises(modal.exception.SandboxTimeoutError):
        await short.wait.aio()
    idle = await create(idle_timeout=1)
    await idle.wait.aio(raise_on_termination=False)
    ended = await create()
    running = await ended.exec.aio("sleep", "30")
    assert await ended.poll.aio() is None
    assert await ended.terminate.aio(wait=True) == 137
    assert await running.wait.aio() == 137
    with pytest.raises(modal.exception.Error):
        await ended.exec.aio("true")
    with pytest.raises(modal.exception.NotFoundError):
        await modal.Sandbox.from_id.aio("sb-01ZZZZZZZZZZZZZZZZZZZZZZZZ", client=client)


async def test_gpus_are_asked_for(create: Callable[..., Any], emulator: ModalEmulator) -> None:
    sandbox = await create(gpu="T4")
    assert (await run(sandbox, "echo v1"))[0] == "v1\n"
    asked = emulator.requests("SandboxCreate")[-1]["request"]["definition"]["resources"]["gpu_config"]
    assert asked["gpu_type"] == "T4"
