"""Many clients that change one row at the same time: a client that loses races backs off."""

from __future__ import annotations

import pytest

from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.stores.mysql.backend import MySqlLeaseBackend
from holdfast.stores.mysql.row import RowState
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import backend_of, taken

server = helpers.server
LOST = 5
"""Number of lost races in a row that makes a client back off."""


def test_the_row_is_read_again_after_a_back_off(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state from before the back-off is stale: a write of it would lose every time."""
    ours, theirs = backend_of(server.url, namespace), backend_of(server.url, namespace)
    assert isinstance(ours, MySqlLeaseBackend)
    held, waiting = taken(theirs, claim_of()), claim_of()
    assert isinstance(run_now(ours.attempt(waiting, join=True)), Busy)
    write, races, pauses = ours._write, [], []

    def change_the_row() -> None:
        run_now(theirs.attempt(claim_of(), join=True))

    async def lose(
        state: RowState, owner: str, until: float | None, then: bytes
    ) -> RowState | None:
        races.append(owner)
        if len(races) <= LOST:
            change_the_row()
        return await write(state, owner, until, then)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        change_the_row()

    monkeypatch.setattr(ours, "_write", lose)
    monkeypatch.setattr(ours.runtime, "sleep", pause)
    run_now(ours.abandon(waiting))
    assert pauses
    assert len(races) == LOST + 1
    assert len(run_now(theirs.look("name")).waiters) == LOST + len(pauses)
    run_now(theirs.release(held))
    run_now(ours.close())
    run_now(theirs.close())
