"""Sends each request to a store and to the reference, and compares the answers.

The reference is ``core.queue.NameState``, one per name. What a store may choose (the number of a
token, which free slots) is checked and taken over. What the store shows by ``look`` after each
request must be what the reference has. A store with direct grants makes a waiter a holder at the
moment at which the reference reserves the name for it: that is taken over, too.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from holdfast.claim import Busy, Claim, Grant, Holder, LockInfo, Mode, write_label
from holdfast.core.admit import Share
from holdfast.core.contract import (
    GRACE_SECONDS,
    STALE_SECONDS,
    Backend,
    Exchanging,
    Guarantee,
    Settings,
    Store,
    Waiting,
)
from holdfast.core.drive import run_now
from holdfast.core.queue import MICROS, HeldClaim, NameState
from holdfast.errors import BackendUnavailable, LimitMismatch
from holdfast.io.clock import now as boot_seconds
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing import loops
from holdfast.testing.admission.differences import Difference, difference_of
from holdfast.testing.guarantees import guarantees_of
from holdfast.testing.harness import Harness
from holdfast.testing.rules import Flavour
from holdfast.url import open_store

__all__ = ["ComparedClaim", "Comparison", "Surroundings", "VirtualClock"]

T = TypeVar("T")

CLIENTS = 3
LONG = 30.0
"""A ttl that does not end during a comparison."""
KEEP_SECONDS = 86_400.0
SOON = 10.0
"""How long a wake-up may take on a busy machine."""
SETTLED_SECONDS = 0.25 * GRACE_SECONDS
"""A reservation that is older is taken before the next request: else it might run out."""
CERTAIN_SECONDS = 0.7 * GRACE_SECONDS
"""A reservation that is older may have run out in the store, by another clock."""
LONGEST_SECONDS = 0.6 * STALE_SECONDS
"""After this time a waiter may be stale in the store."""
SLOW_SECONDS = 2.0
"""A request that takes longer says little about times."""
TOLERANCE_SECONDS = 2 * SLOW_SECONDS
"""Less than the differences between the ttls that are compared."""


class VirtualClock:
    """The clock of a store that runs in this process, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 1e9 + self.seconds


class _Client:
    """One process: a store object, a backend, and the blocking backend of its renewer."""

    def __init__(self, store: Store, flavour: Flavour, runner: asyncio.Runner) -> None:
        self._runner, self._blocking = runner, flavour is Flavour.BLOCKING
        runtime = BlockingRuntime() if self._blocking else AsyncioRuntime()
        self.backend: Backend = store.backend(runtime)
        self.renewer: Backend = store.backend(BlockingRuntime())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_now(work) if self._blocking else self._runner.run(work)

    def close(self) -> None:
        run_now(self.renewer.close())
        self.run(self.backend.close())


class Surroundings:
    """A running store, and the clients that all comparisons on it share."""

    def __init__(
        self,
        harness: Harness,
        flavour: Flavour,
        *,
        difference: Difference | None = None,
        stores: Sequence[Store] = (),
        clock: VirtualClock | None = None,
    ) -> None:
        """``difference`` is for a store that is not in the table. ``stores`` (one per client) and
        ``clock`` are for a store under virtual time."""
        self.harness, self.flavour = harness, flavour
        self.guarantees = guarantees_of(harness)
        self.difference = difference or difference_of(harness)
        self.clock = clock
        self.now = boot_seconds if clock is None else clock.now
        self.compared = 0
        """How many requests were compared: all but those in which the machine stood still."""
        self._runner = loops.new_runner()
        self._settings = Settings(namespace=f"t{secrets.token_hex(6)}")
        self.clients = [self._client(store) for store in stores] or [
            self.new_client() for _ in range(CLIENTS)
        ]

    @property
    def virtual(self) -> bool:
        return self.clock is not None

    def _client(self, store: Store) -> _Client:
        return _Client(store, self.flavour, self._runner)

    def new_client(self) -> _Client:
        return self._client(open_store(self.harness.url, self._settings))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._runner.close()


class ComparedClaim:
    """A claim, the client that makes it, and the last answers to it."""

    def __init__(self, claim: Claim, client: _Client, join: bool) -> None:
        self.claim, self.client, self.join = claim, client, join
        self.grant: Grant | None = None
        self.busy: Busy | None = None

    def __repr__(self) -> str:
        return f"{self.claim.label} {self.claim.mode} of {self.claim.name!r}"


