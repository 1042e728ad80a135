"""How a claim waits on ``consul://``: a blocking query of the one entry in front of it.

A query carries the index of what was read, so that no change since then is missed. Its reply comes
late, so each query has a connection of its own: their number is limited, and a claim that gets none
shares reads with others (``Wakeups.poll``). All queries of a backend together are one subscription
of its wake-up hub.
"""

from __future__ import annotations

import enum
import json
import os
import selectors
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

from holdfast.core.backoff import NO_QUERY_POLL_SECONDS, QUERY_RETRY_SECONDS
from holdfast.core.contract import Runtime
from holdfast.io.connection import PENDING, WRITE, World, world_of
from holdfast.io.http import Reply
from holdfast.io.limits import ConnectionLimit, Permit
from holdfast.io.wakeups import new_hub
from holdfast.stores._consensus.strict import is_list_of
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Agent, AgentConnection, AgentEndpoint
from holdfast.stores.consul.requests import MARK, OPS

__all__ = ["LongPolls", "News", "NoQueryFree", "Target", "Wakeups"]

MOST_POLLS = 16
"""How many queries a backend may have at once. Consul allows 200 connections per client."""
ATTACH_TRIES = 3
"""How often a source is attached: a signal handler may have replaced the last one at once."""

QUERY_MILLISECONDS = 900
"""How long a query asks Consul to wait, per second of the wait: Consul adds up to a sixteenth, and
the reply must come before the wait is over."""


class NoQueryFree(Exception):
    """All blocking queries of the backend are in use; nothing was sent."""


class News(enum.Enum):
    """What a reply to a query says of the target."""

    NONE = enum.auto()
    ENTERED = enum.auto()
    """The entry has become a hold since it was read."""
    GONE = enum.auto()
    """The entry is deleted."""
    OTHER = enum.auto()
    """Another attempt is useful: a slot is free, an entry has lost its session, or the reply is not
    Consul's."""


class Target(NamedTuple):
    """What a claim waits for: an entry, or with ``taken`` the end of any of these slots."""

    prefix: str
    """The key of the entry, which is also the prefix of its mark; or the prefix of all slots."""
    seen: int
    """The index of what was read; 0 if it was not read."""
    marked: bool
    """Whether the entry had a mark when it was read."""
    taken: tuple[str, ...] = ()
    """The keys of the slots that were taken."""

    def news(self, reply: Reply) -> News:
        if reply.status == 404 and reply.seen > 0 and not self.taken:
            return News.GONE
        if reply.status != 200:
            return News.OTHER
        return self.news_of(_rows(reply.body))

    def news_of(self, rows: Mapping[str, object]) -> News:
        """The same, from the keys below the prefix and their sessions."""
        if self.taken:
            return News.NONE if rows.keys() >= set(self.taken) else News.OTHER
        if not rows.get(self.prefix):  # without a session it is an orphan, which an attempt deletes
            return News.OTHER if self.prefix in rows else News.GONE
        return News.ENTERED if self.prefix + MARK in rows and not self.marked else News.NONE


class LongPoll:
    """A blocking query whose reply is pending."""

    __slots__ = ("broken", "connection", "owner", "permit", "reply")

    connection: AgentConnection

    def __init__(self, owner: str, permit: Permit) -> None:
        self.owner = owner
        self.permit = permit
        """Counted for as long as it exists: an interrupt may prevent that it is given back."""
        self.reply: Reply | None = None
        self.broken = False


