"""LISTEN: the one connection of a door on which its waiters are woken."""

from __future__ import annotations

import asyncio

from psycopg import Error as PsycopgError

from holdfast.wires.doorbell import AsyncDoorbell
from holdfast.wires.postgres import Connection

__all__ = ["AsyncListener", "ListenBell"]


class ListenBell:
    """A connection that listens; what a blocking doorbell reads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        """The payloads that came since. Raises ``BackendUnavailable`` when it is broken."""
        pgconn = self._connection.pgconn
        keys: list[str] = []
        try:
            pgconn.consume_input()
            while (notification := pgconn.notifies()) is not None:
                keys.append(notification.extra.decode(errors="replace"))
        except PsycopgError as error:
            raise self._connection.broken(str(error)) from None
        return keys

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()


class AsyncListener:
    """A connection that listens, read by the loop as notifications come in."""

    def __init__(self, connection: Connection, doorbell: AsyncDoorbell) -> None:
        self._bell = ListenBell(connection)
        self._connection, self._doorbell = connection, doorbell
        self._loop = asyncio.get_running_loop()
        self._fileno = connection.fileno()
        self._loop.add_reader(self._fileno, self._readable)

    @property
    def open(self) -> bool:
        return self._connection.open

    def _readable(self) -> None:
        try:
            keys = self._bell.read()
        except ConnectionError:
            self.close()
            self._doorbell.ring_all()
            return
        for key in keys:
            self._doorbell.ring(key)

    def close(self) -> None:
        if self._fileno >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)
        self._fileno = -1
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()
