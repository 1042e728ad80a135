"""What is peculiar to ZooKeeper: sessions, trips, limits, access."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

import holdfast
from backends.zookeeper_bench import QuickServer, SaslServer, SecureServer
from holdfast.backends import zookeeper, zookeeper_end, zookeeper_renew
from holdfast.backends.zookeeper_store import ZooKeeperStore
from holdfast.claim import Busy, Claim, Grant, Mode, write_label
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, Unsupported
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.runtimes.clock import now
from holdfast.url import open_store
from holdfast.wires.zookeeper import NEVER, Options, Session
from holdfast.wires.zookeeper_asks import Ask, Delete
from servers.registry import Servers
from servers.zookeeper import ZooKeeperServer


@pytest.fixture
def server(servers: Servers) -> QuickServer:
    return servers.of(QuickServer)


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def kazoo(server: QuickServer) -> Iterator[KazooClient]:
    """A look at the nodes themselves."""
    client = KazooClient(f"{server.host}:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Every trip to the servers, as the kinds of its requests."""
    seen: list[list[str]] = []
    start = Session.start

    def noted(session: Session, call: Any, *asks: Ask) -> None:
        seen.append([type(ask).__name__ for ask in asks])
        start(session, call, *asks)

    monkeypatch.setattr(Session, "start", noted)
    return seen


def _claims(kazoo: KazooClient, path: str) -> list[str]:
    """The nodes of a name, which has none itself once nobody uses it."""
    try:
        nodes: list[str] = kazoo.get_children(path)
    except NoNodeError:
        return []
    return nodes


def _claim(name: str = "name", **changes: Any) -> Claim:
    label = write_label("host", 1, "thread", "")
    claim = Claim(name, Mode.EXCLUSIVE, 1, 0, 30.0, secrets.token_hex(16), label)
    return claim._replace(**changes)


def test_a_hold_is_two_trips(server: QuickServer, namespace: str, trips: list[list[str]]) -> None:
    """Create and list go out back to back; the release is one request."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name"):
            pass
        trips.clear()
        with locks.lock("name"):
            pass
    assert trips == [["Create", "Listing"], ["Delete"]]


def test_a_woken_waiter_makes_no_trip(
    server: QuickServer, namespace: str, trips: list[list[str]]
) -> None:
    """What it decides by is there when it wakes: the look was sent when the watch fired."""
    store = open_store(server.url, Settings(namespace=namespace))
    ours, theirs = store.backend(BlockingRuntime()), store.backend(BlockingRuntime())
    grant = run_now(ours.attempt(_claim(), join=True))
    assert isinstance(grant, Grant)
    claim = _claim()
    busy = run_now(theirs.attempt(claim, join=True))
    assert isinstance(busy, Busy)
    assert run_now(ours.release(grant))
    trips.clear()
    run_now(theirs.wait(claim, busy, now() + 30))
    assert isinstance(run_now(theirs.attempt(claim, join=True)), Grant)
    assert trips == []
    run_now(ours.close())
    run_now(theirs.close())


def test_an_heir_that_has_come_and_gone_is_not_lined_up_again(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own thread may be served, and release, before the exchange looks at the answers."""
    store = open_store(server.url, Settings(namespace=namespace))
    backend = store.backend(BlockingRuntime())
    grant = run_now(backend.attempt(_claim(), join=True))
    heir = _claim()
    assert isinstance(grant, Grant)
    assert isinstance(run_now(backend.attempt(heir, join=True)), Busy)
    finish = Session.finish

    async def finish_late(session: Session, call: Any, seconds: float, *asks: Ask) -> None:
        monkeypatch.setattr(Session, "finish", finish)
        await finish(session, call, seconds, *asks)
        own = await backend.attempt(heir, join=True)
        assert isinstance(own, Grant)
        assert await backend.release(own) is True

    monkeypatch.setattr(Session, "finish", finish_late)
    ours, answer = run_now(backend.exchange(grant, heir))
    assert ours is True
    assert isinstance(answer, Busy)
    assert _claims(kazoo, f"/{namespace}/locks/name") == []
    run_now(backend.close())


