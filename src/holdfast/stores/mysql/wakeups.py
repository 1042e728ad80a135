"""Waiting for a call: on a session that sleeps on the server, one per backend.

The first wait hangs the subscription and returns at once, so that the attempt which follows is
made with
the subscription already hung. When it breaks, those who wait try again at once, with another.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol

from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection_limit import Permit
from holdfast.io.single_flight import SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.aio import in_thread
from holdfast.stores.mysql.connection import Connection
from holdfast.stores.mysql.sleep import sleep, still_lock
from holdfast.stores.mysql.sql import LeaseStatements, subscription_lock
from holdfast.stores.mysql.wakeup_session import AsyncSubscription, Listen, SleepSubscription

__all__ = ["SLEEP_SECONDS", "Hanger", "Listening", "Look", "make_listening"]

SLEEP_SECONDS = 1.0
"""How long the subscription sleeps at a time: well below the grace of somebody who was called."""
QUIET_SLEEP_SECONDS = 0.25
"""The same where nobody can kill the sleep."""
MEND_SECONDS = (0.1, 0.4)
"""The pause after a subscription broke."""


def _got(connection: Connection, lock: bytes, until: float) -> bool:
    reply = connection.request(b"SELECT GET_LOCK(%s, 0)" % lock, until)
    return reply.failure is None and reply.results[0].rows == [(b"1",)]


class Hanger:
    """Opens subscriptions; tells whether sessions can find and stir each other here."""

    def __init__(
        self, greet: Callable[[float], Connection], galera: Callable[[], bool],
        statements: LeaseStatements, seconds: float,
    ) -> None:  # fmt: skip
        self._greet, self._galera, self.seconds = greet, galera, seconds
        self._statements = statements
        self.quiet = False
        """Whether calls are found by looking, not by being stirred."""

    def attach(self, until: float) -> tuple[str, SleepSubscription]:
        """A subscription by then, and the name by which it is called."""
        subscription = secrets.token_hex(12)
        connection = self._greet(until)
        renewer: Connection | None = None
        try:
            self.quiet = self._galera() or not _got(
                connection, subscription_lock(subscription), until
            )
            if self.quiet:
                return subscription, SleepSubscription(
                    connection, self._listen_quietly(subscription), self.seconds
                )
            renewer = self._greet(until)
            _got(renewer, still_lock(subscription), until)
            return subscription, SleepSubscription(
                connection, self._listen(subscription), self.seconds, renewer
            )
        except BaseException:
            connection.close()
            if renewer is not None:
                renewer.close()
            raise

    def _listen(self, subscription: str) -> Listen:
        asleep = sleep(still_lock(subscription), SLEEP_SECONDS)
        return Listen(
            lambda names: self._statements.listen(subscription, names, asleep), SLEEP_SECONDS
        )

    def _listen_quietly(self, subscription: str) -> Listen:
        seconds, asleep = QUIET_SLEEP_SECONDS, b"SLEEP(%.2f)" % QUIET_SLEEP_SECONDS
        return Listen(lambda names: self._statements.listen(subscription, names, asleep), seconds)

    @property
    def galera(self) -> bool:
        """Whether the server is one node of several."""
        return self._galera()

    @property
    def looks(self) -> bool:
        """Whether it is known that sessions can't stir each other."""
        return self.quiet or self._galera()

    @property
    def finding(self) -> Finding:
        """How waiters are woken, for ``probe``."""
        if self.looks:
            text = (
                "sessions can't stir each other here (Galera, or a proxy): "
                f"each client looks for its calls every {QUIET_SLEEP_SECONDS:g} s while it waits"
            )
            return Finding("waiting", text, "warning")
        return Finding("waiting", "waiters are called on one sleeping session per client")


Look = Callable[[], Awaitable[bool]]
"""Whether the call has come by now."""


class Listening(Protocol):
    """Waits that end with a call."""

    subscription: str
    """The name of the subscription that hangs; empty before."""

    async def wait(self, key: str, name: str, until: float, told: str, look: Look) -> None:
        """``told`` is the subscription that the store was told of: another one is not woken."""
        ...

    def wake(self, key: str) -> None: ...
    def forget_ring(self, key: str) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def make_listening(runtime: Runtime, hanger: Hanger) -> Listening:
    """By the world that it is for."""
    return (BlockingListening if runtime.blocking else AsyncListening)(runtime, hanger)


async def _pause(runtime: Runtime, until: float) -> None:
    left = until - runtime.now()
    await runtime.sleep(max(0.0, min(left, runtime.between(*MEND_SECONDS))))


