"""Celery tasks that run one at a time, are queued once, or run once.

    app = Celery("shop", broker="redis://…")
    install(app, "redis://…")

    @app.task(serial="account:{account_id}")    # one at a time; if busy, back to the queue
    @app.task(unique="rebuild:{user_id}", until="start")    # queued once, until it starts
    @app.task(once="invoice:{number}")          # run once, however often it is delivered

``unique="x"`` stores the record of the job ``unique/x`` while the task is queued: the producer
writes it, and the worker removes it, by its token in the message. While the task runs
(``until="done"``) it is the lock ``unique/x``, with the task's id as note: no lease is in a queue.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
from contextlib import ExitStack
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import holdfast
from holdfast import BackendUnavailable, HoldfastError, Lease, Locks, LockTimeout, ResultNotKept
from holdfast.integrations import missing_extra
from holdfast.integrations.celery_options import check_options

try:
    import celery
    from celery import exceptions, signals
    from kombu.utils.imports import symbol_by_name
except ModuleNotFoundError as error:
    raise missing_extra(error, "celery") from None

__all__ = ["Task", "install", "installed"]

log = logging.getLogger("holdfast.celery")

DELAY_SECONDS = (0.5, 10.0)
"""The first and the longest delay of a task that goes back to the queue."""
PRODUCER_SECONDS = 5.0
"""How long a producer or a worker waits for the record of a queued task."""
PERSISTENT = "celery.beat:PersistentScheduler"
UNIQUE, BUSY = "holdfast_unique", "holdfast_busy"
"""Message headers: the token of the record; how often and since when the task found it busy."""
CANVAS = ("chord", "chain", "group_id", "link", "link_error", "root_id", "parent_id")
"""Options of a task on which other tasks or results of a canvas wait."""

_installed: WeakKeyDictionary[Any, tuple[Locks, str]] = WeakKeyDictionary()


def install(app: Any, locks: Locks | str | None = None, *, beat: str = PERSISTENT) -> Locks:
    """Gives an app's tasks ``serial``, ``unique`` and ``once``, and makes its beat stand by.

    Call it right after the app is made. ``locks`` is a client or a URL, by default that of
    ``HOLDFAST_URL``. ``beat`` is the scheduler that the beat which leads runs. Returns the client.
    The app's own ``task_cls`` is kept, as a base. Raises ``RuntimeError`` if there are tasks.
    """
    if app.finalized or "Task" in vars(app):
        raise RuntimeError("install() comes before the first task: right after app = Celery(…)")
    client = locks if isinstance(locks, Locks) else holdfast.connect(locks)
    _installed[app] = client, beat
    present = symbol_by_name(app.task_cls)
    app.task_cls = present if issubclass(present, Task) else type("Task", (Task, present), {})
    _check_finally(app)
    app.conf.beat_scheduler = "holdfast.integrations.celery_beat:Beat"
    for signal in (signals.task_revoked, signals.task_postrun):
        signal.connect(_settle, weak=False, dispatch_uid="holdfast")
    return client


class Task(celery.Task):  # type: ignore[type-arg]
    """The base of an installed app's tasks. Names are filled from the task's arguments.

    - ``serial``: the name of a lock, held while the task runs. If it is busy, or its store away,
      the task goes back to the queue with a delay, which is no retry; after ``max_wait`` seconds of
      this it fails with ``LockTimeout``.
    - ``unique``: while a task of this name is queued, another ``delay()`` or ``apply_async()``
      publishes nothing and returns the result of the queued one. ``until="done"``, the default,
      holds while it runs and is retried, too; ``until="start"`` ends when it starts.
    - ``once``: the key of a job; a second delivery, or a second task of this key, returns the
      recorded result. ``True`` is the task's id. A task that raises may run again.
    - ``keep``: how long ``once`` records a result (7 days), or ``unique`` may be queued (1 day).
    """

    abstract = True
    serial: str | None = None
    unique: str | None = None
    once: str | bool | None = None
    until: Literal["start", "done"] = "done"
    keep: float | None = None
    max_wait: float | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Called by Celery. Raises ``ValueError`` or ``TypeError`` for an option that does not fit,
        and ``Unsupported`` for one that the store can't have."""
        check_options(cls, _installed[app][0] if app in _installed else None)

    @property
    def locks(self) -> Locks:
        """The client that ``install`` was given."""
        return installed(self.app)[0]

    @property
    def lease(self) -> Lease | None:
        """The lease of ``serial`` or ``once`` of the task that runs in this thread."""
        return self.request.get("holdfast_lease")  # type: ignore[no-any-return]

    def _name(self, template: str, args: Any, kwargs: Any) -> str:
        bound = inspect.signature(self.run).bind(*(args or ()), **(kwargs or {}))
        bound.apply_defaults()
        return template.format_map(bound.arguments)

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, **options: Any
    ) -> Any:
        """As ``celery.Task.apply_async``; see ``unique``."""
        ours = self.request.id is not None and options.get("task_id") == self.request.id
        # A task that goes back to the queue before it has started still has its record.
        running = self.until == "done" and self.request.get("holdfast_started")
        plain = not running if ours else any(map(options.get, CANVAS))
        if not self.unique or self.app.conf.task_always_eager or plain:
            return super().apply_async(args, kwargs, **options)
        name = self._name(self.unique, args, kwargs)
        options["task_id"] = task_id = options.get("task_id") or celery.uuid()
        published: list[Any] = []

        def publish(lease: Lease) -> str:
            holders = self.locks.inspect(f"unique/{name}").holders if self.until == "done" else ()
            if holders and holders[0].note not in (None, task_id):
                raise _Runs(holders[0].note)
            headers = {**(options.get("headers") or {}), UNIQUE: f"{lease.token} {name}"}
            send = super(Task, self).apply_async
            published.append(send(args, kwargs, **{**options, "headers": headers}))
            return task_id

        try:
            queued = _record(self.locks, name, self.keep).run(publish).value
        except _Runs as running:
            queued = running.args[0]
        except HoldfastError as error:
            if not published and not ours:
                raise
            queued = task_id
            log.warning("%s[%s] is queued without its name: %s", self.name, task_id, error)
        if published:
            return published[0]
        if ours:  # the record of another task must not swallow a retry
            return super().apply_async(args, kwargs, **options)
        log.info("%s: not queued, as task %s of %r is", self.name, queued, name)
        return self.AsyncResult(str(queued))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by the worker. A direct call of the task runs its function, and nothing else."""
        request = self.request
        if request.called_directly or request.get("holdfast_entered"):
            return super().__call__(*args, **kwargs)
        request.update(holdfast_entered=True)
        try:
            with ExitStack() as holds:
                if self.serial:
                    name = self._name(self.serial, args, kwargs)
                    request.update(holdfast_lease=self._serial(name, holds))
                if self.unique and not request.is_eager:
                    self._started(self._name(self.unique, args, kwargs), holds)
                return (self._run_once if self.once else self._run)(args, kwargs)
        finally:
            _settle(self, request)  # before the result: who reads that may queue the task again

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the function, by ``__call__`` of the app's own class; a retry waits from zero."""
        (self.request.headers or {}).pop(BUSY, None)
        inner: Any = super().__call__  # that of Celery would push a second request
        return (self.run if inner == celery.Task.__call__.__get__(self) else inner)(*args, **kwargs)

    def _serial(self, name: str, holds: ExitStack) -> Lease:
        timeout = None if self.request.is_eager else 0
        note = f"{self.name}[{self.request.id}]"
        try:
            return holds.enter_context(self.locks.lock(name, timeout=timeout, note=note))
        except (LockTimeout, BackendUnavailable) as error:
            self._requeue(error)

    def _requeue(self, error: HoldfastError) -> NoReturn:
        """Back to the queue with a delay: raises ``Ignore``, or the error after ``max_wait``."""
        request = self.request
        count, since = map(float, (request.headers or {}).get(BUSY, f"0 {time.time()}").split())
        if request.is_eager or (self.max_wait is not None and time.time() - since > self.max_wait):
            raise error
        first, longest = DELAY_SECONDS
        delay = min(longest, first * 1.5 ** min(count, 100)) * random.uniform(0.5, 1.5)
        headers = {**(request.headers or {}), BUSY: f"{count + 1:.0f} {since}"}
        self.signature_from_request(countdown=delay, headers=headers).apply_async()
        request.update(holdfast_settled=True)  # its record goes on with the message
        log.info("%s[%s] is queued again for %.1f s: %s", *(self.name, request.id), delay, error)
        raise exceptions.Ignore from None

    def _started(self, name: str, holds: ExitStack) -> None:
        """The record of the queued task is removed; until it is done its lock is held."""
        try:
            if self.until == "done":
                lease = self.locks.lock(f"unique/{name}", note=self.request.id, timeout=0).acquire()
                if lease is None:  # delivered twice, or queued for too long
                    raise LockTimeout(f"another task of {name!r} runs")
                holds.callback(lease.release)
            _forget(self.locks, self.request.headers)
        except (LockTimeout, BackendUnavailable) as error:
            self._requeue(error)  # started with its record left, it would block its successors
        self.request.update(holdfast_started=True, holdfast_settled=True)

    def _run_once(self, args: Any, kwargs: Any) -> Any:
        key = self.request.id if self.once is True else self._name(str(self.once), args, kwargs)
        keep = 7 * 24 * 3600 if self.keep is None else self.keep
        steps: list[str] = []

        def run(lease: Lease) -> Any:
            steps.append("begun")
            if self.lease is None:
                self.request.update(holdfast_lease=lease)
            result = self._run(args, kwargs)
            steps.append("returned")
            return result

        try:
            outcome = self.locks.once(str(key), keep=keep, timeout=0).run(run)
        except ResultNotKept as unkept:
            if "returned" not in steps:
                raise  # the task's own code raised it
            log.warning("%s[%s]: %s", self.name, self.request.id, unkept)
            return unkept.result
        except (LockTimeout, BackendUnavailable) as error:
            if steps:
                raise
            self._requeue(error)
        if not outcome.ran:
            log.info("%s[%s]: %r has run already", self.name, self.request.id, key)
        return None if outcome.lost else outcome.result()


