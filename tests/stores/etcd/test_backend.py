"""What is special to etcd: leases, watches, passwords, and requests that arrive late."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator

import pytest

import holdfast
from holdfast import fencing
from holdfast.claim import Busy, Mode
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.io.clock import now
from holdfast.stores.etcd import messages
from holdfast.stores.etcd.calls import KEEP_ALIVE, Call
from holdfast.stores.etcd.messages import data
from holdfast.testing import Flavour
from servers.etcd import EtcdServer, Version
from servers.process import wait_until
from servers.proxy import Proxy
from servers.registry import Servers
from stores.claims import claim_of
from stores.etcd import helpers
from stores.http_peer import Peer, peers
from stores.mutual_tls import MutualEtcd, mutual_url
from stores.waiting import waited_for

SOON = 60.0
NAMES = 40
QUIET_SECONDS = 2.0
server, peer, encoded = helpers.server, helpers.peer, helpers.encoded


def test_a_hold_is_two_requests(peer: Callable[[], Peer]) -> None:
    """Once the client has its lease, acquire and release are one request each, in every mode."""
    one = peer()
    run_now(one.backend.release(one.take(claim_of())))
    for claim in (
        claim_of(),
        claim_of("read", Mode.SHARED),
        claim_of("slots", Mode.SLOTS, weight=2, limit=3),
    ):
        one.post.asked.clear()
        run_now(one.backend.release(one.take(claim)))
        assert len(one.post.asked) == 2


def test_joining_is_one_request(peer: Callable[[], Peer]) -> None:
    """An attempt at a contended name joins its queue and learns in the same request which entry to
    wait for. Only the first contended attempt costs one request more."""
    ours, theirs = peer(), peer()
    grant = ours.take(claim_of())
    theirs.post.asked.clear()
    first = claim_of()
    assert isinstance(theirs.attempt(first), Busy)
    assert len(theirs.post.asked) == 3  # one more is for the lease
    run_now(theirs.backend.abandon(first))
    theirs.post.asked.clear()
    claim = claim_of()
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    assert busy.ref[0] == (grant.ref.key, grant.token)
    assert len(theirs.post.asked) == 1
    run_now(ours.backend.release(grant))
    theirs.take(claim)
    assert len(theirs.post.asked) == 2


def test_joining_reads_one_entry_of_a_long_queue(peer: Callable[[], Peer]) -> None:
    """It reads the last entry, and the number of entries."""
    ours, theirs = peer(), peer()
    ours.take(claim_of())
    queue = [claim_of() for _ in range(4)]
    found = [theirs.attempt(claim) for claim in queue]
    keys = [theirs.store.key(claim).decode() for claim in queue]
    for place, busy in enumerate(found):
        assert isinstance(busy, Busy)
        assert (busy.place, busy.retry_seconds) == (place, None)
        assert place == 0 or busy.ref[0][0] == keys[place - 1]
    theirs.post.asked.clear()
    theirs.post.read = 0
    assert isinstance(theirs.attempt(claim_of()), Busy)
    assert len(theirs.post.asked) == 1
    short = theirs.post.read
    for _ in range(8):
        theirs.attempt(claim_of())
    theirs.post.read = 0
    assert isinstance(theirs.attempt(claim_of()), Busy)
    assert abs(theirs.post.read - short) < 32  # some numbers have more digits


def test_any_number_of_holds_is_renewed_in_three_requests(peer: Callable[[], Peer]) -> None:
    """One keep-alive, its confirmation by a majority, and the list of the lease's keys."""
    one = peer()
    grants = one.take_many(1000)
    one.post.asked.clear()
    renewal = run_now(one.backend.renew(grants, [], until=now() + SOON))
    assert (renewal.lost, renewal.unknown) == ({}, {})
    assert len(one.post.asked) == 3
    assert one.post.asked.count(KEEP_ALIVE.path) == 1


