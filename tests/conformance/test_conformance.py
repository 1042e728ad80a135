"""Every rule of Holdfast, on every store, through both doors."""

from __future__ import annotations

import pytest

from holdfast.testing import Flavour, Harness, Rule, conformance
from holdfast.testing.conformance import Bench
from holdfast.testing.guarantees import guarantees_of

CASES = [
    pytest.param(flavour, rule, id=f"{flavour}-{rule.name}", marks=[pytest.mark.faults] * rule.slow)
    for flavour in Flavour
    for rule in conformance.RULES
    if flavour in rule.flavours
]


@pytest.mark.parametrize(("flavour", "rule"), CASES)
def test_conformance(harness: Harness, flavour: Flavour, rule: Rule[Bench]) -> None:
    if lack := rule.lacks(harness, guarantees_of(harness)):
        pytest.skip(lack)
    conformance.run(rule, harness, flavour)
