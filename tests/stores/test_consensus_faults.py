"""Faults in a cluster of three servers of etcd, Consul or ZooKeeper.

In each fault, for both kinds of client: no two clients believe to hold the same lock, tokens grow,
a holder knows of its loss by its deadline, the next claim is granted within the documented time,
and no key is left on the servers.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest

from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.processes import Process
from servers.proxy import Proxy
from stores import ensembles
from stores.ensembles import SENT_AGAIN, Kind, every_kind
from stores.monitored_holders import MonitoredHolders
from stores.recovery import (
    SOON,
    Recovery,
    Taken,
    Tell,
    client,
    drive,
    name_at,
    nothing_is_left,
    recovers,
)

pytestmark = pytest.mark.faults
kind, trio = ensembles.kind, ensembles.trio


@pytest.mark.parametrize("how", ["killed", "stopped"])
@every_kind
def test_a_hold_survives_its_leader(
    trio: Any, kind: Kind, namespace: str, how: str, record_property: Tell
) -> None:
    """A leader that dies or stops costs an election, but no hold."""
    with MonitoredHolders(trio, trio.url, namespace, kind.longest) as monitored:
        leader = trio.leader()
        leader.kill() if how == "killed" else leader.pause()
        recovers(trio, namespace, kind.asked, record_property, without=leader, name="other")
        for holder in monitored.each:
            assert holder.still_holds(trio.others(leader))
        if leader.paused:
            trio.mend()  # else a release that is sent to it would have an unknown outcome
        for holder in monitored.each:
            assert holder.release() is True
        monitored.check_succeeded(kind.asked, record_property)
    nothing_is_left(trio, namespace)


@every_kind
def test_the_leader_stops(trio: Any, kind: Kind, namespace: str, record_property: Tell) -> None:
    """The leader stops for longer than a ttl and is replaced. Whether or not the holders renewed in
    time, no two clients hold at the same time."""
    with MonitoredHolders(trio, trio.url, namespace, kind.ttl) as monitored:
        leader = trio.leader()
        leader.pause()
        recovers(trio, namespace, kind.asked, record_property, without=leader, name="other")
        for holder in monitored.each:
            if not holder.lost(0.0):
                holder.release()
        monitored.check_succeeded(kind.elected, record_property, without=leader)
        trio.mend()
    nothing_is_left(trio, namespace)


@pytest.mark.parametrize("role", ["leader", "follower"])
@every_kind
def test_a_minority_is_cut_off_with_its_client(
    trio: Any, kind: Kind, namespace: str, role: str, record_property: Tell
) -> None:
    """An isolated server, old leader or follower, still answers for a while. Its client must stop
    before the majority grants the lock to another client."""
    isolated = trio.leader() if role == "leader" else trio.follower()
    with MonitoredHolders(trio, trio.url_of(isolated), namespace, kind.ttl) as monitored:
        trio.isolate(isolated)
        bound = kind.elected if role == "leader" else kind.ended
        monitored.check_lost(bound, record_property, without=isolated, cut=now())
        trio.mend()
    nothing_is_left(trio, namespace)


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("mode", ["lock", "semaphore"])
@every_kind
def test_the_reply_of_the_grant_is_lost(
    trio: Any, kind: Kind, namespace: str, mode: str, flavour: Flavour, record_property: Tell
) -> None:
    """The client finds its own hold again: there is one hold, and no key is left after it."""
    at_once = kind.asked._replace(seconds=SENT_AGAIN)
    for lost in kind.grants[mode]:
        with Proxy(trio.nodes[0]) as proxy, Recovery(trio, namespace) as recovery:
            taken = drive(flavour, _lose_the_reply(trio, proxy, namespace, mode, flavour, lost))
            recovery.within(at_once, taken.entered, record_property)
    nothing_is_left(trio, namespace)


async def _lose_the_reply(
    trio: Any, proxy: Proxy, namespace: str, mode: str, flavour: Flavour, lost: bytes
) -> Taken:
    async with (
        client(proxy.url + trio.suffix, flavour, namespace) as locks,
        client(trio.url, flavour, namespace) as others,
    ):
        lock = locks.lock("name") if mode == "lock" else locks.semaphore("name", 2)
        async with lock as lease:
            earlier = lease.token
        dropped = proxy.drop_next_reply(matching=lost)
        async with lock as lease:
            taken = Taken(lease.token, now())
            assert dropped.is_set()
            assert taken.token > earlier
            info = await others.inspect("name")
            assert [holder.token for holder in info.holders] == [taken.token]
            assert info.waiters == ()
    return taken


@every_kind
def test_no_majority_for_three_ttls(
    trio: Any, kind: Kind, namespace: str, record_property: Tell
) -> None:
    """No claim is granted, the holders know of their loss by their deadline, and the store works
    again afterwards."""
    with MonitoredHolders(trio, trio.url, namespace, kind.ttl) as monitored:
        kept = trio.follower()
        stopped = [node for node in trio.nodes if node is not kept]
        for node in stopped:
            node.pause()
        cut = now()
        with Contenders(trio.url, namespace, kind.ttl) as contenders:
            contenders.failed.wait(SOON)
            contenders.over.wait(cut + 3 * kind.ttl - now())
            for holder in monitored.each:
                assert holder.lost(0.0)
            for node in stopped:
                node.resume()
        monitored.check_lost(kind.elected, record_property, cut=cut)
    nothing_is_left(trio, namespace)


class Contenders:
    """A blocking and an asyncio client that try for two ttls to acquire a free lock. They stay open
    until the test is over: to close a client that reaches no server takes time."""

    def __init__(self, url: str, namespace: str, ttl: float) -> None:
        self._url, self._namespace, self._ttl = url, namespace, ttl
        self.failed = threading.Barrier(len(Flavour) + 1)
        self.over = threading.Event()
        self._pool = ThreadPoolExecutor(len(Flavour))

    async def _try(self, flavour: Flavour) -> None:
        ttl, name = self._ttl, name_at(flavour, "free")
        async with client(self._url, flavour, self._namespace, ttl, patience=2 * ttl) as locks:
            with pytest.raises(BackendUnavailable):
                await locks.lock(name, timeout=None).acquire()
            self.failed.wait(SOON)
            self.over.wait(SOON)

    def __enter__(self) -> Self:
        self._tries = [self._pool.submit(drive, at, self._try(at)) for at in Flavour]
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._pool.shutdown()
        for each in self._tries:
            each.result()


@every_kind
def test_a_client_is_stopped_past_its_session(
    trio: Any, kind: Kind, namespace: str, record_property: Tell
) -> None:
    """The first thing the client reports after it is resumed is that the hold is lost."""
    processes = {
        flavour: Process(trio.url, flavour, namespace=namespace, ttl=kind.ttl)
        for flavour in Flavour
    }
    try:
        asyncio.run(_stop(trio, kind, namespace, processes, record_property))
    finally:
        for process in processes.values():
            process.go_on()
            process.close()
    nothing_is_left(trio, namespace)


async def _stop(
    trio: Any, kind: Kind, namespace: str, processes: dict[Flavour, Process], tell: Tell
) -> None:
    names = {flavour: name_at(flavour) for flavour in processes}
    tokens = {at: await each.ask("acquire", name=names[at]) for at, each in processes.items()}
    for process in processes.values():
        process.stop()
    later = await asyncio.to_thread(recovers, trio, namespace, kind.ended, tell)
    for flavour, process in processes.items():
        assert later[flavour].token > tokens[flavour]
        process.go_on()
        state = await process.ask("state", name=names[flavour])
        assert (state["held"], state["lost"]) == (False, True)
        assert await process.ask("release", name=names[flavour]) is False
