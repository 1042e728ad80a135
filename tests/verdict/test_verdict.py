"""Tests that fail on purpose, run as CI runs them: which are run again, and what is printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import StaleFence
from verdict.plugin import BrokenPromise, is_broken_promise

ROOT = Path(__file__).parents[2]

ONLY_ONCE = """
import pathlib, pytest

def fails_once(name):
    mark = pathlib.Path(name)
    first = not mark.exists()
    mark.touch()
    return first
"""


def run_stages(
    folder: Path, body: str, recipe: str = "", options: str = ""
) -> subprocess.CompletedProcess[str]:
    """CI over one test file in a folder of its own."""
    (folder / "test_sample.py").write_text(ONLY_ONCE + body)
    pytest_words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "verdict.plugin",
        "-p",
        "no:cacheprovider",
    ]
    command = shlex.join(pytest_words)
    (folder / "Makefile").write_text(f"test:\n\t{recipe or f'{command} {options}'}\n")
    environment = {key: text for key, text in os.environ.items() if "PYTEST" not in key}
    environment.pop("HOLDFAST_FAILURES", None)
    environment |= {
        "PYTHONPATH": str(ROOT / "tests"),
        "HOLDFAST_RUN_ALONE": command,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # most of the time would go into loading them
    }
    script = [sys.executable, str(ROOT / "scripts/run-stages")]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True)


def test_an_overlap_is_never_run_again(tmp_path: Path) -> None:
    body = """
def test_sixteen():
    found = ["two held"] if fails_once("overlap") else []
    assert found == [], 'overlap'
"""
    done = run_stages(tmp_path, body)
    assert done.returncode == 1, done.stdout
    assert "a broken promise is never run again: test_sample.py::test_sixteen" in done.stdout
    assert "again, alone" not in done.stdout


def an_overlap() -> None:
    found = ["web-1 held while web-2 held"]
    assert not found, "an overlap"


def a_token_that_sank() -> None:
    tokens = [17, 16]
    assert tokens == sorted(tokens)


def a_trace() -> None:
    rows = ["key of a dead claim"]
    assert rows == [], "left behind"


def somebody_let_in() -> None:
    lease = "a lease"
    assert lease is None


def a_stale_fence_let_in() -> None:
    with pytest.raises(StaleFence):
        pass


def an_unclosed_socket() -> None:
    raise ResourceWarning("unclosed socket")


def an_overlap_in_a_task() -> None:
    try:
        an_overlap()
    except AssertionError as error:
        raise ExceptionGroup("tasks", [error]) from None


def an_overlap_in_a_test_that_a_test_ran() -> None:
    raise BrokenPromise("test_conformance[redis-blocking-taking.one_of_many]")


PROMISES = (
    an_overlap,
    a_token_that_sank,
    a_trace,
    somebody_let_in,
    a_stale_fence_let_in,
    an_unclosed_socket,
    an_overlap_in_a_task,
    an_overlap_in_a_test_that_a_test_ran,
)


@pytest.mark.parametrize("broken", PROMISES)
def test_broken_promises_are_known(broken: Callable[[], None]) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it raises
        broken()
    assert is_broken_promise("tests/x.py::test_it", caught.value)


def a_late_answer() -> None:
    seconds = 7.0
    assert seconds < 5.0


def a_hold_that_a_stall_ended() -> None:
    class Lease:
        held = False

    assert Lease().held


def a_lost_connection() -> None:
    raise ConnectionError("reset; the token was 17")


@pytest.mark.parametrize("late", [a_late_answer, a_hold_that_a_stall_ended, a_lost_connection])
def test_what_a_busy_machine_does_is_no_broken_promise(late: Callable[[], None]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it raises
        late()
    assert not is_broken_promise("tests/x.py::test_it", caught.value)
    assert is_broken_promise("tests/x.py::test_it[redis-taking.tokens_grow]", caught.value) == (
        isinstance(caught.value, AssertionError)
    )


def test_a_timeout_that_does_not_come_back_is_flaky(tmp_path: Path) -> None:
    body = """
def test_slow():
    if fails_once("slow"):
        raise TimeoutError("not within 5 s")
"""
    done = run_stages(tmp_path, body)
    assert done.returncode == 0, done.stdout
    assert "FLAKY: test_sample.py::test_slow" in done.stdout
    assert "the first time, at load" in done.stdout
    assert "not within 5 s" in done.stdout.partition("-- the first time")[2]
    assert "1 passed" in done.stdout.partition("-- the second time")[2]
    assert "flaky: test_sample.py::test_slow" in done.stdout
    assert "stages: 1 passed, 0 failed" in done.stdout


def test_a_second_failure_fails_the_run(tmp_path: Path) -> None:
    done = run_stages(tmp_path, "\ndef test_slow():\n    raise TimeoutError('not within 5 s')\n")
    assert done.returncode == 1, done.stdout
    assert "FAILED TWICE: test_sample.py::test_slow" in done.stdout


def test_a_fourth_flaky_test_fails_the_run(tmp_path: Path) -> None:
    body = """
@pytest.mark.parametrize("number", range({count}))
def test_slow(number):
    if fails_once(str(number)):
        raise TimeoutError("late")
"""
    (tmp_path / "three").mkdir()
    assert run_stages(tmp_path / "three", body.format(count=3)).returncode == 0
    (tmp_path / "four").mkdir()
    done = run_stages(tmp_path / "four", body.format(count=4))
    assert done.returncode == 1, done.stdout
    assert "more than 3 tests failed" in done.stdout


CLOCK_JUMPS = """
import verdict.plugin

@pytest.mark.parametrize("number", range(4))
def test_no_overlap(number):
    if fails_once(str(number)){condition}:
        verdict.plugin.wall_clock_lead = lambda: 57.0 * (number + 1)
        assert not "two held", "overlap"
"""


def test_a_test_during_a_jump_of_the_clock_is_run_again(tmp_path: Path) -> None:
    """However many, whatever they found, and none of them counts as flaky."""
    done = run_stages(tmp_path, CLOCK_JUMPS.format(condition=""))
    assert done.returncode == 0, done.stdout
    assert "THE CLOCK JUMPED by" in done.stdout
    assert "flaky: none" in done.stdout
    assert "the clock of the machine jumped: test_sample.py::test_no_overlap[0]" in done.stdout


def test_a_test_that_fails_also_without_a_jump_of_the_clock_fails_the_run(tmp_path: Path) -> None:
    done = run_stages(tmp_path, CLOCK_JUMPS.format(condition=" or True"))
    assert done.returncode == 1, done.stdout
    assert "FAILED TWICE" in done.stdout


def test_tests_that_can_not_be_collected_fail_the_run(tmp_path: Path) -> None:
    """Also beside a flaky one, by several test processes, which go on without them."""
    (tmp_path / "test_other.py").write_text("import no_such_module\n")
    body = "\ndef test_slow():\n    if fails_once('x'): raise TimeoutError('late')\n"
    done = run_stages(tmp_path, body, options="-p xdist.plugin -n 2")
    assert done.returncode == 1, done.stdout
    assert "not by a failed test" in done.stdout


@pytest.mark.parametrize(
    ("body", "recipe"), [("\nimport no_such_module\n", ""), ("\ndef test_ok(): pass\n", "false")]
)
def test_what_is_no_failed_test_fails_the_run(tmp_path: Path, body: str, recipe: str) -> None:
    done = run_stages(tmp_path, body, recipe)
    assert done.returncode == 1, done.stdout
    assert "not by a failed test" in done.stdout
