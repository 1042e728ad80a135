"""What is asked of the server for lease rows, as text.

``@name`` is a table, ``#word#`` is filled in once, and ``%(word)s`` for every request, with
literals made by ``quoted``.

Where one goes and one comes, and both want the name alone, the server changes the crowd by
itself: who joins is put behind the others, who leaves calls the first, who was called takes its
line out. Everything else is decided in ``mysql_row``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from holdfast.claim import Claim
from holdfast.core.contract import GRACE_SECONDS, IDLE_COUNTER_SECONDS, STALE_SECONDS
from holdfast.sql import check_identifier
from holdfast.stores.mysql.protocol import quoted
from holdfast.stores.mysql.row import CALLED, MICROS, NONE, State

__all__ = [
    "CLOCK",
    "IF_WRITTEN",
    "NOW",
    "PROTOCOL",
    "PURGE_TRANSACTIONS",
    "TABLES",
    "UTC_MICROS",
    "LeaseStatements",
    "Schema",
    "fill",
    "place_of",
    "schema_sql",
    "sleep",
    "still_lock",
    "subscription_lock",
]

PROTOCOL = 1
"""Grows when versions can't exclude each other any more. Kept for every namespace."""
TABLES = ("protocol", "lock", "record", "counter", "transaction")

# Names are bytes: no collation takes case, accents or a trailing blank for the same.
_SQL = """\
CREATE TABLE IF NOT EXISTS @protocol (
  namespace VARBINARY(512) NOT NULL PRIMARY KEY,
  version INT NOT NULL,
  mode VARBINARY(16) NOT NULL
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Lease rows: all state of a name. Times are in microseconds since 1970.
CREATE TABLE IF NOT EXISTS @lock (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  version BIGINT NOT NULL,
  token BIGINT NOT NULL,
  owner VARBINARY(64) NOT NULL,
  label BLOB NOT NULL,
  since BIGINT NOT NULL,
  crowd LONGBLOB NOT NULL,
  ends BIGINT NOT NULL,
  PRIMARY KEY (namespace, name)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

CREATE TABLE IF NOT EXISTS @record (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  value LONGBLOB NOT NULL,
  token BIGINT NOT NULL,
  written BIGINT NOT NULL,
  expires BIGINT NOT NULL,
  PRIMARY KEY (namespace, name),
  KEY (namespace, expires)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Advisory mode: tokens, and who took what last. Slot -1 is the name as a whole.
CREATE TABLE IF NOT EXISTS @counter (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  slot INT NOT NULL,
  token BIGINT NOT NULL,
  capacity INT NOT NULL,
  session BIGINT NOT NULL,
  label BLOB NOT NULL,
  since BIGINT NOT NULL,
  ttl BIGINT NOT NULL,
  PRIMARY KEY (namespace, name, slot),
  KEY (namespace, since)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;

-- Locks in callers' own transactions.
CREATE TABLE IF NOT EXISTS @transaction (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  token BIGINT NOT NULL,
  PRIMARY KEY (namespace, name),
  KEY (namespace, token)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;
"""


class Schema:
    """The names of our tables in one database."""

    def __init__(self, prefix: str = "holdfast_") -> None:
        self.prefix = check_identifier(prefix, "prefix")

    def filled(self, sql: str) -> str:
        """The text with every ``@name`` as the name that the table has here."""
        return re.sub(r"@([a-z]+)", rf"`{self.prefix}\1`", sql)

    def sql(self) -> str:
        """All of it, as a script that can be run again."""
        return self.filled(_SQL)


def schema_sql(*, prefix: str = "holdfast_") -> str:
    """The SQL that makes Holdfast's tables; running it again changes nothing.

    >>> schema_sql(prefix="hf_").startswith("CREATE TABLE IF NOT EXISTS `hf_protocol`")
    True
    """
    return Schema(prefix).sql()


NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
UTC_MICROS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The same, whatever the session's time zone is."""
CLOCK = "@holdfast_now"
"""Where a statement keeps the time. A session begins with a whole number in there: a variable's
type is that of its last value, for a statement that sets it too."""
# A statement that needs the time often reads the clock once: the server spends more on the words
# of such a statement than on the row. In a WHERE it comes first, so the rest finds it set.
_CLOCK = f"(#t# := {NOW})"
# Nobody's hold any more, also by the clock of another node (``mysql_dial.SKEW_MICROS``).
_OVER = "ends <= #t# - #skew#"
_FREE = "crowd = '' AND #over#"
JOINED = 1 << 62
"""Above all tokens: what one who has joined a line is told begins here."""
PLACES = 1 << 16

