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
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from holdfast.core.backoff import SUBSCRIPTION_RETRY_SECONDS
from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.limits import Permit, SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.aio import in_thread
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
    "make_wakeups",
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


class SleepSubscription:
    """A sleeping session, as the subscription of a blocking wake-up hub."""

    def __init__(
        self,
        connection: MySqlConnection,
        listen: SleepRequest,
        answer_seconds: float,
        lock_holder: MySqlConnection | None = None,
    ) -> None:
        self._connection, self._sleep_request, self._answer_seconds = (
            connection,
            listen,
            answer_seconds,
        )
        self._lock_holder = lock_holder
        """The session that holds the named lock on which the other one sleeps; None if polling."""
        self.blocks = True
        """True if ``read`` waits until its request is sent; otherwise ``flush`` sends the rest."""
        self._waiting: dict[str, str] = {}
        """The names that are waited for, by key; an empty name after the waiter was woken."""
        # Re-entrant: a signal handler may wait while its own thread is inside one of these methods.
        self._mutex = threading.RLock()
        self._sleeping_for: set[str] = set()
        """The names of the current sleep request; empty if none is pending."""
        self._since = 0.0

    def _sleep(self) -> None:
        names = set(self._waiting.values()) - {""}
        if names and not self._sleeping_for:
            self._sleeping_for, self._since = names, now()
            self._connection.send(self._sleep_request(names))

    def _send_rest(self) -> None:
        """Sends the rest of a request, without the mutex: waiters may be added and removed."""
        connection, until = self._connection, self._since + self._answer_seconds
        try:
            while not connection.sent and not self.flush():
                if not connection.wait_writable(until):
                    raise connection.broken("the send buffer stayed full")
        except BaseException:  # no other thread sends the rest: end the connection for its reader
            connection.sever()
            raise

    def flush(self) -> bool:
        """Sends what is left of a request. Returns True if nothing is left."""
        with self._mutex:
            return self._connection.flush()

    def add_waiter(self, key: str, name: str) -> bool:
        """Registers a waiter. Returns True if its wake-up may have been missed, so that the caller
        must recheck the row."""
        with self._mutex:
            self._waiting[key] = name
            if not self._sleeping_for:
                self._sleep()  # a request for one name always fits into the socket's buffer
            return name not in self._sleeping_for

    def remove_waiter(self, key: str) -> None:
        """Removes a waiter."""
        with self._mutex:
            self._waiting.pop(key, None)

    def stalled(self, moment: float) -> bool:
        """True if the subscription must be replaced: the server has ended one of its sessions, or
        the reply to its sleep is overdue."""
        with self._mutex:
            if not self._connection.open or (
                self._lock_holder is not None and self._lock_holder.has_input()
            ):
                return True
            if not self._sleeping_for:
                return self._connection.has_input()
            return moment > self._since + self._answer_seconds and not self._connection.has_input()

    @property
    def open(self) -> bool:
        return self._connection.open

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        """Reads the reply to a sleep, if it has arrived, and starts the next sleep. Returns the
        keys of the called waiters. Raises ``BackendUnavailable`` if the subscription is broken."""
        connection = self._connection
        reply = connection.collect()
        if reply is None:
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
        if self.blocks:
            self._send_rest()
        return keys

    def _mark_called(self, names: set[str]) -> list[str]:
        keys = [key for key, name in self._waiting.items() if name in names]
        self._waiting.update(dict.fromkeys(keys, ""))
        return keys

    def close(self) -> None:
        self._connection.close()
        if self._lock_holder is not None:
            self._lock_holder.close()

    def forget(self, loop_ended: bool = False) -> None:
        self._connection.leave(loop_ended)
        if self._lock_holder is not None:
            self._lock_holder.leave(loop_ended)


class AsyncSleepSubscription:
    """A sleeping session that is read by an event loop."""

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

    def add_waiter(self, key: str, name: str) -> bool:
        try:
            return self._subscription.add_waiter(key, name)
        except ConnectionError:  # the loop must not keep watching a closed file descriptor
            self.close()
            raise

    def remove_waiter(self, key: str) -> None:
        self._subscription.remove_waiter(key)

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
        """Sends what is left of a request, now or when the socket is writable."""
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
        self._subscription.forget(self._loop.is_closed())


