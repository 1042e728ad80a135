"""The sessions of one client: one per ttl, shared by its blocking and its asyncio backend.

A session is what the store calls a lease or a session: it lives while it is kept alive, and
everything bound to it ends with it. Time is certain from before the last answered keep-alive
was sent. Nothing here touches a store.
"""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from holdfast.claim import Claim
from holdfast.core.contract import Runtime

if TYPE_CHECKING:
    import asyncio

__all__ = ["Attempt", "RuntimeLock", "Session", "Sessions", "whole"]

# A session that was not kept alive for longer than this share of its ttl is asked for first.
FRESH_SHARE = 0.5


def whole(ttl: float) -> int:
    """A ttl in the whole seconds that sessions have."""
    return math.ceil(ttl)


class Session:
    """One session that the store knows."""

    __slots__ = ("generation", "id", "since", "ttl")

    def __init__(self, session_id: str, ttl: int, since: float) -> None:
        self.id, self.ttl, self.since = session_id, ttl, since
        self.generation = 0
        """What the session's guard must say for a request of ours to count."""

    def fresh(self, now: float, ttl: float | None = None) -> bool:
        """Whether enough certain time is left to put a hold on it without asking; ``ttl`` is the
        hold's, where that is another one."""
        return now - self.since < (self.ttl if ttl is None else ttl) * FRESH_SHARE


class Attempt(NamedTuple):
    """One attempt at a claim, as it goes from request to request."""

    claim: Claim
    join: bool
    session: Session
    until: float | None
    """By when the store must have answered; ``None``: in the time that every request has."""


class RuntimeLock:
    """Lets one at a time open a session, or ask for it; the others find it done."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._threads = threading.Lock()
        self._tasks: asyncio.Lock | None = None

    @asynccontextmanager
    async def turn(self, until: float) -> AsyncIterator[None]:
        """Raises ``TimeoutError`` if it does not become one's turn by then."""
        left = max(0.0, until - self._runtime.now())
        if self._runtime.blocking:
            threads = self._threads
            if not threads.acquire(timeout=left):
                # Should an interrupt have kept it for ever: two at once do no harm.
                self._threads = threading.Lock()
                raise TimeoutError
            try:
                yield
            finally:
                threads.release()
            return
        import asyncio

        if self._tasks is None:
            self._tasks = asyncio.Lock()
        tasks = self._tasks
        async with asyncio.timeout(left):
            await tasks.acquire()
        try:
            yield
        finally:
            tasks.release()

    def forget(self) -> None:
        """In a forked child, where a thread of the parent's may have had its turn."""
        self._threads, self._tasks = threading.Lock(), None


class Sessions:
    """Which session is the current one of each ttl."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._current: dict[int, Session] = {}
        self.doubts: dict[str, Session] = {}
        """Owners with a request that may still reach the store, and the session it was for."""

    def current(self, ttl: float) -> Session | None:
        return self._current.get(whole(ttl))

    def all(self) -> list[Session]:
        with self._mutex:
            return list(self._current.values())

    def longer(self, session_id: str, ttl: float) -> Session | None:
        """The session of that id, if it is one of a longer ttl: a hold that is bound to it stays
        there, unless its owner asks for the shorter one."""
        for session in self.all():
            if session.id == session_id and session.ttl > whole(ttl):
                return session
        return None

    def install(self, session: Session) -> Session:
        """Makes it the current one, unless another thread was faster; answers the current one."""
        with self._mutex:
            return self._current.setdefault(session.ttl, session)

    def answered(self, session_id: str, since: float) -> None:
        """Its keep-alive that was sent at ``since`` was answered."""
        with self._mutex:
            for session in self._current.values():
                if session.id == session_id:
                    session.since = max(session.since, since)

    def ended(self, session_id: str) -> None:
        """The store no longer knows it: nothing new is put on it."""
        with self._mutex:
            for ttl, session in list(self._current.items()):
                if session.id == session_id:
                    del self._current[ttl]

    def forget(self) -> None:
        """In a forked child, where they are the parent's; and when the client is closed."""
        self._mutex = threading.Lock()
        self._current, self.doubts = {}, {}
