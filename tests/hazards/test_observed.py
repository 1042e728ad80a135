"""An interrupt at every line that tells observers: no hold is left, and no second end is told."""

from __future__ import annotations

import linecache
from contextvars import copy_context
from typing import Any

import pytest

import holdfast
from hazards.tearing import lines_of, torn_at
from holdfast.core import events
from holdfast.core.acquire import acquire
from holdfast.core.engine import Engine
from holdfast.core.events import Events
from holdfast.io.threads import deliveries
from holdfast.lease import LeaseBase, tell_acquired
from holdfast.primitives.lock import LockBase
from observe.recorder import Recorder, wait_until

TELLING = [
    *(LockBase._begin, Events.begin, Events.acquired, Events.released, Events._end, events.tell),
    *(Events.answered, Events._request),
]
LOCKING = [
    *(LockBase._take, tell_acquired, Engine.take, Engine.own, Engine.release_local),
    *(Engine.release, Engine._released, LeaseBase.__init__, LeaseBase._release, acquire),
]


def begins_try(part: Any, line: int) -> bool:
    """The interpreter does nothing on such a line, so no signal handler can run there."""
    return linecache.getline(part.__code__.co_filename, line).strip() == "try:"


def torn(part: Any, line: int) -> list[str]:
    """What an observer was told of a hold that was interrupted at this line."""
    seen = Recorder()
    url = f"memory://observed-{part.__qualname__}-{line}"
    with holdfast.connect(url, observers=[seen]) as locks, holdfast.connect(url) as other:

        def hold() -> None:
            with locks.lock("name", timeout=20):
                pass

        # In a context of its own: an interrupt before the end is noted leaves its block current.
        copy_context().run(torn_at, part.__code__, line, hold)
        wait_until(lambda: not other.inspect("name").holders, "the end")
        deliveries.flush(30)  # the end of a lease that was dropped
        told = seen.words("requested", "renewed")
        hold()  # and the client goes on
    assert seen.words("requested")[-2:] == ["acquired", "released"]
    return told


@pytest.mark.parametrize(
    ("part", "line"), [(part, line) for part in TELLING for _, line in lines_of(part)]
)
def test_an_interrupt_anywhere_in_the_seam(part: Any, line: int) -> None:
    told = torn(part, line)
    assert sum(word in ("released", "lost", "cancelled") for word in told) <= 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an interrupt may drop the lease
@pytest.mark.parametrize(
    ("part", "line"),
    [(part, line) for part in LOCKING for _, line in lines_of(part) if not begins_try(part, line)],
)
def test_an_interrupt_anywhere_else_is_told_with_one_end(part: Any, line: int) -> None:
    """Nothing at all is told of an acquire that was interrupted before it began."""
    assert torn(part, line) in ([], ["cancelled"], ["acquired", "released"])
