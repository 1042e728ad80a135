"""Lease hand-over in ZooKeeper: waiters, whose nodes are older than that of the taker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.zookeeper.backend import ZooKeeperBackend
from holdfast.stores.zookeeper.client.packets import Exists
from holdfast.url import open_store
from stores.claims import claim_of
from stores.zookeeper import helpers

server = helpers.server
SOON = 60.0
Backends = Callable[[], ZooKeeperBackend]


@pytest.fixture
def backend(server: helpers.QuickServer, namespace: str) -> Iterator[Backends]:
    """Returns a function that makes the backend of another process."""
    made: list[ZooKeeperBackend] = []

    def make() -> ZooKeeperBackend:
        store = open_store(server.url, Settings(namespace=namespace))
        backend = store.backend(BlockingRuntime())
        assert isinstance(backend, ZooKeeperBackend)
        made.append(backend)
        return backend

    yield make
    for each in made:
        run_now(each.close())


def _take(backend: ZooKeeperBackend, claim: Claim) -> Grant:
    answer = run_now(backend.attempt(claim, join=True))
    assert isinstance(answer, Grant)
    return answer


def _wait(backend: ZooKeeperBackend, claim: Claim) -> None:
    assert not isinstance(run_now(backend.attempt(claim, join=True)), Grant)


def _handed(backend: ZooKeeperBackend, grant: Grant) -> Grant:
    ref = run_now(backend.hand_over(grant, until=now() + SOON))
    assert ref is not None
    return grant._replace(ref=tuple(ref))


def _after_the_look(
    monkeypatch: pytest.MonkeyPatch, taker: ZooKeeperBackend, work: Callable[[], None]
) -> None:
    """Does something when the taker has read the nodes of the waiters, and before it goes on."""
    request = taker.request

    async def then(session: Any, *requests: Any, until: float | None = None) -> None:
        await request(session, *requests, until=until)
        if all(isinstance(each, Exists) for each in requests):
            monkeypatch.undo()
            work()

    monkeypatch.setattr(taker, "request", then)


def _kept(backend: ZooKeeperBackend, grant: Grant) -> bool:
    return not run_now(backend.renew([grant], [], until=now() + SOON)).lost


def test_a_waiter_that_was_granted_meanwhile_keeps_its_hold(
    backend: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taker's hold is broken while it lets the waiters join again: the first of them holds, for
    certain, and the taker gets nothing."""
    ours, theirs, waiting = backend(), backend(), backend()
    handed, waiter, got = _handed(ours, _take(ours, claim_of())), claim_of(), list[Grant]()
    _wait(waiting, waiter)

    def break_it() -> None:
        assert run_now(ours.revoke("name"))
        got.append(_take(waiting, waiter))

    _after_the_look(monkeypatch, theirs, break_it)
    assert run_now(theirs.take_over(handed, claim_of(), until=now() + SOON)) is None
    assert _kept(waiting, *got)
    _wait(theirs, claim_of())


def test_a_reader_that_was_granted_meanwhile_keeps_its_hold(
    backend: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer that it waited behind gives up while the taker, a reader, lets waiters join
    again."""
    ours, theirs, waiting, others = backend(), backend(), backend(), backend()
    handed = _handed(ours, _take(ours, claim_of(mode=Mode.SHARED)))
    writer, reader, got = claim_of(), claim_of(mode=Mode.SHARED), list[Grant]()
    _wait(others, writer)
    _wait(waiting, reader)

    def give_up() -> None:
        run_now(others.abandon(writer))
        got.append(_take(waiting, reader))

    _after_the_look(monkeypatch, theirs, give_up)
    taken = run_now(theirs.take_over(handed, claim_of(mode=Mode.SHARED), until=now() + SOON))
    assert taken is not None
    assert all(_kept(waiting, grant) for grant in got)
    assert run_now(theirs.release(taken)) is True
    _wait(others, claim_of())
