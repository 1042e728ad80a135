"""Redis and Valkey: one script call to take the lock or join the queue, one to release it and to
reserve it for the next waiter, or grant it to that waiter directly, and wake it.

The rules are in ``lua/``: ``acquire.lua`` and ``release.lua`` are the usual cases, ``state.lua``
and ``attempt.lua`` all others. This file packs commands, sends them, and reads replies.

Every command is idempotent by its owner. If the server closed the connection, the command is sent
once more. The exception is a renewal that shortens a hold: a proxy may have kept the first one, and
deliver it after later ones. A server that does not know a script gets its text.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.backoff import WATCH_POLL_SECONDS
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
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.io.resp import RedisRefused, bulk, pack
from holdfast.io.wakeups import Wakeups
from holdfast.stores.redis.connection import Connector
from holdfast.stores.redis.inspect import (
    Survey,
    eviction_greeting,
    findings,
    lock_info_or_notice,
    read_lock_info,
)
from holdfast.stores.redis.replies import (
    Keys,
    ReasonLog,
    RedisConnectionBroken,
    busy_answer,
    denied_in_script,
    lock_name,
    milliseconds,
    refusal,
)
from holdfast.stores.redis.routes import (
    ClusterRoute,
    Route,
    SentinelRoute,
    SingleRoute,
)
from holdfast.stores.redis.scripts import Script, Scripts
from holdfast.stores.redis.url import RedisOptions, read_options
from holdfast.url import Url

__all__ = ["RedisBackend", "RedisStore", "open_store"]

_MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
LOOK_CAP = 1000
"""The most holders, and the most waiters, of one name that are shown."""
KEPT_SHAPES = 1024
KEPT_OWNERS = 4096
SIXTEEN_DIGITS = 10**15
"""From 2001 to 2286, the time in microseconds has sixteen digits."""
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0

REPLICATION_SECONDS = 1.0
"""How long a grant may take to reach the required number of replicas."""


class ScriptCall(NamedTuple):
    """A packed script call, and the key that routes it to a node."""

    script: Script
    packed: bytes
    key: str


class RedisBackend:
    """Admits claims by scripts on the server."""

    def __init__(self, store: RedisStore, runtime: Runtime) -> None:
        self.options, self.display, self.runtime = store.options, store.display, runtime
        self._uncertain, self._wall = store.uncertain, runtime.wall
        self._waiters = store.waiters
        self._keys, self._scripts = store.keys, store.scripts
        self._connector = Connector(
            store.options.access, store.connections, blocking=runtime.blocking
        )
        self._listen()
        self._shapes: dict[tuple[Mode, int, int, float, bool, int], str] = {}
        self._replicas, self._reasons = store.options.replicas, ReasonLog()
        self._route = _route(self._connector, store.options, self._moved)
        self._call, self._call_now = self._route.call, self._route.call_now
        seconds = min(REPLICATION_SECONDS, store.options.access.request_seconds / 2)
        self._wait_command = pack("WAIT", store.options.replicas, milliseconds(seconds))

    def _listen(self) -> None:
        self._wakeups = Wakeups(blocking=self.runtime.blocking)
        self._channel = self._keys.channel(secrets.token_hex(8))
        self._subscribe = lambda until: self._route.subscription(self._channel, until)

    def _moved(self) -> None:
        self._wakeups.drop()

    # ---- acquire

    def _pack_claim(self, claim: Claim, join: bool, generation: int) -> str:
        _, mode, weight, limit, ttl, owner, label = claim
        kind = (mode, weight, limit, ttl, join, generation)
        shape = self._shapes.get(kind) or self._pack_shape(*kind)
        sent = int(self._wall() * 1_000_000)
        # For ASCII text, which is the usual case, the length in characters is the length in bytes.
        words = f"${len(owner)}\r\n{owner}\r\n${len(label)}\r\n{label}\r\n$16\r\n{sent}\r\n{shape}"
        if words.isascii() and sent >= SIXTEEN_DIGITS:
            return words
        return f"{bulk(owner)}{bulk(label)}{bulk(str(sent))}{shape}"

    def _pack_shape(
        self, mode: Mode, weight: int, limit: int, ttl: float, join: bool, generation: int
    ) -> str:
        if self.options.interop and mode is not Mode.EXCLUSIVE:
            raise Unsupported(f"{self.display} with interop=redis-py has exclusive locks only")
        channel = self._channel if generation else "-"
        max_ttl = milliseconds(self.options.max_ttl)
        direct = milliseconds(min(DIRECT_GRANT_SECONDS, ttl)) if self._scripts.direct else 0
        words = f"{_MODES[mode]} {weight} {limit} {int(join)} {max_ttl} {direct} {channel}"
        if len(self._shapes) >= KEPT_SHAPES:
            self._shapes.clear()
        shape = bulk(str(milliseconds(ttl))) + bulk(words)
        self._shapes[mode, weight, limit, ttl, join, generation] = shape
        return shape

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        script = self._scripts.acquire
        start, key = script.starts.get(claim.name) or self._keys.start(script, claim.name)
        generation = self._wakeups.generation
        packed = f"{start}{self._pack_claim(claim, join, generation)}".encode()
        if self._replicas:
            return await self._replicated(claim, ScriptCall(script, packed, key), generation, until)
        call_now = self._call_now
        try:
            if call_now is None:
                reply = await self._call(packed, key, until)
            else:
                reply = call_now(packed, until)
        except RedisConnectionBroken as error:
            self._note_uncertain(claim)
            reply = await self._retry(ScriptCall(script, packed, key), error, until)
        if type(reply) is int:
            return Grant(claim, reply)
        if type(reply) is RedisRefused:
            try:
                reply = await self._handle_error(ScriptCall(script, packed, key), reply, until)
            except BackendUnavailable as error:
                await self._undo_denied(claim, error)
                raise
        return self._answer(claim, reply, generation)

    def _answer(self, claim: Claim, reply: Any, generation: int) -> Grant | Busy:
        if type(reply) is int:
            return Grant(claim, reply)
        if type(reply) is not list or not reply:
            raise refusal(reply, self.display, claim.name)
        if reply[0] == b"slots" and len(reply) > 2 and {type(each) for each in reply[1:]} == {int}:
            return Grant(claim, reply[1], tuple(reply[2:]))
        return busy_answer(claim, reply, self.display, generation)

    async def _undo_denied(self, claim: Claim, error: BackendUnavailable) -> None:
        """A script that was denied one of its commands may have written before that: removes it.
        The refusal is final then."""
        if denied_in_script(RedisRefused(str(error))):
            with suppress(HoldfastError):
                await self._abandon(claim)
            error.final = True

    def _note_uncertain(self, claim: Claim) -> None:
        """Notes that an attempt of this owner may still be in flight: its release must abandon."""
        _note(self._uncertain, claim.owner)

    async def _replicated(
        self, claim: Claim, command: ScriptCall, generation: int, until: float | None
    ) -> Grant | Busy:
        try:
            reply, short = await self._with_replicas(command, until)
        except RedisConnectionBroken:
            self._note_uncertain(claim)
            raise
        answer = self._answer(claim, reply, generation)
        if short and isinstance(answer, Grant):
            answer = await self._undo(claim, short, generation)
        if isinstance(answer, Busy):
            _note(self._waiters, claim.owner)
        return answer

    async def _undo(self, claim: Claim, short: str, generation: int) -> Busy:
        await self.abandon(claim)
        reason = f"{short}: {claim.name!r} on {self.display} was released again"
        return Busy(0, 1.0, (generation, 0), reason)

    # ---- wait

    async def wait(self, claim: Claim, busy: Busy, until: float) -> Grant | None:
        self._reasons.tell(claim, busy)
        generation, last = busy.ref
        key = _wakeup_key(claim.owner)
        token = await self._wakeups.wait(key, generation, until, self._subscribe)
        # An old wake-up may have been in flight since before the attempt that returned `busy`.
        if token is None or token <= last:
            return None
        return Grant(claim, token, seconds=min(DIRECT_GRANT_SECONDS, claim.ttl))

    def nudge(self, claim: Claim) -> None:
        self._wakeups.wake(_wakeup_key(claim.owner))

    # ---- renew

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        batch = [self._renewal_call(grant.claim, shorten) for grant in grants]
        batch += [self._refresh_call(claim, behind) for claim, behind in waits]
        replies = await self._requests(batch, until, again=not shorten)
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

    def _renewal_call(self, claim: Claim, shorten: bool) -> ScriptCall:
        script = self._scripts.renew
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(int(claim.ttl * 1000)))}{bulk(str(int(shorten)))}"
        return ScriptCall(script, f"{start}{words}".encode(), key)

    def _refresh_call(self, claim: Claim, behind: int) -> ScriptCall:
        script = self._scripts.refresh
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(behind))}"
        return ScriptCall(script, f"{start}{words}".encode(), key)

    # ---- release, abandon, revoke

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        if self._uncertain and claim.owner in self._uncertain:
            return await self._abandon(claim)
        if self._waiters:
            self._waiters.pop(claim.owner, None)
        script = self._scripts.release
        start, key = script.starts.get(claim.name) or self._keys.start(script, claim.name)
        words = f"{start}${len(claim.owner)}\r\n{claim.owner}\r\n"
        packed = (words if words.isascii() else f"{start}{bulk(claim.owner)}").encode()
        call_now = self._call_now
        try:
            if call_now is not None:
                reply = call_now(packed, None)
            else:
                reply = await self._call(packed, key)
        except RedisConnectionBroken as error:
            # If the first release did arrive, the hold was ours and is gone now.
            await self._retry(ScriptCall(script, packed, key), error)
            return True
        if type(reply) is int:
            return reply == 1
        if type(reply) is RedisRefused:
            reply = await self._handle_error(ScriptCall(script, packed, key), reply)
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
        generation = self._wakeups.generation
        words = f"{bulk(grant.claim.owner)}{self._pack_claim(claim, True, generation)}"
        command = ScriptCall(script, f"{start}{words}".encode(), key)
        sure = True
        try:
            reply = await self._call(command.packed, key)
        except RedisConnectionBroken as error:
            self._note_uncertain(claim)
            sure = False
            reply = await self._retry(command, error)
        if type(reply) is RedisRefused:
            reply = await self._handle_error(command, reply)
        if type(reply) is not list or len(reply) != 2 or type(reply[0]) is not int:
            raise refusal(reply, self.display, claim.name)
        if self._uncertain and grant.claim.owner in self._uncertain:
            await self._abandon(grant.claim)  # an attempt of it may still arrive, too
        # As with a release: if the first exchange did arrive, our hold is gone now.
        was_ours = reply[0] == 1 or not sure
        if reply[1] == [b"gone"]:  # the waiter gave up just before: the hold has ended all the same
            return was_ours, Busy(0)
        return was_ours, self._answer(claim, reply[1], generation)

    async def _in_two_steps(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """With ``replicas``: releases, then attempts. A waiter already in the queue is woken by the
        release. An attempt for it could grant the lock a second time, and undo a good grant
        if the replicas are late."""
        waits = claim.owner in self._waiters
        was_ours = await self.release(grant)
        return was_ours, Busy(0) if waits else await self.attempt(claim, join=True)

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        if self.options.interop:
            raise Unsupported(f"{self.display} with interop=redis-py can't hand a lease over")
        return ()  # a hold ends with its ttl, whatever becomes of its client

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        script, generation = self._scripts.take_over, self._wakeups.generation
        start, key = self._keys.start(script, claim.name)
        old = f"{bulk(grant.claim.owner)}{bulk(str(grant.token))}"
        packed = f"{start}{old}{self._pack_claim(claim, False, generation)}".encode()
        command = ScriptCall(script, packed, key)
        try:
            if self._replicas:
                reply, short = await self._with_replicas(command, until)
            else:
                reply, short = await self._request(command, until), ""
        except RedisConnectionBroken:
            self._note_uncertain(claim)
            raise
        if reply == [b"none"]:
            return None
        if type(reply) is list and reply[:1] == [b"barred"]:
            short = f"{self.display} may have lost holds, and grants nothing for now"
        if short:
            raise BackendUnavailable(f"{claim.name!r} was not taken over: {short}")
        answer = self._answer(claim, reply, generation)
        return answer if isinstance(answer, Grant) else None

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        await self._abandon(claim, until)

    async def _abandon(self, claim: Claim, until: float | None = None) -> bool:
        script = self._scripts.abandon
        start, key = self._keys.start(script, claim.name)
        sent = bulk(str(int(self._wall() * 1_000_000)))
        command = ScriptCall(script, f"{start}{bulk(claim.owner)}{sent}".encode(), key)
        try:
            was = self._flag(await self._request(command, until, again=False), claim.name)
        except RedisConnectionBroken as error:
            await self._retry(command, error, until)
            was = True
        self._uncertain.pop(claim.owner, None)
        self._waiters.pop(claim.owner, None)
        return was

    async def revoke(self, name: str) -> list[int]:
        script = self._scripts.revoke
        start, key = self._keys.start(script, name)
        reply = await self._request(ScriptCall(script, start.encode(), key))
        if type(reply) is not list or any(type(token) is not int for token in reply):
            raise refusal(reply, self.display, name)
        return reply

    # ---- inspect

    async def look(self, name: str) -> LockInfo:
        (reply,) = await self._look_replies([name])
        return read_lock_info(name, reply, self.display)

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        survey = Survey(self._keys, self._route, self._lock_infos)
        return await survey.page(prefix, cursor, limit)

    async def _lock_infos(self, names: Sequence[str]) -> list[LockInfo]:
        """One per name; a name with damaged data has a notice instead."""
        replies = await self._look_replies(names)
        return [
            lock_info_or_notice(name, reply, self.display)
            for name, reply in zip(names, replies, strict=True)
        ]

    async def _look_replies(self, names: Sequence[str]) -> list[Any]:
        script = self._scripts.look
        commands = []
        for name in names:
            start, key = self._keys.start(script, name)
            packed = f"{start}{bulk(str(LOOK_CAP))}".encode()
            commands.append(ScriptCall(script, packed, key))
        return await self._requests(commands)

    # ---- records

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        script = self._scripts.record
        start, key = self._keys.start(script, grant.claim.name)
        words = (grant.claim.owner, value, str(grant.token), str(milliseconds(keep_seconds)))
        packed = f"{start}{''.join(map(bulk, words))}".encode()
        return self._flag(await self._request(ScriptCall(script, packed, key)), grant.claim.name)

    async def recall(self, name: str) -> Record | None:
        script = self._scripts.recall
        start, key = self._keys.start(script, name)
        reply = await self._request(ScriptCall(script, start.encode(), key))
        if reply is None:
            return None
        if type(reply) is not list or [type(word) for word in reply] != [bytes, int, int]:
            raise refusal(reply, self.display, name)
        value, token, age = reply
        return Record(value.decode(errors="replace"), token, age / 1000)

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    # ---- requests

    async def _request(
        self, command: ScriptCall, until: float | None = None, *, again: bool = True
    ) -> Any:
        """Sends one command and returns its reply. Raises for an error reply."""
        try:
            reply = await self._call(command.packed, command.key, until)
        except RedisConnectionBroken as error:
            if not again:
                raise
            return await self._retry(command, error, until)
        if type(reply) is RedisRefused:
            return await self._handle_error(command, reply, until)
        return reply

    async def _retry(
        self, command: ScriptCall, error: RedisConnectionBroken, until: float | None = None
    ) -> Any:
        """Sends a command once more if the server closed its connection; otherwise raises."""
        if not error.closed:
            raise error
        try:
            reply = await self._call(command.packed, command.key, until)
            if type(reply) is RedisRefused:
                return await self._handle_error(command, reply, until)
        except BackendUnavailable as refused:
            refused.final = False  # the first one may have changed something
            raise
        return reply

    async def _handle_error(
        self, command: ScriptCall, reply: RedisRefused, until: float | None = None
    ) -> Any:
        """Handles an error reply: sends the text of an unknown script; raises for other errors."""
        if reply.code == "NOSCRIPT":
            in_full = command.script.in_full(command.packed)
            again = await self._call(in_full, command.key, until)
            if type(again) is not RedisRefused:
                return again
            reply = again
        self._check_role([reply])
        raise refusal(reply, self.display, lock_name(command.key))

    def _check_role(self, replies: Sequence[Any]) -> None:
        """If a replica answered, the route must find the master again."""
        if any(type(reply) is RedisRefused and reply.code == "READONLY" for reply in replies):
            self._route.refused()

    async def _requests(
        self, commands: Sequence[ScriptCall], until: float | None = None, *, again: bool = True
    ) -> list[Any]:
        """Sends all commands in one round trip; those whose script the server does not know, in one
        more. Error replies are returned as values."""
        if not commands:
            return []
        packed = [command.packed for command in commands]
        keys = [command.key for command in commands]
        try:
            replies = await self._route.calls(packed, keys, until)
        except RedisConnectionBroken as error:
            if not error.closed or not again:
                raise
            replies = await self._route.calls(packed, keys, until)
        unknown = [
            i for i, r in enumerate(replies) if type(r) is RedisRefused and r.code == "NOSCRIPT"
        ]
        if unknown:
            full = [commands[i].script.in_full(packed[i]) for i in unknown]
            loaded = await self._route.calls(full, [keys[i] for i in unknown], until)
            for i, reply in zip(unknown, loaded, strict=True):
                replies[i] = reply
        self._check_role(replies)
        return replies

    async def _with_replicas(self, command: ScriptCall, until: float | None) -> tuple[Any, str]:
        """The reply, and a reason if too few replicas have the write; otherwise ``""``."""
        reply, count = await self._route.alone(
            [command.packed, self._wait_command], command.key, until
        )
        if type(reply) is RedisRefused and reply.code == "NOSCRIPT":
            full = command.script.in_full(command.packed)
            reply, count = await self._route.alone([full, self._wait_command], command.key, until)
        self._check_role([reply])
        for each in (reply, count):
            if type(each) is RedisRefused:
                raise refusal(each, self.display, lock_name(command.key))
        if type(count) is not int:
            raise refusal(count, self.display, lock_name(command.key))
        enough = count >= self._replicas
        return reply, "" if enough else f"{count} of {self._replicas} replicas have it"

    # ---- the store itself

    async def probe(self) -> list[Finding]:
        _, loss_key = self._keys.start(self._scripts.begin, "")
        return await findings(self.options, self._route, loss_key, self._wall())

    async def initialise(self) -> str:
        """Marks the server's data as complete, so that loss protection grants at once."""
        script = self._scripts.begin
        start, key = self._keys.start(script, "")
        reply = await self._request(ScriptCall(script, start.encode(), key))
        if type(reply) is not bytes:
            raise refusal(reply, self.display, "")
        return f"{self.display} is marked as new (run {reply.decode()[:8]}…)"

    def forget(self) -> None:
        self._route.forget()
        self._wakeups.forget()
        self._listen()
        self._shapes.clear()  # they contain the parent's channel

    async def close(self) -> None:
        self._wakeups.close()
        self._route.close()


