"""Several leases as one: acquired together, and lost together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from holdfast.claim import Fence
from holdfast.core.drive import run_now
from holdfast.durations import Duration
from holdfast.errors import LockLost
from holdfast.lease import AsyncLease, Lease, LeaseBase
from holdfast.one_process import OneProcess

__all__ = ["AsyncMultiLease", "MultiLease", "MultiLeaseBase"]

L = TypeVar("L", bound=LeaseBase)


class MultiLeaseBase(OneProcess, Generic[L]):
    """``.leases[name]`` is one lease. There is no common token: each name has its own fence."""

    def __init__(self, leases: dict[str, L]) -> None:
        self.leases = leases

    @property
    def _acquired_by(self) -> Any:
        return next(iter(self.leases.values()))._acquired_by

    @property
    def names(self) -> tuple[str, ...]:
        """The names, sorted."""
        return tuple(self.leases)

    @property
    def fences(self) -> dict[str, Fence]:
        """The fence of each name."""
        return {name: lease.fence for name, lease in self.leases.items()}

    @property
    def remaining(self) -> float:
        """Seconds that are certain for all of them."""
        return min(lease.remaining for lease in self.leases.values())

    @property
    def held(self) -> bool:
        """Whether all of them are held."""
        return self.remaining > 0

    @property
    def doubtful(self) -> bool:
        """Whether one of them is doubtful."""
        return any(lease.doubtful for lease in self.leases.values())

    @property
    def lost(self) -> bool:
        """Whether one of them is lost: losing one loses all."""
        return any(lease.lost for lease in self.leases.values())

    def check(self, at_least: Duration = 0) -> None:
        """Raises ``LockLost`` unless that many seconds are certain for all of them."""
        for lease in self.leases.values():
            lease.check(at_least)

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Calls ``callback(reason)`` once, when the first lease is lost."""
        if not callable(callback):
            raise TypeError(f"on_lost() takes a function, not {type(callback).__name__}")
        reasons: list[str] = []

        def first(reason: str) -> None:
            reasons.append(reason)
            if len(reasons) == 1:
                callback(reason)

        for lease in self.leases.values():
            lease.on_lost(first)

    def _note_loss(self, error: BaseException) -> None:
        for lease in self.leases.values():
            if lease.lost:
                lease._note_loss(error)

    def _lost_error(self) -> LockLost:
        lease = next((one for one in self.leases.values() if one.lost), None)
        return (lease or next(iter(self.leases.values())))._lost_error()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "lost" if self.lost else "held" if self.held else "released"
        return f"<{type(self).__name__} {', '.join(map(repr, self.leases))}, {state}>"

    def _drop(self) -> None:
        for lease in self.leases.values():
            lease._drop()

    async def _release_block(self) -> bool:
        """At the end of a block: releases all; false if a lease is known to have been lost."""
        leases = reversed(list(self.leases.values()))
        return all([await lease._release_block() for lease in leases])

    async def _release(self) -> bool | None:
        answers = [await lease._release() for lease in reversed(list(self.leases.values()))]
        return False if False in answers else None if None in answers else True


class MultiLease(MultiLeaseBase[Lease]):
    """Several leases of the blocking client."""

    def release(self) -> bool | None:
        """Ends all of them; returns whether all were still ours, ``None`` if that is unknown."""
        return run_now(self._release())

    def extend(self, ttl: Duration | None = None) -> None:
        """Renews all of them now."""
        for lease in self.leases.values():
            lease.extend(ttl)


class AsyncMultiLease(MultiLeaseBase[AsyncLease]):
    """Several leases of the asyncio client."""

    async def release(self) -> bool | None:
        """Ends all of them; returns whether all were still ours, ``None`` if that is unknown."""
        return await self._release()

    async def extend(self, ttl: Duration | None = None) -> None:
        """Renews all of them now."""
        for lease in self.leases.values():
            await lease.extend(ttl)
