"""Hundreds of seeded schedules of the real core; the same oracle must catch broken cores."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.acquire import acquire
from holdfast.core.contract import Renewal
from holdfast.core.engine import Engine
from holdfast.core.hold import AcquireOptions, Hold
from holdfast.core.renewer import Renewer
from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.stores.memory import MemoryBackend
from holdfast.testing.simulated_store import Network, SimBackend, SimStore
from holdfast.testing.simulator import Node, World
from simulation.schedule import Client, Report, run_schedule

SCHEDULES = 1000
SHARDS = 10
PER_SHARD = 50


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_breaks_a_rule(shard: int) -> None:
    """Exclusion of certain time, growing tokens, progress, and nothing left behind."""
    holds = cancelled = lost = given = extended = unanswered = 0
    for seed in range(shard, SHARDS * PER_SHARD, SHARDS):
        report = run_schedule(seed)
        assert not report.problems, f"seed {seed}: {report.problems[:5]}"
        holds += len(report.holds)
        cancelled += report.cancelled
        lost += report.lost
        given += report.given
        extended += report.extended
        unanswered += report.unanswered
    # The schedules are worth something only if all of this did happen in them.
    assert holds > 500
    assert cancelled > 5
    assert lost > 5
    assert given > 40
    assert extended > 50
    assert unanswered > 5


Prepare = Callable[[SimStore, list[Client]], None]


def _problems(prepare: Prepare, word: str) -> bool:
    """Whether one of the schedules catches a broken core."""
    return any(
        word in problem
        for seed in range(SCHEDULES)
        for problem in run_schedule(seed, prepare).problems
    )


def test_validity_counted_from_the_reply_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reply must not make the hold look longer."""
    take = Engine.take

    def from_the_reply(self: Engine, grant: Grant, since: float, options: object) -> object:
        return take(self, grant, self.runtime.now(), options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "take", from_the_reply)
    assert _problems(lambda store, clients: None, "while")


def test_validity_counted_from_the_wake_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up with a direct grant may have taken long to arrive."""
    take = Engine.take

    def from_the_wake_up(self: Engine, grant: Grant, since: float, options: object) -> object:
        if grant.seconds is not None:
            since = self.runtime.now()
        return take(self, grant, since, options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "take", from_the_wake_up)
    monkeypatch.setattr("holdfast.core.acquire._StoreWait._is_usable", lambda *args: True)
    assert _problems(lambda store, clients: None, "while")


def test_a_direct_grant_that_is_never_renewed_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not count as a grant for the whole ttl."""
    take = Engine.take

    def for_the_whole_ttl(self: Engine, grant: Grant, since: float, options: object) -> object:
        return take(self, grant._replace(seconds=None), since, options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "take", for_the_whole_ttl)
    assert _problems(lambda store, clients: None, "while")


def test_renewal_that_ignores_the_owner_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renews a hold that is no longer ours, and believes the answer."""

    async def renew_anything(
        self: MemoryBackend,
        grants: list[Grant],
        waits: object,
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        return Renewal()

    monkeypatch.setattr(MemoryBackend, "renew", renew_anything)
    assert _problems(lambda store, clients: None, "while")


def test_an_extend_that_counts_only_once_it_is_answered_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shorter ttl may have arrived at the store without an answer."""

    def later(self: Hold, grant: Grant, sent: float) -> None:
        self.renew_by(sent)

    monkeypatch.setattr(Hold, "shorten", later)
    assert _problems(lambda store, clients: None, "while")


def test_no_check_after_a_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats a wake-up as a grant."""
    attempt, wait = SimBackend.attempt, SimBackend.wait
    woken: set[str] = set()

    async def wait_and_believe(self: SimBackend, claim: Claim, busy: Busy, until: float) -> None:
        await wait(self, claim, busy, until)
        woken.add(claim.owner)

    async def believe(
        self: SimBackend, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        if claim.owner in woken:
            token = int(self.node.wall() * 1_000_000)
            return Grant(claim, token)
        return await attempt(self, claim, join=join, until=until)

    monkeypatch.setattr(SimBackend, "wait", wait_and_believe)
    monkeypatch.setattr(SimBackend, "attempt", believe)
    assert _problems(lambda store, clients: None, "while")


def test_release_on_cancel_before_the_acquire_arrived_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Undoes once, on another connection: the undo may overtake the request."""
    leaks = 0

    async def undo_at_once(self: Engine, claim: Claim) -> None:
        try:
            await self.renewer.backend.abandon(claim)
        except HoldfastError:
            return

    monkeypatch.setattr(Engine, "undo", undo_at_once)
    monkeypatch.setattr(Renewer, "undo", lambda *args, **kwargs: None)
    for seed in range(500):
        leaks += _orphans(seed)
    assert leaks


