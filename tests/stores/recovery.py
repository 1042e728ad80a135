"""How soon after a fault a name is to be had again, and who gets it then: at either client.

What is written here once runs at both, on a thread that belongs to it. A fault is shown to both
clients at the same time, each with names of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

import holdfast
from holdfast.core.drive import run_now
from holdfast.errors import HoldfastError
from holdfast.io.clock import now
from holdfast.locks_async import AsyncLocks
from holdfast.testing import Flavour
from holdfast.testing.clients import open_client, run_here
from servers.ensemble import Trio
from servers.process import Server, wait_until

__all__ = [
    "CALM",
    "SOON",
    "Bound",
    "Recovery",
    "Taken",
    "Tell",
    "at_both",
    "client",
    "drive",
    "name_at",
    "next_token",
    "nothing_is_left",
    "recovers",
]

BEAT_SECONDS = 1.0
LET_IN_SECONDS = 1.0
"""Within what the next one is let in once a name is free."""
CALM = 20.0
"""The ttl of those who are not to lose what they hold."""
SOON = 60.0
"""Far more than two ttls and an election, on a machine that is busy: what counts is the order."""
Tell = Callable[[str, object], None]
"""pytest's ``record_property``."""
T = TypeVar("T")


class Bound(NamedTuple):
    """Within how many seconds somebody else has a name."""

    seconds: float
    elected: float
    """The same, counted from an election: a machine that is busy may bring one about."""


class Taken(NamedTuple):
    """What somebody got."""

    token: int
    entered: float
    """When its block was entered."""


def drive(flavour: Flavour, work: Coroutine[Any, Any, T]) -> T:
    """Does it at that client: from here on nothing suspends, or a loop of its own runs."""
    return run_now(work) if flavour is Flavour.BLOCKING else asyncio.run(work)


def at_both(work: Callable[[Flavour], T]) -> dict[Flavour, T]:
    """Does it at both clients at the same time."""
    with ThreadPoolExecutor(len(Flavour)) as pool:
        under_way = {flavour: pool.submit(work, flavour) for flavour in Flavour}
    return {flavour: done.result() for flavour, done in under_way.items()}


def client(
    url: str, flavour: Flavour, namespace: str, ttl: float = CALM, *, patience: float = SOON
) -> AsyncLocks:
    """For ``drive``."""
    return open_client(url, flavour, run_here, namespace=namespace, ttl=ttl, patience=patience)


def name_at(flavour: Flavour, name: str = "name") -> str:
    """What a name is called at one of the clients."""
    return f"{name} {flavour}"


def next_token(
    url: str, namespace: str, flavour: Flavour, name: str, timeout: float = SOON
) -> Taken:
    """Takes the lock, waits for it if need be, and gives it back."""

    async def take() -> Taken:
        async with (
            client(url, flavour, namespace) as locks,
            locks.lock(name, timeout=timeout) as lease,
        ):
            return Taken(lease.token, now())

    return drive(flavour, take())


class Recovery:
    """Takes and gives back a lock of its own, with a second's pause, from the fault on.

    Each of these beats is a second or more in which the store worked. An election has none, and
    a machine that is busy has fewer of them, for whatever keeps the next holder waiting keeps the
    beat waiting, too. So their number can be held to what is documented, unlike seconds. With an
    election what is documented begins anew.
    """

    def __init__(self, trio: Trio[Any], namespace: str, without: Server | None = None) -> None:
        self._trio, self._without, self._namespace = trio, without, namespace
        self._beats: list[float] = []
        self._term = 0
        self._elections = 0
        self._began = now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return self._trio.url if self._without is None else self._trio.others(self._without)

    def _run(self) -> None:
        with holdfast.connect(
            self.url, namespace=self._namespace, ttl=CALM, patience=SOON
        ) as locks:
            while not self._over.wait(BEAT_SECONDS):
                with suppress(HoldfastError), locks.lock("beat", timeout=SOON):
                    self._beat()

    def _beat(self) -> None:
        term = self._trio.term(self._without) or self._term
        if term != self._term:
            self._elections += 1
            self._term, self._beats = term, []
        self._beats.append(now())

    def within(self, bound: Bound, moment: float, tell: Tell) -> None:
        """At that moment somebody had it: after no more beats than so many seconds have, and the
        one in which it was let in."""
        beats = len([beat for beat in self._beats if beat < moment])
        seconds = bound.elected if self._elections else bound.seconds
        took = f"{moment - self._began:.1f} s, {self._elections} elections"
        tell("recovery", f"{beats} beats in {took}; documented: {seconds:.1f} s")
        assert beats * BEAT_SECONDS <= seconds + LET_IN_SECONDS, f"{beats} beats in {took}"

    def __enter__(self) -> Self:
        self._term = self._trio.term(self._without)
        self._began = now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def recovers(
    trio: Trio[Any],
    namespace: str,
    bound: Bound,
    tell: Tell,
    *,
    without: Server | None = None,
    name: str = "name",
) -> dict[Flavour, Taken]:
    """Who takes the names of both clients next: within what is documented, from the servers that
    are there."""
    with Recovery(trio, namespace, without) as recovery:
        taken = at_both(lambda at: next_token(recovery.url, namespace, at, name_at(at, name)))
        for each in taken.values():
            recovery.within(bound, each.entered, tell)
    return taken


def nothing_is_left(trio: Any, namespace: str) -> None:
    """Of all that these clients kept on the servers, once their sessions are over at the latest."""
    found: list[str] = []

    def empty() -> bool:
        found[:] = trio.left(namespace)
        return not found

    wait_until("an empty store", empty, SOON, on_failure=lambda: "\n".join(found))
