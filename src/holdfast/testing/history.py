"""The oracle: what workers recorded, and what must never be in it.

Workers append events to one file, each line written whole with one call, so that a killed
worker leaves all it saw. Times are boot time, comparable between the processes of one machine.
From the events come holds, and from the holds three questions: did two who exclude each other
believe in their hold at the same time; did tokens grow; was anybody left behind.

The oracle counts only because it is tested against histories of broken locks.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from holdfast.claim import Mode
from holdfast.io.clock import now

__all__ = [
    "Event",
    "RecordedHold",
    "Recorder",
    "fairness",
    "faults",
    "overtaken",
    "read_holds",
    "to_holds",
]


class Event(NamedTuple):
    """One line of a history."""

    at: float
    process: str
    hold: str
    """The attempt that it belongs to; empty for ``died``."""
    kind: str
    """``asked``, ``held``, ``kept``, ``ended`` (released or lost), ``refused`` or ``died``."""
    name: str = ""
    mode: str = Mode.EXCLUSIVE
    token: int = 0
    slots: tuple[int, ...] = ()
    certain_until: float = 0.0
    """For ``held`` and ``kept``: until when the holder believes in its hold; for ``died``: the
    moment before it was killed."""


class Recorder:
    """Appends events of one process to a file that many processes share."""

    def __init__(self, path: Path, process: str) -> None:
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def asked(self, hold: str, name: str, mode: str = Mode.EXCLUSIVE) -> None:
        """Before the request is sent."""
        self._write(Event(now(), self.process, hold, "asked", name, mode))

    def held(
        self, hold: str, token: int, certain_until: float, slots: tuple[int, ...] = ()
    ) -> None:
        """When the answer is there. ``certain_until`` is ``now() + lease.remaining``, in this
        order: if the process stands still in between, the time is too early, never too late."""
        event = Event(now(), self.process, hold, "held", token=token, slots=slots)
        self._write(event._replace(certain_until=certain_until))

    def kept(self, hold: str, certain_until: float) -> None:
        """When the holder looked and still believed in its hold."""
        self._write(Event(now(), self.process, hold, "kept", certain_until=certain_until))

    def ended(self, hold: str) -> None:
        """Before the release is sent, also that of a cancelled block, or when the loss is known."""
        self._write(Event(now(), self.process, hold, "ended"))

    def refused(self, hold: str) -> None:
        """When it was not acquired."""
        self._write(Event(now(), self.process, hold, "refused"))

    def died(self, process: str, killed: float) -> None:
        """Records the end of a killed process, once it is gone, with the moment before the kill:
        its store may have freed what it held from then on."""
        self._write(Event(now(), process, "", "died", certain_until=killed))

    def _write(self, event: Event) -> None:
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class RecordedHold:
    """What one holder believed: that the name was its own from ``held`` to ``ends``. If ``ends``
    is the earlier of the two, the process stood still until nothing was certain any more."""

    process: str
    name: str
    mode: Mode
    asked: float
    held: float
    ends: float
    token: int
    slots: tuple[int, ...] = ()

    def excludes(self, other: RecordedHold) -> bool:
        """Whether the two must not hold at the same time."""
        if self.name != other.name:
            return False
        if Mode.SLOTS in (self.mode, other.mode):
            return self.mode != other.mode or bool(set(self.slots) & set(other.slots))
        return Mode.EXCLUSIVE in (self.mode, other.mode)

    def __str__(self) -> str:
        slots = f" slots {self.slots}" if self.slots else ""
        span = f"{self.held:.6f}–{self.ends:.6f}"
        return f"{self.process} {self.mode}{slots} token {self.token} held {span}"


def read_holds(path: Path) -> list[RecordedHold]:
    """The holds of a recorded file; a last line that a kill cut off is left out."""
    events = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        at, process, hold, kind, name, mode, token, slots, until = json.loads(line)
        events.append(Event(at, process, hold, kind, name, mode, token, tuple(slots), until))
    return to_holds(events)


def to_holds(events: Iterable[Event]) -> list[RecordedHold]:
    """Puts the events of each attempt together. A hold without an end lasts as long as its
    holder believed in it: until it died, or until its certain time was over."""
    asked: dict[tuple[str, str], Event] = {}
    open_holds: dict[tuple[str, str], RecordedHold] = {}
    holds: list[RecordedHold] = []
    for event in sorted(events, key=lambda event: event.at):
        key = event.process, event.hold
        if event.kind == "asked":
            asked[key] = event
        elif event.kind == "held":
            open_holds[key] = _begun(asked.pop(key), event)
        elif event.kind == "kept" and key in open_holds:
            open_holds[key] = replace(open_holds[key], ends=event.certain_until)
        elif event.kind == "ended" and key in open_holds:
            holds.append(_ended(open_holds.pop(key), event.at))
        elif event.kind == "died":
            dead = [key for key in open_holds if key[0] == event.process]
            holds += [_killed(open_holds.pop(key), event.certain_until) for key in dead]
    return sorted(holds + list(open_holds.values()), key=lambda hold: hold.held)


def _begun(asked: Event, held: Event) -> RecordedHold:
    mode, ends = Mode(asked.mode), held.certain_until
    return RecordedHold(
        held.process, asked.name, mode, asked.at, held.at, ends, held.token, held.slots
    )


def _ended(hold: RecordedHold, at: float) -> RecordedHold:
    return replace(hold, ends=min(hold.ends, at))


def _killed(hold: RecordedHold, at: float) -> RecordedHold:
    return _ended(hold, max(hold.held, at))


def faults(holds: Iterable[RecordedHold]) -> list[str]:
    """All that must never be: overlaps, tokens used twice, tokens that did not grow."""
    by_name: dict[str, list[RecordedHold]] = defaultdict(list)
    for hold in holds:
        by_name[hold.name].append(hold)
    found: list[str] = []
    for name, group in by_name.items():
        ordered = sorted(group, key=lambda hold: hold.held)
        faults_of_name = _overlaps(ordered) + _repeated_tokens(ordered) + _sinking_tokens(ordered)
        found += [f"{name!r}: {fault}" for fault in faults_of_name]
    return found


def _overlaps(holds: Sequence[RecordedHold]) -> list[str]:
    """One sweep by time of grant; those whose belief has ended leave first."""
    found = []
    active: list[tuple[float, int, RecordedHold]] = []
    for number, hold in enumerate(holds):
        while active and active[0][0] <= hold.held:
            heappop(active)
        if hold.ends < hold.held:
            continue
        found += [f"{hold} while {other}" for *_, other in active if hold.excludes(other)]
        heappush(active, (hold.ends, number, hold))
    return found


def _repeated_tokens(holds: Sequence[RecordedHold]) -> list[str]:
    """A token of an exclusive hold is nobody else's; a slot's token is its own in that slot."""
    lanes: dict[object, Counter[int]] = defaultdict(Counter)
    alone: dict[object, set[int]] = defaultdict(set)
    for hold in holds:
        for lane in hold.slots or ("all",):
            lanes[lane][hold.token] += 1
            if hold.mode is not Mode.SHARED:
                alone[lane].add(hold.token)
    return [
        f"token {token} was given {count} times"
        for lane, tokens in lanes.items()
        for token, count in tokens.items()
        if count > 1 and token in alone[lane]
    ]


def _sinking_tokens(holds: Sequence[RecordedHold]) -> list[str]:
    """Who asked after another was granted has a higher token; among readers at least as high."""
    lanes: dict[object, list[RecordedHold]] = defaultdict(list)
    for hold in holds:
        for lane in hold.slots or ("all",):
            lanes[lane].append(hold)
    return [fault for lane in lanes.values() for fault in _sinking_in(lane)]


def _sinking_in(lane: Sequence[RecordedHold]) -> list[str]:
    writers = [hold for hold in lane if hold.mode is not Mode.SHARED]
    highest = list(accumulate((hold.token for hold in lane), max))
    highest_alone = list(accumulate((hold.token for hold in writers), max))
    granted = [hold.held for hold in lane]
    granted_alone = [hold.held for hold in writers]
    found = []
    for hold in lane:
        before = bisect_left(granted, hold.asked)
        least = highest[before - 1] + (hold.mode is not Mode.SHARED) if before else 0
        before = bisect_left(granted_alone, hold.asked)
        least = max(least, highest_alone[before - 1] + 1 if before else 0)
        if hold.token < least:
            found.append(f"{hold} asked after token {least - 1} was granted")
    return found


def fairness(holds: Iterable[RecordedHold], processes: Iterable[str]) -> float:
    """Fewest over most holds per process while all of them contended: 1 is perfectly fair, 0
    means that a process had no hold."""
    asked: dict[str, list[float]] = {process: [] for process in processes}
    for hold in holds:
        asked.setdefault(hold.process, []).append(hold.asked)
    if not all(asked.values()):
        return 0.0
    began, ended = max(map(min, asked.values())), min(map(max, asked.values()))
    counts = [sum(began <= at <= ended for at in times) for times in asked.values()]
    most = max(counts, default=0)
    return min(counts) / most if most else 0.0


def overtaken(holds: Iterable[RecordedHold]) -> float:
    """The share of holds during whose wait another process came, and came again: 0 where turns are
    in order of arrival, however unevenly the processes come. Once is no fault, since nobody knows
    whose request arrived first."""
    by_start = sorted(holds, key=lambda hold: hold.held)
    starts = [hold.held for hold in by_start]
    behind = 0
    for index, hold in enumerate(by_start):
        between = by_start[bisect_left(starts, hold.asked) : index]
        came = Counter(other.process for other in between if other.asked > hold.asked)
        behind += max(came.values(), default=0) > 1
    return behind / len(by_start) if by_start else 0.0
