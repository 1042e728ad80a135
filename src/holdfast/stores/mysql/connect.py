"""Opening connections to MySQL: what a server must be, and the settings of a session."""

from __future__ import annotations

import secrets

from holdfast.core.contract import Settings
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.io.clock import wall
from holdfast.stores.mysql.connection import Connection, Refused, dial
from holdfast.stores.mysql.login import address_of
from holdfast.stores.mysql.protocol import quoted
from holdfast.stores.mysql.row import MICROS
from holdfast.stores.mysql.schema import PROTOCOL, TABLES, Schema
from holdfast.stores.mysql.sql import UTC_MICROS
from holdfast.stores.mysql_advisory.sql import session_lock
from holdfast.url import Url

__all__ = ["MOST_SKEW_SECONDS", "SKEW_MICROS", "Dialler", "ahead_seconds"]

OLDEST_SERVER = {"MySQL": (8, 0), "MariaDB": (10, 5)}
NO_TABLE = 1146
NO_RIGHTS = frozenset({1044, 1142, 1227, 1410})

_SESSION = (
    b"SET SESSION time_zone='+00:00', autocommit=1, completion_type=0, "
    b"sql_mode='STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout=%d, "
    b"@holdfast_now=0, @holdfast_skew=%d; "
    b"SET SESSION TRANSACTION ISOLATION LEVEL %s"
)
MOST_SKEW_SECONDS = 0.5
"""So far the clock of a Galera node may be from that of whoever asks it."""
SKEW_MICROS = int(2 * MOST_SKEW_SECONDS * MICROS)
"""So far two such nodes may be from each other: a hold that ran out is others' only after that."""
IDLE_SECONDS = 2147483
"""The most that servers on all systems take as ``wait_timeout``."""
# As the session has them: Percona's Galera has no global wsrep_on.
_FACTS = (
    b"SHOW SESSION VARIABLES WHERE Variable_name IN ('version', 'read_only', 'innodb_read_only', "
    b"'wsrep_on', 'log_bin', 'binlog_format')"
)


