"""The bell: one session of a door that sleeps on the server until somebody calls.

Who calls notes for whom and then kills the sleep (``KILL QUERY``), which carries no word of its
own. A kill between two sleeps would be lost, so a sleep begins with a look at the notes: a note
is there before the kill is sent, and a kill after the look finds the sleep. Sleeps are short, so
where kills don't arrive the notes are still found in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.runtimes.clock import now
from holdfast.wires.doorbell import AsyncDoorbell
from holdfast.wires.mysql import INTERRUPTED, Connection
from holdfast.wires.mysql_protocol import Row

__all__ = ["AsyncBell", "Listen", "SleepBell"]

Listen = Callable[[list[tuple[bytes, bytes]]], bytes]
"""The request that sleeps until there are notes besides these, and then tells all notes."""


class SleepBell:
    """A session that sleeps; what a blocking doorbell reads."""

    def __init__(self, connection: Connection, listen: Listen, patience: float) -> None:
        self._connection, self._listen, self._patience = connection, listen, patience
        self._seen: list[tuple[bytes, bytes]] = []
        self._sleep()

    def _sleep(self) -> None:
        self._until = now() + self._patience
        self._connection.send(self._listen(self._seen))

    def stalled(self, moment: float) -> bool:
        """Whether the answer to its sleep is long overdue."""
        return moment > self._until and not self._connection.stirs()

    @property
    def open(self) -> bool:
        return self._connection.open

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        """Who was called since. Raises ``BackendUnavailable`` when it is broken."""
        connection = self._connection
        connection.flush()
        reply = connection.collect()
        if reply is None:
            return []
        if reply.failure is None or reply.failure.code != INTERRUPTED:
            rows = connection.checked(reply)[-1].rows
            keys = self._news(rows)
        else:
            keys = []
        self._sleep()
        return keys

    def _news(self, rows: list[Row]) -> list[str]:
        notes = [(row[0] or b"", row[1] or b"") for row in rows]
        news = [owner.decode() for owner, made in notes if (owner, made) not in self._seen]
        self._seen = notes
        return news

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()


class AsyncBell:
    """A session that sleeps, read by the loop as calls come in."""

    def __init__(self, bell: SleepBell, doorbell: AsyncDoorbell) -> None:
        self._bell, self._doorbell = bell, doorbell
        self._loop = asyncio.get_running_loop()
        self._fileno = bell.fileno()
        self._loop.add_reader(self._fileno, self._readable)

    @property
    def open(self) -> bool:
        return self._bell.open

    def stalled(self, moment: float) -> bool:
        return self._bell.stalled(moment)

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
        self._bell.close()

    def forget(self) -> None:
        self._bell.forget()
