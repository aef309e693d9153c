"""`slot_user`: who commands run as in containers that are one slot's alone, and what root of them can't have."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from hermes_docker.backend import DockerBackend
from hermes_docker.config import DockerConfig

from hermes_core.errors import PolicyError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.pool.adoption import new_creation_id
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

DEDICATED, USER, SHARED = Isolation.DEDICATED, Isolation.USER, Isolation.SHARED
ROOT: dict[str, Any] = {"slot_user": "root", "max_sandboxes": 2}
ORDINARY = {"user": "1000", "tmpfs": {"/data": "mode=1777"}}


def tool_backend(backend: DockerBackend, level: Isolation, owner: str, image: str, **config: Any) -> ToolBackend:
    profile = DockerConfig(**{"image": image, "max_sandboxes": 1, "reserve_slots": 0, **config})
    return opened(backend, level, owner, profile)


def opened(
    backend: DockerBackend, level: Isolation, owner: str, profile: DockerConfig, *, take_over: bool = False
) -> ToolBackend:
    return ToolBackend(
        backend,
        profiles={"default": profile},
        tools=ToolRegistry(),
        isolation=level,
        owner=owner,
        take_over=take_over,
    )


@pytest.fixture
def images(python_image: str, busybox_image: str) -> Mapping[str, str]:
    return {"python": python_image, "busybox": busybox_image}


@pytest.mark.parametrize(
    ("image", "slot_user", "is_root"),
    [
        ("python", None, False),
        ("python", "own", False),
        ("python", "root", True),
        ("busybox", None, True),
        ("busybox", "root", True),
    ],
)
async def test_who_commands_run_as(
    backend: DockerBackend, owner: str, images: Mapping[str, str], image: str, slot_user: str | None, is_root: bool
) -> None:
    opening = tool_backend(backend, DEDICATED, owner, images[image], slot_user=slot_user)
    async with opening as tools, tools.lease() as slot:
        said = await tools.commands(slot).run("id -u; touch /etc/written && echo written")
        assert (said.text.split()[0] == "0", "written" in said.text) == (is_root, is_root)
        assert bool(tools.missing(slot)) == is_root


@pytest.mark.parametrize(
    ("level", "image", "config", "reason"),
    [
        (DEDICATED, "busybox", {"slot_user": "own"}, "can give its slots no user"),
        (SHARED, "python", {"slot_user": "own"}, "at level 'shared'"),
        (USER, "python", {"slot_user": "root"}, "use level private-root or dedicated"),
        (SHARED, "busybox", {"slot_user": "root"}, "use level private-root or dedicated"),
        (DEDICATED, "python", {"slot_user": "root", "slot_secrets": ("KEY",)}, "nothing in a sandbox can be hidden"),
        (DEDICATED, "python", {"slot_user": "root", **ORDINARY}, "the sandbox's own user is not"),
    ],
)
async def test_what_can_not_be_kept_is_refused(
    backend: DockerBackend,
    owner: str,
    images: Mapping[str, str],
    level: Isolation,
    image: str,
    config: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(PolicyError, match=reason):
        async with tool_backend(backend, level, owner, images[image], **config) as tools:
            await tools.acquire()
    assert await backend.list(owner) == []


@pytest.mark.parametrize("image", ["python", "busybox"])
@pytest.mark.parametrize("reset", [True, False])
async def test_a_sandbox_whose_slot_was_root_is_never_used_again(
    backend: DockerBackend, owner: str, images: Mapping[str, str], api: APIClient, image: str, reset: bool
) -> None:
    async with tool_backend(backend, DEDICATED, owner, images[image], **ROOT, reserve_slots=1) as tools:
        used = set()
        for turn in range(3):
            slot = await tools.acquire(verification=turn == 2)
            if turn:
                await tools.commands(slot).run("nohup sleep 1000 >/dev/null 2>&1 &")
            used.add(slot.sandbox_id)
            await tools.release(slot, reset_workspace=reset)
        assert len(used) == 3
        async with asyncio.timeout(30):
            while used & {info.sandbox_id for info in await backend.list(owner)}:
                await asyncio.sleep(0.1)


async def test_the_sandbox_of_an_earlier_driver_is_not_gone_on_with(
    backend: DockerBackend, owner: str, spec: Any, python_image: str
) -> None:
    for slot_user, goes_on in ((None, True), ("root", False)):
        profile = DockerConfig(image=python_image, slot_user=slot_user, max_sandboxes=2, reserve_slots=0)  # type: ignore[arg-type]
        left = await backend.create(spec(DEDICATED, creation_id=new_creation_id(profile, DEDICATED)))
        async with opened(backend, DEDICATED, owner, profile, take_over=True) as tools, tools.lease() as slot:
            assert (slot.sandbox_id == left.id) == goes_on
        await left.terminate()


async def test_nothing_is_prepared_where_root_could_read_or_change_it(
    backend: DockerBackend, owner: str, python_image: str
) -> None:
    async def build(commands: SlotCommands, directory: str) -> None:
        await commands.write_file(f"{directory}/file", b"made")

    async with tool_backend(backend, DEDICATED, owner, python_image, **ROOT) as tools, tools.lease() as slot:
        with pytest.raises(PolicyError, match="without a guest nothing can be hidden"):
            await tools.prepare(slot, "key", build, private=True)
        with pytest.raises(PolicyError, match="nothing in its sandbox is out of its reach"):
            tools.preparation(slot)
        assert (await tools.commands(slot).run(["pgrep", "python"])).stdout == b"", "there is a guest to tamper with"
        place = await tools.prepare(slot, "key", build)
        assert (await tools.commands(slot).read_file(f"{place}/file")).data == b"made"
        async with tools.lease(verification=True) as fresh:
            assert fresh.sandbox_id != slot.sandbox_id


def hermes(owner: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hermes_core", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HERMES_PLUGINS": "docker", "HERMES_OWNER": owner},
        timeout=600,
        stdin=subprocess.DEVNULL,
    )


def test_rollouts_whose_tasks_need_root(tmp_path: Path, owner: str, python_image: str, api: APIClient) -> None:
    task = {"id": "a", "prompt": "p", "check": "grep root /etc/done", "solution": "id -un >/etc/done"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**task, "id": f"t{n}"}) + "\n" for n in range(3)))
    arguments = [
        *("rollout", "tasks", f"--env.dataset_name={tmp_path / 'tasks.jsonl'}", "--agent", "oracle", "--json"),
        *("--backend", "docker", f"--backend.image={python_image}", "--backend.slot_user=root"),
        *("--out", str(tmp_path / "out")),
    ]
    refused = hermes(owner, *arguments)
    assert refused.returncode != 0 and "or dedicated" in refused.stderr
    done = hermes(owner, *arguments, "--isolation", "dedicated")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 3
    assert api.containers(filters={"label": f"hermes-rl.owner={owner}"}) == []
