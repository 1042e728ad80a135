"""The one rule of the resource's half: which fence is refused, given what is remembered.

Every guard keeps this rule: those that run Python use it, those that run SQL or Lua say the same
and are tested against it. No I/O here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.claim import (
    LARGEST_TOKEN,
    MOST_SLOTS,
    Fence,
    FenceKeys,
    Keys,
    Mode,
    check_fence,
    check_name,
)
from holdfast.errors import Incompatible, InvalidName, StaleFence, Unsupported
from holdfast.lease import LeaseBase

__all__ = [
    "NOBODY",
    "Full",
    "Memory",
    "Stamp",
    "as_fence",
    "check_resource",
    "enter",
    "pack",
    "refusal",
    "stale",
    "unpack",
]

FORMAT = 1


class Stamp(NamedTuple):
    """What fences are compared by: the deployment's epoch first."""

    epoch: int
    token: int


NOBODY = Stamp(-1, -1)
MOST_REMEMBERED_SLOTS = 4096
"""Slots that one memory has room for; in SQL and Redis each has a row or field of its own."""


class Full(Unsupported):
    """There is no room for what would have to be remembered. Nothing is forgotten instead: that
    would let a stale holder in."""


class Memory(NamedTuple):
    """What a resource remembers. It belongs to one lock, and to one kind of it."""

    name: str
    """The lock's name."""
    writer: Stamp = NOBODY
    """The highest exclusive fence that entered."""
    highest: Stamp = NOBODY
    """The highest exclusive or shared fence that entered."""
    slots: Mapping[int, Stamp] = {}
    """Of a semaphore: the highest fence that entered, slot by slot."""


def stamp(fence: Fence) -> Stamp:
    return Stamp(fence.epoch, fence.token)


def refusal(memory: Memory | None, fence: Fence) -> Fence | None:
    """The fence that stands against this one, or ``None`` if it may enter.

    An exclusive fence is refused below any that entered, a shared one below the highest writer
    only, one of a semaphore below the highest of its own slots. Equal is never refused.
    """
    if memory is None:
        return None
    semaphore = fence.mode is Mode.SLOTS
    if memory.name != fence.name or (semaphore and memory.highest != NOBODY):
        mode = Mode.SLOTS if memory.slots else Mode.EXCLUSIVE
        return Fence(memory.name, mode, (), *max(memory.highest, *memory.slots.values(), NOBODY))
    if semaphore:
        return _slot_refusal(memory, fence)
    if memory.slots:
        slots = tuple(memory.slots)[:MOST_SLOTS]
        return Fence(memory.name, Mode.SLOTS, slots, *max(memory.slots.values()))
    against = memory.writer if fence.mode is Mode.SHARED else memory.highest
    if stamp(fence) >= against:
        return None
    mode = Mode.EXCLUSIVE if against == memory.writer else Mode.SHARED
    return Fence(memory.name, mode, (), *against)


def _slot_refusal(memory: Memory, fence: Fence) -> Fence | None:
    for slot in fence.slots:
        entered = memory.slots.get(slot, NOBODY)
        if stamp(fence) < entered:
            return Fence(memory.name, Mode.SLOTS, (slot,), *entered)
    return None


def enter(memory: Memory | None, fence: Fence) -> Memory:
    """What is remembered once the fence has entered; the same object if that changes nothing."""
    memory = Memory(fence.name) if memory is None else memory
    mine = stamp(fence)
    if fence.mode is Mode.SLOTS:
        if all(memory.slots.get(slot) == mine for slot in fence.slots):
            return memory
        slots = {**memory.slots, **dict.fromkeys(fence.slots, mine)}
        if len(slots) > MOST_REMEMBERED_SLOTS:
            raise Full(f"{fence.name!r}: fences of {MOST_REMEMBERED_SLOTS} slots are remembered")
        return memory._replace(slots=slots)
    writer = mine if fence.mode is Mode.EXCLUSIVE else memory.writer
    highest = max(memory.highest, mine)
    if (writer, highest) == (memory.writer, memory.highest):
        return memory
    return memory._replace(writer=writer, highest=highest)


