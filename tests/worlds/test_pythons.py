"""The conformance suite on other Pythons, and Django 6, where a warning is an error.

`scripts/make-python-venvs` makes their environments. Each test is a pytest of its own, for one
Python and one store; a failure shows all that it said.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from servers.process import wait_until
from verdict.plugin import BrokenPromise

ROOT = Path(__file__).parents[2]
STORES = ("memory", "sqlite", "redis", "postgres")
LONGEST_SECONDS = 900.0


@pytest.mark.timeout(LONGEST_SECONDS + 60)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_conformance_on_python(version: str, store: str, tmp_path: Path) -> None:
    run_on(version, ["-m", "not faults", "tests/conformance"], tmp_path, HOLDFAST_STORES=store)


@pytest.mark.timeout(LONGEST_SECONDS + 60)
@pytest.mark.parametrize("suite", ["test_django", "test_django_served", "test_migrations"])
def test_django_6(suite: str, tmp_path: Path) -> None:
    """The other tests have Django 5.2, which runs on Python 3.11."""
    words = ["-m", "not faults", f"tests/integrations/{suite}.py"]
    words += ["-k", "django"] if suite == "test_migrations" else []
    # An application that is served warns of a lock that ends before its commit: a test wants that.
    run_on("3.12", words, tmp_path, PYTHONWARNINGS="default")


def run_on(version: str, words: Sequence[str], folder: Path, **environment: str) -> None:
    """Runs tests on another Python; fails with all that they said."""
    venv = ROOT / f".venv-{version}"
    if not (venv / ".installed").exists():
        pytest.skip(f"Python {version} is not installed, or `make worlds` has not found it")
    faulthandler.cancel_dump_traceback_later()  # pytest's limit is for one test, not for a suite
    failures = folder / "failures.json"
    variables = {
        **os.environ,
        "HOLDFAST_FAILURES": str(failures),
        "PYTHONWARNINGS": "error",
        **environment,
    }
    for inherited in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        variables.pop(inherited, None)
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/base"]
    command = [str(venv / "bin/python"), "-m", "pytest", *options, *words]
    code, output = run_to_its_end(command, variables, folder / "output", LONGEST_SECONDS)
    _judge(code, output, failures)


def run_to_its_end(
    command: Sequence[str], environment: Mapping[str, str], said: Path, seconds: float
) -> tuple[int, str]:
    """The exit code and the output; fails with the output if it takes longer.

    The output is a file: a pipe would stay open for as long as any process that inherited it.
    """
    with (
        said.open("wb") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done in {seconds:g} s:\n{_read(said)}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its servers have a guardian of their own
    return code, _read(said)


def _read(said: Path) -> str:
    return said.read_text(errors="replace")


def _judge(code: int, output: str, failures: Path) -> None:
    """As the suite would be judged if it ran here."""
    if failures.exists():
        found = json.loads(failures.read_text())["failures"]
        if broken := [failure["test"] for failure in found if failure["broken_promise"]]:
            raise BrokenPromise(f"{', '.join(broken)}\n{output}")
    assert code == 0, output
    assert " passed" in output, output


def test_a_suite_that_hangs_is_ended_and_shown(tmp_path: Path) -> None:
    """With the processes that it has started."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    with pytest.raises(pytest.fail.Exception, match=r"not done in 5 s") as caught:
        run_to_its_end([sys.executable, "-c", program], os.environ, tmp_path / "output", 5.0)
    child = int(str(caught.value).split()[-1])
    wait_until("the end of its child", lambda: not _runs(child), 60.0)


def _runs(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
