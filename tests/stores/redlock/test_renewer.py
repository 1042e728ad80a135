"""The renewer of a Redlock client: it warns holders in time and does not delay other calls."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.claim import Mode
from holdfast.core.contract import Settings, Waiting
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.redlock.broadcast_blocking import BlockingBroadcast
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from holdfast.url import open_store
from servers.process import wait_until
from servers.redis import RedisServer
from stores.claims import claim_of
from stores.client_runner import run_with_clients
from stores.redis.helpers import blocking_and_asyncio, over, scripts_run, until
from stores.redlock import helpers
from stores.redlock.helpers import Nodes

three = helpers.three
SECONDS = 30.0


@pytest.mark.faults
@blocking_and_asyncio
def test_a_holder_is_warned_in_time_although_a_writer_waits(three: Nodes, flavour: Flavour) -> None:
    """No node answers: the renewer does not wait longer than the hold lasts."""

    async def body(ours: Any, theirs: Any) -> None:
        taken = await theirs.lock("taken").acquire()
        lease = await ours.lock("name").acquire()
        warnings: list[bool] = []
        lease._hold.on_doubtful = lambda _: warnings.append(lease.held)
        waiting = asyncio.create_task(ours.lock("taken", timeout=SECONDS).acquire())
        await until(lambda: bool(ours._engine.renewer.waits))
        three.pause()
        await until(lambda: bool(warnings))
        three.resume()
        assert warnings == [True]
        await lease.release()
        await taken.release()
        assert await (await waiting).release()

    run_with_clients(flavour, body, three.url, three.url, ttl=6)


def test_nodes_that_are_back_are_known_to_all_backends_of_a_client(
    three: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backend reconnects while another waits for that: it must not wait for the timeout."""
    store = open_store(three.url, Settings(request_seconds=2 * SECONDS))
    ours, renewer = (store.backend(BlockingRuntime()) for _ in range(2))
    waits = threading.Event()
    wait_for_nodes = BlockingBroadcast._wait_for_nodes

    def noted(broadcast: BlockingBroadcast, until: float | None) -> None:
        waits.set()
        wait_for_nodes(broadcast, until)

    for backend in (ours, renewer):
        run_now(backend.look("name"))  # opens the connections
    three.pause()
    for _ in range(2):  # the first finds that they do not answer, the second reconnects
        with pytest.raises(BackendUnavailable):
            run_now(ours.attempt(claim_of(), join=True, until=now() + 0.2))
    monkeypatch.setattr(BlockingBroadcast, "_wait_for_nodes", noted)
    with ThreadPoolExecutor() as pool:
        abandoning = pool.submit(run_now, renewer.abandon(claim_of()))
        assert waits.wait(SECONDS)
        three.resume()
        abandoning.result(SECONDS)
    for backend in (ours, renewer):
        run_now(backend.close())


@blocking_and_asyncio
def test_the_intent_of_a_writer_is_renewed_on_existing_connections(
    three: Nodes, flavour: Flavour
) -> None:
    """On every node, without a new connection."""

    async def body(bench: Bench) -> None:
        peer, writer = bench.peer(), bench.claim()
        reader = await peer.take(bench.claim(mode=Mode.SHARED))
        await peer.queue(writer)
        await peer.renew([reader], [Waiting(writer, 0)])
        before = [_clients(node) for node in three.nodes]
        key = f"{bench.namespace}:redlock:{{name}}"
        for _ in range(3):
            for node in three.nodes:
                await until(lambda node=node: node.ask("HGET", key, "i") == writer.owner)  # type: ignore[misc]
                node.ask("HSET", key, "ie", "1")
            await peer.renew([reader], [Waiting(writer, 0)])
            for node in three.nodes:
                await until(lambda node=node: node.ask("HGET", key, "ie") != "1")  # type: ignore[misc]
        assert [_clients(node) for node in three.nodes] == before

    over(three.url, flavour, body)


def _clients(node: RedisServer) -> set[str]:
    """Return the ids of all connected clients except our own."""
    lines = str(node.ask("CLIENT", "LIST")).splitlines()
    return {line.split(" ")[0] for line in lines if "cmd=client|list" not in line}


@blocking_and_asyncio
def test_an_intent_is_not_renewed_after_its_writer_left(three: Nodes, flavour: Flavour) -> None:
    """It would keep readers out without a waiting writer."""

    async def body(bench: Bench) -> None:
        peer, writer = bench.peer(), bench.claim()
        reader = await peer.take(bench.claim(mode=Mode.SHARED))
        await peer.queue(writer)
        await peer.renew([reader])  # the renewer's connections are open
        await peer.abandon(writer)
        key = f"{bench.namespace}:redlock:{{name}}"
        for node in three.nodes:
            await until(lambda node=node: node.ask("HEXISTS", key, "i") == 0)  # type: ignore[misc]
        before = [scripts_run(node) for node in three.nodes]
        await peer.renew([], [Waiting(writer, 0)])
        for node, already in zip(three.nodes, before, strict=True):
            wait_until("the request", lambda n=node, a=already: scripts_run(n) == a + 1)  # type: ignore[misc]
            assert node.ask("HEXISTS", key, "i") == 0

    over(three.url, flavour, body)
