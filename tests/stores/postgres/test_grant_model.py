"""A model of the direct grant of lease rows, checked in every order of events.

The procedure ``hand_over`` (``stores.postgres.sql``) writes the grant of the first waiter, commits,
and notifies the waiter in a second transaction. ``PostgresLeaseBackend.wait`` and ``core.acquire``
decide whether the waiter relies on it. Time is counted in ticks and passes at any moment: a process
may be paused, a notification may be late or lost, a session may end between the two transactions.

Each of the four rules can be broken here; the tests show that each is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

DIRECT_TICKS, LONG_TTL, SHORT_TTL = 4, 6, 2
TICKS = 10
NOBODY, RELEASER, WAITER, NEWCOMER = "nobody", "releaser", "waiter", "newcomer"


class Rules(NamedTuple):
    """The rules of a direct grant; each can be broken."""

    written_first: bool = True
    """The grant is committed before the waiter is notified."""
    counted_from_request: bool = True
    """Its certain time begins with the waiter's last request, not with its wake-up."""
    token_from_counter: bool = True
    """The token is above the last one, wherever the clock is."""
    taken_back: bool = True
    """It ends by itself, soon, if the waiter does not renew it."""
    ttl: int = LONG_TTL

    @property
    def direct_ticks(self) -> int:
        return min(DIRECT_TICKS, self.ttl)


class State(NamedTuple):
    now: int = 0
    holder: str = RELEASER
    """The holder in the row; then its end and the last token."""
    ends: int = LONG_TTL
    token: int = 1
    queued: bool = False
    """True if the waiter is in the queue."""
    notified: int = 0
    """The token of a notification that is under way; 0 for none."""
    unnotified: bool = False
    """True if the release is between its two transactions."""
    sent_at: int | None = None
    """When the waiter sent the attempt that is under way."""
    answered_at: int = 0
    """When it sent the last attempt that was answered."""
    last: int = 0
    """The last token, as that answer said."""
    direct_at: int | None = None
    """When it got a direct grant that it has not used since."""
    certain: tuple[int, int, int] = (LONG_TTL, 0, 0)
    """Until when releaser, waiter and newcomer rely on their holds."""
    has_entered: bool = False
    """True once the waiter has entered its block. Another block would be a newcomer's."""
    entered: int = 1
    """The highest token with which a block was entered."""
    fault: str = ""


def relies(state: State, who: str, until: int, token: int) -> State:
    """The waiter or the newcomer enters its block."""
    fault = "" if token > state.entered else f"token {token} after {state.entered}"
    releaser, waiter, newcomer = state.certain
    certain = (releaser, until, newcomer) if who == WAITER else (releaser, waiter, until)
    has_entered = state.has_entered or who == WAITER
    entered = max(state.entered, token)
    return state._replace(certain=certain, has_entered=has_entered, entered=entered, fault=fault)


def free(state: State) -> bool:
    return state.holder == NOBODY or state.ends <= state.now


def release(state: State, rules: Rules) -> Iterator[State]:
    """The giver's request reaches the server."""
    left = state._replace(certain=(0, *state.certain[1:]))
    if state.holder != RELEASER or state.ends <= state.now:
        return
    if not state.queued:
        yield left._replace(holder=NOBODY)
        return
    fence = state.token + 1 if rules.token_from_counter else 1  # a clock that is behind
    granted = left._replace(
        holder=WAITER,
        ends=state.now + (rules.direct_ticks if rules.taken_back else TICKS * 2),
        token=fence,
        queued=False,
        unnotified=True,
        direct_at=state.now,
    )
    if rules.written_first:
        yield granted
    else:
        yield granted._replace(unnotified=False, notified=fence)
        # The write fails, and with it the whole release; the waiter was notified.
        yield left._replace(notified=fence, queued=False, holder=NOBODY)


