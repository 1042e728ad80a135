"""The WSGI middleware."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Unpack

from holdfast import HoldfastError, Lease, Locks
from holdfast.integrations.idempotency.rules import (
    FENCE,
    HEADER,
    LONGEST_REQUEST_BYTES,
    KeyRefused,
    NotStored,
    Response,
    RuleOptions,
    Rules,
    check_size,
    fingerprint,
    number,
    streamed,
)

__all__ = ["WsgiIdempotency"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

_VARIABLE = "HTTP_" + HEADER.upper().replace("-", "_")


class WsgiIdempotency:
    """The twin of ``AsgiIdempotency``, on a blocking client. ``caller`` and ``required`` are given
    the environ."""

    def __init__(self, app: App, locks: Locks, **rules: Unpack[RuleOptions]) -> None:
        self._app, self._locks, self._rules = app, locks, Rules(**rules)
        locks.once("http", **self._rules.options)  # a store without records is refused here

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        sent = [environ[_VARIABLE]] if _VARIABLE in environ else []
        try:
            path = environ.get("SCRIPT_NAME", "") + "|" + environ.get("PATH_INFO", "")
            key = self._rules.key(environ, environ["REQUEST_METHOD"], path, sent)
            if key:
                return self._once(key, environ, start_response)
        except KeyRefused as error:
            told = error.problem
            start_response(told.status_line, list(told.headers.items()))
            return [told.body]
        environ.setdefault(FENCE, None)
        return self._app(environ, start_response)

    def _once(self, key: str, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        call = _Call(self._app, environ, _read(environ))
        try:
            return self._answer(key, call, start_response)
        except BaseException:
            call.close()
            raise

    def _answer(self, key: str, call: _Call, start_response: StartResponse) -> Iterable[bytes]:
        try:
            outcome = self._locks.once(key, **self._rules.options).run(call.run)
        except (NotStored, HoldfastError) as error:
            if self._rules.runs_unprotected(error, call.response):
                call.environ.setdefault(FENCE, None)
                return self._app(call.environ, start_response)
            self._rules.failed(error, call.response)
            return call.finish(start_response)
        if outcome.ran:
            return call.finish(start_response)
        response = Response.replay(outcome.value, call.fingerprint)
        start_response(f"{response.status} {response.reason}", response.headers)
        return [bytes(response.body)]


class _Call:
    """One call of the application."""

    def __init__(self, app: App, environ: Environ, body: bytes) -> None:
        self._app, self.environ = app, environ
        self.fingerprint = fingerprint(environ.get("QUERY_STRING", "").encode("latin-1"), body)
        self.response = Response()
        self._answer: Iterable[bytes] = ()
        self._rest: Iterator[bytes] | None = None
        """What is left to be passed on."""
        self._error: Any = None
        self._server: StartResponse | None = None
        """That of the server, as soon as the response is sent."""
        self._send: Callable[[bytes], Any] = self.response.body.extend

    def run(self, lease: Lease) -> dict[str, Any]:
        """Calls the application and returns what is to be recorded. The pieces of a stream, and of
        what is too large, are made when they are sent, after the lock is free again."""
        response = self.response
        response.began = True
        self.environ[FENCE] = lease.fence
        self._answer = self._app(self.environ, self._start)
        pieces = iter(self._answer)
        self._await_start(pieces)
        if not response.whole and not self._has_one_piece():
            self._rest = pieces
            raise streamed(self.environ.get("PATH_INFO", ""))
        while not response.too_large:
            piece = next(pieces, None)
            if piece is None:
                self.close()
                break
            response.body += piece
        else:
            self._rest = pieces
        response.complete = True
        return response.record(self.fingerprint)

    def _await_start(self, pieces: Iterator[bytes]) -> None:
        """A generator calls ``start_response`` when its first piece is asked for."""
        while not self.response.status:
            piece = next(pieces, None)
            if piece is None and not self.response.status:
                raise RuntimeError("the application did not call start_response")
            self.response.body += piece or b""

    def _has_one_piece(self) -> bool:
        return isinstance(self._answer, list | tuple) and len(self._answer) <= 1

    def _start(self, status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
        more = () if error is None else (error,)
        if self._server is not None:
            return self._server(status, headers, *more)
        if error is not None:
            self.response.body.clear()  # an error page takes the place of what there was
        code, _, reason = status.partition(" ")
        self.response.start(int(code), headers, reason)
        self._error = error
        return self._write

    def _write(self, piece: bytes) -> None:
        self._send(piece)

    def finish(self, start_response: StartResponse) -> Iterable[bytes]:
        """Sends the response, now that it is recorded."""
        response = self.response
        more = () if self._error is None else (self._error,)
        write = start_response(f"{response.status} {response.reason}", response.headers, *more)
        if self._rest is None:
            return [bytes(response.body)]
        self._server, self._send = start_response, write
        return _Pieces(bytes(response.body), self._rest, self.close)

    def close(self) -> None:
        """Tells the application that nothing more is read."""
        close = getattr(self._answer, "close", None)
        self._answer = ()
        if close is not None:
            close()


class _Pieces:
    """A response that is passed on: what was read of it, then the rest."""

    def __init__(self, head: bytes, rest: Iterator[bytes], close: Callable[[], None]) -> None:
        self._head, self._rest, self.close = head, rest, close

    def __iter__(self) -> Iterator[bytes]:
        if self._head:
            yield self._head
        yield from self._rest


def _read(environ: Environ) -> bytes:
    """The body of a request, which the application can read again. Raises ``KeyRefused`` for a long
    one."""
    stream, length = environ["wsgi.input"], environ.get("CONTENT_LENGTH") or ""
    if length:
        size = number(length)
        if size is None:
            raise KeyRefused(400, "request-invalid", "Content-Length is no number")
        check_size(size)
        body = stream.read(size)
        if len(body) < size:
            raise KeyRefused(400, "request-incomplete", "the body is shorter than announced")
    else:
        body = _read_to_end(stream) if environ.get("wsgi.input_terminated") else b""
    environ["wsgi.input"] = io.BytesIO(body)
    return bytes(body)


def _read_to_end(stream: Any) -> bytes:
    body = bytearray()
    while piece := stream.read(LONGEST_REQUEST_BYTES + 1 - len(body)):
        body += piece
        check_size(len(body))
    return bytes(body)