def tell_refused(resource: str, fence: Fence) -> None:
    """Tells the observers of the process, if it has any, that a guard has refused a fence."""
    if "holdfast.core.events" in sys.modules:  # else no observer exists
        from holdfast.core import events

        events.refused(fence, resource)


def stale(resource: str, fence: Fence, against: Fence) -> StaleFence:
    """The error, in words that a person understands; tells observers of the refusal."""
    tell_refused(resource, fence)
    return StaleFence(
        f"{resource!r} refused {_described(fence)}: {_why(fence, against)}",
        fence=fence,
        highest=against,
    )


def _why(fence: Fence, against: Fence) -> str:
    if fence.name != against.name:
        return (
            f"it is guarded by the lock {against.name!r}, and this is another one: "
            "name the resource after its lock"
        )
    if (fence.mode is Mode.SLOTS) != (against.mode is Mode.SLOTS):
        used = "a semaphore" if against.mode is Mode.SLOTS else "a lock"
        asked = "a semaphore" if fence.mode is Mode.SLOTS else "a lock"
        return f"it is guarded by {against.name!r} as {used}, and can't be by it as {asked}"
    who = "reader" if against.mode is Mode.SHARED else "holder"
    if fence.epoch < against.epoch:
        return f"a {who} of the later epoch {against.epoch} (token {against.token}) was here"
    where = f" in slot {against.slots[0]}" if against.slots else ""
    return f"a later {who}{where}, with token {against.token}, has been here since"


def _described(fence: Fence) -> str:
    epoch = f" of epoch {fence.epoch}" if fence.epoch else ""
    return f"token {fence.token}{epoch} of {fence.name!r} ({fence.mode})"


def pack(memory: Memory) -> str:
    """What is remembered, as text to keep."""
    fields: dict[str, Any] = {"format": FORMAT, **memory._asdict()}
    fields["slots"] = {str(slot): entered for slot, entered in memory.slots.items()}
    return json.dumps(fields)


def unpack(text: str | bytes, where: str) -> Memory:
    """Reads it back; raises ``Incompatible`` for what this version can't read."""
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']}")
        slots = {int(slot): _kept(entered) for slot, entered in fields["slots"].items()}
        stamps = _kept(fields["writer"]), _kept(fields["highest"])
        return Memory(check_name(fields["name"]), *stamps, slots)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Incompatible(
            f"{where}: this version can't read the stored fences ({error}), so it refuses all"
        ) from None


def _kept(numbers: Any) -> Stamp:
    epoch, token = numbers
    if not all(type(number) is int and -1 <= number <= LARGEST_TOKEN for number in numbers):
        raise ValueError("a number that no fence has")
    return Stamp(epoch, token)


def as_fence(source: Any, fence_keys: Keys = ()) -> Fence:
    """The fence of a lease, or the fence itself, also as the text that a header carries.

    A lease is this process's own. Anything else may come from outside: with keys it must be
    signed by one of them, or ``UntrustedFence`` is raised.
    """
    if isinstance(source, LeaseBase):
        return check_fence(source.fence)
    if isinstance(source, str):
        source = Fence.parse(source)
    if not isinstance(source, Fence):
        hint = "; of a MultiLease give one of .leases" if hasattr(source, "leases") else ""
        raise TypeError(f"a guard takes a lease or a fence, not {type(source).__name__}{hint}")
    try:
        if (source.mode is Mode.SLOTS) != bool(source.slots):
            raise ValueError("its slots do not match its mode")
        check_fence(source)
    except ValueError as error:
        raise ValueError(f"not a fence: {source!r:.120} ({error})") from None
    return FenceKeys(fence_keys).verify(source)


def check_resource(resource: str) -> str:
    """A resource's name is any text that a lock's name could be."""
    if not isinstance(resource, str):
        raise TypeError(f"a resource's name is text, not {type(resource).__name__}")
    try:
        return check_name(resource)
    except InvalidName as error:
        raise InvalidName(str(error).replace("a lock's name", "a resource's name")) from None
