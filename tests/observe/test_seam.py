"""Events reach observers, cost nothing without them, and never break locking."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

import holdfast
from holdfast import observe
from holdfast.core import events as core_events
from holdfast.core.events import MOST_KINDS, cause_of
from holdfast.io import threads
from holdfast.stores._sql import advisory
from holdfast.stores.consul import session as consul_session
from holdfast.stores.etcd import session as etcd_session
from holdfast.stores.zookeeper import backend as zookeeper

from .recorder import Recorder, wait_until

EVENTS = [
    *("waiting", "acquired", "timed_out", "cancelled", "renewed", "doubtful", "lost", "released"),
    *("broken", "unreachable", "reachable", "refused", "ran", "leading", "requested"),
]


def test_an_observer_has_a_method_for_every_event() -> None:
    """Each does nothing: an observer overrides those that it wants."""
    for word in EVENTS:
        assert getattr(observe.Observer(), word)(None) is None
    kinds = [value for value in vars(core_events).values() if hasattr(value, "word")]
    assert {kind.word for kind in kinds if isinstance(getattr(kind, "word", None), str)} == {
        *EVENTS
    }


def test_a_hold() -> None:
    seen = Recorder()
    with (
        holdfast.connect("memory://seam-hold", observers=[seen]) as locks,
        locks.lock("order:42", note="n") as lease,
    ):
        pass
    acquired, released = (event for event in seen.events if event.word != "requested")
    assert (acquired.word, released.word) == ("acquired", "released")
    assert acquired.use is released.use
    assert (acquired.name, acquired.kind, acquired.token) == ("order:42", "order", lease.token)
    assert (acquired.store, acquired.contended) == ("memory://seam-hold", False)
    assert released.ours is True
    assert released.seconds >= 0
    assert [event.operation for event in seen.of("requested")] == ["attempt", "release"]


def test_a_wait_and_a_timeout() -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-wait", observers=[seen]) as locks, locks.lock("a"):
        thread = threading.Thread(target=lambda: locks.lock("a").acquire(timeout=0.05))
        thread.start()
        thread.join()
    assert seen.words("requested") == ["acquired", "waiting", "timed_out", "released"]
    assert seen.of("waiting")[0].place == 0
    assert seen.of("timed_out")[0].seconds >= 0.05


def test_a_loss_is_told_on_the_delivering_thread_and_once() -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-lost", observers=[seen]) as locks:
        lease = locks.lock("a", ttl=0.3, renew=False).acquire()
        assert lease is not None
        lost = seen.wait_for("lost")
        hold = lease._hold
        locks._engine.renewer.declare_lost(hold, "again, after an interrupt")
        threads.deliveries.flush(30)
    assert (lost.cause, lost.reason) == ("expired", "its ttl is over")
    assert len([event for event in seen.of("lost") if event.name == "a"]) == 1
    assert seen.of("released") == []
    assert seen.threads["lost"] == seen.threads["doubtful"] == {"holdfast-observers"}


class Slowly(Recorder):
    """Takes its time with a loss."""

    def lost(self, event: observe.Lost) -> None:
        time.sleep(0.3)
        self._tell(event)


def test_the_end_of_a_client_is_told_before_close_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "DELIVERY_SECONDS", 30.0)
    seen = Slowly()
    locks = holdfast.connect("memory://seam-close", observers=[seen])
    lease = locks.lock("a").acquire()
    with pytest.warns(ResourceWarning):
        locks.close()
    assert lease is not None
    assert [event.cause for event in seen.of("lost")] == ["closed"]


def test_a_dropped_lease_is_told_as_released() -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-dropped", observers=[seen]) as locks:
        lease = locks.lock("a").acquire()
        with pytest.warns(ResourceWarning):
            del lease
        assert seen.wait_for("released").ours is None


class Raises(observe.Observer):
    """Fails at every event."""

    def acquired(self, event: observe.Acquired) -> None:
        raise ValueError("from the observer")

    def released(self, event: observe.Released) -> None:
        raise ValueError("from the observer")

    def lost(self, event: observe.Lost) -> None:
        raise ValueError("from the observer")

    def traceparent(self, use: observe.LockUse) -> str:
        raise ValueError("from the observer")


def test_an_observer_that_raises_is_logged_once_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-raises", observers=[Raises(), seen]) as locks:
        for _ in range(3):
            with locks.lock("a") as lease:
                assert lease.held
    assert seen.words("requested") == ["acquired", "released"] * 3
    logged = [record for record in caplog.records if "Raises" in record.getMessage()]
    assert sorted(record.getMessage().split()[0] for record in logged) == [
        *("acquired", "released", "traceparent"),
    ]
    assert all(record.exc_info for record in logged)


class Traced(observe.Observer):
    """Gives the same text for every acquire, and remembers for how many."""

    def __init__(self, text: Any) -> None:
        self.text, self.asked = text, 0

    def traceparent(self, use: observe.LockUse) -> str:
        self.asked += 1
        return self.text  # type: ignore[no-any-return]


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "text",
    [b"00-x", 42, "\ud800", "x" * 200_000, TRACEPARENT.encode(), TRACEPARENT[:-1] + "\n"],
    ids=["bytes", "number", "surrogate", "long", "bytes of a traceparent", "newline"],
)
def test_what_is_no_traceparent_is_not_stored(text: Any, caplog: pytest.LogCaptureFixture) -> None:
    observers = [Traced(text), Traced(TRACEPARENT)]
    with holdfast.connect("memory://seam-traced", observers=observers) as locks:
        for _ in range(2):
            with locks.lock("a"):
                [holder] = locks.inspect("a").holders
                assert holder.traceparent == TRACEPARENT
    [record] = [record for record in caplog.records if "of the observer" in record.getMessage()]
    assert "Traced" in record.getMessage()
    assert "no W3C traceparent" in caplog.text


def test_every_observer_is_asked_for_a_traceparent() -> None:
    """An observer of traces begins its span there."""
    first, second = Traced(TRACEPARENT), Traced(TRACEPARENT.replace("0af", "fff"))
    with (
        holdfast.connect("memory://seam-traces", observers=[first, second]) as locks,
        locks.lock("a"),
    ):
        assert locks.inspect("a").holders[0].traceparent == TRACEPARENT
    assert (first.asked, second.asked) == (1, 1)


def test_a_slow_observer_delays_neither_the_watcher_nor_a_renewal() -> None:
    """The block of the second lock is told of its end while the observer of the first sleeps."""
    go_on = threading.Event()

    class Slow(observe.Observer):
        def doubtful(self, event: observe.Doubtful) -> None:
            go_on.wait(60)

    with holdfast.connect("memory://seam-slow", observers=[Slow()]) as locks:
        first = locks.lock("a", ttl=0.5, renew=False).acquire()
        kept = locks.lock("b", ttl=1.0).acquire()
        assert first is not None
        assert kept is not None
        reasons: list[str] = []
        first.on_lost(reasons.append)
        wait_until(lambda: bool(reasons), "on_lost")
        for _ in range(3):  # longer than its ttl
            assert not go_on.wait(0.5)
            assert kept.held
        go_on.set()
        kept.release()


def test_the_queue_of_events_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "MOST_DELIVERIES", 10)
    go_on, told = threading.Event(), []

    def tell(number: int) -> None:
        go_on.wait(60)
        told.append(number)

    deliveries = threads._Deliveries()
    deliveries.prepare()
    for number in range(100):
        deliveries.call(tell, number)
    assert deliveries.dropped >= 80
    go_on.set()
    deliveries.flush(30)
    assert told == list(range(len(told)))
    assert len(told) <= 12
    assert any("events were dropped" in line for line in caplog.messages)


def test_no_end_of_a_hold_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gauges count for ever what is no longer held."""
    monkeypatch.setattr(threads, "MOST_DELIVERIES", 3)
    go_on = threading.Event()

    class Slow(Recorder):
        def lost(self, event: observe.Lost) -> None:
            go_on.wait(60)
            self._tell(event)

    seen, url = Slow(), "memory://seam-ends"
    with holdfast.connect(url, observers=[seen]) as locks, holdfast.connect(url) as other:
        leases = [locks.lock(f"order:{number}").acquire() for number in range(8)]
        for number in range(8):
            other.break_lock(f"order:{number}", reason="a test")
        wait_until(lambda: all(lease and lease.lost for lease in leases), "the losses")
        go_on.set()
        wait_until(lambda: len(seen.of("lost")) == 8, "all of them are told")
    assert all(event.use.ended for event in seen.of("lost"))


