"""The requests of ``etcd://`` as messages, and the entries in its replies. No network here.

Under ``<namespace>/locks/<name>/`` every claim has one key, its entry, bound to the client's etcd
lease: ``l/w/<key id>`` for a writer, ``l/r/<key id>`` for a reader, ``s/<limit>/<key id>`` for
slots. Each kind is a range of its own, so one transaction can check what it is about to join. The
order of arrival is the key's create_revision, which is also the token. Slots may be granted in
another order than they were requested, so their token is the revision of the grant.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial

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
from holdfast.stores.etcd.messages import KeyValue, RangeReply, data, integer

__all__ = ["NameKeys", "Names", "change_behind", "entries_of", "entry_value", "put"]

PROTOCOL = 1
_VERSION = b"[%d" % PROTOCOL
"""The first bytes of every entry's value."""


def span(prefix: str) -> bytes:
    """The range of all keys with a prefix that ends in a slash."""
    return between(prefix, prefix[:-1] + "0")  # "0" follows "/"


def between(low: str, high: str) -> bytes:
    return data(1, encoded(low)) + data(2, encoded(high))


def encoded(key: str) -> bytes:
    """A key as it is stored. One that another program has written may be no text."""
    return key.encode(errors="surrogateescape")


def only(key: bytes) -> bytes:
    """The range of one key."""
    return data(1, key)


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
    return f"{head}{quoted(claim.label)}]".encode()


def value_with_token(value: bytes, token: int) -> bytes:
    """The value of an entry of slots with its token filled in. Raises ``ValueError`` if another
    program has overwritten the entry."""
    *fields, _, label = stored_fields(value)
    return json.dumps([*fields, token, label], separators=(",", ":")).encode()


def granted_value(value: bytes) -> bytes:
    """The value of a waiter's entry after a direct grant. Raises ``ValueError`` for an entry of
    another protocol version."""
    version, weight, _, rest = value.split(b",", 3)
    if version != _VERSION:
        raise ValueError(f"version {version!r}")
    return b"%b,%b,%d,%b" % (version, weight, GRANTED, rest)


def state_of(kv: KeyValue, prefix: str) -> int:
    """Reads only the state of an entry. Raises ``Incompatible``."""
    try:
        version, _, state, _ = kv.value.split(b",", 3)
        if version == _VERSION:
            return digits(state.decode(), GRANTED)
    except ValueError:
        pass
    raise _foreign(prefix)


@lru_cache(1024)
def quoted(label: str) -> str:
    """The label as JSON. Cached: a client has few labels and many claims."""
    return json.dumps(label)


# Parts of requests. Those that read or write are operations of a transaction.

_EQUAL, _GREATER, _LESS = (integer(1, number) for number in range(3))
_VERSION_OF, _CREATE, _MOD, _VALUE = (integer(2, number) for number in range(4))
_RANGE_OP, _PUT_OP, _DELETE_OP, _TXN_OP = range(1, 5)
_ABSENT = integer(5, 0)


def put(key: bytes, value: bytes, lease: str = "0", extra: bytes = b"") -> bytes:
    return data(_PUT_OP, data(1, key) + data(2, value) + integer(3, int(lease)) + extra)


WITH_PREVIOUS = integer(4, 1)
"""Of a put: its reply has the key as it was before."""


def read(keys: bytes) -> bytes:
    return data(_RANGE_OP, keys)


def _compared_range(keys: tuple[str, str]) -> bytes:
    """The two ends of a range, as a comparison has them."""
    return data(3, encoded(keys[0])) + data(64, encoded(keys[1]))


def empty(low: str, high: str) -> bytes:
    """Compares: no key is in the range."""
    return _EQUAL + _CREATE + _compared_range((low, high)) + _ABSENT


def created_at(key: bytes, revision: int) -> bytes:
    """Compares: the key was created at this revision; 0: it does not exist."""
    return _EQUAL + _CREATE + data(3, key) + integer(5, revision)


def never(key: bytes) -> bytes:
    """A comparison that is false for every state of the key."""
    return _LESS + _CREATE + data(3, key) + _ABSENT


def none_before(keys: tuple[str, str], revision: int) -> bytes:
    return _GREATER + _CREATE + _compared_range(keys) + integer(5, revision - 1)


def unchanged_since(keys: tuple[str, str], revision: int) -> bytes:
    return _LESS + _MOD + _compared_range(keys) + integer(6, revision + 1)


def changed_at(key: bytes, revision: int) -> bytes:
    """Compares: the last write of the key was at this revision."""
    return _EQUAL + _MOD + data(3, key) + integer(6, revision)


def written(key: bytes, version: int) -> bytes:
    """Compares: the key was written so many times since it was created; 0: it does not exist."""
    return _EQUAL + _VERSION_OF + data(3, key) + integer(4, version)


