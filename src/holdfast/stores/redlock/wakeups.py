"""Wake-ups for Redlock: a channel per name, over one subscribed connection per backend.

Every node tells of a release, so any one of them will do: the first that can be reached. Who
waits is woken a little later the more clients listen, each at a moment of its own, so that they do
not take the votes from one another.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.single_flight import SingleFlight, look_by
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.redis.aio import Wired
from holdfast.stores.redis.blocking import BlockingLink
from holdfast.stores.redis.connection import INCOMPLETE, Access, LinkBroken, Reader, pack
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, Fleet, Node

__all__ = ["AsyncNameWakeups", "BlockingNameWakeups", "Listeners"]

MOST_CHANNELS = 4096
SPREAD_SECONDS = 0.002
"""How far apart two listeners come on average."""
LONGEST_SPREAD_SECONDS = 0.05


def _is_count(word: object) -> bool:
    return type(word) is bytes and len(word) <= 9 and word.isdigit()


class Listeners:
    """Who of a backend waits for which name, and which channels are live."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[str, None]] = {}
        self._live: dict[str, bool] = {}
        self._others: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def join(self, channel: str, key: str) -> bool:
        """Notes that somebody waits; false if that is known already."""
        keys = self._keys.setdefault(channel, {})
        if key in keys:
            return False
        keys[key] = None
        if len(self._keys) > MOST_CHANNELS:
            self._keys.pop(next(iter(self._keys)), None)
        return True

    def leave(self, channel: str, key: str) -> bool:
        """Answers whether its channel has to be given up, as nobody else waits there."""
        keys = self._keys.get(channel)
        if keys is None:
            return False
        keys.pop(key, None)
        if keys:
            return False
        self._keys.pop(channel, None)
        self._calls.pop(channel, None)
        return self._live.pop(channel, None) is not None

    def asked(self, channel: str) -> bool:
        """Whether a channel still has to be subscribed to; it counts as asked for then."""
        return self._live.setdefault(channel, False) is False and channel in self._keys

    def is_live(self, channel: str) -> bool:
        return self._live.get(channel, False)

    def is_known(self, channel: str) -> bool:
        return channel in self._live

    def forget_all(self) -> list[str]:
        """The subscription is gone: everybody has to ask again."""
        self._live.clear()
        return [key for keys in list(self._keys.values()) for key in list(keys)]

    def heard(self, message: list[Any]) -> list[str]:
        """Whom a message is for: a new subscription calls as a release does."""
        if len(message) != 3 or type(message[1]) is not bytes:
            return []
        kind, channel = message[0], message[1].decode(errors="replace")
        if kind == b"subscribe":
            if channel in self._live:
                self._live[channel] = True
            self._others.pop(channel, None)
        elif kind == b"message":
            told = message[2]
            self._others[channel] = int(told) if _is_count(told) else 1
            if channel in self._keys:
                self._calls[channel] = self._calls.get(channel, 0) + 1
            if len(self._others) > MOST_CHANNELS:
                self._others.pop(next(iter(self._others)), None)
        else:
            return []
        return list(self._keys.get(channel, ()))

    def calls(self, channel: str) -> int:
        """How often those who wait there have been called."""
        return self._calls.get(channel, 0)

    def pause(self, channel: str) -> float:
        """How long to hold back after a call, so that not all come at once."""
        others = self._others.get(channel, 1) - 1
        return random.uniform(0.0, min(LONGEST_SPREAD_SECONDS, SPREAD_SECONDS * others))


class NameSubscription:
    """A subscribed connection, as the wake-up hub wants it."""

    def __init__(
        self, access: Access, node: Node, heard: Callable[[list[bytes]], list[str]]
    ) -> None:
        self.node, self._heard = node, heard
        self._link = BlockingLink(access, node.address, now() + CONNECT_SECONDS)
        self._link.listen()

    def send(self, word: str, channel: str) -> None:
        self._link.send(pack(word, channel))

    def fileno(self) -> int:
        return self._link.fileno()

    def read(self) -> list[str]:
        messages = self._link.messages()
        return [
            key for message in messages if type(message) is list for key in self._heard(message)
        ]

    def close(self) -> None:
        self._link.close()

    def forget(self) -> None:
        self._link.forget()


