"""Which node of a Redis Cluster a command goes to: the owner of its slot, as any node tells it.

A node that hangs or is gone costs its own names only: the others' commands go where they went, and
nobody waits long for it on their account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.redis.connection import (
    SLOTS,
    Address,
    Greeting,
    Refused,
    key_slot,
    node_address,
    pack,
)
from holdfast.stores.redis.routes import CallBehind, CallNow, Pool, Wire
from holdfast.stores.redis.seeds import HUNG_SECONDS, Guides, share

__all__ = ["ClusterRoute"]

ATTEMPTS = 16
"""How often a command follows the slots of a cluster that is being rearranged."""
MOVING_SECONDS = 0.05
BATCH_SECONDS = 0.25
"""How long a batch waits for a slot that is on its way: it has answers for others to bring."""
COMMAND_SECONDS = 0.001
"""How much longer a batch may take for each command."""
_UNSETTLED = ("TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING")
_ON_ITS_WAY = ("MOVED", "ASK", "TRYAGAIN")
Owners = list[Address | None]


class ClusterRoute:
    """The owners of the slots, as any node of the cluster tells it."""

    now: CallNow | None = None
    behind: CallBehind | None = None

    def __init__(self, wire: Wire, seeds: Sequence[Address], greeting: Greeting | None) -> None:
        self._wire, self._greeting = wire, greeting
        self._seeds = list(seeds)
        self._guides = Guides()
        self._pools: dict[Address, Pool] = {}
        self._owners: Owners = []
        self._lost: set[Address] = set()
        """Owners that did not answer since they were told: others may have their slots by now."""

    def _pool(self, address: Address) -> Pool:
        known = self._pools.get(address)
        if known is not None:
            return known
        # Two threads may come here at once; a pool that is not used has opened nothing.
        return self._pools.setdefault(address, self._wire.pool(address, self._greeting))

    def _lose(self, address: Address) -> None:
        self._lost.add(address)
        self._guides.silent.add(address)

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        deadline = now() + self._wire.access.seconds_until(until)
        return await self._follow(packed, key_slot(key), until, deadline)

    async def _follow(self, packed: bytes, slot: int, until: float | None, deadline: float) -> Any:
        """Goes where it is sent, and waits until the deadline for a slot that is on its way."""
        address, asking = await self._owner(slot, until), False
        reply: Any = None
        sent_on = 0
        while sent_on < ATTEMPTS:
            reply = await self._ask(address, packed, asking, until)
            if type(reply) is not Refused:
                return reply
            code = reply.code
            if code in ("MOVED", "ASK"):
                sent_on += 1
                address, asking = _target(reply, address), code == "ASK"
                if not asking:
                    self._owners[slot : slot + 1] = [address] if self._owners else []
            elif code in _UNSETTLED and now() < deadline:
                await self._wire.sleep(MOVING_SECONDS)
                if code != "TRYAGAIN":
                    self._owners = []
                    address, asking = await self._owner(slot, until), False
            else:
                return reply
        raise BackendUnavailable(f"the cluster does not settle who has slot {slot}: {reply}")

    async def _ask(self, address: Address, packed: bytes, asking: bool, until: float | None) -> Any:
        pool = self._pool(address)
        if until is None and address in self._guides.silent:
            until = now() + HUNG_SECONDS  # whoever waits here may have others to see to
        try:
            if asking:
                reply = (await pool.calls([pack("ASKING"), packed], until))[1]
            else:
                reply = await pool.call(packed, "", until)
        except BackendUnavailable:
            self._lose(address)
            raise
        if self._guides.silent:
            self._guides.silent.discard(address)
        return reply

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        """One batch per node; what a node no longer has is asked for again, one by one. What can't
        be had is answered by its error: the other nodes' part is still worth it."""
        deadline = now() + self._wire.access.seconds_until(until)
        slots = [key_slot(key) for key in keys]
        owners = await self._owners_of(slots, deadline)
        replies: list[Any] = [None] * len(commands)
        places: dict[Address, list[int]] = {}
        for index, slot in enumerate(slots):
            address = owners[slot]
            if address is None:
                replies[index] = self._nobody_has(slot)
            else:
                places.setdefault(address, []).append(index)
        turns = self._guides.in_turn(places)
        for others, address in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            indexes = places[address]
            by = self._patience(address, len(indexes), others, deadline)
            batch = await self._batch(address, [commands[index] for index in indexes], by)
            for index, reply in zip(indexes, batch, strict=True):
                replies[index] = reply
        for index, reply in enumerate(replies):
            if isinstance(reply, Refused) and reply.code in _ON_ITS_WAY:
                replies[index] = await self._followed(commands[index], slots[index], until)
        return replies

    def _patience(self, address: Address, commands: int, others: int, deadline: float) -> float:
        """Until when a node's batch may take. One that did not answer before gets little time, also
        as the last: there may be more to do soon."""
        seconds = HUNG_SECONDS + commands * COMMAND_SECONDS
        if address in self._guides.silent:
            return min(deadline, now() + seconds)
        return share(deadline, others, seconds)

    async def _batch(self, address: Address, commands: list[bytes], by: float) -> list[Any]:
        try:
            replies = await self._pool(address).calls(commands, by)
        except BackendUnavailable as error:
            self._lose(address)
            return [error] * len(commands)
        self._guides.silent.discard(address)
        return replies

    async def _followed(self, packed: bytes, slot: int, until: float | None) -> Any:
        """Where one slot is stuck on its way, all others of a batch are answered all the same."""
        try:
            return await self._follow(packed, slot, until, now() + BATCH_SECONDS)
        except BackendUnavailable as error:
            return error

    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]:
        slot = key_slot(key)
        for _ in range(ATTEMPTS):
            address = await self._owner(slot, until)
            try:
                replies = await self._pool(address).alone(commands, until)
            except BackendUnavailable:
                self._lose(address)
                raise
            first = replies[0]
            if type(first) is not Refused or first.code not in _ON_ITS_WAY:
                return replies
            # A slot on its way elsewhere: look again until it has arrived.
            await self._wire.sleep(MOVING_SECONDS)
            self._owners = []
        raise BackendUnavailable(f"the cluster does not settle who has slot {slot}")

    # ---- who has which slots

    async def _owner(self, slot: int, until: float | None = None) -> Address:
        owners = self._owners
        if not owners or (self._lost and owners[slot] in self._lost):
            owners = await self._discover(until)
        address = owners[slot]
        if address is None:
            raise self._nobody_has(slot)
        return address

    def _nobody_has(self, slot: int) -> BackendUnavailable:
        self._owners = []
        return BackendUnavailable(f"no node of the cluster has slot {slot}")

    async def _owners_of(self, slots: Sequence[int], deadline: float) -> Owners:
        """For a batch: asked for anew where one of them was lost, kept if nobody can tell."""
        owners = self._owners
        if owners and not (self._lost and any(owners[slot] in self._lost for slot in slots)):
            return owners
        try:
            return await self._discover(share(deadline, 1) if owners else deadline)
        except BackendUnavailable:
            if not owners:
                raise
            return owners

    async def _discover(self, until: float | None = None) -> Owners:
        known = [address for address in list(self._pools) if address not in self._seeds]
        wire, nodes, question = self._wire, self._seeds + known, pack("CLUSTER", "SLOTS")
        try:
            owners = await self._guides.ask(wire, wire.access, nodes, question, _slots, until)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"no node tells the cluster's slots: {error}") from error
        self._owners = owners
        self._lost.clear()
        await self._retire(set(owners))
        return owners

    async def _retire(self, owners: set[Address | None]) -> None:
        """Closes the connections to nodes that have no slots any more."""
        for address in [address for address in list(self._pools) if address not in owners]:
            pool = self._pools.pop(address, None)  # unless another thread was faster
            if pool is not None:
                await pool.close()

    async def subscription(self, channel: str, until: float) -> Any:
        """A message reaches the subscribers of every node: any will do."""
        deadline = now() + self._wire.access.seconds_until(until)
        turns = self._guides.in_turn(pool.address for pool in await self.pools())
        failures: list[str] = []
        for others, address in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            try:
                return await self._wire.subscription(address, channel, share(deadline, others))
            except BackendUnavailable as error:
                self._lose(address)
                failures.append(str(error))
        self._owners = []
        raise BackendUnavailable(f"no node takes a subscription: {'; '.join(failures)}")

    async def pools(self) -> list[Pool]:
        owners = self._owners or await self._discover()
        return [self._pool(address) for address in dict.fromkeys(owners) if address]

    def refused(self) -> None:
        self._owners = []

    def forget(self) -> None:
        for pool in self._pools.values():
            pool.forget()

    async def close(self) -> None:
        for pool in list(self._pools.values()):
            await pool.close()


def _slots(seed: Address, reply: Any) -> Owners:
    """The owners of all slots, as a node tells them."""
    if not isinstance(reply, list) or not reply:
        said = reply if isinstance(reply, Refused) else "no slots"
        raise BackendUnavailable(f"{seed}: {said}")
    owners: Owners = [None] * SLOTS
    try:
        for first, last, master, *_ in reply:
            host, port = master[0].decode() or seed.host, str(master[1])
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"slots {first} to {last}")
            owners[first : last + 1] = [node_address(host, port)] * (last + 1 - first)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise BackendUnavailable(f"{seed}: its slots are not understood") from error
    return owners


def _target(reply: Refused, asked: Address) -> Address:
    """The node that ``MOVED 866 host:port`` names; an empty host means the one that was asked."""
    host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
    return node_address(host or asked.host, port)
