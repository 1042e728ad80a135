"""The ASGI middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any

from holdfast.claim import Keys
from holdfast.errors import HoldfastError
from holdfast.fencing.gate import Gate
from holdfast.fencing.http.check import HEADER, KEY, Checks, Problem, Refused, Resource, refused_for

__all__ = ["AsgiFence"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsgiFence:
    """Refuses stale fences early, with 409, and hands others on as ``scope["holdfast.fence"]``.

    ``resource`` returns the resource of a request's scope; by default it is the lock's name.
    With ``required=True`` a request without a fence gets 428. A ``gate``
    on an asyncio client holds the resource for the whole handler. With ``fence_keys``, or those of
    the gate, a fence that none of them has signed gets 403.

    Without keys every caller can send any fence: let only trusted callers reach it.
    """

    def __init__(
        self,
        app: App,
        *,
        resource: Resource | None = None,
        required: bool = False,
        gate: Gate | None = None,
        fence_keys: Keys = (),
    ) -> None:
        if gate is not None and not gate.asynchronous:
            raise TypeError("the gate of an AsgiFence is on a client of connect_async()")
        self._app = app
        self._checks = Checks(resource, required, gate, fence_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._pass(scope, receive, answer)
        except Refused as error:
            await answer.refuse(error.problem)
        except HoldfastError as error:
            refusal = refused_for(error)
            if refusal is None or answer.started:
                raise
            await answer.refuse(refusal.problem)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = HEADER.lower().encode()
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
        fence = self._checks.read(values)
        scope = {**scope, KEY: fence}
        block: Any = nullcontext()
        if fence is not None:
            resource = self._checks.name(fence, scope)
            self._checks.look(resource, fence)
            if self._checks.gate is not None:
                block = self._checks.gate.enter(resource, fence)
        async with block:
            await self._app(scope, receive, send)


class _Answer:
    """Knows whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Any) -> None:
        self.started = True
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        start = {"type": "http.response.start", "status": problem.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": problem.body})
