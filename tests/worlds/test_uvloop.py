"""The suites of the asyncio client once more, on uvloop: contract, conformance and hazards."""

from __future__ import annotations

import asyncio

import pytest

from harnesses.asleep import Asleep
from hazards import (
    test_cancelling,
    test_dropping,
    test_renewer_thread,
    test_subscribing,
    test_watcher,
)
from holdfast.testing import Case, Flavour, Harness, conformance, contract, loops
from worlds.packages import needed

asleep = Asleep()

# The hazards of event loops; `worlds/conftest.py` leaves out those of the blocking client.
_drops = pytest.mark.filterwarnings("ignore::ResourceWarning")
test_cancelled_acquires = test_cancelling.test_cancelled_acquires_leave_nothing
test_unanswered_acquires = test_cancelling.test_cancelled_acquires_without_a_reply_leave_nothing
test_wait_for_works = test_cancelling.test_wait_for_works
test_ended_tasks = _drops(test_dropping.test_the_leases_of_an_ended_task_are_dropped)
test_raised_warnings = test_renewer_thread.test_a_warning_that_is_an_error_is_raised_last_async
test_other_waiters = test_subscribing.test_other_waiters_do_not_wait_for_a_subscription_to_open
test_timeouts = test_subscribing.test_a_waiter_that_opens_a_subscription_keeps_its_timeout
test_closing = test_subscribing.test_a_client_closed_while_it_subscribes_keeps_no_connection
test_slow_callbacks = test_watcher.test_a_slow_callback_delays_callbacks_only


@pytest.fixture(autouse=True)
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("uvloop")
    monkeypatch.setenv("HOLDFAST_TEST_LOOP", "uvloop")


def test_the_suites_run_on_the_chosen_loop() -> None:
    async def kind() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert loops.run(kind()).partition(".")[0] == "uvloop"


def _cases(cases: list[Case]) -> list[object]:
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.faults] * case.rule.slow)
        for case in cases
        if case.flavour is Flavour.ASYNCIO
    ]


@pytest.mark.parametrize("case", _cases(contract.cases()))
def test_contract(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    _run(request, harness, case)


@pytest.mark.parametrize("case", _cases(conformance.cases()))
def test_conformance(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    _run(request, harness, case)


def _run(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    if lack := case.lacks(harness):
        pytest.skip(lack)
    asleep.run(request, harness, case)
