"""The ASGI middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Unpack

from holdfast import AsyncLease, AsyncLocks, HoldfastError
from holdfast.integrations.asgi import client_of
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

__all__ = ["AsgiIdempotency"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_running: set[asyncio.Task[None]] = set()


class AsgiIdempotency:
    """Does a request with an ``Idempotency-Key`` once, and replays its response.

    - ``caller``: a function of the ASGI scope that returns who sends the request, as text: nobody
      else gets the recorded response. ``None``: the same as a request without a key.
    - ``locks``: an asyncio client; by default that of ``holdfast.integrations.asgi.lifespan``
    - ``keep``: how long a response is kept, in seconds
    - ``wait``: how long to wait for a request with the same key that is being done, in seconds
    - ``required``: whether a request without a key gets 400, or a function of the scope that
      returns it
    - ``methods``: other methods pass untouched
    - ``on_outage``: ``"refuse"`` (503) or ``"run"``, unprotected, while the store is away

    Answers 409 while the request is being done, 422 if its body differs. Responses with 5xx, 401,
    408, 423, 425, 429 or ``Retry-After`` and streams are not kept: a repeated request runs again.
    """

    def __init__(
        self, app: App, locks: AsyncLocks | None = None, **rules: Unpack[RuleOptions]
    ) -> None:
        self._app, self._locks, self._rules = app, locks, Rules(**rules)
        if locks is not None:
            locks.once("http", **self._rules.options)  # a store without records is refused here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = HEADER.encode()
        sent = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
        try:
            path = scope.get("root_path", "") + "|" + scope["path"]
            key = self._rules.key(scope, scope["method"], path, sent)
            if key:
                await self._once(key, scope, receive, send)
                return
        except KeyRefused as error:
            told = error.problem
            await _send(send, told.status, told.raw_headers, told.body)
            return
        scope.setdefault(FENCE, None)
        await self._app(scope, receive, send)

    async def _once(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return
        call = _Call(self._app, scope, body, receive, send)
        locks = client_of(scope) if self._locks is None else self._locks
        try:
            outcome = await locks.once(key, **self._rules.options).run(call.run)
        except (NotStored, HoldfastError) as error:
            if self._rules.runs_unprotected(error, call.response):
                await call.run_unprotected()
                return
            self._rules.failed(error, call.response)
            await call.finish()
            return
        if outcome.ran:
            await call.finish()
        else:
            response = Response.replay(outcome.value, call.fingerprint)
            await _send(send, response.status, _raw(response), bytes(response.body))


class _Call:
    """One call of the application."""

    def __init__(self, app: App, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._body = app, scope, body
        self._receive, self._send = receive, send
        self.fingerprint = fingerprint(scope.get("query_string", b""), body)
        self.response = Response()
        self._complete = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self, lease: AsyncLease) -> dict[str, Any]:
        """Calls the application until its response is complete; background tasks go on after it.
        Returns what is to be recorded."""
        self.response.began = True
        # Without extensions: a path that is sent instead of a body could not be recorded.
        scope = {**self._scope, FENCE: lease.fence, "extensions": {}}
        self._task = asyncio.create_task(self._call(scope))
        _running.add(self._task)  # it may go on when the response is sent or refused
        self._task.add_done_callback(_running.discard)
        complete = asyncio.create_task(self._complete.wait())
        try:
            await asyncio.wait({self._task, complete}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        finally:
            complete.cancel()
        if not self._complete.is_set():
            await self._task
            raise RuntimeError("the application sent no complete response")
        if self.response.sent and not self.response.too_large:
            raise streamed(self._scope["path"])
        return self.response.record(self.fingerprint)

    async def _call(self, scope: Scope) -> None:
        await self._app(scope, self._replayed(), self._collect)

    async def run_unprotected(self) -> None:
        """Calls the application although the store is away."""
        self._scope.setdefault(FENCE, None)
        await self._app(self._scope, self._replayed(), self._send)

    async def finish(self) -> None:
        """Sends the response, now that it is recorded, and waits for what goes on after it."""
        if not self.response.sent:
            response = self.response
            await _send(self._send, response.status, _raw(response), bytes(response.body))
        if self._task is not None:
            await self._task

    def _replayed(self) -> Receive:
        """Gives the body to the application, then what follows it."""
        bodies = [{"type": "http.request", "body": self._body, "more_body": False}]

        async def receive() -> Any:
            return bodies.pop() if bodies else await self._receive()

        return receive

    async def _collect(self, message: Any) -> None:
        """Keeps a response that is whole; passes on a stream, and what is too large."""
        response = self.response
        if message["type"] == "http.response.start":
            headers = [
                (bytes(name).decode("latin-1"), bytes(value).decode("latin-1"))
                for name, value in message.get("headers", ())
            ]
            response.start(message["status"], headers)
            return
        if message["type"] != "http.response.body":
            return
        more = message.get("more_body", False)
        if response.sent:
            await self._send(message)
        else:
            response.body += message.get("body", b"")
            if (more and not response.whole) or response.too_large:
                response.sent = True
                await _send(self._send, response.status, _raw(response), bytes(response.body), more)
        if not more:
            response.complete = True
            self._complete.set()


async def _read(receive: Receive) -> bytes | None:
    """The body of a request; ``None`` if the client is gone. Raises ``KeyRefused`` for one that is
    too long."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        check_size(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _raw(response: Response) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]


async def _send(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, more: bool = False
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more})
