"""Consul's blocking queries by themselves: replies, limits, interrupts, cancellations, forks.

The server answers a query with its own path: a reply that goes to another query is noticed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hazards.drivers import every_world, in_world
from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Reply
from holdfast.stores._consensus.hosts import Hosts
from holdfast.stores.consul import wakeups
from holdfast.stores.consul.agent import AgentEndpoint
from holdfast.stores.consul.wakeups import LongPoll, LongPolls, PollSource
from stores.fake_server import fake_server, http_reply

SOON = 30.0
BRIEF = 0.2


class Server:
    """Answers ``GET /now…`` at once and ``GET /late…`` when it is told to."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.late = threading.Event()
        self.asked = threading.Semaphore(0)
        self.resets = threading.Semaphore(0)
        """Counts the connections that the client has closed with a reset."""
        self.reply: Callable[[bytes], bytes] = http_reply

    def handle(self, connection: socket.socket) -> None:
        self.connections += 1
        rest = b""
        try:
            while data := connection.recv(65_536):
                *heads, rest = (rest + data).split(b"\r\n\r\n")
                for head in heads:
                    path = head.split(b" ")[1]
                    self.asked.release()
                    if path.startswith(b"/late"):
                        self._wait(connection)
                    connection.sendall(self.reply(path))
        except ConnectionResetError:
            self.resets.release()
            raise

    def _wait(self, connection: socket.socket) -> None:
        """Until the event is set; raises if the client closes the connection before."""
        connection.settimeout(0.01)
        while not self.late.is_set():
            try:
                if not connection.recv(1):
                    raise BrokenPipeError
            except TimeoutError:
                continue
        connection.settimeout(None)

    def polls(self, *, blocking: bool = True) -> LongPolls:
        hosts = (("127.0.0.1", self.port), ("127.0.0.1", self.port))
        known = Hosts("consul://test", hosts, tls=None, request_seconds=SOON)
        return LongPolls(AgentEndpoint(known), blocking=blocking)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with fake_server(made.handle) as made.port:
        yield made
        made.late.set()


async def ask(polls: LongPolls, path: str, seconds: float = SOON) -> LongPoll | None:
    line = f"GET /{path}".encode()
    return await polls.ask(path, line, now() + SOON, now() + seconds)


async def answer(polls: LongPolls, path: str) -> bytes:
    poll = await ask(polls, path)
    assert poll is not None
    assert isinstance(poll.reply, Reply)
    return poll.reply.body


async def all_of(kind: str, works: list[Callable[[], Coroutine[Any, Any, Any]]]) -> list[Any]:
    """Runs works beside each other, in threads or tasks."""
    if kind != "threads":
        return await asyncio.gather(*(work() for work in works))
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        results[number] = run_now(works[number]())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    return results


def sockets_to(port: int) -> int:
    """How many descriptors of this process are connected to the port."""
    found = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(path.stat().st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    found += one.getpeername()[1:2] == (port,)
    return found


def in_kind(kind: str, body: Callable[[], Awaitable[Any]]) -> None:
    async def run(_: object) -> None:
        await body()

    in_world(kind, run)


@every_world
def test_replies_come_to_those_who_asked(kind: str, server: Server) -> None:
    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")

        async def many(number: int) -> list[bytes]:
            first = await answer(polls, f"now-{number}-0")
            late = await answer(polls, f"late-{number}")
            return [first, late, *[await answer(polls, f"now-{number}-{n}") for n in range(1, 5)]]

        async def go() -> None:
            for _ in range(16):
                while not server.asked.acquire(blocking=False):
                    await polls.woken("pause", now() + 0.01)
            server.late.set()

        works = [partial(many, number) for number in range(8)]
        *found, _ = await all_of(kind, [*works, go])
        for number, bodies in enumerate(found):
            rest = [f"/now-{number}-{n}".encode() for n in range(1, 5)]
            assert bodies == [b"/now-%d-0" % number, b"/late-%d" % number, *rest]
        assert server.connections == 8
        polls.close()
        assert sockets_to(server.port) == 0

    in_kind(kind, body)


@every_world
def test_queries_are_limited(kind: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "MOST_POLLS", 3)

    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")

        async def one_more() -> object:
            for _ in range(3):
                while not server.asked.acquire(blocking=False):
                    await polls.woken("pause", now() + 0.01)
            more = await ask(polls, "now")
            server.late.set()
            return more

        works = [partial(answer, polls, f"late-{n}") for n in range(3)]
        *found, more = await all_of(kind, [*works, one_more])
        assert sorted(found) == [b"/late-0", b"/late-1", b"/late-2"]
        assert more is None
        assert await answer(polls, "now") == b"/now"
        polls.close()

    in_kind(kind, body)


@every_world
def test_a_query_that_ends_before_its_reply_ends_its_connection(kind: str, server: Server) -> None:
    """By its time, or by a nudge. Consul learns it by a reset; the next query has no old reply."""

    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")
        for nudged in (False, True):
            if nudged:
                polls.nudge("late")
            poll = await ask(polls, "late", SOON if nudged else BRIEF)
            assert poll is not None
            assert poll.reply is None
            assert not poll.broken
            assert poll.connection.endpoint.hosts.current == 0
            del poll
        server.late.set()
        assert await answer(polls, "now") == b"/now"
        polls.close()

    in_kind(kind, body)
    for _ in range(2):
        assert server.resets.acquire(timeout=SOON)
    assert sockets_to(server.port) == 0


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "closed": lambda _: b"",
    "garbage": lambda _: b"SSH-2.0\r\n",
    "early end": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab",
}


