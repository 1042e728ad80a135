"""The bell: one session of a door that sleeps on the server until somebody calls.

Who calls marks for whom in the row of a name, and then kills the sleep (``KILL QUERY``), which
carries no word of its own. A kill between two sleeps would be lost, so a sleep begins with a look
at the rows of the names that are waited for: the mark is there before the kill is sent, and a
kill after the look finds the sleep. One for somebody who was told to wait but does not yet may be
lost, too, and the look was not for its name: so whoever comes to wait, and finds the bell asleep
for others, looks for itself. From then on a kill ends the sleep or comes before the next one, whose
look is for its name, too. Sleeps are short, so where kills don't arrive the marks are still found
in time.

Where nobody waits any more, the bell rests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.runtimes.clock import now
from holdfast.wires.doorbell import AsyncDoorbell
from holdfast.wires.mysql import INTERRUPTED, Connection

__all__ = ["AsyncBell", "Listen", "SleepBell"]


class Listen(NamedTuple):
    """How a bell sleeps."""

    request: Callable[[Iterable[str]], bytes]
    """Tells which of these names somebody was called for; if there is none, sleeps first, until
    somebody may be. Rows of a name and ``called``, or one with what the sleep said."""
    seconds: float
    """How long, at the most."""


class SleepBell:
    """A session that sleeps; what a blocking doorbell reads."""

    def __init__(
        self,
        connection: Connection,
        listen: Listen,
        patience: float,
        keeper: Connection | None = None,
    ) -> None:
        self._connection, self._listen, self._patience = connection, listen, patience
        self._all = [connection] if keeper is None else [connection, keeper]
        """With the one that only keeps what the other one sleeps on."""
        self._waiting: dict[str, str] = {}
        """The names for which somebody waits, by key; empty for one who was rung."""
        # Re-entrant: a signal handler may wait in the middle of what its thread does here.
        self._mutex = threading.RLock()
        self._asleep: set[str] = set()
        """The names for which it sleeps; none while it rests."""
        self._since = 0.0

    def _sleep(self) -> None:
        names = set(self._waiting.values()) - {""}
        if names and not self._asleep:
            self._asleep = names
            self._since = now()
            self._connection.send(self._listen.request(names))

    def enter(self, key: str, name: str) -> bool:
        """Somebody begins to wait; whether it was perhaps called before, and nobody looked."""
        with self._mutex:
            self._waiting[key] = name
            if not self._asleep:
                self._sleep()
            return name not in self._asleep

    def leave(self, key: str) -> None:
        """Somebody waits no more."""
        with self._mutex:
            self._waiting.pop(key, None)

    def stalled(self, moment: float) -> bool:
        """Whether the answer to its sleep is long overdue."""
        late = moment > self._since + self._patience
        return bool(self._asleep) and late and not self._connection.stirs()

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
        killed = reply.failure is not None and reply.failure.code == INTERRUPTED
        told = [] if killed else connection.checked(reply)[0].rows
        names = [name or b"" for name, what in told if what == b"called"]
        killed = killed or any(what == b"1" for _, what in told)  # it was cut short
        with self._mutex:
            self._asleep = set()
            if killed and len(self._waiting) == 1:  # it can be for nobody else
                names = [name.encode() for name in self._waiting.values()]
            keys = self._called({name.decode() for name in names})
            self._sleep()
        return keys

    def _called(self, names: set[str]) -> list[str]:
        keys = [key for key, name in self._waiting.items() if name in names]
        self._waiting.update(dict.fromkeys(keys, ""))
        return keys

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    def forget(self) -> None:
        for connection in self._all:
            connection.forget()


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

    def enter(self, key: str, name: str) -> bool:
        return self._bell.enter(key, name)

    def leave(self, key: str) -> None:
        self._bell.leave(key)

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
