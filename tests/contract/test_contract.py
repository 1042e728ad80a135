"""Every backend keeps the contract, in both worlds."""

from __future__ import annotations

import pytest

from harnesses.asleep import Asleep
from holdfast.testing import Case, Harness, contract

asleep = Asleep()


@pytest.mark.parametrize("case", contract.cases(), ids=str)
def test_contract(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    if lack := case.lacks(harness):
        pytest.skip(lack)
    asleep.run(request, harness, case)
