"""A model of the direct grant of lease rows, checked in every order of events.

``hand_over`` (``postgres_keep_sql``) writes the grant of the first in line, commits, and notifies
it in a second transaction; ``PostgresLeaseBackend.wait`` and ``core.acquire`` decide whether that waiter
relies on it. Time is counted in ticks and passes at any moment: a process may stand still, a
notification may come late or never, a session may be cut between the two transactions.

Each of the four rules can be broken here, and is then seen to be needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

HANDED, LONG_TTL, SHORT_TTL = 4, 6, 2
TICKS = 10
NOBODY, GIVER, WAITER, NEWCOMER = "nobody", "giver", "waiter", "newcomer"


class Rules(NamedTuple):
    """What is agreed; each can be broken."""

    written_first: bool = True
    """The grant is committed before the waiter is told."""
    counted_from_request: bool = True
    """Its certain time begins with the waiter's last request, not with its waking."""
    token_from_counter: bool = True
    """The token is above the last one, wherever the clock is."""
    taken_back: bool = True
    """It ends by itself, soon, if nobody comes for it."""
    ttl: int = LONG_TTL

    @property
    def handed(self) -> int:
        return min(HANDED, self.ttl)


class State(NamedTuple):
    now: int = 0
    holder: str = GIVER
    """Of the row, with its end and the last token."""
    ends: int = LONG_TTL
    token: int = 1
    line: bool = False
    """Whether the waiter stands in line."""
    told: int = 0
    """The token of a notification that is under way; 0 for none."""
    owed: bool = False
    """Whether the release is between its two transactions."""
    sent: int | None = None
    """When the waiter sent the attempt that is under way."""
    asked: int = 0
    """When it sent the last attempt that was answered."""
    last: int = 0
    """The last token, as that answer said."""
    handed_at: int | None = None
    """When it was granted without being asked, and has not come for it since."""
    certain: tuple[int, int, int] = (LONG_TTL, 0, 0)
    """Until when giver, waiter and newcomer rely on their holds."""
    came: bool = False
    """Whether the waiter has entered its block, once and for all: another block is a newcomer's."""
    entered: int = 1
    """The highest token with which a block was entered."""
    fault: str = ""


def relies(state: State, who: str, until: int, token: int) -> State:
    """Somebody enters its block."""
    fault = "" if token > state.entered else f"token {token} after {state.entered}"
    giver, waiter, newcomer = state.certain
    certain = (giver, until, newcomer) if who == WAITER else (giver, waiter, until)
    came = state.came or who == WAITER
    entered = max(state.entered, token)
    return state._replace(certain=certain, came=came, entered=entered, fault=fault)


def free(state: State) -> bool:
    return state.holder == NOBODY or state.ends <= state.now


def release(state: State, rules: Rules) -> Iterator[State]:
    """The giver's request reaches the server."""
    left = state._replace(certain=(0, *state.certain[1:]))
    if state.holder != GIVER or state.ends <= state.now:
        return
    if not state.line:
        yield left._replace(holder=NOBODY)
        return
    fence = state.token + 1 if rules.token_from_counter else 1  # a clock that is behind
    granted = left._replace(
        holder=WAITER,
        ends=state.now + (rules.handed if rules.taken_back else TICKS * 2),
        token=fence,
        line=False,
        owed=True,
        handed_at=state.now,
    )
    if rules.written_first:
        yield granted
    else:
        yield granted._replace(owed=False, told=fence)
        # The write fails, and with it the whole release; the waiter has been told.
        yield left._replace(told=fence, line=False, holder=NOBODY)


def answer(state: State, rules: Rules) -> State:
    """The server answers the waiter's attempt."""
    assert state.sent is not None
    done = state._replace(sent=None, asked=state.sent, handed_at=None)
    if state.holder == WAITER and not free(state):  # its own grant: the same token, for longer
        done = done._replace(ends=max(state.ends, state.now + rules.ttl))
        return relies(done, WAITER, state.sent + rules.ttl, state.token)
    if free(state):
        token = state.token + 1
        done = done._replace(holder=WAITER, ends=state.now + rules.ttl, token=token, line=False)
        return relies(done, WAITER, state.sent + rules.ttl, token)
    return done._replace(line=True, last=state.token)


def wake(state: State, rules: Rules) -> State:
    """The waiter hears of its grant, and relies on it or asks again."""
    heard = state._replace(told=0)
    begins = state.asked if rules.counted_from_request else state.now
    if state.told <= state.last or 2 * (state.now - begins) >= rules.handed:
        return heard
    return relies(heard, WAITER, begins + rules.handed, state.told)


def hold(state: State, rules: Rules) -> Iterator[State]:
    """The waiter, in its block: it is renewed, or leaves."""
    giver, until, newcomer = state.certain
    if until > state.now:
        gone = state._replace(certain=(giver, 0, newcomer), handed_at=None)
        ours = state.holder == WAITER and not free(state)
        yield gone._replace(holder=NOBODY) if ours else gone
        if ours:
            ends = state.now + rules.ttl
            certain = (giver, max(until, ends), newcomer)
            yield state._replace(ends=max(state.ends, ends), certain=certain, handed_at=None)


def steps(state: State, rules: Rules) -> Iterator[State]:
    waits = state.sent is None and not state.came
    yield from hold(state, rules)
    if state.now < TICKS:
        yield state._replace(now=state.now + 1)
    if state.certain[0] > state.now and state.entered == 1:
        yield from release(state, rules)
    if state.owed:
        yield state._replace(owed=False, told=state.token)
        yield state._replace(owed=False)  # the session is cut: nobody is told
    if state.told:
        yield state._replace(told=0)  # the connection that listens is cut
        if waits:
            yield wake(state, rules)
    if waits:
        yield state._replace(sent=state.now)
    if state.sent is not None:
        yield answer(state, rules)
    if free(state) and not state.line and state.certain[2] <= state.now:
        token, ends = state.token + 1, state.now + rules.ttl
        taken = state._replace(holder=NEWCOMER, ends=ends, token=token)
        yield relies(taken, NEWCOMER, ends, token)


def fault(state: State, rules: Rules) -> str:
    """What is wrong with a state, if anything."""
    if state.fault:
        return state.fault
    sure = [who for who, until in zip("GWN", state.certain, strict=True) if until > state.now]
    if len(sure) > 1:
        return f"{' and '.join(sure)} hold at once"
    late = state.handed_at is not None and state.now >= state.handed_at + rules.handed
    if late and state.holder == WAITER and not free(state):
        return "nobody came for the grant, and it was not taken back"
    return ""


def search(rules: Rules) -> tuple[int, str]:
    """How many states there are, and the first fault in one of them."""
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
    ("broken", "told"),
    [
        ({"written_first": False}, "hold at once|token"),
        ({"counted_from_request": False}, "hold at once|token"),
        ({"token_from_counter": False}, "token"),
        ({"taken_back": False}, "not taken back"),
    ],
)
def test_each_rule_is_needed(broken: dict[str, bool], told: str) -> None:
    """Without it, some order of events lets two hold, repeats a token, or keeps the name."""
    _, wrong = search(Rules(**broken))
    assert any(word in wrong for word in told.split("|")), wrong
