"""Virtual time and faults for tests of code that uses locks, on the memory store.

A ``VirtualClock`` stands still until the test moves it. It replaces the threads of its clients:
``advance`` renews what is due, ends what is over and calls what is to be called, in order, before
it returns. A ``FaultStore`` is a memory store of one test that can be made unreachable. The pytest
plugin of Holdfast has fixtures for all of these: see the guide "Test with pytest".

>>> clock = VirtualClock()
>>> with FaultStore(clock).connect() as locks, locks.lock("report", ttl=30) as lease:
...     clock.advance(3600)  # renewed every ten seconds
...     lease.held
True
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import holdfast
from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Page, Runtime, Settings, Signal, Store
from holdfast.core.drive import run_now
from holdfast.core.engine import Engine
from holdfast.core.hold import NEVER
from holdfast.core.renewer import Renewer
from holdfast.durations import Duration, seconds
from holdfast.errors import BackendUnavailable
from holdfast.io.runtime_aio import AsyncioRuntime, AsyncSignal
from holdfast.io.runtime_blocking import BlockingRuntime, BlockingSignal
from holdfast.io.threads import RenewerThread, callbacks
from holdfast.locks import Locks
from holdfast.locks_async import AsyncLocks
from holdfast.stores.memory import Ledger, MemoryBackend, MemoryName, MemoryStore

__all__ = ["FaultStore", "LockFaults", "VirtualClock"]

POLL_SECONDS = 0.01
"""How soon, in real time, waits of other threads and of tasks see that the clock was moved."""
STANDS_STILL_SECONDS = 30.0
"""After so much real time a wait that nothing ends fails, and says so."""
LONGEST_WAIT_SECONDS = 24 * 3600.0
"""By how much waits of the test's own thread may move the clock in all."""
MOST_ROUNDS = 1000
CALLBACK_SECONDS = 5.0
PACKAGE = str(Path(holdfast.__file__).parent)


class VirtualClock:
    """A clock that stands still until ``advance`` moves it.

    A wait in the thread that made the clock moves it, too: ``acquire(timeout=5)`` of a busy lock
    fails at once, five seconds later. Waits of other threads, and of tasks, end when the test
    moves the clock.
    """

    def __init__(self) -> None:
        self._start, self._now = time.time(), 0.0
        self._thread = threading.get_ident()
        self._stepping = threading.RLock()
        self._waited = 0.0
        self.renewers: dict[int, Renewer] = {}
        """The renewers of its clients, by id: they run when the clock is moved."""

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def wall(self) -> float:
        """Seconds since the epoch: the time at which the clock was made, and what it moved."""
        return self._start + self._now

    def advance(self, by: Duration) -> None:
        """Moves the clock; what is due on the way is done in its order: renewals, expiry, calls of
        ``on_lost``."""
        until = self._now + seconds(by, "advance()", zero=True)
        self._waited = 0.0
        while self.step(until):
            pass

    def jump(self, by: Duration) -> None:
        """Moves the clock in one step, as if the whole process had stood still for so long: what
        was due on the way is late."""
        with self._stepping:
            self._now += seconds(by, "jump()", zero=True)
        self.settle()

    def settle(self) -> None:
        """Does what is due now."""
        for _ in range(MOST_ROUNDS):
            with self._stepping:
                due = [r for r in list(self.renewers.values()) if r.planned <= self._now]
                for renewer in due:
                    _run_round(renewer)
            if not due:
                return
            _finish_callbacks()  # without the mutex: a callback may use a client
        raise RuntimeError(f"the renewers are not done after {MOST_ROUNDS} rounds")

    def step(self, until: float) -> bool:
        """Moves the clock to what is due next, or to ``until``; returns whether there is more."""
        self.settle()
        with self._stepping:
            due = min((r.planned for r in list(self.renewers.values())), default=NEVER)
            more = due < until
            self._now = max(self._now, min(due, until))
        self.settle()
        return more

    def wait(self, signal: Signal | None, until: float) -> None:
        """A wait of a blocking client: returns when the signal is set or the time is over."""
        if threading.get_ident() == self._thread:
            self._wait_here(signal, until)
            return
        limit = time.monotonic() + STANDS_STILL_SECONDS
        while not _is_over(self, signal, until, limit):
            if isinstance(signal, BlockingSignal):
                signal.wait(POLL_SECONDS)
            else:
                time.sleep(POLL_SECONDS)

    def _wait_here(self, signal: Signal | None, until: float) -> None:
        while not (signal is not None and signal.is_set()) and self._now < until:
            began = self._now
            self.step(until)
            self._waited += self._now - began
            if self._waited > LONGEST_WAIT_SECONDS:
                raise RuntimeError(
                    "this test waits for ever: its thread waits for a lock, and nothing has "
                    "released it in a day of virtual time"
                )


