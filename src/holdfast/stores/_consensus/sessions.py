"""The sessions of one client: one per ttl, shared by its blocking and its asyncio backend.

A session is what the store calls a lease or a session: it lives while it is kept alive, and all
keys bound to it end with it. Its time is certain from the moment before the last answered
keep-alive was sent. Nothing here sends a request.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from holdfast.claim import Claim
from holdfast.core.contract import Runtime

if TYPE_CHECKING:
    import asyncio

__all__ = ["Attempt", "RuntimeLock", "Session", "Sessions", "whole"]

FRESH_SHARE = 0.5
"""A session that was not kept alive for this share of its ttl is kept alive before it is used."""


def whole(ttl: float) -> int:
    """A ttl in whole seconds, rounded up, as sessions need it."""
    return math.ceil(ttl)


class Session:
    """One session that the store knows."""

    __slots__ = ("generation", "id", "since", "ttl")

    def __init__(self, session_id: str, ttl: int, since: float) -> None:
        self.id, self.ttl, self.since = session_id, ttl, since
        self.generation = 0
        """The version of the session's guard key that requests must name to be applied."""

    def fresh(self, now: float, ttl: float | None = None) -> bool:
        """Whether enough certain time is left to bind a hold to it without a keep-alive. ``ttl`` is
        that of the hold, if it differs."""
        return now - self.since < (self.ttl if ttl is None else ttl) * FRESH_SHARE


class Attempt(NamedTuple):
    """The arguments of one attempt, as they are passed from request to request."""

    claim: Claim
    join: bool
    session: Session
    until: float | None
    """The deadline; ``None`` for the usual time of a request."""


class RuntimeLock:
    """A mutex for threads or for tasks, with a deadline: one at a time opens a session or keeps it
    alive; the others then find it done."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._threads = threading.Lock()
        self._tasks: asyncio.Lock | None = None

    @asynccontextmanager
    async def hold(self, until: float) -> AsyncIterator[None]:
        """Raises ``TimeoutError`` if the mutex is not free by ``until``."""
        left = max(0.0, until - self._runtime.now())
        if self._runtime.blocking:
            threads = self._threads
            if not threads.acquire(timeout=left):
                # An interrupt may have left it locked for ever. Two holders at once do no harm.
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
        """In a forked child, where a thread of the parent may have held it."""
        self._threads, self._tasks = threading.Lock(), None


class Sessions:
    """The current session of each ttl."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._process = os.getpid()
        self._current: dict[int, Session] = {}
        self.doubts: dict[str, Session] = {}
        """By owner: the session of a request without an answer, which may still reach the store."""

    def current(self, ttl: float) -> Session | None:
        return self._current.get(whole(ttl))

    def all(self) -> list[Session]:
        with self._mutex:
            return list(self._current.values())

    def longer(self, session_id: str, ttl: float) -> Session | None:
        """The session of that id, if it has a longer ttl: a hold that is bound to it stays there,
        unless its owner asks for the shorter ttl."""
        for session in self.all():
            if session.id == session_id and session.ttl > whole(ttl):
                return session
        return None

    def install(self, session: Session) -> Session:
        """Makes it the current one, unless another thread has set one. Returns the current one."""
        with self._mutex:
            return self._current.setdefault(session.ttl, session)

    def answered(self, session_id: str, since: float) -> None:
        """Notes that the keep-alive sent at ``since`` was answered."""
        with self._mutex:
            for session in self._current.values():
                if session.id == session_id:
                    session.since = max(session.since, since)

    def ended(self, session_id: str) -> None:
        """Drops a session that the store no longer knows."""
        with self._mutex:
            for ttl, session in list(self._current.items()):
                if session.id == session_id:
                    del self._current[ttl]

    def forget_if_forked(self) -> bool:
        """In a forked child: drops all sessions, which are the parent's, and returns true. An
        asyncio client that goes on in another event loop keeps its sessions and holds."""
        if self._process == os.getpid():
            return False
        self._process = os.getpid()
        self.forget()
        return True

    def forget(self) -> None:
        """Drops all sessions."""
        self._mutex = threading.Lock()
        self._current, self.doubts = {}, {}
