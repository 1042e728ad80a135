"""Watches of many keys over one WebSocket, for the waiters of one backend.

A watch begins now, not at an old revision: one that others have passed is served by etcd's slow
sync loop. So a watch tells at which revision it began, and who finds that later than what it
had read reads again. Nothing of a watch outlives the wait that made it, but for the subscriptions.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Collection
from typing import Any, Protocol

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.http import Servers
from holdfast.io.wakeups import EVERYBODY, BlockingWakeupHub
from holdfast.stores.etcd.websocket import BlockingWebSocket, open_blocking

__all__ = ["BlockingWatches", "Book", "Watch", "Watches"]

PATH = "/v3/watch"


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
