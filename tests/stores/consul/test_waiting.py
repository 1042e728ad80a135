"""What waiting costs on Consul: the same for every waiter, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import GRACE_SECONDS
from holdfast.core.drive import run_now
from holdfast.core.ordered import Details, Entry
from holdfast.io.clock import now
from holdfast.stores.consul.line import Line
from holdfast.stores.consul.wakeups import LongPolls
from servers.consul import ConsulServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers

SOON = 60.0
FEW, MANY = 10, 100


@pytest.fixture
def peer(servers: Servers, namespace: str) -> Iterator[Callable[[], Peer]]:
    with peers(servers.of(ConsulServer).url, namespace) as make:
        yield make


def _claim(mode: Mode, weight: int = 1) -> Claim:
    return claim_of("name", mode, weight, 2 if mode is Mode.SLOTS else 0)


class Waiting(NamedTuple):
    """A claim that waits, each with a client of its own."""

    peer: Peer
    claim: Claim
    busy: Busy

    def cost(self, work: Callable[[], object]) -> tuple[int, int]:
        """The requests and the bytes of their answers that some work takes."""
        post = self.peer.post
        asked, read = len(post.asked), post.read
        work()
        return len(post.asked) - asked, post.read - read

    def recheck(self) -> Busy:
        """Attempt again, as after a wait without a wake-up."""
        answer = self.peer.attempt(self.claim)
        assert isinstance(answer, Busy)
        return answer

    def name_holder(self) -> None:
        """Read what the log of a long wait says, once per wait."""
        assert run_now(self.peer.backend.look_at_holders(self.claim)).holders


def _line_up(peer: Callable[[], Peer], modes: list[Mode]) -> tuple[Peer, Grant, list[Waiting]]:
    """A hold of the whole name, and a queue of claims of these modes behind it."""
    holder = peer()
    whole = 2 if modes[0] is Mode.SLOTS else 1
    first = Mode.SLOTS if modes[0] is Mode.SLOTS else Mode.EXCLUSIVE
    grant = holder.take(_claim(first, whole))
    waits = []
    for mode in modes:
        each, claim = peer(), _claim(mode)
        busy = each.attempt(claim)
        assert isinstance(busy, Busy)
        waits.append(Waiting(each, claim, busy))
    return holder, grant, waits


MIXED = [Mode.EXCLUSIVE, Mode.SHARED, Mode.SHARED]
modes_of_a_queue = pytest.mark.parametrize(
    "modes", [[Mode.EXCLUSIVE], MIXED, [Mode.SLOTS]], ids=["locks", "readers", "slots"]
)


def _modes(modes: list[Mode], number: int) -> list[Mode]:
    return (modes * number)[:number]


@modes_of_a_queue
def test_idle_waiters_cost_the_same_each(peer: Callable[[], Peer], modes: list[Mode]) -> None:
    """One read of a few entries each, whether ten wait or a hundred; nothing is written."""
    costs = {}
    for number in (FEW, MANY):
        holder, grant, waits = _line_up(peer, _modes(modes, number))
        each = [wait.cost(wait.recheck) for wait in waits]
        assert {requests for requests, _ in each} == {1}
        lines = {line for wait in waits for line in wait.peer.post.asked[-1:]}
        assert lines == {b"PUT /v1/txn?consistent"}
        if modes[0] is not Mode.SLOTS:
            each += [wait.cost(wait.name_holder) for wait in (waits[1], waits[-1])]
        costs[number] = max(read for _, read in each)
        for wait in waits:
            run_now(wait.peer.backend.abandon(wait.claim))
        assert run_now(holder.backend.release(grant)) is True
    assert costs[MANY] <= 1.5 * costs[FEW]


@modes_of_a_queue
def test_a_queue_drains_with_the_same_requests_per_hold(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch, modes: list[Mode]
) -> None:
    """A hundred waiters, each of which waits only when the one in front has left. So it has not
    seen that one enter, and needs at most one read more."""
    holder, grant, waits = _line_up(peer, _modes(modes, MANY))
    assert run_now(holder.backend.release(grant)) is True
    tokens = []
    for number, wait in enumerate(waits):
        grants: list[Grant] = []
        queries = _count_queries(wait.peer, monkeypatch)

        def acquire(wait: Waiting = wait, grants: list[Grant] = grants) -> None:
            busy = wait.busy
            for _ in range(4):
                run_now(wait.peer.backend.wait(wait.claim, busy, now() + SOON))
                answer = wait.peer.attempt(wait.claim)
                if isinstance(answer, Grant):
                    grants.append(answer)
                    return
                busy = answer

        requests, _ = wait.cost(acquire)
        assert grants, number
        assert requests <= 3, number
        assert len(queries) <= 3, number
        tokens.append(grants[0].token)
        assert run_now(wait.peer.backend.release(grants[0])) is True
    assert tokens == sorted(tokens)


def _count_queries(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of the peer's blocking queries from now on."""
    polls: LongPolls = peer.backend.wakeups.long_polls
    ask, lines = polls.ask, []

    async def counted(owner: str, line: bytes, *rest: object, **named: object) -> object:
        lines.append(line)
        return await ask(owner, line, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(polls, "ask", counted)
    return lines


def test_a_waiter_that_has_entered_shows_that_nobody_is_in_front(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third in the queue sees the mark of the second. When that is gone, one transaction is
    enough to enter, although the first was never looked at again."""
    holder, grant, (second, third) = _line_up(peer, [Mode.EXCLUSIVE] * 2)
    assert run_now(holder.backend.release(grant)) is True
    run_now(second.peer.backend.wait(second.claim, second.busy, now() + SOON))
    entered = second.peer.take(second.claim)
    lines = _count_queries(third.peer, monkeypatch)
    run_now(third.peer.backend.wait(third.claim, third.busy, now() + 1.0))
    assert lines
    assert run_now(second.peer.backend.release(entered)) is True
    run_now(third.peer.backend.wait(third.claim, third.busy, now() + SOON))
    requests, _ = third.cost(lambda: third.peer.take(third.claim))
    assert requests == 1


def test_a_query_without_the_entry_in_front_is_not_proof(peer: Callable[[], Peer]) -> None:
    """A server that was cut off may answer from old data: the transaction checks the entry."""
    holder, grant, (wait,) = _line_up(peer, [Mode.EXCLUSIVE])
    line = wait.peer.store.queued[wait.claim.owner].line
    line.gone = line.watched
    wait.recheck()
    assert run_now(holder.backend.release(grant)) is True


@modes_of_a_queue
def test_a_waiter_that_gives_up_lets_nobody_overtake(
    peer: Callable[[], Peer], modes: list[Mode]
) -> None:
    """The entry in front is gone, but the hold is not: the claim waits for the next one."""
    holder, grant, (*others, last) = _line_up(peer, _modes(modes, 4))
    for gone in reversed(others):
        run_now(gone.peer.backend.abandon(gone.claim))
        run_now(last.peer.backend.wait(last.claim, last.busy, now() + 1.0))
        last = last._replace(busy=last.recheck())
    assert run_now(holder.backend.release(grant)) is True
    run_now(last.peer.backend.wait(last.claim, last.busy, now() + SOON))
    assert last.peer.take(last.claim).token > grant.token


@modes_of_a_queue
def test_waiters_that_are_dead_are_skipped(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch, modes: list[Mode]
) -> None:
    """Six waiters behind each other never act again. The seventh finds that the first of them
    could enter, though it waits for the sixth; and so on."""
    holder, grant, waits = _line_up(peer, _modes(modes, 7))
    assert run_now(holder.backend.release(grant)) is True
    last = waits[-1]
    clock = [now()]
    monkeypatch.setattr(last.peer.backend.runtime, "now", lambda: clock[0])
    for _ in range(40):
        answer = last.peer.attempt(last.claim)
        if isinstance(answer, Grant):
            assert answer.token > grant.token
            return
        clock[0] += GRACE_SECONDS / 2 + 0.1
        last.peer.store.sessions.answered(last.peer.store.sessions.all()[0].id, clock[0])
    pytest.fail("the last waiter was never granted the name")


def _line(mode: Mode, *kinds: str) -> Line:
    """The line of a claim behind entries of these kinds: writers, readers, or claims on slots."""
    details = Details(1, 1, held=False, settled=False, behind=0, since=0.0, slots=(), label="")
    keys = [f"space/locks/name/{kind}/{number}" for number, kind in enumerate(kinds)]
    modes = {"l/w": Mode.EXCLUSIVE, "l/r": Mode.SHARED}
    entries = [
        Entry(
            key,
            key[-1],
            int(key[-1]),
            1,
            "s",
            modes.get(key[-5:-2], Mode.SLOTS),
            0,
            lambda: details,
        )
        for key in keys
    ]
    return Line(mode, entries)


def _ends(line: Line) -> str:
    """The last letters of the keys that are left in a line."""
    return "".join(key[-1] for key in line.ahead)


def test_what_is_out_of_the_way_when_another_waiter_enters() -> None:
    """A writer enters alone; a reader without writers in front of it; slots beside others that
    may still be on their way."""
    writers = _line(Mode.EXCLUSIVE, "l/w", "l/r", "l/w", "l/w")
    writers.entered(writers.ahead[2])
    assert _ends(writers) == "23"
    readers = _line(Mode.EXCLUSIVE, "l/w", "l/r", "l/r", "l/w")
    readers.entered(readers.ahead[2])
    assert _ends(readers) == "123"
    slots = _line(Mode.SLOTS, *["s/0000000009.1"] * 3)
    slots.entered(slots.ahead[1])
    assert _ends(slots) == "02"
    reader = _line(Mode.SHARED, "l/w", "l/w", "l/r")
    assert reader.watched[-1] == "1"
    assert [key[-1] for key in reader.blocking] == ["0", "1"]


def test_a_newcomer_waits_for_the_session_of_a_dead_first_waiter(
    peer: Callable[[], Peer],
) -> None:
    """Only a client that saw it wait knows that it does not hold: see docs/stores/consul.md."""
    holder, grant, (dead, older) = _line_up(peer, [Mode.EXCLUSIVE] * 2)
    assert run_now(holder.backend.release(grant)) is True
    newcomer, claim = peer(), _claim(Mode.EXCLUSIVE)
    busy = newcomer.attempt(claim)
    assert isinstance(busy, Busy)
    assert busy.retry_seconds is None
    assert older.recheck().retry_seconds is not None
    assert dead.peer.take(dead.claim).token > grant.token


def test_watches_of_one_client_have_names_of_their_own(
    peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal random numbers would wake one watch for the other."""
    one = peer()
    owners: list[str] = []

    async def query(owner: str, *_: object, **__: object) -> None:
        owners.append(owner)

    monkeypatch.setattr(one.backend.wakeups, "query", query)
    monkeypatch.setattr(one.backend.runtime, "between", lambda low, high: low)
    for _ in range(2):
        run_now(one.backend.watch("name", None, now() + SOON))
    assert len(set(owners)) == 2
