"""The messages of etcd's gRPC API, written and read by hand: only the fields that Holdfast uses.

Protocol buffers are a sequence of fields: a number, a kind, and a value that is an integer or has a
length. Requests are made of ``integer`` and ``data``. A reply is read strictly: a known field of
another kind, a length beyond the end, or a field that etcd always sends and that is missing raise
``Damaged``, which ``calls`` turns into ``DamagedAnswer``. Fields that are not known are skipped,
since newer versions of etcd may add some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from holdfast.claim import escaped
from holdfast.stores._consensus.strict import DamagedAnswer

__all__ = [
    "Damaged",
    "DeleteReply",
    "Event",
    "KeyValue",
    "LeaseReply",
    "PutReply",
    "RangeReply",
    "StatusReply",
    "TxnReply",
    "WatchReply",
    "data",
    "integer",
    "shown",
]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
LARGEST = 2**63 - 1
DEEPEST_TXN = 3
"""How deep transactions may be nested in a reply; our requests nest one in another."""
LONGEST_TEXT = 300
_ONE_BYTE = [bytes((number,)) for number in range(128)]


class Damaged(ValueError):
    """Bytes that are no message of etcd."""


# Writing.


def varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer(field: int, value: int) -> bytes:
    """An integer or flag. Also 0 is written: in some fields it differs from none."""
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes) -> bytes:
    """Bytes, a text or a message."""
    return varint(field << 3 | BYTES) + varint(len(value)) + value


def sign_in(user: str, password: str) -> bytes:
    return data(1, user.encode()) + data(2, password.encode())


def grant_lease(ttl: int) -> bytes:
    return integer(1, ttl)


def lease(lease_id: str) -> bytes:
    """The request to revoke a lease, or to keep it alive."""
    return integer(1, int(lease_id))


def lease_and_keys(lease_id: str) -> bytes:
    """The request for the time that a lease has left, and for its keys."""
    return integer(1, int(lease_id)) + integer(2, 1)


def create_watch(keys: bytes, number: int, *, ends_only: bool) -> bytes:
    """``keys`` is a key, or the two ends of a range, as in a range request."""
    filters = data(5, b"\0") if ends_only else b""
    return data(1, keys + filters + integer(7, number))


def cancel_watch(number: int) -> bytes:
    return data(2, integer(1, number))


# Reading.


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """An integer, and where it ends. Raises ``IndexError`` if it does not."""
    byte = body[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = body[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 63:
            raise Damaged("a number that is too long")
    if value >> 64:
        raise Damaged("a number that is too large")
    return value, at + 1


def _fields(body: bytes, kinds: dict[int, int]) -> Iterator[tuple[int, Any]]:
    """The fields of a message. ``kinds`` has the kinds of those that are known."""
    at, end = 0, len(body)
    try:
        while at < end:
            tag, at = _varint(body, at)
            field, kind = tag >> 3, tag & 7
            if kind != kinds.get(field, kind) or not field:
                raise Damaged(f"the field {field} has another kind")
            value: Any = None
            if kind == VARINT:
                value, at = _varint(body, at)
            elif kind == BYTES:
                size, at = _varint(body, at)
                value = body[at : at + size]
                at += size
            else:
                at += _SIZES[kind]
            if at > end:
                raise Damaged("it is too short")
            yield field, value
    except (IndexError, KeyError):
        raise Damaged("it is too short, or of another kind") from None


def _signed(value: int) -> int:
    return value - 2**64 if value > LARGEST else value


def _count(value: int) -> int:
    """A number that is never negative."""
    if value > LARGEST:
        raise Damaged("a number that is negative")
    return value


def _text(value: bytes) -> str:
    """A text or a key. Bytes that are no text survive in it: see ``requests.encoded``."""
    return value.decode(errors="surrogateescape")


class Header(NamedTuple):
    """What every reply has: the store's revision, and the number of its last election."""

    revision: int
    term: int


_HEADER_KINDS = {1: VARINT, 2: VARINT, 3: VARINT, 4: VARINT}


def _header(body: bytes) -> Header:
    found = dict(_fields(body, _HEADER_KINDS))
    return Header(_count(found.get(3, 0)), found.get(4, 0))


def _needed(header: Header | None) -> Header:
    """The header of a reply, which etcd always sends."""
    if header is None:
        raise Damaged("it has no header")
    return header