class PollSource:
    """The queries of one backend as one subscription: the descriptor of a selector has input when
    one of their connections has. Any thread may add and remove queries."""

    supported = hasattr(selectors.DefaultSelector, "fileno")
    """Whether a selector has a descriptor to wait for. Otherwise all claims share reads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._idle: list[AgentConnection] = []
        self._all: WeakSet[AgentConnection] = WeakSet()
        # Re-entrant: a signal handler may wait while its own thread runs code in here.
        self._mutex = threading.RLock()
        self.over = False

    def fileno(self) -> int:
        return self._selector.fileno()

    def take_idle(self) -> AgentConnection | None:
        """A connection without a query that is still open, to the current host."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # taken by another thread
                break
            with suppress(OSError):
                connection.collect()  # raises if it is closed, or has what nobody asked for
                if connection.host == connection.endpoint.hosts.current:
                    return connection
            connection.close()
        return None

    def own(self, connection: AgentConnection) -> bool:
        """Closes a connection with the source; at once, and false, if that is over."""
        with self._mutex:
            self._all.add(connection)
            if self.over:
                connection.close()
            return not self.over

    def add(self, poll: LongPoll) -> bool:
        """Waits for the reply to a query; false if the source is over."""
        with self._mutex:
            if not self.over:
                self._selector.register(poll.connection.fd, selectors.EVENT_READ, poll)
            return not self.over

    def remove(self, poll: LongPoll) -> None:
        """Ends a query. Its connection is kept if it has the reply, and is closed otherwise."""
        connection = poll.connection
        with self._mutex:
            if self.over:
                poll.broken = poll.broken or poll.reply is None
            else:
                with suppress(KeyError, ValueError):  # it has its reply, or was not added
                    self._selector.unregister(connection.fd)
            if poll.reply is not None and connection.usable and not self.over:
                self._idle.append(connection)
            else:
                connection.close()

    def read(self) -> list[str]:
        with self._mutex:
            ready = [] if self.over else self._selector.select(0)
            return [key.data.owner for key, _ in ready if self._receive(key.data)]

    def _receive(self, poll: LongPoll) -> bool:
        """Reads what is there. True if the owner must be woken."""
        connection = poll.connection
        try:
            connection.collect()
            reply = connection.next()
            if reply is PENDING:
                return False
            poll.reply = reply
        except OSError as error:
            poll.broken = True
            connection.endpoint.blame(connection.host, error)
        self._selector.unregister(connection.fd)
        return True

    def close(self) -> None:
        with self._mutex:
            if self.over:
                return
            self.over = True
            for connection in list(self._all):
                connection.close()
            self._selector.close()

    def forget(self, *, keep_number: bool = False) -> None:
        """In a forked child. Without the mutex, which a thread of the parent may hold; and nothing
        is unregistered, since the selector is the parent's, too."""
        if self.over:
            return
        self.over = True
        for connection in list(self._all):
            connection.forget()
        if not keep_number:
            self._selector.close()
            return
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, self.fileno())
        os.close(nothing)
        _inherited.append(self._selector)


_inherited: list[selectors.BaseSelector] = []
"""Selectors of a parent process: kept, so that no destructor closes their descriptors."""


class LongPolls:
    """The blocking queries of one backend, for threads or for the tasks of an event loop."""

    def __init__(self, endpoint: AgentEndpoint, *, blocking: bool) -> None:
        self._endpoint, self._hosts, self._blocking = endpoint, endpoint.hosts, blocking
        self._begin()

    def _begin(self) -> None:
        self._hub = new_hub(blocking=self._blocking)
        self._limit = ConnectionLimit(MOST_POLLS)
        self._mutex = threading.RLock()
        self._source: PollSource | None = None

    async def ask(self, owner: str, line: bytes, limit: float, until: float) -> LongPoll | None:
        """Sends a query by ``limit``, and waits until its reply comes, the owner is woken, or
        ``until``. ``None`` if too many are pending. Raises ``BackendUnavailable`` if it could not
        be sent."""
        permit = self._limit.take() if PollSource.supported else None
        if permit is None:
            return None
        try:
            return await self._ask(LongPoll(owner, permit), line, limit, until)
        finally:
            self._limit.free(permit)

    async def _ask(self, poll: LongPoll, line: bytes, limit: float, until: float) -> LongPoll:
        source, world = self._attached(), world_of(blocking=self._blocking)
        poll.connection = source.take_idle() or await self._open(source, world, limit)
        try:
            await self._send(source, world, poll, line, limit)
            await self.woken(poll.owner, until, source)
        finally:
            source.remove(poll)
        return poll

    def _attached(self) -> PollSource:
        """The source that the hub reads: a new one at first, and if an interrupt has ended it."""
        with self._mutex:
            source = self._source
            for _ in range(ATTACH_TRIES):
                if source is not None and not source.over:
                    return source
                source = PollSource()
                self._hub.attach(source)
                self._source = source
        raise self._hosts.closed()  # a closed hub closes what is attached

    async def _open(self, source: PollSource, world: World, until: float) -> AgentConnection:
        connection = await self._endpoint.open(world, until)
        if not source.own(connection):
            raise self._hosts.closed()
        return connection

    async def _send(
        self, source: PollSource, world: World, poll: LongPoll, line: bytes, until: float
    ) -> None:
        connection = poll.connection
        try:
            connection.send_query(line)
            while connection.unsent and not connection.flush():
                if not await world.ready({connection.fd: WRITE}, until):
                    raise TimeoutError
        except OSError as error:
            self._endpoint.blame(connection.host, error)
            raise self._hosts.unknown(connection.host, line, error) from error
        if not source.add(poll):
            raise self._hosts.closed()

    async def woken(self, owner: str, until: float, source: PollSource | None = None) -> bool:
        """True if the owner has a reply or was nudged, or if its query has ended, by ``until``."""
        try:
            return await self._hub.waited(owner, until, source)
        except OSError:  # the source broke: the hub raises that in one thread, and wakes the others
            return True

    def nudge(self, owner: str) -> None:
        self._hub.wake(owner)

    def forget(self) -> None:
        """In a forked child, or on a later event loop: lets all queries go."""
        hub, source = self._hub, self._source
        self._begin()
        hub.discard()
        if source is not None:
            source.forget()

    def close(self) -> None:
        self._hub.close()


