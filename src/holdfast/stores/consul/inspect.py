"""What ``consul://`` shows and keeps besides holds: looks, surveys, records, probes."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from holdfast.claim import Grant, LockInfo, Record
from holdfast.core.contract import Finding, Page
from holdfast.core.ordered import Entry, escape, shown_unreadable, standing, unescape
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores._consensus.strict import read_record
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Refused
from holdfast.stores.consul.session import INFO, OPS, Ref

if TYPE_CHECKING:
    from holdfast.stores.consul.backend import ConsulBackend
    from holdfast.stores.consul.store import ConsulStore

__all__ = ["look", "probe", "recall", "record", "revoke", "survey", "watch"]

SWEEP_SHARE = 0.02
"""How often writing a record also looks for some whose time is over."""
SWEPT = 32
TRIES = 8
_TTL = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s", re.ASCII)


class _Terms(NamedTuple):
    """What Consul will do with a session that is not renewed any more."""

    ttl: float
    delay: float

    @property
    def notice(self) -> str:
        words = f"if its holder dies, Consul ends it {self.ttl:g} to {2 * self.ttl:g} s"
        delay = f", and a lock-delay of {self.delay:g} s comes on top" if self.delay else ""
        return f"{words} after its last renewal{delay}"


async def look(backend: ConsulBackend, name: str) -> LockInfo:
    return await _shown(backend, name, await backend.line(name))


async def _shown(backend: ConsulBackend, name: str, entries: list[Entry]) -> LockInfo:
    """Consul does not tell how long it would still wait: at least the session's whole ttl, and
    then its lock-delay. For an entry whose session has ended, nothing."""
    terms = await _terms(backend, entries)
    remaining = {session: sum(of) for session, of in terms.items()}
    notice = max(terms.values()).notice if terms else ""
    return standing(name, entries, remaining)._replace(notice=notice)


async def _terms(backend: ConsulBackend, entries: Iterable[Entry]) -> dict[str, _Terms]:
    terms: dict[str, _Terms] = {}
    for session in {entry.session for entry in entries if entry.held and entry.session}:
        info = await backend.agent.ask_many(dict, INFO + quote(session).encode())
        ttl = _TTL.fullmatch(info[0]["TTL"]) if info else None
        if ttl:  # others may have made a session of theirs, with words that we never use
            terms[session] = _Terms(float(ttl[1]), int(info[0]["LockDelay"]) / 1e9)
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
    keys, key = backend.store.names.of(name), requests.quotable(entry.key)
    mark = keys.mark(entry.owner)
    ends = [key, mark, *map(keys.slot, entry.details.slots)]
    as_seen = [] if entry.details.settled else [requests.absent(mark)]
    return requests.txn(requests.get(key), *as_seen, *map(requests.delete, ends))


async def survey(backend: ConsulBackend, prefix: str, cursor: str | None, limit: int) -> Page:
    """Consul has no pages: all names are listed, and the entries of some are read."""
    names = backend.store.names
    path = quote(names.root + escape(prefix))
    line = f"GET /v1/kv/{path}?keys&separator=%2F&consistent".encode()
    found = await backend.agent.ask_many(str, line)
    keys = sorted(key for key in found if key > (cursor or ""))
    standings: list[LockInfo] = []
    for start in range(0, min(limit, len(keys)), OPS):
        standings += await _standings(backend, keys[start : min(start + OPS, limit)])
    return Page(standings, keys[limit - 1] if len(keys) > limit else None)


async def _standings(backend: ConsulBackend, listed: list[str]) -> list[LockInfo]:
    root = backend.store.names.root
    prefixes = [key for key in listed if requests.segment_of(key, root) is not None]
    strange = [key[len(root) :].rstrip("/") for key in listed if key not in prefixes]
    standings = [shown_unreadable(segment) for segment in strange]
    if not prefixes:
        return standings
    body = requests.txn(*(requests.tree(prefix.encode()) for prefix in prefixes))
    found = await backend.agent.txn(body, line=READ)
    for prefix in prefixes:
        segment = prefix[len(root) : -1]
        try:
            line = requests.line_of((kv for kv in found if kv["Key"].startswith(prefix)), prefix)
            if line:
                standings.append(await _shown(backend, unescape(segment), line))
        except Incompatible as error:
            standings.append(shown_unreadable(segment, error))
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
    keys = await backend.agent.ask_many(str, line)
    start = int(backend.runtime.between(0, max(0, len(keys) - SWEPT)))
    for key in keys[start : start + SWEPT]:
        with suppress(Incompatible):  # told to whoever asks for it
            await _recall(backend, requests.quotable(key), key)


async def recall(backend: ConsulBackend, name: str) -> Record | None:
    return await _recall(backend, backend.store.names.record(name), name)


async def _recall(backend: ConsulBackend, key: bytes, name: str) -> Record | None:
    try:
        found = (await backend.agent.txn(requests.txn(requests.get(key)), line=READ))[0]
    except Refused:
        return None
    stored = read_record(found["Value"], f"{name!r} on {backend.store.display}")
    record = None if stored is None else stored.at(backend.runtime.wall())
    if stored is not None and record is None:
        with suppress(Refused):  # a newer one has come
            await backend.agent.txn(requests.txn(requests.delete_same(key, found["ModifyIndex"])))
    return record


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
    leader = await backend.agent.ask(str, b"GET /v1/status/leader")
    if not leader:
        return [Finding("leader", "Consul knows no leader", "broken")]
    findings = [Finding("leader", "there is one")]
    peers = await backend.agent.ask_many(str, b"GET /v1/status/peers")
    if len(peers) < 3:
        words = f"{len(peers)} server(s): with fewer than three, the locks go down with one"
        findings.append(Finding("servers", words, "warning"))
    await backend.line("holdfast probe")
    findings.append(Finding("access", f"may read {backend.store.names.root}"))
    session = await backend.renewer.session(max(10.0, backend.store.shortest_ttl))
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
