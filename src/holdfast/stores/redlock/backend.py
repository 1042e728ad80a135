"""The Redlock backend: sends every request to all nodes and acts on the votes of a majority.

Each node votes by a script (``lua/``). ``votes`` counts the votes. ``broadcast_blocking`` and
``broadcast_aio`` send the requests. A grant takes one round trip while the counters of the nodes
agree, and two when they differ. There is no queue: a waiter subscribes to the channel of the name
and attempts again after each release.
"""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.backoff import (
    RETRY_JITTER,
    SPLIT_VOTE_SECONDS,
    WATCH_POLL_SECONDS,
    YIELD_RETRY_SECONDS,
)
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io.clock import wall
from holdfast.io.resp import RedisRefused, bulk, pack
from holdfast.stores.redis.connection import Connector
from holdfast.stores.redis.inspect import read_scan
from holdfast.stores.redis.replies import ReasonLog, milliseconds, refusal
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redlock.broadcast_aio import AsyncBroadcast
from holdfast.stores.redlock.broadcast_blocking import BlockingBroadcast
from holdfast.stores.redlock.inspect import findings, has_entry, read_cursor, read_lock_info
from holdfast.stores.redlock.nodes import (
    INFO,
    OPERATOR_STRAGGLER_SECONDS,
    Nodes,
    Round,
    RoundRequest,
)
from holdfast.stores.redlock.scripts import RUN_KEY, RedlockKeys, RedlockScripts
from holdfast.stores.redlock.url import RedlockOptions
from holdfast.stores.redlock.votes import (
    Ballot,
    Transfer,
    Verdict,
    acknowledged_count,
    answered_count,
    busy_answer,
    check_round,
    choose_slots,
    enough_acks,
    enough_ends,
    enough_grants,
    enough_transfers,
    wait_for_all,
)
from holdfast.stores.redlock.wakeups import NameWakeups

__all__ = ["RedlockBackend", "RedlockStore"]

_MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
SPLIT_TRIES = 3
"""How often an attempt is repeated at once after a split vote: several contend, none has won."""
YIELD_SECONDS = 0.02
"""How long after a release this backend leaves the name to waiters of other clients."""
OVER, HELD = 0, 1
"""The replies of ``release.lua`` for a hold that had ended, and for a hold that this node had. Any
other reply: the node does not know the hold."""
KEPT_NAMES = 4096
LOOK_CAP = 1000
"""How many holders of one name are shown."""
SCAN_ROUNDS = 16
"""A page ends after this many SCAN steps, even if they found little."""
BATCH = 256
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0

FIRST_RETRY_SECONDS = 0.02
MOST_RETRIES = 9
"""Each pause is twice the one before. The last one is longer than the interval of the re-check
that every waiter does anyway."""
KEPT_WAITERS = 4096


class _LastVotes(NamedTuple):
    """What the last votes on a waiter's claim showed."""

    holder: bytes
    """Digest of the owner that holds a majority; empty if none is visible."""
    wakeups: int
    """The wake-up count of the name when this holder was first seen."""
    retries: int
    """Retries since then; ``MOST_RETRIES`` if the waiter can rely on the next wake-up."""