def _is_over(clock: VirtualClock, signal: Signal | None, until: float, limit: float) -> bool:
    """Whether a wait has ended; raises ``RuntimeError`` after the limit, in real time."""
    if (signal is not None and signal.is_set()) or clock.now() >= until:
        return True
    if time.monotonic() > limit:
        raise RuntimeError(
            f"a wait in virtual time has not ended in {STANDS_STILL_SECONDS:.0f} s: move the clock "
            "from the test by advance(), or release what it waits for"
        )
    return False


def _run_round(renewer: Renewer) -> None:
    """What the thread of a renewer does when it wakes."""
    renewer.plans.clear()
    renewer.planned = NEVER
    due = run_now(renewer.round())
    renewer.planned = min(renewer.planned, due)


def _finish_callbacks() -> None:
    """Returns when the calls of ``on_lost`` are done: they have a thread of their own."""
    if threading.current_thread().name == "holdfast-callbacks":
        return
    done = threading.Event()
    callbacks.prepare()
    callbacks.call(lambda _: done.set(), "")
    done.wait(CALLBACK_SECONDS)


class _VirtualRuntime(BlockingRuntime):
    """The blocking runtime on a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.now, self.wall = clock.now, clock.wall

    async def wait(self, signal: Signal, until: float | None) -> bool:
        self.clock.wait(signal, NEVER if until is None else until)
        return signal.is_set()

    async def sleep(self, seconds: float) -> None:
        self.clock.wait(None, self.now() + seconds)


class _VirtualAsyncioRuntime(AsyncioRuntime):
    """The asyncio runtime on a virtual clock: tasks wait until the test moves it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.now, self.wall = clock.now, clock.wall

    async def wait(self, signal: Signal, until: float | None) -> bool:
        assert isinstance(signal, AsyncSignal)
        end, limit = NEVER if until is None else until, time.monotonic() + STANDS_STILL_SECONDS
        while not _is_over(self.clock, signal, end, limit):
            await signal.wait(POLL_SECONDS)
        return signal.is_set()

    async def sleep(self, seconds: float) -> None:
        await self.wait(self.signal(), self.now() + seconds)


class _SteppedRenewer(RenewerThread):
    """A renewer without a thread: the clock runs it."""

    def __init__(self, store: Store, clock: VirtualClock) -> None:
        super().__init__(store, _VirtualRuntime(clock))
        self._clock = clock

    def start(self) -> None:
        if not self.renewer.closing:
            self._clock.renewers[id(self.renewer)] = self.renewer

    def end(self, seconds: float | None) -> None:
        self._clock.renewers.pop(id(self.renewer), None)
        super().end(seconds)


class _FaultBackend(MemoryBackend):
    """Raises while its store is down, and notes where each hold was acquired."""

    def __init__(self, store: FaultStore, runtime: Runtime) -> None:
        super().__init__(store.ledger, store.display, runtime)
        self._store = store

    def _name(self, key: str) -> MemoryName:  # every request passes through here, and ``survey``
        self._store.refuse_if_down()
        return super()._name(key)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        self._store.refuse_if_down()
        return await super().survey(prefix, cursor, limit)

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        answer = await super().attempt(claim, join=join, until=until)
        if isinstance(answer, Grant):
            self._store.places[claim.name] = _calling_line()
        return answer


