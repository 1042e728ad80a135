"""What ``consul://`` shows and keeps besides holds: looks, surveys, records, probes."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from holdfast.backends import consul_requests as requests
from holdfast.backends.consul_agent import READ, Refused
from holdfast.backends.consul_sessions import INFO, OPS, Ref
from holdfast.backends.lines import Entry, escape, standing, unescape
from holdfast.claim import Grant, Record, Standing
from holdfast.core.contract import Finding, Page
from holdfast.errors import BackendUnavailable

if TYPE_CHECKING:
    from holdfast.backends.consul import ConsulStore
    from holdfast.backends.consul_backend import ConsulBackend

__all__ = ["look", "probe", "recall", "record", "revoke", "survey", "watch"]

SWEEP_SHARE = 0.02
"""How often writing a record also looks for some whose time is over."""
SWEPT = 32
TRIES = 8


class _Terms(NamedTuple):
    """What Consul will do with a session that is not renewed any more."""

    ttl: float
    delay: float

    @property
    def notice(self) -> str:
        words = f"if its holder dies, Consul ends it {self.ttl:g} to {2 * self.ttl:g} s"
        delay = f", and a lock-delay of {self.delay:g} s comes on top" if self.delay else ""
        return f"{words} after its last renewal{delay}"


async def look(backend: ConsulBackend, name: str) -> Standing:
    return await _shown(backend, name, await backend.line(name))


async def _shown(backend: ConsulBackend, name: str, entries: list[Entry]) -> Standing:
    """Consul does not tell how long it would still wait: at least the session's whole ttl, and
    then its lock-delay. For an entry whose session has ended, nothing."""
    terms = await _terms(backend, entries)
    remaining = {session: sum(of) for session, of in terms.items()}
    notice = max(terms.values()).notice if terms else ""
    return standing(name, entries, remaining)._replace(notice=notice)


async def _terms(backend: ConsulBackend, entries: Iterable[Entry]) -> dict[str, _Terms]:
    terms: dict[str, _Terms] = {}
    for session in {entry.session for entry in entries if entry.held and entry.session}:
        info = await backend.agent.ask(INFO + session.encode())
        if info:
            ttl = float(str(info[0]["TTL"]).rstrip("s") or 0)
            terms[session] = _Terms(ttl, int(info[0]["LockDelay"]) / 1e9)
    return terms


async def revoke(backend: ConsulBackend, name: str) -> list[int]:
    tokens: list[int] = []
    holders = [entry for entry in await backend.line(name) if entry.held]
    for _ in range(TRIES):
        changed = set()
        for entry in holders:
            try:
                await backend.agent.txn(_ending(backend, name, entry))
                tokens.append(entry.details.token)
            except Refused as refused:
                if 0 not in refused.failed:  # else it has ended by itself
                    changed.add(entry.owner)
        if not changed:
            break
        holders = [entry for entry in await backend.line(name) if entry.owner in changed]
    return tokens


def _ending(backend: ConsulBackend, name: str, entry: Entry) -> bytes:
    """Deletes an entry that is still there with the slots that it has. One that has none may be
    taking them: not after that."""
    keys, key = backend.store.names.of(name), entry.key.encode()
    mark = keys.mark(entry.owner)
    ends = [key, mark, *map(keys.slot, entry.details.slots)]
    as_seen = [] if entry.details.settled else [requests.absent(mark)]
    return requests.txn(requests.get(key), *as_seen, *map(requests.delete, ends))


async def survey(backend: ConsulBackend, prefix: str, cursor: str | None, limit: int) -> Page:
    """Consul has no pages: all names are listed, and the entries of some are read."""
    names = backend.store.names
    path = quote(names.root + escape(prefix))
    line = f"GET /v1/kv/{path}?keys&separator=%2F&consistent".encode()
    found: list[str] = await backend.agent.ask(line) or []
    after = "" if cursor is None else f"{names.root}{escape(cursor)}/"
    keys = sorted(key for key in found if key > after)
    standings: list[Standing] = []
    for start in range(0, min(limit, len(keys)), OPS):
        standings += await _standings(backend, keys[start : min(start + OPS, limit)])
    last = _name(backend, keys[limit - 1]) if len(keys) > limit else None
    return Page(standings, last)


def _name(backend: ConsulBackend, prefix: str) -> str:
    return unescape(prefix[len(backend.store.names.root) : -1])


async def _standings(backend: ConsulBackend, prefixes: list[str]) -> list[Standing]:
    body = requests.txn(*(requests.tree(prefix.encode()) for prefix in prefixes))
    found = await backend.agent.txn(body, line=READ)
    standings: list[Standing] = []
    for prefix in prefixes:
        line = requests.line_of((kv for kv in found if kv["Key"].startswith(prefix)), prefix)
        if line:
            standings.append(await _shown(backend, _name(backend, prefix), line))
    return standings


async def record(backend: ConsulBackend, grant: Grant, value: str, keep_seconds: float) -> bool:
    """Checks the hold and writes the record in one transaction."""
    store, owner = backend.store, grant.claim.owner
    ref = store.moved.get(owner) or Ref(*grant.ref)
    fields = [requests.PROTOCOL, grant.token, backend.runtime.wall(), keep_seconds, value]
    text = b64encode(json.dumps(fields).encode())
    try:
        await backend.agent.txn(
            requests.txn(
                requests.locked_by(ref.key.encode(), ref.session),
                requests.write(store.names.record(grant.claim.name), text),
            )
        )
    except Refused:
        return False
    if backend.runtime.between(0, 1) < SWEEP_SHARE:
        await _sweep(backend)
    return True


async def _sweep(backend: ConsulBackend) -> None:
    """Consul ends only what is bound to a session: records that nobody recalls end here."""
    line = f"GET /v1/kv/{quote(backend.store.names.records)}?keys".encode()
    keys: list[str] = await backend.agent.ask(line) or []
    start = int(backend.runtime.between(0, max(0, len(keys) - SWEPT)))
    for key in keys[start : start + SWEPT]:
        await _recall(backend, key.encode())


async def recall(backend: ConsulBackend, name: str) -> Record | None:
    return await _recall(backend, backend.store.names.record(name))


async def _recall(backend: ConsulBackend, key: bytes) -> Record | None:
    try:
        (found,) = await backend.agent.txn(requests.txn(requests.get(key)), line=READ)
    except Refused:
        return None
    version, token, written, keep_seconds, value = json.loads(b64decode(found["Value"]))
    if version != requests.PROTOCOL:
        return None
    age = backend.runtime.wall() - written
    if age < keep_seconds:
        return Record(value, token, age)
    with suppress(Refused):  # a newer one has come
        await backend.agent.txn(requests.txn(requests.delete_same(key, found["ModifyIndex"])))
    return None


async def watch(backend: ConsulBackend, name: str, seen: int | None, until: float) -> None:
    """Listens to all of a name's keys from before they were read."""
    prefix = backend.store.names.of(name).prefix
    watcher = f"watch {backend.runtime.between(0, 1)}"
    try:
        first = await backend.agent.http.ask(requests.query(prefix, 0, 1, keys=True))
        tokens = [entry.details.token for entry in await backend.line(name) if entry.held]
        if max(tokens, default=None) == seen:
            await backend.waits.listen(watcher, prefix, max(1, first.seen), until, keys=True)
    except BackendUnavailable:
        await backend.waits.pause(until)