def _route(connector: Connector, options: RedisOptions, moved: Callable[[], None]) -> Route:
    greeting = None if options.allow_eviction else eviction_greeting(options.display)
    if options.cluster:
        return ClusterRoute(connector, options.nodes, greeting)
    if options.sentinel_access is not None:
        access, service = options.sentinel_access, options.service
        return SentinelRoute(connector, options.nodes, access, service, greeting, moved)
    return SingleRoute(connector, options.nodes[0], greeting)


def _note(owners: dict[str, None], owner: str) -> None:
    """Adds an owner; drops the oldest ones above ``KEPT_OWNERS``."""
    owners[owner] = None
    while len(owners) > KEPT_OWNERS:
        owners.pop(next(iter(owners)), None)


def _wakeup_key(owner: str) -> str:
    """The key that wakes a waiter. Not its owner: every subscriber could read that secret."""
    return hashlib.sha1(owner.encode(), usedforsecurity=False).hexdigest()[:16]


class RedisStore:
    """One Redis deployment, as a URL or a user's own client describes it."""

    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, options: RedisOptions, settings: Settings) -> None:
        loss_protection, interop = options.loss_protection, options.interop
        self.options, self.display = options, options.display
        self.connections = settings.connections
        self.uncertain: dict[str, None] = {}
        """Owners with an attempt that may still be in flight; see ``_note_uncertain``."""
        self.waiters: dict[str, None] = {}
        """With ``replicas``: owners that are in the queue, and so attempt again when woken."""
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
# redis-py's Lock has no queue, no readers and no slots.
_NOT_WITH_REDIS_PY = {Guarantee.FIFO, Guarantee.SHARED, Guarantee.SLOTS}


def open_store(url: Url, settings: Settings) -> RedisStore:
    """``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``."""
    return RedisStore(read_options(url, settings), settings)
