"""Jobs run in processes of their own: what fails or hangs in one is told, and ends nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.bench.forkserver import ForkServer

CROWD = 8


@pytest.fixture
def forkserver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    with ForkServer("bench.book") as made:
        yield made


def target(tmp_path: Path) -> list[Any]:
    return [f"sqlite://{tmp_path}/locks.db", [], "test"]


def contend(forkserver: ForkServer, tmp_path: Path, name: str) -> Any:
    return forkserver.run(
        "contended",
        allowed=60,
        contender=f"sqlite/{name}",
        target=target(tmp_path),
        processes=CROWD,
        seconds=0.3,
        hold_seconds=0.001,
        pause_seconds=0.0,
    )


def test_processes_of_both_clients_exclude_each_other(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """Real processes hold in turns, and the judge saw all of them."""
    for name in ("Holdfast", "Holdfast asyncio"):
        row = contend(forkserver, tmp_path, name)
        assert "error" not in row
        assert (row["overlaps"], row["sinking_tokens"], row["hung"]) == (0, 0, 0)
        assert row["holds"] > 0


def test_a_lock_that_excludes_nobody_is_found_out(forkserver: ForkServer, tmp_path: Path) -> None:
    """The case can fail: otherwise its zero would mean nothing."""
    assert contend(forkserver, tmp_path, "no lock at all")["overlaps"] > 0


def test_who_cannot_be_opened_is_told_by_name(forkserver: ForkServer, tmp_path: Path) -> None:
    """A peer that is not installed is a row with its error, among rows that were measured."""
    rows = forkserver.run(
        "uncontended",
        allowed=60,
        contenders=["sqlite/not installed", "sqlite/Holdfast"],
        target=target(tmp_path),
        rounds=1,
        slice_seconds=0.02,
    )
    by_name = {row["contender"]: row for row in rows}
    assert by_name["not installed"]["error"].startswith("ModuleNotFoundError")
    assert by_name["Holdfast"]["pinned"]["holds_per_second"] > 0
    assert by_name["Holdfast"]["free"]["p50_us"] > 0
    assert "error" in contend(forkserver, tmp_path, "not installed")


def test_who_hangs_is_killed_and_the_next_is_measured(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    """A contender that never answers costs its own time only."""
    words = {"target": target(tmp_path), "leases": 3, "seconds": 0.1}
    hung = forkserver.run("held", allowed=1.0, contender="sqlite/hangs", **words)
    assert hung["error"].startswith("hung")
    row = forkserver.run("held", allowed=60, contender="sqlite/Holdfast", **words)
    assert (row["leases"], row["lost"]) == (3, 0)


@pytest.mark.parametrize("name", ["Holdfast", "Holdfast asyncio"])
def test_everybody_in_a_crowd_is_served(forkserver: ForkServer, tmp_path: Path, name: str) -> None:
    """Threads and tasks alike."""
    row = forkserver.run(
        "drain",
        allowed=60,
        contender=f"sqlite/{name}",
        target=target(tmp_path),
        waiters=20,
        settle_seconds=0.2,
        idle_seconds=0.1,
        limit_seconds=30,
    )
    assert (row["served"], row["waiters"]) == (20, 20)


@pytest.mark.parametrize(("what", "field"), [("waiters", "served"), ("names", "names")])
def test_points_of_a_growth_plot(
    forkserver: ForkServer, tmp_path: Path, what: str, field: str
) -> None:
    """A point is the size that was asked for."""
    client = "Holdfast asyncio" if what == "waiters" else "Holdfast"
    row = forkserver.run(
        "growth",
        allowed=60,
        contender=f"sqlite/{client}",
        target=target(tmp_path),
        what=what,
        size=5,
    )
    assert row[field] == 5


def test_nothing_outlives_whoever_would_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is killed leaves no process behind that hangs or spins."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    made = ForkServer("bench.book")
    answer = threading.Thread(
        target=lambda: made.run(
            "held", allowed=600, contender="sqlite/hangs", target=target(tmp_path), leases=1,
            seconds=1,
        )
    )  # fmt: skip
    answer.start()
    children = wait_for(lambda: psutil.Process(made.pid).children())
    psutil.Process(made.pid).kill()
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)
    answer.join()
    made.close()


def wait_for(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    for _ in range(3000):
        if found := look():
            return found
        threading.Event().wait(0.01)
    raise AssertionError("no child was started")
