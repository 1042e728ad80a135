"""``Idempotency-Key`` in one process: applications and requests that no well-behaved server has."""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import holdfast
from holdfast import BackendUnavailable, LockLost, fencing
from holdfast.integrations.idempotency import AsgiIdempotency, WsgiIdempotency
from holdfast.integrations.idempotency.rules import LONGEST_REQUEST_BYTES

LARGE = 200_000
OK = [("Content-Length", "2")]


def new_store() -> str:
    return f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def locks() -> Iterator[holdfast.Locks]:
    with holdfast.connect(new_store()) as client:
        yield client


def ann(request: Any) -> str:
    return "ann"


def nobody(request: Any) -> None:
    return None


class Answer:
    """What a WSGI server gets of one request."""

    def __init__(self, app: Any, body: bytes = b"", **environ: Any) -> None:
        self.status, self.headers, self.body = "", dict[str, str](), b""
        request = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_IDEMPOTENCY_KEY": "k"}
        stream = {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
        answer = app({**request, **stream, **environ}, self._start)
        try:
            for piece in answer:
                self.body += piece
        finally:
            if hasattr(answer, "close"):
                answer.close()

    def _start(self, status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
        if error is not None and self.body:
            raise error[1]
        self.status, self.headers = status, dict(headers)
        return self._write

    def _write(self, piece: bytes) -> None:
        self.body += piece

    @property
    def replayed(self) -> bool:
        return "idempotency-replayed" in self.headers


def twice(app: Any, locks: holdfast.Locks, **environ: Any) -> tuple[Answer, Answer]:
    protected = WsgiIdempotency(app, locks, caller=ann)
    return Answer(protected, **environ), Answer(protected, **environ)


def answering(status: str, *headers: tuple[str, str]) -> Any:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response(status, [*OK, *headers])
        return [b"ok"]

    return app


def test_a_generator_starts_its_response_with_the_first_piece(locks: holdfast.Locks) -> None:
    tokens: list[Any] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        tokens.append(environ["holdfast.fence"].token)
        yield b""
        start_response("201 Created", OK)
        yield b"o"
        yield b"k"

    first, second = twice(app, locks)
    assert (first.status, first.body, first.replayed) == ("201 Created", b"ok", False)
    assert (second.status, second.body, second.replayed) == ("201 Created", b"ok", True)
    assert len(tokens) == 1


def test_a_generator_that_streams_is_passed_on_from_its_first_piece(locks: holdfast.Locks) -> None:
    steps: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        try:
            start_response("200 OK", [])
            yield b"one,"
            steps.append("two")
            yield b"two"
        finally:
            steps.append("closed")

    first, second = twice(app, locks)
    assert (first.status, first.body) == ("200 OK", b"one,two")
    assert (second.body, second.replayed) == (b"one,two", False)
    assert steps == ["two", "closed"] * 2


def test_an_application_that_never_starts_its_response_is_an_error(locks: holdfast.Locks) -> None:
    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        yield from ()

    with pytest.raises(RuntimeError, match="did not call start_response"):
        twice(app, locks)


def test_what_a_stream_writes_is_sent(locks: holdfast.Locks) -> None:
    """Before its first piece and between two of them."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        write(b"a")
        yield b"b"
        write(b"c")
        yield b"d"

    assert twice(app, locks)[0].body == b"abcd"


def test_a_stream_that_fails_is_told_so_by_the_server(locks: holdfast.Locks) -> None:
    """``start_response`` with an error, when the headers are sent."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"one,"
        failed = ZeroDivisionError("half way")
        start_response("500 Failed", [], (type(failed), failed, None))
        yield b"never"

    with pytest.raises(ZeroDivisionError, match="half way"):
        twice(app, locks)


def test_an_error_page_takes_the_place_of_what_was_not_sent(locks: holdfast.Locks) -> None:
    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", OK)
        yield b"o"
        start_response("500 Failed", [("Content-Length", "6")], (ValueError, ValueError(), None))
        yield b"failed"

    assert [(answer.status, answer.body) for answer in twice(app, locks)] == [
        ("500 Failed", b"failed")
    ] * 2


def test_no_caller_is_no_key(locks: holdfast.Locks) -> None:
    """Where one is required that is 400; else the handler sees that there is no fence."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        fence = fencing.http.fence_of(environ)
        start_response("201 Created" if fence else "202 Unprotected", OK)
        return [b"ok"]

    required = WsgiIdempotency(app, locks, caller=nobody, required=True)
    assert Answer(required).status == "400 Bad Request"
    assert Answer(required, REQUEST_METHOD="GET").status == "202 Unprotected"
    assert Answer(WsgiIdempotency(app, locks, caller=nobody)).status == "202 Unprotected"
    assert Answer(WsgiIdempotency(app, locks, caller=ann)).status == "201 Created"


def test_a_fence_that_another_middleware_has_checked_is_handed_on(locks: holdfast.Locks) -> None:
    with locks.lock("order:7") as lease:
        sent = str(lease.fence)
    seen: list[Any] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        seen.append(fencing.http.fence_of(environ))
        start_response("200 OK", OK)
        return [b"ok"]

    outer = fencing.http.WsgiFence(WsgiIdempotency(app, locks, caller=nobody))
    Answer(outer, HTTP_HOLDFAST_FENCE=sent)
    assert [str(fence) for fence in seen] == [sent]


@pytest.mark.parametrize("status", [401, 408, 423, 425, 429, 500, 503])
def test_what_may_end_otherwise_is_not_kept(locks: holdfast.Locks, status: int) -> None:
    assert not twice(answering(f"{status} Said"), locks)[1].replayed


@pytest.mark.parametrize("status", [200, 400, 402, 403, 404, 409, 422])
def test_what_is_final_is_kept(locks: holdfast.Locks, status: int) -> None:
    assert twice(answering(f"{status} Said"), locks)[1].replayed


@pytest.mark.parametrize("methods", [("post",), ("POST",)])
@pytest.mark.parametrize("method", ["post", "POST"])
def test_methods_are_the_same_in_any_spelling(
    locks: holdfast.Locks, methods: tuple[str], method: str
) -> None:
    app = WsgiIdempotency(answering("200 OK"), locks, caller=ann, methods=methods)
    assert not Answer(app, REQUEST_METHOD=method).replayed
    assert Answer(app, REQUEST_METHOD=method).replayed


@pytest.mark.parametrize("length", ["abc", "-1", "1.5", "٣", "9" * 5000])
def test_a_length_that_is_no_number_is_400(locks: holdfast.Locks, length: str) -> None:
    first, _ = twice(answering("200 OK"), locks, CONTENT_LENGTH=length)
    assert first.status == "400 Bad Request"


class Endless(io.RawIOBase):
    """A body without an end; knows how much was read of it."""

    size = 0

    def read(self, size: int = -1) -> bytes:
        assert 0 <= size <= LONGEST_REQUEST_BYTES + 1
        self.size += size
        return b"x" * size


def test_no_more_is_read_of_a_long_body_than_shows_that_it_is_too_long(
    locks: holdfast.Locks,
) -> None:
    body = Endless()
    stream: dict[str, Any] = {
        "CONTENT_LENGTH": "",
        "wsgi.input_terminated": True,
        "wsgi.input": body,
    }
    app = WsgiIdempotency(answering("200 OK"), locks, caller=ann)
    assert Answer(app, **stream).status.startswith("413")
    assert body.size == LONGEST_REQUEST_BYTES + 1
    stream["wsgi.input"] = io.BytesIO(b"10 EUR")
    assert Answer(app, **stream).status == "200 OK"


@pytest.mark.parametrize("announced", [LARGE, 2])
def test_a_large_response_is_passed_on_and_not_done_again(
    locks: holdfast.Locks, announced: int
) -> None:
    """At once if it announces its length, else as soon as it is too long."""
    made: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", str(announced))])
        for number in range(LARGE // 1000):
            made.append(number)
            yield b"x" * 1000

    protected = WsgiIdempotency(app, locks, caller=ann)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_IDEMPOTENCY_KEY": "k"}
    pieces = protected({**environ, "wsgi.input": io.BytesIO()}, lambda *args: None)
    assert len(made) == (1 if announced == LARGE else 128 * 1024 // 1000 + 1)
    assert sum(map(len, pieces)) == LARGE
    assert Answer(protected).status == "409 Conflict"


def test_headers_that_are_too_long_to_be_recorded_are_sent(locks: holdfast.Locks) -> None:
    """A letter such as é has six bytes in the record."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("X-Name", "é" * 30_000), ("Content-Length", str(128 * 1024))])
        return [b"x" * 128 * 1024]

    first, second = twice(app, locks)
    assert (first.status, len(first.body)) == ("200 OK", 128 * 1024)
    assert second.status == "409 Conflict"


def test_an_outage_that_the_handler_raises_is_its_own(locks: holdfast.Locks) -> None:
    """Half of a response is not sent as if it were one."""

    def pieces() -> Iterator[bytes]:
        yield b"par"
        raise BackendUnavailable("another store")

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "7")])
        return pieces()

    with pytest.raises(BackendUnavailable, match="another store"):
        twice(app, locks)


