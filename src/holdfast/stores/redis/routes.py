"""Which node a command goes to: the one server, the master that Sentinel names, or the owner of a
slot in a cluster.

A route is written once over pools of either kind. Error replies about routing are handled here; all
others are returned as ``RedisRefused`` values. A cluster node that hangs or is gone costs only its
own lock names: commands for other nodes go on, and wait only a short time for it.
"""

from __future__ import annotations

import threading
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.resp import RedisRefused, pack
from holdfast.io.wakeups import Messages
from holdfast.stores.redis.connection import Connector, RedisEndpoint
from holdfast.stores.redis.replies import is_final
from holdfast.stores.redis.url import Access, Greeting, NodeAddress

__all__ = [
    "CallNow",
    "ClusterRoute",
    "Pool",
    "Route",
    "SentinelRoute",
    "SingleRoute",
]

T = TypeVar("T")

SILENT_SECONDS = 1.0
"""The longest wait for a node while there are other nodes to ask."""
SLOTS = 16_384
ATTEMPTS = 16
"""How many redirections a command follows while the cluster moves slots."""
MOVING_SECONDS = 0.05
BATCH_SECONDS = 0.25
"""The longest wait of a batch for a slot that is being moved: other replies of it are ready."""
COMMAND_SECONDS = 0.001
"""Additional time of a batch per command."""
_UNSETTLED = ("TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING")
_MOVING = ("MOVED", "ASK", "TRYAGAIN")
Owners = list[NodeAddress | None]
_NOT_MASTER = ("READONLY", "MASTERDOWN", "LOADING")


CallNow = Callable[[bytes, float | None], Any]
"""Takes a packed command and its deadline."""


class Pool(Protocol):
    """The connections to one node."""

    endpoint: RedisEndpoint

    def request(self, packed: bytes, until: float | None = None) -> Awaitable[Any]: ...
    async def requests(
        self, commands: Sequence[bytes], until: float | None = None
    ) -> list[Any]: ...
    async def alone(self, commands: Sequence[bytes], until: float | None = None) -> list[Any]: ...
    def reset(self) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class Route(Protocol):
    """Sends commands to their nodes. ``keys`` has one routing key per command."""

    call_now: CallNow | None
    """``call`` without a coroutine; only with one server and a blocking client."""

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]: ...
    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]: ...
    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]: ...
    async def subscription(self, channel: str, until: float) -> Messages: ...
    async def pools(self) -> list[Pool]: ...
    def refused(self) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


def share(deadline: float, others: int, seconds: float = SILENT_SECONDS) -> float:
    """The deadline of one node: at most half of the remaining time while ``others`` are left."""
    if not others:
        return deadline
    moment = now()
    return moment + min(seconds, max(0.0, deadline - moment) / 2)


class SeedNodes:
    """The nodes to ask about the topology, best first: sentinels, or nodes of a cluster.

    Needs no lock: a race costs at most one needless request.
    """

    def __init__(self) -> None:
        self._last: NodeAddress | None = None
        self.silent: set[NodeAddress] = set()
        """Nodes that did not answer the last request."""

    def in_order(self, addresses: Iterable[NodeAddress]) -> list[NodeAddress]:
        """Sorts addresses: the node of the last good answer first, silent nodes last."""
        return sorted(addresses, key=lambda each: (each in self.silent, each != self._last))

    async def ask(
        self,
        connector: Connector,
        access: Access,
        addresses: Iterable[NodeAddress],
        question: bytes,
        read: Callable[[NodeAddress, Any], T],
        until: float | None,
    ) -> T:
        """The first answer that ``read`` accepts; it raises ``BackendUnavailable`` for any other.
        Raises the same if no node has a good answer."""
        deadline = now() + access.seconds_until(until)
        ordered, failures, final = self.in_order(addresses), [], True
        for others, address in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
            by = share(deadline, others)
            try:
                (reply,) = await connector.once(access, address, question, until=by)
                found = read(address, reply)
            except BackendUnavailable as error:
                self.silent.add(address)
                failures.append(str(error))
                final = final and error.final
                continue
            self._last = address
            self.silent.discard(address)
            return found
        raise BackendUnavailable("; ".join(failures), final=final)


