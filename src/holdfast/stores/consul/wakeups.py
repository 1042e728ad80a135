"""How a claim waits on ``consul://``: a blocking query of the one entry in front of it.

A query carries the index of what was read, so that no change since then is missed.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.core.backoff import NO_QUERY_POLL_SECONDS, QUERY_RETRY_SECONDS
from holdfast.core.contract import Runtime
from holdfast.io.http import Reply, Servers
from holdfast.stores._consensus.strict import is_list_of
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Agent
from holdfast.stores.consul.requests import MARK, OPS

if TYPE_CHECKING:
    from holdfast.io.long_poll import LongPolls

__all__ = ["News", "NoQueryFree", "Target", "Wakeups"]

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


class Wakeups:
    """The blocking queries of one backend."""

    def __init__(self, agent: Agent, request_seconds: float, runtime: Runtime) -> None:
        self._agent, self._runtime, self._request_seconds = agent, runtime, request_seconds
        self.long_polls = _long_polls(agent.http.servers, runtime)
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
        poll = await self.long_polls.begin(owner, line, b"", limit)
        if poll is None:
            raise NoQueryFree
        try:
            await self.long_polls.woken(owner, until)
        finally:
            self.long_polls.end(poll)
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


def _long_polls(servers: Servers, runtime: Runtime) -> LongPolls:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingLongPolls

        return BlockingLongPolls(servers)
    from holdfast.io.long_poll_aio import AsyncLongPolls

    return AsyncLongPolls(servers)
