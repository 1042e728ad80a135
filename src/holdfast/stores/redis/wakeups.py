"""Wake-ups: one subscribed connection per backend, for any number of waiters.

A release publishes the key of the waiter on the channel of the waiter's client, and the token if it
granted the lock directly. Each subscription has a generation number. A waiter trusts a subscription
only if it was live when the waiter's request was sent: otherwise the wake-up may have been missed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import Any

from holdfast.core.backoff import SUBSCRIPTION_LOST_SECONDS
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.limits import SingleFlight, look_by, open_by
from holdfast.io.resp import INCOMPLETE, RedisRefused, ReplyReader, pack
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.redis.aio import RedisProtocol
from holdfast.stores.redis.blocking import BlockingRedisConnection
from holdfast.stores.redis.replies import RedisConnectionBroken, unreachable
from holdfast.stores.redis.url import Access, NodeAddress

__all__ = [
    "AsyncSubscription",
    "AsyncWakeups",
    "BlockingSubscription",
    "BlockingWakeups",
    "read_messages",
]

KEPT_TOKENS = 4096
LONGEST_TOKEN = 16
"""Digits of 2^53, the largest token of a script."""


def read_messages(messages: Iterable[Any], tokens: dict[str, int]) -> list[str]:
    """The keys of the waiters that these messages wake. The token of a direct grant is stored in
    ``tokens``, where the woken waiter takes it; tokens of waiters that are gone are dropped, oldest
    first, once there are ``KEPT_TOKENS``."""
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
    """A subscribed connection, with the interface that the wake-up hub reads."""

    def __init__(self, connection: BlockingRedisConnection, channel: str) -> None:
        self._connection = connection
        self.tokens: dict[str, int] = {}
        """Tokens of direct grants, by waiter. They end with their subscription."""
        try:
            reply = connection.call(pack("SUBSCRIBE", channel))
            if isinstance(reply, RedisRefused):
                message = f"redis at {connection.address} refuses SUBSCRIBE: {reply}"
                raise RedisConnectionBroken(message, closed=False)
            connection.listen()
        except BaseException:
            connection.close()
            raise

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[str]:
        return read_messages(self._connection.messages(), self.tokens)

    def close(self) -> None:
        self._connection.close()

    def forget(self) -> None:
        self._connection.forget()


class BlockingWakeups:
    """The waiters of a blocking backend, and the subscription that wakes them."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.generation = 0
        """The number of the live subscription, counted from 1; 0 while there is none."""
        self._count = 0
        self._hub = BlockingWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: BlockingSubscription | None = None

    async def wait(
        self,
        key: str,
        generation: int,
        until: float,
        subscribe: Callable[[str, float], Awaitable[BlockingSubscription]],
    ) -> int | None:
        """Waits until woken, at most until ``until``. Returns the token if the wake-up brought a
        direct grant, otherwise None.

        Returns at once if ``generation``, the subscription that was live when the request was sent,
        is not the live one: the wake-up may have been missed.
        """
        try:
            if not self.generation and not await self._subscribe(until, subscribe):
                self._hub.wait(key, look_by(until))
                return None
            subscription = self._subscription
            if subscription is None or not generation or generation != self.generation:
                return None
            self._hub.wait(key, until, subscription)
            return subscription.tokens.pop(key, None)
        except (RedisConnectionBroken, OSError):
            self.drop()
            time.sleep(random.uniform(*SUBSCRIPTION_LOST_SECONDS))
            return None

    async def _subscribe(
        self, until: float, subscribe: Callable[[str, float], Awaitable[BlockingSubscription]]
    ) -> bool:
        """True if there is a subscription now. False while another thread opens it, or if it
        failed."""
        permit = self._single_flight.begin()
        if permit is None:
            return False
        began = now()
        try:
            if not self.generation:
                self._subscription = await subscribe(self.channel, open_by(until, inf))
                self._hub.attach(self._subscription)
                self._count += 1
                self.generation = self._count
        except BackendUnavailable:
            # The next attempt raises the error, if it persists. The back-off of the single flight
            # prevents a busy loop until then.
            self._single_flight.failed(began)
            return False
        finally:
            self._single_flight.end(permit)
        self._hub.wake(EVERYBODY)  # waiters that poll can rely on the subscription now
        return True

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def drop(self) -> None:
        """Gives up a subscription that broke, or whose server was replaced. All waiters attempt
        again, and the first one to wait subscribes again."""
        self.generation = 0
        self._hub.wake(EVERYBODY)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    async def close(self) -> None:
        self._hub.close()


