"""Whom to ask for the way: sentinels, or nodes of a cluster. One that hangs costs little time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.redis.connection import Access, Address

if TYPE_CHECKING:
    from holdfast.stores.redis.routes import Wire

__all__ = ["HUNG_SECONDS", "Guides", "share"]

T = TypeVar("T")

HUNG_SECONDS = 1.0
"""How long one is waited for while there are others to ask."""


def share(deadline: float, others: int, seconds: float = HUNG_SECONDS) -> float:
    """Until when one may take: never more than half of the time while others are still to come."""
    if not others:
        return deadline
    moment = now()
    return moment + min(seconds, max(0.0, deadline - moment) / 2)


class Guides:
    """Who of them was of use last. Needs no lock: at worst somebody is asked in vain."""

    def __init__(self) -> None:
        self._last: Address | None = None
        self.silent: set[Address] = set()
        """Those that did not answer when they were asked last."""

    def in_turn(self, addresses: Iterable[Address]) -> list[Address]:
        """The one that knew the way last comes first, those that did not answer come last."""
        return sorted(addresses, key=lambda each: (each in self.silent, each != self._last))

    async def ask(
        self,
        wire: Wire,
        access: Access,
        addresses: Iterable[Address],
        question: bytes,
        read: Callable[[Address, Any], T],
        until: float | None,
    ) -> T:
        """What the first one says that ``read`` makes sense of: it raises where there is none."""
        deadline = now() + access.seconds_until(until)
        turns, failures = self.in_turn(addresses), []
        for others, address in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            by = share(deadline, others)
            try:
                (reply,) = await wire.once(access, address, question, until=by)
                found = read(address, reply)
            except BackendUnavailable as error:
                self.silent.add(address)
                failures.append(str(error))
                continue
            self._last = address
            self.silent.discard(address)
            return found
        raise BackendUnavailable("; ".join(failures))
