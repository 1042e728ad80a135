"""Wake-ups for Redlock: a pub/sub channel per name, one subscribed connection per backend.

Every node publishes each release, so a subscription on one node is enough: the first that can be
reached. A woken waiter pauses for a random time, which grows with the number of subscribers, so
that the waiters do not split the votes among them.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.core.backoff import SUBSCRIPTION_LOST_SECONDS
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.limits import SingleFlight, look_by
from holdfast.io.resp import INCOMPLETE, ReplyReader, pack
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.redis.aio import RedisProtocol
from holdfast.stores.redis.blocking import BlockingRedisConnection
from holdfast.stores.redis.replies import RedisConnectionBroken
from holdfast.stores.redis.url import Access
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, Nodes, RedlockNode

__all__ = ["AsyncNameWakeups", "BlockingNameWakeups", "Listeners"]

MOST_CHANNELS = 4096
SPREAD_SECONDS = 0.002
"""The mean time between the attempts of two woken waiters."""
LONGEST_SPREAD_SECONDS = 0.05


def _is_count(word: object) -> bool:
    return type(word) is bytes and len(word) <= 9 and word.isdigit()


class Listeners:
    """The waiting claims of a backend by channel, and the state of each channel's subscription."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, None]] = {}
        self._live: dict[str, bool] = {}
        self._subscriber_counts: dict[str, int] = {}
        self._wakeup_counts: dict[str, int] = {}

    def join(self, channel: str, key: str) -> bool:
        """Add a waiting claim. Returns ``False`` if it was added before."""
        keys = self._keys.setdefault(channel, {})
        if key in keys:
            return False
        keys[key] = None
        if len(self._keys) > MOST_CHANNELS:
            self._keys.pop(next(iter(self._keys)), None)
        return True

    def leave(self, channel: str, key: str) -> bool:
        """Remove a waiting claim. Returns whether to unsubscribe: no other claim waits there."""
        keys = self._keys.get(channel)
        if keys is None:
            return False
        keys.pop(key, None)
        if keys:
            return False
        self._keys.pop(channel, None)
        self._wakeup_counts.pop(channel, None)
        return self._live.pop(channel, None) is not None

    def begin_subscribe(self, channel: str) -> bool:
        """Note that SUBSCRIBE is sent. Returns whether the channel is not active yet and has
        waiting claims."""
        return self._live.setdefault(channel, False) is False and channel in self._keys

    def is_live(self, channel: str) -> bool:
        """Whether the node has confirmed the subscription."""
        return self._live.get(channel, False)

    def is_known(self, channel: str) -> bool:
        """Whether SUBSCRIBE has been sent."""
        return channel in self._live

    def reset(self) -> list[str]:
        """Forget all subscriptions: the connection is lost. Returns the keys of all waiting claims,
        which have to subscribe again."""
        self._live.clear()
        return [key for keys in list(self._keys.values()) for key in list(keys)]

    def read_message(self, message: list[Any]) -> list[str]:
        """Return the keys of the claims to wake for a message: a release, or the confirmation of a
        subscription."""
        if len(message) != 3 or type(message[1]) is not bytes:
            return []
        kind, channel = message[0], message[1].decode(errors="replace")
        if kind == b"subscribe":
            if channel in self._live:
                self._live[channel] = True
            self._subscriber_counts.pop(channel, None)
        elif kind == b"message":
            count = message[2]
            self._subscriber_counts[channel] = int(count) if _is_count(count) else 1
            if channel in self._keys:
                self._wakeup_counts[channel] = self._wakeup_counts.get(channel, 0) + 1
            if len(self._subscriber_counts) > MOST_CHANNELS:
                self._subscriber_counts.pop(next(iter(self._subscriber_counts)), None)
        else:
            return []
        return list(self._keys.get(channel, ()))

    def wakeup_count(self, channel: str) -> int:
        """Count the release messages that arrived on a channel while claims waited."""
        return self._wakeup_counts.get(channel, 0)

    def pause(self, channel: str) -> float:
        """Return a random pause after a wake-up, so that not all waiters attempt at once."""
        others = self._subscriber_counts.get(channel, 1) - 1
        return random.uniform(0.0, min(LONGEST_SPREAD_SECONDS, SPREAD_SECONDS * others))


