"""What a contract rule works with: peers on one store, claims, and a way to wait for a grant.

A ``Peer`` stands for a process: a store object and a backend of its own, as a client would make
them, plus the blocking backend that its renewer thread would use.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record, write_label
from holdfast.core.contract import (
    GRACE_SECONDS,
    Backend,
    Exchanging,
    Finding,
    HandingOver,
    Page,
    Renewal,
    Settings,
    Store,
    Waiting,
)
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing.harness import Harness
from holdfast.testing.rules import Catalogue, Flavour
from holdfast.testing.stalls import Stalls
from holdfast.testing.workers import Workers
from holdfast.url import open_store

__all__ = ["LONG", "SOON", "Bench", "Peer", "contract", "in_grace"]

T = TypeVar("T")

TRIES = 5
LONG = 30.0
"""A ttl that does not end during a test."""
SOON = 10.0
"""How long what is woken or answered may take on a busy machine: far under every ttl it is
measured against, far over what it takes."""
ACROSS = 60.0
"""How long a wait may last where only a wake-up can end it."""


class Peer:
    """One process's view of the store. The methods are the backend's, as coroutines."""

    def __init__(self, store: Store, flavour: Flavour, workers: Workers) -> None:
        self.store = store
        self._workers = workers
        self._blocking = flavour is Flavour.BLOCKING
        self.backend: Backend = store.backend(
            BlockingRuntime() if self._blocking else AsyncioRuntime()
        )
        self._renewer_peer: Peer | None = None

    @property
    def renewer(self) -> Peer:
        """The blocking backend beside this one, as the renewer thread uses it."""
        if self._renewer_peer is None:
            self._renewer_peer = Peer(self.store, Flavour.BLOCKING, self._workers)
        return self._renewer_peer

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the backend's in this peer's world."""
        if self._blocking:
            return await self._workers.run(lambda: run_now(work))
        return await work

    async def attempt(self, claim: Claim, *, join: bool = True) -> Grant | Busy:
        return await self.run(self.backend.attempt(claim, join=join))

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        return await self.run(self.backend.wait(claim, busy, until))

    def nudge(self, claim: Claim) -> None:
        self.backend.nudge(claim)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool | None, Grant | Busy]:
        assert isinstance(self.backend, Exchanging)
        return await self.run(self.backend.exchange(grant, claim))

    @property
    def exchanges(self) -> bool:
        """Whether the backend has the optional ``exchange``."""
        return isinstance(self.backend, Exchanging)

    async def renew(self, grants: Sequence[Grant], waits: Sequence[Waiting] = ()) -> Renewal:
        """Through the renewer, as renewals go."""
        if not self._blocking:
            return await self.renewer.renew(grants, waits)
        return await self.run(self.backend.renew(grants, waits, until=now() + SOON))

    async def extend(self, grant: Grant, *, shorten: bool) -> Renewal:
        """Through its own backend, as a lease's ``extend`` goes."""
        extending = self.backend.renew([grant], [], until=now() + SOON, shorten=shorten)
        return await self.run(extending)

    async def release(self, grant: Grant) -> bool | None:
        return await self.run(self.backend.release(grant))

    async def hand_over(self, grant: Grant) -> Grant:
        """A grant as the taker gets it: only what the text says."""
        assert isinstance(self.backend, HandingOver)
        ref = await self.run(self.backend.hand_over(grant, until=now() + SOON))
        assert ref is not None, "a hold that is there could not be handed over"
        return Grant(grant.claim._replace(label=""), grant.token, ref=tuple(ref))

    async def take_over(self, handed: Grant, claim: Claim) -> Grant | None:
        assert isinstance(self.backend, HandingOver)
        return await self.run(self.backend.take_over(handed, claim, until=now() + SOON))

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self.run(self.backend.abandon(claim, until=until))

    async def revoke(self, name: str) -> list[int]:
        return await self.run(self.backend.revoke(name))

    async def look(self, name: str) -> LockInfo:
        return await self.run(self.backend.look(name))

    async def survey(self, prefix: str = "", limit: int = 100) -> list[LockInfo]:
        """All pages."""
        cursor: str | None = None
        infos: list[LockInfo] = []
        for _ in range(1000):
            page: Page = await self.run(self.backend.survey(prefix, cursor, limit))
            infos += page.infos
            if page.cursor is None:
                return infos
            cursor = page.cursor
        raise AssertionError("a survey without an end")

    async def record(self, grant: Grant, value: str, keep_seconds: float = 60.0) -> bool:
        return await self.run(self.backend.record(grant, value, keep_seconds))

    async def recall(self, name: str) -> Record | None:
        return await self.run(self.backend.recall(name))

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        await self.run(self.backend.watch(name, seen, until))

    async def probe(self) -> list[Finding]:
        return await self.run(self.backend.probe())

    async def close(self) -> None:
        if self._renewer_peer is not None:
            await self._renewer_peer.close()
        await self.run(self.backend.close())

    async def take(self, claim: Claim) -> Grant:
        """An attempt that must be granted at once."""
        answer = await self.attempt(claim)
        assert isinstance(answer, Grant), f"{claim.name!r} was busy: {answer}"
        return answer

    async def queue(self, claim: Claim) -> Busy:
        """An attempt that must not be granted."""
        answer = await self.attempt(claim)
        assert isinstance(answer, Busy), f"{claim.name!r} was granted to a second claim"
        return answer

    async def get(self, claim: Claim, seconds: float = SOON) -> Grant:
        """Attempts and waits as the core does, without its re-check: wake-ups must come."""
        deadline = now() + seconds
        while True:
            answer = await self.attempt(claim)
            if isinstance(answer, Grant):
                return answer
            assert now() < deadline, f"{claim.name!r} was not granted within {seconds} s: {answer}"
            retry = now() + (answer.retry_seconds if answer.retry_seconds is not None else ACROSS)
            await self.wait(claim, answer, min(retry, deadline))


