"""Every schedule of a small Redlock: tokens are distinct and grow, whatever is late or runs out.

Two attempts with all proposals of a small range, three nodes, counters that differ to begin with.
Requests land in any order or never, also after the attempt is over; a hold may run out on any node
at any moment. Votes are counted by the code that ships. Variants that are known to be wrong must
be caught, or the check is worth nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from holdfast.backends.redlock_votes import Ballot

NODES, QUORUM = 3, 2
PROPOSALS = (1, 2)
COUNTERS = ((0, 0, 0), (0, 1, 2))

IDLE, ASKING, RAISING, DONE, FAILED = range(5)


class Node(NamedTuple):
    """What a node knows: who holds, under which token, and the highest it ever gave."""

    owner: int | None
    token: int
    counter: int


class Attempt(NamedTuple):
    """One client's view: the votes it has seen, and what it made of them."""

    phase: int
    asked: tuple[bool, ...] = (False,) * NODES
    votes: tuple[int | None, ...] = (None,) * NODES
    """A token, 0 for a refusal, ``None`` for no answer."""
    token: int = 0
    raised: frozenset[int] = frozenset()
    floor: int = 0
    """The highest token of those who were done before this one began."""


class State(NamedTuple):
    nodes: tuple[Node, ...]
    attempts: tuple[Attempt, ...]


class Protocol:
    """The rules; variants override one of them."""

    def grant(self, node: Node, owner: int, proposal: int) -> tuple[Node, int]:
        if node.owner == owner:
            return node, node.token
        if node.owner is not None:
            return node, 0
        token = max(proposal, node.counter + 1)
        return Node(owner, token, token), token

    def lift(self, node: Node, owner: int, token: int) -> Node | None:
        if node.owner != owner or node.token > token:
            return None
        return Node(owner, token, max(node.counter, token))

    def run_out(self, node: Node) -> Node:
        return node._replace(owner=None)

    def decide(self, votes: tuple[int | None, ...]) -> Attempt | None:
        ballot = Ballot([_vote(vote) for vote in votes], QUORUM)
        verdict = ballot.verdict()
        if verdict is None:
            if ballot.unless_refused() and len(ballot.granted) + votes.count(None) >= QUORUM:
                return None
            return Attempt(FAILED)
        if verdict.token is not None:
            return Attempt(DONE, token=verdict.token)
        assert verdict.raise_to is not None
        return Attempt(RAISING, token=verdict.raise_to, raised=verdict.raised)


def _vote(vote: int | None) -> Any:
    if vote is None:
        return None
    return [[1, vote, b"-", b""]] if vote else [[0, 0, 1, b"other", b"", 0]]


class NoWriteBack(Protocol):
    """The highest vote is the token, and nobody is told."""

    def decide(self, votes: tuple[int | None, ...]) -> Attempt | None:
        granted = [vote for vote in votes if vote]
        if len(granted) >= QUORUM:
            return Attempt(DONE, token=max(granted))
        return super().decide(votes)


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
        if node.owner is not None:
            return super().grant(node, owner, proposal)
        token = max(proposal, node.counter)
        return Node(owner, token, token), token


class Forgetful(Protocol):
    """A node loses its counter with the hold, as one that was emptied does."""

    def run_out(self, node: Node) -> Node:
        return Node(None, 0, 0)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _canonical(state: State) -> State:
    """The same state with its nodes in a fixed order: nothing tells them apart."""
    rows = []
    for i, node in enumerate(state.nodes):
        row: list[Any] = [node.counter, node.token, -1 if node.owner is None else node.owner]
        for a in state.attempts:
            vote = a.votes[i]
            row += [a.asked[i], -1 if vote is None else vote, i in a.raised]
        rows.append((row, i))
    rows.sort()
    if [i for _, i in rows] == list(range(NODES)):
        return state
    order = [i for _, i in rows]
    return State(
        tuple(state.nodes[i] for i in order),
        tuple(
            a._replace(
                asked=tuple(a.asked[i] for i in order),
                votes=tuple(a.votes[i] for i in order),
                raised=frozenset(at for at, i in enumerate(order) if i in a.raised),
            )
            for a in state.attempts
        ),
    )


