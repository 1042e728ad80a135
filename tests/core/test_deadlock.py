"""Deadlocks: which circles are found, and that no search breaks or delays a wait."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import pytest

import holdfast
from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_holds, read_label, write_label
from holdfast.core import deadlock
from holdfast.core.deadlock import find_cycle, sentence, still_held
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable

EXCLUSIVE, SHARED, SLOTS = Mode.EXCLUSIVE, Mode.SHARED, Mode.SLOTS
SOON = 10.0


# ---- the search itself, on what a store would show


def holds(
    token: int, pid: int, mode: Mode = EXCLUSIVE, slots: tuple[int, ...] = (), thread: str = "t"
) -> Holder:
    return Holder("web", pid, thread, "", "", "", mode, token, slots, 0.0, 9.0)


def waits(pid: int, *held: tuple[str, int], mode: Mode = EXCLUSIVE, thread: str = "t") -> Waiter:
    return Waiter("web", pid, thread, "", "", "", mode, 0.0, 0, held)


class Picture:
    """What a store shows: by name, its holders and its waiters."""

    def __init__(self, **names: tuple[list[Holder], list[Waiter]]) -> None:
        self.names = names
        self.looks: list[str] = []
        self.after_looks: dict[int, Callable[[], None]] = {}
        self.limit = 0

    async def look(self, name: str) -> LockInfo:
        self.looks.append(name)
        holders, waiters = self.names.get(name, ([], []))
        info = LockInfo(name, self.limit, tuple(holders), tuple(waiters))
        self.after_looks.get(len(self.looks), lambda: None)()
        return info

    def clear(self, name: str, part: int) -> None:
        """The name has no holders (0), or no waiters (1), any longer."""
        holders, waiters = self.names[name]
        self.names[name] = ([], waiters) if part == 0 else (holders, [])

    def circle(self, name: str, *waiters: Waiter) -> str:
        """The names of the circle that these waiters for the name are in."""
        cycle = run_now(find_cycle(name, waiters, self.look))
        return "".join(member.name for member in cycle)


ME = waits(1, ("a", 10))
"""Holds "a", and waits for "b" or "c"."""


def test_two_that_wait_for_each_other() -> None:
    seen = Picture(a=([holds(10, 1)], [waits(2, ("b", 20))]), b=([holds(20, 2)], [ME]))
    assert seen.circle("b", ME) == "ba"
    cycle = run_now(find_cycle("b", [ME], seen.look))
    assert [member.holder.pid for member in cycle] == [2, 1]
    assert sentence(cycle) == (
        "deadlock: 'b' is held by web pid 2 (t), which waits for 'a', "
        "held by web pid 1 (t), which waits for 'b'"
    )


def three() -> Picture:
    """1 waits for 3, 3 waits for 2, 2 waits for 1."""
    return Picture(
        a=([holds(10, 1)], [waits(2, ("b", 20))]),
        b=([holds(20, 2)], [waits(3, ("c", 30))]),
        c=([holds(30, 3)], [ME]),
    )


def test_three_that_wait_for_each_other() -> None:
    seen = three()
    assert seen.circle("c", ME) == "cba"
    assert len(seen.looks) == 6  # each name twice: to find it, and to be sure


def test_a_chain_is_no_circle() -> None:
    seen = three()
    seen.names["c"] = ([holds(31, 4)], [ME])
    assert seen.circle("c", ME) == ""


def test_a_semaphore_of_one_slot_that_its_holder_waits_for() -> None:
    seen = Picture(a=([holds(10, 1, SLOTS, (0,))], [ME]))
    seen.limit = 1
    assert seen.circle("a", ME) == "a"


def test_a_waiter_that_holds_nothing_looks_at_nothing() -> None:
    seen = three()
    assert seen.circle("c", waits(9)) == ""
    assert seen.looks == []


def test_a_thread_of_the_same_name_is_another_thread() -> None:
    """The process of "b" waits for "a" in a thread that holds nothing, or something else."""
    for other in (waits(2), waits(2, ("b", 19)), waits(2, ("x", 20))):
        seen = Picture(a=([holds(10, 1)], [other]), b=([holds(20, 2)], [ME]))
        assert seen.circle("b", ME) == ""


def test_a_token_of_another_process_is_another_hold() -> None:
    """Readers may have the same one; and labels may lie."""
    seen = Picture(a=([holds(10, 1)], [waits(2, ("b", 20))]), b=([holds(20, 3)], [ME]))
    assert seen.circle("b", ME) == ""


def test_a_hold_that_is_over_is_no_member() -> None:
    for gone in "abc":
        seen = three()
        seen.names[gone] = ([], seen.names[gone][1])
        assert seen.circle("c", ME) == ""


def test_a_hold_that_ends_while_it_is_looked_at() -> None:
    """What was seen at different moments is no circle until all of it is seen again."""
    for name in "abc":
        for part in (0, 1):
            if (name, part) == ("c", 1):
                continue  # the own wait, which the caller knows
            seen = three()

            seen.after_looks[3] = partial(seen.clear, name, part)
            assert seen.circle("c", ME) == ""
            assert len(seen.looks) == 6


@pytest.mark.parametrize(
    ("limit", "slots", "found"), [(1, (0,), "ba"), (2, (0, 1), "ba"), (2, (1,), "")]
)
def test_some_slots_of_a_semaphore_block_nobody(
    limit: int, slots: tuple[int, ...], found: str
) -> None:
    """Another holder may leave: only one that has all of the slots is sure to block."""
    mine, theirs = holds(10, 1, SLOTS, slots), waits(2, ("b", 20), mode=SLOTS)
    seen = Picture(a=([mine], [theirs]), b=([holds(20, 2)], [ME]))
    seen.limit = limit
    assert seen.circle("b", ME) == found
    assert seen.circle("a", theirs) == found[::-1]  # as the other one sees it


def test_a_reader_blocks_a_writer() -> None:
    """All readers must leave; each of them blocks it, whatever the others do."""
    readers = [holds(11, 7, SHARED), holds(10, 1, SHARED)]
    seen = Picture(a=(readers, [waits(2, ("b", 20))]), b=([holds(20, 2)], [ME]))
    assert seen.circle("b", ME) == "ba"


@pytest.mark.parametrize("writer_waits", [True, False])
def test_a_reader_blocks_a_reader_only_through_a_writer(writer_waits: bool) -> None:
    reader = waits(2, ("b", 20), mode=SHARED)
    line = [waits(9), reader] if writer_waits else [reader, waits(9)]
    seen = Picture(a=([holds(10, 1, SHARED)], line), b=([holds(20, 2)], [ME]))
    assert seen.circle("b", ME) == ("ba" if writer_waits else "")


def test_a_waiter_behind_this_one_in_its_process_may_be_the_member() -> None:
    """The first of its process holds nothing; the one behind it is in the circle."""
    behind = waits(1, ("a", 10), thread="behind")
    seen = Picture(a=([holds(10, 1)], [waits(2, ("b", 20))]), b=([holds(20, 2)], [waits(1)]))
    assert seen.circle("b", waits(1), behind) == "ba"


def test_a_circle_beside_the_wait_is_not_its_own() -> None:
    """ "a" is in a circle of others, which never comes back to the name that is waited for."""
    seen = Picture(
        a=([holds(10, 1)], [waits(2, ("x", 1), ("y", 2))]),
        x=([holds(1, 2)], [waits(3, ("y", 3))]),
        y=([holds(2, 2), holds(3, 3)], [waits(2, ("x", 1))]),
        b=([holds(20, 4)], [ME]),
    )
    assert seen.circle("b", ME) == ""
    assert seen.looks == ["a", "x", "y"]


def test_a_long_circle_is_not_followed_for_ever() -> None:
    names = {f"n{n}": ([holds(n, n)], [waits(n + 1, (f"n{n + 1}", n + 1))]) for n in range(1, 1000)}
    seen = Picture(**names)
    assert run_now(find_cycle("n999", [waits(1, ("n1", 1))], seen.look)) == ()
    assert len(seen.looks) == deadlock.LONGEST_CYCLE


def test_whether_the_holds_of_a_circle_are_still_there() -> None:
    seen = three()
    cycle = run_now(find_cycle("c", [ME], seen.look))
    seen.names["b"] = (seen.names["b"][0], [])  # a wait that has just ended
    assert run_now(still_held(cycle, seen.look))
    seen.names["b"] = ([holds(21, 2)], [])
    assert not run_now(still_held(cycle, seen.look))


# ---- labels


def test_the_holds_of_a_label() -> None:
    """Older versions read the fields before it."""
    label = write_label("h", 1, "t", "n", holds=[("a", 17), ('b"ü', 18)])
    assert read_holds(label) == (("a", 17), ('b"ü', 18))
    assert read_label(label) == ("h", 1, "t", "n", "", "")
    assert json.loads(label) == ["h", 1, "t", "n", "", "", ["a", 17, 'b"ü', 18]]
    assert read_holds(write_label("h", 1, "t", "n", "kind")) == ()


def test_a_label_names_few_holds() -> None:
    many = [(f"name-{n}", n) for n in range(100)]
    assert read_holds(write_label("h", 1, "t", "", holds=many)) == tuple(many[:8])
    long = [("ü" * 256, n) for n in range(8)]
    assert read_holds(write_label("h", 1, "t", "", holds=long)) == tuple(long[:1])


@pytest.mark.parametrize(
    "stored",
    [
        *("{}", '"text"', "7", "[]x", '["a"]', "[1,2]", '["a","1"]', '["a",true]', '["a",-1]'),
        *('["a",1.5]', '["",1]', '["\\u0000",1]', '["\\ud800",1]', "[[],1]", '["a",1e400]'),
        json.dumps(["x" * 513, 1]),
        json.dumps(["a", 2**63]),
        json.dumps(["a", 1] * 9),
    ],
)
def test_holds_that_no_client_writes_are_left_out(stored: str) -> None:
    assert read_holds(f'["h",1,"t","n","","",{stored}]') == ()


@pytest.mark.parametrize("label", ["", "[" * 100_000, '{"6":1}', '"1234567"', "7", "null"])
def test_a_damaged_label_has_no_holds(label: str) -> None:
    assert read_holds(label) == ()


# ---- both clients


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.acquire.LONG_WAIT_SECONDS", 0.2)
    monkeypatch.setattr("holdfast.core.acquire.RECHECK_SECONDS", (0.1, 0.3))


@pytest.fixture
def url() -> str:
    return f"memory://circles-{os.urandom(4).hex()}"


@pytest.fixture
def locks(url: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(url) as client:
        yield client


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("deadlock: ")]


Take = Callable[[ExitStack, holdfast.Locks, str], object]


def in_block(stack: ExitStack, locks: holdfast.Locks, name: str) -> object:
    return stack.enter_context(locks.lock(name))


def bare(stack: ExitStack, locks: holdfast.Locks, name: str) -> object:
    lease = locks.lock(name).acquire()
    assert lease is not None
    stack.callback(lease.release)
    return lease


class Circle:
    """Threads of one or several clients: each holds its name and waits for that of the next."""

    def __init__(self, *timeouts: float, take: Take = in_block) -> None:
        self.timeouts, self.take = timeouts, take
        self.held = threading.Barrier(len(timeouts))
        self.errors: dict[int, holdfast.LockTimeout] = {}

    def run(self, *clients: holdfast.Locks) -> list[holdfast.LockTimeout]:
        numbers = range(len(self.timeouts))
        threads = [
            threading.Thread(target=self._work, args=(n, clients[n % len(clients)]), name="worker")
            for n in numbers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return [self.errors[n] for n in numbers if n in self.errors]

    def _work(self, number: int, locks: holdfast.Locks) -> None:
        with ExitStack() as stack:
            self.take(stack, locks, f"n{number}")
            self.held.wait(10)
            following = f"n{(number + 1) % len(self.timeouts)}"
            try:
                with locks.lock(following, timeout=self.timeouts[number]):
                    pass
            except holdfast.LockTimeout as error:
                self.errors[number] = error


def test_threads_in_a_circle(locks: holdfast.Locks, caplog: pytest.LogCaptureFixture) -> None:
    (error,) = Circle(1.5, 10.0, 10.0).run(locks)
    assert error.deadlock == ("n1", "n2", "n0")
    assert "; deadlock: 'n1' is held by " in str(error)
    lines = told(caplog)
    assert {line.name for line in lines} == {"holdfast.lock"}
    assert {line.levelno for line in lines} == {logging.WARNING}
    assert 1 <= len(lines) <= 3  # each wait once
    about: list[Any] = [vars(line)["holdfast"] for line in lines]
    assert {each["event"] for each in about} == {"deadlock"}
    assert len({each["name"] for each in about}) == len(lines)
    for each in about:
        assert each["names"][0] == each["name"]
        assert set(each["names"]) == {"n0", "n1", "n2"}


def test_clients_in_a_circle(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.connect(url) as one, holdfast.connect(url) as other:
        (error,) = Circle(1.5, 10.0).run(one, other)
    assert error.deadlock == ("n1", "n0")
    assert told(caplog)


def test_bare_leases_are_no_deadlock(
    locks: holdfast.Locks, caplog: pytest.LogCaptureFixture
) -> None:
    """Another thread may release them."""
    (error,) = Circle(1.5, 10.0, take=bare).run(locks)
    assert error.deadlock == ()
    assert "deadlock" not in str(error)
    assert told(caplog) == []


def test_a_block_that_was_left_is_no_longer_held(locks: holdfast.Locks) -> None:
    """Also one whose lease was released inside."""
    with locks.lock("a"):
        with locks.lock("b") as lease:
            with locks.lock("c"):
                assert own_holds(locks) == ["c", "b", "a"]
            lease.release()
            assert own_holds(locks) == ["a"]
        assert own_holds(locks) == ["a"]
    assert own_holds(locks) == []
    assert locks._engine.blocks == {}


def test_a_lost_hold_is_no_longer_held(locks: holdfast.Locks) -> None:
    held = ["a"]
    with pytest.raises(holdfast.LockLost), locks.lock("a"):  # noqa: PT012 - in its block
        locks.break_lock("a", reason="a test")
        held = own_holds(locks)
    assert held == []
    assert locks._engine.blocks == {}


def test_an_attempt_that_does_not_wait_tells_nothing(locks: holdfast.Locks) -> None:
    with locks.lock("a"):
        with locks.lock("b", timeout=0) as lease:
            assert read_holds(lease._hold.grant.claim.label) == ()
        with locks.lock("b") as lease:
            assert [name for name, _ in read_holds(lease._hold.grant.claim.label)] == ["a"]


def test_another_thread_holds_something_else(locks: holdfast.Locks) -> None:
    """Also one that has the name or the number of a thread that is gone."""
    with locks.lock("a"):
        for _ in range(3):
            found: list[list[str]] = []
            thread = threading.Thread(target=lambda found=found: found.append(own_holds(locks)))
            thread.start()
            thread.join()
            assert found == [[]]
        locks._engine.blocks[id(threading.current_thread())][0].acquired_by = lambda: None
        assert own_holds(locks) == []


def own_holds(locks: holdfast.Locks) -> list[str]:
    """The names that the label of a waiter of this thread has."""
    engine = locks._engine
    label = engine.label(engine.runtime.me(), "", waits=True)
    return [name for name, _ in read_holds(label)]


def test_a_semaphore_that_its_own_thread_has_taken(locks: holdfast.Locks) -> None:
    """A lock raises ``AlreadyHeld``. Of a semaphore another holder might leave, unless there can be
    none."""
    for limit, deadlock_of in ((1, ("s1",)), (2, ())):
        lock = locks.semaphore(f"s{limit}", limit, timeout=1)
        with ExitStack() as stack:
            for _ in range(limit):
                stack.enter_context(lock)
            with pytest.raises(holdfast.LockTimeout) as caught, lock:
                pass
            assert caught.value.deadlock == deadlock_of


def test_tasks_in_a_circle(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of one name: they are told apart by what they hold."""

    async def work(locks: holdfast.AsyncLocks, mine: str, other: str, timeout: float) -> Any:
        async with locks.lock(mine):
            await asyncio.sleep(0.1)
            try:
                async with locks.lock(other, timeout=timeout):
                    return None
            except holdfast.LockTimeout as error:
                return error

    async def main() -> list[Any]:
        async with holdfast.connect_async(url) as locks:
            pairs = [("a", "b", 1.5), ("b", "a", 10.0)]
            tasks = [asyncio.create_task(work(locks, *pair), name="task") for pair in pairs]
            return await asyncio.gather(*tasks)

    error, nothing = asyncio.run(main())
    assert nothing is None
    assert error.deadlock == ("b", "a")
    assert told(caplog)


