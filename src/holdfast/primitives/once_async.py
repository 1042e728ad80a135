"""Jobs of the asyncio client: the twin of ``primitives.once``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.errors import LockLost, LockTimeout
from holdfast.primitives.decorate import check_client, check_whole, fill
from holdfast.primitives.every import EveryRules
from holdfast.primitives.lock_async import AsyncLock
from holdfast.primitives.once_job import JobBase, Start, ready
from holdfast.primitives.once_outcome import Outcome

__all__ = ["AsyncEvery", "AsyncOnce"]

F = TypeVar("F", bound=Callable[..., Any])


class AsyncOnce(JobBase[AsyncLock]):
    """A job of the asyncio client."""

    _lock = AsyncLock

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
        """Runs the function unless its outcome is recorded, and returns the outcome.

        The function is an ``async def`` or a ``def`` (which runs on the loop). A function with an
        argument called ``lease`` gets the lease of the run. An exception of the function is raised
        here. ``LockLost`` (with ``.result``) means that the lock was lost before the outcome was
        recorded.

        ``.value`` and ``.result()`` are what JSON makes of the function's result (a tuple becomes a
        list), in this process as in all others: so their type is ``Any``.
        """
        check_whole(function, "job")
        call = ready(function, args, kwargs)
        found = await self._find()
        return found.outcome or await self._run(call, found.stale)

    async def _run(self, call: Callable[[Start], Any], stale: Outcome | None) -> Outcome:
        outcome: Outcome | None = None
        begun: Start | Outcome | None = None
        returned: list[Any] = []
        try:
            async with self._attempt if stale else self._guard as lease:
                begun = await self._begin(lease)
                if isinstance(begun, Start):
                    outcome = await self._execute(begun, call, returned)
                else:
                    outcome = begun
        except LockTimeout as error:
            if begun is not None:
                raise  # the function raised it
            return self._instead(stale, error)
        except LockLost as lost:
            if outcome is None:
                if (
                    returned and lost.result is None
                ):  # cancelled while the outcome was being recorded
                    lost.result = returned[0]
                raise
        assert outcome is not None
        return outcome

    async def _execute(
        self, start: Start, call: Callable[[Start], Any], returned: list[Any]
    ) -> Outcome:
        try:
            value = call(start)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            await self._fail(start, error)
            raise
        returned.append(value)
        return await self._finish(start, value)

    async def outcome(self) -> Outcome | None:
        """The recorded outcome of the last run that ended; ``None`` if none is recorded. Runs and
        waits for nothing."""
        return await self._recorded()

    async def forget(self, token: int | None = None) -> bool:
        """Removes the record, so that the next caller runs the job again; returns whether there
        was one.

        With ``token`` only the record of the run with that token is removed. Waits for a run
        that is under way, within ``timeout``; then raises ``LockTimeout``.
        """
        async with self._guard as lease:
            return await self._remove(lease, token)

    def __call__(self, function: F) -> F:
        """As a decorator of an ``async def``: a call returns the job's value, whichever process ran
        it."""
        check_whole(function, "job")
        check_client(function, "jobs", asynchronous=True)
        key = fill(self.key, function)

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            outcome = await self._keyed(key(*args, **kwargs)).run(function, *args, **kwargs)
            return outcome.result()

        return call  # type: ignore[return-value]


class AsyncEvery(EveryRules[AsyncLock], AsyncOnce):
    """A job of the asyncio client that runs once per interval."""
