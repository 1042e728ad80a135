"""The row of a name as values, and back. No I/O.

The rules of admission are in ``core.queue``: the backend reads a row, changes its state by them,
and writes it back. An exclusive hold has columns of its own. Waiters, shared holders and slot
holders are entries in one text, one line each, in the stored column ``crowd``. SQL statements read
and write the first words of a line, too (``sql``). Times are the server's, in µs.
"""

from __future__ import annotations

import json

from holdfast.claim import Claim, Mode, Record
from holdfast.core.queue import MICROS, HeldClaim, NameState, QueuedClaim
from holdfast.errors import Incompatible
from holdfast.stores.mysql.protocol import Row

__all__ = [
    "CALLED",
    "MICROS",
    "NONE",
    "RowState",
    "empty_state",
    "parse_state",
    "read_record",
    "read_state",
]

NONE = "-"
"""An empty word of an entry, as it is stored."""
CALLED = "r"
"""Prefix of the end of a reservation, as it is stored. The word before it is the subscription, so
a subscription finds its called entries by searching for both words."""
LARGEST_NUMBER = 2**63 - 1
COUNTS = LARGEST_NUMBER - 1
"""The largest token or version that can still be incremented."""
LARGEST_LIMIT = 2**31 - 1
MOST_SLOTS = 65536
_MODES: dict[str, Mode] = {mode.value: mode for mode in Mode}


class RowState(NameState[str]):
    """The state of a name at one moment of the server's clock. A waiter is woken through its
    subscription; it has none before its first wait."""

    __slots__ = ("now", "version")

    def __init__(self, name: str, now: int, store: str) -> None:
        super().__init__(name, store)
        self.now, self.version = now, 0

    @property
    def exclusive(self) -> HeldClaim | None:
        """The hold that has columns of its own."""
        holds = self.holds.values()
        return next((held for held in holds if held.claim.mode is Mode.EXCLUSIVE), None)

    @property
    def woken_subscriptions(self) -> list[QueuedClaim[str]]:
        """The waiters to wake after this state is written."""
        return [queued for queued in self.woken if queued.wake]

    def entries_text(self) -> bytes:
        """All entries as they are stored, holders first; empty if there are none."""
        holds = (held for held in self.holds.values() if held.claim.mode is not Mode.EXCLUSIVE)
        lines = [_hold_text(held) for held in holds]
        lines += [_waiter_text(queued) for queued in self.queue.values()]
        return "".join(lines).encode()


def _hold_text(held: HeldClaim) -> str:
    slots = ",".join(map(str, held.slots)) or NONE
    words = f"{held.token} {held.ends} {NONE} {NONE} {held.since}"
    return _line(held.claim, words, f"0 {slots}")


def _waiter_text(queued: QueuedClaim[str]) -> str:
    called = f"{CALLED}{queued.reserved}" if queued.reserved else NONE
    words = f"0 {queued.ends} {queued.wake or NONE} {called} {queued.since}"
    return _line(queued.claim, words, f"{queued.behind} {NONE}")


def _line(claim: Claim, words: str, last: str) -> str:
    return (
        f"{claim.owner} {claim.mode.value} {words} {claim.weight} {claim.limit} {last} "
        f"{json.dumps(claim.label)}\n"
    )


def empty_state(name: str, now: int, store: str) -> RowState:
    """Returns the state of a name that has no row yet."""
    return RowState(name, now, store)


def read_state(row: Row, name: str, store: str) -> RowState:
    """Decodes a row of now, version, token, owner, label, since, ends, crowd, name and skew.
    Raises ``Incompatible`` for a row that this version can't have written."""
    try:
        return parse_state(row, name, store)
    except ValueError as error:
        raise Incompatible(
            f"the row of {name!r} on {store} can't be read: {error}. It is damaged, or another "
            "version wrote it. When no client uses the name, delete its row in the table of locks"
        ) from None


def read_record(row: Row, name: str, store: str) -> Record:
    """Decodes a row of value, token and age. Raises ``Incompatible`` if it can't be read."""
    try:
        value, token, age = (value or b"" for value in row)
        aged = 0 if age.startswith(b"-") else _number(age)  # the clock was set back
        return Record(_text(value), _number(token), aged / MICROS)
    except ValueError as error:
        raise Incompatible(f"the record of {name!r} on {store} can't be read: {error}") from None


def parse_state(row: Row, name: str, store: str) -> RowState:
    """Like ``read_state``, but raises ``ValueError``, with a text that shows no stored value."""
    now, version, token, owner, label, since, ends, entries, _, skew = (v or b"" for v in row)
    state = RowState(name, _number(now), store)
    state.skew = _number(skew)
    state.version, state.token = _number(version, COUNTS), _number(token, COUNTS)
    began, ended, holder = _number(since), _number(ends), _text(owner)
    if holder:
        shown = label.decode(errors="replace")  # it is only displayed
        claim = Claim(name, Mode.EXCLUSIVE, 1, 0, 0.0, holder, shown)
        state.holds[holder] = HeldClaim(claim, state.token, (), began, ended)
    if entries:
        *lines, rest = _text(entries).split("\n")
        if rest:
            raise ValueError("its last entry is incomplete")
        for line in lines:
            _read_entry(state, line)
    return state


def _read_entry(state: RowState, line: str) -> None:
    words = line.split(" ", 11)
    if len(words) != 12:
        raise ValueError("an entry has too few words")
    owner, mode, token, ends, subscription, called, since, weight, limit, behind, slots, label = (
        words
    )
    if mode not in _MODES or not owner or slots.count(",") >= MOST_SLOTS:
        raise ValueError("an entry has no owner, an unknown mode or too many slots")
    if owner in state.holds or owner in state.queue:
        raise ValueError("an owner has two entries")
    claim = Claim(
        state.name, _MODES[mode], _number(weight, LARGEST_LIMIT), _number(limit, LARGEST_LIMIT),
        0.0, owner, _read_text(label),
    )  # fmt: skip
    given, began, ended = _number(token, COUNTS), _number(since), _number(ends)
    numbers = () if slots == NONE else tuple(_number(n, LARGEST_LIMIT) for n in slots.split(","))
    if given:
        state.holds[owner] = HeldClaim(claim, given, numbers, began, ended)
        return
    queued = state.queue[owner] = QueuedClaim(claim, began, ended)
    queued.reserved = 0 if called == NONE else _number(called.removeprefix(CALLED))
    queued.wake = "" if subscription == NONE else subscription
    queued.behind = _number(behind)


def _number(text: bytes | str, most: int = LARGEST_NUMBER) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20 and (number := int(text)) <= most:
        return number
    raise ValueError(f"a number is not between 0 and {most}")


def _text(stored: bytes) -> str:
    try:
        return stored.decode()
    except UnicodeDecodeError:
        raise ValueError("a text is not UTF-8") from None


def _read_text(label: str) -> str:
    try:
        text = json.loads(label)
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ValueError("the label of an entry is not a text")
    return text
