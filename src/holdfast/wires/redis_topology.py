"""Which node a command goes to: the one server, the master that Sentinel names, or a slot's owner.

Written once over pools of either kind. A route answers error replies that are not about routing
as ``Refused`` values; routing errors are its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from holdfast.errors import BackendUnavailable
from holdfast.runtimes.clock import now
from holdfast.wires.redis import SLOTS, Access, Address, Greeting, Refused, key_slot, pack

__all__ = ["ClusterRoute", "Pool", "Route", "SentinelRoute", "SingleRoute", "Wire"]

ATTEMPTS = 16
"""How often a command follows the slots of a cluster that is being rearranged."""
MOVING_SECONDS = 0.05
BATCH_SECONDS = 0.25
"""How long a batch waits for a slot that is on its way: it has answers for others to bring."""
_UNSETTLED = ("TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING")
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
    async def bell(self, address: Address, channel: str, until: float | None = None) -> Any: ...
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
    async def bell(self, channel: str, until: float) -> Any: ...
    async def pools(self) -> list[Pool]: ...
    def refused(self) -> None: ...
    def forget(self) -> None: ...
    async def close(self) -> None: ...


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

    async def bell(self, channel: str, until: float) -> Any:
        return await self._wire.bell(self._pool.address, channel, until)

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
        failures: list[str] = []
        for sentinel in list(self._sentinels):
            try:
                (reply,) = await self._wire.once(self._access, sentinel, question, until=until)
            except BackendUnavailable as error:
                failures.append(str(error))
                continue
            if isinstance(reply, list) and len(reply) == 2:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return Address(reply[0].decode(), int(reply[1]))
            refused = isinstance(reply, Refused)
            says = f"refuses: {reply}" if refused else f"knows no master {self._service!r}"
            failures.append(f"the sentinel at {sentinel} {says}")
        raise BackendUnavailable(f"no sentinel names a master: {'; '.join(failures)}")

    async def bell(self, channel: str, until: float) -> Any:
        pool = self._pool if self._sure and self._pool is not None else await self._find(until)
        return await self._wire.bell(pool.address, channel, until)

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
        self._pools: dict[Address, Pool] = {}
        self._owners: list[Address | None] = []

    def _pool(self, address: Address) -> Pool:
        known = self._pools.get(address)
        if known is not None:
            return known
        # Two threads may come here at once; a pool that is not used has opened nothing.
        return self._pools.setdefault(address, self._wire.pool(address, self._greeting))

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
        try:
            if asking:
                return (await pool.calls([pack("ASKING"), packed], until))[1]
            return await pool.call(packed, "", until)
        except BackendUnavailable:
            self._owners = []  # it may be gone for good: ask who has its slots now
            raise

    async def calls(
        self, commands: Sequence[bytes], keys: Sequence[str], until: float | None = None
    ) -> list[Any]:
        """One batch per node; what a node no longer has is asked for again, one by one."""
        places: dict[Address, list[int]] = {}
        for index, key in enumerate(keys):
            places.setdefault(await self._owner(key_slot(key), until), []).append(index)
        replies: list[Any] = [None] * len(commands)
        for address, indexes in places.items():
            try:
                mine = [commands[index] for index in indexes]
                batch = await self._pool(address).calls(mine, until)
            except BackendUnavailable as error:
                self._owners = []
                batch = [error] * len(indexes)  # the other nodes' part is still worth it
            for index, reply in zip(indexes, batch, strict=True):
                replies[index] = reply
        for index, reply in enumerate(replies):
            if isinstance(reply, Refused) and reply.code in ("MOVED", "ASK", "TRYAGAIN"):
                replies[index] = await self._followed(commands[index], keys[index], until)
        return replies

    async def _followed(self, packed: bytes, key: str, until: float | None) -> Any:
        """Where one slot is stuck on its way, all others of a batch are answered all the same."""
        try:
            return await self._follow(packed, key_slot(key), until, now() + BATCH_SECONDS)
        except BackendUnavailable as error:
            return error

    async def alone(
        self, commands: Sequence[bytes], key: str, until: float | None = None
    ) -> list[Any]:
        slot = key_slot(key)
        for _ in range(ATTEMPTS):
            replies = await self._pool(await self._owner(slot, until)).alone(commands, until)
            first = replies[0]
            if type(first) is not Refused or first.code not in ("MOVED", "ASK", "TRYAGAIN"):
                return replies
            # A slot on its way elsewhere: look again until it has arrived.
            await self._wire.sleep(MOVING_SECONDS)
            self._owners = []
        raise BackendUnavailable(f"the cluster does not settle who has slot {slot}")

    async def _owner(self, slot: int, until: float | None = None) -> Address:
        owners = self._owners or await self._discover(until)
        address = owners[slot]
        if address is None:
            self._owners = []
            raise BackendUnavailable(f"no node of the cluster has slot {slot}")
        return address

    async def _discover(self, until: float | None = None) -> list[Address | None]:
        failures: list[str] = []
        question = pack("CLUSTER", "SLOTS")
        known = [address for address in self._pools if address not in self._seeds]
        for seed in self._seeds + known:
            try:
                access = self._wire.access
                (reply,) = await self._wire.once(access, seed, question, until=until)
            except BackendUnavailable as error:
                failures.append(str(error))
                continue
            if isinstance(reply, list) and reply:
                owners: list[Address | None] = [None] * SLOTS
                for first, last, master, *_ in reply:
                    address = Address(master[0].decode() or seed.host, master[1])
                    owners[first : last + 1] = [address] * (last + 1 - first)
                self._owners = owners
                await self._retire(set(owners))
                return owners
            failures.append(f"{seed}: {reply if isinstance(reply, Refused) else 'no slots'}")
        raise BackendUnavailable(f"no node tells the cluster's slots: {'; '.join(failures)}")

    async def _retire(self, owners: set[Address | None]) -> None:
        """Closes the connections to nodes that have no slots any more."""
        for address in [address for address in list(self._pools) if address not in owners]:
            await self._pools.pop(address).close()

    async def bell(self, channel: str, until: float) -> Any:
        """A message reaches the subscribers of every node: any will do."""
        failures: list[str] = []
        for pool in await self.pools():
            try:
                return await self._wire.bell(pool.address, channel, until)
            except BackendUnavailable as error:
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
        for pool in self._pools.values():
            await pool.close()


def _target(reply: Refused, asked: Address) -> Address:
    """The node that ``MOVED 866 host:port`` names; an empty host means the one that was asked."""
    host, _, port = str(reply).split(" ")[2].rpartition(":")
    return Address(host or asked.host, int(port))
