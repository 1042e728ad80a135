"""Waiting for a ring: over a LISTEN connection, or by looking now and then where there is none.

The first wait opens the connection, or listens on one that is there, and returns at once, so that
the attempt which follows is made with the subscription already hung. So does a wait for what was
asked
before this subscription hung: its ring may have come when nobody listened. When the subscription
breaks, those who wait try again at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from psycopg.pq.abc import PGresult

from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.single_flight import SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.aio import in_thread
from holdfast.stores._sql.blocking import BlockingSqlPool
from holdfast.stores.postgres.connection import PostgresConnection
from holdfast.stores.postgres.listen import AsyncListener, ListenSubscription, SharedSubscription
from holdfast.stores.postgres.statement import Request

__all__ = ["Listen", "Listening", "make_listening"]

MEND_SECONDS = (0.1, 0.4)
"""The pause after a subscription broke."""
SHARING_SECONDS = 1.0
"""So long a connection that was just used may take to listen; then another one is opened."""


class Listening(Protocol):
    """Waits that end with a ring."""

    @property
    def detail(self) -> Finding:
        """How waiters are woken, for ``probe``."""
        ...

    hung: int
    """How many subscriptions have been hung so far."""

    async def wait(self, key: str, until: float, heard: int | None) -> int | None:
        """Returns when woken or by ``until``, maybe early; with the token, if the ring brought a
        grant. ``heard`` is what ``hung`` was before the store was asked, if that is known."""
        ...

    def wake(self, key: str) -> None: ...
    def forget_ring(self, key: str) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


Listen = Callable[[str, float], PostgresConnection]
"""Opens a connection that listens to a channel by then; one through a pooler does not listen."""


def make_listening(
    runtime: Runtime,
    listen: Listen,
    channel: str,
    seconds: float,
    pool: object = None,
    ready: bytes = b"",
) -> Listening:
    """By the world that it is for; ``seconds`` is how long it may take to open a connection. A
    blocking one may listen on a connection of the wire's, and says there what makes it ``ready``
    to ask as well."""
    if not runtime.blocking:
        return AsyncListening(runtime, listen, channel, seconds)
    shared = pool if isinstance(pool, BlockingSqlPool) else None
    return BlockingListening(runtime, listen, channel, seconds, shared, ready)


def _finding(deaf: bool) -> Finding:
    if deaf:
        text = "a pooler is in between and there is no listen_url: waiters poll"
        return Finding("waiting", text, "warning")
    return Finding("waiting", "waiters are woken by LISTEN on one connection per client")


class BlockingListening:
    """For threads: one of those who wait reads the connection for all."""

    def __init__(
        self,
        runtime: Runtime,
        listen: Listen,
        channel: str,
        seconds: float,
        pool: BlockingSqlPool[Request, PGresult] | None,
        ready: bytes,
    ) -> None:
        self._runtime, self._listen, self._channel = runtime, listen, channel
        self._seconds, self._pool, self._ready = seconds, pool, ready
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.hung = 0
        self._made: BlockingWakeupHub | None = None
        self._making = threading.RLock()
        self._subscription: ListenSubscription | None = None
        self._waiting: dict[str, None] = {}
        self._single_flight = SingleFlight()
        self._deaf = False

    def _hub(self) -> BlockingWakeupHub:
        """Made when it is first needed: a backend that never waits has none."""
        hub = self._made
        if hub is None:
            with self._making:
                made = BlockingWakeupHub()
                if self._made is None:  # nor has a signal handler made one meanwhile
                    self._made = made
                else:
                    made.discard()
                hub = self._made
        return hub

    @property
    def detail(self) -> Finding:
        return _finding(self._deaf)

    async def wait(self, key: str, until: float, heard: int | None) -> int | None:
        if self._closed:
            return None
        hub = self._hub()
        self._waiting[key] = None
        try:
            subscription = self._hung(hub)
            if subscription is None:
                await self._without(hub, key, until)
                return None
            if heard != self.hung and heard is not None:
                return None
            hub.wait(key, until, subscription)
            return subscription.tokens.pop(key, None)
        except (BackendUnavailable, OSError):
            await self._pause(until)
            return None
        finally:
            self._waiting.pop(key, None)

    def _hung(self, hub: BlockingWakeupHub) -> ListenSubscription | None:
        subscription = self._subscription
        return (
            subscription
            if subscription is not None and hub.subscription is subscription and subscription.open
            else None
        )

    async def _without(self, hub: BlockingWakeupHub, key: str, until: float) -> None:
        """Hangs the subscription; or looks for itself, where another one does or there can be
        none."""
        place = None if self._deaf else self._single_flight.begin()
        if place is None:
            hub.wait(key, look_by(until))
            return
        began = now()
        try:
            if self._hung(hub) is None:
                self._attach(hub, open_by(until, self._seconds))
        except BackendUnavailable:
            self._single_flight.failed(began)
            raise
        finally:
            self._single_flight.end(place)
            if self._closed:
                hub.close()
        hub.wake(EVERYBODY)  # what was woken while there was none is lost

    def _attach(self, hub: BlockingWakeupHub, by: float) -> None:
        subscription = self._share(hub, by) or self._new_subscription(by)
        if subscription is None:
            self._deaf = True
            return
        self.hung += 1  # before anybody can wait on it
        self._subscription = subscription
        hub.attach(subscription)

    def _share(self, hub: BlockingWakeupHub, by: float) -> ListenSubscription | None:
        """Listens on a connection of the wire's, which goes on answering while nobody waits."""
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
        connection = self._listen(self._channel, by)
        if connection.pooled:
            connection.close()
            return None
        return ListenSubscription(connection)

    async def _pause(self, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(*MEND_SECONDS))))

    def wake(self, key: str) -> None:
        if self._made is not None:  # else nobody has waited yet, and the first wait is none
            self._made.wake(key)

    def forget_ring(self, key: str) -> None:
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


