"""What waiting costs on ZooKeeper: the same for every waiter, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.zookeeper.backend import ZooKeeperBackend
from holdfast.stores.zookeeper.client.packets import Delete, Exists, Listing, Request
from holdfast.stores.zookeeper.node import Presence
from holdfast.url import open_store
from servers.proxy import Proxy
from stores.claims import claim_of
from stores.zookeeper import helpers

server = helpers.server
SOON = 60.0
FEW, MANY = 10, 100
LISTING_BYTES = 50 * MANY
"""Less than what a list of so many nodes has."""


class Waiting(NamedTuple):
    """A claim that waits, each with a session of its own."""

    backend: ZooKeeperBackend
    claim: Claim
    busy: Busy

    def recheck(self) -> None:
        """Attempt again, as after a wait without a wake-up."""
        answer = run_now(self.backend.attempt(self.claim, join=True))
        assert isinstance(answer, Busy)
        assert answer.ref == self.busy.ref
        self.stay()

    def stay(self) -> None:
        """Mark the owner as present, and its entry as refreshed, as during a wait: else its session
        looks whether it may have to leave the queue."""
        entry = self.backend.store.entries[self.claim.owner]
        entry.presence, entry.refreshed = Presence(), now() + SOON


Line = tuple[ZooKeeperBackend, Grant, list[Waiting]]


@pytest.fixture
def proxy(server: helpers.QuickServer) -> Iterator[Proxy]:
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def line_up(proxy: Proxy, namespace: str) -> Iterator[Callable[[str, list[Mode]], Line]]:
    """Makes a hold of a whole name, and a queue of claims of these modes behind it."""
    backends: list[ZooKeeperBackend] = []

    def backend() -> ZooKeeperBackend:
        store = open_store(proxy.url, Settings(namespace=namespace))
        made = store.backend(BlockingRuntime())
        assert isinstance(made, ZooKeeperBackend)
        backends.append(made)
        return made

    def claim(name: str, mode: Mode, weight: int = 1) -> Claim:
        return claim_of(name, mode, weight, 2 if mode is Mode.SLOTS else 0, ttl=50.0)

    def make(name: str, modes: list[Mode]) -> Line:
        slots = modes[0] is Mode.SLOTS
        holder = backend()
        whole = claim(name, Mode.SLOTS if slots else Mode.EXCLUSIVE, 2 if slots else 1)
        grant = run_now(holder.attempt(whole, join=True))
        assert isinstance(grant, Grant)
        waits = []
        for mode in modes:
            each, waiting = backend(), claim(name, mode)
            busy = run_now(each.attempt(waiting, join=True))
            assert isinstance(busy, Busy)
            waits.append(Waiting(each, waiting, busy))
            waits[-1].stay()
        return holder, grant, waits

    yield make
    for made in backends:
        run_now(made.close())


modes_of_a_queue = pytest.mark.parametrize(
    "modes",
    [[Mode.EXCLUSIVE], [Mode.EXCLUSIVE, Mode.SHARED, Mode.SHARED], [Mode.SLOTS]],
    ids=["locks", "readers", "slots"],
)


@modes_of_a_queue
def test_idle_waiters_cost_the_same_each(
    line_up: Callable[[str, list[Mode]], Line], proxy: Proxy, modes: list[Mode]
) -> None:
    """Two small reads each, whether ten wait or a hundred. Only the first that waits for slots
    lists the queue: any of several holds may end."""
    costs = {}
    for number in (FEW, MANY):
        _, _, waits = line_up(f"name {number}", (modes * number)[:number])
        later = waits[1:]
        proxy.reset_counts()
        for wait in later:
            wait.recheck()
        costs[number] = proxy.counts.bytes_to_client / len(later)
    # Heartbeats of the sessions are counted, too: few, but more on a slow machine.
    assert costs[FEW] < LISTING_BYTES / 4
    assert costs[MANY] < LISTING_BYTES / 2


@modes_of_a_queue
def test_a_recheck_reads_two_nodes(
    line_up: Callable[[str, list[Mode]], Line],
    monkeypatch: pytest.MonkeyPatch,
    modes: list[Mode],
) -> None:
    """Its own node and the one ahead; the queue is listed when the one ahead has gone."""
    holder, grant, (first, *others) = line_up("name", (modes * 4)[:4])
    last = others[-1]
    sent: list[Request] = []
    request = last.backend.request

    async def counted(session: object, *requests: Request, until: float | None = None) -> None:
        sent.extend(requests)
        await request(session, *requests, until=until)  # type: ignore[arg-type]

    monkeypatch.setattr(last.backend, "request", counted)
    last.recheck()
    assert list(map(type, sent)) == [Exists, Exists]
    assert run_now(holder.release(grant)) is True
    for wait in (first, *others):
        sent.clear()
        run_now(wait.backend.wait(wait.claim, wait.busy, now() + SOON))
        answer = run_now(wait.backend.attempt(wait.claim, join=True))
        assert isinstance(answer, Grant)
        assert answer.token > 0
        assert sum(isinstance(each, Listing) for each in sent) <= 1
        assert run_now(wait.backend.release(answer)) is True


def test_a_waiter_whose_own_node_is_gone_joins_again(
    line_up: Callable[[str, list[Mode]], Line],
) -> None:
    """The node ahead is still there, but the claim has lost its place."""
    holder, grant, (first, last) = line_up("name", [Mode.EXCLUSIVE] * 2)
    node = last.backend.store.entries[last.claim.owner].node
    assert node is not None
    session = run_now(holder.any_session())
    run_now(holder.request(session, Delete(node.path)))
    again = run_now(last.backend.attempt(last.claim, join=True))
    assert isinstance(again, Busy)
    moved = last.backend.store.entries[last.claim.owner].node
    assert moved is not None
    assert moved.name != node.name
    for each, claim in ((holder, grant.claim), (first.backend, first.claim)):
        run_now(each.abandon(claim))
    run_now(last.backend.wait(last.claim, again, now() + SOON))
    assert isinstance(run_now(last.backend.attempt(last.claim, join=True)), Grant)


def test_a_hold_of_slots_that_was_moved_is_not_in_the_way(
    line_up: Callable[[str, list[Mode]], Line],
) -> None:
    """A longer ttl creates the node of a hold again, in another session and unwritten."""
    holder, grant, (first, last) = line_up("name", [Mode.SLOTS] * 2)
    assert run_now(holder.release(grant)) is True
    held = run_now(first.backend.attempt(first.claim, join=True))
    assert isinstance(held, Grant)
    longer = held._replace(claim=held.claim._replace(ttl=51.0))
    renewal = run_now(first.backend.renew([longer], [], until=now() + SOON))
    assert not renewal.lost
    assert not renewal.unknown
    assert first.backend.store.entries[first.claim.owner].key == 51
    assert isinstance(run_now(last.backend.attempt(last.claim, join=True)), Grant)
