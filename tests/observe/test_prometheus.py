"""The metrics of a process, also of several in one server, and those of a whole store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import holdfast
from holdfast import LockInfo, observe
from holdfast.core.events import MOST_KINDS
from holdfast.observe.prometheus import _filled

from .recorder import wait_until


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_the_metrics_of_a_process() -> None:
    registry = CollectorRegistry()
    seen = observe.Prometheus(registry)
    with holdfast.connect("memory://prometheus", observers=[seen]) as locks:
        with locks.lock("order:42"):
            assert value(registry, "holdfast_locks", kind="order", state="held") == 1
            waiter = threading.Thread(target=lambda: locks.lock("order:42").acquire(timeout=0.05))
            waiter.start()
            waiter.join()
        lease = locks.lock("order:42").acquire()
        locks.break_lock("order:42", reason="stuck")
        lost = {"kind": "order", "reason": "broken"}
        wait_until(lambda: value(registry, "holdfast_lock_lost_total", **lost) == 1, "the loss")
        assert lease is not None
    waits = "holdfast_lock_wait_seconds_count"
    about = {"kind": "order", "mode": "exclusive"}
    assert value(registry, waits, **about, outcome="granted", contended="false") == 2
    assert value(registry, waits, **about, outcome="timeout", contended="true") == 1
    assert value(registry, "holdfast_lock_hold_seconds_count", **about, outcome="released") == 1
    assert value(registry, "holdfast_lock_hold_seconds_count", **about, outcome="lost") == 1
    assert value(registry, "holdfast_locks", kind="order", state="held") == 0
    assert value(registry, "holdfast_locks", kind="order", state="waiting") == 0
    text = generate_latest(registry).decode()
    assert 'holdfast_operation_seconds_bucket{error="",le="0.001",operation="attempt"' in text
    assert "order:42" not in text


def test_several_observers_share_a_registry() -> None:
    registry = CollectorRegistry()
    for url in ("memory://prometheus-one", "memory://prometheus-two"):
        seen = observe.Prometheus(registry)
        with holdfast.connect(url, observers=[seen]) as locks, locks.lock("a"):
            pass
    about = {"kind": "a", "mode": "exclusive", "outcome": "released"}
    assert value(registry, "holdfast_lock_hold_seconds_count", **about) == 2


WORKER = """
import holdfast
locks = holdfast.connect("memory://worker")
with locks.lock("order:42"):
    pass
lease = locks.lock("order:43").acquire()
print("ready", flush=True)
input()
lease.release()
"""
SERVER = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_multiprocess_mode(tmp_path: Path) -> None:
    """The workers of a server write files, which one of them serves."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    environment["HOLDFAST_OBSERVE"] = "prometheus"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        done = subprocess.run(
            [sys.executable, "-c", SERVER],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for worker in workers:
            worker.communicate("\n", timeout=60)
    assert 'holdfast_locks{kind="order",state="held"} 2.0' in done.stdout
    count = 'holdfast_lock_hold_seconds_count{kind="order",mode="exclusive",outcome="released"} 2.0'
    assert count in done.stdout


def acquire_and_release(locks: holdfast.Locks, name: str = "order:42") -> None:
    with locks.lock(name, timeout=60):
        pass


def test_the_metrics_of_a_store() -> None:
    registry = CollectorRegistry()
    with (
        holdfast.connect("memory://prometheus-fleet") as locks,
        holdfast.connect("memory://prometheus-fleet") as others,
    ):
        registry.register(observe.FleetCollector(locks))
        with others.lock("order:42"), others.lock("order:43"), others.lock("x", kind="job"):
            waiter = threading.Thread(target=acquire_and_release, args=(locks,))
            waiter.start()
            wait_until(lambda: bool(locks.inspect("order:42").waiters), "a waiter")
            assert value(registry, "holdfast_fleet_locks", kind="order", state="held") == 2
            assert value(registry, "holdfast_fleet_locks", kind="order", state="waiting") == 1
            assert value(registry, "holdfast_fleet_locks", kind="job", state="held") == 1
            oldest = value(registry, "holdfast_fleet_oldest_hold_seconds", kind="order")
            assert oldest is not None
            assert 0 < oldest < 60
            assert value(registry, "holdfast_fleet_up") == 1
        waiter.join()
        locks.close()
        assert value(registry, "holdfast_fleet_up") == 0
        assert value(registry, "holdfast_fleet_locks", kind="order", state="held") is None


def waited_for(name: str) -> holdfast.LockInfo:
    """What a store says of a name that is held and waited for."""
    url = "memory://prometheus-waits"
    with holdfast.connect(url) as locks, holdfast.connect(url) as others:
        waiter = threading.Thread(target=acquire_and_release, args=(others, name))
        with locks.lock(name):
            waiter.start()
            wait_until(lambda: bool(locks.inspect(name).waiters), "a waiter")
            info = locks.inspect(name)
        waiter.join()
    return info


