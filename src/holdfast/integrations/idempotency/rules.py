"""What both middlewares do with a request, its key and its response."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Literal, Required, TypedDict

from holdfast import BackendUnavailable, Incompatible, LockLost, LockTimeout
from holdfast.integrations.problem import Problem

__all__ = [
    "FENCE",
    "HEADER",
    "LONGEST_REQUEST_BYTES",
    "KeyRefused",
    "NotStored",
    "Response",
    "RuleOptions",
    "Rules",
    "check_size",
    "fingerprint",
    "number",
    "streamed",
]

Caller = Callable[[Mapping[str, Any]], "str | None"]
Headers = list[tuple[str, str]]

HEADER, REPLAYED = "idempotency-key", "idempotency-replayed"
FENCE = "holdfast.fence"
"""Where ``fencing.http.fence_of`` finds the fence of a request."""
ALL = {status.value for status in HTTPStatus}
DAY_SECONDS = 24 * 3600
LONGEST_KEY = 255
LONGEST_REQUEST_BYTES = 10 * 1024 * 1024
LONGEST_RESPONSE_BYTES = 128 * 1024
LONGEST_HEADERS = 32 * 1024
"""As JSON: with the longest body it is less than a job may record."""
LONGEST_NUMBER = 18
NOT_KEPT = {401, 408, 423, 425, 429}
"""Beside 5xx: the same request may end otherwise when it is sent again."""

_log = logging.getLogger("holdfast.integrations.idempotency")


class KeyRefused(Exception):
    """The request goes no further."""

    def __init__(self, status: int, kind: str, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.problem = Problem(status, kind, detail, retry_after)


class NotStored(Exception):
    """A response that is not recorded: the next request with the key runs the handler again."""


class Response:
    """A response of the application: whole, or passed on as it comes."""

    def __init__(self) -> None:
        self.began = False
        """Whether the application was called."""
        self.status, self.reason = 0, ""
        self.headers: Headers = []
        self.body = bytearray()
        self.sent = False
        """Whether a part of it was sent: nothing else can be answered then."""
        self.complete = False
        """Whether the application has given it: an error that follows is one of the store."""
        self._size = 0

    def start(self, status: int, headers: Headers, reason: str = "") -> None:
        """Takes the status and the headers."""
        self.status, self.reason, self.headers = status, reason, headers
        announced = max((number(text) or 0 for text in self._of("content-length")), default=0)
        long = len(json.dumps(headers)) > LONGEST_HEADERS
        self._size = LONGEST_RESPONSE_BYTES + 1 if long else announced

    def _of(self, wanted: str) -> list[str]:
        return [value for name, value in self.headers if name.lower() == wanted]

    @property
    def whole(self) -> bool:
        """Whether the end is known from the start: else it is a stream."""
        return bool(self._of("content-length"))

    @property
    def too_large(self) -> bool:
        """Whether it can't be recorded, by what it has or announces."""
        return max(len(self.body), self._size) > LONGEST_RESPONSE_BYTES

    def record(self, fingerprint: str) -> dict[str, Any]:
        """What is recorded; raises ``NotStored`` for what may end otherwise the next time."""
        if self.status >= 500 or self.status in NOT_KEPT or self._of("retry-after"):
            raise NotStored(f"status {self.status}")
        kept: dict[str, Any] = {"request": fingerprint, "status": self.status}
        if not self.too_large:
            body = base64.b64encode(self.body).decode()
            kept |= {"headers": [list(pair) for pair in self.headers], "body": body}
        return kept

    @classmethod
    def replay(cls, recorded: Any, fingerprint: str) -> Response:
        """The recorded response; raises ``KeyRefused`` if the request is another one."""
        match recorded:
            case {"request": str(), "status": int(), "headers": list(), "body": str()}:
                pass
            case {"request": str(), "status": int()} if recorded.keys() == {"request", "status"}:
                pass
            case _:
                raise Incompatible("what is recorded of this idempotency key is no response")
        if recorded["request"] != fingerprint:
            raise KeyRefused(422, "key-reused", "this key was used for a request with another body")
        if "body" not in recorded:
            detail = f"this request was done (status {recorded['status']}): its response was too "
            raise KeyRefused(409, "response-not-kept", detail + "large to be kept")
        response = cls()
        response.status = recorded["status"]
        response.reason = HTTPStatus(response.status).phrase if response.status in ALL else ""
        response.headers = [(name, value) for name, value in recorded["headers"]]
        response.headers.append((REPLAYED, "true"))
        response.body += base64.b64decode(recorded["body"])
        return response