class _Runs(Exception):
    """A task of this name is running: its id."""


def installed(app: Any) -> tuple[Locks, str]:
    """The client of an app, and the scheduler of its beat; raises ``RuntimeError`` without one."""
    if app not in _installed:
        raise RuntimeError(f"{app!r}: call holdfast.integrations.celery.install(app) first")
    return _installed[app]


def _record(locks: Locks, name: str, keep: float | None = None) -> Any:
    """The record of a queued task, as a job whose run is the publishing of its message."""
    keep = 24 * 3600 if keep is None else keep
    return locks.once(f"unique/{name}", keep=keep, ttl=10, timeout=PRODUCER_SECONDS)


def _forget(locks: Locks, headers: Any) -> None:
    """Removes the record of a message, if it is still that message's."""
    token, _, name = str((headers or {}).get(UNIQUE, "")).partition(" ")
    if token.isdecimal() and name:
        _record(locks, name).forget(token=int(token))


def _check_finally(app: Any) -> None:
    """When the app is finalized: ``TypeError`` for an option of ours that a task's base ignores."""
    finalize = app.finalize

    def check(auto: bool = False) -> None:
        done = app.finalized
        finalize(auto)
        for task in () if done else app.tasks.values():
            found = [o for o in ("serial", "unique", "once") if getattr(task, o, None)]
            if found and not isinstance(task, Task):
                raise TypeError(f"{task.name}: {found[0]}= needs a base of {__name__}.Task")

    app.finalize = check


def _settle(sender: Any = None, request: Any = None, state: str = "", **_: Any) -> None:
    """Called by Celery when a task was revoked, has expired or has ended, and by the task itself:
    if it did not start and is not queued again, its record is removed."""
    request = getattr(sender, "request", None) if request is None else request
    ours = isinstance(sender, Task) and sender.unique and state != "RETRY"
    if ours and not request.get("holdfast_settled"):
        request.update(holdfast_settled=True)
        try:
            _forget(sender.locks, request.headers)
        except HoldfastError as error:
            log.warning("%s[%s]: its record is left: %s", sender.name, request.id, error)
