"""Every schedule of a small Redlock: tokens are distinct and grow, whatever is late or runs out.

Three nodes, and attempts with all proposals of a small range. Requests land in any order or never;
a hold may run out on any node at any moment. With two attempts also: counters that differ to begin
with, requests that land after their attempt is over, and undoings. With three: all of them on equal
counters. Votes are counted by the code that ships. Variants that are known to be wrong must be
caught, or the check is worth nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

from holdfast.stores.redlock.votes import Ballot

NODES, QUORUM = 3, 2
PROPOSALS = (1, 2)
COUNTERS = ((0, 0, 0), (0, 1, 2))
NOBODY = -1

IDLE, ASKING, RAISING, DONE, FAILED = range(5)
UNASKED, REFUSED, LANDED, RAISED = 0, -1, -2, -3
"""What became of one attempt's request to one node; a token where a grant was heard."""


class Node(NamedTuple):
    """What a node knows: who holds, under which token, and the highest it ever gave."""

    owner: int
    token: int
    counter: int


class Attempt(NamedTuple):
    """What a client made of its votes."""

    phase: int
    token: int = 0
    floor: int = 0
    """The highest token of those who were done before this one began."""


class Decision(NamedTuple):
    """What a client does next."""

    phase: int
    token: int = 0
    raised: frozenset[int] = frozenset()


Column = tuple[int, ...]
"""A node, and what became of each attempt's request to it: nothing else tells nodes apart, so a
state is the same whatever their order."""
State = tuple[tuple[Column, ...], tuple[Attempt, ...]]


class Protocol:
    """The rules; variants override one of them."""

    def grant(self, node: Node, owner: int, proposal: int) -> tuple[Node, int]:
        if node.owner == owner:
            return node, node.token
        if node.owner != NOBODY:
            return node, REFUSED
        token = max(proposal, node.counter + 1)
        return Node(owner, token, token), token

    def lift(self, node: Node, owner: int, token: int) -> Node | None:
        if node.owner != owner or node.token > token:
            return None
        return Node(owner, token, max(node.counter, token))

    def run_out(self, node: Node) -> Node:
        return Node(NOBODY, 0, node.counter)

    def decide(self, marks: tuple[int, ...]) -> Decision | None:
        ballot = Ballot([_vote(mark) for mark in marks], QUORUM)
        verdict = ballot.verdict()
        if verdict is None:
            if len(ballot.granted) + marks.count(UNASKED) >= QUORUM:
                return None
            return Decision(FAILED)
        if verdict.token is not None:
            return Decision(DONE, verdict.token)
        assert verdict.raise_to is not None
        return Decision(RAISING, verdict.raise_to, verdict.raised)


def _vote(mark: int) -> Any:
    if mark == UNASKED:
        return None
    return [[1, mark, b"-", b""]] if mark > 0 else [[0, 0, 1, b"other", b"", 0]]


class NoWriteBack(Protocol):
    """The highest vote is the token, and nobody is told."""

    def decide(self, marks: tuple[int, ...]) -> Decision | None:
        granted = [mark for mark in marks if mark > 0]
        if len(granted) >= QUORUM:
            return Decision(DONE, max(granted))
        return super().decide(marks)


class RaiseForAnybody(Protocol):
    """A counter is raised whoever holds by then."""

    def lift(self, node: Node, owner: int, token: int) -> Node | None:
        return node._replace(counter=max(node.counter, token))


class RaiseUnheard(Protocol):
    """A node is counted although its own, higher vote never arrived."""

    def lift(self, node: Node, owner: int, token: int) -> Node | None:
        return node._replace(counter=max(node.counter, token)) if node.owner == owner else None


class NotBeyond(Protocol):
    """A proposal that equals the counter will do."""

    def grant(self, node: Node, owner: int, proposal: int) -> tuple[Node, int]:
        if node.owner != NOBODY:
            return super().grant(node, owner, proposal)
        token = max(proposal, node.counter)
        return Node(owner, token, token), token


class Forgetful(Protocol):
    """A node loses its counter with the hold, as one that was emptied does."""

    def run_out(self, node: Node) -> Node:
        return Node(NOBODY, 0, 0)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


