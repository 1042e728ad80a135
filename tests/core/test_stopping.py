"""The programs of the page on stopping a service: SIGTERM releases what they hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "stop-a-service.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def ended(program: str, url: str) -> tuple[int, str]:
    """Runs the program until it works, and sends it SIGTERM. Returns its exit code and errors."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "HOLDFAST_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
    return process.returncode, errors


@pytest.mark.parametrize("program", PROGRAMS, ids=["blocking", "asyncio"])
def test_the_programs_release_on_sigterm(program: str, tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/locks.db"
    assert ended(program, url) == (0, ""), "a service manager would call it failed"
    with holdfast.connect(url) as locks:
        assert not locks.lock("worker").locked()


def test_a_program_without_the_handler_leaves_it_taken(tmp_path: Path) -> None:
    """As the page says: what a newcomer meets first."""
    url = f"sqlite://{tmp_path}/locks.db"
    ended(PROGRAMS[0].replace("signal.signal(", "(lambda *_: None)("), url)
    with holdfast.connect(url) as locks:
        assert locks.lock("worker").locked()
