"""The SQL of lease rows as text: the tables, and the statements on them. No driver is needed.

In a text, ``@name`` is a table, ``#word#`` is replaced once per namespace, and ``%(word)s`` for
every request, by literals made with ``quoted``.

While all claims on a name are exclusive, the server changes the queue by itself: a statement
appends an entry, calls the first waiter at a release, or removes the entry of a waiter that takes
the name. All other changes are computed in ``row``.

Two stored names are older than the code's words: the column ``crowd`` has the entries of a row
(waiters, shared holders, slot holders), and the named lock ``hf:bell:…`` identifies the session of
a subscription. An entry is *called* when the name is reserved for it and its subscription is woken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from holdfast.claim import Claim
from holdfast.core.contract import GRACE_SECONDS, IDLE_COUNTER_SECONDS, STALE_SECONDS
from holdfast.sql import check_identifier
from holdfast.stores._sql.purge import POSITION
from holdfast.stores.mysql.protocol import quoted
from holdfast.stores.mysql.row import CALLED, MICROS, NONE, RowState

__all__ = [
    "CLOCK",
    "IF_WRITTEN",
    "NOW",
    "PROTOCOL",
    "PURGE_TRANSACTIONS",
    "TABLES",
    "UTC_MICROS",
    "MySqlLeaseStatements",
    "MySqlSchema",
    "fill",
    "position_of",
    "schema_sql",
    "sleep_expression",
    "sleep_lock",
    "subscription_lock",
]

PROTOCOL = 1
"""Protocol version, stored for every namespace. A new number means that older versions can't share
locks with this one."""
TABLES = ("protocol", "lock", "record", "counter", "transaction")

# Names are bytes, so that no collation treats names as equal that differ in case, accents or
# trailing blanks.
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

-- Advisory mode: the last token and the last holder. Slot -1 is the name as a whole.
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

-- Locks in the caller's own transaction.
CREATE TABLE IF NOT EXISTS @transaction (
  namespace VARBINARY(512) NOT NULL,
  name VARBINARY(512) NOT NULL,
  token BIGINT NOT NULL,
  PRIMARY KEY (namespace, name),
  KEY (namespace, token)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC;
"""


class MySqlSchema:
    """The names of the tables in one database."""

    def __init__(self, prefix: str = "holdfast_") -> None:
        self.prefix = check_identifier(prefix, "prefix")

    def filled(self, sql: str) -> str:
        """Replaces every ``@name`` by the name of that table."""
        return re.sub(r"@([a-z]+)", rf"`{self.prefix}\1`", sql)

    def sql(self) -> str:
        """Returns the script that creates all tables. It can be run repeatedly."""
        return self.filled(_SQL)


def schema_sql(*, prefix: str = "holdfast_") -> str:
    """Returns the SQL that creates Holdfast's tables. Running it again changes nothing.

    >>> schema_sql(prefix="hf_").startswith("CREATE TABLE IF NOT EXISTS `hf_protocol`")
    True
    """
    return MySqlSchema(prefix).sql()


NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
UTC_MICROS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The same, independent of the session's time zone."""
CLOCK = "@holdfast_now"
"""Session variable in which a statement keeps the time. A new session sets it to an integer: the
type of a variable is that of its last value, even in the statement that sets it."""
# A statement that uses the time several times reads the clock once: parsing the expression costs
# more than the row. In a WHERE it comes first, so that the conditions after it find it set.
_CLOCK = f"(#t# := {NOW})"
# The exclusive hold is over, also by the clock of another node (``connect.SKEW_MICROS``).
_OVER = "ends <= #t# - #skew#"
_FREE = "crowd = '' AND #over#"
JOINED = 1 << 62
"""Larger than all tokens. An insert id from here on encodes a queue position (``position_of``)."""
POSITIONS = 1 << 16

# Takes a free name without waiters. ``ends`` is set last, since the other assignments read it.
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

# The first entry begins with "owner mode token ends subscription called"; see ``row``.
_WORDS_OF_FIRST = "SUBSTRING_INDEX(crowd, ' ', 6)"
_ENDS_OF_FIRST = "SUBSTRING_INDEX(SUBSTRING_INDEX(crowd, ' ', 4), ' ', -1)"
# The first entry has not expired, and the name is not a semaphore.
_FIRST_IS_ALIVE = """
crowd <> '' AND (#first# := #words#) NOT LIKE '%% slots %%' AND #ends_of_first# > #t#
  AND (#first# LIKE '%% -' OR SUBSTRING_INDEX(#first#, ' r', -1) >= #t#)"""
