"""``loss_protection``: a server that may have lost holds grants nothing until those have ended, and
reports it. Without it, two clients can hold at once, and the fence refuses the first one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
import redis.asyncio

import holdfast
from harnesses.redlock import mark_as_new
from holdfast import fencing
from holdfast.claim import Busy, Claim, Grant
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, LockTimeout, StaleFence
from holdfast.io.clock import now
from holdfast.stores.redis.backend import RedisBackend
from holdfast.stores.redlock.scripts import RUN_KEY
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.redis_sentinel import SentinelTrio
from stores.redis.helpers import blocking_and_asyncio, clients, cut_off, over, replicated, until

PROTECTED = "?loss_protection=on&max_ttl=3"
SECONDS = 60.0


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def _begin(peer: Peer) -> None:
    assert isinstance(peer.backend, RedisBackend)
    assert "marked as new" in await peer.run(peer.backend.initialise())


def lose(server: RedisServer, how: str) -> None:
    """Events in which a server may lose holds. In a failback another server was the master, and
    this one is promoted again without the writes of the other."""
    if how == "flush":
        server.ask("FLUSHALL")
    elif how == "failback":
        server.ask("REPLICAOF", server.host, "1")
        server.ask("REPLICAOF", "NO", "ONE")
    else:
        server.kill()
        server.start()


async def _refused_until_max_ttl(bench: Bench, peer: Peer, lost_at: float) -> Grant:
    """Nothing is granted for max_ttl, with a reason; then the lock is granted."""
    claim = bench.claim("other", ttl=3.0)
    busy = await peer.attempt(claim, join=False)
    assert isinstance(busy, Busy)
    assert "restarted, emptied, demoted or replaced" in busy.reason
    assert busy.retry_seconds is not None
    assert 0 < busy.retry_seconds <= 3.1
    while isinstance(answer := await peer.attempt(claim, join=False), Busy):
        assert now() - lost_at < 10.0
        await asyncio.sleep(0.05)
    assert now() - lost_at >= 3.0, "granted while a lost hold could still be believed in"
    return answer


@blocking_and_asyncio
def test_a_new_deployment_waits_unless_it_is_marked(
    own_server: RedisServer, flavour: Flavour
) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        busy = await peer.attempt(bench.claim(ttl=3.0), join=False)
        assert isinstance(busy, Busy)
        assert "holdfast init" in busy.reason
        await _begin(peer)
        assert isinstance(await peer.attempt(bench.claim(ttl=3.0)), Grant)

    over(own_server.url + PROTECTED, flavour, body)


@pytest.mark.parametrize("loss", ["restart", "flush", "failback"])
@blocking_and_asyncio
def test_nothing_is_granted_after_a_loss(
    own_server: RedisServer, flavour: Flavour, loss: str
) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await _begin(peer)
        grant = await peer.take(bench.claim(ttl=3.0))
        lose(own_server, loss)
        lost_at = now()
        if loss != "failback":
            assert (await peer.renew([grant])).lost
        after = await _refused_until_max_ttl(bench, peer, lost_at)
        assert after.token > grant.token

    over(own_server.url + PROTECTED, flavour, body)


@blocking_and_asyncio
def test_holds_that_a_restart_kept_go_on(flavour: Flavour) -> None:
    with RedisServer(persist=True) as server:

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            await _begin(peer)
            grant = await peer.take(bench.claim(ttl=3.0))
            server.kill()
            server.start()
            assert (await peer.renew([grant])).lost == {}
            assert isinstance(await peer.attempt(grant.claim), Grant), "the same grant again"
            assert await peer.release(grant)

        over(server.url + PROTECTED, flavour, body)


async def _warnings(peer: Peer) -> str:
    """The warnings of ``check()``."""
    found = await peer.run(peer.backend.probe())
    return "; ".join(each.detail for each in found if each.level == "warning")


@blocking_and_asyncio
def test_check_warns_that_nothing_is_granted(own_server: RedisServer, flavour: Flavour) -> None:
    """Before the first request, and then with the time at which grants resume."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await _begin(peer)
        assert "grants nothing" not in await _warnings(peer)
        lose(own_server, "failback")
        assert "it grants nothing for 30 s from the next request on" in await _warnings(peer)
        assert isinstance(await peer.attempt(bench.claim(ttl=3.0), join=False), Busy)
        noted = _barred_until(own_server, bench.namespace)
        assert f"it grants nothing before {noted}: it may have lost holds" in await _warnings(peer)
        await _begin(peer)
        assert "grants nothing" not in await _warnings(peer)

    over(f"{own_server.url}?loss_protection=on&max_ttl=30", flavour, body)


