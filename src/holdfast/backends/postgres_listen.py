"""Waiting for a ring: over a LISTEN connection, or by looking now and then where there is none.

The first wait opens the connection, or listens on one that is there, and returns at once, so that
the attempt which follows is made with the bell already hung. When it breaks, those who wait try
again at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from psycopg.pq.abc import PGresult

from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.doorbell import EVERYBODY, AsyncDoorbell, BlockingDoorbell
from holdfast.wires.in_thread import in_thread
from holdfast.wires.postgres import Connection
from holdfast.wires.postgres_listen import AsyncListener, ListenBell, SharedBell
from holdfast.wires.postgres_statement import Request
from holdfast.wires.sql_blocking import BlockingWire

__all__ = ["Listen", "Listening", "make_listening"]

POLL_SECONDS = (0.2, 0.5)
"""How often a waiter looks where notifications can't reach it."""
MEND_SECONDS = (0.1, 0.4)
"""The pause after a bell broke."""
SHARING_SECONDS = 1.0
"""So long a connection that was just used may take to listen; then another one is opened."""


class Listening(Protocol):
    """Waits that end with a ring."""

    @property
    def detail(self) -> Finding:
        """How waiters are woken, for ``probe``."""
        ...

    async def wait(self, key: str, until: float) -> int | None:
        """Returns when rung or by ``until``, maybe early; with the token, if the ring brought a
        grant."""
        ...

    def ring(self, key: str) -> None: ...
    def forget_ring(self, key: str) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


Listen = Callable[[str], Connection]
"""Opens a connection that listens to a channel; one through a pooler does not."""


def make_listening(
    runtime: Runtime, listen: Listen, channel: str, wire: object = None, ready: bytes = b""
) -> Listening:
    """By the world that it is for. A blocking one may listen on a connection of the wire's, and
    says there what makes it ``ready`` to ask as well."""
    if not runtime.blocking:
        return AsyncListening(runtime, listen, channel)
    return BlockingListening(
        runtime, listen, channel, wire if isinstance(wire, BlockingWire) else None, ready
    )


def _finding(deaf: bool) -> Finding:
    if deaf:
        text = "a pooler is in between and there is no listen_url: waiters poll"
        return Finding("waiting", text, "warning")
    return Finding("waiting", "waiters are woken by LISTEN on one connection per door")


