"""Measures SWE-ReX from within: run in its environment, it does what `benchmarks.swerex` asks, one JSON line each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from swerex.deployment.docker import DockerDeployment
from swerex.exceptions import CommandTimeoutError
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

from benchmarks.peers import WORKERS, Workers


class Driver:
    """One container of its own making, and what is asked of it."""

    def __init__(self) -> None:
        self._deployment: Any = None
        self._parties: dict[str, Workers] = {}

    async def start(self, image: str, mounts: list[str], name: str) -> dict[str, Any]:
        """Seconds until the first command has run; then a session for each worker."""
        began = time.perf_counter()
        arguments = [part for mount in mounts for part in ("-v", mount)] + ["--init", "--label", f"bench={name}"]
        self._deployment = DockerDeployment(image=image, docker_args=arguments, pull="never", startup_timeout=60)
        await self._deployment.start()
        runtime = self._deployment.runtime
        await runtime.execute(Command(command="true", shell=True))
        seconds = time.perf_counter() - began
        sessions = [CreateBashSessionRequest(session=f"s{number}", startup_timeout=30) for number in range(WORKERS + 1)]
        await asyncio.gather(*map(runtime.create_session, sessions))
        self._parties = {
            "session": Workers([self._in_session(f"s{number}") for number in range(WORKERS)], self._session_out),
            "execute": Workers([self._execute] * WORKERS, self._execute_out),
        }
        return {"container": self._deployment.container_name, "seconds": seconds}

    def _in_session(self, session: str) -> Any:
        async def run(command: str) -> int:
            action = BashAction(command=command, session=session, timeout=60)
            return len((await self._deployment.runtime.run_in_session(action)).output)

        return run

    async def _execute(self, command: str) -> int:
        asked = Command(command=["bash", "-c", command], timeout=60, check=True)
        return len((await self._deployment.runtime.execute(asked)).stdout)

    async def _session_out(self, command: str, limit_s: float) -> None:
        action = BashAction(command=command, session=f"s{WORKERS}", timeout=limit_s)  # of no use to anybody after this
        try:
            await self._deployment.runtime.run_in_session(action)
        except CommandTimeoutError:
            return

    async def _execute_out(self, command: str, limit_s: float) -> None:
        try:
            await self._deployment.runtime.execute(Command(command=["bash", "-c", command], timeout=limit_s))
        except CommandTimeoutError:
            return

    async def answer(self, op: str, how: str = "", **arguments: Any) -> Any:
        """What an operation gives, as JSON values."""
        if op == "start":
            return await self.start(**arguments)
        party = self._parties[how]
        if op == "sample":
            sample = await party.sample(**arguments)
            return {"seconds": list(sample.seconds), "rate": sample.rate}
        return await (party.output(**arguments) if op == "output" else party.time_out(**arguments))

    async def stop(self) -> None:
        """End the container."""
        if self._deployment is not None:
            await self._deployment.stop()


async def serve() -> None:
    """Until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    driver = Driver()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = {"value": await driver.answer(**json.loads(line))}
            except Exception as error:
                answer = {
                    "error": "TimeoutError" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
                }
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        await driver.stop()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(serve())