class Explorer:
    """Walks all states that the rules allow."""

    def __init__(self, rules: Protocol, proposals: tuple[int, ...]) -> None:
        self.rules, self.proposals = rules, proposals

    def walk(self, counters: tuple[int, ...]) -> int:
        first = State(
            tuple(Node(None, 0, counter) for counter in counters),
            tuple(Attempt(IDLE) for _ in self.proposals),
        )
        seen, open_ = {first}, [first]
        while open_:
            for found in self._next(open_.pop()):
                state = _canonical(found)
                if state not in seen:
                    self._check(state)
                    seen.add(state)
                    open_.append(state)
        return len(seen)

    def _check(self, state: State) -> None:
        done = [attempt for attempt in state.attempts if attempt.phase == DONE]
        tokens = [attempt.token for attempt in done]
        assert len(set(tokens)) == len(tokens), f"a token twice: {state}"
        for attempt in done:
            assert attempt.token > attempt.floor, f"a token went back: {state}"

    def _next(self, state: State) -> Iterator[State]:
        if all(attempt.phase in (DONE, FAILED) for attempt in state.attempts):
            return  # nothing that is still to come changes a token
        for index, node in enumerate(state.nodes):
            if node.owner is not None:
                yield State(_with(state.nodes, index, self.rules.run_out(node)), state.attempts)
        for who, attempt in enumerate(state.attempts):
            if attempt.phase == IDLE:
                floor = max((a.token for a in state.attempts if a.phase == DONE), default=0)
                begun = attempt._replace(phase=ASKING, floor=floor)
                yield State(state.nodes, _with(state.attempts, who, begun))
                continue
            yield from self._ask(state, who, attempt)
            yield from self._lift(state, who, attempt)
            if attempt.phase == FAILED:
                yield from self._undo(state, who)

    def _ask(self, state: State, who: int, attempt: Attempt) -> Iterator[State]:
        """A request lands, on time or too late to count."""
        for index, node in enumerate(state.nodes):
            if attempt.asked[index]:
                continue
            after, vote = self.rules.grant(node, who, self.proposals[who])
            nodes = _with(state.nodes, index, after)
            landed = attempt._replace(asked=_with(attempt.asked, index, True))
            if attempt.phase != ASKING:
                yield State(nodes, _with(state.attempts, who, landed))
                continue
            heard = landed._replace(votes=_with(attempt.votes, index, vote))
            decided = self.rules.decide(heard.votes)
            if decided is not None:
                kept = decided._replace(asked=heard.asked, floor=heard.floor)
                yield State(nodes, _with(state.attempts, who, kept))
            # A client may also go on to wait for more.
            yield State(nodes, _with(state.attempts, who, heard))

    def _lift(self, state: State, who: int, attempt: Attempt) -> Iterator[State]:
        if attempt.phase != RAISING:
            return
        for index, node in enumerate(state.nodes):
            if index in attempt.raised:
                continue
            after = self.rules.lift(node, who, attempt.token)
            if after is None:
                continue
            raised = attempt.raised | {index}
            phase = DONE if len(raised) >= QUORUM else RAISING
            lifted = attempt._replace(raised=raised, phase=phase)
            yield State(_with(state.nodes, index, after), _with(state.attempts, who, lifted))

    def _undo(self, state: State, who: int) -> Iterator[State]:
        for index, node in enumerate(state.nodes):
            if node.owner == who:
                freed = Node(None, 0, node.counter + 1)
                yield State(_with(state.nodes, index, freed), state.attempts)


def explore(rules: Protocol) -> int:
    """All states from all beginnings."""
    return sum(
        Explorer(rules, proposals).walk(counters)
        for proposals in itertools.combinations_with_replacement(PROPOSALS, 2)
        for counters in COUNTERS
    )


def test_tokens_grow_in_every_schedule() -> None:
    """No schedule gives a token twice, or a lower one to who began later."""
    assert explore(Protocol()) > 10_000


@pytest.mark.parametrize(
    "mutant", [NoWriteBack, RaiseForAnybody, RaiseUnheard, NotBeyond, Forgetful]
)
def test_wrong_protocols_are_caught(mutant: Callable[[], Protocol]) -> None:
    """The check finds what is wrong with each of these."""
    with pytest.raises(AssertionError, match="a token"):
        explore(mutant())
