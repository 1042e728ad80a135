"""The requests of ``etcd://`` as bytes, and the entries in its replies. No network here.

Under ``<namespace>/locks/<name>/`` every claim has one key, its entry, bound to the client's etcd
lease: ``l/w/<key id>`` for a writer, ``l/r/<key id>`` for a reader, ``s/<limit>/<key id>`` for
slots. Each kind is a range of its own, so one transaction can check what it is about to join. The
order of arrival is the key's create_revision, which is also the token. Slots may be granted in
another order than they were requested, so their token is the revision of the grant.
"""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from holdfast.claim import Claim, Mode
from holdfast.core.ordered import Details, Entry, escape, unreadable
from holdfast.errors import Incompatible
from holdfast.stores._consensus.strict import (
    MOST_SLOTS,
    digits,
    moment,
    stored_json,
    text,
    whole_number,
)

__all__ = ["NameKeys", "Names", "change_behind", "entries_of", "entry_value", "put"]

PROTOCOL = 1
_VERSION = b"[%d" % PROTOCOL
"""The first bytes of every entry's value."""


def span(prefix: str) -> bytes:
    """The range of all keys with a prefix that ends in a slash."""
    return between(prefix, prefix[:-1] + "0")  # "0" follows "/"


def between(low: str, high: str) -> bytes:
    return b'"key":"%b","range_end":"%b"' % (encoded(low), encoded(high))


def encoded(key: str) -> bytes:
    return b2a_base64(key.encode(), newline=False)


def decoded(key: str) -> str:
    return a2b_base64(key).decode(errors="replace")


WAITING, HELD, GRANTED = range(3)
"""The states of an entry, as stored. GRANTED is a direct grant that its owner has not confirmed
yet: it counts as a hold until its grace is over, and is skipped then."""


def entry_value(
    claim: Claim,
    since: float,
    *,
    held: bool,
    slots: Sequence[int] = (),
    behind: int = 0,
    token: int = 0,
) -> bytes:
    """The value of an entry: version, weight, state, behind, since, slots, token, label.

    The token is 0 until an entry of slots is written again after its grant: before that, the token
    is the revision of the entry's last change.
    """
    numbers, state = ",".join(map(str, slots)), HELD if held else WAITING
    head = f"[{PROTOCOL},{claim.weight},{state},{behind},{since:.3f},[{numbers}],{token},"
    return encoded(f"{head}{quoted(claim.label)}]")


def value_with_token(value: str, token: int) -> bytes:
    """The value of an entry of slots with its token filled in. Raises ``ValueError`` if another
    program has overwritten the entry."""
    fields = list(stored_fields(value))
    *fields, _, label = fields
    return encoded(json.dumps([*fields, token, label], separators=(",", ":")))


def granted_value(value: str) -> bytes:
    """The value of a waiter's entry after a direct grant. Raises ``ValueError`` for an entry of
    another protocol version."""
    version, weight, _, rest = a2b_base64(value).split(b",", 3)
    if version != _VERSION:
        raise ValueError(f"version {version!r}")
    return b2a_base64(b"%b,%b,%d,%b" % (version, weight, GRANTED, rest), newline=False)


def state_of(kv: dict[str, str], prefix: str) -> int:
    """Reads only the state of an entry. Raises ``Incompatible``."""
    try:
        version, _, state, _ = a2b_base64(kv.get("value", "")).split(b",", 3)
        if version == _VERSION:
            return digits(state.decode(), GRANTED)
    except ValueError:
        pass
    raise _foreign(prefix)


@lru_cache(1024)
def quoted(label: str) -> str:
    """The label as JSON. Cached: a client has few labels and many claims."""
    return json.dumps(label)


def put(key: bytes, value: bytes, lease: str) -> bytes:
    return b'{"request_put":{"key":"%b","value":"%b","lease":"%b"}}' % (key, value, lease.encode())


def empty(keys: bytes) -> bytes:
    return b'{%b,"target":"CREATE","create_revision":"0"}' % keys


def created_at(key: bytes, revision: int) -> bytes:
    """Compares: the key was created at this revision; 0: it does not exist."""
    return b'{"key":"%b","target":"CREATE","create_revision":"%d"}' % (key, revision)


