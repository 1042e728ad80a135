"""The requests of ``consul://`` as bytes, and the entries of its answers. No network here.

Under ``<namespace>/locks/<name>/`` every claim has one key, locked by its door's session:
``l/w/<owner>`` for a writer, ``l/r/<owner>`` for a reader, ``s/<limit>/<owner>`` for slots, and
``n/<number>`` for every slot that is held. The order of arrival is the CreateIndex. A key's
flags say what it is: FRESH ones hold if they fit where they stand, WAITING ones have said that
they wait, HELD ones have said that they hold. The token is the ModifyIndex of the write that
made it a hold.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from holdfast.backends.lines import Entry, escape, unescape
from holdfast.claim import Claim, Mode
from holdfast.core.admit import Share, fits
from holdfast.errors import Incompatible

__all__ = ["FRESH", "HELD", "WAITING", "NameKeys", "Names", "entry_value", "line_of"]

PROTOCOL = 1
FRESH, WAITING, HELD = 0, 1, 2
_MODES = {"w": Mode.EXCLUSIVE, "r": Mode.SHARED}


def entry_value(claim: Claim, since: float, *, behind: int = 0, token: int = 0) -> bytes:
    """What stands in an entry: version, weight, behind, since, label, and the token of a hold
    that was written again after its grant."""
    fields = [PROTOCOL, claim.weight, behind, round(since, 3), claim.label, token]
    return b64encode(json.dumps(fields).encode())


def txn(*ops: bytes) -> bytes:
    return b'[{"KV":%b}]' % b'},{"KV":'.join(ops)


def lock(key: bytes, value: bytes, session: str, flags: int) -> bytes:
    return b'{"Verb":"lock","Key":"%b","Value":"%b","Flags":%d,"Session":"%b"}' % (
        key,
        value,
        flags,
        session.encode(),
    )


def unlock(key: bytes, session: str) -> bytes:
    return b'{"Verb":"unlock","Key":"%b","Session":"%b"}' % (key, session.encode())


def write(key: bytes, value: bytes, flags: int) -> bytes:
    return b'{"Verb":"set","Key":"%b","Value":"%b","Flags":%d}' % (key, value, flags)


def rewrite(key: bytes, value: bytes, flags: int, index: int) -> bytes:
    return b'{"Verb":"cas","Key":"%b","Value":"%b","Flags":%d,"Index":%d}' % (
        key,
        value,
        flags,
        index,
    )


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


def query(path: str, index: int, milliseconds: int, *, keys: bool = False) -> bytes:
    """A blocking query on one key, or on the names of all keys below it."""
    what = "keys&" if keys else ""
    return f"GET /v1/kv/{quote(path)}?{what}index={index}&wait={max(1, milliseconds)}ms".encode()


class NameKeys(NamedTuple):
    """The keys of one name. They need no escapes in JSON."""

    prefix: str
    encoded: bytes

    def entry(self, claim: Claim) -> bytes:
        """The claim's own key."""
        if claim.mode is Mode.SLOTS:
            kind = f"s/{claim.limit:010d}/"
        else:
            kind = "l/r/" if claim.mode is Mode.SHARED else "l/w/"
        return f"{self.prefix}{kind}{claim.owner}".encode()

    def slot(self, number: int) -> bytes:
        return f"{self.prefix}n/{number:010d}".encode()


class Names:
    """The keys of one namespace."""

    def __init__(self, namespace: str) -> None:
        space = escape(namespace)
        self.root = f"{space}/locks/"
        self.records = f"{space}/records/"
        self._guards = f"{space}/guards/"
        self.of = lru_cache(2048)(self._of)

    def _of(self, name: str) -> NameKeys:
        prefix = f"{self.root}{escape(name)}/"
        return NameKeys(prefix, prefix.encode())

    def record(self, name: str) -> bytes:
        return f"{self.records}{escape(name)}".encode()

    def guard(self, session: str) -> bytes:
        """The key whose index a session's requests must know; see ``ConsulBackend.abandon``."""
        return f"{self._guards}{session}".encode()


def line_of(kvs: Iterable[dict[str, Any]], prefix: str) -> list[Entry]:
    """The entries of a tree, in order of arrival, each with the slots that it holds."""
    slots: dict[str, list[int]] = {}
    rows: list[dict[str, Any]] = []
    for kv in kvs:
        if kv["Key"].startswith("n/", len(prefix)):
            owner = b64decode(kv["Value"] or "").decode()
            slots.setdefault(owner, []).append(int(kv["Key"][len(prefix) + 2 :]))
        else:
            rows.append(kv)
    rows.sort(key=lambda kv: int(kv["CreateIndex"]))
    line: list[Entry] = []
    taken: list[Share] = []
    for kv in rows:
        entry = _entry(kv, prefix, slots, taken)
        line.append(entry)
        taken.append(entry.share)
    return line


def _entry(
    kv: dict[str, Any], prefix: str, slots: dict[str, list[int]], taken: Sequence[Share]
) -> Entry:
    try:
        family, kind, owner = kv["Key"][len(prefix) :].split("/")
        mode = Mode.SLOTS if family == "s" else _MODES[kind]
        limit = int(kind) if family == "s" else 0
        version, weight, behind, since, label, token = json.loads(b64decode(kv["Value"] or ""))
        if version != PROTOCOL:
            raise ValueError(f"version {version}")
    except (ValueError, KeyError, TypeError):
        where = unescape(prefix.rstrip("/").rpartition("/")[2])
        raise Incompatible(
            f"{where!r} is in use by a version of Holdfast that this one does not understand"
        ) from None
    flags, changed = kv["Flags"], int(kv["ModifyIndex"])
    return Entry(
        kv["Key"],
        owner,
        int(kv["CreateIndex"]),
        changed,
        token or changed,
        kv.get("Session", ""),
        mode,
        limit,
        weight,
        flags == HELD or (flags == FRESH and fits(mode, weight, limit, taken)),
        flags == HELD,
        behind,
        since,
        tuple(sorted(slots.get(owner, ()))),
        label,
    )


def slot_value(owner: str) -> bytes:
    return b64encode(owner.encode())