def test_a_stuck_observer_delays_the_first_close_only() -> None:
    deliveries, go_on = threads._Deliveries(), threading.Event()
    deliveries.prepare()
    deliveries.call(lambda _: go_on.wait(60), None)
    deliveries.flush(threads.DELIVERY_SECONDS)
    began = time.monotonic()
    deliveries.flush(30)
    assert time.monotonic() - began < 15
    told: list[int] = []
    go_on.set()
    deliveries.call(told.append, 1)
    wait_until(lambda: bool(told), "the observer goes on")
    deliveries.call(lambda _: time.sleep(0.3), None)
    deliveries.call(told.append, 2)
    deliveries.flush(30)
    assert told == [1, 2]


def test_a_flush_without_time_says_nothing_about_the_observer() -> None:
    """At the exit of the process each client is first ended without waiting, then with it."""
    deliveries = threads._Deliveries()
    told: list[int] = []
    deliveries.prepare()
    deliveries.call(lambda _: time.sleep(0.5), None)
    deliveries.call(told.append, 1)
    deliveries.flush(0.0)
    deliveries.flush(30)
    assert told == [1]


def test_an_asyncio_client() -> None:
    seen = Recorder()

    async def main() -> None:
        url = "memory://seam-aio"
        async with holdfast.connect_async(url, observers=[seen]) as locks, locks.lock("a"):
            task = asyncio.ensure_future(locks.lock("a").acquire())
            await asyncio.to_thread(seen.wait_for, "waiting")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert seen.words("requested") == ["acquired", "waiting", "cancelled", "released"]
    assert seen.of("cancelled")[0].outcome == "cancelled"


