"""Wake-ups for Redlock: a pub/sub channel per name, one subscribed connection per backend.

Every node publishes each release, so a subscription on one node is enough: the first that can be
reached. A woken waiter pauses for a random time, which grows with the number of subscribers, so
that the waiters do not split the votes among them.
"""

from __future__ import annotations

import random
import threading
from typing import Any

from holdfast.core.backoff import SUBSCRIPTION_LOST_SECONDS
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.limits import SingleFlight, look_by
from holdfast.io.resp import pack
from holdfast.io.wakeups import Messages, Subscription, new_hub
from holdfast.stores.redis.connection import Connector
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, Nodes, RedlockNode

__all__ = ["Listeners", "NameWakeups"]

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
        return True

    def evict(self) -> str | None:
        """Drop the oldest channel if there are too many: its claims attempt again without a
        wake-up. Returns the channel if it has to be unsubscribed."""
        if len(self._keys) <= MOST_CHANNELS:
            return None
        channel = next(iter(self._keys))
        del self._keys[channel]
        self._wakeup_counts.pop(channel, None)
        return None if self._live.pop(channel, None) is None else channel

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


class NameWakeups:
    """The waiters of a backend, many names, and the subscription that wakes them."""

    def __init__(self, connector: Connector, nodes: Nodes) -> None:
        self._connector, self._nodes = connector, nodes
        self._listeners = Listeners()
        self._hub = new_hub(blocking=connector.blocking)
        # Re-entrant: a signal handler may wait, or leave, while its own thread holds the mutex.
        self._mutex = threading.RLock()
        self._single_flight = SingleFlight()
        self._subscription: Messages | None = None
        self._node: RedlockNode | None = None
        """The node of the subscription."""

    def listens(self, channel: str, index: int) -> bool:
        """Whether the node counts this backend among the subscribers of the channel."""
        return (
            self._subscription is not None
            and self._node is self._nodes.members[index]
            and self._listeners.is_known(channel)
        )

    def wakeup_count(self, channel: str) -> int:
        """Count the release messages that arrived on a channel while claims waited."""
        return self._listeners.wakeup_count(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Wait for a release, at the latest until ``until``. The first wait of a claim returns as
        soon as the subscription is active: a release before that moment may have been missed."""
        new = await self._join(channel, key, until)
        if new and self._listeners.is_live(channel):
            return
        polls = self._subscription is None
        try:
            woken = await self._hub.waited(key, look_by(until) if polls else until)
        except OSError:
            self._drop()
            await self._hub.pause(random.uniform(*SUBSCRIPTION_LOST_SECONDS))
            return
        if woken:
            pause = min(self._listeners.pause(channel), until - now())
            await self._hub.pause(max(0.0, pause))

    async def _join(self, channel: str, key: str, until: float) -> bool:
        """Add a claim and subscribe to its channel if needed. Returns whether the claim is new, or
        the subscription was lost."""
        with self._mutex:
            new = self._listeners.join(channel, key)
            if self._subscription is not None and self._node is not None and self._node.down:
                self._drop()
        if self._subscription is None:
            await self._open(until)
        with self._mutex:
            try:
                evicted = self._listeners.evict()
                if self._subscription is not None and evicted is not None:
                    self._subscription.send(pack("UNSUBSCRIBE", evicted))
                if self._subscription is not None and not self._listeners.is_known(channel):
                    self._listeners.begin_subscribe(channel)
                    self._subscription.send(pack("SUBSCRIBE", channel))
            except OSError:
                self._drop()
                return True
        return new

    async def _open(self, until: float) -> None:
        """Open the subscription, unless another call is opening it."""
        permit = self._single_flight.begin()
        if permit is None:
            return
        began = now()
        try:
            if self._subscription is None and not await self._attach(until):
                # The next attempt reports the error; the back-off keeps waiters from spinning.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(permit)
        self._hub.wake_all()  # waiters that poll can now rely on the subscription

    async def _attach(self, until: float) -> bool:
        connector = self._connector
        for node in self._nodes.members:
            if node.down or now() >= until:
                continue
            soon = now() + CONNECT_SECONDS
            try:
                connection, _ = await connector.begin(connector.access, node.address, (), soon)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            subscription = Messages(connection, self._read_message)
            try:
                # In this order: it may break, in another thread, as soon as it is attached.
                self._subscription, self._node = subscription, node
                self._hub.attach(subscription, self._lost)
            except BaseException:
                self._subscription = None
                subscription.close()
                raise
            return True
        return False

    def _read_message(self, message: Any) -> list[tuple[str, None]]:
        if type(message) is not list:
            return []
        return [(key, None) for key in self._listeners.read_message(message)]

    def _lost(self, subscription: Subscription) -> None:
        with self._mutex:  # not while another thread subscribes to a channel
            if self._subscription is subscription:
                self._subscription = None
                self._listeners.reset()

    def _drop(self) -> None:
        with self._mutex:
            self._subscription = None
            for key in self._listeners.reset():
                self._hub.wake(key)

    def leave(self, channel: str, key: str) -> None:
        """End the wait of a claim; unsubscribe if no other claim waits on the channel."""
        with self._mutex:
            empty = self._listeners.leave(channel, key)
            self._hub.forget(key)
            if empty and self._subscription is not None:
                try:
                    self._subscription.send(pack("UNSUBSCRIBE", channel))
                except OSError:
                    self._drop()

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget(self) -> None:
        """In a forked child, or on a later event loop: let the subscription go."""
        if self._connector.blocking and self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    def close(self) -> None:
        self._hub.close()
