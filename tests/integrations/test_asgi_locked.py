"""Locks around requests: FastAPI's dependency, Starlette and Litestar, on several workers."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import fencing
from holdfast.integrations.fastapi import locked
from integrations.web import HEALTH_SECONDS, PATIENT_SECONDS, WORKERS, Application, serving
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

SECONDS = 90.0
REQUESTS = 60
NAMESPACE = "orders"
APP = "integrations.orders_app:app"


@pytest.fixture(scope="module")
def store(servers: Servers) -> str:
    return servers.of(RedisServer).url


@pytest.fixture(scope="module")
def application(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """One application for the tests that end nothing."""
    folder = tmp_path_factory.mktemp("orders")
    with serving(APP, store, folder, NAMESPACE=NAMESPACE) as running:
        yield running


@pytest.fixture
def locks(store: str) -> Iterator[holdfast.Locks]:
    """A client beside the application's."""
    with holdfast.connect(store, namespace=NAMESPACE, ttl=10, timeout=30) as client:
        yield client


def numbers(application: Application, path: str) -> Counter[int]:
    """The answers to many requests at once."""

    def ask(_: int) -> int:
        number: int = application.http.post(path).raise_for_status().json()
        return number

    with ThreadPoolExecutor(12) as pool:
        return Counter(pool.map(ask, range(REQUESTS)))


def test_without_a_lock_updates_are_lost(application: Application) -> None:
    """The failure that people report."""
    assert max(numbers(application, "/unlocked/1/add").values()) > 1


def test_with_a_lock_none_is_lost(application: Application) -> None:
    assert numbers(application, "/orders/1/add") == Counter(range(1, REQUESTS + 1))


def test_spellings_of_one_value_are_one_lock(application: Application) -> None:
    """By the type that the endpoint gives to the field, in the path and in the query."""
    paths = ("/orders/7/lease", "/orders/007/lease")
    assert {application.http.get(path).json()["name"] for path in paths} == {"order:7"}
    assert application.http.get("/search", params={"order_id": "007"}).json() == "order:7"


def test_a_query_parameter_that_is_left_out_has_its_default(application: Application) -> None:
    assert application.http.get("/report").json() == "report:daily:1"
    chosen = application.http.get("/report", params={"kind": "weekly", "part": "02"})
    assert chosen.json() == "report:weekly:2"


def test_other_endpoints(application: Application) -> None:
    """A ``def``, a name from a function, and a stream that is sent under the lock."""
    assert application.http.get("/def/7").json() == "def:7"
    assert application.http.get("/tenant", headers={"X-Tenant": "a"}).json() == "tenant:a"
    assert application.http.get("/orders/7/stream").text == "True;True;True;"


def test_endpoints_that_are_no_functions(application: Application) -> None:
    assert application.http.get("/object/007").json() == "order:7"
    assert application.http.get("/partial/7").json() == "def:7"


def test_an_option_that_can_not_be_is_refused_when_the_application_is_made() -> None:
    with pytest.raises(TypeError, match="'expire': in Holdfast it is 'ttl'"):
        locked("order:{order_id}", expire=5)
    with pytest.raises(ValueError, match="ttl is a positive number"):
        locked("order:{order_id}", ttl=0)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/orders/seven/lease", "order_id"),
        ("/search", "order_id is missing"),
        ("/renamed?k=weekly", "kind is missing"),
        ("/chosen?k=weekly", "kind is missing"),
        ("/by-header", "kind is missing"),
        ("/def/" + "x" * 600, "512"),
        ("/def/a%07b", "control"),
    ],
)
def test_what_makes_no_name_is_422(application: Application, path: str, says: str) -> None:
    answer = application.http.get(path)
    assert answer.status_code == 422
    assert says in answer.text


def test_a_busy_lock_is_423(application: Application, locks: holdfast.Locks) -> None:
    """After two seconds, without a word about the holder."""
    with locks.lock("order:8", note="a secret note"):
        for answer in (application.http.get("/orders/8/lease"), application.http.post("/own/8")):
            assert answer.status_code == 423
            assert int(answer.headers["retry-after"]) >= 1
            assert "secret" not in answer.text
            assert str(os.getpid()) not in answer.text
    assert application.http.get("/orders/8/lease").is_success


