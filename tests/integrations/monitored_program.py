"""A program with the metrics of its locks: it loses a lock, gives up a leadership and waits; and it
leads two elections of one kind, one of them with a standby, about which there is no alert."""

from __future__ import annotations

import sys
import threading

from prometheus_client import start_http_server

import holdfast
from holdfast import fencing, observe


def main(url: str, port: int, ledger: str) -> None:
    start_http_server(port, "127.0.0.1")
    locks = holdfast.connect(url, observers=[observe.Prometheus()])
    with locks.election("scheduler").campaign():
        pass
    lease = locks.lock("order:1").acquire()
    assert lease is not None
    locks.break_lock("order:1", reason="a test")
    with locks.lock("order:1") as newer, fencing.file.guard(ledger, newer) as file:
        file.write(b"newer")
    try:
        with fencing.file.guard(ledger, lease.fence):
            raise AssertionError("a stale fence was accepted")
    except holdfast.StaleFence:
        pass
    elections = [locks.election(name).campaign() for name in ("leader:mailer", "leader:billing")]
    with elections[0], elections[1], locks.lock("report:1", ttl=6):
        for name in ("leader:mailer", "report:1"):
            threading.Thread(target=wait, args=(url, name), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.readline()


def wait(url: str, name: str) -> None:
    with holdfast.connect(url) as locks, locks.lock(name):
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
