"""The payment service as a plain WSGI application."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import holdfast
from holdfast import StaleFence, fencing
from holdfast.integrations.idempotency import WsgiIdempotency
from holdfast.integrations.problem import problem_of
from integrations.payments import journal, pay

PROTECTED = os.environ.get("PROTECTED", "1") == "1"


def service(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    what = environ["PATH_INFO"].strip("/")
    if environ["REQUEST_METHOD"] == "GET":
        start_response("200 OK", [("content-length", "4")])
        return [b"here"]
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if what == "stream":
        journal.write("stream")
        start_response("200 OK", [])
        return iter([b"one,", b"two"])
    fence = fencing.http.fence_of(environ) if PROTECTED else None
    try:
        answer = pay(what, body, fence)
    except StaleFence as error:
        told = problem_of(error)
        assert told is not None
        start_response(told.status_line, list(told.headers.items()))
        return [told.body]
    length = ("content-length", str(len(answer.body)))
    start_response(f"{answer.status} Said", [*answer.headers, length])
    return [answer.body]


def caller(environ: Mapping[str, Any]) -> str | None:
    found: str | None = environ.get("HTTP_AUTHORIZATION")
    return found


def required(environ: Mapping[str, Any]) -> bool:
    return bool(environ["PATH_INFO"] == "/required")


app: Any = service
if PROTECTED:
    locks = holdfast.connect(namespace=os.environ["NAMESPACE"], ttl=3, patience=2)
    outage: Any = os.environ.get("ON_OUTAGE", "refuse")
    app = WsgiIdempotency(service, locks, caller=caller, required=required, on_outage=outage)
