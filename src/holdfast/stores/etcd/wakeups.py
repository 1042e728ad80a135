"""How waiters of ``etcd://`` wait: for a wake-up by a release, or by a watch of the entry ahead.

All watches of a backend share one call, on a connection of its own. If etcd refuses a watch,
because the token of the call is too old, the call is ended, and the next watch opens another one.

A waiter behind another waiter is woken by that waiter's release (see ``backend``). It watches the
entry ahead itself only if the wake-up takes longer than ``WAKEUP_TRUST_SECONDS``. So a queue with
short holds sends etcd nothing but joins, reads and releases.

A watch starts at the current revision, not at an old one: etcd serves a watch of past revisions
by its slow sync loop. So a watch has a start revision, and a waiter whose last read is older than
that reads again. A watch ends with the wait that made it. Only the watch of a session's wake-up
key, the subscription, stays.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.claim import Busy, Claim, Mode
from holdfast.core.backoff import QUERY_RETRY_SECONDS
from holdfast.core.contract import Runtime
from holdfast.core.ordered import AbsentWaiters
from holdfast.errors import BackendUnavailable
from holdfast.io.blocking import wait_for
from holdfast.io.clock import now
from holdfast.io.connection import READ, WRITE, Broken, Stream, world_of
from holdfast.io.http2 import Http2
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores._consensus.sessions import RuntimeLock
from holdfast.stores.etcd import messages, requests
from holdfast.stores.etcd.calls import (
    RANGE,
    WATCH,
    Calls,
    Endpoint,
    framed,
    refusal_text,
    unframed,
)
from holdfast.stores.etcd.messages import Damaged, WatchReply, shown

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = ["Waits", "Watch", "WatchConnection", "WatchTable", "Watches"]

T = TypeVar("T")

WAKEUP_TRUST_SECONDS = 0.5
"""How long a waiter relies on the wake-up by a release before it watches the entry ahead."""
CANCEL_SECONDS = 1.0
"""How long sending the end of a watch may take."""


class Waits:
    """The waits of one backend."""

    def __init__(
        self, store: EtcdStore, calls: Calls, runtime: Runtime, absent: AbsentWaiters
    ) -> None:
        self.store, self.calls, self.runtime = store, calls, runtime
        self._absent = absent
        self.watches = Watches(store.endpoint, runtime)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> bool:
        """Waits until another attempt is worth it or the time is over. Returns True if a release
        woke the claim: then the name may be granted to it directly."""
        if busy.ref is None:
            await self.pause(until)
            return False
        ahead, revision, session = busy.ref
        if session and await self._woken_by_release(claim, session, revision, until):
            return True
        # Of a waiter ahead the grant counts too, which is a put, no delete: slots may fit then. The
        # grace of a direct grant starts there, but no attempt is worth it before the entry ends.
        ends_only = not session and (claim.mode is not Mode.SLOTS or not ahead[0])
        await self._watch(claim, ahead, revision, ends_only, until)
        return False

    async def _watch(
        self, claim: Claim, ahead: tuple[str, int], revision: int, ends_only: bool, until: float
    ) -> None:
        """Watches the entry ahead, or all keys of the name if no single entry is ahead."""
        target, _ = ahead
        one = requests.only(requests.encoded(target))
        keys = one if target else self.store.names.of(claim.name).all
        owner, quiet = self.store.key_pool.of(claim), claim.mode is not Mode.SLOTS
        try:
            watch = await self.start_watch(owner, keys, ends_only, until, quiet_writes=quiet)
            if watch is None:
                return
            try:
                written = 0 if ends_only else revision
                if (watch.start_revision or 0) > revision and await self._changed(
                    claim, ahead, written
                ):
                    return
                await self.wait_for_event(watch, until)
            finally:
                if watch.written is not None:
                    self._absent.note(target, *watch.written)
                await self.watches.end(watch)
        except BackendUnavailable:
            await self.pause(until)

    async def _woken_by_release(
        self, claim: Claim, session: str, revision: int, until: float
    ) -> bool:
        """Waits for a write to the session's wake-up key that names the claim. False if none came
        in time, or if one may have been missed: the subscription is younger than the claim's last
        read, or broken."""
        now = self.runtime.now()
        if until - now < WAKEUP_TRUST_SECONDS:
            return False
        subscription = self.watches.subscribed(session) or await self._subscribe(
            session, now, until
        )
        if (
            subscription is None
            or subscription.start_revision is None
            or subscription.start_revision > revision
            or subscription.broken
        ):
            return False
        woken = await self.watches.woken(self.store.key_pool.of(claim), now + WAKEUP_TRUST_SECONDS)
        return woken and not subscription.broken

    async def _subscribe(self, session: str, now: float, until: float) -> Watch | None:
        """Opens the subscription of a session; None if that fails. Ends those of past sessions."""
        live = [each.id for each in self.store.sessions.all()]
        keys = requests.only(self.store.names.wakeup_key(session))
        limit = min(until, now + self.store.settings.request_seconds)
        try:
            return await self.watches.subscribe(session, keys, live, limit)
        except BackendUnavailable:  # the watch that is tried next reports it, or reconnects
            return None

    async def start_watch(
        self, owner: str, keys: bytes, ends_only: bool, until: float, *, quiet_writes: bool = False
    ) -> Watch | None:
        """Returns a watch that etcd has confirmed; None if it ended, fired or was not confirmed in
        time. The caller must end the watch. ``quiet_writes``: a write is noted and wakes nobody."""
        limit = min(until, self.runtime.now() + self.store.settings.request_seconds)
        await self.calls.signed_in(limit)
        watch = await self.watches.begin(owner, keys, ends_only, limit)
        watch.quiet_writes = quiet_writes
        try:
            woken = await self.watches.woken(owner, limit)
        except BaseException:  # cancelled or interrupted: no other reference to the watch exists
            await self.watches.end(watch)
            raise
        if watch.start_revision is not None and not watch.broken and not watch.fired:
            return watch
        await self.watches.end(watch)
        if not woken and limit < until:  # the connection is silent, although not closed
            self.watches.reset_connection()
        if watch.broken or not woken:
            await self.pause(until)
        return None

    async def wait_for_event(self, watch: Watch, until: float) -> None:
        """Returns when the watch has an event or is broken, at a nudge, or at ``until``."""
        await self.watches.woken(watch.owner, until)
        if watch.broken:
            await self.pause(until)

    async def _changed(self, claim: Claim, ahead: tuple[str, int], written_after: int) -> bool:
        """True if another attempt is worth it, by a linearizable read. With ``written_after``, a
        revision, it matters if the entry ahead was written after it: slots may fit then; for others
        the write is noted."""
        keys, (target, order) = self.store.names.of(claim.name), ahead
        if target:  # one entry decides: read only that one
            body = requests.only(requests.encoded(target)) + requests.KEYS_ONLY
            kvs = (await self.calls.call(RANGE, body)).kvs
            if not kvs or kvs[0].create_revision != order:
                return True
            written = kvs[0].mod_revision
            if not 0 < written_after < written:
                return False
            self._absent.note(target, written, self.runtime.now())
            return claim.mode is Mode.SLOTS
        found = await self.calls.call(RANGE, keys.all)
        verdict = self.store.judge(claim, requests.entries_of(found.kvs, keys.prefix))
        return verdict.fits or verdict.own is None or requests.identity_of(verdict.front) != ahead

    async def pause(self, until: float) -> None:
        """Sleeps for a short, jittered time: after an error, before the next attempt."""
        now = self.runtime.now()
        await self.runtime.sleep(
            max(0.0, min(until - now, self.runtime.between(*QUERY_RETRY_SECONDS)))
        )


class Watch:
    """One watch of one waiter, or a subscription (owner ``EVERYBODY``)."""

    __slots__ = (
        "broken",
        "fired",
        "number",
        "owner",
        "quiet_writes",
        "start_revision",
        "written",
    )

    def __init__(self, number: int, owner: str) -> None:
        self.number, self.owner = number, owner
        self.start_revision: int | None = None
        """Events after this revision are reported; None until etcd has confirmed the watch."""
        self.fired = False
        self.broken = False
        self.quiet_writes = False
        """Whether a write is only noted, in ``written``."""
        self.written: tuple[int, float] | None = None
        """The revision of the last write that was noted, and when its event was read."""

    def update(self, message: WatchReply) -> bool:
        """Applies one message of etcd about this watch. False if it only notes a write."""
        if message.canceled:  # compaction
            self.broken = True
        elif message.created:
            self.start_revision = message.revision
        if not message.events:
            return True
        if self.quiet_writes and not any(event.deleted for event in message.events):
            self.written = message.events[-1].kv.mod_revision, now()
            return message.canceled or message.created
        self.fired = True
        return True


class WatchTable:
    """The watches on one connection, without the connection: requests out, messages in."""

    def __init__(self) -> None:
        self._next = 0
        self._watches: dict[int, Watch] = {}
        self._subscriptions: dict[str, Watch] = {}
        """By session: watches of wake-up keys, whose events name the claim to wake."""

    def create(self, owner: str, keys: bytes, ends_only: bool) -> tuple[Watch, bytes]:
        """Returns a new watch and the request that starts it. ``keys`` is a key or a range."""
        self._next += 1
        watch = self._watches[self._next] = Watch(self._next, owner)
        return watch, messages.create_watch(keys, watch.number, ends_only=ends_only)

    def subscribed(self, session: str) -> Watch | None:
        """Returns the subscription of a session; None if there is none or it is broken."""
        subscription = self._subscriptions.get(session)
        return None if subscription is None or subscription.broken else subscription

    def subscribe(
        self, session: str, keys: bytes, live: Collection[str]
    ) -> tuple[Watch, list[bytes]]:
        """Returns the subscription of a session, and the requests to send if it is new: they end
        the subscriptions of sessions that are not in ``live``."""
        known = self.subscribed(session)
        if known is not None:
            return known, []
        ended = [old for old in self._subscriptions if old not in live]
        ends = [self.cancel(self._subscriptions.pop(old)) for old in ended]
        watch, request = self.create(EVERYBODY, keys, ends_only=False)
        self._subscriptions[session] = watch
        return watch, [*filter(None, ends), request]

    def cancel(self, watch: Watch) -> bytes:
        """Returns the request that ends a watch; nothing if the watch is of another connection,
        where its number may be another watch's."""
        if self._watches.get(watch.number) is not watch:
            return b""
        self._watches.pop(watch.number, None)
        return messages.cancel_watch(watch.number)

    def received(self, data: bytes) -> list[str]:
        """Applies a message; returns the owners to wake. Raises ``OSError`` if it is not etcd's, or
        refuses a watch."""
        try:
            message = messages.watch_reply(data)
            if message.created and message.canceled:
                raise Broken(f"etcd refused a watch: {message.reason}")
            return self._apply(message)
        except (Damaged, UnicodeDecodeError) as error:
            raise Broken(f"a message that is not etcd's: {error}") from None

    def _apply(self, message: WatchReply) -> list[str]:
        watch = self._watches.get(message.watch_id)
        if watch is None:
            return []
        wakes = watch.update(message)
        if watch.broken:
            self._watches.pop(watch.number, None)
        if watch.owner != EVERYBODY:
            return [watch.owner] if wakes else []
        if watch.broken:
            return [EVERYBODY]
        # A write to a wake-up key names the key id of the waiter to wake.
        return [event.kv.value.decode() for event in message.events if not event.deleted]

    def fail_all(self) -> list[str]:
        """The connection is over: marks all watches as broken and returns their owners."""
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.broken = True
        return [watch.owner for watch in watches]