class RetrySchedule:
    """Polling schedule for waiters that can't rely on the next wake-up.

    One node publishes a release before the other nodes have applied it, so a woken waiter may
    still see the previous holder. A failed attempt of another client is never published at all.
    In both cases no further wake-up comes. So a waiter that sees no majority holder, or that was
    woken and still sees the same holder, retries soon, with exponential back-off. Any other waiter
    waits for the next wake-up.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last: dict[str, _LastVotes] = {}

    def adjust(self, owner: str, ballot: Ballot, answer: Busy, wakeups: int) -> Busy:
        """Return the answer, with an earlier retry if the waiter can't rely on a wake-up.
        ``wakeups`` is the wake-up count of the name before the votes were requested."""
        seen = self._next(self._last.get(owner), ballot.holder(), wakeups)
        if len(self._last) >= KEPT_WAITERS:
            self._last.clear()
        self._last[owner] = seen
        if seen.retries >= MOST_RETRIES:
            return answer
        pause = FIRST_RETRY_SECONDS * 2**seen.retries * self._runtime.between(*RETRY_JITTER)
        if answer.retry_seconds is not None and answer.retry_seconds < pause:
            return answer
        return answer._replace(retry_seconds=pause)

    def _next(self, last: _LastVotes | None, holder: bytes, wakeups: int) -> _LastVotes:
        if last is None or holder != last.holder:
            return _LastVotes(holder, wakeups, MOST_RETRIES if holder else 0)
        if wakeups != last.wakeups:  # woken, and the holder is still the same
            return _LastVotes(holder, wakeups, 0)
        return last._replace(retries=min(MOST_RETRIES, last.retries + 1))

    def forget(self, owner: str) -> None:
        """Remove an owner that no longer waits."""
        self._last.pop(owner, None)


class RedlockBackend:
    """Grants claims by the votes of a majority of the nodes."""

    def __init__(self, store: RedlockStore, runtime: Runtime) -> None:
        self.store, self.runtime, self.display = store, runtime, store.display
        self._keys, self._scripts, self._nodes = store.keys, store.scripts, store.nodes
        self._quorum = store.options.quorum
        access, limit = store.options.access, store.connections
        self._broadcast: Any = (BlockingBroadcast if runtime.blocking else AsyncBroadcast)(
            access, self._nodes, limit
        )
        self._wakeups = self._new_wakeups()
        self._enough = enough_grants(self._quorum, slots=False)
        self._enough_slots = enough_grants(self._quorum, slots=True)
        self._ended = enough_ends(self._quorum)
        self._in_flight: dict[str, object] = {}
        """Owners with an attempt in progress."""
        self._won: dict[str, None] = {}
        """Owners that hold: if another attempt of theirs fails, nothing is undone."""
        self._unanswered: dict[str, None] = {}
        """Owners with an attempt whose copy may still arrive at some node."""
        self._seen: dict[str, int] = {}
        """Counters of names that are ahead of our clock."""
        self._yield_until: dict[str, float] = {}
        self._retries, self._reason_log = RetrySchedule(runtime), ReasonLog()
        self._channels: dict[str, str] = {}

    def _new_wakeups(self) -> NameWakeups:
        access, blocking = self.store.options.access, self.runtime.blocking
        return NameWakeups(
            Connector(access, self.store.connections, blocking=blocking), self._nodes
        )

    # ---- requests

    def _packed(self, script: Script, name: str, *words: str) -> bytes:
        start, _ = self._keys.start(script, name)
        return f"{start}{''.join(map(bulk, words))}".encode()

    async def _call(
        self,
        script: Script,
        packed: bytes,
        enough: Any,
        until: float | None = None,
        keep_for: Collection[int] = (),
    ) -> Round:
        in_full = script.in_full
        request = RoundRequest([packed], lambda at: in_full(packed), enough, keep_for=keep_for)
        round_: Round = await self._broadcast.call(request, until)
        return round_

    # ---- acquire

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        if join and self._yield_until and self._yields(claim.name):
            return Busy(0, self.runtime.between(*YIELD_RETRY_SECONDS))
        mark = object()
        if self._in_flight.setdefault(claim.owner, mark) is not mark:
            # Another thread attempts the same claim: the end of one must not undo the other.
            return Busy(0, self.runtime.between(*SPLIT_VOTE_SECONDS))
        try:
            return await self._acquire(claim, join, until)
        except (Incompatible, BackendUnavailable) as error:
            # The replies of some nodes; others may have granted the claim.
            if isinstance(error, Incompatible) or error.final:
                with suppress(HoldfastError):
                    await self.abandon(claim)
            raise
        finally:
            self._in_flight.pop(claim.owner, None)

    async def _acquire(self, claim: Claim, join: bool, until: float | None = None) -> Grant | Busy:
        answer = await self._attempt(claim, join, until)
        if isinstance(answer, Grant):
            self._won[claim.owner] = None
            _drop_oldest(self._won)
            self._retries.forget(claim.owner)
            self._wakeups.leave(self.channel(claim.name), _subscription_key(claim.owner))
        return answer

    async def _attempt(self, claim: Claim, join: bool, until: float | None) -> Grant | Busy:
        for _ in range(SPLIT_TRIES):
            wakeups: int = self._wakeups.wakeup_count(self.channel(claim.name)) if join else 0
            ballot = await self._election(claim, join, until)
            verdict = ballot.verdict()
            if verdict is not None:
                if verdict.token is not None:
                    return _grant(claim, verdict.token, verdict.slots)
                grant = await self._raise(claim, verdict, ballot.sent, until)
                if grant is not None:
                    return grant
            elif not ballot.split():
                answer = busy_answer(ballot, claim, self.display, self.runtime)
                return self._retries.adjust(claim.owner, ballot, answer, wakeups)
            await self.runtime.sleep(self.runtime.between(*SPLIT_VOTE_SECONDS))
        return Busy(0, self.runtime.between(*SPLIT_VOTE_SECONDS))

    async def _election(self, claim: Claim, join: bool, until: float | None) -> Ballot:
        """Return the votes on a claim. If the nodes chose different slots, vote a second time."""
        if claim.mode is not Mode.SLOTS:
            return await self._vote(claim, join, "-", until)
        start = f"@{random.randrange(claim.limit)}"
        ballot = await self._vote(claim, join, start, until)
        choice = "" if ballot.verdict() else choose_slots(ballot, claim)
        if not choice:
            return ballot
        return await self._vote(claim, join, choice, until)

    async def _vote(self, claim: Claim, join: bool, choice: str, until: float | None) -> Ballot:
        script = self._scripts.grant
        sent = self.store.next_stamp()
        proposal = max(sent, self._seen.get(claim.name, 0) + 1) if self._seen else sent
        max_ttl = milliseconds(self.store.options.max_ttl)
        _, mode, weight, limit, ttl, owner, label = claim
        shape = f"{_MODES[mode]} {weight} {limit} {int(join)} {max_ttl} {choice}"
        words = (owner, label, str(sent), str(milliseconds(ttl)), str(proposal), shape)
        packed = self._packed(script, claim.name, *words)

        ballot = Ballot((), self._quorum)

        def undo(answers: list[Any]) -> tuple[bytes, list[int]] | None:
            """Undo the grants of a minority, on the same connections, after the request."""
            nonlocal ballot
            ballot = Ballot(answers, self._quorum, sent)
            if ballot.verdict() is not None or owner in self._won:
                return None
            return self._undo_command(claim, sent, "-"), ballot.may_hold()

        enough = self._enough if choice == "-" else self._enough_slots
        request = RoundRequest([packed], lambda at: script.in_full(packed), enough, None, undo)
        before = self.store.reached.pop(owner, ())  # unknown while the request is under way
        round_: Round = await self._broadcast.call(request, until)
        self.store.reached[owner] = {*before, *round_.reached()}
        _drop_oldest(self.store.reached)
        self._remember(claim.name, ballot, sent)
        if may_arrive_late(round_, ballot):
            self._unanswered[owner] = None
            _drop_oldest(self._unanswered)
        if ballot.answered < self._quorum:
            check_round(round_.answers, self._quorum, self.display, claim.name)
            raise self._nodes.unavailable(round_.answers)
        return ballot

    def _undo_command(self, claim: Claim, sent: int, channel: str) -> bytes:
        return self._packed(self._scripts.undo, claim.name, claim.owner, str(sent), channel)

    def _remember(self, name: str, ballot: Ballot, sent: int) -> None:
        """Note a counter that is ahead of our clock: the next proposal must be above it."""
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
        """Run the second round: a quorum granted under several tokens; raise all to the highest.
        Return ``None`` if fewer nodes than a quorum confirm it."""
        assert verdict.raise_to is not None
        script, raised = self._scripts.raises, verdict.raised
        packed = self._packed(script, claim.name, claim.owner, str(verdict.raise_to))
        nodes = range(len(self._nodes.members))

        def undo(answers: list[Any]) -> tuple[bytes, Sequence[int]] | None:
            confirmed = acknowledged_count(answers) + len(raised)
            if confirmed >= self._quorum or claim.owner in self._won:
                return None
            return self._undo_command(claim, sent, self.channel(claim.name)), nodes

        only = [index for index in nodes if index not in raised]
        enough = enough_acks(self._quorum, len(raised))
        request = RoundRequest([packed], lambda at: script.in_full(packed), enough, only, undo)
        round_: Round = await self._broadcast.call(request, until)
        if acknowledged_count(round_.answers) + len(raised) < self._quorum:
            return None
        return _grant(claim, verdict.raise_to, verdict.slots)

    # ---- wait

    def channel(self, name: str) -> str:
        """Return the pub/sub channel on which releases of the name are published."""
        channel = self._channels.get(name)
        if channel is None:
            if len(self._channels) >= KEPT_NAMES:
                self._channels.clear()
            digest = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
            channel = self._channels[name] = self._keys.channel(digest[:20])
        return channel

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        self._reason_log.tell(claim, busy)
        await self._wakeups.wait(self.channel(claim.name), _subscription_key(claim.owner), until)

    def nudge(self, claim: Claim) -> None:
        self._wakeups.wake(_subscription_key(claim.owner))

    def _yields(self, name: str) -> bool:
        """Whether this backend has just released the name while other clients wait for it."""
        until = self._yield_until.pop(name, 0.0)
        return self.runtime.now() < until

    # ---- release

    async def release(self, grant: Grant) -> bool:
        was_ours, subscribed = await self._release(grant, self._ended)
        if subscribed:
            if len(self._yield_until) >= KEPT_NAMES:
                self._yield_until.clear()
            self._yield_until[grant.claim.name] = self.runtime.now() + YIELD_SECONDS
        return was_ours

    async def _release(self, grant: Grant, enough: Any) -> tuple[bool, bool]:
        """Return whether the hold was still ours, and whether other clients wait for the name."""
        claim, script = grant.claim, self._scripts.release
        self._won.pop(claim.owner, None)
        channel = self.channel(claim.name)
        late = int(self._unanswered.pop(claim.owner, 0) is None)
        shape = f"{_MODES[claim.mode]} {','.join(map(str, grant.slots)) or '-'} {late}"
        packed = self._packed(script, claim.name, claim.owner, str(grant.token), channel, shape)
        round_ = await self._call(script, packed, enough, keep_for=self._nodes_with(claim.owner))
        ones = zeros = others = 0
        for index, answer in enumerate(round_.answers):
            if type(answer) is list and type(answer[0]) is int:
                subscribed, was = divmod(answer[0], 4)
                ones += was == HELD
                # A request that was sent twice may have ended the hold the first time.
                zeros += was == OVER and index not in round_.resent
                others = max(others, subscribed - self._wakeups.listens(channel, index))
        check_round(round_.answers, self._quorum, self.display, claim.name)
        if answered_count(round_.answers) < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        # A node that does not know the hold has granted no other: it is no sign of a loss.
        lost = zeros > len(self._nodes.members) - self._quorum
        return ones >= self._quorum or not lost, others > 0

    def _nodes_with(self, owner: str) -> Collection[int]:
        """Return the nodes that may have a hold of this owner, which is about to be ended."""
        return self.store.reached.pop(owner, None) or range(len(self._nodes.members))

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        """Release, then attempt: two round trips. If other clients wait, the attempt is left out:
        there is no queue, and a busy client would otherwise keep the name to itself."""
        mark = object()
        alone = self._in_flight.setdefault(claim.owner, mark) is mark
        try:
            was_ours, subscribed = await self._release(grant, wait_for_all)
            if alone and not subscribed:
                with suppress(BackendUnavailable):  # the waiter attempts again by itself
                    return was_ours, await self._acquire(claim, join=True)
        finally:
            if alone:
                self._in_flight.pop(claim.owner, None)
        return was_ours, Busy(0, self.runtime.between(*SPLIT_VOTE_SECONDS))

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        self._won.pop(grant.claim.owner, None)
        self._unanswered.pop(grant.claim.owner, None)
        return ()  # a hold ends with its ttl, whatever becomes of its client

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        """Without a majority the hold is lost: no other taker can have one, either."""
        for _ in range(SPLIT_TRIES):
            token = max(self.store.next_stamp(), grant.token, self._seen.get(claim.name, 0)) + 1
            transfer, unseen = await self._transfer(grant, claim, token, until)
            if transfer.taken >= self._quorum:
                self._won[claim.owner] = None
                _drop_oldest(self._won)
                return _grant(claim, token, transfer.slots)
            if transfer.taken + transfer.behind + unseen < self._quorum:
                await self.abandon(claim, until=until)
                return None
            self._seen[claim.name] = max(transfer.highest, self._seen.get(claim.name, 0))
        raise BackendUnavailable(f"{self.display}: too few nodes gave {claim.name!r} to its taker")

    async def _transfer(
        self, grant: Grant, claim: Claim, token: int, until: float
    ) -> tuple[Transfer, int]:
        """The votes on a take-over, and how many nodes did not answer."""
        script, old = self._scripts.take_over, grant.claim.owner
        ttl, sent = str(milliseconds(claim.ttl)), str(self.store.next_stamp())
        words = (old, str(grant.token), claim.owner, claim.label, ttl, sent, str(token))
        packed = self._packed(script, claim.name, *words)
        round_ = await self._call(script, packed, enough_transfers(self._quorum), until)
        check_round(round_.answers, self._quorum, self.display, claim.name)
        answered = answered_count(round_.answers)
        if answered < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        return Transfer(round_.answers), len(self._nodes.members) - answered

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        script, channel = self._scripts.abandon, self.channel(claim.name)
        self._won.pop(claim.owner, None)
        self._unanswered.pop(claim.owner, None)
        self._retries.forget(claim.owner)
        self.store.leave(channel, _subscription_key(claim.owner), self)
        # After every attempt of the claim, and above any token that it may have.
        sent = str(max(self.store.next_stamp(), self._seen.get(claim.name, 0) + 1))
        packed = self._packed(script, claim.name, claim.owner, sent, channel)
        keep_for = self._nodes_with(claim.owner)
        round_ = await self._call(
            script, packed, self._quorum_answered, until=until, keep_for=keep_for
        )
        check_round(round_.answers, self._quorum, self.display, claim.name)
        if answered_count(round_.answers) < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        if acknowledged_count(round_.answers):
            await self._publish_release(channel, round_.answers)

    async def _publish_release(self, channel: str, answers: list[Any]) -> None:
        """Publish the end of a hold on the nodes that had no vote in it: waiters of other clients
        may be subscribed there."""
        others = [index for index, answer in enumerate(answers) if answer != [1]]
        if others:
            command = pack("PUBLISH", channel, len(self._nodes.members))
            request = RoundRequest([command], lambda at: command, wait_for_all, others)
            await self._broadcast.post(request)

    def _quorum_answered(self, answers: list[Any]) -> bool:
        return answered_count(answers) >= self._quorum

    # ---- renew

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        # The expiry is never shortened. A quorum has answered before all nodes have the request; on
        # a slow node a late request would undo an extend that was sent after it.
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for at in range(0, len(grants), BATCH):
            batch = grants[at : at + BATCH]
            await self._renew(batch, until, lost, unknown)
        writers = [waiting.claim for waiting in waits if waiting.claim.mode is Mode.EXCLUSIVE]
        if writers:
            await self._renew_intents(writers, until)
        return Renewal(lost, unknown)

    async def _renew(
        self,
        grants: Sequence[Grant],
        until: float,
        lost: dict[str, str],
        unknown: dict[str, str],
    ) -> None:
        script = self._scripts.renew
        commands = [self._renew_command(grant) for grant in grants]
        request = RoundRequest(commands, lambda at: script.in_full(commands[at]), self._all_renewed)
        for grant in grants:
            self.store.reached.pop(grant.claim.owner, None)  # from now on it may be on all nodes
        round_: Round = await self._broadcast.call(request, until)
        answers = [answer for answer in round_.answers if type(answer) is list]
        most_lost = len(self._nodes.members) - self._quorum
        for at, grant in enumerate(grants):
            replies = [answer[at] for answer in answers]
            owner = grant.claim.owner
            if replies.count(1) >= self._quorum:
                continue
            if replies.count(0) > most_lost:
                lost[owner] = "it ran out or was broken, and most nodes no longer have it"
            else:
                held = replies.count(1)
                cause = self._nodes.unavailable(round_.answers)
                unknown[owner] = f"{held} nodes renewed it; {cause}"

    def _all_renewed(self, answers: list[Any]) -> bool:
        whole = [answer for answer in answers if type(answer) is list]
        if len(whole) < self._quorum:
            return False
        return all(votes.count(1) >= self._quorum for votes in zip(*whole, strict=True))

    def _renew_command(self, grant: Grant) -> bytes:
        claim, script = grant.claim, self._scripts.renew
        slots = ",".join(map(str, grant.slots)) or "-"
        shape = f"{_MODES[claim.mode]} {claim.limit} {slots}"
        # Rounded down: a node must not keep the hold longer than its holder counts on.
        ttl = str(max(1, int(claim.ttl * 1000)))
        words = (claim.owner, claim.label, ttl, str(grant.token), shape)
        return self._packed(script, claim.name, *words)

    async def _renew_intents(self, claims: Sequence[Claim], until: float) -> None:
        """Renew the intents of waiting writers, which keep new readers out. No reply is needed."""
        script = self._scripts.intend
        for at in range(0, len(claims), BATCH):
            batch = claims[at : at + BATCH]
            commands = [self._packed(script, claim.name, claim.owner) for claim in batch]
            in_full = [script.in_full(command) for command in commands]
            request = RoundRequest(commands, in_full.__getitem__, wait_for_all)
            await self._broadcast.post(request, until)

    async def initialise(self) -> str:
        """Mark the data of all nodes as complete: loss protection then does not delay grants.
        Raises ``BackendUnavailable`` if one node does not confirm it."""
        script = self._scripts.begin
        packed = self._packed(script, "")
        request = RoundRequest(
            [packed],
            lambda at: script.in_full(packed),
            wait_for_all,
            straggler=OPERATOR_STRAGGLER_SECONDS,
        )
        round_: Round = await self._broadcast.call(request)
        marked = [
            node.address
            for node, answer in zip(self._nodes.members, round_.answers, strict=True)
            if type(answer) is list and type(answer[0]) is bytes
        ]
        if len(marked) < len(self._nodes.members):
            done = ", ".join(map(str, marked)) or "none"
            raise BackendUnavailable(
                f"marked as new: {done}; {self._nodes.unavailable(round_.answers)}"
            )
        return f"{self.display}: {len(marked)} nodes are marked as new"

    # ---- inspect

    async def look(self, name: str) -> LockInfo:
        (replies,) = await self._replies([name])
        return read_lock_info(name, replies, self._nodes)

    async def _lock_infos(self, names: Sequence[str], node: int) -> list[LockInfo]:
        """Return what a majority holds of each name, for names whose first node with an entry is
        ``node``. A name that can't be read is returned with a notice."""
        infos = []
        for name, replies in zip(names, await self._replies(names), strict=True):
            if next((i for i, r in replies.items() if has_entry(r)), None) != node:
                continue
            try:
                info = read_lock_info(name, replies, self._nodes)
            except Incompatible as error:
                why = f"what is stored under this name can't be read: {error}"
                info = LockInfo(name, 0, (), (), why)
            if info.holders or info.notice:
                infos.append(info)
        return infos

    async def _replies(self, names: Sequence[str]) -> list[dict[int, Any]]:
        """Return the reply of each node about each name."""
        if not names:
            return []
        script = self._scripts.look
        commands = [self._packed(script, name, str(LOOK_CAP)) for name in names]
        request = RoundRequest(commands, lambda at: script.in_full(commands[at]), wait_for_all)
        round_: Round = await self._broadcast.call(request)
        if sum(type(answer) is list for answer in round_.answers) < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        return [
            {
                index: answer[at]
                for index, answer in enumerate(round_.answers)
                if type(answer) is list
            }
            for at in range(len(names))
        ]

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """Return one page of names. The cursor is ``node.scan.name``; names up to ``name`` of that
        SCAN step have been returned. A name on several nodes is returned with the first node."""
        node, scan, after = read_cursor(cursor)
        total = len(self._nodes.members)
        for _ in range(SCAN_ROUNDS):
            if node >= total:
                return Page([], None)
            following, names = await self._scan(node, prefix, scan, limit)
            fresh = [name for name in sorted(set(names)) if name > after]
            used = await self._lock_infos(fresh, node)
            if len(used) > limit:
                return Page(used[:limit], f"{node}.{scan}.{used[limit - 1].name}")
            after, scan = "", following
            if scan == "0":
                node += 1
            if used:
                return Page(used, None if node >= total else f"{node}.{scan}.")
        return Page([], f"{node}.{scan}.")

    async def _scan(self, node: int, prefix: str, scan: str, limit: int) -> tuple[str, list[str]]:
        amount = max(10, min(limit, 1000))
        command = pack("SCAN", scan, "MATCH", self._keys.pattern(prefix), "COUNT", amount)
        request = RoundRequest([command], lambda at: command, wait_for_all, [node])
        round_: Round = await self._broadcast.call(request)
        answer = round_.answers[node]
        if type(answer) is not list:
            return "0", []  # the node is down: what a majority holds is on another node too
        if isinstance(answer[0], RedisRefused):
            raise refusal(answer[0], str(self._nodes.members[node].address), prefix)
        return read_scan(answer[0], self._keys, str(self._nodes.members[node].address))

    async def revoke(self, name: str) -> list[int]:
        script = self._scripts.revoke
        packed = self._packed(script, name, self.channel(name))
        request = RoundRequest([packed], lambda at: script.in_full(packed), wait_for_all)
        round_: Round = await self._broadcast.call(request)
        check_round(round_.answers, self._quorum, self.display, name)
        if answered_count(round_.answers) < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        tokens: dict[bytes, list[int]] = {}
        answers = [a[0] for a in round_.answers if type(a) is list and type(a[0]) is list]
        for rows in answers:
            for row in rows:
                if type(row) is list and [type(word) for word in row] == [bytes, int]:
                    tokens.setdefault(row[0], []).append(row[1])
        unseen = len(self._nodes.members) - len(answers)
        held = [votes for votes in tokens.values() if len(votes) + unseen >= self._quorum]
        return sorted(max(votes, key=lambda t: (votes.count(t), t)) for votes in held)

    async def probe(self) -> list[Finding]:
        commands = [INFO, pack("HMGET", RUN_KEY, "mark", "marked")]
        request = RoundRequest(
            commands,
            commands.__getitem__,
            wait_for_all,
            straggler=OPERATOR_STRAGGLER_SECONDS,
        )
        round_: Round = await self._broadcast.call(request)
        if sum(type(answer) is list for answer in round_.answers) < self._quorum:
            raise self._nodes.unavailable(round_.answers)
        return findings(self._nodes, round_.answers, self.store.options, self.runtime.wall())

    # ---- not supported

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        raise Unsupported(f"{self.display} keeps no records")

    async def recall(self, name: str) -> Record | None:
        raise Unsupported(f"{self.display} keeps no records")

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        # Without WATCH in the guarantees this only paces the polling of the caller.
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    # ---- close

    def forget(self) -> None:
        self._broadcast.forget()
        self._wakeups.forget()
        self._wakeups = self._new_wakeups()

    async def close(self) -> None:
        self._wakeups.close()
        await self._broadcast.close()


