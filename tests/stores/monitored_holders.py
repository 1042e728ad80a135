"""Clients that hold a lock during a fault and record how long they believe to hold it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, suppress
from typing import Any, Self

from holdfast.errors import HoldfastError
from holdfast.io.clock import now
from holdfast.lease import AsyncLease
from holdfast.testing import Flavour
from servers.ensemble import Trio
from servers.process import Server
from stores.recovery import SOON, Bound, Taken, Tell, client, drive, name_at, recovers

__all__ = ["MonitoredHolder", "MonitoredHolders"]

LOOK_SECONDS = 0.002


class MonitoredHolder:
    """A thread that holds a lock and records, until the lease is lost, that it holds."""

    lease: AsyncLease

    def __init__(self, url: str, namespace: str, flavour: Flavour, ttl: float) -> None:
        self.flavour, self.name, self.ttl = flavour, name_at(flavour), ttl
        self._namespace = namespace
        self.token = 0
        self.reason = ""
        self.held_until = 0.0
        """The last moment at which ``lease.held`` was true."""
        self._released: bool | None = False
        self._holds, self._knows, self._over = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(
            target=lambda: drive(flavour, self._hold(url, namespace)), daemon=True
        )

    async def _hold(self, url: str, namespace: str) -> None:
        async with client(url, self.flavour, namespace, self.ttl) as locks:
            lease = await locks.lock(self.name, timeout=SOON).acquire()
            assert lease is not None
            self.lease, self.token = lease, lease.token
            self._holds.set()
            moment = now()  # before ``lease.held`` is read: the thread may be delayed in between
            while not self._over.is_set() and lease.held:
                self.held_until = moment
                await self._rest()
                moment = now()
            if lease.lost:
                self.reason = lease.reason
                self._knows.set()
            while not self._over.is_set():
                await self._rest()
            with suppress(HoldfastError):
                self._released = await lease.release()

    async def _rest(self) -> None:
        if self.flavour is Flavour.BLOCKING:
            self._over.wait(LOOK_SECONDS)
        else:
            await asyncio.sleep(LOOK_SECONDS)

    def lost(self, seconds: float = SOON) -> bool:
        """Whether the lease is reported as lost within so many seconds."""
        return self._knows.wait(seconds)

    def still_holds(self, url: str) -> bool:
        """Whether the lease is held, and these servers name it as the only holder."""

        async def look() -> list[int]:
            async with client(url, self.flavour, self._namespace) as locks:
                info = await locks.inspect(self.name)
                return [holder.token for holder in info.holders]

        self.lease.check(at_least=1.0)
        return drive(self.flavour, look()) == [self.token]

    def check_successor(self, taken: Taken) -> None:
        """Check the next hold: it has a higher token, and began after this one was over."""
        assert taken.token > self.token
        assert self.held_until <= taken.entered, "two held at the same time"

    def release(self) -> bool:
        """End the hold. Returns whether it was still ours."""
        self._over.set()
        self._thread.join(SOON)
        return bool(self._released)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._holds.wait(SOON)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MonitoredHolders:
    """A blocking and an asyncio holder with names of their own, for the same fault."""

    def __init__(self, trio: Trio[Any], url: str, namespace: str, ttl: float) -> None:
        self._trio, self._namespace = trio, namespace
        self.each = [MonitoredHolder(url, namespace, flavour, ttl) for flavour in Flavour]
        self._stack = ExitStack()

    def check_lost(
        self, bound: Bound, tell: Tell, *, without: Server | None = None, cut: float | None = None
    ) -> None:
        """Check that the holders lose their leases, and the next claims are granted after that,
        within the documented time. ``cut`` is when the holders were cut off: their leases are lost
        by their deadline, counted from then."""
        self.check_succeeded(bound, tell, without=without)
        for holder in self.each:
            assert holder.lost()
            if cut is not None:
                assert holder.held_until <= cut + holder.ttl

    def check_succeeded(self, bound: Bound, tell: Tell, *, without: Server | None = None) -> None:
        """Check that the next claims are granted after these holds, lost or released, are over."""
        taken = recovers(self._trio, self._namespace, bound, tell, without=without)
        for holder in self.each:
            holder.check_successor(taken[holder.flavour])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for holder in self.each:
                stack.enter_context(holder)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
