"""The rule of admission, for backends that keep the state of a name as values.

A name has a capacity, a claim has a weight, and claims are admitted in order of arrival while
they fit. Waiters in front count as if they held already. So no claim overtakes another, and readers
or permits that fit together are admitted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from holdfast.claim import Claim, Mode
from holdfast.errors import LimitMismatch

__all__ = ["Share", "check_limit", "fits", "free_slots"]


class Share(NamedTuple):
    """What one holder or waiter takes of a name."""

    mode: Mode
    weight: int
    slots: tuple[int, ...] = ()


def fits(mode: Mode, weight: int, limit: int, taken: Sequence[Share]) -> bool:
    """Whether a claim fits beside the holders and the waiters in front of it."""
    if mode is Mode.EXCLUSIVE:
        return not taken
    if mode is Mode.SHARED:
        return all(share.mode is Mode.SHARED for share in taken)
    return sum(share.weight for share in taken) + weight <= limit


def free_slots(weight: int, limit: int, holders: Iterable[Share]) -> tuple[int, ...]:
    """The ``weight`` lowest slots that no holder has."""
    used = {slot for share in holders for slot in share.slots}
    free = (slot for slot in range(limit) if slot not in used)
    return tuple(islice(free, weight))


def check_limit(claim: Claim, limit: int, *, slots: bool, store: str) -> None:
    """Raises ``LimitMismatch`` if the name is in use with another limit, or as another kind.

    ``limit`` and ``slots`` describe the current use of the name.
    """
    if (claim.mode is Mode.SLOTS) != slots:
        used, asked = ("a semaphore", "a lock") if slots else ("a lock", "a semaphore")
        raise LimitMismatch(
            f"{claim.name!r} on {store} is in use as {used} and can't be {asked} at the same time"
        )
    if slots and claim.limit != limit:
        raise LimitMismatch(
            f"{claim.name!r} on {store} is in use with a limit of {limit}; "
            f"a limit of {claim.limit} needs a name without holders and waiters"
        )
