"""Threads that wait for ZooKeeper read its answers themselves: what may come in between."""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import holdfast
from backends.zookeeper_bench import QuickServer
from holdfast.core.drive import run_now
from holdfast.runtimes.clock import now
from holdfast.wires.zookeeper import Session
from holdfast.wires.zookeeper_asks import Ask, Exists, Stat
from holdfast.wires.zookeeper_calls import BlockingCall
from holdfast.wires.zookeeper_handler import Wire
from holdfast.wires.zookeeper_turn import Reader, Turn
from servers.proxy import Proxy
from servers.registry import Servers

TTL = 20
SOON = 60.0


@pytest.fixture
def server(servers: Servers) -> QuickServer:
    return servers.of(QuickServer)


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def locks(server: QuickServer, namespace: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(server.url, namespace=namespace, ttl=TTL) as door:
        yield door


@pytest.fixture
def others(server: QuickServer, namespace: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(server.url, namespace=namespace, ttl=TTL) as door:
        yield door


def _session(locks: Any) -> Session:
    session = locks._door.store.sessions[TTL]
    assert isinstance(session, Session)
    return session


def _wire(locks: Any) -> Wire:
    client = _session(locks)._client
    assert client is not None
    wire = client._connection._socket
    assert isinstance(wire, Wire)
    return wire


def _until(condition: Callable[[], bool]) -> None:
    """There is nothing to be told by; what counts is that it comes to pass at all."""
    deadline, pause = now() + SOON, threading.Event()
    while not condition():
        assert now() < deadline
        pause.wait(0.001)


def _let_threads_read(locks: holdfast.Locks) -> Wire:
    """Holds until kazoo's thread has stepped aside."""
    deadline = now() + SOON
    while True:
        with locks.lock("first"):
            pass
        wire = _wire(locks)
        if wire.turn.free:
            return wire
        assert now() < deadline


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which threads have read, in order."""
    seen: list[int] = []
    fill = Wire.fill

    def noted(wire: Wire) -> bool:
        seen.append(threading.get_ident())
        return fill(wire)

    monkeypatch.setattr(Wire, "fill", noted)
    return seen


def test_who_waits_reads(locks: holdfast.Locks, readers: list[int]) -> None:
    """kazoo's thread steps aside for a thread that comes again and again."""
    _let_threads_read(locks)
    readers.clear()
    deadline = now() + SOON
    while threading.get_ident() not in readers:
        assert now() < deadline
        with locks.lock("name"):
            pass


def test_who_waits_in_line_reads_for_all(
    locks: holdfast.Locks, others: holdfast.Locks, readers: list[int]
) -> None:
    """The answers of other threads, too, until it leaves."""
    with ThreadPoolExecutor(1) as pool:
        with others.lock("line"):
            wire = _let_threads_read(locks)
            waiting = pool.submit(locks.lock("line", timeout=SOON).acquire)
            _until(lambda: bool(_session(locks).watching) and not wire.turn.free)
            readers.clear()
            for _ in range(20):
                with locks.lock("other", timeout=SOON):
                    pass
            assert set(readers) - {threading.get_ident()}
            assert not waiting.done()
        lease = waiting.result(SOON)
        assert lease
        lease.release()
    assert _wire(locks) is wire


def test_a_task_needs_nobody_to_wait(server: QuickServer, namespace: str) -> None:
    """kazoo's thread, which stepped aside for the keeper's, comes back for a task."""

    async def hold() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace, ttl=TTL) as locks:
            async with locks.lock("name"):
                pass
            session = _session(locks)
            session._beat_at = now() + 3600  # the next heartbeat would find it, too
            for _ in range(5):
                await asyncio.to_thread(_step_aside, session, _wire(locks).turn)
                async with locks.lock("name"):
                    pass

    asyncio.run(hold())


def _step_aside(session: Session, turn: Turn) -> None:
    """Has kazoo's thread do so, as it does for the keeper's when that renews."""
    session.send(Exists("/").then(lambda _: setattr(turn, "wished", True)))
    session.relieve()
    _until(lambda: turn.free)


def test_the_end_of_a_connection_is_seen_while_nobody_waits(
    server: QuickServer, namespace: str
) -> None:
    """Also by a thread of kazoo's that has stepped aside: not by the next request."""
    with (
        Proxy(server) as proxy,
        holdfast.connect(proxy.url, namespace=namespace, ttl=TTL) as locks,
    ):
        wire = _let_threads_read(locks)
        number = _session(locks).id
        proxy.cut()
        _until(lambda: _session(locks).up and _wire(locks) is not wire)
        with locks.lock("name") as lease:
            assert lease.held
        assert _session(locks).id == number


class Interrupt(BaseException):
    pass


def _interrupt(*_: object) -> None:
    raise Interrupt


def _signal_once(handler: Callable[..., None], when: Callable[[], bool]) -> threading.Thread:
    """The handler runs in the main thread, once that is so."""
    signal.signal(signal.SIGUSR1, handler)
    main = threading.get_ident()

    def send() -> None:
        _until(when)
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back what a test has set."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handlers")
def test_an_interrupt_while_it_waits_costs_nothing(
    locks: holdfast.Locks, others: holdfast.Locks
) -> None:
    """Nothing was read, so nothing is lost: not even the connection."""
    with others.lock("line"):
        wire = _let_threads_read(locks)
        thread = _signal_once(_interrupt, lambda: _polls(wire.turn))
        with pytest.raises(Interrupt):
            locks.lock("line", timeout=SOON).acquire()
        thread.join()
    with locks.lock("line", timeout=SOON) as lease:
        assert lease.held
    assert _wire(locks) is wire