def may_arrive_late(round_: Round, ballot: Ballot) -> bool:
    """Whether a copy of an attempt may arrive at a node after a later request of its owner: it was
    sent twice, its connection broke, or it failed without the answer of that node."""
    broke = any(isinstance(answer, Exception) for answer in round_.answers)
    failed = ballot.verdict() is None and ballot.answered < ballot.total
    return bool(round_.resent) or broke or failed


def _drop_oldest(kept: dict[str, Any]) -> None:
    """Keep the newest ``KEPT_NAMES`` entries."""
    while len(kept) > KEPT_NAMES:
        with suppress(RuntimeError, StopIteration):  # another thread changes it, too
            kept.pop(next(iter(kept)), None)


def _grant(claim: Claim, token: int, slots: str) -> Grant:
    numbers = () if slots == "-" else tuple(sorted(int(slot) for slot in slots.split(",")))
    return Grant(claim, token, numbers)


def _subscription_key(owner: str) -> str:
    """Return the key under which a waiter is woken. It is a digest: the owner stays secret."""
    return hashlib.sha1(owner.encode(), usedforsecurity=False).hexdigest()[:16]


class RedlockStore:
    """The independent masters that a URL lists."""

    shortest_ttl = 0.05
    whole_seconds = False
    guarantees = frozenset(Guarantee) - {Guarantee.FIFO, Guarantee.RECORDS, Guarantee.WATCH}

    def __init__(self, options: RedlockOptions, settings: Settings) -> None:
        self.options, self.display = options, options.display
        self.connections = settings.connections
        self.longest_ttl = options.max_ttl if options.loss_protection else LONGEST_TTL_SECONDS
        self.keys = RedlockKeys(settings.namespace)
        self.scripts = RedlockScripts(loss_protection=options.loss_protection)
        self.nodes = Nodes(
            options.nodes,
            display=self.display,
            allow_eviction=options.allow_eviction,
            prepare=self.scripts.prepare,
        )
        self._backends: weakref.WeakSet[RedlockBackend] = weakref.WeakSet()
        self._stamp = 0
        self.reached: dict[str, set[int]] = {}
        """The nodes that got an attempt of an owner, and so may have its hold. An owner that is
        missing here may be on all of them."""

    def backend(self, runtime: Runtime) -> RedlockBackend:
        backend = RedlockBackend(self, runtime)
        self._backends.add(backend)
        return backend

    def next_stamp(self) -> int:
        """Return the send time of a request in µs, higher than any before in this client."""
        self._stamp = stamp = max(int(wall() * 1_000_000), self._stamp + 1)
        return stamp

    def leave(self, channel: str, key: str, caller: RedlockBackend) -> None:
        """End the wait of a claim in every backend of the client that may know it. An asyncio
        backend is changed only by its own calls, so others than the caller are left out."""
        for backend in list(self._backends):
            if backend is caller or backend.runtime.blocking:
                backend._wakeups.leave(channel, key)