def test_a_short_lease_is_kept_alive_while_its_claim_waits(peer: Callable[[], Peer]) -> None:
    """The renewer refreshes waiters every five seconds, which is too rare for a short ttl."""
    ours, theirs = peer(), peer()
    ours.take(claim_of())
    claim = claim_of(ttl=4.0)
    busy = theirs.attempt(claim)
    assert isinstance(busy, Busy)
    wait = threading.Thread(
        target=run_now, args=(theirs.backend.wait(claim, busy, now() + 3 * SOON),)
    )
    wait.start()
    wait.join(SOON)
    assert not wait.is_alive()  # although the holder did nothing
    theirs.post.asked.clear()
    theirs.attempt(claim)
    assert KEEP_ALIVE.path in theirs.post.asked


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_wait_outlives_compaction(server: EtcdServer, namespace: str, flavour: Flavour) -> None:
    """Compaction during a wait costs no wake-up."""
    with waited_for(server.url, namespace, flavour):
        puts = [server.ask("/v3/kv/put", {"key": "YQ==", "value": "YQ=="}) for _ in range(5)]
        server.ask("/v3/kv/compaction", {"revision": puts[-1]["header"]["revision"]})


def test_a_foreign_version_is_refused(peer: Callable[[], Peer], server: EtcdServer) -> None:
    """An entry of another protocol version is neither ignored nor overwritten."""
    one = peer()
    grant = one.take(claim_of())
    server.ask("/v3/kv/put", {"key": encoded(grant.ref.key), "value": "WzJd", "ignore_lease": True})
    for _ in range(2):
        with pytest.raises(Incompatible, match="name"):
            one.attempt(claim_of())
    found = server.ask("/v3/kv/range", {"key": encoded(grant.ref.key), "range_end": "AA=="})
    prefix = grant.ref.key.rpartition("/")[0].encode()  # keys of other tests follow
    keys = [b64decode(kv["key"]) for kv in found["kvs"]]
    assert [key for key in keys if key.startswith(prefix)] == [grant.ref.key.encode()]


def test_a_queue_of_a_foreign_version_is_not_joined(
    peer: Callable[[], Peer], server: EtcdServer
) -> None:
    """Whatever the length of the queue."""
    ours, theirs = peer(), peer()
    ours.take(claim_of())
    last = claim_of()
    assert isinstance(ours.attempt(last), Busy)
    key = ours.store.key(last).decode()
    server.ask("/v3/kv/put", {"key": encoded(key), "value": "WzJd", "ignore_lease": True})
    waiting = claim_of()
    for one in (ours, theirs):
        with pytest.raises(Incompatible, match="name"):
            one.attempt(waiting)
        found = server.ask("/v3/kv/range", {"key": encoded(one.store.key(waiting).decode())})
        assert "kvs" not in found


def test_many_waiters_share_one_socket(server: EtcdServer, namespace: str) -> None:
    """Two hundred tasks that wait for twenty names use three connections."""
    with Proxy(server) as proxy:
        asyncio.run(_wait_in_many_tasks(server.url, proxy, namespace))


async def _wait_in_many_tasks(url: str, proxy: Proxy, namespace: str) -> None:
    async with (
        holdfast.connect_async(url, namespace=namespace) as ours,
        holdfast.connect_async(proxy.url, namespace=namespace, connections=1) as theirs,
    ):
        held = [await ours.lock(f"name {number}").acquire() for number in range(20)]
        tasks = [
            asyncio.create_task(theirs.lock(f"name {number % 20}").acquire())
            for number in range(200)
        ]
        deadline = now() + SOON
        while sum(len(info.waiters) for info in await ours.list()) < 20:
            assert now() < deadline
            await asyncio.sleep(0.05)
        assert proxy.open_connections <= 3  # for requests, watches and the renewer
        for lease in held:
            assert lease
            await lease.release()
        taken = await asyncio.gather(*tasks[:20])
        for task in tasks[20:]:
            task.cancel()
        await asyncio.gather(*tasks[20:], return_exceptions=True)
        for lease in taken:
            assert lease
            assert await lease.release()