def _got_lock(connection: MySqlConnection, lock: bytes, until: float) -> bool:
    reply = connection.request(b"SELECT GET_LOCK(%s, 0)" % lock, until)
    return reply.failure is None and reply.results[0].rows == [(b"1",)]


class SubscriptionOpener:
    """Opens subscriptions, and knows whether sessions can find and kill each other."""

    def __init__(
        self, connect: Callable[[float], MySqlConnection], galera: Callable[[], bool],
        statements: MySqlLeaseStatements, seconds: float,
    ) -> None:  # fmt: skip
        self._connect, self._galera, self.seconds = connect, galera, seconds
        self._statements = statements
        self.polling = False
        """True if the last subscription polls, because it could not get its named lock."""

    def attach(self, until: float) -> tuple[str, SleepSubscription]:
        """Opens a subscription before the deadline. Returns its id, and the subscription."""
        subscription = secrets.token_hex(12)
        connection = self._connect(until)
        lock_holder: MySqlConnection | None = None
        try:
            self.polling = self._galera() or not _got_lock(
                connection, subscription_lock(subscription), until
            )
            if self.polling:
                return subscription, SleepSubscription(
                    connection, self._poll_request(subscription), self.seconds
                )
            lock_holder = self._connect(until)
            _got_lock(lock_holder, sleep_lock(subscription), until)
            return subscription, SleepSubscription(
                connection, self._kill_request(subscription), self.seconds, lock_holder
            )
        except BaseException:
            connection.close()
            if lock_holder is not None:
                lock_holder.close()
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


class MySqlWakeups(Protocol):
    """The waits of one backend, on one subscription."""

    subscription: str
    """The id of the current subscription; empty before the first one."""

    async def wait(self, key: str, name: str, until: float, stored: str, recheck: Recheck) -> None:
        """Returns when the waiter is woken, at the deadline, or when an attempt is due. ``stored``
        is the subscription in the waiter's entry: if another one is current, returns at once."""
        ...

    def wake(self, key: str) -> None: ...
    def forget_wakeup(self, key: str) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def make_wakeups(runtime: Runtime, opener: SubscriptionOpener) -> MySqlWakeups:
    """Returns the variant for the runtime."""
    return (BlockingMySqlWakeups if runtime.blocking else AsyncMySqlWakeups)(runtime, opener)


async def _pause(runtime: Runtime, until: float) -> None:
    left = until - runtime.now()
    await runtime.sleep(max(0.0, min(left, runtime.between(*SUBSCRIPTION_RETRY_SECONDS))))