class AsyncListening:
    """For the tasks of one loop."""

    def __init__(self, runtime: Runtime, listen: Listen, channel: str, seconds: float) -> None:
        self._runtime, self._listen, self._channel = runtime, listen, channel
        self._seconds = seconds
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.hung = 0
        self._hub = AsyncWakeupHub()
        self._listener: AsyncListener | None = None
        self._single_flight = SingleFlight()
        self._deaf = False

    @property
    def detail(self) -> Finding:
        return _finding(self._deaf)

    async def wait(self, key: str, until: float, heard: int | None) -> int | None:
        if self._closed:
            return None
        if self._listener is not None and not self._listener.open:
            self._listener = None
            await self._pause(until)
        if self._listener is None:
            await self._without(key, until)
            return None
        if heard != self.hung and heard is not None:
            return None
        await self._hub.wait(key, until)
        return self._listener.tokens.pop(key, None) if self._listener is not None else None

    async def _without(self, key: str, until: float) -> None:
        """Hangs the subscription; or looks for itself, where another one does or there can be
        none."""
        place = None if self._deaf else self._single_flight.begin()
        if place is None:
            await self._hub.wait(key, look_by(until))
            return
        began = now()
        try:
            await self._attach(open_by(until, self._seconds))
        except (BackendUnavailable, TimeoutError):
            self._single_flight.failed(began)
            await self._pause(until)
        finally:
            self._single_flight.end(place)
            self._hub.wake_all()  # they attempt again, now that the subscription hangs or not

    async def _attach(self, by: float) -> None:
        async with asyncio.timeout(by - now()):  # a host's name may take longer to be looked up
            made = await in_thread(
                lambda: self._listen(self._channel, by), PostgresConnection.close
            )
        if made.pooled or self._closed:
            made.close()
            self._deaf = made.pooled
            return
        self.hung += 1
        self._listener = AsyncListener(made, self._hub)

    async def _pause(self, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(*MEND_SECONDS))))

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget_ring(self, key: str) -> None:
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
