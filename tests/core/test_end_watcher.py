"""The watcher, in virtual time: it reports in time whatever the store does, and is cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Signal, Waiting
from holdfast.core.hold import Hold, State
from holdfast.core.renewer import Renewer
from holdfast.core.watcher import IDLE_TICKS, EndWatcher
from holdfast.testing.simulator import Node, SimRuntime, World

TTL = 30.0


class Handle:
    _released = False


class CountingRuntime(SimRuntime):
    waits = 0

    async def wait(self, signal: Signal, until: float | None) -> bool:
        self.waits += 1
        return await super().wait(signal, until)


class Store:
    """Renews at once, or hangs and ignores its deadline."""

    def __init__(self, runtime: SimRuntime, hangs: float = 0.0) -> None:
        self.runtime, self.hangs = runtime, hangs
        self.renewed: list[float] = []
        self.given: list[float] = []
        """How many seconds each renewal was given."""
        self.owners: list[list[str]] = []
        self.lost: dict[str, str] = {}
        self.undone: list[str] = []

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        self.given.append(until - self.runtime.now())
        self.owners.append([grant.claim.owner for grant in grants])
        if self.hangs:
            await self.runtime.sleep(self.hangs)
        self.renewed.append(self.runtime.now())
        return Renewal(self.lost)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self.undone.append(claim.owner)


class Process:
    """A client, its renewer and the watcher, on one simulated machine."""

    def __init__(self, hangs: float = 0.0) -> None:
        self.world = World(1)
        self.node = Node(self.world, "node", drift=0.0, skew=0.0)
        self.runtime, self.watching = SimRuntime(self.node), CountingRuntime(self.node)
        self.store = Store(self.runtime, hangs)
        store: Any = self.store
        self.renewer = Renewer(self.runtime, store, "sim://")
        self.watch = EndWatcher(self.watching)
        self.watch.watch(self.renewer)
        self.looks = 0
        self.events: list[tuple[str, float]] = []
        self._handle = Handle()
        look = self.watch.check_ends

        def counted() -> float:
            self.looks += 1
            return look()

        self.watch.check_ends = counted  # type: ignore[method-assign]
        self.node.spawn(self.renewer.run(), "renewer")
        self.node.spawn(self.watch.run(), "watcher")

    def hold(self, owner: str = "kept", ttl: float = TTL, **how: Any) -> Hold:
        claim = Claim(owner, Mode.EXCLUSIVE, 1, 0, ttl, owner, "")
        hold = Hold(Grant(claim, 1), self.runtime.now(), how.get("renew", True), None)
        hold.handles.append(ref(self._handle))
        hold.on_doubtful = lambda _: self.note("doubt", hold.doubtful_at)
        hold.callbacks.append(lambda _: self.note("loss", hold.ends))
        hold.call_back = lambda callback, reason: callback(reason)  # type: ignore[assignment]
        self.renewer.add(hold)
        return hold

    def note(self, what: str, due: float) -> None:
        """Notes an event, and how many seconds after its due time it happened."""
        self.events.append((what, self.runtime.now() - due))

    def run(self, seconds: float) -> None:
        self.world.run(self.world.time + seconds)
        assert not self.world.errors


def test_doubt_and_loss_are_reported_while_a_renewal_hangs() -> None:
    process = Process(hangs=1000.0)
    process.run(1.0)
    process.hold()
    process.run(40.0)
    assert [what for what, _ in process.events] == ["doubt", "loss"]
    assert all(0 <= late < 0.01 for _, late in process.events), process.events
    assert process.store.undone == []
    process.run(1000.0)
    assert process.store.undone[0] == "kept"  # by the renewer, once it can
    process.world.end()


def test_a_hold_that_ends_earlier_than_the_first_is_seen_in_time() -> None:
    process = Process(hangs=1000.0)
    process.hold("long", ttl=600.0)
    process.run(1.0)
    process.hold("short", ttl=5.0)
    process.run(10.0)
    assert [what for what, _ in process.events] == ["doubt", "loss"]
    assert all(0 <= late < 0.01 for _, late in process.events), process.events
    process.world.end()


def test_a_hold_without_renewal_takes_no_time_from_a_renewal() -> None:
    process = Process()
    process.run(1.0)
    process.hold()
    process.hold("short", ttl=TTL / 2 + 0.2, renew=False)  # doubtful when the other is renewed
    process.run(TTL / 2)
    assert len(process.store.given) == 1
    assert process.store.given[0] > TTL / 3
    assert process.events == [("doubt", 0.0)]
    process.world.end()


def test_a_hold_that_is_made_shorter_is_seen_in_time() -> None:
    process = Process(hangs=1000.0)
    hold = process.hold(ttl=600.0)
    process.run(1.0)
    hold.extended(process.runtime.now(), 5.0)
    process.renewer.reschedule(hold)
    process.run(10.0)
    assert [what for what, _ in process.events] == ["doubt", "loss"]
    assert all(0 <= late < 0.01 for _, late in process.events), process.events
    process.world.end()


def _suspend(process: Process, seconds: float) -> None:
    """The clock of certain time runs during a suspend; timed waits under way do not."""
    process.node.offset += seconds


def test_after_a_suspend_a_loss_is_reported_within_a_second() -> None:
    process = Process(hangs=1000.0)
    hold = process.hold()
    process.run(5.0)
    _suspend(process, 3600.0)
    resumed = process.runtime.now()
    events: list[float] = []
    hold.callbacks.append(lambda _: events.append(process.runtime.now() - resumed))
    process.run(1.5)
    assert events
    assert events[0] <= 1.0
    process.world.end()


def test_after_a_suspend_what_is_left_is_renewed() -> None:
    """The renewer slept past its due time; it is woken before the hold is doubtful."""
    process = Process()
    process.hold()
    process.run(5.0)
    _suspend(process, 17.0)
    resumed = process.runtime.now()
    process.run(3.5)
    assert process.events == []
    assert process.store.renewed
    assert process.store.renewed[0] - resumed <= 1.0
    process.world.end()


def _stop_machine(process: Process, seconds: float) -> None:
    """A virtual machine is stopped from outside: no clock in it runs. Then its wall clock is set to
    the time of the world."""
    process.node.skew += seconds


def test_after_the_machine_was_stopped_all_holds_are_renewed_within_a_second() -> None:
    """The store's clock went on: its answer decides what is lost, long before a renewal is due."""
    process = Process()
    process.hold("kept")
    gone, fixed = process.hold("gone"), process.hold("fixed", renew=False)
    process.run(2.5)
    process.store.lost = {"gone": "the store says so"}
    _stop_machine(process, 20.0)
    stopped = process.runtime.now()
    process.run(1.5)
    assert [at - stopped <= 1.0 for at in process.store.renewed] == [True]
    assert process.store.owners == [["kept", "gone"]]
    assert gone.state is State.LOST
    assert fixed.state is State.HELD
    process.run(5.0)
    assert len(process.store.renewed) == 1  # once, and then as before
    process.world.end()


