"""The keys and requests of ``consul://`` as bytes, and the entries of its answers. Pure.

Under ``<namespace>/locks/<name>/`` every claim has one key, locked by a session of its client:
``l/w/<owner>`` for a writer, ``l/r/<owner>`` for a reader, ``s/<limit>.<permits>/<owner>`` for
slots. The order of arrival is its CreateIndex. A claim that fits on arrival holds. A claim that
does not fit waits; when it enters it writes a mark, ``/h`` behind its own key, and ``n/<number>``
for every slot that it takes. The token is the ModifyIndex of the write that made the claim a hold.
A query of the claim's key as a prefix has both its end and its mark.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import quote

from holdfast.claim import Claim, Mode
from holdfast.core.ordered import Details, Entry, escape, unescape, unreadable
from holdfast.stores._consensus.strict import (
    MOST_SLOTS,
    digits,
    moment,
    stored_json,
    text,
    whole_number,
)

__all__ = ["NameKeys", "Names", "entry_value", "queue_of"]

PROTOCOL = 1
_MODES = {"lw": Mode.EXCLUSIVE, "lr": Mode.SHARED}
_FIELDS = 5
LONGEST_OWNER = 64
MARK = "/h"
OPS = 64
"""The largest number of operations in one transaction."""


def quotable(key: str) -> bytes:
    """A key, of Holdfast or of other software, escaped for use between quotes in JSON."""
    return json.dumps(key)[1:-1].encode()


def entry_value(claim: Claim, since: float, *, behind: int = 0, token: int = 0) -> bytes:
    """The value of an entry: version, behind, since, label, token. The token is 0, except for a
    hold that was written again after its grant: a later write must not change its token."""
    text = f"[{PROTOCOL},{behind},{since:.3f},{quoted(claim.label)},{token}]"
    return b64encode(text.encode())


@lru_cache(1024)
def quoted(label: str) -> str:
    """The label as JSON, cached: a client has few labels and many claims."""
    return json.dumps(label)


def txn(*ops: bytes) -> bytes:
    return b'[{"KV":%b}]' % b'},{"KV":'.join(ops)


def lock(key: bytes, value: bytes, session: str) -> bytes:
    return b'{"Verb":"lock","Key":"%b","Value":"%b","Session":"%b"}' % (
        key,
        value,
        session.encode(),
    )


def unlock(key: bytes, session: str) -> bytes:
    return b'{"Verb":"unlock","Key":"%b","Session":"%b"}' % (key, session.encode())


def write(key: bytes, value: bytes) -> bytes:
    return b'{"Verb":"set","Key":"%b","Value":"%b"}' % (key, value)


def rewrite(key: bytes, value: bytes, index: int) -> bytes:
    return b'{"Verb":"cas","Key":"%b","Value":"%b","Index":%d}' % (key, value, index)


def get(key: bytes) -> bytes:
    return b'{"Verb":"get","Key":"%b"}' % key


def tree(prefix: bytes) -> bytes:
    return b'{"Verb":"get-tree","Key":"%b"}' % prefix


def delete(key: bytes) -> bytes:
    return b'{"Verb":"delete","Key":"%b"}' % key


def delete_same(key: bytes, index: int) -> bytes:
    return b'{"Verb":"delete-cas","Key":"%b","Index":%d}' % (key, index)


def absent(key: bytes) -> bytes:
    return b'{"Verb":"check-not-exists","Key":"%b"}' % key


def same(key: bytes, index: int) -> bytes:
    return b'{"Verb":"check-index","Key":"%b","Index":%d}' % (key, index)


def locked_by(key: bytes, session: str) -> bytes:
    return b'{"Verb":"check-session","Key":"%b","Session":"%b"}' % (key, session.encode())


def query(prefix: str, index: int, milliseconds: int, *, keys: bool) -> bytes:
    """A blocking query of all keys that begin with a prefix; with ``keys`` without their values."""
    what = "keys" if keys else "recurse"
    wait = f"index={index}&wait={max(1, milliseconds)}ms"
    return f"GET /v1/kv/{quote(prefix)}?{what}&{wait}".encode()


def mark(entry: bytes) -> bytes:
    """The key that marks an entry which has waited as a hold."""
    return entry + MARK.encode()


class NameKeys(NamedTuple):
    """The keys of one name. They need no escapes in JSON."""

    prefix: str
    encoded: bytes

    def entry(self, claim: Claim) -> bytes:
        """The claim's own key."""
        if claim.mode is Mode.SLOTS:
            kind = f"s/{claim.limit:010d}.{claim.weight}/"
        else:
            kind = "l/r/" if claim.mode is Mode.SHARED else "l/w/"
        return f"{self.prefix}{kind}{claim.owner}".encode()

    @property
    def slots(self) -> str:
        """The prefix of the slots that are taken."""
        return f"{self.prefix}n/"

    def slot(self, number: int) -> bytes:
        return f"{self.slots}{number:010d}".encode()


