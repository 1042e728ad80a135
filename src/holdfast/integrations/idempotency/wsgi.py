"""The WSGI middleware."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from holdfast import HoldfastError, Lease, Locks
from holdfast.integrations.idempotency.rules import (
    FENCE,
    HEADER,
    KeyRefused,
    NotStored,
    Response,
    RuleOptions,
    Rules,
    check_size,
    fingerprint,
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
        return self._app(environ, start_response)

    def _once(self, key: str, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        call = _Call(self._app, environ, _read(environ))
        try:
            outcome = self._locks.once(key, **self._rules.options).run(call.run)
        except (NotStored, HoldfastError) as error:
            if self._rules.runs_unprotected(error, call.response):
                return self._app(environ, start_response)
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
        self._app, self._environ = app, environ
        self.fingerprint = fingerprint(environ.get("QUERY_STRING", "").encode("latin-1"), body)
        self.response = Response()
        self._pieces: Iterable[bytes] = ()
        self._error: Any = None

    def run(self, lease: Lease) -> dict[str, Any]:
        """Calls the application and returns what is to be recorded. The pieces of a stream are
        made when they are sent, after the lock is free again."""
        self.response.began = True
        self._environ[FENCE] = lease.fence
        self._pieces = self._app(self._environ, self._start)
        if not self.response.whole and not (
            isinstance(self._pieces, list | tuple) and len(self._pieces) <= 1
        ):
            self.response.passed_on = True
            raise streamed(self._environ.get("PATH_INFO", ""))
        try:
            for piece in self._pieces:
                self.response.body += piece
        finally:
            _close(self._pieces)
        return self.response.record(self.fingerprint)

    def _start(self, status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
        number, _, self.response.reason = status.partition(" ")
        self.response.status, self.response.headers, self._error = int(number), headers, error
        return self.response.body.extend

    def finish(self, start_response: StartResponse) -> Iterable[bytes]:
        """Sends the response, now that it is recorded."""
        response = self.response
        more = () if self._error is None else (self._error,)
        start_response(f"{response.status} {response.reason}", response.headers, *more)
        return self._pieces if response.passed_on else [bytes(response.body)]


def _close(pieces: Any) -> None:
    if hasattr(pieces, "close"):
        pieces.close()


def _read(environ: Environ) -> bytes:
    """The body of a request, which the application can read again. Raises ``KeyRefused`` for a long
    one."""
    length = environ.get("CONTENT_LENGTH") or ""
    if length:
        check_size(int(length))
        body = environ["wsgi.input"].read(int(length))
        if len(body) < int(length):
            raise KeyRefused(400, "request-incomplete", "the body is shorter than announced")
    else:
        body = environ["wsgi.input"].read() if environ.get("wsgi.input_terminated") else b""
        check_size(len(body))
    environ["wsgi.input"] = io.BytesIO(body)
    return bytes(body)
