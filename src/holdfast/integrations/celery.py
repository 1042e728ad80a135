"""Celery tasks that run one at a time, are queued once, or run once.

    app = Celery("shop", broker="redis://…")
    install(app, "redis://…")

    @app.task(serial="account:{account_id}")    # one at a time; if busy, back to the queue
    @app.task(unique="rebuild:{user_id}", until="start")    # queued once, until it starts
    @app.task(once="invoice:{number}")          # run once, however often it is delivered

What is stored for ``unique="x"``: while the task is queued, the record of the job ``unique/x``,
written by the producer while it publishes. Its token travels in the message, and the worker removes
the record of that token only. While the task runs (``until="done"``), the lock ``unique/x``, with
the task's id as note. So no lease lives in a queue, and a killed worker blocks for a ttl at most.
"""

from __future__ import annotations

import inspect
import logging
import random
import re
import string
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import holdfast
from holdfast import BackendUnavailable, HoldfastError, Lease, Locks, LockTimeout, ResultNotKept
from holdfast.integrations import missing_extra

try:
    import celery
    from celery import signals
    from celery.exceptions import Ignore
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

_installed: WeakKeyDictionary[Any, tuple[Locks, str]] = WeakKeyDictionary()


def install(app: Any, locks: Locks | str | None = None, *, beat: str = PERSISTENT) -> Locks:
    """Gives an app's tasks ``serial``, ``unique`` and ``once``, and makes its beat stand by.

    Call it right after the app is made. ``locks`` is a client or a URL, by default that of
    ``HOLDFAST_URL``. ``beat`` is the scheduler that the beat which leads runs. Returns the client.
    Raises ``RuntimeError`` if the app has made its tasks already.
    """
    if app.finalized or "Task" in vars(app):
        raise RuntimeError("install() comes before the first task: right after app = Celery(…)")
    client = locks if isinstance(locks, Locks) else holdfast.connect(locks)
    _installed[app] = client, beat
    app.task_cls = Task
    app.conf.beat_scheduler = "holdfast.integrations.celery_beat:Beat"
    signals.task_revoked.connect(_revoked, weak=False, dispatch_uid="holdfast")
    return client


