"""An interrupt at every line that tells observers: no hold is left, and no second end is told."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import pytest

import holdfast
from hazards.tearing import lines_of, torn_at
from holdfast.core import events
from holdfast.core.events import Events
from holdfast.primitives.lock import LockBase
from observe.recorder import Recorder, wait_until

TELLING = [
    *(LockBase._begin, Events.begin, Events.acquired, Events.released, Events._end, events.tell),
    *(Events.answered, Events._request),
]


@pytest.mark.parametrize(
    ("part", "line"), [(part, line) for part in TELLING for _, line in lines_of(part)]
)
def test_an_interrupt_anywhere_in_the_seam(part: Any, line: int) -> None:
    seen = Recorder()
    url = f"memory://observed-{part.__qualname__}-{line}"
    with holdfast.connect(url, observers=[seen]) as locks, holdfast.connect(url) as other:

        def hold() -> None:
            with locks.lock("name"):
                pass

        # In a context of its own: an interrupt before the end is noted leaves its block current.
        copy_context().run(torn_at, part.__code__, line, hold)
        wait_until(lambda: not other.inspect("name").holders, "the end")
        ends = [event for event in seen.events if event.word in ("released", "lost", "cancelled")]
        assert len(ends) <= 1
        hold()  # and the client goes on
    assert seen.words("requested")[-2:] == ["acquired", "released"]
