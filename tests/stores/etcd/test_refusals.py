"""Requests that etcd refuses: nothing was changed, so there is nothing to undo."""

from __future__ import annotations

import asyncio
import subprocess
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import TOO_MANY_REQUESTS
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError

import pytest

import holdfast
from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.etcd import messages, requests
from holdfast.stores.etcd.calls import RANGE, SIGN_IN, TXN, Call, Calls, Reply
from holdfast.stores.etcd.messages import data, integer
from holdfast.testing import Flavour
from servers.etcd import EtcdServer
from servers.process import READY_SECONDS
from servers.registry import Servers
from stores.claims import claim_of
from stores.fake_server import answering, fake_server, http_reply
from stores.http_peer import Peer, peers

QUOTA_BYTES = 2_000_000
PIECE_BYTES = 400_000
MOST_PIECES = 500
SOON = 30.0
MANY = 20
ADD_USER = Call(b"/etcdserverpb.Auth/UserAdd", messages.empty_reply)
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
                one.post.asked.clear()
                with pytest.raises(BackendUnavailable, match="role lacks") as caught:
                    one.attempt(claim_of(), join)
                assert caught.value.final
                # The token is fetched again once: it may be older than the permission.
                assert one.post.asked.count(SIGN_IN.path) <= 2
                assert one.post.asked.count(TXN.path) == 2
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