async def probe(backend: ConsulBackend) -> list[Finding]:
    leader = await backend.agent.ask(b"GET /v1/status/leader")
    if not leader:
        return [Finding("leader", "Consul knows no leader", "broken")]
    findings = [Finding("leader", "there is one")]
    peers = await backend.agent.ask(b"GET /v1/status/peers") or []
    if len(peers) < 3:
        words = f"{len(peers)} server(s): with fewer than three, the locks go down with one"
        findings.append(Finding("servers", words, "warning"))
    await backend.line("holdfast probe")
    findings.append(Finding("access", f"may read {backend.store.names.root}"))
    session = await backend.keeper.session(max(10.0, backend.store.shortest_ttl))
    words = "sessions can be made; Consul ends them one to two ttls after their last renewal"
    findings.append(Finding("sessions", f"{words} ({session.ttl} s)"))
    findings.append(_limits(backend.store))
    return findings


def _limits(store: ConsulStore) -> Finding:
    floor = f"the shortest ttl is {store.shortest_ttl:g} s (session_ttl_min)"
    if store.lock_delay:
        return Finding("limits", f"{floor}; the lock-delay is {store.lock_delay:g} s")
    words = "no lock-delay: who destroys a session by hand lets the next in at once (lock_delay)"
    return Finding("limits", f"{floor}; {words}")
