"""One process, nobody else: acquire and release, as often as it goes.

Contenders take turns in short slices and in a new order each round, so that noise hits all
alike. Pinned, client and server share one core and the ratio shows what the client costs; free,
the wake-ups between the cores are in it, too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.bench.bounds import Alarm, limited
from holdfast.bench.contender import Client, Contender, Target
from holdfast.bench.figures import cpu_seconds, percentile, pinned

__all__ = ["uncontended"]

NAME = "benchmark"
SLICE_LIMIT_SECONDS = 10.0
CLOSE_LIMIT_SECONDS = 5.0


@dataclass
class _Slices:
    """What one contender did in one state of the cores."""

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    holds: int = 0
    client_cpu: float = 0.0
    server_cpu: float = 0.0

    def row(self) -> dict[str, Any]:
        return {
            "holds_per_second": statistics.median(self.rates),
            "p50_us": _micro(percentile(self.latencies, 0.5)),
            "p99_us": _micro(percentile(self.latencies, 0.99)),
            "client_cpu_us": self.client_cpu / self.holds * 1e6,
            "server_cpu_us": self.server_cpu / self.holds * 1e6 or None,
        }


class _Player:
    """A contender that is open, with one lock of its own."""

    def __init__(self, contender: Contender, target: Target) -> None:
        self.contender = contender
        self.error = ""
        self.seen: dict[str, _Slices] = {}
        self._pids = target.pids
        self._runner = asyncio.Runner() if contender.flavour == "asyncio" else None
        with limited(SLICE_LIMIT_SECONDS):
            self._client: Client = self._run(contender.open(target))
            self._pair = self._client.lock(NAME)
            self.play("warm", 0.02)

    def _run(self, result: Any) -> Any:
        return result if self._runner is None else self._runner.run(result)

    def play(self, state: str, seconds: float) -> None:
        """One slice."""
        slices = self.seen.setdefault(state, _Slices())
        server = cpu_seconds(self._pids)
        cpu, start = time.process_time(), time.perf_counter()
        if self._runner is None:
            spent = _hold(self._pair.acquire, self._pair.release, seconds)
        else:
            spent = self._runner.run(_hold_async(self._pair.acquire, self._pair.release, seconds))
        slices.client_cpu += time.process_time() - cpu
        slices.rates.append(len(spent) / (time.perf_counter() - start))
        slices.server_cpu += cpu_seconds(self._pids) - server
        slices.holds += len(spent)
        slices.latencies += spent

    def close(self) -> None:
        with suppress(Exception), limited(CLOSE_LIMIT_SECONDS):
            self._run(self._client.close())
        if self._runner is not None:
            with suppress(Exception), limited(CLOSE_LIMIT_SECONDS):
                self._runner.close()


def _hold(acquire: Callable[[], Any], release: Callable[[], Any], seconds: float) -> list[float]:
    spent: list[float] = []
    clock, note = time.perf_counter, spent.append
    last = clock()
    end = last + seconds
    while last < end:
        acquire()
        release()
        now = clock()
        note(now - last)
        last = now
    return spent


async def _hold_async(
    acquire: Callable[[], Any], release: Callable[[], Any], seconds: float
) -> list[float]:
    spent: list[float] = []
    clock, note = time.perf_counter, spent.append
    last = clock()
    end = last + seconds
    while last < end:
        await acquire()
        await release()
        now = clock()
        note(now - last)
        last = now
    return spent


def uncontended(
    contenders: Iterable[Contender],
    target: Target,
    *,
    rounds: int,
    slice_seconds: float,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each contender; one that fails has its error in its row."""
    players, rows = [], []
    for contender in contenders:
        try:
            players.append(_Player(contender, target))
        except (Exception, Alarm) as error:  # noqa: BLE001 - reported in its row
            rows.append(_failed(contender, error))
    for state, cores in (("pinned", pinned(target.pids)), ("free", nullcontext())):
        with cores:
            for _ in range(rounds):
                _round(players, state, slice_seconds)
                tick()
    for player in players:
        rows.append(_row(player))
        player.close()
    return rows


def _round(players: list[_Player], state: str, seconds: float) -> None:
    for player in random.sample(players, len(players)):
        if not player.error:
            try:
                with limited(SLICE_LIMIT_SECONDS):
                    player.play(state, seconds)
            except (Exception, Alarm) as error:  # noqa: BLE001 - reported in its row
                player.error = _text(error)


def _row(player: _Player) -> dict[str, Any]:
    contender = player.contender
    row: dict[str, Any] = _head(contender)
    for state, slices in player.seen.items():
        if state != "warm" and slices.rates:
            row[state] = slices.row()
    if player.error:
        row["error"] = player.error
    return row


def _failed(contender: Contender, error: BaseException) -> dict[str, Any]:
    return {**_head(contender), "error": _text(error)}


def _head(contender: Contender) -> dict[str, Any]:
    return {
        "contender": contender.name,
        "store": contender.store,
        "role": contender.role,
        "flavour": contender.flavour,
    }


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