def answer(state: State, rules: Rules) -> State:
    """The server answers the waiter's attempt."""
    assert state.sent_at is not None
    done = state._replace(sent_at=None, answered_at=state.sent_at, direct_at=None)
    if state.holder == WAITER and not free(state):  # its own grant: the same token, for longer
        done = done._replace(ends=max(state.ends, state.now + rules.ttl))
        return relies(done, WAITER, state.sent_at + rules.ttl, state.token)
    if free(state):
        token = state.token + 1
        done = done._replace(holder=WAITER, ends=state.now + rules.ttl, token=token, queued=False)
        return relies(done, WAITER, state.sent_at + rules.ttl, token)
    return done._replace(queued=True, last=state.token)


def wake(state: State, rules: Rules) -> State:
    """The waiter gets its wake-up, and relies on the grant or attempts again."""
    woken = state._replace(notified=0)
    begins = state.answered_at if rules.counted_from_request else state.now
    if state.notified <= state.last or 2 * (state.now - begins) >= rules.direct_ticks:
        return woken
    return relies(woken, WAITER, begins + rules.direct_ticks, state.notified)


def hold(state: State, rules: Rules) -> Iterator[State]:
    """The waiter is in its block: its grant is renewed or released."""
    releaser, until, newcomer = state.certain
    if until > state.now:
        gone = state._replace(certain=(releaser, 0, newcomer), direct_at=None)
        ours = state.holder == WAITER and not free(state)
        yield gone._replace(holder=NOBODY) if ours else gone
        if ours:
            ends = state.now + rules.ttl
            certain = (releaser, max(until, ends), newcomer)
            yield state._replace(ends=max(state.ends, ends), certain=certain, direct_at=None)


def steps(state: State, rules: Rules) -> Iterator[State]:
    waits = state.sent_at is None and not state.has_entered
    yield from hold(state, rules)
    if state.now < TICKS:
        yield state._replace(now=state.now + 1)
    if state.certain[0] > state.now and state.entered == 1:
        yield from release(state, rules)
    if state.unnotified:
        yield state._replace(unnotified=False, notified=state.token)
        yield state._replace(unnotified=False)  # the session ends: no notification
    if state.notified:
        yield state._replace(notified=0)  # the connection that listens ends
        if waits:
            yield wake(state, rules)
    if waits:
        yield state._replace(sent_at=state.now)
    if state.sent_at is not None:
        yield answer(state, rules)
    if free(state) and not state.queued and state.certain[2] <= state.now:
        token, ends = state.token + 1, state.now + rules.ttl
        taken = state._replace(holder=NEWCOMER, ends=ends, token=token)
        yield relies(taken, NEWCOMER, ends, token)


def fault(state: State, rules: Rules) -> str:
    """Returns what is wrong with a state; empty if nothing is."""
    if state.fault:
        return state.fault
    sure = [who for who, until in zip("GWN", state.certain, strict=True) if until > state.now]
    if len(sure) > 1:
        return f"{' and '.join(sure)} hold at once"
    late = state.direct_at is not None and state.now >= state.direct_at + rules.direct_ticks
    if late and state.holder == WAITER and not free(state):
        return "the grant was not used, and not taken back"
    return ""


def search(rules: Rules) -> tuple[int, str]:
    """Returns the number of states, and the first fault in one of them."""
    begin = State(ends=rules.ttl, certain=(rules.ttl, 0, 0))
    seen, todo = {begin}, [begin]
    while todo:
        state = todo.pop()
        for after in steps(state, rules):
            if after not in seen:
                wrong = fault(after, rules)
                if wrong:
                    return len(seen), wrong
                seen.add(after)
                todo.append(after)
    return len(seen), ""


@pytest.mark.parametrize("ttl", [SHORT_TTL, LONG_TTL])
def test_no_order_of_events_breaks_a_direct_grant(ttl: int) -> None:
    states, wrong = search(Rules(ttl=ttl))
    assert wrong == ""
    assert states > 1000


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"written_first": False}, "hold at once|token"),
        ({"counted_from_request": False}, "hold at once|token"),
        ({"token_from_counter": False}, "token"),
        ({"taken_back": False}, "not taken back"),
    ],
)
def test_each_rule_is_needed(broken: dict[str, bool], expected: str) -> None:
    """Without it, in some order of events two clients hold, a token repeats, or the name is never
    free again."""
    _, wrong = search(Rules(**broken))
    assert any(word in wrong for word in expected.split("|")), wrong
