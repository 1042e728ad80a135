"""An interrupt at every line of code that threads share: the other threads continue."""

from __future__ import annotations

import asyncio
import gc
import select
import socket
import threading
from typing import Any

import pytest

from hazards.drivers import Failed, Lines, LinesEndpoint, Numbered
from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.core.drive import run_now
from holdfast.io.aio import WORLD, Channel
from holdfast.io.clock import now
from holdfast.io.limits import ConnectionLimit
from holdfast.io.wakeups import BlockingWakeupHub, Wakeups
from holdfast.stores.redis.replies import RedisConnectionBroken
from holdfast.stores.redis.url import Access
from holdfast.stores.redlock.broadcast_blocking import BlockingBroadcast
from holdfast.stores.redlock.nodes import Nodes
from stores.fake_server import fake_server

SOON = 30.0
SUBSCRIBE_SECONDS = 5.0


class Subscription:
    """A subscription that reads keys from a socket."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.values: dict[str, int] = {}

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> list[str]:
        return self._ours.recv(4096).decode().split()

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


@pytest.mark.parametrize(
    ("name", "line"),
    [*lines_of(BlockingWakeupHub._leave), *lines_of(BlockingWakeupHub._choose_reader)],
)
def test_a_reader_that_is_interrupted_as_it_leaves(name: str, line: int) -> None:
    """Another waiter is still woken, and so is a later one."""
    subscription, hub = Subscription(), BlockingWakeupHub()
    hub.attach(subscription)
    woken: list[bool] = []

    def follow() -> None:
        woken.append(hub.wait("follower", now() + SOON))

    follower = threading.Thread(target=follow)

    def lead() -> None:
        """Waits as the reader until another waiter has joined, and then until it is woken."""
        follower.start()
        until = now() + SOON
        while "follower" not in hub._waiting and now() < until:
            hub.wait("leader", now() + 0.01)
        subscription.theirs.send(b"leader ")
        hub.wait("leader", now() + SOON)

    torn_at(getattr(BlockingWakeupHub, name).__code__, line, lead)
    subscription.theirs.send(b"follower ")
    follower.join(SOON)
    assert woken == [True]
    subscription.theirs.send(b"newcomer ")
    assert hub.wait("newcomer", now() + SOON)
    hub.close()


def test_an_interrupt_ends_a_subscription_for_all() -> None:
    """What was read is lost, so the next reader gets the error that the subscription is broken."""
    subscription, hub = Subscription(), BlockingWakeupHub()
    hub.attach(subscription)
    subscription.theirs.send(b"leader ")

    def torn() -> list[str]:
        raise KeyboardInterrupt

    subscription.read = torn  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        hub.wait("leader", now() + SOON)
    assert hub.subscription is None
    with pytest.raises(OSError, match="interrupt"):
        hub.wait("follower", now() + SOON)
    another = Subscription()
    hub.attach(another)
    another.theirs.send(b"follower ")
    assert hub.wait("follower", now() + SOON)
    hub.close()


def test_a_subscription_that_breaks_ends_all_waits() -> None:
    """One waiter gets the error; the others could never be woken."""
    subscription, hub = Subscription(), BlockingWakeupHub()
    hub.attach(subscription)
    results: list[object] = []

    def broken() -> list[str]:
        raise OSError("gone")

    def wait(key: str) -> None:
        try:
            results.append(hub.wait(key, now() + 2 * SOON))
        except OSError:
            results.append("gone")

    subscription.read = broken  # type: ignore[method-assign]
    waits = [threading.Thread(target=wait, args=(key,), daemon=True) for key in ("one", "other")]
    for thread in waits:
        thread.start()
    until = now() + SOON
    while len(hub._waiting) < len(waits) and now() < until:
        pass
    subscription.theirs.send(b"x")
    for thread in waits:
        thread.join(SOON)
    assert sorted(results, key=str) == [True, "gone"]
    hub.close()


def test_a_subscription_attached_after_close_is_closed() -> None:
    """Its opener did not know that the hub was closed."""
    subscription, hub = Subscription(), BlockingWakeupHub()
    hub.close()
    hub.attach(subscription)
    assert hub.subscription is None
    assert subscription.fileno() == -1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        step
        for each in ("attach", "wake", "_wake", "wait", "_open", "_leave", "_read", "close")
        for step in lines_of(getattr(BlockingWakeupHub, each))
    ],
)
def test_a_signal_handler_may_wait_in_the_middle_of_anything(name: str, line: int) -> None:
    """It waits until its own deadline, not for its own thread; the interrupted waiter is woken."""
    subscription, hub = Subscription(), BlockingWakeupHub()
    woken: list[bool] = []

    def work() -> None:
        hub.attach(subscription)
        hub.wake("leader")
        woken.append(hub.wait("leader", now() + SOON))
        subscription.theirs.send(b"leader ")
        woken.append(hub.wait("leader", now() + SOON))
        hub.close()

    def handle() -> None:
        hub.wait("handler", now() + 0.002)

    code = getattr(BlockingWakeupHub, name).__code__
    # In a thread that may be left behind: nothing ends one that waits for itself.
    thread = threading.Thread(target=handled_at, args=(code, line, work, handle), daemon=True)
    thread.start()
    thread.join(2 * SOON)
    assert woken == [True, True]
    gc.collect()  # a socket that was left open is a warning, and so a failure, of this test


@pytest.mark.parametrize(
    ("name", "line"), [*lines_of(Wakeups._subscribe), *lines_of(Wakeups._attach)]
)
def test_after_an_interrupted_subscribe_others_can_subscribe(name: str, line: int) -> None:
    """Else they would poll for ever."""
    made: list[Subscription] = []
    woken: list[bool] = []

    async def subscribe(until: float) -> Subscription:
        made.append(Subscription())
        return made[-1]

    wakeups = Wakeups(blocking=True)

    def wait(until: float) -> object:
        return run_now(wakeups.wait("key", wakeups.generation, until, subscribe))  # type: ignore[arg-type]

    torn_at(getattr(Wakeups, name).__code__, line, lambda: wait(now() + SOON))

    def listen() -> None:
        until = now() + SOON
        while not wakeups.generation and now() < until:
            wait(until)
        made[-1].theirs.send(b"key ")
        woken.append(wait(until) is None and now() < until)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(2 * SOON)
    assert wakeups.generation
    assert woken == [True]
    wakeups.close()
    for subscription in made:  # one that was torn off is nobody's
        subscription.close()


@pytest.mark.parametrize(
    ("owner", "name", "line"),
    [
        (owner, *step)
        for owner, names in ((Wakeups, ("wait",)), (BlockingWakeupHub, ("_break", "_read")))
        for name in names
        for step in lines_of(getattr(owner, name))
    ],
)
def test_after_an_interrupt_as_a_subscription_breaks_others_subscribe_again(
    owner: type, name: str, line: int
) -> None:
    """Else nobody is woken any more."""
    made: list[Subscription] = []

    async def subscribe(until: float) -> Subscription:
        made.append(Subscription())
        return made[-1]

    def broken() -> list[str]:
        raise OSError("gone")

    wakeups = Wakeups(blocking=True)

    def wait(until: float) -> object:
        return run_now(wakeups.wait("key", wakeups.generation, until, subscribe))  # type: ignore[arg-type]

    wait(now() + SOON)  # subscribes
    made[0].read = broken  # type: ignore[method-assign]
    made[0].theirs.send(b"x")
    torn_at(getattr(owner, name).__code__, line, lambda: wait(now() + SOON))
    until = now() + SUBSCRIBE_SECONDS
    while len(made) == 1 and now() < until:
        wait(now() + 0.05)
    assert len(made) == 2
    made[1].theirs.send(b"key ")
    until = now() + SOON
    wait(until)
    assert now() < until
    wakeups.close()
    made[0].close()


class Impatient(LinesEndpoint):
    request_seconds = 0.4


def echo_until_silent(connection: socket.socket) -> None:
    """Sends back what it gets, until that has the word ``silent``."""
    while (data := connection.recv(65_536)) and b"silent" not in data:
        connection.sendall(data)
    while data:
        data = connection.recv(65_536)


def use(channel: Channel, made: list[asyncio.Future[Any]]) -> None:
    """Goes through every part of a channel, in one step of its loop; adds what it made."""
    made.append(channel.request(b"one\n"))
    made += channel.requests([b"two\n", b"three\n"])
    for _ in range(3):
        select.select([channel.connection.fd], [], [], 0.25)
        channel._readable()
    channel._time()
    made.append(channel.request(b"x" * 8_000_000 + b"\n"))
    channel._writable()
    channel._time()


@pytest.mark.parametrize("kind", [Lines, Numbered])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        step
        for each in (
            *("request", "requests", "_begin_timing", "_write_later", "_writable", "_readable"),
            *("_in_order", "_by_ticket", "_first", "_time"),
        )
        for step in lines_of(getattr(Channel, each))
    ],
)
def test_an_interrupt_at_every_line_of_a_channel(name: str, line: int, kind: type[Lines]) -> None:
    """Each request gets its own reply or fails, also if the server is silent."""
    made: list[asyncio.Future[Any]] = []

    async def later(channel: Channel, text: bytes) -> Any:
        try:
            return await asyncio.wait_for(channel.request(text + b"\n"), SOON)
        except Failed:
            return "failed"

    async def body() -> None:
        endpoint = Impatient(port, kind)
        channel = Channel(await endpoint.open(WORLD, now() + SOON), endpoint)
        torn_at(getattr(Channel, name).__code__, line, lambda: use(channel, made))
        texts = [b"later", b"still later", b"last"]
        replies = await asyncio.gather(*(later(channel, text) for text in texts))
        assert replies in (texts, ["failed"] * 3)
        assert await later(channel, b"silent") == "failed"
        waiting = [future for future in made if not future.done()]
        assert not waiting, "a request that never ends"
        channel.close()
        for future in made:
            future.exception()  # else its loop complains

    with fake_server(echo_until_silent) as port:
        asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "line"), [*lines_of(ConnectionLimit.take), *lines_of(ConnectionLimit.call)]
)
def test_a_connection_limit_loses_no_permit(name: str, line: int) -> None:
    """A thread that is interrupted as it takes a permit loses no permit and leaves no lock
    taken."""
    connection_limit = ConnectionLimit(1)
    torn_at(getattr(ConnectionLimit, name).__code__, line, getattr(connection_limit, name))
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(connection_limit.take()))
    thread.start()
    thread.join(SOON)
    assert taken
    assert taken[0] is not None
    assert connection_limit.take() is None
    connection_limit.free(taken.pop())  # type: ignore[arg-type]
    assert connection_limit.take() is not None


@pytest.mark.parametrize(
    ("name", "line"), [*lines_of(BlockingBroadcast._take), *lines_of(BlockingBroadcast._give)]
)
def test_a_broadcast_loses_no_connections(name: str, line: int) -> None:
    """A thread that is interrupted as it takes or returns the connections of Redlock loses none."""
    access = Access(tls=False, options={}, request_seconds=SOON)
    broadcast = BlockingBroadcast(access, Nodes([], display="nowhere", allow_eviction=True), 1)

    def use() -> None:
        broadcast._give(broadcast._take(None))

    torn_at(getattr(BlockingBroadcast, name).__code__, line, use)
    gc.collect()  # what the interrupt has kept alive
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(broadcast._take(None)))
    thread.start()
    thread.join(2 * SOON)
    assert taken
    with pytest.raises(RedisConnectionBroken, match="busy"):
        broadcast._take(now())
