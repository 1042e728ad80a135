"""The subscription: one session of a client that sleeps on the server until somebody calls.

Who calls marks for whom in the row of a name, and then kills the sleep (``KILL QUERY``), which
carries no word of its own. A kill between two sleeps would be lost, so a sleep begins with a look
at the rows of the names that are waited for: the mark is there before the kill is sent, and a
kill after the look finds the sleep. One for somebody who was told to wait but does not yet may be
lost, too, and the look was not for its name: so whoever comes to wait, and finds the subscription
asleep
for others, looks for itself. From then on a kill ends the sleep or comes before the next one, whose
look is for its name, too. Sleeps are short, so where kills don't arrive the marks are still found
in time.

Where nobody waits any more, the subscription rests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.io.clock import now
from holdfast.io.wakeups import AsyncWakeupHub
from holdfast.stores.mysql.connection import INTERRUPTED, Connection

__all__ = ["AsyncSubscription", "Listen", "SleepSubscription"]


class Listen(NamedTuple):
    """How a subscription sleeps."""

    request: Callable[[Iterable[str]], bytes]
    """Tells which of these names somebody was called for; if there is none, sleeps first, until
    somebody may be. Rows of a name and ``called``, or one with what the sleep said."""
    seconds: float
    """How long, at the most."""


class SleepSubscription:
    """A session that sleeps; what a blocking wake-up hub reads."""

    def __init__(
        self,
        connection: Connection,
        listen: Listen,
        patience: float,
        renewer: Connection | None = None,
    ) -> None:
        self._connection, self._listen, self._patience = connection, listen, patience
        self._renewer_thread = renewer
        """The one that only keeps what the other one sleeps on."""
        self.blocks = True
        """Whether it waits for room to send. Where it must not, ``flush`` sends the rest."""
        self._waiting: dict[str, str] = {}
        """The names for which somebody waits, by key; empty for one who was woken."""
        # Re-entrant: a signal handler may wait in the middle of what its thread does here.
        self._mutex = threading.RLock()
        self._asleep: set[str] = set()
        """The names for which it sleeps; none while it rests."""
        self._since = 0.0

    def _sleep(self) -> None:
        names = set(self._waiting.values()) - {""}
        if names and not self._asleep:
            self._asleep, self._since = names, now()
            self._connection.send(self._listen.request(names))

    def _send_rest(self) -> None:
        """Sends what did not fit at once. Others may come and go meanwhile."""
        connection, until = self._connection, self._since + self._patience
        try:
            while not connection.sent and not self.flush():
                if not connection.has_room(until):
                    raise connection.broken("no room to send")
        except BaseException:  # nobody else sends the rest: whoever listens is told
            connection.sever()
            raise

    def flush(self) -> bool:
        """Sends what is left to send; whether all of it is gone."""
        with self._mutex:
            return self._connection.flush()

    def enter(self, key: str, name: str) -> bool:
        """Somebody begins to wait; whether it was perhaps called before, and nobody looked."""
        with self._mutex:
            self._waiting[key] = name
            if not self._asleep:
                self._sleep()  # for one name, for which there is always room
            return name not in self._asleep

    def leave(self, key: str) -> None:
        """Somebody waits no more."""
        with self._mutex:
            self._waiting.pop(key, None)

    def stalled(self, moment: float) -> bool:
        """Whether it is of no more use: the server has ended one of its sessions, or the answer to
        its sleep is long overdue."""
        with self._mutex:
            if not self._connection.open or (
                self._renewer_thread is not None and self._renewer_thread.has_input()
            ):
                return True
            if not self._asleep:
                return self._connection.has_input()
            return moment > self._since + self._patience and not self._connection.has_input()

    @property
    def open(self) -> bool:
        return self._connection.open

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        """Who was called since. Raises ``BackendUnavailable`` when it is broken."""
        connection = self._connection
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
        if self.blocks:
            self._send_rest()
        return keys

    def _called(self, names: set[str]) -> list[str]:
        keys = [key for key, name in self._waiting.items() if name in names]
        self._waiting.update(dict.fromkeys(keys, ""))
        return keys

    def close(self) -> None:
        self._connection.close()
        if self._renewer_thread is not None:
            self._renewer_thread.close()

    def forget(self) -> None:
        self._connection.forget()
        if self._renewer_thread is not None:
            self._renewer_thread.forget()


class AsyncSubscription:
    """A session that sleeps, read by the loop as calls come in."""

    def __init__(self, subscription: SleepSubscription, hub: AsyncWakeupHub) -> None:
        self._subscription, self._hub = subscription, hub
        subscription.blocks = False
        self._loop = asyncio.get_running_loop()
        self._fileno = subscription.fileno()
        self._loop.add_reader(self._fileno, self._readable)

    @property
    def open(self) -> bool:
        return self._subscription.open

    def stalled(self, moment: float) -> bool:
        return self._subscription.stalled(moment)

    def enter(self, key: str, name: str) -> bool:
        try:
            return self._subscription.enter(key, name)
        except ConnectionError:  # the loop must not keep the number of a socket that is closed
            self.close()
            raise

    def leave(self, key: str) -> None:
        self._subscription.leave(key)

    def _readable(self) -> None:
        try:
            keys = self._subscription.read()
        except ConnectionError:
            self._break()
            return
        for key in keys:
            self._hub.wake(key)
        self._flush()

    def _flush(self) -> None:
        """Sends what is left to send, now or when there is room again."""
        try:
            gone = self._subscription.flush()
        except ConnectionError:
            self._break()
            return
        if gone:
            self._loop.remove_writer(self._fileno)
        else:
            self._loop.add_writer(self._fileno, self._flush)

    def _break(self) -> None:
        self.close()
        self._hub.wake_all()

    def close(self) -> None:
        if self._fileno >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fileno)
            self._loop.remove_writer(self._fileno)
        self._fileno = -1
        self._subscription.close()

    def forget(self) -> None:
        self._subscription.forget()
