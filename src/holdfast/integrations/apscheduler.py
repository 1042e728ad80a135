"""APScheduler 3 in many processes: each fire time of a job runs once.

    several processes, each with the same schedule
        scheduler → Once.submit_job(job, fire times) → the executor of APScheduler → once(key)

The key is the job's id and the fire time, so no process leads and none has to be found dead. The
first process at a fire time runs the job; the others find that it runs or has run, and skip it.

>>> from apscheduler.executors.pool import ThreadPoolExecutor
>>> import holdfast
>>> locks = holdfast.connect("memory://apscheduler")
>>> executors = {"default": Once(ThreadPoolExecutor(10), locks)}
>>> locks.close()
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import AsyncLocks, BackendUnavailable, Locks, Outcome
from holdfast.integrations import missing_extra
from holdfast.integrations.asgi import on_loop

try:
    from apscheduler.executors.asyncio import AsyncIOExecutor
    from apscheduler.executors.base import BaseExecutor
    from apscheduler.executors.pool import ProcessPoolExecutor
    from apscheduler.triggers.combining import BaseCombiningTrigger
    from apscheduler.triggers.interval import IntervalTrigger
except ModuleNotFoundError as error:
    raise missing_extra(error, "apscheduler") from None

__all__ = ["Once"]

log = logging.getLogger("holdfast.apscheduler")

CLOCK_SECONDS = 3600.0
"""By how much the clocks of two hosts may differ: outcomes are kept for this long, at least."""
LATEST_SECONDS = 7 * 24 * 3600.0
"""How late a job without a ``misfire_grace_time`` is expected to start, at most."""
LONGEST_KEEP_SECONDS = 366 * 24 * 3600.0
"""For longer nothing is recorded."""
RETRY_SECONDS = (0.2, 0.6)
EARLY = timedelta(milliseconds=1)
"""Interval triggers add up fractions: a fire time on a full interval may be a microsecond early."""


class Once(BaseExecutor):  # type: ignore[misc]
    """An executor for schedules that run in several processes: each fire time runs once.

    It wraps an executor of APScheduler: ``Once(ThreadPoolExecutor(10), holdfast.connect(url))``, or
    ``Once(AsyncIOExecutor(), holdfast.connect_async(url))`` for ``async def`` jobs. The job's
    ``max_instances`` then counts in all processes together.

    A job whose process is killed in the middle is not run again at that fire time, as with a single
    scheduler; it counts as running for up to ``ttl`` seconds. With ``take_over=True`` the other
    processes wait for the outcome, each with a thread or task of its executor, and one of them runs
    the job again after that time.

    ``keep`` is how long an outcome is recorded. By default it is the job's ``misfire_grace_time``
    plus an hour, by which the clocks of the hosts may differ. For an interval trigger it is longer
    by the interval, during which the processes come to it at different times.

    Raises ``ValueError``, when the scheduler starts, for a job whose fire times can't be the same
    in all processes (one without an id of its own, or with jitter), or whose interval is longer
    than ``keep``.
    """

    def __init__(
        self,
        executor: BaseExecutor,
        locks: Locks | AsyncLocks,
        *,
        take_over: bool = False,
        ttl: float = 30,
        keep: float | None = None,
    ) -> None:
        super().__init__()
        if isinstance(executor, ProcessPoolExecutor):
            raise TypeError("a lock is held by the process of the scheduler: use a thread pool")
        if isinstance(executor, AsyncIOExecutor) != isinstance(locks, AsyncLocks):
            needed = "connect_async" if isinstance(executor, AsyncIOExecutor) else "connect"
            raise TypeError(f"{type(executor).__name__} needs a client of holdfast.{needed}()")
        locks.once("any", keep=keep or CLOCK_SECONDS, ttl=ttl)  # what can't be is refused here
        self.executor, self.locks = executor, locks
        self.take_over, self.ttl, self.keep = take_over, ttl, keep

    def start(self, scheduler: Any, alias: str) -> None:
        """Called by the scheduler. Raises ``ValueError`` for a job that can't be run once."""
        for job in scheduler.get_jobs():
            if job.executor == alias:
                check(job, self.keep)
        self.executor.start(scheduler, alias)

    def shutdown(self, wait: bool = True) -> None:
        """Called by the scheduler. The client is left open."""
        self.executor.shutdown(wait)

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        """Called by the scheduler when a job is due."""
        check(job, self.keep)
        self._do_submit_job(job, run_times)

    def _do_submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:
        run = _Run(job, self)
        self.executor.submit_job(run, run.each(run_times))


def check(job: Any, keep: float | None) -> None:
    """Raises ``ValueError`` for a job whose fire times differ between processes, or whose outcome
    is forgotten before its interval ends."""
    if _is_random(job.id):
        raise ValueError(
            f"{job}: all processes need the same id for it, and this one was made up: "
            "add_job(…, id='…')"
        )
    for trigger in _triggers(job.trigger):
        if getattr(trigger, "jitter", None):
            raise ValueError(f"{job}: with jitter its fire times differ between processes")
        if isinstance(trigger, IntervalTrigger) and trigger is not job.trigger:
            raise ValueError(f"{job}: an interval in a combined trigger differs between processes")
    length = _interval(job)
    if keep is not None and keep < length:
        raise ValueError(f"{job}: keep={keep:g} is shorter than its interval of {length:g} s")


def _interval(job: Any) -> float:
    """The seconds of an interval trigger; 0 for other jobs."""
    trigger = job.trigger
    return trigger.interval.total_seconds() if isinstance(trigger, IntervalTrigger) else 0.0


