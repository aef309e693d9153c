"""Pools, rollouts and ends of Docker sandboxes, as users meet them."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hermes_docker
import pytest
from docker import APIClient
from docker.errors import NotFound
from hermes_docker import containers
from hermes_docker.backend import DockerBackend
from hermes_docker.config import DockerConfig

from hermes_core.cli import sandboxes as leftovers
from hermes_core.errors import ConfigError, PolicyError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Isolation, SandboxSpec
from hermes_core.sandbox.pool.preparation import NewSandbox
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

Spec = Callable[..., SandboxSpec]


def tool_backend(backend: DockerBackend, level: Isolation, owner: str, image: str, **config: object) -> ToolBackend:
    settings = {"image": image, "slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0, **config}
    return ToolBackend(
        backend,
        profiles={"default": DockerConfig(**settings)},  # type: ignore[arg-type]
        tools=ToolRegistry(),
        isolation=level,
        owner=owner,
    )


@pytest.mark.parametrize(("level", "capabilities"), [(Isolation.USER, ()), (Isolation.NAMESPACE, ("SYS_ADMIN",))])
async def test_slots_of_each_level(
    backend: DockerBackend, owner: str, python_image: str, level: Isolation, capabilities: tuple[str, ...]
) -> None:
    async with tool_backend(backend, level, owner, python_image, cap_add=capabilities) as tools:
        first, second = await tools.acquire("a"), await tools.acquire("b")
        assert first.isolation == level.label
        assert first.sandbox_id == second.sandbox_id
        command = (
            "id -u; echo mine >file; cat file; grep -c . /proc/self/status >/dev/null; grep CapBnd /proc/self/status"
        )
        mine, other = await tools.execute_batch([(slot, "bash", {"command": command}) for slot in (first, second)])
        assert mine.success and other.success, (mine, other)
        uid, text, bounds = mine.output.split("\n")[:3]
        assert text == "mine" and uid != other.output.split("\n")[0]
        assert int(bounds.split()[1], 16) == 0, "no privileges, not even ones to gain"
        spied = await tools.execute(second, "bash", {"command": f"cat {first.workspace_dir}/file"})
        assert not spied.success
        await tools.execute(first, "bash", {"command": "(setsid sleep 600 &) ; echo left >/tmp/left"})
        await tools.release(first, reset_workspace=True)
        third = await tools.acquire("c")
        seen = await tools.execute(third, "bash", {"command": "ls -A; ls /tmp; pgrep -x sleep -u $(id -u)"})
        assert seen.output.strip() == ""


NAMED = (
    'whoami && id -gn && echo "$USER" && python3 -c "import getpass, pwd, os; '
    "print(pwd.getpwuid(os.getuid()).pw_dir == os.path.expanduser('~'), os.access('/etc/passwd', os.W_OK))\""
)


@pytest.mark.parametrize(
    ("level", "capabilities", "names"),
    [
        (Isolation.USER, (), ["agent0", "agent1"]),
        (Isolation.NAMESPACE, ("SYS_ADMIN",), ["agent", "agent"]),
    ],
)
async def test_slots_users_have_names(
    backend: DockerBackend,
    owner: str,
    python_image: str,
    level: Isolation,
    capabilities: tuple[str, ...],
    names: list[str],
) -> None:
    async with tool_backend(backend, level, owner, python_image, cap_add=capabilities) as tools:
        for name in names:
            said = await tools.commands(await tools.acquire("group")).run(f"{NAMED} && id -un 0")
            assert said.text.split() == [name, name, name, "True", "False", "root"], said


async def test_lists_of_users_that_are_not_the_containers_are_left_alone(
    backend: DockerBackend, owner: str, python_image: str, tmp_path: Path
) -> None:
    lists = tmp_path / "passwd"
    lists.write_text("root:x:0:0:root:/root:/bin/sh\n")
    for config in ({"volumes": (f"{lists}:/etc/passwd",)}, {"read_only": True}):
        async with tool_backend(backend, Isolation.USER, owner, python_image, **config) as tools, tools.lease() as slot:
            said = await tools.commands(slot).run('whoami || echo "$USER"')
            assert said.text == "agent\n", said
    assert lists.read_text() == "root:x:0:0:root:/root:/bin/sh\n"


async def test_a_fork_bomb_stays_in_its_slot(backend: DockerBackend, owner: str, python_image: str) -> None:
    async with tool_backend(backend, Isolation.USER, owner, python_image, max_processes=64) as tools:
        first, second = await tools.acquire("a"), await tools.acquire("b")
        bomb = asyncio.create_task(
            tools.execute(first, "bash", {"command": "f() { f | f & }; f; sleep 60"}, timeout_s=3)
        )
        for _ in range(5):
            await asyncio.sleep(0.2)
            assert (await tools.execute(second, "bash", {"command": "echo well"})).output == "well\n"
        await bomb
        await tools.release(first, reset_workspace=True)
        again = await tools.acquire("c")
        assert (await tools.execute(again, "bash", {"command": "echo well"})).output == "well\n"


async def test_the_direct_mode_where_there_is_no_python(backend: DockerBackend, owner: str, busybox_image: str) -> None:
    async with tool_backend(backend, Isolation.SHARED, owner, busybox_image) as tools:
        slot = await tools.acquire("a")
        assert slot.isolation == "shared"
        done = await tools.execute(slot, "bash", {"command": "echo $0; echo oops >&2; exit 3"})
        assert done.metadata["exit_code"] == 3 and "oops" in done.output + str(done.error)
        await tools.execute(slot, "write_file", {"path": "a/b", "content": "text"})
        assert "text" in (await tools.execute(slot, "read_file", {"path": "a/b"})).output


async def test_without_python_a_profile_with_secrets_is_refused(
    backend: DockerBackend, owner: str, busybox_image: str
) -> None:
    with pytest.raises(PolicyError, match="see all of the sandbox's secrets"):
        async with tool_backend(backend, Isolation.SHARED, owner, busybox_image, slot_secrets=("KEY",)) as tools:
            await tools.acquire("a")
    assert await backend.list(owner) == []


async def test_idle_sandboxes_go_and_dead_ones_are_replaced(
    backend: DockerBackend, owner: str, python_image: str, api: APIClient
) -> None:
    limits = {"slots_per_sandbox": 1, "max_sandboxes": 2, "idle_timeout": 0.5}
    async with tool_backend(backend, Isolation.USER, owner, python_image, **limits) as tools:
        slots = [await tools.acquire("a"), await tools.acquire("b")]
        assert len(await backend.list(owner)) == 2
        for slot in slots:
            await tools.release(slot, reset_workspace=True)
        deadline = time.monotonic() + 20
        while len(await backend.list(owner)) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        [left] = await backend.list(owner)
        api.kill(left.sandbox_id)
        while left.sandbox_id in [info.sandbox_id for info in await backend.list(owner)]:
            await asyncio.sleep(0.1)
        slot = await tools.acquire("c", timeout_s=30)
        assert slot.sandbox_id != left.sandbox_id
        assert (await tools.execute(slot, "bash", {"command": "echo well"})).output == "well\n"
    assert await backend.list(owner) == []


_DRIVER = """
import asyncio, sys
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

