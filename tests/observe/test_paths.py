"""Every path of an acquire and a hold, on three stores and through both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import pytest

import holdfast
from harnesses import harness_classes
from harnesses.served import ServedHarness
from holdfast.testing import Flavour, Harness
from holdfast.testing.conformance.bench import Bench, eventually

from .recorder import SOON, Recorder

STORES = [name for name in ("redis", "postgres", "etcd") if name in harness_classes()]
SESSIONS = [name for name in ("etcd", "postgres-advisory") if name in harness_classes()]
LONG_TTL = 30.0

on_stores = pytest.mark.parametrize("harness", STORES, indirect=True, scope="session")
with_sessions = pytest.mark.parametrize("harness", SESSIONS, indirect=True, scope="session")
both_clients = pytest.mark.parametrize("flavour", list(Flavour))


class Watched:
    """A client with a recorder, another client, and the store."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.seen = bench, Recorder()

    def client(self, **options: Any) -> Any:
        return self.bench.client(observers=[self.seen], ttl=LONG_TTL, **options)

    def other(self) -> Any:
        return self.bench.client(ttl=LONG_TTL)

    async def told(self, word: str, count: int = 1) -> Any:
        async def happened() -> bool:
            return len(self.seen.of(word)) >= count

        await eventually(happened, SOON, f"{word} was not told: {self.seen.words()}")
        return self.seen.of(word)[count - 1]

    def words(self) -> list[str]:
        return self.seen.words("requested", "renewed")


def play(harness: Harness, flavour: Flavour, body: Callable[[Watched], Awaitable[None]]) -> None:
    async def whole() -> None:
        bench = Bench(harness, flavour)
        try:
            async with asyncio.timeout(120):
                await body(Watched(bench))
        finally:
            harness.heal()
            await bench.close()

    asyncio.run(whole())


@on_stores
@both_clients
def test_granted(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        async with watched.client().lock("order:1", kind="sale") as lease:
            info = await watched.other().inspect("order:1")
        assert (info.kind, info.holders[0].kind) == ("sale", "sale")
        acquired, released = (watched.seen.of(word)[0] for word in ("acquired", "released"))
        assert acquired.token == released.token == lease.token
        assert (acquired.kind, acquired.contended, released.ours) == ("sale", False, True)
        assert watched.words() == ["acquired", "released"]

    play(harness, flavour, body)


@on_stores
@both_clients
def test_waited(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        other = watched.other()
        held = await other.lock("order:1").acquire()
        mine = watched.client()
        waiter = asyncio.ensure_future(mine.lock("order:1", kind="sale").acquire())
        waiting = await watched.told("waiting")
        await watched.bench.in_line(other, "order:1", 1)
        info = await other.inspect("order:1")
        assert info.waiters[0].kind == info.kind == "sale"
        await held.release()
        lease = await waiter
        await lease.release()
        assert waiting.place == 0
        acquired = watched.seen.of("acquired")[0]
        assert acquired.contended
        assert acquired.seconds > 0
        assert watched.words() == ["waiting", "acquired", "released"]

    play(harness, flavour, body)


@on_stores
@both_clients
def test_timed_out(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        held = await watched.other().lock("order:1").acquire()
        with pytest.raises(holdfast.LockTimeout):
            async with watched.client().lock("order:1", timeout=0.5):
                pass
        await held.release()
        timed_out = watched.seen.of("timed_out")[0]
        assert timed_out.seconds >= 0.5
        assert timed_out.holder.token == held.token
        assert watched.words() == ["waiting", "timed_out"]

    play(harness, flavour, body)


@on_stores
@both_clients
def test_cancelled(harness: Harness, flavour: Flavour) -> None:
    """A task is cancelled; the wait of a thread ends when its client is closed."""

    async def body(watched: Watched) -> None:
        held = await watched.other().lock("order:1").acquire()
        mine = watched.client()
        waiter = asyncio.ensure_future(mine.lock("order:1").acquire())
        await watched.told("waiting")
        if flavour is Flavour.ASYNCIO:
            waiter.cancel()
        else:
            await mine.close()
        with suppress(asyncio.CancelledError, holdfast.HoldfastError):
            await waiter
        cancelled = await watched.told("cancelled")
        assert cancelled.outcome == ("cancelled" if flavour is Flavour.ASYNCIO else "failed")
        assert watched.words() == ["waiting", "cancelled"]
        await held.release()

    play(harness, flavour, body)


@on_stores
@both_clients
def test_lost_by_its_ttl(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        mine = watched.client()
        lease = await mine.lock("order:1", ttl=harness.ttl, renew=False).acquire()
        lost = await watched.told("lost")
        assert (lost.cause, lost.token) == ("expired", lease.token)
        assert lost.seconds > 0
        await lease.release()
        assert watched.words() == ["acquired", "doubtful", "lost"]

    play(harness, flavour, body)


@on_stores
@both_clients
def test_lost_by_a_break(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        lease = await watched.client().lock("order:1").acquire()
        await watched.other().break_lock("order:1", reason="a test")
        assert await lease.release() is False
        lost = await watched.told("lost")
        assert lost.cause == "broken"
        assert "a test" in lost.reason
        assert watched.words() == ["acquired", "lost"]

    play(harness, flavour, body)


@with_sessions
@both_clients
def test_lost_with_its_session(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        mine = watched.client(proxied=True)
        lease = await mine.lock("order:1", ttl=harness.kept_ttl).acquire()
        if harness.name == "etcd":
            server = cast("Any", cast("ServedHarness", harness).servers.nodes[0])
            for found in server.ask("/v3/lease/leases", {})["leases"]:
                server.ask("/v3/lease/revoke", {"ID": found["ID"]})
        else:
            harness.cut()
        lost = await watched.told("lost")
        assert lost.cause == "session", lost.reason
        await lease.release()

    play(harness, flavour, body)


@on_stores
@both_clients
@pytest.mark.faults  # several timeouts of requests
def test_an_outage_and_its_end(harness: Harness, flavour: Flavour) -> None:
    """Told once each, by a renewal: the hold survives."""

    async def body(watched: Watched) -> None:
        mine = watched.client(proxied=True)
        lease = await mine.lock("order:1", ttl=20).acquire()
        harness.stall()
        unreachable = await watched.told("unreachable")
        assert unreachable.error
        harness.unstall()
        reachable = await watched.told("reachable")
        assert reachable.seconds > 0
        assert lease.held
        await lease.release()
        failed = [event for event in watched.seen.of("renewed") if event.error]
        assert failed
        assert failed[0].failed == failed[0].holds == 1

    play(harness, flavour, body)


@on_stores
@both_clients
def test_given_up_in_an_outage(harness: Harness, flavour: Flavour) -> None:
    async def body(watched: Watched) -> None:
        mine = watched.client(proxied=True)
        await mine.check()
        harness.stall()
        with pytest.raises(holdfast.BackendUnavailable):
            await mine.lock("order:1", timeout=1).acquire()
        cancelled = watched.seen.of("cancelled")[0]
        assert cancelled.outcome == "unreachable"
        assert watched.seen.wait_for("unreachable")

    play(harness, flavour, body)
