"""The SQL of named locks as text, and the names of the locks.

All locks of a name begin with ``hf:`` and a digest of namespace and name. An exclusive lock is
just that. A semaphore has a lock for each slot (``:0``, ``:1``, …), a queue lock (``:t``) that the
first waiter holds, and a lock (``:n``) by which that waiter is found while it waits for slots.
Beside them a holder has a mark, ``hf:hold:…``, which differs from the previous hold of the same
session: a session that takes a name again has the lock before it has written its row, and until
then the row of its previous hold must not be believed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import IDLE_COUNTER_SECONDS
from holdfast.stores.mysql.protocol import Result, quoted
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.sql import CLOCK, NOW, PURGE_TRANSACTIONS, MySqlSchema, fill

__all__ = ["WAIT_SECONDS", "MySqlAdvisoryStatements", "got_lock", "hold_mark", "session_lock"]

WAIT_SECONDS = 3600
"""Longest wait of one request in the server's queue."""
SLOT_WAIT_SECONDS = 1
"""Longest wait of one request of the first waiter for slots."""

_KEY = "CONCAT('hf:', LEFT(SHA2(CONCAT(namespace, X'00', name), 256), 48)"
_LOCK_OF_ROW = f"{_KEY}, IF(slot < 0, '', CONCAT(':', slot)))"

# Takes the lock and the token in one statement. It changes nothing if the capacity differs.
_COUNT = """
ON DUPLICATE KEY UPDATE
  token = IF(capacity = %(capacity)d, LAST_INSERT_ID(GREATEST(token + 1, #t#)), token),
  session = IF(capacity = %(capacity)d, %(session)s, session),
  label = IF(capacity = %(capacity)d, %(label)s, label),
  since = IF(capacity = %(capacity)d, #t#, since),
  ttl = IF(capacity = %(capacity)d, %(ttl)d, ttl)"""
_TAKE = """
INSERT INTO @counter (namespace, name, slot, token, capacity, session, label, since, ttl)
SELECT %(namespace)s, %(name)s, -1, LAST_INSERT_ID(#t# := #now#), %(capacity)d, %(session)s,
  %(label)s, #t#, %(ttl)d FROM DUAL WHERE %(condition)s #count#"""
# The same after a wait, when the row exists: an UPDATE costs the server less.
_COUNT_AFTER_WAIT = """
UPDATE @counter SET token = LAST_INSERT_ID(GREATEST(token + 1, #now#)), session = %(session)s,
  label = %(label)s, since = #now#, ttl = %(ttl)d
WHERE #of# AND capacity = %(capacity)d AND %(condition)s"""
_SLOT = """
INSERT INTO @counter (namespace, name, slot, token, capacity, session, label, since, ttl)
SELECT %(namespace)s, %(name)s, %(slot)d, token, %(capacity)d, %(session)s, %(label)s, since,
  %(ttl)d FROM @counter whole
WHERE whole.namespace = %(namespace)s AND whole.name = %(name)s AND whole.slot = -1
ON DUPLICATE KEY UPDATE token = VALUES(token), capacity = %(capacity)d, session = %(session)s,
  label = %(label)s, since = VALUES(since), ttl = %(ttl)d"""
_OF_NAME = "namespace = %(namespace)s AND name = %(name)s AND slot = -1"
_CAPACITY = "SELECT capacity FROM @counter WHERE #of#"
_REBIND = """
UPDATE @counter SET capacity = %(capacity)d WHERE #of# AND capacity = %(was)d AND %(condition)s"""
_SET_TTL = """
UPDATE @counter SET ttl = %(ttl)d
WHERE namespace = %(namespace)s AND name = %(name)s AND session DIV 2 = CONNECTION_ID()"""
_RECORD = """
INSERT INTO @record SELECT %(namespace)s, %(name)s, %(value)s, %(token)d, #now#, #now# + %(keep)d
  FROM (SELECT 1) one WHERE %(condition)s
ON DUPLICATE KEY UPDATE value = %(value)s, token = %(token)d, written = #now#,
  expires = #now# + %(keep)d"""
_LOOK = """
SELECT name, slot, capacity, token, label, since, ttl, session FROM @counter
WHERE namespace = %(namespace)s AND session > 0 AND IS_USED_LOCK(#lock#) = session DIV 2
  AND IS_USED_LOCK(CONCAT('hf:hold:', session)) = session DIV 2"""
_PAGE = """
SELECT name FROM @counter WHERE namespace = %(namespace)s AND slot = -1 AND name >= %(start)s
  AND name > %(after)s AND name < %(end)s ORDER BY name LIMIT %(limit)d"""
# A waiting session is described by a comment in its request.
_WAITING = """
SELECT INFO FROM information_schema.PROCESSLIST
WHERE INFO LIKE %(pattern)s ORDER BY TIME DESC, ID LIMIT 10000"""
_RECALL = """
SELECT value, token, #now# - written FROM @record
WHERE namespace = %(namespace)s AND name = %(name)s AND expires > #now#"""
_PURGE = """
DELETE FROM @counter WHERE namespace = %(namespace)s AND since < #now# - #idle#
  AND token < #now# AND (slot >= 0 OR capacity = 0) AND IS_FREE_LOCK(#lock#) LIMIT 2000;
DELETE FROM @record WHERE namespace = %(namespace)s AND expires < #now# LIMIT 2000"""

