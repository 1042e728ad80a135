"""``redlock://``: a majority of independent Redis masters, asked all at once.

Each node votes by a script (``lua/redlock_*``); ``redlock_votes`` counts; ``wires/redlock*`` ask.
A grant is one round trip while the nodes' counters agree, and two when they don't. There is no
line: who waits listens on the name's channel, and comes again when somebody lets go.
"""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.stores.redis.connection import Refused, bulk, pack
from holdfast.stores.redis.inspect import read_scan
from holdfast.stores.redis.replies import Excuses, milliseconds, refusal
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redlock.broadcast_aio import AsyncFan
from holdfast.stores.redlock.broadcast_blocking import BlockingFan
from holdfast.stores.redlock.inspect import findings, has_something, read_cursor, read_lock_info
from holdfast.stores.redlock.nodes import PING, Fleet, Request, Round
from holdfast.stores.redlock.scripts import RedlockKeys, RedlockScripts
from holdfast.stores.redlock.url import RedlockOptions
from holdfast.stores.redlock.votes import (
    SPLIT_SECONDS,
    Ballot,
    Verdict,
    busy,
    check_round,
    count,
    enough_acks,
    enough_ends,
    enough_grants,
    heard,
    rearranged,
    wait_for_all,
)
from holdfast.stores.redlock.wakeups import AsyncNameWakeups, BlockingNameWakeups

__all__ = ["RedlockBackend", "RedlockStore"]

_MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
SPLIT_TRIES = 3
"""How often an attempt is repeated at once when several contended and none of them won."""
COURTESY_SECONDS = 0.02
"""How long one who let go leaves the name to those who listened."""
OVER, HELD = 0, 1
"""What a node says of a hold that is released; anything else is that it does not know it."""
KEPT_NAMES = 4096
LOOK_CAP = 1000
"""How many holders of one name are shown."""
SCAN_ROUNDS = 16
"""A page is given up after so many steps of SCAN, however little they found."""
BATCH = 256
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0


FIRST_LOOK_SECONDS = 0.02
MOST_LOOKS = 9
"""Each after twice the time of the one before: the last comes later than a re-check would."""
KEPT_WAITERS = 4096


class _Look(NamedTuple):
    holder: bytes
    """Who was seen to hold a majority; empty if nobody was."""
    calls: int
    """How often the name had been called when this was first seen."""
    looks: int
    """How often it was looked at again since; ``MOST_LOOKS`` if nothing is strange about it."""


