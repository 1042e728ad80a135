"""Jobs that run once per key, or once per interval, across all hosts; the outcome is recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.core.drive import run_now
from holdfast.errors import LockLost, LockTimeout
from holdfast.primitives.decorate import check_client, check_whole, fill
from holdfast.primitives.every import EveryRules
from holdfast.primitives.lock import Lock
from holdfast.primitives.once_job import JobBase, Start, ready
from holdfast.primitives.once_outcome import Outcome

__all__ = ["Every", "Once"]

F = TypeVar("F", bound=Callable[..., Any])


class Once(JobBase[Lock]):
    """A job of the blocking client."""

    _lock = Lock

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
        """Runs the function unless its outcome is recorded, and returns the outcome.

        A function with an argument called ``lease`` gets the lease of the run. An exception of the
        function is raised here. ``LockLost`` (with ``.result``) means that the lock was lost before
        the outcome was recorded.

        ``.value`` and ``.result()`` are what JSON makes of the function's result (a tuple becomes a
        list), in this process as in all others: so their type is ``Any``.
        """
        check_whole(function, "job")
        check_client(function, "jobs", asynchronous=False)
        call = ready(function, args, kwargs)
        found = run_now(self._find())
        return found.outcome or self._run(call, found.stale)

    def _run(self, call: Callable[[Start], Any], stale: Outcome | None) -> Outcome:
        outcome: Outcome | None = None
        begun: Start | Outcome | None = None
        try:
            with self._attempt if stale else self._guard as lease:
                begun = run_now(self._begin(lease))
                outcome = self._execute(begun, call) if isinstance(begun, Start) else begun
        except LockTimeout as error:
            if begun is not None:
                raise  # the function raised it
            return self._instead(stale, error)
        except LockLost:
            if outcome is None:
                raise  # else the outcome is recorded, and a later loss does not matter
        assert outcome is not None
        return outcome

    def _execute(self, start: Start, call: Callable[[Start], Any]) -> Outcome:
        try:
            value = call(start)
        except Exception as error:
            run_now(self._fail(start, error))
            raise
        return run_now(self._finish(start, value))

    def outcome(self) -> Outcome | None:
        """The recorded outcome of the last run that ended; ``None`` if none is recorded. Runs and
        waits for nothing."""
        return run_now(self._recorded())

    def forget(self, token: int | None = None) -> bool:
        """Removes the record, so that the next caller runs the job again; returns whether there
        was one.

        With ``token`` only the record of the run with that token is removed. Waits for a run
        that is under way, within ``timeout``; then raises ``LockTimeout``.
        """
        with self._guard as lease:
            return run_now(self._remove(lease, token))

    def __call__(self, function: F) -> F:
        """As a decorator: a call returns the job's value, whichever process ran it."""
        check_whole(function, "job")
        check_client(function, "jobs", asynchronous=False)
        key = fill(self.key, function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._keyed(key(*args, **kwargs)).run(function, *args, **kwargs).result()

        return call  # type: ignore[return-value]


class Every(EveryRules[Lock], Once):
    """A job of the blocking client that runs once per interval."""