def test_an_interrupt_in_an_observer_leaves_no_hold() -> None:
    """Ctrl-C while ``acquired`` is told: the hold is undone, and told as released."""

    class Interrupted(Recorder):
        def acquired(self, event: observe.Acquired) -> None:
            self._tell(event)
            raise KeyboardInterrupt

    seen = Interrupted()
    with holdfast.connect("memory://seam-interrupt", observers=[seen]) as locks:
        with pytest.raises(KeyboardInterrupt):
            locks.lock("a").acquire()
        wait_until(lambda: not locks.inspect("a").holders, "undone")
    assert seen.words("requested") == ["acquired", "released"]


def test_a_fork_tells_nothing() -> None:
    """The parent still holds it."""
    seen = Recorder()
    with holdfast.connect("memory://seam-fork", observers=[seen]) as locks, locks.lock("a"):
        child = os.fork()
        if child == 0:
            with locks.lock("b"):  # starts the thread that delivers events
                threads.deliveries.flush(30)
            told = seen.words("requested", "renewed")
            os._exit(0 if told == ["acquired", "acquired", "released"] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_is_in_no_block() -> None:
    observers = [observe.Observer()]
    with holdfast.connect("memory://seam-child", observers=observers) as locks, locks.lock("a"):
        child = os.fork()
        if child == 0:
            os._exit(0 if observe.current() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        current = observe.current()
        assert current is not None
        assert current.name == "a"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RuntimeError(), "failed"),
        (OSError(), "failed"),
        (holdfast.BackendUnavailable("away"), "unreachable"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
    ],
)
def test_outcomes(error: BaseException, outcome: str) -> None:
    assert core_events._outcome(error) == outcome


def test_a_fence_is_refused_while_clients_are_made() -> None:
    """Reading the clients must raise nothing in place of ``StaleFence``."""

    def make() -> core_events.Events:
        return core_events.Events([], "", time.monotonic, lambda *_: None, lambda: None)

    def churn() -> None:
        while not done.is_set():
            _ = [make() for _ in range(50)]

    done, kept = threading.Event(), [make() for _ in range(2000)]
    fence = holdfast.Fence("a", holdfast.Mode.EXCLUSIVE, (), 0, 1)
    thread, interval = threading.Thread(target=churn), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(500):
            core_events.refused(fence, "r")
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert len(core_events._clients) >= len(kept)


def test_jobs_and_elections() -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-jobs", observers=[seen]) as locks:
        job = locks.once("report:1")
        job.run(lambda: 1)
        job.run(lambda: 1)
        with pytest.raises(ZeroDivisionError):
            locks.once("report:2").run(lambda: 1 / 0)
        with locks.election("leader").campaign():
            pass
    assert [event.outcome for event in seen.of("ran")] == ["ran", "skipped", "failed"]
    assert {event.kind for event in seen.of("ran")} == {"once/report"}
    assert [event.leading for event in seen.of("leading")] == [True, False]


