"""The state of a store, live: a page in the browser, and ``holdfast top`` on a terminal.

Reading order: ``rows`` (what is shown of a name; the tree), ``watch`` (what one reader has seen),
``reader`` (reads for all viewers), ``view`` (the JSON of the page), ``web`` (HTTP, its defences),
``page/`` (HTML, CSS, JavaScript). ``holdfast.cli.top`` draws the same rows on a terminal.

All of it uses the public API only: ``list``, ``inspect``, ``break_lock`` and ``check``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

    from holdfast import AsyncLocks, Locks

    Authorize = Callable[[Request, str], bool | Awaitable[bool]]

__all__ = ["app", "missing_extra"]


def app(
    locks: Locks | AsyncLocks,
    *,
    authorize: Authorize | None = None,
    token: str | None = None,
    allow_break: bool = False,
    hosts: Iterable[str] | None = None,
    always: bool = False,
) -> Starlette:
    """The dashboard of a store, as an ASGI application to mount in another one.

    ``authorize(request, action)`` tells whether a request may ``"view"`` or ``"break"``; it may be
    ``async``. With ``token`` in its place, viewers log in with that text, which has at least 16
    characters. Raises ``ValueError`` if neither is given: names and notes are not for everybody.
    Nothing is broken without ``allow_break``. With ``hosts``, a request for any other host name is
    refused (IP addresses and ``localhost`` are always served).

    The store is read while there are viewers, and for ten minutes afterwards; with ``always``, from
    the first request on. Raises ``ModuleNotFoundError`` if the extra is not installed.
    """
    try:
        from holdfast.dashboard.web import make_app
    except ModuleNotFoundError as error:
        raise missing_extra(error, "dashboard") from None
    return make_app(locks, authorize, token, allow_break, hosts, always)


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error to raise for a package that is not installed: it says what to install."""
    words = f"this needs {error.name!r}: pip install 'holdfast[{extra}]'"
    return ModuleNotFoundError(words, name=error.name)
