"""Locks as decorators: ``@locks.lock("report:{day}")``, with fields from the call's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.claim import check_name
from holdfast.errors import LockLost

if TYPE_CHECKING:
    from holdfast.primitives.lock import LockBase

__all__ = ["check_client", "check_whole", "decorate", "fill"]

F = TypeVar("F", bound=Callable[..., Any])


_TOO_LATE = {
    "lock": "the lock is free again: acquire it inside, around the critical part, or decorate the "
    "function that runs the whole loop",
    "job": "the job is recorded as done: let it run the whole loop and return the result",
}


def check_whole(function: Callable[..., Any], what: str) -> None:
    """Raises ``TypeError`` for what is no function, and for a generator function: calling it runs
    nothing of its body."""
    import inspect

    if not callable(function):
        raise TypeError(f"a {what} takes a function, not {type(function).__name__}")

    if _is(inspect.isgeneratorfunction, function) or _is(inspect.isasyncgenfunction, function):
        raise TypeError(
            f"{_called(function)} is a generator function: its body runs while it is iterated "
            f"over, when {_TOO_LATE[what]}"
        )


def check_client(function: Callable[..., Any], what: str, *, asynchronous: bool) -> None:
    """Raises ``TypeError`` for an ``async def`` on the blocking client, or a ``def`` on the asyncio
    client."""
    import inspect

    if asynchronous != _is(inspect.iscoroutinefunction, function):
        kind, engine = ("def", "connect()") if asynchronous else ("async def", "connect_async()")
        raise TypeError(f"{_called(function)} is a plain {kind}: its {what} come from {engine}")


def _is(kind: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    return kind(function) or kind(getattr(type(function), "__call__", None))  # noqa: B004


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def fill(template: str, function: Callable[..., Any]) -> Callable[..., str]:
    """A function that makes the name of one call; raises ``ValueError`` at once if a field is not
    an argument of ``function``."""
    import inspect
    import string

    fields = {
        field.split(".")[0].split("[")[0]
        for _, field, _, _ in string.Formatter().parse(template)
        if field is not None
    }
    signature = inspect.signature(function)
    for field in fields:
        if field not in signature.parameters:
            wrong = f"has no argument {field!r}" if field else "is called with names: {} has none"
            raise ValueError(f"{template!r}: {_called(function)}() {wrong}")
    if not fields:
        constant = check_name(template.format())  # {{ is a brace, as it is beside a field
        return lambda *args, **kwargs: constant

    def name(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return check_name(template.format_map(bound.arguments))

    return name


def decorate(lock: LockBase[Any], function: F) -> F:
    """The function, run under the lock."""
    asynchronous = hasattr(lock, "__aenter__")
    check_whole(function, "lock")
    check_client(function, "locks", asynchronous=asynchronous)
    name = fill(lock.name, function)
    wrapper = _wrap_async(lock, function, name) if asynchronous else _wrap(lock, function, name)
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]


def _wrap(lock: Any, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            with lock._named(name(*args, **kwargs)):
                result = function(*args, **kwargs)
        except LockLost as lost:
            lost.result = result if lost.result is None else lost.result
            raise
        return result

    return call


def _wrap_async(
    lock: Any, function: Callable[..., Any], name: Callable[..., str]
) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            async with lock._named(name(*args, **kwargs)):
                result = await function(*args, **kwargs)
        except LockLost as lost:
            lost.result = result if lost.result is None else lost.result
            raise
        return result

    return call
