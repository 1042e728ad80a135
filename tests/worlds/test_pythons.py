"""The conformance suite on other Pythons, where a warning is an error.

`scripts/make-python-venvs` makes their environments. Each test is a pytest of its own, for one
Python and one store.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from verdict.plugin import BrokenPromise

ROOT = Path(__file__).parents[2]
STORES = ("memory", "sqlite", "redis", "postgres")
LONGEST_SECONDS = 900.0


@pytest.mark.timeout(LONGEST_SECONDS + 60)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_conformance_on_python(version: str, store: str, tmp_path: Path) -> None:
    venv = ROOT / f".venv-{version}"
    if not (venv / ".installed").exists():
        pytest.skip(f"Python {version} is not installed, or `make worlds` has not found it")
    failures = tmp_path / "failures.json"
    environment = {
        **os.environ,
        "HOLDFAST_FAILURES": str(failures),
        "HOLDFAST_STORES": store,
        "PYTHONWARNINGS": "error",
    }
    for inherited in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(inherited, None)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not faults", f"--basetemp={tmp_path}/base"]
    done = subprocess.run(
        [venv / "bin/python", "-m", "pytest", *options, "tests/conformance"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    _judge(done, failures)


def _judge(done: subprocess.CompletedProcess[str], failures: Path) -> None:
    """As the suite would be judged if it ran here."""
    output = f"{done.stdout}\n{done.stderr}"
    if failures.exists():
        found = json.loads(failures.read_text())["failures"]
        if broken := [failure["test"] for failure in found if failure["broken_promise"]]:
            raise BrokenPromise(f"{', '.join(broken)}\n{output}")
    assert done.returncode == 0, output
    assert " passed" in done.stdout, output
