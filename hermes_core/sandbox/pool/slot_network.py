"""The way out of a slot whose sandbox has no network: a port that leads to a proxy, opened when a command begins."""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TypeVar

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import Call, Forward, Operation, SlotCommands
from hermes_core.sandbox.contract import NetworkPlan, Phase
from hermes_core.sandbox.egress.proxy import EgressProxy
from hermes_core.sandbox.egress.traffic import Traffic

log = logging.getLogger(__name__)

T = TypeVar("T")

_STARTS_PROGRAMS = frozenset({"run", "start"})
"""The operations that start programs."""

_NOT_PROXIED = "localhost,127.0.0.1,::1"


def proxy_variables(port: int) -> dict[str, str]:
    """Return the environment variables by which programs find a proxy on a port of their loopback."""
    url = f"http://127.0.0.1:{port}"
    named = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": _NOT_PROXIED}
    return {**named, **{name.lower(): value for name, value in named.items()}, "NODE_USE_ENV_PROXY": "1"}


class SlotNetwork:
    """The network of one slot during one lease, by phase. It ends with the lease.

    The port of the proxy is closed when the slot's processes are killed. The next command opens it again, if possible
    with the same number. There is no other way out, so programs reach nothing while it is closed.

    Args:
        traffic: counts what is reached and refused.
    """

    def __init__(self, plan: NetworkPlan, traffic: Traffic, phase: Phase = Phase.AGENT) -> None:
        self._plan = plan
        self._traffic = traffic
        self._phase = phase
        self._next_phase = phase
        self._proxy = self._make_proxy()
        self._variables: dict[str, str] = {}
        """Variables of every command. They change with the port."""
        self._commands: SlotCommands | None = None
        self._port: int | None = None
        self._forward: Forward | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None

    def _make_proxy(self) -> EgressProxy | None:
        rules = self._plan.make_rules(self._phase)
        return None if rules is None else EgressProxy(rules, self._traffic.of(self._phase))

    def wrap(self, make: Callable[[Mapping[str, str]], SlotCommands], env: Mapping[str, str]) -> SlotCommands:
        """Return the commands of the slot, whose programs get the variables `env` and those of the proxy.

        Args:
            make: makes commands whose programs get the variables in its argument. The first commands that it ever made
                open the port.
        """
        self._commands = self._commands or make({})
        return make(ChainMap(self._variables, dict(env))).around(self._open_first)

    async def enter(self, phase: Phase) -> None:
        """Apply the policy of a phase: at once, but that of the verification only when `on_kill` is called next.
        Before that, processes of the agent would have it, too."""
        self._next_phase = phase
        if phase is not Phase.VERIFY:
            await self._enter_next()

    async def on_kill(self) -> None:
        """Note that all processes of the slot were killed, and the port closed with them."""
        await self._close()
        await self._enter_next()

    async def aclose(self) -> None:
        """Close the port for good."""
        self._proxy = None
        await self._close()

    async def _enter_next(self) -> None:
        before, self._phase = self._phase, self._next_phase
        if self._phase is not before:
            self._proxy = self._make_proxy()
            await self._close()  # connections of the former phase end

    async def _close(self) -> None:
        """Close the port, and reset its connections. A command that begins meanwhile opens another one."""
        keeper, self._keeper = self._keeper, None
        self._forget()
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])

    def _forget(self) -> None:
        self._opened = self._forward = None
        self._variables.clear()

    def _open_first(self, call: Call, operation: Operation[T], /) -> Coroutine[None, None, T]:
        return self._open_and_call(call, operation) if operation.name in _STARTS_PROGRAMS else call(operation)

    async def _open_and_call(self, call: Call, operation: Operation[T]) -> T:
        await self._open()
        return await call(operation)

    async def _open(self) -> None:
        """Open the port if it is closed. Concurrent calls share one attempt."""
        if self._forward is not None and not self._forward.is_open:
            await self._close()  # its closing was not noted yet
        while self._proxy is not None:
            if self._opened is None:
                self._opened = asyncio.get_running_loop().create_future()
                keep = self._keep(self._proxy, self._opened)
                self._keeper = asyncio.create_task(keep, name="the proxy of a slot")
            with suppress(_Closed):  # the port was closed before it was open
                await asyncio.shield(self._opened)
                return

    async def _keep(self, proxy: EgressProxy, opened: asyncio.Future[None]) -> None:
        """Keep the port open until it is closed or this task is cancelled."""
        outcome: Exception = _Closed()
        try:
            await self._serve(proxy, opened)
        except Exception as error:
            outcome = error
            if opened.done():
                log.warning("the port of a slot's proxy is closed until the next command: %s", error)
        finally:
            if not opened.done():
                opened.set_exception(outcome)
                opened.exception()  # nobody may be left who waits for it
            if self._opened is opened:
                self._forget()

    async def _serve(self, proxy: EgressProxy, opened: asyncio.Future[None]) -> None:
        try:
            await self._hold(proxy, self._port, opened)
        except CommandError as error:
            if error.code != "in_use" or self._port is None:
                raise
            await self._hold(proxy, None, opened)

    async def _hold(self, proxy: EgressProxy, port: int | None, opened: asyncio.Future[None]) -> None:
        assert self._commands is not None
        async with self._commands.forward(proxy.serve, port=port, most=proxy.bounds.connections) as forward:
            self._port = forward.port
            self._variables.update(proxy_variables(forward.port))
            opened.set_result(None)
            self._forward = forward
            await forward.wait_closed()


class _Closed(Exception):
    """The port was closed."""
