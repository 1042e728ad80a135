"""Real processes: exclusion under contention, kill -9, SIGSTOP, fork, and a program's end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast.core.contract import Guarantee
from holdfast.io.clock import now
from holdfast.testing.conformance.bench import (
    SOON,
    Bench,
    Stalls,
    conformance,
    eventually,
    once_in_time,
    within,
)
from holdfast.testing.history import Recorder, faults, overtaken, read_holds
from holdfast.testing.processes import Process

if TYPE_CHECKING:
    from holdfast.locks_async import AsyncLocks

__all__: list[str] = []

CONTEND_SECONDS = 1.2
MOST_RUNS = 10
"""How often processes contend until each may have had its turns."""


@conformance.rule(between_processes=True)
async def processes_exclude_each_other(bench: Bench) -> None:
    """A recorded run of several processes has no overlap, growing tokens, and turns in order."""
    path = bench.folder / "history"
    processes = [bench.process() for _ in range(4)]
    await asyncio.gather(*(process.ask("check") for process in processes))
    holds = []
    for _ in range(MOST_RUNS):  # a busy machine runs a process seldom
        await asyncio.gather(*(_contend(process, str(path)) for process in processes))
        holds = read_holds(path)
        assert faults(holds) == []
        if len(holds) >= 2 * len(processes):
            break
    assert len(holds) >= 2 * len(processes)
    assert {hold.process for hold in holds} == {process.name for process in processes}
    if Guarantee.FIFO in bench.guarantees and len(holds) >= 40:
        # By order of arrival, not by count: a process that the machine runs seldom asks seldom.
        assert overtaken(holds) <= 0.1


async def _contend(process: Process, history: str) -> None:
    await process.ask(
        "contend",
        name="name",
        seconds=CONTEND_SECONDS,
        hold=0.001,
        history=history,
        process=process.name,
    )


@conformance.rule(between_processes=True)
async def a_killed_holder_is_survived(bench: Bench) -> None:
    """kill -9: the next waiter holds within ttl + 1 s and what the store's sessions add."""
    client, process = bench.client(), bench.process()
    token = await process.ask("acquire", name="name", ttl=bench.ttl)
    waiting = asyncio.create_task(client.lock("name").acquire(timeout=bench.recovery + 3 * SOON))
    await asyncio.wait([waiting], timeout=0.2)
    with Stalls() as stalls:
        process.kill()
        killed = now()
        lease = await waiting
        took = now() - killed
    assert lease is not None
    assert took - stalls.seconds < bench.recovery + 1.0, f"{took:.2f} s"  # a second to spare
    assert lease.token > token
    await lease.release()


@conformance.rule(between_processes=True)
async def killed_in_the_middle_of_contention(bench: Bench) -> None:
    """Processes are killed at random while they contend; those who live never overlap."""
    path = bench.folder / "history"
    processes = [bench.process(ttl=bench.ttl) for _ in range(4)]
    await asyncio.gather(*(process.ask("check") for process in processes))
    recorder = Recorder(path, "parent")
    contending = [asyncio.create_task(_contend(process, str(path))) for process in processes[1:]]
    processes[0].send(
        "contend",
        name="name",
        seconds=60,
        hold=0.001,
        history=str(path),
        process=processes[0].name,
    )
    await asyncio.sleep(CONTEND_SECONDS / 3)
    killed = now()
    processes[0].kill()
    recorder.died(processes[0].name, killed)
    await within(bench.recovery + 3 * SOON, asyncio.gather(*contending))
    recorder.close()
    holds = read_holds(path)
    assert faults(holds) == []
    assert {process.name for process in processes[1:]} <= {hold.process for hold in holds}


@conformance.rule(between_processes=True, slow=True)
async def killed_waiters_do_not_stall_the_line(bench: Bench) -> None:
    """Waiters that were killed together are skipped; the next living one is served."""
    client = bench.client()
    processes = [bench.process(ttl=bench.ttl) for _ in range(3)]
    await asyncio.gather(*(process.ask("check") for process in processes))
    lease = await client.lock("name").acquire()
    assert lease is not None
    for number, process in enumerate(processes):
        process.send("acquire", name="name")
        if Guarantee.FIFO in bench.guarantees:
            await bench.in_line(client, "name", number + 1)
    for process in processes:
        process.kill()
    behind = asyncio.create_task(bench.client().lock("name").acquire(timeout=6 * SOON))
    await asyncio.wait([behind], timeout=0.2)
    await lease.release()
    taken = await behind
    assert taken is not None, "killed waiters stalled the line"
    await taken.release()


