"""Waiting for a wake-up: over a LISTEN connection, or by polling where LISTEN is impossible.

A client has one subscription: a connection that listens to the client's channel. A notification
is the key of one waiter, and a token if the release has granted the lock directly. How waiters and
subscription meet is in ``io.wakeups``.

The blocking client also sends requests over the subscription's connection while no thread waits.
A client that uses one lock at a time then needs no second connection, which takes the server
longer to open than many a wait.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

from psycopg.pq.abc import PGresult

from holdfast.core.contract import Finding, Runtime
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import exchange
from holdfast.io.wakeups import Messages, Wakeups
from holdfast.stores._sql.connection import Opening, SqlPool, world_of
from holdfast.stores.postgres.connection import PostgresConnection
from holdfast.stores.postgres.replies import LARGEST_TOKEN
from holdfast.stores.postgres.schema import Request

if TYPE_CHECKING:
    from holdfast.stores.postgres.connect import PostgresConnector

__all__ = ["Listener", "PostgresWakeups", "SharedListener", "wakeup_key"]

SHARING_SECONDS = 1.0
"""Time limit for LISTEN on a connection of the pool; after it a new connection is opened."""
READ_LOCK_SECONDS = 0.002
"""How long a waiter lets a request use the connection before it checks its own deadline again."""


def wakeup_key(owner: str) -> bytes:
    """Returns the key of a waiter's wake-up. Any role may listen, so it is not the owner itself."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest().encode()


class Listener(Messages):
    """A connection that listens: a subscription. The values are the tokens of direct grants."""

    connection: PostgresConnection

    def __init__(self, connection: PostgresConnection) -> None:
        super().__init__(connection, lambda _: ())
        self._woken: list[str] = []
        connection.on_push = self._notified

    def _notified(self, payload: bytes) -> None:
        key, _, token = payload.decode(errors="replace").partition(" ")
        if _is_token(token):
            self.values[key] = int(token)
        self._woken.append(key)

    def read(self) -> list[str]:
        super().read()
        return self.woken()

    def woken(self) -> list[str]:
        """Returns the keys of the notifications that were read since the last call."""
        woken, self._woken = self._woken, []
        return woken


def _is_token(text: str) -> bool:
    """Any role that can connect can notify, with any text."""
    plain = len(text) <= len(str(LARGEST_TOKEN)) and text.isascii() and text.isdecimal()
    return plain and int(text) <= LARGEST_TOKEN


class SharedListener(Listener):
    """A subscription whose connection also carries requests while no thread waits. Wake-ups that
    arrive during a request are not lost: the requesting thread passes them on."""

    def __init__(self, connection: PostgresConnection, wakeups: PostgresWakeups) -> None:
        super().__init__(connection)
        self._wakeups = wakeups
        self._reading = threading.Lock()
        # The thread that pops the connection owns it. An interrupt at that moment may lose it: it
        # then listens until the end, and requests use other connections.
        self._idle = [connection]
        self._closed = False

    def read(self) -> list[str]:
        # A request may be running that began before the first wait, and passes wake-ups on. It may
        # be a request of this very thread, if a signal handler waits within it.
        if not self._reading.acquire(timeout=READ_LOCK_SECONDS):
            return []
        try:
            return super().read()
        finally:
            self._reading.release()

    def request(self, request: Request, until: float | None) -> PGresult | None:
        """Returns the reply; None if the connection is in use or broke while it was idle."""
        if self._wakeups.waiting or not self.connection.open:
            return None
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        try:
            with self._reading:
                return self._send(connection, request, until)
        except BaseException:  # an interrupt may have lost a wake-up: its waiter attempts again
            connection.close()
            raise
        finally:
            self._idle.append(connection)
            if self._closed:
                self.close()
            elif not connection.open:
                self._wakeups.drop()  # a thread that waits by now would get no wake-up

    def _send(
        self, connection: PostgresConnection, request: Request, until: float | None
    ) -> PGresult | None:
        world, by = self._wakeups.world, now() + self._wakeups.request_seconds
        by = by if until is None else min(by, until)
        try:
            if not connection.is_alive():
                connection.close()
                return None
            (reply,) = run_now(exchange(world, connection, [request], by))
            if not connection.usable:
                connection.close()
            return reply  # type: ignore[no-any-return]
        except TimeoutError:
            raise connection.late() from None
        finally:
            for key in self.woken():
                self._wakeups.wake(key)

    def close(self) -> None:
        """Closes the connection now, or at the end of the current request."""
        self._closed = True
        if self._idle or not self._reading.locked():
            self.connection.close()


class PostgresWakeups(Wakeups):
    """The waiters of a blocking or of an asyncio client. A blocking client may listen on a
    connection of ``pool``; ``ready`` is the statement that prepares that connection for requests,
    too."""

    def __init__(
        self,
        runtime: Runtime,
        connector: PostgresConnector,
        channel: str,
        request_seconds: float,
        pool: SqlPool[Request, PGresult] | None = None,
        ready: bytes = b"",
    ) -> None:
        self.waiting: dict[str, None] = {}
        super().__init__(blocking=runtime.blocking)
        self.world, self.request_seconds = world_of(runtime), request_seconds
        self._connector, self._channel = connector, channel
        self._pool, self._ready = pool if runtime.blocking else None, ready
        self._closed = False

    @property
    def finding(self) -> Finding:
        """How waiters are woken, for ``probe``."""
        if self.polling:
            text = "a pooler is in between and there is no listen_url: waiters poll"
            return Finding("waiting", text, "warning")
        return Finding("waiting", "waiters are woken by LISTEN on one connection per client")

    async def wait_for(self, key: str, until: float, generation: int | None) -> int | None:
        """Returns when woken or by ``until``, maybe early: the token, if the wake-up brought a
        grant, else None. ``generation`` is the one before the attempt, or None if unknown."""
        if self._closed:
            return None
        self.waiting[key] = None
        try:
            known = self.generation if generation is None else generation
            token: int | None = await self.wait(key, known, until, self._listen)
            return token
        finally:
            self.waiting.pop(key, None)

    async def _listen(self, by: float) -> Listener | None:
        shared = await self._share(by)
        if shared is not None:
            return shared
        connection = await self._connector.listen(self._channel, self.world, by)
        if connection.pooled or self._closed:
            connection.close()
            return None
        return Listener(connection)

    async def _share(self, by: float) -> Listener | None:
        """Listens on a connection of the pool, which still takes requests while no thread waits.
        Returns None if there is no suitable connection."""
        connection = None if self._pool is None else self._pool.detach()
        if self._pool is None or not isinstance(connection, PostgresConnection):
            return None
        try:
            if connection.pooled:
                connection.close()
                return None
            opening = Opening(self.world, connection, min(by, now() + SHARING_SECONDS))
            await opening.ask(f'LISTEN "{self._channel}"; '.encode() + self._ready)
        except BaseException as error:
            connection.close()
            if isinstance(error, BackendUnavailable):
                return None
            raise
        self._pool.shared = shared = SharedListener(connection, self)
        return shared

    def forget(self) -> None:
        super().forget()
        self.waiting = {}
        self._begin()

    def close(self) -> None:
        self._closed = True
        super().close()
