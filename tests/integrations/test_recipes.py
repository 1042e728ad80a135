"""The recipes of the docs, as they are printed, with the frameworks' real workers: without the
lock two run at once, with it they do not. And the files that are only parsed."""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hcl2
import httpx
import pytest
import yaml

from integrations.processes import Fleet, Line, eventually, fleet
from servers.ports import free_port
from servers.redis import RedisServer

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
PRINTED_URL = "redis://localhost:6379/0"
JOBS = 3
BOOK = re.compile(r"^(?:@.*\n)*(?:async )?def book\(.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
SHOP = """
import asyncio, os, time
from pathlib import Path

JOURNAL = Path(os.environ["JOURNAL"])

def write(*words):
    with JOURNAL.open("a") as file:
        file.write(" ".join(map(str, [time.time(), os.getpid(), *words])) + "\\n")

def alone(account):
    return JOURNAL.read_text().count(f" begin {account}") < 2

def book(account):
    write("begin", account)
    deadline = time.monotonic() + (60 if account == "naive" else 0.3)
    while time.monotonic() < deadline and (account != "naive" or alone(account)):
        time.sleep(0.02)
    write("end", account)

async def book_async(account):
    await asyncio.to_thread(book, account)

def invoice(number):
    write("invoice", number)
    return number
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def program(name: str) -> str:
    """The program of the page that begins with this file's name."""
    return next(text for text in blocks("python") if text.startswith(f"# {name}:"))


def with_naive(text: str) -> str:
    """The program with a second function, ``naive``: ``book`` without its lock."""
    book = BOOK.search(text)
    assert book is not None
    unlocked, count = re.subn(
        r"async with .*:|with .*:", "if True:  # no lock here", book[0], count=1
    )
    assert count == 1
    naive = re.sub(r'(?<!shop\.)\bbook\b(?!")', "naive", unlocked).replace('"/accounts', '"/naive')
    text = text[: book.end()] + naive + text[book.end() :]
    return text.replace("functions = [book]", "functions = [book, naive]")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def workers(tmp_path: Path, redis: RedisServer) -> Iterator[Fleet]:
    """The processes of a recipe, in a folder with its program and ``shop``."""
    for text in blocks("python"):
        name = text[2:].partition(":")[0]
        (tmp_path / name).write_text(with_naive(text).replace(PRINTED_URL, redis.url))
    (tmp_path / "shop.py").write_text(SHOP)
    with fleet(tmp_path) as processes:
        processes.environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
        processes.environment["HOME"] = str(tmp_path)
        yield processes


def most_at_once(lines: list[Line], account: str) -> int:
    inside = most = 0
    for line in lines:
        if line.words == (account,):
            inside += {"begin": 1, "end": -1}.get(line.what, 0)
            most = max(most, inside)
    return most


Send = Callable[[str, str, int], object]
"""Sends so many jobs: the name of the function, the account, the number."""


def check(workers: Fleet, send: Send) -> None:
    """Sends jobs to ``naive`` and to ``book``: all run, and those with the lock one at a time."""
    journal = workers.journal
    send("naive", "naive", 2)
    eventually("the naive jobs", lambda: sum("naive" in x.words for x in journal.lines("end")) == 2)
    assert most_at_once(journal.lines(), "naive") == 2
    send("book", "acme", JOBS)
    eventually("all jobs", lambda: sum("acme" in x.words for x in journal.lines("end")) == JOBS)
    assert most_at_once(journal.lines(), "acme") == 1


def test_flask(workers: Fleet) -> None:
    port = free_port()
    bind = ["--bind", f"127.0.0.1:{port}", "--workers", "2"]
    workers.start(["-m", "gunicorn", *bind, "flask_app:app"])
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url).status_code == 404
        except httpx.TransportError:
            return False

    eventually("the application", answers)
    with ThreadPoolExecutor(JOBS) as pool:

        def send(name: str, account: str, count: int) -> None:
            for _ in range(count):
                pool.submit(until_done, "accounts" if name == "book" else "naive", account)

        def until_done(path: str, account: str) -> None:
            while httpx.post(f"{url}/{path}/{account}/book", timeout=90).status_code == 423:
                time.sleep(0.1)

        check(workers, send)


def test_rq(workers: Fleet, redis: RedisServer) -> None:
    from redis import Redis
    from rq import Queue

    for _ in range(2):
        workers.start(["-m", "rq.cli", "worker", "--url", redis.url])
    with Redis.from_url(redis.url) as client:
        queue = Queue(connection=client)

        def send(name: str, account: str, count: int) -> None:
            for _ in range(count):
                queue.enqueue(f"rq_jobs.{name}", account)

        check(workers, send)
        jobs = [queue.enqueue("rq_jobs.invoice", 7) for _ in range(3)]
        eventually("the invoices", lambda: all(job.return_value() == 7 for job in jobs))
    assert len(workers.journal.lines("invoice")) == 1


