"""MySQL lease rows: a name is one row, changed only by who has seen its newest version.

Taking a name that nobody uses is one statement, and so is freeing it while nobody waits. Where
others wait, and all want the name alone, joining them, leaving and coming are one request each.
All else reads the row, decides by the rules of ``mysql_row``, and writes it (``mysql_change``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.acquire import LEAST_REQUEST_SECONDS
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.io.clock import now
from holdfast.stores.mysql.connect import Store
from holdfast.stores.mysql.connection import Refused, Wire, checked
from holdfast.stores.mysql.inspect import clock_finding, findings
from holdfast.stores.mysql.protocol import Result, Row
from holdfast.stores.mysql.row import State, empty_state, parse_state, read_record, read_state
from holdfast.stores.mysql.sql import IF_WRITTEN, LeaseStatements, place_of, subscription_lock
from holdfast.stores.mysql.wakeups import SLEEP_SECONDS, Hanger, ask_for, make_listening, told_by
from holdfast.url import Url

__all__ = ["LeaseBackend", "LeaseStore"]

T = TypeVar("T")
BATCH = 200
PURGE_EVERY = 1000
"""After so many attempts twice that number of names is looked at, and the idle ones dropped."""
LOST = "it ran out or was broken, and is no longer stored"
CHANGES = 100
"""So often a row may be changed by others while we decide."""
REMEMBERED = 4096
CLASHES = frozenset({1020, 1205, 1213})
"""The server gave way to another transaction; nothing was changed."""
UNREADABLE = frozenset({1264, 1292, 1366, 1690, 1916})
"""What is stored is not what a statement can count with; nothing was changed. The row tells."""
LONGEST_SECONDS = 5.0
"""Nothing rests on the order: who has waited for so long asks all the same."""


class LeaseStore(Store):
    """Lease rows: a hold ends by itself with its ttl."""

    mode = "lease"
    guarantees = frozenset(Guarantee) - {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}
    longest_ttl = 10 * 365 * 86400.0

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = LeaseStatements(self._dialler.schema, settings.namespace)

    def backend(self, runtime: Runtime) -> LeaseBackend:
        dialler, seconds = self._dialler, self._settings.request_seconds
        hanger = Hanger(dialler.greet_to_stay, lambda: dialler.galera, self._statements, seconds)
        return LeaseBackend(runtime, self._wire(runtime), hanger, self._statements, self.display)


class LeaseBackend:
    """Admits claims in the rows of one namespace."""

    def __init__(
        self, runtime: Runtime, wire: Wire, hanger: Hanger, statements: LeaseStatements,
        display: str,
    ) -> None:  # fmt: skip
        self.runtime, self.wire, self.statements, self.display = runtime, wire, statements, display
        self.listening, self._hanger = make_listening(runtime, hanger), hanger
        self._crowded: dict[str, None] = {}
        """Names that were not alone when last seen: asking for them as free is in vain."""
        self._leaving = make_leaving(runtime)
        self._standing: dict[str, str] = {}
        """Who joined a line, with the subscription that it told of: its next attempt is for when
        it is the first, or to tell of another one."""
        self._until_purge = PURGE_EVERY
        self._purged_to = b""

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self._until_purge -= 1
        subscription, state = self.listening.subscription, None
        if claim.mode is Mode.EXCLUSIVE:
            answer = await self._alone(claim, join, subscription, until)
            if not isinstance(answer, State):
                return answer
            state = answer

        def decide(state: State) -> Grant | Busy:
            return state.attempt(claim, join, subscription)

        told = await self._change(claim.name, decide, claim.owner, until, state=state)
        if join and claim.mode is Mode.EXCLUSIVE and isinstance(told, Busy):
            self._stand(claim.owner, subscription)
        return told

    async def _alone(
        self, claim: Claim, join: bool, subscription: str, until: float | None
    ) -> Grant | Busy | State:
        """The short ways of one who wants the name alone; where the row is damaged, its state says
        what it is."""
        try:
            return await self._come_alone(claim, join, subscription, until)
        except Refused as error:
            if error.code not in UNREADABLE:
                raise
        return await self._read(claim.name, claim.owner, until)

    async def _come_alone(
        self, claim: Claim, join: bool, subscription: str, until: float | None
    ) -> Grant | Busy | State:
        """The ways of one who wants the name alone, each a single request: the likely one first.
        Where none of them fits, the row."""
        name, owner = claim.name, claim.owner
        if name in self._leaving.names:
            await self._leaving.wait(name, until)
        crowded = name in self._crowded
        if not crowded and (taken := await self._take(claim, until)):
            return taken
        told = self._standing.pop(owner, None)
        if told is not None:
            return await self._again(claim, subscription, told == subscription, until)
        if join and (busy := await self._line_up("join", claim, subscription, until)):
            return busy
        if crowded and (taken := await self._take(claim, until)):
            self._crowded.pop(name, None)
            return taken
        return await self._read(name, owner, until)

    async def _again(
        self, claim: Claim, subscription: str, told: bool, until: float | None
    ) -> Grant | Busy | State:
        """The ways of one who stands in line: most likely it is its turn, if its subscription was
        told."""
        if not told and (busy := await self._line_up("tell", claim, subscription, until)):
            return busy
        (came,) = await self._ask(self.statements.come_first(claim), claim.owner, until)
        if came.affected:
            return Grant(claim, came.insert_id)
        if told and (busy := await self._line_up("tell", claim, subscription, until)):
            return busy
        return await self._read(claim.name, claim.owner, until)

    async def _line_up(
        self, how: Literal["join", "tell"], claim: Claim, subscription: str, until: float | None
    ) -> Busy | None:
        """Stands in line from now on, or still does; nothing where it may not have to wait."""
        make = self.statements.join if how == "join" else self.statements.tell
        (waits,) = await self._ask(make(claim, subscription), claim.owner, until)
        if not waits.affected:
            return None
        self._crowd(claim.name)
        self._stand(claim.owner, subscription)
        return Busy(*place_of(waits.insert_id), ref=subscription)

    async def _take(self, claim: Claim, until: float | None) -> Grant | None:
        (taken,) = await self._ask(self.statements.take(claim), claim.owner, until)
        return Grant(claim, taken.insert_id) if taken.affected else None

    def _stand(self, owner: str, subscription: str) -> None:
        if len(self._standing) >= REMEMBERED:  # of waiters that the renewer has undone
            self._standing.clear()
        self._standing[owner] = subscription

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        look = partial(self._is_called, claim.name, busy.ref, until)
        await self.listening.wait(claim.owner, claim.name, until, busy.ref, look)

    async def _is_called(self, name: str, subscription: str, until: float) -> bool:
        by = max(until, self.runtime.now() + LEAST_REQUEST_SECONDS)
        (called,) = await self._ask(self.statements.listen(subscription, [name]), until=by)
        return bool(called.rows)

    def nudge(self, claim: Claim) -> None:
        self.listening.wake(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)

        self._standing.pop(claim.owner, None)
        if grant.claim.mode is claim.mode is Mode.EXCLUSIVE:
            sql = self.statements.hand_on(grant.claim, claim)
            (handed,) = await self._ask(sql, claim.owner)
            if handed.affected:
                return True, Grant(claim, handed.insert_id)

        def decide(state: State) -> tuple[bool, Grant | Busy]:
            ours = state.release(grant.claim.owner)
            # The subscription that hangs now: the waiter itself may have told of it while we were
            # asking.
            return ours, state.attempt(claim, True, self.listening.subscription)

        ours, told = await self._change(claim.name, decide, claim.owner)
        if claim.mode is Mode.EXCLUSIVE and isinstance(told, Busy):
            self._stand(claim.owner, told.ref)
        return ours, told

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        others = [g.claim for g in grants if g.claim.mode is not Mode.EXCLUSIVE]
        lost = await self._renew_alone(grants, until, shorten)
        gone, unknown = await self._renew_crowds(others, waits, until, shorten)
        lost |= {claim.owner: LOST for claim in others if claim.owner in gone}
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(w.claim.owner for w in waits) & gone)

    async def _renew_alone(
        self, grants: Sequence[Grant], until: float, shorten: bool
    ) -> dict[str, str]:
        """Renews the holds that are alone; answers which are lost."""
        by_ttl: dict[float, list[Claim]] = {}
        for grant in grants:
            if grant.claim.mode is Mode.EXCLUSIVE:
                by_ttl.setdefault(grant.claim.ttl, []).append(grant.claim)
        lost: dict[str, str] = {}
        for ttl, claims in by_ttl.items():
            for start in range(0, len(claims), BATCH):
                batch = claims[start : start + BATCH]
                extend = self.statements.extend(batch, ttl, shorten)
                (kept,) = await self._ask(extend, until=until)
                if kept.affected < len(batch):
                    (held,) = await self._ask(self.statements.held(batch), until=until)
                    ours = {row[0] for row in held.rows}
                    lost |= {c.owner: LOST for c in batch if c.owner.encode() not in ours}
        return lost

    async def _renew_crowds(
        self, claims: Sequence[Claim], waits: Sequence[Waiting], until: float, shorten: bool
    ) -> tuple[set[str], dict[str, str]]:
        """Renews holds and refreshes waiters in crowds; answers which are no longer there, and of
        which that can't be told, with the cause."""
        gone: set[str] = set()
        unknown: dict[str, str] = {}
        names = sorted({claim.name for claim in claims} | {w.claim.name for w in waits})
        for start in range(0, len(names), BATCH):
            batch = set(names[start : start + BATCH])
            due = _Due(
                [claim for claim in claims if claim.name in batch],
                [wait for wait in waits if wait.claim.name in batch],
                shorten,
            )
            states, damaged = await self._read_many(batch, until)
            for name in batch - set(states) - set(damaged):
                gone |= due.owners(name)
            for name, why in damaged.items():
                unknown |= dict.fromkeys(due.owners(name), why)
            gone |= await self._renew_states(states, due, until)
        return gone, unknown

    async def _renew_states(self, states: dict[str, State], due: _Due, until: float) -> set[str]:
        answers = {name: due.apply(state) for name, state in states.items()}
        for state in states.values():
            state.settle()
        # In the order of their names, in which all lock them: no two wait for each other.
        plain = [s for _, s in sorted(states.items()) if s.changed and not s.wakes]
        written: list[Result] = []
        if plain:
            batch = _together([self.statements.write(state) for state in plain])
            written = (await self._ask(batch, until=until))[-len(plain) - 1 :]
        kept = {s.name for s, result in zip(plain, written, strict=False) if result.affected}
        for name, state in states.items():
            if state.changed and name not in kept:  # somebody is to be called, or was faster
                answers[name] = await self._change(name, due.apply, until=until)
        return set[str]().union(*answers.values())

    async def _read_many(
        self, names: Iterable[str], until: float
    ) -> tuple[dict[str, State], dict[str, str]]:
        """The states by name; and of those that can't be read, why."""
        (result,) = await self._ask(self.statements.read_many(names), until=until)
        states: dict[str, State] = {}
        damaged: dict[str, str] = {}
        for row in result.rows:
            name = (row[8] or b"").decode()  # one that we have asked for
            try:
                states[name] = read_state(row, name, self.display)
            except Incompatible as error:
                damaged[name] = str(error)
        return states, damaged

    async def release(self, grant: Grant) -> bool:
        claim, state = grant.claim, None
        if claim.mode is Mode.EXCLUSIVE:
            state = await self._leave(claim)
            if state is None:
                await self._purge()
                return True

        def decide(state: State) -> bool:
            return state.release(claim.owner)

        ours = await self._change(claim.name, decide, claim.owner, state=state)
        await self._purge()
        return ours

    async def _leave(self, claim: Claim) -> State | None:
        """The ways out of one who has the name alone, each a single request: the likely one first.
        Where none of them fits, the row."""
        name = claim.name
        try:
            self._leaving.names[name] = None
            crowded = name in self._crowded
            if not crowded and await self._free(claim):
                return None
            if await self._call_first(claim):
                return None
            if crowded and await self._free(claim):
                self._crowded.pop(name, None)
                return None
            return await self._read(name, claim.owner)
        except Refused as error:
            if error.code not in UNREADABLE:
                raise
            return await self._read(name, claim.owner)
        finally:
            self._leaving.left(name)

    async def _free(self, claim: Claim) -> bool:
        (freed,) = await self._ask(self.statements.free(claim), claim.owner)
        return freed.affected > 0

    async def _call_first(self, claim: Claim) -> bool:
        looks = self._hanger.looks
        results = await self._request(self.statements.call_first(claim, not looks), 0, claim.owner)
        if not results[0].affected:
            return False
        self._crowd(claim.name)
        if len(results) == 1 and not looks:
            await self._skip_absent(claim.name)
        return True

    async def _skip_absent(self, name: str) -> None:
        """Somebody was called whose subscription is gone: it is skipped at once, and the next
        called."""
        state = await self._read(name)
        subscriptions = list(
            {entry.subscription for entry in state.crowd if entry.reserved and entry.subscription}
        )
        if subscriptions:
            hangs = b", ".join(
                b"IS_USED_LOCK(%s)" % subscription_lock(subscription)
                for subscription in subscriptions
            )
            (found,) = await self._ask(b"SELECT " + hangs)
            gone = {
                subscription
                for subscription, hung in zip(subscriptions, found.rows[0], strict=True)
                if hung is None
            }
            await self._change(name, lambda state: state.skip(gone))

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self._standing.pop(claim.owner, None)
        await self._change(claim.name, lambda state: state.abandon(claim.owner), claim.owner, until)
        self.listening.forget_ring(claim.owner)

    async def revoke(self, name: str) -> list[int]:
        return await self._change(name, State.clear)

    async def look(self, name: str) -> LockInfo:
        state = await self._read(name)
        subscriptions = [
            entry.subscription for entry in state.crowd if entry.subscription and not entry.token
        ]
        why = await self._uncalled(sorted(set(subscriptions))) if subscriptions else ""
        return state.standing()._replace(notice=f"waiters are not woken: {why}" if why else "")

    async def _uncalled(self, subscriptions: Sequence[str]) -> str:
        """Why calls don't arrive at these subscriptions; empty if they do."""
        if self._hanger.looks:
            return self._hanger.finding.detail
        why = told_by(await self.wire.request(ask_for(subscriptions)))
        return f"{why}; calls are found by a look every {SLEEP_SECONDS:g} s" if why else ""

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        sql = self.statements.survey(prefix, cursor or "", limit)
        rows = (await self._ask(sql))[0].rows
        standings = [_standing(row, self.display) for row in rows]
        used = [s for s in standings if s.holders or s.waiters or s.notice]
        last = (rows[-1][8] or b"").decode(errors="surrogateescape") if rows else ""
        return Page(used, last if len(rows) == limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        claim = grant.claim
        then = self.statements.record(claim.name, value, grant.token, keep_seconds)
        try:
            await self._change(claim.name, lambda state: _must_hold(state, claim), then=then)
        except _NotHeld:
            return False
        return True

    async def recall(self, name: str) -> Record | None:
        for row in (await self._ask(self.statements.recall(name)))[0].rows:
            return read_record(row, name, self.display)
        return None

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(0.5, 1.0))
        await self.runtime.sleep(max(0.0, pause))

    async def _purge(self, until: float | None = None) -> None:
        """A bounded step through the names, now and then."""
        if self._until_purge > 0:
            return
        self._until_purge = PURGE_EVERY
        batch = 2 * PURGE_EVERY
        (names,) = await self._ask(self.statements.last(self._purged_to, batch), until=until)
        last = (names.rows[-1][0] or b"") if names.rows else self._purged_to
        await self._ask(self.statements.purge(self._purged_to, last), until=until)
        self._purged_to = last if len(names.rows) == batch else b""
        await self.wire.request(self.statements.purge_transactions(), until=until)

    async def probe(self) -> list[Finding]:
        found, waiting = await findings(self._ask), self._hanger.finding
        if self._hanger.galera:
            found.append(await clock_finding(self._ask, self.runtime.wall))
        why = await self._uncalled(())
        return [*found, Finding("waiting", why, "warning") if why else waiting]

    def forget(self) -> None:
        self.wire.forget()
        self.listening.forget()
        self._leaving = make_leaving(self.runtime)

    async def close(self) -> None:
        self.listening.close()
        await self.wire.close()

    async def _ask(self, sql: bytes, owner: str = "", until: float | None = None) -> list[Result]:
        """One request; again where the server gave way to another."""
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    async def _step_back(self, times: int) -> bool:
        """Leaves the row to others for a moment, the longer the more often they were faster, so
        that a crowd of any size spreads out; whether it did. Four lose ten races in a row now and
        then, fifty often do: what doubles each time would keep the four waiting for nothing."""
        if times <= 2:
            return False
        await self.runtime.sleep(self.runtime.between(0.0, min(0.25, 0.0005 * times**2)))
        return True

    async def _change(
        self,
        name: str,
        decide: Callable[[State], T],
        owner: str = "",
        until: float | None = None,
        then: bytes = b"",
        state: State | None = None,
    ) -> T:
        """Reads the row, decides, and writes what has changed; again if others were faster."""
        state = await self._read(name, owner, until) if state is None else state
        for times in range(CHANGES):
            answer = decide(state)
            state.settle(owner)
            if not state.changed and not then:
                return answer
            fresh = await self._write(state, owner, until, then)
            if fresh is None:
                return answer
            state = fresh
            if await self._step_back(times):  # what was fresh before that is old by now
                state = await self._read(name, owner, until)
        raise BackendUnavailable(f"{self.display}: {name!r} keeps changing while it is asked for")

    async def _read(self, name: str, owner: str = "", until: float | None = None) -> State:
        (row,) = (await self._ask(self.statements.read(name), owner, until))[0].rows
        return self._state(name, row)

    def _state(self, name: str, row: tuple[bytes | None, ...]) -> State:
        if row[1] is None:
            return empty_state(name, int(row[0] or 0), self.display)
        return read_state(row, name, self.display)

    async def _write(
        self, state: State, owner: str, until: float | None, then: bytes
    ) -> State | None:
        """Writes a state; answers a newer one instead if there is one."""
        mine = [wake for wake in state.wakes if wake.subscription == self.listening.subscription]
        calls = [wake for wake in state.wakes if wake.subscription != self.listening.subscription]
        batch = [self.statements.write(state)]
        if then:
            batch = [b"BEGIN", *batch, IF_WRITTEN, then, b"COMMIT"]
        batch.append(self.statements.read(state.name))
        subscriptions = list(dict.fromkeys(wake.subscription for wake in calls))
        results = await self._send(batch, subscriptions, owner, until)
        if not results[1 if then else 0].affected:
            return self._state(state.name, results[len(batch) - 1].rows[0])
        self._note(state)
        for wake in mine:
            self.listening.wake(wake.owner)
        if results[len(batch) :]:
            await self._finish_calls(state.name, subscriptions, results[len(batch)], until)
        return None

    async def _send(
        self, batch: list[bytes], subscriptions: list[str], owner: str, until: float | None
    ) -> list[Result]:
        """One request. The calls come last in it: one that fails says that nobody is there."""
        least = len(batch)
        if subscriptions and not self._hanger.looks:
            found = b", ".join(
                b"IS_USED_LOCK(%s)" % subscription_lock(subscription)
                for subscription in subscriptions
            )
            batch = [*batch, b"SELECT " + found, _stir(subscriptions[0])]
        return await self._request(b"; ".join(batch), least, owner, until)

    async def _request(
        self, sql: bytes, least: int, owner: str = "", until: float | None = None
    ) -> list[Result]:
        """One request, of which what comes behind ``least`` results may fail."""
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if len(reply.results) > least:
                return reply.results
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    def _note(self, state: State) -> None:
        if state.crowd:
            self._crowd(state.name)
        else:
            self._crowded.pop(state.name, None)

    def _crowd(self, name: str) -> None:
        self._crowded[name] = None
        if len(self._crowded) > REMEMBERED:
            self._crowded.pop(next(iter(self._crowded)), None)

    async def _finish_calls(
        self, name: str, subscriptions: list[str], found: Result, until: float | None
    ) -> None:
        """Stirs the other subscriptions, and skips those whose sessions have ended."""
        gone = {
            subscription
            for subscription, number in zip(subscriptions, found.rows[0], strict=True)
            if number is None
        }
        for subscription in subscriptions[1:]:
            if subscription not in gone:
                await self.wire.request(_stir(subscription), until=until)
        if gone:
            await self._change(name, lambda state: state.skip(gone), until=until)