def test_the_gateway_may_be_off(namespace: str) -> None:
    """etcd's JSON gateway is not needed."""
    with EtcdServer(version="3.5") as server:
        server.stop()
        server.arguments.append("--enable-grpc-gateway=false")
        server.launch()
        with (
            holdfast.connect(server.url, namespace=namespace) as locks,
            locks.lock("name", timeout=SOON),
        ):
            assert locks.inspect("name").holders


@pytest.fixture(scope="module")
def guarded() -> Iterator[EtcdServer]:
    """An etcd that requires a password, and drops tokens that were not used for a second."""
    server = EtcdServer(arguments=["--auth-token-ttl", "1"])
    with server:
        for path, body in (
            ("user/add", {"name": "root", "password": "secret-0"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "locks"}),
            # All keys from "t" to "u": the namespaces of these tests.
            (
                "role/grant",
                {
                    "name": "locks",
                    "perm": {"permType": "READWRITE", "key": "dA==", "range_end": "dQ=="},
                },
            ),
            ("user/add", {"name": "worker", "password": "secret-1"}),
            ("user/grant", {"user": "worker", "role": "locks"}),
            ("enable", {}),
        ):
            server.ask(f"/v3/auth/{path}", body)
        yield server


def test_passwords(guarded: EtcdServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the URL or the environment. The error for a missing or wrong password does not
    show it."""
    host = f"{guarded.host}:{guarded.port}"
    with (
        holdfast.connect(f"etcd://{host}", namespace=namespace) as locks,
        pytest.raises(BackendUnavailable, match="needs a user and a password") as caught,
    ):
        locks.lock("name").acquire()
    assert caught.value.final
    with holdfast.connect(f"etcd://worker:wrong-2@{host}", namespace=namespace) as locks:
        with pytest.raises(BackendUnavailable, match="refused the password of 'worker'") as caught:
            locks.lock("name").acquire()
        assert caught.value.final
        assert "wrong-2" not in str(caught.value)
    monkeypatch.setenv("ETCDCTL_USER", "worker:secret-1")
    with (
        holdfast.connect(f"etcd://{host}", namespace=namespace) as locks,
        locks.lock("name", timeout=SOON),
    ):
        pass


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_waiting_with_a_password(guarded: EtcdServer, namespace: str, flavour: Flavour) -> None:
    """Expired tokens are replaced, also that of the call that has the watches."""
    url = f"etcd://worker:secret-1@{guarded.host}:{guarded.port}"
    with holdfast.connect(url, namespace=namespace) as locks:
        assert not any(finding.level == "broken" for finding in locks.check())
    with waited_for(url, namespace, flavour) as waited:
        threading.Event().wait(2.5)  # etcd checks for old tokens once a second
        waited.held.extend()


@pytest.mark.usefixtures("no_recheck")
def test_many_names_are_waited_for_without_requests(guarded: EtcdServer, namespace: str) -> None:
    """One Watch call tells of all of them, also with a password."""
    with Proxy(guarded) as proxy:
        login = f"worker:secret-1@{guarded.host}"
        asyncio.run(
            _wait_for_many_names(
                f"etcd://{login}:{guarded.port}", f"etcd://{login}:{proxy.port}", proxy, namespace
            )
        )


async def _wait_for_many_names(direct: str, url: str, proxy: Proxy, namespace: str) -> None:
    async with (
        holdfast.connect_async(direct, namespace=namespace) as ours,
        holdfast.connect_async(url, namespace=namespace) as theirs,
    ):
        held = [await ours.lock(f"name {number}").acquire() for number in range(NAMES)]
        tasks = [
            asyncio.create_task(theirs.lock(f"name {number}").acquire()) for number in range(NAMES)
        ]
        deadline = now() + SOON
        while sum(len(info.waiters) for info in await ours.list()) < NAMES:
            assert now() < deadline
        quiet = False
        while not quiet:
            assert now() < deadline
            proxy.reset_counts()
            await asyncio.sleep(QUIET_SECONDS)
            quiet = proxy.counts.requests <= NAMES / 4  # those of the renewer
        for lease in held:
            assert lease
            await lease.release()
        for lease in await asyncio.gather(*tasks):
            assert lease
            await lease.release()


def _enable_logins(url: str, user: str) -> None:
    """Makes the user root, and requires a login."""
    with peers(url, "unused") as peer:
        calls = peer().backend.calls
        for method, message in (
            ("UserAdd", messages.sign_in(user, "secret-3")),
            ("RoleAdd", data(1, b"root")),
            ("UserGrantRole", data(1, user.encode()) + data(2, b"root")),
            ("UserAdd", messages.sign_in("root", "secret-0")),
            ("UserGrantRole", data(1, b"root") + data(2, b"root")),
            ("AuthEnable", b""),
        ):
            path = f"/etcdserverpb.Auth/{method}".encode()
            run_now(calls.call(Call(path, messages.empty_reply), message))


@pytest.mark.usefixtures("no_recheck")
@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_client_certificate_is_a_login(namespace: str, flavour: Flavour) -> None:
    """The common name of the certificate is the user; waiters are woken, too."""
    with MutualEtcd() as server:
        url = mutual_url(server)
        _enable_logins(url, "localhost")
        with waited_for(url, namespace, flavour):
            pass


LONG = bytes(range(256)) * 4000
"""Much more than the first windows of HTTP/2, and than one frame; less than etcd allows."""


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("version", ["3.4", "3.5"])
def test_long_requests_and_replies(
    servers: Servers, namespace: str, version: Version, tls: bool, flavour: Flavour
) -> None:
    """A guarded write of a megabyte waits for etcd's windows; it is read back whole."""
    url = servers.of(EtcdServer, version=version, tls=tls).url

    async def run() -> None:
        async with (
            holdfast.connect_async(url, namespace=namespace) as locks,
            locks.lock("name", timeout=SOON) as lease,
        ):
            config = fencing.etcd.guard(lease)
            for _ in range(3):
                await config.put(f"long/{namespace}", LONG)
                assert await config.get(f"long/{namespace}") == LONG
            assert await config.delete(f"long/{namespace}")

    if flavour is Flavour.ASYNCIO:
        asyncio.run(run())
        return
    with (
        holdfast.connect(url, namespace=namespace) as locks,
        locks.lock("name", timeout=SOON) as lease,
    ):
        config = fencing.etcd.guard(lease)
        for _ in range(3):
            config.put(f"long/{namespace}", LONG)
            assert config.get(f"long/{namespace}") == LONG
        assert config.delete(f"long/{namespace}")


@pytest.mark.parametrize("waits", [False, True], ids=["alone", "waited for"])
def test_a_release_without_an_answer_is_unknown(
    server: EtcdServer, namespace: str, waits: bool
) -> None:
    """It may have ended the hold, alone or with a direct grant: it is not told as another's."""
    with (
        Proxy(server) as proxy,
        holdfast.connect(proxy.url, namespace=namespace) as ours,
        holdfast.connect(server.url, namespace=namespace) as theirs,
    ):
        lease = ours.lock("name", timeout=SOON).acquire()
        assert lease is not None
        waiter = threading.Thread(target=theirs.lock("name", timeout=SOON)(lambda: None))
        if waits:
            waiter.start()
            wait_until("it waits", lambda: len(theirs.inspect("name").waiters) == 1, SOON)
        dropped = proxy.drop_next_reply(b"/etcdserverpb.KV/")
        assert lease.release() is None
        assert dropped.wait(SOON)
        if waits:
            waiter.join(SOON)
            assert not waiter.is_alive()
        else:
            wait_until("it is over", lambda: not theirs.inspect("name").holders, SOON)