class KeyValue(NamedTuple):
    """One stored key."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: str
    """Its lease, as a decimal number; "0" for none."""


_KEY_VALUE_KINDS = {1: BYTES, 2: VARINT, 3: VARINT, 4: VARINT, 5: BYTES, 6: VARINT}


def _key_value(body: bytes) -> KeyValue:
    found = dict(_fields(body, _KEY_VALUE_KINDS))
    get = found.get
    key = get(1)
    if not key:
        raise Damaged("a key is missing")
    return KeyValue(
        _text(key),
        get(5, b""),
        _count(get(2, 0)),
        _count(get(3, 0)),
        _count(get(4, 0)),
        str(_count(get(6, 0))),
    )


def _stored(body: bytes) -> KeyValue:
    """A key that exists, as a range request returns it."""
    kv = _key_value(body)
    if not kv.create_revision or not kv.mod_revision or not kv.version:
        raise Damaged("a revision is missing")
    return kv


class RangeReply(NamedTuple):
    header: Header
    kvs: list[KeyValue]
    more: bool = False
    total: int = 0
    """How many keys are in the range, also beyond the limit of the request."""


class PutReply(NamedTuple):
    before: KeyValue | None
    """The key as it was before, if the request asked for it."""


class DeleteReply(NamedTuple):
    deleted: int


_RANGE_KINDS = {1: BYTES, 2: BYTES, 3: VARINT, 4: VARINT}


def range_reply(body: bytes) -> RangeReply:
    return _range(body, _needed)


def _range(body: bytes, check: Callable[[Header | None], Header | None]) -> RangeReply:
    header, kvs, more, count = None, [], False, 0
    for field, value in _fields(body, _RANGE_KINDS):
        if field == 1:
            header = _header(value)
        elif field == 2:
            kvs.append(_stored(value))
        elif field == 3:
            more = bool(value)
        elif field == 4:
            count = _count(value)
    return RangeReply(check(header) or _NO_HEADER, kvs, more, count)


_NO_HEADER = Header(0, 0)
"""Of a reply within another one, which has a header."""


def delete_reply(body: bytes) -> DeleteReply:
    found = dict(_fields(body, {1: BYTES, 2: VARINT}))
    _needed(_header(found[1]) if 1 in found else None)
    return DeleteReply(_count(found.get(2, 0)))


def _delete(body: bytes) -> DeleteReply:
    return DeleteReply(_count(dict(_fields(body, {1: BYTES, 2: VARINT})).get(2, 0)))


def _put(body: bytes) -> PutReply:
    before = dict(_fields(body, {1: BYTES, 2: BYTES})).get(2)
    return PutReply(None if before is None else _key_value(before))


class TxnReply:
    """The reply to a transaction, or to one that was nested in it."""

    __slots__ = ("parts", "revision", "succeeded", "where")

    def __init__(self, revision: int, succeeded: bool, parts: list[Part]) -> None:
        self.revision, self.succeeded, self.parts = revision, succeeded, parts
        self.where = "etcd"
        """The store's name in messages."""

    def exactly(self, count: int) -> None:
        """Raises ``DamagedAnswer`` unless there are replies to so many parts."""
        if len(self.parts) != count:
            raise self._damaged(f"it has {len(self.parts)} parts, not {count}")

    def range(self, index: int) -> RangeReply:
        """The reply to a part that reads. Raises ``DamagedAnswer`` if there is none."""
        return self._part(index, RangeReply)

    def put(self, index: int) -> PutReply:
        return self._part(index, PutReply)

    def deleted(self, index: int) -> bool:
        """Whether a part has deleted a key."""
        return bool(self._part(index, DeleteReply).deleted)

    def nested(self, index: int) -> TxnReply:
        return self._part(index, TxnReply)

    def _part(self, index: int, kind: type[P]) -> P:
        found = self.parts[index] if index < len(self.parts) else None
        if not isinstance(found, kind):
            raise self._damaged(f"part {index} is missing, or of another kind")
        return found

    def _damaged(self, why: str) -> DamagedAnswer:
        return damaged(self.where, why)


P = TypeVar("P", "RangeReply", "PutReply", "DeleteReply", "TxnReply")
Part = RangeReply | PutReply | DeleteReply | TxnReply | None


def damaged(where: str, why: object) -> DamagedAnswer:
    return DamagedAnswer(f"{where} answered with a message that is not its own: {why}")


def shown(text: bytes) -> str:
    """A server's text, cut and safe to print: it becomes part of an error's message."""
    return escaped(text[:LONGEST_TEXT].decode(errors="replace"))


_TXN_KINDS = {1: BYTES, 2: VARINT, 3: BYTES}
_PART_KINDS = {1: BYTES, 2: BYTES, 3: BYTES, 4: BYTES}


