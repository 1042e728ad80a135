"""What is asked of the server for named locks, and the locks that stand for names.

A name's lock is a digest; a semaphore has one lock for each slot, one for the turn of the first
in line, and one by which that waiter is found while it naps. Beside it a holder has a mark, a
lock that changes from one hold of its session to the next: a session that takes a name again has
its lock before its row says so, and the row of its last hold must not be believed meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import IDLE_COUNTER_SECONDS
from holdfast.stores.mysql.protocol import Result, quoted
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.sql import CLOCK, NOW, PURGE_TRANSACTIONS, Schema, fill

__all__ = ["WAIT_SECONDS", "AdvisoryStatements", "came", "hold_mark", "session_lock"]

WAIT_SECONDS = 3600
"""How long the server is asked to wait at a time."""
NAP_SECONDS = 1

_KEY = "CONCAT('hf:', LEFT(SHA2(CONCAT(namespace, X'00', name), 256), 48)"
_LOCK_OF_ROW = f"{_KEY}, IF(slot < 0, '', CONCAT(':', slot)))"

# The lock and its token in one statement. It fails where the name counts as something else.
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
# The same for one who has waited, so that there is a row: the server does less for it.
_COME = """
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
# Sessions that wait show what they are in the words of their request.
_WAITING = """
SELECT INFO FROM information_schema.PROCESSLIST
WHERE INFO LIKE %(pattern)s ORDER BY TIME DESC, ID LIMIT 10000"""
_RECALL = """
SELECT value, token, #now# - written FROM @record
WHERE namespace = %(namespace)s AND name = %(name)s AND expires > #now#"""
_PURGE = """
DELETE FROM @counter WHERE namespace = %(namespace)s AND since < #now# - #idle#
  AND (slot >= 0 OR capacity = 0) AND IS_FREE_LOCK(#lock#) LIMIT 2000;
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
    "come": _COME,
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
    """The named lock by which a session is found."""
    return b"'hf:session:%s'" % tag.encode()


@lru_cache(maxsize=1024)
def _digest(namespace: str, name: str) -> str:
    return hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:48]


def hold_mark(mark: int) -> bytes:
    """The named lock that tells a session's hold from the one before it."""
    return b"'hf:hold:%d'" % mark


def came(told: list[Result]) -> bool:
    """Whether a request that lined up has come to its lock, or to the turn of slots: its first
    statement says that it was free, or its second has waited for it."""
    for result in told[:2]:  # noqa: SIM110 - a generator is three calls more, and others wait
        if result.rows == [(b"1",)]:
            return True
    return False


