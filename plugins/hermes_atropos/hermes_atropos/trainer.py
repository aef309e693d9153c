"""The client of the trainer's `run-api`: registers, asks for its status, and sends groups until they are acknowledged.

run-api 0.4.0 calls for care. It keeps its state in memory, so after a restart it knows no environment. A group that
arrives before a trainer has registered disables run-api for good, because it skips the registration once its queue
exists. It even accepts groups of environments that it does not know.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from hermes_atropos.json_lines import group_json
from hermes_core import ConfigError, InfraError, SingleFlight, TaskSet
from hermes_core.agents.endpoint.http import is_loopback

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two attempts."""
REQUEST_S = 120.0
"""Time limit of a request, in seconds."""
COMPRESSED_FROM = 1024
"""Size in bytes from which a body is compressed."""

SENT_KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "generation_params", "distill_token_ids", "distill_logprobs"),
)
"""The fields of a group that run-api accepts. Some of them are only set by a subclass's `postprocess_histories`."""


class TrainerGone(InfraError):
    """The API did not answer for too long, or its trainer did nothing."""


class TrainerApi:
    """The connection of one environment to a `run-api`; an async context manager.

    Args:
        url: `rollout_server_url`.
        registration: the body of `POST /register-env`.
        patience_s: seconds after which `check_patience` raises if the API or the trainer is silent.
    """

    def __init__(self, url: str, registration: Mapping[str, Any], *, patience_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout_server_url {url!r} is not a URL", hint="write http://HOST:PORT")
        self.url = url.rstrip("/")
        self.registration = dict(registration)
        self.env_id: int | None = None
        self.answer: dict[str, Any] = {}
        """The API's answer to the last registration."""
        self.counts: Counter[str] = Counter()
        """How many groups were `sent`, `sent_again` (because the answer was lost), `refused` and `buffered`, and how
        often the environment `registered`."""
        self._patience_s = patience_s
        self._heard = time.monotonic()
        self._work = TaskSet()
        self._registering: SingleFlight[None] = SingleFlight("the registration with the trainer")
        self._client = httpx.AsyncClient(timeout=REQUEST_S, trust_env=not is_loopback(url))

    async def __aenter__(self) -> TrainerApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._work.aclose()
        await self.disconnect()
        await self._client.aclose()

    async def register(self) -> dict[str, Any]:
        """Register, unless the environment is registered, and return the API's answer. Waits for a trainer.

        Raises:
            TrainerGone: no trainer came within `patience_s`.
            ConfigError: the API refuses the registration.
        """
        if self.env_id is None:
            await self._registering.get(self._work, self._register)
        return self.answer

    async def _register(self) -> None:
        while True:
            answer = await self._ask("POST", "/register-env", self.registration)
            if answer is not None and answer.get("status") == "success":
                self.env_id, self.answer = int(answer["env_id"]), answer
                self.counts["registered"] += 1
                self.note_progress()
                return
            self.check_patience()
            log.info("waiting for a trainer at %s", self.url)
            await asyncio.sleep(POLL_S)

    async def info(self) -> dict[str, Any]:
        """Return the trainer's `batch_size` and `max_token_len`, each -1 if it is unknown."""
        return await self._ask("GET", "/info") or {"batch_size": -1, "max_token_len": -1}

    async def wandb_info(self) -> dict[str, Any]:
        """Return the trainer's wandb `group` and `project`."""
        return await self._ask("GET", "/wandb_info") or {"group": None, "project": None}

    async def status(self) -> dict[str, Any] | None:
        """Return the status of the queue; None if the API can't be reached or does not know this environment."""
        env_id = self.env_id
        if env_id is None:
            return None
        response = await self._request("GET", "/status-env", {"env_id": env_id})
        if response is not None and response.status_code >= 400:
            self.forget(env_id)
        return _answer(response)

    def forget(self, env_id: int | None) -> None:
        """Forget our id if it is `env_id`, which the API does not know. `send` then registers again."""
        if env_id is not None and self.env_id == env_id:
            log.warning("the API at %s does not know this environment any more: it registers anew", self.url)
            self.env_id = None

    def note_progress(self) -> None:
        """Record that the trainer is active: it made a step, or its queue has room."""
        self._heard = time.monotonic()

    def check_patience(self) -> None:
        """Raise an error if the API or the trainer has been silent for too long.

        Raises:
            TrainerGone: the silence was longer than `patience_s`.
        """
        silence = time.monotonic() - self._heard
        if silence > self._patience_s:
            raise TrainerGone(
                f"no trainer at {self.url} for {silence:.0f} s",
                hint="start run-api and the trainer, or raise trainer_timeout",
            )

    async def send(self, group: Mapping[str, Any]) -> bool:
        """Send one group until it is acknowledged. Return False if the API refuses it.

        If the answer to a group is lost, the group is sent again, and may arrive twice. Such groups are counted and
        logged.

        Raises:
            TrainerGone: as `register` does.
        """
        payload = {key: group[key] for key in SENT_KEYS if group.get(key) is not None}
        unsure = False
        while True:
            await self._ensure_registered()
            plain = await group_json({**payload, "env_id": self.env_id})
            body, headers = await asyncio.to_thread(_compress, plain)
            try:
                response = await self._client.post(f"{self.url}/scored_data", content=body, headers=headers)
            except httpx.HTTPError as error:
                # Nothing was sent for certain only if no connection was made.
                lost_answer = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                unsure = unsure or lost_answer
                log.warning("a group was not acknowledged: %s: %s", type(error).__name__, error)
                await asyncio.sleep(POLL_S)
                continue
            if response.status_code >= 500:
                log.warning("the API failed on a group: HTTP %d", response.status_code)
                unsure = True
                await asyncio.sleep(POLL_S)
                continue
            return self._note_answer(response, again=unsure)

    def _note_answer(self, response: httpx.Response, *, again: bool) -> bool:
        if response.status_code >= 400:
            self.counts["refused"] += 1
            log.error("the API refuses a group: HTTP %d: %s", response.status_code, response.text[:500])
            return False
        self.counts["sent"] += 1
        if again:
            self.counts["sent_again"] += 1
            log.warning("a group was sent again, as the answer to the first time was lost: it may be there twice")
        if response.json().get("status") == "buffered":
            self.counts["buffered"] += 1
            log.warning("the API holds a group back: its size is not the registered one")
        return True

    async def _ensure_registered(self) -> None:
        """Register until the API answers that it knows this environment."""
        while self.env_id is None or await self.status() is None:
            self.check_patience()
            await self.register()
            await asyncio.sleep(POLL_S)

    async def disconnect(self) -> None:
        """Tell the API that this environment sends no more."""
        if self.env_id is not None:
            await self._ask("POST", "/disconnect-env", {"env_id": self.env_id})
            self.env_id = None

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Return the API's answer; None if no answer came, or if the API failed.

        Raises:
            ConfigError: the API refuses the body.
        """
        response = await self._request(method, path, body)
        if response is not None and response.status_code == 422:
            raise ConfigError(f"{self.url}{path} refuses what it was sent: {response.text[:500]}", hint="check the URL")
        return _answer(response)

    async def _request(self, method: str, path: str, body: Any) -> httpx.Response | None:
        env_id = self.env_id
        try:
            return await self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            log.info("%s%s: %s: %s", self.url, path, type(error).__name__, error)
            if isinstance(error, httpx.ConnectError):  # run-api is not running; when it starts, it will not know us
                self.forget(env_id)
            return None


def _answer(response: httpx.Response | None) -> dict[str, Any] | None:
    if response is None or response.status_code >= 400:
        return None
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _compress(body: bytes) -> tuple[bytes, dict[str, str]]:
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESSED_FROM:
        return body, headers
    return gzip.compress(body, compresslevel=3), {**headers, "Content-Encoding": "gzip"}