_RELEASE_TO_FIRST = """
UPDATE @lock SET version = GREATEST(version + 1, #t#), owner = '', ends = 0,
  crowd = CONCAT(TRIM(TRAILING '-' FROM #first#), 'r', CAST(#t# + #grace# AS SIGNED),
    SUBSTRING(crowd, LENGTH(#first#) + 1))
#where# AND #clock# AND owner = %(owner)s AND ends > #t#
  AND (#first# := #words#) LIKE '%% exclusive 0 %% -' AND #ends_of_first# > #t#"""
_CALLED = """
FROM @lock WHERE namespace = %(namespace)s AND name IN (%(names)s)
  AND LOCATE(%(word)s, crowd) > 0"""
# Sleeps unless an entry of this subscription is called, also if the row does not exist. A SELECT,
# since other statements would lock the row; and a single one, since the server may never reply to
# a request that is killed between two statements.
_LISTEN = """
SELECT name, IF(LOCATE(%(word)s, crowd) > 0, 'called', %(sleep)s) FROM (SELECT 1) one
LEFT JOIN @lock ON namespace = %(namespace)s AND name = %(names)s"""
_LISTEN_FOR_MANY = """
SELECT name, 'called' #called# UNION ALL
SELECT NULL, IF(EXISTS (SELECT 1 #called#), 0, %(sleep)s)"""

