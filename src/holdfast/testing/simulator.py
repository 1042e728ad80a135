"""The third world: virtual time, one thread, one seed. The real core runs in it unchanged.

A ``World`` is a heap of things to happen. A ``Node`` is a machine in it, with a clock that
drifts, that may be paused or crash, and with tasks. ``SimRuntime`` is the core's ``Runtime`` on
a node; ``SimBackend`` is a node's connection to a ledger on a server, over a network that delays,
reorders between connections and loses. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
import types
from collections.abc import Callable, Coroutine, Generator, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal, TypeVar

from holdfast.core.contract import Signal

__all__ = ["Cancelled", "Node", "SimRuntime", "SimSignal", "SimTask", "World"]

Outcome = Literal["set", "late"]
T = TypeVar("T")


class Cancelled(BaseException):
    """Thrown into a simulated task at the point where it waits, as asyncio does."""


class SimSignal:
    """A signal whose waiters are simulated tasks."""

    __slots__ = ("_set", "waiters")

    def __init__(self) -> None:
        self._set = False
        self.waiters: list[SimTask] = []

    def set(self) -> None:
        self._set = True
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            task.wake("set")

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False


@types.coroutine
def _suspend(signal: SimSignal | None, until: float | None) -> Generator[Any, Outcome, Outcome]:
    """The only point at which a simulated task ever stands still."""
    return (yield signal, until)


class SimTask:
    """A coroutine on a node."""

    def __init__(self, node: Node, work: Coroutine[Any, Any, Any], name: str) -> None:
        self.node, self.name = node, name
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.finished = SimSignal()
        self._work = work
        self._wakes = 0
        self._signal: SimSignal | None = None
        self._cancel = False
        if node.world.ended or node.crashed:
            self.close()
        node.world.after(0.0, lambda: self._step("late", 0), node)

    def close(self) -> None:
        """Ends it without a word, as a crash does."""
        self.done = True
        self._work.close()

    def wake(self, outcome: Outcome, when: int | None = None) -> None:
        """Lets it go on, unless it has gone on since."""
        due = self._wakes if when is None else when
        self.node.world.after(0.0, lambda: self._step(outcome, due), self.node)

    def cancel(self) -> None:
        """Throws ``Cancelled`` into it where it waits, or will wait next."""
        if not self.done:
            self._cancel = True
            self.wake("late")

    def _step(self, outcome: Outcome, due: int) -> None:
        if self.done or due != self._wakes or self.node.crashed:
            return
        self._wakes += 1
        if self._signal is not None and self in self._signal.waiters:
            self._signal.waiters.remove(self)
        self.node.world.running = self
        try:
            if self._cancel:
                self._cancel = False
                request = self._work.throw(Cancelled())
            else:
                request = self._work.send(None if self._wakes == 1 else outcome)
        except StopIteration as end:
            self._end(end.value, None)
        except BaseException as error:  # noqa: BLE001 - it is the task's result
            self._end(None, error)
        else:
            self._stand_still(*request)
        finally:
            self.node.world.running = None

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.done, self.result, self.error = True, result, error
        self.finished.set()
        if error is not None and not isinstance(error, Cancelled):
            self.node.world.errors.append((self.name, error))

    def _stand_still(self, signal: SimSignal | None, until: float | None) -> None:
        due = self._wakes
        self._signal = signal
        if self._cancel or (signal is not None and signal.is_set()):
            self.wake("set", due)
            return
        if signal is not None:
            signal.waiters.append(self)
        if until is not None:
            at = self.node.true_time(until)
            self.node.world.at(at, lambda: self._step("late", due), self.node)


class Node:
    """A machine: its clock runs a little fast or slow, and starts anywhere."""

    def __init__(self, world: World, name: str, *, drift: float, skew: float) -> None:
        self.world, self.name = world, name
        self.rate, self.offset, self.skew = 1.0 + drift, world.random.uniform(0, 1e6), skew
        self.crashed = False
        self.paused_until = 0.0

    def now(self) -> float:
        return self.world.time * self.rate + self.offset

    def wall(self) -> float:
        return 1.7e9 + self.world.time * self.rate + self.skew

    def true_time(self, local: float) -> float:
        """When this node's clock will show that."""
        return (local - self.offset) / self.rate

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "task") -> SimTask:
        task = SimTask(self, work, f"{self.name}/{name}")
        self.world.tasks.append(task)
        return task

    def pause(self, seconds: float) -> None:
        """Nothing runs here for so long, while time goes on."""
        self.paused_until = max(self.paused_until, self.world.time + seconds)

    def crash(self) -> None:
        """Nothing ever runs here again; what it sent is still under way."""
        self.crashed = True


class World:
    """Virtual time and everything that is to happen in it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.running: SimTask | None = None
        self.errors: list[tuple[str, BaseException]] = []
        self.tasks: list[SimTask] = []
        self.ended = False
        self._heap: list[tuple[float, int, Node | None, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, happen: Callable[[], None], node: Node | None = None) -> None:
        """Lets something happen then; on a node, not before its pause is over."""
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.time), self._count, node, happen))

    def after(self, seconds: float, happen: Callable[[], None], node: Node | None = None) -> None:
        self.at(self.time + seconds, happen, node)

    def run(self, until: float, *, steps: int = 2_000_000) -> None:
        """Lets everything happen up to a time; raises if that does not end."""
        for _ in range(steps):
            if not self._heap or self._heap[0][0] > until:
                self.time = max(self.time, until)
                return
            time, _, node, happen = heapq.heappop(self._heap)
            self.time = time
            if node is not None and node.paused_until > time:
                self.at(node.paused_until, happen, node)
            elif node is None or not node.crashed:
                happen()
        raise RuntimeError(f"the simulation did not come to an end in {steps} steps")

    def end(self) -> None:
        """Closes all that still stands somewhere; nothing starts any more."""
        self.ended = True
        for task in self.tasks:
            if not task.done:
                task.close()


class SimRuntime:
    """The core's runtime on one node."""

    def __init__(self, node: Node, *, blocking: bool = False) -> None:
        self.node = node
        self.blocking = blocking
        self.now, self.wall = node.now, node.wall
        self.between = node.world.random.uniform

    def where(self) -> tuple[str, int]:
        return self.node.name, 1

    def me(self) -> Hashable:
        return self.node.world.running

    def name_of(self, caller: Hashable) -> str:
        return caller.name if isinstance(caller, SimTask) else "?"

    def alive(self, caller: Hashable) -> bool:
        return isinstance(caller, SimTask) and not caller.done

    def mutex(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def signal(self) -> Signal:
        return SimSignal()

    async def wait(self, signal: Signal, until: float | None) -> bool:
        assert isinstance(signal, SimSignal)
        if not signal.is_set():
            await _suspend(signal, until)
        return signal.is_set()

    async def sleep(self, seconds: float) -> None:
        await _suspend(None, self.now() + seconds)

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        task = self.node.spawn(work, "finish")
        await self.wait(task.finished, self.now() + seconds)

    async def within(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        results: list[T] = []

        async def run() -> None:
            with suppress(Exception):
                results.append(await work)

        await self.finish(run(), seconds)
        return results[0] if results else None