class Task(celery.Task):  # type: ignore[type-arg]
    """The base of an installed app's tasks. Names are filled from the task's arguments.

    - ``serial``: the name of a lock, held while the task runs. If it is busy, or its store can't be
      reached, the task goes back to the queue with a delay; that counts as no retry. After
      ``max_wait`` seconds of this it fails with ``LockTimeout``.
    - ``unique``: while a task of this name is queued, another ``delay()`` or ``apply_async()``
      publishes nothing and returns the result of the queued one. ``until="done"``, the default,
      holds while it runs and is retried, too; ``until="start"`` ends when it starts.
    - ``once``: the key of a job; a second delivery, or a second task of this key, returns the
      recorded result. ``True`` is the task's id. A task that raises may run again.
    - ``keep``: how long a result of ``once`` is recorded (7 days), and how long a task of
      ``unique`` may be queued (1 day).
    """

    abstract = True
    serial: str | None = None
    unique: str | None = None
    once: str | bool | None = None
    until: Literal["start", "done"] = "done"
    keep: float | None = None
    max_wait: float | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:  # noqa: ARG003
        """Called by Celery. Raises ``ValueError`` for an option that does not fit."""
        if cls.until not in ("start", "done"):
            raise ValueError(f"until is 'start' or 'done'; not {cls.until!r}")
        arguments = inspect.signature(cls.run).parameters
        for template in (cls.serial, cls.unique, cls.once):
            parts = string.Formatter().parse(template) if isinstance(template, str) else ()
            for field in (part[1] for part in parts if part[1] is not None):
                if re.split(r"[.\[]", field)[0] not in arguments:
                    raise ValueError(f"{template!r}: {cls.name} has no argument {field!r}")

    @property
    def locks(self) -> Locks:
        """The client that ``install`` was given."""
        return installed(self.app)[0]

    @property
    def lease(self) -> Lease | None:
        """The lease of ``serial`` or ``once`` of the task that runs in this thread."""
        found: Lease | None = self.request.get("holdfast_lease")
        return found

    def _name(self, template: str, args: Any, kwargs: Any) -> str:
        """A name, filled from the arguments."""
        bound = inspect.signature(self.run).bind(*(args or ()), **(kwargs or {}))
        bound.apply_defaults()
        return template.format_map(bound.arguments)

    # Publishing.

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, **options: Any
    ) -> Any:
        """As ``celery.Task.apply_async``; see ``unique``."""
        ours = self.request.id is not None and options.get("task_id") == self.request.id
        # A task that goes back to the queue before it has started still has its record.
        if not self.unique or self.app.conf.task_always_eager or (ours and not self._running):
            return super().apply_async(args, kwargs, **options)
        name = self._name(self.unique, args, kwargs)
        options["task_id"] = task_id = options.get("task_id") or celery.uuid()
        published: list[Any] = []

        def publish(lease: Lease) -> str:
            runner = self._runner(name)
            if runner not in (None, task_id):
                raise _Runs(runner)
            headers = {**(options.pop("headers", None) or {}), UNIQUE: f"{lease.token} {name}"}
            published.append(
                super(Task, self).apply_async(args, kwargs, headers=headers, **options)
            )
            return task_id

        try:
            queued = _record(self.locks, name, self.keep).run(publish).value
        except _Runs as running:
            queued = running.args[0]
        if published:
            return published[0]
        if ours:  # the record of another task must not swallow a retry
            return super().apply_async(args, kwargs, **options)
        log.info("%s: not queued, as task %s of %r is", self.name, queued, name)
        return self.AsyncResult(str(queued))

    def _runner(self, name: str) -> str | None:
        """The id of the task that runs under this name."""
        if self.until == "start":
            return None
        holders = self.locks.inspect(f"unique/{name}").holders
        return holders[0].note if holders else None

    @property
    def _running(self) -> bool:
        """Whether the task has left the queue and keeps its name until it is done."""
        return bool(self.request.get("holdfast_started")) and self.until == "done"

    # Running.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by the worker. A direct call of the task runs its function, and nothing else."""
        request = self.request
        if request.called_directly or request.get("holdfast_entered"):
            return super().__call__(*args, **kwargs)
        request.update(holdfast_entered=True)
        with ExitStack() as holds:
            if self.serial:
                name = self._name(self.serial, args, kwargs)
                request.update(holdfast_lease=holds.enter_context(self._serial(name)))
            if self.unique and not request.is_eager:
                holds.enter_context(self._started(self._name(self.unique, args, kwargs)))
            return self._run_once(args, kwargs) if self.once else self.run(*args, **kwargs)

    @contextmanager
    def _serial(self, name: str) -> Iterator[Lease]:
        timeout = None if self.request.is_eager else 0
        with ExitStack() as hold:
            try:
                lease = hold.enter_context(
                    self.locks.lock(name, timeout=timeout, note=f"{self.name}[{self.request.id}]")
                )
            except (LockTimeout, BackendUnavailable) as error:
                self._requeue(error)
            yield lease

    def _requeue(self, error: HoldfastError) -> NoReturn:
        """Puts the task back into the queue with a delay; raises ``Ignore``, or the error after
        ``max_wait``."""
        request = self.request
        count, since = _busy(request.headers)
        if request.is_eager or (self.max_wait is not None and time.time() - since > self.max_wait):
            raise error
        first, longest = DELAY_SECONDS
        delay = min(longest, first * 1.5**count) * random.uniform(0.5, 1.5)
        headers = {**(request.headers or {}), BUSY: f"{count + 1} {since}"}
        self.signature_from_request(countdown=delay, headers=headers).apply_async()
        log.info("%s[%s] is queued again for %.1f s: %s", *(self.name, request.id), delay, error)
        raise Ignore from None

    @contextmanager
    def _started(self, name: str) -> Iterator[None]:
        """The record of the queued task is removed; until it is done its lock is held."""
        with ExitStack() as holds:
            try:
                if self.until == "done":
                    lock = self.locks.lock(f"unique/{name}", note=self.request.id, timeout=0)
                    lease = lock.acquire()  # None: delivered twice, or queued for too long
                    if lease is not None:
                        holds.callback(lease.release)
                _forget(self.locks, self.request.headers)
            except (LockTimeout, BackendUnavailable) as error:
                self._requeue(error)  # started with its record left, it would block its successors
            self.request.update(holdfast_started=True)
            yield

    def _run_once(self, args: Any, kwargs: Any) -> Any:
        key = (
            self._name(self.once, args, kwargs)
            if isinstance(self.once, str)
            else str(self.request.id)
        )
        keep = 7 * 24 * 3600 if self.keep is None else self.keep
        begun: list[Lease] = []

        def run(lease: Lease) -> Any:
            begun.append(lease)
            if self.lease is None:
                self.request.update(holdfast_lease=lease)
            return self.run(*args, **kwargs)

        try:
            outcome = self.locks.once(key, keep=keep, timeout=0).run(run)
        except ResultNotKept as unkept:
            log.warning("%s[%s]: %s", self.name, self.request.id, unkept)
            return unkept.result
        except (LockTimeout, BackendUnavailable) as error:
            if begun:
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


def _busy(headers: Any) -> tuple[int, float]:
    """How often the task has found its lock busy, and since when."""
    count, _, since = str((headers or {}).get(BUSY, "")).partition(" ")
    try:
        return min(int(count), 100), float(since)
    except ValueError:
        return 0, time.time()


def _revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    """Called by Celery for a queued task that was revoked or has expired: it never starts."""
    if isinstance(sender, Task) and sender.unique and request is not None:
        try:
            _forget(sender.locks, request.headers)
        except HoldfastError as error:
            log.warning(
                "%s[%s] was revoked; its record is left: %s", sender.name, request.id, error
            )
