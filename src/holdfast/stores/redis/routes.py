"""Which node a command goes to: the one server, or the master that Sentinel names. The owners of
a cluster's slots are in ``redis_cluster``.

Written once over pools of either kind. A route answers error replies that are not about routing
as ``Refused`` values; routing errors are its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from holdfast.errors import BackendUnavailable
from holdfast.stores.redis.connection import Access, Address, Greeting, Refused, node_address, pack
from holdfast.stores.redis.seeds import Guides

__all__ = ["CallBehind", "CallNow", "Pool", "Route", "SentinelRoute", "SingleRoute", "Wire"]

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