class Patience:
    """What the waiters of a backend saw last."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: dict[str, _Look] = {}

    def tempered(self, owner: str, ballot: Ballot, answer: Busy, calls: int) -> Busy:
        """The answer, with an earlier moment to look again where that is wise. ``calls`` is how
        often the name had been called before these votes were asked for."""
        look = self._next(self._last.get(owner), ballot.holder(), calls)
        if len(self._last) >= KEPT_WAITERS:
            self._last.clear()
        self._last[owner] = look
        if look.looks >= MOST_LOOKS:
            return answer
        pause = FIRST_LOOK_SECONDS * 2**look.looks * self._runtime.between(0.5, 1.0)
        if answer.retry_seconds is not None and answer.retry_seconds < pause:
            return answer
        return answer._replace(retry_seconds=pause)

    def _next(self, last: _Look | None, holder: bytes, calls: int) -> _Look:
        if last is None or holder != last.holder:
            return _Look(holder, calls, MOST_LOOKS if holder else 0)
        if calls != last.calls:  # and yet it is the same as before
            return _Look(holder, calls, 0)
        return last._replace(looks=min(MOST_LOOKS, last.looks + 1))

    def forget(self, owner: str) -> None:
        """It waits no more."""
        self._last.pop(owner, None)


class RedlockBackend:
    """Admits claims by the votes of the nodes."""

    def __init__(self, store: RedlockStore, runtime: Runtime) -> None:
        self.store, self.runtime, self.display = store, runtime, store.display
        self._keys, self._scripts, self._fleet = store.keys, store.scripts, store.fleet
        self._quorum = store.options.quorum
        access, limit = store.options.access, store.connections
        self._fan: Any = (BlockingFan if runtime.blocking else AsyncFan)(access, self._fleet, limit)
        self._wakeups: Any = self._new_wakeups()
        self._enough = enough_grants(self._quorum, slots=False)
        self._enough_slots = enough_grants(self._quorum, slots=True)
        self._ended = enough_ends(self._quorum)
        self._sent = 0
        self._asking: dict[str, object] = {}
        self._won: dict[str, None] = {}
        """Owners that hold: an attempt of theirs that fails undoes nothing."""
        self._seen: dict[str, int] = {}
        self._courtesy: dict[str, float] = {}
        self._patience, self._excuses = Patience(runtime), Excuses()
        self._channels: dict[str, str] = {}

    def _new_wakeups(self) -> Any:
        maker = BlockingNameWakeups if self.runtime.blocking else AsyncNameWakeups
        return maker(self.store.options.access, self._fleet)

    # ---- asking

    def _packed(self, script: Script, name: str, *words: str) -> bytes:
        start, _ = self._keys.start(script, name)
        return f"{start}{''.join(map(bulk, words))}".encode()

    async def _ask(
        self,
        script: Script,
        packed: bytes,
        enough: Any,
        only: Sequence[int] | None = None,
        until: float | None = None,
    ) -> Round:
        request = Request([packed], lambda at: script.in_full(packed), enough, only)
        asked: Round = await self._fan.ask(request, until)
        return asked

    # ---- taking

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        if join and self._courtesy and self._gives_way(claim.name):
            return Busy(0, self.runtime.between(0.001, 0.01))
        mark = object()
        if self._asking.setdefault(claim.owner, mark) is not mark:
            # Another thread asks for the same claim: the end of one must not undo the other.
            return Busy(0, self.runtime.between(*SPLIT_SECONDS))
        try:
            return await self._take(claim, join, until)
        except Incompatible:  # told by one node; others may have granted it
            with suppress(HoldfastError):
                await self.abandon(claim)
            raise
        finally:
            self._asking.pop(claim.owner, None)

    async def _take(self, claim: Claim, join: bool, until: float | None = None) -> Grant | Busy:
        answer = await self._attempt(claim, join, until)
        if isinstance(answer, Grant):
            self._won[claim.owner] = None
            if len(self._won) > KEPT_NAMES:
                self._won.pop(next(iter(self._won)), None)
            self._patience.forget(claim.owner)
            self._wakeups.leave(self.channel(claim.name), _subscription_key(claim.owner))
        return answer

    async def _attempt(self, claim: Claim, join: bool, until: float | None) -> Grant | Busy:
        for _ in range(SPLIT_TRIES):
            calls: int = self._wakeups.calls(self.channel(claim.name)) if join else 0
            ballot = await self._election(claim, join, until)
            verdict = ballot.verdict()
            if verdict is not None:
                if verdict.token is not None:
                    return _grant(claim, verdict.token, verdict.slots)
                grant = await self._raise(claim, verdict, ballot.sent, until)
                if grant is not None:
                    return grant
            elif not ballot.split():
                answer = busy(ballot, claim, self.display, self.runtime)
                return self._patience.tempered(claim.owner, ballot, answer, calls)
            await self.runtime.sleep(self.runtime.between(*SPLIT_SECONDS))
        return Busy(0, self.runtime.between(*SPLIT_SECONDS))

    async def _election(self, claim: Claim, join: bool, until: float | None) -> Ballot:
        """The votes on a claim; for slots, once more where the nodes chose different ones."""
        if claim.mode is not Mode.SLOTS:
            return await self._vote(claim, join, "-", until)
        start = f"@{random.randrange(claim.limit)}"
        ballot = await self._vote(claim, join, start, until)
        choice = "" if ballot.verdict() else rearranged(ballot, claim)
        if not choice:
            return ballot
        return await self._vote(claim, join, choice, until)

    async def _vote(self, claim: Claim, join: bool, choice: str, until: float | None) -> Ballot:
        script = self._scripts.grant
        sent = self._stamp()
        proposal = max(sent, self._seen.get(claim.name, 0) + 1) if self._seen else sent
        max_ttl = milliseconds(self.store.options.max_ttl)
        _, mode, weight, limit, ttl, owner, label = claim
        shape = f"{_MODES[mode]} {weight} {limit} {int(join)} {max_ttl} {choice}"
        words = (owner, label, str(sent), str(milliseconds(ttl)), str(proposal), shape)
        packed = self._packed(script, claim.name, *words)

        ballot = Ballot((), self._quorum)

        def undo(answers: list[Any]) -> tuple[bytes, list[int]] | None:
            """What some nodes granted in vain is given back, in order behind the request."""
            nonlocal ballot
            ballot = Ballot(answers, self._quorum, sent)
            if ballot.verdict() is not None or owner in self._won:
                return None
            return self._undoing(claim, sent, "-"), ballot.unless_refused()

        enough = self._enough if choice == "-" else self._enough_slots
        request = Request([packed], lambda at: script.in_full(packed), enough, None, undo)
        asked: Round = await self._fan.ask(request, until)
        self._remember(claim.name, ballot, sent)
        if ballot.answered < self._quorum:
            check_round(asked.answers, self._quorum, self.display, claim.name)
            raise self._fleet.unavailable(asked.answers)
        return ballot

    def _stamp(self) -> int:
        """When an attempt is sent, in µs; later ones of this backend have higher ones."""
        sent = int(self.runtime.wall() * 1_000_000)
        self._sent = sent = max(sent, self._sent + 1)
        return sent

    def _undoing(self, claim: Claim, sent: int, channel: str) -> bytes:
        return self._packed(self._scripts.undo, claim.name, claim.owner, str(sent), channel)

    def _remember(self, name: str, ballot: Ballot, sent: int) -> None:
        """A counter that runs before our clock is proposed beyond the next time."""
        highest = ballot.counter()
        if highest >= sent:
            if len(self._seen) >= KEPT_NAMES:
                self._seen.clear()
            self._seen[name] = highest
        elif self._seen:
            self._seen.pop(name, None)

    async def _raise(
        self, claim: Claim, verdict: Verdict, sent: int, until: float | None
    ) -> Grant | None:
        """The second round: a quorum granted under several tokens, and agrees on the highest."""
        assert verdict.raise_to is not None
        script, raised = self._scripts.raises, verdict.raised
        packed = self._packed(script, claim.name, claim.owner, str(verdict.raise_to))
        nodes = range(len(self._fleet.nodes))

        def undo(answers: list[Any]) -> tuple[bytes, Sequence[int]] | None:
            if count(answers) + len(raised) >= self._quorum or claim.owner in self._won:
                return None
            return self._undoing(claim, sent, self.channel(claim.name)), nodes

        only = [index for index in nodes if index not in raised]
        enough = enough_acks(self._quorum, len(raised))
        request = Request([packed], lambda at: script.in_full(packed), enough, only, undo)
        asked: Round = await self._fan.ask(request, until)
        if count(asked.answers) + len(raised) < self._quorum:
            return None
        return _grant(claim, verdict.raise_to, verdict.slots)

    # ---- waiting

    def channel(self, name: str) -> str:
        """Where a release of the name is told."""
        channel = self._channels.get(name)
        if channel is None:
            if len(self._channels) >= KEPT_NAMES:
                self._channels.clear()
            digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
            channel = self._channels[name] = self._keys.channel(digest[:20])
        return channel

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        self._excuses.tell(claim, busy)
        await self._wakeups.wait(self.channel(claim.name), _subscription_key(claim.owner), until)

    def nudge(self, claim: Claim) -> None:
        self._wakeups.wake(_subscription_key(claim.owner))

    def _gives_way(self, name: str) -> bool:
        until = self._courtesy.pop(name, 0.0)
        return self.runtime.now() < until

    # ---- ending

    async def release(self, grant: Grant) -> bool:
        was_ours, listening = await self._release(grant, self._ended)
        if listening:
            if len(self._courtesy) >= KEPT_NAMES:
                self._courtesy.clear()
            self._courtesy[grant.claim.name] = self.runtime.now() + COURTESY_SECONDS
        return was_ours

    async def _release(self, grant: Grant, enough: Any) -> tuple[bool, bool]:
        """Whether it was still ours, and whether others listen for it."""
        claim, script = grant.claim, self._scripts.release
        self._won.pop(claim.owner, None)
        channel = self.channel(claim.name)
        shape = f"{_MODES[claim.mode]} {','.join(map(str, grant.slots)) or '-'}"
        packed = self._packed(script, claim.name, claim.owner, str(grant.token), channel, shape)
        asked = await self._ask(script, packed, enough)
        ones = zeros = others = 0
        for index, answer in enumerate(asked.answers):
            if type(answer) is list and type(answer[0]) is int:
                listening, was = divmod(answer[0], 4)
                ones += was == HELD
                # A reply to a request that was sent again may be the second answer.
                zeros += was == OVER and index not in asked.resent
                others = max(others, listening - self._wakeups.listens(channel, index))
        check_round(asked.answers, self._quorum, self.display, claim.name)
        if heard(asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        # Nodes that never heard of it, or forgot it, let nobody in and so say nothing against it.
        lost = zeros > len(self._fleet.nodes) - self._quorum
        return ones >= self._quorum or not lost, others > 0

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """Two round trips; and where others listen, the next of this client takes its chance with
        them: without a line nothing else keeps a busy client from keeping the name."""
        mark = object()
        alone = self._asking.setdefault(claim.owner, mark) is mark
        try:
            was_ours, listening = await self._release(grant, wait_for_all)
            if alone and not listening:
                return was_ours, await self._take(claim, join=True)
        finally:
            if alone:
                self._asking.pop(claim.owner, None)
        return was_ours, Busy(0, self.runtime.between(*SPLIT_SECONDS))

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        script, channel = self._scripts.abandon, self.channel(claim.name)
        self._won.pop(claim.owner, None)
        self._patience.forget(claim.owner)
        self.store.leave(channel, _subscription_key(claim.owner), self)
        sent = str(int(self.runtime.wall() * 1_000_000))
        packed = self._packed(script, claim.name, claim.owner, sent, channel)
        asked = await self._ask(script, packed, self._half, until=until)
        check_round(asked.answers, self._quorum, self.display, claim.name)
        if heard(asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        if count(asked.answers):
            await self._tell(channel, asked.answers)

    async def _tell(self, channel: str, answers: list[Any]) -> None:
        """Nodes that had no vote in a hold that ended tell those who listen there, too."""
        silent = [index for index, answer in enumerate(answers) if answer != [1]]
        if silent:
            told = pack("PUBLISH", channel, len(self._fleet.nodes))
            await self._fan.post(Request([told], lambda at: told, wait_for_all, silent))

    def _half(self, answers: list[Any]) -> bool:
        return heard(answers) >= self._quorum

    # ---- renewing

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        # The end is never shortened: when a quorum has answered, some nodes have yet to hear of it,
        # and what reaches them late would undo an extend that came after it.
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for at in range(0, len(grants), BATCH):
            batch = grants[at : at + BATCH]
            await self._renew(batch, until, lost, unknown)
        writers = [waiting.claim for waiting in waits if waiting.claim.mode is Mode.EXCLUSIVE]
        if writers:
            await self._intend(writers, until)
        return Renewal(lost, unknown)

    async def _renew(
        self,
        grants: Sequence[Grant],
        until: float,
        lost: dict[str, str],
        unknown: dict[str, str],
    ) -> None:
        script = self._scripts.renew
        commands = [self._renewal(grant) for grant in grants]
        request = Request(commands, lambda at: script.in_full(commands[at]), self._all_renewed)
        asked: Round = await self._fan.ask(request, until)
        answers = [answer for answer in asked.answers if type(answer) is list]
        most_lost = len(self._fleet.nodes) - self._quorum
        for at, grant in enumerate(grants):
            replies = [answer[at] for answer in answers]
            owner = grant.claim.owner
            if replies.count(1) >= self._quorum:
                continue
            if replies.count(0) > most_lost:
                lost[owner] = "it ran out or was broken, and most nodes no longer have it"
            else:
                held = replies.count(1)
                cause = self._fleet.unavailable(asked.answers)
                unknown[owner] = f"{held} nodes renewed it; {cause}"

    def _all_renewed(self, answers: list[Any]) -> bool:
        whole = [answer for answer in answers if type(answer) is list]
        if len(whole) < self._quorum:
            return False
        return all(votes.count(1) >= self._quorum for votes in zip(*whole, strict=True))

    def _renewal(self, grant: Grant) -> bytes:
        claim, script = grant.claim, self._scripts.renew
        slots = ",".join(map(str, grant.slots)) or "-"
        shape = f"{_MODES[claim.mode]} {claim.limit} {slots}"
        # The whole milliseconds of the ttl: never longer than its holder believes.
        ttl = str(max(1, int(claim.ttl * 1000)))
        words = (claim.owner, claim.label, ttl, str(grant.token), shape)
        return self._packed(script, claim.name, *words)

    async def _intend(self, claims: Sequence[Claim], until: float) -> None:
        """Waiting writers keep new readers out; nobody needs the answers."""
        script = self._scripts.intend
        for at in range(0, len(claims), BATCH):
            batch = claims[at : at + BATCH]
            commands = [self._packed(script, claim.name, claim.owner) for claim in batch]
            in_full = [script.in_full(command) for command in commands]
            await self._fan.post(Request(commands, in_full.__getitem__, wait_for_all), until)

    async def initialise(self) -> str:
        """Marks the nodes' data as whole, so that loss protection does not wait."""
        script = self._scripts.begin
        packed = self._packed(script, "")
        request = Request([packed], lambda at: script.in_full(packed), wait_for_all)
        asked: Round = await self._fan.ask(request)
        marked = [
            node.address
            for node, answer in zip(self._fleet.nodes, asked.answers, strict=True)
            if type(answer) is list and type(answer[0]) is bytes
        ]
        if len(marked) < len(self._fleet.nodes):
            done = ", ".join(map(str, marked)) or "none"
            raise BackendUnavailable(
                f"marked as new: {done}; {self._fleet.unavailable(asked.answers)}"
            )
        return f"{self.display}: {len(marked)} nodes are marked as new"

    # ---- looking

    async def look(self, name: str) -> LockInfo:
        (replies,) = await self._replies([name])
        return read_lock_info(name, replies, self._fleet)

    async def _standings(self, names: Sequence[str], node: int) -> list[LockInfo]:
        """What a majority holds of each name of which a node is the first to have anything. One
        that can't be read says so, and the others are told as always."""
        standings = []
        for name, replies in zip(names, await self._replies(names), strict=True):
            if next((i for i, r in replies.items() if has_something(r)), None) != node:
                continue
            try:
                standing = read_lock_info(name, replies, self._fleet)
            except Incompatible as error:
                why = f"what is stored under this name can't be read: {error}"
                standing = LockInfo(name, 0, (), (), why)
            if standing.holders or standing.notice:
                standings.append(standing)
        return standings

    async def _replies(self, names: Sequence[str]) -> list[dict[int, Any]]:
        """What each node tells about each name."""
        if not names:
            return []
        script = self._scripts.look
        commands = [self._packed(script, name, str(LOOK_CAP)) for name in names]
        request = Request(commands, lambda at: script.in_full(commands[at]), wait_for_all)
        asked: Round = await self._fan.ask(request)
        if sum(type(answer) is list for answer in asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        return [
            {
                index: answer[at]
                for index, answer in enumerate(asked.answers)
                if type(answer) is list
            }
            for at in range(len(names))
        ]

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """A cursor is ``node.scan.name``: the name up to which that step was already given. A name
        that several nodes have is given where the first of them is walked."""
        node, scan, after = read_cursor(cursor)
        total = len(self._fleet.nodes)
        for _ in range(SCAN_ROUNDS):
            if node >= total:
                return Page([], None)
            following, names = await self._step(node, prefix, scan, limit)
            fresh = [name for name in sorted(set(names)) if name > after]
            used = await self._standings(fresh, node)
            if len(used) > limit:
                return Page(used[:limit], f"{node}.{scan}.{used[limit - 1].name}")
            after, scan = "", following
            if scan == "0":
                node += 1
            if used:
                return Page(used, None if node >= total else f"{node}.{scan}.")
        return Page([], f"{node}.{scan}.")

    async def _step(self, node: int, prefix: str, scan: str, limit: int) -> tuple[str, list[str]]:
        amount = max(10, min(limit, 1000))
        command = pack("SCAN", scan, "MATCH", self._keys.pattern(prefix), "COUNT", amount)
        request = Request([command], lambda at: command, wait_for_all, [node])
        asked: Round = await self._fan.ask(request)
        answer = asked.answers[node]
        if type(answer) is not list:
            return "0", []  # it is down: what a majority holds is on another one too
        if isinstance(answer[0], Refused):
            raise refusal(answer[0], str(self._fleet.nodes[node].address), prefix)
        return read_scan(answer[0], self._keys, str(self._fleet.nodes[node].address))

    async def revoke(self, name: str) -> list[int]:
        script = self._scripts.revoke
        packed = self._packed(script, name, self.channel(name))
        request = Request([packed], lambda at: script.in_full(packed), wait_for_all)
        asked: Round = await self._fan.ask(request)
        check_round(asked.answers, self._quorum, self.display, name)
        if heard(asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        tokens: dict[bytes, list[int]] = {}
        answers = [a[0] for a in asked.answers if type(a) is list and type(a[0]) is list]
        for rows in answers:
            for row in rows:
                if type(row) is list and [type(word) for word in row] == [bytes, int]:
                    tokens.setdefault(row[0], []).append(row[1])
        unseen = len(self._fleet.nodes) - len(answers)
        held = [told for told in tokens.values() if len(told) + unseen >= self._quorum]
        return sorted(max(told, key=lambda t: (told.count(t), t)) for told in held)

    async def probe(self) -> list[Finding]:
        request = Request([PING], lambda at: PING, lambda answers: False)
        asked: Round = await self._fan.ask(request)
        if sum(type(answer) is list for answer in asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        return findings(self._fleet, asked.answers, self.store.options)

    # ---- what there is not

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        raise Unsupported(f"{self.display} keeps no records")

    async def recall(self, name: str) -> Record | None:
        raise Unsupported(f"{self.display} keeps no records")

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    # ---- the end

    def forget(self) -> None:
        self._fan.forget()
        self._wakeups.forget()
        self._wakeups = self._new_wakeups()

    async def close(self) -> None:
        await self._wakeups.close()
        await self._fan.close()


def _grant(claim: Claim, token: int, slots: str) -> Grant:
    numbers = () if slots == "-" else tuple(sorted(int(slot) for slot in slots.split(",")))
    return Grant(claim, token, numbers)


def _subscription_key(owner: str) -> str:
    """By what a waiter is woken: not its owner, which nobody else is to learn."""
    return hashlib.sha1(owner.encode(), usedforsecurity=False).hexdigest()[:16]


class RedlockStore:
    """Independent masters, as a URL lists them."""

    shortest_ttl = 0.05
    whole_seconds = False
    guarantees = frozenset(Guarantee) - {Guarantee.FIFO, Guarantee.RECORDS, Guarantee.WATCH}

    def __init__(self, options: RedlockOptions, settings: Settings) -> None:
        self.options, self.display = options, options.display
        self.connections = settings.connections
        self.longest_ttl = options.max_ttl if options.loss_protection else LONGEST_TTL_SECONDS
        self.keys = RedlockKeys(settings.namespace)
        self.scripts = RedlockScripts(loss_protection=options.loss_protection)
        self.fleet = Fleet(
            options.nodes,
            display=self.display,
            allow_eviction=options.allow_eviction,
            prepare=self.scripts.prepare,
        )
        self._backends: weakref.WeakSet[RedlockBackend] = weakref.WeakSet()

    def backend(self, runtime: Runtime) -> RedlockBackend:
        backend = RedlockBackend(self, runtime)
        self._backends.add(backend)
        return backend

    def leave(self, channel: str, key: str, caller: RedlockBackend) -> None:
        """A claim waits no more, whichever of the client's backends hears of it first."""
        for backend in list(self._backends):
            if backend is caller or backend.runtime.blocking:
                backend._wakeups.leave(channel, key)
