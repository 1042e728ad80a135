"""What is asked of the server for lease rows, as text.

``@name`` is a table, ``#word#`` is filled in once, and ``%(word)s`` for every request, with
literals made by ``quoted``.

Where one goes and one comes, and both want the name alone, the server changes the crowd by
itself: who joins is put behind the others, who leaves calls the first, who was called takes its
line out. Everything else is decided in ``mysql_row``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from holdfast.backends.mysql_row import CALLED, MICROS, NONE, State
from holdfast.backends.mysql_schema import Schema
from holdfast.claim import Claim
from holdfast.core.contract import GRACE_SECONDS, IDLE_COUNTER_SECONDS, STALE_SECONDS
from holdfast.wires.mysql_protocol import quoted

__all__ = ["IF_WRITTEN", "NOW", "PURGE_TRANSACTIONS", "LeaseStatements", "bell_lock", "fill"]

NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
_FREE = "crowd = '' AND ends <= #now#"

# Nobody holds and nobody waits: one statement decides. ``ends`` is last, since the others ask it.
_TAKE = """
INSERT INTO @lock (namespace, name, version, token, owner, label, since, crowd, ends)
VALUES (%(namespace)s, %(name)s, #now#, LAST_INSERT_ID(#now#), %(owner)s, %(label)s, #now#, '',
  #now# + %(ttl)d)
ON DUPLICATE KEY UPDATE version = IF(#free#, GREATEST(version + 1, #now#), version),
  token = IF(#free#, LAST_INSERT_ID(GREATEST(token + 1, #now#)), token),
  owner = IF(#free#, %(owner)s, owner), label = IF(#free#, %(label)s, label),
  since = IF(#free#, #now#, since), ends = IF(#free#, #now# + %(ttl)d, ends)"""

_WHERE = "WHERE namespace = %(namespace)s AND name = %(name)s"

_FREE_IT = """
UPDATE @lock SET version = GREATEST(version + 1, #now#), owner = '', ends = 0
#where# AND owner = %(owner)s AND ends > #now# AND crowd = ''"""

# The first line of a crowd is "owner mode token ends bell called ..."; see ``Entry.line``.
_WORD = "SUBSTRING_INDEX(SUBSTRING_INDEX(crowd, ' ', {0}), ' ', -1)"
# Whoever is first in the crowd is still there, and it is no semaphore.
_STANDS = (
    "(crowd <> '' AND #word2# <> 'slots' AND #word4# > #now# AND "
    "(#word6# = '-' OR SUBSTRING(#word6#, 2) >= #now#))"
)
_CALL_FIRST = """
UPDATE @lock SET version = GREATEST(version + 1, #now#), owner = '', ends = 0,
  crowd = CONCAT(#first# := SUBSTRING_INDEX(crowd, ' ', 5), ' r', #now# + #grace#,
    SUBSTRING(crowd, LENGTH(#first#) + 3))
#where# AND owner = %(owner)s AND ends > #now#
  AND SUBSTRING_INDEX(crowd, ' ', 3) LIKE '%% exclusive 0' AND #word4# > #now# AND #word6# = '-'"""
_CALLED = """
FROM @lock WHERE namespace = %(namespace)s AND name IN (%(names)s)
  AND LOCATE(%(word)s, crowd) > 0"""
_COME_FIRST = """
UPDATE @lock SET version = GREATEST(version + 1, #now#),
  token = LAST_INSERT_ID(GREATEST(token + 1, #now#)), owner = %(owner)s, label = %(label)s,
  since = #now#, crowd = SUBSTRING(crowd, LOCATE(X'0A', crowd) + 1), ends = #now# + %(ttl)d
#where# AND ends <= #now# AND LEFT(crowd, %(length)d) = %(mine)s"""
_JOIN = """
UPDATE @lock SET version = GREATEST(version + 1, #now#),
  crowd = CONCAT(crowd, %(head)s, #now# + #stale#, %(bell)s, #now#, %(tail)s)
#where# AND owner <> %(owner)s AND (ends > #now# OR #stands#) AND LENGTH(crowd) < 500000
  AND LOCATE(%(mine)s, CONCAT(X'0A', crowd)) = 0"""

# Where one who has just joined stands, and when whoever holds or was called is over.
_PLACE = """
SELECT LENGTH(crowd) - LENGTH(REPLACE(crowd, X'0A', '')) - 1, IF(ends > #now#, ends,
  IF(#word3# <> '0', #word4#, IF(#word6# = '-', NULL, SUBSTRING(#word6#, 2)))) - #now#
FROM @lock #where#"""

_EXTEND = """
UPDATE @lock SET version = GREATEST(version + 1, #now#), ends = #now# + %(ttl)d
#where# AND owner = %(owner)s AND ends > #now#"""

_COLUMNS = "version, token, owner, label, since, ends, crowd"
_READ = """
SELECT #now#, #columns# FROM (SELECT 1) one LEFT JOIN @lock
ON namespace = %(namespace)s AND name = %(name)s"""
_READ_MANY = "SELECT #now#, #columns#, name FROM @lock WHERE namespace = %(namespace)s"

_WRITE = """
UPDATE @lock SET version = %(next)d, token = %(token)d, owner = %(owner)s, label = %(label)s,
  since = %(since)d, ends = %(ends)d, crowd = %(crowd)s
#where# AND version = %(version)d"""
_WRITE_NEW = """
INSERT INTO @lock (namespace, name, version, token, owner, label, since, ends, crowd)
VALUES (%(namespace)s, %(name)s, %(next)d, %(token)d, %(owner)s, %(label)s, %(since)d, %(ends)d,
  %(crowd)s)
ON DUPLICATE KEY UPDATE version = version"""

_RECORD = """
INSERT INTO @record SELECT %(namespace)s, %(name)s, %(value)s, %(token)d, #now#, #now# + %(keep)d
  FROM (SELECT 1) one WHERE #written#
ON DUPLICATE KEY UPDATE value = %(value)s, token = %(token)d, written = #now#,
  expires = #now# + %(keep)d"""
_RECALL = "SELECT value, token, #now# - written FROM @record #where# AND expires > #now#"

_PURGE = """
DELETE FROM @lock WHERE namespace = %(namespace)s AND name > %(after)s AND name <= %(last)s
  AND crowd = '' AND ends <= #now# AND version < #now# - #idle#;
DELETE FROM @record WHERE namespace = %(namespace)s AND expires < #now# LIMIT 2000"""
# Of locks in transactions; a token is never below the time of its last use. One that somebody has
# just now ends the request, and they are all left for another time.
PURGE_TRANSACTIONS = """
BEGIN; SELECT name FROM @transaction WHERE namespace = %(namespace)s AND token < #now# - #idle#
  LIMIT 500 FOR UPDATE NOWAIT;
DELETE FROM @transaction WHERE namespace = %(namespace)s AND token < #now# - #idle# LIMIT 500;
COMMIT"""
_LAST = """
SELECT name FROM @lock WHERE namespace = %(namespace)s AND name > %(after)s
ORDER BY name LIMIT %(batch)d"""


_WORDS = {
    "#free#": _FREE,
    "#stands#": _STANDS,
    **{f"#word{place}#": _WORD.format(place) for place in (2, 3, 4, 6)},
    "#where#": _WHERE,
    "#grace#": str(int(GRACE_SECONDS * MICROS)),
    "#stale#": str(int(STALE_SECONDS * MICROS)),
    "#columns#": _COLUMNS,
    "#idle#": str(int(IDLE_COUNTER_SECONDS * MICROS)),
    "#now#": NOW,
}


def fill(sql: str, words: dict[str, str]) -> str:
    """The text with its words filled in; a word's text may hold the words after it."""
    for word, text in words.items():
        sql = sql.replace(word, text)
    return sql


IF_WRITTEN = b"SET @holdfast = ROW_COUNT()"
"""Right behind a write: what follows it happens only if it found its row unchanged. Where it did
not, nothing is written, and nobody waits for the disk."""


_BELL_OF_FIRST = (
    b"CONVERT(CONCAT('hf:bell:', SUBSTRING_INDEX(@holdfast_first, ' ', -1)) USING utf8mb4)"
)


def bell_lock(bell: str) -> bytes:
    """The named lock by which the session of a bell is found."""
    return b"'hf:bell:%s'" % bell.encode()


class LeaseStatements:
    """The requests, as they read in one database and namespace."""

    def __init__(self, schema: Schema, namespace: str) -> None:
        words = _WORDS | {"%(namespace)s": quoted(namespace.encode()).decode()}
        self._sql = {
            name: " ".join(schema.filled(fill(sql, words)).split())
            .replace("#written#", "@holdfast = 1")
            .replace("#first#", "@holdfast_first")
            .encode()
            for name, sql in _TEXTS.items()
        }

    def take(self, claim: Claim) -> bytes:
        """Takes a name that nobody uses, alone."""
        return self._sql["take"] % self._taken(claim)

    def _taken(self, claim: Claim) -> dict[bytes, bytes | int]:
        return {
            b"name": quoted(claim.name.encode()),
            b"owner": quoted(claim.owner.encode()),
            b"label": quoted(claim.label.encode()),
            b"ttl": int(claim.ttl * MICROS),
        }

    def free(self, claim: Claim) -> bytes:
        """Ends a hold that nobody waits for."""
        return self._sql["free"] % self._of(claim)

    def call_first(self, claim: Claim, stir: bool) -> bytes:
        """Ends a hold that others wait for, and calls the first of them: what is changed by the
        second statement, and the last one says whether it is there."""
        batch = [b"SET @holdfast_first = NULL", self._sql["call_first"] % self._of(claim)]
        if stir:
            batch.append(b"KILL QUERY IS_USED_LOCK(%s)" % _BELL_OF_FIRST)
        return b"; ".join(batch)

    def come_first(self, claim: Claim) -> bytes:
        """Takes a name for the first in line, who wants it alone."""
        mine = f"{claim.owner} {claim.mode.value} 0 ".encode()
        given = self._taken(claim) | {b"mine": quoted(mine), b"length": len(mine)}
        return self._sql["come_first"] % given

    def join(self, claim: Claim, bell: str) -> bytes:
        """Puts a claim behind all others, where it must wait in any case; and tells its place."""
        owner, mode, label = claim.owner, claim.mode.value, json.dumps(claim.label)
        given = self._of(claim) | {
            b"head": quoted(f"{owner} {mode} 0 ".encode()),
            b"bell": quoted(f" {bell or NONE} {NONE} ".encode()),
            b"tail": quoted(f" {claim.weight} {claim.limit} 0 {NONE} {label}\n".encode()),
            b"mine": quoted(f"\n{owner} ".encode()),
        }
        return self._sql["join"] % given

    def extend(self, claims: Sequence[Claim]) -> list[bytes]:
        """Renews holds that are alone, one statement each."""
        return [
            self._sql["extend"] % (self._of(claim) | {b"ttl": int(claim.ttl * MICROS)})
            for claim in claims
        ]

    def _of(self, claim: Claim) -> dict[bytes, bytes | int]:
        return {b"name": quoted(claim.name.encode()), b"owner": quoted(claim.owner.encode())}

    def read(self, name: str) -> bytes:
        return self._sql["read"] % {b"name": quoted(name.encode())}

    def read_many(self, names: Iterable[str]) -> bytes:
        listed = b", ".join(quoted(name.encode()) for name in names)
        return self._sql["read_many"] + b" AND name IN (%s)" % listed

    def survey(self, prefix: str, after: str, limit: int) -> bytes:
        start = prefix.encode()
        return self._sql["read_many"] + (
            b" AND name >= %s AND name > %s AND name < %s ORDER BY name LIMIT %d"
            % (quoted(start), quoted(after.encode()), quoted(start + b"\xff"), limit)
        )

    def write(self, state: State) -> bytes:
        """Writes a state back, unless it has changed meanwhile."""
        return self._sql["write" if state.version else "write_new"] % {
            b"name": quoted(state.name.encode()),
            b"version": state.version,
            b"next": max(state.version + 1, state.now),
            b"token": state.token,
            b"owner": quoted(state.owner.encode()),
            b"label": quoted(state.label.encode()),
            b"since": state.since,
            b"ends": state.ends,
            b"crowd": quoted(state.crowd_text()),
        }

    def called(self, bell: str, names: Iterable[str]) -> bytes:
        """Where somebody of this bell was called, of these names; a table and its condition."""
        listed = b", ".join(quoted(name.encode()) for name in names)
        word = quoted(f" {bell} {CALLED}".encode())
        return self._sql["called"] % {b"names": listed, b"word": word}

    def record(self, name: str, value: str, token: int, keep_seconds: float) -> bytes:
        """Keeps a value, ``IF_WRITTEN``."""
        return self._sql["record"] % {
            b"name": quoted(name.encode()),
            b"value": quoted(value.encode()),
            b"token": token,
            b"keep": int(min(keep_seconds, 3e9) * MICROS),
        }

    def recall(self, name: str) -> bytes:
        return self._sql["recall"] % {b"name": quoted(name.encode())}

    def last(self, after: bytes, batch: int) -> bytes:
        return self._sql["last"] % {b"after": quoted(after), b"batch": batch}

    def purge_transactions(self) -> bytes:
        return self._sql["purge_transactions"]

    def purge(self, after: bytes, last: bytes) -> bytes:
        return self._sql["purge"] % {b"after": quoted(after), b"last": quoted(last)}


_TEXTS = {
    "take": _TAKE,
    "free": _FREE_IT,
    "call_first": _CALL_FIRST,
    "called": _CALLED,
    "come_first": _COME_FIRST,
    "join": _JOIN + "; " + _PLACE,
    "extend": _EXTEND,
    "read": _READ,
    "read_many": _READ_MANY,
    "write": _WRITE,
    "write_new": _WRITE_NEW,
    "record": _RECORD,
    "recall": _RECALL,
    "last": _LAST,
    "purge": _PURGE,
    "purge_transactions": PURGE_TRANSACTIONS,
}
