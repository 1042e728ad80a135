"""How waiters are woken: one session per client sleeps on the server until a wake-up kills it.

To wake a waiter, a client (1) marks the waiter's entry in the row as called, with the id of the
waiter's subscription, and (2) kills the subscription's sleep with ``KILL QUERY``, which carries no
data. A kill between two sleeps would be lost, so every sleep starts by reading the rows of the
names that are waited for: the mark is written before the kill is sent, and a kill after the read
ends the sleep. A waiter that arrives while the subscription sleeps for other names rechecks its
own row first. From then on a kill ends the sleep, or comes before the next sleep, which reads the
waiter's row, too. Sleeps are short, so the marks are found in time even where kills do not arrive.

Without waiters the session is idle. The first wait opens the subscription and returns at once, so
that the next attempt stores its id in the entry. If the subscription breaks, all waiters attempt
again with a new one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence

from holdfast.core.backoff import SUBSCRIPTION_RETRY_SECONDS, pause_within
from holdfast.core.contract import Finding, Runtime
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, WRITE, World
from holdfast.io.wakeups import Messages, Wakeups
from holdfast.stores._sql.connection import Dial, Opening, world_of
from holdfast.stores.mysql.connection import INTERRUPTED, MySqlConnection
from holdfast.stores.mysql.protocol import MySqlReply
from holdfast.stores.mysql.sql import (
    MySqlLeaseStatements,
    sleep_expression,
    sleep_lock,
    subscription_lock,
)

__all__ = [
    "SLEEP_SECONDS",
    "MySqlWakeups",
    "Recheck",
    "SleepSubscription",
    "SubscriptionOpener",
    "wakeup_check_request",
    "wakeup_problem",
]

SLEEP_SECONDS = 1.0
"""Duration of one sleep: well below the grace of a called waiter."""
POLL_SECONDS = 0.25
"""Duration of one sleep where sessions can't kill each other: the subscription polls."""
NO_SUCH_SESSION = 1094
_NO_SUBSCRIPTION = "-"

SleepRequest = Callable[[Iterable[str]], bytes]
"""Makes the request with which a subscription sleeps for a set of names. It selects the names that
have a called entry, each with ``called``; if there is none, it sleeps and selects the value of the
sleep."""