class BlockingListening:
    """For threads: one of those who wait reads the connection for all."""

    def __init__(
        self,
        runtime: Runtime,
        listen: Listen,
        channel: str,
        wire: BlockingWire[Request, PGresult] | None,
        ready: bytes,
    ) -> None:
        self._runtime, self._listen, self._channel = runtime, listen, channel
        self._wire, self._ready = wire, ready
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._made: BlockingDoorbell | None = None
        self._bell: ListenBell | None = None
        self._waiting: dict[str, None] = {}
        self._making = threading.Lock()
        self._deaf = False

    def _doorbell(self) -> BlockingDoorbell:
        """Made when it is first needed: a backend that never waits has none."""
        doorbell = self._made
        if doorbell is None:
            with self._making:
                doorbell = self._made = self._made or BlockingDoorbell()
        return doorbell

    @property
    def detail(self) -> Finding:
        return _finding(self._deaf)

    async def wait(self, key: str, until: float) -> int | None:
        if self._closed:
            return None
        doorbell = self._doorbell()
        self._waiting[key] = None
        try:
            bell = self._hung(doorbell)
            if bell is None and not self._deaf:
                await self._hang(doorbell, until)
                return None
            if self._deaf:
                until = min(until, self._runtime.now() + self._runtime.between(*POLL_SECONDS))
            doorbell.wait(key, until)
            return None if bell is None else bell.tokens.pop(key, None)
        except (BackendUnavailable, OSError):
            await self._pause(until)
            return None
        finally:
            self._waiting.pop(key, None)

    def _hung(self, doorbell: BlockingDoorbell) -> ListenBell | None:
        bell = self._bell
        return bell if bell is not None and doorbell.bell is bell and bell.open else None

    async def _hang(self, doorbell: BlockingDoorbell, until: float) -> None:
        broken = False
        with self._making:
            if self._hung(doorbell) is not None:
                return
            try:
                bell = self._share(doorbell) or self._new_bell()
                if bell is not None:
                    self._bell = bell
                    doorbell.hang(bell)
                self._deaf = bell is None
            except BackendUnavailable:
                broken = True
        doorbell.ring(EVERYBODY)  # what was rung while it was broken is lost
        if broken:
            await self._pause(until)

    def _share(self, doorbell: BlockingDoorbell) -> ListenBell | None:
        """Listens on a connection of the wire's, which goes on answering while nobody waits."""
        connection = None if self._wire is None else self._wire.detach()
        if self._wire is None or not isinstance(connection, Connection):
            return None
        try:
            if connection.pooled or not connection.stands():
                connection.close()
                return None
            listen = f'LISTEN "{self._channel}"; '.encode()
            connection.script(listen + self._ready, now() + SHARING_SECONDS)
        except BackendUnavailable:
            return None
        self._wire.shared = bell = SharedBell(connection, doorbell, self._waiting)
        return bell

    def _new_bell(self) -> ListenBell | None:
        connection = self._listen(self._channel)
        if connection.pooled:
            connection.close()
            return None
        return ListenBell(connection)

    async def _pause(self, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(*MEND_SECONDS))))

    def ring(self, key: str) -> None:
        if self._made is not None:  # else nobody has waited yet, and the first wait is none
            self._made.ring(key)

    def forget_ring(self, key: str) -> None:
        if self._bell is not None:
            self._bell.tokens.pop(key, None)
        if self._made is not None:
            self._made.forget(key)

    def forget(self) -> None:
        doorbell = self._made
        self._reset()
        if doorbell is not None:
            if isinstance(doorbell.bell, ListenBell):
                doorbell.bell.forget()
            doorbell.discard()

    def close(self) -> None:
        self._closed = True
        if self._made is not None:
            self._made.close()


class AsyncListening:
    """For the tasks of one loop."""

    def __init__(self, runtime: Runtime, listen: Listen, channel: str) -> None:
        self._runtime, self._listen, self._channel = runtime, listen, channel
        self._reset()

    def _reset(self) -> None:
        self._doorbell = AsyncDoorbell()
        self._listener: AsyncListener | None = None
        self._hanging = False
        self._deaf = False

    @property
    def detail(self) -> Finding:
        return _finding(self._deaf)

    async def wait(self, key: str, until: float) -> int | None:
        if self._listener is not None and not self._listener.open:
            self._listener = None
            await self._pause(until)
        if self._listener is None and not self._deaf and not self._hanging:
            await self._hang(until)
            return None
        if self._deaf:
            until = min(until, self._runtime.now() + self._runtime.between(*POLL_SECONDS))
        await self._doorbell.wait(key, until)
        return self._listener.tokens.pop(key, None) if self._listener is not None else None

    async def _hang(self, until: float) -> None:
        self._hanging = True
        try:
            made = await in_thread(lambda: self._listen(self._channel), Connection.close)
            if made.pooled:
                made.close()
                self._deaf = True
            else:
                self._listener = AsyncListener(made, self._doorbell)
        except BackendUnavailable:
            await self._pause(until)
        finally:
            self._hanging = False
            self._doorbell.ring_all()  # they attempt again, now that the bell hangs or not

    async def _pause(self, until: float) -> None:
        left = until - self._runtime.now()
        await self._runtime.sleep(max(0.0, min(left, self._runtime.between(*MEND_SECONDS))))

    def ring(self, key: str) -> None:
        self._doorbell.ring(key)

    def forget_ring(self, key: str) -> None:
        if self._listener is not None:
            self._listener.tokens.pop(key, None)
        self._doorbell.forget(key)

    def forget(self) -> None:
        listener = self._listener
        self._reset()
        if listener is not None:
            listener.forget()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._doorbell.ring_all()
