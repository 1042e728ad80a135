"""Waiting for a call: on a session that sleeps on the server, one per backend.

The first wait hangs the subscription and returns at once, so that the attempt which follows is
made with
the subscription already hung. When it breaks, those who wait try again at once, with another.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from holdfast.core.contract import Finding, Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection_limit import Permit
from holdfast.io.single_flight import SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._sql.in_thread import in_thread
from holdfast.stores.mysql.connection import INTERRUPTED, Connection
from holdfast.stores.mysql.protocol import Reply
from holdfast.stores.mysql.sql import LeaseStatements, sleep, still_lock, subscription_lock

__all__ = [
    "SLEEP_SECONDS",
    "Hanger",
    "Listening",
    "Look",
    "SleepSubscription",
    "ask_for",
    "make_listening",
    "told_by",
]

SLEEP_SECONDS = 1.0
"""How long the subscription sleeps at a time: well below the grace of somebody who was called."""
QUIET_SLEEP_SECONDS = 0.25
"""The same where nobody can kill the sleep."""
MEND_SECONDS = (0.1, 0.4)
"""The pause after a subscription broke."""
NO_SUCH_SESSION = 1094
_NOBODY = "-"


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
                self._renewer_thread is not None and self._renewer_thread.stirs()
            ):
                return True
            if not self._asleep:
                return self._connection.stirs()
            return moment > self._since + self._patience and not self._connection.stirs()

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


def ask_for(subscriptions: Sequence[str]) -> bytes:
    """One request: where the subscriptions hang, which of these sessions are shown to us, and a
    kill."""
    kill = b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(_NOBODY)
    if not subscriptions:
        return kill
    hung = b", ".join(
        b"IS_USED_LOCK(%s)" % subscription_lock(subscription) for subscription in subscriptions
    )
    shown = b"SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN (%s)" % hung
    return b"; ".join([b"SELECT " + hung, shown, kill])


def told_by(reply: Reply) -> str:
    """Why calls don't arrive; empty if they do."""
    if reply.failure is None or reply.failure.code != NO_SUCH_SESSION:
        said = f": {reply.failure.text}" if reply.failure else ""
        return f"KILL QUERY is not done here{said}"
    if not reply.results:
        return ""
    hung, shown = reply.results
    if None in hung.rows[0]:
        return (
            "not all who wait can be found from here: they are gone, or a proxy or another node "
            "is in between"
        )
    if not set(hung.rows[0]) <= {row[0] for row in shown.rows}:
        return "not all who wait are of this account, which may not call those of others"
    return ""
