"""What a store tells about its names, and the records that are kept under them."""

from __future__ import annotations

import asyncio

from holdfast.claim import Mode, write_label
from holdfast.core.contract import Guarantee
from holdfast.io.clock import now, wall
from holdfast.testing.contract.bench import LONG, SOON, Bench, contract
from holdfast.testing.contract.names import DISTINCT_NAMES, HOSTILE_NOTES

__all__: list[str] = []

RECORDS = Guarantee.RECORDS


@contract.rule()
async def a_look_shows_the_holder(bench: Bench) -> None:
    """Who holds a name: host, pid, thread, note, token, since when and for how long."""
    ours, theirs = bench.peer(), bench.peer()
    label = write_label("tall.example", 4242, "main", "nightly")
    grant = await ours.take(bench.claim()._replace(label=label))
    info = await theirs.look("name")
    assert info.name == "name"
    (holder,) = info.holders
    assert (holder.host, holder.pid, holder.thread) == ("tall.example", 4242, "main")
    assert (holder.note, holder.mode, holder.token) == ("nightly", Mode.EXCLUSIVE, grant.token)
    assert abs(holder.since - wall()) < SOON
    assert 0 < holder.remaining <= LONG + bench.harness.extra_recovery + 1
    assert grant.claim.owner not in repr(info)


@contract.rule()
async def a_look_at_a_free_name_is_empty(bench: Bench) -> None:
    """A name that nobody uses has no holders and no waiters, also after it was used."""
    peer = bench.peer()
    for _ in range(2):
        info = await peer.look("name")
        assert (info.name, info.holders, info.waiters) == ("name", (), ())
        assert await peer.release(await peer.take(bench.claim()))


@contract.rule(Guarantee.FIFO)
async def a_look_shows_the_line(bench: Bench) -> None:
    """Waiters are shown in their order."""
    ours, theirs = bench.peer(), bench.peer()
    await ours.take(bench.claim())
    for note in ("first", "second", "third"):
        await theirs.queue(bench.claim(note=note))
    waiters = (await ours.look("name")).waiters
    assert [waiter.note for waiter in waiters] == ["first", "second", "third"]
    assert all(abs(waiter.since - wall()) < SOON for waiter in waiters)


@contract.rule()
async def notes_are_any_text(bench: Bench) -> None:
    """What a holder says of itself comes back letter by letter."""
    peer = bench.peer()
    for number, note in enumerate(HOSTILE_NOTES):
        await peer.take(bench.claim(f"name {number}", note=note))
        (holder,) = (await peer.look(f"name {number}")).holders
        assert holder.note == note


@contract.rule()
async def a_survey_finds_all_in_pages(bench: Bench) -> None:
    """A survey gives every name in use, page by page, and no name that is free."""
    peer = bench.peer()
    names = {f"job:{number}" for number in range(25)}
    for name in names:
        await peer.take(bench.claim(name))
    freed = await peer.take(bench.claim("job:freed"))
    assert await peer.release(freed)
    for limit in (1, 7, 100):
        assert {info.name for info in await peer.survey("job:", limit)} == names


@contract.rule()
async def a_survey_s_prefix_is_plain_text(bench: Bench) -> None:
    """A prefix is compared letter by letter: no pattern, no case folding, no escape."""
    peer = bench.peer()
    for name in DISTINCT_NAMES:
        await peer.take(bench.claim(name))
    for prefix in ("", "a", "A", "a%", "a_", "a*", "[", "{", "/", ".", "'", "ä", "\\", "a\\"):
        found = {info.name for info in await peer.survey(prefix)}
        assert found == {name for name in DISTINCT_NAMES if name.startswith(prefix)}


@contract.rule(RECORDS)
async def a_record_is_kept_under_a_hold(bench: Bench) -> None:
    """A value written under a live hold outlives it, with its token, until its time is over."""
    ours, theirs = bench.peer(), bench.peer()
    assert await theirs.recall("name") is None
    grant = await ours.take(bench.claim())
    value = 'done: {"n": 1} 名前\n' + "v" * 1000
    assert await ours.record(grant, value) is True
    assert await ours.release(grant)
    record = await theirs.recall("name")
    assert record is not None
    assert (record.value, record.token) == (value, grant.token)
    assert -1.0 <= record.age_seconds < SOON
    assert await theirs.recall("other") is None


@contract.rule(RECORDS)
async def a_record_needs_a_live_hold(bench: Bench) -> None:
    """A lost hold writes no record, also while the name is free."""
    ours, theirs = bench.peer(), bench.peer()
    old = await ours.take(bench.claim())
    assert await ours.release(old)
    assert await ours.record(old, "stale") is False
    new = await theirs.take(bench.claim())
    assert await ours.record(old, "stale") is False
    assert await theirs.record(new, "fresh") is True
    assert await theirs.record(new, "fresher") is True
    record = await ours.recall("name")
    assert record is not None
    assert record.value == "fresher"


@contract.rule(RECORDS, sleeps=True)
async def a_record_ends_with_its_time(bench: Bench) -> None:
    """A record that was kept for a second is gone afterwards."""
    peer = bench.peer()
    grant = await peer.take(bench.claim())
    assert await peer.record(grant, "short", keep_seconds=1.0)
    deadline = now() + SOON
    while await peer.recall("name") is not None:
        assert now() < deadline, "a record outlived its time"
        await asyncio.sleep(0.1)


@contract.rule(sleeps=True)
async def a_watch_returns(bench: Bench) -> None:
    """An observer hears of a change, or looks again by itself, long before the deadline."""
    ours, theirs = bench.peer(), bench.peer()
    watching = asyncio.create_task(_seen(bench))
    grant = await ours.take(bench.claim("watched"))
    assert await asyncio.wait_for(watching, SOON) == grant.token
    await theirs.watch("watched", grant.token, now() + 0.2)


async def _seen(bench: Bench) -> int:
    peer = bench.peer()
    while True:
        holders = (await peer.look("watched")).holders
        if holders:
            return holders[0].token
        await peer.watch("watched", None, now() + SOON)
