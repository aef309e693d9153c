"""Modal's sandboxes as a backend, through the real SDK and the emulator: what is asked for, leases, slots, ends."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import hermes_modal.plugin
import hermes_swe_smith
import pytest
from hermes_modal.backend import ModalBackend
from hermes_modal.config import ModalSandboxConfig
from hermes_modal_emulator import ModalEmulator

from hermes_core.cli import sandboxes as leftovers
from hermes_core.errors import ChannelLost, PolicyError, ProvisionError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation, SandboxSpec, SandboxStatus
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

pytestmark = pytest.mark.usefixtures("workable")

Spec = Callable[..., SandboxSpec]


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def backend(emulator: ModalEmulator, version: str, owner: str) -> AsyncIterator[ModalBackend]:
    made = ModalBackend()
    yield made
    emulator.clear_faults()
    emulator.set(refused_tokens=[])
    for info in await made.list(owner):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def spec(owner: str) -> Spec:
    def make(isolation: Isolation = Isolation.USER, *, creation_id: str | None = None, **config: Any) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner=owner,
            config=ModalSandboxConfig(**{"orphan_ttl_s": 60, **config}),
            isolation=isolation,
        )

    return make


def last_creation(emulator: ModalEmulator) -> dict[str, Any]:
    asked = [each for each in emulator.requests() if each["method"] in ("SandboxCreate", "SandboxCreateV2")]
    request: dict[str, Any] = asked[-1]["request"]
    return request


def tool_backend(backend: ModalBackend, owner: str, level: Isolation = Isolation.USER, **config: Any) -> ToolBackend:
    settings = {"slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0, **config}
    return ToolBackend(
        backend,
        profiles={"default": ModalSandboxConfig(**settings)},
        tools=ToolRegistry(),
        isolation=level,
        owner=owner,
    )


async def test_one_lease_is_one_sandbox(backend: ModalBackend, spec: Spec, owner: str) -> None:
    wanted = spec()
    first, second = await asyncio.gather(backend.create(wanted), backend.create(wanted))
    assert first.id == second.id
    assert first.uid_base == second.uid_base  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match="'user', not 'dedicated'"):
        await backend.create(spec(Isolation.DEDICATED, creation_id=wanted.creation_id))
    await first.terminate()
    assert await first.status() is SandboxStatus.ENDED
    again = await backend.create(wanted)
    assert again.id != first.id


async def test_slots_users_have_names(backend: ModalBackend, owner: str, namespaces: bool) -> None:
    lists = Path("/etc/passwd"), Path("/etc/group")
    before = [path.read_bytes() for path in lists]
    async with tool_backend(backend, owner) as tools:
        for number in range(2):
            said = await tools.commands(await tools.acquire("group")).run('echo "$USER"; id -un; id -gn')
            # Without namespaces the emulator's sandboxes are this host as it is, where no names are given.
            assert said.text.split()[:1] == [f"agent{number}" if namespaces else "agent"], said
            assert said.text.split()[1:] == [f"agent{number}"] * 2 or not namespaces, said
    assert [path.read_bytes() for path in lists] == before


async def test_everything_that_a_profile_says_is_asked_for(
    backend: ModalBackend, spec: Spec, emulator: ModalEmulator, owner: str
) -> None:
    emulator.add_secret("my-api-key", {"API_KEY": "sk-xxx"})
    import modal

    client = await modal.Client.from_credentials.aio("ak-emulator", "as-emulator")
    await modal.Volume.from_name("cache", create_if_missing=True, client=client).hydrate.aio(client)
    await client.close.aio()
    sandbox = await backend.create(
        spec(
            app_name="asked-for",
            image="python:3.12",
            cpu=0.5,
            memory=512,
            max_lifetime=1234,
            idle_timeout=77.2,
            secrets="my-api-key",
            env_vars={"DEBUG": "1"},
            region=("us-east", "eu-west"),
            cloud="aws",
            volumes={"/cache": "cache"},
            outbound_cidr_allowlist=["10.0.0.0/8"],
            outbound_domain_allowlist=["*.example.com"],
        )
    )
    request = last_creation(emulator)
    asked = request["definition"]
    assert asked["timeout_secs"] == 1234 and asked["idle_timeout_secs"] == 78
    assert (asked["resources"]["milli_cpu"], asked["resources"]["memory_mb"]) == (500, 512)
    assert asked["scheduler_placement"]["regions"] == ["us-east", "eu-west"]
    assert asked["cloud_provider_str"].lower() == "aws"
    assert [each["mount_path"] for each in asked["volume_mounts"]] == ["/cache"]
    assert asked["network_access"]["allowed_cidrs"] == ["10.0.0.0/8"]
    assert asked["network_access"]["allowed_domains"] == ["*.example.com"]
    assert any("hermes-watchdog" in part for part in asked["entrypoint_args"])
    tags = {each["tag_name"]: each["tag_value"] for each in request["tags"]}
    assert tags["hermes-rl.owner"] == owner and tags["hermes-rl.profile"] == "default"
    images = [each["request"]["image"]["dockerfile_commands"] for each in emulator.requests("ImageGetOrCreate")]
    assert any("FROM python:3.12" in lines for lines in images)
    channel = await sandbox.open(["sh", "-c", "echo $API_KEY $DEBUG $MORE"], env={"MORE": "2"})
    assert await channel.read(100) == b"sk-xxx 1 2\n"
    await channel.aclose()


@pytest.mark.parametrize(("config", "key"), [({"network": "none"}, "block_network"), ({"gpu": "A100:2"}, "gpu")])
async def test_network_and_gpu_are_asked_for(
    backend: ModalBackend, spec: Spec, emulator: ModalEmulator, config: dict[str, str], key: str
) -> None:
    await backend.create(spec(**config))
    asked = last_creation(emulator)["definition"]
    if key == "gpu":
        assert (asked["resources"]["gpu_config"]["gpu_type"], asked["resources"]["gpu_config"]["count"]) == ("A100", 2)
    else:
        assert asked.get("block_network") or asked["network_access"]["network_access_type"] == "BLOCKED"


async def test_images_by_dockerfile_snapshot_and_private_registry(
    backend: ModalBackend, spec: Spec, emulator: ModalEmulator, tmp_path: Path, namespaces: bool
) -> None:
    emulator.add_secret("registry", {"REGISTRY_USERNAME": "u", "REGISTRY_PASSWORD": "p"})
    private = await backend.create(spec(image="private/image:1", registry_secret="registry"))
    assert private.image is not None and private.image.name == "private/image:1"
    assert str(private.image.digest).startswith("im-")
    configs = [
        each["request"]["image"].get("image_registry_config", {}) for each in emulator.requests("ImageGetOrCreate")
    ]
    assert any(each.get("secret_id") for each in configs)
    (tmp_path / "Dockerfile").write_text("FROM python:3.11\nENV FROM_FILE=yes\nCOPY beside.txt /\n")
    (tmp_path / "beside.txt").write_text("beside the Dockerfile")
    sandbox = await backend.create(spec(dockerfile=str(tmp_path / "Dockerfile")))
    channel = await sandbox.open(["sh", "-c", "echo made >/root/made; echo $FROM_FILE"])
    assert await channel.read(100) == b"yes\n"
    assert await channel.wait() == 0
    context = emulator.requests("MountGetOrCreate")[-1]["request"]["files"]
    assert [Path(each["filename"]).name for each in context] == ["beside.txt"]
    await channel.aclose()
    if namespaces:
        image = await sandbox._sandbox.snapshot_filesystem.aio()  # type: ignore[attr-defined]
        restored = await backend.create(spec(snapshot_id=image.object_id))
        channel = await restored.open(["cat", "/root/made"])
        assert await channel.read(100) == b"made\n"
        await channel.aclose()


async def test_what_can_not_be_made_says_why(backend: ModalBackend, spec: Spec, emulator: ModalEmulator) -> None:
    async def refused(**config: Any) -> ProvisionError:
        with pytest.raises(ProvisionError) as caught:
            await backend.create(spec(name="training", **config))
        return caught.value

    error = await refused(secrets=["no-such-secret"])
    assert not error.retryable and "profile 'training', key 'secrets'" in str(error)
    assert "modal secret create no-such-secret" in str(error)
    error = await refused(volumes={"/v": "no-such-volume"})
    assert not error.retryable and "no-such-volume" in str(error)
    emulator.set(missing_images=["nobody/nothing"])
    error = await refused(image="nobody/nothing:1")
    assert not error.retryable and "verify that the image exists" in str(error)
    assert "image 'nobody/nothing:1'" in str(error)
    emulator.set(max_sandboxes=0)
    error = await refused()
    assert error.retryable and "quota limits" in str(error)
    emulator.set(max_sandboxes=None, refused_tokens=["ak-emulator"])
    error = await refused()
    assert not error.retryable and "modal token new" in str(error)


async def test_slots_of_a_sandbox(backend: ModalBackend, owner: str) -> None:
    async with tool_backend(backend, owner) as tools:
        first, second = await tools.acquire("a"), await tools.acquire("b")
        assert first.isolation == "user" and first.sandbox_id == second.sandbox_id
        assert first.workspace_dir == "/data/slot_0"
        script = "id -u; echo mine >file; cat file; ls /data/slot_0 /data/slot_1 2>&1 | grep -c denied"
        mine, other = await tools.execute_batch([(slot, "bash", {"command": script}) for slot in (first, second)])
        assert mine.output.split()[1:] == other.output.split()[1:] == ["mine", "1"]
        assert mine.output.split()[0] != other.output.split()[0]
        big = "x" * 3_000_000
        assert (await tools.execute(first, "write_file", {"path": "big", "content": big})).success
        assert (await tools.execute(first, "bash", {"command": "wc -c <big"})).output.strip() == "3000000"
        for slot in (first, second):
            await tools.release(slot, reset_workspace=True)
        async with tools.lease("c") as slot:
            assert (await tools.execute(slot, "bash", {"command": "ls -A"})).output == ""
    assert await backend.list(owner) == []


async def test_dedicated_and_another_workspace(backend: ModalBackend, owner: str, emulator: ModalEmulator) -> None:
    async with tool_backend(backend, owner, Isolation.DEDICATED, max_sandboxes=2, workspace_base="/srv/work") as tools:
        slots = await asyncio.gather(tools.acquire("a"), tools.acquire("b"))
        assert len({slot.sandbox_id for slot in slots}) == 2
        assert {slot.workspace_dir for slot in slots} == {"/srv/work/slot_0"}
        assert "/srv/work/.hermes/heartbeat" in last_creation(emulator)["definition"]["entrypoint_args"]
        again = await backend.attach(slots[0].sandbox_id)
        assert again.workspace_base == "/srv/work" and again.state_dir == "/srv/work/.hermes"
        assert again.lifetime_s is not None and 3000 < again.lifetime_s <= 3600
        runtime = Runtime(Settings(owner=owner), plugins=[hermes_modal.plugin], load_entry_points=False)
        runtime._backends["modal"] = backend
        found = (await leftovers.find(runtime, ["modal"], owner)).sandboxes
        reaped = await leftovers.reap(runtime, found)
        assert [(each.outcome, each.why) for each in reaped] == [("left", "its driver is alive")] * 2


async def test_another_process_finds_a_sandbox_in_whatever_app(
    emulator: ModalEmulator, version: str, owner: str, spec: Spec, tmp_path: Path
) -> None:
    first, second = (ModalBackend(Settings(state_dir=tmp_path)) for _ in range(2))
    made = await first.create(spec(app_name="an-app-of-its-own"))
    assert [info.sandbox_id for info in await second.list(owner)] == [made.id]
    await made.terminate()
    for backend in (first, second):
        await backend.aclose()


async def test_a_gpu_profile_and_a_cpu_profile_never_mix(
    backend: ModalBackend, owner: str, emulator: ModalEmulator
) -> None:
    profiles = {
        name: ModalSandboxConfig(name=name, gpu=gpu, slots_per_sandbox=3, max_sandboxes=1, reserve_slots=0)
        for name, gpu in (("default", None), ("gpu", "T4"))
    }
    async with ToolBackend(
        backend, profiles=profiles, tools=ToolRegistry(), isolation=Isolation.USER, owner=owner
    ) as tools:
        slots = [await tools.acquire(f"{name}-{n}", profile=name) for n in range(3) for name in profiles]
        ran = await tools.execute_batch([(slot, "bash", {"command": "hostname; echo $$ >mark"}) for slot in slots])
        assert all(result.success for result in ran)
        by_profile = {name: {slot.sandbox_id for slot in slots if slot.profile == name} for name in profiles}
        assert len(by_profile["default"]) == len(by_profile["gpu"]) == 1
        assert by_profile["default"] != by_profile["gpu"]
        for slot in slots:
            lines = await tools.execute(slot, "bash", {"command": "cat mark"})
            assert lines.success and slot.slot_id.startswith(slot.sandbox_id)


async def test_a_refused_token_of_a_handle_is_replaced(
    backend: ModalBackend, spec: Spec, emulator: ModalEmulator
) -> None:
    sandbox = await backend.create(spec())
    channel = await sandbox.open(["cat"])
    await channel.write(b"1")
    assert await channel.read(1) == b"1"
    emulator.revoke_tokens()
    with pytest.raises(ChannelLost):
        for _ in range(100):
            await channel.write(b"2")
            await asyncio.sleep(0.01)
    await channel.aclose()
    emulator.set(refused_tokens=["ak-emulator"])
    with pytest.raises(ChannelLost):
        await sandbox.open(["true"])
    emulator.set(refused_tokens=[])  # an outage while the handle is replaced leaves one that can be replaced
    fresh = await sandbox.open(["echo", "again"])
    assert await fresh.read(10) == b"again\n"
    await fresh.aclose()


async def test_commands_see_the_secrets_that_the_profile_names_for_them(
    backend: ModalBackend, owner: str, emulator: ModalEmulator
) -> None:
    emulator.add_secret("two-keys", {"API_KEY": "sk-seen-by-commands", "OTHER_KEY": "sk-hidden"})
    profile = {"secrets": ["two-keys"], "slot_secrets": ["API_KEY", "NOT_THERE"], "env_vars": {"DEBUG": "1"}}
    async with tool_backend(backend, owner, **profile) as tools, tools.lease() as slot:
        script = "echo $API_KEY $DEBUG $OTHER_KEY ${#API_KEY}; cat /proc/*/environ 2>/dev/null | grep -c sk-hidden"
        result = await tools.execute(slot, "bash", {"command": script})
        assert result.output == "******************* 1 19\n0\n"


async def test_each_tasks_own_image(emulator: ModalEmulator, tmp_path: Path) -> None:
    """`image` of a task row: its sandboxes are made from that, and the record says what they cost."""
    rows = [
        {"id": "own", "prompt": "p", "image": "python:3.12", "check": "test -f a", "solution": "touch a"},
        {"id": "usual", "prompt": "p", "check": "test -f a", "solution": "touch a"},
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    since = len(emulator.requests())
    config = {"image": "python:3.11", "app_name": "images", "prices": {"sandbox": 3600.0}}
    async with Runtime(Settings(state_dir=tmp_path), plugins=[hermes_modal.plugin], load_entry_points=False) as runtime:
        summary = await run_rollouts(
            runtime, "tasks", "oracle", env={"dataset_name": str(file)}, backend="modal", backend_config=config
        )
    assert summary.complete and summary.mean_reward == 1.0
    built = [
        line
        for each in emulator.requests("ImageGetOrCreate", since)
        for line in each["request"]["image"].get("dockerfile_commands", [])
    ]
    assert {"FROM python:3.11", "FROM python:3.12"} <= set(built)
    assert summary.sandbox_s.keys() == summary.cost.keys() == {"default"}
    assert summary.cost["default"] == pytest.approx(summary.sandbox_s["default"], rel=0.01)


async def test_an_image_name_of_swe_smith(emulator: ModalEmulator, tmp_path: Path) -> None:
    """`use_image_name`: the sandbox is asked for with the row's image."""
    from hermes_swe_smith.demo_tasks import write

    write(tmp_path)
    file = next(tmp_path.glob("*.jsonl"))
    row = {**json.loads(file.read_text().splitlines()[0]), "image_name": "swesmith/ledgerline:1"}
    file.write_text(json.dumps(row) + "\n")
    env = {"dataset_name": str(file), "repo_base_url": str(tmp_path), "use_image_name": True}
    emulator.set(missing_images=["swesmith/ledgerline"])
    async with Runtime(
        Settings(state_dir=tmp_path), plugins=[hermes_modal.plugin, hermes_swe_smith], load_entry_points=False
    ) as runtime:
        summary = await run_rollouts(runtime, "swe-smith", "oracle", env=env, backend="modal", infra_retries=0)
    assert summary.scored == 0 and list(summary.failures) == ["image"]
    built = [
        line
        for each in emulator.requests("ImageGetOrCreate")
        for line in each["request"]["image"].get("dockerfile_commands", [])
    ]
    assert "FROM swesmith/ledgerline:1" in built