class Dialler:
    """Opens connections to one server, each checked before it is used."""

    def __init__(self, url: Url, settings: Settings, mode: str) -> None:
        self.address = address_of(url)
        self.settings, self.mode = settings, mode
        self.schema = Schema(url.options.get("prefix", "holdfast_"))
        self.galera = False
        """Whether sessions can't find each other: they may be on different nodes."""
        self._checked = False

    def greet_to_stay(self, until: float) -> Connection:
        """One that the server does not end however long it is idle."""
        return self.greet(until, b"SET SESSION wait_timeout = %d" % IDLE_SECONDS)

    def greet(self, until: float, more: bytes = b"") -> Connection:
        """A connection to a server that can be written to, with our settings."""
        connection = dial(self.address, until)
        try:
            results = connection.checked(connection.request(_FACTS, until))
            facts = {(row[0] or b"").decode(): (row[1] or b"").decode() for row in results[0].rows}
            _check_server(self.address.display, facts)
            self.galera = facts.get("wsrep_on", "OFF") == "ON"
            self._refuse_galera()
            if self.galera:
                self._check_clock(connection, until)
            settings = self._settings(facts) + (b"; " + more if more else b"")
            connection.checked(connection.request(settings, until))
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_galera(self) -> None:
        if self.galera and self.mode == "advisory":
            raise Unsupported(
                f"{self.address.display} is a Galera cluster, where GET_LOCK locks one node only: "
                "use lease rows (without mode=advisory)"
            )

    def _check_clock(self, connection: Connection, until: float) -> None:
        """Every node ends holds by a clock of its own: they must agree."""
        before = wall()
        reply = connection.request(b"SELECT " + UTC_MICROS.encode(), until)
        told = int(connection.checked(reply)[0].rows[0][0] or 0) / MICROS
        ahead = ahead_seconds(told, before, wall())
        if abs(ahead) > MOST_SKEW_SECONDS:
            raise BackendUnavailable(
                f"{self.address.display} is a Galera node whose clock is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} this host's: holds would end at another "
                f"time there than on other nodes. {MOST_SKEW_SECONDS:g} s are allowed: set both "
                "clocks (NTP)"
            )

    def _settings(self, facts: dict[str, str]) -> bytes:
        # The server can't log statements of READ COMMITTED as statements.
        as_text = facts.get("log_bin") == "ON" and facts.get("binlog_format") == "STATEMENT"
        level = b"REPEATABLE READ" if as_text else b"READ COMMITTED"
        skew = SKEW_MICROS if self.galera else 0
        return _SESSION % (max(1, int(self.settings.request_seconds)), skew, level)

    def enter(self, until: float) -> Connection:
        """A connection that found our tables."""
        connection = self.greet(until)
        try:
            self._enter(connection, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def enter_session(self, until: float) -> Connection:
        """A connection that others can find by its tag, and end."""
        connection = self.enter(until)
        try:
            tag = secrets.token_hex(12)
            ask = b"SELECT GET_LOCK(%s, 0), CONNECTION_ID()" % session_lock(tag)
            ((got, number),) = connection.checked(connection.request(ask, until))[0].rows
            if got != b"1":
                raise Unsupported(f"{self.address.display} gives no named locks (GET_LOCK)")
            connection.tag, connection.number = tag, int(number or 0)
        except BaseException:
            connection.close()
            raise
        return connection

    def _enter(self, connection: Connection, until: float) -> None:
        kept = self._protocol(connection, until)
        if kept is None:
            self._insert_protocol(connection, until)
            kept = self._protocol(connection, until)
        if not self._checked:
            self._check_engines(connection, until)
            self._checked = True
        version, mode = kept or (PROTOCOL, self.mode)
        self._compare(version, mode)

    def _protocol(self, connection: Connection, until: float) -> tuple[int, str] | None:
        ask = self.schema.filled("SELECT version, mode FROM @protocol WHERE namespace = ")
        sql = ask.encode() + quoted(self.settings.namespace.encode())
        try:
            results = connection.checked(connection.request(sql, until))
        except Refused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._rights()}") from None
            if error.code != NO_TABLE:
                raise
            self._create(connection, until)
            return None
        for version, mode in results[0].rows:
            return int(version or 0), (mode or b"").decode()
        return None

    def _insert_protocol(self, connection: Connection, until: float) -> None:
        sql = self.schema.filled("INSERT IGNORE INTO @protocol VALUES (").encode()
        values = (quoted(self.settings.namespace.encode()), PROTOCOL, quoted(self.mode.encode()))
        sql += b"%s, %d, %s)" % values
        try:
            connection.checked(connection.request(sql, until))
        except Refused as error:
            if error.code in NO_RIGHTS:
                raise Unsupported(f"{error}. {self._rights()}") from None
            raise

    def _rights(self) -> str:
        return (
            "This account needs SELECT, INSERT, UPDATE and DELETE on all tables whose names begin "
            f"with {self.schema.prefix!r}"
        )

    def _create(self, connection: Connection, until: float) -> None:
        try:
            connection.checked(connection.request(self.schema.sql().rstrip(" ;\n").encode(), until))
        except Refused as error:
            if error.code not in NO_RIGHTS:
                raise
            raise Unsupported(
                f"{error}. Holdfast's tables are missing, or older than this version, and this "
                "account may not make them: let somebody who may run what `holdfast schema mysql` "
                f"prints, which is\n{self.schema.sql()}"
            ) from None

    def _check_engines(self, connection: Connection, until: float) -> None:
        names = b", ".join(quoted((self.schema.prefix + table).encode()) for table in TABLES)
        sql = (
            b"SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES "
            b"WHERE TABLE_SCHEMA = DATABASE() AND CAST(TABLE_NAME AS BINARY) IN (%s)" % names
        )
        results = connection.checked(connection.request(sql, until))
        if len(results[0].rows) < len(TABLES):
            self._create(connection, until)
        for table, engine in results[0].rows:
            if (engine or b"").lower() != b"innodb":
                raise Unsupported(
                    f"the table {(table or b'').decode()} on {self.address.display} is of "
                    f"{(engine or b'?').decode()}, which has no transactions: InnoDB is needed"
                )

    def _compare(self, version: int, mode: str) -> None:
        namespace, server = self.settings.namespace, self.address.display
        if version != PROTOCOL:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used with protocol {version}, "
                f"which this version (protocol {PROTOCOL}) can't share locks with"
            )
        if mode != self.mode:
            raise Incompatible(
                f"the namespace {namespace!r} on {server} is used in {mode} mode, whose locks do "
                f"not exclude those of {self.mode} mode. Use another namespace, or, when nobody "
                f"uses it any more, delete its row in {self.schema.filled('@protocol')}"
            )


def ahead_seconds(told: float, before: float, after: float) -> float:
    """How far a clock is ahead that told its time between two moments of ours; 0 if that can't be
    said.

    >>> ahead_seconds(105.0, 100.0, 101.0), ahead_seconds(100.5, 100.0, 101.0)
    (4.0, 0.0)
    """
    return told - min(max(told, before), after)


def _check_server(display: str, facts: dict[str, str]) -> None:
    version = facts.get("version", "")
    kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST_SERVER[kind]:
        oldest = ".".join(map(str, OLDEST_SERVER[kind]))
        raise Unsupported(f"{display} is {kind} {version}; {oldest} is the oldest supported")
    writable = ("OFF", "0", "")
    if facts.get("read_only", "") not in writable or facts.get("innodb_read_only") not in writable:
        raise BackendUnavailable(f"{display} is a read-only replica: locks need the primary")