class SleepSubscription(Messages):
    """A sleeping session, as a subscription. It has no values."""

    connection: MySqlConnection

    def __init__(
        self,
        identity: str,
        world: World,
        connection: MySqlConnection,
        listen: SleepRequest,
        answer_seconds: float,
        lock_holder: MySqlConnection | None = None,
    ) -> None:
        super().__init__(connection, lambda _: ())
        self._world = world
        self.identity = identity
        """What a waiter's entry has, so that wake-ups find this subscription."""
        self._sleep_request, self._answer_seconds = listen, answer_seconds
        self._lock_holder = lock_holder
        """The session that holds the named lock on which the other one sleeps; None if polling."""
        self._waiting: dict[str, str] = {}
        """The names that are waited for, by key; an empty name after the waiter was woken."""
        self._sleeping_for: set[str] = set()
        """The names of the current sleep request; empty if none is pending."""
        self._since = 0.0

    def _sleep(self) -> None:
        names = set(self._waiting.values()) - {""}
        if names and not self._sleeping_for:
            self._sleeping_for, self._since = names, now()
            self.connection.send(self._sleep_request(names))

    def add_waiter(self, key: str, name: str) -> bool:
        """Registers a waiter. Returns True if its wake-up may have been missed, so that the caller
        must recheck the row."""
        try:
            with self._mutex:
                self._waiting[key] = name
                if not self._sleeping_for:
                    self._sleep()  # a request for one name always fits into the socket's buffer
                return name not in self._sleeping_for
        except OSError:
            self.connection.sever()  # so that its reader ends it
            raise

    def remove_waiter(self, key: str) -> None:
        """Removes a waiter."""
        with self._mutex:
            self._waiting.pop(key, None)

    def stalled(self, moment: float) -> bool:
        """True if the subscription must be replaced: the server has ended one of its sessions, or
        the reply to its sleep is overdue."""
        with self._mutex:
            if not self.connection.open or (
                self._lock_holder is not None and self._lock_holder.has_input()
            ):
                return True
            if not self._sleeping_for:
                return self.connection.has_input()
            return moment > self._since + self._answer_seconds and not self.connection.has_input()

    def read(self) -> list[str]:
        """Reads the reply to a sleep, if it has arrived, and starts the next sleep. Returns the
        keys of the called waiters. Raises ``BackendUnavailable`` if the subscription is broken."""
        connection = self.connection
        connection.collect()
        reply = connection.next()
        if reply is PENDING:
            return []
        killed = reply.failure is not None and reply.failure.code == INTERRUPTED
        rows = [] if killed else connection.checked(reply)[0].rows
        names = [name or b"" for name, what in rows if what == b"called"]
        killed = killed or any(what == b"1" for _, what in rows)
        with self._mutex:
            self._sleeping_for = set()
            if killed and len(self._waiting) == 1:  # the kill can only be for this waiter
                names = [name.encode() for name in self._waiting.values()]
            keys = self._mark_called({name.decode() for name in names})
            self._sleep()
        if connection.unsent:
            self._send_rest()
        return keys

    def _send_rest(self) -> None:
        """Sends the rest of a request: a thread waits for that, without the mutex; an event loop
        goes on when there is room for it."""
        connection, until = self.connection, self._since + self._answer_seconds
        if not self._world.blocking:
            from holdfast.io.aio import watch

            watch(asyncio.get_running_loop(), connection.fd, WRITE, self._writable)
            return
        try:
            while not self._flush():
                if not run_now(self._world.ready({connection.fd: WRITE}, until)):
                    raise connection.broken("the send buffer stayed full")
        except BaseException:  # no other thread sends the rest: end the connection for its reader
            connection.sever()
            raise

    def _flush(self) -> bool:
        with self._mutex:
            return self.connection.flush()

    def _writable(self) -> None:
        done = True
        try:
            done = self._flush()
        except OSError:
            self.connection.sever()  # the loop's reader sees that
        finally:
            if done:
                asyncio.get_running_loop().remove_writer(self.connection.fd)

    def _mark_called(self, names: set[str]) -> list[str]:
        keys = [key for key, name in self._waiting.items() if name in names]
        self._waiting.update(dict.fromkeys(keys, ""))
        return keys

    def close(self) -> None:
        self.connection.close()
        if self._lock_holder is not None:
            self._lock_holder.close()

    def forget(self, *, keep_number: bool = False) -> None:
        self.connection.forget(keep_number=keep_number)
        if self._lock_holder is not None:
            self._lock_holder.forget()


async def _got_lock(opening: Opening[MySqlConnection], lock: bytes) -> bool:
    reply = await opening.ask(b"SELECT GET_LOCK(%s, 0)" % lock)
    return reply.failure is None and reply.results[0].rows == [(b"1",)]


class SubscriptionOpener:
    """Opens subscriptions, and knows whether sessions can find and kill each other."""

    def __init__(
        self,
        connect: Dial[MySqlConnection],
        galera: Callable[[], bool],
        statements: MySqlLeaseStatements,
        seconds: float,
    ) -> None:
        self._connect, self._galera, self._seconds = connect, galera, seconds
        self._statements = statements
        self.polling = False
        """True if the last subscription polls, because it could not get its named lock."""

    async def open(self, world: World, until: float) -> SleepSubscription:
        """Opens a subscription before the deadline."""
        until = min(until, now() + self._seconds)
        identity = secrets.token_hex(12)
        made: list[MySqlConnection] = []
        try:
            made.append(await self._connect(world, until))
            own = Opening(world, made[0], until)
            self.polling = self._galera() or not await _got_lock(own, subscription_lock(identity))
            if self.polling:
                listen = self._poll_request(identity)
                return SleepSubscription(identity, world, made[0], listen, self._seconds)
            made.append(await self._connect(world, until))
            await _got_lock(Opening(world, made[1], until), sleep_lock(identity))
            listen = self._kill_request(identity)
            return SleepSubscription(identity, world, made[0], listen, self._seconds, made[1])
        except BaseException:
            for connection in made:
                connection.close()
            raise

    def _kill_request(self, subscription: str) -> SleepRequest:
        asleep = sleep_expression(sleep_lock(subscription), SLEEP_SECONDS)
        return lambda names: self._statements.listen(subscription, names, asleep)

    def _poll_request(self, subscription: str) -> SleepRequest:
        asleep = b"SLEEP(%.2f)" % POLL_SECONDS
        return lambda names: self._statements.listen(subscription, names, asleep)

    @property
    def galera(self) -> bool:
        """True if the server is a Galera node."""
        return self._galera()

    @property
    def polls(self) -> bool:
        """True if sessions are known not to be able to kill each other."""
        return self.polling or self._galera()

    @property
    def finding(self) -> Finding:
        """How waiters are woken, for ``check()``."""
        if self.polls:
            text = (
                "sessions can't wake each other here (Galera, or a proxy): "
                f"each waiting client polls its rows every {POLL_SECONDS:g} s"
            )
            return Finding("waiting", text, "warning")
        return Finding("waiting", "waiters are woken through one sleeping session per client")