# Nobody holds and nobody waits: one statement decides. ``ends`` is last, since the others ask it.
_TAKE = """
INSERT INTO @lock (namespace, name, version, token, owner, label, since, crowd, ends)
VALUES (%(namespace)s, %(name)s, #clock#, LAST_INSERT_ID(#t#), %(owner)s, %(label)s, #t#, '',
  #t# + %(ttl)d)
ON DUPLICATE KEY UPDATE version = IF(#taken# := #free#, GREATEST(version + 1, #t#), version),
  token = IF(#taken#, LAST_INSERT_ID(GREATEST(token + 1, #t#)), token),
  owner = IF(#taken#, %(owner)s, owner), label = IF(#taken#, %(label)s, label),
  since = IF(#taken#, #t#, since), ends = IF(#taken#, #t# + %(ttl)d, ends)"""

_WHERE = "WHERE namespace = %(namespace)s AND name = %(name)s"

_FREE_IT = """
UPDATE @lock SET version = GREATEST(version + 1, #t#), owner = '', ends = 0
#where# AND #clock# AND owner = %(owner)s AND ends > #t# AND crowd = ''"""

# The first line of a crowd is "owner mode token ends subscription called ..."; see ``Entry.line``.
_WORDS_OF_FIRST = "SUBSTRING_INDEX(crowd, ' ', 6)"
_ENDS_OF_FIRST = "SUBSTRING_INDEX(SUBSTRING_INDEX(crowd, ' ', 4), ' ', -1)"
# Whoever is first in the crowd is still there, and it is no semaphore.
_STANDS = """
crowd <> '' AND (#first# := #words#) NOT LIKE '%% slots %%' AND #ends_of_first# > #t#
  AND (#first# LIKE '%% -' OR SUBSTRING_INDEX(#first#, ' r', -1) >= #t#)"""
_CALL_FIRST = """
UPDATE @lock SET version = GREATEST(version + 1, #t#), owner = '', ends = 0,
  crowd = CONCAT(TRIM(TRAILING '-' FROM #first#), 'r', CAST(#t# + #grace# AS SIGNED),
    SUBSTRING(crowd, LENGTH(#first#) + 1))
#where# AND #clock# AND owner = %(owner)s AND ends > #t#
  AND (#first# := #words#) LIKE '%% exclusive 0 %% -' AND #ends_of_first# > #t#"""
_CALLED = """
FROM @lock WHERE namespace = %(namespace)s AND name IN (%(names)s)
  AND LOCATE(%(word)s, crowd) > 0"""
# Sleeps, unless somebody was called, also where the row is gone: a SELECT, as all else would lock
# what it looks at; and only one, since a request that is killed between two may never be answered.
_LISTEN = """
SELECT name, IF(LOCATE(%(word)s, crowd) > 0, 'called', %(sleep)s) FROM (SELECT 1) one
LEFT JOIN @lock ON namespace = %(namespace)s AND name = %(names)s"""
_LISTEN_FOR_MANY = """
SELECT name, 'called' #called# UNION ALL
SELECT NULL, IF(EXISTS (SELECT 1 #called#), 0, %(sleep)s)"""

