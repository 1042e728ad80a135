"""A server in the simulator: the memory backend's ledger behind a network that fails.

Some stores wake a waiter with its grant, for a moment. A server that is ``giving`` does that too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import Finding, Page, Renewal, Runtime, Signal, Waiting
from holdfast.core.drive import run_now
from holdfast.core.queue import NameState
from holdfast.errors import BackendUnavailable
from holdfast.stores.memory import Ledger, MemoryBackend, MemoryStore
from holdfast.testing.simulator import Node, SimRuntime, SimSignal, World

__all__ = ["Network", "SimBackend", "SimStore"]

T = TypeVar("T")

REQUEST_SECONDS = 2.0
DIRECT_GRANT_SECONDS = 2.0
"""Less than the ttls here, so that a renewal decides whether it lasts."""


class Network:
    """How bad the way is. ``calm`` ends all faults."""

    def __init__(self, world: World, *, delay: float = 0.05, loss: float = 0.05) -> None:
        self.world, self.delay, self.loss = world, delay, loss

    def travel(self) -> float | None:
        """How long one way takes, or ``None`` if it is lost."""
        draw = self.world.random
        if draw.random() < self.loss:
            return None
        slow = draw.random() < 0.05
        return draw.uniform(0, self.delay) * (20 if slow else 1)

    def calm(self) -> None:
        self.delay, self.loss = 0.001, 0.0


class _Rings:
    """The wake-ups of one connection: a signal per claim that waits, and what came with it."""

    def __init__(self) -> None:
        self.signals: dict[str, SimSignal] = {}
        self.given: dict[str, Grant] = {}


class _GivingLedger(Ledger):
    """Grants directly to the waiter that it wakes, for ``DIRECT_GRANT_SECONDS``."""

    def wake(self, state: NameState[Signal]) -> None:
        now = self.micros()
        for queued in state.woken:
            claim, signal = queued.claim, queued.wake
            if claim.mode is Mode.EXCLUSIVE and claim.owner in state.queue:
                grant = state.attempt(claim, now, join=False, wall=self.wall_micros())
                assert isinstance(grant, Grant)
                seconds = min(DIRECT_GRANT_SECONDS, claim.ttl)
                state.extend(claim.owner, seconds, now, shorten=True)
                assert isinstance(signal, _RemoteSignal)
                signal.grant = grant._replace(seconds=seconds)
        super().wake(state)


class _ServerRuntime(SimRuntime):
    """On the server: a waiter's signal is a message to its node."""

    def __init__(self, node: Node, network: Network, client: SimBackend) -> None:
        super().__init__(node)
        self.network, self.client = network, client
        self.claim: Claim | None = None

    def signal(self) -> SimSignal:
        assert self.claim is not None
        return _RemoteSignal(self.network, self.client, self.claim)


class _RemoteSignal(SimSignal):
    """Setting it sends a wake-up, which may be lost as anything may."""

    def __init__(self, network: Network, client: SimBackend, claim: Claim) -> None:
        super().__init__()
        self._network, self._client, self._claim = network, client, claim
        self.grant: Grant | None = None
        """What goes along with the wake-up. It is there by the time that this arrives."""

    def set(self) -> None:
        super().set()
        way = self._network.travel()
        if way is not None:
            self._network.world.after(way, self._arrive, self._client.node)

    def _arrive(self) -> None:
        self._client.wake(self._claim, self.grant)


class SimBackend:
    """One connection: in order both ways; a lost message breaks it, with an unknown outcome."""

    def __init__(self, server: Node, ledger: Ledger, network: Network, runtime: SimRuntime) -> None:
        self.node, self.runtime, self.network = runtime.node, runtime, network
        self._there = _ServerRuntime(server, network, self)
        self._inner = MemoryBackend(ledger, "sim://", self._there)
        self._rings = _Rings()
        self._last_arrival = 0.0

    async def _call(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        claim: Claim | None = None,
        until: float | None = None,
    ) -> T:
        world, answered = self.node.world, SimSignal()
        answers: list[T | Exception] = []

        def answer(value: T | Exception) -> None:
            answers.append(value)
            answered.set()

        def arrive() -> None:
            self._there.claim = claim
            try:
                value: T | Exception = run_now(work())
            except Exception as error:  # noqa: BLE001 - it is the server's answer
                value = error
            back = self.network.travel()
            if back is not None:
                world.after(back, lambda: answer(value), self.node)

        way = self.network.travel()
        if way is not None:
            self._last_arrival = max(self._last_arrival + 1e-9, world.time + way)
            world.at(self._last_arrival, arrive)
        limit = self.runtime.now() + REQUEST_SECONDS
        if not await self.runtime.wait(answered, limit if until is None else min(limit, until)):
            raise BackendUnavailable("sim://: no answer in time")
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        async def ask() -> Grant | Busy:
            return self._answered(claim, await self._inner.attempt(claim, join=join))

        return await self._call(ask, claim, until)

    def _answered(self, claim: Claim, answer: Grant | Busy) -> Grant | Busy:
        """On the server: says along which token was the last, for ``wait``."""
        if isinstance(answer, Grant):
            return answer
        return answer._replace(ref=self._inner.ledger.names[claim.name].state.token)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        signal = self._rings.signals.setdefault(claim.owner, SimSignal())
        await self.runtime.wait(signal, until)
        self._rings.signals.pop(claim.owner, None)
        grant = self._rings.given.pop(claim.owner, None)
        # A wake-up may have been under way since before the attempt whose answer this waits on.
        return None if grant is None or grant.token <= busy.ref else grant

    def nudge(self, claim: Claim) -> None:
        self.wake(claim, None)

    def wake(self, claim: Claim, grant: Grant | None) -> None:
        """A wake-up has arrived, and maybe a grant with it."""
        if grant is not None:
            self._rings.given[claim.owner] = grant
        self._rings.signals.setdefault(claim.owner, SimSignal()).set()

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        async def ask() -> tuple[bool, Grant | Busy]:
            was_ours, answer = await self._inner.exchange(grant, claim)
            return was_ours, self._answered(claim, answer)

        return await self._call(ask, claim)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return await self._call(
            lambda: self._inner.renew(grants, waits, until=until, shorten=shorten)
        )

    async def release(self, grant: Grant) -> bool:
        return await self._call(lambda: self._inner.release(grant))

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._call(lambda: self._inner.abandon(claim), until=until)

    async def revoke(self, name: str) -> list[int]:
        return await self._call(lambda: self._inner.revoke(name))

    async def look(self, name: str) -> LockInfo:
        return await self._call(lambda: self._inner.look(name))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        return await self._call(lambda: self._inner.survey(prefix, cursor, limit))

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        return await self._call(lambda: self._inner.record(grant, value, keep_seconds))

    async def recall(self, name: str) -> Record | None:
        return await self._call(lambda: self._inner.recall(name))

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        await self.runtime.sleep(min(1.0, max(0.0, until - self.runtime.now())))

    async def probe(self) -> list[Finding]:
        return []

    def forget(self) -> None:
        self._rings = _Rings()

    async def close(self) -> None:
        pass


class SimStore(MemoryStore):
    """The store of a simulated server; each backend is a connection of its own."""

    def __init__(self, server: Node, network: Network, *, giving: bool = False) -> None:
        ledger = _GivingLedger if giving else Ledger
        super().__init__(ledger(server.now, server.wall), "sim://")
        self.server, self.network = server, network

    def backend(self, runtime: Runtime) -> Any:
        assert isinstance(runtime, SimRuntime)
        return SimBackend(self.server, self.ledger, self.network, runtime)
