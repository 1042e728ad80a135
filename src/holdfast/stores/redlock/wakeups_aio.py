"""Wake-ups for asyncio Redlock backends: see ``redlock_bell``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.single_flight import Opening, look_by
from holdfast.io.wakeups import AsyncWakeupHub
from holdfast.stores.redis.aio import Wired
from holdfast.stores.redis.connection import INCOMPLETE, Access, Reader, pack
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, Fleet, Node
from holdfast.stores.redlock.wakeups import Listeners

__all__ = ["AsyncNameWakeups"]


class AsyncNameBell(Wired):
    """A subscribed connection that calls as messages come in."""

    def __init__(
        self, node: Node, heard: Callable[[Any], None], lost: Callable[[AsyncNameBell], None]
    ) -> None:
        self.node, self._heard = node, heard
        self._lost: Callable[[AsyncNameBell], None] | None = lost
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
        self._opening = Opening()
        self._bell: AsyncNameBell | None = None
        self._closed = False

    def listens(self, channel: str, index: int) -> bool:
        """Whether this backend is among those whom that node counts as listening."""
        bell = self._bell
        return (
            bell is not None
            and bell.node is self._fleet.nodes[index]
            and self._listeners.is_known(channel)
        )

    def calls(self, channel: str) -> int:
        """How often those who wait there have been called."""
        return self._listeners.calls(channel)

    async def wait(self, channel: str, key: str, until: float) -> None:
        """Returns when the name may be had, or by ``until``; the first time as soon as nothing
        can be missed any more."""
        new = self._listeners.join(channel, key)
        bell = self._bell
        if bell is not None and bell.node.down:
            self._drop()
        if self._bell is None:
            await self._open(until)
        bell = self._bell
        if bell is not None and not self._listeners.is_known(channel):
            self._listeners.asked(channel)
            bell.send("SUBSCRIBE", channel)
        if new and self._listeners.is_live(channel):
            return
        if await self._hub.wait(key, until if bell is not None else look_by(until)):
            await asyncio.sleep(max(0.0, min(self._listeners.pause(channel), until - now())))

    async def _open(self, until: float) -> None:
        """Listens to a node, unless another one is about to."""
        place = self._opening.begin()
        if place is None:
            return
        began = now()
        try:
            if not await self._hang(until):
                # The next attempt says what is wrong; until then nobody spins.
                self._opening.failed(began)
                return
        finally:
            self._opening.end(place)
        self._hub.ring_all()  # those who look for themselves need not any more

    async def _hang(self, until: float) -> bool:
        for node in self._fleet.nodes:
            if node.down or now() >= until:
                continue
            bell = AsyncNameBell(node, self._heard, self._lost)
            try:
                await bell.wire(self._access, node.address, now() + CONNECT_SECONDS)
            except BackendUnavailable as error:
                node.failed(error)
                continue
            if self._closed:
                bell.close()
                return True
            if not bell.closing:
                self._bell = bell
                return True
        return False

    def _heard(self, message: Any) -> None:
        if type(message) is list:
            for key in self._listeners.heard(message):
                self._hub.ring(key)

    def _lost(self, bell: AsyncNameBell) -> None:
        if self._bell is bell:
            # Everybody attempts again and subscribes anew, a moment later: the node may be back.
            self._bell, keys = None, self._listeners.forget_all()
            asyncio.get_running_loop().call_later(random.uniform(0.01, 0.1), self._ring, keys)

    def _ring(self, keys: list[str]) -> None:
        for key in keys:
            self._hub.ring(key)

    def _drop(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
        self._ring(self._listeners.forget_all())

    def leave(self, channel: str, key: str) -> None:
        """The claim waits no more."""
        empty = self._listeners.leave(channel, key)
        self._hub.forget(key)
        if empty and self._bell is not None and not self._bell.closing:
            self._bell.send("UNSUBSCRIBE", channel)

    def ring(self, key: str) -> None:
        self._hub.ring(key)

    def forget(self) -> None:
        if self._bell is not None:
            self._bell.forget()

    async def close(self) -> None:
        self._closed = True
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
        self._hub.ring_all()
