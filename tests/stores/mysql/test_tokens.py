"""A token is above the last one, in every way to take a name, also after the clock was set back:
here the last token is years ahead of the server's clock."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.claim import Busy, Claim, Grant, Mode
from holdfast.core.contract import Exchanging
from holdfast.io.clock import now
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Peer, peers

server, admin = helpers.server, helpers.admin
AHEAD = 4_000_000_000_000_000


def put_ahead(admin: Any, namespace: str, table: str) -> None:
    change = f"UPDATE holdfast_{table} SET token = {AHEAD} WHERE namespace = '{namespace}'"
    with admin.cursor() as cursor:
        assert cursor.execute(change) >= 1


def acquire(peer: Peer, asked: Claim) -> Grant:
    """Attempts until the claim is granted."""
    until = now() + 30
    while now() < until:
        answer = peer.do(peer.backend.attempt(asked, join=True))
        if isinstance(answer, Grant):
            return answer
        peer.do(peer.backend.wait(asked, answer, min(until, now() + 1)))
    raise AssertionError("the claim was not granted")


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_tokens_grow_from_hold_to_hold(
    server: MySQLServer, admin: Any, namespace: str, mode: str, flavour: Flavour
) -> None:
    """Of a free name, as the first waiter, and by an exchange within a client, where there is
    one."""
    url = f"{server.url}?mode={mode}"
    with peers(namespace, flavour, url, url) as (ours, tnext_claims):
        first = ours.take()
        put_ahead(admin, namespace, "lock" if mode == "lease" else "counter")
        waiting, next_claim = claim_of(ttl=600.0), claim_of(ttl=600.0)
        assert isinstance(tnext_claims.do(tnext_claims.backend.attempt(waiting, join=True)), Busy)
        assert ours.do(ours.backend.release(first))
        second = acquire(tnext_claims, waiting)
        assert second.token == AHEAD + 1
        backend = tnext_claims.backend
        if isinstance(backend, Exchanging):
            _, third = tnext_claims.do(backend.exchange(second, next_claim))
        else:
            assert tnext_claims.do(backend.release(second))
            third = tnext_claims.do(backend.attempt(next_claim, join=True))
        third = third if isinstance(third, Grant) else acquire(tnext_claims, next_claim)
        assert third.token == AHEAD + 2
        assert tnext_claims.do(tnext_claims.backend.release(third))
        assert ours.take().token == AHEAD + 3


@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.SLOTS])
def test_tokens_of_readers_and_permits_grow(
    server: MySQLServer, admin: Any, namespace: str, mode: Mode
) -> None:
    with peers(namespace, Flavour.BLOCKING, server.url) as (peer,):
        asked = [claim_of(mode=mode, limit=3 if mode is Mode.SLOTS else 0) for _ in range(3)]
        acquire(peer, asked[0])
        put_ahead(admin, namespace, "lock")
        assert [acquire(peer, claim).token for claim in asked[1:]] == [AHEAD + 1, AHEAD + 2]
