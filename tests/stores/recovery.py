"""How soon after a fault a lock can be acquired again, with a blocking and an asyncio client.

Each check is written once and runs for both kinds of client, on a thread of its own. Both clients
see the same fault at the same time, each with names of its own.
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
"""The longest time until the next claim is granted once a name is free."""
CALM = 20.0
"""The ttl of holds that must not be lost."""
SOON = 60.0
"""Far more than two ttls and an election, also on a busy machine. The tests check the order of
events, not this time."""
Tell = Callable[[str, object], None]
"""pytest's ``record_property``."""
T = TypeVar("T")


class Bound(NamedTuple):
    """Within how many seconds the next claim must be granted."""

    seconds: float
    elected: float
    """The same, counted from an election: a busy machine may cause one."""


class Taken(NamedTuple):
    """A grant."""

    token: int
    entered: float
    """When the ``with`` block was entered."""


def drive(flavour: Flavour, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine with that kind of client: without a loop, or in a new event loop."""
    return run_now(work) if flavour is Flavour.BLOCKING else asyncio.run(work)


def at_both(work: Callable[[Flavour], T]) -> dict[Flavour, T]:
    """Run work for both kinds of client at the same time."""
    with ThreadPoolExecutor(len(Flavour)) as pool:
        under_way = {flavour: pool.submit(work, flavour) for flavour in Flavour}
    return {flavour: done.result() for flavour, done in under_way.items()}


def client(
    url: str, flavour: Flavour, namespace: str, ttl: float = CALM, *, patience: float = SOON
) -> AsyncLocks:
    """Return a client for use in ``drive``."""
    return open_client(url, flavour, run_here, namespace=namespace, ttl=ttl, patience=patience)


def name_at(flavour: Flavour, name: str = "name") -> str:
    """Return the lock name that one kind of client uses."""
    return f"{name} {flavour}"


def next_token(
    url: str, namespace: str, flavour: Flavour, name: str, timeout: float = SOON
) -> Taken:
    """Acquire the lock, waiting if needed, and release it."""

    async def take() -> Taken:
        async with (
            client(url, flavour, namespace) as locks,
            locks.lock(name, timeout=timeout) as lease,
        ):
            return Taken(lease.token, now())

    return drive(flavour, take())


class Recovery:
    """Measures the time after a fault in beats of the store instead of seconds.

    From the fault on, a thread acquires and releases a lock of its own, with a pause of a second.
    Each of these beats is a second or more in which the store worked. There is no beat during an
    election, and there are fewer on a busy machine: a delay of the next holder delays the beats
    too. So the number of beats can be compared with the documented time; seconds could not. After
    an election the count starts again.
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
        """Check that a grant at ``moment`` came within the documented number of beats, plus
        ``LET_IN_SECONDS``."""
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
    """Acquire the names of both clients from the remaining servers, and check that this takes no
    longer than documented. Returns the grants."""
    with Recovery(trio, namespace, without) as recovery:
        taken = at_both(lambda at: next_token(recovery.url, namespace, at, name_at(at, name)))
        for each in taken.values():
            recovery.within(bound, each.entered, tell)
    return taken


def nothing_is_left(trio: Any, namespace: str) -> None:
    """Wait until the servers have no key of the namespace; sessions may have to expire first."""
    found: list[str] = []

    def empty() -> bool:
        found[:] = trio.left(namespace)
        return not found

    wait_until("an empty store", empty, SOON, on_failure=lambda: "\n".join(found))
