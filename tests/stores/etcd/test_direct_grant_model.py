"""Every schedule of a small direct grant on etcd: never are two clients certain to hold the name.

Three clients: the first holds, the second waits and is the next waiter of the holder's release, and
the third waits behind the second. Requests arrive in any order and at any time, and so do their
replies. A release may get lost; then the lease of the first client runs out. The second client
counts the time of a direct grant from its own last attempt. The third client skips an entry that
could hold and is not confirmed within its grace. Variants that are known to be wrong must be
caught, or the check proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

LAST = 7
"""When the model ends."""
DIRECT = 3
"""How long a direct grant lasts without confirmation, and its grace."""
GRACE = 1
LEASE = 2
"""When the lease of the first client runs out, if nothing else ends its entry."""
FOREVER = LAST + 1

WAITING, GRANTED, HELD, GONE = range(4)
"""States of the second client's entry."""
NOT, SENT, DONE, FAILED = range(4)
"""States of a request: not sent, sent, and succeeded or failed with the reply under way."""


class State(NamedTuple):
    """The store, the requests and replies under way, and what each client knows."""

    time: int = 0
    first: bool = True
    """Whether the first client's entry exists."""
    second: int = WAITING
    change: int = 0
    """Counts the changes of the second client's entry."""
    third: bool = False
    """Whether the third client holds."""
    release: int = NOT
    wakeup: int = NOT
    """The wake-up that follows a direct grant."""
    asked: int = 0
    """When the second client sent the last attempt whose reply was that it still waits."""
    attempt: tuple[int, int] = (NOT, 0)
    """State of its next attempt, and when that was sent."""
    read: int = NOT
    ends: int = -1
    """Until when the second client is certain to hold."""
    confirm: int = NOT
    seen: tuple[int, int] = (-1, 0)
    """Which change of the entry ahead the third client has seen, and when it first did."""
    skip: tuple[int, int] = (NOT, 0)
    take: int = NOT

    @property
    def certain(self) -> list[str]:
        """The clients that are certain to hold."""
        holds = {
            "first": self.release == NOT,
            "second": self.time < self.ends,
            "third": self.third,
        }
        return [client for client, holds_it in holds.items() if holds_it]


class Protocol:
    """The rules; each variant overrides one of them."""

    def released(self, state: State) -> State:
        """A release arrives: it grants the name to the waiter that it knows, in the same
        transaction."""
        if state.second == WAITING and state.change == 0:
            return state._replace(first=False, second=GRANTED, change=1, wakeup=SENT)
        return state._replace(first=False)

    def sent(self, state: State) -> State:
        """A release is sent."""
        return state

    def found(self, state: State) -> State:
        """The second client has read, after its wake-up, that the name is granted to it."""
        return state._replace(ends=state.asked + DIRECT)

    def queued(self, state: State, when: int) -> State:
        """The second client learns that it still waits, by an attempt that was sent at ``when``."""
        return state._replace(asked=when)

    def confirmed(self, state: State) -> State:
        """The second client confirms the grant in its entry."""
        if state.second == GONE:
            return state._replace(confirm=FAILED)
        return state._replace(second=HELD, change=state.change + 1, confirm=DONE)

    def skipped(self, state: State) -> State:
        """The third client deletes an entry that was not confirmed in time."""
        if state.second in (WAITING, GRANTED) and state.change == state.skip[1]:
            return state._replace(second=GONE)
        return state

    grace = DIRECT

    def steps(self, state: State) -> Iterator[State]:
        """All states that can follow."""
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
            if state.wakeup == SENT:
                yield state._replace(wakeup=DONE, read=SENT)
        if what == SENT and state.first:
            yield state._replace(attempt=(FAILED, when))
        elif what == SENT and state.second != GONE:
            change = state.change + 1
            yield state._replace(attempt=(DONE, when), second=HELD, change=change)
        elif what == DONE:
            yield state._replace(attempt=(NOT, 0), ends=FOREVER)
        elif what == FAILED:
            yield self.queued(state._replace(attempt=(NOT, 0)), when)
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
        grace = self.grace if state.second == GRANTED else GRACE
        if late and change == state.change and state.time >= since + grace:
            yield state._replace(skip=(SENT, change))
        if state.skip[0] == SENT:
            yield self.skipped(state)._replace(skip=(NOT, 0))
        if not state.third and not state.first and state.second == GONE:
            yield state._replace(third=True)


def _overlap(protocol: Protocol) -> State | None:
    """A reachable state in which two clients are certain to hold; None if there is none."""
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


class WokenBeforeWritten(Protocol):
    """The second client is woken when the release is sent, and relies on that."""

    def sent(self, state: State) -> State:
        return state._replace(wakeup=SENT, read=DONE if state.second == WAITING else NOT)


class CountedFromTheWakeUp(Protocol):
    def found(self, state: State) -> State:
        return state._replace(ends=state.time + DIRECT)


class CountedFromTheAnswer(Protocol):
    def queued(self, state: State, when: int) -> State:
        return state._replace(asked=state.time)


class SkippedWithoutCompare(Protocol):
    def skipped(self, state: State) -> State:
        return state._replace(second=GONE)


class SkippedTooEarly(Protocol):
    grace = DIRECT - 2


@pytest.mark.parametrize(
    "wrong",
    [
        WokenBeforeWritten,
        CountedFromTheWakeUp,
        CountedFromTheAnswer,
        SkippedWithoutCompare,
        SkippedTooEarly,
    ],
)
def test_what_is_known_to_be_wrong_is_caught(wrong: type[Protocol]) -> None:
    assert _overlap(wrong()) is not None
