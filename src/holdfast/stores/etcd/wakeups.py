"""Waiting on ``etcd://``: a watch of the one entry in front, and a read behind its beginning.

All waits of a backend share one WebSocket; without WebSockets each has a stream of its own. Who
waits behind another waiter is called by it (see ``backend``) and watches it only if that takes
longer: where turns are short, nothing is asked of etcd but to join, to take and to let go.

A watch begins now, not at an old revision: one that others have passed is served by etcd's slow
sync loop. So a watch tells at which revision it began, and who finds that later than what it
had read reads again. Nothing of a watch outlives the wait that made it, but for the subscriptions.

Streams are needed where etcd asks for a password, since its gateway passes no credentials from a
WebSocket on, and behind proxies that know no WebSockets.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.claim import Busy, Claim, Mode
from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.io.long_poll import Call, Listening
from holdfast.io.wakeups import EVERYBODY, BlockingWakeupHub
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import Gateway
from holdfast.stores.etcd.session import RANGE
from holdfast.stores.etcd.websocket import BlockingWebSocket, NoWebSocket, open_blocking

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdStore

__all__ = ["PATH", "BlockingWatches", "Book", "StreamWatches", "Waits", "Watch", "Watches"]

PATH = "/v3/watch"
WATCH = b"POST /v3/watch"
CALLED_SECONDS = 0.5
"""How long a waiter relies on being called before it watches the entry in front itself."""
PAUSE_SECONDS = (0.05, 0.25)
MOST_UNREAD_BYTES = 16 * 2**20
"""How much of a text may come before its end does."""


class Waits:
    """The waits of one backend."""

    def __init__(self, store: EtcdStore, gateway: Gateway, runtime: Runtime) -> None:
        self.store, self.gateway, self.runtime = store, gateway, runtime
        self.watches = _watches(store, runtime)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> bool:
        """Whether it was called, so that the name may have been handed over."""
        if busy.ref is None:
            await self.pause(until)
            return False
        front, revision, subscription = busy.ref
        if subscription and await self._called(claim, subscription, revision, until):
            return True
        await self._watch(claim, front, revision, until)
        return False

    async def _watch(
        self, claim: Claim, front: tuple[str, int], revision: int, until: float
    ) -> None:
        target, _ = front
        keys = self.store.names.of(claim.name).all.decode() if not target else f'"key":"{target}"'
        # A slot's predecessor moves on by being granted, which is a change and no end.
        ends_only = claim.mode is not Mode.SLOTS or not target
        try:
            watch = await self.confirmed(self.store.tags.of(claim), keys, ends_only, until)
            if watch is None:
                return
            try:
                if watch.began > revision and await self._changed(claim, front):
                    return
                await self.fired(watch, until)
            finally:
                await self.watches.end(watch)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, NoWebSocket):
                useless, self.watches = self.watches, _streams(self.store, self.runtime)
                useless.close()
            await self.pause(until)

    async def _called(self, claim: Claim, session: str, revision: int, until: float) -> bool:
        """Whether it was called by who stands in front of it."""
        now = self.runtime.now()
        if until - now < CALLED_SECONDS:
            return False
        subscription = self.watches.hung(session) or await self._attach(session, now, until)
        if (
            subscription is None
            or subscription.began is None
            or subscription.began > revision
            or subscription.broken
        ):
            return False
        woken = await self.watches.woken(self.store.tags.of(claim), now + CALLED_SECONDS)
        return woken and not subscription.broken

    async def _attach(self, session: str, now: float, until: float) -> Watch | None:
        live = [each.id for each in self.store.sessions.all()]
        keys = f'"key":"{self.store.names.subscription(session).decode()}"'
        limit = min(until, now + self.store.settings.request_seconds)
        try:
            return await self.watches.subscription(session, keys, live, limit)
        except BackendUnavailable:  # told, or mended, by the watch that is tried next
            return None

    async def confirmed(self, owner: str, keys: str, ends_only: bool, until: float) -> Any:
        """A watch that has begun; ``None`` if the wait is over before."""
        limit = min(until, self.runtime.now() + self.store.settings.request_seconds)
        watch = await self.watches.begin(owner, keys, ends_only, limit)
        try:
            woken = await self.watches.woken(owner, limit)
        except BaseException:  # cancelled or interrupted: nobody else knows of the watch
            await self.watches.end(watch)
            raise
        if watch.began is not None and not watch.broken and not watch.fired:
            return watch
        await self.watches.end(watch)
        if not woken and limit < until:  # nothing comes any more, and nobody said so
            self.watches.distrust()
        if watch.broken or not woken:
            await self.pause(until)
        return None

    async def fired(self, watch: Any, until: float) -> None:
        """Returns when the watch has something to tell, or is broken, or was nudged."""
        await self.watches.woken(watch.owner, until)
        if watch.broken:
            await self.pause(until)

    async def _changed(self, claim: Claim, front: tuple[str, int]) -> bool:
        """Whether another attempt is worth it, by a linearizable read."""
        keys, (target, order) = self.store.names.of(claim.name), front
        if target and claim.mode is not Mode.SLOTS:  # it waits for one end, and reads no line
            body = b'{"key":"%b","keys_only":true}' % target.encode()
            found = (await self.gateway.post(RANGE, body)).get("kvs")
            return not found or int(found[0]["create_revision"]) != order
        found = await self.gateway.post(RANGE, b"{%b}" % keys.all)
        verdict = self.store.judge(claim, requests.line_of(found, keys.prefix))
        return verdict.fits or verdict.own is None or requests.place_of(verdict.front) != front

    async def pause(self, until: float) -> None:
        """Something is in the way: a short, jittered rest before the next attempt."""
        now = self.runtime.now()
        await self.runtime.sleep(max(0.0, min(until - now, self.runtime.between(*PAUSE_SECONDS))))


def _streams(store: EtcdStore, runtime: Runtime) -> Watches:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingListening

        return StreamWatches(BlockingListening(store.servers))
    from holdfast.io.long_poll_aio import AsyncListening

    return StreamWatches(AsyncListening(store.servers))


def _watches(store: EtcdStore, runtime: Runtime) -> Watches:
    if store.credentials.user:
        return _streams(store, runtime)
    if runtime.blocking:
        return BlockingWatches(store.servers)
    from holdfast.stores.etcd.aio import AsyncWatches

    return AsyncWatches(store.servers)


class Watch:
    """One watch of one waiter."""

    __slots__ = ("began", "broken", "fired", "number", "owner")

    def __init__(self, number: int, owner: str) -> None:
        self.number, self.owner = number, owner
        self.began: int | None = None
        """The revision up to which nothing is told."""
        self.fired = False
        self.broken = False

    def learn(self, result: dict[str, Any]) -> None:
        """Takes in one answer of etcd's about it."""
        if result.get("canceled"):  # compaction, or no permission
            self.broken = True
        elif result.get("created"):
            self.began = int(result["header"]["revision"])
        if result.get("events"):
            self.fired = True


