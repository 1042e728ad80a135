"""LISTEN: the one connection of a client on which its waiters are woken.

The blocking client asks over it, too, while nobody waits: whoever comes and goes alone then needs
no second one, which takes the server longer to open than many a wait.
"""

from __future__ import annotations

import asyncio
import threading

from psycopg import Error as PsycopgError
from psycopg.pq.abc import PGresult

from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.postgres.connection import PostgresConnection, PostgresRefused
from holdfast.stores.postgres.statement import Request

__all__ = ["AsyncListener", "ListenSubscription", "SharedSubscription"]

KEPT_TOKENS = 4096
LARGEST_TOKEN = 2**63 - 1
ASKING_SECONDS = 0.002
"""How long who waits is kept from reading by who asks, before it looks at its own clock again."""


class ListenSubscription:
    """A connection that listens; what a blocking wake-up hub reads."""

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self.tokens: dict[str, int] = {}
        """Grants that came with a ring, by its key. They end with the connection."""

    @property
    def open(self) -> bool:
        return self._connection.open

    def fileno(self) -> int:
        try:
            return self._connection.fileno()
        except PsycopgError as error:  # whoever asked over it has closed it
            raise self._connection.broken(str(error)) from None

    def read(self) -> list[str]:
        """The keys that were woken since. Raises ``BackendUnavailable`` when it is broken."""
        try:
            self._connection.pgconn.consume_input()
            return self._woken()
        except PsycopgError as error:
            raise self._connection.broken(str(error)) from None

    def _woken(self) -> list[str]:
        keys: list[str] = []
        notifies = self._connection.pgconn.notifies
        while (notification := notifies()) is not None:
            keys.append(self._take_down(notification.extra))
        return keys

    def _take_down(self, payload: bytes) -> str:
        """The key that it wakes. If it brings a grant, the token is put where whoever is woken
        looks for it; those of waiters that have left are forgotten in the end."""
        key, _, token = payload.decode(errors="replace").partition(" ")
        if _is_token(token):
            if len(self.tokens) >= KEPT_TOKENS:
                self.tokens.pop(next(iter(self.tokens)), None)
            self.tokens[key] = int(token)
        return key

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()


def _is_token(text: str) -> bool:
    """Whoever may connect may notify, and send any text."""
    plain = len(text) <= len(str(LARGEST_TOKEN)) and text.isascii() and text.isdecimal()
    return plain and int(text) <= LARGEST_TOKEN


class SharedSubscription(ListenSubscription):
    """One over which requests go, too, while nobody listens. What wakes meanwhile is not lost:
    whoever has asked passes it on."""

    def __init__(
        self, connection: PostgresConnection, hub: BlockingWakeupHub, waiting: dict[str, None]
    ) -> None:
        super().__init__(connection)
        self._hub, self._waiting = hub, waiting
        self._reading = threading.Lock()
        # Whoever takes the connection out of here has it. An interrupt in that moment may lose it:
        # it then goes on listening until the end, and requests go elsewhere.
        self._idle = [connection]
        self._closed = False

    def read(self) -> list[str]:
        # Somebody may ask, who began before anybody waited, and passes on what wakes meanwhile;
        # maybe this very thread, if a signal handler waits within its request.
        if not self._reading.acquire(timeout=ASKING_SECONDS):
            return []
        try:
            return super().read()
        finally:
            self._reading.release()

    def request(self, request: Request, until: float) -> PGresult | None:
        """The answer; nothing if it is in use, or broke while nobody used it."""
        if self._waiting or not self.open:
            return None
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        try:
            with self._reading:
                return self._ask(connection, request, until)
        except PostgresRefused:
            raise
        except BaseException:  # an interrupt may have lost a ring: who waits for it asks again
            connection.close()
            raise
        finally:
            self._idle.append(connection)
            if self._closed:
                self.close()
            elif not connection.open:
                self._hub.wake(EVERYBODY)  # who has begun to wait would hear nothing

    def _ask(
        self, connection: PostgresConnection, request: Request, until: float
    ) -> PGresult | None:
        try:
            if connection.has_input() and not connection.is_alive():
                return None
            return connection.request(request, until)
        finally:
            if connection.open:
                for key in self._woken():
                    self._hub.wake(key)

    def close(self) -> None:
        """Now, or when who asks over it is done."""
        self._closed = True
        if self._idle or not self._reading.locked():
            self._connection.close()


class AsyncListener:
    """A connection that listens, read by the loop as notifications come in."""

    def __init__(self, connection: PostgresConnection, hub: AsyncWakeupHub) -> None:
        self._subscription = ListenSubscription(connection)
        self.tokens = self._subscription.tokens
        self._connection, self._hub = connection, hub
        self._loop = asyncio.get_running_loop()
        self._fileno = connection.fileno()
        self._loop.add_reader(self._fileno, self._readable)

    @property
    def open(self) -> bool:
        return self._connection.open

    def _readable(self) -> None:
        try:
            keys = self._subscription.read()
        except ConnectionError:
            self.close()
            self._hub.wake_all()
            return
        for key in keys:
            self._hub.wake(key)

    def close(self) -> None:
        if self._fileno >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)
        self._fileno = -1
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()