class BlockingNameWakeups:
    """Waits of many threads for many names."""

    def __init__(self, access: Access, fleet: Fleet) -> None:
        self._access, self._fleet = access, fleet
        self._listeners = Listeners()
        self._hub = BlockingWakeupHub()
        # Re-entrant: a signal handler may wait, or leave, in the middle of what its thread does.
        self._changing = threading.RLock()
        self._single_flight = SingleFlight()
        self._subscription: NameSubscription | None = None

    def listens(self, channel: str, index: int) -> bool:
        """Whether this backend is among those whom that node counts as listening."""
        subscription = self._subscription
        return (
            subscription is not None
            and subscription.node is self._fleet.nodes[index]
            and self._listeners.is_known(channel)
        )

    def calls(self, channel: str) -> int:
        """How often those who wait there have been called."""
        return self._listeners.calls(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Returns when the name may be had, or by ``until``; the first time as soon as nothing
        can be missed any more."""
        new = self._join(channel, key, until)
        if new and self._listeners.is_live(channel):
            return
        try:
            woken = self._hub.wait(key, until if self._subscription is not None else look_by(until))
        except (LinkBroken, OSError):
            self._drop()
            time.sleep(random.uniform(0.01, 0.1))
            return
        if woken:
            time.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    def _join(self, channel: str, key: str, until: float) -> bool:
        with self._changing:
            new = self._listeners.join(channel, key)
            if self._subscription is not None and self._subscription.node.down:
                self._drop()
        if self._subscription is None:
            self._open(until)
        with self._changing:
            try:
                if self._subscription is not None and not self._listeners.is_known(channel):
                    self._listeners.asked(channel)
                    self._subscription.send("SUBSCRIBE", channel)
            except LinkBroken:
                self._drop()
                return True
        return new

    def _open(self, until: float) -> None:
        """Listens to a node, unless another one is about to."""
        place = self._single_flight.begin()
        if place is None:
            return
        began = now()
        try:
            if self._subscription is None and not self._attach(until):
                # The next attempt says what is wrong; until then nobody spins.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(place)
        self._hub.wake(EVERYBODY)  # those who look for themselves need not any more

    def _attach(self, until: float) -> bool:
        for node in self._fleet.nodes:
            if node.down or now() >= until:
                continue
            try:
                subscription = NameSubscription(self._access, node, self._listeners.heard)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            self._subscription = subscription
            self._hub.attach(subscription)
            return True
        return False

    def _drop(self) -> None:
        self._subscription = None
        for key in self._listeners.forget_all():
            self._hub.wake(key)

    def leave(self, channel: str, key: str) -> None:
        """The claim waits no more."""
        with self._changing:
            empty = self._listeners.leave(channel, key)
            self._hub.forget(key)
            subscription = self._subscription
            if empty and subscription is not None:
                try:
                    subscription.send("UNSUBSCRIBE", channel)
                except LinkBroken:
                    self._drop()

    def wake(self, key: str) -> None:
        self._hub.wake(key)

    def forget(self) -> None:
        if self._subscription is not None:
            self._subscription.forget()
        self._hub.discard()

    async def close(self) -> None:
        self._hub.close()


class AsyncNameSubscription(Wired):
    """A subscribed connection that calls as messages come in."""

    def __init__(
        self,
        node: Node,
        heard: Callable[[Any], None],
        lost: Callable[[AsyncNameSubscription], None],
    ) -> None:
        self.node, self._heard = node, heard
        self._lost: Callable[[AsyncNameSubscription], None] | None = lost
        reader = Reader()
        self._feed, self._gets = reader.feed, reader.gets

    def send(self, word: str, channel: str) -> None:
        self._transport.write(pack(word, channel))

    def data_received(self, data: bytes) -> None:
        try:
            self._feed(data)
            while (reply := self._gets()) is not INCOMPLETE:
                self._heard(reply)
        except ConnectionError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lost is not None:
            self._lost(self)

    @property
    def closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._lost = None
        self._transport.abort()


class AsyncNameWakeups:
    """Waits of many tasks for many names."""

    def __init__(self, access: Access, fleet: Fleet) -> None:
        self._access, self._fleet = access, fleet
        self._listeners = Listeners()
        self._hub = AsyncWakeupHub()
        self._single_flight = SingleFlight()
        self._subscription: AsyncNameSubscription | None = None
        self._closed = False

    def listens(self, channel: str, index: int) -> bool:
        """Whether this backend is among those whom that node counts as listening."""
        subscription = self._subscription
        return (
            subscription is not None
            and subscription.node is self._fleet.nodes[index]
            and self._listeners.is_known(channel)
        )

    def calls(self, channel: str) -> int:
        """How often those who wait there have been called."""
        return self._listeners.calls(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Returns when the name may be had, or by ``until``; the first time as soon as nothing
        can be missed any more."""
        new = self._listeners.join(channel, key)
        subscription = self._subscription
        if subscription is not None and subscription.node.down:
            self._drop()
        if self._subscription is None:
            await self._open(until)
        subscription = self._subscription
        if subscription is not None and not self._listeners.is_known(channel):
            self._listeners.asked(channel)
            subscription.send("SUBSCRIBE", channel)
        if new and self._listeners.is_live(channel):
            return
        if await self._hub.wait(key, until if subscription is not None else look_by(until)):
            await asyncio.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    async def _open(self, until: float) -> None:
        """Listens to a node, unless another one is about to."""
        place = self._single_flight.begin()
        if place is None:
            return
        began = now()
        try:
            if not await self._attach(until):
                # The next attempt says what is wrong; until then nobody spins.
                self._single_flight.failed(began)
                return
        finally:
            self._single_flight.end(place)
        self._hub.wake_all()  # those who look for themselves need not any more

    async def _attach(self, until: float) -> bool:
        for node in self._fleet.nodes:
            if node.down or now() >= until:
                continue
            subscription = AsyncNameSubscription(node, self._heard, self._lost)
            try:
                await subscription.wire(self._access, node.address, now() + CONNECT_SECONDS)
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

    def _heard(self, message: Any) -> None:
        if type(message) is list:
            for key in self._listeners.heard(message):
                self._hub.wake(key)

    def _lost(self, subscription: AsyncNameSubscription) -> None:
        if self._subscription is subscription:
            # Everybody attempts again and subscribes anew, a moment later: the node may be back.
            self._subscription, keys = None, self._listeners.forget_all()
            asyncio.get_running_loop().call_later(random.uniform(0.01, 0.1), self._wake, keys)

    def _wake(self, keys: list[str]) -> None:
        for key in keys:
            self._hub.wake(key)

    def _drop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
        self._wake(self._listeners.forget_all())

    def leave(self, channel: str, key: str) -> None:
        """The claim waits no more."""
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
