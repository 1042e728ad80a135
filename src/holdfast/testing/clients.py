"""Both clients behind one set of words, so that a test body is written once.

A body is written for ``AsyncLocks``. For the blocking client each object is dressed as its
asyncio twin: a word that the twin awaits runs the blocking call where ``run`` says (in the
current task's own thread, or on the spot), every other word is passed through.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import holdfast
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__ = ["open_client", "run_here"]

Run = Callable[[Callable[[], Any]], Awaitable[Any]]


def open_client(url: str, flavour: Flavour, run: Run, **options: Any) -> AsyncLocks:
    """A client of either kind, with the words of the asyncio one."""
    if flavour is Flavour.ASYNCIO:
        return holdfast.connect_async(url, **options)
    return cast("AsyncLocks", _Dressed(holdfast.connect(url, **options), run))


async def run_here(work: Callable[[], Any]) -> Any:
    """Makes the blocking call on the spot: for a program that has nothing else to do."""
    return work()


_twins: dict[type, type | None] = {}


def _twin(kind: type) -> type | None:
    """The asyncio twin of a blocking type, by its name; ``None`` for values."""
    if kind not in _twins:
        _twins[kind] = _find_twin(kind)
    return _twins[kind]


def _find_twin(kind: type) -> type | None:
    if not kind.__module__.startswith("holdfast.") or hasattr(kind, "__aenter__"):
        return None
    for name in (kind.__module__, f"{kind.__module__}_async"):
        try:
            twin = getattr(importlib.import_module(name), f"Async{kind.__name__}", None)
        except ModuleNotFoundError:
            continue
        if twin is not None:
            return cast("type", twin)
    return None


def _me() -> object:
    """The current task; in a program without a loop, the thread."""
    loop = asyncio._get_running_loop()
    return threading.current_thread() if loop is None else asyncio.current_task(loop)


class _Dressed:
    """A blocking object with the words of its twin."""

    def __init__(self, inner: Any, run: Run) -> None:
        self._inner, self._run = inner, run
        # Each task's ways out, newest last; a task that is gone has no block left to leave.
        self._ways_out: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def __getattr__(self, word: str) -> Any:
        value = getattr(self._inner, word)
        if not callable(value):
            return value
        twin = getattr(_twin(type(self._inner)), word, None)
        if inspect.iscoroutinefunction(twin):
            return self._awaited(value)
        return lambda *args, **options: self._dress(value(*args, **options))

    def _dress(self, result: Any) -> Any:
        if inspect.isgenerator(result):
            return self._iterated(result)
        dressed = _twin(type(result)) is not None or hasattr(result, "read")
        return _Dressed(result, self._run) if dressed else result

    def _awaited(self, method: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            return self._dress(await self._run(lambda: method(*args, **options)))

        return call

    async def _iterated(self, items: Iterator[Any]) -> AsyncIterator[Any]:
        end = object()
        while (item := await self._run(lambda: next(items, end))) is not end:
            yield item

    async def __aenter__(self) -> Any:
        """As ``with`` does it: the way out is looked up first, and kept by the block."""

        def enter() -> tuple[Any, Any]:
            way_out = self._inner.__exit__
            return way_out, self._inner.__enter__()

        way_out, value = await self._run(enter)
        self._ways_out.setdefault(_me(), []).append(way_out)
        return self._dress(value)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Any:
        way_out = self._ways_out[_me()].pop()
        return await self._run(lambda: way_out(kind, error, trace))

    def __call__(self, function: Callable[..., Any]) -> Any:
        """As a decorator it wraps a plain function, which the caller awaits all the same."""
        wrapped = self._inner(function)

        async def call(*args: Any, **options: Any) -> Any:
            return await self._run(lambda: wrapped(*args, **options))

        return call

    def __bool__(self) -> bool:
        return bool(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)
