"""The trainer's side, against a `run-api` that dies, forgets, refuses and answers too late."""

from __future__ import annotations

import asyncio
import gzip
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hermes_atropos import trainer as module
from hermes_atropos.trainer import TrainerApi, TrainerGone

from hermes_core.aio import BrokenOff
from hermes_core.errors import ConfigError

GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "messages": None, "unknown": 1}


class FlakyApi:
    """An HTTP server whose answers are a function of method, path and body: `(status, body)`, or None to hang up."""

    def __init__(self, answer: Callable[[str, str, Any], tuple[int, Any] | None]) -> None:
        self.answer, self.received, self.url = answer, [], ""

    async def __aenter__(self) -> FlakyApi:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            given = json.loads(body) if body else None
            self.received.append((path, given))
            answer = self.answer(method, path, given)
            if answer is not None:
                data = json.dumps(answer[1]).encode()
                writer.write(
                    f"HTTP/1.1 {answer[0]} X\r\nContent-Type: application/json\r\nConnection: close\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n".encode()
                    + data
                )
        finally:
            writer.close()


REGISTERED = {"status": "success", "env_id": 3, "wandb_name": "x_0", "starting_step": 0}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)


def client(server: FlakyApi, patience_s: float = 20) -> TrainerApi:
    return TrainerApi(server.url, {"desired_name": "x"}, patience_s=patience_s)


def steady(method: str, path: str, body: Any) -> tuple[int, Any] | None:
    answers = {"/register-env": REGISTERED, "/status-env": {"current_step": 0, "queue_size": 0}}
    return 200, answers.get(path, {"status": "received"})


async def test_a_group_is_sent_once_with_the_keys_that_the_api_takes() -> None:
    async with FlakyApi(steady) as server, client(server) as api:
        assert await api.send(GROUP)
        sent = [body for path, body in server.received if path == "/scored_data"]
        assert sent == [{"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0], "env_id": 3}]
        assert api.counts["sent"] == 1
        assert api.counts["sent_again"] == 0
    assert server.received[-1] == ("/disconnect-env", {"env_id": 3})


@pytest.mark.usefixtures("atropos_extra")
def test_the_keys_are_all_that_the_api_takes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from atroposlib.api.server import ScoredData
    assert set(module.SENT_KEYS) == set(ScoredData.model_fields) - {"env_id"}


async def test_a_large_group_is_compressed() -> None:
    async with FlakyApi(steady) as server, client(server) as api:
        assert await api.send({**GROUP, "tokens": [list(range(5000))]})
        assert [body["tokens"] for path, body in server.received if path == "/scored_data"] == [[list(range(5000))]]


async def test_a_lost_answer_is_sent_again_and_counted() -> None:
    lost = iter([True])

    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        return None if path == "/scored_data" and next(lost, False) else steady(method, path, body)

    async with FlakyApi(answer) as server, client(server) as api:
        assert await api.send(GROUP)
        assert api.counts["sent_again"] == 1
        assert api.counts["registered"] == 1


async def test_an_api_that_forgot_us_is_registered_with_before_anything_is_sent() -> None:
    known = {"yes": True}
    order = []

    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        order.append(path)
        if path == "/register-env":
            known["yes"] = True
        if path == "/status-env" and not known["yes"]:
            return 500, {}
        return steady(method, path, body)

    async with FlakyApi(answer) as server, client(server) as api:
        await api.send(GROUP)
        known["yes"] = False
        order.clear()
        await asyncio.gather(*(api.send(GROUP) for _ in range(5)))
        assert order.index("/register-env") < order.index("/scored_data")
        assert api.counts["registered"] == 2
        assert api.counts["sent"] == 6


async def test_a_refused_group_is_not_tried_for_ever() -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        return (422, {"detail": "no"}) if path == "/scored_data" else steady(method, path, body)

    async with FlakyApi(answer) as server, client(server) as api:
        assert not await api.send(GROUP)
        assert api.counts["refused"] == 1


async def test_all_who_register_share_one_registration_whoever_of_them_is_cancelled() -> None:
    there = asyncio.Event()

    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        return steady(method, path, body) if there.is_set() else (200, {"status": "wait for trainer to start"})

    async with FlakyApi(answer) as server, client(server) as api:
        first, *others = (asyncio.create_task(api.register()) for _ in range(5))
        async with asyncio.timeout(20):
            while len(server.received) < 3:
                await asyncio.sleep(0.01)
        first.cancel()
        there.set()
        assert await asyncio.gather(*others) == [REGISTERED] * 4
        assert first.cancelled()
        assert api.counts["registered"] == 1


async def test_who_waits_for_a_trainer_hears_that_the_api_was_closed() -> None:
    async with FlakyApi(lambda *_: (200, {"status": "wait for trainer to start"})) as server:
        async with client(server) as api:
            waiting = asyncio.create_task(api.register())
            async with asyncio.timeout(20):
                while not server.received:
                    await asyncio.sleep(0.01)
        with pytest.raises(BrokenOff, match="registration"):
            await waiting


async def test_a_trainer_that_is_gone_ends_the_waiting() -> None:
    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        return 200, {"status": "wait for trainer to start"}

    async with FlakyApi(answer) as server, client(server, patience_s=0.1) as api:
        with pytest.raises(TrainerGone, match="raise trainer_timeout"):
            await api.register()
    async with client(server, patience_s=0.1) as api:
        with pytest.raises(TrainerGone):
            await api.send(GROUP)


async def test_wrong_addresses_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a URL"):
        TrainerApi("localhost:8000", {}, patience_s=1)
