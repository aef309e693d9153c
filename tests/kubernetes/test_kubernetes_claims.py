"""Sandboxes claimed from a warm pool of agent-sandbox, whose template decides what is in them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_core import ConfigError, PolicyError, ProvisionError, SandboxLost, SandboxSpec, SandboxStatus
from tests.kubernetes.conftest import ClusterProcess, output, tool_backend

Spec = Callable[..., SandboxSpec]

MAIN = 'trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done'


def template(**changes: Any) -> dict[str, Any]:
    """The pod of a template that keeps every promise at the levels `shared` and `dedicated`."""
    container = {"name": "main", "image": "python:3.11", "command": ["/bin/sh", "-c", MAIN]}
    return {"restartPolicy": "Never", "containers": [{**container, **changes.pop("container", {})}], **changes}


@pytest.fixture
def pool(cluster: ClusterProcess) -> ClusterProcess:
    cluster.ask("pool", name="python", spec=template())
    return cluster


async def test_a_claim_is_a_sandbox(pool: ClusterProcess, backend: Any, spec: Spec, owner: str) -> None:
    wanted = spec(warm_pool="python")
    wanted.environment["OF_THE_SPEC"] = "yes"  # type: ignore[index]
    backend.note_profile(wanted.config)
    sandbox = await backend.create(wanted)
    assert (await backend.create(wanted)).id == sandbox.id
    assert [info.sandbox_id for info in await backend.list(owner)] == [sandbox.id]
    assert await output(sandbox, 'echo "$OF_THE_SPEC"') == b"yes\n"
    again = await backend.attach(sandbox.id)
    assert await output(again, 'echo "$OF_THE_SPEC"') == b"yes\n", "the spec's variables are kept in the claim"
    assert 0 < again.lifetime_s <= wanted.config.max_lifetime
    await sandbox.terminate()
    assert await backend.list(owner) == []
    assert await sandbox.status() is SandboxStatus.GONE
    with pytest.raises(SandboxLost):
        await backend.attach(sandbox.id)


async def test_the_template_of_the_guide_gives_slots_of_level_user(
    cluster: ClusterProcess, backend: Any, owner: str
) -> None:
    (found,) = [each for each in of_the_guide() if each["kind"] == "SandboxTemplate"]
    cluster.ask("pool", name="rollouts", spec=found["spec"]["podTemplate"]["spec"])
    async with tool_backend(backend, owner, warm_pool="rollouts") as tools:
        slots = [await tools.acquire(name) for name in "ab"]
        commands = [(slot, "bash", {"command": "id -u; cat /proc/sys/kernel/sem"}) for slot in slots]
        found = [result.output.splitlines() for result in await tools.execute_batch(commands)]
        assert found[0][0] != found[1][0], "each has a user of its own"
        assert found[0][1].split() == ["0"] * 4


def test_the_role_of_the_guide_has_all_rights(cloud_extra: None) -> None:
    from hermes_kubernetes.diagnosis import RIGHTS

    (role,) = [each for each in of_the_guide() if each["kind"] == "Role"]
    granted = {(verb, what) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}
    assert granted == {right for rights in RIGHTS.values() for right in rights}


async def test_the_doctor_looks_for_agent_sandbox(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    backend.note_profile(spec(warm_pool="python").config)
    assert (await backend.check()).usable
    cluster.ask("set", denied=["create sandboxclaims"])
    assert "no right to create sandboxclaims" in (await backend.check()).summary
    cluster.ask("set", claims=False)
    found = await backend.check()
    assert (found.usable, "agent-sandbox is not installed" in found.summary) == (False, True)


def of_the_guide() -> list[dict[str, Any]]:
    """The objects of Kubernetes that the guide shows."""
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "kubernetes.md"
    blocks = re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.DOTALL)
    return [each for block in blocks for each in yaml.safe_load_all(block) if "kind" in each]


async def test_without_a_driver_the_watchdog_ends_the_pod_and_with_it_the_claim(
    pool: ClusterProcess, backend: Any, spec: Spec, owner: str
) -> None:
    sandbox = await backend.create(spec(warm_pool="python", orphan_ttl_s=1.0))
    async with asyncio.timeout(30):
        while await sandbox.status() is not SandboxStatus.GONE:
            await asyncio.sleep(0.2)
    assert await backend.list(owner) == []


async def test_a_driver_that_dies_before_the_watchdog_runs_leaves_a_claim_with_an_end(
    pool: ClusterProcess, spec: Spec
) -> None:
    from hermes_kubernetes.claims import claim_of

    wanted = spec(warm_pool="python", max_lifetime=600)
    lifecycle = claim_of(wanted, wanted.config, None)["spec"]["lifecycle"]  # type: ignore[arg-type]
    assert lifecycle["shutdownPolicy"] == "DeleteForeground"
    assert lifecycle["shutdownTime"].endswith("Z")


@pytest.mark.parametrize(
    ("spec_of_pods", "level", "words"),
    [
        (template(restartPolicy="Always"), "shared", "restartPolicy is not Never"),
        (template(container={"command": ["sleep", "infinity"]}), "shared", "ignores TERM"),
        (template(), "user", "System V IPC"),
    ],
)
async def test_a_template_that_breaks_a_promise_is_refused(
    pool: ClusterProcess, backend: Any, spec: Spec, owner: str, spec_of_pods: dict[str, Any], level: str, words: str
) -> None:
    pool.ask("pool", name="other", spec=spec_of_pods)
    with pytest.raises(PolicyError, match=words):
        await backend.create(spec(level, warm_pool="other"))
    assert await backend.list(owner) == []


async def test_a_pool_that_does_not_exist_is_told_at_once(pool: ClusterProcess, backend: Any, spec: Spec) -> None:
    with pytest.raises(ProvisionError, match='WarmPoolNotFound: SandboxWarmPool "none" not found') as caught:
        await backend.create(spec(warm_pool="none"))
    assert not caught.value.retryable


async def test_an_item_with_an_image_of_its_own_is_refused(pool: ClusterProcess, backend: Any, spec: Spec) -> None:
    wanted = spec(warm_pool="python")
    other = replace(wanted, config=wanted.config.model_copy(update={"image": "of-an-item:1"}))
    with pytest.raises(PolicyError, match="has the image of its template"):
        await backend.create(other)


async def test_a_cancelled_claim_leaves_nothing(pool: ClusterProcess, backend: Any, spec: Spec, owner: str) -> None:
    for delay in (0.0, 0.02, 0.3, 0.6):
        creating = asyncio.create_task(backend.create(spec(warm_pool="python")))
        await asyncio.sleep(delay)
        creating.cancel()
        with suppress(asyncio.CancelledError):
            await (await creating).terminate()
    assert await backend.list(owner) == []


def test_settings_that_a_template_decides_are_refused(spec: Spec) -> None:
    with pytest.raises(ConfigError, match="its template decides on image"):
        spec(warm_pool="python", image="python:3.12")
