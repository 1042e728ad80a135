"""Ending claims: one's own, somebody else's, and those whose outcome nobody knows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kazoo.exceptions import BadVersionError

from holdfast.claim import Claim, Grant, Mode
from holdfast.stores.zookeeper.client.packets import Ask, Delete, Listing, Multi, Read, Sync
from holdfast.stores.zookeeper.inspect import token_of
from holdfast.stores.zookeeper.pending import Debt, deletion
from holdfast.stores.zookeeper.queue import SEQUENCE_LIMIT, Line, Place, digest, slots_to_end
from holdfast.stores.zookeeper.session import Session
from holdfast.stores.zookeeper.trips import Trips

__all__ = ["Ending", "was_ours"]


TRIES = 8


def was_ours(ending: Ask) -> bool:
    if isinstance(ending, Multi):
        return not ending.failed
    return ending.error is None


def _changed(ending: Ask) -> bool:
    """Whether a node has taken slots, or said something else, since it was read."""
    results = ending.value if isinstance(ending, Multi) else [ending.error]
    return any(isinstance(result, BadVersionError) for result in results)


class Ending(Trips):
    """The part of the backend that gives back."""

    async def release(self, grant: Grant) -> bool:
        key, ending = self.ending(grant)
        if not ending:
            return False
        await self.ask(await self.ready(key), *ending)
        return was_ours(ending[0])

    def ending(self, grant: Grant) -> tuple[int, list[Ask]]:
        """The key of the hold's session, and what ends it: nothing if the session has."""
        key, number, path = grant.ref
        entry = self.store.entries.pop(grant.claim.owner, None)
        node = None if entry is None else entry.node
        if entry is not None and node is not None:
            node.end()
            if node.path == path:
                key, number = entry.key, node.session
            if entry.unsure or node.path != path:
                late = self.runtime.now() + 2 * self.store.settings.request_seconds
                self.store.debts.owe(Debt(key, grant.claim, late))
        session = self.store.sessions.get(key)
        if session is None or session.id != number:
            return key, []
        parent = self.store.parent(grant.claim.name)
        ending = [deletion(parent, path, grant.slots)]
        if not 0 <= int(path[path.rindex(".") + 1 :]) < SEQUENCE_LIMIT:
            ending.append(Delete(parent))  # fails while somebody is there
        return key, ending

    async def abandon(self, claim: Claim, *, until: float | None = None) -> None:
        entry = self.store.entries.pop(claim.owner, None)
        node = None if entry is None else entry.node
        if node is not None:
            node.end()
        key = entry.key if entry is not None else math.ceil(claim.ttl)
        known = self.store.sessions.get(key)
        if known is None or not known.used:
            return  # nothing was ever sent
        # Should this fail, the session's thread goes on trying for as long as there is a session.
        debt = self.store.debts.owe(Debt(key, claim, 0.0))
        session = await self.ready(key, until)
        parent = self.store.parent(claim.name)
        listing = Listing(parent)
        asks: list[Ask] = [Sync(parent), listing]
        if node is not None and claim.mode is not Mode.SLOTS:
            asks.insert(0, Delete(node.path))
        await self.ask(session, *asks, until=until)
        if listing.error is None:
            line = Line(listing.value, self.where(claim.name))
            await self._delete(session, parent, line.of_owner(digest(claim.owner)), until)
        self.store.debts.settled(debt)

    async def _delete(
        self, session: Session, parent: str, places: Sequence[Place], until: float | None = None
    ) -> list[int]:
        """Deletes claims with whatever slots they have; the tokens of those that were there."""
        tokens: list[int] = []
        for _ in range(TRIES):
            reads = [Read(f"{parent}/{place.node}") for place in places]
            if not reads:
                break
            await self.ask(session, *reads, until=until)
            ends: list[tuple[Place, int, Ask]] = []
            for place, read in zip(places, reads, strict=True):
                if read.error is None:
                    data, stat = slots_to_end(read.value[0]), read.value[1]
                    end = deletion(parent, read.path, data.slots, stat.version)
                    ends.append((place, token_of(place.mode, data, stat), end))
            if ends:
                await self.ask(session, *(end for _, _, end in ends), until=until)
            tokens += [token for _, token, end in ends if was_ours(end)]
            places = [place for place, _, end in ends if _changed(end)]
        return tokens

    async def revoke(self, name: str) -> list[int]:
        session = await self.looking()
        parent = self.store.parent(name)
        listing = Listing(parent)
        await self.ask(session, Sync(parent), listing)
        if listing.error is not None:
            return []
        line = Line(listing.value, self.where(name))
        return await self._delete(session, parent, line.places[: line.admitted])
