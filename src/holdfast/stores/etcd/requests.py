"""The requests of ``etcd://`` as bytes, and the entries of its answers. No network here.

Under ``<namespace>/locks/<name>/`` every claim has one key, bound to its client's etcd lease:
``l/w/<tag>`` for a writer, ``l/r/<tag>`` for a reader, ``s/<limit>/<tag>`` for slots. The
kinds are ranges of their own, so one transaction can tell what it is about to join. The order
of arrival is the key's create_revision, which is also the token. Slots may be taken in another
order than they were asked for, so their token is the revision of the grant.
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

__all__ = ["NameKeys", "Names", "behind", "entry_value", "line_of", "put"]

PROTOCOL = 1
_VERSION = b"[%d" % PROTOCOL
"""How the entries of this protocol begin."""


def span(prefix: str) -> bytes:
    """A range of all keys with a prefix that ends in a slash."""
    return between(prefix, prefix[:-1] + "0")  # "0" follows "/"


def between(low: str, high: str) -> bytes:
    return b'"key":"%b","range_end":"%b"' % (encoded(low), encoded(high))


def encoded(key: str) -> bytes:
    return b2a_base64(key.encode(), newline=False)


def decoded(key: str) -> str:
    return a2b_base64(key).decode(errors="replace")


WAITING, HELD, HANDED = range(3)
"""What an entry can be. One that was handed over counts as a hold until others lose patience:
its owner says by then that it came, or is skipped."""


def entry_value(
    claim: Claim,
    since: float,
    *,
    held: bool,
    slots: Sequence[int] = (),
    behind: int = 0,
    token: int = 0,
) -> bytes:
    """What stands in an entry: version, weight, state, behind, since, slots, token, label.

    The token is 0 until slots are written again after their grant: before that it is the revision
    of their last change."""
    numbers, state = ",".join(map(str, slots)), HELD if held else WAITING
    head = f"[{PROTOCOL},{claim.weight},{state},{behind},{since:.3f},[{numbers}],{token},"
    return encoded(f"{head}{quoted(claim.label)}]")


def told_value(value: str, token: int) -> bytes:
    """What an entry of slots says that is written again: the same, and its token. Raises
    ``ValueError`` for one that somebody else has overwritten."""
    fields = list(stored_fields(value))
    *fields, _, label = fields
    return encoded(json.dumps([*fields, token, label], separators=(",", ":")))


def handed_value(value: str) -> bytes:
    """What a waiter's entry says once it has been handed over. Raises ``ValueError`` for one that
    is of another version."""
    version, weight, _, rest = a2b_base64(value).split(b",", 3)
    if version != _VERSION:
        raise ValueError(f"version {version!r}")
    return b2a_base64(b"%b,%b,%d,%b" % (version, weight, HANDED, rest), newline=False)


def state_of(kv: dict[str, str], prefix: str) -> int:
    """What an entry is, read no further than that."""
    try:
        version, _, state, _ = a2b_base64(kv.get("value", "")).split(b",", 3)
        if version == _VERSION:
            return digits(state.decode(), HANDED)
    except ValueError:
        pass
    raise _foreign(prefix)


@lru_cache(1024)
def quoted(label: str) -> str:
    """A client has few labels and many claims."""
    return json.dumps(label)


def put(key: bytes, value: bytes, lease: str) -> bytes:
    return b'{"request_put":{"key":"%b","value":"%b","lease":"%b"}}' % (key, value, lease.encode())


def empty(keys: bytes) -> bytes:
    return b'{%b,"target":"CREATE","create_revision":"0"}' % keys


def created_at(key: bytes, revision: int) -> bytes:
    """The key was created at this revision; 0: it does not exist."""
    return b'{"key":"%b","target":"CREATE","create_revision":"%d"}' % (key, revision)


def never(key: bytes) -> bytes:
    """Does not hold, whatever becomes of the key."""
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


def tag_of(key: str) -> str:
    """The tag in a stored key."""
    return decoded(key).rpartition("/")[2]


def is_writer(key: str) -> bool:
    return "/l/w/" in decoded(key)


def change(key: bytes, value: bytes) -> bytes:
    """Writes an entry anew, bound to the lease it has."""
    return b'{"request_put":{"key":"%b","value":"%b","ignore_lease":true}}' % (key, value)


def bind(key: bytes, lease: str) -> bytes:
    """Binds an entry to another lease, and changes nothing else."""
    return b'{"request_put":{"key":"%b","ignore_value":true,"lease":"%b"}}' % (key, lease.encode())


def read(key: bytes) -> bytes:
    return b'{"request_range":{"key":"%b"}}' % key


def changed_at(key: bytes, revision: int) -> bytes:
    """The key was last written at this revision."""
    return b'{"key":"%b","target":"MOD","mod_revision":"%d"}' % (key, revision)


def wake(subscription: bytes, tag: str, session: str) -> bytes:
    return put(subscription, encoded(tag), session)


def delete(key: bytes) -> bytes:
    return b'{"request_delete_range":{"key":"%b"}}' % key


def ending(entry: Entry) -> bytes:
    """Deletes an entry unless it has ended already: its key may be another's by now."""
    key = entry.key.encode()
    return nested([created_at(key, entry.order)], [delete(key)])


_BY_ARRIVAL = b'"sort_order":"%b","sort_target":"CREATE"'


