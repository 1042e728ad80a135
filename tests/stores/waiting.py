"""Waits that only a wake-up ends, at either client: use with ``no_recheck``."""

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
"""At the end of its timeout a waiter looks once more, too."""
QUIET_SECONDS = 1.0
"""Longer than who is not woken waits before it looks again; heartbeats are rarer."""


class Waited(NamedTuple):
    """A hold, and the one who waits for its end, for longer than a test does."""

    held: holdfast.Lease
    later: Future[Taken]

    def got(self, within: float) -> bool:
        """Whether it has got the name within so many seconds."""
        return bool(wait([self.later], within).done)

    def wake(self) -> None:
        """It still waits, and gets the name by the release."""
        assert not self.later.done()
        assert self.held.release() is True
        assert self.later.result(SOON).token > self.held.token


def wait_for_waiter(locks: holdfast.Locks, name: str = "name") -> None:
    """Returns once somebody stands in line for the name."""
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
        held.release()  # what has failed shall not take as long as it would wait


class Passage(Pump):
    """What a waiter reaches its server through, to see whether it is quiet there."""

    def __init__(self, url: str) -> None:
        """The URL names a server on loopback, with its port."""
        server = f"{LOOPBACK}:"
        before, _, rest = url.partition(server)
        port = re.match("[0-9]+", rest)
        assert port is not None
        super().__init__(free_port(), (LOOPBACK, int(port[0])))
        self.url = f"{before}{server}{self.port}{rest[port.end() :]}"

    def grow_quiet(self) -> None:
        """Returns once nothing has been asked for a while: who looks now and then never does."""

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
    """A hold for which somebody waits, without a word: its release, at the block's end, wakes it.
    It waits through another URL, if one is given."""
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
    """Somebody waits at each client, asking the leader first, and at each asking the others alone.
    In the block something happens to the leader. Once there is one again all still wait, and are
    woken by the release of what they wait for."""
    leader = trio.leader()
    others = [node for node in trio.nodes if node is not leader]
    urls = {"leader": trio.url_of(leader, *others), "others": trio.url_of(*others)}
    places = [(name_at(at, side), urls[side], at) for side in urls for at in Flavour]
    with (
        holdfast.connect(trio.url, namespace=namespace, ttl=ttl, patience=SOON) as ours,
        ThreadPoolExecutor(len(places)) as pool,
        ExitStack() as stack,
    ):
        waits = [
            stack.enter_context(_waited(ours, pool, url, namespace, at, name))
            for name, url, at in places
        ]
        yield leader
        with ours.lock("free", timeout=SOON):
            pass
        for waited in waits:
            waited.held.check()
            waited.wake()
