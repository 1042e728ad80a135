"""A job that runs once per key across the fleet, with its outcome recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.core.drive import run_now
from holdfast.errors import LockLost, LockTimeout
from holdfast.primitives.decorate import check_client, check_whole, fill
from holdfast.primitives.lock import Lock
from holdfast.primitives.once_job import JobBase, Start, ready
from holdfast.primitives.once_outcome import Outcome

__all__ = ["Once"]

F = TypeVar("F", bound=Callable[..., Any])


class Once(JobBase[Lock]):
    """A job of the blocking client."""

    _lock = Lock

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
        """Runs the function unless its outcome is recorded, and answers the outcome.

        A function with an argument called ``lease`` is given the run's lease. Its own exception
        is raised here; ``LockLost`` (with ``.result``) means that the outcome came too late.
        """
        check_whole(function, "job")
        check_client(function, "jobs", asynchronous=False)
        call = ready(function, args, kwargs)
        found = run_now(self._find())
        return self._run(call) if found is None else found

    def _run(self, call: Callable[[Start], Any]) -> Outcome:
        outcome: Outcome | None = None
        begun: Start | Outcome | None = None
        try:
            with self._guard as lease:
                begun = run_now(self._begin(lease))
                outcome = self._execute(begun, call) if isinstance(begun, Start) else begun
        except LockTimeout as error:
            if begun is not None:
                raise  # the function's own
            return self._busy(error)
        except LockLost:
            if outcome is None:
                raise  # else it is recorded, and whatever came after it does not matter
        assert outcome is not None
        return outcome

    def _execute(self, start: Start, call: Callable[[Start], Any]) -> Outcome:
        try:
            value = call(start)
        except Exception as error:
            run_now(self._fail(start, error))
            raise
        return run_now(self._finish(start, value))

    def __call__(self, function: F) -> F:
        """As a decorator: a call answers the job's value, whoever ran it."""
        check_whole(function, "job")
        check_client(function, "jobs", asynchronous=False)
        key = fill(self.key, function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._keyed(key(*args, **kwargs)).run(function, *args, **kwargs).result()

        return call  # type: ignore[return-value]
