"""What ZooKeeper can tell of its names: holders, waiters, and who holds next."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Holder, LockInfo, Mode, Waiter, read_label
from holdfast.core.contract import Finding
from holdfast.errors import Incompatible
from holdfast.stores.zookeeper.client.packets import Listing, Read, Stat
from holdfast.stores.zookeeper.queue import (
    NodeData,
    NodeQueue,
    QueuedNode,
    read_data,
)
from holdfast.stores.zookeeper.session import USUAL_TICK_SECONDS

__all__ = ["MOST_SHOWN", "read_lock_info", "read_queue", "tick_finding", "token_of"]

MOST_SHOWN = 1000
"""Of a longer line the rest is not read."""


def token_of(mode: Mode, data: NodeData, stat: Stat) -> int:
    """When it came, or when it took its slots: after that a holder's node does not change."""
    return data.token or (stat.mzxid if mode is Mode.SLOTS else stat.czxid)


def read_queue(listing: Listing, where: str) -> NodeQueue | Incompatible:
    try:
        return NodeQueue(listing.value or (), where)
    except Incompatible as error:
        return error


def read_lock_info(
    name: str, queue: NodeQueue, reads: Sequence[Read], where: str
) -> LockInfo | Incompatible:
    try:
        return _lock_info(name, queue, reads, where)
    except Incompatible as error:
        return error


def _lock_info(name: str, queue: NodeQueue, reads: Sequence[Read], where: str) -> LockInfo:
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    for index, (queued, read) in enumerate(zip(queue.claims, reads, strict=False)):
        if read.error is not None:
            continue  # it left meanwhile
        data, stat = read_data(read.value[0], where), read.value[1]
        label = read_label(data.label)
        slots_missing = queued.mode is Mode.SLOTS and not data.slots
        if index < queue.admitted and not slots_missing:
            holders.append(_holder(label, queued, data, stat))
        else:
            waiters.append(Waiter(*label, queued.mode, stat.ctime / 1000, data.behind))
    limit = queue.claims[0].limit if queue.claims else 0
    return LockInfo(name, limit, tuple(holders), tuple(waiters))


def _holder(
    label: tuple[str, int, str, str], queued: QueuedNode, data: NodeData, stat: Stat
) -> Holder:
    since = stat.mtime if queued.mode is Mode.SLOTS else stat.ctime
    token = token_of(queued.mode, data, stat)
    # The ensemble does not tell when it last heard of a session: this is the most.
    return Holder(*label, queued.mode, token, data.slots, since / 1000, float(data.ttl))


def tick_finding(tick: float | None, floor: float) -> Finding:
    """What the certain time of holds rests on: servers tell each other every half tick of whom
    they have heard, and don't tell how long a tick is."""
    if tick is not None:
        return Finding("tick", f"{max(tick, floor / 2):g} s, as the URL says")
    if floor >= 2 * USUAL_TICK_SECONDS:
        words = f"taken to be {floor / 2:g} s, half of the shortest session"
        return Finding("tick", f"{words}; if minSessionTimeout is set, name it: ?tick=SECONDS")
    words = f"taken to be {USUAL_TICK_SECONDS:g} s: the shortest session of {floor:g} s does "
    more = "not tell it. Name it, so that a dead holder is replaced sooner: ?tick=SECONDS"
    return Finding("tick", words + more)