@blocking_and_asyncio
def test_an_earlier_version_beside_this_one_is_no_loss(
    own_server: RedisServer, flavour: Flavour
) -> None:
    """It stores the server as ``run`` and ``until``, with each of its attempts."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        await _begin(peer)
        for _ in range(2):
            own_server.ask("HSET", f"{bench.namespace}:loss", "run", "f" * 40, "until", "1")
            assert await peer.release(await peer.take(bench.claim(ttl=3.0)))
        noted = own_server.ask("HMGET", f"{bench.namespace}:loss", "run", "until")
        assert noted == ["f" * 40, "1"], "the other takes a change of its note for a loss"

    over(own_server.url + PROTECTED, flavour, body)


@blocking_and_asyncio
def test_an_earlier_version_beside_this_one_costs_no_votes(flavour: Flavour) -> None:
    """The same as with one server."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        url = f"redlock://{nodes.hosts}?max_ttl=3"
        mark_as_new(url)

        async def body(bench: Bench) -> None:
            noted = ["f" * 40, str(2**50)]
            for node in nodes.nodes:
                node.ask("HSET", RUN_KEY, "run", noted[0], "since", noted[1])
            peer = bench.peer()
            assert await peer.release(await peer.take(bench.claim(ttl=3.0)))
            for node in nodes.nodes:
                assert node.ask("HMGET", RUN_KEY, "run", "since") == noted

        over(url, flavour, body)


def _mark_as_new(url: str, namespace: str) -> None:
    """The work of ``holdfast init``."""
    with holdfast.connect(url, namespace=namespace, ttl=3) as locks:
        run_now(locks._engine.backend.initialise())  # type: ignore[attr-defined]


def _barred_until(server: RedisServer, namespace: str) -> str:
    """The stored time before which a server grants nothing."""
    noted = server.ask("HGET", f"{namespace}:loss", "barred")
    return datetime.fromtimestamp(int(str(noted)) / 1000, UTC).strftime("%H:%M:%S UTC")


WHY = "it was restarted, emptied, demoted or replaced and may have lost holds"