@pytest.mark.parametrize("seconds", [-3600.0, 0.2])
def test_a_wall_clock_that_is_set_back_or_corrected_causes_no_renewal(seconds: float) -> None:
    process = Process()
    process.hold()
    process.run(2.5)
    _stop_machine(process, seconds)
    process.run(5.0)
    assert process.store.renewed == []
    process.world.end()


def test_a_wall_clock_that_is_set_forward_ends_no_hold() -> None:
    """Not even if the store can't be reached just then."""
    process = Process(hangs=5.0)
    hold = process.hold()
    process.run(2.5)
    _stop_machine(process, 365 * 86400.0)
    process.run(15.0)
    assert process.events == []
    assert hold.state is State.HELD
    assert hold.ends > process.runtime.now() + 15.0
    process.world.end()


def test_a_machine_that_is_stopped_during_a_renewal_renews_again() -> None:
    """The answer is that of the time before."""
    process = Process(hangs=3.0)
    process.hold()
    process.run(TTL / 3 + 1.0)
    assert len(process.store.given) == 1
    _stop_machine(process, 20.0)
    process.run(3.0)
    assert len(process.store.given) == 2
    process.world.end()


def test_while_something_is_held_it_wakes_once_a_second_and_looks_only_at_events() -> None:
    process = Process()
    hold = process.hold()
    process.run(100.0)
    looks, waits = process.looks, process.watching.waits
    process.run(100.0)
    assert process.watching.waits - waits <= 110
    assert process.looks - looks <= 10  # a hold of 30 s is doubtful after 25 s at the earliest
    process.renewer.remove(hold)
    process.world.end()


def test_while_nothing_is_held_it_sleeps() -> None:
    process = Process()
    process.run(1.0)
    process.renewer.remove(process.hold(ttl=3600.0))
    process.run(IDLE_TICKS + 2.0)
    waits = process.watching.waits
    process.run(1000.0)
    assert process.watching.waits == waits
    process.hold("next")
    process.run(10.0)
    assert process.watching.waits > waits
    process.world.end()


def test_short_holds_hardly_ever_wake_it() -> None:
    process = Process()
    events: list[float] = []
    plan = process.watch.plan

    def counted(at: float) -> None:
        events.append(at)
        plan(at)

    process.watch.plan = counted  # type: ignore[method-assign]
    for number in range(1000):
        process.renewer.remove(process.hold(str(number)))
        process.run(0.1)
    assert len(events) <= 100 / IDLE_TICKS + 2
    process.world.end()


@pytest.mark.parametrize("rival", ["another thread that looks", "a release"])
def test_of_two_threads_that_end_a_hold_one_does(rival: str) -> None:
    """The watcher has seen that it expired, and another thread is faster."""
    process = Process()
    process.run(1.0)
    hold = process.hold(renew=False)
    renewer, now = process.renewer, process.runtime.now() + 2 * TTL
    remove = renewer.remove

    def remove_late(hold: Hold) -> bool:
        renewer.remove = remove  # type: ignore[method-assign]
        if rival == "a release":
            assert renewer.remove(hold)
        else:
            renewer.check_ends(now)
        return remove(hold)

    renewer.remove = remove_late  # type: ignore[method-assign]
    renewer.check_ends(now)
    events = ["doubt", "loss"] if rival != "a release" else []
    assert [what for what, _ in process.events] == events
    assert len(renewer.unlogged) == len(renewer.undoing) == len(events) // 2
    assert (hold.state is State.LOST) == bool(events)
    process.world.end()
