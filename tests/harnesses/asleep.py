"""Rules that sleep most of their time run at the same time; each is told by its own test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.testing import Case, Harness

__all__ = ["Asleep"]

MOST = 6
"""So many at a time: each has work to do, too."""


class Asleep:
    """The first test of such a rule runs all that are to be run on its store, in its world."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], Future[None]] = {}

    def run(self, request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
        """Raises what the case has found."""
        if not case.rule.sleeps:
            case.run(harness)
            return
        key = harness.name, str(case)
        if key not in self._ended:
            beside = [item for item in request.session.items if item.path == request.path]
            self._run_all(harness, _beside(beside, harness, case))
        self._ended.pop(key).result()

    def _run_all(self, harness: Harness, cases: Iterable[Case]) -> None:
        ready = [case for case in cases if not case.lacks(harness)]
        ready.sort(key=lambda case: not case.rule.between_processes)  # these take longest
        with ThreadPoolExecutor(MOST) as pool:
            for case in ready:
                self._ended[harness.name, str(case)] = pool.submit(case.run, harness)


def _beside(items: Iterable[pytest.Item], harness: Harness, case: Case) -> Iterator[Case]:
    """Those of the same catalogue that were chosen for this run."""
    for item in items:
        params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        other = params.get("case")
        if (
            isinstance(other, Case)
            and other.rule.sleeps
            and params.get("harness") == harness.name
            and other.flavour is case.flavour
            and other._run == case._run
        ):
            yield other