_WORDS = {
    "#count#": _COUNT,
    "#of#": _OF_NAME,
    "#lock#": _LOCK_OF_ROW,
    "#idle#": str(int(IDLE_COUNTER_SECONDS * MICROS)),
    "#now#": NOW,
}
_TEXTS = {
    "take": _TAKE,
    "count_after_wait": _COUNT_AFTER_WAIT,
    "slot": _SLOT,
    "capacity": _CAPACITY,
    "rebind": _REBIND,
    "set_ttl": _SET_TTL,
    "record": _RECORD,
    "look": _LOOK,
    "page": _PAGE,
    "recall": _RECALL,
    "purge": _PURGE,
    "purge_transactions": PURGE_TRANSACTIONS,
}


def session_lock(tag: str) -> bytes:
    """Returns the named lock by which a session is found."""
    return b"'hf:session:%s'" % tag.encode()


@lru_cache(maxsize=1024)
def _digest(namespace: str, name: str) -> str:
    return hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:48]


def hold_mark(mark: int) -> bytes:
    """Returns the named lock that marks one hold of a session."""
    return b"'hf:hold:%d'" % mark


def got_lock(results: list[Result]) -> bool:
    """True if a request of ``enter_queue`` got its lock: at once (first result), or after a wait
    (second result)."""
    for result in results[:2]:  # noqa: SIM110 - a generator costs three more calls, in a hot path
        if result.rows == [(b"1",)]:
            return True
    return False