def never(key: bytes) -> bytes:
    """A comparison that is false for every state of the key."""
    return b'{"key":"%b","target":"CREATE","result":"LESS","create_revision":"0"}' % key


def none_before(keys: bytes, revision: int) -> bytes:
    return b'{%b,"target":"CREATE","result":"GREATER","create_revision":"%d"}' % (
        keys,
        revision - 1,
    )


def unchanged_since(keys: bytes, revision: int) -> bytes:
    return b'{%b,"target":"MOD","result":"LESS","mod_revision":"%d"}' % (keys, revision + 1)


def txn(compare: Iterable[bytes], success: Iterable[bytes], failure: Iterable[bytes] = ()) -> bytes:
    return b'{"compare":[%b],"success":[%b],"failure":[%b]}' % (
        b",".join(compare),
        b",".join(success),
        b",".join(failure),
    )


def nested(compare: Iterable[bytes], success: Iterable[bytes]) -> bytes:
    return b'{"request_txn":%b}' % txn(compare, success)


def key_id_of(key: str) -> str:
    """The key id in a stored key."""
    return decoded(key).rpartition("/")[2]


def is_writer(key: str) -> bool:
    return "/l/w/" in decoded(key)


def change(key: bytes, value: bytes) -> bytes:
    """Writes the value of an entry and keeps its lease."""
    return b'{"request_put":{"key":"%b","value":"%b","ignore_lease":true}}' % (key, value)


def bind(key: bytes, lease: str) -> bytes:
    """Binds an entry to another lease and keeps its value."""
    return b'{"request_put":{"key":"%b","ignore_value":true,"lease":"%b"}}' % (key, lease.encode())


def read(key: bytes) -> bytes:
    return b'{"request_range":{"key":"%b"}}' % key


def changed_at(key: bytes, revision: int) -> bytes:
    """Compares: the last write of the key was at this revision."""
    return b'{"key":"%b","target":"MOD","mod_revision":"%d"}' % (key, revision)


def wake(wakeup_key: bytes, key_id: str, session: str) -> bytes:
    """Writes a wake-up key, which wakes the waiter with that key id."""
    return put(wakeup_key, encoded(key_id), session)


def delete(key: bytes) -> bytes:
    return b'{"request_delete_range":{"key":"%b"}}' % key


def delete_if_same(entry: Entry) -> bytes:
    """Deletes an entry unless it has ended: its key may be recycled for another claim by now."""
    key = entry.key.encode()
    return nested([created_at(key, entry.order)], [delete(key)])


FIRST_ENTRIES = 2
"""How many entries from the start a waiter reads: so the first two waiters know their place."""
_BY_ARRIVAL = b'"sort_order":"%b","sort_target":"CREATE"'


