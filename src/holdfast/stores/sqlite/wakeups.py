"""The embedded store's wake-ups: one socket per backend that waits, and sending to others'.

Where there are no datagram sockets, or none can be bound, waits are short and jittered instead.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.core import log
from holdfast.core.contract import Runtime
from holdfast.errors import GuaranteeNotMet
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.sqlite.datagram import DatagramSubscription, Delivery, Folder, supported
from holdfast.stores.sqlite.file import Place
from holdfast.stores.sqlite.queue import Wake

if TYPE_CHECKING:
    import asyncio

__all__ = ["Wakes"]

POLL_SECONDS = (0.01, 0.05)
FULL_TRIES = 20
FULL_PAUSE_SECONDS = 0.001
REBIND_SECONDS = 60.0


class Wakes:
    """Waits for our own wake-ups and delivers others'."""

    def __init__(self, place: Place, runtime: Runtime) -> None:
        self._place, self._runtime = place, runtime
        self._folder = Folder(f"{place.path}-wake", self._make_folder, place.file_mode)
        self._subscription: DatagramSubscription | None = None
        self._hub: BlockingWakeupHub | AsyncWakeupHub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry_at = 0.0 if supported() else float("inf")
        # Re-entrant: a signal handler may wait in the middle of what its thread does here.
        self._mutex = threading.RLock()

    def _make_folder(self, path: str) -> None:
        try:
            Path(path).mkdir(0o700)
            self._place.share_folder(path, self._place.wake_folder_mode)
        except FileExistsError:
            pass
        found = Path(path).lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_IWOTH
        if not private or not self._place.trusts(found.st_uid):
            raise GuaranteeNotMet(f"{path} is not a folder for wake-ups of ours: remove it")

    def address(self) -> str:
        """Where we can be woken, from now on; empty if we have to look for ourselves."""
        subscription = self._subscription
        if subscription is not None and (self._runtime.blocking or self._same_loop()):
            return subscription.address
        with self._mutex:
            return self._bind(instead_of=subscription)

    def _same_loop(self) -> bool:
        import asyncio

        return self._loop is asyncio.get_running_loop()

    def _bind(self, instead_of: DatagramSubscription | None) -> str:
        if self._subscription is not instead_of and self._subscription is not None:
            return self._subscription.address  # another thread was faster
        if self._runtime.now() < self._retry_at:
            return ""
        self._unbind()
        try:
            subscription = self._folder.bind()
        except OSError as error:
            self._retry_at = self._runtime.now() + REBIND_SECONDS
            log.warning("no wake-ups in %s, waiting by polling: %s", self._folder.path, error)
            return ""
        if self._subscription is not None:  # a signal handler was faster
            subscription.close()
            return self._subscription.address
        if self._runtime.blocking:
            if not isinstance(self._hub, BlockingWakeupHub):
                self._hub = BlockingWakeupHub()
            self._hub.attach(subscription)
        else:
            self._listen(subscription)
        self._subscription = subscription
        return subscription.address

    def _listen(self, subscription: DatagramSubscription) -> None:
        import asyncio

        if not isinstance(self._hub, AsyncWakeupHub):
            self._hub = AsyncWakeupHub()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(subscription.fileno(), self._heard, subscription, self._hub)

    @staticmethod
    def _heard(subscription: DatagramSubscription, hub: AsyncWakeupHub) -> None:
        for key in subscription.read():
            if key == EVERYBODY:
                hub.wake_all()
            else:
                hub.wake(key)

    def _unbind(self) -> None:
        subscription, self._subscription = self._subscription, None
        loop, self._loop = self._loop, None
        if subscription is None:
            return
        if loop is not None and not loop.is_closed():
            loop.remove_reader(subscription.fileno())
        subscription.close()

    async def wait(self, owner: str, until: float) -> None:
        """Returns when the owner was woken, at ``until`` at the latest, or early."""
        subscription, hub, runtime = self._subscription, self._hub, self._runtime
        if subscription is None or hub is None:
            pause = min(until - runtime.now(), runtime.between(*POLL_SECONDS))
            await runtime.sleep(max(0.0, pause))
        elif not subscription.reachable():
            with self._mutex:
                self._retry_at = 0.0
                self._bind(
                    instead_of=subscription
                )  # the attempt that follows stores the new address
        elif isinstance(hub, BlockingWakeupHub):
            self._wait_blocking(hub, owner, until)
        else:
            await hub.wait(owner, until)

    def _wait_blocking(self, hub: BlockingWakeupHub, owner: str, until: float) -> None:
        try:
            hub.wait(owner, until)
        except OSError as error:
            log.debug("wake-ups at %s broke: %s", self._folder.path, error)
            self._subscription = None

    def wake(self, owner: str) -> None:
        """Ends a wait of this backend."""
        if self._hub is not None:
            self._hub.wake(owner)

    def quiet(self, owner: str) -> None:
        """Drops a wake-up that nobody will ask for."""
        if self._hub is not None:
            self._hub.forget(owner)

    async def deliver(self, wakes: Iterable[Wake]) -> set[str]:
        """Wakes them; answers the addresses where nobody lives any more."""
        dead = set()
        for owner, address in wakes:
            if self._subscription is not None and address == self._subscription.address:
                self.wake(owner)
            elif address and await self._send(owner, address) is Delivery.DEAD:
                dead.add(address)
        return dead

    async def _send(self, owner: str, address: str) -> Delivery:
        delivery = self._folder.send(address, owner)
        for _ in range(FULL_TRIES):
            if delivery is not Delivery.FULL:
                break
            await self._runtime.sleep(FULL_PAUSE_SECONDS)
            delivery = self._folder.send(address, owner)
        return delivery

    def dead_among(self, addresses: Iterable[str]) -> set[str]:
        """Those at which nobody lives any more."""
        return {address for address in addresses if not self._folder.alive(address)}

    def forget(self) -> None:
        """In a forked child: the sockets and the loop are the parent's."""
        self._mutex = threading.RLock()
        subscription, self._subscription = self._subscription, None
        hub, self._hub = self._hub, None
        self._loop = None
        if isinstance(hub, BlockingWakeupHub):
            hub.discard()
        if subscription is not None:
            subscription.close()
        self._folder.close()

    def close(self) -> None:
        """Ends all waits and removes our socket."""
        hub = self._hub
        if isinstance(hub, BlockingWakeupHub):
            hub.close()
        elif hub is not None:
            hub.wake_all()
        self._unbind()
        self._folder.close()
