"""Every rule of Holdfast, on every store, through both clients."""

from __future__ import annotations

import pytest

from harnesses.asleep import Asleep
from holdfast.testing import Case, Harness, conformance

CASES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.faults] * case.rule.slow)
    for case in conformance.cases()
]
asleep = Asleep()


@pytest.mark.parametrize("case", CASES)
def test_conformance(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    if lack := case.lacks(harness):
        pytest.skip(lack)
    asleep.run(request, harness, case)
