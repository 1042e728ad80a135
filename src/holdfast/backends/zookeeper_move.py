"""Moving a hold to a longer session, for ``extend(ttl=…)``.

A node can't change its session. So one transaction deletes it and makes it again under the same
name, which is its place in the line; its data keeps the token, since the new zxid is higher.
"""

from __future__ import annotations

import math

from holdfast.backends.zookeeper_line import NodeData, slot_name, write_data
from holdfast.backends.zookeeper_store import Entry
from holdfast.backends.zookeeper_trips import Trips
from holdfast.claim import Claim
from holdfast.errors import BackendUnavailable
from holdfast.wires.zookeeper_asks import Ask, Delete, Ephemeral, Multi, Read

__all__ = ["ENDED", "Moving"]

ENDED = "its ZooKeeper session has ended"


class Moving(Trips):
    """The part of the backend that changes a hold's session."""

    async def move(self, entry: Entry, claim: Claim, until: float) -> None:
        """Puts a hold on the session of a longer ttl; a hold that is gone keeps its session."""
        assert entry.grant is not None
        session = await self.ready(math.ceil(claim.ttl), until)
        number, acl = session.id, self.store.acl
        grant, parent = entry.grant, self.store.parent(claim.name)
        data = NodeData(math.ceil(claim.ttl), 0, grant.slots, grant.token, claim.label)
        parts: list[Ask] = [Delete(entry.path), Ephemeral(entry.path, write_data(data), acl)]
        for slot in grant.slots:
            path = f"{parent}/{slot_name(slot)}"
            parts += [Delete(path), Ephemeral(path, b"", acl)]
        entry.moving = math.ceil(claim.ttl)
        multi = Multi(parts)
        await self.ask(session, multi, until=until)
        if session.id != number:
            raise BackendUnavailable(f"{self.store.display}: the session has just ended")
        if not multi.failed:
            entry.key, entry.session = entry.moving, number
        entry.moving = 0

    async def find_session(self, entry: Entry, until: float) -> None:
        """A move was not answered: asks to which session the node belongs now."""
        session = await self.ready(entry.key, until)
        read = Read(entry.path)
        await self.ask(session, read, until=until)
        if read.error is None:
            owner = read.value[1].ephemeral_owner
            for key in (entry.key, entry.moving):
                known = self.store.sessions.get(key)
                if known is not None and known.id == owner:
                    entry.key, entry.session = key, owner
        entry.moving = 0