class Names:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        space = escape(namespace)
        self.root = f"{space}/locks/"
        self.records = f"{space}/records/"
        self.guards = f"{space}/guards/"
        self.of = lru_cache(2048)(self._of)

    def _of(self, name: str) -> NameKeys:
        prefix = f"{self.root}{escape(name)}/"
        return NameKeys(prefix, prefix.encode())

    def record(self, name: str) -> bytes:
        return f"{self.records}{escape(name)}".encode()

    def guard(self, session: str) -> bytes:
        """The key whose index a session's requests must know; see ``ConsulBackend.abandon``."""
        return f"{self.guards}{session}".encode()


def queue_of(
    kvs: Iterable[dict[str, Any]], prefix: str, waiting: Collection[tuple[str, int]] = ()
) -> list[Entry]:
    """The entries of a tree, in order of arrival. ``waiting`` has the key and order of entries
    that are known not to have fitted on arrival.

    Raises ``Incompatible`` for keys or values of another version or of other software."""
    marks: dict[str, _Mark] = {}
    rows: list[dict[str, Any]] = []
    ahead = _Ahead()
    try:
        for kv in kvs:
            key: str = kv["Key"][len(prefix) :]
            if key.endswith(MARK):
                marks.setdefault(key.removesuffix(MARK).rpartition("/")[2], _Mark()).read(kv)
            elif key.startswith("n/"):
                marks.setdefault(_value(kv).decode(), _Mark()).add(digits(key[2:]))
            else:
                rows.append(kv)
        rows.sort(key=lambda kv: int(kv["CreateIndex"]))
        return [_entry(kv, prefix, marks, waiting, ahead) for kv in rows]
    except (ValueError, KeyError):
        raise unreadable("Consul", prefix) from None


def _value(kv: dict[str, Any]) -> bytes:
    return b64decode(kv["Value"] or "")


class _Ahead:
    """The sum of the entries before an entry, as far as it decides whether that entry fits."""

    __slots__ = ("readers_only", "weight")

    def __init__(self) -> None:
        self.weight = 0
        self.readers_only = True

    def leaves_room(self, mode: Mode, weight: int, limit: int) -> bool:
        if mode is Mode.SLOTS:
            return self.weight + weight <= limit
        return self.readers_only if mode is Mode.SHARED else self.weight == 0

    def add(self, mode: Mode, weight: int) -> None:
        self.weight += weight
        self.readers_only = self.readers_only and mode is Mode.SHARED


class _Mark:
    """The mark and the slots of one owner."""

    __slots__ = ("since", "slots", "token")

    def __init__(self) -> None:
        self.token = 0
        self.since = 0.0
        self.slots: list[int] = []

    def read(self, kv: dict[str, Any]) -> None:
        self.token = _written(kv)
        self.since = moment(float(_value(kv) or b"0"))

    def add(self, slot: int) -> None:
        if len(self.slots) >= MOST_SLOTS:
            raise ValueError("its slots are too many")
        self.slots.append(slot)


def _written(kv: dict[str, Any]) -> int:
    """The index of the write of a key. The end of its session changes the ModifyIndex again."""
    return int(kv["ModifyIndex"] if kv.get("Session") else kv["CreateIndex"])


