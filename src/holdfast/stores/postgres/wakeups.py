"""Waiting for a wake-up: over a LISTEN connection, or by polling where LISTEN is impossible.

A client has one subscription: a connection that listens to the client's channel. A notification
is the key of one waiter, and a token if the release has granted the lock directly.

The first wait subscribes and returns at once, so that the next attempt is made with the
subscription in place. A wait whose attempt was made before the current subscription (an older
generation) also returns at once: its wake-up may have been sent before. When the subscription
breaks, all waiters attempt again at once.

The blocking client also sends requests over the subscription's connection while no thread waits.
A client that uses one lock at a time then needs no second connection, which takes the server
longer to open than many a wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from typing import Protocol

from psycopg import Error as PsycopgError
from psycopg.pq.abc import PGresult

from holdfast.core.backoff import SUBSCRIPTION_RETRY_SECONDS
from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.limits import SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.aio import in_thread
from holdfast.stores._sql.blocking import BlockingSqlPool
from holdfast.stores.postgres.connection import PostgresConnection, PostgresRefused
from holdfast.stores.postgres.replies import LARGEST_TOKEN
from holdfast.stores.postgres.schema import Request

__all__ = [
    "OpenListener",
    "PostgresWakeups",
    "make_wakeups",
    "wakeup_key",
]

SHARING_SECONDS = 1.0
"""Time limit for LISTEN on a connection of the pool; after it a new connection is opened."""
READ_LOCK_SECONDS = 0.002
"""How long a waiter lets a request use the connection before it checks its own deadline again."""
KEPT_TOKENS = 4096

OpenListener = Callable[[str, float], PostgresConnection]
"""Opens a connection that listens to a channel, before a deadline. One through a pooler does not
listen."""


def wakeup_key(owner: str) -> bytes:
    """Returns the key of a waiter's wake-up. Any role may listen, so it is not the owner itself."""
    return hashlib.blake2b(owner.encode(), digest_size=8).hexdigest().encode()


class PostgresWakeups(Protocol):
    """Waits that end with a notification."""

    @property
    def finding(self) -> Finding:
        """How waiters are woken, for ``probe``."""
        ...

    generation: int
    """How many subscriptions there have been so far."""

    async def wait(self, key: str, until: float, generation: int | None) -> int | None:
        """Returns when woken or by ``until``, maybe early: the token, if the wake-up brought a
        grant, else None. ``generation`` is the one before the attempt, or None if unknown."""
        ...

    def wake(self, key: str) -> None: ...
    def discard(self, key: str) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def make_wakeups(
    runtime: Runtime,
    open_listener: OpenListener,
    channel: str,
    seconds: float,
    pool: object = None,
    ready: bytes = b"",
) -> PostgresWakeups:
    """Returns the wake-ups of a blocking or of an asyncio client. ``seconds`` is the time limit for
    opening a connection. A blocking client may listen on a connection of ``pool``; ``ready`` is
    the statement that prepares that connection for requests, too."""
    if not runtime.blocking:
        return AsyncPostgresWakeups(runtime, open_listener, channel, seconds)
    shared = pool if isinstance(pool, BlockingSqlPool) else None
    return BlockingPostgresWakeups(runtime, open_listener, channel, seconds, shared, ready)


def _finding(polling: bool) -> Finding:
    if polling:
        text = "a pooler is in between and there is no listen_url: waiters poll"
        return Finding("waiting", text, "warning")
    return Finding("waiting", "waiters are woken by LISTEN on one connection per client")


async def _pause(runtime: Runtime, until: float) -> None:
    left = until - runtime.now()
    await runtime.sleep(max(0.0, min(left, runtime.between(*SUBSCRIPTION_RETRY_SECONDS))))


