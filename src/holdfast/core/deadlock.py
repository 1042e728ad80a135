"""Deadlocks: circles of threads or tasks that wait for each other, found by what waiters hold.

A waiter's label names what its thread or task holds in blocks (``Waiter.holds``). Only that thread
or task can end such a hold, by leaving its block, and it waits. So a waiter looks at the names that
it holds, at the waiters there, at the names that these hold, and so on, until it finds the holder
of the name that it waits for itself. That is one look for each name, on every store that shows its
waiters, and none for a waiter that holds nothing. Holders are known again by their tokens, never by
the names of their threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from holdfast.claim import Claim, Holder, LockInfo, Mode, Waiter, read_holds, read_label
from holdfast.core import log

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.core.local_queue import LocalWaiter

__all__ = ["DeadlockSearch", "Member", "find_cycle", "sentence", "still_held"]

SEARCH_SECONDS = 1.0
"""How long a search lasts, and how long it may delay the error of a timeout."""
TURN_POLL_SECONDS = 0.05
"""How often a timeout looks whether another search of its process is over."""
MOST_LOOKS = 64
"""How many names a search looks at."""
LONGEST_CYCLE = 16
"""A circle of more members is not found."""

Look = Callable[[str], Awaitable[LockInfo]]

_searching: dict[tuple[str, int], object] = {}
"""The search that is under way, by host and process: a forked child is another process."""


class Member(NamedTuple):
    """One member of a circle: it holds the name, and waits for the name of the next member. The
    last one waits for the name of the first."""

    name: str
    holder: Holder


class _Step(NamedTuple):
    """A hold, and its thread or task as a waiter."""

    name: str
    token: int
    waiter: Waiter


class _OutOfTime(Exception):
    """The search is over before it has found anything."""


def sentence(cycle: Iterable[Member]) -> str:
    """The circle for people."""
    (name, holder), *others = cycle
    text = f"deadlock: {name!r} is held by {holder}"
    for other, its_holder in others:
        text += f", which waits for {other!r}, held by {its_holder}"
    return f"{text}, which waits for {name!r}"


async def find_cycle(name: str, waiters: Sequence[Waiter], look: Look) -> tuple[Member, ...]:
    """A circle through the name, which one of these waiters waits for; empty if there is none.

    ``look`` gives what the store knows of a name; what it raises ends the search. A circle is
    looked at twice: if all its holds and waits are still there, they were all there at one moment,
    between the two looks.
    """
    infos: dict[str, LockInfo] = {}
    paths = deque([step] for waiter in waiters for step in _steps(waiter))
    seen = {path[0][:2] for path in paths}
    while paths:
        path = paths.popleft()
        held = path[-1]
        if held.name not in infos:
            infos[held.name] = await look(held.name)
        info = infos[held.name]
        if held.name == name:
            if _is_closed(path, info):
                again = {step.name: await look(step.name) for step in path}
                if _is_circle(path, again):
                    return _members(path, again)
        elif len(path) < LONGEST_CYCLE:
            for step in _next_steps(held, info):
                if step[:2] not in seen:
                    seen.add(step[:2])
                    paths.append([*path, step])
    return ()


def _steps(waiter: Waiter) -> list[_Step]:
    return [_Step(name, token, waiter) for name, token in waiter.holds]


def _next_steps(held: _Step, info: LockInfo) -> list[_Step]:
    """What those hold that wait for this hold to end."""
    holder = _holder(info, held)
    if holder is None:
        return []
    blocked = [waiter for waiter in info.waiters if _is_blocked(waiter, info, holder)]
    return [step for waiter in blocked for step in _steps(waiter)]


def _holder(info: LockInfo, held: _Step) -> Holder | None:
    """The holder of this hold, if it still is one."""
    wanted = held.token, held.waiter.host, held.waiter.pid
    for holder in info.holders:
        if (holder.token, holder.host, holder.pid) == wanted:
            return holder
    return None


def _is_blocked(waiter: Waiter, info: LockInfo, holder: Holder) -> bool:
    """Whether the waiter can't get the name while this holder has it, whatever others do.

    A holder of some slots of a semaphore blocks none: another holder may leave. Readers block a
    reader only through a writer that waits in front of it."""
    if holder.mode is Mode.SLOTS:
        return 0 < info.limit <= len(holder.slots)
    if holder.mode is Mode.SHARED and waiter.mode is Mode.SHARED:
        line = info.waiters
        ahead = line[: line.index(waiter)] if waiter in line else line
        return any(other.mode is Mode.EXCLUSIVE for other in ahead)
    return True


def _is_closed(path: Sequence[_Step], info: LockInfo) -> bool:
    """Whether the last hold of the path blocks the waiter that the path begins with."""
    holder = _holder(info, path[-1])
    return holder is not None and _is_blocked(path[0].waiter, info, holder)


def _is_circle(path: Sequence[_Step], infos: dict[str, LockInfo]) -> bool:
    """Whether each hold of the path is there, with the waiter that it blocks."""
    for held, (_, _, waiter) in pairwise(path):
        info = infos[held.name]
        holder = _holder(info, held)
        same = [other for other in info.waiters if _who(other) == _who(waiter)]
        if holder is None or not any(_is_blocked(other, info, holder) for other in same):
            return False
    return _is_closed(path, infos[path[-1].name])


def _who(waiter: Waiter) -> tuple[object, ...]:
    return waiter.host, waiter.pid, waiter.thread, waiter.mode, waiter.holds


def _members(path: Sequence[_Step], infos: dict[str, LockInfo]) -> tuple[Member, ...]:
    holders = [(step.name, _holder(infos[step.name], step)) for step in reversed(path)]
    return tuple(Member(name, holder) for name, holder in holders if holder is not None)


async def still_held(cycle: Iterable[Member], look: Look) -> bool:
    """Whether all holds of a circle are still there."""
    for name, holder in cycle:
        info = await look(name)
        who = {(other.token, other.host, other.pid) for other in info.holders}
        if (holder.token, holder.host, holder.pid) not in who:
            return False
    return True


class DeadlockSearch:
    """The search of one long wait: beside the wait, once, and at its timeout.

    A failure of the store ends it, and nothing else: it is logged at DEBUG."""

    __slots__ = ("_begun", "_cycle", "_engine", "_waiter")

    def __init__(self, engine: Engine, waiter: LocalWaiter) -> None:
        self._engine, self._waiter = engine, waiter
        self._begun = False
        self._cycle: tuple[Member, ...] = ()
        """What the search beside the wait has found."""

    async def begin(self, *, for_error: bool) -> None:
        """Searches in the background and logs a deadlock, once. Does nothing while another search
        of this process is under way, and if neither the log nor an error would tell the result."""
        runtime = self._engine.runtime
        if self._begun or runtime.where() in _searching or not self._waiters():
            return
        if not for_error and not log.wants_warning("lock"):
            return
        self._begun = True
        work = self._search_and_log()
        # Both return at once; the blocking runtime does ``finish`` in the foreground.
        await (runtime.within(work, 0.0) if runtime.blocking else runtime.finish(work, 0.0))

    async def at_timeout(self) -> tuple[str, tuple[str, ...]]:
        """The deadlock that the wait was in when its time was over: the end of the error's message,
        and the names of the circle. Both are empty if there is none."""
        if not self._waiters():
            return "", ()
        cycle = await self._engine.runtime.within(self._search_in_turn(), SEARCH_SECONDS)
        return (f"; {sentence(cycle)}", names_of(cycle)) if cycle else ("", ())

    def _waiters(self) -> list[Waiter]:
        """This waiter, and those of its client behind it: the ones that hold something."""
        own, queues = self._waiter, self._engine.local_queues
        claims = [other.claim for other in queues.of(own.claim.name) if other is not own]
        return [each for each in map(_as_waiter, [own.claim, *claims]) if each.holds]

    async def _search_and_log(self) -> None:
        cycle = await self._search(self._engine.runtime.now() + SEARCH_SECONDS)
        if not cycle or self._waiter.gone or self._waiter.answer is not None:
            return
        self._cycle = cycle
        store, name = self._engine.store.display, self._waiter.claim.name
        about = {"event": "deadlock", "store": store, "name": name, "names": names_of(cycle)}
        log.warning("%s (%s)", sentence(cycle), store, part="lock", **about)

    async def _search_in_turn(self) -> tuple[Member, ...]:
        runtime = self._engine.runtime
        until = runtime.now() + SEARCH_SECONDS
        while runtime.now() < until:
            cycle = await self._search(until)
            if cycle is not None:
                return cycle
            await runtime.sleep(TURN_POLL_SECONDS)
        return ()

    async def _search(self, until: float) -> tuple[Member, ...] | None:
        """Searches until then; ``None`` if another search of this process is under way."""
        where, turn = self._engine.runtime.where(), object()
        if _searching.setdefault(where, turn) is not turn:
            return None
        try:
            look = _Looks(self._engine, until)
            if self._cycle and await still_held(self._cycle, look):
                return self._cycle
            return await find_cycle(self._waiter.claim.name, self._waiters(), look)
        except Exception as error:  # noqa: BLE001 - the wait is what counts
            text = "the search for a deadlock of %r has ended: %r"
            log.debug(text, self._waiter.claim.name, error, part="lock")
            return ()
        finally:
            _searching.pop(where, None)


class _Looks:
    """Looks at names, as many and as long as a search may; local waiters count, too."""

    __slots__ = ("_engine", "_left", "_until")

    def __init__(self, engine: Engine, until: float) -> None:
        self._engine, self._until = engine, until
        self._left = MOST_LOOKS

    async def __call__(self, name: str) -> LockInfo:
        self._left -= 1
        if self._left < 0 or self._engine.runtime.now() >= self._until:
            raise _OutOfTime
        info = await self._engine.backend.look(name)
        local = [_as_waiter(waiter.claim) for waiter in self._engine.local_queues.of(name)]
        return info._replace(waiters=(*info.waiters, *local))


def _as_waiter(claim: Claim) -> Waiter:
    return Waiter(*read_label(claim.label), claim.mode, 0.0, 0, read_holds(claim.label))


def names_of(cycle: Iterable[Member]) -> tuple[str, ...]:
    """The names of a circle, in its order."""
    return tuple(member.name for member in cycle)
