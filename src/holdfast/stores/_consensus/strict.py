"""Strict reading of answers and of stored values: every value has a type and bounds.

The server at a URL may be another one than intended, and any client with write access may store
anything. An answer of the wrong shape is a ``DamagedAnswer``: the outcome of that request is
unknown. A stored value that can't be read raises ``ValueError`` here; each store turns it into
``Incompatible``, with the name of the lock.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Never, TypeVar

from holdfast.claim import Record
from holdfast.errors import BackendUnavailable, Incompatible

__all__ = [
    "LARGEST_TOKEN",
    "MOST_SLOTS",
    "DamagedAnswer",
    "Items",
    "JsonReader",
    "digits",
    "is_digits",
    "is_list_of",
    "moment",
    "read_record",
    "stored_json",
    "text",
    "whole_number",
]

LARGEST_TOKEN = 2**63 - 1
MOST_SLOTS = 65_536
LATEST_MOMENT = 1e11
"""Seconds since the epoch; far beyond any clock."""
MOST_DIGITS = 20
RECORD_VERSION = 1

_JSON_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "a flag"}
_JSON_NAMES |= {int: "a number", float: "a number"}

T = TypeVar("T")


class DamagedAnswer(BackendUnavailable):
    """An answer that the store's server never gives: the outcome of the request is unknown."""


class JsonReader:
    """Reads the JSON answers of one kind of server."""

    def __init__(self, where: str, kinds: Mapping[str, Callable[[Any], bool]]) -> None:
        """``where`` is the store's name in messages; ``kinds`` has a check for each known field."""
        self.where = where
        self._kinds = kinds
        self._decode = json.JSONDecoder(object_hook=self._checked).raw_decode

    def read(self, body: bytes) -> Any:
        """The first JSON value of a body. Raises ``DamagedAnswer`` if there is none."""
        try:
            return self._decode(body.decode())[0]
        except (ValueError, RecursionError):
            raise self.damaged("it is not JSON") from None

    def read_as(self, kind: type[T], body: bytes) -> T:
        """The same, for a value that must have this type."""
        value = self.read(body)
        if not isinstance(value, kind):
            raise self.damaged(f"it is {_json_name(type(value))}, not {_json_name(kind)}")
        return value

    def damaged(self, why: str) -> DamagedAnswer:
        return DamagedAnswer(f"{self.where} answered with a text that is not its own: {why}")

    def _checked(self, fields: dict[str, Any]) -> Fields:
        for name, value in fields.items():
            fits = self._kinds.get(name)
            if fits is not None and not fits(value):
                raise self.damaged(f"the field {name!r} is {_json_name(type(value))}")
            if type(value) is list:
                fields[name] = Items(self, name, value)
        return Fields(self, fields)


def _json_name(kind: type) -> str:
    """What JSON calls a value of this type."""
    return next((name for base, name in _JSON_NAMES.items() if issubclass(kind, base)), "null")


class Fields(dict[str, Any]):
    """A JSON object of an answer. A missing field raises ``DamagedAnswer``."""

    __slots__ = ("_reader",)

    def __init__(self, reader: JsonReader, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._reader = reader

    def __missing__(self, name: str) -> Never:
        raise self._reader.damaged(f"the field {name!r} is missing")


class Items(list[Any]):
    """A JSON list of an answer. An index beyond its end raises ``DamagedAnswer``."""

    __slots__ = ("_name", "_reader")

    def __init__(self, reader: JsonReader, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self._reader, self._name = reader, name

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise self._reader.damaged(f"the field {self._name!r} is too short") from None


def is_digits(value: object) -> bool:
    """Whether it is a number that is written as text."""
    return (
        type(value) is str and value.isascii() and value.isdigit() and 0 < len(value) <= MOST_DIGITS
    )


def is_list_of(kind: type) -> Callable[[Any], bool]:
    def fits(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(item, kind) for item in value)

    return fits


def stored_json(data: bytes) -> Any:
    """Reads stored JSON. Raises ``ValueError``, also for deep nesting, ``NaN`` and
    ``Infinity``."""
    try:
        return json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _no_number(word: str) -> Never:
    raise ValueError(f"{word} is not a number")


def whole_number(value: object, most: int = LARGEST_TOKEN) -> int:
    """An integer from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("a number is missing or out of bounds")
    return value


def digits(value: str, most: int = LARGEST_TOKEN) -> int:
    """The same, written as decimal digits."""
    if not is_digits(value):
        raise ValueError("a number is missing or out of bounds")
    return whole_number(int(value), most)


def moment(value: object) -> float:
    """Seconds since the epoch."""
    if not isinstance(value, int | float) or not 0 <= value <= LATEST_MOMENT:  # also false for NaN
        raise ValueError("a moment is missing or out of bounds")
    return float(value)


def text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("a text is missing")
    return value


class StoredRecord(NamedTuple):
    """A record as it is stored."""

    token: int
    written: float
    keep_seconds: float
    value: str

    def at(self, wall: float) -> Record | None:
        """The record at this time; ``None`` if it has expired."""
        age = wall - self.written
        return None if age >= self.keep_seconds else Record(self.value, self.token, age)


def read_record(value: bytes | str | None, where: str) -> StoredRecord | None:
    """Reads a record, which is stored as JSON; a text is base64 of that. ``None`` for a record of
    another version; raises ``Incompatible`` if it can't be read."""
    try:
        fields = stored_json(value if isinstance(value, bytes) else a2b_base64(value or ""))
        if isinstance(fields, list) and fields and fields[0] != RECORD_VERSION:
            return None
        _, token, written, keep_seconds, kept = fields
        return StoredRecord(whole_number(token), moment(written), moment(keep_seconds), text(kept))
    except (ValueError, TypeError):
        raise Incompatible(f"the record that is kept for {where} can't be read") from None