def test_a_stale_fence_is_409(application: Application, locks: holdfast.Locks) -> None:
    assert application.http.post("/orders/9/guarded").is_success
    with locks.lock("order:9") as lease:
        later = str(lease.fence).replace(str(lease.token), str(lease.token + 10**9))
    with closing(sqlite3.connect(application.log.parent / "orders.db")) as connection, connection:
        fencing.sql.guard(connection, "order:9", later)
    answer = application.http.post("/orders/9/guarded")
    assert answer.status_code == 409
    assert int(answer.headers["retry-after"]) >= 1
    for secret in ("order:9", "token", str(lease.token)):
        assert secret not in answer.text
    assert "'order:9' refused token" in application.log.read_text()


def test_a_lock_that_is_broken_is_503(application: Application, locks: holdfast.Locks) -> None:
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(application.http.post, "/orders/10/wait")
        wait_until("hold", lambda: bool(application.journal.read("hold")), SECONDS)
        locks.break_lock("order:10", reason="a test")
        answer = request.result(SECONDS)
    assert answer.status_code == 503
    assert application.journal.read("cancelled")


def waiting_request(application: Application) -> httpx.Response | None:
    try:
        return application.http.post("/orders/1/wait")
    except httpx.TransportError:
        return None  # its worker was killed


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_paused_loses_the_lock(
    kind: signal.Signals, store: str, tmp_path: Path
) -> None:
    health = PATIENT_SECONDS if kind is signal.SIGSTOP else HEALTH_SECONDS
    with (
        serving(APP, store, tmp_path, health=health) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(waiting_request, running)
        wait_until("hold", lambda: bool(running.journal.read("hold")), SECONDS)
        [held] = running.journal.read("hold")
        os.kill(held["pid"], kind)
        try:
            wait_until("another", lambda: _served_by_another(running, held["pid"]), SECONDS)
        finally:
            if kind is signal.SIGSTOP:
                os.kill(held["pid"], signal.SIGCONT)
        running.journal.write("finish")
        answer = first.result(SECONDS)
        assert answer is None or answer.status_code == 503
        assert (answer is None) == (kind is signal.SIGKILL)


def _served_by_another(running: Application, pid: int) -> bool:
    """Whether a request that needs the lock is served. One that the paused worker accepts is not
    answered in time, so it is sent again, over a new connection."""
    with httpx.Client(base_url=running.http.base_url, timeout=3) as client:
        try:
            return client.get("/orders/1/lease").status_code == 200
        except httpx.TransportError:
            return False


def test_a_store_that_is_away_is_503(tmp_path: Path) -> None:
    with RedisServer() as own, serving(APP, own.url, tmp_path) as running:
        assert running.http.get("/orders/1/lease").is_success
        own.stop()
        for answer in (running.http.get("/orders/1/lease"), running.http.post("/own/1")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert str(own.port) not in answer.text
        own.start()
        wait_until("again", lambda: running.http.get("/orders/1/lease").is_success, SECONDS)


@pytest.mark.parametrize("app", ["starlette_app", "litestar_app"])
def test_starlette_and_litestar(app: str, store: str, tmp_path: Path) -> None:
    space = f"{NAMESPACE}-{app}"
    with serving(f"integrations.{app}:app", store, tmp_path, NAMESPACE=space) as running:
        assert running.http.get("/orders/1").is_success
        with holdfast.connect(store, namespace=space) as client, client.lock("order:1"):
            answer = running.http.get("/orders/1")
        assert (answer.status_code, answer.json()["type"]) == (423, "urn:holdfast:locked")
        assert "retry-after" in answer.headers
        wait_until("runs", lambda: len(running.journal.read("end")) >= WORKERS, SECONDS)
        counts = Counter(run["due"] for run in running.journal.read("end"))
        assert set(counts.values()) == {1}