def _entry(
    kv: dict[str, Any],
    prefix: str,
    marks: dict[str, _Mark],
    waiting: Collection[tuple[str, int]],
    ahead: _Ahead,
) -> Entry:
    """Raises ``ValueError`` or ``KeyError`` for what no version of this protocol writes."""
    key, order, changed = kv["Key"], int(kv["CreateIndex"]), int(kv["ModifyIndex"])
    family, kind, owner = key[len(prefix) :].split("/")
    limit, weight = map(digits, kind.split(".")) if family == "s" else (0, 1)
    mode = Mode.SLOTS if family == "s" else _MODES[family + kind]
    checked_owner(owner)
    marked = marks.get(owner)
    settled = marked is not None and marked.token > 0
    held = settled or ((key, order) not in waiting and ahead.leaves_room(mode, weight, limit))
    ahead.add(mode, weight)
    token, since = _written(kv), 0.0
    if marked is not None and settled:
        token, since = marked.token, marked.since
    slots = tuple(sorted(marked.slots)) if marked is not None else ()
    known = Details(token, weight, held, settled, 0, since, slots, "")
    read = partial(_details, kv, prefix, known)
    return Entry(key, owner, order, changed, kv.get("Session", ""), mode, limit, read, held)


def checked_owner(owner: str) -> str:
    """An owner, which is a part of a key. Raises ``ValueError``."""
    if not (owner.isascii() and owner.isalnum() and len(owner) <= LONGEST_OWNER):
        raise ValueError("its owner is of another form")
    return owner


def handed_ref(ref: Sequence[str | int]) -> str:
    """The session that a hold was bound to when it was handed over, of a text. Raises
    ``ValueError``."""
    session = ref[0] if len(ref) == 1 else ""
    if isinstance(session, str) and session.isascii() and session.replace("-", "").isalnum():
        return session
    raise ValueError("not the text of a hold in Consul")


def _details(kv: dict[str, Any], prefix: str, known: Details) -> Details:
    try:
        version, behind, since, label, token = _stored_fields(_value(kv))
        if version != PROTOCOL:
            raise ValueError(f"version {version}")
    except ValueError:
        raise unreadable("Consul", prefix) from None
    since, token = known.since or since, token or known.token
    return known._replace(behind=behind, since=since, label=label, token=token)


def _stored_fields(data: bytes) -> tuple[int, int, float, str, int]:
    """The fields of an entry, in the order of ``entry_value``. Raises ``ValueError`` for what no
    version of this protocol writes. No other code reads the value of an entry."""
    fields = stored_json(data)
    if not isinstance(fields, list) or len(fields) != _FIELDS:
        raise ValueError("it is of another form")
    version, behind, since, label, token = fields
    whole = whole_number
    return whole(version), whole(behind), moment(since), text(label), whole(token)


def segment_of(key: str, root: str) -> str | None:
    """The escaped name in a listed key. ``None`` if Holdfast has not written the key: it must
    never be sent back as the prefix of a name."""
    segment = key[len(root) :].removesuffix("/")
    written_by_us = key == f"{root}{segment}/" and escape(unescape(segment)) == segment
    return segment if written_by_us else None


def moving(keys: NameKeys, claim: Claim, value: bytes, slots: Iterable[int], by: Move) -> bytes:
    """Binds a hold and its slots to another session. The hold keeps its token, which is in its
    value from then on."""
    key, owner = keys.entry(claim), plain(claim.owner)
    ops = [
        locked_by(key, by.old),
        unlock(key, by.old),
        lock(key, value, by.new),
        delete(mark(key)),
        lock(mark(key), b"", by.new),
    ]
    for slot in map(keys.slot, slots):
        ops += [unlock(slot, by.old), lock(slot, owner, by.new)]
    return txn(*ops)


class Move(NamedTuple):
    """The ids of the old and of the new session."""

    old: str
    new: str


def plain(text: str) -> bytes:
    """A text as the value of a key."""
    return b64encode(text.encode())
