"""Redis and Valkey: one script to take or join the line, one to release, reserve and wake.

The rules are in ``lua/``: ``acquire.lua`` is the usual way, ``state.lua`` and ``attempt.lua`` are
everything else. This file packs commands and reads answers; it knows nothing of connections,
which are ``wires/redis*``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import (
    DIRECT_GRANT_SECONDS,
    Finding,
    Guarantee,
    Page,
    Renewal,
    Runtime,
    Settings,
    Waiting,
)
from holdfast.errors import Unsupported
from holdfast.io.resp import Refused, bulk, pack
from holdfast.stores.redis.inspect import (
    Survey,
    eviction_greeting,
    findings,
    read_standing,
    readable_standing,
)
from holdfast.stores.redis.replies import (
    Excuses,
    Keys,
    LinkBroken,
    busy_answer,
    lock_name,
    milliseconds,
    refusal,
)
from holdfast.stores.redis.routes import (
    AsyncWire,
    BlockingWire,
    ClusterRoute,
    Route,
    SentinelRoute,
    SingleRoute,
    Wire,
)
from holdfast.stores.redis.scripts import Script, Scripts
from holdfast.stores.redis.url import Options, read_options
from holdfast.url import Url

__all__ = ["RedisBackend", "RedisStore", "initialise", "open_store"]

_MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
LOOK_CAP = 1000
"""How many holders and waiters of one name are shown."""
KEPT_SHAPES = 1024
KEPT_OWNERS = 4096
SIXTEEN_DIGITS = 10**15
"""Microseconds since the epoch have so many, from 2001 to 2286."""
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0

REPLICATION_SECONDS = 1.0
"""How long a grant may take to reach the replicas that were asked for."""


class Command(NamedTuple):
    """A packed script call, and the key that says which node it goes to."""

    script: Script
    packed: bytes
    key: str


class RedisBackend:
    """Admits claims in scripts on the server."""

    def __init__(self, store: RedisStore, runtime: Runtime) -> None:
        self.options, self.display, self.runtime = store.options, store.display, runtime
        self._doubtful, self._wall = store.doubtful, runtime.wall
        self._waiters = store.waiters
        self._keys, self._scripts = store.keys, store.scripts
        wire = BlockingWire if runtime.blocking else AsyncWire
        self._wire: Any = wire(store.options.access, store.connections)
        self._wakeups: Any = self._wire.wakeups(self._keys.channel(secrets.token_hex(8)))
        self._shapes: dict[tuple[Mode, int, int, float, bool, int], str] = {}
        self._replicas, self._excuses = store.options.replicas, Excuses()
        self._route = _route(self._wire, store.options, self._moved)
        self._call, self._now, self._behind = self._route.call, self._route.now, self._route.behind
        patience = min(REPLICATION_SECONDS, store.options.access.request_seconds / 2)
        self._wait_command = pack("WAIT", store.options.replicas, milliseconds(patience))

    def _moved(self) -> None:
        self._wakeups.drop()

    # ---- taking

    def _claim_words(self, claim: Claim, join: bool, heard: int) -> str:
        _, mode, weight, limit, ttl, owner, label = claim
        kind = (mode, weight, limit, ttl, join, heard)
        shape = self._shapes.get(kind) or self._new_shape(*kind)
        sent = int(self._wall() * 1_000_000)
        # One look at the flag that the text is ASCII, where every character is a byte.
        words = f"${len(owner)}\r\n{owner}\r\n${len(label)}\r\n{label}\r\n$16\r\n{sent}\r\n{shape}"
        if words.isascii() and sent >= SIXTEEN_DIGITS:
            return words
        return f"{bulk(owner)}{bulk(label)}{bulk(str(sent))}{shape}"

    def _new_shape(
        self, mode: Mode, weight: int, limit: int, ttl: float, join: bool, heard: int
    ) -> str:
        if self.options.interop and mode is not Mode.EXCLUSIVE:
            raise Unsupported(f"{self.display} with interop=redis-py has exclusive locks only")
        channel = self._wakeups.channel if heard else "-"
        max_ttl = milliseconds(self.options.max_ttl)
        handed = milliseconds(min(DIRECT_GRANT_SECONDS, ttl)) if self._scripts.direct else 0
        words = f"{_MODES[mode]} {weight} {limit} {int(join)} {max_ttl} {handed} {channel}"
        if len(self._shapes) >= KEPT_SHAPES:
            self._shapes.clear()
        shape = bulk(str(milliseconds(ttl))) + bulk(words)
        self._shapes[mode, weight, limit, ttl, join, heard] = shape
        return shape

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        script = self._scripts.acquire
        start, key = script.starts.get(claim.name) or self._keys.start(script, claim.name)
        heard: int = self._wakeups.hearing
        packed = f"{start}{self._claim_words(claim, join, heard)}".encode()
        if self._replicas:
            return await self._replicated(claim, Command(script, packed, key), heard, until)
        now = self._now
        try:
            reply = await self._call(packed, key, until) if now is None else now(packed, until)
        except LinkBroken as error:
            self._doubt(claim)
            reply = await self._again(Command(script, packed, key), error, until)
        if type(reply) is int:
            return Grant(claim, reply)
        if type(reply) is Refused:
            reply = await self._amend(Command(script, packed, key), reply, until)
        return self._answer(claim, reply, heard)

    def _answer(self, claim: Claim, reply: Any, heard: int) -> Grant | Busy:
        if type(reply) is int:
            return Grant(claim, reply)
        if type(reply) is not list or not reply:
            raise refusal(reply, self.display, claim.name)
        if reply[0] == b"slots" and len(reply) > 2 and {type(each) for each in reply[1:]} == {int}:
            return Grant(claim, reply[1], tuple(reply[2:]))
        return busy_answer(claim, reply, self.display, heard)

    def _doubt(self, claim: Claim) -> None:
        """An attempt of this owner may still arrive: its release will see to that."""
        _note(self._doubtful, claim.owner)

    async def _replicated(
        self, claim: Claim, command: Command, heard: int, until: float | None
    ) -> Grant | Busy:
        try:
            reply, short = await self._with_replicas(command, until)
        except LinkBroken:
            self._doubt(claim)
            raise
        answer = self._answer(claim, reply, heard)
        if short and isinstance(answer, Grant):
            answer = await self._undo(claim, short, heard)
        if isinstance(answer, Busy):
            _note(self._waiters, claim.owner)
        return answer

    async def _undo(self, claim: Claim, short: str, heard: int) -> Busy:
        await self.abandon(claim)
        reason = f"{short}: {claim.name!r} on {self.display} was given back"
        return Busy(0, 1.0, (heard, 0), reason)

    # ---- waiting

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        self._excuses.tell(claim, busy)
        heard, last = busy.ref
        subscription = self._route.subscription
        token = await self._wakeups.wait(_subscription_key(claim.owner), heard, until, subscription)
        # A ring may have been under way since before the attempt whose answer this waits on.
        if token is None or token <= last:
            return None
        return Grant(claim, token, seconds=min(DIRECT_GRANT_SECONDS, claim.ttl))

    def nudge(self, claim: Claim) -> None:
        self._wakeups.wake(_subscription_key(claim.owner))

    # ---- renewing

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        batch = [self._renewal(grant.claim, shorten) for grant in grants]
        batch += [self._refreshing(claim, behind) for claim, behind in waits]
        replies = await self._many(batch, until, again=not shorten)
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for grant, reply in zip(grants, replies, strict=False):
            if type(reply) is not int:
                unknown[grant.claim.owner] = str(refusal(reply, self.display, grant.claim.name))
            elif reply == 0:
                lost[grant.claim.owner] = "it ran out or was broken, and is no longer stored"
        answers = zip(waits, replies[len(grants) :], strict=True)
        forgotten = frozenset(waiting.claim.owner for waiting, reply in answers if reply == 0)
        return Renewal(lost, unknown, forgotten)

    def _renewal(self, claim: Claim, shorten: bool) -> Command:
        script = self._scripts.renew
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(int(claim.ttl * 1000)))}{bulk(str(int(shorten)))}"
        return Command(script, f"{start}{words}".encode(), key)

    def _refreshing(self, claim: Claim, behind: int) -> Command:
        script = self._scripts.refresh
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(behind))}"
        return Command(script, f"{start}{words}".encode(), key)

    # ---- ending

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        if self._doubtful and claim.owner in self._doubtful:
            return await self._abandon(claim)
        if self._waiters:
            self._waiters.pop(claim.owner, None)
        script = self._scripts.release
        start, key = script.starts.get(claim.name) or self._keys.start(script, claim.name)
        words = f"{start}${len(claim.owner)}\r\n{claim.owner}\r\n"
        packed = (words if words.isascii() else f"{start}{bulk(claim.owner)}").encode()
        # Whoever was woken itself is likely to wake somebody, who is then told before we are.
        now, woken = self._now, grant.seconds is not None
        try:
            if now is not None:
                reply = now(packed, None, woken)
            elif woken and self._behind is not None:
                reply = await self._behind(packed)
            else:
                reply = await self._call(packed, key)
        except LinkBroken as error:
            # If the first one did arrive, the hold was ours and is gone by now.
            await self._again(Command(script, packed, key), error)
            return True
        if type(reply) is int:
            return reply == 1
        if type(reply) is Refused:
            reply = await self._amend(Command(script, packed, key), reply)
        return self._flag(reply, claim.name)

    def _flag(self, reply: Any, name: str) -> bool:
        if type(reply) is not int:
            raise refusal(reply, self.display, name)
        return reply == 1

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if self._replicas:
            return await self._in_two_steps(grant, claim)
        script = self._scripts.exchange
        start, key = self._keys.start(script, claim.name)
        heard: int = self._wakeups.hearing
        words = f"{bulk(grant.claim.owner)}{self._claim_words(claim, True, heard)}"
        command = Command(script, f"{start}{words}".encode(), key)
        sure = True
        try:
            reply = await self._call(command.packed, key)
        except LinkBroken as error:
            self._doubt(claim)
            sure = False
            reply = await self._again(command, error)
        if type(reply) is Refused:
            reply = await self._amend(command, reply)
        if type(reply) is not list or len(reply) != 2 or type(reply[0]) is not int:
            raise refusal(reply, self.display, claim.name)
        if self._doubtful and grant.claim.owner in self._doubtful:
            await self._abandon(grant.claim)  # also what may still arrive of it
        # As with a release: a first one that did arrive has ended what was ours.
        return reply[0] == 1 or not sure, self._answer(claim, reply[1], heard)

    async def _in_two_steps(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """One that waits comes by itself, woken by the release. Asked for on its behalf, it would
        get once more what it may have by then, and would lose it if replicas are late now."""
        waits = claim.owner in self._waiters
        was_ours = await self.release(grant)
        return was_ours, Busy(0) if waits else await self.attempt(claim, join=True)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._abandon(claim, until)

    async def _abandon(self, claim: Claim, until: float | None = None) -> bool:
        script = self._scripts.abandon
        start, key = self._keys.start(script, claim.name)
        sent = bulk(str(int(self._wall() * 1_000_000)))
        command = Command(script, f"{start}{bulk(claim.owner)}{sent}".encode(), key)
        try:
            was = self._flag(await self._one(command, until, again=False), claim.name)
        except LinkBroken as error:
            await self._again(command, error, until)
            was = True
        self._doubtful.pop(claim.owner, None)
        self._waiters.pop(claim.owner, None)
        return was

    async def revoke(self, name: str) -> list[int]:
        script = self._scripts.revoke
        start, key = self._keys.start(script, name)
        reply = await self._one(Command(script, start.encode(), key))
        if type(reply) is not list or any(type(token) is not int for token in reply):
            raise refusal(reply, self.display, name)
        return reply

    # ---- looking

    async def look(self, name: str) -> LockInfo:
        (reply,) = await self._looks([name])
        return read_standing(name, reply, self.display)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        survey = Survey(self._keys, self._route, self._standings)
        return await survey.page(prefix, cursor, limit)

    async def _standings(self, names: Sequence[str]) -> list[LockInfo]:
        """One that can't be read says so, and the others are told as always."""
        replies = await self._looks(names)
        return [
            readable_standing(name, reply, self.display)
            for name, reply in zip(names, replies, strict=True)
        ]

    async def _looks(self, names: Sequence[str]) -> list[Any]:
        script = self._scripts.look
        commands = []
        for name in names:
            start, key = self._keys.start(script, name)
            packed = f"{start}{bulk(str(LOOK_CAP))}".encode()
            commands.append(Command(script, packed, key))
        return await self._many(commands)

    # ---- records

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        script = self._scripts.record
        start, key = self._keys.start(script, grant.claim.name)
        words = (grant.claim.owner, value, str(grant.token), str(milliseconds(keep_seconds)))
        packed = f"{start}{''.join(map(bulk, words))}".encode()
        return self._flag(await self._one(Command(script, packed, key)), grant.claim.name)

    async def recall(self, name: str) -> Record | None:
        script = self._scripts.recall
        start, key = self._keys.start(script, name)
        reply = await self._one(Command(script, start.encode(), key))
        if reply is None:
            return None
        if type(reply) is not list or [type(word) for word in reply] != [bytes, int, int]:
            raise refusal(reply, self.display, name)
        value, token, age = reply
        return Record(value.decode(errors="replace"), token, age / 1000)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    # ---- requests

    async def _one(
        self, command: Command, until: float | None = None, *, again: bool = True
    ) -> Any:
        """Sends one command and answers its reply."""
        try:
            reply = await self._call(command.packed, command.key, until)
        except LinkBroken as error:
            if not again:
                raise
            return await self._again(command, error, until)
        return await self._amend(command, reply, until) if type(reply) is Refused else reply

    async def _again(self, command: Command, error: LinkBroken, until: float | None = None) -> Any:
        """Sends a command once more if the server had closed its connection."""
        if not error.closed:
            raise error
        reply = await self._call(command.packed, command.key, until)
        return await self._amend(command, reply, until) if type(reply) is Refused else reply

    async def _amend(self, command: Command, reply: Refused, until: float | None = None) -> Any:
        """Answers an error reply with the script's text, where that is what is missing."""
        if reply.code == "NOSCRIPT":
            in_full = command.script.in_full(command.packed)
            again = await self._call(in_full, command.key, until)
            if type(again) is not Refused:
                return again
            reply = again
        self._look_elsewhere([reply])
        raise refusal(reply, self.display, lock_name(command.key))

    def _look_elsewhere(self, replies: Sequence[Any]) -> None:
        """Where a replica answers, another may be the master by now."""
        if any(type(reply) is Refused and reply.code == "READONLY" for reply in replies):
            self._route.refused()

    async def _many(
        self, commands: Sequence[Command], until: float | None = None, *, again: bool = True
    ) -> list[Any]:
        """All in one round trip; what the server has no script for, in one more. Error replies
        stand where their replies would."""
        if not commands:
            return []
        packed = [command.packed for command in commands]
        keys = [command.key for command in commands]
        try:
            replies = await self._route.calls(packed, keys, until)
        except LinkBroken as error:
            if not error.closed or not again:
                raise
            replies = await self._route.calls(packed, keys, until)
        unknown = [i for i, r in enumerate(replies) if type(r) is Refused and r.code == "NOSCRIPT"]
        if unknown:
            full = [commands[i].script.in_full(packed[i]) for i in unknown]
            loaded = await self._route.calls(full, [keys[i] for i in unknown], until)
            for i, reply in zip(unknown, loaded, strict=True):
                replies[i] = reply
        self._look_elsewhere(replies)
        return replies

    async def _with_replicas(self, command: Command, until: float | None) -> tuple[Any, str]:
        """The reply, and what is missing if too few replicas have what it wrote."""
        reply, count = await self._route.alone(
            [command.packed, self._wait_command], command.key, until
        )
        if type(reply) is Refused and reply.code == "NOSCRIPT":
            full = command.script.in_full(command.packed)
            reply, count = await self._route.alone([full, self._wait_command], command.key, until)
        self._look_elsewhere([reply])
        for each in (reply, count):
            if type(each) is Refused:
                raise refusal(each, self.display, lock_name(command.key))
        if type(count) is not int:
            raise refusal(count, self.display, lock_name(command.key))
        enough = count >= self._replicas
        return reply, "" if enough else f"{count} of {self._replicas} replicas have it"

    # ---- the store itself

    async def probe(self) -> list[Finding]:
        _, noted = self._keys.start(self._scripts.begin, "")
        return await findings(self.options, self._route, noted, self._wall())

    async def initialise(self) -> str:
        """Marks the server's data as whole, so that loss protection does not wait."""
        script = self._scripts.begin
        start, key = self._keys.start(script, "")
        reply = await self._one(Command(script, start.encode(), key))
        if type(reply) is not bytes:
            raise refusal(reply, self.display, "")
        return f"{self.display} is marked as new (run {reply.decode()[:8]}…)"

    def forget(self) -> None:
        self._route.forget()
        self._wakeups.forget()
        self._wakeups = self._wire.wakeups(self._keys.channel(secrets.token_hex(8)))
        self._shapes.clear()  # they name the parent's channel

    async def close(self) -> None:
        await self._wakeups.close()
        await self._route.close()