def _held(backend: Any, names: Iterable[str]) -> list[Grant]:
    grants = [run_now(backend.attempt(_claim(name, ttl=50.0), join=True)) for name in names]
    assert all(isinstance(grant, Grant) for grant in grants)
    return grants


def test_holds_are_renewed_in_one_trip(
    server: QuickServer,
    namespace: str,
    kazoo: KazooClient,
    trips: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share one session: a write proves many, and only among these it is asked who is gone."""
    monkeypatch.setattr(zookeeper_renew, "BATCH", 10)
    backend = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    grants = _held(backend, map(str, range(25)))
    trips.clear()
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert trips == [["Checks"] * 3]
    broken = grants[17]
    kazoo.delete(broken.ref[2])
    trips.clear()
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (set(renewal.lost), renewal.unknown) == ({broken.claim.owner}, {})
    assert trips == [["Checks"] * 3, ["Exists"] * 10]
    run_now(backend.close())


def test_holds_of_long_names_are_renewed(server: QuickServer, namespace: str) -> None:
    """Servers close a connection that sends a megabyte at once."""
    settings = Settings(namespace=namespace.ljust(500, "\x7f"))
    backend = open_store(server.url, settings).backend(BlockingRuntime())
    grants = _held(backend, (f"{n:04}".ljust(508, "\x7f") for n in range(400)))
    assert sum(len(grant.ref[2]) for grant in grants) > 2**20
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    run_now(backend.close())


def test_holds_are_renewed_while_others_are_released(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are: at every request one more."""
    backend = open_store(server.url, Settings(namespace=namespace)).backend(BlockingRuntime())
    grants = _held(backend, map(str, range(20)))
    going, start = grants[10:], Session.start
    gone: list[Grant] = []

    def lose_one(session: Session, call: Any, *asks: Ask) -> None:
        gone.append(going.pop())
        kazoo.delete(gone[-1].ref[2])
        start(session, call, *asks)

    monkeypatch.setattr(Session, "start", lose_one)
    renewal = run_now(backend.renew(grants, [], until=now() + 20))
    monkeypatch.undo()
    assert gone
    assert set(renewal.lost) == {grant.claim.owner for grant in gone}
    assert renewal.unknown == {}
    run_now(backend.close())


@pytest.mark.faults
def test_a_thousand_tasks_share_one_connection(server: QuickServer, namespace: str) -> None:
    """Those who wait in one door cost no connection of their own."""

    async def wait_all() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace) as locks:
            lock = locks.lock("name")
            before = server.connections()

            async def take() -> int:
                async with lock as lease:
                    return lease.token

            async with lock:
                tasks = [asyncio.create_task(take()) for _ in range(1000)]
                await asyncio.sleep(0.2)
                assert server.connections() - before <= 1
            tokens = await asyncio.gather(*tasks)
            assert tokens == sorted(set(tokens))

    asyncio.run(wait_all())