class NameKeys:
    """The keys of one name."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.crowded = False
        """Whether somebody was in the way when it was last asked for."""
        self.all = span(prefix)
        self.writers = span(prefix + "l/w/")
        self.locks = span(prefix + "l/")
        self.slots = span(prefix + "s/")
        self.listing = b'{"request_range":{%b}}' % self.all
        last = b'{"request_range":{%b,"limit":"1",%b}}' % (self.all, _BY_ARRIVAL % b"DESCEND")
        line = nested([b"%b", created_at(b"%b", 0), empty(self.slots)], [put(b"%b", b"%b", "%b")])
        self.lined_until = 0.0
        """Until when it may be taken for granted that others are in line, for now."""
        self._taking = txn([b"%b", empty(self.all)], [put(b"%b", b"%b", "%b")])
        self._joining = txn(
            [b"%b", created_at(b"%b", 0), empty(self.slots)], [last, put(b"%b", b"%b", "%b")]
        )
        self._entering = txn([b"%b", empty(self.all)], [put(b"%b", b"%b", "%b")], [last, line])

    def taking(self, guard: bytes, key: bytes, lease: str, held: bytes) -> bytes:
        """Takes the name for a writer if nobody is there."""
        return self._taking % (guard, key, held, lease.encode())

    def entering(self, guard: bytes, key: bytes, lease: str, held: bytes, waiting: bytes) -> bytes:
        """Takes the name for a writer if nobody is there, and else reads who is last in line and
        joins behind that one."""
        session = lease.encode()
        return self._entering % (guard, key, held, session, guard, key, key, waiting, session)

    def joining(self, guard: bytes, key: bytes, lease: str, waiting: bytes) -> bytes:
        """Joins the line in any case: shorter, where somebody is there for sure."""
        return self._joining % (guard, key, key, waiting, lease.encode())

    def from_on(self, order: int, count: int) -> bytes:
        """The first entries of those who stand there since ``order`` or later."""
        return b'%b,"min_create_revision":"%d","limit":"%d",%b' % (
            self.all,
            order,
            count,
            _BY_ARRIVAL % b"ASCEND",
        )

    def next_after(self, order: int) -> bytes:
        """Reads who comes after one who stands there since ``order``; 0: who is first."""
        return b'{"request_range":{%b}}' % self.from_on(order + 1, 1)

    def entry(self, claim: Claim, tag: str) -> bytes:
        """The claim's own key."""
        return encoded(self.prefix + _kind(claim) + tag)

    def free_for(self, claim: Claim, key: bytes) -> list[bytes]:
        """Holds if a newcomer can be granted at once."""
        if claim.mode is Mode.SHARED:
            return [empty(self.writers), empty(self.slots), created_at(key, 0)]
        return [empty(self.all)]

    def first_for(self, claim: Claim, key: bytes, order: int) -> list[bytes]:
        """Holds if one who stands in line since ``order`` can be granted."""
        if claim.mode is Mode.SHARED:
            return [empty(self.writers), empty(self.slots), created_at(key, order)]
        return [none_before(self.all, order), created_at(key, order)]

    def joinable(self, claim: Claim, key: bytes) -> list[bytes]:
        """Holds if the claim is not in line yet and nobody uses the name as something else."""
        if claim.mode is not Mode.SLOTS:
            return [created_at(key, 0), empty(self.slots)]
        same, after = self.prefix + _kind(claim), self.prefix + _kind(claim)[:-1] + "0"
        others = [between(self.prefix + "s/", same), between(after, self.prefix + "s0")]
        return [created_at(key, 0), empty(self.locks), *map(empty, others)]


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
        self._subscriptions = f"{space}/bells/"
        self.of = lru_cache(2048)(self._of)
        self.guard = lru_cache(64)(self._guard)
        self.subscription = lru_cache(64)(self._subscription)

    def _of(self, name: str) -> NameKeys:
        return NameKeys(f"{self.root}{escape(name)}/")

    def record(self, name: str) -> bytes:
        return encoded(self._records + escape(name))

    def _guard(self, session: str) -> bytes:
        """The key whose version a session's requests must know; see ``etcd_leave``."""
        return encoded(self._guards + session)

    def _subscription(self, session: str) -> bytes:
        """The key that is written to call a waiter whose entry is bound to that session."""
        return encoded(self._subscriptions + session)

    def segment_of(self, key: str) -> str:
        """The name that a stored key belongs to, as it is stored."""
        return key[len(self.root) :].partition("/")[0]


def place_of(entry: Entry | None) -> tuple[str, int]:
    """Which entry it is: its key alone may be used again."""
    return ("", 0) if entry is None else (entry.key, entry.order)


def line_of(found: dict[str, Any], prefix: str) -> list[Entry]:
    """The entries of a range's answer, in order of arrival."""
    line = [_entry(kv, prefix) for kv in found.get("kvs", ())]
    line.sort(key=lambda entry: entry.order)
    return line


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
    """What an entry says, in the order of ``entry_value``. The one place where it is read; raises
    ``ValueError`` for what no version of this protocol writes."""
    fields = stored_json(a2b_base64(value))
    if not isinstance(fields, list) or len(fields) != _FIELDS:
        raise ValueError("it is of another form")
    version, weight, state, behind, since, slots, token, label = fields
    if whole_number(version) != PROTOCOL:
        raise ValueError(f"version {version}")
    if not isinstance(slots, list) or len(slots) > MOST_SLOTS:
        raise ValueError("its slots are missing or too many")
    return (
        version,
        whole_number(weight),
        whole_number(state, HANDED),
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


def behind(key: bytes, old: bytes, new: bytes) -> bytes:
    """Writes how many wait behind an entry that was not granted meanwhile."""
    compare = b'{"key":"%b","target":"VALUE","value":"%b"}' % (key, old)
    return txn([compare], [change(key, new)])