def test_undone_claims_leave_no_orphan() -> None:
    """The same check of the real core finds nothing."""
    assert not sum(_orphans(seed) for seed in range(500))


def _orphans(seed: int) -> int:
    """Cancels one acquire at a random moment; returns what is left well before the ttl is over."""
    world = World(seed)
    server = Node(world, "server", drift=0.0, skew=0.0)
    store = SimStore(server, Network(world, delay=0.2, loss=0.0))
    client = Client(world, store, 0, Report())
    claim = Claim("a", Mode.EXCLUSIVE, 1, 0, 300.0, "owner", "[]")
    task = client.node.spawn(acquire(client.engine, claim, AcquireOptions(None, explain=False)))
    world.at(world.random.uniform(0.0, 0.3), task.cancel)
    world.run(60.0)
    world.end()
    if task.error is None:
        return 0  # it was granted before
    return len(store.ledger.names["a"].state.holds) if "a" in store.ledger.names else 0


def test_a_next_waiter_whose_exchange_was_not_answered_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has timed out and was undone by then; the exchange may still grant its claim."""
    world = World(1)
    store = SimStore(Node(world, "server", drift=0.0, skew=0.0), Network(world, loss=0.0))
    client = Client(world, store, 0, Report())
    engine = client.engine
    first, next_claim = (Claim("a", Mode.EXCLUSIVE, 1, 0, 300.0, who, "[]") for who in "12")
    undone: list[tuple[float, str]] = []
    abandon = SimBackend.abandon

    async def unanswered(self: SimBackend, grant: Grant, claim: Claim) -> None:
        await self.runtime.sleep(3.0)
        raise BackendUnavailable("sim://: no answer in time")

    async def noted(self: SimBackend, claim: Claim, *, until: float | None = None) -> None:
        undone.append((world.time, claim.owner))
        await abandon(self, claim, until=until)

    async def hold_and_release() -> None:
        hold = await acquire(engine, first, AcquireOptions(None, explain=False))
        await engine.runtime.sleep(5.0)
        await engine.release(hold)

    async def wait_for_a_while() -> None:
        await engine.runtime.sleep(1.0)
        await acquire(engine, next_claim, AcquireOptions(5.0, explain=False))

    monkeypatch.setattr(SimBackend, "exchange", unanswered)
    monkeypatch.setattr(SimBackend, "abandon", noted)
    client.node.spawn(hold_and_release())
    client.node.spawn(wait_for_a_while())
    world.run(30.0)
    world.end()
    times = [time for time, owner in undone if owner == next_claim.owner]
    assert min(times) < 7.0  # as it gave up
    assert max(times) > 8.0  # after the exchange did


def test_a_next_waiter_that_acquired_and_left_by_itself_is_not_granted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exchange that arrives later grants a claim without a waiter; it is undone at once."""
    world = World(1)
    store = SimStore(Node(world, "server", drift=0.0, skew=0.0), Network(world, loss=0.0))
    client = Client(world, store, 0, Report())
    engine, holds = client.engine, store.ledger.names
    first, second, next_claim = (Claim("a", Mode.SLOTS, 1, 2, 300.0, who, "[]") for who in "123")
    exchange = SimBackend.exchange
    left: list[float] = []
    holders_left: list[list[str]] = []

    async def late(self: SimBackend, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim is first:
            await self.runtime.sleep(3.0)
        return await exchange(self, grant, claim)

    async def hold(claim: Claim, after: float, seconds: float) -> None:
        await engine.runtime.sleep(after)
        hold = await acquire(engine, claim, AcquireOptions(None, explain=False))
        await engine.runtime.sleep(seconds)
        await engine.release(hold)
        left.append(world.time)

    async def look() -> None:
        await engine.runtime.sleep(9.0)
        holders_left.append(list(holds["a"].state.holds))

    monkeypatch.setattr(SimBackend, "exchange", late)
    client.node.spawn(hold(first, 0.0, 5.0))  # its exchange is on its way from 5 to 8
    client.node.spawn(hold(second, 0.0, 6.0))
    client.node.spawn(hold(next_claim, 1.0, 0.5))
    client.node.spawn(look())
    world.run(30.0)
    world.end()
    assert len(left) == 3
    assert holders_left == [[]]
