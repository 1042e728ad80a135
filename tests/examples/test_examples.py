"""Every example runs by one command, on the embedded store and on another one by its URL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from servers.redis import RedisServer
from servers.registry import Servers

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES / "README.md"

SAYS = {
    "two_workers": "30 of 30 jobs done, 0 twice",
    "nightly_job": "nights, each was run once",
    "leader": "leads after",
    "cache_refill": "7 went on with the old ones",
    "migration": "taking over from token",
    "shared_file": "20 transfers, 30 sums, all of them {100}",
    "flash_sale": "oversold: 1 of 1 without fencing, 0 of 1 with it",
}
SALES = 4
RUNS = 25


def start(name: str, url: str, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url, *more]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            with suppress(ProcessLookupError):  # its children, too, also those that are stopped
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return said


def embedded(folder: Path, name: str = "locks") -> str:
    place = folder / name
    place.mkdir(mode=0o700)
    return f"sqlite:///{place}/locks.db"


def test_all_are_here() -> None:
    assert SAYS.keys() == {path.stem for path in EXAMPLES.glob("*.py")} - {"scene"}
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\)", README.read_text(), re.MULTILINE)
    assert set(listed) == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_a_store_that_can_not_is_told_at_once(name: str) -> None:
    """In one line, before any process is started."""
    for words in (("--url", "nosuch://host"), ("--url", "consul://host", "--ttl", "1")):
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *words], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", SAYS)
def test_on_the_embedded_store(name: str, tmp_path: Path) -> None:
    assert SAYS[name] in finish(start(name, embedded(tmp_path)))


@pytest.mark.faults
@pytest.mark.parametrize("name", SAYS)
def test_by_changing_the_url(name: str, servers: Servers) -> None:
    assert SAYS[name] in finish(start(name, servers.of(RedisServer).url))


@pytest.mark.faults
def test_a_hundred_flash_sales(tmp_path: Path) -> None:
    """A seller is stopped in the middle of each: unfenced it oversells, fenced never."""
    options = ("--ttl", "0.2", "--runs", str(RUNS), "--unfenced", "2")
    urls = [embedded(tmp_path, f"locks-{number}") for number in range(SALES)]
    sales = [start("flash_sale", url, *options) for url in urls]
    for sale in sales:
        said = finish(sale)
        assert f"oversold: 2 of 2 without fencing, 0 of {RUNS} with it" in said
        assert said.count("refused: 'sale' refused token") >= RUNS, "it was not stale: no proof"
