"""Model check of the token protocol: in every schedule tokens are distinct and grow.

There are three nodes, and attempts with all proposals of a small range. Requests arrive in any
order or never; a hold may expire on any node at any moment. With two attempts the check also covers
counters that differ at the start, requests that arrive after the end of their attempt, and undo
requests. With three attempts the counters are equal at the start. The votes are counted by the
shipped code. Protocol variants that are known to be wrong must be detected: this checks the check.
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

IDLE, VOTING, RAISING, DONE, FAILED = range(5)
NOT_ARRIVED, REFUSED, ARRIVED, RAISED = 0, -1, -2, -3
"""The state of one attempt's request to one node; a positive number is the granted token."""


class ModelNode(NamedTuple):
    """The state of a node: holder, its token, and the highest token that was ever granted."""

    owner: int
    token: int
    counter: int


class Attempt(NamedTuple):
    """The state of one attempt."""

    phase: int
    token: int = 0
    floor: int = 0
    """The highest token of the attempts that were done before this one began."""


class Decision(NamedTuple):
    """What a client does next."""

    phase: int
    token: int = 0
    raised: frozenset[int] = frozenset()


Column = tuple[int, ...]
"""A node, and the state of each attempt's request to it. Nodes have no other difference, so the
order of the nodes does not matter."""
State = tuple[tuple[Column, ...], tuple[Attempt, ...]]


class Protocol:
    """The rules of the protocol; each variant overrides one of them."""

    def grant(self, node: ModelNode, owner: int, proposal: int) -> tuple[ModelNode, int]:
        if node.owner == owner:
            return node, node.token
        if node.owner != NOBODY:
            return node, REFUSED
        token = max(proposal, node.counter + 1)
        return ModelNode(owner, token, token), token

    def lift(self, node: ModelNode, owner: int, token: int) -> ModelNode | None:
        if node.owner != owner or node.token > token:
            return None
        return ModelNode(owner, token, max(node.counter, token))

    def expire(self, node: ModelNode) -> ModelNode:
        return ModelNode(NOBODY, 0, node.counter)

    def decide(self, marks: tuple[int, ...]) -> Decision | None:
        ballot = Ballot([_vote(mark) for mark in marks], QUORUM)
        verdict = ballot.verdict()
        if verdict is None:
            if len(ballot.granted) + marks.count(NOT_ARRIVED) >= QUORUM:
                return None
            return Decision(FAILED)
        if verdict.token is not None:
            return Decision(DONE, verdict.token)
        assert verdict.raise_to is not None
        return Decision(RAISING, verdict.raise_to, verdict.raised)


def _vote(mark: int) -> Any:
    if mark == NOT_ARRIVED:
        return None
    return [[1, mark, b"-", b""]] if mark > 0 else [[0, 0, 1, b"other", b"", 0]]


class NoWriteBack(Protocol):
    """The highest vote is the token, and the other nodes are not raised to it."""

    def decide(self, marks: tuple[int, ...]) -> Decision | None:
        granted = [mark for mark in marks if mark > 0]
        if len(granted) >= QUORUM:
            return Decision(DONE, max(granted))
        return super().decide(marks)


class RaiseForAnybody(Protocol):
    """A counter is raised even if another owner holds by then."""

    def lift(self, node: ModelNode, owner: int, token: int) -> ModelNode | None:
        return node._replace(counter=max(node.counter, token))


class RaiseDespiteHigherVote(Protocol):
    """A node counts as raised although its own vote, which was lost, is higher."""

    def lift(self, node: ModelNode, owner: int, token: int) -> ModelNode | None:
        return node._replace(counter=max(node.counter, token)) if node.owner == owner else None


class NotBeyond(Protocol):
    """A proposal equal to the counter is granted."""

    def grant(self, node: ModelNode, owner: int, proposal: int) -> tuple[ModelNode, int]:
        if node.owner != NOBODY:
            return super().grant(node, owner, proposal)
        token = max(proposal, node.counter)
        return ModelNode(owner, token, token), token


class Forgetful(Protocol):
    """A node loses its counter together with the hold, as an emptied server does."""

    def expire(self, node: ModelNode) -> ModelNode:
        return ModelNode(NOBODY, 0, 0)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


