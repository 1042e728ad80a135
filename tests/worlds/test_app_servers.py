"""Real application servers with several workers, which all take one lock on one Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.ports import free_port
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers
from worlds.packages import needed

TESTS = Path(__file__).parents[1]
WORKERS = 4
REQUESTS = 200
AT_ONCE = 16
START_SECONDS = 60.0


class Application:
    """An application server on a port of its own."""

    def __init__(self, port: int, counter: Path) -> None:
        self.url, self.counter = f"http://127.0.0.1:{port}/", counter

    def ask(self, _: int = 0) -> dict[str, Any]:
        """Adds one; what the worker answers."""
        with urllib.request.urlopen(self.url, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def answers(self) -> bool:
        try:
            self.ask()
        except OSError:
            return False
        return True


@contextmanager
def serving(command: Sequence[str], store: str, folder: Path, port: int) -> Iterator[Application]:
    """Runs a server until the end of the block; it must then end by itself, and well."""
    counter, log = folder / "counter", folder / "log"
    counter.write_text("0")
    environment = {
        **os.environ,
        "HOLDFAST_URL": store,
        "COUNTER": str(counter),
        "PYTHONPATH": str(TESTS),
    }
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdout=output, stderr=output
        )
        try:
            application = Application(port, counter)
            wait_until("the application", application.answers, START_SECONDS)
            yield application
            server.terminate()
            server.wait(60)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
            print(log.read_text())
    assert "Traceback" not in log.read_text()


def add_many(application: Application, world: str) -> None:
    """No request is lost, in whichever worker it was served."""
    before = int(application.counter.read_text())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(application.ask, range(REQUESTS)))
    numbers = sorted(answer["number"] for answer in answers)
    assert numbers == list(range(before + 1, before + 1 + REQUESTS)), "not exclusive"
    assert int(application.counter.read_text()) == before + REQUESTS, "not exclusive"
    assert {answer["world"] for answer in answers} == {world}
    assert len({answer["worker"] for answer in answers}) > 1


def test_uvicorn_with_uvloop_and_four_workers(servers: Servers, tmp_path: Path) -> None:
    needed("uvloop")
    needed("uvicorn")
    port = free_port()
    command = ["uvicorn", "worlds.counter_asgi:app", "--loop", "uvloop", "--lifespan", "on"]
    command += ["--workers", str(WORKERS), "--port", str(port), "--no-access-log"]
    with serving(command, servers.of(RedisServer).url, tmp_path, port) as application:
        add_many(application, "uvloop")


def test_gunicorn_with_gevent_and_four_workers(servers: Servers, tmp_path: Path) -> None:
    needed("gevent")
    needed("gunicorn")
    port = free_port()
    command = ["gunicorn", "worlds.counter_wsgi:app", "-k", "gevent", "-w", str(WORKERS)]
    command += ["-b", f"127.0.0.1:{port}", "--no-control-socket"]
    with serving(command, servers.of(RedisServer).url, tmp_path, port) as application:
        add_many(application, "gevent")