class WatchConnection(Stream):
    """The connection of one Watch call, which lasts as long as it does. ``send`` takes a message;
    messages that were received go to ``on_push``."""

    def __init__(self, sock: socket.socket, block: bytes) -> None:
        super().__init__(sock)
        self._http2 = Http2()
        self._call = self._http2.request(block, b"", end=False)
        self._rest = bytearray()
        super().send(self._http2.take())

    def send(self, request: bytes) -> None:
        self._http2.send(self._call, framed(request))
        super().send(self._http2.take(self.unsent))

    def feed(self, data: bytes) -> None:
        self._http2.feed(data)
        if more := self._http2.take(self.unsent):
            super().send(more)
        self._rest += self._call.take()
        for message in unframed(self._rest):
            if self.on_push is not None:
                self.on_push(message)
        if self._call.ended:
            why = shown(refusal_text(self._call.trailers or {}))
            raise Broken(f"etcd ended the watches: {why}")


class WatchSource:
    """One Watch call and the watches on it. For threads, it is what a wake-up hub reads.

    Any thread may send. An exception in the middle of a step, such as an interrupt, leaves
    ``_busy`` set: the connection can't be used any more.
    """

    def __init__(self, connection: WatchConnection, host: int) -> None:
        self.connection, self.host = connection, host
        self.table = WatchTable()
        self.over = False
        self._owners: list[str] = []
        connection.on_push = self._received
        # Re-entrant: a signal handler may use it while its own thread runs code in here.
        self._mutex = threading.RLock()
        self._busy = False
        self._process = os.getpid()
        self.stop: Callable[[], None] = lambda: None
        """Ends the loop's watch of the descriptor."""

    def _received(self, message: bytes) -> None:
        self._owners += self.table.received(message)

    def send(self, request: bytes) -> None:
        """Sends a request, or its beginning. Raises ``OSError``."""
        with self._mutex:
            self._begin()
            self.connection.send(request)
            self._busy = False

    def flush(self) -> bool:
        """Sends more of it; true when nothing is left."""
        with self._mutex:
            self._begin()
            done = self.connection.flush()
            self._busy = False
        return done

    def flush_by(self, until: float) -> None:
        """Waits until all of it was sent. Raises ``TimeoutError`` at ``until``."""
        while self.connection.unsent and not self.flush():
            if not wait_for({self.connection.fd: WRITE}, until):
                raise TimeoutError

    def read(self) -> list[str]:
        """Reads what is there; returns the owners to wake. Raises ``OSError``."""
        with self._mutex:
            self._begin()
            self.connection.collect()
            if self.connection.unsent:
                self.connection.flush()
            owners, self._owners = self._owners, []
            self._busy = False
        return owners

    def _begin(self) -> None:
        if self._busy or self.over:
            raise Broken("the connection was interrupted, or is closed", closed=True)
        self._busy = True

    def fileno(self) -> int:
        return self.connection.fd

    def close(self) -> None:
        """Closes the connection, from any thread; in a forked child, only lets it go."""
        if self.over:
            return
        self.over = True
        if self._process != os.getpid():
            self.connection.forget(keep_number=True)
            return
        with self._mutex:  # not while another thread reads
            self.stop()
            self.connection.close()


