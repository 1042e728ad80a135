"""Several processes on one lock, or a few: rate, hand-over, fairness, and no two holds at once."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast.bench.bounds import Alarm, limited
from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.figures import cpu_seconds, percentile
from holdfast.bench.forkserver import in_child, read_by
from holdfast.bench.jobs import find, read_target

__all__ = ["Turn", "contended_job", "judge"]

NAME = "contended"
LATE_SECONDS = 2.0
"""How long after the end the last waiters may still take to get the lock once; then they leave."""
SILENT_SECONDS = 10.0
"""How long after that a process is waited for which does not even hear that it should leave."""


class Turn(NamedTuple):
    """One hold. Times are of the machine's monotonic clock, the same in all processes."""

    process: int
    asked: float
    held: float
    ended: float
    token: int


class Pace(NamedTuple):
    """What each process does. The name is of this run: one that was killed may have left its own
    lock held."""

    name: str
    seconds: float
    hold_seconds: float
    pause_seconds: float


def judge(
    turns: Sequence[Turn], processes: int, start: float, end: float, locks: int = 1
) -> dict[str, Any]:
    """What the turns of one run come to, in which the processes shared so many locks in turn.

    A wait that was still unanswered at the end counts with what it had lasted by then: who
    starves must not look as if he had never asked.
    """
    turns = sorted(turns, key=lambda turn: turn.held)
    counted = [turn for turn in turns if turn.held <= end]
    each = Counter(dict.fromkeys(range(processes), 0))
    each.update(turn.process for turn in counted)
    lines = [[turn for turn in counted if turn.process % locks == lock] for lock in range(locks)]
    pairs = [pair for line in lines for pair in pairwise(line)]
    gaps = [after.held - before.ended for before, after in pairs]
    handed = [a.held - b.ended for b, a in pairs if a.process != b.process]
    waits = [min(turn.held, end) - turn.asked for turn in turns if turn.asked < end]
    most = max(each.values(), default=0)
    return {
        "holds": len(counted),
        "holds_per_second": len(counted) / (end - start),
        "gap_p50_us": _micro(percentile(gaps, 0.5)),
        "gap_p99_us": _micro(percentile(gaps, 0.99)),
        "handover_p50_us": _micro(percentile(handed, 0.5)),
        "handover_p99_us": _micro(percentile(handed, 0.99)),
        "longest_wait_ms": max(waits, default=0.0) * 1000,
        "switch_percent": 100 * len(handed) / len(pairs) if pairs else 0.0,
        "counts": [each[process] for process in range(processes)],
        "fewest": min(each.values()),
        "most": most,
        "fewest_to_most": min(each.values()) / most if most else 0.0,
        "overlaps": sum(gap < 0 for gap in gaps),
        "sinking_tokens": sum(b.token >= a.token for b, a in pairs if b.token and a.token),
    }


def contended_job(
    book: Book,
    contender: str,
    target: list[Any],
    processes: int,
    seconds: float,
    hold_seconds: float,
    pause_seconds: float,
    locks: int = 1,
) -> Any:
    """Forks the processes, starts them together, and judges what they recorded."""
    (found,), aim = find(book, [contender]), read_target(target)
    names = [f"{NAME}:{os.getpid()}:{number % locks}" for number in range(processes)]
    paces = [Pace(name, seconds, hold_seconds, pause_seconds) for name in names]
    children = [_spawn(found, aim, pace) for pace in paces]
    for reader, _ in children:
        first = os.read(reader, 1)
        if first != b"r":
            line = first + (read_by(reader, time.monotonic() + 1) or b"")
            return json.loads(line or b'{"error": "a process did not start"}')
    server = cpu_seconds(aim.pids)
    start = time.monotonic() + 0.05
    for _, go in children:
        os.write(go, f"{start!r}\n".encode())
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    server = cpu_seconds(aim.pids) - server
    deadline = time.monotonic() + LATE_SECONDS + SILENT_SECONDS
    said = [read_by(reader, deadline) for reader, _ in children]

    def judged(turns: list[Turn]) -> dict[str, Any]:
        return judge(turns, processes, start, start + seconds, locks)

    return _gather(said, judged, server if aim.pids else None)


