"""``Idempotency-Key`` on real servers with several workers, as ASGI and as WSGI."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import pytest

import holdfast
from holdfast.integrations.idempotency import AsgiIdempotency, WsgiIdempotency
from integrations.web import HEALTH_SECONDS, PATIENT_SECONDS, UVICORN, Application, serving
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

SECONDS = 90.0
AT_ONCE = 20
GTHREAD: tuple[str, ...] = (
    "gunicorn",
    "{app}",
    "-k",
    "gthread",
    "--threads",
    "8",
    "-w",
    "{workers}",
)
GTHREAD += ("-b", "127.0.0.1:{port}", "--no-control-socket", "--timeout", "120")
FLAVOURS: dict[str, dict[str, Any]] = {
    "asgi": {"app": "integrations.pay_asgi:app", "command": UVICORN},
    "wsgi": {"app": "integrations.pay_wsgi:app", "command": GTHREAD},
}


@pytest.fixture(scope="module")
def store(servers: Servers) -> str:
    return servers.of(RedisServer).url


@pytest.fixture(scope="module", params=list(FLAVOURS.values()), ids=list(FLAVOURS))
def flavour(request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = request.param
    return chosen


@pytest.fixture(scope="module")
def service(
    flavour: dict[str, Any], store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    """One service for the tests that end nothing."""
    folder = tmp_path_factory.mktemp("payments")
    with serving(store=store, folder=folder, **flavour) as running:
        yield running


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def post(
    service: Application,
    path: str,
    key: str | None,
    body: str = "10 EUR",
    caller: str | None = "ann",
    method: str = "POST",
) -> httpx.Response:
    headers = {"Idempotency-Key": key, "Authorization": caller}
    sent = {name: value for name, value in headers.items() if value is not None}
    return service.http.request(method, path, content=body, headers=sent)


def payments(service: Application) -> int:
    path = service.log.parent / "ledger.db"
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        count: int = connection.execute("SELECT count(*) FROM payment").fetchone()[0]
    return count


def runs(service: Application, what: str) -> int:
    return len(service.journal.read(what))


def test_without_it_a_payment_that_is_sent_twice_is_paid_twice(
    flavour: dict[str, Any], store: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The failure that people report."""
    folder = tmp_path_factory.mktemp("unprotected")
    with serving(store=store, folder=folder, PROTECTED="0", **flavour) as service:
        for _ in range(2):
            assert post(service, "/pay", "a").status_code == 201
        assert payments(service) == 2


def test_requests_that_are_sent_many_times_at_once_are_done_once(
    service: Application, key: str
) -> None:
    before = runs(service, "pay")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda _: post(service, "/pay", key), range(AT_ONCE)))
    assert runs(service, "pay") == before + 1
    done = [answer for answer in answers if answer.status_code == 201]
    assert {answer.status_code for answer in answers} <= {201, 409}  # 409 after a wait of a second
    assert len({answer.content for answer in done}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in done) <= 1
    assert post(service, "/pay", key).content == done[0].content


def test_the_replay_has_the_headers_as_they_were(service: Application, key: str) -> None:
    first, second = (post(service, "/pay", key) for _ in range(2))
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers.get_list("set-cookie") == ["a=1", "b=2"]
    for word in ("content-length", "x-payment"):
        assert second.headers.get_list(word) == first.headers.get_list(word)
    assert second.content == first.content


def test_a_key_belongs_to_its_caller_method_and_path(service: Application, key: str) -> None:
    first = post(service, "/pay", key)
    others = [
        post(service, "/pay", key, caller="bob"),
        post(service, "/pay", key, method="PATCH"),
        post(service, "/declined", key),
    ]
    for answer in others:
        assert "idempotency-replayed" not in answer.headers
    assert len({first.content, *(answer.content for answer in others)}) == 4


def test_another_body_is_422(service: Application, key: str) -> None:
    assert post(service, "/pay", key).status_code == 201
    before = runs(service, "pay")
    for answer in (post(service, "/pay", key, "99 EUR"), post(service, "/pay?to=bob", key)):
        assert answer.status_code == 422
        assert answer.json()["type"] == "urn:holdfast:key-reused"
    assert runs(service, "pay") == before


