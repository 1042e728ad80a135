"""An interrupt at every line of code that threads share: the other threads continue."""

from __future__ import annotations

import gc
import socket
import threading

import pytest

from hazards.tearing import handled_at, lines_of, torn_at
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.limits import ConnectionLimit
from holdfast.io.wakeups import BlockingWakeupHub
from holdfast.stores.redis.replies import RedisConnectionBroken
from holdfast.stores.redis.url import Access
from holdfast.stores.redis.wakeups import BlockingWakeups
from holdfast.stores.redlock.broadcast_blocking import BlockingBroadcast
from holdfast.stores.redlock.nodes import Nodes

SOON = 30.0


class Subscription:
    """A subscription that reads keys from a socket."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.tokens: dict[str, int] = {}

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
        for each in ("attach", "wake", "_wake", "wait", "_leave", "_read", "close")
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


@pytest.mark.parametrize(("name", "line"), lines_of(BlockingWakeups._subscribe))
def test_after_an_interrupted_subscribe_others_can_subscribe(name: str, line: int) -> None:
    """Else they would poll for ever."""
    made: list[Subscription] = []

    async def subscribe(channel: str, until: float) -> Subscription:
        made.append(Subscription())
        return made[-1]

    wakeups = BlockingWakeups("channel")

    def wait(until: float) -> object:
        return run_now(wakeups.wait("key", wakeups.generation, until, subscribe))  # type: ignore[arg-type]

    torn_at(getattr(BlockingWakeups, name).__code__, line, lambda: wait(now() + SOON))

    def listen() -> None:
        until = now() + SOON
        while not wakeups.generation and now() < until:
            wait(until)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(2 * SOON)
    assert wakeups.generation
    run_now(wakeups.close())
    for subscription in made:  # one that was torn off is nobody's
        subscription.close()


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
