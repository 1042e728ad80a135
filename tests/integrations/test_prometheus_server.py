"""A real Prometheus scrapes a program and the exporter, and fires the shipped alert rules."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from servers.ports import free_port
from servers.process import Server
from servers.prometheus import PrometheusServer
from servers.redis import RedisServer

from .processes import eventually

DOCS = Path(__file__).parents[2] / "docs"
RULES = DOCS / "monitoring" / "holdfast-alerts.yml"
DASHBOARD = DOCS / "monitoring" / "holdfast-dashboard.json"
PROGRAM = Path(__file__).with_name("monitored_program.py")
AT_ONCE = {"HoldfastLockLost", "HoldfastFenceRefused", "HoldfastNoLeader", "HoldfastLongWait"}


def hurried(rules: str) -> str:
    """The shipped rules, with times that a test can wait for."""
    assert rules.count("> 60") == 1
    return re.sub(r"for: \d+m", "for: 1s", rules.replace("> 60", "> 1"))


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def exporter(url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The exporter on a free port, and where it listens."""
    command = (sys.executable, "-m", "holdfast", "exporter", "--bind", "127.0.0.1:0")
    with started(*command, "--url", url) as process:
        assert process.stderr is not None
        found = re.search(r"http://([^/]+)/metrics", line := process.stderr.readline())
        assert found, line
        yield process, found[1]


def test_the_shipped_rules_are_valid() -> None:
    promtool = PrometheusServer("", []).binary("promtool")
    done = subprocess.run(
        [promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    from prometheus_client import CollectorRegistry

    import holdfast
    from holdfast import observe

    registry = CollectorRegistry()
    observe.Prometheus(registry)
    with holdfast.connect("memory://names") as locks:
        registry.register(observe.FleetCollector(locks))
        known = {family.name for family in registry.collect()}
        known |= {family.name for family in observe.FleetCollector(locks).describe()}
    dashboard = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for name in set(re.findall(r"\bholdfast_\w+", RULES.read_text() + " ".join(shown))) - {
        "holdfast_fleet_",
        "holdfast_operation_seconds",
    }:
        assert re.sub("_(total|bucket|count)$", "", name) in known, name


def test_prometheus_fires_the_shipped_rules(tmp_path: Path) -> None:
    with RedisServer() as redis, exporter(redis.url) as (process, address):
        port = free_port()
        program = (sys.executable, str(PROGRAM), redis.url, str(port), str(tmp_path / "ledger"))
        with started(*program) as app:
            assert app.stdout is not None
            line = app.stdout.readline()
            assert line == "ready\n", app.stderr and app.stderr.read()
            targets = [f"127.0.0.1:{port}", address]
            with PrometheusServer(hurried(RULES.read_text()), targets) as prometheus:
                eventually("the alerts", lambda: prometheus.firing() >= AT_ONCE)
                assert not prometheus.firing() - AT_ONCE
                assert prometheus.kinds("HoldfastNoLeader") == {"scheduler"}
                assert prometheus.kinds("HoldfastLongWait") == {"report"}  # no standby
                outage(redis, prometheus)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def outage(redis: Server, prometheus: PrometheusServer) -> None:
    """A scrape that takes too long is the exporter's end, as Prometheus sees it."""
    redis.pause()
    wanted = {"HoldfastRenewalsFail", "HoldfastExporterGone"}
    eventually("the outage", lambda: prometheus.firing() >= wanted)
    redis.resume()
    eventually("the end", lambda: "HoldfastExporterGone" not in prometheus.firing())


def test_a_store_that_is_gone_can_not_be_read() -> None:
    with RedisServer() as redis, exporter(redis.url) as (_, address):

        def scraped() -> str:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                return str(answer.read().decode())

        assert "holdfast_fleet_up 1.0" in scraped()
        redis.kill()
        assert "holdfast_fleet_up 0.0" in scraped()
        with PrometheusServer(hurried(RULES.read_text()), [address]) as prometheus:
            eventually("the alert", lambda: "HoldfastStoreUnreadable" in prometheus.firing())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_how_the_exporter_ends(number: int, code: int) -> None:
    with exporter("memory://") as (process, address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            assert answer.status == 200
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_an_address_that_is_taken() -> None:
    with exporter("memory://") as (_, address):
        command = [sys.executable, "-m", "holdfast", "exporter", "--url", "memory://"]
        done = subprocess.run(
            [*command, "--bind", address], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 78
    assert f"--bind {address}" in done.stderr


@pytest.mark.parametrize("address", ["9464", "127.0.0.1:", "127.0.0.1:99999"])
def test_an_address_that_is_none(address: str) -> None:
    command = [sys.executable, "-m", "holdfast", "exporter", "--url", "memory://"]
    done = subprocess.run([*command, "--bind", address], capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert "HOST:PORT" in done.stderr
