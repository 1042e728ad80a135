"""Fences over HTTP: a header carries the fence, a middleware refuses a stale one early.

The early check is a convenience: each server process knows only what it has seen itself. The
fence that counts is checked where the effect is, by a guard in the handler's own transaction, for
which the middleware hands the fence on; or, for handlers without one, by a ``Gate``.

    app = fencing.http.AsgiFence(app)              # or WsgiFence
    fencing.sql.guard(conn, "order:42", fencing.http.fence_of(request)) # in the handler

    httpx.post(url, headers=fencing.http.headers(lease))                # at the caller
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from holdfast.claim import Fence, escaped
from holdfast.errors import StaleFence, UntrustedFence
from holdfast.fencing.gate import Gate
from holdfast.fencing.http.asgi import AsgiFence
from holdfast.fencing.http.check import HEADER, KEY, STALE, Problem, refused_for
from holdfast.fencing.http.wsgi import WsgiFence
from holdfast.fencing.rule import as_fence

__all__ = [
    "HEADER",
    "AsgiFence",
    "Gate",
    "WsgiFence",
    "carry",
    "fence_of",
    "headers",
    "problem",
    "raise_for_stale",
]

R = TypeVar("R")

LONGEST_DETAIL = 2000
"""Characters that are kept of what the other side says."""


def headers(lease: Any) -> dict[str, str]:
    """The header that carries a lease's fence, for any client.

    >>> headers("1;exclusive;;0;17;order%3A42")
    {'Holdfast-Fence': '1;exclusive;;0;17;order%3A42'}
    """
    return {HEADER: str(as_fence(lease))}


def carry(lease: Any) -> Callable[[R], R]:
    """Adds the header to each request: ``httpx.Client(auth=carry(lease))``, also of an
    ``AsyncClient``, and ``requests.post(url, auth=carry(lease))``."""

    def add(request: Any) -> Any:
        request.headers[HEADER] = str(as_fence(lease))
        return request

    return add


def problem(error: StaleFence | UntrustedFence) -> Problem:
    """The 409 (403 of ``UntrustedFence``) that a middleware answers with, for frameworks that catch
    a handler's errors before it sees them (Flask, Django): ``.status``, ``.headers``, ``.body``.

    >>> problem(StaleFence("a later holder has been here")).status
    409
    """
    refusal = refused_for(error)
    if refusal is None:
        raise TypeError(
            f"this is for StaleFence and UntrustedFence, not for {type(error).__name__}"
        )
    return refusal.problem


def raise_for_stale(response: R) -> R:
    """Raises ``StaleFence`` if the other side refused the fence, else returns the response.

    Takes the responses of httpx and requests.
    """
    answer: Any = response
    kind = str(answer.headers.get("content-type", ""))
    if answer.status_code != 409 or not kind.startswith("application/problem+json"):
        return response
    problem = _problem(answer)
    if problem.get("type") == STALE:
        detail = str(problem.get("detail", "the fence was refused"))
        raise StaleFence(
            escaped(detail[:LONGEST_DETAIL]),
            fence=_parsed(problem.get("fence")),
            highest=_parsed(problem.get("highest")),
        )
    return response


def _problem(response: Any) -> dict[str, Any]:
    """The problem document; nothing for what is none, of whatever service that may be."""
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(text: object) -> Fence | None:
    try:
        return Fence.parse(str(text))
    except ValueError:
        return None


def fence_of(request: Any) -> Fence | None:
    """The fence that the middleware has handed on; ``None`` if the request carried none.

    Takes an ASGI scope, a WSGI environ, or a request object that has one (Starlette, FastAPI,
    Django, Flask).
    """
    for carrier in (
        request,
        *(getattr(request, word, None) for word in ("scope", "environ", "META")),
    ):
        if isinstance(carrier, Mapping) and KEY in carrier:
            fence: Fence | None = carrier[KEY]
            return fence
    raise LookupError(
        "this request has not passed AsgiFence or WsgiFence: its fence is not checked"
    )
