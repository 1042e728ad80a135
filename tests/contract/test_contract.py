"""Every backend keeps the contract, in both worlds."""

from __future__ import annotations

import pytest

from holdfast.testing import Flavour, Harness, Rule, contract
from holdfast.testing.contract import Bench
from holdfast.testing.guarantees import guarantees_of


@pytest.mark.parametrize("rule", list(contract.RULES), ids=lambda rule: rule.name)
@pytest.mark.parametrize("flavour", list(Flavour))
def test_contract(harness: Harness, flavour: Flavour, rule: Rule[Bench]) -> None:
    if lack := rule.lacks(harness, guarantees_of(harness)):
        pytest.skip(lack)
    contract.run(rule, harness, flavour)
