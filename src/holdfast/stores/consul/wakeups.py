"""How a claim waits on ``consul://``: a blocking query on the one entry in front of it.

A query carries the index of what was read, so that no change since then is missed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from holdfast.core.backoff import NO_QUERY_POLL_SECONDS, QUERY_RETRY_SECONDS
from holdfast.core.contract import Runtime
from holdfast.io.http import Reply, Servers
from holdfast.stores._consensus.strict import is_list_of
from holdfast.stores.consul import requests

if TYPE_CHECKING:
    from holdfast.io.long_poll import LongPolls

__all__ = ["Target", "Wakeups"]

QUERY_MILLISECONDS = 900
"""How long a query asks Consul to wait, per second of the wait: Consul adds up to a sixteenth, and
the reply must come before the wait is over."""


class Target(NamedTuple):
    """What a claim waits for."""

    path: str
    """The key, or the prefix of the keys, to query."""
    seen: int
    """The index of what was read."""
    deleted: tuple[str, ...]
    """Keys below the prefix: the wait is over when one of them is deleted. Empty if ``path`` is
    one key: the wait is over when that is deleted, or loses its session."""
    created: str
    """A key below the prefix: the wait is over when it is created. Empty for none."""

    def next_index(self, reply: Reply, index: int) -> int | None:
        """The index for the next query. ``None`` if another attempt is worth it."""
        # Without a session an entry is an orphan, which the attempt deletes.
        if reply.status != 200 or (not self.deleted and b'"Session"' not in reply.body):
            return None
        if self.deleted:
            keys = _listed(reply.body)
            if self.created in keys or not keys.issuperset(self.deleted):
                return None
        # If Consul's indexes start over, so does the query.
        return reply.seen if reply.seen >= index else 0


class Wakeups:
    """The blocking queries of one backend."""

    def __init__(self, servers: Servers, request_seconds: float, runtime: Runtime) -> None:
        self._runtime, self._request_seconds = runtime, request_seconds
        self.long_polls = _long_polls(servers, runtime)

    async def query(
        self, owner: str, path: str, index: int, until: float, *, keys: bool
    ) -> Reply | None:
        """One blocking query. ``None`` when the wait has ended without a reply.

        Raises ``BackendUnavailable`` if the query could not be sent."""
        left = until - self._runtime.now()
        if left <= 0:
            return None
        line = requests.query(path, index, int(left * QUERY_MILLISECONDS), keys=keys)
        limit = min(until, self._runtime.now() + self._request_seconds)
        poll = await self.long_polls.begin(owner, line, b"", limit)
        if poll is None:  # too many queries are under way: poll
            await self.pause(until, NO_QUERY_POLL_SECONDS)
            return None
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


def _listed(body: bytes) -> frozenset[str]:
    """The keys of a listing. None for a body that is no listing: the wait then ends, and the
    attempt after it reports the error."""
    try:
        keys = json.loads(body)
    except (ValueError, RecursionError):
        keys = []
    return frozenset(keys) if is_list_of(str)(keys) else frozenset()


def _long_polls(servers: Servers, runtime: Runtime) -> LongPolls:
    if runtime.blocking:
        from holdfast.io.long_poll import BlockingLongPolls

        return BlockingLongPolls(servers)
    from holdfast.io.long_poll_aio import AsyncLongPolls

    return AsyncLongPolls(servers)