def txn(compare: Iterable[bytes], success: Iterable[bytes], failure: Iterable[bytes] = ()) -> bytes:
    return b"".join(
        [data(1, each) for each in compare]
        + [data(2, each) for each in success]
        + [data(3, each) for each in failure]
    )


def nested(compare: Iterable[bytes], success: Iterable[bytes]) -> bytes:
    return data(_TXN_OP, txn(compare, success))


def key_id_of(key: str) -> str:
    """The key id in a stored key."""
    return key.rpartition("/")[2]


def is_writer(key: str) -> bool:
    return "/l/w/" in key


def change(key: bytes, value: bytes) -> bytes:
    """Writes the value of an entry and keeps its lease."""
    return data(_PUT_OP, data(1, key) + data(2, value) + _KEEP_LEASE)


def bind(key: bytes, lease: str) -> bytes:
    """Binds an entry to another lease and keeps its value."""
    return data(_PUT_OP, data(1, key) + integer(3, int(lease)) + _KEEP_VALUE)


_KEEP_VALUE, _KEEP_LEASE = integer(5, 1), integer(6, 1)


def wake(wakeup_key: bytes, key_id: str, session: str) -> bytes:
    """Writes a wake-up key, which wakes the waiter with that key id."""
    return put(wakeup_key, key_id.encode(), session)


def delete(key: bytes) -> bytes:
    return data(_DELETE_OP, data(1, key))


def delete_between(low: str, high: str) -> bytes:
    return data(_DELETE_OP, between(low, high))


def delete_if_same(entry: Entry) -> bytes:
    """Deletes an entry unless it has ended: its key may be recycled for another claim by now."""
    key = entry.key.encode()
    return nested([created_at(key, entry.order)], [delete(key)])


FIRST_ENTRIES = 2
"""How many entries from the start a waiter reads: so the first two waiters know their place."""
FEW_SHOWN = 4
"""How many entries a message reads that names the holders."""
_FIRST_COME = integer(5, 1) + integer(6, 2)
_LAST_COME = integer(5, 2) + integer(6, 2)
"""Orders of a range: by create revision, ascending or descending."""
_ONE = integer(3, 1)
KEYS_ONLY = integer(8, 1)


def oldest_entries(keys: bytes) -> bytes:
    """The request for the oldest of these entries, for a message."""
    return keys + integer(3, FEW_SHOWN) + _FIRST_COME


class NameKeys:
    """The keys and requests of one name."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.contended = False
        """True if other entries were there at the last attempt."""
        self.all = span(prefix)
        self.queue_expected_until = 0.0
        """Until this time an attempt joins without trying to take: entries are surely there."""
        self.ends = prefix, prefix[:-1] + "0"
        self.writers = span(prefix + "l/w/")
        self.listing = read(self.all)
        self._no_entry = empty(*self.ends)
        self._no_writer = empty(prefix + "l/w/", prefix + "l/w0")
        self._no_lock = empty(prefix + "l/", prefix + "l0")
        self._no_slots = empty(prefix + "s/", prefix + "s0")
        self._last = read(self.all + _ONE + _LAST_COME)

    def take(self, guard: bytes, key: bytes, lease: str, held: bytes) -> bytes:
        """Takes the name for a writer if it has no entries."""
        return txn([guard, self._no_entry], [put(key, held, lease)])

    def take_or_join(
        self, guard: bytes, key: bytes, lease: str, held: bytes, waiting: bytes
    ) -> bytes:
        """Takes the name for a writer if it has no entries. Otherwise reads the last entry of the
        queue and joins behind it."""
        absent = [guard, created_at(key, 0), self._no_slots]
        join = nested(absent, [put(key, waiting, lease)])
        return txn([guard, self._no_entry], [put(key, held, lease)], [self._last, join])

    def join(self, guard: bytes, key: bytes, lease: str, waiting: bytes) -> bytes:
        """Joins the queue in any case. Shorter than ``take_or_join``, for a name that surely has
        entries."""
        absent = [guard, created_at(key, 0), self._no_slots]
        return txn(absent, [self._last, put(key, waiting, lease)])

    def from_on(self, order: int, count: int) -> bytes:
        """The range of the first ``count`` entries that were created at revision ``order`` or
        later."""
        return self.all + integer(3, count) + _FIRST_COME + integer(12, order)

    def next_after(self, order: int) -> bytes:
        """Reads the first entry that was created after revision ``order``; 0: the first of all."""
        return read(self.from_on(order + 1, 1))

    def around(self, claim: Claim, key: bytes, order: int) -> list[bytes]:
        """Reads what decides about a claim that waits, however long the queue is: the first
        entries, the one in front of the claim's own (for a reader, the last writer), and its own.
        """
        among = self.writers if claim.mode is Mode.SHARED else self.all
        before = among + _ONE + _LAST_COME + integer(13, order - 1)
        return [read(self.from_on(0, _first_count(claim))), read(before), read(only(key))]

    def entry(self, claim: Claim, key_id: str) -> bytes:
        """The key of a claim's entry."""
        return encoded(self.prefix + _kind(claim) + key_id)

    def free_for(self, claim: Claim, key: bytes) -> list[bytes]:
        """Compares: a claim without an entry can be granted at once."""
        if claim.mode is Mode.SHARED:
            return [self._no_writer, self._no_slots, created_at(key, 0)]
        return [self._no_entry]

    def first_for(self, claim: Claim, key: bytes, order: int) -> list[bytes]:
        """Compares: the claim whose entry was created at revision ``order`` can be granted."""
        if claim.mode is Mode.SHARED:
            return [self._no_writer, self._no_slots, created_at(key, order)]
        return [none_before(self.ends, order), created_at(key, order)]

    def take_over(self, old: bytes, key: bytes, value: bytes, lease: str) -> list[bytes]:
        """Replaces a hold by one with another key, and deletes all entries that wait: they join
        again. The token of a waiter is the revision at which it joined, and must be higher than
        that of the new hold."""
        if is_writer(key.decode()):
            ours = key.decode()
            before = delete_between(f"{self.prefix}l/", ours)
            after = delete_between(f"{ours}\0", f"{self.prefix}l0")
            return [before, after, put(key, value, lease)]
        writers = delete_between(f"{self.prefix}l/w/", f"{self.prefix}l/w0")
        return [delete(old), writers, put(key, value, lease)]

    def joinable(self, claim: Claim, key: bytes) -> list[bytes]:
        """Compares: the claim has no entry yet, and the name is not in use as another kind of
        lock."""
        if claim.mode is not Mode.SLOTS:
            return [created_at(key, 0), self._no_slots]
        same, after = self.prefix + _kind(claim), self.prefix + _kind(claim)[:-1] + "0"
        others = [empty(self.prefix + "s/", same), empty(after, self.prefix + "s0")]
        return [created_at(key, 0), self._no_lock, *others]


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