def test_a_missing_or_invalid_key_is_400(service: Application, key: str) -> None:
    assert post(service, "/required", None).status_code == 400
    assert post(service, "/required", key, caller=None).status_code == 400
    assert post(service, "/pay", "x" * 256).status_code == 400
    assert post(service, "/pay", None).status_code == 201
    assert post(service, "/pay", key, caller=None).status_code == 201  # not known: no key
    assert "idempotency-replayed" not in post(service, "/pay", key, caller=None).headers


@pytest.mark.parametrize("what", ["broken", "limited", "busy", "stream"])
def test_what_may_end_otherwise_is_run_again(service: Application, key: str, what: str) -> None:
    before = runs(service, what)
    first, second = (post(service, f"/{what}", key) for _ in range(2))
    assert runs(service, what) == before + 2
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert "idempotency-replayed" not in second.headers


def test_a_refusal_is_kept(service: Application, key: str) -> None:
    first, second = (post(service, "/declined", key) for _ in range(2))
    assert (first.status_code, second.status_code) == (402, 402)
    assert second.headers["idempotency-replayed"] == "true"


def test_a_response_that_is_too_large_is_not_done_again(service: Application, key: str) -> None:
    before = runs(service, "large")
    first, second = (post(service, "/large", key) for _ in range(2))
    assert len(first.content) == 1_000_000
    assert second.status_code == 409
    assert second.json()["type"] == "urn:holdfast:response-not-kept"
    assert runs(service, "large") == before + 1