def _standing(row: Row, store: str) -> LockInfo:
    """What a row of a survey shows; of one that can't be read, that it is there."""
    stored = row[8] or b""
    name = stored.decode(errors="backslashreplace")
    try:
        stored.decode()
        return parse_state(row, name, store).standing()
    except ValueError as error:
        why = "its name is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        notice = f"what is stored under this name can't be read: {why}"
        return LockInfo(name, 0, (), (), notice=notice)


class _NotHeld(Exception):
    """Nothing is to be recorded under a hold that is gone."""


def _must_hold(state: State, claim: Claim) -> None:
    if not state.holds(claim.owner):
        raise _NotHeld
    state.changed = True


class _Due:
    """What a batch renews and refreshes, by name."""

    def __init__(
        self, claims: Sequence[Claim], waits: Sequence[Waiting], shorten: bool = False
    ) -> None:
        self._shorten = shorten
        self._claims: dict[str, list[Claim]] = {}
        self._waits: dict[str, list[Waiting]] = {}
        for claim in claims:
            self._claims.setdefault(claim.name, []).append(claim)
        for wait in waits:
            self._waits.setdefault(wait.claim.name, []).append(wait)

    def owners(self, name: str) -> set[str]:
        return {claim.owner for claim in self._claims.get(name, ())} | {
            wait.claim.owner for wait in self._waits.get(name, ())
        }

    def apply(self, state: State) -> set[str]:
        """Renews what is still there; answers whose is not."""
        claims = self._claims.get(state.name, ())
        shorten = self._shorten
        kept = {c.owner for c in claims if state.extend(c.owner, c.ttl, shorten=shorten)}
        for claim, behind in self._waits.get(state.name, ()):
            if state.refresh(claim.owner, behind):
                kept.add(claim.owner)
        return self.owners(state.name) - kept


