"""The outcome of a job: the value that callers get, and the text that is recorded."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from holdfast.claim import Holder, Record
from holdfast.errors import Incompatible, JobFailed, ResultNotKept

__all__ = ["Outcome", "Previous", "RunRecord", "Status", "pack", "read", "write"]

FORMAT = 1
LONGEST_VALUE_BYTES = 256 * 1024
LONGEST_ERROR = 2000
DEEPEST = 100


class Status:
    """The states in records. ``done``, ``failed`` and ``skipped`` are states of an outcome, too."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TRIED = "tried"
    """The job failed, and is to be run again."""
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """The outcome of a job: of the run of this call, or of the recorded run."""

    key: str
    status: str
    """``done``; ``failed`` (its error is recorded); ``skipped`` (another process runs it, or it is
    not due)."""
    value: Any = None
    """What the job returned, after a round trip through JSON: the same value for the process that
    ran the job and for all others."""
    error: str = ""
    """Of a failed job: the type and text of its error."""
    ran: bool = False
    """Whether this call ran it."""
    token: int | None = None
    """The fencing token of the run."""
    took_over: int | None = None
    """The token of the earlier, unfinished run that this run took over from."""
    attempt: int = 0
    """The number of this run, counting runs that failed or did not finish."""
    age_seconds: float = 0.0
    """Seconds since the outcome was recorded."""
    holder: Holder | None = None
    """Of a skipped job: the process that runs it, if the store could say."""
    next_seconds: float | None = None
    """Of ``every``: seconds until the next run is due."""
    lost: str = ""
    """Why the value of a finished job could not be recorded."""
    stale: bool = False
    """Of ``once`` with ``stale_for``: the value is older than ``keep``, and another caller is
    making a new one."""

    def result(self) -> Any:
        """The job's value; of a skipped job the last known value, or ``None``.

        Raises ``JobFailed`` for a failed job, ``ResultNotKept`` if JSON can't hold the value.
        """
        if self.status == Status.SKIPPED:
            return self.value
        if self.status == Status.FAILED:
            raise JobFailed(f"{self.key!r} failed when it was run: {self.error}", error=self.error)
        if self.lost:
            raise ResultNotKept(f"{self.key!r} is done, but its result was not kept: {self.lost}")
        return self.value


class Previous(NamedTuple):
    """What an earlier run returned."""

    value: Any
    token: int
    age_seconds: float


class RunRecord(NamedTuple):
    """The content of a record."""

    status: str
    token: int
    age_seconds: float
    attempt: int = 0
    value: Any = None
    error: str = ""
    took_over: int | None = None
    lost: str = ""
    where: str = ""
    """Of an unfinished run: its host and process."""
    due: int = 0
    """Of ``every``: the start of the interval of this run, in µs since the epoch."""
    finished: int = 0
    """Of ``every``: the start of the last interval whose run ended."""
    previous: Any = None
    """Of a run that replaces a stale value: that value, as ``Previous``."""

    @property
    def ended(self) -> bool:
        """Whether the job will not be run again."""
        return self.status in (Status.DONE, Status.FAILED)

    def last(self) -> Previous | None:
        """The newest value that a run has returned and that was kept."""
        if self.status == Status.DONE:
            return None if self.lost else Previous(self.value, self.token, self.age_seconds)
        match self.previous:
            case [value, int(token), int() | float() as age]:
                return Previous(value, token, age + self.age_seconds)
        return None

    def outcome(self, key: str) -> Outcome:
        """The record as an ``Outcome``."""
        return Outcome(
            key,
            self.status,
            self.value,
            self.error,
            token=self.token,
            took_over=self.took_over,
            attempt=self.attempt,
            age_seconds=self.age_seconds,
            lost=self.lost,
        )


def write(status: str, **fields: Any) -> str:
    """The text to record; empty fields are left out, but not an empty value."""
    kept = {
        word: value
        for word, value in fields.items()
        if value is not None and (word == "value" or value not in ("", 0))
    }
    return json.dumps({"format": FORMAT, "status": status, **kept}, separators=(",", ":"))


def read(record: Record | None, key: str) -> RunRecord | None:
    """The content of a record; raises ``Incompatible`` if a newer version has written it."""
    if record is None:
        return None
    try:
        fields = json.loads(record.value)
        number, status = fields.pop("format"), fields.pop("status")
    except (ValueError, AttributeError, KeyError, TypeError):
        raise Incompatible(f"what is recorded of {key!r} is no outcome of a job") from None
    if number != FORMAT:
        raise Incompatible(
            f"what is recorded of {key!r} was written by another version (format {number!r}; "
            f"this one reads {FORMAT})"
        )
    known = {word: fields[word] for word in RunRecord._fields if word in fields}
    return RunRecord(status, record.token, record.age_seconds, **known)


def pack(value: object) -> str:
    """A result as JSON; raises ``ResultNotKept``, a ``TypeError``, if JSON can't hold it."""
    _check(value, "the result", DEEPEST)
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > LONGEST_VALUE_BYTES:
        raise ResultNotKept(
            f"the result has {len(text)} bytes as JSON, and {LONGEST_VALUE_BYTES} can be kept"
        )
    return text


def _check(value: object, path: str, depth: int) -> None:
    """Raises ``ResultNotKept`` for what JSON can't hold, or would change silently."""
    if depth == 0:
        raise ResultNotKept(f"{path} is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise ResultNotKept(f"{path} has the key {key!r}: in JSON all keys are text")
            _check(item, f"{path}[{key[:40]!r}]", depth - 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check(item, f"{path}[{number}]", depth - 1)
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ResultNotKept(f"{path} is {value!r}: JSON has finite numbers only")
    elif not isinstance(value, str | int | float | bool | None):
        kind = type(value).__qualname__
        raise ResultNotKept(f"{path} is of the type {kind}: JSON can't hold it")
