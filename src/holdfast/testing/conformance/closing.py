"""The end of a client: what is held is released, threads and connections end."""

from __future__ import annotations

import asyncio
import threading
import warnings
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.testing import loops
from holdfast.testing.conformance.bench import SOON, Bench, conformance, eventually, raises, within
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []


@conformance.rule()
async def closing_releases_with_a_warning(bench: Bench) -> None:
    """What is still held when the client closes is released, each with a warning."""
    ours, theirs = bench.client(), bench.client()
    leases = [await ours.lock(f"name {n}").acquire() for n in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await ours.close()
        await ours.close()
    messages = [str(one.message) for one in caught if one.category is ResourceWarning]
    assert [sum(f"name {n}" in text for text in messages) for n in range(3)] == [1, 1, 1]
    assert await theirs.list() == []
    for lease in leases:
        assert lease is not None
        assert not lease.held
        assert await lease.release() is False


@conformance.rule()
async def a_closed_client_says_so(bench: Bench) -> None:
    """A call on a closed client raises: it neither blocks nor holds."""
    client = bench.client()
    async with client.lock("name"):
        pass
    await client.close()
    with raises((HoldfastError, RuntimeError)):
        await client.lock("name").acquire()
    with raises((HoldfastError, RuntimeError)):
        await client.inspect("name")


@conformance.rule()
async def an_unused_client_closes(bench: Bench) -> None:
    """A client that was never used closes without touching the store."""
    await bench.client().close()
    async with bench.client():
        pass


@conformance.rule()
async def closing_ends_the_threads(bench: Bench) -> None:
    """No thread of the client's is left once it is closed."""

    async def use_and_close() -> None:
        client = bench.client()
        async with client.lock("name"):
            pass
        await client.close()

    await use_and_close()  # starts what the process has only one of, such as the watcher of ends
    before = set(threading.enumerate())
    await use_and_close()

    async def gone() -> bool:
        left = set(threading.enumerate()) - before
        return not [thread for thread in left if "holdfast" in thread.name]

    await eventually(gone, SOON, "a thread of the client's is still there")


@conformance.rule()
async def closing_ends_who_waits(bench: Bench) -> None:
    """A waiter of a client that is closed gets an error and leaves no place in the line."""
    ours, theirs = bench.client(), bench.client()

    async def wait() -> None:
        with raises((HoldfastError, RuntimeError)):
            await theirs.lock("name").acquire()

    async with ours.lock("name"):
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.wait(waiting, timeout=0.2)
        await within(SOON, theirs.close())
        await within(SOON, asyncio.gather(*waiting))
        await eventually(lambda: _nobody_waits(ours), SOON, "a place in the line was left")


async def _nobody_waits(client: AsyncLocks) -> bool:
    return not (await client.inspect("name")).waiters


@conformance.rule(flavours=[Flavour.ASYNCIO])
async def a_client_belongs_to_one_loop(bench: Bench) -> None:
    """A client that is in use on one event loop says so on another."""
    client = bench.client()
    async with client.lock("name"):
        pass

    def elsewhere() -> None:
        async def use() -> None:
            with raises(RuntimeError) as raised:
                await client.lock("other").acquire()
            assert "loop" in str(raised.error)

        loops.run(use())

    await asyncio.to_thread(elsewhere)
