"""What the sessions of clients with a lock-delay leave behind, and its burial.

A session without a lock-delay takes its keys with it. One with a lock-delay leaves them, without
a session, and Consul lets nobody lock them for so long. So whoever finds an entry of nobody's in
its way locks and deletes it in one transaction, which Consul itself refuses until the delay is
over: meanwhile the entry keeps others out like a hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.core.ordered import Entry
from holdfast.errors import Incompatible
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Agent, Refused

if TYPE_CHECKING:
    from holdfast.stores.consul.store import ConsulStore

__all__ = ["DELAYED", "RETRY_SECONDS", "bury", "sweep"]

DELAYED = "the Consul session of its last holder has ended, and the lock-delay is not over"
RETRY_SECONDS = 1.0
"""How often it is tried whether a lock-delay is over: Consul does not tell when."""
SWEPT = 16
"""How many names a new session looks through for what nobody asks for any more."""


async def bury(
    agent: Agent,
    keys: requests.NameKeys,
    remains: Iterable[Entry],
    session: str,
    until: float | None,
) -> bool:
    """Deletes entries that have no session; whether all of them are gone now."""
    done = True
    for entry in remains:
        key = requests.quotable(entry.key)
        ends = [key, keys.mark(entry.owner), *map(keys.slot, entry.details.slots)]
        body = requests.txn(requests.lock(key, b"", session), *map(requests.delete, ends))
        try:
            await agent.txn(body, until=until)
        except Refused:
            done = False
    return done


async def sweep(
    agent: Agent, store: ConsulStore, session: str, start: float, until: float | None
) -> None:
    """Buries what lies around: guards of ended sessions, and the remains in some of the names.

    ``start`` is a random number from 0 to 1: with which names to begin."""
    await _sweep_guards(agent, store, until)
    root = quote(store.names.root)
    line = f"GET /v1/kv/{root}?keys&separator=%2F".encode()
    listed = await agent.ask_many(str, line, until)
    names = [key for key in listed if requests.segment_of(key, store.names.root) is not None]
    first = int(start * max(0, len(names) - SWEPT + 1))
    some = names[first : first + SWEPT]
    if not some:
        return
    body = requests.txn(*(requests.tree(prefix.encode()) for prefix in some))
    found = await agent.txn(body, line=READ, until=until)
    for prefix in some:
        keys = requests.NameKeys(prefix, prefix.encode())
        with suppress(Incompatible):  # a name that can't be read is left alone
            line_of_name = requests.line_of(
                (kv for kv in found if kv["Key"].startswith(prefix)), prefix
            )
            await bury(agent, keys, remains_of(line_of_name), session, until)


def remains_of(line: Sequence[Entry]) -> list[Entry]:
    """The entries of a line that no session has any more."""
    return [entry for entry in line if not entry.session]


async def _sweep_guards(agent: Agent, store: ConsulStore, until: float | None) -> None:
    line = f"GET /v1/kv/{quote(store.names.guards)}?recurse".encode()
    for kv in (await agent.ask_many(dict, line, until))[: SWEPT * 2]:
        if not kv.get("Session"):
            end = requests.delete_same(requests.quotable(kv["Key"]), int(kv["ModifyIndex"]))
            with suppress(Refused):  # somebody else was faster
                await agent.txn(requests.txn(end), until=until)
