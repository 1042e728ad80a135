"""Failovers at the worst moments of a hand-over: the release that wakes the first in line has
granted it for a moment, and the master is gone before the word, or before that is confirmed.

What a replica has is kept: two never hold at once. What it lacks is lost, as with every failover:
then the later token is the higher one, and the fence refuses the earlier. Nobody hangs.
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
from stores.redis.bench import (
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
"""Of holds that a replica keeps although they have ended: others wait for no longer."""
SECONDS = 60.0
kept_or_lost = pytest.mark.parametrize("kept", [True, False], ids=["kept", "lost"])


@pytest.fixture
def trio() -> Iterator[SentinelTrio]:
    with SentinelTrio() as trio:
        yield trio


def _last_token(server: RedisServer, namespace: str) -> int:
    return int(str(server.ask("HGET", f"{namespace}:{{name}}", "t") or 0))


async def _replicate_or_not(trio: SentinelTrio, kept: bool) -> None:
    """The hold and the line are on the replica; what comes from here on is ``kept`` or not."""
    await replicated(trio.master)
    if not kept:
        cut_off(trio.master)


async def _knows(trio: SentinelTrio, namespace: str, token: int) -> None:
    await until(lambda: _last_token(trio.replicas[0], namespace) >= token)


async def _hand_over(trio: SentinelTrio, namespace: str, held: Any, heir: Any) -> Any:
    """Releases while the heir waits; the lease that it gets."""
    getting = asyncio.create_task(heir.lock("name", timeout=SECONDS).acquire())
    await until(lambda: listening(trio.master, namespace) == 1)
    assert await held.release() is True
    lease = await getting
    assert lease is not None
    return lease


async def _turn(
    trio: SentinelTrio, namespace: str, ours: Any, theirs: Any, kept: bool
) -> tuple[Any, int]:
    """A lease that came with its wake-up, and the token of the hold before. Whoever had to wait
    for long asks once more instead, which is then tried again."""
    held = await ours.lock("name", timeout=SECONDS).acquire()
    await _replicate_or_not(trio, kept)
    while (lease := await _hand_over(trio, namespace, held, theirs))._hold.grant.seconds is None:
        held = await _hand_over(trio, namespace, lease, ours)
    return lease, held.token


@kept_or_lost
@blocking_and_asyncio
def test_a_turn_that_is_not_confirmed(
    trio: SentinelTrio, namespace: str, flavour: Flavour, kept: bool, tmp_path: Path
) -> None:
    """It ends by its own clock unless the new master has it; the next holder comes later."""

    async def main() -> None:
        options = {"namespace": namespace, "ttl": TTL}
        async with clients(trio.url, flavour, 3, **options) as (ours, theirs, third):
            turn, before = await _turn(trio, namespace, ours, theirs, kept)
            if kept:
                await _knows(trio, namespace, turn.token)
            trio.master.kill()
            granted_until = turn._hold.ends  # by the old master, whatever it has said
            coming = asyncio.create_task(_enter(third))
            await until(lambda: turn.lost or turn._hold.ends > granted_until)
            believed_until = min(turn._hold.ends, now())
            if not turn.lost:
                assert kept, "a new master has confirmed what it can't know of"
                believed_until = now()
                assert await turn.release() is True
            later, entered = await coming
            assert later.token > turn.token > before
            if kept:
                assert believed_until <= entered, "two held at the same time"
            _refused_behind(tmp_path / "ledger", later, turn)
            assert await later.release() is True

    asyncio.run(main())


async def _enter(client: Any) -> tuple[Any, float]:
    lease = await client.lock("name", timeout=SECONDS).acquire()
    assert lease is not None, "it was never let in"
    return lease, now()


def _refused_behind(path: Path, later: Any, earlier: Any) -> None:
    """Where the later holder was, the earlier one can do no harm."""
    with fencing.file.guard(path, later.fence) as file:
        file.write_text("later")
    with pytest.raises(StaleFence), fencing.file.guard(path, earlier.fence):
        pass


@kept_or_lost
@blocking_and_asyncio
def test_a_wake_up_that_comes_too_late(
    trio: SentinelTrio, namespace: str, flavour: Flavour, kept: bool
) -> None:
    """The first in line is frozen as it is woken, and wakes after the failover with the old
    master's word in its ear: by then it is the turn of the second."""

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
            told = _last_token(trio.master, namespace)
            assert told > before, "the release did not grant it"
            if kept:
                await _knows(trio, namespace, told)
            trio.master.kill()
            token = await second.answer()
            assert token > told
            first.go_on()
            await until(lambda: listening(trio.current_master(), namespace) == 1)
            assert (await second.ask("state", name="name"))["held"]
            assert await second.ask("release", name="name") is True
            assert await first.answer() > token

    asyncio.run(main())


@kept_or_lost
@blocking_and_asyncio
def test_a_wake_up_that_never_comes(
    trio: SentinelTrio,
    namespace: str,
    flavour: Flavour,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master is gone between the release and the word: those in line find the new one, and
    are let in one after the other."""
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
