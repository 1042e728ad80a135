"""Every schedule of a small direct grant on etcd: no two are ever certain to hold the name.

One holds, one waits behind it and is named by the holder's release, and one waits behind that one.
Requests land in any order and at any moment, their answers come at any later one, a release may get
lost, and then the lease of who sent it runs out. The one that was granted the name directly counts
its time from its own last attempt; the one behind it loses patience with an entry that could hold,
and does not say that somebody came. Variants that are known to be wrong must be caught, or the
check is worth nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

LAST = 7
"""When the model ends."""
HANDED = 3
"""For how long a direct grant lasts, and for how long others have patience with it."""
GRACE = 1
LEASE = 2
"""When the lease of the holder runs out, if nothing else ends its entry."""
FOREVER = LAST + 1

WAITING, GRANTED, HELD, GONE = range(4)
"""What the entry of the second one says."""
NOT, SENT, DONE, FAILED = range(4)
"""What became of a request: it was not sent, it was, and its answer is on its way."""


class State(NamedTuple):
    """The store, what is on its way, and what each of the three knows."""

    time: int = 0
    first: bool = True
    """Whether the entry of the holder is there."""
    second: int = WAITING
    change: int = 0
    """Counts the changes of the second one's entry."""
    third: bool = False
    """Whether the third one holds."""
    release: int = NOT
    told: int = NOT
    """The wake-up that follows a direct grant."""
    asked: int = 0
    """When the second one sent its last attempt that was answered with a place in line."""
    attempt: tuple[int, int] = (NOT, 0)
    """What became of its next one, and when that was sent."""
    read: int = NOT
    ends: int = -1
    """Until when the second one holds for certain."""
    confirm: int = NOT
    seen: tuple[int, int] = (-1, 0)
    """Which change of the entry in front the third one saw first, and when."""
    skip: tuple[int, int] = (NOT, 0)
    take: int = NOT

    @property
    def certain(self) -> list[str]:
        """Those who are certain to hold."""
        holds = {
            "first": self.release == NOT,
            "second": self.time < self.ends,
            "third": self.third,
        }
        return [who for who, so in holds.items() if so]


class Protocol:
    """The rules; variants override one of them."""

    def released(self, state: State) -> State:
        """A release lands: it grants the name to the one it knows, in the same transaction."""
        if state.second == WAITING and state.change == 0:
            return state._replace(first=False, second=GRANTED, change=1, told=SENT)
        return state._replace(first=False)

    def sent(self, state: State) -> State:
        """A release is sent."""
        return state

    def found(self, state: State) -> State:
        """The second one has read, after it was woken, that it was granted the name."""
        return state._replace(ends=state.asked + HANDED)

    def placed(self, state: State, when: int) -> State:
        """The second one learns that it stands in line, by an attempt that was sent then."""
        return state._replace(asked=when)

    def confirmed(self, state: State) -> State:
        """The second one says in its entry that it came."""
        if state.second == GONE:
            return state._replace(confirm=FAILED)
        return state._replace(second=HELD, change=state.change + 1, confirm=DONE)

    def skipped(self, state: State) -> State:
        """The third one takes the place of one that did not come."""
        if state.second in (WAITING, GRANTED) and state.change == state.skip[1]:
            return state._replace(second=GONE)
        return state

    patience = HANDED

    # What can happen next.

    def steps(self, state: State) -> Iterator[State]:
        if state.time < LAST:
            yield state._replace(time=state.time + 1)
        yield from self._of_first(state)
        yield from self._of_second(state)
        yield from self._of_third(state)

    def _of_first(self, state: State) -> Iterator[State]:
        if state.release == NOT:
            yield self.sent(state._replace(release=SENT))
        elif state.release == SENT:
            yield self.released(state)._replace(release=DONE)
            yield state._replace(release=FAILED)
        elif state.release == FAILED and state.first and state.time >= LEASE:
            yield state._replace(first=False)

    def _of_second(self, state: State) -> Iterator[State]:
        idle = state.ends < 0 and state.second != GONE
        what, when = state.attempt
        if idle and what == NOT and state.read == NOT:
            yield state._replace(attempt=(SENT, state.time))
            if state.told == SENT:
                yield state._replace(told=DONE, read=SENT)
        if what == SENT and state.first:
            yield state._replace(attempt=(FAILED, when))
        elif what == SENT and state.second != GONE:
            change = state.change + 1
            yield state._replace(attempt=(DONE, when), second=HELD, change=change)
        elif what == DONE:
            yield state._replace(attempt=(NOT, 0), ends=FOREVER)
        elif what == FAILED:
            yield self.placed(state._replace(attempt=(NOT, 0)), when)
        yield from self._granted(state)

    def _granted(self, state: State) -> Iterator[State]:
        if state.read == SENT:
            yield state._replace(read=DONE if state.second == GRANTED else FAILED)
        elif state.read == DONE:
            yield self.found(state._replace(read=NOT))
        elif state.read == FAILED:
            yield state._replace(read=NOT)
        if state.confirm == NOT and state.time < state.ends < FOREVER:
            yield state._replace(confirm=SENT)
        elif state.confirm == SENT:
            yield self.confirmed(state)
        elif state.confirm == DONE and state.time < state.ends:
            yield state._replace(ends=FOREVER)
        elif state.confirm == FAILED and state.ends < FOREVER:
            yield state._replace(ends=min(state.ends, state.time))

    def _of_third(self, state: State) -> Iterator[State]:
        late = not state.first and state.second in (WAITING, GRANTED)
        if late and state.seen[0] != state.change:
            yield state._replace(seen=(state.change, state.time))
        change, since = state.seen
        patience = self.patience if state.second == GRANTED else GRACE
        if late and change == state.change and state.time >= since + patience:
            yield state._replace(skip=(SENT, change))
        if state.skip[0] == SENT:
            yield self.skipped(state)._replace(skip=(NOT, 0))
        if not state.third and not state.first and state.second == GONE:
            yield state._replace(third=True)


def _overlap(protocol: Protocol) -> State | None:
    """A state in which two are certain to hold, if any can be reached."""
    seen, left = {State()}, [State()]
    while left:
        for state in protocol.steps(left.pop()):
            if len(state.certain) > 1:
                return state
            if state not in seen:
                seen.add(state)
                left.append(state)
    assert any(state.second == HELD for state in seen)
    assert any(state.third for state in seen)
    assert any(state.time < state.ends < FOREVER for state in seen)
    return None


def test_a_direct_grant_never_overlaps() -> None:
    assert _overlap(Protocol()) is None


class ToldBeforeWritten(Protocol):
    """The second one is woken as the release is sent, and relies on that."""

    def sent(self, state: State) -> State:
        return state._replace(told=SENT, read=DONE if state.second == WAITING else NOT)


class CountedFromTheWakeUp(Protocol):
    def found(self, state: State) -> State:
        return state._replace(ends=state.time + HANDED)


class CountedFromTheAnswer(Protocol):
    def placed(self, state: State, when: int) -> State:
        return state._replace(asked=state.time)


class SkippedWithoutALook(Protocol):
    def skipped(self, state: State) -> State:
        return state._replace(second=GONE)


class Impatient(Protocol):
    patience = HANDED - 2


@pytest.mark.parametrize(
    "wrong",
    [
        ToldBeforeWritten,
        CountedFromTheWakeUp,
        CountedFromTheAnswer,
        SkippedWithoutALook,
        Impatient,
    ],
)
def test_what_is_known_to_be_wrong_is_caught(wrong: type[Protocol]) -> None:
    assert _overlap(wrong()) is not None