class RuleOptions(TypedDict, total=False):
    """The keyword arguments of both middlewares."""

    caller: Required[Caller]
    keep: float | timedelta
    wait: float
    required: bool | Callable[[Mapping[str, Any]], bool]
    methods: Collection[str]
    on_outage: Literal["refuse", "run"]


class Rules:
    """What both middlewares do with a request."""

    def __init__(
        self,
        *,
        caller: Caller | None = None,
        keep: float | timedelta = DAY_SECONDS,
        wait: float = 1.0,
        required: bool | Callable[[Mapping[str, Any]], bool] = False,
        methods: Collection[str] = ("POST", "PATCH"),
        on_outage: Literal["refuse", "run"] = "refuse",
    ) -> None:
        if not callable(caller):
            raise TypeError("caller= is a function of the request that returns who sends it")
        if on_outage not in ("refuse", "run"):
            raise ValueError(f"on_outage is 'refuse' or 'run'; not {on_outage!r}")
        self._caller, self._required = caller, required
        self._methods = frozenset(method.upper() for method in methods)
        self.options: dict[str, Any] = {"keep": keep, "timeout": wait}
        self.on_outage = on_outage

    def key(self, request: Mapping[str, Any], method: str, path: str, sent: list[str]) -> str:
        """The key of the job; empty for a request without one. Raises ``KeyRefused``."""
        method = method.upper()
        if method not in self._methods:
            return ""
        if not sent:
            return self._without_key(request, "the header Idempotency-Key")
        if len(sent) > 1 or not 0 < len(sent[0]) <= LONGEST_KEY or not sent[0].isprintable():
            detail = f"Idempotency-Key is one text of 1 to {LONGEST_KEY} printable characters"
            raise KeyRefused(400, "key-invalid", detail)
        caller = self._caller(request)
        if caller is None:
            return self._without_key(request, "a caller who is known")
        parts = json.dumps([str(caller), method, path, sent[0]])
        return f"http/{hashlib.sha256(parts.encode()).hexdigest()}"

    def _without_key(self, request: Mapping[str, Any], missing: str) -> str:
        required = self._required(request) if callable(self._required) else self._required
        if required:
            raise KeyRefused(400, "key-missing", f"this request needs {missing}")
        return ""

    def runs_unprotected(self, error: Exception, response: Response) -> bool:
        """Whether the application is to be called although the store is away."""
        away = isinstance(error, BackendUnavailable) and not response.began
        return away and self.on_outage == "run"

    def failed(self, error: Exception, response: Response) -> None:
        """Decides on an error of the job: returns if the response is to be sent nevertheless."""
        if isinstance(error, NotStored):
            return
        if isinstance(error, LockTimeout) and not response.began:
            detail = "a request with this key is being done"
            raise KeyRefused(409, "in-progress", detail, 1) from None
        if isinstance(error, LockLost) and not response.sent:
            detail = "the request was taken over by another one with its key"
            raise KeyRefused(503, "lock-lost", detail, 1) from error
        if isinstance(error, BackendUnavailable) and not response.began:
            detail = "it can't be seen whether this request was done before"
            raise KeyRefused(503, "store-unavailable", detail, 1) from error
        if isinstance(error, BackendUnavailable | LockLost) and response.complete:
            _log.warning("a response was not recorded, a repeated request runs again: %s", error)
            return
        raise error


def fingerprint(query: bytes, body: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(query).digest() + body).hexdigest()


def number(text: str) -> int | None:
    """The number in a header; ``None`` for what is none."""
    digits = text.strip()
    fine = digits.isascii() and digits.isdecimal() and len(digits) <= LONGEST_NUMBER
    return int(digits) if fine else None


def streamed(path: str) -> NotStored:
    _log.warning("the response of %r is a stream: not kept, a repeated request runs again", path)
    return NotStored("a stream")


def check_size(size: int) -> None:
    if size > LONGEST_REQUEST_BYTES:
        detail = f"a request with a key has at most {LONGEST_REQUEST_BYTES} bytes"
        raise KeyRefused(413, "request-too-large", detail)
