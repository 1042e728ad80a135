"""Sixteen processes on one file for ten seconds: exclusive, in order, and asleep while they
wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.testing import Flavour
from holdfast.testing.history import faults, overtaken
from holdfast.testing.processes import Process
from scale.processes import CROWD, contend


@pytest.mark.faults
def test_sixteen_processes_take_turns(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/locks.db"
    holds, processes = asyncio.run(contend(url, Flavour.BLOCKING, tmp_path / "history"))
    assert faults(holds) == []
    tokens = [hold.token for hold in sorted(holds, key=lambda hold: hold.held)]
    assert tokens == sorted(set(tokens))
    assert len(holds) >= 10 * CROWD
    assert {hold.process for hold in holds} == set(processes)
    assert overtaken(holds) <= 0.05


@pytest.mark.faults
def test_a_waiter_uses_no_processor_time(tmp_path: Path) -> None:
    """Four seconds of waiting cost a few milliseconds, with the wake-up: waiters do not poll."""

    async def wait() -> list[float]:
        url = f"sqlite://{tmp_path}/locks.db"
        processes = [Process(url, Flavour.BLOCKING) for _ in range(CROWD)]
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