class ListenSubscription:
    """A connection that listens; the source of a blocking wake-up hub."""

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        self.tokens: dict[str, int] = {}
        """Direct grants that came with a wake-up, by its key. They end with the connection."""

    @property
    def open(self) -> bool:
        return self._connection.open

    def fileno(self) -> int:
        try:
            return self._connection.fileno()
        except PsycopgError as error:  # a request over it failed and closed it
            raise self._connection.broken(str(error)) from None

    def read(self) -> list[str]:
        """Returns the keys woken since the last call. Raises ``BackendUnavailable`` when the
        connection is broken."""
        try:
            self._connection.pgconn.consume_input()
            return self._woken()
        except PsycopgError as error:
            raise self._connection.broken(str(error)) from None

    def _woken(self) -> list[str]:
        keys: list[str] = []
        notifies = self._connection.pgconn.notifies
        while (notification := notifies()) is not None:
            keys.append(self._read_notification(notification.extra))
        return keys

    def _read_notification(self, payload: bytes) -> str:
        """Returns the key that it wakes. The token of a direct grant is kept for the waiter; of
        waiters that have left, the oldest tokens are dropped."""
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
    """Any role that can connect can notify, with any text."""
    plain = len(text) <= len(str(LARGEST_TOKEN)) and text.isascii() and text.isdecimal()
    return plain and int(text) <= LARGEST_TOKEN


class SharedSubscription(ListenSubscription):
    """A subscription whose connection also carries requests while no thread waits. Wake-ups that
    arrive during a request are not lost: the requesting thread passes them on."""

    def __init__(
        self, connection: PostgresConnection, hub: BlockingWakeupHub, waiting: dict[str, None]
    ) -> None:
        super().__init__(connection)
        self._hub, self._waiting = hub, waiting
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

    def request(self, request: Request, until: float) -> PGresult | None:
        """Returns the answer; None if the connection is in use or broke while it was idle."""
        if self._waiting or not self.open:
            return None
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        try:
            with self._reading:
                return self._send(connection, request, until)
        except PostgresRefused:
            raise
        except BaseException:  # an interrupt may have lost a wake-up: its waiter attempts again
            connection.close()
            raise
        finally:
            self._idle.append(connection)
            if self._closed:
                self.close()
            elif not connection.open:
                self._hub.wake(EVERYBODY)  # a thread that waits by now would get no wake-up

    def _send(
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
        """Closes the connection now, or at the end of the current request."""
        self._closed = True
        if self._idle or not self._reading.locked():
            self._connection.close()


class BlockingPostgresWakeups:
    """For threads: one of the waiting threads reads the connection for all."""

    def __init__(
        self,
        runtime: Runtime,
        open_listener: OpenListener,
        channel: str,
        seconds: float,
        pool: BlockingSqlPool[Request, PGresult] | None,
        ready: bytes,
    ) -> None:
        self._runtime, self._open_listener, self._channel = runtime, open_listener, channel
        self._seconds, self._pool, self._ready = seconds, pool, ready
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.generation = 0
        self._made: BlockingWakeupHub | None = None
        self._making = threading.RLock()
        self._subscription: ListenSubscription | None = None
        self._waiting: dict[str, None] = {}
        self._single_flight = SingleFlight()
        self._polling = False

    def _hub(self) -> BlockingWakeupHub:
        """Makes the hub at its first use: a backend that never waits has none."""
        hub = self._made
        if hub is None:
            with self._making:
                made = BlockingWakeupHub()
                if self._made is None:  # a signal handler may have made one just now
                    self._made = made
                else:
                    made.discard()
                hub = self._made
        return hub

    @property
    def finding(self) -> Finding:
        return _finding(self._polling)

    async def wait(self, key: str, until: float, generation: int | None) -> int | None:
        if self._closed:
            return None
        hub = self._hub()
        self._waiting[key] = None
        try:
            subscription = self._attached(hub)
            if subscription is None:
                await self._subscribe_or_poll(hub, key, until)
                return None
            if generation != self.generation and generation is not None:
                return None
            hub.wait(key, until, subscription)
            return subscription.tokens.pop(key, None)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)
            return None
        finally:
            self._waiting.pop(key, None)

    def _attached(self, hub: BlockingWakeupHub) -> ListenSubscription | None:
        subscription = self._subscription
        return (
            subscription
            if subscription is not None and hub.subscription is subscription and subscription.open
            else None
        )

    async def _subscribe_or_poll(self, hub: BlockingWakeupHub, key: str, until: float) -> None:
        """Subscribes; waits for a short time if another thread does so or LISTEN is impossible."""
        permit = None if self._polling else self._single_flight.begin()
        if permit is None:
            hub.wait(key, look_by(until))
            return
        began = now()
        try:
            if self._attached(hub) is None:
                self._attach(hub, open_by(until, self._seconds))
        except BackendUnavailable:
            self._single_flight.failed(began)
            raise
        finally:
            self._single_flight.end(permit)
            if self._closed:
                hub.close()
        hub.wake(EVERYBODY)  # wake-ups sent before the subscription are lost

    def _attach(self, hub: BlockingWakeupHub, by: float) -> None:
        subscription = self._share(hub, by) or self._new_subscription(by)
        if subscription is None:
            self._polling = True
            return
        self.generation += 1  # before a thread can wait on it
        self._subscription = subscription
        hub.attach(subscription)

    def _share(self, hub: BlockingWakeupHub, by: float) -> ListenSubscription | None:
        """Listens on a connection of the pool, which still takes requests while no thread waits.
        Returns None if there is no suitable connection."""
        connection = None if self._pool is None else self._pool.detach()
        if self._pool is None or not isinstance(connection, PostgresConnection):
            return None
        try:
            if connection.pooled or not connection.is_alive():
                connection.close()
                return None
            listen = f'LISTEN "{self._channel}"; '.encode()
            connection.script(listen + self._ready, min(by, now() + SHARING_SECONDS))
        except BackendUnavailable:
            return None
        self._pool.shared = subscription = SharedSubscription(connection, hub, self._waiting)
        return subscription

    def _new_subscription(self, by: float) -> ListenSubscription | None:
        connection = self._open_listener(self._channel, by)
        if connection.pooled:
            connection.close()
            return None
        return ListenSubscription(connection)

    def wake(self, key: str) -> None:
        if self._made is not None:  # else no thread waits yet, and the first wait returns at once
            self._made.wake(key)

    def discard(self, key: str) -> None:
        if self._subscription is not None:
            self._subscription.tokens.pop(key, None)
        if self._made is not None:
            self._made.forget(key)

    def forget(self) -> None:
        hub = self._made
        self._reset()
        if hub is not None:
            if isinstance(hub.subscription, ListenSubscription):
                hub.subscription.forget()
            hub.discard()

    def close(self) -> None:
        self._closed = True
        if self._made is not None:
            self._made.close()


