"""The driver for event loops, on asyncio's and uvloop's: cancellations, cuts, deadlines, forks."""

from __future__ import annotations

import asyncio
import os
import random
import select
import socket
import stat
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
from holdfast.io.aio import WORLD, AsyncPool
from holdfast.io.clock import now
from holdfast.io.connection import AllBusy, Broken
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


@both_loops
def test_a_forked_child_has_no_connection_that_was_in_use(kind: str) -> None:
    """Its number stays taken, by another file: the loop believes to know it."""
    asked = threading.Event()

    def handle(connection: socket.socket) -> None:
        connection.recv(100)
        asked.set()
        echo(connection)

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1, pipelined=False)
        task = asyncio.ensure_future(pool.request(b"lost\n"))
        assert await asyncio.to_thread(asked.wait, SOON)
        (channel,) = pool._all
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pool.forget()
                code = 2 if stat.S_ISSOCK(os.fstat(channel._fd).st_mode) else 0
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        task.cancel()
        await asyncio.wait([task])
        pool.close()

    with fake_server(handle) as port:
        on_loop(kind, body)


@both_loops
def test_a_full_pool_says_so_at_the_deadline(kind: str) -> None:
    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1, pipelined=False)
        task = asyncio.ensure_future(pool.request(b"silent\n"))
        await asyncio.sleep(0)
        began = now()
        with pytest.raises(Failed, match="AllBusy: all 1 connections are busy"):
            await pool.request(b"x\n", now() + SHORT)
        assert now() - began < SHORT + SPARE_SECONDS
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(Failed, match="TimeoutError"):
            await pool.request(b"y\n", now() + SHORT)
        pool.close()

    with fake_server(drain) as port:
        on_loop(kind, body)


def drain(connection: socket.socket) -> None:
    """Reads and answers nothing."""
    while connection.recv(100):
        pass


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


