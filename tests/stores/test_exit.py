"""A program that ends without ``close()``: its connections are closed, and Python warns of none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.process import Server
from servers.redis import RedisServer
from servers.registry import Servers

HOLD = """
with locks.lock("order:42", ttl=30, timeout=30) as lease:
    pass
"""
LOOK = """
locks.inspect("order:42")
"""
HELD = """
lease = locks.lock("order:42", timeout=30).acquire()
"""


@pytest.mark.parametrize("body", [HOLD, LOOK, HELD], ids=["hold", "look", "held"])
@pytest.mark.parametrize("kind", [RedisServer, EtcdServer, ConsulServer])
def test_no_connection_is_left_open(kind: type[Server], body: str, servers: Servers) -> None:
    program = f"import sys, holdfast\nlocks = holdfast.connect(sys.argv[1])\n{body}"
    command = [sys.executable, "-X", "dev", "-c", program, servers.of(kind).url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "unclosed" not in done.stderr
    if body is not HELD:
        assert done.stderr == ""


FAILING_CLOSE = """
import time, holdfast
idle = holdfast.connect("memory://idle")

async def fail():
    raise ValueError("a failing close")

idle._engine.backend.close = fail
locks = holdfast.connect("memory://held")
abandon = locks._engine.renewer.backend.abandon

async def slow(claim, until=None):
    time.sleep(0.2)
    await abandon(claim, until=until)
    print("released", claim.name)

locks._engine.renewer.backend.abandon = slow
lease = locks.lock("order:42").acquire()
"""


def test_a_client_that_fails_to_close_keeps_no_other_from_releasing() -> None:
    command = [sys.executable, "-c", FAILING_CLOSE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "released order:42\n"
