"""Which node a command goes to: the one server, or the master that Sentinel names, or the owner of
a cluster's slot.

Written once over pools of either kind. A route answers error replies that are not about routing
as ``Refused`` values; routing errors are its own business.
"""

from __future__ import annotations

import asyncio
import threading
import time
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.resp import Refused, pack
from holdfast.stores.redis.aio import AsyncLink, AsyncPool
from holdfast.stores.redis.blocking import BlockingLink, BlockingPool
from holdfast.stores.redis.replies import unreachable
from holdfast.stores.redis.url import Access, Address, Greeting
from holdfast.stores.redis.wakeups import (
    AsyncSubscription,
    AsyncWakeups,
    BlockingSubscription,
    BlockingWakeups,
)

__all__ = [
    "AsyncWire",
    "BlockingWire",
    "CallBehind",
    "CallNow",
    "ClusterRoute",
    "Pool",
    "Route",
    "SentinelRoute",
    "SingleRoute",
    "Wire",
]

T = TypeVar("T")

HUNG_SECONDS = 1.0
"""How long one is waited for while there are others to ask."""
SLOTS = 16_384
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
_NOT_MASTER = ("READONLY", "MASTERDOWN", "LOADING")


CallNow = Callable[..., Any]
"""A packed command, by when it is given up, and whether its reply comes behind what it tells."""
CallBehind = Callable[[bytes], Awaitable[Any]]


class Pool(Protocol):
    """The connections to one node."""

    address: Address

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]: ...
    async def calls(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]: ...
    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]: ...
    def reset(self) -> None: ...
    def forget(self) -> None: ...
    async def close(self) -> None: ...


class Wire(Protocol):
    """Blocking or asyncio."""

    access: Access

    def pool(self, address: Address, greeting: Greeting | None) -> Any: ...
    async def once(
        self, access: Access, address: Address, *commands: bytes, until: float | None = None
    ) -> list[Any]: ...
    async def subscription(
        self, address: Address, channel: str, until: float | None = None
    ) -> Any: ...
    async def sleep(self, seconds: float) -> None: ...


class Route(Protocol):
    """Where commands go. Keys are the routing keys of their commands, one each."""

    now: CallNow | None
    """``call`` without a coroutine in between, where one blocking server is all there is."""
    behind: CallBehind | None
    """``call`` with a reply that comes behind what is told others, for one server's tasks."""

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]: ...
    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]: ...
    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]: ...
    async def subscription(self, channel: str, until: float) -> Any: ...
    async def pools(self) -> list[Pool]: ...
    def refused(self) -> None: ...
    def forget(self) -> None: ...
    async def close(self) -> None: ...


class BlockingWire:
    """Makes what talks to nodes, for blocking backends."""

    blocking = True

    def __init__(self, access: Access, connections: int) -> None:
        self.access, self.connections = access, connections

    def pool(self, address: Address, greeting: Greeting | None) -> BlockingPool:
        return BlockingPool(self.access, address, self.connections, greeting)

    async def once(
        self, access: Access, address: Address, *commands: bytes, until: float | None = None
    ) -> list[Any]:
        """Opens a connection for a few commands and closes it."""
        link = BlockingLink(access, address, until)
        try:
            link.limit(access.seconds_until(until))
            return [link.call(command) for command in commands]
        finally:
            link.close()

    async def subscription(
        self, address: Address, channel: str, until: float | None = None
    ) -> BlockingSubscription:
        link = BlockingLink(self.access, address, until)
        link.limit(self.access.seconds_until(until))
        return BlockingSubscription(link, channel)

    def wakeups(self, channel: str) -> BlockingWakeups:
        return BlockingWakeups(channel)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class AsyncWire:
    """Makes what talks to nodes, for asyncio backends."""

    blocking = False

    def __init__(self, access: Access, connections: int) -> None:
        self.access, self.connections = access, connections

    def pool(self, address: Address, greeting: Greeting | None) -> AsyncPool:
        return AsyncPool(self.access, address, self.connections, greeting)

    async def once(
        self, access: Access, address: Address, *commands: bytes, until: float | None = None
    ) -> list[Any]:
        """Opens a connection for a few commands and closes it."""
        seconds = access.seconds_until(until)
        link = await AsyncLink.open(access, address, until)
        try:
            async with asyncio.timeout(access.seconds_until(until)):
                return [await link.request(command) for command in commands]
        except TimeoutError as error:
            raise unreachable(address, error, seconds) from error
        finally:
            link.close()

    async def subscription(
        self, address: Address, channel: str, until: float | None = None
    ) -> AsyncSubscription:
        return await AsyncSubscription.open(self.access, address, channel, until)

    def wakeups(self, channel: str) -> AsyncWakeups:
        return AsyncWakeups(channel)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def share(deadline: float, others: int, seconds: float = HUNG_SECONDS) -> float:
    """Until when one may take: never more than half of the time while others are still to come."""
    if not others:
        return deadline
    moment = now()
    return moment + min(seconds, max(0.0, deadline - moment) / 2)


