"""Wake-ups: one subscribed connection, whatever the number of waiters."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.resp import INCOMPLETE, Reader, Refused, pack
from holdfast.io.single_flight import SingleFlight, look_by, open_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.redis.aio import Wired
from holdfast.stores.redis.blocking import BlockingLink
from holdfast.stores.redis.replies import LinkBroken, unreachable
from holdfast.stores.redis.url import Access, Address

__all__ = [
    "AsyncSubscription",
    "AsyncWakeups",
    "BlockingSubscription",
    "BlockingWakeups",
    "take_down",
]

KEPT_TOKENS = 4096
LONGEST_TOKEN = 16
"""Scripts count to 2^53, which has so many digits."""


def take_down(messages: Iterable[Any], tokens: dict[str, int]) -> list[str]:
    """The keys that messages ring. If one brings a grant, its token is put where whoever is woken
    looks for it; those of waiters that have left are forgotten in the end."""
    keys = []
    for message in messages:
        if type(message) is list and len(message) == 3 and type(message[2]) is bytes:
            key, _, token = message[2].decode(errors="replace").partition(" ")
            keys.append(key)
            if token.isascii() and token.isdigit() and len(token) <= LONGEST_TOKEN:
                tokens[key] = int(token)
    while len(tokens) > KEPT_TOKENS:
        tokens.pop(next(iter(tokens)), None)
    return keys


class BlockingSubscription:
    """A subscribed connection, as the wake-up hub wants it."""

    def __init__(self, link: BlockingLink, channel: str) -> None:
        self._link = link
        self.tokens: dict[str, int] = {}
        """Grants that came with a ring. They end with the subscription that brought them."""
        try:
            reply = link.call(pack("SUBSCRIBE", channel))
            if isinstance(reply, Refused):
                message = f"redis at {link.address} refuses SUBSCRIBE: {reply}"
                raise LinkBroken(message, closed=False)
            link.listen()
        except BaseException:
            link.close()
            raise

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self) -> list[str]:
        return take_down(self._link.messages(), self.tokens)

    def close(self) -> None:
        self._link.close()

    def forget(self) -> None:
        self._link.forget()


class BlockingWakeups:
    """Who waits in this backend, and the subscription that wakes them."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.hearing = 0
        """Which subscription is live, counted from 1; 0 while there is none."""
        self._count = 0
        self._hub = BlockingWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: BlockingSubscription | None = None

    async def wait(
        self,
        key: str,
        heard: int,
        until: float,
        subscribe: Callable[[str, float], Awaitable[BlockingSubscription]],
    ) -> int | None:
        """Returns when woken or by ``until``; at once unless what is waited for was asked while
        the subscription that is live now was live (``heard``): its wake-up may have come before.
        Answers the token, if the ring brought a grant.
        """
        try:
            if not self.hearing and not await self._subscribe(until, subscribe):
                self._hub.wait(key, look_by(until))
                return None
            subscription = self._subscription
            if subscription is None or not heard or heard != self.hearing:
                return None
            self._hub.wait(key, until, subscription)
            return subscription.tokens.pop(key, None)
        except (LinkBroken, OSError):
            self.drop()
            time.sleep(random.uniform(0.01, 0.1))
            return None

    async def _subscribe(
        self, until: float, subscribe: Callable[[str, float], Awaitable[BlockingSubscription]]
    ) -> bool:
        """Whether there is a subscription now; there is none yet while another one subscribes."""
        place = self._single_flight.begin()
        if place is None:
            return False
        began = now()
        try:
            if not self.hearing:
                self._subscription = await subscribe(self.channel, open_by(until, inf))
                self._hub.attach(self._subscription)
                self._count += 1
                self.hearing = self._count
        except BackendUnavailable:
            # The next attempt says what is wrong, if anything is; until then nobody spins.
            self._single_flight.failed(began)
            return False
        finally:
            self._single_flight.end(place)
        self._hub.wake(EVERYBODY)  # those who look for themselves need not any more
        return True

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def drop(self) -> None:
        """The subscription broke, or its server is no longer the one: everybody attempts again
        and the first to wait subscribes anew."""
        self.hearing = 0
        self._hub.wake(EVERYBODY)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    async def close(self) -> None:
        self._hub.close()


