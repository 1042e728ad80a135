"""A round of the renewer checks every hold, so it runs only when a hold is due."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.renewer import Renewer
from holdfast.testing.simulator import Node, SimRuntime, World


class CountedKeep(Renewer):
    """Each round is due 50 s after the last; a task is planned during the first round."""

    def __init__(self, runtime: SimRuntime, planned: float) -> None:
        nothing: Any = object()
        super().__init__(runtime, nothing, "sim://")
        self.rounds: list[float] = []
        self._told = planned

    async def round(self) -> float:
        now = self.runtime.now()
        self.rounds.append(round(now))
        if len(self.rounds) == 1:
            self.plan(now + self._told)
        return now + 50


@pytest.mark.parametrize(
    ("planned", "rounds"),
    [(80, [0, 50, 100]), (20, [0, 20, 70, 120])],
    ids=["for later", "for earlier"],
)
def test_a_plan_made_during_a_round_is_kept_and_no_more(planned: float, rounds: list[int]) -> None:
    world = World(1)
    node = Node(world, "node", drift=0.0, skew=0.0)
    renewer = CountedKeep(SimRuntime(node), planned)
    task = node.spawn(renewer.run(), "renewer")
    world.run(125.0)
    first = renewer.rounds[0]
    assert [at - first for at in renewer.rounds] == rounds
    assert not task.done
    world.end()