def _route(wire: Wire, options: Options, moved: Callable[[], None]) -> Route:
    greeting = None if options.allow_eviction else eviction_greeting(options.display)
    if options.cluster:
        return ClusterRoute(wire, options.nodes, greeting)
    if options.sentinel_access is not None:
        access, service = options.sentinel_access, options.service
        return SentinelRoute(wire, options.nodes, access, service, greeting, moved)
    return SingleRoute(wire, options.nodes[0], greeting)


def _note(owners: dict[str, None], owner: str) -> None:
    """Remembers one more, and forgets the oldest of very many."""
    owners[owner] = None
    while len(owners) > KEPT_OWNERS:
        owners.pop(next(iter(owners)), None)


def _subscription_key(owner: str) -> str:
    """By what a waiter is woken: not its owner, which anybody who listens would learn."""
    return hashlib.sha1(owner.encode(), usedforsecurity=False).hexdigest()[:16]


class RedisStore:
    """One Redis deployment, as a URL or a user's own client describes it."""

    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, options: Options, settings: Settings) -> None:
        loss_protection, interop = options.loss_protection, options.interop
        self.options, self.display = options, options.display
        self.connections = settings.connections
        self.doubtful: dict[str, None] = {}
        self.waiters: dict[str, None] = {}
        """With ``replicas``: who was told to wait, and so comes again by itself."""
        self.longest_ttl = options.max_ttl if loss_protection else LONGEST_TTL_SECONDS
        self.keys = Keys(settings.namespace, cluster=options.cluster)
        self.scripts = Scripts(
            loss_protection=loss_protection,
            interop=interop,
            cluster=options.cluster,
            replicas=options.replicas > 0,
        )
        self.guarantees = _GUARANTEES - _NOT_WITH_REDIS_PY if interop else _GUARANTEES

    def backend(self, runtime: Runtime) -> RedisBackend:
        return RedisBackend(self, runtime)


_GUARANTEES = frozenset(Guarantee) - {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}
# Its Lock knows no line, no readers and no slots.
_NOT_WITH_REDIS_PY = {Guarantee.FIFO, Guarantee.SHARED, Guarantee.SLOTS}


def open_store(url: Url, settings: Settings) -> RedisStore:
    """``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``."""
    return RedisStore(read_options(url, settings), settings)


async def initialise(backend: RedisBackend) -> str:
    """What ``holdfast init`` does here; says what it did."""
    return await backend.initialise()