def _polls(turn: Turn) -> bool:
    reader = turn._who.get(0)
    return isinstance(reader, Reader) and reader.polling


@pytest.mark.usefixtures("handlers")
def test_a_handler_that_waits_reads_in_its_place(
    locks: holdfast.Locks, others: holdfast.Locks
) -> None:
    """The thread below it can't."""
    tokens = []

    def handler(*_: object) -> None:
        with locks.lock("inner", timeout=SOON) as lease:
            tokens.append(lease.token)
        line.release()

    line = others.lock("line")
    line.acquire()
    wire = _let_threads_read(locks)
    thread = _signal_once(handler, lambda: _polls(wire.turn))
    with locks.lock("line", timeout=SOON) as lease:
        assert lease.held
    thread.join()
    assert tokens
    assert _wire(locks) is wire


class Tearing(Exists):
    """An interrupt comes when a certain thread reads its answer."""

    __slots__ = ("_thread",)

    def __init__(self, thread: int) -> None:
        super().__init__("/")
        self._thread = thread

    def read(self, buffer: bytes, offset: int) -> Stat:
        if threading.get_ident() == self._thread:
            raise Interrupt
        return super().read(buffer, offset)


def _ask_on(session: Session, first: Callable[[], Ask]) -> None:
    """Asks until an interrupt comes: not, if kazoo's thread happens to read."""
    deadline = now() + SOON
    while now() < deadline:
        call, asks = BlockingCall(), (first(), Exists("/"), Exists("/"))
        session.start(call, *asks)
        run_now(session.finish(call, SOON, *asks))


@pytest.mark.parametrize("moment", ["received", "taken"])
def test_an_interrupt_while_it_reads_is_told_to_all(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What it had read is lost: the connection ends, the session and its holds go on."""
    kept = locks.lock("kept").acquire()
    assert kept
    wire, us, fill = _let_threads_read(locks), threading.get_ident(), Wire.fill
    session = _session(locks)
    number, told = session.id, threading.Event()

    def fill_and_tear(wire: Wire) -> bool:
        read = fill(wire)
        if threading.get_ident() == us:
            monkeypatch.setattr(Wire, "fill", fill)
            raise Interrupt
        return read

    if moment == "received":
        monkeypatch.setattr(Wire, "fill", fill_and_tear)
    session.send(Exists("/").then(lambda _: told.set()))
    with pytest.raises(Interrupt):
        _ask_on(session, lambda: Tearing(us) if moment == "taken" else Exists("/"))
    assert told.wait(SOON)
    with locks.lock("name", timeout=SOON) as lease:
        assert lease.token > kept.token
    assert _wire(locks) is not wire
    assert session.id == number
    assert kept.release() is True


def test_a_reader_that_never_leaves(server: QuickServer, namespace: str) -> None:
    """Two interrupts in a row may leave one behind: its connection is given up."""
    with holdfast.connect(server.url, namespace=namespace, ttl=TTL) as locks:
        wire = _let_threads_read(locks)
        session = _session(locks)
        number = session.id
        assert wire.turn.take(Reader())
        session.timeout = 1.0  # so that silence is soon too long
        with locks.lock("name", timeout=SOON) as lease:
            assert lease.held
        assert _wire(locks) is not wire
        assert session.id == number


def test_a_turn_is_one_readers() -> None:
    turn, first, second = Turn(), Reader(), Reader()
    assert turn.kazoos
    assert not turn.take(first)
    turn.leave(turn)
    assert turn.free
    assert turn.take(first)
    assert not turn.take(second)
    assert not turn.steal(second)
    first.polling = True
    assert turn.steal(second)
    turn.leave(first)
    assert turn.of(second)
    turn.leave(second)
    turn.reclaim()
    assert turn.kazoos
