"""How waiters of ``etcd://`` wait: for a wake-up by a release, or by a watch of the entry ahead.

All watches of a backend share one WebSocket. Without WebSockets each watch has an HTTP stream of
its own. That is so where etcd requires a password, because its gateway does not pass credentials
on from a WebSocket, and behind proxies without WebSocket support.

A waiter behind another waiter is woken by that waiter's release (see ``backend``). It watches the
entry ahead itself only if the wake-up takes longer than ``WAKEUP_TRUST_SECONDS``. So a queue with
short holds sends etcd nothing but joins, reads and releases.

A watch starts at the current revision, not at an old one: etcd serves a watch of past revisions
by its slow sync loop. So a watch has a start revision, and a waiter whose last read is older than
that reads again. A watch ends with the wait that made it. Only the watch of a session's wake-up
key, the subscription, stays.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.claim import Busy, Claim, Mode
from holdfast.core.backoff import QUERY_RETRY_SECONDS
from holdfast.core.contract import Runtime
from holdfast.core.ordered import AbsentWaiters
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.io.long_poll import LongPoll, LongPolls
from holdfast.io.wakeups import EVERYBODY, BlockingWakeupHub
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import Gateway
from holdfast.stores.etcd.session import RANGE
from holdfast.stores.etcd.websocket import BlockingWebSocket, NoWebSocket, open_blocking

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = ["PATH", "BlockingWatches", "StreamWatches", "Waits", "Watch", "WatchTable", "Watches"]

PATH = "/v3/watch"
WATCH = b"POST /v3/watch"
WAKEUP_TRUST_SECONDS = 0.5
"""How long a waiter relies on the wake-up by a release before it watches the entry ahead."""
CANCEL_SECONDS = 1.0
"""How long sending the end of a watch may take."""
MOST_UNREAD_BYTES = 16 * 2**20
"""Size limit of one JSON text in a stream."""


class Waits:
    """The waits of one backend."""

    def __init__(
        self, store: EtcdStore, gateway: Gateway, runtime: Runtime, absent: AbsentWaiters
    ) -> None:
        self.store, self.gateway, self.runtime = store, gateway, runtime
        self._absent = absent
        self.watches = _watches(store, runtime)

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
        keys = self.store.names.of(claim.name).all.decode() if not target else f'"key":"{target}"'
        owner, quiet = self.store.key_pool.of(claim), claim.mode is not Mode.SLOTS
        try:
            watch = await self.start_watch(owner, keys, ends_only, until, quiet_writes=quiet)
            if watch is None:
                return
            try:
                written = 0 if ends_only else revision
                if watch.start_revision > revision and await self._changed(claim, ahead, written):
                    return
                await self.wait_for_event(watch, until)
            finally:
                if watch.written is not None:
                    self._absent.note(target, *watch.written)
                await self.watches.end(watch)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, NoWebSocket):
                unusable, self.watches = self.watches, _streams(self.store, self.runtime)
                unusable.close()
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
        keys = f'"key":"{self.store.names.wakeup_key(session).decode()}"'
        limit = min(until, now + self.store.settings.request_seconds)
        try:
            return await self.watches.subscribe(session, keys, live, limit)
        except BackendUnavailable:  # the watch that is tried next reports it, or reconnects
            return None

    async def start_watch(
        self, owner: str, keys: str, ends_only: bool, until: float, *, quiet_writes: bool = False
    ) -> Any:
        """Returns a watch that etcd has confirmed; None if it ended, fired or was not confirmed in
        time. The caller must end the watch. ``quiet_writes``: a write is noted and wakes nobody."""
        limit = min(until, self.runtime.now() + self.store.settings.request_seconds)
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

    async def wait_for_event(self, watch: Any, until: float) -> None:
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
            body = b'{"key":"%b","keys_only":true}' % target.encode()
            found = (await self.gateway.post(RANGE, body)).get("kvs")
            if not found or int(found[0]["create_revision"]) != order:
                return True
            written = int(found[0]["mod_revision"])
            if not 0 < written_after < written:
                return False
            self._absent.note(target, written, self.runtime.now())
            return claim.mode is Mode.SLOTS
        found = await self.gateway.post(RANGE, b"{%b}" % keys.all)
        verdict = self.store.judge(claim, requests.entries_of(found, keys.prefix))
        return verdict.fits or verdict.own is None or requests.identity_of(verdict.front) != ahead

    async def pause(self, until: float) -> None:
        """Sleeps for a short, jittered time: after an error, before the next attempt."""
        now = self.runtime.now()
        await self.runtime.sleep(
            max(0.0, min(until - now, self.runtime.between(*QUERY_RETRY_SECONDS)))
        )


def _streams(store: EtcdStore, runtime: Runtime) -> Watches:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingLongPolls

        return StreamWatches(BlockingLongPolls(store.servers))
    from holdfast.io.long_poll_aio import AsyncLongPolls

    return StreamWatches(AsyncLongPolls(store.servers))


def _watches(store: EtcdStore, runtime: Runtime) -> Watches:
    if store.credentials.user:
        return _streams(store, runtime)
    if runtime.blocking:
        return BlockingWatches(store.servers)
    from holdfast.stores.etcd.aio import AsyncWatches

    return AsyncWatches(store.servers)


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

    def update(self, result: dict[str, Any]) -> bool:
        """Applies one message of etcd about this watch. False if it only notes a write."""
        if result.get("canceled"):  # compaction, or no permission
            self.broken = True
        elif result.get("created"):
            self.start_revision = int(result["header"]["revision"])
        events = result.get("events")
        if not events:
            return True
        if self.quiet_writes and not any("type" in event for event in events):
            self.written = int(events[-1]["kv"]["mod_revision"]), now()
            return bool(result.get("canceled") or result.get("created"))
        self.fired = True
        return True


class WatchTable:
    """The watches on one connection, without the connection: requests out, messages in."""

    def __init__(self) -> None:
        self._next = 0
        self._watches: dict[int, Watch] = {}
        self._subscriptions: dict[str, Watch] = {}
        """By session: watches of wake-up keys, whose events name the claim to wake."""

    def create(self, owner: str, keys: str, ends_only: bool) -> tuple[Watch, str]:
        """Returns a new watch and the request that starts it. ``keys`` is the JSON of a key or
        range."""
        self._next += 1
        watch = self._watches[self._next] = Watch(self._next, owner)
        filters = ',"filters":["NOPUT"]' if ends_only else ""
        return watch, f'{{"create_request":{{{keys},"watch_id":"{watch.number}"{filters}}}}}'

    def subscribed(self, session: str) -> Watch | None:
        """Returns the subscription of a session; None if there is none or it is broken."""
        subscription = self._subscriptions.get(session)
        return None if subscription is None or subscription.broken else subscription

    def subscribe(self, session: str, keys: str, live: Collection[str]) -> tuple[Watch, list[str]]:
        """Returns the subscription of a session, and the requests to send if it is new: they end
        the subscriptions of sessions that are not in ``live``."""
        known = self.subscribed(session)
        if known is not None:
            return known, []
        ended = [old for old in self._subscriptions if old not in live]
        requests = [self.cancel(self._subscriptions.pop(old)) for old in ended]
        watch, request = self.create(EVERYBODY, keys, ends_only=False)
        self._subscriptions[session] = watch
        return watch, [*filter(None, requests), request]

    def cancel(self, watch: Watch) -> str:
        """Returns the request that ends a watch; "" if the watch is of another connection, where
        its number may be another watch's."""
        if self._watches.get(watch.number) is not watch:
            return ""
        self._watches.pop(watch.number, None)
        return f'{{"cancel_request":{{"watch_id":"{watch.number}"}}}}'

    def received(self, message: str) -> list[str]:
        """Applies a message; returns the owners to wake. Raises ``OSError`` if it is not etcd's."""
        try:
            return self._received(json.loads(message))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise ConnectionResetError(0, "a message that is not etcd's") from None

    def _received(self, answer: dict[str, Any]) -> list[str]:
        result = answer.get("result") or {}
        watch = self._watches.get(int(result.get("watch_id", 0)))
        if watch is None:
            return []
        wakes = watch.update(result)
        if watch.broken:
            self._watches.pop(watch.number, None)
        if watch.owner != EVERYBODY:
            return [watch.owner] if wakes else []
        if watch.broken:
            return [EVERYBODY]
        return [_woken_id(event) for event in result.get("events", ()) if "type" not in event]

    def fail_all(self) -> list[str]:
        """The connection is over: marks all watches as broken and returns their owners."""
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.broken = True
        return [watch.owner for watch in watches]


