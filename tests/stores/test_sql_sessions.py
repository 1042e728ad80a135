"""Advisory modes: the session of a hold is given from one claim to the next, by several threads."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.claim import Busy
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores._sql.session import SqlSession, ended
from holdfast.url import open_store
from servers.process import wait_until
from stores import sql_helpers
from stores.claims import claim_of
from stores.sql_helpers import Store

SECONDS = 20.0

store = sql_helpers.store


class Emptied(dict[str, Any]):
    """The sessions by owner: another thread drops each as soon as it was found."""

    def get(self, owner: str, otherwise: Any = None) -> Any:
        return self.pop(owner, otherwise)


@pytest.fixture
def backends(store: Store) -> Iterator[tuple[Any, Any]]:
    """Two clients' backends."""
    settings = Settings(namespace=f"t{secrets.token_hex(6)}")
    url = store.url("advisory")
    made = [open_store(url, settings).backend(BlockingRuntime()) for _ in range(2)]
    yield made[0], made[1]
    for backend in made:
        run_now(backend.close())


class HandedOver:
    """The mutex of a session: its owner continues only after the thread that waits for it has
    ended, as on a busy machine."""

    def __init__(self, mutex: threading.Lock, waiting: threading.Thread) -> None:
        self._mutex, self._waiting, self._owner = mutex, waiting, threading.current_thread()
        self.acquire, self.locked = mutex.acquire, mutex.locked

    def release(self) -> None:
        self._mutex.release()
        if threading.current_thread() is self._owner:
            self._waiting.join(SECONDS)


def test_a_release_beside_a_renewal_leaves_nothing_of_the_hold(backends: tuple[Any, Any]) -> None:
    """The next claim on that session waits for the name: it is not taken for the hold before it,
    and its session is not lost, still open and in the server's queue."""
    ours, theirs = backends
    asked = claim_of()
    grant = run_now(ours.attempt(asked, join=True))
    session, renew = ours.sessions.by_owner[asked.owner], ours.driver.request_all
    releasing = threading.Thread(target=lambda: run_now(ours.release(grant)))

    async def renew_beside_release(requests: Any, until: float) -> Any:
        releasing.start()
        wait_until("the release", lambda: asked.owner not in ours.sessions.by_owner)
        return await renew(requests, until)

    session.mutex = HandedOver(session.mutex, releasing)
    ours.driver.request_all = renew_beside_release
    run_now(ours.renew([grant], [], until=now() + SECONDS))
    releasing.join(SECONDS)
    ours.driver.request_all = renew
    held = run_now(theirs.attempt(claim_of(), join=True))
    waiting = claim_of()
    for _ in range(3):
        assert isinstance(run_now(ours.attempt(waiting, join=True)), Busy)
        assert ours.sessions.by_owner[waiting.owner] is session
    assert session.grant is None
    run_now(ours.abandon(waiting))
    assert run_now(theirs.release(held))


def test_a_session_that_has_another_claim_by_now_is_not_renewed(backends: tuple[Any, Any]) -> None:
    """The renewer found the session just before its hold was released."""
    ours, _ = backends
    asked, other = claim_of(), claim_of("other")
    grant = run_now(ours.attempt(asked, join=True))
    session = ours.sessions.by_owner[asked.owner]
    mutex = session.mutex

    class Late:
        """Another claim has the session before the mutex is acquired."""

        locked, release = mutex.locked, mutex.release

        def acquire(self, **how: Any) -> bool:
            session.mutex = mutex
            assert run_now(ours.release(grant))
            run_now(ours.attempt(other, join=True))
            return bool(mutex.acquire(**how))

    session.mutex = Late()
    renewal = run_now(ours.renew([grant], [], until=now() + SECONDS))
    assert list(renewal.lost) == [asked.owner]
    assert ours.sessions.by_owner[other.owner] is session
    assert session.grant.claim == other
    assert run_now(ours.release(session.grant))


def test_a_waiter_of_a_closed_client_leaves_the_server_s_queue(backends: tuple[Any, Any]) -> None:
    """Its attempt may have been under way when the client was closed. A server may not notice that
    the connection of a session that waits is gone: it would get the lock, for nobody."""
    ours, theirs = backends
    held = run_now(theirs.attempt(claim_of(), join=True))
    waiting = claim_of()
    assert isinstance(run_now(ours.attempt(waiting, join=True)), Busy)
    wait_until("the waiter", lambda: run_now(theirs.look("name")).waiters)
    run_now(ours.close())
    run_now(ours.abandon(waiting))
    wait_until("the end of the waiter", lambda: not run_now(theirs.look("name")).waiters, SECONDS)
    assert run_now(theirs.release(held))


def test_two_threads_may_drop_a_session_at_the_same_time(backends: tuple[Any, Any]) -> None:
    """The client is closed, and a waiter gives up."""
    ours, _ = backends
    asked = claim_of()
    run_now(ours.attempt(asked, join=True))
    session = ours.sessions.by_owner[asked.owner]

    ours.sessions.by_owner = Emptied(ours.sessions.by_owner)
    ours.sessions.lose(asked.owner, session)
    assert not session.connection.open


def test_a_client_may_be_closed_beside_a_release(backends: tuple[Any, Any]) -> None:
    """Who closes it ends the hold."""
    ours, _ = backends
    asked = claim_of()
    grant = run_now(ours.attempt(asked, join=True))
    session = ours.sessions.by_owner[asked.owner]
    ours.sessions.by_owner = Emptied(ours.sessions.by_owner)
    assert run_now(ours.release(grant)) is False
    session.end()


def test_a_client_may_be_closed_beside_an_attempt(
    backends: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes when the client no longer has the session."""
    ours, theirs = backends
    held = run_now(theirs.attempt(claim_of(), join=True))
    take, sessions = ours._take, []

    async def take_and_close(session: Any, *rest: Any, **how: Any) -> Any:
        answer = await take(session, *rest, **how)
        sessions.append(session)
        await ours.close()
        return answer

    monkeypatch.setattr(ours, "_take", take_and_close)
    assert isinstance(run_now(ours.attempt(claim_of(), join=False)), Busy)
    assert [session.connection.open for session in sessions] == [False]
    assert run_now(theirs.release(held))


def test_a_session_that_another_thread_closes_has_ended(backends: tuple[Any, Any]) -> None:
    """It may be closed between two looks at it."""
    ours, _ = backends
    asked = claim_of()
    run_now(ours.attempt(asked, join=True))
    session: SqlSession[Any] = ours.sessions.by_owner[asked.owner]
    kind = type(session.connection)

    class ClosedMeanwhile(kind):  # type: ignore[misc, valid-type]
        open = True

    session.connection.close()
    session.connection.__class__ = ClosedMeanwhile
    assert ended([session]) == [session]
    session.connection.__class__ = kind