class NameSubscription:
    """A subscribed connection that a ``BlockingWakeupHub`` reads."""

    def __init__(
        self, access: Access, node: RedlockNode, read_message: Callable[[list[bytes]], list[str]]
    ) -> None:
        self.node, self._read_message = node, read_message
        self._link = BlockingRedisConnection(access, node.address, now() + CONNECT_SECONDS)
        self._link.listen()

    def send(self, word: str, channel: str) -> None:
        self._link.send(pack(word, channel))

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self) -> list[str]:
        messages = self._link.messages()
        return [
            key
            for message in messages
            if type(message) is list
            for key in self._read_message(message)
        ]

    def close(self) -> None:
        self._link.close()

    def forget(self) -> None:
        self._link.forget()


class BlockingNameWakeups:
    """Wake-ups for a blocking backend: many threads wait for many names."""

    def __init__(self, access: Access, nodes: Nodes) -> None:
        self._access, self._nodes = access, nodes
        self._listeners = Listeners()
        self._hub = BlockingWakeupHub()
        # Re-entrant: a signal handler may wait, or leave, while its own thread holds the mutex.
        self._mutex = threading.RLock()
        self._single_flight = SingleFlight()
        self._subscription: NameSubscription | None = None

    def listens(self, channel: str, index: int) -> bool:
        """Whether the node counts this backend among the subscribers of the channel."""
        subscription = self._subscription
        return (
            subscription is not None
            and subscription.node is self._nodes.members[index]
            and self._listeners.is_known(channel)
        )

    def wakeup_count(self, channel: str) -> int:
        """Count the release messages that arrived on a channel while claims waited."""
        return self._listeners.wakeup_count(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Wait for a release, at the latest until ``until``. The first wait of a claim returns as
        soon as the subscription is active: a release before that moment may have been missed."""
        new = self._join(channel, key, until)
        if new and self._listeners.is_live(channel):
            return
        try:
            woken = self._hub.wait(key, until if self._subscription is not None else look_by(until))
        except (RedisConnectionBroken, OSError):
            self._drop()
            time.sleep(random.uniform(*SUBSCRIPTION_LOST_SECONDS))
            return
        if woken:
            time.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    def _join(self, channel: str, key: str, until: float) -> bool:
        """Add a claim and subscribe to its channel if needed. Returns whether the claim is new, or
        the subscription was lost."""
        with self._mutex:
            new = self._listeners.join(channel, key)
            if self._subscription is not None and self._subscription.node.down:
                self._drop()
        if self._subscription is None:
            self._open(until)
        with self._mutex:
            try:
                if self._subscription is not None and not self._listeners.is_known(channel):
                    self._listeners.begin_subscribe(channel)
                    self._subscription.send("SUBSCRIBE", channel)
            except RedisConnectionBroken:
                self._drop()
                return True
        return new

    def _open(self, until: float) -> None:
        """Open the subscription, unless another call is opening it."""
        permit = self._single_flight.begin()
        if permit is None:
            return
        began = now()
        try:
            if self._subscription is None and not self._attach(until):
                # The next attempt reports the error; the back-off keeps waiters from spinning.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(permit)
        self._hub.wake(EVERYBODY)  # waiters that poll can now rely on the subscription

    def _attach(self, until: float) -> bool:
        for node in self._nodes.members:
            if node.down or now() >= until:
                continue
            try:
                subscription = NameSubscription(self._access, node, self._listeners.read_message)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            self._subscription = subscription
            self._hub.attach(subscription)
            return True
        return False

    def _drop(self) -> None:
        self._subscription = None
        for key in self._listeners.reset():
            self._hub.wake(key)

    def leave(self, channel: str, key: str) -> None:
        """End the wait of a claim; unsubscribe if no other claim waits on the channel."""
        with self._mutex:
            empty = self._listeners.leave(channel, key)
            self._hub.forget(key)
            subscription = self._subscription
            if empty and subscription is not None:
                try:
                    subscription.send("UNSUBSCRIBE", channel)
                except RedisConnectionBroken:
                    self._drop()

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    async def close(self) -> None:
        self._hub.close()


class AsyncNameSubscription(RedisProtocol):
    """A subscribed connection that passes each message to a callback."""

    def __init__(
        self,
        node: RedlockNode,
        read_message: Callable[[Any], None],
        lost: Callable[[AsyncNameSubscription], None],
    ) -> None:
        self.node, self._read_message = node, read_message
        self._lost: Callable[[AsyncNameSubscription], None] | None = lost
        reader = ReplyReader()
        self._feed, self._gets = reader.feed, reader.gets

    def send(self, word: str, channel: str) -> None:
        self.write(pack(word, channel))

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
            while (reply := self._gets()) is not INCOMPLETE:
                self._read_message(reply)
        except ConnectionError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._lost is not None:
            self._lost(self)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._lost = None
        self.abort()


class AsyncNameWakeups:
    """Wake-ups for an asyncio backend: many tasks wait for many names."""

    def __init__(self, access: Access, nodes: Nodes) -> None:
        self._access, self._nodes = access, nodes
        self._listeners = Listeners()
        self._hub = AsyncWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: AsyncNameSubscription | None = None
        self._closed = False

    def listens(self, channel: str, index: int) -> bool:
        """Whether the node counts this backend among the subscribers of the channel."""
        subscription = self._subscription
        return (
            subscription is not None
            and subscription.node is self._nodes.members[index]
            and self._listeners.is_known(channel)
        )

    def wakeup_count(self, channel: str) -> int:
        """Count the release messages that arrived on a channel while claims waited."""
        return self._listeners.wakeup_count(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Wait for a release, at the latest until ``until``. The first wait of a claim returns as
        soon as the subscription is active: a release before that moment may have been missed."""
        new = self._listeners.join(channel, key)
        subscription = self._subscription
        if subscription is not None and subscription.node.down:
            self._drop()
        if self._subscription is None:
            await self._open(until)
        subscription = self._subscription
        if subscription is not None and not self._listeners.is_known(channel):
            self._listeners.begin_subscribe(channel)
            subscription.send("SUBSCRIBE", channel)
        if new and self._listeners.is_live(channel):
            return
        if await self._hub.wait(key, until if subscription is not None else look_by(until)):
            await asyncio.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    async def _open(self, until: float) -> None:
        """Open the subscription, unless another call is opening it."""
        permit = self._single_flight.begin()
        if permit is None:
            return
        began = now()
        try:
            if not await self._attach(until):
                # The next attempt reports the error; the back-off keeps waiters from spinning.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(permit)
        self._hub.wake_all()  # waiters that poll can now rely on the subscription

    async def _attach(self, until: float) -> bool:
        for node in self._nodes.members:
            if node.down or now() >= until:
                continue
            subscription = AsyncNameSubscription(node, self._read_message, self._lost)
            try:
                await subscription.connect(self._access, node.address, now() + CONNECT_SECONDS)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            if self._closed:
                subscription.close()
                return True
            if not subscription.closing:
                self._subscription = subscription
                return True
        return False

    def _read_message(self, message: Any) -> None:
        if type(message) is list:
            for key in self._listeners.read_message(message):
                self._hub.wake(key)

    def _lost(self, subscription: AsyncNameSubscription) -> None:
        if self._subscription is subscription:
            # Wake all waiters, so that they attempt and subscribe again. The pause gives a node
            # that restarts time to come back.
            self._subscription, keys = None, self._listeners.reset()
            asyncio.get_running_loop().call_later(
                random.uniform(*SUBSCRIPTION_LOST_SECONDS), self._wake, keys
            )

    def _wake(self, keys: list[str]) -> None:
        for key in keys:
            self._hub.wake(key)

    def _drop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._wake(self._listeners.reset())

    def leave(self, channel: str, key: str) -> None:
        """End the wait of a claim; unsubscribe if no other claim waits on the channel."""
        empty = self._listeners.leave(channel, key)
        self._hub.forget(key)
        if empty and self._subscription is not None and not self._subscription.closing:
            self._subscription.send("UNSUBSCRIBE", channel)

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()

    async def close(self) -> None:
        self._closed = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._hub.wake_all()
