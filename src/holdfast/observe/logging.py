"""Events as lines of the log, and the lock of the current block in the lines of others.

What goes wrong (a loss, a broken hold, a release without an answer) is logged by every client. This
observer logs the rest: what happens at every acquire and renewal. A client without one has it at
DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from holdfast.core.events import (
    Acquired,
    Cancelled,
    Doubtful,
    FenceRefused,
    LockEvent,
    Observer,
    Ran,
    Reachable,
    Released,
    Renewed,
    TimedOut,
    Unreachable,
    WaitBegan,
    current,
)

__all__ = ["LockFilter", "Logging", "structlog_context"]

LOCK = logging.getLogger("holdfast.lock")
RENEW = logging.getLogger("holdfast.renew")
STORE = logging.getLogger("holdfast.store")
ANSWERS = {True: "yes", False: "no", None: "unknown"}


class Logging(Observer):
    """Logs every event, at ``level``. Each record has a ``holdfast`` attribute: a dictionary with
    the event and its fields, for formatters that write JSON."""

    def __init__(self, level: int | str = logging.INFO) -> None:
        numbers = logging.getLevelNamesMapping()
        if isinstance(level, str) and level.upper() not in numbers:
            raise ValueError(f"level is a level of logging, such as 'INFO'; not {level!r:.40}")
        self._level = numbers[level.upper()] if isinstance(level, str) else level

    def waiting(self, event: WaitBegan) -> None:
        if LOCK.isEnabledFor(self._level) and self._level > logging.DEBUG:
            # At DEBUG the acquire itself logs every step of its wait.
            held = "" if event.holder is None else f", held by {event.holder}"
            text = "waiting for %r on %s%s"
            self._lock(event, text, event.name, event.store, held)

    def acquired(self, event: Acquired) -> None:
        text = "granted %r (%s) on %s: token %d, %.3g s are certain"
        values = event.name, event.mode, event.store, event.token, event.certain
        self._lock(event, text, *values, waited=event.seconds, contended=event.contended)

    def timed_out(self, event: TimedOut) -> None:
        self._lock(event, "timed out: %r on %s", event.name, event.store, waited=event.seconds)

    def cancelled(self, event: Cancelled) -> None:
        text = "%s: %r on %s: %s"
        values = event.outcome, event.name, event.store, type(event.error).__name__
        self._lock(event, text, *values, waited=event.seconds, outcome=event.outcome)

    def released(self, event: Released) -> None:
        text = "released %r on %s: token %d, still ours: %s"
        values = event.name, event.store, event.token, ANSWERS[event.ours]
        self._lock(event, text, *values, held=event.seconds)

    def doubtful(self, event: Doubtful) -> None:
        text = "doubtful: %r on %s: %s"
        self._lock(event, text, event.name, event.store, event.reason, remaining=event.remaining)

    def renewed(self, event: Renewed) -> None:
        text = "renewed %d holds and %d waiters on %s in %.3g s, %d failed"
        values = event.holds, event.waiters, event.store, event.seconds, event.failed
        self._write(RENEW, "renewed", text, *values, store=event.store, error=event.error)

    def unreachable(self, event: Unreachable) -> None:
        text = "%s does not answer: %s"
        self._write(STORE, "unreachable", text, event.store, event.error, store=event.store)

    def reachable(self, event: Reachable) -> None:
        text = "%s answers again, after %.3g s"
        values = event.store, event.seconds
        self._write(STORE, "reachable", text, *values, store=event.store, seconds=event.seconds)

    def refused(self, event: FenceRefused) -> None:
        text = "refused a stale fence: %r at %r"
        fence, resource = event.fence, event.resource
        fields: dict[str, object] = {"name": fence.name, "resource": resource}
        self._write(LOCK, "refused", text, fence, resource, token=fence.token, **fields)

    def ran(self, event: Ran) -> None:
        fields = {"key": event.key, "kind": event.kind, "outcome": event.outcome}
        self._write(
            LOCK, "ran", "job %r on %s: %s", event.key, event.store, event.outcome, **fields
        )

    def _lock(self, event: LockEvent, text: str, *values: object, **more: object) -> None:
        fields: dict[str, object] = {"store": event.store, "name": event.name, "kind": event.kind}
        fields |= {"mode": str(event.mode), "token": event.token}
        self._write(LOCK, event.word, text, *values, **fields, **more)

    def _write(
        self, logger: logging.Logger, word: str, text: str, *values: object, **fields: object
    ) -> None:
        if logger.isEnabledFor(self._level):
            extra = {"holdfast": {"event": word, **fields}}
            logger.log(self._level, text, *values, extra=extra, stacklevel=2)


class LockFilter(logging.Filter):
    """A filter that lets every record pass and adds ``lock`` and ``token`` of the block that the
    current thread or task is in; ``None`` outside of a block.

    Add it to a handler, and ``%(lock)s`` to its format.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        use = current()
        record.lock = None if use is None else use.name
        record.token = None if use is None else use.token
        return True


def structlog_context(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog: adds ``lock`` and ``token`` of the block that the current thread or
    task is in."""
    use = current()
    if use is not None:
        event.setdefault("lock", use.name)
        event.setdefault("token", use.token)
    return event
