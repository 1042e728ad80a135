"""The driver for event loops, on asyncio's and uvloop's: cancellations, cuts, deadlines, forks."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hazards.drivers import (
    Failed,
    Lines,
    LinesEndpoint,
    Numbered,
    backwards,
    counted,
    echo,
    in_world,
)
from holdfast.errors import BackendUnavailable
from holdfast.io.aio import AsyncPool
from holdfast.io.clock import now
from holdfast.io.connection import Broken
from holdfast.io.wakeups import Messages, Wakeups
from stores.fake_server import answering, fake_server

SOON = 30.0
SHORT = 0.3
SPARE_SECONDS = 5.0

both_loops = pytest.mark.parametrize("kind", ["asyncio", "uvloop"])


def on_loop(kind: str, body: Callable[[], Awaitable[Any]]) -> Any:
    async def run(_: object) -> Any:
        async with asyncio.timeout(2 * SOON):
            return await body()

    return in_world(kind, run)


WAYS: dict[str, Callable[[AsyncPool], Awaitable[Any]]] = {
    "request": lambda pool: pool.request(b"torn\n"),
    "in a hurry": lambda pool: pool.request(b"torn\n", now() + 1.0),
    "requests": lambda pool: pool.requests([b"torn\n", b"torn too\n"]),
    "alone": lambda pool: pool.alone([b"torn\n", b"torn too\n"]),
}


@both_loops
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("warm", [True, False])
def test_a_cancellation_at_every_await(kind: str, way: str, warm: bool) -> None:
    """Whenever it comes, also while the connection is opened: later replies are right, and the
    limit of exclusive connections is whole."""

    async def body() -> None:
        for steps in range(40):
            pool = AsyncPool(LinesEndpoint(port), 1)
            if warm:
                assert await pool.request(b"warm\n") == b"warm"
            task = asyncio.ensure_future(WAYS[way](pool))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert await pool.request(b"after\n") == b"after"
            assert await pool.alone([b"x\n", b"y\n"]) == [b"x", b"y"]
            pool.close()
            if done:
                return

    with fake_server(echo) as port:
        on_loop(kind, body)


@both_loops
def test_thousands_of_cancellations_on_one_connection(kind: str) -> None:
    connections: list[int] = []

    async def body() -> None:
        pool, chance = AsyncPool(LinesEndpoint(port), 1), random.Random(1)
        await pool.request(b"warm\n")
        wrong: list[Any] = []

        async def ask(number: int) -> None:
            text = b"%d" % number
            if await pool.request(text + b"\n") != text:
                wrong.append(number)

        for start in range(0, 3000, 100):
            tasks = [asyncio.ensure_future(ask(start + n)) for n in range(100)]
            await asyncio.sleep(0)
            for task in tasks:
                if chance.random() < 0.4:
                    task.cancel()
            await asyncio.wait(tasks)
        assert wrong == []
        pool.close()

    with fake_server(counted(connections)) as port:
        on_loop(kind, body)
    assert len(connections) == 1


@both_loops
@pytest.mark.parametrize("cut", range(len(b"!push\nreply\n")))
def test_a_reply_that_is_cut_off(kind: str, cut: int) -> None:
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

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1)
        assert await pool.request(b"warm\n") == b"warm"
        with pytest.raises(Failed) as caught:
            await pool.request(b"one\n")
        assert isinstance(caught.value.__cause__, Broken)
        assert caught.value.__cause__.closed
        assert await pool.request(b"two\n") == b"two"
        pool.close()

    with fake_server(handle) as port:
        on_loop(kind, body)


@both_loops
def test_replies_in_another_order(kind: str) -> None:
    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port, Numbered), 1)
        asked = [pool.request(text) for text in (b"a\n", b"b\n", b"c\n")]
        assert await asyncio.gather(*asked) == [b"a", b"b", b"c"]
        assert await pool.requests([b"d\n", b"e\n", b"f\n"]) == [b"d", b"e", b"f"]
        pool.close()

    with fake_server(backwards) as port:
        on_loop(kind, body)


@both_loops
def test_more_than_the_buffers_hold(kind: str) -> None:
    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1)
        large = b"x" * 2_000_000
        assert await pool.request(large + b"\n") == large
        many = [b"%03d" % n * 20_000 for n in range(500)]
        assert await pool.requests([each + b"\n" for each in many]) == many
        pool.close()

    with fake_server(echo) as port:
        on_loop(kind, body)


@both_loops
@pytest.mark.parametrize("way", ["in a hurry", "the usual", "alone", "requests"])
def test_a_silent_server_costs_no_more_than_the_deadline(kind: str, way: str) -> None:
    class Impatient(LinesEndpoint):
        request_seconds = SHORT if way == "the usual" else SOON

    async def body() -> None:
        pool = AsyncPool(Impatient(port), 1)
        until = now() + SHORT
        began = now()
        asked: dict[str, Callable[[], Awaitable[Any]]] = {
            "the usual": lambda: pool.request(b"x\n"),
            "in a hurry": lambda: pool.request(b"x\n", until),
            "alone": lambda: pool.alone([b"x\n"], until),
            "requests": lambda: pool.requests([b"x\n"], until),
        }
        with pytest.raises(Failed) as caught:
            await asked[way]()
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert now() - began < 2 * SHORT + SPARE_SECONDS
        pool.close()

    def silent(connection: socket.socket) -> None:
        while connection.recv(100):
            pass

    with fake_server(silent) as port:
        on_loop(kind, body)


@both_loops
def test_a_reply_without_a_request_ends_the_connection(kind: str) -> None:
    """It would be taken for the next one."""

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1)
        assert await pool.request(b"x\n") == b"one"
        assert await pool.request(b"y\n") == b"one"
        pool.close()

    with fake_server(answering(b"one\ntwo\n")) as port:
        on_loop(kind, body)


@both_loops
def test_any_loop_may_close(kind: str) -> None:
    ended = threading.Event()

    def handle(connection: socket.socket) -> None:
        echo(connection)
        ended.set()

    with fake_server(handle) as port:
        pool = AsyncPool(LinesEndpoint(port), 1)

        async def use() -> None:
            assert await pool.request(b"x\n") == b"x"

        async def close() -> None:
            pool.close()

        on_loop(kind, use)
        assert ended.wait(SOON), "the connection stays open after its loop"
        on_loop(kind, close)


@both_loops
def test_a_forked_child_leaves_the_parents_connections_alone(kind: str) -> None:
    connections: list[int] = []

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1)
        assert await pool.request(b"before\n") == b"before"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.forget()
                with socket.create_connection(("127.0.0.1", port)) as own:
                    own.sendall(b"child\n")
                    code = 0 if own.recv(100) == b"child\n" else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert await pool.request(b"after\n") == b"after"
        pool.close()

    with fake_server(counted(connections)) as port:
        on_loop(kind, body)
    assert len(connections) == 2


def _lacks(*_: object) -> None:
    raise NotImplementedError


lacks: Any = _lacks


def test_a_loop_without_readers_is_refused() -> None:
    class ProactorLike(asyncio.SelectorEventLoop):
        add_reader = remove_reader = add_writer = remove_writer = lacks

    async def body() -> None:
        with pytest.raises(BackendUnavailable, match=r"ProactorLike.*SelectorEventLoop") as caught:
            await AsyncPool(LinesEndpoint(port), 1).request(b"x\n")
        assert caught.value.final

    with fake_server(echo) as port, asyncio.Runner(loop_factory=ProactorLike) as runner:
        runner.run(body())


def listener(told: list[bytes], ends: threading.Event) -> Callable[[socket.socket], None]:
    """Sends what it is told, then closes."""

    def handle(connection: socket.socket) -> None:
        for text in told:
            connection.sendall(text)
            time.sleep(0.05)
        ends.wait(SOON)

    return handle


@pytest.mark.parametrize("kind", ["threads", "asyncio", "uvloop"])
def test_wake_ups(kind: str) -> None:
    """With a value; of the live subscription only; again after that broke."""
    ends = threading.Event()
    count = 0

    def read(message: Any) -> list[tuple[str, Any]]:
        key, _, value = message.decode().partition(" ")
        return [(key, value or None)]

    async def body(world: Any) -> None:
        async def subscribe(until: float) -> Messages:
            nonlocal count
            count += 1
            return Messages(await LinesEndpoint(port).open(world, until), read)

        wakeups = Wakeups(blocking=kind == "threads")
        assert wakeups.generation == 0
        assert await wakeups.wait("one", 0, now() + SOON, subscribe) is None  # it subscribes
        assert wakeups.generation == 1
        assert await wakeups.wait("one", 1, now() + SOON, subscribe) == "value"
        assert await wakeups.wait("two", 1, now() + SOON, subscribe) is None
        assert await wakeups.wait("three", 2, now() + SOON, subscribe) is None  # not the live one
        ends.set()
        began = now()
        assert await wakeups.wait("four", 1, now() + SOON, subscribe) is None
        assert wakeups.generation == 0
        assert now() - began < SOON / 2
        assert await wakeups.wait("four", 1, now() + SOON, subscribe) is None
        assert (wakeups.generation, count) == (2, 2)
        wakeups.close()

    with fake_server(listener([b"one value\ntwo\n"], ends)) as port:
        in_world(kind, body)


def test_the_protocol_of_these_tests_is_pure() -> None:
    """Its lines come out the same, however they are cut."""
    stream = b"first\n!push\nsecond\nthird\n"
    for cut in range(1, len(stream) + 1):
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Lines(ours)
            pushed: list[bytes] = []
            connection.on_push = pushed.append
            for at in range(0, len(stream), cut):
                connection.feed(stream[at : at + cut])
            found = [connection.next() for _ in range(3)]
            assert found == [b"first", b"second", b"third"]
            assert pushed == [b"push"]
            connection.close()
