"""What every connection does first: it finds our tables, or makes them, and may share them.

The making is one idempotent step, guarded by an advisory lock.
"""

from __future__ import annotations

from holdfast.errors import Incompatible, Unsupported
from holdfast.stores.postgres.connection import (
    NO_RIGHTS,
    PostgresConnection,
    PostgresRefused,
    first_value,
)
from holdfast.stores.postgres.schema import PROTOCOL, REVISION, Schema

__all__ = ["enter"]

CREATION_KEY = 7_019_267_233_085_447_000
"""Two that create at once: one waits for the other."""
_MISSING = frozenset({"42883", "42P01", "3F000"})


def enter(
    schema: Schema, connection: PostgresConnection, namespace: str, mode: str, until: float
) -> None:
    """Makes sure that everything is there and that we may share it; creates it if not."""
    ask = schema.statement("enter", "SELECT @enter($1, $2, $3)")
    parameters = [namespace.encode(), mode.encode(), str(PROTOCOL).encode()]
    try:
        answer = first_value(connection.request((ask, parameters), until))
    except PostgresRefused as error:
        if error.sqlstate == NO_RIGHTS:
            raise Unsupported(
                f"{error}. This role needs USAGE on the schema {schema.schema!r}, and SELECT, "
                "INSERT, UPDATE and DELETE on all tables in it"
            ) from None
        if error.sqlstate not in _MISSING:
            raise
        _create(schema, connection, until)
        answer = first_value(connection.request((ask, parameters), until))
    revision, version, kept_mode = _read(answer, connection.server, namespace)
    if revision < REVISION:
        _create(schema, connection, until)
    _compare(schema, connection.server, namespace, mode, version, kept_mode)


def _read(answer: bytes, server: str, namespace: str) -> tuple[int, int, str]:
    try:
        revision, version, kept_mode = answer.decode().split(" ")
        return int(revision), int(version), kept_mode
    except ValueError:
        raise Incompatible(
            f"what is stored about the namespace {namespace!r} on {server} can't be read"
        ) from None


def _compare(
    schema: Schema, server: str, namespace: str, mode: str, version: int, kept: str
) -> None:
    if version != PROTOCOL:
        raise Incompatible(
            f"the namespace {namespace!r} on {server} is used with protocol {version}, "
            f"which this version (protocol {PROTOCOL}) can't share locks with"
        )
    if kept != mode:
        raise Incompatible(
            f"the namespace {namespace!r} on {server} is used in {kept} mode, whose locks do "
            f"not exclude those of {mode} mode. Use another namespace, or, when nobody uses it "
            f"any more, delete its row in {schema.filled('@protocol')}"
        )


def _create(schema: Schema, connection: PostgresConnection, until: float) -> None:
    script = (
        f"BEGIN; SELECT pg_catalog.pg_advisory_xact_lock({CREATION_KEY}); {schema.sql()} COMMIT;"
    )
    try:
        connection.script(script.encode(), until)
    except PostgresRefused as error:
        connection.script(b"ROLLBACK", until)
        if error.sqlstate == NO_RIGHTS:
            raise Unsupported(
                f"{error}. Holdfast's tables are missing, or older than this version, and this "
                "role may not make them: "
                "let somebody who may run what `holdfast schema postgresql` prints, which is\n"
                f"{schema.sql()}"
            ) from None
        raise