def _woken_id(event: dict[str, Any]) -> str:
    """The key id in a write to a wake-up key."""
    return b64decode(event["kv"]["value"]).decode()


class Watches(Protocol):
    """What ``Waits`` needs of watches, blocking or asyncio, over a WebSocket or streams."""

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        """Requests a watch. Raises ``BackendUnavailable``."""
        ...

    def subscribed(self, session: str) -> Watch | None:
        """Returns the subscription of a session, if there is one. It wakes the owners that events
        name."""
        ...

    async def subscribe(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch | None:
        """Returns the subscription of a session; opens it if needed. None if that fails."""
        ...

    async def woken(self, owner: str, until: float) -> bool:
        """True if the owner's watch changed, or the owner was woken or nudged, before ``until``."""
        ...

    async def end(self, watch: Watch) -> None: ...

    def reset_connection(self) -> None:
        """Ends a connection on which no reply came in time; the next watch opens a new one."""
        ...

    def nudge(self, owner: str) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class BlockingWatches:
    """Watches for threads. The WebSocket is the subscription of their wake-up hub."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = BlockingWakeupHub()
        self._lock = threading.Lock()
        self._connection: _WatchConnection | None = None
        self._closed = False

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        with self._lock:
            connection = self._open(until)
            watch, request = connection.table.create(owner, keys, ends_only)
        self._send(connection, request, until)
        return watch

    def subscribed(self, session: str) -> Watch | None:
        connection = self._connection
        if connection is None or not self._usable(connection):
            return None
        return connection.table.subscribed(session)

    def _usable(self, connection: _WatchConnection) -> bool:
        """False if the connection is over, or requests have left its host since: a node without a
        leader confirms watches and never reports an event."""
        attached = self._hub.subscription is connection
        return attached and connection.web.host == self._servers.current

    async def subscribe(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch:
        with self._lock:
            connection = self._open(until)
            watch, requests = connection.table.subscribe(session, keys, live)
        for request in requests:
            self._send(connection, request, until)
        return watch

    def _open(self, until: float) -> _WatchConnection:
        if self._closed:
            raise self._servers.closed()
        connection = self._connection
        if connection is None or not self._usable(connection):
            self._drop()
            connection = self._connection = _WatchConnection(
                open_blocking(self._servers, PATH, until)
            )
            self._hub.attach(connection)
        return connection

    def _drop(self) -> None:
        """Gives up a connection that is over or no longer used. Call with ``_lock`` held: waiters
        on this connection must be woken before another one is opened, since nothing wakes them
        after that."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._wake_watches_of(connection)

    def _wake_watches_of(self, connection: _WatchConnection) -> None:
        """Wakes every waiter on a connection that is over."""
        for owner in connection.table.fail_all():
            self._hub.wake(owner)

    def _send(self, connection: _WatchConnection, request: str, until: float) -> None:
        try:
            connection.web.send(request, until)
        except OSError as error:
            self._failed(connection)
            raise BackendUnavailable(f"{self._servers.display}: {PATH}: {error}") from error

    async def woken(self, owner: str, until: float) -> bool:
        try:
            return self._hub.wait(owner, until)
        except (OSError, BackendUnavailable):
            # The hub raises the error in one thread only. The other threads' watches ended with
            # the same connection, and another thread may have opened a new one by now.
            if self._connection is not None and self._hub.subscription is not self._connection:
                with self._lock:
                    if self._hub.subscription is not self._connection:
                        self._drop()
            return True

    def _failed(self, connection: _WatchConnection) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
        self._wake_watches_of(connection)

    async def end(self, watch: Watch) -> None:
        connection = self._connection
        request = "" if connection is None or watch.broken else connection.table.cancel(watch)
        if connection is None or not request:
            return
        try:
            connection.web.send(request, now() + CANCEL_SECONDS)
        except OSError:
            self._failed(connection)

    def reset_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.web.shut_down()  # the listening thread reads the end of the connection

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        connection, self._connection = self._connection, None
        hub, self._hub = self._hub, BlockingWakeupHub()
        self._lock = threading.Lock()
        hub.discard()  # not ``close``: a thread of the parent may hold its mutex forever
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._connection = None
        self._hub.close()


class _WatchConnection:
    """One WebSocket and the watches on it, as a subscription of the wake-up hub."""

    def __init__(self, web: BlockingWebSocket) -> None:
        self.web, self.table = web, WatchTable()

    def fileno(self) -> int:
        return self.web.fileno()

    def read(self) -> list[str]:
        return [owner for message in self.web.messages() for owner in self.table.received(message)]

    def close(self) -> None:
        self.web.close()


class StreamWatches:
    """One HTTP stream per watch, as many as the connection limit allows; further watches are broken
    from the start, so that their waiters poll."""

    def __init__(self, listening: LongPolls) -> None:
        self._listening = listening
        self._streams: dict[str, tuple[Watch, LongPoll, bytearray]] = {}

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        watch = Watch(0, owner)
        filters = ',"filters":["NOPUT"]' if ends_only else ""
        body = f'{{"create_request":{{{keys}{filters}}}}}'.encode()
        call = await self._listening.begin(owner, WATCH, body, until, stream=True)
        if call is None:
            watch.broken = True
        else:
            self._streams[owner] = watch, call, bytearray()
        return watch

    def subscribed(self, session: str) -> Watch | None:
        return None

    async def subscribe(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch | None:
        """Always None: a subscription would occupy a stream for good."""
        return None

    async def woken(self, owner: str, until: float) -> bool:
        stream = self._streams.get(owner)
        if stream is None:
            return True
        woken = await self._listening.woken(owner, until)
        _read_stream(*stream)
        return woken

    async def end(self, watch: Watch) -> None:
        stream = self._streams.pop(watch.owner, None)
        if stream is not None:
            self._listening.end(stream[1])

    def reset_connection(self) -> None:
        """Nothing to do: a stream's connection ends with the stream."""

    def nudge(self, owner: str) -> None:
        self._listening.nudge(owner)

    def forget(self) -> None:
        self._streams.clear()
        self._listening.forget()

    def close(self) -> None:
        self._listening.close()


def _read_stream(watch: Watch, call: LongPoll, rest: bytearray) -> None:
    """Reads what has arrived on a stream: one JSON text per line."""
    pieces, call.pieces = call.pieces, []
    rest += b"".join(pieces)
    *lines, tail = rest.split(b"\n")
    rest[:] = tail
    try:
        for line in lines:
            if line:
                watch.update(json.loads(line).get("result") or {"canceled": True})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        watch.broken = True  # the peer is not etcd
    if call.broken or call.reply is not None or len(rest) > MOST_UNREAD_BYTES:
        watch.broken = True
