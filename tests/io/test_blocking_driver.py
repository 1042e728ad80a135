"""The driver for threads, against a local server: interrupts, cuts, deadlines, forks."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hazards.drivers import Failed, Lines, LinesEndpoint, Numbered, backwards, counted, echo
from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.io.blocking import BlockingPool
from holdfast.io.clock import now
from holdfast.io.connection import Broken
from stores.fake_server import answering, fake_server

TESTS = Path(__file__).parents[1]
SOON = 30.0
SHORT = 0.3
SPARE_SECONDS = 5.0

# A connection that an interrupt tears off is garbage: its socket is closed with a warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of the work, in a thread that is left behind if it never ends."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * SOON)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


POOL_LINES = [
    step
    for name in (
        *("request", "requests", "_exchange", "_receive", "take", "_pop_alive", "_is_alive"),
        *("_open", "give", "drop", "_notify", "reset", "_seconds"),
    )
    for step in lines_of(getattr(BlockingPool, name))
]


def use(pool: BlockingPool) -> None:
    """Goes through every part of the pool."""
    assert pool.request(b"first\n") == b"first"
    assert pool.request(b"second\n") == b"second"
    assert pool.requests([b"a\n", b"b\n"]) == [b"a", b"b"]
    connection = pool.take(now() + SOON)
    pool.give(connection)
    pool.reset()
    assert pool.request(b"third\n", now() + 1.0) == b"third"


@pytest.mark.parametrize(("name", "line"), POOL_LINES)
def test_an_interrupt_at_every_line_of_the_pool(name: str, line: int) -> None:
    """No permit is lost, no mutex stays locked, no reply goes to another request."""
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        torn_at(getattr(BlockingPool, name).__code__, line, lambda: use(pool))
        gc.collect()  # what the interrupt has kept alive
        for text in (b"one", b"two", b"three"):
            assert in_thread(partial(pool.request, text + b"\n")) == text
        pool.close()


@pytest.mark.parametrize(("name", "line"), POOL_LINES)
def test_a_signal_handler_may_use_the_pool_at_every_line(name: str, line: int) -> None:
    with fake_server(echo) as port:
        pool, seen = BlockingPool(LinesEndpoint(port), 3), []

        def handle() -> None:
            seen.append(pool.request(b"handler\n"))

        code = getattr(BlockingPool, name).__code__
        in_thread(lambda: handled_at(code, line, lambda: use(pool), handle))
        assert seen in ([], [b"handler"])
        assert pool.request(b"after\n") == b"after"
        pool.close()


def test_interrupts_of_many_threads() -> None:
    """Alarms raise in the main thread, while other threads use the same pool."""
    program = [sys.executable, "-m", "hazards.interrupted_pool"]
    done = subprocess.run(
        program, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    interrupts, *rest = done.stdout.splitlines() or [""]
    assert rest == ["stuck threads 0", "wrong replies []", "free connections 3"], done.stderr
    assert int(interrupts.removeprefix("interrupts ")) > 100


@pytest.mark.parametrize("cut", range(len(b"!push\nreply\n")))
def test_a_reply_that_is_cut_off(cut: int) -> None:
    """At any byte: the request fails, and the next one has another connection."""
    first = threading.Event()

    def handle(connection: socket.socket) -> None:
        if first.is_set():
            echo(connection)
            return
        assert connection.recv(100) == b"warm\n"
        connection.sendall(b"warm\n")
        connection.recv(100)
        first.set()
        connection.sendall(b"!push\nreply\n"[:cut])

    with fake_server(handle) as port:
        pool = BlockingPool(LinesEndpoint(port), 2)
        assert pool.request(b"warm\n") == b"warm"
        with pytest.raises(Failed) as caught:
            pool.request(b"one\n")
        assert isinstance(caught.value.__cause__, Broken)
        assert caught.value.__cause__.closed
        assert pool.request(b"two\n") == b"two"
        pool.close()


def test_a_reply_that_comes_byte_by_byte() -> None:
    def handle(connection: socket.socket) -> None:
        while data := connection.recv(100):
            for byte in data:
                connection.sendall(bytes([byte]))
                time.sleep(0.002)

    with fake_server(handle) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        for _ in range(2):
            assert pool.request(b"letters\n") == b"letters"
        assert pool.requests([b"some\n", b"more\n"]) == [b"some", b"more"]
        pool.close()


def test_replies_in_another_order() -> None:
    with fake_server(backwards) as port:
        pool = BlockingPool(LinesEndpoint(port, Numbered), 1)
        assert pool.requests([b"a\n", b"b\n", b"c\n"]) == [b"a", b"b", b"c"]
        assert pool.requests([b"d\n", b"e\n", b"f\n"]) == [b"d", b"e", b"f"]
        pool.close()


def test_more_than_the_buffers_hold() -> None:
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        large = b"x" * 2_000_000
        assert pool.request(b"warm\n") == b"warm"
        assert pool.request(large + b"\n") == large
        many = [b"%03d" % n * 20_000 for n in range(500)]
        assert pool.requests([each + b"\n" for each in many]) == many
        pool.close()


@pytest.mark.parametrize("warm", [False, True])
def test_a_silent_server_costs_no_more_than_the_deadline(warm: bool) -> None:
    def handle(connection: socket.socket) -> None:
        while (data := connection.recv(100)) == b"warm\n":
            connection.sendall(data)
        time.sleep(SOON)

    with fake_server(handle) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        if warm:
            assert pool.request(b"warm\n") == b"warm"
        for ask in (
            lambda: pool.request(b"x\n", now() + SHORT),
            lambda: pool.requests([b"x\n"], now() + SHORT),
        ):
            began = now()
            with pytest.raises(Failed) as caught:
                ask()
            assert isinstance(caught.value.__cause__, TimeoutError)
            assert now() - began < SHORT + SPARE_SECONDS
        pool.close()


def test_a_full_pool_says_so_at_the_deadline() -> None:
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        taken = pool.take(now() + SOON)
        with pytest.raises(Failed, match="all 1 connections are busy"):
            pool.request(b"x\n", now() + SHORT)
        threading.Timer(0.1, pool.give, (taken,)).start()
        assert pool.request(b"x\n", now() + SOON) == b"x"
        pool.close()


def test_a_reply_without_a_request_is_never_used() -> None:
    with fake_server(answering(b"one\ntwo\n")) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        connection = pool.take(now() + SOON)
        connection.send(b"x\n")
        assert connection.poll(SOON * 1000)
        connection.collect()
        assert connection.next() == b"one"
        pool.give(connection)
        another = pool.take(now() + SOON)
        assert another is not connection
        pool.drop(another)
        pool.close()


@pytest.mark.parametrize("way", ["request", "requests"])
def test_a_reply_without_a_request_ends_the_connection(way: str) -> None:
    """It came with the reply before, and would be taken for the next one."""
    with fake_server(answering(b"one\ntwo\n")) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        for _ in range(4):
            if way == "request":
                assert pool.request(b"x\n") == b"one"
            else:
                assert pool.requests([b"x\n"]) == [b"one"]
        pool.close()


def test_what_can_not_be_read_after_a_reply_ends_the_connection() -> None:
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        connection = pool.take(now() + SOON)

        def unreadable() -> Any:
            raise Broken("it sent something that is not a line")

        connection.next = unreadable
        pool.give(connection)
        assert pool.request(b"x\n", now() + SOON) == b"x"  # its permit is free
        pool.close()


def test_a_connection_that_is_not_usable_is_not_kept() -> None:
    connections: list[int] = []
    with fake_server(counted(connections)) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        for _ in range(3):
            assert pool.request(b"x\n") == b"x"
            connection = pool.take(now() + SOON)
            connection.usable = False
            pool.give(connection)
        assert len(connections) == 3
        pool.close()


def test_after_close_nothing_stays_open() -> None:
    ended: list[int] = []

    def handle(connection: socket.socket) -> None:
        echo(connection)
        ended.append(1)

    with fake_server(handle) as port:
        pool = BlockingPool(LinesEndpoint(port), 2)
        assert pool.request(b"x\n") == b"x"
        pool.close()
        assert pool.request(b"late\n") == b"late"
        until = now() + SOON
        while len(ended) < 2 and now() < until:
            time.sleep(0.01)
        assert len(ended) == 2


def test_a_forked_child_leaves_the_parents_connections_alone() -> None:
    connections: list[int] = []
    with fake_server(counted(connections)) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        assert pool.request(b"before\n") == b"before"
        with pool._connection_limit.mutex:  # as if another thread had it
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    pool.forget()
                    code = 0 if pool.request(b"child\n") == b"child" else 2
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.request(b"after\n") == b"after"
        assert len(connections) == 2
        pool.close()


def test_a_forked_child_has_no_connection_that_another_thread_was_using() -> None:
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        used = pool.take(now() + SOON)
        number = used.fd
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.forget()
                try:
                    os.fstat(number)
                    code = 2
                except OSError:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pool.give(used)
        assert pool.request(b"after\n") == b"after"
        pool.close()


def test_a_connection_that_ended_while_idle_is_not_used() -> None:
    class LookFirst(Lines):
        look_first = True

    def once(connection: socket.socket) -> None:
        connection.sendall(connection.recv(100))

    with fake_server(once) as port:
        pool = BlockingPool(LinesEndpoint(port, LookFirst), 1)
        for text in (b"one", b"two", b"three"):
            assert pool.request(text + b"\n") == text
            assert select.select([pool._idle[0]], [], [], SOON)[0]
        pool.close()


def test_a_detached_connection_does_not_count() -> None:
    with fake_server(echo) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        assert pool.detach() is None
        assert pool.request(b"one\n") == b"one"
        detached = pool.detach()
        assert detached is not None
        assert in_thread(lambda: pool.request(b"two\n")) == b"two"
        pool.close()
        assert detached.fd >= 0
        detached.close()


def test_a_server_that_sends_without_reading_gets_no_more_time() -> None:
    """It never lacks something to be read, while the request is never sent to its end."""

    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"!push\n" * 10_000)

    with fake_server(flood) as port:
        pool = BlockingPool(LinesEndpoint(port), 1)
        began = now()
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                pool.request(b"x" * 50_000_000 + b"\n", began + 0.3)
            except Failed as error:
                outcome.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(5.0)
        assert "TimeoutError" in str(outcome)
        pool.close()