def test_a_waiter_behind_the_first_of_its_process(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first waiter for "b" holds nothing; the one behind it holds "a". The first tells it."""

    async def hold_and_wait(
        locks: holdfast.AsyncLocks, mine: str, other: str, timeout: float
    ) -> Any:
        async with AsyncExitStack() as stack:
            if mine:
                await stack.enter_async_context(locks.lock(mine))
            await asyncio.sleep(0.1 if other == "a" or not mine else 0.3)
            try:
                await stack.enter_async_context(locks.lock(other, timeout=timeout))
            except holdfast.LockTimeout as error:
                return error

    async def main() -> list[Any]:
        async with holdfast.connect_async(url) as locks, holdfast.connect_async(url) as peer:
            work = [
                hold_and_wait(peer, "b", "a", 2.0),
                hold_and_wait(locks, "", "b", 10.0),
                hold_and_wait(locks, "a", "b", 10.0),
            ]
            return await asyncio.gather(*work)

    error, *others = asyncio.run(main())
    assert error.deadlock == ()  # the other process sees only the first
    assert others == [None, None]
    (line,) = told(caplog)
    assert vars(line)["holdfast"]["names"] == ("b", "a")


# ---- what a search costs, and what it can't break


class Looks:
    """Counts the looks of a client, or does something else in their place."""

    def __init__(self, locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.instead: Callable[[], object] = lambda: None
        self._look = locks._engine.backend.look
        monkeypatch.setattr(locks._engine.backend, "look", self)

    async def __call__(self, name: str) -> LockInfo:
        self.names.append(name)
        if name == "a":  # of a search; "b" is looked at for the holder's name
            self.instead()
        return await self._look(name)


def wait_for(
    locks: holdfast.Locks, other: holdfast.Locks, held: str | None, seconds: float, **options: Any
) -> float:
    """This thread holds a name, or none, and waits for "b", which another client releases after
    some seconds; how long after its release this thread has it."""
    released: list[float] = []
    lease = other.lock("b").acquire()
    assert lease is not None

    def release() -> None:
        released.append(time.monotonic())
        lease.release()

    timer = threading.Timer(seconds, release)
    timer.start()
    with ExitStack() as stack:
        if held is not None:
            stack.enter_context(locks.lock(held))
        stack.enter_context(locks.lock("b", **options))
        took = time.monotonic()
    timer.join()
    return took - released[0]


@pytest.mark.parametrize(
    ("held", "level", "options", "searches"),
    [
        ("a", logging.WARNING, {}, True),
        ("a", logging.ERROR, {"timeout": 9}, True),
        ("a", logging.ERROR, {}, False),
        (None, logging.WARNING, {"timeout": 9}, False),
    ],
    ids=["for the log", "for the error", "for nobody", "holds nothing"],
)
def test_a_search_is_made_only_if_it_can_tell_something(
    url: str,
    locks: holdfast.Locks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    held: str | None,
    level: int,
    options: dict[str, Any],
    searches: bool,
) -> None:
    """Once for a wait, however long that is."""
    caplog.set_level(level, "holdfast")
    looks = Looks(locks, monkeypatch)
    with holdfast.connect(url) as other:
        wait_for(locks, other, held, 1.5, **options)
    assert looks.names == (["a"] if searches else [])


def test_an_acquire_that_answers_none_searches_nothing_at_its_timeout(
    url: str,
    locks: holdfast.Locks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.ERROR, "holdfast")
    looks = Looks(locks, monkeypatch)
    with holdfast.connect(url) as other, other.lock("b"), locks.lock("a"):
        assert locks.lock("b").acquire(timeout=0.8) is None
    assert looks.names == []


def test_a_store_that_hangs_does_not_delay_the_wake_up(
    url: str, locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search runs beside the wait."""
    looks = Looks(locks, monkeypatch)
    going_on = threading.Event()
    looks.instead = lambda: going_on.wait(20)
    with holdfast.connect(url) as other:
        try:
            assert wait_for(locks, other, "a", 1.5) < 1.0
            assert looks.names == ["a"]
        finally:
            going_on.set()
    wait_until(lambda: not deadlock._searching)


@pytest.mark.parametrize("first", [1, 2], ids=["beside the wait", "at the timeout"])
def test_a_store_that_hangs_delays_a_timeout_by_a_second(
    url: str, locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    looks = Looks(locks, monkeypatch)
    going_on = threading.Event()
    looks.instead = lambda: looks.names.count("a") >= first and going_on.wait(20)
    began = time.monotonic()
    with holdfast.connect(url) as other, other.lock("b"), locks.lock("a"):
        try:
            with pytest.raises(holdfast.LockTimeout) as caught, locks.lock("b", timeout=1):
                pass
            assert 1.9 < time.monotonic() - began < 3.5
        finally:
            going_on.set()
    assert caught.value.deadlock == ()
    assert "held by" in str(caught.value)
    wait_until(lambda: not deadlock._searching)


def wait_until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + SOON
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("error", [BackendUnavailable("a test"), RuntimeError("a test")])
def test_a_search_that_fails_is_only_logged(
    url: str,
    locks: holdfast.Locks,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    looks = Looks(locks, monkeypatch)

    def fail() -> None:
        raise error

    looks.instead = fail
    with holdfast.connect(url) as other:
        assert wait_for(locks, other, "a", 1.5) < 1.0
    (line,) = (text for text in caplog.messages if text.startswith("the search for a deadlock"))
    assert "'b'" in line
    assert deadlock._searching == {}


def test_one_search_of_a_process_at_a_time(
    url: str, locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that found another under way is made at a later re-check; a timeout waits for it."""
    looks = Looks(locks, monkeypatch)
    here = locks._engine.runtime.where()
    deadlock._searching[here] = "another search"
    try:
        with holdfast.connect(url) as other:
            wait_for(locks, other, "a", 1.0)
            assert looks.names == []
            threading.Timer(1.0, deadlock._searching.clear).start()
            wait_for(locks, other, "a", 2.5)
            assert looks.names == ["a"]
            with other.lock("b"), locks.lock("a"):
                deadlock._searching[here] = "another search"
                began = time.monotonic()
                threading.Timer(1.5, deadlock._searching.clear).start()
                with pytest.raises(holdfast.LockTimeout), locks.lock("b", timeout=1):
                    pass
                assert time.monotonic() - began > 1.4
    finally:
        deadlock._searching.clear()
    assert looks.names == ["a", "b", "a"]  # the second one names the holder in the error


def test_timeouts_at_the_same_moment(url: str) -> None:
    """Neither waits any longer when the errors are made, but what they hold is still there."""
    with holdfast.connect(url) as one, holdfast.connect(url) as other:
        errors = Circle(1.5, 1.5).run(one, other)
    assert errors
    assert [error.deadlock for error in errors if error.deadlock]


def test_a_deadlock_that_has_ended_is_not_in_the_error(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the two gives up, and the next in line gets its name."""
    errors: list[holdfast.LockTimeout] = []
    over = threading.Event()

    def give_up(locks: holdfast.Locks) -> None:
        try:
            with locks.lock("b"), locks.lock("a", timeout=1.5):
                pass
        except holdfast.LockTimeout as error:
            errors.append(error)

    def follow(locks: holdfast.Locks) -> None:
        with locks.lock("b"):
            over.wait(20)

    with ExitStack() as stack:
        mine, peer, third = (stack.enter_context(holdfast.connect(url)) for _ in range(3))
        stack.enter_context(mine.lock("a"))
        threads = [threading.Thread(target=give_up, args=(peer,))]
        threads.append(threading.Thread(target=follow, args=(third,)))
        for thread, name in zip(threads, "ab", strict=True):
            thread.start()
            wait_until(lambda name=name: len(mine.inspect(name).waiters) == 1)  # type: ignore[misc]
        with pytest.raises(holdfast.LockTimeout) as caught, mine.lock("b", timeout=3):
            pass
        over.set()
        for thread in threads:
            thread.join()
    assert [error.deadlock for error in errors] == [("a", "b")]
    assert {vars(line)["holdfast"]["name"] for line in told(caplog)} == {"a", "b"}
    assert caught.value.deadlock == ()


def test_a_forked_child_holds_nothing_and_searches_itself(locks: holdfast.Locks) -> None:
    """Also if a thread of its parent searched at the fork."""
    here = locks._engine.runtime.where()
    deadlock._searching[here] = "a search of the parent"
    try:
        with locks.lock("a"):
            assert own_holds(locks) == ["a"]
            child = os.fork()
            if child == 0:
                free = locks._engine.runtime.where() not in deadlock._searching
                os._exit(0 if free and own_holds(locks) == [] else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        deadlock._searching.clear()