def _calling_line() -> str:
    """The file and line outside this package that acquires."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(PACKAGE):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"


class FaultStore(MemoryStore):
    """A memory store of one test, which can be made unreachable; with a clock, in virtual time."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        runtime = BlockingRuntime if clock is None else clock
        super().__init__(Ledger(runtime.now, runtime.wall), "memory://test")
        self.clock = clock
        self.down = False
        """Whether every request fails with ``BackendUnavailable``."""
        self.places: dict[str, str] = {}
        """By name: the file and line that acquired it last."""

    def refuse_if_down(self) -> None:
        """Raises ``BackendUnavailable`` while the store is down."""
        if self.down:
            raise BackendUnavailable(f"{self.display} can't be reached: an outage of this test")

    def backend(self, runtime: Runtime) -> MemoryBackend:
        return _FaultBackend(self, runtime)

    def connect(self, **settings: Any) -> Locks:
        """A blocking client of this store, with the settings of ``holdfast.connect``."""
        return _TestLocks(self, **settings)

    def connect_async(self, **settings: Any) -> AsyncLocks:
        """An asyncio client of this store, with the settings of ``holdfast.connect_async``."""
        return _TestAsyncLocks(self, **settings)


class _TestLocks(Locks):
    def __init__(self, store: FaultStore, **settings: Any) -> None:
        self._store = store
        super().__init__(store, **settings)
        clock = store.clock
        if clock is not None:
            self._engine.on_enter = lambda engine: clock.settle()

    def _open(self, url: str | object, settings: Settings) -> Store:
        return self._store

    def _new_renewer(self, store: Store) -> RenewerThread:
        return _renewer_of(self._store)

    def _new_runtime(self) -> BlockingRuntime:
        clock = self._store.clock
        return super()._new_runtime() if clock is None else _VirtualRuntime(clock)


class _TestAsyncLocks(AsyncLocks):
    def __init__(self, store: FaultStore, **settings: Any) -> None:
        self._store = store
        super().__init__(store, **settings)
        clock, guard = store.clock, self._engine.on_enter

        def enter(engine: Engine) -> None:
            assert guard is not None
            guard(engine)
            if clock is not None:
                clock.settle()

        self._engine.on_enter = enter

    def _open(self, url: str | object, settings: Settings) -> Store:
        return self._store

    def _new_renewer(self, store: Store) -> RenewerThread:
        return _renewer_of(self._store)

    def _new_runtime(self) -> AsyncioRuntime:
        clock = self._store.clock
        return super()._new_runtime() if clock is None else _VirtualAsyncioRuntime(clock)


def _renewer_of(store: FaultStore) -> RenewerThread:
    return RenewerThread(store) if store.clock is None else _SteppedRenewer(store, store.clock)


class LockFaults:
    """What can happen to locks in production, for a store in virtual time."""

    def __init__(self, store: FaultStore, clock: VirtualClock) -> None:
        self._store, self._clock = store, clock
        self._other = store.connect(timeout=0)

    def lose(self, name: str, reason: str = "lock_faults.lose()") -> None:
        """Another client breaks the lock; its holder learns that now, and with this reason. Raises
        ``ValueError`` if nothing holds the name."""
        self._held(name)
        self._other.break_lock(name, reason=reason)
        for renewer in list(self._clock.renewers.values()):
            renewer.renew_all()
        self._clock.settle()

    def expire(self, name: str) -> None:
        """The process stands still until the hold of this name is over, as in a long pause. Raises
        ``ValueError`` if nothing holds the name."""
        self._clock.jump(self._held(name))

    def pause(self, seconds: Duration) -> None:
        """The process stands still for so long: nothing is renewed meanwhile."""
        self._clock.jump(seconds)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The store can't be reached in this block; holds last until their certain time is over."""
        self._store.down = True
        try:
            yield
        finally:
            self._store.down = False

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Another process holds the lock in this block."""
        with self._other.lock(name, note="lock_faults.busy()"):
            yield

    def close(self) -> None:
        """Ends the client that plays the other process."""
        self._other.close()

    def _held(self, name: str) -> float:
        """How long the holds of the name will last in the store."""
        holders = self._other.inspect(name).holders
        if not holders:
            raise ValueError(f"nothing holds {name!r}, so it can't be lost")
        return max(holder.remaining for holder in holders)
