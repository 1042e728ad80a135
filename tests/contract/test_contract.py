"""Every backend keeps the contract, in both worlds."""

from __future__ import annotations

import pytest

from holdfast.testing import Case, Harness, contract


@pytest.mark.parametrize("case", contract.cases(), ids=str)
def test_contract(harness: Harness, case: Case) -> None:
    if lack := case.lacks(harness):
        pytest.skip(lack)
    case.run(harness)
