"""The client of the trainer's `run-api`: registers, asks for its status, and sends groups until it acknowledges them.

This is so careful because of what run-api 0.4.0 does. All of its state is in memory, so after a restart it knows no
environment. A group that reaches it before a trainer has registered breaks it for good (its queue then exists, and
registration is skipped). A group for an environment that it does not know goes into the queue all the same.
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
REQUEST_S = 120.0
COMPRESSED_FROM = 1024

SENT_KEYS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "inference_logprobs"),
    *("overrides", "group_overrides", "images", "generation_params", "distill_token_ids", "distill_logprobs"),
)
"""The fields of a group that run-api accepts. Some are only set by a subclass's `postprocess_histories`."""


class TrainerGone(InfraError):
    """The API, or the trainer behind it, was silent for too long."""


class TrainerApi:
    """One environment's place at a `run-api`; an async context manager.

    Args:
        url: `rollout_server_url`.
        registration: the body of `POST /register-env`.
        patience_s: how many seconds to continue without an answer, or without a trainer.
    """

    def __init__(self, url: str, registration: Mapping[str, Any], *, patience_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout_server_url {url!r} is not a URL", hint="write http://HOST:PORT")
        self.url = url.rstrip("/")
        self.registration = dict(registration)
        self.env_id: int | None = None
        self.answer: dict[str, Any] = {}
        """What the API said when this environment registered."""
        self.counts: Counter[str] = Counter()
        """`sent`, `sent_again` (the answer to the first time was lost), `refused`, `buffered`, `registered`."""
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
        """Register, waiting for the trainer as long as patience lasts; what the API says of the run.

        Raises:
            TrainerGone: there was none.
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
                self.progressed()
                return
            self.check_patience()
            log.info("waiting for a trainer at %s", self.url)
            await asyncio.sleep(POLL_S)

    async def info(self) -> dict[str, Any]:
        """Return the trainer's `batch_size` and `max_token_len`, -1 where it has not said."""
        return await self._ask("GET", "/info") or {"batch_size": -1, "max_token_len": -1}

    async def wandb_info(self) -> dict[str, Any]:
        """Return the trainer's wandb `group` and `project`."""
        return await self._ask("GET", "/wandb_info") or {"group": None, "project": None}

    async def status(self) -> dict[str, Any] | None:
        """Return the queue's status; None if the API can't be reached or does not know this environment (any more)."""
        asked = self.env_id
        if asked is None:
            return None
        response = await self._request("GET", "/status-env", {"env_id": asked})
        if response is not None and response.status_code >= 400:
            self.forget(asked)
        return _answer(response)

    def forget(self, env_id: int | None) -> None:
        """Forget our id, as the API does not know it or is another one. The next call registers again."""
        if env_id is not None and self.env_id == env_id:
            log.warning("the API at %s does not know this environment any more: it registers anew", self.url)
            self.env_id = None

    def progressed(self) -> None:
        """Record that the trainer is active: it took a step, or has room for more."""
        self._heard = time.monotonic()

    def check_patience(self) -> None:
        """Give up after too long a silence.

        Raises:
            TrainerGone: patience is at its end.
        """
        silence = time.monotonic() - self._heard
        if silence > self._patience_s:
            raise TrainerGone(
                f"no trainer at {self.url} for {silence:.0f} s",
                hint="start run-api and the trainer, or raise trainer_timeout",
            )

    async def send(self, group: Mapping[str, Any]) -> bool:
        """Send one group, until it is acknowledged; False if the API refuses it for good.

        A group whose answer was lost is sent again, and may arrive twice: that is counted and logged.

        Raises:
            TrainerGone: as `register` does.
        """
        payload = {key: group[key] for key in SENT_KEYS if group.get(key) is not None}
        unsure = False
        while True:
            await self._known()
            plain = await group_json({**payload, "env_id": self.env_id})
            body, headers = await asyncio.to_thread(_packed, plain)
            try:
                response = await self._client.post(f"{self.url}/scored_data", content=body, headers=headers)
            except httpx.HTTPError as error:
                # Only if no connection was made can we be sure that nothing was sent.
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
            return self._acknowledged(response, again=unsure)

    def _acknowledged(self, response: httpx.Response, *, again: bool) -> bool:
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

    async def _known(self) -> None:
        """Make sure that the API knows this environment now."""
        while self.env_id is None or await self.status() is None:
            self.check_patience()
            await self.register()
            await asyncio.sleep(POLL_S)

    async def disconnect(self) -> None:
        """Tell the API that no more is to come."""
        if self.env_id is not None:
            await self._ask("POST", "/disconnect-env", {"env_id": self.env_id})
            self.env_id = None

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Return the answer; None if there is none, or the API failed."""
        response = await self._request(method, path, body)
        if response is not None and response.status_code == 422:
            raise ConfigError(f"{self.url}{path} refuses what it was sent: {response.text[:500]}", hint="check the URL")
        return _answer(response)

    async def _request(self, method: str, path: str, body: Any) -> httpx.Response | None:
        asked = self.env_id
        try:
            return await self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            log.info("%s%s: %s: %s", self.url, path, type(error).__name__, error)
            if isinstance(error, httpx.ConnectError):  # nobody listens: the next API there does not know us
                self.forget(asked)
            return None


def _answer(response: httpx.Response | None) -> dict[str, Any] | None:
    if response is None or response.status_code >= 400:
        return None
    try:
        answer = response.json()
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _packed(body: bytes) -> tuple[bytes, dict[str, str]]:
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESSED_FROM:
        return body, headers
    return gzip.compress(body, compresslevel=3), {**headers, "Content-Encoding": "gzip"}