class BlockingMySqlWakeups:
    """The variant for threads: one of the waiting threads reads the session for all."""

    def __init__(self, runtime: Runtime, opener: SubscriptionOpener) -> None:
        self._runtime, self._opener = runtime, opener
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.subscription = ""
        self._hub: BlockingWakeupHub | None = None
        self._making = threading.RLock()
        self._single_flight = SingleFlight()

    def _get_hub(self) -> BlockingWakeupHub:
        """Returns the hub. Created at the first use: a backend that never waits has none."""
        hub = self._hub
        if hub is None:
            with self._making:
                made = BlockingWakeupHub()
                if self._hub is None:  # a signal handler may have created one in this thread
                    self._hub = made
                else:
                    made.discard()
                hub = self._hub
        return hub

    async def wait(self, key: str, name: str, until: float, stored: str, recheck: Recheck) -> None:
        if self._closed:
            return
        hub = self._get_hub()
        subscription = self._usable(hub)
        if subscription is None:
            await self._attach_or_poll(hub, key, until)
            return
        if stored != self.subscription:
            return
        try:
            called = subscription.add_waiter(key, name) and await recheck()
            if not called and hub.subscription is subscription:
                hub.wait(key, until)
        except (BackendUnavailable, OSError):
            await _pause(self._runtime, until)
        finally:
            subscription.remove_waiter(key)

    def _usable(self, hub: BlockingWakeupHub) -> SleepSubscription | None:
        subscription = hub.subscription
        return (
            subscription
            if isinstance(subscription, SleepSubscription) and not subscription.stalled(now())
            else None
        )

    async def _attach_or_poll(self, hub: BlockingWakeupHub, key: str, until: float) -> None:
        """Opens the subscription; while another waiter opens it, waits for a short time, after
        which this waiter attempts again."""
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
            if self._usable(hub) is None:
                self.subscription, made = self._opener.attach(open_by(until, self._opener.seconds))
                hub.attach(made)
        except BackendUnavailable:
            self._single_flight.failed(began)
            raise
        finally:
            self._single_flight.end(permit)
            if self._closed:
                hub.close()
        hub.wake(EVERYBODY)  # wake-ups without a subscription were lost

    def wake(self, key: str) -> None:
        if self._hub is not None:  # without a hub: the first wait returns at once in any case
            self._hub.wake(key)

    def forget_wakeup(self, key: str) -> None:
        if self._hub is not None:
            self._hub.forget(key)

    def forget(self) -> None:
        hub = self._hub
        self._reset()
        if hub is not None:
            if isinstance(hub.subscription, SleepSubscription):
                hub.subscription.forget()
            hub.discard()

    def close(self) -> None:
        self._closed = True
        if self._hub is not None:
            self._hub.close()


class AsyncMySqlWakeups:
    """The variant for the tasks of one event loop."""

    def __init__(self, runtime: Runtime, opener: SubscriptionOpener) -> None:
        self._runtime, self._opener = runtime, opener
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self.subscription = ""
        self._hub = AsyncWakeupHub()
        self._attached: AsyncSleepSubscription | None = None
        self._single_flight = SingleFlight()

    async def wait(self, key: str, name: str, until: float, stored: str, recheck: Recheck) -> None:
        if self._closed:
            return
        attached = self._attached
        if attached is not None and attached.stalled(now()):
            self._attached = None
            attached.close()
            await _pause(self._runtime, until)
        if self._attached is None:
            await self._attach_or_poll(key, until)
        elif stored == self.subscription:
            await self._wait(self._attached, key, name, until, recheck)

    async def _wait(
        self, attached: AsyncSleepSubscription, key: str, name: str, until: float, recheck: Recheck
    ) -> None:
        try:
            called = attached.add_waiter(key, name) and await recheck()
            if not called and attached.open:
                await self._hub.wait(key, until)
        except BackendUnavailable:
            await _pause(self._runtime, until)
        finally:
            attached.remove_waiter(key)

    async def _attach_or_poll(self, key: str, until: float) -> None:
        """Opens the subscription; while another waiter opens it, waits for a short time, after
        which this waiter attempts again."""
        permit = self._single_flight.begin()
        if permit is None:
            await self._hub.wait(key, look_by(until))
            return
        began = now()
        try:
            await self._attach(open_by(until, self._opener.seconds))
        except (BackendUnavailable, TimeoutError):
            self._single_flight.failed(began)
            await _pause(self._runtime, until)
        finally:
            self._single_flight.end(permit)
            self._hub.wake_all()  # all attempt again, with the subscription or without

    async def _attach(self, by: float) -> None:
        async with asyncio.timeout(by - now()):  # resolving the host name may take longer
            name, subscription = await in_thread(
                lambda: self._opener.attach(by), lambda made: made[1].close()
            )
        if self._closed:
            subscription.close()
            return
        self.subscription = name
        self._attached = AsyncSleepSubscription(subscription, self._hub)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget_wakeup(self, key: str) -> None:
        self._hub.forget(key)

    def forget(self) -> None:
        attached = self._attached
        self._reset()
        if attached is not None:
            attached.forget()

    def close(self) -> None:
        self._closed = True
        if self._attached is not None:
            self._attached.close()
            self._attached = None
        self._hub.wake_all()


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