def test_a_session_that_ends_loses_its_holds(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """All of them, with the reason; the next session adopts none."""
    with holdfast.connect(server.url, namespace=namespace, ttl=6) as locks:
        leases = [locks.lock(name).acquire() for name in ("a", "b")]
        (session,) = [s for s in _sessions(locks).values() if s.id]
        assert session._client is not None
        thief = KazooClient(f"{server.host}:{server.port}", client_id=session._client.client_id)
        thief.start()
        thief.stop()
        thief.close()
        deadline = now() + 6
        for lease in leases:
            assert lease is not None
            while not lease.lost:
                assert now() < deadline
            assert "session" in lease.reason
        with locks.lock("a", timeout=5) as lease:
            assert leases[0] is not None
            assert lease.token > leases[0].token
        assert _claims(kazoo, f"/{namespace}/locks/b") == []


def _sessions(locks: holdfast.Locks) -> dict[int, Session]:
    sessions: dict[int, Session] = locks._door.store.sessions  # type: ignore[attr-defined]
    return sessions


def test_a_ttl_is_refused_with_its_limits(servers: Servers, namespace: str) -> None:
    """Two ticks at least, and what the longest session leaves at the most."""
    slow = servers.of(ZooKeeperServer, tick_ms=2000)
    with holdfast.connect(slow.url, namespace=namespace) as locks:
        with pytest.raises((Unsupported, ValueError), match="4 s"):
            locks.lock("name", ttl=3).acquire()
        with pytest.raises((Unsupported, ValueError), match="60 s, enough for 52 s"):
            locks.lock("name", ttl=60).acquire()
        with locks.lock("name", ttl=4) as lease:
            assert lease.held


def test_empty_names_vanish(server: QuickServer, namespace: str, kazoo: KazooClient) -> None:
    """The servers delete a name's node after its last claim; the token goes on growing."""
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with locks.lock("name") as lease:
            first = lease.token
        deadline = now() + 20
        while kazoo.exists(f"/{namespace}/locks/name"):
            assert now() < deadline
        with locks.lock("name") as lease:
            assert lease.token > first
        assert _claims(kazoo, f"/{namespace}/locks/name") == []


def test_the_line_starts_over_before_its_counter_ends(
    server: QuickServer, namespace: str, kazoo: KazooClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers let it drain; the last one out takes the name's node along."""
    for module in (zookeeper, zookeeper_end):
        monkeypatch.setattr(module, "SEQUENCE_LIMIT", 3)
    tokens = []
    with holdfast.connect(server.url, namespace=namespace) as locks:
        for _ in range(8):
            with locks.lock("name") as lease:
                tokens.append(lease.token)
        with holdfast.connect(server.url, namespace=namespace) as others:
            lock = others.lock("name")
            for _ in range(8):
                with locks.lock("name") as lease:
                    tokens.append(lease.token)
                    assert not lock.acquire(timeout=0.05)
                with lock as lease:
                    tokens.append(lease.token)
    assert tokens == sorted(set(tokens))
    assert _claims(kazoo, f"/{namespace}/locks/name") == []


def test_a_newer_version_is_not_touched(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """What it stored stays, and nothing of ours is left beside it."""
    kazoo.create(f"/{namespace}/locks/name/2.something", makepath=True)
    with holdfast.connect(server.url, namespace=namespace) as locks:
        with pytest.raises(Incompatible):
            locks.lock("name").acquire()
        assert kazoo.get_children(f"/{namespace}/locks/name") == ["2.something"]


def test_nodes_belong_to_their_user(
    server: QuickServer, namespace: str, kazoo: KazooClient
) -> None:
    """With a user and a password others can't even look, and no secret is shown."""
    with holdfast.connect(_as(server, "us", "s3cret:/?"), namespace=namespace) as locks:
        with locks.lock("name"):
            kazoo.add_auth("digest", "us:s3cret:/?")
            (acl,) = kazoo.get_acls(f"/{namespace}/locks/name")[0]
            assert (acl.id.scheme, acl.id.id.split(":")[0]) == ("digest", "us")
            with holdfast.connect(_as(server, "them", "x"), namespace=namespace) as others:
                with pytest.raises(Unsupported, match="another user's") as caught:
                    others.lock("name").acquire()
                assert "s3cret" not in str(caught.value)
        assert "s3cret" not in repr(locks)


def _as(server: QuickServer, user: str, password: str) -> str:
    return f"zookeeper://{user}:{quote(password, safe='')}@{server.host}:{server.port}"


def test_sasl(servers: Servers, namespace: str) -> None:
    """Nodes belong to the user that the server has recognised; a wrong password is told."""
    pytest.importorskip("puresasl", reason="auth=sasl needs the package pure-sasl")
    server = servers.of(SaslServer)
    with holdfast.connect(f"{_as(server, 'us', 's3cret')}?auth=sasl", namespace=namespace) as locks:
        with (
            locks.lock("name"),
            holdfast.connect(server.url, namespace=namespace) as others,
            pytest.raises(Unsupported, match="another user's"),
        ):
            others.lock("name").acquire()
        server.restart()
        with locks.lock("name", timeout=30) as lease:
            assert lease.held
    wrong = f"{_as(server, 'us', 'wr0ng')}?auth=sasl"
    with holdfast.connect(wrong, namespace=namespace) as locks:
        with pytest.raises(Unsupported, match="refuses our user") as caught:
            locks.lock("name").acquire()
        assert "wr0ng" not in str(caught.value)


def test_a_path_in_the_url_is_made(server: QuickServer, namespace: str, kazoo: KazooClient) -> None:
    """Nobody has to create it first."""
    with holdfast.connect(f"{server.url}/{namespace}/deep/down") as locks, locks.lock("name"):
        assert len(kazoo.get_children(f"/{namespace}/deep/down/holdfast/locks/name")) == 1


def test_tls_and_client_certificates(servers: Servers, namespace: str, tmp_path: Path) -> None:
    """The server is verified by name, and asks for a certificate of ours."""
    secure = servers.of(SecureServer)
    files = secure.certificate
    url = f"zookeeper://127.0.0.1:{secure.secure_port}"
    ours = f"ca={files.certificate}&cert={files.certificate}&key={files.key}"
    with holdfast.connect(f"{url}?{ours}", namespace=namespace) as locks:
        for _ in range(20):
            with locks.lock("name") as lease:
                assert lease.held
        assert "CN=" not in repr(locks)
    with (
        holdfast.connect(f"{url}?tls=on", namespace=namespace) as locks,
        pytest.raises(BackendUnavailable),
    ):
        locks.lock("name").acquire(timeout=1)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("zookeeper://", "no server"),
        ("zookeeper://host?surprise=1", "surprise"),
        ("zookeeper://host?auth=digest", "user:password"),
        ("zookeeper://host?auth=ticket", "digest, sasl or none"),
        ("zookeeper://host?tls=off&ca=file", "tls=on"),
        ("zookeeper://host?tls=on&verify=off&check_hostname=on", "verify=on"),
        ("zookeeper://host/a/../b", "path"),
        ("zookeeper://host//a", "path"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(wrong: str, why: str) -> None:
    """When the store is made, before anything touches the network."""
    with pytest.raises(ValueError, match=why):
        open_store(wrong, Settings())


def test_credentials_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the URL names none; neither is shown."""
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_USERNAME", "us")
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_PASSWORD", "s3cret")
    store = open_store("zookeeper://host1,host2:2182/path", Settings())
    assert isinstance(store, ZooKeeperStore)
    assert store.options.client == {"auth_data": {("digest", "us:s3cret")}}
    assert store.options.hosts == "host1:2181,host2:2182"
    assert "s3cret" not in f"{store.display} {store.options!r}"


def test_a_withdrawn_request_is_never_sent() -> None:
    """Whoever gives up first decides: it goes out as a harmless read instead."""
    ask = Delete("/holdfast/somebody")
    assert ask.withdraw() is True
    assert (ask.type, b"somebody" in ask.serialize()) == (3, False)
    sent = Delete("/holdfast/somebody")
    assert (sent.type, b"somebody" in sent.serialize()) == (Delete.kind, True)
    assert sent.withdraw() is False


def test_a_heartbeat_counts_once_a_later_write_was_answered() -> None:
    """The leader hears of it up to half a tick late; the session's reserve pays for that."""
    session = Session(Options("host:1", "zookeeper://host:1", 5.0), 10.0, None, lambda *_: None)
    asked = session.settle(2.0)
    assert asked is not None
    assert asked >= 10.0 + session.lag + 1.0
    session.timeout, session.id = asked, 7
    reserve = asked - 10.0
    session._base = 100.0
    assert session.since(100.5, 7) == 100.5  # the connection itself was the leader's word
    assert session.since(130.0, 7) == pytest.approx(100.0 + reserve)
    session._marks.append(129.5)
    assert session.since(130.0, 7) == pytest.approx(100.0 + reserve)  # not told yet, for sure
    assert session.since(130.5, 7) == 130.5
    assert session.proven_since(7) == 130.5
    assert session.since(131.0, 8) == session.proven_since(8) == NEVER
