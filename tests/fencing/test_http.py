"""The header, the early check, the gate, and the two middlewares."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import pytest
import requests

import holdfast
from holdfast import BackendUnavailable, Fence, Guarantee, Mode, StaleFence, Unsupported
from holdfast.fencing import http

Send = Callable[..., httpx.Response]


def fence(token: int, mode: Mode = Mode.EXCLUSIVE, name: str = "lock") -> Fence:
    return Fence(name, mode, (), 0, token)


class Service:
    """One application, served through either middleware."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: list[Fence | None] = []
        self.raises: Exception | None = None

    def act(self, request: Any) -> bytes:
        self.seen.append(http.fence_of(request))
        if self.raises is not None:
            raise self.raises
        return b"done"

    def wsgi(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        body = self.act(environ)  # a generator: nothing happens before it is asked
        start_response("200 OK", [])
        yield body
        yield b"!"

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        body = self.act(SimpleNamespace(scope=scope))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body + b"!"})

    def send(self, headers: Any = None, path: str = "/", **options: Any) -> httpx.Response:
        return self.served(**options)(headers, path)

    def served(self, **options: Any) -> Callable[..., httpx.Response]:
        """Keeps one middleware for several requests."""
        if self.kind == "wsgi":
            app: Any = http.WsgiFence(self.wsgi, **options)
            client = httpx.Client(transport=httpx.WSGITransport(app), base_url="http://s")
            return lambda headers=None, path="/": client.get(path, headers=headers)
        asgi = http.AsgiFence(self.asgi, **options)

        async def get(headers: Any, path: str) -> httpx.Response:
            transport = httpx.ASGITransport(asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
                return await client.get(path, headers=headers)

        return lambda headers=None, path="/": asyncio.run(get(headers, path))


@pytest.fixture(params=["wsgi", "asgi"])
def service(request: pytest.FixtureRequest) -> Service:
    return Service(request.param)


def test_the_fence_is_handed_on(service: Service) -> None:
    get = service.served()
    assert get(http.headers(fence(5))).text == "done!"
    assert get().status_code == 200
    assert service.seen == [fence(5), None]


def test_a_stale_one_is_refused_early(service: Service) -> None:
    get = service.served()
    get(http.headers(fence(6)))
    answer = get(http.headers(fence(5)))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == "urn:holdfast:stale-fence"
    assert problem["status"] == 409
    assert (problem["fence"], problem["highest"]) == (str(fence(5)), str(fence(6)))
    assert "token 6" in problem["detail"]
    assert service.seen == [fence(6)]
    with pytest.raises(StaleFence, match="token 6") as caught:
        http.raise_for_stale(answer)
    assert (caught.value.fence, caught.value.highest) == (fence(5), fence(6))
    assert get(http.headers(fence(5, name="another"))).status_code == 200


def test_resources_by_request(service: Service) -> None:
    def resource(request: Any) -> str | None:
        path = str(request["path"] if "path" in request else request["PATH_INFO"])
        return path if path != "/own" else None

    get = service.served(resource=resource)
    assert get(http.headers(fence(6)), "/a").status_code == 200
    assert get(http.headers(fence(5)), "/b").status_code == 200
    assert get(http.headers(fence(5)), "/a").status_code == 409
    assert get(http.headers(fence(7, name="other")), "/a").status_code == 409
    assert get(http.headers(fence(7, name="other")), "/own").status_code == 200


def test_a_request_without_a_fence(service: Service) -> None:
    answer = service.send(required=True)
    assert answer.status_code == 428
    assert "Holdfast-Fence" in answer.json()["detail"]
    assert not service.seen


@pytest.mark.parametrize("text", ["", "nonsense", "2;exclusive;;0;5;lock", "1;slots;;0;5;lock"])
def test_a_header_that_is_no_fence(service: Service, text: str) -> None:
    answer = service.send({http.HEADER: text})
    assert answer.status_code == 400
    assert answer.json()["type"] == "urn:holdfast:bad-fence"
    assert not service.seen


def test_headers_that_are_too_many_or_too_long(service: Service) -> None:
    text = str(fence(5))
    joined = [(http.HEADER, f"{text}, {text}")]  # as servers hand them to WSGI
    separate = [(http.HEADER, text), (http.HEADER, text)]
    assert service.send(joined if service.kind == "wsgi" else separate).status_code == 400
    assert service.send({http.HEADER: text + " " * 10_000}).status_code == 400


def test_a_handlers_own_refusal_is_told_alike(service: Service) -> None:
    service.raises = StaleFence("'orders' refused", fence=fence(5), highest=fence(6))
    answer = service.send(http.headers(fence(5)))
    assert answer.status_code == 409
    assert answer.json()["highest"] == str(fence(6))


def test_a_refusal_for_a_frameworks_own_error_handler() -> None:
    """Flask and Django catch errors before a middleware sees them."""
    error = StaleFence("later", fence=fence(5), highest=fence(6))
    result = http.problem(error)
    answer = httpx.Response(result.status, headers=dict(result.headers), content=result.body)
    assert int(answer.headers["content-length"]) == len(result.body)
    with pytest.raises(StaleFence, match="later") as caught:
        http.raise_for_stale(answer)
    assert caught.value.fence == fence(5)
    assert caught.value.highest == fence(6)
    with pytest.raises(TypeError, match="not for ValueError"):
        http.problem(ValueError())  # type: ignore[arg-type]


def test_other_errors_are_the_servers(service: Service) -> None:
    service.raises = ZeroDivisionError("a defect")
    with pytest.raises(ZeroDivisionError):
        service.send(http.headers(fence(5)))
    service.raises = holdfast.HoldfastError("another")
    with pytest.raises(holdfast.HoldfastError):
        service.send(http.headers(fence(5)))


def test_an_unreachable_store_tells_strangers_nothing(service: Service) -> None:
    service.raises = BackendUnavailable("redis://secret-host:6379 is away")
    answer = service.send(http.headers(fence(5)))
    assert answer.status_code == 503
    assert "secret-host" not in answer.text


def test_what_the_middleware_remembers_is_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.fencing.http.check.REMEMBERED", 2)
    get = service.served()
    for name in ("a", "b", "c"):
        get(http.headers(fence(6, name=name)))
    assert get(http.headers(fence(5, name="c"))).status_code == 409
    assert get(http.headers(fence(5, name="a"))).status_code == 200  # only the early check forgets


def test_a_request_that_was_not_checked() -> None:
    with pytest.raises(LookupError, match="has not passed"):
        http.fence_of({})


def test_other_protocols_pass() -> None:
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def nothing(*args: Any) -> None:
        raise AssertionError

    asyncio.run(http.AsgiFence(app)({"type": "lifespan"}, nothing, nothing))
    assert passed == ["lifespan"]


def test_the_gate_is_shared_by_servers() -> None:
    """Two processes' middlewares: what one has seen, the other refuses, through the store."""
    with holdfast.connect("memory://gates") as locks:
        first, second = Service("wsgi"), Service("wsgi")
        one = first.served(gate=http.Gate(locks))
        other = second.served(gate=http.Gate(locks))
        assert one(http.headers(fence(6))).status_code == 200
        answer = other(http.headers(fence(5)))
        assert answer.status_code == 409
        assert not second.seen
        assert other(http.headers(fence(6))).status_code == 200


def test_the_gate_is_held_until_the_response_is_closed() -> None:
    with holdfast.connect("memory://held") as locks:
        app: Any = http.WsgiFence(Service("wsgi").wsgi, gate=http.Gate(locks))
        environ = {"HTTP_HOLDFAST_FENCE": str(fence(5))}
        body = app(environ, lambda *args: None)
        assert locks.lock("gate/lock").locked()
        assert b"".join(body) == b"done!"
        body.close()
        assert not locks.lock("gate/lock").locked()


def test_a_gate_that_is_busy() -> None:
    with holdfast.connect("memory://busy") as locks:
        get = Service("wsgi").served(gate=http.Gate(locks, timeout=0.05))
        blocker = locks.lock("gate/lock").acquire()
        assert blocker is not None
        thread = threading.Thread(target=lambda: answers.append(get(http.headers(fence(5)))))
        answers: list[httpx.Response] = []
        thread.start()
        thread.join(10)
        blocker.release()
        assert answers[0].status_code == 503
        assert answers[0].headers["retry-after"] == "1"


def test_readers_pass_the_gate_together() -> None:
    with holdfast.connect("memory://readers") as locks:
        gate = http.Gate(locks, timeout=5)
        with gate.enter("r", fence(4)):
            pass
        with gate.enter("r", fence(6, Mode.SHARED)):
            entered: list[bool] = []

            def beside() -> None:
                with gate.enter("r", fence(6, Mode.SHARED)):
                    entered.append(True)

            thread = threading.Thread(target=beside)
            thread.start()
            thread.join(10)
            assert entered == [True]
        with pytest.raises(StaleFence, match="reader"):
            gate.enter("r", fence(5)).__enter__()


def test_a_gate_lost_before_it_is_passed() -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://lost") as locks:
            gate = http.Gate(locks)
            real = locks._engine.backend.recall

            async def broken(name: str) -> Any:
                await locks.break_lock("gate/r", reason="a test")
                return await real(name)

            locks._engine.backend.recall = broken  # type: ignore[method-assign]
            with pytest.raises(holdfast.LockLost):
                await gate.enter("r", fence(5)).__aenter__()
            locks._engine.backend.recall = real  # type: ignore[method-assign]
            async with gate.enter("r", fence(4)):
                pass

    asyncio.run(body())


def test_gates_where_they_can_not_be() -> None:
    with holdfast.connect("memory://not") as locks:
        with pytest.raises(TypeError, match="connect_async"):
            http.AsgiFence(Service("asgi").asgi, gate=http.Gate(locks))
        locks._engine.store.guarantees = locks.guarantees - {Guarantee.RECORDS}
        with pytest.raises(Unsupported, match="RECORDS"):
            http.Gate(locks)


def test_with_requests_over_a_socket() -> None:
    class Silent(WSGIRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    app: Any = http.WsgiFence(Service("wsgi").wsgi)
    with make_server("127.0.0.1", 0, app, handler_class=Silent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        with requests.Session() as session:
            assert session.get(url, auth=http.carry(fence(6))).text == "done!"
            answer = session.get(url, headers=http.headers(fence(5)))
            with pytest.raises(StaleFence):
                http.raise_for_stale(answer)
            fine = session.get(url, auth=http.carry(fence(7)))
            assert http.raise_for_stale(fine) is fine
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"[" * 100_000, b"\xff", b"{}"])
def test_a_conflict_of_another_service(body: bytes) -> None:
    """Not every problem document is one of ours, nor what it says it is."""
    answer = httpx.Response(409, headers={"content-type": "application/problem+json"}, content=body)
    assert http.raise_for_stale(answer) is answer


def test_what_the_other_side_says_is_harmless_to_show() -> None:
    result: dict[str, Any] = {"type": "urn:holdfast:stale-fence", "fence": [], "highest": "1;x"}
    result["detail"] = "\x1b[2J\nforged" + "x" * 10_000
    answer = httpx.Response(409, headers={"content-type": "application/problem+json"}, json=result)
    with pytest.raises(StaleFence) as caught:
        http.raise_for_stale(answer)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2100
    assert caught.value.fence is None
    assert caught.value.highest is None