class NameKeys:
    """The keys and requests of one name."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.contended = False
        """True if other entries were there at the last attempt."""
        self.all = span(prefix)
        self.writers = span(prefix + "l/w/")
        self.locks = span(prefix + "l/")
        self.slots = span(prefix + "s/")
        self.listing = b'{"request_range":{%b}}' % self.all
        last = b'{"request_range":{%b,"limit":"1",%b}}' % (self.all, _BY_ARRIVAL % b"DESCEND")
        join = nested([b"%b", created_at(b"%b", 0), empty(self.slots)], [put(b"%b", b"%b", "%b")])
        self.queue_expected_until = 0.0
        """Until this time an attempt joins without trying to take: entries are surely there."""
        self._take = txn([b"%b", empty(self.all)], [put(b"%b", b"%b", "%b")])
        self._join = txn(
            [b"%b", created_at(b"%b", 0), empty(self.slots)], [last, put(b"%b", b"%b", "%b")]
        )
        self._take_or_join = txn([b"%b", empty(self.all)], [put(b"%b", b"%b", "%b")], [last, join])

    def take(self, guard: bytes, key: bytes, lease: str, held: bytes) -> bytes:
        """Takes the name for a writer if it has no entries."""
        return self._take % (guard, key, held, lease.encode())

    def take_or_join(
        self, guard: bytes, key: bytes, lease: str, held: bytes, waiting: bytes
    ) -> bytes:
        """Takes the name for a writer if it has no entries. Otherwise reads the last entry of the
        queue and joins behind it."""
        session = lease.encode()
        return self._take_or_join % (guard, key, held, session, guard, key, key, waiting, session)

    def join(self, guard: bytes, key: bytes, lease: str, waiting: bytes) -> bytes:
        """Joins the queue in any case. Shorter than ``take_or_join``, for a name that surely has
        entries."""
        return self._join % (guard, key, key, waiting, lease.encode())

    def from_on(self, order: int, count: int) -> bytes:
        """The range of the first ``count`` entries that were created at revision ``order`` or
        later."""
        return b'%b,"min_create_revision":"%d","limit":"%d",%b' % (
            self.all,
            order,
            count,
            _BY_ARRIVAL % b"ASCEND",
        )

    def next_after(self, order: int) -> bytes:
        """Reads the first entry that was created after revision ``order``; 0: the first of all."""
        return b'{"request_range":{%b}}' % self.from_on(order + 1, 1)

    def around(self, claim: Claim, key: bytes, order: int) -> list[bytes]:
        """Reads what decides about a claim that waits, however long the queue is: the first
        entries, the one in front of the claim's own (for a reader, the last writer), and its own.
        """
        first = _first_count(claim)
        among = self.writers if claim.mode is Mode.SHARED else self.all
        before = b'%b,"max_create_revision":"%d","limit":"1",%b' % (
            among,
            order - 1,
            _BY_ARRIVAL % b"DESCEND",
        )
        ranges = (self.from_on(0, first), before, b'"key":"%b"' % key)
        return [b'{"request_range":{%b}}' % each for each in ranges]

    def entry(self, claim: Claim, key_id: str) -> bytes:
        """The key of a claim's entry."""
        return encoded(self.prefix + _kind(claim) + key_id)

    def free_for(self, claim: Claim, key: bytes) -> list[bytes]:
        """Compares: a claim without an entry can be granted at once."""
        if claim.mode is Mode.SHARED:
            return [empty(self.writers), empty(self.slots), created_at(key, 0)]
        return [empty(self.all)]

    def first_for(self, claim: Claim, key: bytes, order: int) -> list[bytes]:
        """Compares: the claim whose entry was created at revision ``order`` can be granted."""
        if claim.mode is Mode.SHARED:
            return [empty(self.writers), empty(self.slots), created_at(key, order)]
        return [none_before(self.all, order), created_at(key, order)]

    def joinable(self, claim: Claim, key: bytes) -> list[bytes]:
        """Compares: the claim has no entry yet, and the name is not in use as another kind of
        lock."""
        if claim.mode is not Mode.SLOTS:
            return [created_at(key, 0), empty(self.slots)]
        same, after = self.prefix + _kind(claim), self.prefix + _kind(claim)[:-1] + "0"
        others = [between(self.prefix + "s/", same), between(after, self.prefix + "s0")]
        return [created_at(key, 0), empty(self.locks), *map(empty, others)]


def _first_count(claim: Claim) -> int:
    # Every hold of slots has one at least: the entry after so many holds can't fit.
    return claim.limit + 1 if claim.mode is Mode.SLOTS else FIRST_ENTRIES


def first_of(claim: Claim, around: Sequence[Entry]) -> Sequence[Entry]:
    """Of the entries that ``NameKeys.around`` has read, in order: those whose place is certain."""
    count = _first_count(claim)
    return around[:count] if claim.mode is Mode.SHARED else around[: count + 1]


def _kind(claim: Claim) -> str:
    if claim.mode is Mode.SLOTS:
        return f"s/{claim.limit:010d}/"
    return "l/r/" if claim.mode is Mode.SHARED else "l/w/"