class AsyncSubscription(RedisProtocol):
    """A subscribed connection that wakes waiters as messages arrive."""

    def __init__(self, access: Access, address: NodeAddress) -> None:
        self.address = address
        self.tokens: dict[str, int] = {}
        """Tokens of direct grants, by waiter. They end with their subscription."""
        self._seconds = access.request_seconds
        self._wake: Callable[[str], None] | None = None
        self._lost: Callable[[AsyncSubscription], None] | None = None
        self._subscribed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reader = ReplyReader()
        self._feed, self._gets = reader.feed, reader.gets

    @classmethod
    async def open(
        cls, access: Access, address: NodeAddress, channel: str, until: float | None = None
    ) -> AsyncSubscription:
        subscription = cls(access, address)
        await subscription.connect(access, address, until)
        seconds = access.seconds_until(until)
        try:
            subscription.write(pack("SUBSCRIBE", channel))
            async with asyncio.timeout(seconds):
                reply = await subscription._subscribed
        except OSError as error:
            subscription.close()
            raise unreachable(address, error, seconds) from error
        except BaseException:
            subscription.close()
            raise
        if isinstance(reply, RedisRefused):
            subscription.close()
            message = f"redis at {address} refuses SUBSCRIBE: {reply}"
            raise RedisConnectionBroken(message, closed=False)
        return subscription

    def attach(
        self, wake: Callable[[str], None], lost: Callable[[AsyncSubscription], None]
    ) -> None:
        self._wake, self._lost = wake, lost

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
            while (reply := self._gets()) is not INCOMPLETE:
                self._received(reply)
        except ConnectionError:
            self.abort()

    def _received(self, reply: Any) -> None:
        if not self._subscribed.done():
            self._subscribed.set_result(reply)
        elif self._wake is not None and isinstance(reply, list):
            for key in read_messages((reply,), self.tokens):
                self._wake(key)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
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
        self.abort()


class AsyncWakeups:
    """The waiters of an asyncio backend, and the subscription that wakes them."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.generation = 0
        """The number of the live subscription, counted from 1; 0 while there is none."""
        self._count = 0
        self._hub = AsyncWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: AsyncSubscription | None = None
        self._closed = False

    async def wait(
        self,
        key: str,
        generation: int,
        until: float,
        subscribe: Callable[[str, float], Awaitable[AsyncSubscription]],
    ) -> int | None:
        """The same as ``BlockingWakeups.wait``."""
        if not self.generation and not await self._subscribe(until, subscribe):
            await self._hub.wait(key, look_by(until))
            return None
        subscription = self._subscription
        if subscription is None or not generation or generation != self.generation:
            return None
        await self._hub.wait(key, until)
        return subscription.tokens.pop(key, None)

    async def _subscribe(
        self, until: float, subscribe: Callable[[str, float], Awaitable[AsyncSubscription]]
    ) -> bool:
        """True if there is a subscription now. False while another task opens it, or if it
        failed."""
        permit = self._single_flight.begin()
        if permit is None:
            return False
        began = now()
        try:
            subscription = await subscribe(self.channel, open_by(until, inf))
            subscription.attach(self._hub.wake, self._lost)
            if self._closed:
                subscription.close()
            elif not subscription.closing:
                self._count += 1
                self._subscription, self.generation = subscription, self._count
        except BackendUnavailable:
            # The next attempt raises the error, if it persists. The back-off of the single flight
            # prevents a busy loop until then.
            self._single_flight.failed(began)
            return False
        finally:
            self._single_flight.end(permit)
        self._hub.wake_all()  # waiters that poll can rely on the subscription now
        return True

    def _lost(self, subscription: AsyncSubscription) -> None:
        if self._subscription is subscription:
            self._subscription, self.generation = None, 0
            # All waiters attempt again and subscribe again, after a pause.
            pause = random.uniform(*SUBSCRIPTION_LOST_SECONDS)
            asyncio.get_running_loop().call_later(pause, self._hub.wake_all)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def drop(self) -> None:
        """Closes the subscription: its server was replaced. All waiters attempt again."""
        subscription, self._subscription, self.generation = self._subscription, None, 0
        if subscription is not None:
            subscription.close()
            self._hub.wake_all()

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()

    async def close(self) -> None:
        self._closed = True
        self.drop()