_GRANT = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  token = LAST_INSERT_ID(GREATEST(token + 1, #t#)), owner = %(owner)s, label = %(label)s,
  since = #t#, crowd = SUBSTRING(crowd, LOCATE(X'0A', crowd) + 1), ends = #t# + %(ttl)d
#where# AND #clock#"""
_TAKE_AS_FIRST = "#grant# AND #over# AND LEFT(crowd, %(length)d) = %(mine)s"
# Ends a hold and grants the name to the claim, unless another waiter is first in the queue.
_EXCHANGE = """
#grant# AND owner = %(holder)s AND ends > #t#
  AND (crowd = '' OR LEFT(crowd, %(length)d) = %(mine)s)"""
# The insert id encodes the queue position, and the milliseconds until the hold or the grace of the
# called waiter is over.
_JOIN = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  crowd = CONCAT(crowd, %(head)s, CAST(#t# + #stale# AS SIGNED), %(subscription)s,
    CAST(#t# AS SIGNED), %(tail)s),
  since = since + 0 * LAST_INSERT_ID(#joined# + LENGTH(crowd) - LENGTH(REPLACE(crowd, X'0A', ''))
    - 1 + #positions# * (IF(ends > #t#, ends - #t#, #grace#) DIV 1000))
#where# AND #clock# AND owner <> %(owner)s AND LENGTH(crowd) < 500000
  AND LOCATE(%(mine)s, CONCAT(X'0A', crowd)) = 0 AND (ends > #t# OR #first_is_alive#)"""

# Stores another subscription in the entry of a waiter that must go on waiting: the name is held
# exclusively, or a waiter ahead is called. Other entries may change at the same time. The insert
# id is as above.
_CALL_OF_FIRST = "SUBSTRING_INDEX(#words#, ' ', -1)"
_BEFORE_MINE = "SUBSTRING_INDEX(CONCAT(X'0A', crowd), %(mine)s, 1)"
_AFTER_MINE = "SUBSTRING_INDEX(crowd, %(head)s, -1)"
_UPDATE_SUBSCRIPTION = """
UPDATE @lock SET version = GREATEST(version + 1, #t#),
  since = since + 0 * LAST_INSERT_ID(#joined# + LENGTH(#before#)
    - LENGTH(REPLACE(#before#, X'0A', ''))
    + #positions# * (IF(ends > #t#, ends - #t#, #grace#) DIV 1000)),
  crowd = SUBSTRING(CONCAT(#before#, %(mine)s, CAST(#t# + #stale# AS SIGNED), %(subscription)s,
    SUBSTRING(#after#, LENGTH(SUBSTRING_INDEX(#after#, ' ', 3)) + 2)), 2)
#where# AND #clock# AND owner <> %(owner)s AND LOCATE(%(mine)s, CONCAT(X'0A', crowd)) > 0
  AND (ends > #t# OR (LEFT(crowd, LENGTH(%(head)s)) <> %(head)s AND #ends_of_first# > #t#
    AND #call_of_first# LIKE 'r%%' AND SUBSTRING(#call_of_first#, 2) >= #t#))"""

# An owner belongs to one claim, so it can't match the row of another name in the list.
_OURS = """
WHERE namespace = %(namespace)s AND #clock# AND name IN (%(names)s) AND owner IN (%(owners)s)
  AND ends > #t#"""
# Without FORCE INDEX the server might scan, and lock, all rows if the list is long.
_EXTEND = """
UPDATE @lock FORCE INDEX (PRIMARY) SET version = GREATEST(version + 1, #t#),
  ends = #t# + %(ttl)d #of_ours#"""
# A later end stays: this request may be executed after newer ones.
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
  since = %(since)d, ends = %(ends)d, crowd = %(entries)s
#where# AND version = %(version)d"""
_WRITE_NEW = """
INSERT INTO @lock (namespace, name, version, token, owner, label, since, ends, crowd)
VALUES (%(namespace)s, %(name)s, %(next)d, %(token)d, %(owner)s, %(label)s, %(since)d, %(ends)d,
  %(entries)s)
ON DUPLICATE KEY UPDATE version = version"""

_RECORD = """
INSERT INTO @record SELECT %(namespace)s, %(name)s, %(value)s, %(token)d, #now#, #now# + %(keep)d
  FROM (SELECT 1) one WHERE #written#
ON DUPLICATE KEY UPDATE value = %(value)s, token = %(token)d, written = #now#,
  expires = #now# + %(keep)d"""
_RECALL = "SELECT value, token, #now# - written FROM @record #where# AND expires > #now#"

# A row whose token is above the clock stays: the next token must be higher.
_IDLE = "(crowd = '' AND ends <= #now# AND version < #now# - #idle# AND token < #now#)"
_PURGED_TO = "SELECT value FROM @record WHERE namespace = %(namespace)s AND name = %(position)s"
# Reads without locks: a transaction of the application may have locked one of the rows (a guard).
_SCAN = """
SELECT name, #is_idle# FROM @lock WHERE namespace = %(namespace)s AND name > %(after)s
ORDER BY name LIMIT %(batch)d"""
# If another transaction holds one of the rows, NOWAIT ends the request, and all of them stay until
# the next purge. So a purge never waits with rows locked, and can't be part of a deadlock.
_PURGE = """
BEGIN; SELECT name FROM @lock FORCE INDEX (PRIMARY) WHERE namespace = %(namespace)s
  AND name IN (%(names)s) FOR UPDATE NOWAIT;
DELETE FROM @lock WHERE namespace = %(namespace)s AND name IN (%(names)s) AND #is_idle#;
COMMIT"""
_FINISH_PURGE = """
DELETE FROM @record WHERE namespace = %(namespace)s AND expires < #now# LIMIT 2000;
INSERT INTO @record VALUES (%(namespace)s, %(position)s, %(value)s, 0, #now#, #now# + %(keep)d)
ON DUPLICATE KEY UPDATE value = %(value)s"""
# Deletes idle transaction locks: a token is never below the time of its last use. If a transaction
# holds one of the rows, NOWAIT ends the request, and all of them stay until the next purge.
PURGE_TRANSACTIONS = """
BEGIN; SELECT name FROM @transaction WHERE namespace = %(namespace)s AND token < #now# - #idle#
  LIMIT 500 FOR UPDATE NOWAIT;
DELETE FROM @transaction WHERE namespace = %(namespace)s AND token < #now# - #idle# LIMIT 500;
COMMIT"""


_POSITION = quoted(f"{POSITION}lock".encode())

_WORDS = {
    "#free#": _FREE,
    "#over#": _OVER,
    "#before#": _BEFORE_MINE,
    "#after#": _AFTER_MINE,
    "#called#": _CALLED,
    "#first_is_alive#": _FIRST_IS_ALIVE,
    "#grant#": _GRANT,
    "#call_of_first#": _CALL_OF_FIRST,
    "#words#": _WORDS_OF_FIRST,
    "#ends_of_first#": _ENDS_OF_FIRST,
    "#of_ours#": _OURS,
    "#clock#": _CLOCK,
    "#joined#": str(JOINED),
    "#positions#": str(POSITIONS),
    "#where#": _WHERE,
    "#grace#": str(int(GRACE_SECONDS * MICROS)),
    "#stale#": str(int(STALE_SECONDS * MICROS)),
    "#columns#": _COLUMNS,
    "#is_idle#": _IDLE,
    "#idle#": str(int(IDLE_COUNTER_SECONDS * MICROS)),
    "#now#": NOW,
}


def fill(sql: str, words: dict[str, str]) -> str:
    """Replaces the words in a text. The text of a word may contain words that come after it."""
    for word, text in words.items():
        sql = sql.replace(word, text)
    return sql


IF_WRITTEN = b"SET @holdfast = ROW_COUNT()"
"""Statement directly after a write. The statements after it act only if the write found the row
unchanged; otherwise nothing is written and the commit does not wait for the disk."""


_SUBSCRIPTION_OF_FIRST = (
    b"CONVERT(CONCAT('hf:bell:', SUBSTRING_INDEX(SUBSTRING_INDEX(@holdfast_first, ' ', 5), ' ', "
    b"-1)) USING utf8mb4)"
)


def subscription_lock(subscription: str) -> bytes:
    """Returns the named lock that identifies the session of a subscription."""
    return b"'hf:bell:%s'" % subscription.encode()


def position_of(insert_id: int) -> tuple[int, float]:
    """Decodes the position in the queue, and the seconds after which to attempt again.

    >>> position_of(JOINED + 2 + POSITIONS * 1500)
    (2, 1.5)
    """
    left, place = divmod(insert_id - JOINED, POSITIONS)
    return place, left / 1000


def sleep_lock(subscription: str) -> bytes:
    """Returns the named lock on which a subscription sleeps."""
    return b"'hf:still:%s'" % subscription.encode()


def sleep_expression(lock: bytes, seconds: float) -> bytes:
    """Returns an expression that sleeps on the server. Its value is 1 if the sleep was killed.

    MariaDB has one global mutex for all calls of ``SLEEP()``: two concurrent kills, or a kill as
    the sleep starts, block every ``SLEEP()`` on the server for two seconds. So the session waits
    for a named lock instead, which has a mutex of its own. Another session of the same client
    holds that lock. If that session has ended, this one gets the lock, keeps it, and uses
    ``SLEEP()`` from then on.
    """
    alone = b"SLEEP(%.2f)" % seconds
    # GET_LOCK gives 1 with the lock, 0 at the timeout, and NULL if killed.
    wait = b"ELT(2 - GET_LOCK(%s, %.2f), %s, 0)" % (lock, seconds, alone)
    ours = b"IS_USED_LOCK(%s) <=> CONNECTION_ID()" % lock
    return b"IF(%s, %s, IFNULL(%s, 1))" % (ours, alone, wait)


class MySqlLeaseStatements:
    """The requests for lease rows, filled in for one database and namespace."""

    def __init__(self, schema: MySqlSchema, namespace: str) -> None:
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
        """Takes a free name for an exclusive claim."""
        return self._sql["take"] % self._grant_values(claim)

    def _grant_values(self, claim: Claim) -> dict[bytes, bytes | int]:
        return {
            b"name": quoted(claim.name.encode()),
            b"owner": quoted(claim.owner.encode()),
            b"label": quoted(claim.label.encode()),
            b"ttl": int(claim.ttl * MICROS),
        }

    def free(self, claim: Claim) -> bytes:
        """Ends an exclusive hold that has no waiters."""
        return self._sql["free"] % self._of(claim)

    def release_to_first(self, claim: Claim, kill: bool) -> bytes:
        """Ends an exclusive hold and calls the first waiter. With ``kill`` a second statement kills
        the sleep of the waiter's subscription; it fails if that session has ended."""
        sql = self._sql["release_to_first"] % self._of(claim)
        if not kill:
            return sql
        return (
            sql + b"; KILL QUERY IF(ROW_COUNT() > 0, IS_USED_LOCK(%s), 0)" % _SUBSCRIPTION_OF_FIRST
        )

    def take_as_first(self, claim: Claim) -> bytes:
        """Takes a name for an exclusive claim that is first in the queue."""
        return self._sql["take_as_first"] % self._first_values(claim)

    def exchange(self, holder: Claim, claim: Claim) -> bytes:
        """Ends a hold and grants the name to a claim, unless another waiter is first."""
        given = self._first_values(claim) | {b"holder": quoted(holder.owner.encode())}
        return self._sql["exchange"] % given

    def join(self, claim: Claim, subscription: str) -> bytes:
        """Appends a claim to the queue, if it must wait in any case. The insert id is for
        ``position_of``."""
        label = json.dumps(claim.label)
        given = self._queue_values(claim, subscription) | {
            b"tail": quoted(f" {claim.weight} {claim.limit} 0 {NONE} {label}\n".encode()),
            b"mine": quoted(f"\n{claim.owner} ".encode()),
        }
        return self._sql["join"] % given

    def update_subscription(self, claim: Claim, subscription: str) -> bytes:
        """Stores another subscription in the entry of a waiter, if it must go on waiting in any
        case. The insert id is for ``position_of``."""
        mine = quoted(f"\n{claim.owner} {claim.mode.value} 0 ".encode())
        return self._sql["update_subscription"] % (
            self._queue_values(claim, subscription) | {b"mine": mine}
        )

    def _queue_values(self, claim: Claim, subscription: str) -> dict[bytes, bytes | int]:
        return self._of(claim) | {
            b"head": quoted(f"{claim.owner} {claim.mode.value} 0 ".encode()),
            b"subscription": quoted(f" {subscription or NONE} {NONE} ".encode()),
        }

    def _first_values(self, claim: Claim) -> dict[bytes, bytes | int]:
        mine = f"{claim.owner} {claim.mode.value} 0 ".encode()
        return self._grant_values(claim) | {b"mine": quoted(mine), b"length": len(mine)}

    def extend(self, claims: Sequence[Claim], ttl: float, shorten: bool) -> bytes:
        """Renews exclusive holds for ``ttl`` seconds. A later end stays unless ``shorten``."""
        sql = self._sql["extend" if shorten else "renew"]
        return sql % (self._of_all(claims) | {b"ttl": int(ttl * MICROS)})

    def held(self, claims: Sequence[Claim]) -> bytes:
        """Selects the owners of those of these exclusive holds that are still stored."""
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

    def write(self, state: RowState) -> bytes:
        """Writes a state, if the row still has the version that was read."""
        held = state.exclusive
        return self._sql["write" if state.version else "write_new"] % {
            b"name": quoted(state.name.encode()),
            b"version": state.version,
            b"next": max(state.version + 1, state.now),
            b"token": state.token,
            b"owner": quoted(held.claim.owner.encode() if held else b""),
            b"label": quoted(held.claim.label.encode() if held else b""),
            b"since": held.since if held else 0,
            b"ends": held.ends if held else 0,
            b"entries": quoted(state.entries_text()),
        }

    def listen(self, subscription: str, names: Iterable[str], sleep: bytes = b"") -> bytes:
        """Selects those of these names that have a called entry of this subscription, each with
        ``called``. If there is none and ``sleep`` is given, evaluates that expression once and
        selects its value."""
        listed = [quoted(name.encode()) for name in names]
        word = quoted(f" {subscription} {CALLED}".encode())
        given = {b"names": b", ".join(listed), b"word": word, b"sleep": sleep}
        how = "listen" if len(listed) == 1 else "listen_for_many"
        return self._sql[how if sleep else "called"] % given

    def record(self, name: str, value: str, token: int, keep_seconds: float) -> bytes:
        """Stores a record. Must come after ``IF_WRITTEN``."""
        return self._sql["record"] % {
            b"name": quoted(name.encode()),
            b"value": quoted(value.encode()),
            b"token": token,
            b"keep": int(min(keep_seconds, 3e9) * MICROS),
        }

    def recall(self, name: str) -> bytes:
        return self._sql["recall"] % {b"name": quoted(name.encode())}

    def purged_to(self) -> bytes:
        """Selects the last name that a purge has checked; empty at the end of the table."""
        return self._sql["purged_to"] % {b"position": _POSITION}

    def scan(self, after: bytes, batch: int) -> bytes:
        """Selects the next names, each with 1 if its row is idle."""
        return self._sql["scan"] % {b"after": quoted(after), b"batch": batch}

    def purge_transactions(self) -> bytes:
        return self._sql["purge_transactions"]

    def purge(self, names: Iterable[bytes]) -> bytes:
        """Deletes those of these rows that are still idle."""
        return self._sql["purge"] % {b"names": b", ".join(quoted(name) for name in names)}

    def finish_purge(self, last: bytes) -> bytes:
        """Deletes expired records, and stores the last name that was checked."""
        given = {b"position": _POSITION, b"value": quoted(last), b"keep": int(3e9 * MICROS)}
        return self._sql["finish_purge"] % given


_TEXTS = {
    "take": _TAKE,
    "free": _FREE_IT,
    "release_to_first": _RELEASE_TO_FIRST,
    "called": "SELECT name, 'called' #called#",
    "listen": _LISTEN,
    "listen_for_many": _LISTEN_FOR_MANY,
    "take_as_first": _TAKE_AS_FIRST,
    "exchange": _EXCHANGE,
    "join": _JOIN,
    "update_subscription": _UPDATE_SUBSCRIPTION,
    "extend": _EXTEND,
    "renew": _RENEW,
    "held": _HELD,
    "read": _READ,
    "read_many": _READ_MANY,
    "write": _WRITE,
    "write_new": _WRITE_NEW,
    "record": _RECORD,
    "recall": _RECALL,
    "purged_to": _PURGED_TO,
    "scan": _SCAN,
    "purge": _PURGE,
    "finish_purge": _FINISH_PURGE,
    "purge_transactions": PURGE_TRANSACTIONS,
}
