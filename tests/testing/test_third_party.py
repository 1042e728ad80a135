"""A store of somebody else's runs the suite by what it declares itself."""

from __future__ import annotations

import pytest

from holdfast.core.contract import Guarantee
from holdfast.testing import Case, Harness, KnobMissing, conformance, contract
from holdfast.testing.guarantees import expected_guarantees, guarantees_of


class PebbleHarness(Harness):
    """A store that is not in the table."""

    name = "pebble"
    url = "memory://pebble"
    ttl = 0.3
    between_processes = False


SOME = [
    case
    for case in [*contract.cases(), *conformance.cases()]
    if case.rule.theme in ("taking", "holding") and not case.rule.slow
]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_it_runs_the_suite(case: Case) -> None:
    with PebbleHarness() as harness:
        assert case.lacks(harness) == ""
        case.run(harness)


def test_its_own_word_counts() -> None:
    harness = PebbleHarness()
    assert Guarantee.FIFO in guarantees_of(harness)
    declared = frozenset({Guarantee.EXCLUSIVE})
    assert expected_guarantees(harness, declared) == declared


def test_a_knob_that_is_missing_says_so() -> None:
    with pytest.raises(KnobMissing, match="'pebble' has no KILL"):
        PebbleHarness().kill()


def test_every_rule_says_what_it_holds() -> None:
    for case in [*contract.cases(), *conformance.cases()]:
        assert case.rule.body.__doc__, case
