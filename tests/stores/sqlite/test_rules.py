"""The embedded store decides as the memory store does, whatever is asked in whatever order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Waiting
from holdfast.core.drive import run_now
from holdfast.errors import LimitMismatch
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.memory import Ledger, MemoryBackend
from holdfast.stores.sqlite import backend as sqlite
from holdfast.stores.sqlite.backend import SqliteBackend
from stores.sqlite.helpers import backend_of, claim

STEPS = 150


class Clock:
    """One clock for both stores."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 1e9 + self.seconds


class Pair:
    """Sends the same requests to both stores and compares their answers."""

    def __init__(self, model: MemoryBackend, store: SqliteBackend, chance: random.Random) -> None:
        self.model, self.store, self.chance = model, store, chance
        self.claims: list[Claim] = []
        self.grants: dict[str, tuple[Grant, Grant]] = {}

    def new_claim(self) -> Claim:
        mode = self.chance.choice([Mode.EXCLUSIVE, Mode.SHARED, Mode.SLOTS, Mode.SLOTS])
        weight, limit = (self.chance.randint(1, 3), 4) if mode is Mode.SLOTS else (1, 0)
        name = "slots" if mode is Mode.SLOTS else "lock"
        if self.chance.random() < 0.03:
            name = "lock"  # where it may never fit
        made = claim(name, mode, weight, limit, ttl=self.chance.choice([0.5, 5.0, 50.0]))
        self.claims.append(made)
        return made

    def attempt(self) -> None:
        new = not self.claims or self.chance.random() < 0.4
        asked = self.new_claim() if new else self.chance.choice(self.claims[-8:])
        join = self.chance.random() < 0.8
        answers = [self._try(backend, asked, join) for backend in (self.model, self.store)]
        self._compare(asked, *answers)

    def _try(
        self, backend: MemoryBackend | SqliteBackend, asked: Claim, join: bool
    ) -> Grant | Busy | str:
        try:
            return run_now(backend.attempt(asked, join=join))
        except LimitMismatch:
            return "mismatch"

    def _compare(
        self, asked: Claim, expected: Grant | Busy | str, found: Grant | Busy | str
    ) -> None:
        if isinstance(expected, Grant) and isinstance(found, Grant):
            assert found.slots == expected.slots
            self.grants[asked.owner] = expected, found
        elif isinstance(expected, Busy) and isinstance(found, Busy):
            assert found.place == expected.place
            assert found.retry_seconds == pytest.approx(expected.retry_seconds)
        else:
            assert found == expected
            self.update_queues()  # a refused attempt is rolled back whole

    def release(self) -> None:
        if self.grants:
            owner = self.chance.choice(list(self.grants))
            expected, found = self.grants.pop(owner)
            assert run_now(self.store.release(found)) == run_now(self.model.release(expected))

    def exchange(self) -> None:
        if self.grants:
            owner = self.chance.choice(list(self.grants))
            expected, found = self.grants.pop(owner)
            mine = expected.claim
            self.update_queues()
            if run_now(self.model.look(mine.name)).limit != mine.limit:
                return  # it has expired, and the name is used in another way by now
            next_claim = claim(mine.name, mine.mode, mine.weight, mine.limit)
            self.claims.append(next_claim)
            left, expected_answer = run_now(self.model.exchange(expected, next_claim))
            right, found_answer = run_now(self.store.exchange(found, next_claim))
            assert left == right
            self._compare(next_claim, expected_answer, found_answer)

    def abandon(self) -> None:
        if self.claims:
            gone = self.claims.pop(self.chance.randrange(len(self.claims)))
            self.grants.pop(gone.owner, None)
            for backend in (self.model, self.store):
                run_now(backend.abandon(gone))

    def renew(self) -> None:
        self.update_queues()
        pairs = list(self.grants.values())[:3]
        waits = [Waiting(one, 2) for one in self.claims[-6:] if one.owner not in self.grants]
        expected = run_now(self.model.renew([one for one, _ in pairs], waits, until=1e9))
        found = run_now(self.store.renew([one for _, one in pairs], waits, until=1e9))
        assert set(found.lost) == set(expected.lost)
        assert found.forgotten == expected.forgotten

    def update_queues(self) -> None:
        """The memory store updates the queue at every request, also at a read."""
        for name in ("lock", "slots"):
            for backend in (self.model, self.store):
                run_now(backend.abandon(claim(name)))

    def revoke(self) -> None:
        name = self.chance.choice(["lock", "slots"])
        expected, found = run_now(self.model.revoke(name)), run_now(self.store.revoke(name))
        assert len(found) == len(expected)

    def look(self) -> None:
        self.update_queues()
        for name in ("lock", "slots"):
            expected, found = run_now(self.model.look(name)), run_now(self.store.look(name))
            assert found.limit == expected.limit
            assert sorted(one.slots for one in found.holders) == sorted(
                one.slots for one in expected.holders
            )
            assert [one.mode for one in found.waiters] == [one.mode for one in expected.waiters]


@pytest.mark.parametrize("seed", range(12))
def test_both_stores_decide_alike(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, clock = random.Random(seed), Clock()
    monkeypatch.setattr(sqlite, "now_seconds", clock.now)
    monkeypatch.setattr(sqlite, "wall_seconds", clock.wall)
    model = MemoryBackend(Ledger(clock.now, clock.wall), "memory://", BlockingRuntime())
    with backend_of(tmp_path / "locks.db") as store:
        pair = Pair(model, store, chance)
        steps = [pair.attempt] * 8 + [pair.release] * 3
        steps += [pair.exchange, pair.abandon, pair.renew, pair.look]
        for _ in range(STEPS):
            clock.seconds += chance.choice([0.0, 0.01, 0.1, 0.1, 0.6, 2.5])
            chance.choice(steps)() if chance.random() > 0.01 else pair.revoke()
