"""An observer is user code: it may block, raise, be interrupted, or use locks. The hold does not
suffer, and every acquire and every hold is told one end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NoReturn

import pytest
from prometheus_client import CollectorRegistry

import holdfast
from holdfast import observe
from holdfast.core.hold import State

from .recorder import Recorder, wait_until


class Acts(Recorder):
    """Does something, once, when it is told of an event."""

    def __init__(self, word: str, act: Callable[[Any], object]) -> None:
        super().__init__()
        self._word, self._act = word, act

    def _tell(self, event: Any) -> None:
        super()._tell(event)
        if event.word == self._word:
            self._word = ""
            self._act(event)

    waiting = acquired = timed_out = cancelled = renewed = doubtful = lost = released = _tell
    broken = unreachable = reachable = refused = ran = leading = requested = _tell


def interrupt(_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_observer_that_takes_the_same_name_does_not_end_the_hold(reentrant: bool) -> None:
    """It gets ``AlreadyHeld``, or a handle of its own: the block that is being entered goes on."""
    taken: list[bool] = []

    def take(event: observe.Acquired) -> None:
        with locks.lock(event.name, timeout=5, reentrant=reentrant) as again:
            taken.append(again.held)

    seen, url = Acts("acquired", take), "memory://user-same"
    with holdfast.connect(url, observers=[seen]) as locks, holdfast.connect(url) as other:
        with locks.lock("a") as lease:
            time.sleep(0.3)  # the renewer looks for holds without a handle meanwhile
            assert lease.held
            assert other.lock("a").acquire(timeout=0) is None
        assert taken == [True] * reentrant
    assert seen.words("requested") == ["acquired", "released"]
    assert seen.of("released")[0].ours is True


def test_an_observer_can_take_other_names_and_end_clients() -> None:
    def take(event: Any) -> None:
        with other.lock("log", timeout=5) as lease:
            assert lease.held

    for word in ("requested", "acquired", "released", "waiting", "timed_out"):
        seen, url = Acts(word, take), f"memory://user-other-{word}"
        with holdfast.connect(url, observers=[seen]) as locks, holdfast.connect(url) as other:
            with locks.lock("a") as lease:
                assert lease.held
            with other.lock("a"):
                assert locks.lock("a").acquire(timeout=0.05) is None
        assert word in seen.words()


@pytest.mark.parametrize("word", ["acquired", "requested"])
def test_a_hold_is_renewed_while_an_observer_blocks(word: str) -> None:
    """For longer than the ttl: the block is entered held."""
    seen = Acts(word, lambda _: time.sleep(1.5))
    with (
        holdfast.connect(f"memory://user-slow-{word}", observers=[seen]) as locks,
        locks.lock("a", ttl=0.6, timeout=5) as lease,
    ):
        assert lease.held
    assert seen.words("requested", "renewed") == ["acquired", "released"]
    assert [event.operation for event in seen.of("requested")].count("attempt") == 1


def test_a_block_is_not_entered_if_the_hold_has_ended_meanwhile() -> None:
    seen = Acts("acquired", lambda _: time.sleep(0.8))
    with holdfast.connect("memory://user-late", observers=[seen]) as locks:
        entered = []
        with pytest.raises(holdfast.LockLost), locks.lock("a", ttl=0.3, renew=False):
            entered.append(True)
        assert not entered
        seen.wait_for("lost")
    assert seen.words("requested", "doubtful") == ["acquired", "lost"]


def test_an_end_is_told_after_the_begin() -> None:
    """Although the delivering thread is free while the first observer of ``acquired`` blocks."""
    slow, seen = Acts("acquired", lambda _: time.sleep(0.8)), Recorder()
    with holdfast.connect("memory://user-order", observers=[slow, seen]) as locks:
        with pytest.raises(holdfast.LockLost):
            locks.lock("a", ttl=0.3, renew=False).acquire()
        seen.wait_for("lost")
    for each in (slow, seen):
        assert each.words("requested", "doubtful") == ["acquired", "lost"]


def test_no_end_is_told_of_a_hold_that_was_not_told() -> None:
    """An interrupt between the grant and ``acquired``, and the renewer loses it meanwhile."""
    seen = Recorder()
    with holdfast.connect("memory://user-untold", observers=[seen]) as locks:
        own = locks._engine.own

        def interrupted(hold: Any, me: Any, *, block: bool) -> NoReturn:
            own(hold, me, block=block)
            locks._engine.renewer.lose(hold, "a test")
            raise KeyboardInterrupt

        locks._engine.own = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            locks.lock("a").acquire()
    assert seen.words("requested") == ["cancelled"]


@pytest.mark.parametrize("word", ["acquired", "released", "waiting", "cancelled", "leading"])
def test_an_interrupt_in_one_observer_keeps_no_event_from_the_others(word: str) -> None:
    """What Prometheus counts as held, waiting and leading comes back to zero."""
    registry = CollectorRegistry()
    observers = [Acts(word, interrupt), observe.Prometheus(registry), Acts(word, interrupt)]
    url = f"memory://user-interrupt-{word}"
    with holdfast.connect(url, observers=observers) as locks, holdfast.connect(url) as other:
        with pytest.raises(KeyboardInterrupt), locks.election("leader").campaign():
            raise KeyboardInterrupt
        threading.Timer(0.3, locks.close).start()
        with other.lock("leader"), pytest.raises((KeyboardInterrupt, holdfast.HoldfastError)):
            locks.lock("leader").acquire()
    for state in ("held", "waiting"):
        labels = {"kind": "leader", "state": state}
        assert not registry.get_sample_value("holdfast_locks", labels), state
    assert registry.get_sample_value("holdfast_leader", {"kind": "leader"}) == 0


def test_an_interrupt_at_the_answer_of_a_release_is_told_as_released() -> None:
    seen = Recorder()
    first = Acts("", interrupt)
    with holdfast.connect("memory://user-release", observers=[first, seen]) as locks:
        with pytest.raises(KeyboardInterrupt), locks.lock("a"):
            first._word = "requested"
        assert not locks.inspect("a").holders
    assert seen.words("requested") == ["acquired", "released"]


async def _unavailable(*_: object, **__: object) -> NoReturn:
    raise holdfast.BackendUnavailable("no answer")


def test_an_interrupt_at_a_failed_release_leaves_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    first, url = Acts("", interrupt), "memory://user-failed-release"
    with holdfast.connect(url, observers=[first]) as locks, holdfast.connect(url) as other:
        lease = locks.lock("a").acquire()
        assert lease is not None
        monkeypatch.setattr(locks._engine.backend, "release", _unavailable)
        first._word = "requested"
        with pytest.raises(KeyboardInterrupt):
            lease.release()
        wait_until(lambda: not other.inspect("a").holders, "undone", 10)
    assert first.words("requested", "unreachable", "reachable") == ["acquired", "released"]


def test_an_interrupt_at_a_failed_attempt_leaves_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt has arrived; its answer was lost."""
    first, url = Acts("requested", interrupt), "memory://user-failed-attempt"
    with holdfast.connect(url, observers=[first]) as locks, holdfast.connect(url) as other:
        attempt = locks._engine.backend.attempt

        async def lost(*claim: Any, **options: Any) -> NoReturn:
            await attempt(*claim, **options)
            raise holdfast.BackendUnavailable("no answer")

        monkeypatch.setattr(locks._engine.backend, "attempt", lost)
        with pytest.raises(KeyboardInterrupt):
            locks.lock("a").acquire(timeout=0)
        wait_until(lambda: not other.inspect("a").holders, "undone", 10)
    assert first.words("requested", "unreachable", "reachable") == ["cancelled"]


