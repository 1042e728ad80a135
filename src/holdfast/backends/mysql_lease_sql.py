"""What is asked of the server for lease rows, as text.

``@name`` is a table, ``#word#`` is filled in once, and ``%(word)s`` for every request, with
literals made by ``quoted``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.backends.mysql_row import MICROS, State, Wake
from holdfast.backends.mysql_schema import Schema
from holdfast.claim import Claim
from holdfast.core.contract import IDLE_COUNTER_SECONDS
from holdfast.wires.mysql_protocol import quoted

__all__ = ["IF_WRITTEN", "NOW", "LeaseStatements", "bell_lock", "fill"]

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

_RING = "INSERT INTO @ring SELECT * FROM (%(calls)s) calls WHERE #written#"
_CALL_AGAIN = " ON DUPLICATE KEY UPDATE made = %(made)d"
_RECORD = """
INSERT INTO @record SELECT %(namespace)s, %(name)s, %(value)s, %(token)d, #now#, #now# + %(keep)d
  FROM (SELECT 1) one WHERE #written#
ON DUPLICATE KEY UPDATE value = %(value)s, token = %(token)d, written = #now#,
  expires = #now# + %(keep)d"""
_RECALL = "SELECT value, token, #now# - written FROM @record #where# AND expires > #now#"

_PURGE = """
DELETE FROM @lock WHERE namespace = %(namespace)s AND name > %(after)s AND name <= %(last)s
  AND crowd = '' AND ends <= #now# AND version < #now# - #idle#;
DELETE FROM @record WHERE namespace = %(namespace)s AND expires < #now# LIMIT 2000;
DELETE FROM @ring WHERE made < #now# - 3600000000 LIMIT 2000"""
_LAST = """
SELECT name FROM @lock WHERE namespace = %(namespace)s AND name > %(after)s
ORDER BY name LIMIT %(batch)d"""


_WORDS = {
    "#free#": _FREE,
    "#where#": _WHERE,
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
            .encode()
            for name, sql in _TEXTS.items()
        }

    def take(self, claim: Claim) -> bytes:
        """Takes a name that nobody uses, alone."""
        return self._sql["take"] % {
            b"name": quoted(claim.name.encode()),
            b"owner": quoted(claim.owner.encode()),
            b"label": quoted(claim.label.encode()),
            b"ttl": int(claim.ttl * MICROS),
        }

    def free(self, claim: Claim) -> bytes:
        """Ends a hold that nobody waits for."""
        return self._sql["free"] % self._of(claim)

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

    def ring(self, wakes: Sequence[Wake], made: int) -> bytes:
        """Notes who was called, ``IF_WRITTEN``."""
        calls = b" UNION ALL ".join(
            b"SELECT %s bell, %s owner, %d made"
            % (quoted(wake.bell.encode()), quoted(wake.owner.encode()), made)
            for wake in wakes
        )
        return self._sql["ring"] % {b"calls": calls, b"made": made}

    def heard(self, reads: Sequence[Wake]) -> bytes:
        """Drops the notes of those who have come, or won't, ``IF_WRITTEN``."""
        pairs = b", ".join(
            b"(%s, %s)" % (quoted(wake.bell.encode()), quoted(wake.owner.encode()))
            for wake in reads
        )
        return self._sql["heard"] + b" WHERE @holdfast = 1 AND (bell, owner) IN (%s)" % pairs

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

    def purge(self, after: bytes, last: bytes) -> bytes:
        return self._sql["purge"] % {b"after": quoted(after), b"last": quoted(last)}


_TEXTS = {
    "take": _TAKE,
    "free": _FREE_IT,
    "extend": _EXTEND,
    "read": _READ,
    "read_many": _READ_MANY,
    "write": _WRITE,
    "write_new": _WRITE_NEW,
    "ring": _RING + _CALL_AGAIN,
    "heard": "DELETE FROM @ring",
    "record": _RECORD,
    "recall": _RECALL,
    "last": _LAST,
    "purge": _PURGE,
}