def handed_ref(ref: Sequence[str | int]) -> tuple[str, int, int]:
    """What a text says of a hold that was handed over: its key id, its create revision, and the
    revision at which it was handed over. Raises ``ValueError``."""
    if len(ref) != 3:
        raise ValueError("not the text of a hold in etcd")
    key_id, order, changed = ref
    whole = isinstance(order, int) and isinstance(changed, int)
    if not whole or not isinstance(key_id, str) or not key_id.isalnum() or not key_id.isascii():
        raise ValueError("not the text of a hold in etcd")
    return key_id, int(order), int(changed)


def identity_of(entry: Entry | None) -> tuple[str, int]:
    """Key and create revision of an entry: a recycled key alone does not identify it. ``("", 0)``
    for no entry."""
    return ("", 0) if entry is None else (entry.key, entry.order)


def merged(replies: Iterable[RangeReply]) -> list[KeyValue]:
    """The keys in the replies to range requests that overlap, each once."""
    return list({kv.key: kv for reply in replies for kv in reply.kvs}.values())


def entries_of(kvs: Iterable[KeyValue], prefix: str) -> list[Entry]:
    """The entries that were read, in order of arrival. Raises ``Incompatible``."""
    entries = [_entry(kv, prefix) for kv in kvs]
    entries.sort(key=lambda entry: entry.order)
    return entries


def _entry(kv: KeyValue, prefix: str) -> Entry:
    try:
        family, kind, owner = kv.key[len(prefix) :].split("/")
        mode = Mode.SLOTS if family == "s" else _MODES[family + kind]
        limit = digits(kind) if family == "s" else 0
        if not owner.isascii():
            raise ValueError("no key of ours")
    except (ValueError, KeyError):
        raise _foreign(prefix) from None
    order, changed = kv.create_revision, kv.mod_revision
    details = partial(_details, kv.value, changed if mode is Mode.SLOTS else order, prefix)
    return Entry(kv.key, owner, order, changed, kv.lease, mode, limit, details)


def _details(value: bytes, revision: int, prefix: str) -> Details:
    try:
        _, weight, state, behind, since, slots, token, label = stored_fields(value)
    except ValueError:
        raise _foreign(prefix) from None
    held, given = state == HELD, state != WAITING
    return Details(token or revision, weight, held, given, behind, since, tuple(slots), label)


def stored_fields(value: bytes) -> tuple[int, int, int, int, float, list[int], int, str]:
    """Reads the fields of an entry, in the order of ``entry_value``. Raises ``ValueError`` for a
    value that no version of this protocol writes. All of an entry is read only here."""
    fields = stored_json(value)
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
    compare = _EQUAL + _VALUE + data(3, key) + data(7, old)
    return txn([compare], [change(key, new)])
