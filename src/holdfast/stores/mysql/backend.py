"""The lease backend of MySQL: all state of a name is one row, changed by compare-and-swap.

One statement takes a free name, and one frees a name that has no waiters. While all claims on a
name are exclusive, each of these is also a single request: join the queue, release to the first
waiter, take the name as the first waiter. Every other operation reads the row, decides by the
rules of ``row``, and writes the row back if its version has not changed (``_change``). That is two
requests, and no row stays locked while a client decides or hangs.

To wake a waiter, the request that frees the name marks the waiter's entry as called and kills the
sleep of the waiter's subscription (``wakeups``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol, TypeVar

from holdfast.claim import Busy, Claim, Grant, LockInfo, Mode, Record
from holdfast.core.acquire import LEAST_REQUEST_SECONDS
from holdfast.core.backoff import WATCH_POLL_SECONDS
from holdfast.core.contract import Finding, Guarantee, Page, Renewal, Runtime, Settings, Waiting
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.io.clock import now
from holdfast.stores._sql.purge import PURGE_EVERY, PURGED_NAMES, attempts_until_purge
from holdfast.stores.mysql.connect import Ask, MySqlDialler, MySqlStore
from holdfast.stores.mysql.connection import MySqlPool, MySqlRefused, checked
from holdfast.stores.mysql.inspect import clock_finding, findings
from holdfast.stores.mysql.protocol import MySqlReply, Result, Row
from holdfast.stores.mysql.row import RowState, empty_state, parse_state, read_record, read_state
from holdfast.stores.mysql.sql import (
    IF_WRITTEN,
    MySqlLeaseStatements,
    position_of,
    subscription_lock,
)
from holdfast.stores.mysql.wakeups import (
    SLEEP_SECONDS,
    MySqlWakeups,
    SubscriptionOpener,
    wakeup_check_request,
    wakeup_problem,
)
from holdfast.url import Url

__all__ = ["MySqlLeaseBackend", "MySqlLeaseStore"]

T = TypeVar("T")
BATCH = 200
PURGE_BATCH = 500
"""Most names in one request that deletes idle rows."""
LOST = "it ran out or was broken, and is no longer stored"
CHANGES = 100
"""Most retries of a compare-and-swap, or of a request that clashed with another transaction."""
REMEMBERED = 4096
"""Most names or owners kept in a hint. Hints only choose which request is tried first."""
CLASHES = frozenset({1020, 1205, 1213})
"""Error numbers of a statement that lost against another transaction and changed nothing."""
UNREADABLE = frozenset({1264, 1292, 1366, 1690, 1916})
"""Error numbers of a statement that could not compute with a damaged row. Nothing was changed;
reading the row gives the cause."""
BACKOFF_STEP_SECONDS = 0.0005
LONGEST_BACKOFF_SECONDS = 0.25
"""After n lost races the back-off is random, up to min(longest, n² steps)."""
RACES_BEFORE_BACKOFF = 2
LONGEST_IN_FLIGHT_SECONDS = 5.0
"""Longest wait for a release of the same client. Correctness does not depend on this order, so the
attempt is sent after the wait in any case."""


class MySqlLeaseStore(MySqlStore):
    """The store of lease rows: a hold ends when its ttl is over."""

    mode = "lease"
    guarantees = frozenset(Guarantee) - {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}
    longest_ttl = 10 * 365 * 86400.0

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = MySqlLeaseStatements(self._dialler.schema, settings.namespace)

    def backend(self, runtime: Runtime) -> MySqlLeaseBackend:
        dialler, seconds = self._dialler, self._settings.request_seconds
        opener = SubscriptionOpener(
            dialler.connect_long_lived, lambda: dialler.galera, self._statements, seconds
        )
        return MySqlLeaseBackend(runtime, self._pool(runtime), opener, self._statements, dialler)


class MySqlLeaseBackend:
    """Admits claims in the rows of one namespace."""

    def __init__(
        self,
        runtime: Runtime,
        pool: MySqlPool,
        opener: SubscriptionOpener,
        statements: MySqlLeaseStatements,
        dialler: MySqlDialler,
    ) -> None:
        self.runtime, self.pool, self.statements = runtime, pool, statements
        self.display, self._dialler = dialler.address.display, dialler
        self.wakeups, self._opener = MySqlWakeups(runtime, opener), opener
        self._contended: dict[str, None] = {}
        """Names that had waiters or shared holders when last seen: a hint that the request for a
        free name will fail."""
        self._in_flight = make_in_flight_releases(runtime)
        self._queued: dict[str, str] = {}
        """Owners that joined a queue, with the subscription stored in their entry: a hint for
        their next attempt."""
        self._until_purge = attempts_until_purge()

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self._until_purge -= 1
        subscription, state = self.wakeups.subscription, None
        if claim.mode is Mode.EXCLUSIVE:
            answer = await self._attempt_exclusive(claim, join, subscription, until)
            if not isinstance(answer, RowState):
                return answer
            state = answer

        def decide(state: RowState) -> Grant | Busy:
            return _attempt(state, claim, join, subscription)

        result = await self._change(claim.name, decide, claim.owner, until, state=state)
        if join and claim.mode is Mode.EXCLUSIVE and isinstance(result, Busy):
            self._note_queued(claim.owner, subscription)
        return result

    async def _attempt_exclusive(
        self, claim: Claim, join: bool, subscription: str, until: float | None
    ) -> Grant | Busy | RowState:
        """Tries the single requests for an exclusive claim. Returns the row's state if none of
        them fits; raises ``Incompatible`` if the row is damaged."""
        try:
            return await self._attempt_in_one_request(claim, join, subscription, until)
        except MySqlRefused as error:
            if error.code not in UNREADABLE:
                raise
        return await self._read(claim.name, claim.owner, until)

    async def _attempt_in_one_request(
        self, claim: Claim, join: bool, subscription: str, until: float | None
    ) -> Grant | Busy | RowState:
        """Tries the single requests for an exclusive claim, the most likely first. Returns the
        row's state if none of them fits."""
        name, owner = claim.name, claim.owner
        if name in self._in_flight.names:
            await self._in_flight.wait(name, until)
        contended = name in self._contended
        if not contended and (taken := await self._take(claim, until)):
            return taken
        stored = self._queued.pop(owner, None)
        if stored is not None:
            return await self._attempt_queued(claim, subscription, stored == subscription, until)
        if join and (busy := await self._enter_queue("join", claim, subscription, until)):
            return busy
        if contended and (taken := await self._take(claim, until)):
            self._contended.pop(name, None)
            return taken
        return await self._read(name, owner, until)

    async def _attempt_queued(
        self, claim: Claim, subscription: str, stored: bool, until: float | None
    ) -> Grant | Busy | RowState:
        """An attempt of a queued claim. If its entry has the current subscription (``stored``),
        the claim was most likely woken, so taking the name is tried first."""
        if not stored and (
            busy := await self._enter_queue("update_subscription", claim, subscription, until)
        ):
            return busy
        (taken,) = await self._execute(self.statements.take_as_first(claim), claim.owner, until)
        if taken.affected:
            return Grant(claim, taken.insert_id)
        if stored and (
            busy := await self._enter_queue("update_subscription", claim, subscription, until)
        ):
            return busy
        return await self._read(claim.name, claim.owner, until)

    async def _enter_queue(
        self,
        how: Literal["join", "update_subscription"],
        claim: Claim,
        subscription: str,
        until: float | None,
    ) -> Busy | None:
        """Appends an entry to the queue, or stores another subscription in the claim's entry.
        Returns None, and changes nothing, if the claim may not have to wait."""
        make = self.statements.join if how == "join" else self.statements.update_subscription
        (waits,) = await self._execute(make(claim, subscription), claim.owner, until)
        if not waits.affected:
            return None
        self._mark_contended(claim.name)
        self._note_queued(claim.owner, subscription)
        return Busy(*position_of(waits.insert_id), ref=subscription)

    async def _take(self, claim: Claim, until: float | None) -> Grant | None:
        (taken,) = await self._execute(self.statements.take(claim), claim.owner, until)
        return Grant(claim, taken.insert_id) if taken.affected else None

    def _note_queued(self, owner: str, subscription: str) -> None:
        if len(self._queued) >= REMEMBERED:  # owners that the renewer has abandoned stay in it
            self._queued.clear()
        self._queued[owner] = subscription

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        recheck = partial(self._is_reserved, claim.name, busy.ref, until)
        await self.wakeups.wait_for(claim.owner, claim.name, until, busy.ref, recheck)

    async def _is_reserved(self, name: str, subscription: str, until: float) -> bool:
        by = max(until, self.runtime.now() + LEAST_REQUEST_SECONDS)
        (found,) = await self._execute(self.statements.listen(subscription, [name]), until=by)
        return bool(found.rows)

    def nudge(self, claim: Claim) -> None:
        self.wakeups.wake(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)

        self._queued.pop(claim.owner, None)
        if grant.claim.mode is claim.mode is Mode.EXCLUSIVE:
            sql = self.statements.exchange(grant.claim, claim)
            (granted,) = await self._execute(sql, claim.owner)
            if granted.affected:
                return True, Grant(claim, granted.insert_id)

        def decide(state: RowState) -> tuple[bool, Grant | Busy]:
            owner, now = grant.claim.owner, state.now
            ours, answer = state.exchange(owner, claim, now, wall=now)
            # The subscription as it is now: the waiter itself may have stored it in its entry
            # while this request was under way.
            return ours, _subscribed(state, claim, answer, self.wakeups.subscription)

        ours, result = await self._change(claim.name, decide, claim.owner)
        if claim.mode is Mode.EXCLUSIVE and isinstance(result, Busy):
            self._note_queued(claim.owner, result.ref)
        return ours, result

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        others = [g.claim for g in grants if g.claim.mode is not Mode.EXCLUSIVE]
        lost = await self._renew_exclusive(grants, until, shorten)
        gone, unknown = await self._renew_entries(others, waits, until, shorten)
        lost |= {claim.owner: LOST for claim in others if claim.owner in gone}
        await self._purge(until)
        return Renewal(lost, unknown, frozenset(w.claim.owner for w in waits) & gone)

    async def _renew_exclusive(
        self, grants: Sequence[Grant], until: float, shorten: bool
    ) -> dict[str, str]:
        """Renews the exclusive holds. Returns the lost ones by owner, with the reason."""
        by_ttl: dict[float, list[Claim]] = {}
        for grant in grants:
            if grant.claim.mode is Mode.EXCLUSIVE:
                by_ttl.setdefault(grant.claim.ttl, []).append(grant.claim)
        lost: dict[str, str] = {}
        for ttl, claims in by_ttl.items():
            for start in range(0, len(claims), BATCH):
                batch = claims[start : start + BATCH]
                extend = self.statements.extend(batch, ttl, shorten)
                (kept,) = await self._execute(extend, until=until)
                if kept.affected < len(batch):
                    (held,) = await self._execute(self.statements.held(batch), until=until)
                    ours = {row[0] for row in held.rows}
                    lost |= {c.owner: LOST for c in batch if c.owner.encode() not in ours}
        return lost

    async def _renew_entries(
        self, claims: Sequence[Claim], waits: Sequence[Waiting], until: float, shorten: bool
    ) -> tuple[set[str], dict[str, str]]:
        """Renews shared and slot holds, and refreshes waiters. Returns the owners that are no
        longer stored, and the owners whose row can't be read, with the cause."""
        gone: set[str] = set()
        unknown: dict[str, str] = {}
        names = sorted({claim.name for claim in claims} | {w.claim.name for w in waits})
        for start in range(0, len(names), BATCH):
            batch = set(names[start : start + BATCH])
            due = _RenewalBatch(
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

    async def _renew_states(
        self, states: dict[str, RowState], due: _RenewalBatch, until: float
    ) -> set[str]:
        answers = {name: due.apply(state) for name, state in states.items()}
        # Every client locks rows in the order of their names, so two batches can't deadlock.
        plain = [s for _, s in sorted(states.items()) if s.changed and not s.woken_subscriptions]
        written: list[Result] = []
        if plain:
            batch = _in_one_transaction([self.statements.write(state) for state in plain])
            written = (await self._execute(batch, until=until))[-len(plain) - 1 :]
        kept = {s.name for s, result in zip(plain, written, strict=False) if result.affected}
        for name, state in states.items():
            if state.changed and name not in kept:  # it has waiters to wake, or the write lost
                answers[name] = await self._change(name, due.apply, until=until)
        return set[str]().union(*answers.values())

    async def _read_many(
        self, names: Iterable[str], until: float
    ) -> tuple[dict[str, RowState], dict[str, str]]:
        """Returns the states by name, and by name why a row can't be read."""
        (result,) = await self._execute(self.statements.read_many(names), until=until)
        states: dict[str, RowState] = {}
        damaged: dict[str, str] = {}
        for row in result.rows:
            name = (row[8] or b"").decode()  # valid UTF-8: it is one of ``names``
            try:
                states[name] = read_state(row, name, self.display)
            except Incompatible as error:
                damaged[name] = str(error)
        return states, damaged

    async def release(self, grant: Grant) -> bool:
        claim, state = grant.claim, None
        if claim.mode is Mode.EXCLUSIVE:
            state = await self._release_exclusive(claim)
            if state is None:
                await self._purge()
                return True

        def decide(state: RowState) -> bool:
            return state.release(claim.owner, state.now)

        ours = await self._change(claim.name, decide, claim.owner, state=state)
        await self._purge()
        return ours

    async def _release_exclusive(self, claim: Claim) -> RowState | None:
        """Tries the single requests that release an exclusive hold, the most likely first. Returns
        None if one of them released it, otherwise the row's state."""
        name = claim.name
        try:
            self._in_flight.names[name] = None
            contended = name in self._contended
            if not contended and await self._free(claim):
                return None
            if await self._release_to_first(claim):
                return None
            if contended and await self._free(claim):
                self._contended.pop(name, None)
                return None
            return await self._read(name, claim.owner)
        except MySqlRefused as error:
            if error.code not in UNREADABLE:
                raise
            return await self._read(name, claim.owner)
        finally:
            self._in_flight.finished(name)

    async def _free(self, claim: Claim) -> bool:
        (freed,) = await self._execute(self.statements.free(claim), claim.owner)
        return freed.affected > 0

    async def _release_to_first(self, claim: Claim) -> bool:
        polls = self._opener.polls
        results = await self._execute_at_least(
            self.statements.release_to_first(claim, not polls), 0, claim.owner
        )
        if not results[0].affected:
            return False
        self._mark_contended(claim.name)
        if len(results) == 1 and not polls:
            await self._skip_absent(claim.name)
        return True

    async def _skip_absent(self, name: str) -> None:
        """Removes waiters that were called and whose subscription has ended, and calls the next
        waiter. The killed session was not found, so there is at least one."""
        queue = (await self._read(name)).queue.values()
        subscriptions = list({queued.wake for queued in queue if queued.reserved and queued.wake})
        if subscriptions:
            sessions = b", ".join(
                b"IS_USED_LOCK(%s)" % subscription_lock(subscription)
                for subscription in subscriptions
            )
            (found,) = await self._execute(b"SELECT " + sessions)
            gone = {
                subscription
                for subscription, session in zip(subscriptions, found.rows[0], strict=True)
                if session is None
            }
            await self._change(name, lambda state: state.skip(gone, state.now))

    async def hand_over(self, grant: Grant, *, until: float) -> Sequence[str | int] | None:
        return ()  # a hold is a row, and ends with its ttl

    async def take_over(self, grant: Grant, claim: Claim, *, until: float) -> Grant | None:
        def decide(state: RowState) -> Grant | None:
            owner, now = grant.claim.owner, state.now
            return state.take_over(owner, grant.token, claim, now, wall=now)

        return await self._change(claim.name, decide, claim.owner, until)

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        self._queued.pop(claim.owner, None)

        def decide(state: RowState) -> None:
            state.abandon(claim.owner, state.now)

        await self._change(claim.name, decide, claim.owner, until)
        self.wakeups.discard(claim.owner)

    async def revoke(self, name: str) -> list[int]:
        return await self._change(name, lambda state: state.revoke(state.now))

    async def look(self, name: str) -> LockInfo:
        state = await self._read(name)
        waiters = [q for q in state.queue.values() if not q.is_over(state.now)]
        subscriptions = {queued.wake for queued in waiters if queued.wake}
        why = await self._why_not_woken(sorted(subscriptions)) if subscriptions else ""
        return state.info(state.now)._replace(notice=f"waiters are not woken: {why}" if why else "")

    async def _why_not_woken(self, subscriptions: Sequence[str]) -> str:
        """Returns why wake-ups do not reach these subscriptions; empty if they do."""
        if self._opener.polls:
            return self._opener.finding.detail
        return _woken_or_not(await self.pool.request(wakeup_check_request(subscriptions)))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        sql = self.statements.survey(prefix, cursor or "", limit)
        rows = (await self._execute(sql))[0].rows
        infos = [_info_of(row, self.display) for row in rows]
        used = [s for s in infos if s.holders or s.waiters or s.notice]
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
        for row in (await self._execute(self.statements.recall(name)))[0].rows:
            return read_record(row, name, self.display)
        return None

    async def watch(self, name: str, seen: int | None, until: float) -> None:
        pause = min(until - self.runtime.now(), self.runtime.between(*WATCH_POLL_SECONDS))
        await self.runtime.sleep(max(0.0, pause))

    async def _purge(self, until: float | None = None) -> None:
        """Deletes idle rows among the next ``PURGED_NAMES`` names, every ``PURGE_EVERY`` attempts.
        A failed step is repeated later."""
        if self._until_purge > 0:
            return
        self._until_purge = PURGE_EVERY
        with suppress(BackendUnavailable):
            await self._purge_names(until)
            await self.pool.request(self.statements.purge_transactions(), until=until)

    async def _purge_names(self, until: float | None) -> None:
        (stored,) = await self._execute(self.statements.purged_to(), until=until)
        after = (stored.rows[0][0] or b"") if stored.rows else b""
        (found,) = await self._execute(self.statements.scan(after, PURGED_NAMES), until=until)
        idle = [name or b"" for name, is_idle in found.rows if is_idle == b"1"]
        for start in range(0, len(idle), PURGE_BATCH):
            names = idle[start : start + PURGE_BATCH]
            await self.pool.request(self.statements.purge(names), until=until)
        last = (found.rows[-1][0] or b"") if len(found.rows) == PURGED_NAMES else b""
        await self._execute(self.statements.finish_purge(last), until=until)

    async def probe(self) -> list[Finding]:
        return await self._dialler.examine(self.runtime, self._findings)

    async def _findings(self, ask: Ask) -> list[Finding]:
        async def execute(sql: bytes) -> list[Result]:
            return checked(await ask(sql), self.display)

        found, opener = await findings(execute), self._opener
        if opener.galera:
            found.append(await clock_finding(execute, self.runtime.wall))
        why = "" if opener.polls else _woken_or_not(await ask(wakeup_check_request(())))
        why = opener.finding.detail if opener.polls else why
        return [*found, Finding("waiting", why, "warning") if why else opener.finding]

    def forget(self) -> None:
        self._until_purge = attempts_until_purge()
        self.pool.forget()
        self.wakeups.forget()
        self._in_flight = make_in_flight_releases(self.runtime)

    async def close(self) -> None:
        self.wakeups.close()
        self.pool.close()

    async def _execute(
        self, sql: bytes, owner: str = "", until: float | None = None
    ) -> list[Result]:
        """Sends one request, and sends it again after a clash. Returns one result per statement;
        raises ``MySqlRefused`` for any other error."""
        reply = await self.pool.request(sql, owner, until)
        for clash in range(CHANGES):
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._back_off(clash)
            reply = await self.pool.request(sql, owner, until)
        return checked(reply, self.display)

    async def _back_off(self, times: int) -> bool:
        """Sleeps after ``times`` lost races. Returns whether it slept.

        The back-off grows with the square of the losses, so that any number of clients spreads
        out. Four clients lose ten races in a row now and then, fifty often do: exponential
        back-off would make the four wait too long.
        """
        if times <= RACES_BEFORE_BACKOFF:
            return False
        longest = min(LONGEST_BACKOFF_SECONDS, BACKOFF_STEP_SECONDS * times**2)
        await self.runtime.sleep(self.runtime.between(0.0, longest))
        return True

    async def _change(
        self,
        name: str,
        decide: Callable[[RowState], T],
        owner: str = "",
        until: float | None = None,
        then: bytes = b"",
        state: RowState | None = None,
    ) -> T:
        """Compare-and-swap: reads the row (unless ``state`` is given), lets ``decide`` change the
        state, and writes it. Repeats if another client has changed the row. Returns the result of
        the last ``decide``. ``then`` is a statement for the same transaction as the write."""
        state = await self._read(name, owner, until) if state is None else state
        for times in range(CHANGES):
            answer = decide(state)
            if not state.changed and not then:
                return answer
            fresh = await self._write(state, owner, until, then)
            if fresh is None:
                return answer
            state = fresh
            if await self._back_off(times):  # the state has aged during the sleep
                state = await self._read(name, owner, until)
        raise BackendUnavailable(f"{self.display}: {name!r} is changed too often by other clients")

    async def _read(self, name: str, owner: str = "", until: float | None = None) -> RowState:
        (row,) = (await self._execute(self.statements.read(name), owner, until))[0].rows
        return self._state(name, row)

    def _state(self, name: str, row: tuple[bytes | None, ...]) -> RowState:
        if row[1] is None:
            return empty_state(name, int(row[0] or 0), self.display)
        return read_state(row, name, self.display)

    async def _write(
        self, state: RowState, owner: str, until: float | None, then: bytes
    ) -> RowState | None:
        """Writes a state and wakes its waiters that have a reservation now. Returns None on
        success, or the newer state if the row has changed."""
        own, woken = self.wakeups.subscription, state.woken_subscriptions
        mine = [queued.claim.owner for queued in woken if queued.wake == own]
        others = [queued.wake or "" for queued in woken if queued.wake != own]
        batch = [self.statements.write(state)]
        if then:
            batch = [b"BEGIN", *batch, IF_WRITTEN, then, b"COMMIT"]
        batch.append(self.statements.read(state.name))
        subscriptions = list(dict.fromkeys(others))
        results = await self._send(batch, subscriptions, owner, until)
        if not results[1 if then else 0].affected:
            return self._state(state.name, results[len(batch) - 1].rows[0])
        self._note(state)
        for waiter in mine:
            self.wakeups.wake(waiter)
        if results[len(batch) :]:
            await self._finish_wakes(state.name, subscriptions, results[len(batch)], until)
        return None

    async def _send(
        self, batch: list[bytes], subscriptions: list[str], owner: str, until: float | None
    ) -> list[Result]:
        """Sends one request: the batch, then the wake-ups. They are last, because the KILL fails
        if the subscription's session has ended."""
        least = len(batch)
        if subscriptions and not self._opener.polls:
            found = b", ".join(
                b"IS_USED_LOCK(%s)" % subscription_lock(subscription)
                for subscription in subscriptions
            )
            batch = [*batch, b"SELECT " + found, _kill_sleep(subscriptions[0])]
        return await self._execute_at_least(b"; ".join(batch), least, owner, until)

    async def _execute_at_least(
        self, sql: bytes, least: int, owner: str = "", until: float | None = None
    ) -> list[Result]:
        """Sends one request whose statements after the first ``least`` may fail."""
        reply = await self.pool.request(sql, owner, until)
        for clash in range(CHANGES):
            if len(reply.results) > least:
                return reply.results
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._back_off(clash)
            reply = await self.pool.request(sql, owner, until)
        return checked(reply, self.display)

    def _note(self, state: RowState) -> None:
        if state.queue or (state.holds and not state.exclusive):
            self._mark_contended(state.name)
        else:
            self._contended.pop(state.name, None)

    def _mark_contended(self, name: str) -> None:
        self._contended[name] = None
        if len(self._contended) > REMEMBERED:
            self._contended.pop(next(iter(self._contended)), None)

    async def _finish_wakes(
        self, name: str, subscriptions: list[str], found: Result, until: float | None
    ) -> None:
        """Wakes the other subscriptions, and removes the waiters of ended sessions."""
        gone = {
            subscription
            for subscription, number in zip(subscriptions, found.rows[0], strict=True)
            if number is None
        }
        for subscription in subscriptions[1:]:
            if subscription not in gone:
                await self.pool.request(_kill_sleep(subscription), until=until)
        if gone:
            await self._change(name, lambda state: state.skip(gone, state.now), until=until)


def _info_of(row: Row, store: str) -> LockInfo:
    """Returns what a survey shows of a row: for a damaged row, its name and the cause."""
    stored = row[8] or b""
    name = stored.decode(errors="backslashreplace")
    try:
        stored.decode()
        state = parse_state(row, name, store)
        return state.info(state.now)
    except ValueError as error:
        why = "its name is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        notice = f"what is stored under this name can't be read: {why}"
        return LockInfo(name, 0, (), (), notice=notice)


def _attempt(state: RowState, claim: Claim, join: bool, subscription: str) -> Grant | Busy:
    answer = state.attempt(claim, state.now, join=join, wall=state.now)
    return _subscribed(state, claim, answer, subscription)


def _subscribed(
    state: RowState, claim: Claim, answer: Grant | Busy, subscription: str
) -> Grant | Busy:
    """Stores the subscription in the claim's entry, if it has one, and in the answer."""
    if claim.owner in state.queue:
        state.queue[claim.owner].wake = subscription
    return answer._replace(ref=subscription) if isinstance(answer, Busy) else answer


class _NotHeld(Exception):
    """The hold is lost, so no record may be written under it."""


def _woken_or_not(reply: MySqlReply) -> str:
    """Returns why waiters are not woken, from the reply to ``wakeup_check_request``."""
    why = wakeup_problem(reply)
    return f"{why}; waiters poll the row every {SLEEP_SECONDS:g} s instead" if why else ""


def _must_hold(state: RowState, claim: Claim) -> None:
    if not state.is_held_by(claim.owner, state.now):
        raise _NotHeld
    state.changed = True


class _RenewalBatch:
    """The holds to renew and the waiters to refresh in one batch, by name."""

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

    def apply(self, state: RowState) -> set[str]:
        """Renews what is still stored in a row. Returns the owners that are not."""
        claims, now, shorten = self._claims.get(state.name, ()), state.now, self._shorten
        kept = {c.owner for c in claims if state.extend(c.owner, c.ttl, now, shorten=shorten)}
        for claim, behind in self._waits.get(state.name, ()):
            if state.refresh(claim.owner, behind, now):
                kept.add(claim.owner)
        return self.owners(state.name) - kept


def _in_one_transaction(statements: list[bytes]) -> bytes:
    """Joins statements in one transaction: one write to the disk serves all."""
    if len(statements) == 1:
        return statements[0] + b"; DO 0"
    return b"; ".join([b"BEGIN", *statements, b"COMMIT"])


def _kill_sleep(subscription: str) -> bytes:
    return b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(subscription)


class InFlightReleases(Protocol):
    """Names that this client is releasing now. An attempt of the same client on such a name waits
    until the release is answered.

    The next waiter of a client attempts as soon as it is first in the client's own queue, which is
    often while the release is under way. Two requests that race for one row cost more than two
    requests in sequence.
    """

    names: dict[str, None]
    """A release adds its name before its first request, and calls ``finished`` at its end."""

    def finished(self, name: str) -> None: ...
    async def wait(self, name: str, until: float | None) -> None: ...


def make_in_flight_releases(runtime: Runtime) -> InFlightReleases:
    """Returns the variant for the runtime."""
    return BlockingInFlightReleases() if runtime.blocking else AsyncInFlightReleases()


class BlockingInFlightReleases:
    """The variant for threads."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting = 0
        # Entered directly: an interrupt could tear the condition's own enter and exit.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)

    def finished(self, name: str) -> None:
        self.names.pop(name, None)
        if self._waiting:  # a waiter that is not counted yet checks ``names`` afterwards
            with self._mutex:
                self._changed.notify_all()

    async def wait(self, name: str, until: float | None) -> None:
        by = now() + LONGEST_IN_FLIGHT_SECONDS
        by = by if until is None else min(by, until)
        with self._mutex:
            self._waiting += 1
            try:
                while name in self.names and (left := by - now()) > 0:
                    self._changed.wait(left)
            finally:
                self._waiting -= 1


class AsyncInFlightReleases:
    """The variant for the tasks of one event loop."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def finished(self, name: str) -> None:
        self.names.pop(name, None)
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, name: str, until: float | None) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        left = (
            LONGEST_IN_FLIGHT_SECONDS
            if until is None
            else min(LONGEST_IN_FLIGHT_SECONDS, until - now())
        )
        await asyncio.wait([future], timeout=max(0.0, left))