class Held:
    """A server that echoes, and answers ``slow`` only when told to."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.slow, self.go = threading.Event(), threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        self.connections.append(connection)
        while text := connection.recv(100):
            self.seen.append(text)
            if text.startswith(b"slow"):
                self.slow.set()
                assert self.go.wait(SOON)
            connection.sendall(text)


@both_loops
def test_a_request_of_an_owner_runs_after_its_cancelled_one(kind: str) -> None:
    """Other owners have the other connections meanwhile; no connection is lost."""
    server = Held()

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 2, pipelined=False)
        task = asyncio.ensure_future(pool.request(b"slow\n", owner="me"))
        assert await asyncio.to_thread(server.slow.wait, SOON)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        undo = asyncio.ensure_future(pool.request(b"undo\n", owner="me"))
        for _ in range(5):
            assert await pool.request(b"other\n", owner="other") == b"other"
        assert b"undo\n" not in server.seen
        server.go.set()
        assert await undo == b"undo"
        assert await pool.request(b"after\n", owner="me") == b"after"
        assert len(server.connections) == 2
        pool.close()

    with fake_server(server) as port:
        on_loop(kind, body)


@both_loops
def test_a_request_of_an_owner_waits_beyond_its_own_deadline_for_its_cancelled_one(
    kind: str,
) -> None:
    """Sent before, it would undo what does not exist yet."""
    server = Held()

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 2, pipelined=False)
        await asyncio.gather(pool.request(b"one\n"), pool.request(b"two\n"))  # both are open
        task = asyncio.ensure_future(pool.request(b"slow\n", owner="me"))
        assert await asyncio.to_thread(server.slow.wait, SOON)
        task.cancel()
        await asyncio.wait([task])
        undo = asyncio.ensure_future(pool.request(b"undo\n", now() + SHORT, owner="me"))
        await asyncio.sleep(5 * SHORT)
        assert b"undo\n" not in server.seen
        server.go.set()
        await asyncio.wait([undo])
        undo.exception()  # its time is over: it may fail, and is then repeated
        pool.close()

    with fake_server(server) as port:
        on_loop(kind, body)


@both_loops
def test_blocking_work_that_ends_as_its_task_is_cancelled_is_undone(kind: str) -> None:
    """In the same round of the loop: the result is delivered, and then the task is cancelled."""
    undone: list[int] = []

    async def body() -> None:
        loop, ended = asyncio.get_running_loop(), threading.Event()

        def work() -> int:
            ended.set()
            return 7

        task = asyncio.ensure_future(WORLD.run(work, undone.append))
        await asyncio.sleep(0)
        ended.wait(SOON)
        time.sleep(SHORT)  # the loop stands still until the result waits to be delivered
        loop.call_soon(task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()

    on_loop(kind, body)
    assert undone == [7]


def test_blocking_work_that_ends_with_its_loop_is_undone() -> None:
    """What the thread would deliver to the loop, the loop never runs."""
    undone: list[int] = []
    go, ended = threading.Event(), threading.Event()

    def work() -> int:
        go.wait(SOON)
        return 7

    def undo(result: int) -> None:
        undone.append(result)
        ended.set()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(WORLD.run(work, undo))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        # As if the loop were closed before it runs what comes from the thread.
        loop.call_soon_threadsafe = lambda *_: None  # type: ignore[assignment, method-assign]
        go.set()
        assert ended.wait(SOON)

    on_loop("asyncio", body)  # methods of uvloop's loop can't be replaced
    assert undone == [7]


@both_loops
def test_a_cancelled_request_has_its_connection_until_its_deadline(kind: str) -> None:
    server = Held()

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port), 1, pipelined=False)
        task = asyncio.ensure_future(pool.request(b"slow\n", now() + 5 * SHORT, owner="me"))
        assert await asyncio.to_thread(server.slow.wait, SOON)
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(Failed) as caught:
            await pool.request(b"busy\n", now() + SHORT)
        assert isinstance(caught.value.__cause__, AllBusy)
        assert await pool.request(b"after\n", owner="me") == b"after"
        assert len(server.connections) == 2
        server.go.set()
        pool.close()

    with fake_server(server) as port:
        on_loop(kind, body)


@both_loops
@pytest.mark.parametrize("owner", ["", "me"])
def test_a_cancellation_at_every_await_of_an_exclusive_request(kind: str, owner: str) -> None:
    """The limit is whole, and later replies are right."""

    async def body() -> None:
        for steps in range(40):
            pool = AsyncPool(LinesEndpoint(port), 1, pipelined=False)
            task = asyncio.ensure_future(pool.request(b"torn\n", owner=owner))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert await pool.request(b"after\n", owner=owner) == b"after"
            assert await asyncio.gather(*(pool.request(b"%d\n" % n) for n in range(3))) == [
                b"0",
                b"1",
                b"2",
            ]
            pool.close()
            if done:
                return

    with fake_server(echo) as port:
        on_loop(kind, body)


@both_loops
def test_a_connection_that_ended_while_the_loop_stood_still_is_not_used(kind: str) -> None:
    class LookFirst(Lines):
        look_first = True

    def once(connection: socket.socket) -> None:
        connection.sendall(connection.recv(100))

    async def body() -> None:
        pool = AsyncPool(LinesEndpoint(port, LookFirst), 1, pipelined=False)
        for text in (b"one", b"two", b"three"):
            assert await pool.request(text + b"\n") == text
            # The loop does not run until the end is there.
            assert select.select([pool._idle[0].connection], [], [], SOON)[0]
        pool.close()

    with fake_server(once) as port:
        on_loop(kind, body)


@both_loops
def test_blocking_work_runs_beside_the_loop(kind: str) -> None:
    """Its result or error is returned; the result of cancelled work is undone."""

    async def body() -> None:
        assert await WORLD.run(lambda: 42, lambda _: None) == 42
        with pytest.raises(ZeroDivisionError):
            await WORLD.run(lambda: 1 // 0, lambda _: None)
        began, go, undone = threading.Event(), threading.Event(), threading.Event()

        def work() -> int:
            began.set()
            assert go.wait(SOON)
            return 42

        task = asyncio.ensure_future(WORLD.run(work, lambda result: undone.set()))
        assert await asyncio.to_thread(began.wait, SOON)
        task.cancel()
        await asyncio.wait([task])
        go.set()
        assert await asyncio.to_thread(undone.wait, SOON)

    on_loop(kind, body)