def txn_reply(body: bytes) -> TxnReply:
    reply = _txn(body, 1)
    if not reply.revision:
        raise Damaged("it has no revision")
    return reply


def _txn(body: bytes, depth: int) -> TxnReply:
    if depth > DEEPEST_TXN:
        raise Damaged("it is nested too deep")
    revision, succeeded, parts = 0, False, []
    for field, value in _fields(body, _TXN_KINDS):
        if field == 1:
            revision = _header(value).revision
        elif field == 2:
            succeeded = bool(value)
        elif field == 3:
            parts.append(_part(value, depth))
    return TxnReply(revision, succeeded, parts)


def _part(body: bytes, depth: int) -> Part:
    found: Part = None
    for field, value in _fields(body, _PART_KINDS):
        if field == 1:
            found = _range(value, lambda header: header)
        elif field == 2:
            found = _put(value)
        elif field == 3:
            found = _delete(value)
        elif field == 4:
            found = _txn(value, depth + 1)
    return found


class LeaseReply(NamedTuple):
    """The reply to a request about one lease."""

    header: Header
    id: str
    ttl: int
    """Seconds; 0 or less once it has ended."""
    keys: frozenset[str] = frozenset()


_LEASE_KINDS = {1: BYTES, 2: VARINT, 3: VARINT, 5: BYTES}


def lease_reply(body: bytes) -> LeaseReply:
    header, lease_id, ttl, keys = None, 0, 0, []
    for field, value in _fields(body, _LEASE_KINDS):
        if field == 1:
            header = _header(value)
        elif field == 2:
            lease_id = _count(value)
        elif field == 3:
            ttl = _signed(value)
        elif field == 5:
            keys.append(_text(value))
    if not lease_id:
        raise Damaged("it names no lease")
    return LeaseReply(_needed(header), str(lease_id), ttl, frozenset(keys))


def grant_reply(body: bytes) -> LeaseReply:
    """The reply to a request for a lease, which has a ttl."""
    reply = lease_reply(body)
    if reply.ttl <= 0:
        raise Damaged("a new lease without a ttl")
    return reply


def empty_reply(body: bytes) -> Header:
    """A reply that has nothing but its header."""
    found = dict(_fields(body, {1: BYTES}))
    return _needed(_header(found[1]) if 1 in found else None)


def token_reply(body: bytes) -> str:
    """The token of a sign-in. It becomes part of a header, so it must be plain text."""
    found = dict(_fields(body, {1: BYTES, 2: BYTES}))
    token = _text(found.get(2, b""))
    if not token or not token.isascii() or not token.isprintable():
        raise Damaged("its token is not a valid header value")
    return token


class StatusReply(NamedTuple):
    """What one node says about itself."""

    version: str
    leader: int
    errors: list[str]


def status_reply(body: bytes) -> StatusReply:
    header, version, leader, errors = None, "", 0, []
    for field, value in _fields(body, {1: BYTES, 2: BYTES, 4: VARINT, 8: BYTES}):
        if field == 1:
            header = _header(value)
        elif field == 2:
            version = value.decode(errors="replace")
        elif field == 4:
            leader = value
        elif field == 8:
            errors.append(value.decode(errors="replace"))
    _needed(header)
    return StatusReply(version, leader, errors)


class Event(NamedTuple):
    """One change of a watched key."""

    deleted: bool
    kv: KeyValue


class WatchReply(NamedTuple):
    """A message about one watch."""

    revision: int
    watch_id: int
    created: bool
    canceled: bool
    reason: str
    events: list[Event]


_WATCH_KINDS = {1: BYTES, 2: VARINT, 3: VARINT, 4: VARINT, 6: BYTES, 11: BYTES}


def watch_reply(body: bytes) -> WatchReply:
    header, numbers, reason, events = None, {2: 0, 3: 0, 4: 0}, "", []
    for field, value in _fields(body, _WATCH_KINDS):
        if field == 1:
            header = _header(value)
        elif field in numbers:
            numbers[field] = value
        elif field == 6:
            reason = shown(value)
        elif field == 11:
            events.append(_event(value))
    revision = _needed(header).revision
    if not revision:
        raise Damaged("it has no revision")
    number, created, canceled = numbers.values()
    return WatchReply(revision, _signed(number), bool(created), bool(canceled), reason, events)


def _event(body: bytes) -> Event:
    found = dict(_fields(body, {1: VARINT, 2: BYTES}))
    if 2 not in found:
        raise Damaged("an event without a key")
    kv = _key_value(found[2])
    if not kv.mod_revision:
        raise Damaged("a revision is missing")
    return Event(bool(found.get(1, 0)), kv)