def _sign(folder: Path) -> str:
    """Makes a pair of keys; returns etcd's option for signed tokens."""
    private, public = folder / "private.pem", folder / "public.pem"
    for words in (
        ["genrsa", "-out", str(private), "2048"],
        ["rsa", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    return f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m"


@pytest.mark.parametrize("version", ["3.4", "3.5"])
def test_signed_tokens_survive_changes_of_users(
    namespace: str, tmp_path: Path, version: Literal["3.4", "3.5"]
) -> None:
    """Any change of users or roles makes all tokens that were signed before it invalid."""
    with EtcdServer(version=version, arguments=["--auth-token", _sign(tmp_path)]) as server:
        for path, body in (
            ("user/add", {"name": "root", "password": "secret-0"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            server.ask(f"/v3/auth/{path}", body)
        url = server.url.replace("etcd://", "etcd://root:secret-0@")
        with peers(url, namespace) as peer:
            one, admin = peer(), peer()
            grant = one.take(claim_of())
            admin.run(admin.backend.calls.call(ADD_USER, messages.sign_in("other", "secret-1")))
            renewal = one.run(one.backend.renew([grant], [], until=now() + SOON))
            assert (renewal.lost, renewal.unknown) == ({}, {})
            assert one.run(one.backend.release(grant)) is True
            assert one.post.asked.count(SIGN_IN.path) == 2


@pytest.mark.parametrize("body", [b"{}", b"[]", b'"x"', b"<html>", b""])
@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "403 Forbidden", "404 Not Found"])
def test_a_server_that_is_not_etcd_is_refused_at_once(body: bytes, status: str) -> None:
    """Also when locks are listed: it is not an etcd without locks."""
    with (
        fake_server(answering(http_reply(body, status))) as port,
        holdfast.connect(f"etcd://127.0.0.1:{port}") as locks,
    ):
        for step in (locks.list, locks.lock("name").acquire, partial(locks.inspect, "name")):
            with pytest.raises(BackendUnavailable, match="not etcd") as caught:
                step()
            assert caught.value.final


def test_a_first_answer_to_a_second_backend_that_is_damaged_is_not_final(
    servers: Servers, namespace: str
) -> None:
    """etcd may have executed the request: the claim must be undone. Its session is of another
    backend, so this is the first answer that this one gets."""
    with peers(servers.of(EtcdServer).url, namespace) as peer:
        one = peer()
        one.run(one.backend.release(one.take(claim_of())))
        second = one.store.backend(BlockingRuntime())
        second.calls.wire = _Broken(second.calls.wire, TXN.path, Reply(0, b"{"))
        claim = claim_of()
        with pytest.raises(BackendUnavailable) as caught:
            one.run(second.attempt(claim, join=True))
        assert not caught.value.final
        assert claim.owner in one.store.sessions.doubts
        one.run(second.abandon(claim))
        one.run(second.close())


@pytest.mark.parametrize("status", [12, 200, 404, 405, 501])
def test_a_proxy_without_an_etcd_for_a_moment_is_not_final(
    servers: Servers, namespace: str, status: int
) -> None:
    with peers(servers.of(EtcdServer).url, namespace) as peer:
        one = peer()
        one.run(one.backend.release(one.take(claim_of())))
        one.backend.calls.wire = _Broken(one.post, TXN.path, Reply(status, b""))
        with pytest.raises(BackendUnavailable) as caught:
            one.attempt(claim_of())
        assert not caught.value.final


class _TwoSignIns:
    """Another thread signs in between this one's sign-in and its next request."""

    def __init__(self, wire: Any, other: Calls) -> None:
        self._wire, self._other = wire, other
        self.sign_ins = 0

    async def ask(self, path: bytes, message: bytes = b"", until: float | None = None) -> Reply:
        if path == SIGN_IN.path:
            self.sign_ins += 1
        elif self.sign_ins:
            self._other.wire = _Unanswered()  # type: ignore[assignment]
            with pytest.raises(BackendUnavailable):
                await self._other.sign_in(self._other.credentials.sign_ins, until)
        reply: Reply = await self._wire.ask(path, message, until)
        return reply


class _Unanswered:
    async def ask(self, path: bytes, message: bytes = b"", until: float | None = None) -> Reply:
        raise BackendUnavailable("not answered yet")


def test_a_sign_in_does_not_take_the_token_of_other_threads(namespace: str) -> None:
    """The token of a thread that has just signed in was dropped by the next sign-in, and its
    request was refused for good."""
    with Guarded() as server:
        url = server.url.replace("etcd://", "etcd://root:secret-0@")
        with peers(url, namespace) as peer:
            one = peer()
            another = one.store.backend(BlockingRuntime())
            unused = another.calls.wire
            two = one.backend.calls.wire = _TwoSignIns(one.post, another.calls)
            one.run(one.backend.calls.call(RANGE, requests.only(b"a")))
            assert two.sign_ins == 1
            one.store.credentials.use("old")
            one.run(one.backend.calls.call(RANGE, requests.only(b"a")))
            assert two.sign_ins == 2
            one.backend.calls.wire, another.calls.wire = one.post, unused
            one.run(another.close())


@every_flavour
def test_one_of_many_requests_signs_in_for_all(namespace: str, flavour: Flavour) -> None:
    """At first use, and after the token has expired: a sign-in costs a server much CPU time."""
    with Guarded() as server:
        url = server.url.replace("etcd://", "etcd://root:secret-0@")
        with peers(url, namespace) as peer:
            one = peer(flavour)
            calls = one.backend.calls

            def read(_: int) -> Coroutine[Any, Any, object]:
                return calls.call(RANGE, requests.only(b"a"))  # type: ignore[no-any-return]

            async def many() -> None:
                await asyncio.gather(*map(read, range(MANY)))

            for token in ("", "old"):
                one.store.credentials.use(token)
                one.post.asked.clear()
                if flavour is Flavour.ASYNCIO:
                    one.run(many())
                else:
                    with ThreadPoolExecutor(MANY) as pool:
                        list(pool.map(lambda number: run_now(read(number)), range(MANY)))
                assert one.post.asked.count(SIGN_IN.path) == 1


class _Broken:
    """Answers of etcd, one of which is denied or damaged."""

    def __init__(self, wire: Any, path: bytes, reply: Reply) -> None:
        self._wire = wire
        self._path: bytes | None = path
        self._reply = reply

    async def ask(self, path: bytes, message: bytes = b"", until: float | None = None) -> Reply:
        if path == self._path:
            self._path = None
            return self._reply
        reply: Reply = await self._wire.ask(path, message, until)
        return reply

    def forget(self) -> None:
        self._wire.forget()

    async def close(self) -> None:
        await self._wire.close()


def _txn(*parts: bytes) -> bytes:
    return data(1, integer(3, 7)) + integer(2, 1) + b"".join(data(3, part) for part in parts)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(7, b"etcdserver: permission denied"),
        Reply(0, _txn()),
        Reply(0, _txn(b"")),
        Reply(0, _txn(data(1, data(2, b"")))),
        Reply(0, _txn(data(2, b""))),
        Reply(0, _txn(data(1, b""), data(1, b""))),
        Reply(0, b"\xff"),
    ],
    ids=["denied", "too short", "empty", "damaged", "another kind", "too long", "no message"],
)
def test_a_refusal_of_one_hold_leaves_the_rest_of_a_renewal(
    servers: Servers, namespace: str, reply: Reply
) -> None:
    """A hold whose ttl was changed is looked up by a request of its own."""
    with peers(servers.of(EtcdServer).url, namespace) as peer:
        one = peer()
        stays, moves = one.take(claim_of("stays")), one.take(claim_of("moves"))
        moves = moves._replace(claim=moves.claim._replace(ttl=60.0))
        one.backend.calls.wire = _Broken(one.post, TXN.path, reply)
        renewal = one.run(one.backend.renew([moves, stays], [], until=now() + SOON))
        assert renewal.lost == {}
        assert list(renewal.unknown) == [moves.claim.owner]
        assert renewal.since is not None


def _leases(server: EtcdServer) -> set[str]:
    return {lease["ID"] for lease in server.ask("/v3/lease/leases", {})["leases"]}


def test_a_record_that_is_refused_leaves_no_lease(servers: Servers, namespace: str) -> None:
    server = servers.of(EtcdServer)
    with peers(server.url, namespace) as peer:
        one = peer()
        grant = one.take(claim_of())
        before = _leases(server)
        one.post.lose = b"txn"
        with pytest.raises(BackendUnavailable):
            one.run(one.backend.record(grant, "value", 600.0))
        assert _leases(server) <= before
        assert one.run(one.backend.record(grant, "value", 600.0))
        assert one.run(one.backend.recall("name")).value == "value"