class Comparison:
    """One sequence of requests, with names of its own."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.at = surroundings
        self._names: dict[str, NameState[None]] = {}
        self.claims: dict[str, ComparedClaim] = {}
        """All claims, by the note that the store shows."""
        self._waiting: dict[str, ComparedClaim] = {}
        """Where claims do not wait in order: those that wait, by owner."""
        self._tokens: dict[str, list[tuple[HeldClaim, int]]] = {}
        self._records: dict[str, tuple[str, int]] = {}
        self._direct: set[str] = set()
        """Owners that have a direct grant and have not attempted since: it ends sooner."""
        self._prefix = secrets.token_hex(4)
        self._began = self.at.now()
        self._sent, self._settling = self._now(), False
        self.void = False
        """Whether the machine stood still for so long that nothing can be concluded any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes what is left."""
        for one in self.claims.values():
            one.client.run(one.client.backend.abandon(one.claim))

    def claim(
        self,
        name: str,
        mode: Mode = Mode.EXCLUSIVE,
        *,
        client: int,
        weight: int = 1,
        limit: int = 0,
        ttl: float = LONG,
        join: bool = True,
    ) -> ComparedClaim:
        """A claim with an owner of its own, which no request has named yet."""
        note = str(len(self.claims))
        label = write_label("host", 1, "thread", note)
        name, owner = f"{self._prefix} {name}", secrets.token_hex(16)
        claim = Claim(name, mode, weight, limit, ttl, owner, label)
        clients = self.at.clients
        self.claims[note] = one = ComparedClaim(claim, clients[client % len(clients)], join)
        return one

    def name_of(self, one: ComparedClaim) -> str:
        """The name as it was given to ``claim``."""
        return one.claim.name.removeprefix(f"{self._prefix} ")

    def attempt(self, one: ComparedClaim, *, by_renewer: bool = False) -> None:
        """An attempt; the first one, a retry, or one that arrives late or twice. The renewer's
        backend attempts for holders only: a waiter is woken where it attempted."""
        client, claim = one.client, one.claim
        if not self._is_held(one):
            one.grant, by_renewer = None, False
        with self._request(claim.name) as now:
            if by_renewer:
                found = _answer(run_now, client.renewer.attempt(claim, join=one.join))
            else:
                found = _answer(client.run, client.backend.attempt(claim, join=one.join))
            if not self._is_void():
                self._compare_attempt(one, found, now)

    def exchange(self, one: ComparedClaim, following: ComparedClaim) -> None:
        """The release of a hold and an attempt of another claim of the same client and name."""
        client, name = one.client, one.claim.name
        if one.grant is None or not isinstance(client.backend, Exchanging):
            return
        with self._request(name) as now:
            found = _answer(client.run, client.backend.exchange(one.grant, following.claim))
            if self._is_void():
                return
            state = copy.deepcopy(self._state(name))
            ours = state.release(one.claim.owner, now)
            if isinstance(found, LimitMismatch):
                assert not ours, f"{one} was ended by an exchange that was refused"
                self._compare_attempt(following, found, now)
                return
            assert found[0] == ours, f"exchange of {one}: {found[0]}, not {ours}"
            self._names[name] = state
            known = following.busy is not None and self.at.difference.exchange_wakes
            if not known or isinstance(found[1], Grant):
                self._compare_attempt(following, found[1], now)

    def release(self, one: ComparedClaim, *, by_renewer: bool = False) -> None:
        """The release of a hold, or of one that is over."""
        if one.grant is None:
            return
        client, name = one.client, one.claim.name
        with self._request(name) as now:
            if by_renewer:
                found = run_now(client.renewer.release(one.grant))
            else:
                found = client.run(client.backend.release(one.grant))
            if not self._is_void():
                ours = self._state(name).release(one.claim.owner, now)
                assert found == ours, f"release of {one}: {found}, not {ours}"

    def renew(self, chosen: Iterable[ComparedClaim], behind: int = 0) -> None:
        """The renewal of all holds and the refresh of all waiters among these, by client."""
        for client in self.at.clients:
            ours = [one for one in chosen if one.client is client]
            if ours:
                self._renew(client, ours, behind)

    def _renew(self, client: _Client, ours: list[ComparedClaim], behind: int) -> None:
        grants = [one.grant for one in ours if one.grant is not None]
        waits = [Waiting(one.claim, behind) for one in ours if one.grant is None and one.busy]
        with self._request(*{one.claim.name for one in ours}) as now:
            until = boot_seconds() + SOON
            found = run_now(client.renewer.renew(grants, waits, until=until))
            if self._is_void():
                return
            lost = {g.claim.owner for g in grants if not self._extend(g.claim, now)}
            assert set(found.lost) == lost, f"lost are {self._shown(found.lost)}"
            assert not found.unknown
            for claim, _ in waits:
                told = claim.owner in found.forgotten
                self._compare_refresh(claim, behind, told, now)

    def _extend(self, claim: Claim, now: int, shorten: bool = False) -> bool:
        state = self._state(claim.name)
        return state.extend(claim.owner, claim.ttl, now, shorten=shorten)

    def _compare_refresh(self, claim: Claim, behind: int, told: bool, now: int) -> None:
        state = self._state(claim.name)
        kept = state.refresh(claim.owner, behind, now)
        if self.at.difference.in_order and not state.is_held_by(claim.owner, now):
            assert told != kept, f"{self._shown([claim.owner])} is forgotten: {told}"

    def extend(self, one: ComparedClaim, ttl: float, *, shorten: bool) -> None:
        """``extend`` of a hold to another ttl."""
        if one.grant is None:
            return
        claim = one.claim._replace(ttl=ttl)
        grant = one.grant._replace(claim=claim)
        with self._request(claim.name) as now:
            until = boot_seconds() + SOON
            renewing = one.client.backend.renew([grant], [], until=until, shorten=shorten)
            found = one.client.run(renewing)
            if not self._is_void():
                ours = self._extend(claim, now, shorten and self.at.harness.shortens)
                lost = set() if ours else {claim.owner}
                assert (set(found.lost), found.unknown) == (lost, {}), f"extend of {one}: {found}"

    def abandon(self, one: ComparedClaim, *, by_renewer: bool = False) -> None:
        """Leaves no trace of a claim, whether it holds, waits, or is over."""
        client, claim = one.client, one.claim
        with self._request(claim.name) as now:
            if by_renewer:
                run_now(client.renewer.abandon(claim))
            else:
                client.run(client.backend.abandon(claim))
            self._state(claim.name).abandon(claim.owner, now)
            self._waiting.pop(claim.owner, None)
            one.grant = one.busy = None

    def revoke(self, name: str, client: int) -> None:
        """Ends all holds of a name."""
        asked = self.at.clients[client % len(self.at.clients)]
        name = f"{self._prefix} {name}"
        with self._request(name) as now:
            found = asked.run(asked.backend.revoke(name))
            if not self._is_void():
                self._compare_revoked(self._state(name), found, now)

    def _compare_revoked(self, state: NameState[None], found: list[int], now: int) -> None:
        turns = [queued.claim.owner for queued in state.queue.values() if queued.reserved]
        tokens = state.revoke(now)
        more = len(found) - len(tokens)
        if not self.at.difference.turns_are_holds or more == 0:
            assert sorted(found) == sorted(tokens), f"revoked {found}, not {tokens}"
            return
        assert set(tokens) <= set(found), f"revoked {found}, not {tokens}"
        assert more <= len(turns), f"revoked {found}, not {tokens}"
        self.void = more < len(turns)  # which of them have lost their turn is not told
        for owner in turns:
            state.abandon(owner, now)

    def record(self, one: ComparedClaim, value: str) -> None:
        """Stores a value under a hold, or under one that is over; then reads it back."""
        if one.grant is None or Guarantee.RECORDS not in self.at.guarantees:
            return
        client, name = one.client, one.claim.name
        with self._request(name) as now:
            ours = self._state(name).is_held_by(one.claim.owner, now)
            try:
                found = client.run(client.backend.record(one.grant, value, KEEP_SECONDS))
            except BackendUnavailable:
                found = False
                if ours or not self.at.difference.ends_with_connection:
                    raise
            if self._is_void():
                return
            assert found == ours, f"record under {one}: {found}, not {ours}"
            if found:
                self._records[name] = value, one.grant.token
        recalled = client.run(client.backend.recall(name))
        stored = None if recalled is None else (recalled.value, recalled.token)
        assert stored == self._records.get(name), f"recalled {stored}"

    def come(self, one: ComparedClaim) -> None:
        """A waiter whose turn it is: its wake-up must have come, and its attempt is granted."""
        if not self.has_turn(one) or one.busy is None:
            return
        if self._is_woken_later(one):
            return
        if self.at.virtual:  # an end by itself wakes nobody
            self.attempt(one)
            return
        client, began = one.client, boot_seconds()
        brought = client.run(client.backend.wait(one.claim, one.busy, began + 3 * SOON))
        assert boot_seconds() - began < SOON, f"{one} was not woken"
        self.attempt(one)
        if brought is not None and one.grant is not None:
            assert brought.token == one.grant.token, f"{one} was woken with another token"

    def _is_woken_later(self, one: ComparedClaim) -> bool:
        """Whether the store wakes it only after the waiter in front of it has come."""
        first = next(iter(self._state(one.claim.name).queue), one.claim.owner)
        return self.at.difference.woken_in_turn and first != one.claim.owner

    def has_turn(self, one: ComparedClaim) -> bool:
        """Whether the name is reserved for a waiter, or was granted to it directly."""
        queued = self._state(one.claim.name).queue.get(one.claim.owner)
        if queued is None:
            return one.busy is not None and one.grant is None and self._is_held(one)
        return queued.reserved > 0

    def waits(self, one: ComparedClaim) -> bool:
        """Whether a claim is in the queue."""
        owner = one.claim.owner
        return owner in self._state(one.claim.name).queue or owner in self._waiting

    def settle(self, older: float = SETTLED_SECONDS) -> None:
        """Lets the waiters attempt whose reservations would soon run out."""
        self._settling = True
        for one in list(self.claims.values()):
            queued = self._state(one.claim.name).queue.get(one.claim.owner)
            if queued is None or not queued.reserved or self.at.virtual or self.void:
                continue
            if self._reservation_age(queued.reserved) >= older:
                self.attempt(one)
        self._settling = False

    def advance(self, seconds: float) -> None:
        """Lets virtual time pass."""
        assert self.at.clock is not None
        self.at.clock.seconds += seconds
        for name in self._names:
            self.check(name)

    def expire(self, name: str, mode: Mode, weight: int = 1, limit: int = 0) -> None:
        """A client takes the name and is not heard of again: its hold ends by itself."""
        self.settle(0.0)
        dead = self.at.new_client()
        ttl = self.at.harness.ttl
        one = self.claim(name, mode, client=0, weight=weight, limit=limit, ttl=ttl, join=False)
        one.client = dead
        try:
            began = boot_seconds()
            self.attempt(one)
            if one.grant is not None and not self.void:
                self._wait_for_end(one, began + ttl)
        finally:
            dead.close()
            one.client = self.at.clients[0]

    def _wait_for_end(self, one: ComparedClaim, ends: float) -> None:
        name, client = one.claim.name, self.at.clients[0]
        latest = ends + 1.0 + self.at.harness.extra_recovery + SOON
        while any(holder.note == _note(one) for holder in self._look(name, client).holders):
            assert boot_seconds() < latest, f"{one} has not ended"
            time.sleep(0.02)
        assert boot_seconds() >= ends - 0.05, f"{one} ended early"
        self._state(name).abandon(one.claim.owner, self._now())
        one.grant = None
        self.check(name)
        self.settle(0.0)  # an end by itself wakes nobody

    def check(self, name: str) -> None:
        """Compares what the store shows of a name with the reference."""
        client, sent = self.at.clients[len(self.claims) % len(self.at.clients)], self._now()
        info = self._look(name, client)
        if not self._is_void():
            self._compare_info(name, info, sent)

    def _look(self, name: str, client: _Client) -> LockInfo:
        return client.run(client.backend.look(name))

    def _now(self) -> int:
        return int(self.at.now() * MICROS)

    def _state(self, name: str) -> NameState[None]:
        if name not in self._names:
            self._names[name] = NameState(name, "the reference")
        return self._names[name]

    def _is_held(self, one: ComparedClaim) -> bool:
        return self._state(one.claim.name).is_held_by(one.claim.owner, self._now())

    def _reservation_age(self, until: int) -> float:
        return GRACE_SECONDS - (until - self._now()) / MICROS

    @contextmanager
    def _request(self, *names: str) -> Iterator[int]:
        """One request: gives the time before it was sent, and looks at its names after it."""
        if not self._settling:
            self.settle()
        self._sent = self._now()
        yield self._sent
        self.at.compared += not self.void
        for name in names:
            self._forget_ended(name)
            if not self.void:
                self.check(name)

    def _is_void(self) -> bool:
        """Whether too much time has passed to know what has run out in the store."""
        if self.at.virtual or self.void:
            return self.void
        reserved = [q.reserved for s in self._names.values() for q in s.queue.values()]
        aged = any(self._reservation_age(until) > CERTAIN_SECONDS for until in reserved if until)
        slow = self._now() - self._sent > SLOW_SECONDS * MICROS
        self.void = aged or slow or self.at.now() - self._began > LONGEST_SECONDS
        return self.void

    def _compare_attempt(
        self, one: ComparedClaim, found: Grant | Busy | LimitMismatch, now: int
    ) -> None:
        name, owner = one.claim.name, one.claim.owner
        before, in_order = self._state(name), self.at.difference.in_order
        state, again = copy.deepcopy(before), before.is_held_by(owner, now)
        join = one.join and in_order
        try:
            expected: Grant | Busy | LimitMismatch = state.attempt(
                one.claim, now, join=join, wall=before.token + 1
            )
        except LimitMismatch as error:
            expected = error
        waiters = [each for each in self._waiting.values() if each.claim.name == name]
        if not waiters or isinstance(found, Grant):  # the server may still be waking one of them
            told = f"attempt of {one}: {_told(found)}, not {_told(expected)}"
            assert type(found) is type(expected), told
        if isinstance(found, Grant) or not isinstance(expected, Grant):
            self._names[name] = state
        if isinstance(found, Grant):
            self._granted(one, found, again=again)
        elif isinstance(found, Busy):
            self._refused(one, found, expected)

    def _granted(self, one: ComparedClaim, found: Grant, *, again: bool) -> None:
        one.grant, one.busy = found, None
        self._waiting.pop(one.claim.owner, None)
        self._direct.discard(one.claim.owner)
        self._take_over(one, found.token, found.slots, again=again)

    def _refused(
        self, one: ComparedClaim, found: Busy, expected: Grant | Busy | LimitMismatch
    ) -> None:
        one.busy = found
        if not self.at.difference.in_order:
            if one.join:
                self._waiting[one.claim.owner] = one
        elif isinstance(expected, Busy):
            self._compare_place(one, found.place)
            assert found.retry_seconds is None or found.retry_seconds >= 0

    def _compare_place(self, one: ComparedClaim, place: int) -> None:
        """A waiter in front whose turn it is may count as a holder."""
        state, ahead, least = self._state(one.claim.name), 0, 0
        for queued in state.queue.values():
            if queued.claim.owner == one.claim.owner:
                break
            ahead, least = ahead + 1, least + (not queued.reserved)
        exact = self.at.difference.exact_places
        assert least <= place, f"{one} has place {place}, not {least} to {ahead}"
        assert place <= ahead or not exact, f"{one} has place {place}, not {least} to {ahead}"

    def _take_over(
        self, one: ComparedClaim, token: int, slots: tuple[int, ...], *, again: bool
    ) -> None:
        """Checks the choices of the store, and makes them those of the reference."""
        state = self._state(one.claim.name)
        held = state.holds[one.claim.owner]
        if again:
            assert (held.token, held.slots) == (token, slots), f"{one} has another token or slots"
            return
        self._check_slots(one, slots, [h for h in state.holds.values() if h is not held])
        earlier = self._tokens.setdefault(one.claim.name, [])
        for other, its_token in earlier:
            if one.claim.mode is Mode.EXCLUSIVE or other.claim.mode is Mode.EXCLUSIVE:
                assert token > its_token, f"{one} has token {token} after {its_token}"
            elif one.claim.mode is Mode.SLOTS and set(slots) & set(other.slots):
                assert token > its_token, f"{one} has token {token} after {its_token} of its slot"
        held.token, held.slots = token, slots
        held.share = Share(one.claim.mode, one.claim.weight, slots)
        state.token = max(state.token, token)
        earlier.append((held, token))

    def _check_slots(
        self, one: ComparedClaim, slots: tuple[int, ...], others: list[HeldClaim]
    ) -> None:
        claim = one.claim
        count = claim.weight if claim.mode is Mode.SLOTS else 0
        assert len(set(slots)) == len(slots) == count, f"{one} has slots {slots}"
        assert all(0 <= slot < claim.limit for slot in slots), f"{one} has slots {slots}"
        for other in others:
            assert not set(slots) & set(other.slots), f"{one} has slots of another: {slots}"

    def _forget_ended(self, name: str) -> None:
        for one in self.claims.values():
            if one.claim.name == name and one.claim.owner in self._waiting and self._is_held(one):
                del self._waiting[one.claim.owner]

    def _compare_info(self, name: str, info: LockInfo, sent: int) -> None:
        shown = {holder.note: holder for holder in info.holders}
        assert len(shown) == len(info.holders), f"a claim holds twice: {info}"
        early: set[str] = set()
        for holder in info.holders:
            one = self.claims[holder.note]
            if self._is_held(one):
                continue
            if self.at.difference.turns_are_holds and self.has_turn(one):
                early.add(holder.note)
                del shown[holder.note]
            else:
                self._take_over_direct_grant(one, holder, sent)
        state = self._state(name)
        held = (h for h in state.holds.values() if state.is_held_by(h.claim.owner, sent))
        expected = {_note_of(h.claim): h for h in held}
        assert set(shown) == set(expected), f"{name!r} is held by {set(shown)}, not {set(expected)}"
        for note, its_hold in expected.items():
            self._compare_holder(shown[note], its_hold, sent)
        if self.at.difference.in_order:
            waiters = [(waiter.note, waiter.behind) for waiter in info.waiters]
            queue = [(waiter.note, waiter.behind) for waiter in state.info(sent).waiters]
            queue = [each for each in queue if each[0] not in early]
            assert waiters == queue, f"{waiters} wait for {name!r}, not {queue}"
        limits = {each.claim.limit for each in expected.values()}
        assert not limits or {info.limit} == limits, f"the limit of {name!r} is {info.limit}"

    def _take_over_direct_grant(self, one: ComparedClaim, holder: Holder, sent: int) -> None:
        state, owner = self._state(one.claim.name), one.claim.owner
        queued = state.queue.get(owner)
        waits = owner in self._waiting if queued is None else queued.reserved
        assert waits, f"{one} is shown as a holder"
        answer = state.attempt(one.claim, sent, join=False, wall=state.token + 1)
        assert isinstance(answer, Grant), f"{one} holds beside others: {answer}"
        self._waiting.pop(owner, None)
        self._direct.add(owner)
        self._take_over(one, holder.token, holder.slots, again=False)

    def _compare_holder(self, holder: Holder, held: HeldClaim, sent: int) -> None:
        shown = holder.mode, holder.token, holder.slots
        expected = held.claim.mode, held.token, held.slots
        assert shown == expected, f"the holder is {shown}, not {expected}"
        wrong = abs(holder.remaining - (held.ends - sent) / MICROS)
        if self.at.virtual:
            assert wrong < 0.001, f"it ends in {holder.remaining} s, {wrong} s from its end"
        elif self.at.difference.own_ends and held.claim.owner not in self._direct:
            assert wrong < TOLERANCE_SECONDS, f"it ends in {holder.remaining} s, {wrong} s wrong"

    def _shown(self, owners: Iterable[str]) -> list[ComparedClaim]:
        return [one for one in self.claims.values() if one.claim.owner in set(owners)]


def _note_of(claim: Claim) -> str:
    return claim.label.split('"')[-2]


def _note(one: ComparedClaim) -> str:
    return _note_of(one.claim)


def _told(answer: Grant | Busy | LimitMismatch) -> str:
    return "granted" if isinstance(answer, Grant) else str(answer)


def _answer(run: Any, work: Coroutine[Any, Any, T]) -> T | LimitMismatch:
    try:
        answer: T = run(work)
    except LimitMismatch as error:
        return error
    return answer