class Bench:
    """One rule's surroundings: a namespace of its own on a running store."""

    def __init__(self, harness: Harness, flavour: Flavour) -> None:
        self.harness, self.flavour = harness, flavour
        self.namespace = f"t{secrets.token_hex(6)}"
        self.workers = Workers()
        self._peers: list[Peer] = []

    def peer(self, *, proxied: bool = False, namespace: str = "", request: float = 5.0) -> Peer:
        """Another process's view of the store."""
        url = self.harness.proxied_url if proxied else self.harness.url
        settings = Settings(namespace=namespace or self.namespace, request_seconds=request)
        peer = Peer(open_store(url, settings), self.flavour, self.workers)
        self._peers.append(peer)
        return peer

    def claim(
        self,
        name: str = "name",
        mode: Mode = Mode.EXCLUSIVE,
        *,
        weight: int = 1,
        limit: int = 0,
        ttl: float = LONG,
        note: str = "",
    ) -> Claim:
        """A claim with an owner of its own."""
        label = write_label("host", 1, "thread", note)
        return Claim(name, mode, weight, limit, ttl, secrets.token_hex(16), label)

    async def in_line(self, peer: Peer, name: str, count: int) -> None:
        """Returns once so many stand in line."""
        deadline = now() + SOON
        while len((await peer.look(name)).waiters) != count:
            assert now() < deadline, f"{count} did not come to stand in line for {name!r}"
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for peer in self._peers:
            await peer.close()
        self.workers.close()


async def in_grace(body: Callable[[str], Awaitable[None]]) -> None:
    """Runs a body in which a waiter takes what is reserved for it, with a name of its own. It is
    repeated with another name if the machine stood still for much of that grace."""
    for number in range(TRIES):
        with Stalls() as stalls:
            try:
                return await body(f"name {number}")
            except AssertionError as error:
                failed = error
        if stalls.seconds < GRACE_SECONDS / 2 or number == TRIES - 1:
            raise failed
    return None


contract: Catalogue[Bench] = Catalogue(Bench)