AsgiApp = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]
START = {"type": "http.response.start", "status": 200}


def body(piece: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": more}


class AsgiCall:
    """One request to an ASGI application, and what is sent."""

    def __init__(self, app: AsgiApp, locks: holdfast.AsyncLocks, **rules: Any) -> None:
        self._app = AsgiIdempotency(app, locks, **{"caller": ann, **rules})
        self.sent: list[dict[str, Any]] = []

    async def __call__(self, method: str = "POST") -> None:
        headers = [(b"idempotency-key", b"k")]
        scope = {"type": "http", "method": method, "path": "/pay", "headers": headers}
        requests: list[dict[str, Any]] = [{"type": "http.request", "body": b""}]

        async def receive() -> Any:
            return requests.pop()

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self._app(scope, receive, send)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if "status" in message]


def asgi(test: Callable[[holdfast.AsyncLocks], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with holdfast.connect_async(new_store()) as locks:
            await test(locks)

    asyncio.run(main())


async def break_all(locks: holdfast.AsyncLocks) -> None:
    for info in await locks.list():
        await locks.break_lock(info.name, reason="a test")


def test_a_lock_that_is_lost_in_a_stream_does_not_start_a_second_response() -> None:
    """The server sees an error, and ends the connection."""

    async def test(locks: holdfast.AsyncLocks) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({**START, "headers": []})
            await send(body(b"one,"))
            await break_all(locks)
            await asyncio.sleep(60)

        call = AsgiCall(app, locks)
        with pytest.raises(LockLost):
            await asyncio.wait_for(call(), 30)
        assert call.statuses == [200]

    asgi(test)


def test_a_lock_that_is_lost_before_the_response_is_503() -> None:
    async def test(locks: holdfast.AsyncLocks) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({**START, "headers": [(b"content-length", b"4")]})
            await break_all(locks)
            await asyncio.sleep(60)

        call = AsgiCall(app, locks)
        await asyncio.wait_for(call(), 30)
        assert call.statuses == [503]

    asgi(test)


def test_an_outage_that_an_asgi_handler_raises_is_its_own() -> None:
    async def test(locks: holdfast.AsyncLocks) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({**START, "headers": [(b"content-length", b"7")]})
            await send(body(b"par"))
            raise BackendUnavailable("another store")

        call = AsgiCall(app, locks)
        with pytest.raises(BackendUnavailable, match="another store"):
            await call()
        assert call.sent == []

    asgi(test)


def test_a_large_asgi_response_is_passed_on_from_its_first_piece() -> None:
    async def test(locks: holdfast.AsyncLocks) -> None:
        passed: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            length = str(LARGE).encode()
            await send({**START, "headers": [(b"content-length", length)]})
            await send(body(b"x"))
            passed.append(len(call.sent))
            await send(body(b"x" * (LARGE - 1), more=False))

        call = AsgiCall(app, locks)
        await call()
        assert passed == [2]
        await call()
        assert call.statuses == [200, 409]

    asgi(test)


def test_without_a_key_an_asgi_handler_has_no_fence() -> None:
    async def test(locks: holdfast.AsyncLocks) -> None:
        fences: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            fences.append(fencing.http.fence_of(scope))
            await send({**START, "headers": []})
            await send(body(b"", more=False))

        await AsgiCall(app, locks, caller=nobody)()
        await AsgiCall(app, locks)("GET")
        assert fences == [None, None]
        required = AsgiCall(app, locks, caller=nobody, required=True)
        await required()
        assert required.statuses == [400]

    asgi(test)


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_a_handler_that_runs_while_the_store_is_away_has_no_fence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*args: Any, **kwargs: Any) -> Any:
        raise BackendUnavailable("away")

    fences: list[Any] = []

    async def test(locks: holdfast.AsyncLocks) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            fences.append(fencing.http.fence_of(scope))

        call = AsgiCall(app, locks, on_outage="run")
        monkeypatch.setattr(type(locks.once("a")), "run", away)
        await call()

    def app(environ: Any, start_response: Any) -> list[bytes]:
        fences.append(fencing.http.fence_of(environ))
        return []

    if kind == "asgi":
        asgi(test)
    else:
        with holdfast.connect(new_store()) as locks:
            protected = WsgiIdempotency(app, locks, caller=ann, on_outage="run")
            monkeypatch.setattr(type(locks.once("a")), "run", away)
            Answer(protected)
    assert fences == [None]
