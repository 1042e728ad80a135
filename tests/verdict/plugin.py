"""Tells failed tests apart: a broken promise of a lock is never run again, anything else once.

A failure is a broken promise if an assertion failed, or an expected refusal did not come, in a
statement that speaks of exclusion, tokens, fences, records of jobs or traces left behind, or in a
test named after one of these. The words below are chosen wide: a failure that is taken for a broken
promise by mistake only means that it is not run again.

A machine may be suspended during a test, as virtual machines are for a snapshot. Its wall clock
then jumps, and servers end what clients still count as held: such a run of a test shows nothing. It
is seen by the wall clock and the monotonic clock, which no longer agree.

With ``HOLDFAST_FAILURES=path`` all failures of a run are written there, for ``scripts/run-stages``.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from _pytest._code import Traceback

__all__ = ["BrokenPromise", "is_broken_promise"]

JUMP_SECONDS = 0.3
"""The clocks of a machine that was not suspended agree better than this over one test."""
_STARTED = pytest.StashKey[float]()

IN_STATEMENT = re.compile(
    r"faults\(|overlap|exclu|both|token|[Ff]ence|[Ss]tale|trace|left|leak|remain(?!ing)|orphan"
    r"|Busy|Grant|holders|waiters|\binfo\b|lock_info|\bis None\b|descriptors|fds\b|threads"
    r"|keys\(|rows\(|\brecord\b|recall"
)
IN_NAME = re.compile(
    r"overlap|exclu|two_hold|both|token|fence|guard|stale|trace|leak|leaves|left_behind|barge"
    r"|nobody|undo|orphan|simulation|model|not_granted|grants_no|grants_nothing|no_claim|no_holder"
    r"|no_waiter|not_admitted|taken_back|twice|runs_once"
)
UNCLOSED = re.compile(r"ResourceWarning|PytestUnraisableExceptionWarning")
DID_NOT_RAISE = re.compile(r"DID NOT RAISE")


class BrokenPromise(AssertionError):
    """A broken promise by its type: raised by a test that runs other tests, for one of these."""


def is_broken_promise(test: str, error: BaseException) -> bool:
    """Whether this failure of a test must never be run again."""
    return any(_breaks(test, leaf) for leaf in _leaves(error))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _breaks(test: str, error: BaseException) -> bool:
    if isinstance(error, BrokenPromise):
        return True
    text = f"{type(error).__name__}: {error}"
    if UNCLOSED.search(text) or DID_NOT_RAISE.search(text):
        return True
    if not isinstance(error, AssertionError):
        return False
    if IN_NAME.search(test):
        return True
    return any(map(IN_STATEMENT.search, _statements(error.__traceback__)))


def _statements(trace: TracebackType | None) -> Iterator[str]:
    """The source of every statement of the tests on the way to the failure."""
    for entry in Traceback(trace) if trace is not None else ():
        path = str(entry.path)
        if "/tests/" in path or "holdfast/testing/" in path or "test_" in path:
            yield str(entry.statement)


def wall_clock_lead() -> float:
    """How far the wall clock is ahead of the monotonic clock."""
    return time.time() - time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture of the test."""
    item.stash[_STARTED] = wall_clock_lead()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        # Attributes of a report travel from the test processes to the one that writes them down.
        marks: Any = report
        marks.broken_promise = is_broken_promise(item.nodeid, call.excinfo.value)
        marks.load = os.getloadavg()[0]
        jump = wall_clock_lead() - item.stash[_STARTED]
        marks.clock_jump = jump if abs(jump) > JUMP_SECONDS else 0.0
    return report


class Failures:
    """Writes down what failed in a run, when it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: list[dict[str, object]] = []
        self._uncollected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(
                {
                    "test": report.nodeid,
                    "when": report.when,
                    "broken_promise": getattr(report, "broken_promise", False),
                    "clock_jump": getattr(report, "clock_jump", 0.0),
                    "load": getattr(report, "load", os.getloadavg()[0]),
                    "output": "\n".join(
                        [report.longreprtext, *(f"-- {t}\n{s}" for t, s in report.sections)]
                    ),
                }
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._uncollected.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        told = {
            "exit": int(exitstatus),
            "failures": self._failed,
            "uncollected": self._uncollected,
        }
        self._path.write_text(json.dumps(told))


def pytest_configure(config: pytest.Config) -> None:
    """Only in the process that gets all reports, not in the ones that run the tests for it."""
    path = os.environ.get("HOLDFAST_FAILURES")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "holdfast-failures")