class Guides:
    """Who of them was of use last. Needs no lock: at worst somebody is asked in vain."""

    def __init__(self) -> None:
        self._last: Address | None = None
        self.silent: set[Address] = set()
        """Those that did not answer when they were asked last."""

    def in_turn(self, addresses: Iterable[Address]) -> list[Address]:
        """The one that knew the way last comes first, those that did not answer come last."""
        return sorted(addresses, key=lambda each: (each in self.silent, each != self._last))

    async def ask(
        self,
        wire: Wire,
        access: Access,
        addresses: Iterable[Address],
        question: bytes,
        read: Callable[[Address, Any], T],
        until: float | None,
    ) -> T:
        """What the first one says that ``read`` makes sense of: it raises where there is none."""
        deadline = now() + access.seconds_until(until)
        turns, failures = self.in_turn(addresses), []
        for others, address in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            by = share(deadline, others)
            try:
                (reply,) = await wire.once(access, address, question, until=by)
                found = read(address, reply)
            except BackendUnavailable as error:
                self.silent.add(address)
                failures.append(str(error))
                continue
            self._last = address
            self.silent.discard(address)
            return found
        raise BackendUnavailable("; ".join(failures))


class SingleRoute:
    """One server, always the same."""

    def __init__(self, wire: Wire, address: Address, greeting: Greeting | None) -> None:
        self._wire = wire
        self._pool: Pool = wire.pool(address, greeting)
        self.call = self._pool.call  # no step in between on the usual way
        self.now: CallNow | None = getattr(self._pool, "call_now", None)
        self.behind: CallBehind | None = getattr(self._pool, "call_behind", None)

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        return await self._pool.calls(commands, until)

    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]:
        return await self._pool.alone(commands, until)

    async def subscription(self, channel: str, until: float) -> Any:
        return await self._wire.subscription(self._pool.address, channel, until)

    async def pools(self) -> list[Pool]:
        return [self._pool]

    def refused(self) -> None:
        """A replica answered: behind this address may be another server by now."""
        self._pool.reset()

    def forget(self) -> None:
        self._pool.forget()

    async def close(self) -> None:
        await self._pool.close()


class SentinelRoute:
    """The master that the sentinels name. ``moved`` is called when it is another one."""

    now: CallNow | None = None
    behind: CallBehind | None = None

    def __init__(
        self,
        wire: Wire,
        sentinels: Sequence[Address],
        sentinel_access: Access,
        service: str,
        greeting: Greeting | None,
        moved: Callable[[], None],
    ) -> None:
        self._wire, self._service, self._greeting = wire, service, greeting
        self._sentinels, self._access, self._moved = list(sentinels), sentinel_access, moved
        self._guides = Guides()
        self._pool: Pool | None = None
        self._sure = False
        self._changing = threading.Lock()

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        try:
            reply = await pool.call(packed, "", until)
        except BackendUnavailable:
            self._sure = False
            raise
        if type(reply) is Refused:
            self._judge([reply])
        return reply

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._judged(pool.calls(commands, until))

    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._judged(pool.alone(commands, until))

    async def _judged(self, batch: Awaitable[list[Any]]) -> list[Any]:
        try:
            replies = await batch
        except BackendUnavailable:
            self._sure = False
            raise
        self._judge(replies)
        return replies

    def _judge(self, replies: Sequence[Any]) -> None:
        if any(type(reply) is Refused and reply.code in _NOT_MASTER for reply in replies):
            self.refused()

    async def _find(self, until: float | None = None) -> Pool:
        """Asks the sentinels, the one that knew last first."""
        address = await self._master(until)
        with self._changing:
            known, self._sure = self._pool, True
            if known is not None and known.address == address:
                return known
            pool: Pool = self._wire.pool(address, self._greeting)
            self._pool = pool
        if known is not None:
            await known.close()
            self._moved()
        return pool

    async def _master(self, until: float | None) -> Address:
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        wire, access, sentinels = self._wire, self._access, self._sentinels
        try:
            return await self._guides.ask(wire, access, sentinels, question, self._named, until)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"no sentinel names a master: {error}") from error

    def _named(self, sentinel: Address, reply: Any) -> Address:
        if isinstance(reply, list) and [type(word) for word in reply] == [bytes, bytes]:
            return node_address(reply[0].decode(errors="replace"), reply[1].decode("latin-1"))
        refused = isinstance(reply, Refused)
        says = f"refuses: {reply}" if refused else f"knows no master {self._service!r}"
        raise BackendUnavailable(f"the sentinel at {sentinel} {says}")

    async def subscription(self, channel: str, until: float) -> Any:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._wire.subscription(pool.address, channel, until)

    async def pools(self) -> list[Pool]:
        return [self._pool if self._sure and self._pool is not None else await self._find()]

    def refused(self) -> None:
        """This is no longer the master: ask again who is."""
        self._sure = False
        if self._pool is not None:
            self._pool.reset()

    def forget(self) -> None:
        self._changing = threading.Lock()
        if self._pool is not None:
            self._pool.forget()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


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


def key_slot(key: str) -> int:
    """The Cluster slot of a key."""
    data = key.encode()
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return crc_hqx(data, 0) % SLOTS


def node_address(host: str, port: str) -> Address:
    """A node as another one names it; ``BackendUnavailable`` if that is no address."""
    if not host or not port.isdecimal() or len(port) > 5:
        raise BackendUnavailable(f"not the address of a node: {host[:100]!r} {port[:10]!r}")
    return Address(host, int(port))
