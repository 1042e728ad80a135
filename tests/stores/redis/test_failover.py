"""Failovers at the worst moments of a direct grant: a release has granted the lock to the first
waiter, and the master fails before the wake-up is sent, or before the grant is renewed.

What the replica has is kept: two clients never hold at once. What it lacks is lost, as with every
failover: then the later token is higher, and the fence refuses the earlier one. No client hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast import fencing
from holdfast.errors import StaleFence
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.redis import RedisServer
from servers.redis_sentinel import SentinelTrio
from stores.redis.helpers import (
    blocking_and_asyncio,
    clients,
    cut_off,
    listening,
    replicated,
    swallow_messages,
    until,
)

pytestmark = pytest.mark.faults

TTL = 6.0
"""A replica may keep holds that have ended: other clients wait at most this long for them."""
SECONDS = 60.0
kept_or_lost = pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])


@pytest.fixture
def trio() -> Iterator[SentinelTrio]:
    with SentinelTrio() as trio:
        yield trio


def _last_token(server: RedisServer, namespace: str) -> int:
    return int(str(server.ask("HGET", f"{namespace}:{{name}}", "t") or 0))


async def _replicate_or_not(trio: SentinelTrio, kept: bool) -> None:
    """The replica has the hold and the queue; later writes reach it only if ``kept``."""
    await replicated(trio.master)
    if not kept:
        cut_off(trio.master)


async def _knows(trio: SentinelTrio, namespace: str, token: int) -> None:
    await until(lambda: _last_token(trio.replicas[0], namespace) >= token)


async def _release_to(trio: SentinelTrio, namespace: str, held: Any, waiter: Any) -> Any:
    """Releases while ``waiter`` waits. Returns the lease of the waiter."""
    getting = asyncio.create_task(waiter.lock("name", timeout=SECONDS).acquire())
    await until(lambda: listening(trio.master, namespace) == 1)
    assert await held.release() is True
    lease = await getting
    assert lease is not None
    return lease


async def _direct_grant(
    trio: SentinelTrio, namespace: str, ours: Any, theirs: Any, kept: bool
) -> tuple[Any, int]:
    """A lease that was granted directly, and the token of the hold before it. On a slow machine a
    waiter may attempt by itself instead: then it is tried again."""
    held = await ours.lock("name", timeout=SECONDS).acquire()
    await _replicate_or_not(trio, kept)
    while (lease := await _release_to(trio, namespace, held, theirs))._hold.grant.seconds is None:
        held = await _release_to(trio, namespace, lease, ours)
    return lease, held.token


@kept_or_lost
@blocking_and_asyncio
def test_a_direct_grant_that_is_not_renewed(
    trio: SentinelTrio, namespace: str, flavour: Flavour, kept: bool, tmp_path: Path
) -> None:
    """The lease ends by its own clock unless the new master has it; the next hold starts later."""

    async def main() -> None:
        options = {"namespace": namespace, "ttl": TTL}
        async with clients(trio.url, flavour, 3, **options) as (ours, theirs, third):
            direct, before = await _direct_grant(trio, namespace, ours, theirs, kept)
            if kept:
                await _knows(trio, namespace, direct.token)
            trio.master.kill()
            granted_until = direct._hold.ends  # granted by the old master, renewed or not
            coming = asyncio.create_task(_enter(third))
            await until(lambda: direct.lost or direct._hold.ends > granted_until)
            believed_until = min(direct._hold.ends, now())
            if not direct.lost:
                assert kept, "a new master has renewed a hold that it can't have"
                believed_until = now()
                assert await direct.release() is True
            later, entered = await coming
            assert later.token > direct.token > before
            if kept:
                assert believed_until <= entered, "two held at the same time"
            _refused_behind(tmp_path / "ledger", later, direct)
            assert await later.release() is True

    asyncio.run(main())


async def _enter(client: Any) -> tuple[Any, float]:
    lease = await client.lock("name", timeout=SECONDS).acquire()
    assert lease is not None, "the lock was never granted"
    return lease, now()


def _refused_behind(path: Path, later: Any, earlier: Any) -> None:
    """After the later holder has written, the fence refuses the earlier holder."""
    with fencing.file.guard(path, later.fence) as file:
        file.write_text("later")
    with pytest.raises(StaleFence), fencing.file.guard(path, earlier.fence):
        pass


@kept_or_lost
@blocking_and_asyncio
def test_a_wake_up_that_arrives_too_late(
    trio: SentinelTrio, namespace: str, flavour: Flavour, kept: bool
) -> None:
    """The first waiter is frozen when it is woken, and runs on after the failover with the wake-up
    of the old master: by then the second waiter holds the lock."""

    async def main() -> None:
        options = {"namespace": namespace, "ttl": TTL}
        with (
            closing(Process(trio.url, flavour, **options)) as ours,
            closing(Process(trio.url, flavour, **options)) as first,
            closing(Process(trio.url, flavour, **options)) as second,
        ):
            before = await ours.ask("acquire", name="name")
            for number, waiter in enumerate((first, second), 1):
                waiter.send("acquire", name="name", timeout=SECONDS)
                await until(lambda number=number: listening(trio.master, namespace) == number)  # type: ignore[misc]
            first.stop()
            await _replicate_or_not(trio, kept)
            assert await ours.ask("release", name="name") is True
            granted = _last_token(trio.master, namespace)
            assert granted > before, "the release did not grant it"
            if kept:
                await _knows(trio, namespace, granted)
            trio.master.kill()
            token = await second.answer()
            assert token > granted
            first.go_on()
            await until(lambda: listening(trio.current_master(), namespace) == 1)
            assert (await second.ask("state", name="name"))["held"]
            assert await second.ask("release", name="name") is True
            assert await first.answer() > token

    asyncio.run(main())


@kept_or_lost
@blocking_and_asyncio
def test_a_wake_up_that_never_arrives(
    trio: SentinelTrio,
    namespace: str,
    flavour: Flavour,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master fails between the release and the wake-up: the waiters find the new master, and
    are granted one after the other."""
    swallow_messages(monkeypatch)

    async def main() -> None:
        async with clients(trio.url, flavour, 3, namespace=namespace, ttl=TTL) as (ours, *others):
            held = await ours.lock("name").acquire()
            coming = []
            for number, client in enumerate(others, 1):
                coming.append(asyncio.create_task(_enter(client)))
                await until(lambda number=number: listening(trio.master, namespace) == number)  # type: ignore[misc]
            await _replicate_or_not(trio, kept)
            assert await held.release() is True
            if kept:
                await _knows(trio, namespace, _last_token(trio.master, namespace))
            trio.master.kill()
            tokens = [held.token]
            for done in asyncio.as_completed(coming):
                lease, _ = await done
                assert sum(task.done() for task in coming) == len(tokens), "two hold at once"
                tokens.append(lease.token)
                assert await lease.release() is True
            assert tokens == sorted(set(tokens))

    asyncio.run(main())
