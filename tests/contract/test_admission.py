"""Every store admits claims as ``core.queue`` does, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harnesses.memory import MemoryHarness
from harnesses.sqlite import SqliteHarness
from holdfast.core.contract import Settings, Store
from holdfast.stores.memory import Ledger, MemoryStore
from holdfast.stores.sqlite import backend as sqlite_backend
from holdfast.testing import Flavour, Harness
from holdfast.testing.admission import VirtualClock, machine
from holdfast.testing.admission.comparison import CLIENTS, Surroundings
from holdfast.url import open_store

EXAMPLES, STEPS = 12, 25
SOAK_EXAMPLES, SOAK_STEPS = int(os.environ.get("HOLDFAST_SOAK") or 1500), 50


@pytest.fixture(params=list(Flavour))
def surroundings(request: pytest.FixtureRequest, harness: Harness) -> Iterator[Surroundings]:
    at = Surroundings(harness, request.param)
    yield at
    at.close()


def test_a_store_admits_as_the_reference(surroundings: Surroundings) -> None:
    machine.run(surroundings, examples=EXAMPLES, steps=STEPS)
    assert surroundings.compared > STEPS, "the machine stood still for too much of the time"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_store_admits_as_the_reference_for_long(surroundings: Surroundings) -> None:
    machine.run(surroundings, examples=SOAK_EXAMPLES, steps=SOAK_STEPS, rare=20, search=True)


@pytest.fixture(params=["memory", "sqlite"])
def virtual(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Surroundings]:
    """A store inside this process, under virtual time: what expires costs nothing."""
    clock = VirtualClock()
    if request.param == "memory":
        harness: Harness = MemoryHarness()
        stores: list[Store] = [MemoryStore(Ledger(clock.now, clock.wall))] * CLIENTS
    else:
        harness = SqliteHarness()
        harness.url = f"sqlite://{tmp_path}/locks.db"
        stores = [open_store(harness.url, Settings()) for _ in range(CLIENTS)]
        monkeypatch.setattr(sqlite_backend, "now_seconds", clock.now)
        monkeypatch.setattr(sqlite_backend, "wall_seconds", clock.wall)
    at = Surroundings(harness, Flavour.BLOCKING, stores=stores, clock=clock)
    yield at
    at.close()


def test_a_store_admits_as_the_reference_under_virtual_time(virtual: Surroundings) -> None:
    machine.run(virtual, examples=60, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_store_admits_as_the_reference_under_virtual_time_for_long(
    virtual: Surroundings,
) -> None:
    machine.run(virtual, examples=10 * SOAK_EXAMPLES, steps=60, search=True)
