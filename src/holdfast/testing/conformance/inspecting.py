"""What the clients tell about names, and what they refuse before anything is changed."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from datetime import timedelta
from typing import Any

from holdfast.claim import Mode
from holdfast.core.contract import Guarantee
from holdfast.errors import GuaranteeNotMet, HoldfastError, InvalidName
from holdfast.io.clock import wall
from holdfast.testing.clients import open_client
from holdfast.testing.conformance.bench import SOON, Bench, conformance, raises
from holdfast.testing.contract.names import DISTINCT_NAMES, HOSTILE_NOTES

__all__: list[str] = []


@conformance.rule()
async def inspect_shows_the_holder(bench: Bench) -> None:
    """Host, pid, thread or task, since when, token, remaining and note; no owner."""
    ours, theirs = bench.client(), bench.client()
    async with ours.lock("name", note="a note") as lease:
        (holder,) = (await theirs.inspect("name")).holders
        assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
        assert holder.thread
        assert (holder.note, holder.mode) == ("a note", Mode.EXCLUSIVE)
        assert holder.token == lease.token
        assert abs(holder.since - wall()) < SOON
        assert 0 < holder.remaining <= lease.ttl + bench.harness.extra_recovery + 1
    info = await theirs.inspect("name")
    assert (info.holders, info.waiters) == ((), ())


@conformance.rule(Guarantee.FIFO)
async def inspect_shows_who_waits(bench: Bench) -> None:
    """Waiters are shown in their order, with what they say of themselves."""
    ours, clients = bench.client(), [bench.client(), bench.client()]
    async with ours.lock("name"):
        waiting = []
        for number, client in enumerate(clients):
            lock = client.lock("name", note=f"waiter {number}", timeout=SOON)
            waiting.append(asyncio.create_task(_once(lock)))
            await bench.in_line(ours, "name", number + 1)
        waiters = (await ours.inspect("name")).waiters
        assert [waiter.note for waiter in waiters] == ["waiter 0", "waiter 1"]
        assert {waiter.pid for waiter in waiters} == {os.getpid()}
    await asyncio.gather(*waiting)


async def _once(lock: Any) -> None:
    async with lock:
        pass


@conformance.rule()
async def list_shows_names_in_use(bench: Bench) -> None:
    """All names in use that start with the prefix, with any text in them."""
    client = bench.client()
    leases = [await client.lock(name).acquire() for name in DISTINCT_NAMES]
    assert [info.name for info in await client.list()] == sorted(DISTINCT_NAMES)
    some = [info.name for info in await client.list("a")]
    assert some == sorted(name for name in DISTINCT_NAMES if name.startswith("a"))
    for lease in leases:
        assert lease is not None
        assert await lease.release() is True
    assert await client.list() == []


@conformance.rule()
async def notes_come_back_as_they_were(bench: Bench) -> None:
    """A note is any text; what is too long is refused."""
    client = bench.client()
    for note in HOSTILE_NOTES:
        async with client.lock("name", note=note) as lease:
            (holder,) = (await client.inspect("name")).holders
            assert (lease.note, holder.note) == (note, note)
    with raises(ValueError):
        client.lock("name", note="n" * 5000)


@conformance.rule()
async def bad_names_are_refused(bench: Bench) -> None:
    """Empty, too long, with control characters or no text: refused before anything is asked."""
    client = bench.client()
    for name in ("", "a" * 513, "é" * 257, "a\nb", "a\x00b", "a\x7f", "\ud800"):
        with raises(InvalidName):
            client.lock(name)
        with raises(InvalidName):
            await client.inspect(name)
    for thing in (None, 3, b"bytes"):
        with raises(TypeError):
            client.lock(thing)  # type: ignore[arg-type]


@conformance.rule()
async def bad_durations_are_refused(bench: Bench) -> None:
    """Zero, negative, not a number, absurd, or no duration at all."""
    client = bench.client()
    for ttl in (0, -1, math.nan, math.inf, 1e12):
        with raises(ValueError):
            client.lock("name", ttl=ttl)
    for timeout in (-2, math.nan):
        with raises(ValueError):
            client.lock("name", timeout=timeout)
    for wrong in ("30", None, True):
        with raises(TypeError):
            client.lock("name", ttl=wrong)  # type: ignore[arg-type]
    async with client.lock(
        "name", ttl=timedelta(seconds=20), timeout=timedelta(seconds=1)
    ) as lease:
        assert lease.ttl == 20


@conformance.rule()
async def other_libraries_words_are_explained(bench: Bench) -> None:
    """A spelling of another library's raises a ``TypeError`` that names ours."""
    client = bench.client()
    for theirs, word in (
        ("expire", "ttl"),
        ("blocking_timeout", "timeout"),
        ("lease_time", "ttl"),
        ("auto_release_time", "ttl"),
    ):
        wrong: dict[str, Any] = {theirs: 5}
        with raises(TypeError) as raised:
            client.lock("name", **wrong)
        assert word in str(raised.error)


@conformance.rule()
async def required_guarantees_are_checked(bench: Bench) -> None:
    """``connect(require=…)`` fails at once on a store that does not promise it."""
    client = bench.client()
    assert client.guarantees >= bench.guarantees
    for guarantee in Guarantee:
        require = {"require": [str(guarantee)], "namespace": bench.namespace}
        url, run = bench.harness.url, bench.workers.run
        if guarantee in client.guarantees:
            await open_client(url, bench.flavour, run, **require).close()
        else:
            with raises(GuaranteeNotMet):
                open_client(url, bench.flavour, run, **require)
    with raises((ValueError, HoldfastError)):
        open_client(bench.harness.url, bench.flavour, bench.workers.run, require=["SPEED"])


@conformance.rule()
async def check_looks_at_the_store(bench: Bench) -> None:
    """``check()`` contacts the store and tells what its promises rest on."""
    findings = await bench.client().check()
    assert findings
    assert all(finding.level in ("ok", "warning") for finding in findings)