class Names:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        space = escape(namespace)
        self.root = f"{space}/locks/"
        self._records, self._guards = f"{space}/records/", f"{space}/guards/"
        self._wakeup_keys = f"{space}/bells/"  # the stored spelling, kept for compatibility
        self.of = lru_cache(2048)(self._of)
        self.guard = lru_cache(64)(self._guard)
        self.wakeup_key = lru_cache(64)(self._wakeup_key)

    def _of(self, name: str) -> NameKeys:
        return NameKeys(f"{self.root}{escape(name)}/")

    def record(self, name: str) -> bytes:
        return encoded(self._records + escape(name))

    def _guard(self, session: str) -> bytes:
        """The guard of a session: an attempt counts only if it knows the guard's version (see
        ``EtcdBackend._undo``)."""
        return encoded(self._guards + session)

    def _wakeup_key(self, session: str) -> bytes:
        """The key that is written to wake a waiter whose entry is bound to the session."""
        return encoded(self._wakeup_keys + session)

    def segment_of(self, key: str) -> str:
        """The name that a stored key belongs to, as it is stored."""
        return key[len(self.root) :].partition("/")[0]


def identity_of(entry: Entry | None) -> tuple[str, int]:
    """Key and create revision of an entry: a recycled key alone does not identify it. ``("", 0)``
    for no entry."""
    return ("", 0) if entry is None else (entry.key, entry.order)


def merged(replies: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The replies to range requests that overlap, as one."""
    by_key = {kv["key"]: kv for reply in replies for kv in reply["response_range"].get("kvs", ())}
    return {"kvs": list(by_key.values())}


def entries_of(found: dict[str, Any], prefix: str) -> list[Entry]:
    """The entries in the reply to a range request, in order of arrival. Raises ``Incompatible``."""
    entries = [_entry(kv, prefix) for kv in found.get("kvs", ())]
    entries.sort(key=lambda entry: entry.order)
    return entries


def _entry(kv: dict[str, str], prefix: str) -> Entry:
    try:
        family, kind, owner = decoded(kv["key"])[len(prefix) :].split("/")
        mode = Mode.SLOTS if family == "s" else _MODES[family + kind]
        limit = digits(kind) if family == "s" else 0
    except (ValueError, KeyError):
        raise _foreign(prefix) from None
    order, changed = int(kv["create_revision"]), int(kv["mod_revision"])
    lease = kv.get("lease", "0")
    details = partial(_details, kv, changed if mode is Mode.SLOTS else order, prefix)
    return Entry(kv["key"], owner, order, changed, lease, mode, limit, details)


def _details(kv: dict[str, str], revision: int, prefix: str) -> Details:
    try:
        _, weight, state, behind, since, slots, token, label = stored_fields(kv.get("value", ""))
    except ValueError:
        raise _foreign(prefix) from None
    held, given = state == HELD, state != WAITING
    return Details(token or revision, weight, held, given, behind, since, tuple(slots), label)


def stored_fields(value: str) -> tuple[int, int, int, int, float, list[int], int, str]:
    """Reads the fields of an entry, in the order of ``entry_value``. Raises ``ValueError`` for a
    value that no version of this protocol writes. All of an entry is read only here."""
    fields = stored_json(a2b_base64(value))
    if not isinstance(fields, list) or len(fields) != _FIELDS:
        raise ValueError("not a list of eight fields")
    version, weight, state, behind, since, slots, token, label = fields
    if whole_number(version) != PROTOCOL:
        raise ValueError(f"version {version}")
    if not isinstance(slots, list) or len(slots) > MOST_SLOTS:
        raise ValueError("the slots are missing or too many")
    return (
        version,
        whole_number(weight),
        whole_number(state, GRANTED),
        whole_number(behind),
        moment(since),
        [whole_number(slot) for slot in slots],
        whole_number(token),
        text(label),
    )


def _foreign(prefix: str) -> Incompatible:
    return unreadable("etcd", prefix)


_MODES = {"lw": Mode.EXCLUSIVE, "lr": Mode.SHARED}
_FIELDS = 8


def change_behind(key: bytes, old: bytes, new: bytes) -> bytes:
    """Writes how many waiters are behind an entry, if its value is still ``old``."""
    compare = b'{"key":"%b","target":"VALUE","value":"%b"}' % (key, old)
    return txn([compare], [change(key, new)])