class Watches:
    """The watches of one backend, for threads or for the tasks of an event loop.

    Threads: one of those that wait reads for all (see ``io.wakeups``). Tasks: the loop reads.
    """

    def __init__(self, endpoint: Endpoint, runtime: Runtime) -> None:
        self._endpoint, self._runtime = endpoint, runtime
        self._hub: Any = BlockingWakeupHub() if runtime.blocking else AsyncWakeupHub()
        self._lock = RuntimeLock(runtime)
        self._source: WatchSource | None = None
        self._closed = False

    async def begin(self, owner: str, keys: bytes, ends_only: bool, until: float) -> Watch:
        """Requests a watch. Raises ``BackendUnavailable``."""
        source, (watch, request) = await self._prepare(
            until, lambda table: table.create(owner, keys, ends_only)
        )
        self._send(source, request, until)
        return watch

    def subscribed(self, session: str) -> Watch | None:
        """Returns the subscription of a session, if there is one. It wakes the owners that events
        name."""
        source = self._source
        if source is None or not self._is_usable(source):
            return None
        return source.table.subscribed(session)

    async def subscribe(
        self, session: str, keys: bytes, live: Collection[str], until: float
    ) -> Watch:
        """Returns the subscription of a session; opens it if needed. Raises
        ``BackendUnavailable``."""
        source, (watch, wanted) = await self._prepare(
            until, lambda table: table.subscribe(session, keys, live)
        )
        for request in wanted:
            self._send(source, request, until)
        return watch

    def _is_usable(self, source: WatchSource) -> bool:
        """False if the connection is over, or requests have left its host since: a node without a
        leader confirms watches and never reports an event."""
        return not source.over and source.host == self._endpoint.hosts.current

    async def _prepare(
        self, until: float, step: Callable[[WatchTable], T]
    ) -> tuple[WatchSource, T]:
        """Opens a connection if needed, and adds to the table of its watches."""
        try:
            async with self._lock.hold(until):  # one of many new waiters opens it for all
                source = self._source
                if source is None or not self._is_usable(source):
                    self._drop(source)
                    source = await self._open(until)
                return source, step(source.table)
        except TimeoutError:
            hosts = self._endpoint.hosts
            raise BackendUnavailable(f"{hosts.display}: no watch could be opened in time") from None

    async def _open(self, until: float) -> WatchSource:
        endpoint = self._endpoint
        if self._closed:
            raise endpoint.hosts.closed()
        world = world_of(blocking=self._runtime.blocking)
        sock, host = await endpoint.connect(world, until)
        try:
            source = WatchSource(WatchConnection(sock, endpoint.block(host, WATCH)), host)
        except BaseException:
            sock.close()
            raise
        self._attach(source)
        return source

    def _attach(self, source: WatchSource) -> None:
        if self._runtime.blocking:
            self._hub.attach(source)  # first: a source without a reader looks lost
        else:
            self._read_on_loop(source)
        self._source = source
        if self._closed:
            self.close()
            raise self._endpoint.hosts.closed()

    def _read_on_loop(self, source: WatchSource) -> None:
        import asyncio

        from holdfast.io import aio

        loop, number = asyncio.get_running_loop(), source.fileno()
        source.stop = lambda: aio.unwatch(loop, number)
        aio.watch(loop, number, READ, self._readable, source)
        aio.close_with_loop(source)

    def _readable(self, source: WatchSource) -> None:
        try:
            for owner in source.read():
                self._wake(owner)
            self._write_rest(source)
        except OSError:
            self._drop(source)

    def _write_rest(self, source: WatchSource) -> None:
        """On an event loop: sends what did not fit at once, as soon as there is room."""
        import asyncio

        loop, number = asyncio.get_running_loop(), source.fileno()
        if source.connection.unsent and not source.flush():
            loop.add_writer(number, self._readable, source)
        else:
            loop.remove_writer(number)

    def _wake(self, owner: str) -> None:
        if owner == EVERYBODY and not self._runtime.blocking:
            self._hub.wake_all()
        else:
            self._hub.wake(owner)

    def _drop(self, source: WatchSource | None) -> None:
        """Gives up a connection that is over or no longer used, and wakes every waiter on it:
        nothing else does."""
        if source is None:
            return
        if self._source is source:
            self._source = None
        source.close()
        for owner in source.table.fail_all():
            self._wake(owner)

    def _send(self, source: WatchSource, request: bytes, until: float) -> None:
        try:
            source.send(request)
            if self._runtime.blocking:
                source.flush_by(until)
            elif source.connection.unsent:
                self._write_rest(source)
        except OSError as error:
            self._drop(source)
            display = self._endpoint.hosts.display
            raise BackendUnavailable(f"{display}: {WATCH.decode()}: {error}") from error

    async def woken(self, owner: str, until: float) -> bool:
        """True if the owner's watch changed, or the owner was woken or nudged, before ``until``."""
        if not self._runtime.blocking:
            woken: bool = await self._hub.wait(owner, until)
            return woken
        try:
            return bool(self._hub.wait(owner, until))
        except (OSError, BackendUnavailable):
            # The hub raises the error in one thread only, and has closed the source. Another thread
            # may have opened a new one by now.
            if self._source is not None and self._source.over:
                self._drop(self._source)
            return True

    async def end(self, watch: Watch) -> None:
        source = self._source
        request = b"" if source is None or watch.broken else source.table.cancel(watch)
        if source is not None and request:
            try:
                self._send(source, request, now() + CANCEL_SECONDS)
            except BackendUnavailable:
                return  # it has ended with its connection

    def reset_connection(self) -> None:
        """Ends a connection on which no reply came in time; the next watch opens a new one."""
        self._drop(self._source)

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        source, self._source = self._source, None
        hub, self._lock = self._hub, RuntimeLock(self._runtime)
        if self._runtime.blocking:
            self._hub = BlockingWakeupHub()
            hub.discard()  # not ``close``: a thread of the parent may hold its mutex forever
        else:
            self._hub = AsyncWakeupHub()
        if source is not None:
            source.close()

    def close(self) -> None:
        self._closed = True
        source, self._source = self._source, None
        if self._runtime.blocking:
            self._hub.close()
        else:
            self._hub.wake_all()
        if source is not None:
            source.close()
