"""The answers for errors of locks: they go to strangers."""

from __future__ import annotations

import json
import logging

import pytest

import holdfast
from holdfast import Fence, HoldfastError, StaleFence, UntrustedFence, fencing
from holdfast.integrations.problem import problem_of

FENCE = Fence.parse("1;exclusive;;0;17;a-secret")
ERRORS: list[tuple[StaleFence | UntrustedFence, int]] = [
    (StaleFence("'a-secret' refused token 17", fence=FENCE, highest=FENCE), 409),
    (UntrustedFence("token 17 of 'a-secret' is not accepted"), 403),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
def test_a_refused_fence_is_named_in_the_log_only(
    error: HoldfastError, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        told = problem_of(error)
    assert told is not None
    assert told.status == json.loads(told.body)["status"] == status
    for word in ("a-secret", "17"):
        assert word not in told.detail
        assert word not in told.body.decode()
    assert str(error) in caplog.text


def test_a_stale_fence_may_be_sent_again() -> None:
    """So that no middleware keeps the answer for an ``Idempotency-Key``."""
    told = problem_of(ERRORS[0][0])
    assert told is not None
    assert int(told.headers["retry-after"]) >= 1
    assert json.loads(told.body)["type"] == "urn:holdfast:stale-fence"


def test_the_middleware_of_fences_keeps_its_form() -> None:
    """Its caller is a holder of the lock."""
    told = json.loads(fencing.http.problem(ERRORS[0][0]).body)
    assert told["fence"] == told["highest"] == str(FENCE)


def test_other_errors_have_no_answer() -> None:
    assert problem_of(holdfast.Incompatible("a newer version")) is None
