"""The WSGI middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

from holdfast.claim import Keys
from holdfast.errors import HoldfastError
from holdfast.fencing.gate import Gate
from holdfast.fencing.http.check import HEADER, KEY, Checks, Problem, Refused, Resource, refused_for

__all__ = ["WsgiFence"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

_VARIABLE = "HTTP_" + HEADER.upper().replace("-", "_")


class WsgiFence:
    """Refuses stale fences early, with 409, and hands others on as ``environ["holdfast.fence"]``.

    ``resource`` returns the resource of a request's environ; by default it is the lock's name.
    With ``required=True`` a request without a fence gets 428. A
    ``gate`` on a blocking client holds the resource until the response is closed. With
    ``fence_keys``, or those of the gate, a fence that none of them has signed gets 403.

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
        if gate is not None and gate.asynchronous:
            raise TypeError("the gate of a WsgiFence is on a client of connect()")
        self._app = app
        self._checks = Checks(resource, required, gate, fence_keys)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        started: list[object] = []

        def start(*args: Any, **options: Any) -> Any:
            started.append(args)
            return start_response(*args, **options)

        try:
            return self._pass(environ, start)
        except Refused as error:
            return _refuse(error.problem, start_response)
        except HoldfastError as error:
            refusal = refused_for(error)
            if refusal is None or started:
                raise
            return _refuse(refusal.problem, start_response)

    def _pass(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        values = [environ[_VARIABLE]] if _VARIABLE in environ else []
        fence = environ[KEY] = self._checks.read(values)
        with ExitStack() as stack:
            if fence is not None:
                resource = self._checks.name(fence, environ)
                self._checks.look(resource, fence)
                if self._checks.gate is not None:
                    stack.enter_context(self._checks.gate.enter(resource, fence))
            body = self._app(environ, start_response)
            close = getattr(body, "close", None)
            if close is not None:
                stack.callback(close)
            rest = iter(body)
            first = list(_some(rest))  # a generator has not done anything before that
            return _Body(chain(first, rest), stack.pop_all())
        raise AssertionError


def _some(rest: Iterator[bytes]) -> Iterator[bytes]:
    """The first piece, if there is one."""
    for piece in rest:
        yield piece
        return


class _Body:
    """A response whose end is the end of the block."""

    def __init__(self, pieces: Iterator[bytes], stack: ExitStack) -> None:
        self._pieces, self._stack = pieces, stack

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        self._stack.close()


def _refuse(problem: Problem, start_response: StartResponse) -> list[bytes]:
    start_response(f"{problem.status} {problem.phrase}", list(problem.headers))
    return [problem.body]
