"""Jobs that one worker of many runs, and answers for errors of locks, in any ASGI application.

    from holdfast.integrations.asgi import fleet, lifespan

    app = FastAPI(lifespan=lifespan("redis://cache"))            # app.state.locks

    @fleet.every(60)                                             # one worker per interval
    async def sweep(): ...

Starlette, FastAPI and Litestar take the same ``lifespan``.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from datetime import timedelta
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from holdfast import AsyncLock, AsyncLocks, BackendUnavailable, LockLost, Outcome, connect_async
from holdfast.integrations.problem import LockErrors

__all__ = ["Fleet", "LockErrors", "client_of", "fleet", "lifespan"]

F = TypeVar("F", bound=Callable[..., Any])
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]

YEAR_SECONDS = 365 * 24 * 3600
RETRY_SECONDS = (1.0, 2.0)
"""How soon a failed job is looked at again, at random in between."""
MOST_DOUBLINGS = 3
"""How often that time doubles while a store is away, at most."""
BUSY_SECONDS = 10.0
"""How soon a worker looks again at a job that another worker runs: that one may be killed."""
LONGEST_SLEEP_SECONDS = 300.0
"""A machine that was suspended is not late by more than this."""
LONGEST_JITTER_SECONDS = 0.5

_log = logging.getLogger("holdfast.integrations.asgi")


class _Job(NamedTuple):
    """A function of a fleet."""

    name: str
    function: Callable[..., Any]
    run: Callable[[AsyncLocks, _Job, asyncio.Event], Coroutine[Any, Any, None]]
    options: dict[str, Any]
    at_start: bool = False


class Fleet:
    """Jobs of which each is run by one worker of all that share a store.

    The decorators return the function as it is. A function gets the lease of its run as ``lease``,
    if it has such an argument. The jobs run while the ``lifespan`` of an application lasts.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    def every(
        self, interval: float | timedelta, name: str | None = None, **options: Any
    ) -> Callable[[F], F]:
        """One run per interval, by any worker; takes the options of ``locks.every``.

        A worker that is killed in the middle is replaced by another within its ttl and ten seconds.
        An ``async def`` is cancelled before its lock ends; a ``def`` runs in a thread, and a worker
        that shuts down waits for it. An exception is logged, and counts as the run
        (``errors="retry"``: it is run again).
        """
        return self._adds(name, _run_every, {"interval": interval, **options})

    def leader(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """An ``async def`` that runs on one worker, for as long as it leads; takes the options of
        ``locks.election``.

        It is cancelled when the leadership is doubtful or the worker shuts down. Another worker
        then runs it, also if it returns or raises.
        """
        return self._adds(name, _lead, {"timeout": None, **options})

    def once_per_deploy(
        self, release: str, name: str | None = None, *, timeout: float = 60, **options: Any
    ) -> Callable[[F], F]:
        """Work at the start of a release: one worker does it, the others wait for its end.

        Takes the options of ``locks.once``. A worker does not start if the function raises
        (``LockTimeout`` if it is not done within ``timeout``); the next worker tries again.
        """
        if not isinstance(release, str) or not release:
            raise ValueError(f"release is the version that is deployed, as text; not {release!r}")
        options = {"keep": YEAR_SECONDS, **options, "timeout": timeout, "release": release}
        return self._adds(name, _run_once, options, at_start=True)

    def _adds(
        self, name: str | None, run: Any, options: dict[str, Any], at_start: bool = False
    ) -> Callable[[F], F]:
        def add(function: F) -> F:
            if run is _lead and not inspect.iscoroutinefunction(function):
                raise TypeError("a leader is an async def: it is cancelled when it leads no more")
            job = _Job(name or _name_of(function), function, run, options, at_start)
            if job.name in self._jobs:
                _check_again(job, self._jobs[job.name])
            self._jobs[job.name] = job
            return function

        return add

    @asynccontextmanager
    async def run(self, locks: AsyncLocks) -> AsyncIterator[None]:
        """Runs the jobs for as long as the block lasts; ``lifespan`` does this for you."""
        tasks: list[asyncio.Task[None]] = []
        stopping = asyncio.Event()
        try:
            for job in self._jobs.values():
                if job.at_start:
                    await job.run(locks, job, stopping)
            for job in self._jobs.values():
                if not job.at_start:  # a wrong option is told here, before the application starts
                    tasks += [asyncio.create_task(job.run(locks, job, stopping), name=job.name)]
            yield
        finally:
            stopping.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


fleet = Fleet()
"""The fleet of this process: what ``lifespan`` runs if it is given no other."""


def lifespan(
    url: str | object | None = None,
    *,
    also: Lifespan | None = None,
    fleet: Fleet = fleet,
    **settings: Any,
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """The ``lifespan`` of an application: opens a client as ``app.state.locks``, runs the jobs of
    the fleet, and closes both at shutdown.

    Takes the arguments of ``connect_async``. ``also`` is your own lifespan: it begins before the
    jobs, ends after them, and finds ``app.state.locks``.
    """

    @asynccontextmanager
    async def live(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with connect_async(url, **settings) as locks:
            app.state.locks = locks
            inner: AbstractAsyncContextManager[Any] = nullcontext() if also is None else also(app)
            async with inner as state, fleet.run(locks):
                yield {**(state or {}), "locks": locks}

    return live


def client_of(scope: Mapping[str, Any]) -> AsyncLocks:
    """The client that ``lifespan`` has opened, by the scope of a request."""
    found = (scope.get("state") or {}).get("locks")
    if not isinstance(found, AsyncLocks):
        raise RuntimeError("this application has no client: give it lifespan=lifespan(url)")
    return found


def _run_every(locks: AsyncLocks, job: _Job, stopping: asyncio.Event) -> Coroutine[Any, Any, None]:
    run = locks.every(job.options["interval"], job.name, **_without(job, "interval")).run
    return _repeat(job.name, functools.partial(run, on_loop(job.function)), stopping)


async def _repeat(
    name: str, run: Callable[[], Awaitable[Outcome]], stopping: asyncio.Event
) -> None:
    failures = 0
    while not stopping.is_set():
        wait = random.uniform(*RETRY_SECONDS) * 2**failures
        failures = min(failures + 1, MOST_DOUBLINGS)
        with _reported(name):
            outcome = await run()
            failures = 0
            wait = outcome.next_seconds or 0.0
            if outcome.token is None:  # another worker runs it
                wait = min(wait, BUSY_SECONDS)
        wait = min(wait, LONGEST_SLEEP_SECONDS)
        await _pause(wait + random.uniform(0, min(wait / 20, LONGEST_JITTER_SECONDS)), stopping)


async def _pause(seconds: float, stopping: asyncio.Event) -> None:
    """Sleeps until the fleet stops: its cancellation ended in the job, if the job swallowed it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stopping.wait()


def _lead(locks: AsyncLocks, job: _Job, stopping: asyncio.Event) -> Coroutine[Any, Any, None]:
    return _campaign(locks.election(job.name, **job.options).campaign(), job.function, stopping)


async def _campaign(lock: AsyncLock, function: Callable[..., Any], stopping: asyncio.Event) -> None:
    takes_lease = "lease" in inspect.signature(function).parameters
    while not stopping.is_set():
        with _reported(lock.name):
            async with lock as lease:
                _log.info("this worker leads %r, with token %d", lock.name, lease.token)
                await function(**({"lease": lease} if takes_lease else {}))
        await _pause(random.uniform(*RETRY_SECONDS), stopping)  # not held: another one may lead


async def _run_once(locks: AsyncLocks, job: _Job, _stopping: asyncio.Event) -> None:
    key = f"deploy/{job.options['release']}/{job.name}"
    await locks.once(key, **_without(job, "release")).run(on_loop(job.function))


def _without(job: _Job, word: str) -> dict[str, Any]:
    return {key: value for key, value in job.options.items() if key != word}


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Logs the errors of a run, so that the next run follows."""
    try:
        yield
    except (LockLost, BackendUnavailable) as error:
        _log.warning("the job %r was stopped: %s", name, error)
    except Exception:  # noqa: BLE001 - whatever it is: the next run follows
        _log.exception("the job %r failed", name)


def on_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as an ``async def``. A ``def`` runs in a thread, and a cancellation waits for
    its end: a thread can't be stopped, and what its caller holds must not be released before."""
    if inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        work = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        thread = asyncio.get_running_loop().run_in_executor(None, work)  # no task: not cancelled
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            while not thread.done():
                with suppress(asyncio.CancelledError):  # the lock is lost, then the worker stops
                    await asyncio.wait([thread])
            raise

    return call


def _name_of(function: Callable[..., Any]) -> str:
    """Module and name, the same for a module that is run and for one that is imported."""
    module = function.__module__
    if module == "__main__":
        spec = sys.modules[module].__spec__
        module = Path(_code(function).co_filename).stem if spec is None else spec.name
    return f"{module}.{function.__qualname__}"


def _check_again(job: _Job, before: _Job) -> None:
    """Raises ``ValueError`` for a job of a known name, unless its module was imported again: then
    its code is equal, but made anew."""
    new, old = _code(job.function), _code(before.function)
    if (new.co_filename, new.co_firstlineno) != (old.co_filename, old.co_firstlineno):
        raise ValueError(f"two jobs are called {job.name!r}: give one of them a name=")
    if new is old:
        raise ValueError(
            f"the job {job.name!r} is declared again, of which only the last would run: give each "
            "a name= if they are declared in a loop, or a Fleet() to each application"
        )


def _code(function: Callable[..., Any]) -> CodeType:
    code: CodeType = inspect.unwrap(function).__code__
    return code
