"""A cluster that fails in every way that the emulator knows: what happens is told, and nothing is lost or leaked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core import (
    ChannelLost,
    ImageError,
    Isolation,
    PolicyError,
    ProvisionError,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
)
from tests.kubernetes.conftest import ClusterProcess, output, tool_backend

Spec = Callable[..., SandboxSpec]

PODS = "/api/v1/namespaces/rollouts/pods"


@pytest.mark.parametrize(
    ("config", "kind", "words", "retryable"),
    [
        ({"image": "missing:1"}, ImageError, "ErrImagePull: .*not found", False),
        ({"image": "silent:1", "start_timeout_s": 1}, ImageError, "ImagePullBackOff", False),
        ({"image": "flaky:1"}, ProvisionError, "ErrImagePull: .*i/o timeout", True),
        (
            {"cpu": 100, "start_timeout_s": 1},
            ProvisionError,
            "no node takes it: Unschedulable: .*Insufficient cpu",
            True,
        ),
        ({"node_selector": {"emulator": "no"}, "start_timeout_s": 1}, ProvisionError, "node affinity", True),
        ({"gpus": 1, "start_timeout_s": 1}, ProvisionError, "nvidia.com/gpu", True),
        ({"namespace": "missing"}, ProvisionError, 'namespaces "missing" not found', False),
    ],
)
async def test_why_a_pod_does_not_start_is_told(
    backend: Any,
    spec: Spec,
    owner: str,
    config: dict[str, Any],
    kind: type[ProvisionError],
    words: str,
    retryable: bool,
) -> None:
    with pytest.raises(ProvisionError, match=words) as caught:
        await backend.create(spec(**config))
    assert type(caught.value) is kind
    assert caught.value.retryable is retryable
    assert caught.value.hint
    assert await backend.list(owner) == []


async def test_a_setup_container_that_fails_is_told(backend: Any, spec: Spec, owner: str) -> None:
    pod = {"spec": {"initContainers": [{"name": "mine", "image": "x", "command": ["sh", "-c", "echo no >&2; exit 4"]}]}}
    with pytest.raises(ProvisionError, match=r"container mine ended with status 4 .*no"):
        await backend.create(spec(pod=pod))
    assert await backend.list(owner) == []


async def test_a_quota_is_waited_for_by_the_pool(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    cluster.ask("set", quota=0)
    with pytest.raises(ProvisionError, match="exceeded quota") as caught:
        await backend.create(spec())
    assert caught.value.retryable


async def test_a_limited_rate_is_respected(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    cluster.fault(f"POST {PODS}", status=429, reason="TooManyRequests", retry_after=1, times=2)
    began = time.monotonic()
    sandbox = await backend.create(spec())
    assert time.monotonic() - began > 2
    cluster.fault(f"GET {PODS}.*", status=429, retry_after=1)
    assert await output(sandbox, "echo on") == b"on\n"


async def test_a_server_that_fails_now_and_then_is_asked_again(
    cluster: ClusterProcess, backend: Any, spec: Spec
) -> None:
    for request in (f"POST {PODS}", f"GET {PODS}", f"GET {PODS}/.*/exec", f"DELETE {PODS}/.*"):
        cluster.fault(request, status=500, reason="InternalError", times=2)
    sandbox = await backend.create(spec())
    assert await output(sandbox, "echo on") == b"on\n"
    await sandbox.terminate()
    assert await sandbox.status() is SandboxStatus.GONE


async def test_a_lost_answer_makes_no_second_pod(cluster: ClusterProcess, backend: Any, spec: Spec, owner: str) -> None:
    cluster.fault(f"POST {PODS}", lose_answer=True)
    sandbox = await backend.create(spec())
    assert [info.sandbox_id for info in await backend.list(owner)] == [sandbox.id]
    assert len([line for line in cluster.ask("log") if line.startswith("POST")]) == 2


async def test_a_creation_cancelled_while_its_request_is_on_the_way_leaves_nothing(
    cluster: ClusterProcess, backend: Any, spec: Spec, owner: str
) -> None:
    cluster.fault(f"POST {PODS}", delay_s=0.5)
    creating = asyncio.create_task(backend.create(spec()))
    await asyncio.sleep(0.2)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await asyncio.sleep(1)
    assert await backend.list(owner) == []


async def test_an_expired_token_is_read_again(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec())
    token = Path(cluster.folder, "token")
    before = token.read_text()
    try:
        token.write_text("another-token")
        assert await output(sandbox, "echo on") == b"on\n"
        token.write_text("a-third-token")
        assert await sandbox.status() is SandboxStatus.RUNNING
    finally:
        token.write_text(before)


async def test_no_right_is_told_with_the_way_to_it(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    cluster.fault(f"POST {PODS}", status=403, reason="Forbidden", message="pods is forbidden: User cannot create")
    with pytest.raises(ProvisionError, match="User cannot create") as caught:
        await backend.create(spec())
    assert not caught.value.retryable
    assert "doctor kubernetes" in str(caught.value.hint)


async def test_no_right_to_exec_is_told(cluster: ClusterProcess, backend: Any, spec: Spec, owner: str) -> None:
    cluster.fault(f"GET {PODS}/.*/exec", status=403)
    with pytest.raises(ProvisionError, match="refuses an exec: 403") as caught:
        await backend.create(spec())
    assert "doctor kubernetes" in str(caught.value.hint)
    assert await backend.list(owner) == []


async def test_an_evicted_pod_is_lost(cluster: ClusterProcess, backend: Any, spec: Spec) -> None:
    sandbox = await backend.create(spec())
    channel = await sandbox.open(["sh", "-c", "echo in; sleep 1000"])
    assert await channel.read(10) == b"in\n"
    namespace, name = sandbox.id.split("/")
    cluster.ask("evict", namespace=namespace, name=name)
    with pytest.raises(ChannelLost):  # or its end: the program was killed
        if await channel.read(10) == b"" and await channel.wait() == 137:
            raise ChannelLost("it was killed")
    await channel.aclose()
    with pytest.raises(SandboxLost):
        await sandbox.open(["true"])
    assert await sandbox.status() is SandboxStatus.ENDED


async def test_a_stream_that_is_cut_in_the_middle_of_100_mb_is_no_end(
    cluster: ClusterProcess, backend: Any, spec: Spec
) -> None:
    sandbox = await backend.create(spec())
    cluster.fault(f"GET {PODS}/.*/exec", cut_after_bytes=40 << 20)
    channel = await sandbox.open(["head", "-c", str(100 << 20), "/dev/zero"])
    got = 0
    with pytest.raises(ChannelLost):
        while data := await channel.read(1 << 20):
            got += len(data)
    with pytest.raises(ChannelLost):
        await channel.wait()
    await channel.aclose()
    assert 0 < got <= 41 << 20


async def test_commands_go_on_over_cut_channels(cluster: ClusterProcess, backend: Any, owner: str) -> None:
    async with tool_backend(backend, owner) as tools:
        slot = await tools.acquire("a")
        command = (
            "for n in 1 2 3 4 5 6 7 8; do echo $n >>ran; sleep 0.5; done; head -c 30000000 /dev/zero | wc -c; cat ran"
        )
        running = asyncio.create_task(tools.execute(slot, "bash", {"command": command}, timeout_s=60))
        for _ in range(3):
            await asyncio.sleep(1)
            await asyncio.to_thread(cluster.ask, "cut")
        result = await running
        assert result.output == "30000000\n1\n2\n3\n4\n5\n6\n7\n8\n", "each line once"


async def test_a_pool_replaces_an_evicted_pod(cluster: ClusterProcess, backend: Any, owner: str) -> None:
    async with tool_backend(backend, owner) as tools:
        slot = await tools.acquire("a")
        namespace, name = slot.sandbox_id.split("/")
        await asyncio.to_thread(cluster.ask, "evict", namespace=namespace, name=name)
        with pytest.raises(SandboxLost):
            await tools.execute(slot, "bash", {"command": "echo on"})
        await tools.release(slot)
        other = await tools.acquire("b")
        assert other.sandbox_id != slot.sandbox_id
        assert (await tools.execute(other, "bash", {"command": "echo on"})).output == "on\n"


async def test_two_sandboxes_never_have_the_same_user_ids(
    backend: Any, spec: Spec, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_kubernetes import pods

    choices = iter([2_100_000_000, 2_100_000_000, 2_100_000_512])
    monkeypatch.setattr(pods, "choose_uids", lambda config: next(choices))
    first, second = await backend.create(spec("user")), await backend.create(spec("user"))
    assert (first.uid_base, second.uid_base) == (2_100_000_000, 2_100_000_512)


@pytest.mark.parametrize(
    ("level", "config", "words"),
    [
        ("user", {"user": 1000}, "only root can keep slots apart"),
        ("namespace", {}, "need SYS_ADMIN"),
        ("private-root", {}, "need SYS_ADMIN"),
    ],
)
async def test_levels_that_a_pod_can_not_give_are_refused(
    backend: Any, spec: Spec, level: str, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        await backend.create(spec(level, **config))


def test_a_network_that_a_slot_could_bring_up_again_is_refused(backend: Any, spec: Spec) -> None:
    kept = {Isolation.USER, Isolation.NAMESPACE}
    assert backend.levels(spec(network="setup").config) == kept
    assert backend.levels(spec(network="none", cap_add=["NET_ADMIN"]).config) == kept
    assert backend.levels(spec(network="none", cap_add=["SYS_ADMIN"]).config) == kept | {Isolation.PRIVATE_ROOT}
