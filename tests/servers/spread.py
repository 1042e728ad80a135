"""Which test process runs what: few of them start the same server, and all end at the same time.

Every test is handed out by itself. A process goes on where it is for as long as anything is left
there; then it goes to where nobody is, if it can to a store that it knows; and last it helps where
most is left. So each server is started by one or two processes, not by all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import pytest

__all__ = ["Place", "Share", "place_of"]

STORES = (
    "redlock", "redis", "etcd", "consul", "zookeeper", "postgres", "mysql", "sqlite",
    "memcached",  # of an example
)  # fmt: skip
SUITES = ("tests/contract/", "tests/conformance/", "tests/primitives/", "tests/worlds/")
"""Where tests run on every store, each with the server of its harness."""


class Place(NamedTuple):
    """Tests that share their servers."""

    store: str
    name: str


def place_of(test: str) -> Place:
    """A store's share of the suites, or of a file."""
    path, _, rest = test.partition("::")
    words = f"-{rest.partition('[')[2].rstrip(']')}-"
    if path.startswith(SUITES):
        from harnesses import harness_classes

        for harness in sorted(harness_classes(), key=len, reverse=True):
            if f"-{harness}-" in words:
                return Place(harness.partition("-")[0], harness)
    store = next((s for s in STORES if any(f in path for f in (f"/{s}", f"/test_{s}"))), "")
    store = store or next((s for s in STORES if f"-{s}-" in words), "")
    return Place(store, f"{path} {store}")


class Share:
    """What is left to do, and who is where."""

    def __init__(self, tests: Iterable[str]) -> None:
        self._left: dict[Place, list[str]] = {}
        for test in tests:
            self._left.setdefault(place_of(test), []).append(test)
        for waiting in self._left.values():
            waiting.reverse()
        self._been: dict[Hashable, list[Place]] = {}

    def next(self, who: Hashable) -> str:
        """The next test of a process; there must be one left."""
        been = self._been.setdefault(who, [])
        if not been or been[-1] not in self._left:
            been.append(self._choose(who))
        waiting = self._left[been[-1]]
        test = waiting.pop()
        if not waiting:
            del self._left[been[-1]]
        return test

    def _choose(self, who: Hashable) -> Place:
        taken = {been[-1] for other, been in self._been.items() if other != who and been}
        free = [place for place in self._left if place not in taken]
        if not free:
            return max(self._left, key=lambda place: len(self._left[place]))
        own = {place.store for place in self._been[who]}
        others = {place.store for been in self._been.values() for place in been} - own
        # The suites wait more than they work, and small files the other way round: some of the
        # processes begin with these, so that both are under way at any time.
        sign = -1 if list(self._been).index(who) % 2 else 1

        def rank(place: Place) -> tuple[bool, bool, int]:
            return place.store in own, place.store not in others, sign * len(self._left[place])

        return max(free, key=rank)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Spread(LoadScopeScheduling):  # type: ignore[misc]
        """Asks `Share` which of the waiting tests is next."""

        share: Share | None = None

        def _split_scope(self, nodeid: str) -> str:
            return nodeid

        def _assign_work_unit(self, node: Any) -> None:
            queue: OrderedDict[str, dict[str, bool]] = self.workqueue
            if self.share is None:
                self.share = Share(queue)
            queue.move_to_end(self.share.next(node), last=False)
            super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            """The test that a process died in, if it died. This one has failed and is not run
            again, or it would end one process after the other; what waited for the process is."""
            work = self.assigned_work.pop(node)
            left: list[str] = [test for test, unit in work.items() if not all(unit.values())]
            if not left:
                return None
            self.workqueue.update((test, {test: False}) for test in left[1:])
            self.share = None
            for other in self.assigned_work:
                self._reschedule(other)
            return left[0]

    return Spread(config, log)