def test_dramatiq(workers: Fleet, redis: RedisServer) -> None:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    options = ["--processes", "2", "--threads", "2", "--path", str(workers.folder)]
    workers.start(["-m", "dramatiq", "dramatiq_tasks", *options])
    make: Any = RedisBroker
    broker = make(url=redis.url)
    broker.declare_queue("default")

    def send(name: str, account: str, count: int) -> None:
        for _ in range(count):
            message: Any = dramatiq.Message(
                queue_name="default", actor_name=name, args=(account,), kwargs={}, options={}
            )
            broker.enqueue(message)

    check(workers, send)
    broker.close()
    broker.client.close()


def test_huey(workers: Fleet, redis: RedisServer) -> None:
    for _ in range(2):
        workers.start(["-m", "huey.bin.huey_consumer", "huey_tasks.huey", "-d", "0.1", "-m", "0.2"])
    check(
        workers, by_program(workers, "import huey_tasks as tasks", "getattr(tasks, name)(account)")
    )


def test_arq(workers: Fleet, redis: RedisServer) -> None:
    from arq import create_pool
    from arq.connections import RedisSettings

    for _ in range(2):
        workers.start(["-m", "arq", "arq_worker.WorkerSettings"])

    async def enqueue(name: str, account: str, count: int) -> None:
        pool = await create_pool(RedisSettings.from_dsn(redis.url))
        for _ in range(count):
            await pool.enqueue_job(name, account)
        await pool.aclose()

    check(workers, lambda *words: asyncio.run(enqueue(*words)))


def test_taskiq(workers: Fleet) -> None:
    options = ["--workers", "2", "--max-async-tasks", "1", "--app-dir", str(workers.folder)]
    workers.start(["-m", "taskiq", "worker", "taskiq_tasks:broker", *options])
    first = "import asyncio, taskiq_tasks as tasks; loop = asyncio.new_event_loop()"
    check(
        workers,
        by_program(workers, first, "loop.run_until_complete(getattr(tasks, name).kiq(account))"),
    )


def by_program(workers: Fleet, first: str, each: str) -> Send:
    """Sends from a process of its own: the program has a client of the broker at module level."""

    def send(name: str, account: str, count: int) -> None:
        text = f"{first}\nname, account = {name!r}, {account!r}\nfor _ in range({count}): {each}"
        command = [sys.executable, "-c", text]
        subprocess.run(command, env=workers.environment, cwd=workers.folder, check=True)

    return send


# What starts commands: parsed, and the commands themselves run.


def runs(command: list[str], folder: Path) -> None:
    """Runs a command of the page as it is, with ``true`` behind the ``--`` and a store here."""
    assert Path(command[0]).name == "holdfast"
    command = ["-m", "holdfast", *command[1 : command.index("--") + 1], "true"]
    command = [word.replace("0.0.0.0:8086", f"127.0.0.1:{free_port()}") for word in command]
    environment = {**os.environ, "HOLDFAST_URL": f"sqlite://{folder}/locks.db"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_systemd_units(tmp_path: Path) -> None:
    service, timer = blocks("ini")
    unit = configparser.ConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(service)
    assert unit["Service"]["Type"] == "oneshot"
    runs(shlex.split(unit["Service"]["ExecStart"]), tmp_path)
    unit.clear()
    unit.read_string(timer)
    assert unit["Install"]["WantedBy"] == "timers.target"


def test_kubernetes_manifests(tmp_path: Path) -> None:
    deployment, pod, _ = map(yaml.safe_load, blocks("yaml"))
    spec = deployment["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= (
        deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    health = container["command"][container["command"].index("--health") + 1]
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": 8086}
    assert health.endswith(":8086")
    runs(container["command"], tmp_path)
    runs(pod["spec"]["initContainers"][0]["command"], tmp_path)


def test_github_actions(tmp_path: Path) -> None:
    workflow = yaml.safe_load(blocks("yaml")[2])
    steps = workflow["jobs"]["deploy"]["steps"]
    runs(shlex.split(steps[-1]["run"]), tmp_path)
    assert steps[-1]["env"] == {"HOLDFAST_URL": "${{ secrets.HOLDFAST_URL }}"}


def test_terraform(tmp_path: Path) -> None:
    command = re.search(r"^\$ (holdfast run terraform.*)$", PAGE, re.MULTILINE)
    assert command is not None
    runs(shlex.split(command[1]), tmp_path)
    (text,) = blocks("hcl")
    (backend,) = hcl2.loads(text)["terraform"][0]["backend"]
    assert next(iter(backend.values()))["use_lockfile"] in (False, "false")


def test_what_is_not_run_is_marked() -> None:
    assert "**Not run by us**" in PAGE.partition("# What starts commands")[2].split("##")[0]