def test_a_request_in_progress_is_409(service: Application, key: str) -> None:
    """After a second; when it is done, its response is replayed."""
    with ThreadPoolExecutor(1) as pool:
        before = runs(service, "slow")
        first = pool.submit(post, service, "/slow", key)
        wait_until("slow", lambda: runs(service, "slow") > before, SECONDS)
        answer = post(service, "/slow", key)
        assert answer.status_code == 409
        assert int(answer.headers["retry-after"]) >= 1
        service.journal.write("finish")
        assert first.result(SECONDS).status_code == 201
    assert post(service, "/slow", key).content == first.result().content


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_after_a_crash_the_next_request_has_a_higher_fence(
    kind: signal.Signals,
    flavour: dict[str, Any],
    store: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The worker that was only paused can't pay any more: the payment is made once."""
    folder = tmp_path_factory.mktemp("crash")
    health = PATIENT_SECONDS if kind is signal.SIGSTOP else HEALTH_SECONDS
    with (
        serving(store=store, folder=folder, health=health, **flavour) as service,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(_unless_killed, service)
        wait_until("slow", lambda: runs(service, "slow") == 1, SECONDS)
        [begun] = service.journal.read("slow")
        os.kill(begun["pid"], kind)
        second = pool.submit(_until_accepted, service)
        wait_until("another", lambda: runs(service, "slow") == 2, SECONDS)
        taken = service.journal.read("slow")[1]
        assert taken["pid"] != begun["pid"]
        assert taken["token"] > begun["token"]
        service.journal.write("finish")
        assert second.result(SECONDS).status_code == 201
        if kind is signal.SIGSTOP:
            os.kill(begun["pid"], signal.SIGCONT)
        answer = first.result(SECONDS)
        assert answer is None or answer.status_code in (409, 503)
        assert payments(service) == 1


def _unless_killed(service: Application) -> httpx.Response | None:
    try:
        return post(service, "/slow", "the key")
    except httpx.TransportError:
        return None


def _until_accepted(service: Application) -> httpx.Response:
    """Sends the request, as a client does that gets no answer or 409, over new connections."""
    headers = {"Idempotency-Key": "the key", "Authorization": "ann"}
    answers: list[httpx.Response] = []

    def sent() -> bool:
        with httpx.Client(base_url=service.http.base_url, timeout=20) as client:
            try:
                answers.append(client.post("/slow", content="10 EUR", headers=headers))
            except httpx.TransportError:
                return False
        return answers[-1].status_code != 409

    wait_until("an answer", sent, SECONDS)
    return answers[-1]


def test_a_restarted_store_replays_and_a_store_that_is_away_refuses(
    flavour: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("restart")
    with (
        RedisServer(persist=True) as own,
        serving(store=own.url, folder=folder, **flavour) as service,
    ):
        first = post(service, "/pay", "a")
        own.stop()
        away = post(service, "/pay", "a")
        assert (away.status_code, "retry-after" in away.headers) == (503, True)
        assert str(own.port) not in away.text
        own.start()
        wait_until("again", lambda: post(service, "/pay", "a").status_code == 201, SECONDS)
        assert post(service, "/pay", "a").content == first.content
        assert payments(service) == 1


def test_by_choice_requests_run_unprotected_while_the_store_is_away(
    flavour: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("outage")
    with (
        RedisServer() as own,
        serving(store=own.url, folder=folder, ON_OUTAGE="run", **flavour) as service,
    ):
        own.stop()
        assert post(service, "/pay", "a").status_code == 201


def test_background_tasks_run_after_the_response(
    store: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("background")
    with serving(store=store, folder=folder, **FLAVOURS["asgi"]) as service:
        first, second = (post(service, "/background", "a") for _ in range(2))
        assert first.text == second.text == "at once"
        assert second.headers["idempotency-replayed"] == "true"
        assert not service.journal.read("later")
        service.journal.write("finish")
        wait_until("later", lambda: runs(service, "later") == 1, SECONDS)
        assert runs(service, "background") == 1


def test_what_can_not_work_is_refused_at_once() -> None:
    async def asgi(scope: Any, receive: Any, send: Any) -> None: ...

    def wsgi(environ: Any, start_response: Any) -> list[bytes]:
        return []

    def caller(request: Any) -> str:
        return "ann"

    with pytest.raises(TypeError, match="caller= is a function"):
        AsgiIdempotency(asgi)  # type: ignore[call-arg]
    with (
        holdfast.connect("redlock://a,b,c") as locks,
        pytest.raises(holdfast.Unsupported, match="RECORDS"),
    ):
        WsgiIdempotency(wsgi, locks, caller=caller)
    with (
        holdfast.connect("memory://") as locks,
        pytest.raises(ValueError, match="on_outage"),
    ):
        WsgiIdempotency(wsgi, locks, caller=caller, on_outage="maybe")  # type: ignore[arg-type]


def call_wsgi(locks: holdfast.Locks, body: bytes = b"10 EUR", length: int = 6) -> list[str]:
    """Sends one request; the status, and whether the application was called."""
    seen: list[str] = []

    def service(environ: Any, start_response: Any) -> list[bytes]:
        seen.append("called")
        start_response("201 Created", [("content-length", "4")])
        return [b"done"]

    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_IDEMPOTENCY_KEY": "k"}
    stream = {"CONTENT_LENGTH": str(length), "wsgi.input": io.BytesIO(body)}
    app = WsgiIdempotency(service, locks, caller=lambda environ: "ann")
    app({**environ, **stream}, lambda status, headers: seen.append(status))
    return seen


def test_a_body_that_was_cut_off_is_400() -> None:
    with holdfast.connect("memory://cut-off") as locks:
        assert call_wsgi(locks, b"1") == ["400 Bad Request"]
        assert call_wsgi(locks) == ["called", "201 Created"]
        assert call_wsgi(locks) == ["201 Created"]


@pytest.mark.parametrize("recorded", [None, "text", {}, {"request": "a", "status": 1, "body": 1}])
def test_a_record_that_is_no_response_is_refused(recorded: object) -> None:
    with holdfast.connect("memory://no-response") as locks:
        call_wsgi(locks)
        parts = json.dumps(["ann", "POST", "|/pay", f"{recorded}"])
        key = f"http/{hashlib.sha256(parts.encode()).hexdigest()}"
        locks.once(key).run(lambda: recorded)
        app = WsgiIdempotency(lambda environ, start: [], locks, caller=lambda environ: "ann")
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "wsgi.input": io.BytesIO()}
        with pytest.raises(holdfast.Incompatible, match="no response"):
            app({**environ, "HTTP_IDEMPOTENCY_KEY": f"{recorded}"}, lambda *args: None)
