"""Waiting for a call: on a session that sleeps on the server, one per backend.

The first wait hangs the bell and returns at once, so that the attempt which follows is made with
the bell already hung. When it breaks, those who wait try again at once, with another.
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
from holdfast.io.connection_limit import Place
from holdfast.io.single_flight import Opening, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.in_thread import in_thread
from holdfast.stores.mysql.connection import Connection
from holdfast.stores.mysql.sleep import sleep, still_lock
from holdfast.stores.mysql.sql import LeaseStatements, bell_lock
from holdfast.stores.mysql.wakeup_session import AsyncBell, Listen, SleepBell

__all__ = ["SLEEP_SECONDS", "Hanger", "Listening", "Look", "make_listening"]

SLEEP_SECONDS = 1.0
"""How long the bell sleeps at a time: well below the grace of somebody who was called."""
QUIET_SLEEP_SECONDS = 0.25
"""The same where nobody can kill the sleep."""
MEND_SECONDS = (0.1, 0.4)
"""The pause after a bell broke."""


def _got(connection: Connection, lock: bytes, until: float) -> bool:
    reply = connection.request(b"SELECT GET_LOCK(%s, 0)" % lock, until)
    return reply.failure is None and reply.results[0].rows == [(b"1",)]


class Hanger:
    """Opens bells; tells whether sessions can find and stir each other here."""

    def __init__(
        self, greet: Callable[[float], Connection], galera: Callable[[], bool],
        statements: LeaseStatements, seconds: float,
    ) -> None:  # fmt: skip
        self._greet, self._galera, self.seconds = greet, galera, seconds
        self._statements = statements
        self.quiet = False
        """Whether calls are found by looking, not by being stirred."""

    def hang(self, until: float) -> tuple[str, SleepBell]:
        """A bell by then, and the name by which it is called."""
        bell = secrets.token_hex(12)
        connection = self._greet(until)
        renewer: Connection | None = None
        try:
            self.quiet = self._galera() or not _got(connection, bell_lock(bell), until)
            if self.quiet:
                return bell, SleepBell(connection, self._listen_quietly(bell), self.seconds)
            renewer = self._greet(until)
            _got(renewer, still_lock(bell), until)
            return bell, SleepBell(connection, self._listen(bell), self.seconds, renewer)
        except BaseException:
            connection.close()
            if renewer is not None:
                renewer.close()
            raise

    def _listen(self, bell: str) -> Listen:
        asleep = sleep(still_lock(bell), SLEEP_SECONDS)
        return Listen(lambda names: self._statements.listen(bell, names, asleep), SLEEP_SECONDS)

    def _listen_quietly(self, bell: str) -> Listen:
        seconds, asleep = QUIET_SLEEP_SECONDS, b"SLEEP(%.2f)" % QUIET_SLEEP_SECONDS
        return Listen(lambda names: self._statements.listen(bell, names, asleep), seconds)

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

    bell: str
    """The name of the bell that hangs; empty before."""

    async def wait(self, key: str, name: str, until: float, told: str, look: Look) -> None:
        """``told`` is the bell that the store was told of: another one is not rung."""
        ...

    def ring(self, key: str) -> None: ...
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
        self.bell = ""
        self._made: BlockingWakeupHub | None = None
        self._making = threading.RLock()
        self._opening = Opening()

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
        bell = self._hung(hub)
        if bell is None:
            await self._without(hub, key, until)
            return
        if told != self.bell:
            return
        try:
            called = bell.enter(key, name) and await look()
            if not called and hub.bell is bell:
                hub.wait(key, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)
        finally:
            bell.leave(key)

    def _hung(self, hub: BlockingWakeupHub) -> SleepBell | None:
        bell = hub.bell
        return bell if isinstance(bell, SleepBell) and not bell.stalled(now()) else None

    async def _without(self, hub: BlockingWakeupHub, key: str, until: float) -> None:
        """Hangs the bell, or looks for itself where another one does."""
        try:
            place = self._opening.begin()
            if place is None:
                hub.wait(key, look_by(until))
            else:
                self._open(place, hub, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)

    def _open(self, place: Place, hub: BlockingWakeupHub, until: float) -> None:
        began = now()
        try:
            if self._hung(hub) is None:
                self.bell, made = self._hanger.hang(open_by(until, self._hanger.seconds))
                hub.hang(made)
        except BackendUnavailable:
            self._opening.failed(began)
            raise
        finally:
            self._opening.end(place)
            if self._closed:
                hub.close()
        hub.ring(EVERYBODY)  # what was called while there was none is lost

    def ring(self, key: str) -> None:
        if self._made is not None:  # else nobody has waited yet, and the first wait is none
            self._made.ring(key)

    def forget_ring(self, key: str) -> None:
        if self._made is not None:
            self._made.forget(key)

    def forget(self) -> None:
        hub = self._made
        self._reset()
        if hub is not None:
            if isinstance(hub.bell, SleepBell):
                hub.bell.forget()
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
        self.bell = ""
        self._hub = AsyncWakeupHub()
        self._hung: AsyncBell | None = None
        self._opening = Opening()

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
        elif told == self.bell:
            await self._wait(self._hung, key, name, until, look)

    async def _wait(self, hung: AsyncBell, key: str, name: str, until: float, look: Look) -> None:
        try:
            called = hung.enter(key, name) and await look()
            if not called and hung.open:
                await self._hub.wait(key, until)
        except BackendUnavailable:
            await _pause(self._runtime, until)
        finally:
            hung.leave(key)

    async def _without(self, key: str, until: float) -> None:
        """Hangs the bell, or looks for itself where another one does."""
        place = self._opening.begin()
        if place is None:
            await self._hub.wait(key, look_by(until))
            return
        began = now()
        try:
            await self._hang(open_by(until, self._hanger.seconds))
        except (BackendUnavailable, TimeoutError):
            self._opening.failed(began)
            await _pause(self._runtime, until)
        finally:
            self._opening.end(place)
            self._hub.ring_all()  # they attempt again, now that the bell hangs or not

    async def _hang(self, by: float) -> None:
        async with asyncio.timeout(by - now()):  # a host's name may take longer to be looked up
            name, bell = await in_thread(
                lambda: self._hanger.hang(by), lambda made: made[1].close()
            )
        if self._closed:
            bell.close()
            return
        self.bell = name
        self._hung = AsyncBell(bell, self._hub)

    def ring(self, key: str) -> None:
        self._hub.ring(key)

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
        self._hub.ring_all()
