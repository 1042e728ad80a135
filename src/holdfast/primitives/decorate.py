"""Locks as decorators: ``@locks.lock("report:{day}")``, with fields from the call's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

from holdfast.claim import check_name
from holdfast.errors import LockLost

__all__ = ["Decorating", "fill"]

F = TypeVar("F", bound=Callable[..., Any])


def fill(template: str, function: Callable[..., Any]) -> Callable[..., str]:
    """What makes the name of one call; raises at once if a field is no argument's name."""
    import inspect
    import string

    fields = {
        field.split(".")[0].split("[")[0]
        for _, field, _, _ in string.Formatter().parse(template)
        if field
    }
    signature = inspect.signature(function)
    for field in fields:
        if field not in signature.parameters:
            raise ValueError(f"{template!r}: {function.__qualname__}() has no argument {field!r}")
    if not fields:
        return lambda *args, **kwargs: template

    def name(*args: Any, **kwargs: Any) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return check_name(template.format_map(bound.arguments))

    return name


class Decorating:
    """A lock that can wrap functions."""

    __slots__ = ()

    name: str

    def _named(self, name: str) -> Self:
        raise TypeError(f"{type(self).__name__} has no name")

    def __call__(self, function: F) -> F:
        """Runs the function under the lock; ``LockLost.result`` is its result if it finished."""
        import inspect

        name = fill(self.name, function)
        asynchronous = hasattr(self, "__aenter__")
        if asynchronous != inspect.iscoroutinefunction(function):
            kind, door = ("def", "connect()") if asynchronous else ("async def", "connect_async()")
            raise TypeError(
                f"{function.__qualname__} is a plain {kind}: its locks come from {door}"
            )
        wrapper = _wrap_async(self, function, name) if asynchronous else _wrap(self, function, name)
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
