"""The steps of a job that runs at most once, shared by ``once`` and ``every``.

The record is stored under the lock's own name and is written only under the grant, so a run that
was taken over can't record its late outcome. A run that is recorded as running although its lock is
free has crashed: the next run takes over, and logs that.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

from holdfast.claim import LONGEST_NAME_BYTES, Mode, check_name, kind_of
from holdfast.core import log
from holdfast.core.backoff import RECORD_RETRY_SECONDS
from holdfast.errors import (
    BackendUnavailable,
    HoldfastError,
    InvalidName,
    LockLost,
    LockTimeout,
    ResultNotKept,
)
from holdfast.one_process import OneProcess
from holdfast.primitives.lock import LockBase, template_kind
from holdfast.primitives.once_outcome import (
    LONGEST_ERROR,
    Outcome,
    Previous,
    RunRecord,
    Status,
    pack,
    read,
    write,
)
from holdfast.primitives.options import check_flag

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.lease import LeaseBase
    from holdfast.primitives.options import LockOptions

__all__ = ["Errors", "JobBase", "Plan", "Start", "make_plan", "ready"]

K = TypeVar("K", bound=LockBase[Any])
T = TypeVar("T")
Errors = Literal["retry", "record"]

SHORTEST_KEEP_SECONDS = 24 * 3600.0
"""How long the record of an unfinished run is kept, at least: the next run must see it."""
FORGOTTEN_KEEP_SECONDS = 1.0
"""A record is removed by one that says "to be run again" and expires at once: stores have no
request that deletes a record under a grant."""


class Plan(NamedTuple):
    """The options of a job, checked."""

    keep: float
    errors: Errors
    wait: bool
    stale_for: float = 0.0
    """Seconds after ``keep`` in which a value is still returned while a new one is being made."""


def make_plan(keep: float, errors: Errors, wait: bool, stale_for: float = 0.0) -> Plan:
    """Checks the options of a job; raises ``ValueError`` or ``TypeError``."""
    if errors not in ("retry", "record"):
        raise ValueError(f"errors is 'retry' or 'record'; not {errors!r}")
    return Plan(keep, errors, check_flag(wait, "wait"), stale_for)


class Start(NamedTuple):
    """A run that has begun."""

    lease: LeaseBase
    attempt: int
    took_over: int | None
    due: int = 0
    """Of ``every``: the start of its interval, in µs since the epoch."""
    finished: int = 0
    previous: Previous | None = None
    """The stale value that this run replaces."""


class Found(NamedTuple):
    """What is recorded before a run."""

    outcome: Outcome | None = None
    """The outcome, if nothing is to be run."""
    stale: Outcome | None = None
    """The outcome for a caller that finds the job running."""


class JobBase(OneProcess, Generic[K]):
    """A job with a key, on one client. Any number of threads or tasks may run it at once."""

    _lock: type[K]
    _prefix = "once/"

    def __init__(self, engine: Engine, key: str, options: LockOptions, plan: Plan) -> None:
        if options.reentrant:
            raise TypeError("a job can't be re-entered: it would wait for its own outcome")
        self._engine, self._plan = engine, plan
        self._options = options if plan.wait else options._replace(timeout=0.0)
        self._set(key)

    def _set(self, key: str) -> None:
        self.key = key
        self.name = _name(self._prefix, key)
        self._guard = self._lock(self._engine, self.name, self._options, Mode.EXCLUSIVE)
        at_once = self._options._replace(timeout=0.0)
        self._attempt = self._lock(self._engine, self.name, at_once, Mode.EXCLUSIVE)

    def _keyed(self, key: str) -> Self:
        """The same job with another key, for decorated calls."""
        job = type(self).__new__(type(self))
        job.__dict__.update(self.__dict__)
        if not self._options.kind:
            job._options = self._options._replace(kind=template_kind(self.key, key))
        job._set(key)
        return job

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key!r} on {self._engine.store.display}>"

    # ``every`` overrides these two.

    def _judge(self, recorded: RunRecord | None) -> Outcome | int:
        """The outcome if nothing is to be run; else the start of the interval to run, or 0."""
        if recorded is None or not recorded.ended:
            return 0
        stale = self._plan.stale_for and recorded.age_seconds >= self._plan.keep
        return 0 if stale else recorded.outcome(self.key)

    def _ended(self, outcome: Outcome, recorded: RunRecord) -> Outcome:
        """The outcome that the caller of this run gets."""
        return outcome

    # The steps of a run, in their order.

    async def _find(self) -> Found:
        """The recorded outcome, with one request; none if the job is to be run, or if the store
        can't be reached: the acquire that follows retries during an outage."""
        self._engine.enter()
        try:
            record = await self._engine.backend.recall(self.name)
        except BackendUnavailable:
            return Found()
        recorded = read(record, self.key)
        found = self._judge(recorded)
        if isinstance(found, Outcome):
            self._tell("skipped")
            return Found(found)
        return Found(None, self._stale(recorded))

    def _tell(self, outcome: str) -> None:
        """Tells observers how a call of the job ended."""
        if self._engine.events is not None:
            kind = self._options.kind or kind_of(self.name)
            self._engine.events.ran(self.key, kind, outcome)

    def _stale(self, recorded: RunRecord | None) -> Outcome | None:
        """The value to return while another caller makes a new one, if there is one."""
        last = recorded.last() if recorded is not None and self._plan.stale_for else None
        if last is None or last.age_seconds >= self._plan.keep + self._plan.stale_for:
            return None
        value, token, age = last
        return Outcome(self.key, Status.DONE, value, token=token, age_seconds=age, stale=True)

    def _instead(self, stale: Outcome | None, error: LockTimeout) -> Outcome:
        """The outcome of a caller that finds the job running."""
        if stale is None:
            return self._busy(error)
        self._tell("skipped")
        return stale

    def _busy(self, error: LockTimeout) -> Outcome:
        """The outcome while another process runs the job; raises the error if ``wait`` is set."""
        if self._plan.wait:
            raise error
        self._tell("skipped")
        return Outcome(self.key, Status.SKIPPED, holder=error.holder)

    async def _begin(self, lease: LeaseBase) -> Start | Outcome:
        """Records that the job runs; returns the outcome instead if another run has recorded
        one."""
        backend = self._engine.backend
        recorded = read(await self._insist(lease, lambda: backend.recall(self.name)), self.key)
        due = self._judge(recorded)
        if isinstance(due, Outcome):
            self._tell("skipped")
            return due
        start = _follow(lease, recorded, due)
        if recorded is not None and self._stale(recorded) is not None:
            start = start._replace(previous=recorded.last())
        if start.took_over is not None and recorded is not None:
            log.warning(
                "%r on %s: run %d (token %d, %s) did not finish; run %d with token %d takes over",
                *(
                    self.key,
                    self._engine.store.display,
                    recorded.attempt,
                    recorded.token,
                    recorded.where,
                ),
                *(start.attempt, lease.token),
            )
        host, pid = self._engine.runtime.where()
        if not await self._record(start, Status.RUNNING, where=f"{host} pid {pid}"):
            raise self._late(lease, "has begun")
        return start

    async def _finish(self, start: Start, value: object) -> Outcome:
        """Records that the job is done; raises ``LockLost`` if another run has taken over."""
        text, unkept = "null", None
        try:
            text = pack(value)
        except ResultNotKept as error:  # the job did run: it must not run again
            unkept = error
        kept = json.loads(text)
        lost = "" if unkept is None else str(unkept)
        if not await self._record(start, Status.DONE, value=kept, lost=lost):
            raise self._late(start.lease, "has ended", value)
        self._tell("ran" if start.took_over is None else "resumed")
        if unkept is not None:
            raise ResultNotKept(
                f"{self.key!r} is recorded as done without its result: {unkept}", result=value
            ) from None
        return self._outcome(start, Status.DONE, kept)

    async def _fail(self, start: Start, error: Exception) -> None:
        """Records the error, or that the job may be run again. Raises nothing: the caller raises
        the job's own error."""
        status = Status.FAILED if self._plan.errors == "record" else Status.TRIED
        text = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        try:
            ours = await self._record(start, status, error=text)
        except HoldfastError as unrecorded:
            log.warning("%r failed, and that was not recorded: %s", self.key, unrecorded)
        else:
            if not ours:
                log.warning("%r failed after another run had taken over: not recorded", self.key)
        self._tell("failed")

    async def _recorded(self) -> Outcome | None:
        """The outcome of the last run that ended; ``None`` if none is recorded."""
        self._engine.enter()
        recorded = read(await self._engine.backend.recall(self.name), self.key)
        return recorded.outcome(self.key) if recorded is not None and recorded.ended else None

    async def _remove(self, lease: LeaseBase, token: int | None) -> bool:
        """Removes the record if it is of the run with this token, or of any run."""
        backend, hold = self._engine.backend, lease._hold
        recorded = read(await self._insist(lease, lambda: backend.recall(self.name)), self.key)
        if recorded is None or recorded.status == Status.TRIED:
            return False
        if token is not None and recorded.token != token:
            return False
        text = write(Status.TRIED)
        if not await self._insist(
            lease, lambda: backend.record(hold.grant, text, FORGOTTEN_KEEP_SECONDS)
        ):
            raise self._late(lease, "was to be forgotten")
        return True

    def _outcome(self, start: Start, status: str, value: Any) -> Outcome:
        recorded = RunRecord(
            *(status, start.lease.token, 0.0, start.attempt, value),
            took_over=start.took_over,
            due=start.due,
            finished=start.due,
        )
        return self._ended(recorded.outcome(self.key)._replace(ran=True), recorded)

    async def _record(self, start: Start, status: str, **fields: Any) -> bool:
        ended = status in (Status.DONE, Status.FAILED)
        text = write(
            status,
            attempt=start.attempt,
            took_over=start.took_over,
            due=start.due,
            finished=start.due if ended else start.finished,
            previous=None if status == Status.DONE else start.previous,
            **fields,
        )
        keep = self._plan.keep + self._plan.stale_for
        keep = keep if ended else max(keep, SHORTEST_KEEP_SECONDS)
        backend, hold = self._engine.backend, start.lease._hold
        return await self._insist(start.lease, lambda: backend.record(hold.grant, text, keep))

    async def _insist(self, lease: LeaseBase, request: Callable[[], Awaitable[T]]) -> T:
        """Retries a request until it is answered, while the hold is certain: an outage that is
        shorter than the ttl does not waste a run."""
        runtime = self._engine.runtime
        ends = runtime.now() + self._engine.patience
        while True:
            try:
                return await request()
            except BackendUnavailable:
                delay = runtime.between(*RECORD_RETRY_SECONDS)
                if min(lease.remaining, ends - runtime.now()) <= delay:
                    raise
                await runtime.sleep(delay)

    def _late(self, lease: LeaseBase, what: str, value: object = None) -> LockLost:
        reason = lease.reason or "the store no longer had it"
        return LockLost(
            f"{self.key!r} {what} under token {lease.token} on {self._engine.store.display}, which "
            f"is no longer held ({reason}): this is not recorded, another run takes over",
            name=self.name,
            reason=reason,
            result=value,
        )


