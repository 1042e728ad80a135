"""Guards for resources that live in the lock's own store: no memory, and no clock at all.

The write and the check that the hold is still there are one transaction of the store. Once the
hold has ended, by whatever cause, every request is refused, so no fence has to enter.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from holdfast.claim import Fence
from holdfast.core.drive import run_now
from holdfast.errors import StaleFence
from holdfast.fencing.rule import tell_refused
from holdfast.lease import AsyncLease, LeaseBase

__all__ = ["OwnStoreGuard"]


class OwnStoreGuard:
    """Reads and writes that go through only while the lease's hold is in the store.

    Each raises ``StaleFence`` once it is not. On a lease of the asyncio client they are awaited.
    """

    store: str
    """The kind of store, as its backend's type is called."""

    def __init__(self, lease: Any) -> None:
        if not isinstance(lease, LeaseBase):
            raise TypeError(
                f"this guard takes the lease itself, not {type(lease).__name__}: it checks the "
                "hold in the lock's own store"
            )
        self._lease = lease
        self._backend: Any = lease._engine.backend
        kind = type(self._backend).__name__
        if kind != f"{self.store}Backend":
            raise TypeError(
                f"the lock of {lease.name!r} is not in {self.store}, but on "
                f"{lease._engine.store.display}: guard the resource where it lives"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._lease!r}>"

    def get(self, key: str) -> Any:
        """What is stored under the key, as bytes, or ``None``."""
        return self._do(self._get(self._key(key)))

    def put(self, key: str, value: bytes | str) -> Any:
        """Stores a value under the key."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        return self._do(self._put(self._key(key), data))

    def delete(self, key: str) -> Any:
        """Deletes the key; whether it was there."""
        return self._do(self._delete(self._key(key)))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return work if isinstance(self._lease, AsyncLease) else run_now(work)

    def _key(self, key: str) -> str:
        if not isinstance(key, str) or not key or "\0" in key:
            raise ValueError(f"a key is text that is not empty; not {key!r}")
        if key.startswith(self._own()):
            raise ValueError(f"{key!r} is among the keys of Holdfast itself")
        return key

    def _own(self) -> str:
        """What all keys of Holdfast's own begin with."""
        raise NotImplementedError

    async def _get(self, key: str) -> bytes | None:
        raise NotImplementedError

    async def _put(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    async def _delete(self, key: str) -> bool:
        raise NotImplementedError

    async def _refused(self, key: str) -> StaleFence:
        """Names our token and the current holder."""
        lease, fence = self._lease, self._lease.fence
        tell_refused(key, fence)
        message = f"{key!r} refused token {fence.token} of {fence.name!r} ({fence.mode})"
        holders = (await self._backend.look(lease.name)).holders
        latest = max(holders, key=lambda holder: holder.token, default=None)
        if latest is None:
            return StaleFence(f"{message}: that hold has ended; nobody holds it now", fence=fence)
        highest = Fence(lease.name, latest.mode, latest.slots, fence.epoch, latest.token)
        who = f"that hold has ended; now token {latest.token} holds it, {latest}"
        return StaleFence(f"{message}: {who}", fence=fence, highest=highest)