def _together(statements: list[bytes]) -> bytes:
    """One transaction, so that one write to the disk serves all."""
    if len(statements) == 1:
        return statements[0] + b"; DO 0"
    return b"; ".join([b"BEGIN", *statements, b"COMMIT"])


def _stir(subscription: str) -> bytes:
    return b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(subscription)


class Leaving(Protocol):
    """Waits that end when a name has been left."""

    names: dict[str, None]
    """Whoever leaves puts the name in here before it asks, and says ``left`` afterwards."""

    def left(self, name: str) -> None: ...
    async def wait(self, name: str, until: float | None) -> None: ...


def make_leaving(runtime: Runtime) -> Leaving:
    """By the world that it is for."""
    return BlockingLeaving() if runtime.blocking else AsyncLeaving()


class BlockingLeaving:
    """For threads."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting = 0
        self._mutex = threading.RLock()  # entered directly: the condition's own way can be torn
        self._changed = threading.Condition(self._mutex)

    def left(self, name: str) -> None:
        self.names.pop(name, None)
        if self._waiting:  # who is not counted yet looks at the names after that
            with self._mutex:
                self._changed.notify_all()

    async def wait(self, name: str, until: float | None) -> None:
        by = now() + LONGEST_SECONDS
        by = by if until is None else min(by, until)
        with self._mutex:
            self._waiting += 1
            try:
                while name in self.names and (left := by - now()) > 0:
                    self._changed.wait(left)
            finally:
                self._waiting -= 1


class AsyncLeaving:
    """For the tasks of one loop."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def left(self, name: str) -> None:
        self.names.pop(name, None)
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, name: str, until: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        left = LONGEST_SECONDS if until is None else min(LONGEST_SECONDS, until - now())
        await asyncio.wait([future], timeout=max(0.0, left))
