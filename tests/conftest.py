"""The stores under test: each is started once, when its first test needs it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The `servers` fixture, skips for missing servers, and their logs for tests that fail; which of
# several test processes runs what; and which failures may be run again.
pytest_plugins = ("servers.plugin", "servers.spread", "verdict.plugin")

# Failures inside the suite show the values, as in test files; before anything imports it.
pytest.register_assert_rewrite("holdfast.testing")

from harnesses import harness_classes  # noqa: E402
from holdfast.core import log  # noqa: E402
from holdfast.stores._sql import purge  # noqa: E402
from holdfast.testing import Harness  # noqa: E402
from servers.missing import ServerMissing, required  # noqa: E402

# A machine that stumbles is no fault of an example or of its making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Who starts the tests in the background of a script makes them ignore Ctrl-C and Ctrl-\\, and with
# them every process that they send it to.
for _signal, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)


@pytest.fixture(scope="session", autouse=True)
def _purges_late() -> Iterator[None]:
    """The first purge of a client is as late as it may be: tests count requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(purge, "randbelow", lambda most: most - 1)
        yield


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """A command that is called inside a test process sets up the log for itself alone."""
    logger = logging.getLogger("holdfast")
    handlers, propagate = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    log._prepare.clear()


@pytest.fixture(scope="session", params=list(harness_classes()))
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Every store in turn. ``HOLDFAST_REQUIRE_SERVERS=1`` makes a missing server a failure."""
    chosen = harness_classes()[request.param]()
    try:
        chosen.start()
    except ServerMissing as missing:
        if required():
            raise
        pytest.skip(str(missing))
    yield chosen
    chosen.stop()


@pytest.hookimpl(tryfirst=True)  # before anything is chosen by its marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a store has shown, once more on other servers, is for the slow tests. Tests that last as
    long as wanted run only if they are asked for."""
    if "soak" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    repeating = {name for name, kind in harness_classes().items() if kind.repeats}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("harness") in repeating:
            item.add_marker(pytest.mark.faults)
