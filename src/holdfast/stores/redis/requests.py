"""Sending scripts to Redis and reading their replies, whatever stands between.

Every command is idempotent by owner, so one whose connection was closed is sent once more; but not
one that shortens a hold: the first may arrive after later ones, from a proxy that closed its other
side. A server that does not know a script gets its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.stores.redis.cluster import ClusterRoute
from holdfast.stores.redis.connection import LinkBroken, Refused, pack
from holdfast.stores.redis.probe import eviction_greeting
from holdfast.stores.redis.replies import lock_name, milliseconds, refusal
from holdfast.stores.redis.routes import Route, SentinelRoute, SingleRoute, Wire
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.url import Options

__all__ = ["Command", "Requests"]

REPLICATION_SECONDS = 1.0
"""How long a grant may take to reach the replicas that were asked for."""


class Command(NamedTuple):
    """A packed script call, and the key that says which node it goes to."""

    script: Script
    packed: bytes
    key: str


class Requests:
    """The way to one store."""

    def __init__(self, wire: Wire, options: Options, moved: Callable[[], None]) -> None:
        self._display = options.display
        self._replicas = options.replicas
        self.route = _route(wire, options, moved)
        self.call = self.route.call
        self.now, self.behind = self.route.now, self.route.behind
        patience = min(REPLICATION_SECONDS, options.access.request_seconds / 2)
        self._wait = pack("WAIT", options.replicas, milliseconds(patience))

    async def one(self, command: Command, until: float | None = None, *, again: bool = True) -> Any:
        """Sends one command and answers its reply."""
        try:
            reply = await self.call(command.packed, command.key, until)
        except LinkBroken as error:
            if not again:
                raise
            return await self.again(command, error, until)
        return await self.amend(command, reply, until) if type(reply) is Refused else reply

    async def again(self, command: Command, error: LinkBroken, until: float | None = None) -> Any:
        """Sends a command once more if the server had closed its connection."""
        if not error.closed:
            raise error
        reply = await self.call(command.packed, command.key, until)
        return await self.amend(command, reply, until) if type(reply) is Refused else reply

    async def amend(self, command: Command, reply: Refused, until: float | None = None) -> Any:
        """Answers an error reply with the script's text, where that is what is missing."""
        if reply.code == "NOSCRIPT":
            in_full = command.script.in_full(command.packed)
            again = await self.call(in_full, command.key, until)
            if type(again) is not Refused:
                return again
            reply = again
        self._look_elsewhere([reply])
        raise refusal(reply, self._display, lock_name(command.key))

    def _look_elsewhere(self, replies: Sequence[Any]) -> None:
        """Where a replica answers, another may be the master by now."""
        if any(type(reply) is Refused and reply.code == "READONLY" for reply in replies):
            self.route.refused()

    async def many(
        self, commands: Sequence[Command], until: float | None = None, *, again: bool = True
    ) -> list[Any]:
        """All in one round trip; what the server has no script for, in one more. Error replies
        stand where their replies would."""
        if not commands:
            return []
        packed = [command.packed for command in commands]
        keys = [command.key for command in commands]
        try:
            replies = await self.route.calls(packed, keys, until)
        except LinkBroken as error:
            if not error.closed or not again:
                raise
            replies = await self.route.calls(packed, keys, until)
        unknown = [i for i, r in enumerate(replies) if type(r) is Refused and r.code == "NOSCRIPT"]
        if unknown:
            full = [commands[i].script.in_full(packed[i]) for i in unknown]
            loaded = await self.route.calls(full, [keys[i] for i in unknown], until)
            for i, reply in zip(unknown, loaded, strict=True):
                replies[i] = reply
        self._look_elsewhere(replies)
        return replies

    async def replicated(self, command: Command, until: float | None) -> tuple[Any, str]:
        """The reply, and what is missing if too few replicas have what it wrote."""
        reply, count = await self.route.alone([command.packed, self._wait], command.key, until)
        if type(reply) is Refused and reply.code == "NOSCRIPT":
            full = command.script.in_full(command.packed)
            reply, count = await self.route.alone([full, self._wait], command.key, until)
        self._look_elsewhere([reply])
        for each in (reply, count):
            if type(each) is Refused:
                raise refusal(each, self._display, lock_name(command.key))
        if type(count) is not int:
            raise refusal(count, self._display, lock_name(command.key))
        enough = count >= self._replicas
        return reply, "" if enough else f"{count} of {self._replicas} replicas have it"


def _route(wire: Wire, options: Options, moved: Callable[[], None]) -> Route:
    greeting = None if options.allow_eviction else eviction_greeting(options.display)
    if options.cluster:
        return ClusterRoute(wire, options.nodes, greeting)
    if options.sentinel_access is not None:
        access, service = options.sentinel_access, options.service
        return SentinelRoute(wire, options.nodes, access, service, greeting, moved)
    return SingleRoute(wire, options.nodes[0], greeting)
