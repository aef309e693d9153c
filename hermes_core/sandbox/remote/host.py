"""A place that runs our program: asks it to make, find and end sandboxes, and opens channels into these."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hermes_core.errors import ChannelLost, ConfigError, HermesError, PolicyError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Channel, SandboxSpec
from hermes_core.sandbox.local.host import MARK, NOT_THERE, description, sandbox_id_of

__all__ = ["RemoteHost", "creation_request", "sandbox_id_of", "skip_to_mark"]

ANSWER_S = 90.0
"""Time limit in seconds of one request."""

_ANSWER_BYTES = 8 << 20
_NOISE_BYTES = 1 << 20


def creation_request(spec: SandboxSpec) -> dict[str, Any]:
    """Return the request to make the sandbox of this spec, or to find the one with the spec's creation id."""
    return {"op": "create", "sandbox": description(spec), "packages": None}


class RemoteHost(ABC):
    """A place where `hermes_core.sandbox.local.host` carries out our requests, with the channels that lead to it."""

    kind: ClassVar[str] = "host"
    """What it is, in messages."""
    name: str
    """Its name in messages, and the first part of the ids of its sandboxes."""

    @abstractmethod
    async def open(self, request: Mapping[str, Any]) -> Channel:
        """Start our program there with a request, and return the channel to it.

        Raises:
            InfraError: the place can't be reached.
        """

    @abstractmethod
    def explain_silence(self, status: int, words: str) -> HermesError:
        """Return the error for a program that ended with this exit status and these last words, and gave no answer."""

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            PolicyError, ConfigError, ProvisionError: the host refuses; the message has the reason.
            ChannelLost: the connection was cut; the request may have been carried out.
            HermesError: see `open` and `explain_silence`.
        """
        channel = await self.open(request)
        try:
            async with asyncio.timeout(ANSWER_S):
                await skip_to_mark(channel)
                answer = b""
                while data := await channel.read(1 << 16):
                    answer += data
                    if len(answer) > _ANSWER_BYTES:
                        raise ProvisionError(f"{self.kind} {self.name!r} answers more than we can take")
                status = await channel.wait()
        except TimeoutError as error:
            raise ChannelLost(f"{self.kind} {self.name!r} gave no answer within {ANSWER_S:.0f} s") from error
        finally:
            await channel.aclose()
        try:
            value = json.loads(answer)
        except ValueError:
            raise self.explain_silence(status, channel.stderr_tail) from None
        if not isinstance(value, dict):
            raise ProvisionError(f"{self.kind} {self.name!r} answers with something else than was asked for")
        if "error" in value:
            raise self._refusal(value)
        return value

    async def enter(self, sandbox_id: str, argv: Sequence[str], env: Mapping[str, str]) -> Channel:
        """Start a program in a sandbox, and return the channel to it.

        Raises:
            SandboxLost: the sandbox does not exist any more.
            InfraError: the host can't be reached.
        """
        global_id = f"{self.name}/{sandbox_id}"
        request = {"op": "enter", "sandbox_id": sandbox_id, "command": [*argv], "env": dict(env)}
        channel = await self.open(request)
        try:
            await skip_to_mark(channel)
            if await channel.read(1):  # our program writes one byte before it becomes the program `argv`
                return channel
            if await channel.wait() == NOT_THERE:
                raise SandboxLost("the sandbox has ended", hint="create another one", sandbox_id=global_id)
            raise ChannelLost(f"it could not be entered: {channel.stderr_tail}", sandbox_id=global_id)
        except BaseException:
            await channel.aclose()
            raise

    def _refusal(self, answer: Mapping[str, Any]) -> HermesError:
        kinds: dict[str, type[HermesError]] = {"policy": PolicyError, "config": ConfigError}
        kind = kinds.get(str(answer.get("kind")), ProvisionError)
        hint = answer.get("hint")
        return kind(
            f"{self.kind} {self.name!r}: {str(answer['error'])[:2000]}", hint=str(hint)[:2000] if hint else None
        )


async def skip_to_mark(channel: Channel) -> None:
    """Read up to our program's mark, and not further. Login files of the account may print something before it.

    The channel may also end before the mark.

    Raises:
        ChannelLost: too much comes before the mark.
    """
    noise = b""
    while not noise.endswith(MARK):
        known = next(n for n in range(len(MARK) - 1, -1, -1) if noise.endswith(MARK[:n]))
        data = await channel.read(len(MARK) - known)
        noise += data
        if not data:
            return
        if len(noise) > _NOISE_BYTES:
            raise ChannelLost(f"the account's login files print without end: {noise[:200]!r}")