class Book:
    """The watches on one connection: requests out, answers in."""

    def __init__(self) -> None:
        self._next = 0
        self._watches: dict[int, Watch] = {}
        self._subscriptions: dict[str, Watch] = {}
        """By session: watches that stay, and whose events name whom they call."""

    def create(self, owner: str, keys: str, ends_only: bool) -> tuple[Watch, str]:
        """``keys`` is the JSON of a key or range."""
        self._next += 1
        watch = self._watches[self._next] = Watch(self._next, owner)
        filters = ',"filters":["NOPUT"]' if ends_only else ""
        return watch, f'{{"create_request":{{{keys},"watch_id":"{watch.number}"{filters}}}}}'

    def hung(self, session: str) -> Watch | None:
        """The watch of a session's subscription, if there is one."""
        subscription = self._subscriptions.get(session)
        return None if subscription is None or subscription.broken else subscription

    def subscription(
        self, session: str, keys: str, live: Collection[str]
    ) -> tuple[Watch, list[str]]:
        """The watch of a session's subscription, and what is to be sent before it is one."""
        known = self.hung(session)
        if known is not None:
            return known, []
        over = [old for old in self._subscriptions if old not in live]
        requests = [self.cancel(self._subscriptions.pop(old)) for old in over]
        watch, request = self.create(EVERYBODY, keys, ends_only=False)
        self._subscriptions[session] = watch
        return watch, [*filter(None, requests), request]

    def cancel(self, watch: Watch) -> str:
        """What is to be sent, if anything: on another connection its number may be another's."""
        if self._watches.get(watch.number) is not watch:
            return ""
        self._watches.pop(watch.number, None)
        return f'{{"cancel_request":{{"watch_id":"{watch.number}"}}}}'

    def heard(self, message: str) -> list[str]:
        """Whom an answer concerns. Raises ``OSError`` for one that is not etcd's."""
        try:
            return self._heard(json.loads(message))
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            raise ConnectionResetError(0, "a message that is not etcd's") from None

    def _heard(self, answer: dict[str, Any]) -> list[str]:
        result = answer.get("result") or {}
        watch = self._watches.get(int(result.get("watch_id", 0)))
        if watch is None:
            return []
        watch.learn(result)
        if watch.broken:
            self._watches.pop(watch.number, None)
        if watch.owner != EVERYBODY:
            return [watch.owner]
        if watch.broken:
            return [EVERYBODY]
        return [_called(event) for event in result.get("events", ()) if "type" not in event]

    def broke(self) -> list[str]:
        """The connection is over: whom that concerns."""
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.broken = True
        return [watch.owner for watch in watches]


def _called(event: dict[str, Any]) -> str:
    """Who is named by a subscription that was written."""
    return b64decode(event["kv"]["value"]).decode()