async def main():
    async with Runtime(Settings(owner=sys.argv[1])) as runtime:
        config = {"image": sys.argv[2], "orphan_ttl_s": 3, "min_sandboxes": 1, "max_sandboxes": 1}
        async with runtime.tool_backend("docker", config=config) as tools:
            slot = await tools.acquire("a")
            await tools.execute(slot, "bash", {"command": "(trap '' TERM HUP; sleep 600) &"})
            print(slot.sandbox_id, flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_driver_leaves_no_container(owner: str, python_image: str, api: APIClient) -> None:
    environment = {**os.environ, "HERMES_PLUGINS": "docker"}
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _DRIVER, owner, python_image, env=environment, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    sandbox_id = (await asyncio.wait_for(driver.stdout.readline(), 60)).decode().strip()
    assert api.inspect_container(sandbox_id)["State"]["Running"]
    await asyncio.sleep(4)
    assert api.inspect_container(sandbox_id)["State"]["Running"], "as long as its driver lives"
    driver.kill()
    await driver.wait()
    killed = time.monotonic()
    while time.monotonic() - killed < 30:
        try:
            api.inspect_container(sandbox_id)
        except NotFound:
            return
        await asyncio.sleep(0.1)
    pytest.fail("it is still there")


async def test_reap_ends_the_dead_and_leaves_the_living(
    backend: DockerBackend, spec: Spec, owner: str, python_image: str, api: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "STARTING_S", 0.0)
    monkeypatch.setattr(leftovers, "STARTING_S", 0.0)
    runtime = Runtime(Settings(owner=owner), plugins=[hermes_docker], load_entry_points=False)
    runtime._backends["docker"] = backend
    async with tool_backend(backend, Isolation.USER, owner, python_image, orphan_ttl_s=12) as tools:
        living = (await tools.acquire("a")).sandbox_id
        silent = await backend.create(spec(ttl_s=600))
        never = spec()
        containers._create(api, never, never.config, python_image, None)  # type: ignore[arg-type]
        found = (await leftovers.find(runtime, ["docker"], owner)).sandboxes
        outcomes = {each.found.info.sandbox_id: each.outcome for each in await leftovers.reap(runtime, found)}
        assert outcomes == {living: "left", silent.id: "ended", containers.name_of(never.creation_id): "ended"}
        assert [info.sandbox_id for info in await backend.list(owner)] == [living]


def hermes(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hermes_core", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def test_a_rollout_of_tasks(tmp_path: Path, owner: str, python_image: str) -> None:
    task = {"id": "a", "prompt": "p", "setup": "echo 1 >f", "check": "grep 2 f", "solution": "echo 2 >f"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**task, "id": f"t{n}"}) + "\n" for n in range(6)))
    arguments = [
        *("rollout", "tasks", f"--env.dataset_name={tmp_path / 'tasks.jsonl'}", "--backend", "docker"),
        *(f"--backend.image={python_image}", "--json"),
    ]
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        out = ("--out", str(tmp_path / agent))
        done = hermes(*arguments, *out, "--agent", agent, HERMES_PLUGINS="docker", HERMES_OWNER=owner)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["mean_reward"] == reward
    listed = hermes("ps", "docker", "--owner", owner, "--json", HERMES_PLUGINS="docker")
    assert json.loads(listed.stdout) == []


