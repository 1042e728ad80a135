"""Reading the replies about stored locks and about the state of the nodes. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from holdfast.claim import Holder, LockInfo, Mode, read_label
from holdfast.core.contract import Finding
from holdfast.errors import BackendUnavailable, GuaranteeNotMet
from holdfast.io.resp import RedisRefused
from holdfast.stores.redis.inspect import read_info
from holdfast.stores.redis.replies import clock_time, damage, refusal
from holdfast.stores.redlock.nodes import Nodes, RedlockNode
from holdfast.stores.redlock.url import RedlockOptions
from holdfast.stores.redlock.votes import check_round

__all__ = ["findings", "has_entry", "read_cursor", "read_lock_info"]

_MODES = {b"x": Mode.EXCLUSIVE, b"s": Mode.SHARED, b"n": Mode.SLOTS}


def read_lock_info(name: str, replies: dict[int, Any], nodes: Nodes) -> LockInfo:
    """Return what a majority holds. Raises ``Incompatible`` or ``BackendUnavailable`` if that can't
    be known. A node with damaged data counts as down, as long as a quorum is left."""
    answers = [[reply] for reply in replies.values()]
    check_round(answers, nodes.quorum, nodes.display, name)
    for reply in replies.values():
        if isinstance(reply, RedisRefused) and not damage(reply):
            raise refusal(reply, nodes.display, name)
    try:
        return _agreed(name, [r for r in replies.values() if type(r) is list], nodes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"a node of {nodes.display} sent a reply that can't be read"
        raise BackendUnavailable(why) from error


def _agreed(name: str, replies: Sequence[Any], nodes: Nodes) -> LockInfo:
    """Return the holders that a quorum has, or may have with the nodes that did not answer."""
    seen: dict[bytes, list[tuple[Any, int]]] = {}
    limits: Counter[int] = Counter()
    for limit, now, rows in replies:
        limits[int(limit)] += bool(rows)
        for row in rows:
            seen.setdefault(row[0], []).append((row, now))
    unseen = len(nodes.members) - len(replies)
    found = [rows for rows in seen.values() if len(rows) + unseen >= nodes.quorum]
    holders = sorted((_holder(rows, nodes.quorum) for rows in found), key=lambda h: h.token)
    limit = max(limits, key=lambda each: limits[each], default=0) if holders else 0
    return LockInfo(name, limit, tuple(holders), ())


def _holder(rows: list[tuple[Any, int]], quorum: int) -> Holder:
    """Return one holder from the entries of several nodes, which may differ: a node may have missed
    a renewal."""
    tokens = Counter(row[2] for row, _ in rows)
    token = max(tokens, key=lambda each: (tokens[each], each))
    ends = sorted(((row[3] - now) / 1000 for row, now in rows), reverse=True)
    remaining = ends[min(quorum, len(ends)) - 1]
    (_, mode, _, _, slots, label), now = rows[0]
    numbers = () if slots == b"-" else tuple(int(slot) for slot in slots.split(b","))
    since = min(token / 1_000_000, now / 1000)
    parts = read_label(label.decode(errors="replace"))
    return Holder(*parts, _MODES[mode], token, numbers, since, max(0.0, remaining))


def has_entry(reply: Any) -> bool:
    """Whether a node has holders of a name, or an entry that can't be read."""
    if type(reply) is not list or reply[:1] == [b"incompatible"]:
        return True
    return len(reply) == 3 and bool(reply[2])


def read_cursor(cursor: str | None) -> tuple[int, str, str]:
    """Return the node, the SCAN cursor and the last name of a page cursor."""
    if cursor is None:
        return 0, "0", ""
    node, scan, after = cursor.split(".", 2)
    return int(node), scan, after


def findings(
    nodes: Nodes, answers: Sequence[Any], options: RedlockOptions, wall: float
) -> list[Finding]:
    """Return the findings of ``check()`` from the answers of all nodes to INFO and to HMGET of the
    mark of loss protection."""
    found: list[Finding] = []
    for node, answer in zip(nodes.members, answers, strict=True):
        info, mark = answer if type(answer) is list else (None, None)
        found += _node(nodes, node, info, options)
        if options.loss_protection and isinstance(info, bytes):
            found += _pause(node, read_info(info), mark, options, wall)
    found.append(_loss(options))
    if options.access.tls and options.access.options.get("ssl_cert_reqs") == "none":
        found.append(Finding("tls", "certificates are not verified", "warning"))
    return found


def _node(nodes: Nodes, node: RedlockNode, reply: Any, options: RedlockOptions) -> list[Finding]:
    where = f"redis at {node.address}"
    if reply is None:
        detail = f"no answer: the store survives one failure less ({node.cause or 'no reply'})"
        return [Finding(where, detail, "warning")]
    if isinstance(reply, RedisRefused):
        return [Finding(where, f"INFO is refused, nothing can be verified: {reply}", "warning")]
    try:
        nodes.check_info(node, reply)
    except GuaranteeNotMet as error:
        return [Finding(where, str(error), "broken")]
    info = read_info(reply)
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "?")
    found = [Finding(where, f"{product} {version}, master, run {info.get('run_id', '?')[:8]}")]
    if info.get("aof_enabled") == "1":
        found.append(Finding(where, "the append-only file is on: a restart keeps locks"))
    elif options.loss_protection:
        detail = "no append-only file: after a restart it grants nothing for max_ttl"
        found.append(Finding(where, detail))
    else:
        found.append(Finding(where, "no append-only file: a restart loses its votes", "warning"))
    return found


def _pause(
    node: RedlockNode, info: dict[str, str], reply: Any, options: RedlockOptions, wall: float
) -> list[Finding]:
    """Return a warning if loss protection lets the node grant nothing now, or from its next request
    on."""
    if type(reply) is not list or len(reply) != 2:
        return []  # the user may not read it
    mark, marked = reply
    server = f"{info.get('run_id', '')}:{info.get('master_replid', '')}"
    since = int(marked[:16]) if type(marked) is bytes and marked.isdigit() else 0
    until = since + int(options.max_ttl * 1000)
    if mark != server.encode():
        detail = f"it grants nothing for {options.max_ttl:g} s from the next request on"
    elif until > wall * 1000:
        detail = f"it grants nothing before {clock_time(until)}"
    else:
        return []
    detail += ": it is new or may have lost holds (run `holdfast init` if it is new)"
    return [Finding(f"redis at {node.address}", detail, "warning")]


def _loss(options: RedlockOptions) -> Finding:
    if options.loss_protection:
        return Finding("loss protection", f"on, max_ttl {options.max_ttl:g} s")
    detail = "off: a node that restarts without its data may let two clients hold at once"
    return Finding("loss protection", detail, "warning")
