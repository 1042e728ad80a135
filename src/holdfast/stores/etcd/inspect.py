"""What ``etcd://`` shows and keeps besides holds: looks, surveys, records, probes."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from holdfast.claim import Grant, LockInfo, Record
from holdfast.core.contract import Finding, Page
from holdfast.core.ordered import Entry, escape, shown_unreadable, standing, unescape
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores._consensus.sessions import whole
from holdfast.stores._consensus.strict import read_record
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.gateway import SessionGone
from holdfast.stores.etcd.leave import call_first
from holdfast.stores.etcd.session import GRANT, REVOKE, TXN, Ref

if TYPE_CHECKING:
    from holdfast.stores.etcd.backend import EtcdBackend

__all__ = ["look", "probe", "recall", "record", "revoke", "survey", "watch"]

RANGE = b"POST /v3/kv/range"
STATUS = b"POST /v3/maintenance/status"
VERSION = b"GET /version"
ENTRIES_PER_PAGE = 1000
DELETES_PER_TXN = 100  # etcd allows 128
# Below these, an old leader that was stuck could revoke leases that were kept alive elsewhere.
SOUND_PATCH = {(3, 4): 31, (3, 5): 13}


async def line(backend: EtcdBackend, name: str) -> list[Entry]:
    """Everybody who holds or waits, in order, by a linearizable read."""
    keys = backend.store.names.of(name)
    found = await backend.gateway.post(RANGE, b"{%b}" % keys.all)
    return requests.line_of(found, keys.prefix)


async def look(backend: EtcdBackend, name: str) -> LockInfo:
    entries = await line(backend, name)
    return standing(name, entries, await _remaining(backend, entries))


async def _remaining(backend: EtcdBackend, entries: Iterable[Entry]) -> dict[str, float]:
    sessions = {entry.session for entry in entries if entry.given}
    return {session: (await backend.leases.time_to_live(session))[0] for session in sessions}


async def revoke(backend: EtcdBackend, name: str) -> list[int]:
    holders = [entry for entry in await line(backend, name) if entry.given]
    tokens: list[int] = []
    for start in range(0, len(holders), DELETES_PER_TXN):
        batch = holders[start : start + DELETES_PER_TXN]
        body = requests.txn([], [_ending(entry) for entry in batch])
        answer = await backend.gateway.post(TXN, body)
        replies = answer["responses"].exactly(len(batch))
        for entry, reply in zip(batch, replies, strict=True):
            if reply["response_txn"].get("succeeded"):
                tokens.append(entry.details.token)
    if tokens:
        await call_first(backend, name)
    return tokens


def _ending(entry: Entry) -> bytes:
    """Deletes an entry unless it has ended already: its key may be another's by now."""
    key = entry.key.encode()
    return requests.nested([requests.created_at(key, entry.order)], [requests.delete(key)])


async def survey(backend: EtcdBackend, prefix: str, cursor: str | None, limit: int) -> Page:
    """Reads entries in the order of their keys, which keeps those of a name together."""
    names = backend.store.names
    low = names.root + escape(prefix)
    high = low + "\U0010ffff"
    if cursor is not None:
        low = f"{names.root}{cursor}0"  # behind the slash that ends a name
    body = b'{%b,"limit":"%d"}' % (requests.between(low, high), ENTRIES_PER_PAGE)
    found = await backend.gateway.post(RANGE, body)
    kvs = found.get("kvs", [])
    groups = [(name, list(some)) for name, some in groupby(kvs, lambda kv: _segment(backend, kv))]
    whole_page = not found.get("more")
    if not whole_page and len(groups) > 1:
        groups.pop()  # it may go on in the next page
    standings = [
        await _shown(backend, segment, some if whole_page or len(groups) > 1 else None)
        for segment, some in islice(groups, limit)
    ]
    more = not whole_page or len(groups) > limit
    return Page(standings, groups[:limit][-1][0] if more and groups else None)


def _segment(backend: EtcdBackend, kv: dict[str, str]) -> str:
    return backend.store.names.segment_of(requests.decoded(kv["key"]))


async def _shown(backend: EtcdBackend, segment: str, kvs: list[dict[str, Any]] | None) -> LockInfo:
    """One name of a survey; ``kvs`` are its entries, if all of them were read."""
    name = unescape(segment)
    if escape(name) != segment:
        return shown_unreadable(segment)
    try:
        if kvs is None:
            return await look(backend, name)
        entries = requests.line_of({"kvs": kvs}, backend.store.names.of(name).prefix)
        return standing(name, entries, await _remaining(backend, entries))
    except Incompatible as error:
        return shown_unreadable(segment, error)


