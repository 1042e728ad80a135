"""Many who come to one row at the same moment: none of them tries in vain again and again."""

from __future__ import annotations

import pytest

from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.stores.mysql.backend import LeaseBackend
from holdfast.stores.mysql.row import State
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import bench as mysql_bench
from stores.mysql.bench import backend_of, taken

server = mysql_bench.server
LOST = 5
"""So many races in a row, which makes it step back."""


def test_whoever_steps_back_reads_anew(
    server: MySQLServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was told before that is old by then: deciding on it would be in vain every time."""
    ours, theirs = backend_of(server.url, namespace), backend_of(server.url, namespace)
    assert isinstance(ours, LeaseBackend)
    held, waiting = taken(theirs, claim_of()), claim_of()
    assert isinstance(run_now(ours.attempt(waiting, join=True)), Busy)
    write, races, naps = ours._write, [], []

    def be_faster() -> None:
        run_now(theirs.attempt(claim_of(), join=True))

    async def lose(state: State, owner: str, until: float | None, then: bytes) -> State | None:
        races.append(owner)
        if len(races) <= LOST:
            be_faster()
        return await write(state, owner, until, then)

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        be_faster()

    monkeypatch.setattr(ours, "_write", lose)
    monkeypatch.setattr(ours.runtime, "sleep", nap)
    run_now(ours.abandon(waiting))
    assert naps
    assert len(races) == LOST + 1
    assert len(run_now(theirs.look("name")).waiters) == LOST + len(naps)
    run_now(theirs.release(held))
