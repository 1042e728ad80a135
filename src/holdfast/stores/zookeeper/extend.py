"""Moving a hold to a longer session, for ``extend(ttl=…)``.

A node can't change its session. So one transaction deletes it and makes it again under the same
name, which is its place in the line; its data keeps the token, since the new zxid is higher.
"""

from __future__ import annotations

import math

from holdfast.claim import Grant
from holdfast.errors import BackendUnavailable
from holdfast.stores.zookeeper.client.packets import Ask, Delete, Ephemeral, Multi, Read
from holdfast.stores.zookeeper.node import Entry, Node
from holdfast.stores.zookeeper.queue import NodeData, slot_name, write_data
from holdfast.stores.zookeeper.trips import Trips

__all__ = ["ENDED", "Moving"]

ENDED = "its ZooKeeper session has ended"


class Moving(Trips):
    """The part of the backend that changes a hold's session."""

    async def move(self, entry: Entry, node: Node, grant: Grant, until: float) -> None:
        """Puts a hold on the session of a longer ttl; a hold that is gone keeps its session."""
        claim = grant.claim
        session = await self.ready(math.ceil(claim.ttl), until)
        number, acl = session.id, self.store.acl
        parent = self.store.parent(claim.name)
        data = NodeData(math.ceil(claim.ttl), 0, grant.slots, grant.token, claim.label)
        parts: list[Ask] = [Delete(node.path), Ephemeral(node.path, write_data(data), acl)]
        for slot in grant.slots:
            path = f"{parent}/{slot_name(slot)}"
            parts += [Delete(path), Ephemeral(path, b"", acl)]
        node.moving = math.ceil(claim.ttl)
        multi = Multi(parts)
        await self.ask(session, multi, until=until)
        if session.id != number:
            raise BackendUnavailable(f"{self.store.display}: the session has just ended")
        if not multi.failed:
            entry.key, node.session = node.moving, number
        node.moving = 0

    async def find_session(self, entry: Entry, node: Node, until: float) -> None:
        """A move was not answered: asks to which session the node belongs now."""
        session = await self.ready(entry.key, until)
        read = Read(node.path)
        await self.ask(session, read, until=until)
        if read.error is None:
            owner = read.value[1].ephemeral_owner
            for key in (entry.key, node.moving):
                known = self.store.sessions.get(key)
                if known is not None and known.id == owner:
                    entry.key, node.session = key, owner
        node.moving = 0
