"""Holders and waiters of a name as people are shown them, from a listing and its nodes' data."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Holder, Label, LockInfo, Mode, Waiter, read_holds, read_label
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

__all__ = ["FEW_SHOWN", "MOST_SHOWN", "read_lock_info", "read_queue", "tick_finding", "token_of"]

MOST_SHOWN = 1000
"""How many claims of one name are read and shown at most."""
FEW_SHOWN = 4
"""How many holders are read for a message."""


def token_of(mode: Mode, data: NodeData, stat: Stat) -> int:
    """A holder's token: the zxid of its node's creation, or for slots of its last change. A node
    does not change after it has taken slots."""
    return data.token or (stat.mzxid if mode is Mode.SLOTS else stat.czxid)


def read_queue(listing: Listing, where: str) -> NodeQueue | Incompatible:
    """The queue of a name, or the error if it can't be read."""
    try:
        return NodeQueue(listing.value or (), where)
    except Incompatible as error:
        return error


def read_lock_info(
    name: str, queue: NodeQueue, reads: Sequence[Read], where: str
) -> LockInfo | Incompatible:
    """Holders and waiters of a name, or the error if the data of a node can't be read."""
    try:
        return _lock_info(name, queue, reads, where)
    except Incompatible as error:
        return error


def _lock_info(name: str, queue: NodeQueue, reads: Sequence[Read], where: str) -> LockInfo:
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    for index, (queued, read) in enumerate(zip(queue.claims, reads, strict=False)):
        if read.error is not None:
            continue  # deleted since the listing
        data, stat = read_data(read.value[0], where), read.value[1]
        label = read_label(data.label)
        slots_missing = queued.mode is Mode.SLOTS and not data.slots
        if index < queue.admitted and not slots_missing:
            holders.append(_holder(label, queued, data, stat))
        else:
            since, holds = stat.ctime / 1000, read_holds(data.label)
            waiters.append(Waiter(*label, queued.mode, since, data.behind, holds))
    limit = queue.claims[0].limit if queue.claims else 0
    return LockInfo(name, limit, tuple(holders), tuple(waiters))


def _holder(label: Label, queued: QueuedNode, data: NodeData, stat: Stat) -> Holder:
    since = stat.mtime if queued.mode is Mode.SLOTS else stat.ctime
    token = token_of(queued.mode, data, stat)
    # Servers don't show when they last received a heartbeat: the whole ttl is the upper bound.
    return Holder(*label, queued.mode, token, data.slots, since / 1000, float(data.ttl))


def tick_finding(tick: float | None, floor: float) -> Finding:
    """The assumed length of a tick, on which the certain time of holds depends: followers report
    heartbeats to the leader every half tick, and no server shows how long a tick is."""
    if tick is not None:
        return Finding("tick", f"{max(tick, floor / 2):g} s, as the URL says")
    if floor >= 2 * USUAL_TICK_SECONDS:
        detail = f"assumed to be {floor / 2:g} s, half of the shortest session"
        advice = "if the servers set minSessionTimeout, add their tick to the URL: ?tick=SECONDS"
        return Finding("tick", f"{detail}; {advice}")
    detail = (
        f"assumed to be {USUAL_TICK_SECONDS:g} s: the shortest session of {floor:g} s does not "
    )
    advice = "show it. Add it to the URL to replace a dead holder sooner: ?tick=SECONDS"
    return Finding("tick", detail + advice)