@conformance.rule(between_processes=True, sleeps=True)
async def waiting_costs_nothing(bench: Bench) -> None:
    """A process that waits sleeps: it polls neither the store nor its own memory."""
    client, process = bench.client(), bench.process()
    await process.ask("check")
    async with client.lock("name"):
        process.send("cost_of_waiting", name="name")
        await asyncio.sleep(1.5)
    cost = await within(SOON, process.answer())
    assert cost < 0.15, f"{cost:.2f} s of CPU for a wait of 1.5 s"


@conformance.rule(between_processes=True, sleeps=True)
async def a_stopped_holder_learns_it(bench: Bench) -> None:
    """SIGSTOP past the ttl: others get the name, and the first word after SIGCONT is lost."""
    client, process = bench.client(), bench.process()
    token = await process.ask("acquire", name="name", ttl=bench.ttl)
    process.stop()
    lease = await client.lock("name").acquire(timeout=bench.recovery + 2 * SOON)
    assert lease is not None
    assert lease.token > token
    process.go_on()
    state = await process.ask("state", name="name")
    assert (state["held"], state["lost"], state["remaining"]) == (False, True, 0)
    assert await process.ask("release", name="name") is False
    assert lease.held
    assert await lease.release() is True


@conformance.rule(between_processes=True, sleeps=True)
async def a_fork_holds_nothing(bench: Bench) -> None:
    """fork() inside a hold: the child holds nothing and disturbs nothing; both can lock."""
    client, process = bench.client(), bench.process()
    await once_in_time(lambda: _forks_in_a_hold(bench, client, process))


async def _forks_in_a_hold(bench: Bench, client: AsyncLocks, process: Process) -> bool:
    token = await process.ask("acquire", name="name", ttl=bench.kept_ttl)
    found = await process.ask("fork", name="name")
    assert "error" not in found, found["error"]
    assert (found["held"], found["lost"], found["released"]) == (False, True, False)
    assert found["token"] > 0
    if found["taken"]:
        assert not (await process.ask("state", name="name"))["held"]
        await client.break_lock("name", reason="its holder was the child")
        return False
    await asyncio.sleep(bench.kept_ttl * 1.2)  # the parent's renewer goes on
    holders = [holder.token for holder in (await client.inspect("name")).holders]
    held = (await process.ask("state", name="name"))["held"]
    assert holders == [token] or not held
    if not await process.ask("release", name="name"):
        return False
    assert await process.ask("acquire", name="name") > token
    await process.ask("release", name="name")
    return bool(held)


@conformance.rule(between_processes=True)
async def a_program_s_end_releases(bench: Bench) -> None:
    """A program that ends holding something releases it, long before the ttl."""
    client, process = bench.client(), bench.process()
    await process.ask("acquire", name="name", ttl=60)
    assert await process.leave() == 0, process.said()
    lease = await client.lock("name").acquire(timeout=SOON)
    assert lease is not None
    await lease.release()


@conformance.rule(between_processes=True, sleeps=True)
async def the_renewer_works_while_the_program_is_busy(bench: Bench) -> None:
    """A hold is renewed by its process alone; another process sees it held all the time."""
    client, process = bench.client(), bench.process()
    await once_in_time(lambda: _kept_until_broken(bench, client, process))
    process.send("lose", name="name")
    assert await within(bench.kept_ttl + SOON, process.answer())

    async def free() -> bool:
        return await bench.is_free(client, "name")

    await eventually(free, SOON, "a lost hold came back")


async def _kept_until_broken(bench: Bench, client: AsyncLocks, process: Process) -> bool:
    token = await process.ask("acquire", name="name", ttl=bench.kept_ttl)
    ends = now() + 1.3 * bench.kept_ttl
    while now() < ends:
        if [h.token for h in (await client.inspect("name")).holders] != [token]:
            assert not (await process.ask("state", name="name"))["held"]
            return False
        await asyncio.sleep(bench.kept_ttl / 10)
    return bool(await client.break_lock("name", reason="enough") == token)