@every_world
@pytest.mark.parametrize("how", DAMAGED)
def test_a_reply_that_breaks_off_ends_its_own_query(kind: str, how: str, server: Server) -> None:
    """The other queries go on. Requests leave the host."""

    def reply(path: bytes) -> bytes:
        return http_reply(path) if b"good" in path else DAMAGED[how](path)

    server.reply = reply
    handle = server.handle

    def once(connection: socket.socket) -> None:
        handle(_OneReply(connection) if how != "garbage" else connection)  # type: ignore[arg-type]

    async def body(port: int) -> None:
        server.port = port
        polls = server.polls(blocking=kind == "threads")

        async def broken() -> LongPoll | None:
            while not server.asked.acquire(blocking=False):
                await polls.woken("pause", now() + 0.01)
            poll = await ask(polls, "now-bad")
            server.late.set()
            return poll

        good, bad = await all_of(kind, [partial(answer, polls, "late-good"), broken])
        assert good == b"/late-good"
        assert bad is not None
        assert bad.broken
        assert bad.connection.fd == -1
        assert bad.connection.endpoint.hosts.current == 1
        polls.close()

    with fake_server(once) as port:
        in_kind(kind, partial(body, port))


class _OneReply:
    """A connection that is closed after the first thing sent on it, if that is not a reply."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.recv, self.settimeout = connection.recv, connection.settimeout

    def sendall(self, data: bytes) -> None:
        self._connection.sendall(data)
        if b"good" not in data:
            raise BrokenPipeError


@every_world
def test_more_than_a_reply_ends_the_connection(kind: str, server: Server) -> None:
    server.reply = lambda path: http_reply(path) + b"HTTP/1.1 2"

    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")
        for number in range(3):
            assert await answer(polls, f"now-{number}") == b"/now-%d" % number
        assert sockets_to(server.port) == 0
        polls.close()

    in_kind(kind, body)
    assert server.connections == 3


@every_world
def test_an_idle_connection_that_was_closed_is_not_used(kind: str, server: Server) -> None:
    handle, served = server.handle, threading.Event()

    def once(connection: socket.socket) -> None:
        handle(_Counted(connection, 1))  # type: ignore[arg-type]
        connection.close()
        served.set()

    async def body(port: int) -> None:
        server.port = port
        polls = server.polls(blocking=kind == "threads")
        for number in range(3):
            served.clear()
            assert await answer(polls, f"now-{number}") == b"/now-%d" % number
            assert served.wait(SOON)
        polls.close()

    with fake_server(once) as port:
        in_kind(kind, partial(body, port))
    assert server.connections == 3


class _Counted:
    """A connection that ends after so many replies."""

    def __init__(self, connection: socket.socket, replies: int) -> None:
        self._connection, self._left = connection, replies
        self.settimeout = connection.settimeout

    def recv(self, size: int) -> bytes:
        return self._connection.recv(size) if self._left else b""

    def sendall(self, data: bytes) -> None:
        self._connection.sendall(data)
        self._left -= 1


@every_world
def test_a_host_that_was_left_gets_no_more_queries(kind: str, server: Server) -> None:
    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")
        poll = await ask(polls, "now")
        assert poll is not None
        first = poll.connection
        first.endpoint.hosts.failed(0)
        poll = await ask(polls, "now")
        assert poll is not None
        assert poll.connection is not first
        assert (poll.connection.host, first.fd) == (1, -1)
        polls.close()

    in_kind(kind, body)


def test_a_query_without_a_reply_does_not_make_its_host_silent(server: Server) -> None:
    """Else a request with a short deadline would leave a host that serves everybody."""
    polls = server.polls()
    poll = run_now(ask(polls, "late", BRIEF))
    assert poll is not None
    assert poll.connection.endpoint.silent == {}
    polls.close()


@every_world
def test_after_close_no_query_is_sent(kind: str, server: Server) -> None:
    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")

        async def close() -> None:
            while not server.asked.acquire(blocking=False):
                await polls.woken("pause", now() + 0.01)
            polls.close()

        async def late() -> bool:
            """Whether it ended without a reply."""
            try:
                poll = await ask(polls, "late")
            except BackendUnavailable as error:  # closed just when the query was sent
                return "closed" in str(error)
            return poll is not None and poll.reply is None

        ended, _ = await all_of(kind, [late, close])
        assert ended
        with pytest.raises(BackendUnavailable, match="closed"):
            await ask(polls, "now")
        assert sockets_to(server.port) == 0

    in_kind(kind, body)


SOURCE = ("own", "add", "remove", "read", "_receive", "take_idle", "fileno", "__init__")
PARTS = [
    *[
        (LongPolls, *step)
        for name in ("ask", "_ask", "_attached", "_open", "_send", "woken")
        for step in lines_of(getattr(LongPolls, name))
    ],
    *[(PollSource, *step) for name in SOURCE for step in lines_of(getattr(PollSource, name))],
]


@pytest.mark.parametrize(("owner", "name", "line"), PARTS)
def test_an_interrupt_at_every_line(
    owner: type, name: str, line: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No permit is lost, no mutex stays locked, no reply goes to another query."""
    monkeypatch.setattr(wakeups, "MOST_POLLS", 1)
    polls = server.polls()

    def use() -> None:
        assert run_now(answer(polls, "now-a")) == b"/now-a"
        assert run_now(answer(polls, "now-b")) == b"/now-b"
        run_now(ask(polls, "late", BRIEF / 10))

    with _quiet():
        torn_at(getattr(owner, name).__code__, line, use)
        gc.collect()
    found: list[bytes] = []

    def later() -> None:
        for number in range(3):
            ends = now() + SOON
            while now() < ends:
                poll = run_now(ask(polls, f"now-{number}"))
                if poll is not None and poll.reply is not None:
                    found.append(poll.reply.body)
                    break

    thread = threading.Thread(target=later)
    thread.start()
    thread.join(2 * SOON)
    assert found == [b"/now-0", b"/now-1", b"/now-2"]
    polls.close()
    gc.collect()
    assert sockets_to(server.port) == 0