class Explorer:
    """Walks all states that the rules allow."""

    def __init__(self, rules: Protocol, proposals: tuple[int, ...], *, late: bool) -> None:
        self.proposals, self.late = proposals, late
        self.grant, self.lift = cache(rules.grant), cache(rules.lift)
        self.run_out, self.decide = cache(rules.run_out), cache(rules.decide)

    def walk(self, counters: tuple[int, ...]) -> int:
        marks = (UNASKED,) * len(self.proposals)
        columns = tuple((NOBODY, 0, counter, *marks) for counter in counters)
        first: State = columns, tuple(Attempt(IDLE) for _ in self.proposals)
        seen: set[State] = {first}
        open_: list[State] = [first]
        while open_:
            for found in self._next(*open_.pop()):
                state = self._canonical(*found)
                if state not in seen:
                    self._check(state)
                    seen.add(state)
                    open_.append(state)
        return len(seen)

    def _canonical(self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...]) -> State:
        """The same state in a fixed order of the nodes, and of attempts with one proposal."""
        everybody = range(len(attempts))
        order = sorted(everybody, key=lambda who: (self.proposals[who], attempts[who]))
        if order != list(everybody):
            place = {old: new for new, old in enumerate(order)}
            attempts = tuple(attempts[who] for who in order)
            columns = tuple(
                (place.get(c[0], NOBODY), c[1], c[2], *(c[3 + who] for who in order))
                for c in columns
            )
        return tuple(sorted(columns)), attempts

    def _check(self, state: State) -> None:
        done = [attempt for attempt in state[1] if attempt.phase == DONE]
        tokens = [attempt.token for attempt in done]
        assert len(set(tokens)) == len(tokens), f"a token twice: {state}"
        for attempt in done:
            assert attempt.token > attempt.floor, f"a token went back: {state}"

    def _next(self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...]) -> Iterator[State]:
        if all(attempt.phase in (DONE, FAILED) for attempt in attempts):
            return  # nothing that is still to come changes a token
        for at, column in _different(columns):
            if column[0] != NOBODY:
                node = self.run_out(Node(*column[:3]))
                yield _with(columns, at, (*node, *column[3:])), attempts
        for who, attempt in enumerate(attempts):
            if attempt.phase == IDLE:
                floor = max((a.token for a in attempts if a.phase == DONE), default=0)
                yield columns, _with(attempts, who, Attempt(ASKING, 0, floor))
                continue
            yield from self._call(columns, attempts, who)
            if attempt.phase == RAISING:
                yield from self._lift(columns, attempts, who)
            elif attempt.phase == FAILED and self.late:
                yield from self._undo(columns, attempts, who)

    def _call(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], who: int
    ) -> Iterator[State]:
        """A request lands, on time or too late to count."""
        asking = attempts[who].phase == ASKING
        for at, column in _different(columns):
            if column[3 + who] != UNASKED:
                continue
            node, mark = self.grant(Node(*column[:3]), who, self.proposals[who])
            marked = _with(column[3:], who, mark if asking else LANDED)
            after = _with(columns, at, (*node, *marked))
            # A client that has enough may have heard more by the time it looks.
            yield after, attempts
            decision = self.decide(tuple(c[3 + who] for c in after)) if asking else None
            if decision is not None:
                yield self._decided(after, attempts, who, decision)

    def _decided(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], who: int, what: Decision
    ) -> State:
        marked = []
        for at, column in enumerate(columns):
            mark = LANDED
            if at in what.raised:
                mark = RAISED
            elif self.late and column[3 + who] == UNASKED:
                mark = UNASKED
            marked.append(_with(column, 3 + who, mark))
        attempt = Attempt(what.phase, what.token, attempts[who].floor)
        return tuple(marked), _with(attempts, who, attempt)

    def _lift(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], who: int
    ) -> Iterator[State]:
        attempt = attempts[who]
        for at, column in _different(columns):
            node = self.lift(Node(*column[:3]), who, attempt.token)
            if column[3 + who] == RAISED or node is None:
                continue
            after = _with(columns, at, (*node, *_with(column[3:], who, RAISED)))
            if sum(c[3 + who] == RAISED for c in after) >= QUORUM:
                yield self._decided(after, attempts, who, Decision(DONE, attempt.token))
            else:
                yield after, attempts

    def _undo(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], who: int
    ) -> Iterator[State]:
        for at, column in _different(columns):
            if column[0] == who:
                yield _with(columns, at, (NOBODY, 0, column[2] + 1, *column[3:])), attempts


def _different(columns: tuple[Column, ...]) -> Iterator[tuple[int, Column]]:
    """Of nodes that are alike one is enough."""
    last: Column | None = None
    for at, column in enumerate(columns):
        if column != last:
            yield at, column
        last = column


def explore(rules: Protocol) -> int:
    """All states of two attempts from all beginnings."""
    return sum(
        Explorer(rules, proposals, late=True).walk(counters)
        for proposals in itertools.combinations_with_replacement(PROPOSALS, 2)
        for counters in COUNTERS
    )


def test_tokens_grow_in_every_schedule() -> None:
    """No schedule gives a token twice, or a lower one to who began later."""
    assert explore(Protocol()) > 10_000


@pytest.mark.faults
@pytest.mark.parametrize("proposals", [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_tokens_of_three_attempts_grow(proposals: tuple[int, ...]) -> None:
    """The same with one more: what the first and the third know of each other is the second's."""
    assert Explorer(Protocol(), proposals, late=False).walk((0, 0, 0)) > 50_000


@pytest.mark.parametrize(
    "mutant", [NoWriteBack, RaiseForAnybody, RaiseUnheard, NotBeyond, Forgetful]
)
def test_wrong_protocols_are_caught(mutant: Callable[[], Protocol]) -> None:
    """The check finds what is wrong with each of these."""
    with pytest.raises(AssertionError, match="a token"):
        explore(mutant())
