"""Code of users, for the type checkers only: events have their types, observers are checked."""

from __future__ import annotations

from typing import assert_type

import holdfast
from holdfast import observe
from holdfast.claim import Holder


class Mine(observe.Observer):
    """An observer of a user."""

    def waiting(self, event: observe.WaitBegan) -> None:
        assert_type(event.place, int | None)
        assert_type(event.holder, Holder | None)

    def acquired(self, event: observe.Acquired) -> None:
        assert_type(event.seconds, float)
        assert_type(event.name, str)
        assert_type(event.token, int)

    def lost(self, event: observe.Lost) -> None:
        assert_type(event.cause, str)

    def refused(self, event: observe.FenceRefused) -> None:
        assert_type(event.fence, holdfast.Fence)


def connect() -> None:
    holdfast.connect("memory://", observers=[Mine(), observe.Logging("INFO")])
    holdfast.connect_async("memory://", observers=(observe.OpenTelemetry(), observe.Prometheus()))
    holdfast.connect("memory://", observers=[print])  # type: ignore[list-item]
    locks = holdfast.connect("memory://")
    locks.lock("order:42", kind="order")
    locks.lock("order:42", kind=7)  # type: ignore[arg-type]
    assert_type(locks.inspect("a").kind, str)
    assert_type(observe.current(), observe.LockUse | None)
