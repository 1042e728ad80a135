"""Ctrl-C at any moment: nothing that is left outlives the ttl, and no thread is locked out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.core.engine import Engine
from holdfast.core.hold import Hold

TTL = 2.0

STORM = """
import random, signal, sys, time, warnings
import holdfast

warnings.simplefilter("ignore", ResourceWarning)
sys.unraisablehook = lambda *args: None  # interrupts inside destructors are told there


def interrupt(*args):
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, interrupt)
locks = holdfast.connect(sys.argv[1], ttl=float(sys.argv[2]))
lock = locks.lock("name")
draw = random.Random(int(sys.argv[3]))
interrupted = held = 0
while interrupted < 400:
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.00001, 0.002))
        with lock:
            held += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0)

# A thread of the same process is not stuck behind an acquire that was torn apart,
# and another client of it finds the name free once the ttl is over.
with holdfast.connect(sys.argv[1]) as others:
    with others.lock("name", timeout=float(sys.argv[2]) + 1) as lease:
        pass
with locks.lock("name", timeout=1):
    pass
info = locks.inspect("name")
print("left", len(info.holders), len(info.waiters))
locks.close()
"""


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_a_storm_of_interrupts_leaves_nothing(tmp_path: Path, store: str, seed: int) -> None:
    """Four hundred interrupts at random moments of acquire, block and release."""
    url = "memory://" if store == "memory" else f"sqlite://{tmp_path}/locks.db"
    program = [sys.executable, "-c", STORM, url, str(TTL), str(seed)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "left 0 0", done.stderr


def test_an_interrupt_between_grant_and_lease_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The granted hold has no handle, so it is released at once."""

    def torn(client: Engine, hold: Hold, me: object, *, block: bool) -> None:
        raise KeyboardInterrupt

    with holdfast.connect("memory://", ttl=3600) as ours, holdfast.connect("memory://") as theirs:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "own", torn)
            with pytest.raises(KeyboardInterrupt), ours.lock("torn"):
                pass
        with theirs.lock("torn", timeout=60):
            pass
