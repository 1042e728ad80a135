"""The interface of what is measured, and Holdfast as one implementation of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

__all__ = ["Book", "Client", "Contender", "Pair", "Role", "Target", "ours"]

Role = Literal["ours", "peer", "library", "limit", "least"]
"""``limit`` sends the same requests prebuilt, ``least`` what an unfenced lock could do with,
``library`` the same requests through the bare client library."""
Flavour = Literal["blocking", "asyncio"]

UNCONTENDED, CONTENDED, DRAIN, HELD, REDLOCK = (
    "uncontended",
    "contended",
    "drain",
    "held",
    "redlock",
)
TTL_SECONDS = 30.0
HELD_TTL_SECONDS = 10.0


class Pair(NamedTuple):
    """One lock as one worker sees it. Of an asyncio contender, both are coroutine functions."""

    acquire: Callable[[], Any]
    """Waits until it is ours; may answer a token."""
    release: Callable[[], Any]


class Client(NamedTuple):
    """An open connection, or several, of one contender."""

    lock: Callable[[str], Pair]
    close: Callable[[], Any]


class Target(NamedTuple):
    """Where a contender is pointed at, and what can be seen of it from outside."""

    url: str
    pids: tuple[int, ...] = ()
    """Roots of the server's processes, where they are on this machine and ours to pin."""
    namespace: str = "holdfast-bench"


Opener = Callable[[Target], "Client | Awaitable[Client]"]


@dataclass(frozen=True)
class Contender:
    """One row of a table."""

    name: str
    store: str
    role: Role
    flavour: Flavour
    open: Opener
    cases: frozenset[str] = frozenset({UNCONTENDED, CONTENDED})
    open_held: Opener | None = None
    """Opens it with renewal and a ttl of ``HELD_TTL_SECONDS``, where it can renew."""

    @property
    def key(self) -> str:
        """Unique in a book."""
        return f"{self.store}/{self.name}"


class Book(Protocol):
    """A module that knows contenders: what a worker process imports."""

    def contenders(self) -> list[Contender]: ...

    def request_counter(self, store: str, url: str, /) -> Callable[[], float] | None:
        """Something that tells how many requests the server has had, where it counts them."""
        ...


def _open_blocking(ttl: float) -> Opener:
    def opened(target: Target) -> Client:
        import holdfast

        locks = holdfast.connect(target.url, namespace=target.namespace, ttl=ttl)

        def lock(name: str) -> Pair:
            made = locks.lock(name)

            def acquire() -> int:
                lease = made.acquire()
                assert lease is not None
                return lease.token

            return Pair(acquire, made.release)

        return Client(lock, locks.close)

    return opened


def _open_asyncio(ttl: float) -> Opener:
    async def opened(target: Target) -> Client:
        import holdfast

        locks = holdfast.connect_async(target.url, namespace=target.namespace, ttl=ttl)

        def lock(name: str) -> Pair:
            made = locks.lock(name)

            async def acquire() -> int:
                lease = await made.acquire()
                assert lease is not None
                return lease.token

            return Pair(acquire, made.release)

        return Client(lock, locks.close)

    return opened


def ours(
    store: str, name: str = "Holdfast", cases: frozenset[str] | None = None
) -> list[Contender]:
    """Both clients of Holdfast on one store."""
    played = frozenset({UNCONTENDED, CONTENDED, DRAIN, HELD}) if cases is None else cases
    return [
        Contender(
            name,
            store,
            "ours",
            "blocking",
            _open_blocking(TTL_SECONDS),
            played,
            _open_blocking(HELD_TTL_SECONDS),
        ),
        Contender(
            f"{name} asyncio",
            store,
            "ours",
            "asyncio",
            _open_asyncio(TTL_SECONDS),
            played,
            _open_asyncio(HELD_TTL_SECONDS),
        ),
    ]