class Wakeups:
    """The blocking queries of one backend."""

    def __init__(self, agent: Agent, request_seconds: float, runtime: Runtime) -> None:
        self._agent, self._runtime, self._request_seconds = agent, runtime, request_seconds
        self.long_polls = LongPolls(agent.endpoint, blocking=runtime.blocking)
        self._polled: dict[str, Target] = {}
        """By owner: what claims wait for that have no query, since all queries are in use."""
        self._polled_at = 0.0

    async def poll(self, owner: str, target: Target, until: float) -> None:
        """Waits for a target without a query. All such waits of the backend share their reads: the
        wait whose time comes first reads for all."""
        self._polled[owner] = target
        try:
            while (now := self._runtime.now()) < until:
                due = now + self._runtime.between(*NO_QUERY_POLL_SECONDS)
                if await self.long_polls.woken(owner, min(until, due)):
                    return
                now = self._runtime.now()
                if now >= self._polled_at + NO_QUERY_POLL_SECONDS[1]:
                    self._polled_at = now
                    await self._read_polled(until)
        finally:
            self._polled.pop(owner, None)

    async def _read_polled(self, until: float) -> None:
        """Reads all targets without a query, and wakes the claims for which there is news."""
        polled = list(self._polled.items())
        for start in range(0, len(polled), OPS):
            some = polled[start : start + OPS]
            trees = (requests.tree(requests.quotable(target.prefix)) for _, target in some)
            found = await self._agent.txn(requests.txn(*trees), line=READ, until=until)
            for owner, target in some:
                rows = {
                    row["Key"]: row.get("Session")
                    for row in found
                    if row["Key"].startswith(target.prefix)
                }
                if target.news_of(rows) is not News.NONE:
                    self.long_polls.nudge(owner)

    async def query(
        self, owner: str, prefix: str, index: int, until: float, *, keys: bool
    ) -> Reply | None:
        """One blocking query. ``None`` when the wait has ended without a reply.

        Raises ``BackendUnavailable`` if the query could not be sent, and ``NoQueryFree`` if too
        many are under way."""
        left = until - self._runtime.now()
        if left <= 0:
            return None
        line = requests.query(prefix, index, int(left * QUERY_MILLISECONDS), keys=keys)
        limit = min(until, self._runtime.now() + self._request_seconds)
        poll = await self.long_polls.ask(owner, line, limit, until)
        if poll is None:
            raise NoQueryFree
        if poll.broken:
            await self.pause(until)
        return poll.reply

    async def pause(self, until: float, seconds: tuple[float, float] = QUERY_RETRY_SECONDS) -> None:
        """A short, jittered pause before the next attempt."""
        now = self._runtime.now()
        await self._runtime.sleep(max(0.0, min(until - now, self._runtime.between(*seconds))))


def _rows(body: bytes) -> dict[str, object]:
    """The keys of a listing, with their sessions if it has values. None for a body that is no
    listing: the wait then ends, and the attempt after it reports the error."""
    try:
        rows: Any = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if is_list_of(str)(rows):
        return {str(key): None for key in rows}
    if is_list_of(dict)(rows):
        found: dict[str, object] = {}
        for row in rows:
            found[str(row.get("Key"))] = row.get("Session")
        return found
    return {}