async def record(backend: EtcdBackend, grant: Grant, value: str, keep_seconds: float) -> bool:
    """A lease of its own ends the record; the hold is checked in the same transaction."""
    answer = await backend.gateway.post(GRANT, b'{"TTL":"%d"}' % max(1, whole(keep_seconds)))
    lease: str = answer["ID"]
    fields = [requests.PROTOCOL, grant.token, backend.runtime.wall(), keep_seconds, value]
    text = b64encode(json.dumps(fields).encode())
    mine = Ref(*grant.ref).stands()
    keep = b'{"request_put":{"key":"%b","value":"%b","lease":"%b","prev_kv":true}}' % (
        backend.store.names.record(grant.claim.name),
        text,
        lease.encode(),
    )
    answer = await backend.gateway.post(TXN, requests.txn([mine], [keep]))
    kept = bool(answer.get("succeeded"))
    before = answer["responses"][0]["response_put"].get("prev_kv", {}) if kept else {}
    await _end_lease(backend, before.get("lease", "0") if kept else lease)
    return kept


async def _end_lease(backend: EtcdBackend, lease: str) -> None:
    if lease == "0":
        return
    with suppress(BackendUnavailable, SessionGone):  # it ends by itself
        await backend.gateway.post(REVOKE, b'{"ID":"%b"}' % lease.encode())


async def recall(backend: EtcdBackend, name: str) -> Record | None:
    body = b'{"key":"%b"}' % backend.store.names.record(name)
    kvs = (await backend.gateway.post(RANGE, body)).get("kvs")
    if not kvs:
        return None
    record = read_record(kvs[0].get("value"), f"{name!r} on {backend.store.display}")
    # A lease lives longer when etcd changes its leader; the record does not.
    return None if record is None else record.at(backend.runtime.wall())


async def watch(backend: EtcdBackend, name: str, seen: int | None, until: float) -> None:
    keys = backend.store.names.of(name).all.decode()
    watcher = f"watch {backend.runtime.between(0, 1)}"
    try:
        found = await backend.waits.confirmed(watcher, keys, False, until)
        if found is None:
            return
        try:
            given = [entry for entry in await line(backend, name) if entry.given]
            tokens = [entry.details.token for entry in given]
            if max(tokens, default=None) == seen:
                await backend.waits.fired(found, until)
        finally:
            await backend.waits.watches.end(found)
    except BackendUnavailable:
        await backend.waits.pause(until)


async def probe(backend: EtcdBackend) -> list[Finding]:
    store = backend.store
    reply = await backend.gateway.http.ask(VERSION)
    findings = [_version(reply.body)]
    if findings[0].level == "broken":  # it has no gateway that we could ask for more
        return findings
    status = await backend.gateway.post(STATUS, b"{}")
    if int(status.get("leader", 0)) == 0:
        findings.append(Finding("leader", "this etcd knows no leader", "broken"))
    if status.get("errors"):
        findings.append(Finding("alarms", "; ".join(status["errors"]), "broken"))
    await line(backend, "holdfast probe")
    findings.append(Finding("access", f"may read {store.names.root}"))
    findings.append(await _watching(backend))
    if len(store.servers.hosts) == 1:
        words = "one host is named: the locks are as available as that one"
        findings.append(Finding("hosts", words, "warning"))
    return findings


async def _watching(backend: EtcdBackend) -> Finding:
    until = backend.runtime.now() + backend.store.settings.request_seconds
    keys = backend.store.names.of("holdfast probe").all.decode()
    found = await backend.waits.confirmed("probe", keys, True, until)
    if found is None:
        return Finding("watch", "no watch could be opened: waiters only look again", "warning")
    await backend.waits.watches.end(found)
    return Finding("watch", "waiters are woken over one WebSocket")


def _version(body: bytes) -> Finding:
    try:
        text = str(json.loads(body).get("etcdserver", ""))
    except (ValueError, AttributeError, RecursionError):
        text = ""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        return Finding("version", "the server does not say its version", "warning")
    major, minor, patch = map(int, match.groups())
    if (major, minor) < (3, 4):
        return Finding("version", f"etcd {text} is too old: 3.4 or newer is needed", "broken")
    sound = SOUND_PATCH.get((major, minor), 0)
    if patch < sound:
        words = f"etcd {text}: a leader that was stuck may end leases that are alive; "
        return Finding("version", f"{words}{major}.{minor}.{sound} fixes it", "warning")
    return Finding("version", f"etcd {text}")
