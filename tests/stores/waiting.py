"""Waits that only a wake-up ends, for both kinds of client. Use with ``no_recheck``."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import holdfast
from holdfast.testing import Flavour
from servers.ports import LOOPBACK, free_port, give_back
from servers.process import Server, wait_until
from servers.pump import Pump
from stores.recovery import SOON, Taken, name_at, next_token

__all__ = ["wait_for_waiter", "waited_for", "waits_across"]

LONG = 2 * SOON
"""Longer than a test: a waiter attempts a last time when its timeout is over."""
QUIET_SECONDS = 1.0
"""Longer than the polling interval of a waiter without wake-ups, shorter than a heartbeat."""


class Waited(NamedTuple):
    """A hold, and a claim that waits for its end with a timeout longer than the test."""

    held: holdfast.Lease
    later: Future[Taken]

    def got(self, within: float) -> bool:
        """Whether the waiter is granted the name within so many seconds."""
        return bool(wait([self.later], within).done)

    def wake(self) -> None:
        """Check that the claim still waits, and that a release of the hold grants it."""
        assert not self.later.done()
        assert self.held.release() is True
        assert self.later.result(SOON).token > self.held.token


def wait_for_waiter(locks: holdfast.Locks, name: str = "name") -> None:
    """Wait until a claim waits in the queue of the name."""
    wait_until("a waiter", lambda: bool(locks.inspect(name).waiters))


@contextmanager
def _waited(
    locks: holdfast.Locks,
    pool: ThreadPoolExecutor,
    url: str,
    namespace: str,
    flavour: Flavour,
    name: str,
) -> Iterator[Waited]:
    held = locks.lock(name).acquire()
    assert held
    try:
        later = pool.submit(next_token, url, namespace, flavour, name, LONG)
        wait_for_waiter(locks, name)
        yield Waited(held, later)
    finally:
        held.release()  # after a failure the test must not wait for the timeout


class Passage(Pump):
    """A proxy between a waiter and its server, to see whether the waiter sends requests."""

    def __init__(self, url: str) -> None:
        """``url`` names a server on loopback, with its port."""
        server = f"{LOOPBACK}:"
        before, _, rest = url.partition(server)
        port = re.match("[0-9]+", rest)
        assert port is not None
        super().__init__(free_port(), (LOOPBACK, int(port[0])))
        self.url = f"{before}{server}{self.port}{rest[port.end() :]}"

    def grow_quiet(self) -> None:
        """Wait until no request was sent for ``QUIET_SECONDS``. Never true for a waiter that
        polls."""

        def quiet() -> bool:
            sent = self.counts.bytes_to_server
            threading.Event().wait(QUIET_SECONDS)
            return sent == self.counts.bytes_to_server

        wait_until("a quiet waiter", quiet)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.do(lambda: setattr(self, "ending", True))
        self.join()
        give_back(self.port)


@contextmanager
def waited_for(url: str, namespace: str, flavour: Flavour, through: str = "") -> Iterator[Waited]:
    """Yield a hold and a claim that waits for it without polling. At the end of the block the hold
    is released, which must wake the claim. The waiter uses the URL ``through`` if it is given."""
    with (
        Passage(url) as passage,
        holdfast.connect(url, namespace=namespace, patience=SOON) as locks,
        ThreadPoolExecutor(1) as pool,
    ):
        there = through or passage.url
        with _waited(locks, pool, there, namespace, flavour, "name") as waited:
            passage.grow_quiet()
            yield waited
            waited.wake()


@contextmanager
def waits_across(trio: Any, namespace: str, ttl: float) -> Iterator[Server]:
    """Start waits with both kinds of client: with a URL that begins with the leader, and with a URL
    of the other servers only. Yield the leader, to which the block does something. Once there is a
    leader again, check that all claims still wait and that a release wakes each."""
    leader = trio.leader()
    others = [node for node in trio.nodes if node is not leader]
    urls = {"leader": trio.url_of(leader, *others), "others": trio.url_of(*others)}
    waiters = [(name_at(at, side), urls[side], at) for side in urls for at in Flavour]
    with (
        holdfast.connect(trio.url, namespace=namespace, ttl=ttl, patience=SOON) as ours,
        ThreadPoolExecutor(len(waiters)) as pool,
        ExitStack() as stack,
    ):
        waits = [
            stack.enter_context(_waited(ours, pool, url, namespace, at, name))
            for name, url, at in waiters
        ]
        yield leader
        with ours.lock("free", timeout=SOON):
            pass
        for waited in waits:
            waited.held.check()
            waited.wake()
