"""MySQL lease rows: a name is one row, changed only by who has seen its newest version.

Taking a name that nobody uses is one statement, and so is freeing it while nobody waits. All
else reads the row, decides by the rules of ``mysql_row``, and writes it back where its version
is still the same: two requests, and no row stays locked while a client thinks, or hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from holdfast.backends.mysql_lease_sql import IF_WRITTEN, LeaseStatements, bell_lock
from holdfast.backends.mysql_listen import Hanger, make_listening
from holdfast.backends.mysql_look import findings
from holdfast.backends.mysql_row import State, empty_state, read_state
from holdfast.claim import Busy, Claim, Grant, Mode, Record, Standing
from holdfast.core.contract import Finding, Page, Renewal, Runtime, Waiting
from holdfast.errors import BackendUnavailable
from holdfast.wires.mysql import checked
from holdfast.wires.mysql_protocol import Reply, Result

__all__ = ["LeaseBackend", "Wire"]

T = TypeVar("T")
CHANGES = 100
"""So often a row may be changed by others while we decide."""
REMEMBERED = 4096
BATCH = 200
PURGE_EVERY = 1000
"""After so many attempts twice that number of names is looked at, and the idle ones dropped."""
CLASHES = frozenset({1020, 1205, 1213})
"""The server gave way to another transaction; nothing was changed."""
LOST = "it ran out or was broken, and is no longer stored"


class Wire(Protocol):
    """What both wires have."""

    async def request(self, sql: bytes, owner: str = "", until: float | None = None) -> Reply: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


class LeaseBackend:
    """Admits claims in the rows of one namespace."""

    def __init__(
        self, runtime: Runtime, wire: Wire, hanger: Hanger, statements: LeaseStatements,
        display: str,
    ) -> None:  # fmt: skip
        self.runtime, self.wire, self.statements, self.display = runtime, wire, statements, display
        self._hanger = hanger
        self.listening = make_listening(runtime, hanger)
        self._crowded: dict[str, None] = {}
        """Names that were not alone when last seen: asking for them as free is in vain."""
        self._until_purge = PURGE_EVERY
        self._purged_to = b""

    async def attempt(
        self, claim: Claim, *, join: bool, until: float | None = None
    ) -> Grant | Busy:
        self._until_purge -= 1
        if claim.mode is Mode.EXCLUSIVE and claim.name not in self._crowded:
            (taken,) = await self._ask(self.statements.take(claim), claim.owner, until)
            if taken.affected:
                return Grant(claim, taken.insert_id)
        bell = self.listening.bell
        return await self._change(
            claim.name, lambda state: state.attempt(claim, join, bell), claim.owner, until
        )

    async def _ask(self, sql: bytes, owner: str = "", until: float | None = None) -> list[Result]:
        """One request; again where the server gave way to another."""
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    async def _step_back(self, times: int) -> None:
        if times > 2:
            await self.runtime.sleep(self.runtime.between(0.0, 0.001 * min(times, 20)))

    async def _change(
        self,
        name: str,
        decide: Callable[[State], T],
        owner: str = "",
        until: float | None = None,
        then: bytes = b"",
    ) -> T:
        """Reads the row, decides, and writes what has changed; again if others were faster."""
        state = await self._read(name, owner, until)
        for times in range(CHANGES):
            answer = decide(state)
            state.settle(owner)
            if not state.changed and not then:
                return answer
            fresh = await self._write(state, owner, until, then)
            if fresh is None:
                return answer
            state = fresh
            await self._step_back(times)
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
        mine = [wake for wake in state.wakes if wake.bell == self.listening.bell]
        calls = [wake for wake in state.wakes if wake.bell != self.listening.bell]
        more = [then] if then else []
        if calls:
            more.append(self.statements.ring(calls, max(state.version + 1, state.now)))
        if state.reads:
            more.append(self.statements.heard(state.reads))
        batch = [self.statements.write(state)]
        if more:
            batch = [b"BEGIN", *batch, IF_WRITTEN, *more, b"COMMIT"]
        batch.append(self.statements.read(state.name))
        bells = list(dict.fromkeys(wake.bell for wake in calls))
        results = await self._send(batch, bells, owner, until)
        if not results[1 if more else 0].affected:
            return self._state(state.name, results[len(batch) - 1].rows[0])
        self._note(state)
        for wake in mine:
            self.listening.ring(wake.owner)
        if calls and not self._hanger.quiet:
            await self._finish_calls(state.name, bells, results[len(batch)], until)
        return None

    async def _send(
        self, batch: list[bytes], bells: list[str], owner: str, until: float | None
    ) -> list[Result]:
        """One request. The calls come last in it: one that fails says that nobody is there."""
        count = len(batch)
        if bells and not self._hanger.quiet:
            found = b", ".join(b"IS_USED_LOCK(%s)" % bell_lock(bell) for bell in bells)
            batch = [*batch, b"SELECT " + found, _stir(bells[0])]
        sql = b"; ".join(batch)
        reply = await self.wire.request(sql, owner, until)
        for clash in range(CHANGES):
            if len(reply.results) > count:
                return reply.results
            if reply.failure is None or reply.failure.code not in CLASHES:
                break
            await self._step_back(clash)
            reply = await self.wire.request(sql, owner, until)
        return checked(reply, self.display)

    def _note(self, state: State) -> None:
        if not state.crowd:
            self._crowded.pop(state.name, None)
            return
        self._crowded[state.name] = None
        if len(self._crowded) > REMEMBERED:
            self._crowded.pop(next(iter(self._crowded)), None)

    async def _finish_calls(
        self, name: str, bells: list[str], found: Result, until: float | None
    ) -> None:
        """Stirs the other bells, and skips those whose sessions have ended."""
        gone = {bell for bell, number in zip(bells, found.rows[0], strict=True) if number is None}
        for bell in bells[1:]:
            if bell not in gone:
                await self.wire.request(_stir(bell), until=until)
        if gone:
            await self._change(name, lambda state: state.skip(gone), until=until)

    async def wait(self, claim: Claim, busy: Busy, until: float) -> None:
        await self.listening.wait(claim.owner, until, busy.ref)

    def nudge(self, claim: Claim) -> None:
        self.listening.ring(claim.owner)

    async def exchange(self, grant: Grant, claim: Claim) -> tuple[bool, Grant | Busy]:
        if grant.claim.name != claim.name:
            return await self.release(grant), await self.attempt(claim, join=True)

        bell = self.listening.bell

        def decide(state: State) -> tuple[bool, Grant | Busy]:
            ours = state.release(grant.claim.owner)
            return ours, state.attempt(claim, True, bell)

        return await self._change(claim.name, decide, claim.owner)

    async def renew(
        self, grants: Sequence[Grant], waits: Sequence[Waiting], *, until: float
    ) -> Renewal:
        alone = sorted(g.claim for g in grants if g.claim.mode is Mode.EXCLUSIVE)
        others = [g.claim for g in grants if g.claim.mode is not Mode.EXCLUSIVE]
        lost: dict[str, str] = {}
        for start in range(0, len(alone), BATCH):
            batch = alone[start : start + BATCH]
            results = await self._ask(_together(self.statements.extend(batch)), until=until)
            for claim, result in zip(batch, results[-len(batch) - 1 :], strict=False):
                lost |= {} if result.affected else {claim.owner: LOST}
        gone = await self._renew_crowds(others, waits, until)
        lost |= {claim.owner: LOST for claim in others if claim.owner in gone}
        await self._purge(until)
        return Renewal(lost, forgotten=frozenset(w.claim.owner for w in waits) & gone)

    async def _renew_crowds(
        self, claims: Sequence[Claim], waits: Sequence[Waiting], until: float
    ) -> set[str]:
        """Renews holds and refreshes waiters in crowds; answers which are no longer there."""
        gone: set[str] = set()
        names = sorted({claim.name for claim in claims} | {w.claim.name for w in waits})
        for start in range(0, len(names), BATCH):
            batch = set(names[start : start + BATCH])
            due = _Due(
                [claim for claim in claims if claim.name in batch],
                [wait for wait in waits if wait.claim.name in batch],
            )
            states = await self._read_many(batch, until)
            for name in batch - set(states):
                gone |= due.owners(name)
            gone |= await self._renew_states(states, due, until)
        return gone

    async def _renew_states(self, states: dict[str, State], due: _Due, until: float) -> set[str]:
        answers = {name: due.apply(state) for name, state in states.items()}
        for state in states.values():
            state.settle()
        plain = [s for s in states.values() if s.changed and not s.wakes and not s.reads]
        written: list[Result] = []
        if plain:
            batch = _together([self.statements.write(state) for state in plain])
            written = (await self._ask(batch, until=until))[-len(plain) - 1 :]
        kept = {s.name for s, result in zip(plain, written, strict=False) if result.affected}
        for name, state in states.items():
            if state.changed and name not in kept:  # somebody is to be called, or was faster
                answers[name] = await self._change(name, due.apply, until=until)
        return set[str]().union(*answers.values())

    async def _read_many(self, names: Iterable[str], until: float) -> dict[str, State]:
        (result,) = await self._ask(self.statements.read_many(names), until=until)
        states: dict[str, State] = {}
        for row in result.rows:
            name = (row[8] or b"").decode()
            states[name] = read_state(row, name, self.display)
        return states

    async def release(self, grant: Grant) -> bool:
        claim = grant.claim
        if claim.mode is Mode.EXCLUSIVE and claim.name not in self._crowded:
            (freed,) = await self._ask(self.statements.free(claim), claim.owner)
            if freed.affected:
                await self._purge()
                return True
        ours = await self._change(claim.name, lambda state: state.release(claim.owner), claim.owner)
        await self._purge()
        return ours

    async def abandon(self, claim: Claim) -> None:
        await self._change(claim.name, lambda state: state.abandon(claim.owner), claim.owner)
        self.listening.forget_ring(claim.owner)

    async def revoke(self, name: str) -> list[int]:
        return await self._change(name, State.clear)

    async def look(self, name: str) -> Standing:
        return (await self._read(name)).standing()

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        sql = self.statements.survey(prefix, cursor or "", limit)
        rows = (await self._ask(sql))[0].rows
        names = [(row[8] or b"").decode() for row in rows]
        standings = [
            read_state(row, name, self.display).standing()
            for name, row in zip(names, rows, strict=True)
        ]
        used = [standing for standing in standings if standing.holders or standing.waiters]
        return Page(used, names[-1] if len(names) == limit else None)

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        claim = grant.claim
        then = self.statements.record(claim.name, value, grant.token, keep_seconds)
        try:
            await self._change(claim.name, lambda state: _must_hold(state, claim), then=then)
        except _NotHeld:
            return False
        return True

    async def recall(self, name: str) -> Record | None:
        for value, token, age in (await self._ask(self.statements.recall(name)))[0].rows:
            return Record((value or b"").decode(), int(token or 0), int(age or 0) / 1_000_000)
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

    async def probe(self) -> list[Finding]:
        return [*await findings(self._ask), self._hanger.finding]

    def forget(self) -> None:
        self.wire.forget()
        self.listening.forget()

    async def close(self) -> None:
        self.listening.close()
        await self.wire.close()


class _NotHeld(Exception):
    """Nothing is to be recorded under a hold that is gone."""


def _must_hold(state: State, claim: Claim) -> None:
    if not state.holds(claim.owner):
        raise _NotHeld
    state.changed = True


class _Due:
    """What a batch renews and refreshes, by name."""

    def __init__(self, claims: Sequence[Claim], waits: Sequence[Waiting]) -> None:
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
        kept = {c.owner for c in self._claims.get(state.name, ()) if state.extend(c.owner, c.ttl)}
        for claim, behind in self._waits.get(state.name, ()):
            if state.refresh(claim.owner, behind):
                kept.add(claim.owner)
        return self.owners(state.name) - kept


def _stir(bell: str) -> bytes:
    return b"KILL QUERY IS_USED_LOCK(%s)" % bell_lock(bell)


def _together(statements: list[bytes]) -> bytes:
    """One transaction, so that one write to the disk serves all."""
    if len(statements) == 1:
        return statements[0] + b"; DO 0"
    return b"; ".join([b"BEGIN", *statements, b"COMMIT"])