class AsyncSubscription(Wired):
    """A subscribed connection that wakes as messages come in."""

    def __init__(self, access: Access, address: Address) -> None:
        self.address = address
        self.tokens: dict[str, int] = {}
        """Grants that came with a ring. They end with the subscription that brought them."""
        self._seconds = access.request_seconds
        self._wake: Callable[[str], None] | None = None
        self._lost: Callable[[AsyncSubscription], None] | None = None
        self._subscribed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    async def open(
        cls, access: Access, address: Address, channel: str, until: float | None = None
    ) -> AsyncSubscription:
        subscription = cls(access, address)
        await subscription.wire(access, address, until)
        seconds = access.seconds_until(until)
        try:
            subscription._transport.write(pack("SUBSCRIBE", channel))
            async with asyncio.timeout(seconds):
                reply = await subscription._subscribed
        except OSError as error:
            subscription.close()
            raise unreachable(address, error, seconds) from error
        except BaseException:
            subscription.close()
            raise
        if isinstance(reply, Refused):
            subscription.close()
            raise LinkBroken(f"redis at {address} refuses SUBSCRIBE: {reply}", closed=False)
        return subscription

    def attach(
        self, wake: Callable[[str], None], lost: Callable[[AsyncSubscription], None]
    ) -> None:
        self._wake, self._lost = wake, lost

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
        elif self._wake is not None and isinstance(reply, list):
            for key in take_down((reply,), self.tokens):
                self._wake(key)

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
        self._single_flight = SingleFlight()
        self._subscription: AsyncSubscription | None = None
        self._closed = False

    async def wait(
        self,
        key: str,
        heard: int,
        until: float,
        subscribe: Callable[[str, float], Awaitable[AsyncSubscription]],
    ) -> int | None:
        """Returns when woken or by ``until``; at once unless what is waited for was asked while
        the subscription that is live now was live (``heard``): its wake-up may have come before.
        Answers the token, if the ring brought a grant.
        """
        if not self.hearing and not await self._subscribe(until, subscribe):
            await self._hub.wait(key, look_by(until))
            return None
        subscription = self._subscription
        if subscription is None or not heard or heard != self.hearing:
            return None
        await self._hub.wait(key, until)
        return subscription.tokens.pop(key, None)

    async def _subscribe(
        self, until: float, subscribe: Callable[[str, float], Awaitable[AsyncSubscription]]
    ) -> bool:
        """Whether there is a subscription now; there is none yet while another one subscribes."""
        place = self._single_flight.begin()
        if place is None:
            return False
        began = now()
        try:
            subscription = await subscribe(self.channel, open_by(until, inf))
            subscription.attach(self._hub.wake, self._lost)
            if self._closed:
                subscription.close()
            elif not subscription.closing:
                self._count += 1
                self._subscription, self.hearing = subscription, self._count
        except BackendUnavailable:
            # The next attempt says what is wrong, if anything is; until then nobody spins.
            self._single_flight.failed(began)
            return False
        finally:
            self._single_flight.end(place)
        self._hub.wake_all()  # those who look for themselves need not any more
        return True

    def _lost(self, subscription: AsyncSubscription) -> None:
        if self._subscription is subscription:
            self._subscription, self.hearing = None, 0
            # Everybody attempts again and subscribes anew, a moment later: the server may be back.
            asyncio.get_running_loop().call_later(random.uniform(0.01, 0.1), self._hub.wake_all)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def drop(self) -> None:
        """Ends the subscription: the server it came from is no longer the one."""
        subscription, self._subscription, self.hearing = self._subscription, None, 0
        if subscription is not None:
            subscription.close()
            self._hub.wake_all()

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()

    async def close(self) -> None:
        self._closed = True
        self.drop()
