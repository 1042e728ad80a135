"""What is asked of the server for advisory locks, and the keys that stand for names."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from holdfast.stores.postgres.schema import Schema
from holdfast.stores.postgres.shared import SharedStatements

__all__ = ["AdvisoryStatements", "base_key"]


@lru_cache(maxsize=1024)
def base_key(namespace: str, name: str) -> int:
    """The 64-bit key of a name; a few follow it for its slots."""
    digest = hashlib.sha256(f"{namespace}\0{name}".encode()).digest()
    key = int.from_bytes(digest[:8], signed=True)
    return key if key < 2**63 - 2**32 else key - 2**32


class AdvisoryStatements(SharedStatements):
    """The requests, as they read in one schema."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, "look_sessions", "survey_sessions", "terminate", "purge_counters")
        say = schema.statement
        self.take = say("take", "SELECT @take($1, $2, $3, $4, $5, $6, $7, $8)")
        places = ", ".join(f"${number}" for number in range(1, 12))
        self.take_slots = say("take_slots", f"SELECT @take_slots({places})")
        self.wait = say("wait", "SELECT pg_catalog.pg_advisory_lock($1)")
        self.wait_take = say("wait_take", "SELECT @wait_take($1, $2, $3, $4, $5, $6)")
        self.unlock = say("unlock", f"SELECT pg_catalog.pg_advisory_unlock($1) AND {_UNMARK}")
        self.unlock_shared = say(
            "unlock_shared", f"SELECT pg_catalog.pg_advisory_unlock_shared($1) AND {_UNMARK}"
        )
        self.free_slots = say("free_slots", "SELECT @free_slots($1, $2, $3, $4, $5)")
        self.leave = say("leave", "SELECT @leave()")
        self.cancel = say("cancel", "SELECT pg_catalog.pg_cancel_backend($1)")
        self.end = say("end", "SELECT @end_session($1, $2)")
        self.behind = say("behind", "SELECT @note_behind($1)")
        self.record = say("record", "SELECT @durable(true), @keep_record($1, $2, $3, $4, $5)")
        self.touch = say("touch", "")
        self.set_ttl = say("set_ttl", "SELECT @set_ttl($1, $2, $3)")
        self.prepared = (
            self.take, self.take_slots, self.wait, self.wait_take, self.unlock,
            self.unlock_shared, self.free_slots,
        )  # fmt: skip


_UNMARK = "pg_catalog.pg_advisory_unlock_shared($1 OPERATOR(pg_catalog.#) $2)"
