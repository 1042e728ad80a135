"""Sixteen processes on one file for ten seconds: alone, in turn, and asleep while they wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.testing.history import Hold, fairness, faults, read_holds
from holdfast.testing.processes import Process
from holdfast.testing.rules import Flavour

PROCESSES = 16
SECONDS = 10.0


async def _contend(url: str, history: Path) -> tuple[list[Hold], list[str]]:
    processes = [Process(url, Flavour.BLOCKING) for _ in range(PROCESSES)]
    try:
        await asyncio.gather(*(process.ask("check") for process in processes))
        for process in processes:
            process.send(
                "contend",
                name="name",
                seconds=SECONDS,
                hold=0.001,
                history=str(history),
                process=process.name,
            )
        await asyncio.gather(*(process.answer() for process in processes))
        return read_holds(history), [process.name for process in processes]
    finally:
        for process in processes:
            process.close()


@pytest.mark.faults
def test_sixteen_processes_take_turns(tmp_path: Path) -> None:
    holds, processes = asyncio.run(_contend(f"sqlite://{tmp_path}/locks.db", tmp_path / "history"))
    assert faults(holds) == []
    tokens = [hold.token for hold in sorted(holds, key=lambda hold: hold.held)]
    assert tokens == sorted(set(tokens))
    assert len(holds) >= 10 * PROCESSES
    assert fairness(holds, processes) >= 0.8


@pytest.mark.faults
def test_who_waits_uses_no_processor_time(tmp_path: Path) -> None:
    """Four seconds of waiting cost a few milliseconds, the wake-up among them: nobody polls."""

    async def wait() -> list[float]:
        url = f"sqlite://{tmp_path}/locks.db"
        processes = [Process(url, Flavour.BLOCKING) for _ in range(PROCESSES)]
        holder, waiters = processes[0], processes[1:]
        try:
            await holder.ask("acquire", name="name")
            for waiter in waiters:
                waiter.send("cost_of_waiting", name="name")
            await asyncio.sleep(4)
            await holder.ask("release", name="name")
            return list(await asyncio.gather(*(waiter.answer() for waiter in waiters)))
        finally:
            for process in processes:
                process.close()

    assert max(asyncio.run(wait())) < 0.1