class SingleRoute:
    """One server, always the same."""

    def __init__(
        self, connector: Connector, address: NodeAddress, greeting: Greeting | None
    ) -> None:
        self._connector = connector
        self._pool: Pool = connector.pool(address, greeting)
        self.call_now: CallNow | None = getattr(self._pool, "request_now", None)

    def call(self, packed: bytes, key: str = "", until: float | None = None) -> Awaitable[Any]:
        return self._pool.request(packed, until)

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        return await self._pool.requests(commands, until)

    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]:
        return await self._pool.alone(commands, until)

    async def subscription(self, channel: str, until: float) -> Messages:
        return await self._connector.subscription(self._pool.endpoint.address, channel, until)

    async def pools(self) -> list[Pool]:
        return [self._pool]

    def refused(self) -> None:
        """A replica answered: reconnect, as this address may lead to another server now."""
        self._pool.reset()

    def forget(self) -> None:
        self._pool.forget()

    def close(self) -> None:
        self._pool.close()


class SentinelRoute:
    """The master that the sentinels name. ``moved`` is called when the master has changed."""

    call_now: CallNow | None = None

    def __init__(
        self,
        connector: Connector,
        sentinels: Sequence[NodeAddress],
        sentinel_access: Access,
        service: str,
        greeting: Greeting | None,
        moved: Callable[[], None],
    ) -> None:
        self._connector, self._service, self._greeting = connector, service, greeting
        self._sentinels, self._access, self._moved = list(sentinels), sentinel_access, moved
        self._seed_nodes = SeedNodes()
        self._pool: Pool | None = None
        self._sure = False
        self._changing = threading.Lock()

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        try:
            reply = await pool.request(packed, until)
        except BackendUnavailable:
            self._sure = False
            raise
        if type(reply) is RedisRefused:
            self._judge([reply])
        return reply

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._judged(pool.requests(commands, until))

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
        if any(type(reply) is RedisRefused and reply.code in _NOT_MASTER for reply in replies):
            self.refused()

    async def _find(self, until: float | None = None) -> Pool:
        """Asks the sentinels for the master and opens a pool to it, unless it is unchanged."""
        address = await self._master(until)
        with self._changing:
            known, self._sure = self._pool, True
            if known is not None and known.endpoint.address == address:
                return known
            pool: Pool = self._connector.pool(address, self._greeting)
            self._pool = pool
        if known is not None:
            known.close()
            self._moved()
        return pool

    async def _master(self, until: float | None) -> NodeAddress:
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        connector, access, sentinels = self._connector, self._access, self._sentinels
        try:
            return await self._seed_nodes.ask(
                connector, access, sentinels, question, self._named, until
            )
        except BackendUnavailable as error:
            why = f"no sentinel names a master: {error}"
            raise BackendUnavailable(why, final=error.final) from error

    def _named(self, sentinel: NodeAddress, reply: Any) -> NodeAddress:
        if isinstance(reply, list) and [type(word) for word in reply] == [bytes, bytes]:
            return node_address(reply[0].decode(errors="replace"), reply[1].decode("latin-1"))
        refused = isinstance(reply, RedisRefused)
        says = f"refuses: {reply}" if refused else f"knows no master {self._service!r}"
        raise BackendUnavailable(f"the sentinel at {sentinel} {says}", final=is_final(reply))

    async def subscription(self, channel: str, until: float) -> Messages:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._connector.subscription(pool.endpoint.address, channel, until)

    async def pools(self) -> list[Pool]:
        return [self._pool if self._sure and self._pool is not None else await self._find()]

    def refused(self) -> None:
        """The pool's server is not the master: ask the sentinels before the next request."""
        self._sure = False
        if self._pool is not None:
            self._pool.reset()

    def forget(self) -> None:
        self._changing = threading.Lock()
        if self._pool is not None:
            self._pool.forget()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class ClusterRoute:
    """A cluster: each command goes to the owner of its slot. Any node knows all owners."""

    call_now: CallNow | None = None

    def __init__(
        self, connector: Connector, seeds: Sequence[NodeAddress], greeting: Greeting | None
    ) -> None:
        self._connector, self._greeting = connector, greeting
        self._seeds = list(seeds)
        self._seed_nodes = SeedNodes()
        self._pools: dict[NodeAddress, Pool] = {}
        self._owners: Owners = []
        self._lost: set[NodeAddress] = set()
        """Owners that failed since the last discovery: their slots may have new owners."""

    def _pool(self, address: NodeAddress) -> Pool:
        known = self._pools.get(address)
        if known is not None:
            return known
        # Two threads may do this at once; the pool that loses has opened no connection.
        return self._pools.setdefault(address, self._connector.pool(address, self._greeting))

    def _lose(self, address: NodeAddress) -> None:
        self._lost.add(address)
        self._seed_nodes.silent.add(address)

    async def call(self, packed: bytes, key: str = "", until: float | None = None) -> Any:
        deadline = now() + self._connector.access.seconds_until(until)
        return await self._follow(packed, key_slot(key), until, deadline)

    async def _follow(self, packed: bytes, slot: int, until: float | None, deadline: float) -> Any:
        """Follows redirections, and waits until the deadline for a slot that is being moved."""
        address, asking = await self._owner(slot, until), False
        reply: Any = None
        redirections = 0
        while redirections < ATTEMPTS:
            reply = await self._call_node(address, packed, asking, until)
            if type(reply) is not RedisRefused:
                return reply
            code = reply.code
            if code in ("MOVED", "ASK"):
                redirections += 1
                address, asking = _target(reply, address), code == "ASK"
                if not asking:
                    self._owners[slot : slot + 1] = [address] if self._owners else []
            elif code in _UNSETTLED and now() < deadline:
                await self._connector.sleep(MOVING_SECONDS)
                if code != "TRYAGAIN":
                    self._owners = []
                    address, asking = await self._owner(slot, until), False
            else:
                return reply
        raise BackendUnavailable(f"too many redirections for slot {slot} of the cluster: {reply}")

    async def _call_node(
        self, address: NodeAddress, packed: bytes, asking: bool, until: float | None
    ) -> Any:
        pool = self._pool(address)
        if until is None and address in self._seed_nodes.silent:
            until = now() + SILENT_SECONDS  # the caller may have requests for other nodes
        try:
            if asking:
                reply = (await pool.requests([pack("ASKING"), packed], until))[1]
            else:
                reply = await pool.request(packed, until)
        except BackendUnavailable:
            self._lose(address)
            raise
        if self._seed_nodes.silent:
            self._seed_nodes.silent.discard(address)
        return reply

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        """Sends one batch per node; redirected commands follow one by one. The reply of a command
        that fails is its error, so that the replies of the other nodes are not lost."""
        deadline = now() + self._connector.access.seconds_until(until)
        slots = [key_slot(key) for key in keys]
        owners = await self._owners_of(slots, deadline)
        replies: list[Any] = [None] * len(commands)
        by_node: dict[NodeAddress, list[int]] = {}
        for index, slot in enumerate(slots):
            address = owners[slot]
            if address is None:
                replies[index] = self._no_owner(slot)
            else:
                by_node.setdefault(address, []).append(index)
        ordered = self._seed_nodes.in_order(by_node)
        for others, address in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
            indexes = by_node[address]
            by = self._batch_deadline(address, len(indexes), others, deadline)
            batch = await self._batch(address, [commands[index] for index in indexes], by)
            for index, reply in zip(indexes, batch, strict=True):
                replies[index] = reply
        for index, reply in enumerate(replies):
            if isinstance(reply, RedisRefused) and reply.code in _MOVING:
                replies[index] = await self._followed(commands[index], slots[index], until)
        return replies

    def _batch_deadline(
        self, address: NodeAddress, commands: int, others: int, deadline: float
    ) -> float:
        """The deadline of a node's batch. A silent node gets little time, even as the last one: the
        caller may have more to do."""
        seconds = SILENT_SECONDS + commands * COMMAND_SECONDS
        if address in self._seed_nodes.silent:
            return min(deadline, now() + seconds)
        return share(deadline, others, seconds)

    async def _batch(self, address: NodeAddress, commands: list[bytes], by: float) -> list[Any]:
        try:
            replies = await self._pool(address).requests(commands, by)
        except BackendUnavailable as error:
            self._lose(address)
            return [error] * len(commands)
        self._seed_nodes.silent.discard(address)
        return replies

    async def _followed(self, packed: bytes, slot: int, until: float | None) -> Any:
        """The reply, or the error as a value: a slot that is stuck fails its command only."""
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
            if type(first) is not RedisRefused or first.code not in _MOVING:
                return replies
            # The slot is being moved: ask again until it has arrived.
            await self._connector.sleep(MOVING_SECONDS)
            self._owners = []
        raise BackendUnavailable(f"slot {slot} of the cluster is still being moved")

    # ---- the owners of the slots

    async def _owner(self, slot: int, until: float | None = None) -> NodeAddress:
        owners = self._owners
        if not owners or (self._lost and owners[slot] in self._lost):
            owners = await self._discover(until)
        address = owners[slot]
        if address is None:
            raise self._no_owner(slot)
        return address

    def _no_owner(self, slot: int) -> BackendUnavailable:
        self._owners = []
        return BackendUnavailable(f"no node of the cluster has slot {slot}")

    async def _owners_of(self, slots: Sequence[int], deadline: float) -> Owners:
        """The owners for a batch: discovered again if one of them failed; the known ones if that
        fails."""
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
        connector, nodes, question = self._connector, self._seeds + known, pack("CLUSTER", "SLOTS")
        try:
            owners = await self._seed_nodes.ask(
                connector, connector.access, nodes, question, _slots, until
            )
        except BackendUnavailable as error:
            why = f"no node names the owners of the cluster's slots: {error}"
            raise BackendUnavailable(why, final=error.final) from error
        self._owners = owners
        self._lost.clear()
        self._retire(set(owners))
        return owners

    def _retire(self, owners: set[NodeAddress | None]) -> None:
        """Closes the connections to nodes that no longer own slots."""
        for address in [address for address in list(self._pools) if address not in owners]:
            pool = self._pools.pop(address, None)  # None if another thread was faster
            if pool is not None:
                pool.close()

    async def subscription(self, channel: str, until: float) -> Messages:
        """Subscribes at any node: a message reaches the subscribers of all nodes."""
        deadline = now() + self._connector.access.seconds_until(until)
        ordered = self._seed_nodes.in_order(pool.endpoint.address for pool in await self.pools())
        failures: list[str] = []
        for others, address in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
            try:
                return await self._connector.subscription(address, channel, share(deadline, others))
            except BackendUnavailable as error:
                self._lose(address)
                failures.append(str(error))
        self._owners = []
        raise BackendUnavailable(f"no node accepts a subscription: {'; '.join(failures)}")

    async def pools(self) -> list[Pool]:
        owners = self._owners or await self._discover()
        return [self._pool(address) for address in dict.fromkeys(owners) if address]

    def refused(self) -> None:
        self._owners = []

    def forget(self) -> None:
        for pool in self._pools.values():
            pool.forget()

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.close()