def test_each_task_in_the_image_that_it_names(
    tmp_path: Path, owner: str, api: APIClient, python_image: str, busybox_image: str
) -> None:
    """No image in the profile: each task's own decides what is there."""
    task = {"prompt": "p", "solution": "true"}
    rows = [
        {**task, "id": "python", "image": python_image, "check": "python3 -c 'print(1)'"},
        {**task, "id": "busybox", "image": busybox_image, "check": "! command -v python3"},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["rollout", "tasks", f"--env.dataset_name={tmp_path / 'tasks.jsonl'}", "--agent", "oracle", "--json"]
    where = ["--backend", "docker", "--isolation", "dedicated", "--out", str(tmp_path / "out")]
    done = hermes(*arguments, *where, HERMES_PLUGINS="docker", HERMES_OWNER=owner)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 2
    assert api.containers(filters={"label": f"hermes-rl.owner={owner}"}) == []


def docker_only(owner: str) -> Runtime:
    return Runtime(Settings(owner=owner), plugins=[hermes_docker], load_entry_points=False)


REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@pytest.mark.parametrize("isolation", ["shared", "user", "dedicated"])
async def test_the_network_is_open_for_the_preparation_and_cut_for_every_slot(
    isolation: str, owner: str, api: APIClient, python_image: str
) -> None:
    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def prepare(sandbox: NewSandbox) -> None:
        said = await sandbox.commands.run(["python3", "-c", REACH, *address])
        assert said.ok, said.error_text
        await sandbox.prepare("fetched", "echo something >here")

    # A daemon names the gateway from its second start on only; it is the subnet's first address.
    subnet = api.inspect_network("bridge")["IPAM"]["Config"][0]["Subnet"]
    gateway = str(ipaddress.ip_network(subnet)[1])
    config = {"image": python_image, "network": "setup", "max_sandboxes": 1, "reserve_slots": 0}
    async with await asyncio.start_server(ignore, gateway, 0) as server, docker_only(owner) as runtime:
        address = [gateway, str(server.sockets[0].getsockname()[1])]
        with pytest.raises(ConfigError, match="nothing prepares"):
            runtime.tool_backend("docker", isolation=isolation, config=config, profiles={})
        backend = runtime.tool_backend(
            "docker", isolation=isolation, config=config, profiles={}, prepare_sandbox=prepare
        )
        async with backend, backend.lease() as slot:
            said = await backend.commands(slot).run(["python3", "-c", REACH, *address])
            assert "unreachable" in said.error_text
            assert (await backend.preparation(slot).run(["python3", "-c", REACH, *address])).returncode
            directory = await backend.prepare(slot, "fetched", _never)
            assert (await backend.commands(slot).read_file(f"{directory}/here")).data == b"something\n"


async def _never(commands: SlotCommands, directory: str) -> None:
    raise AssertionError("it was prepared before")


async def test_a_sandbox_that_can_not_be_prepared_is_not_left(owner: str, api: APIClient, python_image: str) -> None:
    async def prepare(sandbox: NewSandbox) -> None:
        await sandbox.prepare("x", "echo no such package >&2; exit 3")

    config = {"image": python_image, "network": "setup"}
    async with docker_only(owner) as runtime:
        with pytest.raises(PolicyError, match="no such package"):
            async with runtime.tool_backend("docker", config=config, profiles={}, prepare_sandbox=prepare):
                pass
    assert api.containers(filters={"label": f"hermes-rl.owner={owner}"}) == []


def test_a_rollout_of_swe_smith(tmp_path: Path, owner: str, python_image: str) -> None:
    arguments = [
        *("rollout", "swe-smith", "--env.dataset_name=demo", "--backend", "docker", "--json"),
        *(f"--backend.image={python_image}", "--backend.network=setup"),
    ]
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        out = ("--out", str(tmp_path / agent))
        done = hermes(*arguments, *out, "--agent", agent, HERMES_PLUGINS="docker,swe-smith", HERMES_OWNER=owner)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["mean_reward"] == reward


def test_the_doctor_says_what_is_wrong_with_the_daemon(tmp_path: Path) -> None:
    well = hermes("doctor", "docker", HERMES_PLUGINS="docker")
    assert well.returncode == 0, well.stdout
    absent = hermes("doctor", "docker", HERMES_PLUGINS="docker", DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert absent.returncode == 1
    assert "No such file or directory" in absent.stdout and "-> start it" in absent.stdout
    elsewhere = hermes("doctor", "docker", HERMES_PLUGINS="docker", DOCKER_HOST="ssh://somewhere")
    assert elsewhere.returncode == 1 and "ssh -L /tmp/docker.sock" in elsewhere.stdout
