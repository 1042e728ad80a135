"""A kind is kept with holder and waiter, on every store, and shown where the store is read."""

from __future__ import annotations

import os
import threading

import pytest

import holdfast
from holdfast import Guarantee, observe
from holdfast.testing import Harness
from holdfast.testing.guarantees import guarantees_of

from .recorder import Recorder, wait_until

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced(observe.Observer):
    def traceparent(self, use: observe.LockUse) -> str:
        return TRACEPARENT


def test_every_store_keeps_kind_and_traceparent(harness: Harness) -> None:
    """Also beside the longest note, of a name with the longest kind."""
    namespace, kind = f"kinds-{os.getpid()}", "ü" * 64
    url, observers = harness.url, [Traced()]
    with (
        holdfast.connect(url, namespace=namespace, observers=observers) as locks,
        holdfast.connect(url, namespace=namespace, observers=observers) as others,
    ):
        waiter = threading.Thread(target=lambda: acquire_and_release(others, kind))
        with locks.lock("order:42", kind=kind, note="n" * 1024):
            info = locks.inspect("order:42")
            [holder] = info.holders
            assert (holder.kind, holder.traceparent, holder.note) == (kind, TRACEPARENT, "n" * 1024)
            assert info.kind == kind
            waiter.start()
            if Guarantee.FIFO in guarantees_of(harness):  # else the store has no queue to show
                wait_until(lambda: bool(locks.inspect("order:42").waiters), "a waiter")
                [waiting] = locks.inspect("order:42").waiters
                assert (waiting.kind, waiting.traceparent) == (kind, TRACEPARENT)
        waiter.join()


def acquire_and_release(locks: holdfast.Locks, kind: str) -> None:
    with locks.lock("order:42", kind=kind, timeout=60):
        pass


def test_where_a_kind_comes_from() -> None:
    seen = Recorder()
    with holdfast.connect("memory://kinds", observers=[seen]) as locks:

        @locks.lock("report:{day}")
        def report(day: str) -> str:
            return locks.inspect(f"report:{day}").kind

        @locks.lock("plain:name")
        def plain() -> str:
            return locks.inspect("plain:name").kind

        @locks.once("job:{day}")
        def job(day: str) -> None: ...

        assert report("monday") == "report:{day}"
        assert plain() == "plain"
        job("monday")
        with locks.lock("order:42"), locks.lock("no colon"), locks.lock(":x"):
            pass
        with locks.rwlock("book:1", kind="shelf").read(), locks.semaphore("slots:1", 2):
            pass
        with locks.multi(["a:1", "b:1"], kind="both"):
            pass
    assert [event.kind for event in seen.of("acquired")] == [
        *("report:{day}", "plain", "job:{day}", "order", "no colon", ":x", "shelf", "slots"),
        *("both", "both"),
    ]
    assert [event.kind for event in seen.of("ran")] == ["job:{day}"]


@pytest.mark.parametrize("kind", ["", "x" * 65, "a\nb"])
def test_a_kind_that_is_not_valid(kind: str) -> None:
    with (
        holdfast.connect("memory://kinds") as locks,
        pytest.raises(ValueError, match="one word for many names"),
    ):
        locks.lock("order:42", kind=kind)


def test_a_kind_is_text() -> None:
    with (
        holdfast.connect("memory://kinds") as locks,
        pytest.raises(TypeError, match="kind is text, not int"),
    ):
        locks.lock("order:42", kind=7)  # type: ignore[arg-type]