def test_an_interrupt_while_the_trace_begins_is_told_as_cancelled() -> None:
    class Traces(Recorder):
        def traceparent(self, use: observe.LockUse) -> str:
            raise KeyboardInterrupt

    seen = Traces()
    with (
        holdfast.connect("memory://user-trace", observers=[seen]) as locks,
        pytest.raises(KeyboardInterrupt),
    ):
        locks.lock("a").acquire()
    assert seen.words() == ["cancelled"]


def test_an_observer_that_closes_the_client() -> None:
    """The block is not entered, and the end is told once."""
    seen = Acts("acquired", lambda _: locks.close())
    locks = holdfast.connect("memory://user-close", observers=[seen])
    with pytest.warns(ResourceWarning), pytest.raises(holdfast.LockLost), locks.lock("a"):
        raise AssertionError("entered")
    wait_until(lambda: bool(seen.of("lost")), "the loss")
    assert seen.words("requested", "renewed") == ["acquired", "lost"]


def test_an_undo_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder()
    with holdfast.connect("memory://user-undo", observers=[seen]) as locks:
        monkeypatch.setattr(locks._engine.renewer.backend, "abandon", _unavailable)
        lease = locks.lock("a").acquire()
        with pytest.warns(ResourceWarning):
            del lease
        wait_until(lambda: bool(seen.of("unreachable")), "the outage")
        [failed, *_] = [event for event in seen.of("requested") if event.error]
        assert (failed.operation, failed.error) == ("abandon", "BackendUnavailable")
        monkeypatch.undo()


