"""What the renewer undoes: that does not keep it from what is held, nor is anything left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest

import holdfast
from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Waiting
from holdfast.core.hold import Hold
from holdfast.core.renewer import Renewer
from holdfast.errors import BackendUnavailable, LockLost
from holdfast.testing.simulator import Node, SimRuntime, World

TTL = 30.0


class SlowStore:
    """Undoing takes a second each."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime
        self.undone: list[str] = []
        self.renewed: list[float] = []
        self.lost: dict[str, str] = {}

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._runtime.sleep(1.0)
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
def test_a_hold_is_renewed_between_two_undoings(taken: float) -> None:
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


def test_what_the_store_calls_lost_is_undone() -> None:
    """Once: if the store was wrong, nobody else would end what it still has."""
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


def test_what_is_found_lost_when_it_is_extended_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.connect("memory://extended") as locks:
        lease = locks.lock("name").acquire()
        assert lease
        undone: list[Claim] = []
        monkeypatch.setattr(locks._engine.renewer, "undo", lambda claim, **_: undone.append(claim))
        locks.break_lock("name", reason="a test")
        with pytest.raises(LockLost):
            lease.extend()
        assert [claim.name for claim in undone] == ["name"]


class HungStore(SlowStore):
    """Answers nothing, and is given up when its caller says so, or after five seconds."""

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
def test_doubt_and_loss_are_told_in_time_while_something_is_undone(dropped: float) -> None:
    """An undoing that hangs holds the renewer up no longer than a hold can bear."""
    world, node, runtime, renewer = _hung()
    handle, told = Handle(), []

    async def use() -> None:
        hold = Hold(Grant(_claim("kept")._replace(ttl=5.0), 1), runtime.now(), True, None)
        hold.handles.append(ref(handle))
        hold.on_doubtful = lambda reason: told.append(("doubt", runtime.now() - hold.doubtful_at))
        hold.callbacks.append(lambda reason: told.append(("loss", runtime.now() - hold.ends)))
        hold.call_back = lambda callback, reason: callback(reason)  # type: ignore[assignment]
        renewer.add(hold)
        await runtime.sleep(dropped)
        for number in range(3):
            renewer.undo(_claim(f"dropped {number}"), landed=True)

    node.spawn(use(), "user")
    node.spawn(renewer.run(), "renewer")
    world.run(30.0)
    assert [what for what, _ in told] == ["doubt", "loss"]
    assert all(late <= 0.06 for _, late in told), told
    world.end()


def test_the_end_of_a_client_waits_once_for_a_store_that_hangs() -> None:
    """However much it holds."""
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
    assert took == [pytest.approx(5.0)]
    world.end()