def test_a_broken_lock() -> None:
    seen = Recorder()
    with holdfast.connect("memory://seam-broken", observers=[seen]) as locks:
        lease = locks.lock("order:42", kind="sale").acquire()
        assert lease is not None
        locks.break_lock("order:42", reason="stuck")
        assert seen.wait_for("lost").cause == "broken"
    [broken] = seen.of("broken")
    assert (broken.name, broken.kind, broken.reason) == ("order:42", "sale", "stuck")
    assert broken.tokens == (lease.token,)


def test_a_refused_fence(tmp_path: Any) -> None:
    from holdfast.fencing import file

    seen = Recorder()
    with holdfast.connect("memory://seam-fence", observers=[seen]) as locks:
        path = tmp_path / "ledger"
        old = locks.lock("order:42").acquire()
        assert old is not None
        stale = old.fence
        old.release()
        with locks.lock("order:42") as lease, file.guard(path, lease) as guarded:
            guarded.write(b"new")
        with pytest.raises(holdfast.StaleFence), file.guard(path, stale):
            pass
    [refused] = seen.of("refused")
    assert refused.fence == stale
    assert "ledger" in refused.resource


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("it could not be renewed in time: redis at h:1 does not answer", "expired"),
        ("its certain time is over", "expired"),
        ("max_hold is over", "max_hold"),
        ("it was broken by web-1 pid 7: the session was stuck", "broken"),
        (etcd_session.BROKEN, "broken"),
        (consul_session.BROKEN, "broken"),
        (zookeeper.SESSION_ENDED, "session"),
        ("its Consul session ran out or was destroyed", "session"),
        (advisory.LOST, "session"),
        (zookeeper.NODE_GONE, "gone"),
        ("it ran out or was broken, and is no longer stored", "gone"),
        ("its client was closed", "closed"),
    ],
)
def test_causes_are_few(reason: str, cause: str) -> None:
    """A label of a metric must not have a text of its own for every loss."""
    assert cause_of(reason) == cause


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"holdfast\.observe\.Observer"):
        holdfast.connect("memory://", observers=[print])  # type: ignore[list-item]


def test_the_environment_names_observers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_OBSERVE", "logging")
    caplog.set_level(logging.INFO, "holdfast")
    with holdfast.connect("memory://seam-environment") as locks, locks.lock("a"):
        pass
    assert [line.split()[0] for line in caplog.messages] == ["granted", "released"]


def test_a_word_that_the_environment_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_OBSERVE", "loging")
    with pytest.raises(ValueError, match="known are logging, opentelemetry, prometheus"):
        holdfast.connect("memory://")


def test_an_observer_of_the_whole_process() -> None:
    seen = Recorder()
    observe.install(seen)
    try:
        with holdfast.connect("memory://seam-installed") as locks, locks.lock("a"):
            pass
    finally:
        observe.uninstall(seen)
    with holdfast.connect("memory://seam-installed") as locks, locks.lock("a"):
        pass
    assert seen.words("requested") == ["acquired", "released"]


def test_nothing_is_imported_without_observers() -> None:
    program = (
        "import sys, holdfast\n"
        "with holdfast.connect('memory://light') as locks, locks.lock('a'): pass\n"
        "print([m for m in sys.modules if 'observe' in m or m.endswith('core.events')])"
    )
    environment = {name: text for name, text in os.environ.items() if name != "HOLDFAST_OBSERVE"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


def test_without_observers_the_seam_costs_less_than_a_hundredth_of_a_hold() -> None:
    """In instructions of the interpreter, on the store that has the fewest of them. Beside the
    functions counted here there are eight comparisons with ``None``, of three instructions each;
    and ``tracer`` ran twice before there was a seam."""
    counts = {"all": 0, "seam": 0}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counts["all"] += 1
            counts["seam"] += frame.f_code.co_name == "observing"
        return trace

    with holdfast.connect("memory://seam-cost") as locks:
        lock = locks.lock("order:42")
        for _ in range(20):
            with lock:
                pass
        sys.settrace(trace)
        try:
            for _ in range(20):
                with lock:
                    pass
        finally:
            sys.settrace(None)
    assert counts["seam"] > 0
    assert counts["seam"] < 0.01 * counts["all"]


def test_more_than_a_hundred_kinds_become_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core_events, "_kinds", set())
    kinds = [core_events.limited(f"kind-{number}") for number in range(MOST_KINDS + 5)]
    assert kinds == [f"kind-{number}" for number in range(MOST_KINDS)] + ["other"] * 5
    assert core_events.limited("kind-7") == "kind-7"
    [line] = [line for line in caplog.messages if "kinds of locks" in line]
    assert "'kind-100'" in line