_GRANTED = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  token = LAST_INSERT_ID(GREATEST(token + 1, #t#)), owner = %(owner)s, label = %(label)s,
  since = #t#, crowd = SUBSTRING(crowd, LOCATE(X'0A', crowd) + 1), ends = #t# + %(ttl)d
#where# AND #clock#"""
_COME_FIRST = "#granted# AND #over# AND LEFT(crowd, %(length)d) = %(mine)s"
# Ends a hold and grants another in its place, where nobody else is first in line.
_HAND_ON = """
#granted# AND owner = %(holder)s AND ends > #t#
  AND (crowd = '' OR LEFT(crowd, %(length)d) = %(mine)s)"""
# Told by the number of an insert: the place, and in how many ms whoever holds, or may have been
# called, is over.
_JOIN = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  crowd = CONCAT(crowd, %(head)s, CAST(#t# + #stale# AS SIGNED), %(bell)s, CAST(#t# AS SIGNED),
    %(tail)s),
  since = since + 0 * LAST_INSERT_ID(#joined# + LENGTH(crowd) - LENGTH(REPLACE(crowd, X'0A', ''))
    - 1 + #places# * (IF(ends > #t#, ends - #t#, #grace#) DIV 1000))
#where# AND #clock# AND owner <> %(owner)s AND LENGTH(crowd) < 500000
  AND LOCATE(%(mine)s, CONCAT(X'0A', crowd)) = 0 AND (ends > #t# OR #stands#)"""

# One who stands in line and has to wait on, since somebody holds the name alone or was called in
# front of it, tells of its subscription, whatever else is written to the line. The place is told
# as above.
_CALL_OF_FIRST = "SUBSTRING_INDEX(#words#, ' ', -1)"
_BEFORE_MINE = "SUBSTRING_INDEX(CONCAT(X'0A', crowd), %(mine)s, 1)"
_AFTER_MINE = "SUBSTRING_INDEX(crowd, %(head)s, -1)"
_TELL = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  since = since + 0 * LAST_INSERT_ID(#joined# + LENGTH(#before#)
    - LENGTH(REPLACE(#before#, X'0A', ''))
    + #places# * (IF(ends > #t#, ends - #t#, #grace#) DIV 1000)),
  crowd = SUBSTRING(CONCAT(#before#, %(mine)s, CAST(#t# + #stale# AS SIGNED), %(bell)s,
    SUBSTRING(#after#, LENGTH(SUBSTRING_INDEX(#after#, ' ', 3)) + 2)), 2)
#where# AND #clock# AND owner <> %(owner)s AND LOCATE(%(mine)s, CONCAT(X'0A', crowd)) > 0
  AND (ends > #t# OR (LEFT(crowd, LENGTH(%(head)s)) <> %(head)s AND #ends_of_first# > #t#
    AND #call_of_first# LIKE 'r%%' AND SUBSTRING(#call_of_first#, 2) >= #t#))"""

# An owner is of one claim, so that it can't be found in the row of another name.
_OURS = """
WHERE namespace = %(namespace)s AND #clock# AND name IN (%(names)s) AND owner IN (%(owners)s)
  AND ends > #t#"""
# The server might else read, and lock, all names where many of them are listed.
_EXTEND = """
UPDATE @lock FORCE INDEX (PRIMARY) SET version = GREATEST(version + 1, #t#),
  ends = #t# + %(ttl)d #of_ours#"""
# An end that is later stays: this may be done long after later ones.
_RENEW = """
UPDATE @lock FORCE INDEX (PRIMARY) SET version = GREATEST(version + 1, #t#),
  ends = GREATEST(ends, #t# + %(ttl)d) #of_ours#"""
_HELD = "SELECT owner FROM @lock #of_ours#"

_COLUMNS = "version, token, owner, label, since, ends, crowd"
_READ = """
SELECT #now#, #columns#, name, #skew# FROM (SELECT 1) one LEFT JOIN @lock
ON namespace = %(namespace)s AND name = %(name)s"""
_READ_MANY = "SELECT #now#, #columns#, name, #skew# FROM @lock WHERE namespace = %(namespace)s"

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
    "#over#": _OVER,
    "#before#": _BEFORE_MINE,
    "#after#": _AFTER_MINE,
    "#called#": _CALLED,
    "#stands#": _STANDS,
    "#granted#": _GRANTED,
    "#call_of_first#": _CALL_OF_FIRST,
    "#words#": _WORDS_OF_FIRST,
    "#ends_of_first#": _ENDS_OF_FIRST,
    "#of_ours#": _OURS,
    "#clock#": _CLOCK,
    "#joined#": str(JOINED),
    "#places#": str(PLACES),
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


_SUBSCRIPTION_OF_FIRST = (
    b"CONVERT(CONCAT('hf:bell:', SUBSTRING_INDEX(SUBSTRING_INDEX(@holdfast_first, ' ', 5), ' ', "
    b"-1)) USING utf8mb4)"
)


def subscription_lock(subscription: str) -> bytes:
    """The named lock by which the session of a subscription is found."""
    return b"'hf:bell:%s'" % subscription.encode()


def place_of(told: int) -> tuple[int, float]:
    """The place of one who has joined, and after how many seconds another attempt is worth it.

    >>> place_of(JOINED + 2 + PLACES * 1500)
    (2, 1.5)
    """
    left, place = divmod(told - JOINED, PLACES)
    return place, left / 1000


def still_lock(subscription: str) -> bytes:
    """The named lock that a subscription sleeps on."""
    return b"'hf:still:%s'" % subscription.encode()


def sleep(lock: bytes, seconds: float) -> bytes:
    """An expression that tells, with 1, if it was cut short. Whoever gets the lock, as the session
    that had it has ended, keeps it and sleeps by itself from then on."""
    alone = b"SLEEP(%.2f)" % seconds
    # A wait tells 1 for a lock that it got, 0 for none in time, and nothing at all if killed.
    wait = b"ELT(2 - GET_LOCK(%s, %.2f), %s, 0)" % (lock, seconds, alone)
    ours = b"IS_USED_LOCK(%s) <=> CONNECTION_ID()" % lock
    return b"IF(%s, %s, IFNULL(%s, 1))" % (ours, alone, wait)


class LeaseStatements:
    """The requests, as they read in one database and namespace."""

    def __init__(self, schema: Schema, namespace: str) -> None:
        words = _WORDS | {"%(namespace)s": quoted(namespace.encode()).decode()}
        self._sql = {
            name: " ".join(schema.filled(fill(sql, words)).split())
            .replace("#written#", "@holdfast = 1")
            .replace("#first#", "@holdfast_first")
            .replace("#taken#", "@holdfast")
            .replace("#skew#", "@holdfast_skew")
            .replace("#t#", CLOCK)
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
        """Ends a hold that others wait for, and calls the first of them: its subscription is
        stirred if it is to be, by a second statement, which says whether it is there."""
        sql = self._sql["call_first"] % self._of(claim)
        if not stir:
            return sql
        return (
            sql + b"; KILL QUERY IF(ROW_COUNT() > 0, IS_USED_LOCK(%s), 0)" % _SUBSCRIPTION_OF_FIRST
        )

    def come_first(self, claim: Claim) -> bytes:
        """Takes a name for the first in line, who wants it alone."""
        return self._sql["come_first"] % self._first(claim)

    def hand_on(self, holder: Claim, claim: Claim) -> bytes:
        """Ends a hold and grants a claim in its place, unless somebody else is first in line."""
        given = self._first(claim) | {b"holder": quoted(holder.owner.encode())}
        return self._sql["hand_on"] % given

    def join(self, claim: Claim, subscription: str) -> bytes:
        """Puts a claim behind all others, where it must wait in any case. What it tells is for
        ``place_of``."""
        label = json.dumps(claim.label)
        given = self._in_line(claim, subscription) | {
            b"tail": quoted(f" {claim.weight} {claim.limit} 0 {NONE} {label}\n".encode()),
            b"mine": quoted(f"\n{claim.owner} ".encode()),
        }
        return self._sql["join"] % given

    def tell(self, claim: Claim, subscription: str) -> bytes:
        """Tells of the subscription of one who stands in line, where it must go on to wait in any
        case. What it tells is for ``place_of``."""
        mine = quoted(f"\n{claim.owner} {claim.mode.value} 0 ".encode())
        return self._sql["tell"] % (self._in_line(claim, subscription) | {b"mine": mine})

    def _in_line(self, claim: Claim, subscription: str) -> dict[bytes, bytes | int]:
        return self._of(claim) | {
            b"head": quoted(f"{claim.owner} {claim.mode.value} 0 ".encode()),
            b"bell": quoted(f" {subscription or NONE} {NONE} ".encode()),
        }

    def _first(self, claim: Claim) -> dict[bytes, bytes | int]:
        mine = f"{claim.owner} {claim.mode.value} 0 ".encode()
        return self._taken(claim) | {b"mine": quoted(mine), b"length": len(mine)}

    def extend(self, claims: Sequence[Claim], ttl: float, shorten: bool) -> bytes:
        """Renews holds that are alone, for so long."""
        sql = self._sql["extend" if shorten else "renew"]
        return sql % (self._of_all(claims) | {b"ttl": int(ttl * MICROS)})

    def held(self, claims: Sequence[Claim]) -> bytes:
        """Which of these holds, that are alone, there are: their owners."""
        return self._sql["held"] % self._of_all(claims)

    def _of_all(self, claims: Sequence[Claim]) -> dict[bytes, bytes | int]:
        return {
            b"names": b", ".join([quoted(claim.name.encode()) for claim in claims]),
            b"owners": b", ".join([quoted(claim.owner.encode()) for claim in claims]),
        }

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
            % (
                quoted(start),
                quoted(after.encode(errors="surrogateescape")),
                quoted(start + b"\xff"),
                limit,
            )
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

    def listen(self, subscription: str, names: Iterable[str], sleep: bytes = b"") -> bytes:
        """Tells for which of these names somebody of this subscription was called, with
        ``called``; sleeps
        first if there is none, if it is to, and tells with 1 if that was cut short."""
        listed = [quoted(name.encode()) for name in names]
        word = quoted(f" {subscription} {CALLED}".encode())
        given = {b"names": b", ".join(listed), b"word": word, b"sleep": sleep}
        how = "listen" if len(listed) == 1 else "listen_for_many"
        return self._sql[how if sleep else "called"] % given

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
    "called": "SELECT name, 'called' #called#",
    "listen": _LISTEN,
    "listen_for_many": _LISTEN_FOR_MANY,
    "come_first": _COME_FIRST,
    "hand_on": _HAND_ON,
    "join": _JOIN,
    "tell": _TELL,
    "extend": _EXTEND,
    "renew": _RENEW,
    "held": _HELD,
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
