"""Django served by several workers: gunicorn with PostgreSQL, and uvicorn with SQLite."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import psycopg
import pytest

import holdfast
from integrations.web import TESTS, Application, serving
from servers.postgres import PostgresServer
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

SECONDS = 90.0
REQUESTS = 40
ANSWER_SECONDS = 6.0
"""The ttl, which is 3 s, and as much again."""
SITE = "integrations.django_site"
GUNICORN: tuple[str, ...] = (
    "gunicorn",
    "{app}",
    "-k",
    "gthread",
    "--threads",
    "4",
    "-w",
    "{workers}",
)
GUNICORN += ("-b", "127.0.0.1:{port}", "--no-control-socket", "--timeout", "120")
UVICORN: tuple[str, ...] = (
    "uvicorn",
    "{app}",
    "--lifespan",
    "off",
    "--no-access-log",
    "--workers",
    "{workers}",
)
UVICORN += ("--port", "{port}", "--timeout-worker-healthcheck", "{health}")
KINDS = {
    "gunicorn": ("postgresql", f"{SITE}.wsgi:app", GUNICORN),
    "uvicorn": ("sqlite", f"{SITE}.asgi:app", UVICORN),
}


def migrated(kind: str, servers: Servers, folder: Path) -> str:
    """The address of a new database with the tables and some orders."""
    address = f"sqlite://{folder}/shop.db"
    if kind == "postgresql":
        url, name = servers.of(PostgresServer).url, f"d{secrets.token_hex(6)}"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        address = url.replace("/postgres", f"/{name}")
    code = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "from integrations.django_site.shop.models import Order\n"
        "call_command('migrate', skip_checks=True)\n"
        "for pk in range(1, 10): Order.objects.create(pk=pk)"
    )
    variables = {**os.environ, "PYTHONPATH": str(TESTS), "DATABASE": address}
    variables |= {"DJANGO_SETTINGS_MODULE": f"{SITE}.settings"}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    return address


def serve(
    kind: str, servers: Servers, store: str, folder: Path, namespace: str = "holdfast"
) -> AbstractContextManager[Application]:
    """Serves the project by one of the two servers, with its database."""
    database, app, command = KINDS[kind]
    address = migrated(database, servers, folder)
    environment = {"DATABASE": address, "NAMESPACE": namespace}
    return serving(app, store, folder, command=command, **environment)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=list(KINDS))
def application(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    """One application of each kind, for the tests that end nothing."""
    folder = tmp_path_factory.mktemp(request.param)
    store = servers.of(RedisServer).url
    with serve(request.param, servers, store, folder, f"django-{request.param}") as running:
        yield running


def totals(application: Application, path: str) -> Counter[int]:
    """The answers to many requests at once."""

    def ask(_: int) -> int:
        return int(application.http.post(path).raise_for_status().json()["total"])

    with ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(ask, range(REQUESTS)))


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Which server the test's application has."""
    found: str = request.node.callspec.params["application"]
    return found


@pytest.fixture
def loses(kind: str) -> bool:
    """Whether updates can be lost: transactions of SQLite that begin IMMEDIATE run one after the
    other in any case."""
    return KINDS[kind][0] == "postgresql"


def test_without_a_lock_updates_are_lost(application: Application, loses: bool) -> None:
    """The failure that people report: ``atomic()`` alone does not help."""
    found = totals(application, "/orders/1/unlocked")
    assert (max(found.values()) > 1) is loses


def test_a_lock_around_the_transaction_loses_none(application: Application) -> None:
    assert totals(application, "/orders/2/add") == Counter(range(1, REQUESTS + 1))


def test_a_lock_that_is_released_before_the_commit_loses_updates(
    application: Application, loses: bool
) -> None:
    """The trap; the log has the warning."""
    found = totals(application, "/orders/3/early")
    assert (max(found.values()) > 1) is loses
    assert "ReleasedBeforeCommit: a lock 'shop.order'" in application.log.read_text()


def test_until_commit_loses_none(application: Application) -> None:
    assert totals(application, "/orders/4/commit") == Counter(range(1, REQUESTS + 1))


def test_a_busy_lock_is_423(application: Application, servers: Servers, kind: str) -> None:
    with (
        holdfast.connect(servers.of(RedisServer).url, namespace=f"django-{kind}") as other,
        other.lock("shop.order:5", note="a secret note"),
    ):
        answer = application.http.post("/orders/5/busy")
    assert answer.status_code == 423
    assert int(answer.headers["retry-after"]) >= 1
    assert "secret" not in answer.text
    assert application.http.post("/orders/5/busy").is_success


def test_an_event_loop_is_not_blocked(application: Application) -> None:
    assert application.http.get("/loop").json() == {"error": "SynchronousOnlyOperation"}


@pytest.mark.parametrize("server", list(KINDS))
def test_workers_that_are_killed_and_paused_and_a_store_that_restarts(
    server: str, servers: Servers, tmp_path: Path
) -> None:
    with (
        RedisServer(persist=True) as store,
        serve(server, servers, store.url, tmp_path) as running,
        ThreadPoolExecutor(4) as pool,
    ):
        journal = running.journal
        # Killed in the middle: the lock ends with its ttl.
        pool.submit(running.http.post, "/orders/1/hold")
        wait_until("a hold", lambda: len(journal.read("hold")) == 1, SECONDS)
        os.kill(journal.read("hold")[0]["pid"], signal.SIGKILL)
        assert retried(running, "/orders/1/add") >= 1

        # Paused past its ttl: another one writes; then the guard refuses the paused one.
        paused = pool.submit(running.http.post, "/orders/2/hold")
        wait_until("a hold", lambda: len(journal.read("hold")) == 2, SECONDS)
        pid = journal.read("hold")[1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert retried(running, "/orders/2/add") >= 1
            journal.write("finish")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert paused.result(SECONDS).status_code == 409
        assert not journal.read("written")

        # Restarted: what is held is still held, and what comes is served.
        store.restart()
        assert totals(running, "/orders/3/add") == Counter(range(1, REQUESTS + 1))


def retried(application: Application, path: str) -> int:
    """The total, from the first request that is answered in time: a worker that is killed or
    stopped takes those along that the kernel has given to it."""
    answer: list[int] = []

    def ask() -> bool:
        try:
            found = httpx.post(f"{application.http.base_url}{path}", timeout=ANSWER_SECONDS)
        except httpx.TransportError:
            return False
        answer.append(int(found.raise_for_status().json()["total"]))
        return True

    wait_until("an answer", ask, SECONDS)
    return answer[0]