def test_a_failed_job_is_told_when_that_is_recorded() -> None:
    seen = Acts("ran", interrupt)
    with holdfast.connect("memory://user-job", observers=[seen]) as locks:
        job = locks.once("report:1", errors="record")
        with pytest.raises(KeyboardInterrupt):
            job.run(lambda: 1 / 0)
        outcome = job.outcome()
    assert outcome is not None
    assert outcome.status == "failed"


def test_every_line_of_the_log_has_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    """Also the steps of a wait: a formatter that writes JSON needs no exception."""
    caplog.set_level(logging.DEBUG, "holdfast")
    url = "memory://user-log"
    with holdfast.connect(url) as locks, holdfast.connect(url) as other:
        held = other.lock("a").acquire()
        assert held is not None
        waiters = [
            threading.Thread(target=lambda: locks.lock("a").acquire(timeout=0.2)) for _ in range(2)
        ]
        for each in waiters:
            each.start()
        for each in waiters:
            each.join()
        held.release()
    with (
        holdfast.connect("redis://127.0.0.1:1/0") as away,
        pytest.raises(holdfast.BackendUnavailable),
    ):
        away.lock("a").acquire(timeout=0.5)
    parts = ("holdfast.lock", "holdfast.store", "holdfast.renew")
    records = [vars(record) for record in caplog.records if record.name in parts]
    steps = [record["holdfast"] for record in records]
    assert {"acquired", "busy", "woken", "timed_out", "unreachable"} <= {
        step.get("event") for step in steps
    }
    for step in steps:
        if step.get("event") in ("busy", "woken", "timed_out"):
            assert (step["name"], step["store"]) == ("a", url)


def test_a_loss_is_not_told_as_released() -> None:
    """Both ends at once: the store has lost the hold, and an observer is interrupted."""
    seen = Recorder()
    first, url = Acts("", interrupt), "memory://user-both"
    with holdfast.connect(url, observers=[first, seen]) as locks, holdfast.connect(url) as other:
        lease = locks.lock("a").acquire()
        assert lease is not None
        other.break_lock("a", reason="a test")
        first._word = "requested"
        copy_context().run(_interrupted, lease.release)
        seen.wait_for("lost")
        assert lease._hold.state is State.LOST
    assert seen.words("requested", "renewed") == ["acquired", "lost"]


def _interrupted(work: Callable[[], object]) -> None:
    with pytest.raises(KeyboardInterrupt):
        work()