class BlockingListening:
    """For threads: one of those who wait reads the session for all."""

    def __init__(self, runtime: Runtime, hanger: Hanger) -> None:
        self._runtime, self._hanger = runtime, hanger
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.subscription = ""
        self._made: BlockingWakeupHub | None = None
        self._making = threading.RLock()
        self._single_flight = SingleFlight()

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

    async def wait(self, key: str, name: str, until: float, told: str, look: Look) -> None:
        if self._closed:
            return
        hub = self._hub()
        subscription = self._hung(hub)
        if subscription is None:
            await self._without(hub, key, until)
            return
        if told != self.subscription:
            return
        try:
            called = subscription.enter(key, name) and await look()
            if not called and hub.subscription is subscription:
                hub.wait(key, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)
        finally:
            subscription.leave(key)

    def _hung(self, hub: BlockingWakeupHub) -> SleepSubscription | None:
        subscription = hub.subscription
        return (
            subscription
            if isinstance(subscription, SleepSubscription) and not subscription.stalled(now())
            else None
        )

    async def _without(self, hub: BlockingWakeupHub, key: str, until: float) -> None:
        """Hangs the subscription, or looks for itself where another one does."""
        try:
            permit = self._single_flight.begin()
            if permit is None:
                hub.wait(key, look_by(until))
            else:
                self._open(permit, hub, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)

    def _open(self, permit: Permit, hub: BlockingWakeupHub, until: float) -> None:
        began = now()
        try:
            if self._hung(hub) is None:
                self.subscription, made = self._hanger.attach(open_by(until, self._hanger.seconds))
                hub.attach(made)
        except BackendUnavailable:
            self._single_flight.failed(began)
            raise
        finally:
            self._single_flight.end(permit)
            if self._closed:
                hub.close()
        hub.wake(EVERYBODY)  # what was called while there was none is lost

    def wake(self, key: str) -> None:
        if self._made is not None:  # else nobody has waited yet, and the first wait is none
            self._made.wake(key)

    def forget_ring(self, key: str) -> None:
        if self._made is not None:
            self._made.forget(key)

    def forget(self) -> None:
        hub = self._made
        self._reset()
        if hub is not None:
            if isinstance(hub.subscription, SleepSubscription):
                hub.subscription.forget()
            hub.discard()

    def close(self) -> None:
        self._closed = True
        if self._made is not None:
            self._made.close()


class AsyncListening:
    """For the tasks of one loop."""

    def __init__(self, runtime: Runtime, hanger: Hanger) -> None:
        self._runtime, self._hanger = runtime, hanger
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.subscription = ""
        self._hub = AsyncWakeupHub()
        self._hung: AsyncSubscription | None = None
        self._single_flight = SingleFlight()

    async def wait(self, key: str, name: str, until: float, told: str, look: Look) -> None:
        if self._closed:
            return
        hung = self._hung
        if hung is not None and hung.stalled(now()):
            self._hung = None
            hung.close()
            await _pause(self._runtime, until)
        if self._hung is None:
            await self._without(key, until)
        elif told == self.subscription:
            await self._wait(self._hung, key, name, until, look)

    async def _wait(
        self, hung: AsyncSubscription, key: str, name: str, until: float, look: Look
    ) -> None:
        try:
            called = hung.enter(key, name) and await look()
            if not called and hung.open:
                await self._hub.wait(key, until)
        except BackendUnavailable:
            await _pause(self._runtime, until)
        finally:
            hung.leave(key)

    async def _without(self, key: str, until: float) -> None:
        """Hangs the subscription, or looks for itself where another one does."""
        permit = self._single_flight.begin()
        if permit is None:
            await self._hub.wait(key, look_by(until))
            return
        began = now()
        try:
            await self._attach(open_by(until, self._hanger.seconds))
        except (BackendUnavailable, TimeoutError):
            self._single_flight.failed(began)
            await _pause(self._runtime, until)
        finally:
            self._single_flight.end(permit)
            self._hub.wake_all()  # they attempt again, now that the subscription hangs or not

    async def _attach(self, by: float) -> None:
        async with asyncio.timeout(by - now()):  # a host's name may take longer to be looked up
            name, subscription = await in_thread(
                lambda: self._hanger.attach(by), lambda made: made[1].close()
            )
        if self._closed:
            subscription.close()
            return
        self.subscription = name
        self._hung = AsyncSubscription(subscription, self._hub)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget_ring(self, key: str) -> None:
        self._hub.forget(key)

    def forget(self) -> None:
        hung = self._hung
        self._reset()
        if hung is not None:
            hung.forget()

    def close(self) -> None:
        self._closed = True
        if self._hung is not None:
            self._hung.close()
            self._hung = None
        self._hub.wake_all()