@blocking_and_asyncio
def test_the_error_and_the_log_have_reason_and_time(
    own_server: RedisServer, namespace: str, flavour: Flavour, caplog: pytest.LogCaptureFixture
) -> None:
    """In every error, and once in the log, although two names wait."""

    async def main() -> None:
        url = f"{own_server.url}?loss_protection=on"
        async with clients(url, flavour, namespace=namespace) as (opened,):
            reason = ""
            for name, timeout in (("at once", 0), ("name", 1), ("other", 0.1)):
                with pytest.raises(LockTimeout) as caught:
                    async with opened.lock(name, timeout=timeout):
                        pass
                reason = f"grants nothing before {_barred_until(own_server, namespace)}: {WHY}"
                assert reason in str(caught.value)
            _mark_as_new(url, namespace)
            async with opened.lock("name", timeout=0):
                pass
        (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert warning.startswith("waiting for 'name': redis://")
        assert reason in warning

    asyncio.run(main())


@blocking_and_asyncio
def test_a_majority_reports_reason_and_time(
    flavour: Flavour, caplog: pytest.LogCaptureFixture
) -> None:
    """The same as with one server."""

    async def main() -> None:
        async with clients(f"redlock://{nodes.hosts}", flavour) as (opened,):
            assert await opened.lock("at once", timeout=0).acquire() is None
            with pytest.raises(LockTimeout) as caught:
                async with opened.lock("name", timeout=1):
                    pass
        reason = (
            r"\d of 3 nodes of redlock://\S+ grant nothing before \d\d:\d\d:\d\d UTC: they are new"
        )
        assert re.search(reason, str(caught.value))
        assert re.search(f"^waiting for 'name': {reason}", caplog.messages[0])

    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        asyncio.run(main())


@pytest.mark.parametrize("loss", ["restart", "flush", "failback"])
@blocking_and_asyncio
def test_a_majority_that_lost_something_grants_nothing_for_max_ttl(
    flavour: Flavour, loss: str
) -> None:
    """Each node decides by itself."""
    with Ensemble([RedisServer() for _ in range(3)]) as nodes:
        url = f"redlock://{nodes.hosts}?max_ttl=3"
        mark_as_new(url)

        async def body(bench: Bench) -> None:
            peer = bench.peer()
            before = await peer.take(bench.claim(ttl=3.0))
            for node in nodes.nodes:
                lose(node, loss)
            lost_at, claim = now(), bench.claim("other", ttl=3.0)
            while isinstance(answer := await _asked(peer, claim), Busy):
                assert now() - lost_at < 20.0
                assert "restarted, emptied, demoted or replaced" in answer.reason
                await asyncio.sleep(0.05)
            assert now() - lost_at >= 3.0, "granted while a lost hold could still be believed in"
            assert answer.token > before.token

        over(url, flavour, body)


async def _asked(peer: Peer, claim: Claim) -> Grant | Busy:
    """An attempt, repeated while restarted nodes are not reachable yet."""
    while True:
        with suppress(BackendUnavailable):
            return await peer.attempt(claim, join=False)
        await asyncio.sleep(0.05)


@blocking_and_asyncio
def test_larger_ttls_are_refused(own_server: RedisServer, namespace: str, flavour: Flavour) -> None:
    """As the default of a client, as the ttl of a lock, and for an existing hold."""
    url = own_server.url + PROTECTED
    _mark_as_new(url, namespace)

    async def main() -> None:
        async with clients(url, flavour, namespace=namespace, ttl=3) as (opened,):
            lease = await opened.lock("name").acquire()
            with pytest.raises(ValueError, match=r"ttl=3\.5: redis://.* and 3 s at most"):
                opened.lock("other", ttl=3.5)
            with pytest.raises(ValueError, match=r"ttl=3\.5: redis://.* and 3 s at most"):
                await lease.extend(3.5)
            assert await lease.release() is True
        with pytest.raises(ValueError, match=r"ttl=30: redis://.* and 3 s at most"):
            async with clients(url, flavour):
                pass

    asyncio.run(main())


async def _write(server: RedisServer, flavour: Flavour, fence: Any, value: str) -> None:
    """A write to the protected resource."""
    if flavour is Flavour.ASYNCIO:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await fencing.redis.guard(client, "stock:7", fence).set(value)
    else:
        with redis.Redis.from_url(server.url) as blocking:
            fencing.redis.guard(blocking, "stock:7", fence).set(value)


@pytest.mark.faults
@pytest.mark.parametrize("protected", [True, False], ids=["protected", "unprotected"])
@blocking_and_asyncio
def test_a_replica_is_promoted_without_the_lock(
    flavour: Flavour, namespace: str, protected: bool
) -> None:
    """With loss protection nothing is granted while the first holder relies on its hold. Without
    it, both hold the lock, and the fence refuses the write of the first."""
    suffix = PROTECTED if protected else ""
    options: dict[str, Any] = {"namespace": namespace, "timeout": SECONDS}
    options["ttl"] = 3 if protected else 60

    async def main(master: RedisServer, replica: RedisServer) -> None:
        async with (
            clients(master.url + suffix, flavour, **options) as (old,),
            clients(replica.url + suffix, flavour, **options) as (new,),
        ):
            await replicated(master)
            replica.ask("REPLICAOF", "127.0.0.1", "1")  # it gets no further writes
            first = await old.lock("name").acquire()
            master.kill()
            replica.ask("REPLICAOF", "NO", "ONE")
            second = await new.lock("name").acquire()
            assert second.held
            assert (first.held, first.lost) == ((False, True) if protected else (True, False))
            assert second.token > first.token
            await _write(replica, flavour, second.fence, "later")
            with pytest.raises(StaleFence):
                await _write(replica, flavour, first.fence, "earlier")
            assert replica.ask("GET", "stock:7") == "later"
            assert await second.release() is True
            # Lost, or unknown: its server does not answer any more.
            assert await first.release() is (False if protected else None)

    with RedisServer() as master, RedisServer(replica_of=master) as replica:
        replica.wait_linked()
        if protected:
            _mark_as_new(master.url + suffix, namespace)
        asyncio.run(main(master, replica))


@pytest.mark.faults
@blocking_and_asyncio
def test_sentinel_promotes_a_replica_without_the_lock(flavour: Flavour, namespace: str) -> None:
    """The new master has another run id than the stored one, and grants nothing."""

    async def main(trio: SentinelTrio) -> None:
        url = f"{trio.url}?loss_protection=on&max_ttl=120"
        _mark_as_new(url, namespace)
        options = {"namespace": namespace, "ttl": 120}
        async with clients(url, flavour, 2, **options) as (ours, theirs):
            await replicated(trio.master)
            cut_off(trio.master)
            lease = await ours.lock("name").acquire()
            trio.master.kill()
            await until(lambda: trio.current_master() is not trio.master)
            with pytest.raises(LockTimeout) as caught:
                async with theirs.lock("name", timeout=3):
                    pass
            assert lease.held
            noted = _barred_until(trio.current_master(), namespace)
            assert f"grants nothing before {noted}: {WHY}" in str(caught.value)
            await lease.release()

    with SentinelTrio() as trio:
        asyncio.run(main(trio))
