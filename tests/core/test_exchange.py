"""``exchange`` is optional: without it the release wakes the next waiter."""

from __future__ import annotations

import pytest

from harnesses.memory import MemoryHarness
from holdfast.core.contract import Exchanging, Runtime, Settings
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.stores.memory import MemoryBackend, MemoryStore
from holdfast.testing import Flavour, conformance, contract
from holdfast.url import open_store

RULES = (
    "waiting.tasks_of_a_client_are_served_in_order",
    "waiting.a_local_queue_gives_others_their_turn",
)


class PlainBackend(MemoryBackend):
    """A backend without the capability."""

    exchange = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(self: MemoryStore, runtime: Runtime) -> PlainBackend:
        return PlainBackend(self.ledger, self.display, runtime)

    monkeypatch.setattr(MemoryStore, "backend", backend)


@pytest.mark.parametrize("flavour", list(Flavour))
@pytest.mark.parametrize("rule", RULES)
def test_a_store_without_exchange_serves_its_waiters(rule: str, flavour: Flavour) -> None:
    conformance.run(conformance.RULES[rule], MemoryHarness(), flavour)


def test_the_contract_does_not_ask_for_it() -> None:
    store = open_store("memory://", Settings())
    assert not isinstance(store.backend(BlockingRuntime()), Exchanging)
    for rule in contract.RULES:
        if "exchange" in rule.name:
            contract.run(rule, MemoryHarness(), Flavour.BLOCKING)