Recheck = Callable[[], Awaitable[bool]]
"""Reads the row. Returns True if the waiter's entry is called."""


class MySqlWakeups(Wakeups):
    """The waits of one backend, on one subscription."""

    def __init__(self, runtime: Runtime, opener: SubscriptionOpener) -> None:
        super().__init__(blocking=runtime.blocking)
        self.subscription = ""
        """The id of the current subscription; empty before the first one."""
        self._runtime, self._world, self._opener = runtime, world_of(runtime), opener
        self._waits: dict[str, tuple[str, Recheck]] = {}
        self._closed = False

    async def wait_for(
        self, key: str, name: str, until: float, stored: str, recheck: Recheck
    ) -> None:
        """Returns when the waiter is woken, at the deadline, or when an attempt is due. ``stored``
        is the subscription in the waiter's entry: if another one is current, returns at once."""
        if self._closed:
            return
        live = self._subscription
        if isinstance(live, SleepSubscription) and live.stalled(now()):
            self.drop()
        generation = self.generation if stored == self.subscription else 0
        self._waits[key] = name, recheck
        try:
            await self.wait(key, generation, until, self._open)
        finally:
            self._waits.pop(key, None)

    async def _open(self, by: float) -> SleepSubscription:
        made = await self._opener.open(self._world, by)
        self.subscription = made.identity
        return made

    async def _wait_on(self, subscription: Messages, key: str, until: float) -> None:
        if not isinstance(subscription, SleepSubscription):
            return
        name, recheck = self._waits[key]
        try:
            called = subscription.add_waiter(key, name) and await self._recheck(recheck, until)
            if not called and self.generation:
                await super()._wait_on(subscription, key, until)
        finally:
            subscription.remove_waiter(key)

    async def _recheck(self, recheck: Recheck, until: float) -> bool:
        try:
            return await recheck()
        except BackendUnavailable:  # the subscription may be as good as before
            left = until - self._runtime.now()
            await self._hub.pause(
                pause_within(left, SUBSCRIPTION_RETRY_SECONDS, self._runtime.between)
            )
            return True

    def forget(self) -> None:
        super().forget()
        self.subscription = ""
        self._begin()

    def close(self) -> None:
        self._closed = True
        super().close()


def wakeup_check_request(subscriptions: Sequence[str]) -> bytes:
    """Returns a request that checks whether wake-ups reach these subscriptions. It wakes none.

    It selects the sessions of the subscriptions by their named locks, and those of them that this
    account may see. Then it kills the query of a session that does not exist: a server that allows
    ``KILL`` answers with ``NO_SUCH_SESSION``.
    """
    kill = b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(_NO_SUBSCRIPTION)
    if not subscriptions:
        return kill
    sessions = b", ".join(
        b"IS_USED_LOCK(%s)" % subscription_lock(subscription) for subscription in subscriptions
    )
    shown = b"SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN (%s)" % sessions
    return b"; ".join([b"SELECT " + sessions, shown, kill])


def wakeup_problem(reply: MySqlReply) -> str:
    """Returns why wake-ups do not arrive, from the reply to that request; empty if they do."""
    if reply.failure is None or reply.failure.code != NO_SUCH_SESSION:
        cause = f": {reply.failure.text}" if reply.failure else ""
        return f"KILL QUERY does not work here{cause}"
    if not reply.results:
        return ""
    sessions, shown = reply.results
    if None in sessions.rows[0]:
        return (
            "the sessions of some waiters are not found: they have ended, or are behind a proxy "
            "or on another node"
        )
    if not set(sessions.rows[0]) <= {row[0] for row in shown.rows}:
        return "some waiters use another account, whose sessions this account may not kill"
    return ""
