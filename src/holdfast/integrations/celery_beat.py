"""``celery beat`` in several processes: one leads, the others stand by.

``holdfast.integrations.celery.install`` makes it an app's scheduler. It wraps any scheduler.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime
from typing import Any

from holdfast import BackendUnavailable, HoldfastError, Lease
from holdfast.integrations import missing_extra
from holdfast.integrations.celery import installed

try:
    from celery.beat import Scheduler
    from kombu.utils.imports import symbol_by_name
except ModuleNotFoundError as error:
    raise missing_extra(error, "celery") from None

__all__ = ["Beat"]

log = logging.getLogger("holdfast.celery")

STANDBY_SECONDS = 5.0
"""How long one tick waits for the lead: beat must notice between ticks that it is to end."""
RETRY_SECONDS = 0.5
RECORD_SECONDS = 5.0
KEEP_SECONDS = 366 * 24 * 3600.0
"""How long it is known when an entry was last sent: the longest time that a store keeps."""
LONGEST_KEY_BYTES = 400
"""The key of a longer entry has the hash of its name: a job's key has some 500 bytes at most."""


class Beat(Scheduler):
    """A scheduler of ``celery beat`` of which one process leads, and the others stand by.

    The one that leads runs the scheduler that ``install(app, beat=…)`` names. When each entry was
    last sent is recorded, so the next leader neither skips an entry nor sends it again. A leader
    that loses its lock stops sending and stands by; no process exits.
    """

    def __init__(self, app: Any, lazy: bool = False, **options: Any) -> None:
        super().__init__(app, max_interval=options.get("max_interval"), lazy=True)
        self._options = options
        self._locks, self._class = installed(app)
        self._name = f"beat/{app.main or 'celery'}"
        self._lease: Lease | None = None
        self._scheduler: Any = None
        self._seen: dict[str, str] = {}

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Sends what is due if this process leads; returns the seconds until the next call."""
        if not self._leads():
            return RETRY_SECONDS
        interval: float = self._scheduler.tick()
        self._remember()
        return interval

    def _leads(self) -> bool:
        if self._lease is not None and self._lease.held:
            return not self._lease.doubtful
        if self._lease is not None:
            log.warning("beat no longer leads, and stands by: %s", self._lease.reason)
            self.close()
        try:
            lock = self._locks.lock(self._name, timeout=STANDBY_SECONDS)
            self._lease = lock.acquire()
            if self._lease is not None:
                self._take_over()
        except HoldfastError as error:
            log.warning("beat stands by: %s", error)
            self.close()
        return self._lease is not None

    def _take_over(self) -> None:
        log.info("beat leads: %s", self._name)
        self._scheduler = symbol_by_name(self._class)(app=self.app, **self._options)
        self._seen = {}
        for name, entry in self._scheduler.schedule.items():
            try:
                outcome = self._job(name).outcome()
                if outcome is not None:
                    entry.last_run_at = datetime.fromisoformat(outcome.value)
                    self._seen[name] = outcome.value
            except BackendUnavailable:
                raise  # without the records it would send again what was sent
            except (HoldfastError, TypeError, ValueError) as error:
                log.warning("beat: when %r was last sent is not known: %s", name, error)
        self._remember()

    def _remember(self) -> None:
        """Records when each entry was last sent, for the next leader."""
        for name, entry in self._scheduler.schedule.items():
            last = entry.last_run_at.isoformat()
            if self._seen.get(name) != last:
                try:
                    job = self._job(name)
                    job.forget()
                    job.run(str, last)
                except HoldfastError as error:
                    log.warning("beat: that %r was sent is not recorded: %s", name, error)
                    if isinstance(error, BackendUnavailable):
                        return  # all of them with the next tick
                else:
                    self._seen[name] = last

    def _job(self, entry: str) -> Any:
        key = f"{self._name}/{entry}"
        if len(key.encode(errors="replace")) > LONGEST_KEY_BYTES or not key.isprintable():
            # Celery makes names of all arguments of a task.
            digest = hashlib.sha256(entry.encode(errors="surrogatepass")).hexdigest()
            key = f"{self._name}/sha256:{digest}"
        return self._locks.once(key, keep=KEEP_SECONDS, timeout=RECORD_SECONDS)

    @property
    def schedule(self) -> Any:  # type: ignore[override]
        """The entries, of the process that leads."""
        return {} if self._scheduler is None else self._scheduler.schedule

    @property
    def info(self) -> str:
        return f"    . one of several, runs {self._class} when it leads"

    def sync(self) -> None:
        if self._scheduler is not None:
            self._scheduler.sync()

    def close(self) -> None:
        """Closes the scheduler and gives up the lead; a later ``tick`` stands for it again."""
        scheduler, self._scheduler = self._scheduler, None
        lease, self._lease = self._lease, None
        try:
            if scheduler is not None:
                scheduler.close()
        finally:
            if lease is not None:
                lease.release()