@contextmanager
def _quiet() -> Iterator[None]:
    """A connection that only an interrupted frame had is closed by its destructor, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@pytest.mark.parametrize(("owner", "name", "line"), PARTS)
def test_a_signal_handler_may_query_at_every_line(
    owner: type, name: str, line: int, server: Server
) -> None:
    """If the handler runs in the thread that reads for all, nothing reads its reply."""
    polls, seen = server.polls(), list[LongPoll | None]()

    def handle() -> None:
        seen.append(run_now(ask(polls, "now-handler", BRIEF)))

    def use() -> None:
        assert run_now(answer(polls, "now-a")) == b"/now-a"
        assert run_now(answer(polls, "now-b")) == b"/now-b"

    thread = threading.Thread(
        target=lambda: handled_at(getattr(owner, name).__code__, line, use, handle)
    )
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive()
    for poll in seen:
        assert poll is not None
        assert poll.reply in (None, Reply(200, b"/now-handler"))
    assert run_now(answer(polls, "now-after")) == b"/now-after"
    polls.close()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
@pytest.mark.parametrize("warm", [True, False])
def test_a_cancellation_at_every_await(
    kind: str, warm: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "MOST_POLLS", 1)

    async def body() -> None:
        for steps in range(60):
            polls = server.polls(blocking=False)
            if warm:
                assert await answer(polls, "now") == b"/now"
            task = asyncio.ensure_future(ask(polls, "now-torn"))
            for _ in range(steps):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.wait([task])
            assert await answer(polls, "now-after") == b"/now-after"
            polls.close()
            assert sockets_to(server.port) == 0
            if done:
                return

    in_kind(kind, body)


@every_world
def test_a_forked_child_has_no_connection_of_its_parent(kind: str, server: Server) -> None:
    """Neither idle ones, nor those of other threads; and the parent's queries go on."""

    async def body() -> None:
        polls = server.polls(blocking=kind == "threads")

        async def fork() -> int:
            for _ in range(3):
                while not server.asked.acquire(blocking=False):
                    await polls.woken("pause", now() + 0.01)
            assert await answer(polls, "now-idle") == b"/now-idle"
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    polls.forget()
                    code = sockets_to(server.port) * 10
                    if kind == "threads":
                        code += run_now(answer(polls, "now-child")) != b"/now-child"
                        polls.close()
                        code += sockets_to(server.port)
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - its loop has nothing else to do
            server.late.set()
            return os.waitstatus_to_exitcode(status)

        works = [partial(answer, polls, f"late-{n}") for n in range(3)]
        *found, code = await all_of(kind, [*works, fork])
        assert code == 0
        assert found == [b"/late-0", b"/late-1", b"/late-2"]
        assert await answer(polls, "now-parent") == b"/now-parent"
        polls.close()

    in_kind(kind, body)


def test_a_forked_child_goes_on_with_the_loop_that_it_inherits(server: Server) -> None:
    """The number of the parent's selector stays taken: the loop believes to know it."""
    server.late.set()
    with asyncio.Runner() as runner:
        polls = server.polls(blocking=False)
        assert runner.run(answer(polls, "now")) == b"/now"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                polls.forget()
                loop = runner.get_loop()
                code = loop.run_until_complete(answer(polls, "now-child")) != b"/now-child"
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        polls.close()
