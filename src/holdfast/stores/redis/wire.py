"""Makes what talks to Redis nodes: a blocking and an asyncio wire with the same words."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from holdfast.stores.redis.aio import AsyncLink, AsyncPool
from holdfast.stores.redis.blocking import BlockingLink, BlockingPool
from holdfast.stores.redis.connection import Access, Address, Greeting, unreachable
from holdfast.stores.redis.wakeups import BlockingSubscription, BlockingWakeups
from holdfast.stores.redis.wakeups_aio import AsyncSubscription, AsyncWakeups

__all__ = ["AsyncWire", "BlockingWire"]


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
