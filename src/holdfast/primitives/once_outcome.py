"""What became of a job: the value that callers get, and the text that is recorded of it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from holdfast.claim import Holder, Record
from holdfast.errors import Incompatible, JobFailed, ResultNotKept

__all__ = ["Outcome", "Status", "Told", "pack", "read", "write"]

FORMAT = 1
LONGEST_VALUE_BYTES = 256 * 1024
LONGEST_ERROR = 2000
DEEPEST = 100


class Status:
    """The words that records are made of; three of them are an outcome's, too."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TRIED = "tried"
    """It failed, and is to be run again."""
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """What became of a job: of this call's run, or of the one that was recorded."""

    key: str
    status: str
    """``done``; ``failed`` (its error is recorded); ``skipped`` (another runs it, or it isn't
    due)."""
    value: Any = None
    """What the job returned, as JSON gives it back: the same to the runner and to all others."""
    error: str = ""
    """Of a failed job: the error's type and text."""
    ran: bool = False
    """Whether this call ran it."""
    token: int | None = None
    """The fencing token of the run."""
    took_over: int | None = None
    """The token of an earlier run that did not finish, and that this run took over from."""
    attempt: int = 0
    """Which run this is, counting those that failed or did not finish."""
    age_seconds: float = 0.0
    """How long ago it was recorded."""
    holder: Holder | None = None
    """Of a skipped job: who runs it, where the store could tell."""
    next_seconds: float | None = None
    """Of ``every``: how long until the next run is due."""
    lost: str = ""
    """Why the value of a job that is done could not be kept."""

    def result(self) -> Any:
        """The job's value; of a skipped job the last that is known, or ``None``.

        Raises ``JobFailed`` for one that failed, ``ResultNotKept`` where JSON can't hold it.
        """
        if self.status == Status.SKIPPED:
            return self.value
        if self.status == Status.FAILED:
            raise JobFailed(f"{self.key!r} failed when it was run: {self.error}", error=self.error)
        if self.lost:
            raise ResultNotKept(f"{self.key!r} is done, but its result was not kept: {self.lost}")
        return self.value


class Told(NamedTuple):
    """What a record says."""

    status: str
    token: int
    age_seconds: float
    attempt: int = 0
    value: Any = None
    error: str = ""
    took_over: int | None = None
    lost: str = ""
    where: str = ""
    """Of a run that has not finished: its host and process."""
    due: int = 0
    """Of ``every``: the start of the interval that this is about, in µs since the epoch."""
    finished: int = 0
    """Of ``every``: the start of the last interval that was run to its end."""

    @property
    def ended(self) -> bool:
        """Whether it will not be run again."""
        return self.status in (Status.DONE, Status.FAILED)

    def outcome(self, key: str) -> Outcome:
        """The same, as callers get it."""
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
    """The text to record; fields that are nothing are left out."""
    kept = {word: value for word, value in fields.items() if value not in (None, "", 0)}
    return json.dumps({"format": FORMAT, "status": status, **kept}, separators=(",", ":"))


def read(record: Record | None, key: str) -> Told | None:
    """What a record says; raises ``Incompatible`` for one that a newer version has written."""
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
    known = {word: fields[word] for word in Told._fields if word in fields}
    return Told(status, record.token, record.age_seconds, **known)


def pack(value: object) -> str:
    """A result as JSON; raises ``ResultNotKept``, a ``TypeError``, for what JSON can't hold."""
    _check(value, "the result", DEEPEST)
    text = json.dumps(value, separators=(",", ":"))
    if len(text) > LONGEST_VALUE_BYTES:
        raise ResultNotKept(
            f"the result has {len(text)} bytes as JSON, and {LONGEST_VALUE_BYTES} can be kept"
        )
    return text


def _check(value: object, path: str, depth: int) -> None:
    """Refuses what JSON can't hold, and what it would change without a word."""
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