class Explorer:
    """Visits all states that the rules allow."""

    def __init__(self, rules: Protocol, proposals: tuple[int, ...], *, late: bool) -> None:
        self.proposals, self.late = proposals, late
        self.grant, self.lift = cache(rules.grant), cache(rules.lift)
        self.expire, self.decide = cache(rules.expire), cache(rules.decide)

    def walk(self, counters: tuple[int, ...]) -> int:
        marks = (NOT_ARRIVED,) * len(self.proposals)
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
        """Return the same state with nodes, and attempts of equal proposals, in a fixed order."""
        all_attempts = range(len(attempts))
        order = sorted(all_attempts, key=lambda which: (self.proposals[which], attempts[which]))
        if order != list(all_attempts):
            position = {old: new for new, old in enumerate(order)}
            attempts = tuple(attempts[which] for which in order)
            columns = tuple(
                (position.get(c[0], NOBODY), c[1], c[2], *(c[3 + which] for which in order))
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
            return  # no later event changes a token
        for at, column in _different(columns):
            if column[0] != NOBODY:
                node = self.expire(ModelNode(*column[:3]))
                yield _with(columns, at, (*node, *column[3:])), attempts
        for which, attempt in enumerate(attempts):
            if attempt.phase == IDLE:
                floor = max((a.token for a in attempts if a.phase == DONE), default=0)
                yield columns, _with(attempts, which, Attempt(VOTING, 0, floor))
                continue
            yield from self._arrive(columns, attempts, which)
            if attempt.phase == RAISING:
                yield from self._lift(columns, attempts, which)
            elif attempt.phase == FAILED and self.late:
                yield from self._undo(columns, attempts, which)

    def _arrive(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], which: int
    ) -> Iterator[State]:
        """A request arrives at a node, in time or too late to count."""
        voting = attempts[which].phase == VOTING
        for at, column in _different(columns):
            if column[3 + which] != NOT_ARRIVED:
                continue
            node, mark = self.grant(ModelNode(*column[:3]), which, self.proposals[which])
            marked = _with(column[3:], which, mark if voting else ARRIVED)
            after = _with(columns, at, (*node, *marked))
            # A client that has enough votes may have read more of them before it decides.
            yield after, attempts
            decision = self.decide(tuple(c[3 + which] for c in after)) if voting else None
            if decision is not None:
                yield self._decided(after, attempts, which, decision)

    def _decided(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], which: int, what: Decision
    ) -> State:
        marked = []
        for at, column in enumerate(columns):
            mark = ARRIVED
            if at in what.raised:
                mark = RAISED
            elif self.late and column[3 + which] == NOT_ARRIVED:
                mark = NOT_ARRIVED
            marked.append(_with(column, 3 + which, mark))
        attempt = Attempt(what.phase, what.token, attempts[which].floor)
        return tuple(marked), _with(attempts, which, attempt)

    def _lift(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], which: int
    ) -> Iterator[State]:
        attempt = attempts[which]
        for at, column in _different(columns):
            node = self.lift(ModelNode(*column[:3]), which, attempt.token)
            if column[3 + which] == RAISED or node is None:
                continue
            after = _with(columns, at, (*node, *_with(column[3:], which, RAISED)))
            if sum(c[3 + which] == RAISED for c in after) >= QUORUM:
                yield self._decided(after, attempts, which, Decision(DONE, attempt.token))
            else:
                yield after, attempts

    def _undo(
        self, columns: tuple[Column, ...], attempts: tuple[Attempt, ...], which: int
    ) -> Iterator[State]:
        for at, column in _different(columns):
            if column[0] == which:
                yield _with(columns, at, (NOBODY, 0, column[2] + 1, *column[3:])), attempts


def _different(columns: tuple[Column, ...]) -> Iterator[tuple[int, Column]]:
    """Yield one of each group of equal nodes."""
    last: Column | None = None
    for at, column in enumerate(columns):
        if column != last:
            yield at, column
        last = column


def explore(rules: Protocol) -> int:
    """Visit all states of two attempts from all start states; return their number."""
    return sum(
        Explorer(rules, proposals, late=True).walk(counters)
        for proposals in itertools.combinations_with_replacement(PROPOSALS, 2)
        for counters in COUNTERS
    )


def test_tokens_grow_in_every_schedule() -> None:
    """No schedule grants a token twice, or a lower token to an attempt that began later."""
    assert explore(Protocol()) > 10_000


@pytest.mark.faults
@pytest.mark.parametrize("proposals", [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_tokens_of_three_attempts_grow(proposals: tuple[int, ...]) -> None:
    """The same with three attempts: the second may carry state from the first to the third."""
    assert Explorer(Protocol(), proposals, late=False).walk((0, 0, 0)) > 50_000


@pytest.mark.parametrize(
    "mutant", [NoWriteBack, RaiseForAnybody, RaiseDespiteHigherVote, NotBeyond, Forgetful]
)
def test_wrong_protocols_are_caught(mutant: Callable[[], Protocol]) -> None:
    """The check detects the error in each wrong variant."""
    with pytest.raises(AssertionError, match="a token"):
        explore(mutant())