def _gather(
    said: list[bytes | None], judged: Callable[[list[Turn]], dict[str, Any]], server: float | None
) -> dict[str, Any]:
    turns: list[Turn] = []
    cpu, hung, errors = 0.0, 0, []
    for number, text in enumerate(said):
        answer: dict[str, Any] = json.loads(text) if text else {"error": "hung"}
        if "error" in answer:
            hung += answer["error"] == "hung"
            errors.append(answer["error"])
        else:
            cpu += answer["cpu"]
            turns += [Turn(number, *turn) for turn in answer["turns"]]
    row = judged(turns)
    holds = row["holds"] or 1
    row |= {"client_cpu_ms": cpu / holds * 1000, "hung": hung}
    if server is not None:
        row["server_cpu_ms"] = server / holds * 1000
    if errors:
        row["errors"] = sorted(set(errors))
    return row


def _spawn(contender: Contender, target: Target, pace: Pace) -> tuple[int, int]:
    """Returns the descriptors to read a child from and to start it with."""
    order, go = os.pipe()

    def work(writer: int) -> Any:
        os.close(go)

        def ready() -> float:
            os.write(writer, b"r")
            with os.fdopen(order) as line:
                return float(line.readline())

        play = _play if contender.flavour == "blocking" else _play_async
        return play(contender, target, ready, pace)

    _, reader = in_child(work)
    os.close(order)
    return reader, go


class _Log:
    """What one process noted."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.turns: list[tuple[float, float, float, int]] = []
        self.asked = self.end = self.cpu = 0.0

    def begin(self, start: float) -> None:
        self.end, self.cpu = start + self.pace.seconds, time.process_time()

    def asking(self) -> bool:
        """Whether it goes on."""
        self.asked = time.monotonic()
        return self.asked < self.end

    def note(self, held: float, ended: float, token: object) -> None:
        self.turns.append((self.asked, held, ended, token if type(token) is int else 0))

    def left(self) -> None:
        """It never got what it asked for last."""
        self.note(self.end + LATE_SECONDS, self.end + LATE_SECONDS, 0)

    def answer(self) -> dict[str, Any]:
        return {"turns": self.turns, "cpu": time.process_time() - self.cpu}


def _play(
    contender: Contender, target: Target, ready: Callable[[], float], pace: Pace
) -> dict[str, Any]:
    log = _Log(pace)
    client: Any = contender.open(target)
    own = client.lock(f"{pace.name}:{os.getpid()}")  # connects, and whatever else comes first
    own.acquire()
    own.release()
    pair = client.lock(pace.name)
    clock, sleep = time.monotonic, time.sleep
    log.begin(start := ready())
    sleep(max(0.0, start - clock()))
    try:
        with limited(log.end + LATE_SECONDS - clock()):
            while log.asking():
                token = pair.acquire()
                held = clock()
                sleep(pace.hold_seconds)
                ended = clock()
                pair.release()
                log.note(held, ended, token)
                if pace.pause_seconds:
                    sleep(pace.pause_seconds)
    except Alarm:
        log.left()
    return log.answer()


def _play_async(
    contender: Contender, target: Target, ready: Callable[[], float], pace: Pace
) -> dict[str, Any]:
    log = _Log(pace)
    clock, sleep = time.monotonic, asyncio.sleep

    async def main() -> None:
        client: Any = await contender.open(target)  # type: ignore[misc]
        own = client.lock(f"{pace.name}:{os.getpid()}")
        await own.acquire()
        await own.release()
        pair = client.lock(pace.name)
        log.begin(start := ready())
        await sleep(max(0.0, start - clock()))
        async with asyncio.timeout(log.end + LATE_SECONDS - clock()):
            while log.asking():
                token = await pair.acquire()
                held = clock()
                await sleep(pace.hold_seconds)
                ended = clock()
                await pair.release()
                log.note(held, ended, token)
                if pace.pause_seconds:
                    await sleep(pace.pause_seconds)

    try:
        asyncio.Runner().run(main())  # not closed: a peer's tasks may not end
    except TimeoutError:
        log.left()
    return log.answer()


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
