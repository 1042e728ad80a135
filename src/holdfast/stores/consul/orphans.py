"""Entries that outlive their session because of a lock-delay, and how they are deleted.

A session without a lock-delay deletes its keys when it ends. A session with a lock-delay leaves
them behind, without a session, and Consul refuses to lock them until the delay is over. A client
that finds such an orphan in front of its own claim locks and deletes it in one transaction. Consul
refuses that transaction during the delay, and until then the orphan keeps others out like a hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from urllib.parse import quote

from holdfast.core.ordered import Entry
from holdfast.errors import Incompatible
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Agent, TransactionRefused

__all__ = ["DELAYED", "LOCK_DELAY_POLL_SECONDS", "delete_orphans", "orphans_of", "sweep"]

DELAYED = "the Consul session of its last holder has ended, and the lock-delay is not over"
LOCK_DELAY_POLL_SECONDS = 1.0
"""How often a waiting claim tries whether a lock-delay is over: Consul sends no notification."""
SWEPT_NAMES = 16
"""In how many names a new session looks for orphans that block no claim."""


def orphans_of(queue: Sequence[Entry]) -> list[Entry]:
    """The entries whose session has ended."""
    return [entry for entry in queue if not entry.session]


async def delete_orphans(
    agent: Agent,
    keys: requests.NameKeys,
    orphans: Iterable[Entry],
    session: str,
    until: float | None,
) -> bool:
    """Deletes entries that have no session. False if a lock-delay still protects one of them."""
    all_deleted = True
    for entry in orphans:
        all_deleted &= await delete_orphan(agent, keys, entry, session, until)
    return all_deleted


async def delete_orphan(
    agent: Agent, keys: requests.NameKeys, entry: Entry, session: str, until: float | None
) -> bool:
    """Locks and deletes one entry that has no session. False if its lock-delay is not over."""
    key = requests.quotable(entry.key)
    ends = [key, requests.mark(key), *map(keys.slot, entry.details.slots)]
    body = requests.txn(requests.lock(key, b"", session), *map(requests.delete, ends))
    try:
        await agent.txn(body, until=until)
    except TransactionRefused:
        return False
    return True


async def sweep(
    agent: Agent, names: requests.Names, session: str, start: float, until: float | None
) -> None:
    """Deletes guards of ended sessions, and the orphans in some of the names.

    ``start`` is a random number from 0 to 1 that chooses the first of these names."""
    await _sweep_guards(agent, names, until)
    line = f"GET /v1/kv/{quote(names.root)}?keys&separator=%2F".encode()
    listed = await agent.ask_many(str, line, until)
    prefixes = [key for key in listed if requests.segment_of(key, names.root) is not None]
    first = int(start * max(0, len(prefixes) - SWEPT_NAMES + 1))
    some = prefixes[first : first + SWEPT_NAMES]
    if not some:
        return
    body = requests.txn(*(requests.tree(prefix.encode()) for prefix in some))
    found = await agent.txn(body, line=READ, until=until)
    for prefix in some:
        keys = requests.NameKeys(prefix, prefix.encode())
        with suppress(Incompatible):  # a name that can't be read is left alone
            queue = requests.queue_of((kv for kv in found if kv["Key"].startswith(prefix)), prefix)
            await delete_orphans(agent, keys, orphans_of(queue), session, until)


async def _sweep_guards(agent: Agent, names: requests.Names, until: float | None) -> None:
    line = f"GET /v1/kv/{quote(names.guards)}?recurse".encode()
    for kv in (await agent.ask_many(dict, line, until))[: SWEPT_NAMES * 2]:
        if not kv.get("Session"):
            end = requests.delete_same(requests.quotable(kv["Key"]), int(kv["ModifyIndex"]))
            with suppress(TransactionRefused):  # another client has deleted it
                await agent.txn(requests.txn(end), until=until)
