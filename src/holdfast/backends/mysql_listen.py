"""Waiting for a call: on a session that sleeps on the server, one per backend.

The first wait hangs the bell and returns at once, so that the attempt which follows is made with
the bell already hung. When it breaks, those who wait try again at once, with another.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.backends.mysql_lease_sql import LeaseStatements, bell_lock
from holdfast.backends.mysql_sleep import sleep, still_lock
from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.doorbell import EVERYBODY, AsyncDoorbell, BlockingDoorbell
from holdfast.wires.in_thread import in_thread
from holdfast.wires.mysql import Connection
from holdfast.wires.mysql_bell import AsyncBell, Listen, SleepBell

__all__ = ["SLEEP_SECONDS", "Hanger", "Listening", "make_listening"]

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
        self._greet, self._galera, self._seconds = greet, galera, seconds
        self._statements = statements
        self.quiet = False
        """Whether calls are found by looking, not by being stirred."""

    def hang(self) -> tuple[str, SleepBell]:
        """A bell, and the name by which it is called."""
        bell, until = secrets.token_hex(12), now() + self._seconds
        connection = self._greet(until)
        keeper: Connection | None = None
        try:
            self.quiet = self._galera() or not _got(connection, bell_lock(bell), until)
            if self.quiet:
                return bell, SleepBell(connection, self._listen_quietly(bell), self._seconds)
            keeper = self._greet(until)
            _got(keeper, still_lock(bell), until)
            return bell, SleepBell(connection, self._listen(bell), self._seconds, keeper)
        except BaseException:
            connection.close()
            if keeper is not None:
                keeper.close()
            raise

    def _listen(self, bell: str) -> Listen:
        asleep = sleep(still_lock(bell), SLEEP_SECONDS)
        return Listen(lambda names: self._statements.listen(bell, names, asleep), SLEEP_SECONDS)

    def _listen_quietly(self, bell: str) -> Listen:
        seconds, asleep = QUIET_SLEEP_SECONDS, b"SLEEP(%.2f)" % QUIET_SLEEP_SECONDS
        return Listen(lambda names: self._statements.listen(bell, names, asleep), seconds)

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
                f"each door looks for its calls every {QUIET_SLEEP_SECONDS:g} s while it waits"
            )
            return Finding("waiting", text, "warning")
        return Finding("waiting", "waiters are called on one sleeping session per door")


class Listening(Protocol):
    """Waits that end with a call."""

    bell: str
    """The name of the bell that hangs; empty before."""

    @property
    def begun(self) -> int:
        """How many sleeps the bell has begun."""
        ...

    async def wait(self, key: str, name: str, until: float, told: str, begun: int) -> None:
        """``told`` is the bell that the store was told of: another one is not rung. ``begun`` is
        what it was before that."""
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
        self._made: BlockingDoorbell | None = None
        self._making = threading.Lock()

    @property
    def begun(self) -> int:
        bell = None if self._made is None else self._made.bell
        return bell.begun if isinstance(bell, SleepBell) else 0

    def _doorbell(self) -> BlockingDoorbell:
        """Made when it is first needed: a backend that never waits has none."""
        doorbell = self._made
        if doorbell is None:
            with self._making:
                doorbell = self._made = self._made or BlockingDoorbell()
        return doorbell

    async def wait(self, key: str, name: str, until: float, told: str, begun: int) -> None:
        if self._closed:
            return
        doorbell = self._doorbell()
        bell = doorbell.bell
        if bell is None or (isinstance(bell, SleepBell) and bell.stalled(now())):
            await self._hang(doorbell, until)
            return
        if told != self.bell or not isinstance(bell, SleepBell):
            return
        try:
            if bell.enter(key, name, begun):
                return
            doorbell.wait(key, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)
        finally:
            bell.leave(key)

    async def _hang(self, doorbell: BlockingDoorbell, until: float) -> None:
        broken = False
        with self._making:
            bell = doorbell.bell
            if isinstance(bell, SleepBell) and not bell.stalled(now()):
                return
            try:
                self.bell, made = self._hanger.hang()
                doorbell.hang(made)
            except BackendUnavailable:
                broken = True
        doorbell.ring(EVERYBODY)  # what was called while it was broken is lost
        if broken:
            await _pause(self._runtime, until)

    def ring(self, key: str) -> None:
        if self._made is not None:  # else nobody has waited yet, and the first wait is none
            self._made.ring(key)

    def forget_ring(self, key: str) -> None:
        if self._made is not None:
            self._made.forget(key)

    def forget(self) -> None:
        doorbell = self._made
        self._reset()
        if doorbell is not None:
            if isinstance(doorbell.bell, SleepBell):
                doorbell.bell.forget()
            doorbell.discard()

    def close(self) -> None:
        self._closed = True
        if self._made is not None:
            self._made.close()


class AsyncListening:
    """For the tasks of one loop."""

    def __init__(self, runtime: Runtime, hanger: Hanger) -> None:
        self._runtime, self._hanger = runtime, hanger
        self._reset()

    def _reset(self) -> None:
        self.bell = ""
        self._doorbell = AsyncDoorbell()
        self._hung: AsyncBell | None = None
        self._hanging = False

    @property
    def begun(self) -> int:
        return 0 if self._hung is None else self._hung.begun

    async def wait(self, key: str, name: str, until: float, told: str, begun: int) -> None:
        hung = self._hung
        if hung is not None and (not hung.open or hung.stalled(now())):
            self._hung = None
            hung.close()
            await _pause(self._runtime, until)
        if self._hung is None and not self._hanging:
            await self._hang(until)
        elif self._hung is None:  # somebody else hangs it just now
            await self._doorbell.wait(key, until)
        elif told == self.bell:
            await self._wait(self._hung, key, name, until, begun)

    async def _wait(self, hung: AsyncBell, key: str, name: str, until: float, begun: int) -> None:
        try:
            if not hung.enter(key, name, begun):
                await self._doorbell.wait(key, until)
        except BackendUnavailable:
            await _pause(self._runtime, until)
        finally:
            hung.leave(key)

    async def _hang(self, until: float) -> None:
        self._hanging = True
        try:
            self.bell, bell = await in_thread(self._hanger.hang, lambda made: made[1].close())
            self._hung = AsyncBell(bell, self._doorbell)
        except BackendUnavailable:
            await _pause(self._runtime, until)
        finally:
            self._hanging = False
            self._doorbell.ring_all()  # they attempt again, now that the bell hangs or not

    def ring(self, key: str) -> None:
        self._doorbell.ring(key)

    def forget_ring(self, key: str) -> None:
        self._doorbell.forget(key)

    def forget(self) -> None:
        hung = self._hung
        self._reset()
        if hung is not None:
            hung.forget()

    def close(self) -> None:
        if self._hung is not None:
            self._hung.close()
            self._hung = None
        self._doorbell.ring_all()
