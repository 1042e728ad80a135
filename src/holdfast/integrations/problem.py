"""The HTTP answers of the web integrations: problem documents (RFC 9457) without secrets."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple

from holdfast import (
    BackendUnavailable,
    HoldfastError,
    LockLost,
    LockTimeout,
    StaleFence,
    UntrustedFence,
)

__all__ = ["LockErrors", "Problem", "problem_of"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("holdfast.integrations.problem")


class Problem(NamedTuple):
    """An answer that says why a request was not served."""

    status: int
    kind: str
    """The last part of the document's type."""
    detail: str
    retry_after: int | None = None
    """Seconds."""

    @property
    def status_line(self) -> str:
        """The status as WSGI wants it."""
        return f"{self.status} {HTTPStatus(self.status).phrase}"

    @property
    def body(self) -> bytes:
        """The problem document."""
        fields = {
            "type": f"urn:holdfast:{self.kind}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        return json.dumps(fields).encode()

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the body, and ``Retry-After``."""
        headers = {
            "content-type": "application/problem+json",
            "content-length": str(len(self.body)),
        }
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return headers

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers as ASGI wants them."""
        return [(name.encode(), value.encode()) for name, value in self.headers.items()]


def problem_of(error: HoldfastError) -> Problem | None:
    """The answer for an error of a lock: 423 busy, 503 store away or hold lost, 409 stale fence;
    ``None`` for all others.

    It goes to a stranger: it names neither the lock, nor its holder, nor the store. What a fence
    was refused for is logged.
    """
    match error:
        case LockTimeout():
            return Problem(423, "locked", "another request holds the lock of this resource", 1)
        case BackendUnavailable():
            return Problem(503, "store-unavailable", "the store of locks can't be reached", 1)
        case LockLost():
            return Problem(503, "lock-lost", "the lock was lost before the request was done", 1)
        case StaleFence():
            _log.warning("answered with 409: %s", error)
            # Retry-After: a request that is sent again has a fence of its own.
            return Problem(409, "stale-fence", "a later holder of the lock was here before", 1)
        case UntrustedFence():
            _log.warning("answered with 403: %s", error)
            return Problem(403, "untrusted-fence", "the fence is not signed by a known key")
    return None


class LockErrors:
    """A middleware that answers errors of locks: 423 for ``LockTimeout``, 503 for
    ``BackendUnavailable`` and ``LockLost``, 409 for ``StaleFence``, all with ``Retry-After``.

    For Starlette, and for handlers of FastAPI that take locks themselves. An error that comes when
    the response has begun is raised as before.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except HoldfastError as error:
            told = problem_of(error)
            if told is None or started or scope["type"] != "http":
                raise
            start = {"status": told.status, "headers": told.raw_headers}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": told.body})
