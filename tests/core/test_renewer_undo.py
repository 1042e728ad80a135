"""Undos of the renewer: they do not delay renewals, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest

import holdfast
from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Waiting
from holdfast.core.hold import Hold, State
from holdfast.core.renewer import Renewer
from holdfast.errors import BackendUnavailable, Incompatible, LockLost
from holdfast.io.clock import now
from holdfast.testing.simulator import Node, SimRuntime, World

TTL = 30.0


class SlowStore:
    """Each undo takes a second."""

    seconds = 1.0

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime
        self.undone: list[str] = []
        self.renewed: list[float] = []
        self.lost: dict[str, str] = {}

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._runtime.sleep(self.seconds)
        self.undone.append(claim.owner)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        self.renewed.append(self._runtime.now())
        return Renewal(self.lost)


class Handle:
    _released = False


def _claim(owner: str) -> Claim:
    return Claim(owner, Mode.EXCLUSIVE, 1, 0, TTL, owner, "")


@pytest.mark.parametrize("taken", [0.0, 20.0], ids=["before", "meanwhile"])
def test_a_hold_is_renewed_between_two_undos(taken: float) -> None:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = SlowStore(runtime)
    slow: Any = store
    renewer = Renewer(runtime, slow, "sim://")
    handle = Handle()

    async def use() -> None:
        for number in range(100):
            renewer.undo(_claim(f"old {number}"), landed=True)
        await runtime.sleep(taken)
        hold = Hold(Grant(_claim("new"), 1), runtime.now(), True, None)
        hold.handles.append(ref(handle))
        renewer.add(hold)

    node.spawn(use(), "user")
    node.spawn(renewer.run(), "renewer")
    began = runtime.now()
    world.run(60.0)
    first = store.renewed[0] - began - taken
    assert TTL / 3 <= first <= TTL / 3 + 2
    assert len(store.renewed) > 1
    world.run(130.0)
    assert len(store.undone) == 100
    world.end()


def test_a_hold_that_the_store_reports_lost_is_undone() -> None:
    """Once: if the store was wrong, nothing else would end what it still has."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = SlowStore(runtime)
    store.lost = {"gone": "the store says so"}
    slow: Any = store
    renewer = Renewer(runtime, slow, "sim://")
    handle = Handle()

    async def use() -> None:
        for owner in ("gone", "kept"):
            hold = Hold(Grant(_claim(owner), 1), runtime.now(), True, None)
            hold.handles.append(ref(handle))
            renewer.add(hold)

    node.spawn(use(), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(60.0)
    assert store.undone == ["gone"]
    assert list(renewer.holds) == ["kept"]
    world.end()


class MuteStore(SlowStore):
    """Never tells why a hold was broken."""

    async def recall(self, name: str) -> None:
        await self._runtime.sleep(1000.0)


def test_reasons_that_the_store_does_not_tell_delay_nothing_but_the_losses() -> None:
    """What was renewed counts at once; all losses are told within a fraction of a second, however
    many."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = MuteStore(runtime)
    store.lost = {f"gone {number}": "the store says so" for number in range(5)}
    mute: Any = store
    renewer = Renewer(runtime, mute, "sim://")
    handle = Handle()
    holds: dict[str, Hold] = {}
    ends: list[float] = []

    async def use() -> None:
        for owner in (*store.lost, "kept"):
            hold = holds[owner] = Hold(Grant(_claim(owner), 1), runtime.now(), True, None)
            hold.handles.append(ref(handle))
            renewer.add(hold)
        while not store.renewed:
            await runtime.sleep(0.1)
        ends.append(holds["kept"].ends - store.renewed[0])

    node.spawn(use(), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(TTL / 3 + 0.5)  # a quarter of a second for the reasons, and steps of the renewer
    assert ends[0] > TTL * 0.9
    assert [holds[owner].state for owner in store.lost] == [State.LOST] * 5
    assert holds["kept"].state is State.HELD
    world.end()


def test_a_hold_that_an_extend_finds_lost_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://extended"
    with holdfast.connect(url) as locks, holdfast.connect(url) as other:
        lease = locks.lock("name").acquire()
        assert lease
        undone: list[Claim] = []
        monkeypatch.setattr(locks._engine.renewer, "undo", lambda claim, **_: undone.append(claim))
        other.break_lock("name", reason="a test")
        assert undone == []
        with pytest.raises(LockLost):
            lease.extend()
        assert [claim.name for claim in undone] == ["name"]


class HungStore(SlowStore):
    """Never answers: fails at the caller's deadline, or after five seconds."""

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._attach(until)

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        await self._attach(until)
        raise AssertionError

    async def _attach(self, until: float | None) -> None:
        left = 5.0 if until is None else min(5.0, until - self._runtime.now())
        await self._runtime.sleep(max(0.0, left))
        raise BackendUnavailable("it hangs")


def _hung() -> tuple[World, Node, SimRuntime, Renewer]:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    hung: Any = HungStore(runtime)
    return world, node, runtime, Renewer(runtime, hung, "sim://")


@pytest.mark.parametrize("dropped", [0.0, 1.5, 2.9, 3.2])
def test_doubt_and_loss_are_reported_in_time_during_an_undo(dropped: float) -> None:
    """An undo that hangs does not delay the renewer beyond the time when a hold is doubtful."""
    world, node, runtime, renewer = _hung()
    handle, events = Handle(), []

    async def use() -> None:
        hold = Hold(Grant(_claim("kept")._replace(ttl=5.0), 1), runtime.now(), True, None)
        hold.handles.append(ref(handle))
        hold.on_doubtful = lambda reason: events.append(("doubt", runtime.now() - hold.doubtful_at))
        hold.callbacks.append(lambda reason: events.append(("loss", runtime.now() - hold.ends)))
        hold.call_back = lambda callback, reason: callback(reason)  # type: ignore[assignment]
        renewer.add(hold)
        await runtime.sleep(dropped)
        for number in range(3):
            renewer.undo(_claim(f"dropped {number}"), landed=True)

    node.spawn(use(), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(30.0)
    assert [what for what, _ in events] == ["doubt", "loss"]
    assert all(late <= 0.06 for _, late in events), events
    world.end()


def test_close_waits_once_for_a_store_that_hangs() -> None:
    """However many holds there are."""
    world, node, runtime, renewer = _hung()
    took: list[float] = []

    async def close() -> None:
        for number in range(8):
            renewer.add(Hold(Grant(_claim(f"{number}"), 1), runtime.now(), True, None))
        began = runtime.now()
        await renewer.finish()
        took.append(runtime.now() - began)

    node.spawn(close(), "user")
    world.run(120.0)
    assert took == [pytest.approx(0.5)]
    world.end()


def test_close_counts_the_time_that_a_caller_has_waited_in_vain() -> None:
    """Unless something is held, which is surely stored, or the store has answered since."""
    world, node, runtime, renewer = _hung()
    seconds: list[float] = []

    async def close() -> None:
        renewer.unanswered(runtime.now(), BackendUnavailable("silent"))
        await runtime.sleep(0.2)
        seconds.append(renewer.close_seconds())
        await runtime.sleep(0.8)
        renewer.undo(_claim("unknown"))
        seconds.append(renewer.close_seconds())
        held = Hold(Grant(_claim("held"), 1), runtime.now(), True, None)
        renewer.add(held)
        seconds.append(renewer.close_seconds())
        renewer.remove(held)
        renewer.answered(runtime.now())
        seconds.append(renewer.close_seconds())
        renewer.unanswered(runtime.now() - 1.0, BackendUnavailable("silent"))
        renewer.close()
        seconds.append(renewer.finish_by - runtime.now())

    done = node.spawn(close(), "user")
    world.run(10.0)
    assert done.error is None
    assert seconds == [pytest.approx(each) for each in (0.3, 0.05, 0.5, 0.5, 0.05)]
    world.end()


def test_close_waits_longer_for_a_store_that_was_slow_before() -> None:
    """Three times as long as its answers took; each answer starts the wait anew."""
    world, node, runtime, renewer = _hung()
    took: list[float] = []

    async def close() -> None:
        renewer.answered(runtime.now() - 0.6)
        renewer.add(Hold(Grant(_claim("held"), 1), runtime.now(), True, None))
        began = runtime.now()
        await renewer.finish()
        took.append(runtime.now() - began)
        renewer.answered(runtime.now() - 60)
        assert renewer.finish_seconds() == pytest.approx(5.0)

    node.spawn(close(), "user")
    world.run(120.0)
    assert took == [pytest.approx(1.8)]
    world.end()


def test_a_renewal_that_the_store_did_not_answer_makes_close_no_longer() -> None:
    """A store that renews one by one reports it as unknown, and raises nothing. The five seconds
    that it took are not the store's speed."""
    world, node, runtime, renewer = _hung()
    took: list[float] = []

    async def renew(grants: Sequence[Grant], waits: object, **_: object) -> Renewal:
        await runtime.sleep(5.0)
        return Renewal(unknown={grant.claim.owner: "silent" for grant in grants})

    async def close() -> None:
        hung: Any = renewer.backend
        hung.renew = renew
        hold = Hold(Grant(_claim("held"), 1), runtime.now(), True, None)
        renewer.add(hold)
        await renewer._renew([hold], [])
        began = runtime.now()
        await renewer.finish()
        took.append(runtime.now() - began)

    node.spawn(close(), "user")
    world.run(120.0)
    assert took == [pytest.approx(0.5)]
    world.end()


def test_close_releases_everything_on_a_store_that_is_slow() -> None:
    """Each answer takes 0.4 s, and ten are needed: ``close`` waits for all of them."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = SlowStore(runtime)
    slow: Any = store
    store.seconds = 0.4
    renewer = Renewer(runtime, slow, "sim://")
    seen: list[int] = []

    async def close() -> None:
        for number in range(10):
            renewer.add(Hold(Grant(_claim(f"{number}"), 1), runtime.now(), True, None))
        await renewer.finish()

    async def wait() -> None:
        while (left := renewer.finish_by - runtime.now()) > 0:
            await runtime.sleep(left)
        seen.append(len(store.undone))

    node.spawn(close(), "user")
    node.spawn(wait(), "close()")
    world.run(60.0)
    assert sorted(store.undone) == [str(number) for number in range(10)]
    assert seen == [10]
    world.end()


def test_close_waits_for_a_new_connection_to_a_store_far_away() -> None:
    """An answer takes 0.3 s, and 1.6 s if it needs a new connection, as the renewer's first one."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    slow: Any = SlowStore(runtime)
    renewer = Renewer(runtime, slow, "sim://")

    async def close() -> None:
        await runtime.sleep(1.6)
        renewer.answered(runtime.now() - 1.6)
        for _ in range(100):
            renewer.answered(runtime.now() - 0.3)
        assert renewer.finish_seconds() > 2.0

    done = node.spawn(close(), "user")
    world.run(60.0)
    assert done.error is None
    world.end()


def test_close_releases_every_hold_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.renewer.MOST_UNDOS", 5)
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = SlowStore(runtime)
    slow: Any = store
    renewer = Renewer(runtime, slow, "sim://")

    async def close() -> None:
        for number in range(20):
            renewer.add(Hold(Grant(_claim(f"{number}"), 1), runtime.now(), True, None))
        await renewer.finish()

    node.spawn(close(), "user")
    world.run(60.0)
    assert len(store.undone) == 20
    world.end()


class DownStore(SlowStore):
    """Refuses every connection, until it is up."""

    up = False
    tries = 0

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self.tries += 1
        if not self.up:
            raise BackendUnavailable("connection refused")
        self.undone.append(claim.owner)


def _down(sessions: bool = False) -> tuple[World, Node, SimRuntime, DownStore, Renewer]:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = DownStore(runtime)
    down: Any = store
    return world, node, runtime, store, Renewer(runtime, down, "sim://", sessions=sessions)


async def _fail(renewer: Renewer, runtime: SimRuntime, number: int) -> None:
    for claim in range(number):
        renewer.undo(_claim(f"{claim}")._replace(ttl=2.0))
        await runtime.sleep(0.01)


@pytest.mark.parametrize("number", [10, 1000])
def test_an_outage_costs_one_try_at_a_time_however_many_claims_there_are(number: int) -> None:
    world, node, runtime, store, renewer = _down()
    node.spawn(_fail(renewer, runtime, number), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(20.0)
    assert 5 <= store.tries <= 20
    world.end()


def test_a_claim_is_not_undone_after_its_ttl_has_ended_it() -> None:
    world, node, runtime, store, renewer = _down()
    node.spawn(_fail(renewer, runtime, 1000), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(20.0)
    assert len(renewer.undoing) == 1000
    world.run(60.0)
    assert renewer.undoing == {}
    tries = store.tries
    world.run(600.0)
    assert store.tries == tries
    world.end()


def test_a_claim_under_a_session_that_is_renewed_does_not_end_with_its_ttl() -> None:
    world, node, runtime, _, renewer = _down(sessions=True)

    async def answer() -> None:
        while True:
            await runtime.sleep(1.0)
            renewer.answered(runtime.now())

    node.spawn(_fail(renewer, runtime, 10), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(1.0)
    answering = node.spawn(answer(), "answers")
    world.run(300.0)
    assert len(renewer.undoing) == 10
    answering.cancel()
    world.run(400.0)
    assert renewer.undoing == {}
    world.end()


def test_all_are_undone_soon_after_an_outage() -> None:
    world, node, runtime, store, renewer = _down()
    node.spawn(_fail(renewer, runtime, 100), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(10.0)
    store.up = True
    world.run(14.0)
    assert set(store.undone) == {str(number) for number in range(100)}
    world.end()


def test_a_refused_undo_does_not_delay_the_others() -> None:
    world, node, runtime, store, renewer = _down()
    store.up = True
    abandon = store.abandon

    async def refuse(claim: Claim, *, until: float | None = None) -> None:
        if claim.owner == "9":
            raise Incompatible("damaged")
        await abandon(claim, until=until)

    store.abandon = refuse  # type: ignore[method-assign]
    node.spawn(_fail(renewer, runtime, 10), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(1.0)
    assert set(store.undone) == {str(number) for number in range(9)}
    world.end()


class PartlyHungStore(SlowStore):
    """A cluster: the node of names with "a" hangs, or refuses connections; the other answers."""

    hangs = 0.0

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        if claim.owner.startswith("a"):
            left = 5.0 if until is None else until - self._runtime.now()
            await self._runtime.sleep(max(0.0, min(self.hangs, left)))
            raise BackendUnavailable("this node is down")
        self.undone.append(claim.owner)


@pytest.mark.parametrize(("landed", "per_second"), [(True, 20), (False, 2)])
def test_a_node_that_is_down_does_not_delay_undos_on_the_others(
    landed: bool, per_second: int
) -> None:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = PartlyHungStore(runtime)
    part: Any = store
    renewer = Renewer(runtime, part, "sim://")

    async def fail() -> None:
        for number in range(24 * per_second):
            renewer.undo(_claim(f"a{number}"))
            await runtime.sleep(1 / per_second)

    async def use() -> None:
        while True:
            renewer.answered(runtime.now())
            await runtime.sleep(0.5)

    node.spawn(renewer.run(), "renewer")
    node.spawn(fail(), "failing")
    node.spawn(use(), "using")
    world.run(20.0)
    for number in range(5):
        renewer.undo(_claim(f"b{number}"), landed=landed)
    world.run(24.0)
    assert set(store.undone) >= {f"b{number}" for number in range(5)}
    world.run(200.0)
    assert renewer.undoing == {}
    world.end()


def test_close_releases_on_the_nodes_that_answer_if_one_hangs() -> None:
    """In the background: ``close`` itself waits no longer."""
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    runtime = SimRuntime(node)
    store = PartlyHungStore(runtime)
    store.hangs = 60.0
    part: Any = store
    renewer = Renewer(runtime, part, "sim://")

    async def close() -> None:
        for owner in ("a0", "a1", "b0", "a2", "b1"):
            renewer.add(Hold(Grant(_claim(owner), 1), runtime.now(), True, None))
        renewer.close()
        assert renewer.finish_by - runtime.now() == pytest.approx(0.5)
        await renewer.finish(background=True)

    done = node.spawn(close(), "user")
    world.run(20.0)
    assert done.done
    assert done.error is None
    assert store.undone == ["b0", "b1"]
    world.end()


def test_a_claim_under_a_session_is_kept_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be held as long as its session is, which may be for ever."""
    monkeypatch.setattr("holdfast.core.renewer.MOST_UNDOS", 5)
    world, node, runtime, store, renewer = _down(sessions=True)
    node.spawn(_fail(renewer, runtime, 20), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(5.0)
    store.up = True
    world.run(10.0)
    assert len(set(store.undone)) == 20
    world.end()


def test_no_more_than_so_many_claims_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.renewer.MOST_UNDOS", 50)
    world, node, runtime, _, renewer = _down()
    node.spawn(_fail(renewer, runtime, 200), "user")
    world.run(10.0)
    assert sorted(map(int, renewer.undoing)) == list(range(150, 200))
    world.end()


@pytest.mark.parametrize("timeout", [0, 1])
def test_an_attempt_that_arrives_after_its_undo_is_undone_again(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """It was not answered, so its connection was given up, and the undo went another way."""
    url = f"memory://late-attempt-{timeout}"

    async def main() -> None:
        async with holdfast.connect_async(url) as locks, holdfast.connect_async(url) as other:
            backend = locks._engine.backend
            attempt, late = backend.attempt, list[Any]()

            async def stalls(claim: Claim, **_: Any) -> Any:
                late.append(claim)
                raise BackendUnavailable("no answer in time")

            monkeypatch.setattr(backend, "attempt", stalls)
            with pytest.raises(BackendUnavailable):
                await locks.lock("name", ttl=3600).acquire(timeout=timeout)
            assert await attempt(late[-1], join=True, until=now() + 10)
            assert (await other.inspect("name")).holders
            lease = await other.lock("name").acquire(timeout=20)
            assert lease
            assert await lease.release()

    asyncio.run(main())
