"""A lock around a request of FastAPI, as a dependency that gives the lease.

from holdfast.integrations.asgi import lifespan
from holdfast.integrations.fastapi import locked

app = FastAPI(lifespan=lifespan("redis://cache"))

@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: Annotated[AsyncLease, locked("order:{order_id}")]): ...
"""

from __future__ import annotations

import functools
import inspect
import string
import typing
from collections.abc import AsyncIterator, Callable
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any, Literal
from uuid import UUID

from holdfast import AsyncLease, HoldfastError, InvalidName, connect_async
from holdfast.integrations import missing_extra
from holdfast.integrations.asgi import client_of
from holdfast.integrations.problem import problem_of

try:
    from fastapi import Depends, HTTPException, params
    from pydantic import TypeAdapter, ValidationError
    from starlette.requests import HTTPConnection
except ModuleNotFoundError as error:
    raise missing_extra(error, "fastapi") from None

__all__ = ["locked"]

DEFAULT_TIMEOUT_SECONDS = 2.0
SIMPLE = str | int | float | Decimal | date | Enum | UUID


def locked(
    name: str | Callable[[HTTPConnection], str],
    *,
    timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
    scope: Literal["function", "request"] = "function",
    **options: Any,
) -> Any:
    """A dependency that holds a lock while the request is handled, and gives its lease.

    Fields of the name come from the request's path, then from its query, each read by the type that
    the endpoint gives to it: ``/orders/7`` and ``/orders/07`` are one order. A query parameter that
    is left out has its default, if that is a simple value. A name that needs more comes from a
    function of the request. Takes the options of ``locks.lock``; the client is that of
    ``lifespan``.

    The answer is 423 if the lock is not acquired within ``timeout``, 503 if the store can't be
    reached or the lock is lost meanwhile, 409 if the endpoint raises ``StaleFence``, and 422 for
    fields that make no name.

    It is released before the response is sent; with ``scope="request"`` after it, for responses
    that are streamed and for background tasks.
    """
    name_of = name if callable(name) else functools.partial(_filled, name, _fields(name))
    # A wrong option is told here, not by the first request; this client contacts nothing.
    connect_async("memory://").lock("any", timeout=timeout, **options)

    async def hold(connection: HTTPConnection) -> AsyncIterator[AsyncLease]:
        try:
            lock = client_of(connection.scope).lock(name_of(connection), timeout=timeout, **options)
            async with lock as lease:
                yield lease
        except InvalidName as error:
            raise HTTPException(422, str(error)) from error
        except HoldfastError as error:
            told = problem_of(error)
            if told is None:
                raise
            retry = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
            raise HTTPException(told.status, told.detail, retry) from error

    return Depends(hold, scope=scope)


def _fields(template: str) -> list[str]:
    """The fields of a name; raises ``ValueError`` for those that no request has."""
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    for field in fields:
        if not field.isidentifier():
            raise ValueError(f"{template!r}: a field is the name of a parameter, not {field!r}")
    return fields


def _filled(template: str, fields: list[str], connection: HTTPConnection) -> str:
    """The name of the lock of one request."""
    values = {}
    for field in fields:
        raw = connection.path_params.get(field, connection.query_params.get(field))
        endpoint = connection.scope["endpoint"]
        if raw is None:
            values[field] = _default(endpoint, field)
            continue
        try:
            values[field] = _reader(endpoint, field).validate_python(raw)
        except ValidationError as error:
            raise HTTPException(422, f"{field}: {error.errors()[0]['msg']}") from None
    return template.format_map(values)


def _default(endpoint: Callable[..., Any], field: str) -> SIMPLE:
    """The value of a query parameter that is left out; one with another name, or that is none of
    the query, is not known here."""
    found = inspect.signature(endpoint).parameters.get(field)
    default = None if found is None else found.default
    hint = _hints(endpoint).get(field)
    marks = [mark for mark in (default, *getattr(hint, "__metadata__", ())) if _is_mark(mark)]
    plain = all(
        isinstance(mark, params.Query)
        and all(alias in (None, field) for alias in (mark.alias, mark.validation_alias))
        for mark in marks
    )
    if isinstance(default, params.Query):
        default = default.default
    if not plain or not isinstance(default, SIMPLE):
        raise HTTPException(422, f"{field} is missing in the path and in the query")
    return default


def _is_mark(value: object) -> bool:
    """Whether this says where FastAPI takes a parameter from."""
    return type(value).__module__ == params.__name__


@functools.lru_cache(maxsize=1000)
def _reader(endpoint: Callable[..., Any], field: str) -> TypeAdapter[Any]:
    """Reads a field by the type that the endpoint gives to it; any, if it has no such parameter."""
    return TypeAdapter(_hints(endpoint).get(field, Any))


def _hints(endpoint: Callable[..., Any]) -> dict[str, Any]:
    """The types of its parameters; an endpoint may be a function, a partial one, or an object."""
    while isinstance(endpoint, functools.partial):
        endpoint = endpoint.func
    function = endpoint if inspect.isroutine(endpoint) else type(endpoint).__call__
    return typing.get_type_hints(function, include_extras=True)