class MySqlAdvisoryStatements:
    """The requests for named locks, filled in for one database and namespace."""

    def __init__(self, schema: MySqlSchema, namespace: str) -> None:
        self._namespace = namespace
        words = _WORDS | {"%(namespace)s": quoted(namespace.encode()).decode()}
        self._sql = {
            name: " ".join(schema.filled(fill(sql, words)).split()).replace("#t#", CLOCK).encode()
            for name, sql in _TEXTS.items()
        }

    def lock(self, name: str, part: str = "") -> bytes:
        """Returns the literal of a lock of a name; ``part`` is its suffix."""
        return f"'hf:{_digest(self._namespace, name)}{part}'".encode()

    def slots(self, name: str, slots: Iterable[int]) -> list[bytes]:
        return [self.lock(name, f":{slot}") for slot in slots]

    def release_lock(self, claim: Claim, mark: int) -> bytes:
        return b"DO RELEASE_LOCK(%s), RELEASE_LOCK(%s)" % (self.lock(claim.name), hold_mark(mark))

    def locks(self, grant: Grant) -> list[bytes]:
        """Returns the locks of a hold, without its mark."""
        if grant.claim.mode is Mode.SLOTS:
            return self.slots(grant.claim.name, grant.slots)
        return [self.lock(grant.claim.name)]

    def take(self, claim: Claim, mark: int, *, has_lock: bool) -> bytes:
        """Takes the lock of a name (unless ``has_lock``), the mark of the hold, and a token."""
        if has_lock:
            condition = self._has_lock(claim, mark)
        else:
            locks = self.lock(claim.name), hold_mark(mark)
            condition = b"GET_LOCK(%s, 0) = 1 AND GET_LOCK(%s, 0) = 1" % locks
        return self._count("take", claim, condition, mark)

    def _has_lock(self, claim: Claim, mark: int) -> bytes:
        # The session may have the mark already: a lock that is taken twice must be freed twice.
        lock, own = self.lock(claim.name), hold_mark(mark)
        ask = b"IS_USED_LOCK(%s) = CONNECTION_ID() AND IFNULL(IS_USED_LOCK(%s), GET_LOCK(%s, 0))"
        return ask % (lock, own, own)

    def _count(self, how: str, claim: Claim, condition: bytes, mark: int) -> bytes:
        return self._sql[how] % {
            b"name": quoted(claim.name.encode()),
            b"capacity": claim.limit,
            b"session": b"%d" % mark,
            b"label": quoted(claim.label.encode()),
            b"ttl": int(claim.ttl * MICROS),
            b"condition": condition,
        }

    def count_slots(self, claim: Claim, slots: Iterable[int], mark: int) -> list[bytes]:
        """Takes a token, and stores the holder of each slot."""
        return [self._count("take", claim, b"1", 0)] + [
            self._sql["slot"]
            % {
                b"name": quoted(claim.name.encode()),
                b"slot": slot,
                b"capacity": claim.limit,
                b"session": b"%d" % mark,
                b"label": quoted(claim.label.encode()),
                b"ttl": int(claim.ttl * MICROS),
            }
            for slot in slots
        ]

    def capacity(self, name: str) -> bytes:
        return self._sql["capacity"] % {b"name": quoted(name.encode())}

    def lock_and_capacity(self, name: str) -> bytes:
        """Selects whether this session has the lock of a name, and the stored capacity."""
        mine = b"SELECT IS_USED_LOCK(%s) = CONNECTION_ID(), " % self.lock(name)
        return mine + b"(%s)" % self.capacity(name)

    def rebind(self, claim: Claim, was: int) -> bytes:
        """Changes the capacity of a name, if all its locks under the old capacity are free."""
        locks = self.slots(claim.name, range(was)) if was else [self.lock(claim.name)]
        return self._sql["rebind"] % {
            b"name": quoted(claim.name.encode()),
            b"capacity": claim.limit,
            b"was": was,
            b"condition": b" AND ".join(b"IS_FREE_LOCK(%s)" % lock for lock in locks),
        }

    def enter_queue(self, claim: Claim, mark: int, wall: float) -> bytes:
        """Waits in the server's queue, for the queue lock of slots or for an exclusive lock. For
        an exclusive lock the first result is 1 if it was free; and with the lock the request takes
        a token, if the row exists and its capacity is still the claim's."""
        if claim.mode is Mode.SLOTS:
            return self._wait(claim, ":t", wall)
        wait = self._wait(claim, "", wall) + b" FROM DUAL WHERE @holdfast = 0"
        come = self._count("count_after_wait", claim, self._has_lock(claim, mark), mark)
        return b"; ".join([self.try_lock(claim), wait, come])

    def try_lock(self, claim: Claim) -> bytes:
        """Takes an exclusive lock if it is free: the cheapest request for that."""
        return b"SELECT @holdfast := GET_LOCK(%s, 0)" % self.lock(claim.name)

    def _wait(self, claim: Claim, part: str, wall: float) -> bytes:
        # The comment describes the waiter, for ``inspect()``.
        comment = b"%s %d" % (claim.label.encode().hex().encode() or b"-", int(wall * MICROS))
        lock = self.lock(claim.name, part)
        return b"SELECT GET_LOCK(%s, %d) /*hf %s*/" % (lock, WAIT_SECONDS, comment)

    def await_slot(self, claim: Claim) -> bytes:
        """Waits until enough slots may be free: for the first slot that is taken, which it releases
        at once. No other claim takes a slot while this session has the queue lock. A holder that
        frees another slot kills the wait, which it finds by the lock ``:n``; a slot that is freed
        before that lock is taken is seen by the check before the wait."""
        slots = self.slots(claim.name, range(claim.limit))
        free = [b"IS_FREE_LOCK(%s)" % lock for lock in slots]
        # At this second check all of them may be free.
        which = b", ".join(free), b", ".join(slots), slots[0]
        taken = b"IFNULL(ELT(FIELD(0, %s), %s), %s)" % which
        wait = b"IF(GET_LOCK(@holdfast_slot := %s, %d), RELEASE_LOCK(@holdfast_slot), 0)" % (
            taken, SLOT_WAIT_SECONDS,
        )  # fmt: skip
        wait_lock = self.lock(claim.name, ":n")
        # One statement, since the server may never reply to a request that is killed between two;
        # and DO, which MariaDB completes after a kill where it stops a SELECT.
        return b"DO GET_LOCK(%s, 0), IF(%s >= %d, 0, %s), RELEASE_LOCK(%s)" % (
            wait_lock, b" + ".join(free), claim.weight, wait, wait_lock,
        )  # fmt: skip

    def set_ttl(self, claim: Claim) -> bytes:
        given = {b"name": quoted(claim.name.encode()), b"ttl": int(claim.ttl * MICROS)}
        return self._sql["set_ttl"] % given

    def wake_slot_waiter(self, name: str) -> bytes:
        return b"KILL QUERY IS_USED_LOCK(%s)" % self.lock(name, ":n")

    def record(
        self, claim: Claim, locks: list[bytes], token: int, value: str, keep: float
    ) -> bytes:
        return self._sql["record"] % {
            b"name": quoted(claim.name.encode()),
            b"value": quoted(value.encode()),
            b"token": token,
            b"keep": int(min(keep, 3e9) * MICROS),
            b"condition": b"IS_USED_LOCK(%s) = CONNECTION_ID()" % locks[0],
        }

    def look(self, names: Iterable[str]) -> bytes:
        listed = b", ".join(quoted(name.encode(errors="surrogateescape")) for name in names)
        return self._sql["look"] + b" AND name IN (%s) ORDER BY name, slot" % listed

    def waiting(self, name: str) -> bytes:
        lock = self.lock(name).strip(b"'")
        pattern = quoted(b"SELECT GET_LOCK('%s%%" % lock)
        return " ".join(_WAITING.split()).encode() % {b"pattern": pattern}

    def page(self, prefix: str, after: str, limit: int) -> bytes:
        start = prefix.encode()
        return self._sql["page"] % {
            b"start": quoted(start),
            b"after": quoted(after.encode(errors="surrogateescape")),
            b"end": quoted(start + b"\xff"),
            b"limit": limit,
        }

    def recall(self, name: str) -> bytes:
        return self._sql["recall"] % {b"name": quoted(name.encode())}

    def purge(self) -> bytes:
        return self._sql["purge"]

    def purge_transactions(self) -> bytes:
        return self._sql["purge_transactions"]