class Watches(Protocol):
    """What a backend's waits use."""

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        """Asks for a watch; raises ``BackendUnavailable``."""
        ...

    def hung(self, session: str) -> Watch | None:
        """The watch that stays on a session's subscription and wakes whom it names, if there is
        one."""
        ...

    async def subscription(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch | None:
        """The same, made if need be; ``None`` if it can't be."""
        ...

    async def woken(self, owner: str, until: float) -> bool:
        """Whether anything happened to the owner's watch, or it was called or nudged, by then."""
        ...

    async def end(self, watch: Watch) -> None: ...

    def distrust(self) -> None:
        """What was asked was not answered in time: starts over with a new connection."""
        ...

    def nudge(self, owner: str) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class BlockingWatches:
    """For threads. The WebSocket is their wake-up hub's subscription."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._hub = BlockingWakeupHub()
        self._opening = threading.Lock()
        self._line: _Line | None = None
        self._closed = False

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        with self._opening:
            line = self._open(until)
            watch, request = line.book.create(owner, keys, ends_only)
        self._send(line, request, until)
        return watch

    def hung(self, session: str) -> Watch | None:
        line = self._line
        if line is None or self._hub.subscription is not line:
            return None
        return line.book.hung(session)

    async def subscription(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch:
        with self._opening:
            line = self._open(until)
            watch, requests = line.book.subscription(session, keys, live)
        for request in requests:
            self._send(line, request, until)
        return watch

    def _open(self, until: float) -> _Line:
        if self._closed:
            raise self._servers.closed()
        line = self._line
        if line is None or self._hub.subscription is not line:
            self._drop()
            line = self._line = _Line(open_blocking(self._servers, PATH, until))
            self._hub.attach(line)
        return line

    def _drop(self) -> None:
        """Gives up a connection that is over. Under the mutex: before another one is opened, those
        who wait on this one must know, or nobody would tell them."""
        line, self._line = self._line, None
        if line is not None:
            self._tell(line)

    def _tell(self, line: _Line) -> None:
        for owner in line.book.broke():
            self._hub.wake(owner)

    def _send(self, line: _Line, request: str, until: float) -> None:
        try:
            line.web.send(request, until)
        except OSError as error:
            self._broke(line)
            raise BackendUnavailable(f"{self._servers.display}: {PATH}: {error}") from error

    async def woken(self, owner: str, until: float) -> bool:
        try:
            return self._hub.wait(owner, until)
        except (OSError, BackendUnavailable):
            # Told to one thread only; the others' watches ended with the same connection, which
            # somebody else may have replaced by now.
            if self._line is not None and self._hub.subscription is not self._line:
                with self._opening:
                    if self._hub.subscription is not self._line:
                        self._drop()
            return True

    def _broke(self, line: _Line) -> None:
        with self._opening:
            if self._line is line:
                self._line = None
        self._tell(line)

    async def end(self, watch: Watch) -> None:
        line = self._line
        request = "" if line is None or watch.broken else line.book.cancel(watch)
        if line is None or not request:
            return
        try:
            line.web.send(request, now() + 1.0)
        except OSError:
            self._broke(line)

    def distrust(self) -> None:
        line = self._line
        if line is not None:
            line.web.hang_up()  # which whoever listens hears as the connection's end

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        line, self._line = self._line, None
        hub, self._hub = self._hub, BlockingWakeupHub()
        self._opening = threading.Lock()
        hub.discard()  # not ``close``: a thread of the parent's may hold its mutex for ever
        if line is not None:
            line.close()

    def close(self) -> None:
        with self._opening:
            self._closed = True
            self._line = None
        self._hub.close()


class _Line:
    """One WebSocket and the watches on it, as a subscription."""

    def __init__(self, web: BlockingWebSocket) -> None:
        self.web, self.book = web, Book()

    def fileno(self) -> int:
        return self.web.fileno()

    def read(self) -> list[str]:
        return [owner for message in self.web.messages() for owner in self.book.heard(message)]

    def close(self) -> None:
        self.web.close()


class StreamWatches:
    """As many watches as there is room for streams; the others are told to look again."""

    def __init__(self, listening: Listening) -> None:
        self._listening = listening
        self._streams: dict[str, tuple[Watch, Call, bytearray]] = {}

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

    def hung(self, session: str) -> Watch | None:
        return None

    async def subscription(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch | None:
        """None: it would take up a stream for good."""
        return None

    async def woken(self, owner: str, until: float) -> bool:
        stream = self._streams.get(owner)
        if stream is None:
            return True
        woken = await self._listening.woken(owner, until)
        _read(*stream)
        return woken

    async def end(self, watch: Watch) -> None:
        stream = self._streams.pop(watch.owner, None)
        if stream is not None:
            self._listening.end(stream[1])

    def distrust(self) -> None:
        """Every stream has a connection of its own, which ends with it."""

    def nudge(self, owner: str) -> None:
        self._listening.nudge(owner)

    def forget(self) -> None:
        self._streams.clear()
        self._listening.forget()

    def close(self) -> None:
        self._listening.close()


def _read(watch: Watch, call: Call, rest: bytearray) -> None:
    """Takes in what came: one JSON text per line."""
    pieces, call.pieces = call.pieces, []
    rest += b"".join(pieces)
    *lines, tail = rest.split(b"\n")
    rest[:] = tail
    try:
        for line in lines:
            if line:
                watch.learn(json.loads(line).get("result") or {"canceled": True})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        watch.broken = True  # it is not etcd that speaks
    if call.broken or call.reply is not None or len(rest) > MOST_UNREAD_BYTES:
        watch.broken = True