class AsyncListener:
    """A connection that listens; the loop reads it as notifications come in."""

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
        self._connection.leave(self._loop.is_closed())


class AsyncPostgresWakeups:
    """For the tasks of one event loop."""

    def __init__(
        self, runtime: Runtime, open_listener: OpenListener, channel: str, seconds: float
    ) -> None:
        self._runtime, self._open_listener, self._channel = runtime, open_listener, channel
        self._seconds = seconds
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.generation = 0
        self._hub = AsyncWakeupHub()
        self._listener: AsyncListener | None = None
        self._single_flight = SingleFlight()
        self._polling = False

    @property
    def finding(self) -> Finding:
        return _finding(self._polling)

    async def wait(self, key: str, until: float, generation: int | None) -> int | None:
        if self._closed:
            return None
        if self._listener is not None and not self._listener.open:
            self._listener = None
            await _pause(self._runtime, until)
        if self._listener is None:
            await self._subscribe_or_poll(key, until)
            return None
        if generation != self.generation and generation is not None:
            return None
        await self._hub.wait(key, until)
        return self._listener.tokens.pop(key, None) if self._listener is not None else None

    async def _subscribe_or_poll(self, key: str, until: float) -> None:
        """Subscribes; waits for a short time if another task does so or LISTEN is impossible."""
        permit = None if self._polling else self._single_flight.begin()
        if permit is None:
            await self._hub.wait(key, look_by(until))
            return
        began = now()
        try:
            await self._attach(open_by(until, self._seconds))
        except (BackendUnavailable, TimeoutError):
            self._single_flight.failed(began)
            await _pause(self._runtime, until)
        finally:
            self._single_flight.end(permit)
            self._hub.wake_all()  # all waiters attempt again, with or without the subscription

    async def _attach(self, by: float) -> None:
        async with asyncio.timeout(by - now()):  # resolving a host name may take longer
            made = await in_thread(
                lambda: self._open_listener(self._channel, by), PostgresConnection.close
            )
        if made.pooled or self._closed:
            made.close()
            self._polling = made.pooled
            return
        self.generation += 1
        self._listener = AsyncListener(made, self._hub)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def discard(self, key: str) -> None:
        if self._listener is not None:
            self._listener.tokens.pop(key, None)
        self._hub.forget(key)

    def forget(self) -> None:
        listener = self._listener
        self._reset()
        if listener is not None:
            listener.forget()

    def close(self) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._hub.wake_all()