def _slots(seed: NodeAddress, reply: Any) -> Owners:
    """Reads a reply to CLUSTER SLOTS: the owner of each slot."""
    if not isinstance(reply, list) or not reply:
        said = reply if isinstance(reply, RedisRefused) else "no slots"
        raise BackendUnavailable(f"{seed}: {said}", final=is_final(reply))
    owners: Owners = [None] * SLOTS
    try:
        for first, last, master, *_ in reply:
            host, port = master[0].decode() or seed.host, str(master[1])
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"slots {first} to {last}")
            owners[first : last + 1] = [node_address(host, port)] * (last + 1 - first)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise BackendUnavailable(f"{seed}: its reply to CLUSTER SLOTS can't be read") from error
    return owners


def _target(reply: RedisRefused, asked: NodeAddress) -> NodeAddress:
    """The node of a reply ``MOVED 866 host:port``; an empty host is the node that was asked."""
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


def node_address(host: str, port: str) -> NodeAddress:
    """The address of a node in a reply. Raises ``BackendUnavailable`` if it is invalid."""
    # Port 0 would be a UNIX socket: only the user may name one.
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65_536:
        raise BackendUnavailable(f"not the address of a node: {host[:100]!r} {port[:10]!r}")
    return NodeAddress(host, int(port))