@pytest.mark.parametrize("kind", ["leader", "election", "leader:mailer"])
def test_standbys_of_an_election_are_no_long_wait(kind: str) -> None:
    """They wait for as long as all is well; without a leader their wait counts."""
    info = waited_for(f"{kind}:1")._replace(name=kind)
    [holder], [waiter] = info.holders, info.waiters
    led = info._replace(holders=(holder._replace(kind=kind),))
    alone = info._replace(holders=(), waiters=(waiter._replace(kind=kind),))
    for shown, seconds in ((led, 0), (alone, 90)):
        locks, _, waits = _filled([shown], waiter.since + 90)
        assert [sample.value for sample in waits.samples] == [pytest.approx(seconds)]
        assert locks.samples[1].labels == {"kind": kind, "state": "waiting"}
        assert locks.samples[1].value == 1


@pytest.mark.parametrize("name", ["\ud800:1", "\u202eab:1", "a\nb:1", '"} 1\n:1'])
def test_a_hostile_name_does_not_spoil_a_scrape(name: str) -> None:
    """Another program has written it into the store."""

    class Hostile:
        def list(self) -> list[holdfast.LockInfo]:
            return [info, info._replace(name=name)]

    info, registry = waited_for("order:1"), CollectorRegistry()
    registry.register(observe.FleetCollector(Hostile()))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert 'holdfast_fleet_locks{kind="order",state="held"} 1.0' in text
    kinds = {
        line.split('kind="')[1].split('",state')[0]
        for line in text.splitlines()
        if "state=" in line
    }
    assert len(kinds) == 2
    assert all(kind.isprintable() for kind in kinds)


def test_other_waits_are_long() -> None:
    info = waited_for("leaderboard:1")
    *_, waits = _filled([info], info.waiters[0].since + 90)
    assert [sample.value for sample in waits.samples] == [pytest.approx(90)]


def test_the_kinds_of_one_scrape_do_not_count_for_the_next() -> None:
    """Names without a colon, each a kind of its own, must not use up the labels for ever."""
    registry = CollectorRegistry()
    with holdfast.connect("memory://prometheus-kinds") as locks:
        registry.register(observe.FleetCollector(locks))
        leases = [locks.lock(f"job{number}").acquire() for number in range(MOST_KINDS + 20)]
        with locks.lock("order:1"), locks.lock("order:2"):  # more names than any other kind
            assert value(registry, "holdfast_fleet_locks", kind="order", state="held") == 2
            assert value(registry, "holdfast_fleet_locks", kind="other", state="held") == 21
        for lease in leases:
            assert lease is not None
            lease.release()
        with locks.lock("order:1"):
            assert value(registry, "holdfast_fleet_locks", kind="order", state="held") == 1
            assert value(registry, "holdfast_fleet_locks", kind="other", state="held") is None


class ForeignLocks:
    """A client to a store in which another program wrote a name whose bytes are no text."""

    def list(self) -> Any:
        return [LockInfo("\udcff:1", 0, (), ()), LockInfo("order:1", 0, (), ())]


def test_a_name_that_is_no_text_does_not_end_the_scrapes() -> None:
    registry = CollectorRegistry()
    registry.register(observe.FleetCollector(ForeignLocks()))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert r'kind="\\udcff",state="held"' in text
    assert 'kind="order",state="held"' in text


class SlowLocks:
    """A client whose scans last until they are told to go on."""

    def __init__(self, locks: holdfast.Locks) -> None:
        self._locks, self.scans, self.go_on = locks, 0, threading.Event()

    def list(self) -> Any:
        self.scans += 1
        assert self.go_on.wait(60)
        return self._locks.list()


def test_scrapes_at_the_same_time_share_a_scan() -> None:
    registry = CollectorRegistry()
    with holdfast.connect("memory://prometheus-scrapes") as locks:
        slow, arrived = SlowLocks(locks), []
        collector = observe.FleetCollector(slow)  # type: ignore[arg-type]
        registry.register(collector)

        def scrape() -> None:
            arrived.append(1)
            generate_latest(registry)

        scrapes = [threading.Thread(target=scrape) for _ in range(10)]
        scrapes[0].start()
        wait_until(lambda: slow.scans == 1, "the first scan")
        for each in scrapes[1:]:
            each.start()
        wait_until(lambda: len(arrived) == 10, "the others")
        slow.go_on.set()
        for each in scrapes:
            each.join()
        assert slow.scans <= 3  # a thread that was late may need one more
        before = slow.scans
        assert value(registry, "holdfast_fleet_up") == 1
        assert slow.scans == before + 1  # and a later scrape reads the store again


def test_a_missing_extra_names_its_command() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from holdfast.cli.main import main\n"
        "sys.exit(main(['exporter', '--url', 'memory://']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 78
    assert "pip install 'holdfast[prometheus]'" in done.stderr
