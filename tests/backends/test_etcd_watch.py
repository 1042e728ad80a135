"""The watches of a door on etcd: none outlives its wait, and each ends with its own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import Any

import pytest

from backends import etcd_bench
from backends.claims import claim_of
from backends.http_peer import Peer
from holdfast.backends import etcd_wait
from holdfast.claim import Busy
from holdfast.runtimes.clock import now
from holdfast.testing import Flavour

SOON = 20.0
LATER = 3 * SOON
server, peer = etcd_bench.server, etcd_bench.peer
Peers = Callable[..., Peer]


def _open(watches: Any) -> Sized:
    """Watches that somebody could be told of."""
    if hasattr(watches, "_streams"):
        streams: Sized = watches._streams
        return streams
    book = watches._book if hasattr(watches, "_book") else watches._line.book
    found: Sized = book._watches
    return found


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("streams", [False, True], ids=["websocket", "streams"])
def test_a_wait_that_is_cancelled_early_leaves_no_watch(
    peer: Peers, flavour: Flavour, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled or interrupted when its watch was asked for and had not begun yet."""
    ours, theirs = peer(), peer(flavour)
    ours.take(claim_of())
    claim = claim_of()
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    waits = theirs.backend.waits
    if streams:
        waits.watches.close()
        waits.watches = etcd_wait._streams(theirs.store, theirs.backend.runtime)
    watches = waits.watches
    rung = watches.rung
    asked: list[int] = []

    async def interrupted(owner: str, until: float) -> object:
        asked.append(len(_open(watches)))
        if flavour is Flavour.BLOCKING:
            raise KeyboardInterrupt
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await rung(owner, until)

    monkeypatch.setattr(watches, "rung", interrupted)
    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        theirs.run(theirs.backend.wait(claim, busy, now() + LATER))
    assert asked == [1]
    assert len(_open(watches)) == 0
