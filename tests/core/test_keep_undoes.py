"""What is to be undone on a slow store does not keep the keeper from what is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Waiting
from holdfast.core.hold import Hold
from holdfast.core.keep import Keep
from holdfast.testing.simulator import Node, SimRuntime, World

TTL = 30.0


class SlowStore:
    """Undoing takes a second each."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime = runtime
        self.undone: list[str] = []
        self.renewed: list[float] = []

    async def abandon(self, claim: Claim) -> None:
        await self._runtime.sleep(1.0)
        self.undone.append(claim.owner)

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        self.renewed.append(self._runtime.now())
        return Renewal()


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
    keep = Keep(runtime, slow, "sim://")
    handle = Handle()

    async def use() -> None:
        for number in range(100):
            keep.undo(_claim(f"old {number}"), landed=True)
        await runtime.sleep(taken)
        hold = Hold(Grant(_claim("new"), 1), runtime.now(), True, None)
        hold.handles.append(ref(handle))
        keep.add(hold)

    node.spawn(use(), "user")
    node.spawn(keep.run(), "keeper")
    began = runtime.now()
    world.run(60.0)
    first = store.renewed[0] - began - taken
    assert TTL / 3 <= first <= TTL / 3 + 2
    assert len(store.renewed) > 1
    world.run(130.0)
    assert len(store.undone) == 100
    world.end()
