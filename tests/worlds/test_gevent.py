"""Locks under ``gevent.monkey.patch_all()``, in real processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servers.redis import RedisServer
from servers.registry import Servers
from worlds.packages import needed

PROGRAM = Path(__file__).parent / "gevent_program.py"


@pytest.mark.parametrize("kind", ["main", "greenlet", "thread", "hand_over", "killed"])
@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_lock_is_held_and_handed_over(kind: str, store: str, servers: Servers) -> None:
    needed("gevent")
    url = "memory://" if store == "memory" else servers.of(RedisServer).url
    command = [sys.executable, str(PROGRAM), kind, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
