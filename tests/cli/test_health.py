"""``elect --health``: what probes are answered; a leader that is told to stop has a successor."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from cli.processes import Cli, read_line, until

LEAD = "echo lead; trap 'echo stop; exit 0' TERM; while :; do sleep 0.05; done"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()
    except urllib.error.URLError:
        return 0, ""


def elect(cli: Cli, port: int, *options: str) -> subprocess.Popen[str]:
    return cli.start(
        "elect", "boss", "--health", f"127.0.0.1:{port}", *options, "--", "sh", "-c", LEAD
    )


def state(port: int) -> Any:
    status, body = get(port, "/")
    return json.loads(body)["state"] if status == 200 else None


def test_probes_tell_the_leader_from_the_standby(cli: Cli) -> None:
    first, second = free_port(), free_port()
    leader = elect(cli, first)
    assert read_line(leader) == "lead\n"
    token = cli.show("boss")["holders"][0]["token"]
    assert json.loads(get(first, "/")[1]) == {"name": "boss", "state": "leader", "token": token}
    assert get(first, "/leader") == (200, "leader\n")

    standby = elect(cli, second)
    until(lambda: cli.show("boss")["waiters"])
    assert json.loads(get(second, "/")[1]) == {"name": "boss", "state": "standby"}
    assert get(second, "/leader") == (503, "standby\n")
    assert get(second, "/live") == (200, "live\n")
    assert get(second, "/else")[0] == 404

    # A ttl is 30 s: a follower within 10 s was told, it did not wait for the end of the ttl.
    told = time.monotonic()
    leader.send_signal(signal.SIGTERM)
    assert read_line(standby) == "lead\n"
    assert time.monotonic() - told < 10
    assert leader.communicate()[0] == "stop\n"
    assert leader.returncode == 0
    assert state(second) == "leader"
    assert get(first, "/live")[0] == 0  # it no longer listens


def test_a_leadership_that_was_broken_is_not_told(cli: Cli) -> None:
    port = free_port()
    leader = elect(cli, port, "--ttl", "6")
    assert read_line(leader) == "lead\n"
    with_it = cli.start("run", "boss", "-w", "50", "--", "sh", "-c", "echo held; read line")
    until(lambda: cli.show("boss")["waiters"])
    cli("break", "boss", "--reason", "test")
    assert read_line(with_it) == "held\n"
    until(lambda: state(port) == "standby")
    with_it.communicate("\n")
    until(lambda: state(port) == "leader")


def test_probes_that_say_nothing_do_not_keep_others_waiting(cli: Cli) -> None:
    port = free_port()
    leader = elect(cli, port)
    assert read_line(leader) == "lead\n"
    with (
        socket.create_connection(("127.0.0.1", port)),
        socket.create_connection(("127.0.0.1", port)),
    ):
        assert state(port) == "leader"


@pytest.mark.parametrize("text", ["8086", ":8086", "127.0.0.1:", "127.0.0.1:70000", "::1:8086"])
def test_a_wrong_address_is_refused(cli: Cli, text: str) -> None:
    result = cli("elect", "boss", "--health", text, "--", "true")
    assert result.returncode == 64
    assert f"{text!r} is not HOST:PORT, as in 127.0.0.1:8086 or [::1]:8086" in result.stderr


def test_a_taken_port_is_refused(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = cli("elect", "boss", "--health", address, "--", "echo", "led")
    assert (result.returncode, result.stdout) == (78, "")
    assert f"--health {address}: Address already in use" in result.stderr
