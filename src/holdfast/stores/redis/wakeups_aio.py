"""Wake-ups for asyncio backends: one subscribed connection, whatever the number of waiters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.single_flight import Opening, look_by, open_by
from holdfast.io.wakeups import AsyncWakeupHub
from holdfast.stores.redis.aio import Wired
from holdfast.stores.redis.connection import (
    INCOMPLETE,
    Access,
    Address,
    LinkBroken,
    Reader,
    Refused,
    pack,
    unreachable,
)
from holdfast.stores.redis.wakeups import take_down

__all__ = ["AsyncBell", "AsyncWakeups"]


class AsyncBell(Wired):
    """A subscribed connection that rings as messages come in."""

    def __init__(self, access: Access, address: Address) -> None:
        self.address = address
        self.tokens: dict[str, int] = {}
        """Grants that came with a ring. They end with the subscription that brought them."""
        self._seconds = access.request_seconds
        self._ring: Callable[[str], None] | None = None
        self._lost: Callable[[AsyncBell], None] | None = None
        self._subscribed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    async def open(
        cls, access: Access, address: Address, channel: str, until: float | None = None
    ) -> AsyncBell:
        bell = cls(access, address)
        await bell.wire(access, address, until)
        seconds = access.seconds_until(until)
        try:
            bell._transport.write(pack("SUBSCRIBE", channel))
            async with asyncio.timeout(seconds):
                reply = await bell._subscribed
        except OSError as error:
            bell.close()
            raise unreachable(address, error, seconds) from error
        except BaseException:
            bell.close()
            raise
        if isinstance(reply, Refused):
            bell.close()
            raise LinkBroken(f"redis at {address} refuses SUBSCRIBE: {reply}", closed=False)
        return bell

    def hang(self, ring: Callable[[str], None], lost: Callable[[AsyncBell], None]) -> None:
        self._ring, self._lost = ring, lost

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
            while (reply := self._gets()) is not INCOMPLETE:
                self._heard(reply)
        except ConnectionError:
            self._transport.abort()

    def _heard(self, reply: Any) -> None:
        if not self._subscribed.done():
            self._subscribed.set_result(reply)
        elif self._ring is not None and isinstance(reply, list):
            for key in take_down((reply,), self.tokens):
                self._ring(key)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._subscribed.done():
            cause = exc or EOFError("closed by the server")
            self._subscribed.set_exception(unreachable(self.address, cause, self._seconds))
        if self._lost is not None:
            self._lost(self)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._lost = None
        self._transport.abort()


class AsyncWakeups:
    """Who waits in this backend, and the subscription that wakes them."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.hearing = 0
        """Which subscription is live, counted from 1; 0 while there is none."""
        self._count = 0
        self._hub = AsyncWakeupHub()
        self._opening = Opening()
        self._bell: AsyncBell | None = None
        self._closed = False

    async def wait(
        self,
        key: str,
        heard: int,
        until: float,
        subscribe: Callable[[str, float], Awaitable[AsyncBell]],
    ) -> int | None:
        """Returns when rung or by ``until``; at once unless what is waited for was asked while
        the subscription that is live now was live (``heard``): its wake-up may have come before.
        Answers the token, if the ring brought a grant.
        """
        if not self.hearing and not await self._subscribe(until, subscribe):
            await self._hub.wait(key, look_by(until))
            return None
        bell = self._bell
        if bell is None or not heard or heard != self.hearing:
            return None
        await self._hub.wait(key, until)
        return bell.tokens.pop(key, None)

    async def _subscribe(
        self, until: float, subscribe: Callable[[str, float], Awaitable[AsyncBell]]
    ) -> bool:
        """Whether there is a subscription now; there is none yet while another one subscribes."""
        place = self._opening.begin()
        if place is None:
            return False
        began = now()
        try:
            bell = await subscribe(self.channel, open_by(until, inf))
            bell.hang(self._hub.ring, self._lost)
            if self._closed:
                bell.close()
            elif not bell.closing:
                self._count += 1
                self._bell, self.hearing = bell, self._count
        except BackendUnavailable:
            # The next attempt says what is wrong, if anything is; until then nobody spins.
            self._opening.failed(began)
            return False
        finally:
            self._opening.end(place)
        self._hub.ring_all()  # those who look for themselves need not any more
        return True

    def _lost(self, bell: AsyncBell) -> None:
        if self._bell is bell:
            self._bell, self.hearing = None, 0
            # Everybody attempts again and subscribes anew, a moment later: the server may be back.
            asyncio.get_running_loop().call_later(random.uniform(0.01, 0.1), self._hub.ring_all)

    def ring(self, key: str) -> None:
        self._hub.ring(key)

    def drop(self) -> None:
        """Ends the subscription: the server it came from is no longer the one."""
        bell, self._bell, self.hearing = self._bell, None, 0
        if bell is not None:
            bell.close()
            self._hub.ring_all()

    def forget(self) -> None:
        if self._bell is not None:
            self._bell.forget()

    async def close(self) -> None:
        self._closed = True
        self.drop()
