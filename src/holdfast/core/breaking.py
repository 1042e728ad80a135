"""The reason of a break: how it gets from the client that breaks a lock to the holder.

The client that breaks a lock first writes its reason as a record, under another name
(``note_name``). A holder whose hold is gone reads the record. If the record lists the token of the
hold, its text is the reason of the loss. Stores without ``RECORDS`` keep no such record: there only
the client that breaks the lock logs the reason. No rule of locking depends on the record.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections.abc import Iterable
from contextlib import suppress

from holdfast.claim import Grant, Record, escaped
from holdfast.core.contract import Backend, Runtime

__all__ = ["LONGEST_REASON", "NEWS_SECONDS", "note_name", "note_text", "why_lost"]

LONGEST_REASON = 200
MOST_TOKENS = 100
"""Of more holders, as of readers, only the first ones are told the reason."""
READ_SECONDS = 1.0
"""How long a release, an extend or the end of a block waits for the reason."""
NEWS_SECONDS = 0.25
"""How long a store may delay the news of losses that the renewer finds, however many."""


def note_name(name: str) -> str:
    """The name under which the reason is recorded: short, however long the lock's name is."""
    from hashlib import sha256

    return f"holdfast.broken:{sha256(name.encode()).hexdigest()[:32]}"


def note_text(tokens: Iterable[int], where: str, reason: str) -> str:
    """The record: the tokens of the broken holds, who breaks them, and why."""
    import json

    return json.dumps([list(tokens)[:MOST_TOKENS], where, reason[:LONGEST_REASON]])


async def why_lost(
    runtime: Runtime, backend: Backend, grant: Grant, reason: str, seconds: float = READ_SECONDS
) -> str | None:
    """The reason why a hold is gone, if the client that broke it has recorded one; else the reason
    that is known already; ``None`` if the store did not tell. Never fails, whatever a store raises:
    a loss must be told. Waits for ``seconds`` at the most."""
    found: list[Record | None] = []

    async def recall() -> None:
        found.append(await backend.recall(note_name(grant.claim.name)))

    with suppress(Exception):
        await runtime.within(recall(), seconds)
    if not found:
        return None
    return (found[0] and _read(found[0], grant.token)) or reason


def _read(record: Record, token: int) -> str:
    """What the record says of the hold with this token; empty if it says nothing of it, or is not
    one of ours."""
    import json

    try:
        tokens, where, reason = json.loads(record.value)
        told = isinstance(tokens, list) and token in tokens
    except (ValueError, TypeError, RecursionError):
        return ""
    if not (told and isinstance(where, str) and isinstance(reason, str)):
        return ""
    return f"it was broken by {escaped(where[:LONGEST_REASON])}: {escaped(reason[:LONGEST_REASON])}"
