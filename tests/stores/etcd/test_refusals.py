"""Requests that etcd refuses: nothing was changed, so there is nothing to undo."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import TOO_MANY_REQUESTS
from urllib.error import HTTPError

import pytest

from holdfast.claim import Busy
from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.process import READY_SECONDS
from stores.claims import claim_of
from stores.http_peer import Peer, peers

QUOTA_BYTES = 2_000_000
PIECE_BYTES = 400_000
MOST_PIECES = 500
every_flavour = pytest.mark.parametrize("flavour", list(Flavour))


class Guarded(EtcdServer):
    """An etcd whose user may only read."""

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        super().wait_ready(seconds)
        everything = {"permType": "READ", "key": "AA==", "range_end": "AA=="}
        for path, body in (
            ("user/add", {"name": "root", "password": "secret-0"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "looks"}),
            ("role/grant", {"name": "looks", "perm": everything}),
            ("user/add", {"name": "reader", "password": "secret-1"}),
            ("user/grant", {"user": "reader", "role": "looks"}),
            ("enable", {}),
        ):
            self.ask(f"/v3/auth/{path}", body)


@every_flavour
def test_a_denied_request_leaves_no_pending_undo(namespace: str, flavour: Flavour) -> None:
    with Guarded() as server:
        url = server.url.replace("etcd://", "etcd://reader:secret-1@")
        with peers(url, namespace) as peer:
            one = peer(flavour)
            for join in (True, False):
                with pytest.raises(Unsupported, match="role lacks"):
                    one.attempt(claim_of(), join)
            assert not one.store.sessions.doubts


def _refused(server: EtcdServer, piece: dict[str, str]) -> bool:
    try:
        server.ask("/v3/kv/put", piece)
    except HTTPError as error:
        error.close()
        return error.code == TOO_MANY_REQUESTS
    return False


@contextmanager
def _full(server: EtcdServer) -> Iterator[None]:
    """Fills the database, and makes space again at the end."""
    piece = {"key": "YQ==", "value": b64encode(bytes(PIECE_BYTES)).decode()}
    # etcd keeps old versions too, and checks its size ten times a second.
    assert any(_refused(server, piece) for _ in range(MOST_PIECES))
    yield
    header = server.ask("/v3/kv/deleterange", {"key": piece["key"]})["header"]
    server.ask("/v3/kv/compaction", {"revision": header["revision"], "physical": True})
    server.ask("/v3/maintenance/defragment", {})
    alarm = {"alarm": "NOSPACE", "memberID": header["member_id"]}
    server.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})


@every_flavour
def test_a_full_database(namespace: str, flavour: Flavour) -> None:
    """No claim is admitted, a hold can be released, and an unanswered request is undone in the
    end."""
    with (
        EtcdServer(arguments=["--quota-backend-bytes", str(QUOTA_BYTES)]) as server,
        peers(server.url, namespace) as peer,
    ):
        _survive_full_database(server, peer, flavour)


def _survive_full_database(
    server: EtcdServer, peer: Callable[[Flavour], Peer], flavour: Flavour
) -> None:
    ours, theirs = peer(flavour), peer(flavour)
    unsure, waiting, behind = claim_of("unsure"), claim_of(), claim_of()
    ours.post.lose = b"txn"
    with pytest.raises(BackendUnavailable):
        ours.attempt(unsure)
    granted = ours.take(unsure)
    first = theirs.take(claim_of())
    assert isinstance(ours.attempt(waiting), Busy)
    assert isinstance(theirs.attempt(behind), Busy)
    assert theirs.run(theirs.backend.release(first))
    held = ours.take(waiting)  # its release will wake the waiter behind it
    with _full(server):
        with pytest.raises(BackendUnavailable, match="space exceeded"):
            ours.attempt(claim_of("late"))
        with pytest.raises(BackendUnavailable, match="space exceeded"):
            ours.run(ours.backend.release(granted))  # its first request is not void yet
        assert list(ours.store.sessions.doubts) == [unsure.owner]
        assert theirs.run(theirs.backend.look("unsure")).holders == ()
        assert ours.run(ours.backend.release(held)) is True
    ours.run(ours.backend.abandon(unsure))
    assert not ours.store.sessions.doubts
    assert theirs.take(behind).token > held.token