def _follow(lease: LeaseBase, recorded: RunRecord | None, due: int) -> Start:
    """The run that follows the recorded one."""
    if recorded is None:
        return Start(lease, 1, None, due)
    attempt = recorded.attempt + 1 if recorded.due == due and not recorded.ended else 1
    crashed = recorded.token if recorded.status == Status.RUNNING else None
    return Start(lease, attempt, crashed, due, recorded.finished)


def _name(prefix: str, key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a job's key is text, not {type(key).__name__}")
    try:
        check_name(key)
    except InvalidName as error:
        raise InvalidName(str(error).replace("a lock's name", "a job's key")) from None
    longest = LONGEST_NAME_BYTES - len(prefix)
    if len(key.encode()) > longest:
        size = len(key.encode())
        raise InvalidName(f"a job's key has at most {longest} bytes, not {size}: {key[:40]!r}…")
    return prefix + key


def ready(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Start], Any]:
    """The call of a function. It passes ``lease`` and ``due`` if the function has such arguments
    and the caller did not give them."""
    try:
        import inspect

        signature = inspect.signature(function)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except ValueError:  # a built-in without a signature
        return lambda start: function(*args, **kwargs)
    wanted = {word for word in ("lease", "due") if word in signature.parameters}
    wanted -= bound.keys()

    def call(start: Start) -> Any:
        from datetime import UTC, datetime, timedelta

        due = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=start.due)
        known: dict[str, Any] = {"lease": start.lease, "due": due}
        return function(*args, **kwargs, **{word: known[word] for word in wanted})

    return call