class AdvisoryStatements:
    """The requests, as they read in one database and namespace."""

    def __init__(self, schema: Schema, namespace: str) -> None:
        self._namespace = namespace
        words = _WORDS | {"%(namespace)s": quoted(namespace.encode()).decode()}
        self._sql = {
            name: " ".join(schema.filled(fill(sql, words)).split()).replace("#t#", CLOCK).encode()
            for name, sql in _TEXTS.items()
        }

    def lock(self, name: str, part: str = "") -> bytes:
        """The lock of a name, or a part of it: a slot, the turn, the nap."""
        return f"'hf:{_digest(self._namespace, name)}{part}'".encode()

    def slots(self, name: str, slots: Iterable[int]) -> list[bytes]:
        return [self.lock(name, f":{slot}") for slot in slots]

    def let_go(self, claim: Claim, mark: int) -> bytes:
        return b"DO RELEASE_LOCK(%s), RELEASE_LOCK(%s)" % (self.lock(claim.name), hold_mark(mark))

    def locks(self, grant: Grant) -> list[bytes]:
        """All that a hold has, but for its mark."""
        if grant.claim.mode is Mode.SLOTS:
            return self.slots(grant.claim.name, grant.slots)
        return [self.lock(grant.claim.name)]

    def take(self, claim: Claim, mark: int, *, has_lock: bool) -> bytes:
        """Takes the lock of a name, unless the session has it, and the mark, and counts."""
        if has_lock:
            condition = self._has_lock(claim, mark)
        else:
            locks = self.lock(claim.name), hold_mark(mark)
            condition = b"GET_LOCK(%s, 0) = 1 AND GET_LOCK(%s, 0) = 1" % locks
        return self._count("take", claim, condition, mark)

    def _has_lock(self, claim: Claim, mark: int) -> bytes:
        # And maybe the mark: a lock that is taken twice must be freed twice.
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
        """Counts, and notes who has which slot."""
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

    def why(self, name: str) -> bytes:
        """Whether the session has the lock all the same, and what the name counts as."""
        mine = b"SELECT IS_USED_LOCK(%s) = CONNECTION_ID(), " % self.lock(name)
        return mine + b"(%s)" % self.capacity(name)

    def rebind(self, claim: Claim, was: int) -> bytes:
        """Makes a name something else, if nobody has any lock of what it was."""
        locks = self.slots(claim.name, range(was)) if was else [self.lock(claim.name)]
        return self._sql["rebind"] % {
            b"name": quoted(claim.name.encode()),
            b"capacity": claim.limit,
            b"was": was,
            b"condition": b" AND ".join(b"IS_FREE_LOCK(%s)" % lock for lock in locks),
        }

    def line_up(self, claim: Claim, mark: int, wall: float) -> bytes:
        """Stands in the server's queue, for the turn of slots or for a lock. Of a lock it first
        tells whether it is free; and once it has it, takes its token, if the name still counts as
        what it did for the one before."""
        if claim.mode is Mode.SLOTS:
            return self._wait(claim, ":t", wall)
        wait = self._wait(claim, "", wall) + b" FROM DUAL WHERE @holdfast = 0"
        come = self._count("come", claim, self._has_lock(claim, mark), mark)
        return b"; ".join([self.try_lock(claim), wait, come])

    def try_lock(self, claim: Claim) -> bytes:
        """The least that tells whether a lock is free, and takes it if so."""
        return b"SELECT @holdfast := GET_LOCK(%s, 0)" % self.lock(claim.name)

    def _wait(self, claim: Claim, part: str, wall: float) -> bytes:
        # The comment is for people who look.
        said = b"%s %d" % (claim.label.encode().hex().encode() or b"-", int(wall * MICROS))
        lock = self.lock(claim.name, part)
        return b"SELECT GET_LOCK(%s, %d) /*hf %s*/" % (lock, WAIT_SECONDS, said)

    def nap(self, claim: Claim) -> bytes:
        """Waits until enough slots are free, for the first one that is not, and leaves it free:
        nobody else takes one before our turn is over. Who frees another ends the wait by a kill,
        found by its lock; who freed one before that is seen by the look that comes first."""
        slots = self.slots(claim.name, range(claim.limit))
        free = [b"IS_FREE_LOCK(%s)" % lock for lock in slots]
        # None of them may be taken any more at this second look.
        which = b", ".join(free), b", ".join(slots), slots[0]
        taken = b"IFNULL(ELT(FIELD(0, %s), %s), %s)" % which
        wait = b"IF(GET_LOCK(@holdfast_slot := %s, %d), RELEASE_LOCK(@holdfast_slot), 0)" % (
            taken, NAP_SECONDS,
        )  # fmt: skip
        nap = self.lock(claim.name, ":n")
        # One statement, since a server whose request is killed between two may never answer it;
        # and DO, which on MariaDB goes on to its end where a SELECT stops.
        return b"DO GET_LOCK(%s, 0), IF(%s >= %d, 0, %s), RELEASE_LOCK(%s)" % (
            nap, b" + ".join(free), claim.weight, wait, nap,
        )  # fmt: skip

    def set_ttl(self, claim: Claim) -> bytes:
        given = {b"name": quoted(claim.name.encode()), b"ttl": int(claim.ttl * MICROS)}
        return self._sql["set_ttl"] % given

    def stir(self, name: str) -> bytes:
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