def _is_random(job_id: str) -> bool:
    """Whether APScheduler made up the id, for a job that was added without one."""
    try:
        return uuid.UUID(job_id).hex == job_id and uuid.UUID(job_id).version == 4
    except ValueError:
        return False


def _triggers(trigger: Any) -> Iterator[Any]:
    yield trigger
    if isinstance(trigger, BaseCombiningTrigger):
        for inner in trigger.triggers:
            yield from _triggers(inner)


class _Run:
    """A job as the wrapped executor sees it: its function runs once per fire time.

    The executor iterates over the fire times and calls ``func`` for each that is not too late.
    """

    def __init__(self, job: Any, executor: Once) -> None:
        self.job, self.executor = job, executor
        self.func = self.call_async if isinstance(executor.locks, AsyncLocks) else self.call
        self.fire_time = datetime.now(UTC)

    def __getattr__(self, word: str) -> Any:
        return getattr(self.job, word)

    def __str__(self) -> str:
        return str(self.job)

    def each(self, run_times: Iterable[datetime]) -> Iterator[datetime]:
        """The fire times; remembers which one is being run."""
        for self.fire_time in run_times:
            yield self.fire_time

    def key(self) -> str:
        """The job and its fire time, the same in all processes. Interval triggers count from the
        start of their process: theirs is the number of the interval since the epoch."""
        moment = self.fire_time.astimezone(UTC)
        if length := _interval(self.job):
            number = math.floor((moment + EARLY).timestamp() / length)
            return f"apscheduler/{self.job.id}/{length:g}s/{number}"
        return f"apscheduler/{self.job.id}/{moment.isoformat()}"

    def once(self) -> Any:
        """The job of this fire time, on either client."""
        late = self.job.misfire_grace_time
        usual = CLOCK_SECONDS + (LATEST_SECONDS if late is None else late) + _interval(self.job)
        return self.executor.locks.once(
            self.key(),
            keep=self.executor.keep or min(usual, LONGEST_KEEP_SECONDS),
            ttl=self.executor.ttl,
            wait=self.executor.take_over,
        )

    def instances(self) -> Any:
        """As many slots as instances of the job may run, in all processes together. A run that
        takes over waits until the slot of the killed process is free."""
        limit, ttl = self.job.max_instances, self.executor.ttl
        name = f"apscheduler/{self.job.id}/instances/{limit}"
        timeout = ttl if self.executor.take_over else 0
        return self.executor.locks.semaphore(name, limit, ttl=ttl, timeout=timeout)

    def retry(self, call: _JobCall, error: BackendUnavailable) -> float:
        """After how many seconds to try a store again that can't be reached. Raises the error if
        the job has begun, or would be too late then."""
        late = self.job.misfire_grace_time
        latest = CLOCK_SECONDS if late is None else float(late)
        delay = random.uniform(*RETRY_SECONDS)
        if call.begun or datetime.now(UTC) + timedelta(seconds=delay - latest) > self.fire_time:
            raise error
        return delay

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the job unless another process runs it or has run it. Returns its value, or the
        ``Outcome`` of the run of another process."""
        call = _JobCall()

        @functools.wraps(self.job.func)
        def run(*args: Any, **kwargs: Any) -> str:
            slot = self.instances().acquire()
            if slot is None:
                return self.busy()
            try:
                call.begun = True
                call.value = self.job.func(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 raised to APScheduler by answer()
                call.error = error
            finally:
                slot.release()
            return call.recorded()

        while True:
            try:
                outcome = self.once().run(run, *args, **kwargs)
            except BackendUnavailable as error:
                time.sleep(self.retry(call, error))
            else:
                return self.answer(call, outcome)

    async def call_async(self, *args: Any, **kwargs: Any) -> Any:
        """``call`` for the asyncio client; a ``def`` runs in a thread, as APScheduler does it, and
        keeps its slot until it ends."""
        call = _JobCall()

        @functools.wraps(self.job.func)
        async def run(*args: Any, **kwargs: Any) -> str:
            slot = await self.instances().acquire()
            if slot is None:
                return self.busy()
            try:
                call.begun = True
                call.value = await on_loop(self.job.func)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 raised to APScheduler by answer()
                call.error = error
            finally:
                await slot.release()
            return call.recorded()

        while True:
            try:
                outcome = await self.once().run(run, *args, **kwargs)
            except BackendUnavailable as error:
                await asyncio.sleep(self.retry(call, error))
            else:
                return self.answer(call, outcome)

    def busy(self) -> str:
        """All instances are running: this fire time is skipped, in all processes."""
        log.warning(
            "%s, due at %s: skipped, as %d of it run already (max_instances)",
            *(self.job.id, self.fire_time, self.job.max_instances),
        )
        return "max_instances"

    def answer(self, call: _JobCall, outcome: Outcome) -> Any:
        """What listeners get as the job's value; raises the job's own error."""
        if call.error is not None:
            raise call.error
        if call.begun:
            log.info("%s, due at %s: run by this process", self.job.id, self.fire_time)
            return call.value
        log.debug("%s, due at %s: not run by this process", self.job.id, self.fire_time)
        return outcome


class _JobCall:
    """What the job did in this process. The record has only a word of it: a job may return what
    JSON can't hold, and its error belongs to the process that ran it."""

    begun = False
    value: Any = None
    error: Exception | None = None

    def recorded(self) -> str:
        return "ran" if self.error is None else f"raised {type(self.error).__name__}"
